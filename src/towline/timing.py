"""Duration histograms, message rates, timestamps that survive clock changes, polling, and retry backoff."""

from __future__ import annotations

import functools
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

T = TypeVar("T")

#: Bounds in seconds: of a sync of a file, from a disk with a cache that survives a power failure to one that is dying.
SYNC_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
#: Of a micro-batch, or of a transaction.
BATCH_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Histogram of durations; one thread writes, any thread may read.

    Args:
        bounds: Upper bounds of the buckets in seconds, ascending, inclusive as Prometheus' ``le``; a last bucket counts
            longer durations.

    Attributes:
        counts: Count of each bucket, the last for longer durations.
        seconds: Sum of all durations.
    """

    __slots__ = ("bounds", "counts", "seconds")

    def __init__(self, bounds: Sequence[float] = SYNC_BUCKETS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Add one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def as_json(self) -> dict[str, Any]:
        """Return the histogram as JSON values, for a gateway's status."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "seconds": self.seconds}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Create a histogram from `as_json`."""
        histogram = cls(values["bounds"])
        histogram.counts, histogram.seconds = [int(count) for count in values["counts"]], float(values["seconds"])
        return histogram


class RateMeter:
    """Rates per second of a message counter and a second counter (bytes, for example), over a time window.

    Args:
        window_s: Minimum window of the rates, in seconds.
    """

    #: Two looks nearer than this, in seconds, are one.
    MIN_INTERVAL_S: Final = 1.0

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        #: Seconds, and the counters then.
        self._samples: deque[tuple[float, int, int]] = deque()

    def sample(self, at: float, messages: int, amount: int) -> None:
        """Add a sample of both counters; counters that went back start a new window.

        Args:
            at: Time in seconds, of any monotonic clock.
            messages: Message counter.
            amount: Second counter.
        """
        samples = self._samples
        if samples and (messages < samples[-1][1] or amount < samples[-1][2]):
            samples.clear()
        if samples and at - samples[-1][0] < self.MIN_INTERVAL_S:
            return
        samples.append((at, messages, amount))
        while len(samples) > 2 and at - samples[1][0] >= self._window_s:
            samples.popleft()

    @property
    def rates(self) -> tuple[float, float] | None:
        """Growth of both counters per second; None before the second sample."""
        if len(self._samples) < 2:
            return None
        oldest, newest = self._samples[0], self._samples[-1]
        seconds = newest[0] - oldest[0]
        return (newest[1] - oldest[1]) / seconds, (newest[2] - oldest[2]) / seconds


#: When this process began: what another boot has stored is older.
_PROCESS_START_US: Final = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


@functools.cache
def _boot_id() -> int:
    try:
        return int(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:15], 16)
    except (OSError, ValueError):
        return 0


class Timestamp(NamedTuple):
    """Time by the wall clock, which people and NTP set, and by CLOCK_BOOTTIME, which is never set.

    Attributes:
        wall_us: Microseconds since 1970 UTC.
        boottime_us: Microseconds since boot, suspended time included.
        boot: Id of the boot: 60 bits of its random id (proc(5)); 0 if unknown.
    """

    wall_us: int
    boottime_us: int = 0
    boot: int = 0

    @classmethod
    def now(cls) -> Self:
        """Return the current time."""
        return cls(time.time_ns() // 1000, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000, _boot_id())

    def age_us(self, now: Timestamp) -> int:
        """Return the age at `now` in microseconds, at least 0: by boot time, or across boots by the wall clock.

        A timestamp of an earlier boot is at least as old as this process, even if the wall clock was ahead then.
        """
        if self.boot and self.boot == now.boot:
            return max(0, now.boottime_us - self.boottime_us)
        return max(0, now.wall_us - self.wall_us, now.boottime_us - _PROCESS_START_US)


def poll_until(probe: Callable[[], T], seconds: float, wait: Callable[[float], object] = time.sleep) -> T:
    """Call `probe` until it returns a true value; return its last result after `seconds`, or when `wait` returns true.

    `wait` is called between two probes with a pause in seconds.
    """
    deadline = time.monotonic() + seconds
    while not (result := probe()) and time.monotonic() < deadline and not wait(0.1):
        pass
    return result


_MAX_DOUBLINGS: Final = 30


class Backoff:
    """Exponential backoff with jitter, so that clients that failed together retry apart.

    Args:
        first_s: First pause in seconds.
        max_s: Longest pause in seconds.
        jitter: Part of a pause that is shortened at random, 0 to 1.
        rng: Source of randomness.
    """

    def __init__(
        self, first_s: float = 1.0, max_s: float = 60.0, jitter: float = 0.3, rng: random.Random | None = None
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self._rng = rng or random.Random()  # noqa: S311 - not a secret
        #: Tries since the last success.
        self.failures = 0

    def next_pause(self) -> float:
        """Count a failure and return the pause before the next retry, in seconds."""
        pause = min(self._max_s, self._first_s * 2.0 ** min(self.failures, _MAX_DOUBLINGS))
        self.failures += 1
        return pause * (1 - self._jitter * self._rng.random())

    def reset(self) -> None:
        """Reset the pauses after a success."""
        self.failures = 0


def local_time(seconds: float) -> str:
    """Return seconds since 1970 as local time, ``2026-11-24 20:30:00``; ``at an unknown time`` if out of range."""
    try:
        return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError, TypeError):
        return "at an unknown time"
