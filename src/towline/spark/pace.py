"""How many rows a micro-batch may have so that it stays under a target time. Pure.

A batch costs something fixed and something for each row. In proportion to the batch before, the number of rows moves
towards the target from below and does not pass it: the fixed part is counted as if it grew with the rows.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BatchPace"]

#: Part of the target that a batch is planned for: the rest is for what differs from batch to batch.
_PLANNED: Final = 0.8
#: The number of rows grows at most so much from batch to batch.
_GROWTH: Final = 2.0
#: Rows of the first batch, of which nothing is known.
_FIRST_ROWS: Final = 2_000


class BatchPace:
    """Follows the batches of one query.

    Args:
        target_s: Longest time a batch is to take, in seconds.
        first_rows: Most rows of the first batch.

    Attributes:
        rows: Most rows of the next batch, at least 1.
    """

    def __init__(self, target_s: float, first_rows: int = _FIRST_ROWS) -> None:
        self._planned_s = target_s * _PLANNED
        #: rows of the batch that was planned last, and when; None when none was, or its time is known
        self._batch: tuple[int, float] | None = None
        self.rows = first_rows

    def planned(self, rows: int, now: float) -> None:
        """A batch of so many rows begins at ``now``, in seconds of any clock."""
        self._batch = (rows, now) if rows else None

    def ended(self, now: float) -> None:
        """The batch has ended; a call without a batch says nothing."""
        if self._batch is None:
            return
        (rows, began), self._batch = self._batch, None
        fitting = rows * self._planned_s / max(now - began, 1e-6)
        if fitting < rows or rows >= self.rows / _GROWTH:  # a small batch that was quick says nothing of large ones
            self.rows = max(1, int(min(fitting, self.rows * _GROWTH)))
