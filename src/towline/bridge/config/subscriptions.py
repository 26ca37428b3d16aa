"""MQTT subscriptions of a line: the filters of its routes, without filters covered by another. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from towline.bridge.routes import Route
from towline.mqtt.events import Filter
from towline.mqtt.filters import common_filter, without_share


def covers(wide: str, narrow: str) -> bool:
    """Return whether every topic that the filter ``narrow`` matches is also matched by ``wide``, share groups aside."""
    narrow = without_share(narrow)
    return common_filter(without_share(wide), narrow) == narrow


def _is_covered(narrow: Filter, wide: Filter) -> bool:
    """Return whether a filter is covered by one of its own share group."""
    groups = (each.pattern.removesuffix(without_share(each.pattern)) for each in (narrow, wide))
    return len({*groups}) == 1 and covers(wide.pattern, narrow.pattern)


def _widest_filters(filters: Sequence[Filter]) -> tuple[Filter, ...]:
    """Return the filters that no other covers, of equal ones the first, each with the highest QoS that it covers."""
    widest = list[Filter]()
    for index, each in enumerate(filters):
        wider = [i for i, wide in enumerate(filters) if i != index and _is_covered(each, wide)]
        if not any(i < index or not _is_covered(filters[i], each) for i in wider):
            widest.append(replace(each, qos=max(other.qos for other in filters if _is_covered(other, each))))
    return tuple(widest)


def shadowed_routes(routes: Sequence[Route]) -> list[tuple[int, int]]:
    """Return pairs (route, earlier route) of indices where the earlier route takes every topic of the later one."""
    filters = [route.pattern.filter for route in routes]
    covering = ([i for i in range(n) if covers(filters[i], narrow)] for n, narrow in enumerate(filters))
    return [(index, earlier_routes[0]) for index, earlier_routes in enumerate(covering) if earlier_routes]


def subscriptions(routes: Sequence[Route]) -> tuple[Filter, ...]:
    """Return the fewest filters that deliver the messages of all routes.

    A broker may send a message once for each overlapping subscription of a client [MQTT-3.3.4-2], and each copy
    would become a record. So a filter that another one covers is dropped, and the covering one gets the higher QoS.
    """
    return _widest_filters([Filter(route.pattern.filter, route.qos) for route in routes])


def repeatable_filters(routes: Sequence[Route], filters: Iterable[str]) -> tuple[str, ...]:
    """Return the filters with messages only for routes that accept repeats."""
    all_repeatable = all(route.repeatable for route in routes)
    return tuple(text for text in filters if all_repeatable or _all_repeatable(routes, without_share(text)))


def _all_repeatable(routes: Sequence[Route], topic_filter: str) -> bool:
    for route in routes:
        shared_filter = common_filter(without_share(route.pattern.filter), topic_filter)
        if shared_filter is not None and not route.repeatable:
            return False
        if shared_filter == topic_filter:
            break
    return True


def restrict_filters(filters: Sequence[str], subscriptions: Sequence[Filter]) -> tuple[Filter, ...]:
    """Return the line's subscriptions restricted to the topics of some filters, each with its own options."""
    pairs = (
        (line_filter, common_filter(text, line_filter.pattern)) for line_filter in subscriptions for text in filters
    )
    return _widest_filters(
        [replace(line_filter, pattern=pattern) for line_filter, pattern in pairs if pattern is not None]
    )
