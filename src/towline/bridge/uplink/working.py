"""The columns that an uplink works with, between those of the source and those of the record; what is counted by them.

Counted on the way is why rows don't come to the sink, as far as nobody else knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from towline.bridge.config.routes import Route

__all__ = [
    "COUNTS",
    "FILTERED",
    "KEEP",
    "KEPT",
    "NAME",
    "PACKET",
    "REASON",
    "REFUSAL",
    "REJECT",
    "REPEATED",
    "ROUTE",
    "SAME",
    "STUB",
    "TOPIC",
    "UNROUTED",
    "WHERE",
    "reasons",
    "to_count",
]

#: Names of the working columns; a source column never begins with two underscores.
ROUTE, WHERE, REJECT, KEEP, NAME, TOPIC, REASON = (
    "__route",
    "__where",
    "__reject",
    "__keep",
    "__name",
    "__topic",
    "__reason",
)
#: Why a message is refused; the struct around it is null where finding that out raised an error.
REFUSAL: Final = f"{REJECT}.why"
#: The packet of a message that was not taken in whole, as it came; null where it was too large to be kept.
PACKET: Final = "__packet"
#: Whether a row is the stub of such a message (`towline.mqtt.stubs`): no payload of MQTT is null. Devices can't make
#: one, and whoever writes a condition or a key is not asked about it.
STUB: Final = "payload IS NULL"
#: What makes two messages the same: topic, key, and for those without a key the offset, which no other has. The topic,
#: because a device may write any key: on its own topics, which the broker guards, it can only drop its own [I13].
SAME: Final = ("__scope", "__dedupe", "__unique")
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
