"""How long things take, counted in fixed buckets: what happens thousands of times a second costs one bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

__all__ = ["BATCHES", "SYNCS", "Histogram"]

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
