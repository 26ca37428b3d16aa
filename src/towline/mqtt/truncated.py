"""Truncated messages, in place of a PUBLISH that is too large or has too many properties.

Two kinds of message would block a line for ever if they were refused, because the broker sends them again: one larger
than the limit on a packet, and one whose thousands of properties cost 50 times their size as objects. A
`TruncatedMessage` takes the place of either in its run, with its topic, QoS, packet id and flags, so it is numbered,
stored and acknowledged like any other. Its payload is None, which no payload of MQTT can be.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from mqtt5 import PublishPacket, QoS

from towline.mqtt import checks, codec3
from towline.mqtt.checks import MAX_PROPERTIES, SUBSCRIPTION_ID, UNKNOWN_LENGTH, USER_PROPERTY

#: Reasons of a truncated message: the values of ``towline-reason``.
PACKET_TOO_LARGE: Final = "packet_too_large"
TOO_MANY_PROPERTIES: Final = "too_many_properties"
#: Names of the properties of a truncated message.
REASON_KEY, SIZE_KEY, DIGEST_KEY, COUNT_KEY = ("towline-reason", "towline-size", "towline-sha256", "towline-properties")


@dataclass(frozen=True, slots=True)
class TruncatedMessage:
    """Message without its content; has the attributes of a `mqtt5.PublishPacket`.

    Attributes:
        topic: Topic name; empty if only a topic alias was sent.
        qos, retain, duplicate, packet_id, topic_alias: As received; None for no packet id or alias.
        user_properties: The facts: ``towline-reason`` (`PACKET_TOO_LARGE` or `TOO_MANY_PROPERTIES`), ``towline-size``
            (bytes of the packet), ``towline-sha256`` (of its payload, hex), ``towline-properties`` (number of its user
            properties); then the message's own properties with a ``towline-`` name: the marks of a publisher that asks
            for receipts.
        correlation_data: The whole packet as received, None if it was larger than the limit.
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
    def comparable_facts(self) -> bytes:
        """Bytes that tell a repeat from another message, as a payload does.

        Without reason and size: a server may send the same message with another number of bytes the next time, with or
        without a topic alias, and the limit may have changed by then.
        """
        return repr([pair for pair in self.user_properties if pair[0] not in (REASON_KEY, SIZE_KEY)]).encode()

    @property
    def reason(self) -> str:
        """`PACKET_TOO_LARGE` or `TOO_MANY_PROPERTIES`."""
        return self.user_properties[0][1]


#: A received PUBLISH, whole or truncated.
ReceivedPublish: TypeAlias = PublishPacket | TruncatedMessage

#: Bytes of properties that can't exceed `MAX_PROPERTIES`: an identifier takes 2.
_SAFE_PROPERTIES_BYTES: Final = 2 * MAX_PROPERTIES
#: Prefix of the facts of a truncated message, and of the marks of publishers that ask for receipts.
_TOWLINE_PREFIX: Final = b"towline-"
_FACT_NAMES: Final = frozenset({REASON_KEY, SIZE_KEY, DIGEST_KEY, COUNT_KEY})
#: Most properties of the message with that prefix that are kept: a mark has two or three.
_MAX_MARK_PROPERTIES: Final = 8
#: Properties of PUBLISH beside the user property [MQTT 5 section 3.3.2.3].
_TOPIC_ALIAS: Final = 0x23
_PUBLISH_PROPERTIES: Final = frozenset({0x01, 0x02, 0x03, 0x08, 0x09, SUBSCRIPTION_ID, _TOPIC_ALIAS})


class PublishSkipper:
    """Reader that skips one PUBLISH: counts its properties, and buffers at most one incomplete property.

    Args:
        header: First byte of the packet.
        size: Bytes of the whole packet.
        remaining_bytes: Bytes behind the fixed header.
        has_properties: True if the protocol has properties: MQTT 5.

    Raises:
        ValueError: QoS 3, or DUP at QoS 0.
    """

    def __init__(self, header: int, size: int, remaining_bytes: int, *, has_properties: bool) -> None:
        flags = codec3.PUBLISH_FLAGS[header]
        if flags is None:
            raise ValueError(codec3.INVALID_PUBLISH_HEADER)
        #: First byte of the packet.
        self.header = header
        self._flags = flags
        self._size = size
        self._remaining_bytes = remaining_bytes
        self._has_properties = has_properties
        #: Bytes received before the head was complete.
        self._head_bytes = bytearray()
        self._head: checks.PublishHead | None = None
        #: Bytes of properties still to come, and an incomplete property.
        self._unread_properties, self._partial_property = 0, b""
        self._user_property_count = self._subscription_id_count = 0
        self._topic_alias: int | None = None
        #: Properties of the message with a ``towline-`` name.
        self._mark_properties: list[tuple[str, str]] = []
        self._payload_digest = hashlib.sha256()

    def feed(self, data: bytes) -> bytes:
        """Read received bytes and return those behind the packet.

        Raises:
            ValueError: They can't be a PUBLISH.
        """
        following_bytes = data[self._remaining_bytes :]
        data = data[: self._remaining_bytes]
        self._remaining_bytes -= len(data)
        if self._head is None:
            self._head_bytes += data
            self._head = head = checks.publish_head(self._head_bytes, 0, self.header, properties=self._has_properties)
            if head is None:
                if not self._remaining_bytes:
                    raise ValueError("PUBLISH is too short")
                return b""
            data = bytes(self._head_bytes[head.properties_at :])
            self._head_bytes.clear()
            if head.properties_length > len(data) + self._remaining_bytes:
                raise ValueError("a property length beyond the end of the packet [MQTT-2.2.2-1]")
            self._unread_properties = head.properties_length
        if self._unread_properties:
            property_bytes = data[: self._unread_properties]
            data = data[len(property_bytes) :]
            self._count_properties(property_bytes)
        self._payload_digest.update(data)
        return following_bytes

    def _count_properties(self, data: bytes) -> None:
        """Count the properties in these bytes."""
        self._unread_properties -= len(data)
        buffer = self._partial_property + data if self._partial_property else data
        at = property_at = user_properties = 0
        size, has_towline_names = len(buffer), _TOWLINE_PREFIX in buffer
        try:
            while at < size:  # 13 million times in 64 MiB
                property_at = at
                if buffer[at] == USER_PROPERTY:
                    value_at = at + 3 + (buffer[at + 1] << 8 | buffer[at + 2])
                    at = value_at + 2 + (buffer[value_at] << 8 | buffer[value_at + 1])
                    if at > size:
                        break
                    user_properties += 1
                    if has_towline_names and buffer.startswith(_TOWLINE_PREFIX, property_at + 3):
                        self._keep_mark_property(buffer[property_at + 3 : value_at], buffer[value_at + 2 : at])
                else:
                    at = self._skip_other_property(buffer[at], buffer, at)
        except IndexError:
            at = size + 1
        self._user_property_count += user_properties
        self._partial_property = buffer[property_at:] if at > size else b""
        if self._partial_property and not self._unread_properties:
            raise ValueError("a property longer than the property length says [MQTT-2.2.2-1]")

    def _skip_other_property(self, identifier: int, buffer: bytes, at: int) -> int:
        """Skip a property that is no user property, and return the start of the next one."""
        if identifier not in _PUBLISH_PROPERTIES:
            raise ValueError(f"property {identifier:#x} in PUBLISH [MQTT 5 section 2.2.2.2]")
        end = checks.property_value_end(identifier, buffer, at + 1)
        if identifier == _TOPIC_ALIAS:
            alias = buffer[at + 1] << 8 | buffer[at + 2]
            if self._topic_alias is not None:
                raise ValueError("two topic aliases [MQTT 5 section 3.3.2.3.4]")
            self._topic_alias = alias
        self._subscription_id_count += identifier == SUBSCRIPTION_ID
        return end

    def _keep_mark_property(self, raw_name: bytes, raw_value: bytes) -> None:
        name, text = str(raw_name, "utf-8"), str(raw_value, "utf-8")
        if name not in _FACT_NAMES and len(self._mark_properties) < _MAX_MARK_PROPERTIES:
            self._mark_properties.append((name, text))

    @property
    def is_complete(self) -> bool:
        """True after the last byte of the packet."""
        return not self._remaining_bytes

    @property
    def is_crowded(self) -> bool:
        """True for more than `MAX_PROPERTIES` of a kind."""
        return max(self._user_property_count, self._subscription_id_count) > MAX_PROPERTIES

    def to_truncated(self, reason: str = PACKET_TOO_LARGE, packet: bytes | None = None) -> TruncatedMessage:
        """Return the truncated message, once the packet is complete.

        Args:
            reason: `PACKET_TOO_LARGE` or `TOO_MANY_PROPERTIES`.
            packet: The whole packet, to be kept in the truncated message.

        Raises:
            ValueError: Its topic is not UTF-8, or empty without an alias.
        """
        head = self._head
        assert head is not None
        if not head.topic and self._topic_alias is None:
            raise ValueError("topic is empty [MQTT-4.7.3-1]")
        qos, _, duplicate, retain = self._flags
        topic, alias = checks.decode_text(head.topic), self._topic_alias
        pairs = [(REASON_KEY, reason), (SIZE_KEY, str(self._size)), (DIGEST_KEY, self._payload_digest.hexdigest())]
        pairs += [(COUNT_KEY, str(self._user_property_count)), *self._mark_properties]
        return TruncatedMessage(topic, qos, retain, duplicate, head.packet_id, alias, pairs, packet)


def truncate_crowded_publish(packet: memoryview, properties_length: int) -> TruncatedMessage | None:
    """Return a truncated message for a PUBLISH with more than `MAX_PROPERTIES`; None for one that may be decoded.

    Args:
        packet: The whole packet of MQTT 5.
        properties_length: Its Property Length, or `UNKNOWN_LENGTH` if that has more than one byte.

    Raises:
        ValueError: Its properties are malformed. Other errors are left to the codec.
    """
    if properties_length < UNKNOWN_LENGTH:
        return None
    header, (_, head_at) = packet[0], checks.read_varint(packet, 1)
    head = checks.publish_head(packet, head_at, header, properties=True)
    if head is None or head.properties_length <= _SAFE_PROPERTIES_BYTES:
        return None
    payload_at = head.properties_at + head.properties_length
    skipper = PublishSkipper(header, len(packet), len(packet) - head_at, has_properties=True)
    skipper.feed(bytes(packet[head_at : head.properties_at]))
    skipper.feed(bytes(packet[head.properties_at : payload_at]))
    if not skipper.is_crowded:
        return None
    skipper.feed(bytes(packet[payload_at:]))
    return skipper.to_truncated(TOO_MANY_PROPERTIES, bytes(packet))
