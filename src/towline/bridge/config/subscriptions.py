"""Which filters a line subscribes to for its routes, and which of those cover each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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


def shadowed(routes: Sequence[SubscribedRoute]) -> list[tuple[int, int]]:
    """Pairs (route, earlier route) where the earlier one takes everything the route could."""
    pairs = []
    for later, route in enumerate(routes):
        above = next((i for i in range(later) if covers(routes[i].pattern, route.pattern)), None)
        if above is not None:
            pairs.append((later, above))
    return pairs


def subscriptions(routes: Sequence[SubscribedRoute]) -> tuple[Filter, ...]:
    """The fewest filters that bring every route its messages.

    A broker may send a message once for each overlapping subscription of a client [MQTT-3.3.4-2], and each copy
    would become a record; so a filter that another covers is left out, and the covering one gets the higher QoS.
    """
    kept: list[tuple[SubscribedRoute, int]] = []
    for route in routes:
        pattern, qos = route.pattern, route.qos
        rivals = [(r, q) for r, q in kept if r.pattern.share == pattern.share]
        if any(covers(r.pattern, pattern) for r, _ in rivals):
            kept = [(r, max(q, qos) if (r, q) in rivals and covers(r.pattern, pattern) else q) for r, q in kept]
            continue
        swallowed = [(r, q) for r, q in rivals if covers(pattern, r.pattern)]
        kept = [entry for entry in kept if entry not in swallowed]
        kept.append((route, max([qos, *(q for _, q in swallowed)])))
    return tuple(replace(route.terms, pattern=route.pattern.filter, qos=qos) for route, qos in kept)


def repeatable(routes: Sequence[SubscribedRoute], filters: Iterable[str]) -> tuple[str, ...]:
    """Filters of which all messages go by routes that bear a repeat."""
    return tuple(one for one in filters if _bear(routes, unshared(one)))


def _bear(routes: Sequence[SubscribedRoute], pattern: str) -> bool:
    taking = [(route, common(unshared(route.pattern.filter), pattern)) for route in routes]
    alone = next((at for at, (_, taken) in enumerate(taking, start=1) if taken == pattern), None)
    return all(route.repeatable for route, taken in taking[:alone] if taken is not None)


def at_odds(routes: Sequence[SubscribedRoute]) -> tuple[int, int] | None:
    """A route, and another whose filter covers its own and is subscribed with other options; None for no such pair."""
    for one, route in enumerate(routes):
        for other, wide in enumerate(routes):
            same_group = one != other and wide.pattern.share == route.pattern.share
            if same_group and covers(wide.pattern, route.pattern) and wide.terms != route.terms:
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
