"""Matching and intersection of topic filters, as sets of topics. Pure.

Filters are compared level by level [MQTT-4.7.1-1 to -3]. A final ``#`` matches the parent level too, and a wildcard at
the start matches no topic that begins with ``$`` [MQTT-4.7.2-1]. The intersection of two filters is again one filter,
or empty: so an overlap is proven, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, zip_longest


def without_share(pattern: str) -> str:
    """Return a filter without the ``$share/NAME/`` of a shared subscription."""
    return pattern.split("/", 2)[2] if pattern.startswith("$share/") else pattern


def matches(pattern: str, topic: str) -> bool:
    """Return whether a filter matches a topic."""
    return common_filter(pattern, topic) == topic


def common_filter(first_filter: str, second_filter: str) -> str | None:
    """Return the filter of all topics that both filters match; None if there is no such topic.

    Args:
        first_filter: A topic filter, not of a shared subscription.
        second_filter: Another one.
    """
    if first_filter.startswith("$") != second_filter.startswith("$"):
        return None
    (short_levels, short_has_hash), (long_levels, long_has_hash) = sorted(
        (_levels(first_filter), _levels(second_filter)), key=lambda split_filter: len(split_filter[0])
    )
    if len(short_levels) < len(long_levels) and not short_has_hash:
        return None
    common_levels = [_common_level(a, b) for a, b in zip_longest(short_levels, long_levels, fillvalue="+")]
    matched_levels = [level for level in common_levels if level is not None]
    if len(matched_levels) < len(common_levels):
        return None
    return "/".join([*matched_levels, *(["#"] if short_has_hash and long_has_hash else [])])


def overlapping_pairs(patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of subscribed filters with topics in common: a broker may send a message for each [MQTT-3.3.4-2]."""
    return (pair for pair in combinations(patterns, 2) if common_filter(*map(without_share, pair)) is not None)


@lru_cache(maxsize=1024)  # of many filters each is compared with all
def _levels(pattern: str) -> tuple[Sequence[str], bool]:
    """Return the levels of a filter without a final ``#``, and whether it ends with ``#``."""
    levels = pattern.split("/")
    return (levels[:-1], True) if levels[-1] == "#" else (levels, False)


def _common_level(first_level: str, second_level: str) -> str | None:
    """Return the intersection of two filter levels; None if it is empty."""
    if first_level == "+":
        return second_level
    return first_level if second_level in {"+", first_level} else None
