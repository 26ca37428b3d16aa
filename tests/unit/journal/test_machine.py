"""Random lives of a journal on disk against a list: append, commit, read, roll, close, kill, torn writes."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.engines.journal_life import JournalLife
from tests.engines.journals import DiskShelf
from tests.unit.journal.support import SCHEMA, segments, store_of

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 only its speed is wanted


class DiskLife(JournalLife):
    """A write may be torn as well."""

    new_shelf = staticmethod(lambda: DiskShelf(Path(tempfile.mkdtemp(dir=FAST))))

    @property
    def directory(self) -> Path:
        assert isinstance(self.shelf, DiskShelf)
        return self.shelf.directory

    @precondition(lambda self: self.end > 0)
    @rule(keep=st.floats(0, 0.99), noise=st.booleans(), seed=st.integers(0, 1000))
    def kill_in_a_write(self, keep: float, noise: bool, seed: int) -> None:
        """The next frame reaches the disk in part; the blocks behind it may hold anything."""
        self.shelf.crash(self.journal)
        last = segments(self.directory)[-1]
        whole = last.read_bytes()
        torn = b"TWLJ" + random.Random(seed).randbytes(2000)
        last.write_bytes(whole + torn[: max(1, round(len(torn) * keep))] + (bytes(seed) if noise else b""))
        self._open()
        assert self.journal.recovery.cut_bytes > 0

    @invariant()
    def files_agree(self) -> None:
        if not hasattr(self, "journal"):
            return
        journal = self.journal
        files = segments(self.directory)
        assert journal.bytes_on_disk == sum(path.stat().st_size for path in files)
        assert [segment.path for segment in store_of(journal).segments] == files
        assert store_of(journal).schema.equals(SCHEMA)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.directory)


DiskLife.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLife = DiskLife.TestCase
