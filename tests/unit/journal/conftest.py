"""Where the journal's tests keep their files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.journal.support import Shelf

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where the machine has one, for tests that open a journal thousands of times."""
    shared = Path("/dev/shm")  # noqa: S108 only its speed is wanted
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "journal")
