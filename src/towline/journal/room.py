"""How much disk a journal may take: its limits, and the small reserve that lets committed rows always be removed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from towline.journal.writer import full

if TYPE_CHECKING:
    from pathlib import Path

    from towline.journal.disk import Disk

__all__ = ["Limits", "Room"]

_CHECK_BYTES = 8 << 20  # free space is asked for once in so many bytes: far below any sensible guard
_SHARE = 8  # a size limit holds at least so many segments, so that it can be met by removing whole ones
_RESERVE = "reserve"
_RESERVE_BYTES = 1 << 16  # room for the watermarks on a full disk, so that committed rows can always be removed


@dataclass(frozen=True)
class Limits:
    """How much disk a journal may take; sizes in bytes, bounds are what a configuration may say.

    Attributes:
        max_bytes: Most bytes of all segments together, none by default. More is `JournalFull`, unless no row waits: a
            frame that is larger than the limit by itself is taken then.
        min_free_bytes: What must stay free on the file system, 512 MiB by default. Less is `JournalFull`.
        segment_bytes: A new file is begun when this one would grow beyond it; 64 MiB by default.
        retain_bytes: Committed segments are kept up to this size in all, for another look; 0 by default.
    """

    max_bytes: Annotated[int, Ge(1 << 20)] | None = None
    min_free_bytes: Annotated[int, Ge(0)] = 512 << 20
    segment_bytes: Annotated[int, Ge(64 << 10)] = 64 << 20
    retain_bytes: Annotated[int, Ge(0)] = 0


class Room:
    """The room in one directory.

    Args:
        directory: Of a journal.
        limits: Its limits.
        disk: The file system.
    """

    def __init__(self, directory: Path, limits: Limits, disk: Disk) -> None:
        self._directory = directory
        self.limits = limits
        self._disk = disk
        #: Bytes written since the file system was asked for its free space; asked for with the first.
        self._unasked = _CHECK_BYTES

    @property
    def segment_bytes(self) -> int:
        """The size at which a new segment is begun."""
        most = self.limits.max_bytes
        return self.limits.segment_bytes if most is None else min(self.limits.segment_bytes, most // _SHARE)

    def check(self, used: int, more: int, *, limited: bool = True) -> None:
        """Refuse what does not fit.

        Args:
            used: Bytes of all segments.
            more: Bytes to be written.
            limited: The limit of the journal counts, and not only the disk's.

        Raises:
            JournalFull: TL-J02.
        """
        limits = self.limits
        if limited and limits.max_bytes is not None and used + more > limits.max_bytes:
            what = f"{used:,} of at most {limits.max_bytes:,} bytes are used, {more:,} more don't fit"
            raise full(self._directory, what, "Intake goes on when rows are committed; or raise the limit.")
        self._unasked += more
        if self._unasked >= _CHECK_BYTES:
            free = self._disk.free(self._directory)
            if free - more < limits.min_free_bytes:
                # To a megabyte: it changes from moment to moment, and each text that differs is said once more.
                wanted = limits.min_free_bytes / 1e6
                what = f"{free / 1e6:,.0f} MB are free on this disk, {wanted:,.0f} MB must stay free"
                raise full(self._directory, what)
            self._unasked = 0

    def left(self, used: int) -> int:
        """Bytes that may still be written: by the journal's own limit or by the disk's, whichever is less.

        Args:
            used: Bytes of all segments.

        Raises:
            OSError: The file system does not tell.
        """
        limits = self.limits
        left = self._disk.free(self._directory) - limits.min_free_bytes
        return max(0, left if limits.max_bytes is None else min(left, limits.max_bytes - used))

    def prepare(self) -> None:
        """Let a disk that is nearly full be recovered on: a segment may have to be copied."""
        if self._disk.free(self._directory) < self.limits.segment_bytes:
            self.use_reserve()

    def use_reserve(self) -> None:
        """Give the reserve to what must be written now."""
        self._disk.remove(self._directory / _RESERVE)

    def reserve(self) -> None:
        """Set the reserve apart, where there is none."""
        reserve = self._directory / _RESERVE
        with contextlib.suppress(OSError):  # a convenience for the day when the disk is full
            if not reserve.exists():
                self._disk.allocate(reserve, _RESERVE_BYTES)
