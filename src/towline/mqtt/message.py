"""A message to be published, without the packet id it leaves under: that is the session's to give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mqtt5 import PublishPacket, QoS

from towline.mqtt import fence

#: Message Expiry Interval is a four byte integer [MQTT 5 section 3.3.2.3.3].
LONGEST_EXPIRY: Final = 0xFFFFFFFF
#: Bytes of a payload whose copy would be felt.
LARGE: Final = 1 << 20
#: The codec makes no PUBLISH of QoS > 0 without a packet id; this one never leaves.
_PLACEHOLDER: Final = 1
_LEVELS: Final = (QoS.AT_MOST_ONCE, QoS.AT_LEAST_ONCE, QoS.EXACTLY_ONCE)


class OutboundMessage:
    """What a PUBLISH says; the arguments are those of `mqtt5.PublishPacket` that are not the connection's own.

    Raises:
        PacketTooLarge: Longer than a packet can be (`towline.mqtt.fence`).
        ValueError: MQTT has no way to say it; as TypeError and OverflowError, and the codec's panics.
    """

    __slots__ = ("_packet", "qos", "retain", "template", "topic")

    def __init__(
        self,
        topic: str,
        payload: bytes = b"",
        *,
        qos: int = 0,
        retain: bool = False,
        payload_format_indicator: int = 0,
        message_expiry_interval: int | None = None,
        content_type: str | None = None,
        response_topic: str | None = None,
        correlation_data: bytes | None = None,
        user_properties: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._packet = PublishPacket(
            topic,
            payload,
            qos=_LEVELS[qos],
            retain=retain,
            packet_id=_PLACEHOLDER if qos else None,
            payload_format_indicator=payload_format_indicator,
            message_expiry_interval=message_expiry_interval,
            content_type=content_type,
            response_topic=response_topic,
            correlation_data=correlation_data,
            user_properties=user_properties if isinstance(user_properties, list) else list(user_properties),
        )
        fence.check_size(self._packet)
        #: Where it goes.
        self.topic = topic
        #: 0, 1 or 2.
        self.qos = qos
        #: The broker keeps it for later subscribers.
        self.retain = retain
        #: The packet, whose bytes are made right by `renumbered`; None where that would copy a large payload.
        self.template = self._packet if len(payload) <= LARGE else None

    @property
    def message_expiry_interval(self) -> int | None:
        """Seconds after which nobody gets it any more, None for never."""
        return self._packet.message_expiry_interval

    def packet(self, packet_id: int, interval: int | None, *, duplicate: bool = False) -> PublishPacket:
        """The PUBLISH.

        Args:
            packet_id: 0 for QoS 0.
            interval: Message expiry interval: what is left of it.
            duplicate: It was sent before.
        """
        packet = self._packet
        return PublishPacket(
            packet.topic,
            packet.payload,
            qos=packet.qos,
            retain=packet.retain,
            packet_id=packet_id or None,
            duplicate=duplicate,
            payload_format_indicator=packet.payload_format_indicator,
            message_expiry_interval=interval,
            content_type=packet.content_type,
            response_topic=packet.response_topic,
            correlation_data=packet.correlation_data,
            user_properties=packet.user_properties,
        )

    @staticmethod
    def renumbered(data: bytes, packet_id: int) -> bytes:
        """The bytes of a `template` under another packet id: it stands behind the topic name [MQTT 5 section 3.3.2.2].

        Making the packet anew costs five times as much.
        """
        at = 2
        while data[at - 1] & 0x80:  # remaining length, a variable byte integer
            at += 1
        at += 2 + (data[at] << 8 | data[at + 1])
        return b"".join((data[:at], packet_id.to_bytes(2, "big"), data[at + 2 :]))
