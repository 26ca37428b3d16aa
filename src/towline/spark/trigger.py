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

#: Longest rest of a bridge's uplink unless told otherwise, in milliseconds.
DEFAULT_DELAY_MS: Final = 1000
#: Longest rest that can be asked for, in milliseconds: Spark's Python workers end when they have idled for 60 s.
LONGEST_DELAY_MS: Final = 30_000
#: Rows of a batch with which a stream does not rest, for each second of its longest rest. With batches of 75 ms 100
#: msg/s begin one each 0.4 s, of 39 rows; 5,000 msg/s bring twice as many as these while one runs.
BUSY_ROWS: Final = 200
#: Between two looks at what waits, in seconds: a burst is seen after the longest.
MIN_POLL_S: Final = 0.01
MAX_POLL_S: Final = 0.3
#: An idle stream makes an empty batch this often, in seconds: Spark ends Python workers that idle for 60 s
#: (PythonWorkerFactory.IDLE_WORKER_TIMEOUT_NS), and the next batch would then take five seconds instead of 0.2.
IDLE_BATCH_S = 45.0
#: Longest wait for a message while rows are in the commit log and not yet safe to remove, in seconds.
UNSYNCED_POLL_S = 0.25
#: Batches of which the middle one says what a batch takes: one that was held up says nothing.
_DURATIONS: Final = 3


class TriggerTiming:
    """Start times of a stream's batches, from the times of the last ones.

    Args:
        max_delay_s: Longest pause while rows wait, in seconds; 0 for none.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        #: When the last batch that had rows began and ended; while one runs, `_ended` is of the batch before it.
        self._batch_start = self._batch_end = -math.inf
        self._batch_durations: deque[float] = deque(maxlen=_DURATIONS)
        #: When the offset changed last. Never, at first: a query that starts idle ticks at once, so that Spark's Python
        #: workers and the sink's producer are warm when the first message comes.
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
        return max(
            0.0,
            min(poll_s if all_durable else min(poll_s, UNSYNCED_POLL_S), self._offset_changed_at + IDLE_BATCH_S - now),
        )

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
        # As rows have come since the last batch began, so many will wait then that a batch is worth its time.
        next_poll_s = min(
            math.sqrt(since_start_s * interval_s) - since_start_s, self._max_delay_s - since_end_s, MAX_POLL_S
        )
        return max(next_poll_s, MIN_POLL_S)
