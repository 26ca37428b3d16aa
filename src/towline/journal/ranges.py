"""Set of integers as a watermark and ranges above it, such as the done rows of an outbox."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Range = tuple[int, int]


class Ranges:
    """Set of all numbers below a watermark, and of ranges above it.

    Args:
        watermark: Every number below it is in the set.
        ranges: Ranges ``(start, end)`` of more numbers, in any order.
    """

    def __init__(self, watermark: int = 0, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.watermark = watermark
        #: both sorted, of equal length; starts[i] < ends[i] < starts[i + 1], and watermark < starts[0]
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __contains__(self, number: int) -> bool:
        if number < self.watermark:
            return True
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._ends[index]

    @property
    def range_count(self) -> int:
        """Number of ranges above the watermark."""
        return len(self._starts)

    @property
    def end(self) -> int:
        """The number after the largest in the set."""
        return self._ends[-1] if self._ends else self.watermark

    def is_adjacent(self, number: int) -> bool:
        """Return whether adding this number would create no new range."""
        if number <= self.watermark:
            return True
        index = bisect_right(self._starts, number + 1) - 1
        return index >= 0 and number <= self._ends[index]

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of numbers from `start` to `end` - 1 that are not in the set."""
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
        """Add the numbers from `start` to `end` - 1; only `start` without `end`."""
        end = start + 1 if end is None else end
        start = max(start, self.watermark)
        if end <= start:
            return
        if start == self.watermark and not self._starts:  # in order, the usual case
            self.watermark = end
            return
        first_index, end_index = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first_index < end_index:  # merged with all adjacent ranges
            start, end = min(start, self._starts[first_index]), max(end, self._ends[end_index - 1])
        self._starts[first_index:end_index] = [start]
        self._ends[first_index:end_index] = [end]
        if self._starts[0] <= self.watermark:
            self.watermark = self._ends[0]
            del self._starts[0], self._ends[0]

    def copy(self) -> Self:
        """Return an independent copy of the set."""
        return type(self)(self.watermark, self.ranges_above())

    def unite(self, other: Ranges) -> None:
        """Add all numbers of another set."""
        for start, end in other.ranges:
            self.add(start, end)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """All numbers of the set as ranges from 0 on, in order; no two ranges touch."""
        below = ((0, self.watermark),) if self.watermark else ()
        return (*below, *zip(self._starts, self._ends, strict=True))

    def ranges_above(self) -> list[list[int]]:
        """Return the ranges above the watermark as JSON lists."""
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]

    def count(self) -> int:
        """Return the count of numbers from 0 on in the set."""
        return self.watermark + sum(self._ends) - sum(self._starts)
