"""Which filters a line subscribes to for its routes, and which of those cover each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from towline.bridge.patterns import Pattern
from towline.bridge.routes import Route
from towline.mqtt.events import Filter
from towline.mqtt.filters import common, unshared


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribedRoute(Route):
    """A route, and how its messages are asked for.

    Attributes:
        subscription: What it alone would be subscribed with.
        repeatable: Whether a message may come twice: that has a key, or at least once is all that is promised.
    """

    subscription: Filter
    repeatable: bool = False


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Whether every topic that ``narrow`` matches is matched by ``wide`` too."""
    levels, inner = wide.levels, narrow.levels
    if len(inner) < len(levels) or (not wide.deep and (narrow.deep or len(inner) > len(levels))):
        return False
    hidden = bool(inner) and (inner[0] or "").startswith("$") and (not levels or levels[0] is None)  # [MQTT-4.7.2-1]
    return not hidden and all(level is None or level == other for level, other in zip(levels, inner, strict=False))


def _wider(routes: Sequence[SubscribedRoute]) -> list[list[int]]:
    """Of each route the routes, itself too, whose filters cover its own in the same share group."""
    patterns = [route.pattern for route in routes]
    return [
        [at for at, wide in enumerate(patterns) if wide.share == pattern.share and covers(wide, pattern)]
        for pattern in patterns
    ]


def shadowed(routes: Sequence[SubscribedRoute]) -> list[tuple[int, int]]:
    """Pairs (route, earlier route) where the earlier one takes everything the route could."""
    above = ([i for i in range(at) if covers(routes[i].pattern, one.pattern)] for at, one in enumerate(routes))
    return [(at, earlier[0]) for at, earlier in enumerate(above) if earlier]


def subscriptions(routes: Sequence[SubscribedRoute]) -> tuple[Filter, ...]:
    """The fewest filters that bring every route its messages.

    A broker may send a message once for each overlapping subscription of a client [MQTT-3.3.4-2], and each copy
    would become a record; so a filter that another covers is left out, and the covering one gets the higher QoS.
    """
    wider, found = _wider(routes), dict[int, Filter]()
    for at, above in enumerate(wider):
        if not any(i < at or at not in wider[i] for i in above if i != at):
            found[at] = routes[at].subscription
    for at, above in enumerate(wider):
        for i in found.keys() & above:
            found[i] = replace(found[i], qos=max(found[i].qos, routes[at].subscription.qos))
    return tuple(found.values())


def repeatable(routes: Sequence[SubscribedRoute], filters: Iterable[str]) -> tuple[str, ...]:
    """Filters of which all messages go by routes that bear a repeat."""
    every = all(route.repeatable for route in routes)
    return tuple(one for one in filters if every or _bear(routes, unshared(one)))


def _bear(routes: Sequence[SubscribedRoute], pattern: str) -> bool:
    for route in routes:
        taken = common(unshared(route.pattern.filter), pattern)
        if taken is not None and not route.repeatable:
            return False
        if taken == pattern:
            break
    return True


def at_odds(routes: Sequence[SubscribedRoute]) -> tuple[int, int] | None:
    """A route, and another whose filter covers its own and is subscribed with other options; None for no such pair."""
    terms = [replace(route.subscription, pattern="", qos=0) for route in routes]
    if len({*terms}) < 2:
        return None
    pairs = ((at, wide) for at, above in enumerate(_wider(routes)) for wide in above)
    return next(((at, wide) for at, wide in pairs if terms[at] != terms[wide]), None)


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
