"""Names of the columns that an uplink works with, between those of the source and those of the record."""

from __future__ import annotations

from typing import Final

__all__ = [
    "KEEP",
    "NAME",
    "PACKET",
    "REASON",
    "REFUSAL",
    "REJECT",
    "ROUTE",
    "SAME",
    "STUB",
    "TOPIC",
    "WHERE",
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
