"""How fast Kafka takes what is written, and how much the next batch may have of it. Pure.

A batch that is planned does not shrink, so none is planned that Kafka can't take in time: the first of a start is
small, and the next grow with what the one before took. Bytes are counted as the source does, in its journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

#: Most bytes of the first batch of a start: with a Kafka at 1.2 kB/s it takes Kafka's longest transaction, 15 minutes.
FIRST: Final = 1 << 20
#: Least bytes of a limit: a small batch that had to wait, as for a broker that was restarted, tells of no slow Kafka.
LEAST: Final = 64 << 10
#: Most growth from a batch to the next: a quota lets a burst pass before it holds back.
GROWTH: Final = 8
#: Seconds of a write that are nobody's slowness: requests that wait for each other, a machine that is busy.
LATENCY_S: Final = 1.0


class WritePace(NamedTuple):
    """How Kafka took the last batch of a query.

    Attributes:
        batch: Its number.
        size: Bytes of its keys and values, of the writer that took longest; 0 if the batch failed.
        seconds: How long that writer wrote.
        budget_s: How long it should take at most, a fraction of a transaction's time.
    """

    batch: int
    size: int
    seconds: float
    budget_s: float

    @property
    def rate(self) -> float | None:
        """Bytes a second; 0 where none arrived, None where it took too little time to tell."""
        busy = self.seconds - LATENCY_S
        return self.size / busy if busy > 0 else None

    def limit(self, most: int) -> int:
        """Most bytes of the next batch: what takes the budget at this rate, and no more than `most`."""
        return most if self.rate is None else max(LEAST, min(most, int(self.rate * self.budget_s)))


class BatchLimit:
    """The limit of a stream's batches, from batch to batch.

    Args:
        noted: Reads the note of the sink. One that leaves no word of the first batch is another format's: no limit.
    """

    def __init__(self, noted: Callable[[], WritePace | None]) -> None:
        self._noted = noted
        self._last = noted()
        #: Most bytes of the next batch; None for no limit.
        self.bytes: int | None = self._last.limit(FIRST) if self._last is not None and self._last.rate else FIRST
        #: Bytes of the batch that was planned and not yet looked for in the note; 0 for none.
        self._planned = 0

    def planned(self, size: int) -> None:
        """A batch of so many bytes is about to run."""
        self._planned = size

    def next(self) -> int | None:
        """Most bytes of the next batch, now that the planned one is done; None for no limit."""
        if self._planned and self.bytes is not None:
            pace, most = self._noted(), max(self.bytes, GROWTH * self._planned)
            latest = None if pace == self._last else pace
            self.bytes = latest and latest._replace(size=self._planned).limit(most)
            self._last, self._planned = pace, 0
        return self.bytes
