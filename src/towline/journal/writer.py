"""The one file that is written to: frames at its end, durable when it says so, dead after a failed sync [I6]."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from towline.errors import JournalFailed, JournalFull
from towline.journal.directory import UNFINISHED, Name
from towline.journal.frames import Bytes, Encoded, Kind, encode
from towline.journal.segment import Index, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from towline.journal.disk import Disk
    from towline.journal.state import Snapshot
    from towline.timing import Histogram

__all__ = ["Active", "failing", "full", "new_file", "new_segment", "write_all"]

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def full(
    where: Path | str, what: str, do: str = "Free some disk; intake goes on by itself when there is room."
) -> JournalFull:
    """Return the error for a write that found no room; nothing of it stays [I7]."""
    return JournalFull("TL-J02", str(where), what, do)


@contextlib.contextmanager
def failing(where: Path, what: str) -> Iterator[None]:
    """Turn a failed system call into the end of this journal object [I6]."""
    try:
        yield
    except OSError as error:
        raise JournalFailed(
            "TL-J04",
            str(where),
            f"{what} failed ({error.strerror}); what was not acknowledged before is not promised",
            "Check the disk and start again: recovery copies what is valid into a new file.",
        ) from error


def write_all(disk: Disk, descriptor: int, buffers: Sequence[Bytes]) -> None:
    """Write every byte; a short write goes on where it stopped."""
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        written = disk.write(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def new_file(disk: Disk, path: Path, buffers: Sequence[Bytes]) -> int:
    """Write a whole file under another name, sync it, give it its name, sync the directory; return its descriptor.

    A crash in between leaves the old state and a file that the next opening removes.

    Raises:
        JournalFull: TL-J02, no room; nothing changed.
        JournalFailed: TL-J04, a system call failed.
    """
    unfinished = path.with_suffix(UNFINISHED)
    descriptor = -1
    try:
        with failing(path, "writing a new segment"):
            descriptor = _unless_full(disk, unfinished, buffers)
            disk.sync(descriptor)
            disk.rename(unfinished, path)
            disk.sync_directory(path.parent)
    except BaseException:
        _discard(disk, descriptor, unfinished)
        raise
    return descriptor


def _unless_full(disk: Disk, path: Path, buffers: Sequence[Bytes]) -> int:
    descriptor = -1
    try:
        descriptor = disk.create(path)
        write_all(disk, descriptor, buffers)
    except OSError as error:
        _discard(disk, descriptor, path)
        if error.errno in _NO_ROOM:
            raise full(path.parent, f"no room for a new segment ({error.strerror})") from error
        raise
    return descriptor


def _discard(disk: Disk, descriptor: int, path: Path) -> None:
    if descriptor >= 0:
        with contextlib.suppress(OSError):  # closed already
            os.close(descriptor)
    with contextlib.suppress(OSError):
        disk.remove(path)


class Active:
    """The newest segment and how much of it is written and durable.

    Args:
        disk: The file system.
        descriptor: Of the file.
        segment: As below.
        syncs: Takes how long each sync took.

    Attributes:
        segment: What readers see of it.
        size: Bytes written, all of them whole frames.
        synced: Bytes known to be durable; <= size. Between them lie only watermarks, never rows.
    """

    def __init__(self, disk: Disk, descriptor: int, segment: Segment, syncs: Histogram) -> None:
        self._disk = disk
        self._descriptor = descriptor
        self._syncs = syncs
        self.segment = segment
        self.size = segment.size
        self.synced = segment.size

    def write(self, frame: Encoded) -> None:
        """Put a frame behind the last one, not yet durable.

        Raises:
            JournalFull: TL-J02, no room on the disk; the file is as it was.
            JournalFailed: TL-J04, anything else.
        """
        path = self.segment.path
        with failing(path, "writing a frame"):
            try:
                write_all(self._disk, self._descriptor, frame.buffers)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._disk.truncate(self._descriptor, self.size)
                raise full(path.parent, f"the disk took no more ({error.strerror}); nothing was written") from error
        self.size += frame.size

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            JournalFailed: TL-J04; this file must not be synced again [I6].
        """
        if self.synced < self.size:
            begun = time.perf_counter()
            with failing(self.segment.path, "fdatasync"):
                self._disk.sync_data(self._descriptor)
            self._syncs.observe(time.perf_counter() - begun)
            self.synced = self.size

    def publish(self, end: int) -> None:
        """Let readers see what is durable: up to offset `end`."""
        self.segment.size = self.synced
        self.segment.end = end

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def new_segment(disk: Disk, directory: Path, snapshot: Snapshot, syncs: Histogram) -> Active:
    """Make the next segment, durable with its name before this returns.

    Raises:
        JournalFull: TL-J02, no room; nothing changed.
        JournalFailed: TL-J04, a system call failed.
    """
    state = snapshot.state
    frame = encode(Kind.SNAPSHOT, epoch=state.epoch, first=state.end, durable=0, payload=snapshot.encode())
    name = Name(snapshot.sequence, state.end)
    descriptor = new_file(disk, name.path(directory), frame.buffers)
    segment = Segment(directory, name, size=frame.size, end=state.end, origin=state.origin, index=Index())
    return Active(disk, descriptor, segment, syncs)
