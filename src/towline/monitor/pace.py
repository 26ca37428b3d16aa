"""How fast messages come, and how long there is room for them: the outage budgets."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

__all__ = ["Pace", "budget"]

#: The present rate is that of so many seconds: long enough to see past one burst.
WINDOW_S: Final = 300.0
#: Two looks nearer than this are one.
_APART_S: Final = 1.0


class _Look(NamedTuple):
    at: float
    messages: int
    bytes: int


class Pace:
    """The rates of one gateway over the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()

    def look(self, at: float, messages: int, size: int) -> None:
        """Note where its counters are; after a restart they begin anew.

        Args:
            at: Seconds, of any clock that does not go back.
            messages: Counted so far.
            size: Bytes of them.
        """
        looks = self._looks
        if looks and (messages < looks[-1].messages or size < looks[-1].bytes):
            looks.clear()
        if looks and at - looks[-1].at < _APART_S:
            return
        looks.append(_Look(at, messages, size))
        while len(looks) > 2 and at - looks[1].at >= WINDOW_S:
            looks.popleft()

    @property
    def rates(self) -> tuple[float, float] | None:
        """Messages and bytes a second; None before the second look."""
        if len(self._looks) < 2:
            return None
        first, last = self._looks[0], self._looks[-1]
        seconds = last.at - first.at
        return (last.messages - first.messages) / seconds, (last.bytes - first.bytes) / seconds


def budget(room: float, rate: float) -> float:
    """Seconds until `room` is used up at `rate`; 0 without room, infinite while nothing comes."""
    if room <= 0:
        return 0.0
    return room / rate if rate > 0 else math.inf
