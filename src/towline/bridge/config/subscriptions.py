"""MQTT subscriptions of a line: the filters of its routes, without filters covered by another. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from towline.bridge.patterns import Pattern
from towline.bridge.routes import Route
from towline.mqtt.events import Filter
from towline.mqtt.filters import common_filter, without_share


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Return whether every topic that ``narrow`` matches is also matched by ``wide``, share groups aside."""
    narrow_filter = without_share(narrow.filter)
    return common_filter(without_share(wide.filter), narrow_filter) == narrow_filter


def shadowed_routes(routes: Sequence[Route]) -> list[tuple[int, int]]:
    """Return pairs (route, earlier route) of indices where the earlier route takes every topic of the later one."""
    covering = ([i for i in range(n) if covers(routes[i].pattern, route.pattern)] for n, route in enumerate(routes))
    return [(index, earlier_routes[0]) for index, earlier_routes in enumerate(covering) if earlier_routes]


def subscriptions(routes: Sequence[Route]) -> tuple[Filter, ...]:
    """Return the fewest filters that deliver the messages of all routes.

    A broker may send a message once for each overlapping subscription of a client [MQTT-3.3.4-2], and each copy
    would become a record. So a filter that another one covers is dropped, and the covering one gets the higher QoS.
    """
    patterns, filters = [route.pattern for route in routes], list[Filter]()
    covering = [[i for i, wide in enumerate(patterns) if wide.share == p.share and covers(wide, p)] for p in patterns]
    for index, route in enumerate(routes):
        if not any(i < index or index not in covering[i] for i in covering[index] if i != index):
            qos = max(routes[i].qos for i, cover in enumerate(covering) if index in cover)
            filters.append(Filter(route.pattern.filter, qos))
    return tuple(filters)


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
    by_filter: dict[str, Filter] = {}
    for line_filter in subscriptions:
        for topic_filter in filters:
            pattern = common_filter(topic_filter, line_filter.pattern)
            if pattern is not None and (pattern not in by_filter or by_filter[pattern].qos < line_filter.qos):
                by_filter[pattern] = replace(line_filter, pattern=pattern)
    narrower = {
        wide: [
            candidate for candidate in by_filter.values() if common_filter(wide, candidate.pattern) == candidate.pattern
        ]
        for wide in by_filter
    }
    return tuple(
        replace(subscription, qos=max(inner.qos for inner in narrower[pattern]))
        for pattern, subscription in by_filter.items()
        if not any(subscription in narrower[outer] for outer in by_filter if outer != pattern)
    )
