"""Checks for packets that the `mqtt5` codec accepts or panics at, and MQTT 5 forbids.

There are three kinds of check, because the codec is written in Rust:

- before encoding: a PUBLISH longer than MQTT allows makes it panic;
- before decoding: ill-formed UTF-8 makes it panic, which prints on stderr whatever the caller does, and a value that
  ends beyond its Property Length takes the bytes there. `check_fields` reads the fields of a packet, each within its
  given length, and costs more than decoding. So PUBLISH, which comes by the thousand, is checked by its
  `publish_offsets`: ASCII only, and a payload that begins where the lengths say (`check_payload`);
- after decoding PUBLISH (`towline.mqtt.codec.check_run`), and before encoded bytes are sent.

All functions raise `MalformedPacket`, with the violated statement and the reason code for our DISCONNECT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

from mqtt5 import PublishPacket

#: Most user properties of a packet, and most subscription identifiers. One is 5 bytes on the wire at least and some
#: 280 as objects: 1,000 are 280 kB, and 64 MiB of them would be 3.6 GB. HTTP servers stop at 100 header fields
#: (Apache httpd LimitRequestFields, Tomcat maxHeaderCount).
MAX_PROPERTIES: Final = 1_000
#: Identifiers of the properties that may come more than once.
SUBSCRIPTION_ID, USER_PROPERTY = 0x0B, 0x26
#: First bytes of a PUBLISH, which determine its offsets: remaining length of up to two bytes, topic length.
PREFIX_BYTES: Final = 5
#: In place of a Property Length of more than one byte, or at an unknown position.
UNKNOWN_LENGTH: Final = 0x80
#: Properties of one byte that is 0 or 1: any other value is a protocol error [MQTT 5 section 3.2.2.3].
_BOOLEAN_PROPERTIES: Final = frozenset({0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A})
_TEXT_PROPERTIES: Final = frozenset({0x03, 0x08, 0x12, 0x15, 0x1A, 0x1C, 0x1F})
#: Bytes of the value of each property but the user property [MQTT 5 section 2.2.2.2]; `_LENGTH_PREFIXED` for one
#: behind a length of two bytes, `_VARIABLE_INTEGER` for a variable byte integer.
_LENGTH_PREFIXED, _VARIABLE_INTEGER = -1, 0
_VALUE_SIZES: Final = {
    **dict.fromkeys(_BOOLEAN_PROPERTIES, 1),
    **dict.fromkeys((0x13, 0x21, 0x22, 0x23), 2),
    **dict.fromkeys((0x02, 0x11, 0x18, 0x27), 4),
    **dict.fromkeys((*_TEXT_PROPERTIES, 0x09, 0x16), _LENGTH_PREFIXED),
    SUBSCRIPTION_ID: _VARIABLE_INTEGER,
}
_MAX_LENGTH_BYTES: Final = 4
#: Four bytes of seven bits each [MQTT-1.5.5-1].
MAX_REMAINING_LENGTH: Final = 268_435_455
#: A user property with both strings of 65,535 bytes.
_MAX_USER_PROPERTY_BYTES: Final = 5 + 2 * 65_535
#: Length of a payload that leaves room for every other field of a PUBLISH at its longest.
_SAFE_LENGTH: Final = MAX_REMAINING_LENGTH - 5 * (3 + 65_535)
_NULL_PROBLEM: Final = "a string with U+0000 [MQTT-1.5.4-2]"
_TOO_LONG: Final = "a field that ends behind the length given for it, which is too short [MQTT 5 sections 2.1.4, 2.2.2]"
#: Error text for packet id 0.
PACKET_ID_ZERO: Final = "packet id 0 [MQTT-2.2.1-3, -4]"

ReceivedBytes: TypeAlias = bytes | bytearray | memoryview
#: Offsets in a PUBLISH: its size, start and end of its topic, and its Property Length, or its payload in 3.x.
PublishOffsets: TypeAlias = tuple[int, int, int, int]


class MalformedPacket(ValueError):
    """Malformed MQTT packet, or one that the standard forbids.

    Attributes:
        reason: Reason code for our DISCONNECT: 0x81 malformed, 0x82 protocol error, 0x90 topic name invalid,
            0x94 topic alias invalid, 0x95 packet too large, 0x97 too many properties.
    """

    def __init__(self, problem: str, reason: int = 0x81) -> None:
        super().__init__(problem)
        self.reason = reason


class PacketTooLarge(ValueError):
    """Packet longer than the maximum remaining length [MQTT-1.5.5-1]."""


#: Error text of the codec for a readable packet that MQTT 5 forbids → reason code.
_CODEC_ERRORS: Final = (("Duplicate value", 0x82), ("Topic alias must be != 0", 0x94), ("must be != 0", 0x82))


def codec_error_reason(message: str) -> int:
    """Return the reason code for an error message of the codec."""
    return next((reason for excerpt, reason in _CODEC_ERRORS if excerpt in message), 0x81)


def is_panic(error: BaseException) -> bool:
    """Return whether the codec panicked; its exception class can't be imported."""
    return type(error).__name__ == "PanicException"


# Before decoding ------------------------------------------------------------------------------------------------------


def check_fields(packet: bytes) -> None:
    """Check the fields of one whole packet: each ends within its packet or property block, and text is valid.

    An unknown packet type, and bytes behind the last field, are left to the codec.

    Raises:
        MalformedPacket: A field exceeds its length, [MQTT-1.5.4-1], [MQTT-1.5.4-2] or a rule for its value (0x82); or
            more than `MAX_PROPERTIES` (0x97), for which the codec would create objects.
    """
    check = _FIELD_CHECKS.get(packet[0] >> 4)
    if check is not None:
        try:
            check(FieldReader(packet, read_varint(packet, 1)[1]), packet[0])
        except IndexError:
            raise MalformedPacket(_TOO_LONG) from None


def publish_offsets(prefix: bytes, *, properties: bool) -> PublishOffsets:
    """Return the field offsets of a PUBLISH from its first bytes.

    Args:
        prefix: The first `PREFIX_BYTES` bytes of the packet.
        properties: True if it has a Property Length: MQTT 5.

    Returns:
        Offsets from the packet's first byte; zeros if the prefix does not determine them, or they exceed the packet.
    """
    if len(prefix) < PREFIX_BYTES or (prefix[1] > 127 and not 0 < prefix[2] < 128):
        return 0, 0, 0, 0
    length, topic_length_at = (prefix[1], 2) if prefix[1] < 128 else (prefix[1] & 127 | prefix[2] << 7, 3)
    topic_end = topic_length_at + 2 + (prefix[topic_length_at] << 8 | prefix[topic_length_at + 1])
    properties_at = topic_end + (2 if prefix[0] & 6 else 0)
    return (
        (topic_length_at + length, topic_length_at + 2, topic_end, properties_at)
        if properties_at + properties <= topic_length_at + length
        else (0, 0, 0, 0)
    )


class PublishHead(NamedTuple):
    """Fields of a PUBLISH before its properties."""

    topic: bytes
    packet_id: int | None
    #: Bytes of the properties, and their position.
    properties_length: int
    properties_at: int


def publish_head(data: ReceivedBytes, at: int, header: int, *, properties: bool) -> PublishHead | None:
    """Read the fields after the remaining length; None if they are incomplete."""
    try:
        position = at + 2 + (data[at] << 8 | data[at + 1])
        topic, packet_id, properties_length = bytes(data[at + 2 : position]), None, 0
        if header & 6:
            packet_id = data[position] << 8 | data[position + 1]
            position += 2
        if properties:
            properties_length, position = read_varint(data, position)
    except IndexError:
        return None
    return PublishHead(topic, packet_id, properties_length, position) if position <= len(data) else None


def check_payload(packet: bytes, payload_length: int) -> None:
    """Refuse a PUBLISH whose payload did not begin where its Property Length says.

    Raises:
        MalformedPacket: A property value ended beyond the Property Length.
    """
    head = publish_head(packet, read_varint(packet, 1)[1], packet[0], properties=True)
    if head is None or head.properties_at + head.properties_length + payload_length != len(packet):
        raise MalformedPacket(_TOO_LONG)


def read_varint(data: ReceivedBytes, at: int) -> tuple[int, int]:
    """Return the variable byte integer at a position, and its end.

    Raises:
        IndexError: It is incomplete.
        MalformedPacket: It is longer than needed, or than four bytes [MQTT-1.5.5-1].
    """
    value = 0
    for index in range(_MAX_LENGTH_BYTES):
        byte = data[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            if not byte and index:
                raise MalformedPacket("a variable byte integer longer than needed [MQTT-1.5.5-1]")
            return value, at + index + 1
    raise MalformedPacket("a variable byte integer longer than four bytes [MQTT-1.5.5-1]")


def property_value_end(identifier: int, data: bytes, at: int) -> int:
    """Return the end of the property value that begins at a position.

    Raises:
        IndexError: Its length is incomplete.
        MalformedPacket: There is no such property with a single value.
    """
    size = _VALUE_SIZES.get(identifier)
    if size is None:
        raise MalformedPacket(f"property {identifier:#04x} is none of MQTT 5 [MQTT 5 section 2.2.2.2]")
    if size == _LENGTH_PREFIXED:
        return at + 2 + (data[at] << 8 | data[at + 1])
    return at + size if size else read_varint(data, at)[1]


def decode_text(data: bytes) -> str:
    """Decode strict UTF-8 without U+0000.

    Raises:
        MalformedPacket: [MQTT-1.5.4-1], [MQTT-1.5.4-2]; in MQTT 3.1.1 [MQTT-1.5.3-1], [MQTT-1.5.3-2].
    """
    try:
        string = str(data, "utf-8")
    except UnicodeDecodeError:
        raise MalformedPacket("ill-formed UTF-8 [MQTT-1.5.4-1]") from None
    if "\0" in string:
        raise MalformedPacket(_NULL_PROBLEM)
    return string


class FieldReader:
    """Sequential reader for the fields of one packet; none may end beyond the packet or its property block."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data = data
        self.position = position
        self._end_position = len(data)

    @property
    def remaining_bytes(self) -> int:
        """Number of bytes before the end."""
        return self._end_position - self.position

    def skip(self, count: int) -> int:
        """Skip bytes and return the position of the first one."""
        self.position += count
        if self.position > self._end_position:
            raise MalformedPacket(_TOO_LONG)
        return self.position - count

    def take_bytes(self, count: int) -> bytes:
        """Read that many bytes."""
        return self.data[self.skip(count) : self.position]

    def byte(self) -> int:
        """Read one byte."""
        return self.data[self.skip(1)]

    def uint16(self) -> int:
        """Read a two byte integer."""
        at = self.skip(2)
        return self.data[at] << 8 | self.data[at + 1]

    def variable_integer(self) -> int:
        """Read a variable byte integer."""
        value, end = read_varint(self.data, self.position)
        self.skip(end - self.position)
        return value

    def binary(self) -> bytes:
        """Read binary data with a two byte length."""
        at = self.skip(2)
        return self.data[self.skip(self.data[at] << 8 | self.data[at + 1]) : self.position]

    def string(self) -> str:
        """Read a UTF-8 encoded string."""
        return decode_text(self.binary())

    def packet_id(self) -> int:
        """Read a packet id, which is never 0 [MQTT-2.3.1-1]."""
        packet_id = self.uint16()
        if not packet_id:
            raise MalformedPacket(PACKET_ID_ZERO)
        return packet_id

    def check_end(self) -> None:
        """Refuse bytes behind the last field."""
        if self.remaining_bytes:
            raise MalformedPacket(f"Invalid remaining length: {self.remaining_bytes} bytes too many")

    def check_properties(self) -> None:
        """Check a block of properties behind its length."""
        length = self.variable_integer()
        packet_end, self._end_position = self._end_position, self.skip(length) + length
        self.position -= length
        user_properties = 0
        while self.remaining_bytes:
            identifier = self.variable_integer()
            if identifier == USER_PROPERTY:
                user_properties += 1
                if user_properties > MAX_PROPERTIES:
                    raise MalformedPacket(f"a packet with more than {MAX_PROPERTIES:,} user properties", 0x97)
                self.string()
                self.string()
            elif identifier in _TEXT_PROPERTIES:
                self.string()
            else:
                value_at = self.skip(property_value_end(identifier, self.data, self.position) - self.position)
                if identifier in _BOOLEAN_PROPERTIES and self.data[value_at] > 1:
                    raise MalformedPacket(
                        f"property {identifier:#04x} is neither 0 nor 1 [MQTT 5 section 2.2.2.2]", 0x82
                    )
        self._end_position = packet_end


def _check_publish(fields: FieldReader, header: int) -> None:
    fields.string()
    fields.skip(2 if header & 6 else 0)
    fields.check_properties()


def _ack_check(code_bytes: int, *, has_packet_id: bool = False) -> Callable[[FieldReader, int], None]:
    """Return a check for reason bytes and properties, both optional at the end [MQTT 5 section 3.4.2.1]."""

    def check_ack(fields: FieldReader, _header: int) -> None:
        if has_packet_id:
            fields.packet_id()
        fields.skip(min(code_bytes, fields.remaining_bytes))
        if fields.remaining_bytes:
            fields.check_properties()

    return check_ack


def _topic_filters_check(options_bytes: int) -> Callable[[FieldReader, int], None]:
    def check_filters(fields: FieldReader, _header: int) -> None:
        fields.packet_id()
        fields.check_properties()
        while fields.remaining_bytes:
            fields.string()
            fields.skip(options_bytes)

    return check_filters


def _check_connect(fields: FieldReader, _header: int) -> None:
    fields.string()
    fields.skip(1)
    flags = fields.byte()
    fields.skip(2)
    fields.check_properties()
    fields.string()
    if flags & 4:
        fields.check_properties()
        fields.string()
        fields.binary()
    if flags & 0x80:
        fields.string()


#: Packet type → check of its fields [MQTT 5 chapter 3].
_FIELD_CHECKS: Final[dict[int, Callable[[FieldReader, int], None]]] = {
    1: _check_connect,
    2: _ack_check(2),
    3: _check_publish,
    **dict.fromkeys((4, 5, 6, 7), _ack_check(1, has_packet_id=True)),
    8: _topic_filters_check(1),
    9: _ack_check(0, has_packet_id=True),
    10: _topic_filters_check(0),
    11: _ack_check(0, has_packet_id=True),
    14: _ack_check(1),
    15: _ack_check(1),
}


# Before encoding ------------------------------------------------------------------------------------------------------


def check_size(packet: PublishPacket) -> None:
    """Refuse a PUBLISH longer than MQTT allows, which makes the codec panic.

    Raises:
        PacketTooLarge: Above 268,435,455 bytes behind the fixed header.
    """
    if len(packet.payload) + _MAX_USER_PROPERTY_BYTES * len(packet.user_properties) <= _SAFE_LENGTH:
        return
    length = _publish_length(packet)
    if length > MAX_REMAINING_LENGTH:
        problem = f"a packet of {length:,} bytes behind its fixed header, MQTT ends at {MAX_REMAINING_LENGTH:,}"
        raise PacketTooLarge(f"{problem} [MQTT-1.5.5-1]")


def _publish_length(packet: PublishPacket) -> int:
    """Return the exact remaining length: a message of the largest size must pass."""
    texts = [*(part for pair in packet.user_properties for part in pair), packet.content_type, packet.response_topic]
    length = sum(len(text.encode()) for text in texts if text is not None)
    length += 5 * len(packet.user_properties) + sum(1 + _varint_size(i) for i in packet.subscription_ids)
    length += 3 * sum(value is not None for value in (packet.content_type, packet.response_topic, packet.topic_alias))
    length += 0 if packet.correlation_data is None else 3 + len(packet.correlation_data)
    length += (0 if packet.message_expiry_interval is None else 5) + (2 if packet.payload_format_indicator else 0)
    length += _varint_size(length) + len(packet.payload)
    return length + 2 + len(packet.topic.encode()) + 2 * bool(packet.packet_id)


def _varint_size(value: int) -> int:
    return next((size for size in range(1, _MAX_LENGTH_BYTES) if value < 1 << 7 * size), _MAX_LENGTH_BYTES)


# After decoding, or instead of it ----------------------------------------------------------------------


def check_topics(topics: Iterable[str]) -> None:
    """Refuse U+0000 and wildcards in topic names (0x90) with a `MalformedPacket`."""
    joined_topics = "".join(topics)
    if "\0" in joined_topics:
        raise MalformedPacket(_NULL_PROBLEM)
    if "#" in joined_topics or "+" in joined_topics:
        raise MalformedPacket("a topic name with a wildcard [MQTT-3.3.2-2]", 0x90)


def check_null(joined_text: str) -> None:
    """Refuse text with U+0000 by a `MalformedPacket`."""
    if "\0" in joined_text:
        raise MalformedPacket(_NULL_PROBLEM)
