"""Start time of a stream's next micro-batch. Pure: no clock.

A batch of ten rows costs as much CPU as one of ten thousand. So the share of the time spent in batches follows their
size: with n rows it is n of `BUSY_ROWS`. A slow stream has few batches with pauses between them. A steady stream or a
backlog has one batch after the other. The first rows after an idle period start a batch at once.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import Final

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
