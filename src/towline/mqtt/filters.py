"""Topic filters as sets of topics: whether one takes a topic, and what two take both. Pure.

A filter is looked at level by level [MQTT-4.7.1-1 to -3]. A final ``#`` takes the level above it too, and a wildcard at
the very beginning takes no topic that begins with ``$`` [MQTT-4.7.2-1]. What two filters take both is again one filter,
or nothing: so whether filters overlap is proven, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, zip_longest
from typing import NamedTuple, Self


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
    short, long = sorted((_Levels.of(one), _Levels.of(other)), key=lambda part: len(part.levels))
    if len(short.levels) < len(long.levels) and not short.deep:
        return None
    both = [_level(a, b) for a, b in zip_longest(short.levels, long.levels, fillvalue="+")]
    found = [level for level in both if level is not None]
    if len(found) < len(both):
        return None
    return "/".join([*found, *(["#"] if short.deep and long.deep else [])])


def overlapping(patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of subscribed filters with topics in common: a broker may send a message for each [MQTT-3.3.4-2]."""
    return ((a, b) for a, b in combinations(patterns, 2) if common(unshared(a), unshared(b)) is not None)


class _Levels(NamedTuple):
    """A filter, its final ``#`` apart."""

    levels: list[str]
    deep: bool

    @classmethod
    def of(cls, pattern: str) -> Self:
        levels = pattern.split("/")
        deep = levels[-1] == "#"
        return cls(levels[:-1] if deep else levels, deep)


def _level(one: str, other: str) -> str | None:
    """What both take of one level."""
    if one == "+":
        return other
    return one if other in {"+", one} else None
