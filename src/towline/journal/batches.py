"""Batches of an outbox: what one is called, and what is remembered of it.

The newest batch of a writer stands in the notes of the outbox's journal, as ``batch:<writer>``: a list ``[number,
rows, whole, end, origin]`` and, where there is more to say, an object with ``attempt``, ``ranges`` and ``at``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Appended", "Batch", "LastBatch", "Range", "job_of", "joined"]

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
