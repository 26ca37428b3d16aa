"""Rows of batches that are not whole: they are on disk and must not leave yet, while the rows behind them may.

Any thread may call; what is asked and answered is memory alone.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from towline.journal.batches import Range, joined

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Partial"]


class Partial:
    """What is held back, by writer, and what was given up and the sending thread has not noted as done yet."""

    def __init__(self) -> None:
        #: guards all below; held for moments, never during a system call
        self.lock = threading.Lock()
        self._parts: dict[str, tuple[Range, ...]] = {}
        self._touched: dict[str, float] = {}
        self._dropped: list[Range] = []
        #: all rows that must not leave, in order; replaced, never changed
        self._skipped: tuple[Range, ...] = ()
        #: a batch became whole: the sending thread has to go back to its first row
        self._back: int | None = None

    @property
    def rows(self) -> int:
        """Rows of batches that are not whole."""
        return sum(end - start for ranges in list(self._parts.values()) for start, end in ranges)

    @property
    def skipped(self) -> int:
        """Rows that must not leave: those, and what was given up and is not done yet."""
        return sum(end - start for start, end in self._skipped)

    @property
    def pending(self) -> bool:
        """Rows were given up that are not done yet."""
        return bool(self._dropped)

    def hold(self, writer: str, ranges: tuple[Range, ...]) -> None:
        """These rows of a writer must not leave; called before they can be seen."""
        with self.lock:
            if ranges:
                self._parts[writer], self._touched[writer] = ranges, time.monotonic()
            else:
                self._parts.pop(writer, None)
            self._changed()

    def let_go(self, writer: str) -> None:
        """A writer's batch is whole: its rows leave, the oldest first."""
        with self.lock:
            ranges = self._parts.pop(writer, ())
            if ranges:
                self._back = ranges[0][0] if self._back is None else min(self._back, ranges[0][0])
                self._changed()

    def give_up(self, writer: str) -> None:
        """A writer's rows are never to leave; the sending thread notes them as done."""
        with self.lock:
            self._dropped += self._parts.pop(writer, ())
            self._changed()

    def take_dropped(self) -> list[Range]:
        """What was given up since the last time; the caller notes it as done before it asks for `following`."""
        with self.lock:
            dropped, self._dropped = self._dropped, []
            self._changed()
            return dropped

    def of(self, writer: str) -> tuple[Range, ...]:
        """Where the rows of a writer's batch are that is not whole."""
        return self._parts.get(writer, ())

    def idle(self, seconds: float) -> list[str]:
        """Writers whose batch is not whole and has got nothing for so long."""
        now = time.monotonic()
        with self.lock:
            return [writer for writer in self._parts if now - self._touched[writer] >= seconds]

    def following(self, cursor: int, end: int) -> Range | None:
        """The next rows from `cursor` to `end` that may leave; from further back if a batch became whole."""
        with self.lock:
            start = cursor if self._back is None else min(cursor, self._back)
            self._back = None
            for first, stop in self._skipped:
                if stop <= start:
                    continue
                if first > start:
                    end = min(end, first)
                    break
                start = stop
        return (start, end) if start < end else None

    def covers(self, gaps: Iterable[Range]) -> bool:
        """Whether nothing but rows that must not leave is in some ranges, which are in order; with `lock` held."""
        skipped = iter(self._skipped)
        first, stop = next(skipped, (0, 0))
        for start, end in gaps:
            while stop <= start:
                first, stop = next(skipped, (end, end + 1))
            if start < first or stop < end:
                return False
        return True

    def _changed(self) -> None:
        self._skipped = joined([*(one for ranges in self._parts.values() for one in ranges), *self._dropped])
