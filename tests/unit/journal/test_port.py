"""The promises of a journal and an outbox, kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.journal_port import *  # noqa: F403 - the tests
from tests.engines.journals import DiskShelf
from tests.engines.outbox_port import *  # noqa: F403


@pytest.fixture
def shelf(tmp_path: Path) -> DiskShelf:
    return DiskShelf(tmp_path / "journal")
