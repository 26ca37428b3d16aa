"""When the next micro-batch of a stream begins. Pure: no clock.

A batch of ten rows costs as much CPU as one of ten thousand. So the share of the time that goes into batches follows
what one holds: with n rows it is n of `BUSY_ROWS`. A trickle has few batches and rests between them, a steady stream
and a backlog have one after the other, and what comes after a silence begins one at once.
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
SHORTEST_LOOK_S: Final = 0.01
LONGEST_LOOK_S: Final = 0.3
#: An idle stream makes an empty batch this often, in seconds: Spark ends Python workers that idle for 60 s
#: (PythonWorkerFactory.IDLE_WORKER_TIMEOUT_NS), and the next batch would then take five seconds instead of 0.2.
TICK_S = 45.0
#: Longest wait for a message while rows are in the commit log and not yet safe to remove, in seconds.
SETTLE_S = 0.25
#: Batches of which the middle one says what a batch takes: one that was held up says nothing.
_BATCHES: Final = 3


class Cadence:
    """The last batches of a stream, as far as they decide when the next one begins.

    Args:
        most_s: The longest rest while rows wait, in seconds; 0 for none.
    """

    def __init__(self, most_s: float) -> None:
        self._most = most_s
        #: When the last batch that had rows began and ended; while one runs, `_ended` is of the batch before it.
        self._began = self._ended = -math.inf
        self._took: deque[float] = deque(maxlen=_BATCHES)
        #: When the offset changed last. Never, at first: a query that starts idle ticks at once, so that Spark's Python
        #: workers and the sink's producer are warm when the first message comes.
        self._moved = -math.inf

    def begins(self, now: float) -> None:
        """A batch with rows begins."""
        self._began = self._moved = now

    def ticks(self, now: float) -> bool:
        """Whether an empty batch is due, which begins then."""
        due = now - self._moved >= TICK_S
        self._moved = now if due else self._moved
        return due

    def patience_s(self, poll_s: float, now: float, *, settled: bool) -> float:
        """How long rows may be waited for: not beyond the next tick, and not long before all that is done is cut."""
        return max(0.0, min(poll_s if settled else min(poll_s, SETTLE_S), self._moved + TICK_S - now))

    def asks(self, now: float) -> None:
        """Spark asks for the next batch: the one that ran has ended."""
        if self._ended < self._began:
            self._ended = now
            self._took.append(now - self._began)

    def wait_s(self, rows: int, now: float) -> float:
        """Seconds until the rows that wait, at least 1, are looked at again; 0 where the next batch begins now."""
        since, rested = now - self._began, now - self._ended
        if rested >= self._most:
            return 0.0
        apart = median_low(self._took) * BUSY_ROWS * self._most / rows
        if since >= apart:
            return 0.0
        # As rows have come since the last batch began, so many will wait then that a batch is worth its time.
        look = min(math.sqrt(since * apart) - since, self._most - rested, LONGEST_LOOK_S)
        return max(look, SHORTEST_LOOK_S)
