"""Rows, a disk that fails on request, and a look at the files: shared by the journal's tests."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from towline.journal import Disk, Journal, Limits, Outbox
from towline.journal.frames import Bytes
from towline.journal.segment import Segment

#: A directory in memory where the machine has one: only its speed matters.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
SCHEMA = pa.schema([("offset", pa.int64()), ("payload", pa.binary()), ("tags", pa.list_(pa.string()))])
SMALL = Limits(min_free_bytes=0, segment_bytes=4096)
ROOMY = Limits(min_free_bytes=0)


def rows(start: int, count: int, size: int = 20) -> Any:
    """Return `count` rows that say which they are."""
    offsets = range(start, start + count)
    payloads = [f"payload {offset} ".encode().ljust(size, b".") for offset in offsets]
    return pa.record_batch([offsets, payloads, [[f"t{offset % 3}"] for offset in offsets]], schema=SCHEMA)


def fill(journal: Journal, count: int, *, group: int = 1, size: int = 20) -> None:
    for _ in range(0, count, group):
        journal.append(rows(journal.end, group, size))


def opened(directory: Path, limits: Limits = ROOMY, disk: Disk | None = None) -> Journal:
    return Journal.open(directory, schema=SCHEMA, limits=limits, disk=disk or Unsynced())


def opened_outbox(directory: Path, limits: Limits = ROOMY, disk: Disk | None = None) -> Outbox:
    return Outbox.open(directory, schema=SCHEMA, limits=limits, disk=disk or Unsynced())


def crash(journal: Journal) -> None:
    """Leave the files as a kill would: nothing is written, the kernel takes the lock back."""
    journal._active.close()
    journal._lock.release()


def served(journal: Journal, start: int | None = None, end: int | None = None, *, batch_rows: int = 9999) -> list[int]:
    """Return the offsets that a read hands out, after comparing every byte with what was appended."""
    start = journal.first_offset if start is None else start
    end = journal.end if end is None else end
    seen: list[int] = []
    for batch in journal.read(start, end, batch_rows=batch_rows):
        assert 0 < batch.num_rows <= batch_rows
        batch.validate(full=True)
        numbers = batch.column("offset").to_pylist()
        for number, payload in zip(numbers, batch.column("payload").to_pylist(), strict=True):
            assert payload.startswith(b"payload %d " % number)
        seen += numbers
    assert seen == list(range(start, end))
    return seen


def segments_of(journal: Journal) -> tuple[Segment, ...]:
    return journal._segments


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.seg"), key=lambda path: path.stem.split("-")[1])


class Sending:
    """Reads an outbox as the gateway's sending thread does."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.cursor = outbox.done_rows.watermark
        self.left: list[int] = []

    def turn(self) -> list[int]:
        """Send what may leave; return it."""
        sent: list[int] = []
        self.outbox.finish_dropped()
        while following := self.outbox.next_rows(self.cursor):
            start, self.cursor = following
            for batch in self.outbox.read(start, self.cursor):
                for number in batch.column("offset").to_pylist():
                    if start not in self.outbox.done_rows:
                        sent.append(number)
                        self.outbox.mark_done([start])
                    start += 1
        self.outbox.flush()
        self.left += sent
        return sent


class Unsynced(Disk):
    """The real disk without waiting for it, where a test opens a journal thousands of times."""

    def sync_data(self, descriptor: int) -> None: ...

    def sync(self, descriptor: int) -> None: ...

    def sync_directory(self, directory: Path) -> None: ...


class FillingDisk(Unsynced):
    """The real disk, which a test says to be full and not full."""

    full = False

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, buffers)


class FaultyDisk(Unsynced):
    """The real disk, until the n-th call of one kind: then an error, so many times, after some bytes of a write."""

    def __init__(
        self, call: str = "", at: int = 1, number: int = errno.EIO, *, times: int | None = None, partial: int = 0
    ) -> None:
        self.call, self.at, self.number, self.times, self.partial = call, at, number, times, partial
        self.calls: list[str] = []

    def fail_next(self, call: str, number: int, *, times: int | None = None, partial: int = 0) -> None:
        """Fail the next call of a kind, and those after it."""
        self.call, self.at, self.number = call, self.calls.count(call) + 1, number
        self.times, self.partial = times, partial

    def step(self, call: str) -> None:
        self.calls.append(call)
        last = float("inf") if self.times is None else self.at + self.times - 1
        if call == self.call and self.at <= self.calls.count(call) <= last:
            raise OSError(self.number, os.strerror(self.number))

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        try:
            self.step("write")
        except OSError:
            if self.partial:
                os.write(descriptor, b"".join(bytes(buffer) for buffer in buffers)[: self.partial])
            raise
        return super().write(descriptor, buffers)


def step_before(kind: type[Any], *calls: str) -> None:
    """Have a disk's `step` told the name of each of these calls before it is made."""

    def stepped(name: str) -> Callable[..., Any]:
        call = getattr(kind, name)

        def step_and_call(disk: Any, *arguments: Any) -> Any:
            disk.step(name)
            return call(disk, *arguments)

        return step_and_call

    for name in calls:
        setattr(kind, name, stepped(name))


step_before(FaultyDisk, "create", "sync_data", "sync", "sync_directory", "truncate", "rename", "remove", "free")
