"""Where the journal's tests keep their files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.journal.support import FAST


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where the machine has one, for tests that open a journal thousands of times."""
    with tempfile.TemporaryDirectory(dir=FAST or tmp_path) as name:
        yield Path(name)
