"""Size of the next batch, from the write throughput of Kafka. Pure.

A planned batch can't shrink, so none is planned that Kafka can't write in time. The first batch of a start is small,
and the next ones grow with the throughput of the one before. Bytes are counted as in the source's journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

#: Most bytes of the first batch of a start: at 1.2 kB/s it takes Kafka's longest transaction, 15 minutes.
FIRST_BATCH_BYTES: Final = 1 << 20
#: Lowest limit in bytes: a small batch that waited, for a restarted broker for example, does not mean a slow Kafka.
MIN_LIMIT_BYTES: Final = 64 << 10
#: Most growth from a batch to the next: a quota lets a burst pass before it throttles.
MAX_GROWTH: Final = 8
#: Seconds of a write that don't count: waits of requests for each other, a busy machine.
LATENCY_S: Final = 1.0


class WriteThroughput(NamedTuple):
    """Write throughput of Kafka in the last batch of a query.

    Attributes:
        batch: Batch id.
        size: Bytes of keys and values, of the writer that took longest; 0 if the batch failed.
        seconds: Write time of that writer.
        budget_s: Longest write time that is allowed, a fraction of the transaction timeout.
    """

    batch: int
    size: int
    seconds: float
    budget_s: float

    @property
    def rate(self) -> float | None:
        """Bytes a second; 0 if no byte was written, None if the time was too short to measure."""
        writing_s = self.seconds - LATENCY_S
        return self.size / writing_s if writing_s > 0 else None

    def batch_limit(self, max_bytes: int) -> int:
        """Return the byte limit of the next batch: the bytes written within the budget, at most `max_bytes`."""
        return max_bytes if self.rate is None else max(MIN_LIMIT_BYTES, min(max_bytes, int(self.rate * self.budget_s)))


class BatchByteLimit:
    """Limit of a stream's batches in bytes, adjusted after each batch.

    Args:
        read_throughput: Reads the throughput from the sink note. If the sink notes none for the first batch, it is
            another format's, and there is no limit.
    """

    def __init__(self, read_throughput: Callable[[], WriteThroughput | None]) -> None:
        self._read_throughput = read_throughput
        self._last_throughput = read_throughput()
        #: Most bytes of the next batch; None for no limit.
        self.max_bytes: int | None = FIRST_BATCH_BYTES
        if self._last_throughput is not None and self._last_throughput.rate:
            self.max_bytes = self._last_throughput.batch_limit(FIRST_BATCH_BYTES)
        #: Bytes of the planned batch whose throughput was not read yet; 0 for none.
        self._planned_bytes = 0

    def record_planned(self, size: int) -> None:
        """Record the size of the batch that is about to run, in bytes."""
        self._planned_bytes = size

    def next_limit(self) -> int | None:
        """Return the most bytes of the next batch, after the planned one has ended; None for no limit."""
        if self._planned_bytes and self.max_bytes is not None:
            throughput, max_limit = self._read_throughput(), max(self.max_bytes, MAX_GROWTH * self._planned_bytes)
            new_throughput = None if throughput == self._last_throughput else throughput
            self.max_bytes = new_throughput and new_throughput._replace(size=self._planned_bytes).batch_limit(max_limit)
            self._last_throughput, self._planned_bytes = throughput, 0
        return self.max_bytes
