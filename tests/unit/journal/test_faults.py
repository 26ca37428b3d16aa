"""A disk that fails: after a failed sync nothing is promised or synced again; a full disk takes nothing and mends."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.journal.support import ROOMY, SMALL, FaultyDisk, crash, fill, opened, rows, segments, served
from towline.errors import JournalError, JournalFailed, JournalFull
from towline.journal import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from towline.journal.frames import Bytes

NO_ROOM = [errno.ENOSPC, errno.EDQUOT]


def workload(directory: Path, disk: FaultyDisk) -> tuple[int, JournalError | None]:
    """Append, commit, change the session and roll until something fails; return what was acknowledged."""
    acknowledged = 0
    try:
        journal = opened(directory, SMALL, disk)
    except JournalError as error:
        return acknowledged, error
    try:
        for number in range(30):
            journal.count(received=8)
            acknowledged = journal.append(rows(acknowledged, 8))
            if number % 7 == 3:
                journal.set_session({"number": number})
            if number % 5 == 4:
                journal.commit("spark", acknowledged - 20)
    except JournalError as error:
        return acknowledged, error
    else:
        return acknowledged, None
    finally:
        crash(journal)


def calls_of_a_run(directory: Path) -> FaultyDisk:
    disk = FaultyDisk()
    assert workload(directory, disk) == (240, None)
    return disk


CALLS = ["create", "write", "sync_data", "sync", "sync_directory", "rename"]


@pytest.mark.parametrize("call", CALLS)
def test_an_error_at_every_call_loses_nothing(memory_path: Path, call: str) -> None:
    count = calls_of_a_run(memory_path / "dry").calls.count(call)
    assert count >= 3
    for at in range(1, count + 1):
        directory = memory_path / str(at)
        acknowledged, error = workload(directory, FaultyDisk(call, at))
        assert error is not None
        assert error.code in {"TL-J04", "TL-J01"}, error
        with opened(directory, SMALL) as journal:
            assert journal.end >= acknowledged
            assert journal.end - acknowledged <= 8  # at most the batch that was under way
            served(journal)


@pytest.mark.parametrize("number", NO_ROOM)
@pytest.mark.parametrize("call", ["create", "write"])
def test_no_space_at_every_call_changes_nothing(memory_path: Path, call: str, number: int) -> None:
    count = calls_of_a_run(memory_path / "dry").calls.count(call)
    for at in range(2, count + 1):
        directory = memory_path / str(at)
        disk = FaultyDisk(call, at, number, times=2, partial=100)
        journal = opened(directory, SMALL, disk)
        full = 0
        while journal.end < 240:
            try:
                journal.append(rows(journal.end, 8))
                journal.set_session({"end": journal.end})
                journal.commit("spark", max(journal.end - 20, 0))
            except JournalFull as error:
                assert error.code == "TL-J02"  # noqa: PT017 counted below
                full += 1
                served(journal)
        assert full <= 2
        crash(journal)
        with opened(directory, SMALL) as journal:
            assert journal.end == 240
            served(journal)


class Noting(FaultyDisk):
    """A disk that notes which directories were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[Path] = []

    def sync_directory(self, directory: Path) -> None:
        super().sync_directory(directory)
        self.synced.append(directory)


def test_names_are_durable_up_to_the_root_before_there_is_a_journal(tmp_path: Path) -> None:
    """Whoever made the state directory a moment ago did not care to; a power failure would take all in it along."""
    disk, place = Noting(), tmp_path / "state" / "inbox"
    opened(place, SMALL, disk).close()
    assert [*place.parents] == disk.synced[: len(place.parents)]
    assert disk.synced[len(place.parents) :] == [place]


def test_a_new_segment_is_durable_with_its_name_before_it_has_rows(tmp_path: Path) -> None:
    disk = Noting()
    with opened(tmp_path, SMALL, disk) as journal:
        while len(segments(tmp_path)) == 1:
            disk.calls.clear()
            disk.synced.clear()
            fill(journal, 10, group=10)
    assert disk.calls[-7:] == ["create", "write", "sync", "rename", "sync_directory", "write", "sync_data"]
    assert disk.synced == [tmp_path]


def test_rows_are_written_behind_what_is_durable(tmp_path: Path) -> None:
    """A watermark is not synced, but before the next rows: what can be cut at an opening is never in front of rows."""
    disk = FaultyDisk()
    with opened(tmp_path, SMALL, disk) as journal:
        fill(journal, 3)
        disk.calls.clear()
        journal.commit("spark", 1)
        assert disk.calls == ["write"]
        fill(journal, 1)
        assert disk.calls[1:] == ["sync_data", "write", "sync_data"]


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


@pytest.mark.parametrize("call", ["sync_data", "write"])
def test_after_a_failure_the_object_is_dead(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()
    journal = opened(tmp_path, ROOMY, disk)
    fill(journal, 5)
    disk.call, disk.at, disk.times = call, disk.calls.count(call) + 1, 1  # one failure; the kernel says "ok" after it
    with pytest.raises(JournalFailed, match=r"failed \(Input/output error\).*\[TL-J04\]"):
        journal.append(rows(5, 1))
    before = list(disk.calls)
    for repeat in (
        lambda: journal.append(rows(5, 1)),
        lambda: journal.set_session({}),
        lambda: journal.commit("spark", 1),
        lambda: journal.forget("spark"),
        lambda: journal.read(0, 5),
        lambda: journal.find_range_end(0),
    ):
        with pytest.raises(JournalFailed, match="TL-J04"):
            repeat()
    journal.close()
    assert disk.calls == before
    assert journal.end == 5
    with opened(tmp_path) as journal:  # unlocked, and recovered
        assert journal.end in {5, 6}
        served(journal)


def test_a_truncation_that_fails_kills(tmp_path: Path) -> None:
    class Both(FaultyDisk):
        def truncate(self, descriptor: int, size: int) -> None:
            raise OSError(errno.EIO, f"cutting {descriptor} to {size}")

    disk = Both()
    journal = opened(tmp_path, ROOMY, disk)
    fill(journal, 5)
    disk.call, disk.at, disk.number, disk.partial = "write", disk.calls.count("write") + 1, errno.ENOSPC, 60
    with pytest.raises(JournalFailed):
        journal.append(rows(5, 1))
    crash(journal)
    with opened(tmp_path) as journal:
        assert journal.end == 5
        assert ": cut 60 bytes" in journal.repair_note


def test_short_writes_are_continued(tmp_path: Path) -> None:
    class Short(FaultyDisk):
        def write(self, descriptor: int, buffers: object) -> int:
            return os.write(descriptor, bytes(next(iter(buffers)))[:7])  # type: ignore[call-overload]

    with opened(tmp_path, SMALL, Short()) as journal:
        fill(journal, 60, group=20)
    with opened(tmp_path) as journal:
        assert len(served(journal)) == 60


def test_a_file_that_cannot_be_removed_stays_and_goes_later(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, SMALL, disk) as journal:
        fill(journal, 100, group=10)
        disk.call, disk.at, disk.number = "remove", disk.calls.count("remove") + 1, errno.EBUSY
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

    def __init__(self, reserve: Path, *, forgiving: bool) -> None:
        super().__init__()
        self.reserve, self.forgiving, self.crowded = reserve, forgiving, False

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        if self.crowded and (self.reserve.exists() or not self.forgiving):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, buffers)


def test_the_reserve_lets_committed_rows_go_on_a_full_disk(tmp_path: Path) -> None:
    disk = Crowded(tmp_path / "reserve", forgiving=True)
    with opened(tmp_path, SMALL, disk) as journal:
        fill(journal, 100, group=10)
        disk.crowded = True
        with pytest.raises(JournalFull):
            fill(journal, 1)
        journal.commit("spark", 100)
        assert journal.first_offset > 50
        assert disk.reserve.stat().st_size == 1 << 16  # kept again for the next time
        disk.crowded = False
        fill(journal, 10)
        served(journal)
    with opened(tmp_path, SMALL) as journal:
        assert journal.consumers == {"spark": 100}


def test_nothing_is_removed_before_its_watermark_is_written(tmp_path: Path) -> None:
    disk = Crowded(tmp_path / "reserve", forgiving=False)
    with opened(tmp_path, SMALL, disk) as journal:
        fill(journal, 100, group=10)
        there = segments(tmp_path)
        disk.crowded = True
        journal.commit("spark", 90)
        assert journal.committed == 90
        assert segments(tmp_path) == there
        disk.crowded = False
        journal.commit("spark", 100)
        assert journal.first_offset > 50


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False, text=True
    )
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
        end = journal.end
        journal.commit("spark", end)  # written into the reserve; then whole segments go
        assert journal.first_offset > 0
        fill(journal, 500, group=100)
        served(journal)
    end = journal.end
    crash(journal)
    with opened(small_disk / "inbox", limits) as journal:
        assert journal.end == end
        served(journal)


def test_a_failed_sync_of_a_mark_kills_before_anything_is_removed(tmp_path: Path) -> None:
    disk = FaultyDisk()
    journal = opened(tmp_path, SMALL, disk)
    fill(journal, 100, group=10)
    there = segments(tmp_path)
    disk.call, disk.at = "sync_data", disk.calls.count("sync_data") + 1
    with pytest.raises(JournalFailed):
        journal.commit("spark", 100)
    assert segments(tmp_path) == there
    crash(journal)
