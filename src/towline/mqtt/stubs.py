"""What is left of a PUBLISH that is not taken in whole: a stub, which has the message's place and not its content.

Two kinds of message would end a line for ever if they were refused, because the broker sends them again: one larger
than the limit on a packet, and one whose thousands of properties cost 50 times their size once they are objects. Of
either a `Stub` stands in its run, with the message's own topic, QoS, packet id and flags, so it is numbered, held,
stored and acknowledged like any other. Its payload is None, which no payload of MQTT can be. `towline.mqtt.codec` makes
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from mqtt5 import PublishPacket, QoS

#: Why there is only a stub: the values of ``towline-reason``.
TOO_LARGE: Final = "packet_too_large"
TOO_MANY: Final = "too_many_properties"
#: Names of the facts of a stub.
REASON, SIZE, DIGEST, COUNT = "towline-reason", "towline-size", "towline-sha256", "towline-properties"


@dataclass(frozen=True, slots=True)
class Stub:
    """A message that is not taken in whole; looks like a `mqtt5.PublishPacket`.

    Attributes:
        topic: Topic name; empty where only the alias says it.
        qos: As it came, and so the next four.
        retain: See above.
        duplicate: See above.
        packet_id: None for QoS 0.
        topic_alias: None for none.
        user_properties: The facts: ``towline-reason`` (`TOO_LARGE` or `TOO_MANY`), ``towline-size`` (bytes of the
            packet), ``towline-sha256`` (of its payload, hex), ``towline-properties`` (its user properties); then the
            message's own whose names begin with ``towline-``: the marks of a publisher that wants receipts.
        correlation_data: The whole packet as it came, None where it was larger than the limit.
    """

    topic: str
    qos: QoS
    retain: bool
    duplicate: bool
    packet_id: int | None
    topic_alias: int | None
    user_properties: list[tuple[str, str]]
    correlation_data: bytes | None

    payload: ClassVar[None] = None
    payload_format_indicator: ClassVar[int] = 0
    message_expiry_interval: ClassVar[None] = None
    content_type: ClassVar[None] = None
    response_topic: ClassVar[None] = None
    subscription_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def facts(self) -> bytes:
        """Tells a repeat from another message, as a payload does.

        Without reason and size: a server may say the same message in another number of bytes the next time, with or
        without a topic alias, and another limit may be set by then.
        """
        return repr([pair for pair in self.user_properties if pair[0] not in (REASON, SIZE)]).encode()

    @property
    def reason(self) -> str:
        """`TOO_LARGE` or `TOO_MANY`."""
        return self.user_properties[0][1]


#: What comes of a PUBLISH.
Published: TypeAlias = PublishPacket | Stub
