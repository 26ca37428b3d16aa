"""Outbound message without a packet id, which the session assigns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mqtt5 import PublishPacket, QoS

from towline.mqtt import checks

#: Message Expiry Interval is a four byte integer [MQTT 5 section 3.3.2.3.3].
MAX_EXPIRY_S: Final = 0xFFFFFFFF
#: Bytes of a payload that is too expensive to copy.
LARGE_PAYLOAD_BYTES: Final = 1 << 20
#: The codec builds no PUBLISH of QoS > 0 without a packet id; this one is never sent.
_PLACEHOLDER_ID: Final = 1
_QOS_LEVELS: Final = (QoS.AT_MOST_ONCE, QoS.AT_LEAST_ONCE, QoS.EXACTLY_ONCE)


class OutboundMessage:
    """Content of a PUBLISH: the arguments of `mqtt5.PublishPacket` that do not depend on the connection.

    Raises:
        PacketTooLarge: Longer than a packet can be (`towline.mqtt.checks`).
        ValueError: MQTT can't carry it; as TypeError and OverflowError, and the codec's panics.
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
            qos=_QOS_LEVELS[qos],
            retain=retain,
            packet_id=_PLACEHOLDER_ID if qos else None,
            payload_format_indicator=payload_format_indicator,
            message_expiry_interval=message_expiry_interval,
            content_type=content_type,
            response_topic=response_topic,
            correlation_data=correlation_data,
            user_properties=user_properties if isinstance(user_properties, list) else list(user_properties),
        )
        checks.check_size(self._packet)
        #: Topic name.
        self.topic = topic
        #: QoS 0, 1 or 2.
        self.qos = qos
        #: RETAIN flag.
        self.retain = retain
        #: Packet to encode and change by `with_packet_id`; None where that would copy a large payload.
        self.template = self._packet if len(payload) <= LARGE_PAYLOAD_BYTES else None

    @property
    def message_expiry_interval(self) -> int | None:
        """Message expiry interval in seconds; None for no expiry."""
        return self._packet.message_expiry_interval

    def to_packet(self, packet_id: int, expiry_interval_s: int | None, *, is_duplicate: bool = False) -> PublishPacket:
        """Return the PUBLISH packet.

        Args:
            packet_id: Packet id; 0 for QoS 0.
            expiry_interval_s: Remaining message expiry interval in seconds.
            is_duplicate: True if it was sent before (DUP).
        """
        packet = self._packet
        return PublishPacket(
            packet.topic,
            packet.payload,
            qos=packet.qos,
            retain=packet.retain,
            packet_id=packet_id or None,
            duplicate=is_duplicate,
            payload_format_indicator=packet.payload_format_indicator,
            message_expiry_interval=expiry_interval_s,
            content_type=packet.content_type,
            response_topic=packet.response_topic,
            correlation_data=packet.correlation_data,
            user_properties=packet.user_properties,
        )

    @staticmethod
    def with_packet_id(data: bytes, packet_id: int) -> bytes:
        """Return the bytes of a `template` with another packet id, the field after the topic [MQTT 5 section 3.3.2.2].

        Encoding the packet again costs five times as much.
        """
        position = 2
        while data[position - 1] & 0x80:  # remaining length, a variable byte integer
            position += 1
        position += 2 + (data[position] << 8 | data[position + 1])
        return b"".join((data[:position], packet_id.to_bytes(2, "big"), data[position + 2 :]))
