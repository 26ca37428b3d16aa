"""Why rows of a line don't come to its sink, and what of that has to be counted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from towline.bridge.uplink.working import KEEP, REASON, ROUTE, TOPIC

if TYPE_CHECKING:
    from towline.bridge.config.routes import Route

__all__ = [
    "COUNTS",
    "FILTERED",
    "KEPT",
    "REPEATED",
    "UNROUTED",
    "reasons",
    "to_count",
]

#: Why a row may not come to the sink.
FILTERED, UNROUTED, REPEATED = "filtered", "unrouted", "deduplicated"
#: What is counted by `observe`, of all rows: name → SQL aggregate.
COUNTS: Final = {
    FILTERED: f"count_if({ROUTE} IS NOT NULL AND NOT {KEEP} AND {REASON} IS NULL)",
    UNROUTED: f"count_if({ROUTE} IS NULL AND {REASON} IS NULL)",
}
#: The same of the rows that go on to Kafka, repeats dropped.
KEPT: Final = {
    "fallback": f"count_if({KEEP} AND {TOPIC} IS NULL AND {REASON} IS NULL)",
    "dead_lettered": f"count_if({REASON} IS NOT NULL)",
}


def reasons(routes: Sequence[Route], *, dead_letters: bool, repeats: bool) -> list[str]:
    """Why rows of a line may not come to its sink.

    A topic that no route takes may come whatever the routes are: of a subscription that the line has given up since.
    """
    possible = {
        FILTERED: any(route.where is not None for route in routes),
        UNROUTED: not dead_letters,
        REPEATED: repeats,
    }
    return [reason for reason, may in possible.items() if may]


def to_count(
    routes: Sequence[Route], *, dead_letters: bool, repeats: bool, sink_counts: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """What has to be counted on the way, because nobody else knows it: before repeats are dropped, and after that.

    Where one reason is left, its rows are those that went in and did not come to the sink. To count rows on their way
    costs as much as to map them.

    Args:
        routes: Of the line.
        dead_letters: It has a dead-letter topic.
        repeats: It drops repeats.
        sink_counts: The sink counts dead letters.
    """
    why = reasons(routes, dead_letters=dead_letters, repeats=repeats)
    before = {name: COUNTS[name] for name in why if name in COUNTS} if len(why) > 1 else {}
    some = {
        "fallback": any(route.fallback_topic is not None for route in routes),
        "dead_lettered": dead_letters and not sink_counts,
    }
    after = {name: KEPT[name] for name, wanted in some.items() if wanted}
    return (before, after) if repeats else ({**before, **after}, {})
