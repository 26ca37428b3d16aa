"""How long things take, in fixed buckets; how many come a second; how old they are; the pause before the next try."""

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
SYNCS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
#: Of a micro-batch, or of a transaction.
BATCHES: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Durations, as many of each bucket as there were; one thread counts, any may read.

    Args:
        bounds: Upper ends of the buckets in seconds, ascending, each inclusive as Prometheus has them (``le``); what is
            longer has a bucket of its own.

    Attributes:
        counts: One for each bound, and one for what is longer.
        seconds: All durations together.
    """

    __slots__ = ("bounds", "counts", "seconds")

    def __init__(self, bounds: Sequence[float] = SYNCS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def as_json(self) -> dict[str, Any]:
        """Plain values, as they travel in a gateway's status."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "seconds": self.seconds}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From `as_json`."""
        made = cls(values["bounds"])
        made.counts, made.seconds = [int(count) for count in values["counts"]], float(values["seconds"])
        return made


class Pace:
    """Messages, and what goes with them, a second: the rates of two counters over the last seconds.

    Args:
        window_s: Seconds that the rates are taken over, at least.
    """

    #: Two looks nearer than this, in seconds, are one.
    APART_S: Final = 1.0

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        #: Seconds, and the counters then.
        self._looks: deque[tuple[float, int, int]] = deque()

    def look(self, at: float, messages: int, other: int) -> None:
        """Note where the two counters are, of messages and their bytes for instance; after a restart they begin anew.

        The seconds are those of any clock that does not go back.
        """
        looks = self._looks
        if looks and (messages < looks[-1][1] or other < looks[-1][2]):
            looks.clear()
        if looks and at - looks[-1][0] < self.APART_S:
            return
        looks.append((at, messages, other))
        while len(looks) > 2 and at - looks[1][0] >= self._window_s:
            looks.popleft()

    @property
    def rates(self) -> tuple[float, float] | None:
        """How much each counter grew a second; None before the second look."""
        if len(self._looks) < 2:
            return None
        first, last = self._looks[0], self._looks[-1]
        seconds = last[0] - first[0]
        return (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds


#: When this process began: what another boot has stored is older.
_BEGAN_US: Final = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


@functools.cache
def _boot() -> int:
    try:
        return int(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:15], 16)
    except (OSError, ValueError):
        return 0


class Stamp(NamedTuple):
    """A time by the wall clock, which people and NTP set, and by CLOCK_BOOTTIME, which nobody does.

    Attributes:
        wall_us: Microseconds since 1970 UTC.
        boottime_us: Microseconds since the machine was booted, those asleep included.
        boot: Names the boot: 60 bits of its random id (proc(5)); 0 for unknown.
    """

    wall_us: int
    boottime_us: int = 0
    boot: int = 0

    @classmethod
    def now(cls) -> Self:
        """This moment."""
        return cls(time.time_ns() // 1000, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000, _boot())

    def age_us(self, now: Stamp) -> int:
        """Microseconds from here to `now`, at least 0: by boot time within a boot, by the wall clock across boots.

        What another boot has stored is at least as old as this process, so that no clock that was ahead keeps it young.
        """
        if self.boot and self.boot == now.boot:
            return max(0, now.boottime_us - self.boottime_us)
        return max(0, now.wall_us - self.wall_us, now.boottime_us - _BEGAN_US)


def until(look: Callable[[], T], seconds: float, wait: Callable[[float], object] = time.sleep) -> T:
    """What a look-up says once it is true; else after so many seconds, or when ``wait`` says that it is over.

    ``wait`` is called between two looks with a pause in seconds.
    """
    deadline = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < deadline and not wait(0.1):
        pass
    return seen


_MOST_DOUBLINGS: Final = 30


class Backoff:
    """Pauses before the next try, doubling, with jitter, so that those who failed together return apart.

    Args:
        jitter: Part by which a pause is shortened at random, 0 to 1.
    """

    def __init__(
        self, first: float = 1.0, most: float = 60.0, jitter: float = 0.3, rng: random.Random | None = None
    ) -> None:
        self._first = first
        self._most = most
        self._jitter = jitter
        self._rng = rng or random.Random()  # noqa: S311 - not a secret
        #: Tries since the last success.
        self.failures = 0

    def next(self) -> float:
        """The pause after one more failure."""
        pause = min(self._most, self._first * 2.0 ** min(self.failures, _MOST_DOUBLINGS))
        self.failures += 1
        return pause * (1 - self._jitter * self._rng.random())

    def reset(self) -> None:
        """Begin again after a success."""
        self.failures = 0


def local_time(seconds: float) -> str:
    """``2026-11-24 20:30:00`` on this machine's clock, of seconds since 1970; or that no calendar has that time."""
    try:
        return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError, TypeError):
        return "at an unknown time"
