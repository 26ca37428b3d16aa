"""Which filters a line subscribes to for its routes, and which of those cover each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Final

from towline.bridge.patterns import Pattern
from towline.bridge.routes import Route
from towline.mqtt.events import Filter
from towline.mqtt.filters import common, unshared

#: A subscription that says nothing of its own.
_NO_TERMS: Final = Filter("")


@dataclass(frozen=True, slots=True)
class SubscribedRoute(Route):
    """A route, and how its messages are asked for.

    Attributes:
        qos: Highest QoS to subscribe with.
        repeatable: Whether a message may come twice: that has a key, or at least once is all that is promised.
        terms: Further options of the subscription; its filter and QoS are not looked at.
    """

    qos: int = 0
    repeatable: bool = False
    terms: Filter = _NO_TERMS


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Whether every topic that ``narrow`` matches is matched by ``wide`` too."""
    inner = unshared(narrow.filter)
    return common(unshared(wide.filter), inner) == inner


def _within(route: SubscribedRoute, wide: SubscribedRoute) -> bool:
    """Whether the other's filter covers a route's, in the same share group."""
    return wide.pattern.share == route.pattern.share and covers(wide.pattern, route.pattern)


def shadowed(routes: Sequence[SubscribedRoute]) -> list[tuple[int, int]]:
    """Pairs (route, earlier route) where the earlier one takes everything the route could."""
    above = ([i for i in range(at) if covers(routes[i].pattern, one.pattern)] for at, one in enumerate(routes))
    return [(at, earlier[0]) for at, earlier in enumerate(above) if earlier]


def subscriptions(routes: Sequence[SubscribedRoute]) -> tuple[Filter, ...]:
    """The fewest filters that bring every route its messages.

    A broker may send a message once for each overlapping subscription of a client [MQTT-3.3.4-2], and each copy
    would become a record; so a filter that another covers is left out, and the covering one gets the higher QoS.
    """
    return tuple(
        replace(route.terms, pattern=route.pattern.filter, qos=max(one.qos for one in routes if _within(one, route)))
        for at, route in enumerate(routes)
        if not any(_within(route, one) and (i < at or not _within(one, route)) for i, one in enumerate(routes))
    )


def repeatable(routes: Sequence[SubscribedRoute], filters: Iterable[str]) -> tuple[str, ...]:
    """Filters of which all messages go by routes that bear a repeat."""
    return tuple(one for one in filters if _bear(routes, unshared(one)))


def _bear(routes: Sequence[SubscribedRoute], pattern: str) -> bool:
    taking = [(route, common(unshared(route.pattern.filter), pattern)) for route in routes]
    alone = next((at for at, (_, taken) in enumerate(taking, start=1) if taken == pattern), None)
    return all(route.repeatable for route, taken in taking[:alone] if taken is not None)


def at_odds(routes: Sequence[SubscribedRoute]) -> tuple[int, int] | None:
    """A route, and another whose filter covers its own and is subscribed with other options; None for no such pair."""
    for (one, route), (other, wide) in permutations(enumerate(routes), 2):
        if wide.terms != route.terms and _within(route, wide):
            return one, other
    return None


def restricted(filters: Sequence[str], subscriptions: Sequence[Filter]) -> tuple[Filter, ...]:
    """The subscriptions, as far as one of the filters takes their topics; each with the options of the line's own."""
    found: dict[str, Filter] = {}
    for wanted in subscriptions:
        for text in filters:
            pattern = common(text, wanted.pattern)
            if pattern is not None and (pattern not in found or found[pattern].qos < wanted.qos):
                found[pattern] = replace(wanted, pattern=pattern)
    below = {wide: [one for one in found.values() if common(wide, one.pattern) == one.pattern] for wide in found}
    return tuple(
        replace(one, qos=max(other.qos for other in below[pattern]))
        for pattern, one in found.items()
        if not any(one in below[other] for other in found if other != pattern)
    )
