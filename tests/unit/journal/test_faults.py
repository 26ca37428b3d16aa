"""A disk that fails or is full: nothing is promised that is not there, and a full disk takes nothing and mends."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.journal.support import ROOMY, SMALL, FaultyDisk, crash, fill, opened, rows, segments, served
from towline.errors import JournalFailed, JournalFull
from towline.journal.frames import Bytes


@pytest.mark.parametrize(
    ("call", "number"), [("create", errno.ENOSPC), ("write", errno.ENOSPC), ("write", errno.EDQUOT)]
)
def test_no_space_at_every_call_changes_nothing(memory_path: Path, call: str, number: int) -> None:
    at, failed = 1, True
    while failed:
        at += 1
        disk = FaultyDisk(call, at, number, times=2, partial=100)
        journal, failed = opened(memory_path / str(at), SMALL, disk), False
        while journal.end < 56:
            try:
                journal.append(rows(journal.end, 8, 150))
                journal.set_session({"end": journal.end})
                journal.commit("spark", max(journal.end - 20, 0))
            except JournalFull as error:
                assert error.code == "TL-J02"  # noqa: PT017 counted below
                failed = True
                served(journal)
        failed = failed or disk.calls.count(call) >= at  # a watermark may wait for the next one
        crash(journal)
        with opened(memory_path / str(at), SMALL) as journal:
            assert journal.end == 56
            served(journal)
    assert at > 3


def test_what_is_counted_while_a_frame_is_written_is_in_the_next(tmp_path: Path) -> None:
    """The frame has the total of before [I11]."""

    class Counting(FaultyDisk):
        def sync_data(self, descriptor: int) -> None:
            super().sync_data(descriptor)
            if len(more):
                journal.count(received=more.pop())

    more: list[int] = []
    journal = opened(tmp_path, ROOMY, Counting())
    journal.count(received=1)
    more.append(10)
    fill(journal, 1)
    fill(journal, 1)
    crash(journal)
    with opened(tmp_path) as journal:
        assert journal.ledger == {"received": 11}


def test_a_truncation_that_fails_kills(tmp_path: Path) -> None:
    class Both(FaultyDisk):
        def truncate(self, descriptor: int, size: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), descriptor, size)

    disk = Both()
    journal = opened(tmp_path, ROOMY, disk)
    fill(journal, 5)
    disk.fail_next("write", errno.ENOSPC, partial=60)
    with pytest.raises(JournalFailed, match=r"failed \(Input/output error\).*\[TL-J04\]"):
        journal.append(rows(5, 1))
    crash(journal)
    with opened(tmp_path) as journal:
        assert journal.end == 5
        assert ": cut 60 bytes" in journal.repair_note


def test_short_writes_are_continued(tmp_path: Path) -> None:
    class Short(FaultyDisk):
        def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
            return os.write(descriptor, bytes(buffers[0])[:7])

    with opened(tmp_path, SMALL, Short()) as journal:
        fill(journal, 60, group=20)
    with opened(tmp_path) as journal:
        assert len(served(journal)) == 60


def test_a_file_that_cannot_be_removed_stays_and_goes_later(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, SMALL, disk) as journal:
        fill(journal, 100, group=10)
        disk.fail_next("remove", errno.EBUSY)
        journal.commit("spark", 90)
        assert journal.first_offset == 0
        served(journal)
        disk.call = ""
        journal.commit("spark", 100)
        assert journal.first_offset > 50


def test_an_interrupt_half_way_kills(tmp_path: Path) -> None:
    class Interrupted(FaultyDisk):
        def sync_data(self, descriptor: int) -> None:
            raise KeyboardInterrupt(descriptor)

    journal = opened(tmp_path, ROOMY, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        fill(journal, 1)
    with pytest.raises(JournalFailed, match="a write was interrupted"):
        fill(journal, 1)
    crash(journal)


def test_recovery_without_space_changes_nothing(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    fill(journal, 50, group=10)
    crash(journal)
    before = segments(tmp_path)[-1].read_bytes()
    with pytest.raises(JournalFull, match=r"no room for the [\d,]+ bytes that recovery copies; nothing was changed"):
        opened(tmp_path, disk=FaultyDisk("write", number=errno.ENOSPC))
    assert segments(tmp_path)[-1].read_bytes() == before
    with opened(tmp_path) as journal:
        assert journal.end == 50


class Crowded(FaultyDisk):
    """A disk without room, except what the reserve gives back."""

    crowded, forgiving = False, False

    def __init__(self, reserve: Path) -> None:
        super().__init__()
        self.reserve = reserve

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        if self.crowded and (self.reserve.exists() or not self.forgiving):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, buffers)


def test_the_reserve_lets_committed_rows_go_on_a_full_disk(tmp_path: Path) -> None:
    """And nothing is removed before its watermark is written."""
    disk = Crowded(tmp_path / "reserve")
    with opened(tmp_path, SMALL, disk) as journal:
        fill(journal, 100, group=10)
        there = segments(tmp_path)
        disk.crowded = True
        with pytest.raises(JournalFull):
            fill(journal, 1)
        assert not journal.commit("spark", 90)
        assert (journal.committed, segments(tmp_path)) == (90, there)
        disk.forgiving = True
        assert journal.commit("spark", 100)
        assert journal.first_offset > 50
        assert disk.reserve.stat().st_size == 1 << 16  # kept again for the next time
        disk.crowded = False
        fill(journal, 10)
        served(journal)
    with opened(tmp_path, SMALL) as journal:
        assert journal.consumers == {"spark": 100}
