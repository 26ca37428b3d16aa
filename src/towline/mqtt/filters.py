"""Topic filters as sets of topics: whether one takes a topic, and what two take both. Pure.

A filter is looked at level by level [MQTT-4.7.1-1 to -3]. A final ``#`` takes the level above it too, and a wildcard at
the very beginning takes no topic that begins with ``$`` [MQTT-4.7.2-1]. What two filters take both is again one filter,
or nothing: so whether filters overlap is proven, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, zip_longest


def unshared(pattern: str) -> str:
    """A filter without the ``$share/NAME/`` of a shared subscription."""
    return pattern.split("/", 2)[2] if pattern.startswith("$share/") else pattern


def matches(pattern: str, topic: str) -> bool:
    """Whether a filter takes a topic."""
    return common(pattern, topic) == topic


def common(one: str, other: str) -> str | None:
    """The filter of all topics that both filters take; None where there is no such topic.

    Args:
        one: A filter, not of a shared subscription.
        other: Another one.
    """
    if one.startswith("$") != other.startswith("$"):
        return None
    (short, rest), (long, more) = sorted((_levels(one), _levels(other)), key=lambda part: len(part[0]))
    if len(short) < len(long) and not rest:
        return None
    both = [_level(a, b) for a, b in zip_longest(short, long, fillvalue="+")]
    found = [level for level in both if level is not None]
    if len(found) < len(both):
        return None
    return "/".join([*found, *(["#"] if rest and more else [])])


def overlapping(patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of subscribed filters with topics in common: a broker may send a message for each [MQTT-3.3.4-2]."""
    return ((a, b) for a, b in combinations(patterns, 2) if common(unshared(a), unshared(b)) is not None)


@lru_cache(maxsize=1024)  # of many filters each is compared with all
def _levels(pattern: str) -> tuple[Sequence[str], bool]:
    """The levels of a filter, and whether a final ``#`` stands behind them."""
    levels = pattern.split("/")
    return (levels[:-1], True) if levels[-1] == "#" else (levels, False)


def _level(one: str, other: str) -> str | None:
    """What both take of one level."""
    if one == "+":
        return other
    return one if other in {"+", one} else None
