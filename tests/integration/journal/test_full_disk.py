"""A journal on a file system that is really full: it takes nothing, commits all the same, and mends."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.journal.support import crash, fill, opened, served
from towline.errors import JournalFull
from towline.journal import Limits


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, check=False, text=True)
    if done.returncode:
        pytest.skip(f"mounting needs rights: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)  # lazily: a failed test may hold files


@pytest.mark.faults
def test_a_really_full_disk(small_disk: Path) -> None:
    limits = Limits(min_free_bytes=0, segment_bytes=128 << 10)
    journal = opened(small_disk / "inbox", limits)
    for _ in range(3):
        with pytest.raises(JournalFull, match="TL-J02"):
            fill(journal, 1 << 20, group=100)
        served(journal)
        with contextlib.suppress(OSError), (small_disk / "other").open("ab", buffering=0) as other:
            while other.write(bytes(4096)):  # someone else takes the last blocks
                pass
        with pytest.raises(JournalFull):
            fill(journal, 1 << 20, group=1)
        start, end = journal.committed, journal.end
        for upto in (*range(start, start + 100), end):  # the last block, then the reserve; then whole segments go
            assert journal.commit("spark", upto)
        assert journal.first_offset > 0
        fill(journal, 500, group=100)
        served(journal)
    end = journal.end
    crash(journal)
    with opened(small_disk / "inbox", limits) as journal:
        assert journal.end == end
        served(journal)
