"""A set of numbers that fills up from below, almost in order: what is done of a long list."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Range", "Ranges"]

Range = tuple[int, int]


class Ranges:
    """Everything below a watermark, and some ranges above it.

    Args:
        watermark: Every number below it is in the set.
        above: Ranges ``(start, end)`` of more numbers, in any order.
    """

    def __init__(self, watermark: int = 0, above: Iterable[Sequence[int]] = ()) -> None:
        self.watermark = watermark
        #: both sorted, of one length; starts[i] < ends[i] < starts[i + 1], and watermark < starts[0]
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in above:
            self.add(start, end)

    def __contains__(self, number: int) -> bool:
        if number < self.watermark:
            return True
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    @property
    def pieces(self) -> int:
        """Ranges above the watermark."""
        return len(self._starts)

    @property
    def end(self) -> int:
        """The number after the largest in the set."""
        return self._ends[-1] if self._ends else self.watermark

    def touches(self, number: int) -> bool:
        """Whether a number could be put in without making another range."""
        if number <= self.watermark:
            return True
        at = bisect_right(self._starts, number + 1) - 1
        return at >= 0 and number <= self._ends[at]

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of numbers from `start` to `end` - 1 that are not in the set."""
        gaps = []
        start = max(start, self.watermark)
        for begin, stop in zip(self._starts, self._ends, strict=True):
            if begin >= end:
                break
            if begin > start:
                gaps.append((start, begin))
            start = max(start, stop)
        return [*gaps, (start, end)] if start < end else gaps

    def add(self, start: int, end: int | None = None) -> None:
        """Put in the numbers from `start` to `end` - 1; one number without an end."""
        end = start + 1 if end is None else end
        start = max(start, self.watermark)
        if end <= start:
            return
        if start == self.watermark and not self._starts:  # in order, as nearly always
            self.watermark = end
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:  # it is put in together with all that it touches
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        if self._starts[0] <= self.watermark:
            self.watermark = self._ends[0]
            del self._starts[0], self._ends[0]

    def copy(self) -> Self:
        """The same numbers, apart from here on."""
        return type(self)(self.watermark, self.above())

    def unite(self, others: Ranges) -> None:
        """Put in all numbers of another set."""
        for start, end in others.ranges:
            self.add(start, end)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """All numbers of the set from 0 on, in order; no range touches another."""
        below = ((0, self.watermark),) if self.watermark else ()
        return (*below, *zip(self._starts, self._ends, strict=True))

    def above(self) -> list[list[int]]:
        """The ranges above the watermark, as JSON holds them."""
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]

    def count(self) -> int:
        """How many numbers from 0 on are in the set."""
        return self.watermark + sum(self._ends) - sum(self._starts)
