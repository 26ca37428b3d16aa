"""Start time and size of a stream's next micro-batch. Pure: no clock.

A batch of ten rows costs as much CPU as one of ten thousand. So the share of the time spent in batches follows their
size: with n rows it is n of `BUSY_ROWS`. A slow stream has few batches with pauses between them. A steady stream or a
backlog has one batch after the other. The first rows after an idle period start a batch at once.

A planned batch can't shrink, so none is planned that Kafka can't write in time. The first batch of a start is small,
and the next ones grow with the throughput of the one before. Bytes are counted as in the source's journal.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

#: Default of a bridge's ``max_trigger_delay_ms``.
DEFAULT_DELAY_MS: Final = 1000
#: Most that ``maxTriggerDelayMs`` may be: Spark's Python workers end after 60 s without work.
LONGEST_DELAY_MS: Final = 30_000
#: Rows of a batch above which the next one starts at once, for each second of the longest pause. With batches of 75 ms,
#: 100 msg/s start one each 0.4 s, of 39 rows; 5,000 msg/s bring twice as many as these while one runs.
BUSY_ROWS: Final = 200
#: Shortest and longest time between two polls for waiting rows, in seconds: a burst is seen after the longest.
MIN_POLL_S: Final = 0.01
MAX_POLL_S: Final = 0.3
#: Time between the empty batches of an idle stream, in seconds: Spark ends Python workers that idle for 60 s
#: (PythonWorkerFactory.IDLE_WORKER_TIMEOUT_NS), and the next batch would then take five seconds instead of 0.2.
IDLE_BATCH_S = 45.0
#: Longest poll while rows in the commit log are not yet durable, in seconds.
UNSYNCED_POLL_S = 0.25
#: Number of durations whose median counts: one slow batch changes nothing.
_DURATIONS: Final = 3


class TriggerTiming:
    """Start times of a stream's batches, from the times of the last ones.

    Args:
        max_delay_s: Longest pause while rows wait, in seconds; 0 for none.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        #: Start and end of the last batch with rows; while one runs, the end is that of the batch before.
        self._batch_start = self._batch_end = -math.inf
        self._batch_durations: deque[float] = deque(maxlen=_DURATIONS)
        #: Last change of the offset; never, at first: a query that starts idle has an empty batch at once, which warms
        #: Spark's Python workers and the sink's producer for the first message.
        self._offset_changed_at = -math.inf

    def start_batch(self, now: float) -> None:
        """Record the start of a batch with rows."""
        self._batch_start = self._offset_changed_at = now

    def start_idle_batch(self, now: float) -> bool:
        """Start an empty batch if one is due, and return whether it is."""
        due = now - self._offset_changed_at >= IDLE_BATCH_S
        self._offset_changed_at = now if due else self._offset_changed_at
        return due

    def poll_timeout_s(self, poll_s: float, now: float, *, all_durable: bool) -> float:
        """Return the poll timeout in seconds: until the next empty batch, and shorter while rows are not durable."""
        until_idle_batch_s = self._offset_changed_at + IDLE_BATCH_S - now
        return max(0.0, min(poll_s, until_idle_batch_s, poll_s if all_durable else UNSYNCED_POLL_S))

    def end_batch(self, now: float) -> None:
        """Record the end of the running batch: Spark asks for the next one."""
        if self._batch_end < self._batch_start:
            self._batch_end = now
            self._batch_durations.append(now - self._batch_start)

    def delay_s(self, rows: int, now: float) -> float:
        """Return the seconds until the next poll with `rows` >= 1 waiting; 0 if the next batch starts now."""
        since_start_s, since_end_s = now - self._batch_start, now - self._batch_end
        if since_end_s >= self._max_delay_s:
            return 0.0
        interval_s = median_low(self._batch_durations) * BUSY_ROWS * self._max_delay_s / rows
        if since_start_s >= interval_s:
            return 0.0
        # At the present rate enough rows for a batch will wait then.
        enough_rows_s = math.sqrt(since_start_s * interval_s) - since_start_s
        return max(min(enough_rows_s, self._max_delay_s - since_end_s, MAX_POLL_S), MIN_POLL_S)


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
