"""Batches of an outbox: what one is called, what is remembered of it, and which rows of it must not leave yet.

The newest batch of a writer stands in the notes of the outbox's journal, as ``batch:<writer>``: a list ``[number,
rows, whole, end, origin]`` and, where there is more to say, an object with ``attempt``, ``ranges`` and ``at``.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Appended", "Batch", "LastBatch", "Partial", "Range", "job_of", "joined"]

Range = tuple[int, int]

#: Writers that belong to a job, which ends: ``job-<id>/<part>``. A query's id is a UUID and never begins so.
_OF_A_JOB: Final = re.compile(r"(job-[0-9a-f]{32})/[0-9]+")


@dataclass(frozen=True, slots=True)
class Batch:
    """Names some rows for ever, so that they enter once, however often they are brought.

    Attributes:
        writer: Who writes one batch after the other, such as a query and a partition of it.
        number: Grows with each of the writer's batches.
        origin: What the batch was made from, such as a hash; tells another batch with the same number. Empty for
            unknown.
        attempt: Names one run through the rows, from the first on: another run may have them in another order. Empty
            for a batch that comes whole.
    """

    writer: str
    number: int
    origin: str = ""
    attempt: str = ""


class Appended(NamedTuple):
    """What became of rows that were brought.

    Attributes:
        rows: Rows of this batch that are here now, durable; of this attempt, as long as the batch is not whole.
        end: The offset after the last of them.
        whole: The batch is complete: whatever more is brought of it is a repeat.
        already: Nothing of what was brought was new.
        newest: Number of the writer's newest batch; -1 when it has none.
    """

    rows: int
    end: int
    whole: bool
    already: bool
    newest: int = -1


@dataclass(frozen=True, slots=True)
class LastBatch:
    """The newest batch of a writer, as the notes have it.

    Attributes:
        number: Of the batch.
        rows: So many of its rows are here.
        whole: No more are expected.
        end: The offset after the last of them.
        origin: As `Batch` has it.
        attempt: Whose rows they are, until the batch is whole.
        ranges: Where they are, until the batch is whole.
        at: Seconds since 1970 of the newest rows; only of a writer that belongs to a job.
    """

    number: int
    rows: int
    whole: bool
    end: int
    origin: str = ""
    attempt: str = ""
    ranges: tuple[Range, ...] = ()
    at: int = 0

    def as_json(self) -> list[Any]:
        """As the notes have it; what is empty is left out."""
        more = {"attempt": self.attempt, "ranges": self.ranges, "at": self.at}
        rest = {name: value for name, value in more.items() if value}
        return [self.number, self.rows, int(self.whole), self.end, self.origin, *([rest] if rest else [])]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """From `as_json`."""
        number, rows, whole, end, origin, *more = values
        rest = more[0] if more else {}
        ranges = tuple((start, stop) for start, stop in rest.get("ranges", ()))
        return cls(number, rows, bool(whole), end, origin, rest.get("attempt", ""), ranges, rest.get("at", 0))


def job_of(writer: str) -> str:
    """The job a writer belongs to; "" for a writer that goes on for ever."""
    match = _OF_A_JOB.fullmatch(writer)
    return match[1] if match else ""


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges in order; those that touch are joined."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif start < end:
            result.append((start, end))
    return tuple(result)


class Partial:
    """Rows of batches that are not whole, by writer, and what was given up and is not noted as done yet.

    They are on disk and must not leave yet, while the rows behind them may. Any thread may call; what is asked and
    answered is memory alone.
    """

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
