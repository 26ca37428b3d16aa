"""How limits are told: as a time at a rate, and how near is near. Pure."""

from __future__ import annotations

from typing import Final

from towline.doctor.case import LineLoad
from towline.doctor.findings import Standing
from towline.text import counted

__all__ = ["NEAR_S", "at_rate", "duration", "verdict_of", "within"]

#: An outage that is shorter may well be over before anybody has looked at it: limits below are warned of.
NEAR_S: Final = 3600.0

#: Upper bound in seconds, unit in seconds, its name.
_UNITS: Final = (
    (120.0, 1.0, "s"),
    (2 * 3600.0, 60.0, "min"),
    (2 * 86400.0, 3600.0, "h"),
    (1000 * 86400.0, 86400.0, "days"),
)


def duration(seconds: float) -> str:
    """``0.4 s``, ``5 s``, ``8 min``, ``27 h``, ``4 days``; rounded down, because it is a limit."""
    for bound, unit, name in _UNITS:
        if seconds < bound:
            if name == "s" and seconds < 10:
                return f"{int(seconds * 10) / 10:g} s"
            return f"{int(seconds / unit)} {name}"
    return "years"


def at_rate(load: LineLoad) -> str:
    """``at 200 msg/s``."""
    rate = load.messages_s
    return f"at {rate:,.0f} msg/s" if rate >= 10 else f"at {rate:.2g} msg/s"


def within(messages: float, load: LineLoad | None) -> str:
    """``1,000 messages, 5 s at 200 msg/s``; only the messages where no load is known."""
    told = counted(int(messages))
    return told if load is None else f"{told}, {duration(messages / load.messages_s)} {at_rate(load)}"


def verdict_of(seconds: float | None, *, near_s: float = NEAR_S) -> Standing:
    """Of a limit that is so many seconds away, None where that is not known; below `near_s` it is near."""
    return Standing.LIMITED if seconds is not None and seconds >= near_s else Standing.WARNS
