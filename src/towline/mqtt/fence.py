"""What the `mqtt5` codec lets pass, or dies of, and MQTT 5 forbids.

Three kinds of check, because the codec is written in Rust:

- before it writes: a packet longer than MQTT can say makes it panic;
- before it reads: ill-formed UTF-8 makes it panic, which prints on stderr whatever the caller does, and a value that
  ends behind its Property Length takes what stands there. `check_fields` walks the fields of a packet, each within the
  length it was given, and costs more than decoding it; so the decoder looks at PUBLISH, which comes by the thousand,
  by its `publish_shape`: nothing but ASCII, and a payload that begins where the lengths say (`check_payload`);
- after it has read PUBLISH (`towline.mqtt.codec.check_run`), and before what it has written leaves.

All functions raise `MalformedPacket`, with the statement that was broken and the reason code for our DISCONNECT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

import mqtt5
from mqtt5 import PublishPacket

#: Most user properties of a packet, and most subscription identifiers. One is 5 bytes on the wire at least and some
#: 280 as objects: 1,000 are 280 kB, and 64 MiB of them would be 3.6 GB. HTTP servers stop at 100 header fields
#: (Apache httpd LimitRequestFields, Tomcat maxHeaderCount).
MAX_PROPERTIES: Final = 1_000
#: Identifiers of the properties that may come more than once.
SUBSCRIPTION_ID, USER_PROPERTY = 0x0B, 0x26
#: First bytes of a PUBLISH that say where its Property Length is: remaining length of up to two bytes, topic length.
SHAPE_KEY: Final = 5
#: A Property Length that is none: of more than one byte, or of a packet of which is not known where it stands.
UNKNOWN_LENGTH: Final = 0x80
#: Properties of one byte that is 0 or 1: any other value is a protocol error [MQTT 5 section 3.2.2.3].
_BITS: Final = frozenset({0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A})
_TEXT: Final = frozenset({0x03, 0x08, 0x12, 0x15, 0x1A, 0x1C, 0x1F})
#: Bytes of the value of each property but the user property [MQTT 5 section 2.2.2.2]; `_COUNTED` for one behind a
#: length of two bytes, `_VARIABLE` for a variable byte integer.
_COUNTED, _VARIABLE = -1, 0
_VALUES: Final = {
    **dict.fromkeys(_BITS, 1),
    **dict.fromkeys((0x13, 0x21, 0x22, 0x23), 2),
    **dict.fromkeys((0x02, 0x11, 0x18, 0x27), 4),
    **dict.fromkeys((*_TEXT, 0x09, 0x16), _COUNTED),
    SUBSCRIPTION_ID: _VARIABLE,
}
_MAX_LENGTH_BYTES: Final = 4
#: Four bytes of seven bits each [MQTT-1.5.5-1].
MAX_REMAINING_LENGTH: Final = 268_435_455
#: A user property with both strings of 65,535 bytes.
_LONGEST_PAIR: Final = 5 + 2 * 65_535
#: Every string of CONNECT at its longest: client id, user name, password, two of authentication, five of the will.
_FEW_STRINGS: Final = 12 * (3 + 65_535)
_SURELY_FITS: Final = MAX_REMAINING_LENGTH - _FEW_STRINGS
_NULL: Final = "a string with U+0000 [MQTT-1.5.4-2]"
_BEYOND: Final = "a field that ends behind the length given for it, which is too short [MQTT 5 sections 2.1.4, 2.2.2]"
#: What is wrong with a packet id that is none.
ID_ZERO: Final = "packet id 0 [MQTT-2.2.1-3, -4]"

Received: TypeAlias = bytes | bytearray | memoryview
#: Of a PUBLISH: its size, where its topic begins and ends, and where its Property Length stands, or its payload.
Shape: TypeAlias = tuple[int, int, int, int]


class MalformedPacket(ValueError):
    """Bytes that are no MQTT packet, or one that the standard forbids.

    Attributes:
        reason: Reason code for our DISCONNECT: 0x81 malformed, 0x82 protocol error, 0x90 topic name invalid,
            0x94 topic alias invalid, 0x95 packet too large, 0x97 too many properties.
    """

    def __init__(self, what: str, reason: int = 0x81) -> None:
        super().__init__(what)
        self.reason = reason


class PacketTooLarge(ValueError):
    """A packet longer than MQTT has a length for [MQTT-1.5.5-1]."""


#: What the codec says of a packet that it could read, and MQTT 5 forbids → reason code.
_SAID: Final = (("Duplicate value", 0x82), ("Topic alias must be != 0", 0x94), ("must be != 0", 0x82))


def reason_of(said: str) -> int:
    """The reason code for a packet that the codec refused with these words."""
    return next((reason for words, reason in _SAID if words in said), 0x81)


def is_panic(error: BaseException) -> bool:
    """Whether the codec died of something; its exception has no name that could be imported."""
    return type(error).__name__ == "PanicException"


# Before reading ------------------------------------------------------------------------------------------------------


def check_fields(packet: bytes) -> None:
    """Walk the fields of one whole packet: no field ends behind its packet or block of properties, text is sound.

    What is no packet, and bytes behind its last field, the codec refuses.

    Raises:
        MalformedPacket: A field breaks its length, [MQTT-1.5.4-1], [MQTT-1.5.4-2] or a rule for its value (0x82); or
            more than `MAX_PROPERTIES` (0x97), which the codec would make objects of.
    """
    layout = _LAYOUT.get(packet[0] >> 4)
    if layout is not None:
        try:
            layout(Body(packet, variable_integer(packet, 1)[1]), packet[0])
        except IndexError:
            raise MalformedPacket(_BEYOND) from None


def publish_shape(key: bytes, *, properties: bool) -> Shape:
    """The shape of a PUBLISH by its first bytes.

    Args:
        key: The first `SHAPE_KEY` bytes of it.
        properties: It has a Property Length: MQTT 5.

    Returns:
        All from the packet's first byte on; zeros where they don't say it, or it would stand behind the packet.
    """
    if len(key) < SHAPE_KEY or (key[1] > 127 and not 0 < key[2] < 128):
        return 0, 0, 0, 0
    length, at = (key[1], 2) if key[1] < 128 else (key[1] & 127 | key[2] << 7, 3)
    end = at + 2 + (key[at] << 8 | key[at + 1])
    place = end + (2 if key[0] & 6 else 0)
    return (at + length, at + 2, end, place) if place + properties <= at + length else (0, 0, 0, 0)


class PublishHead(NamedTuple):
    """A PUBLISH up to where its properties begin."""

    topic: bytes
    packet_id: int | None
    #: Bytes of the properties, and where they begin.
    length: int
    at: int


def publish_head(data: Received, at: int, header: int, *, properties: bool) -> PublishHead | None:
    """Read what follows the remaining length at `at`; None when it has not arrived."""
    try:
        end = at + 2 + (data[at] << 8 | data[at + 1])
        topic, packet_id, length = bytes(data[at + 2 : end]), None, 0
        if header & 6:
            packet_id = data[end] << 8 | data[end + 1]
            end += 2
        if properties:
            length, end = variable_integer(data, end)
    except IndexError:
        return None
    return PublishHead(topic, packet_id, length, end) if end <= len(data) else None


def check_payload(packet: bytes, payload: int) -> None:
    """Refuse a PUBLISH whose payload, of so many bytes, did not begin where its Property Length says.

    Raises:
        MalformedPacket: The value of a property ended behind it.
    """
    head = publish_head(packet, variable_integer(packet, 1)[1], packet[0], properties=True)
    if head is None or head.at + head.length + payload != len(packet):
        raise MalformedPacket(_BEYOND)


def variable_integer(data: Received, at: int) -> tuple[int, int]:
    """The variable byte integer at `at`, and where it ends.

    Raises:
        IndexError: It has not arrived.
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


def end_of_value(kind: int, data: bytes, at: int) -> int:
    """Where the value of a property ends that begins at `at`.

    Raises:
        IndexError: Its length has not arrived.
        MalformedPacket: There is no such property of one value.
    """
    size = _VALUES.get(kind)
    if size is None:
        raise MalformedPacket(f"property {kind:#04x} is none of MQTT 5 [MQTT 5 section 2.2.2.2]")
    if size == _COUNTED:
        return at + 2 + (data[at] << 8 | data[at + 1])
    return at + size if size else variable_integer(data, at)[1]


def text(raw: bytes) -> str:
    """Strict UTF-8 without U+0000.

    Raises:
        MalformedPacket: [MQTT-1.5.4-1], [MQTT-1.5.4-2]; in MQTT 3.1.1 [MQTT-1.5.3-1], [MQTT-1.5.3-2].
    """
    try:
        decoded = str(raw, "utf-8")
    except UnicodeDecodeError:
        raise MalformedPacket("ill-formed UTF-8 [MQTT-1.5.4-1]") from None
    if "\0" in decoded:
        raise MalformedPacket(_NULL)
    return decoded


class Body:
    """Fields of one packet, read from left to right, none behind its end or that of the properties being read."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at
        self._end = len(data)

    @property
    def left(self) -> int:
        """Bytes before the end."""
        return self._end - self.at

    def skip(self, count: int) -> int:
        """Step over bytes, and return where they begin."""
        self.at += count
        if self.at > self._end:
            raise MalformedPacket(_BEYOND)
        return self.at - count

    def take(self, count: int) -> bytes:
        """The next bytes."""
        return self.data[self.skip(count) : self.at]

    def byte(self) -> int:
        """A byte."""
        return self.data[self.skip(1)]

    def word(self) -> int:
        """A two byte integer."""
        at = self.skip(2)
        return self.data[at] << 8 | self.data[at + 1]

    def integer(self) -> int:
        """A variable byte integer."""
        value, end = variable_integer(self.data, self.at)
        self.skip(end - self.at)
        return value

    def binary(self) -> bytes:
        """Binary data behind their two byte length."""
        at = self.skip(2)
        return self.data[self.skip(self.data[at] << 8 | self.data[at + 1]) : self.at]

    def string(self) -> str:
        """A UTF-8 encoded string."""
        return text(self.binary())

    def packet_id(self) -> int:
        """A packet id is never 0 [MQTT-2.3.1-1]."""
        number = self.word()
        if not number:
            raise MalformedPacket(ID_ZERO)
        return number

    def end(self) -> None:
        """Refuse bytes behind the last field."""
        if self.left:
            raise MalformedPacket(f"Invalid remaining length: {self.left} bytes too many")

    def properties(self) -> None:
        """Walk a block of properties behind its length."""
        length = self.integer()
        after, self._end = self._end, self.skip(length) + length
        self.at -= length
        users = 0
        while self.left:
            kind = self.integer()
            if kind == USER_PROPERTY:
                users += 1
                if users > MAX_PROPERTIES:
                    raise MalformedPacket(f"a packet with more than {MAX_PROPERTIES:,} user properties", 0x97)
                self.string()
                self.string()
            elif kind in _TEXT:
                self.string()
            else:
                at = self.skip(end_of_value(kind, self.data, self.at) - self.at)
                if kind in _BITS and self.data[at] > 1:
                    raise MalformedPacket(f"property {kind:#04x} is neither 0 nor 1 [MQTT 5 section 2.2.2.2]", 0x82)
        self._end = after


def _publish(walk: Body, header: int) -> None:
    walk.string()
    walk.skip(2 if header & 6 else 0)
    walk.properties()


def _properties_after(count: int, *, numbered: bool = False) -> Callable[[Body, int], None]:
    """Fields of so many bytes, of which the last may be missing where no properties follow [MQTT 5 section 3.4.2.1].

    Before them stands a packet id where the packets are `numbered`.
    """

    def layout(walk: Body, _header: int) -> None:
        if numbered:
            walk.packet_id()
        walk.skip(min(count, walk.left))
        if walk.left:
            walk.properties()

    return layout


def _filters(options: int) -> Callable[[Body, int], None]:
    def layout(walk: Body, _header: int) -> None:
        walk.packet_id()
        walk.properties()
        while walk.left:
            walk.string()
            walk.skip(options)

    return layout


def _connect(walk: Body, _header: int) -> None:
    walk.string()
    walk.skip(1)
    flags = walk.byte()
    walk.skip(2)
    walk.properties()
    walk.string()
    if flags & 4:
        walk.properties()
        walk.string()
        walk.binary()
    if flags & 0x80:
        walk.string()


#: Packet type → the walk over its fields [MQTT 5 chapter 3].
_LAYOUT: Final[dict[int, Callable[[Body, int], None]]] = {
    1: _connect,
    2: _properties_after(2),
    3: _publish,
    **dict.fromkeys((4, 5, 6, 7), _properties_after(1, numbered=True)),
    8: _filters(1),
    9: _properties_after(0, numbered=True),
    10: _filters(0),
    11: _properties_after(0, numbered=True),
    14: _properties_after(1),
    15: _properties_after(1),
}


# Before writing ------------------------------------------------------------------------------------------------------


def check_size(packet: mqtt5.Packet) -> None:
    """Refuse what is longer than a packet can be, which makes the codec panic.

    Raises:
        PacketTooLarge: Above 268,435,455 bytes behind the fixed header.
    """
    if isinstance(packet, PublishPacket):
        if len(packet.payload) + _LONGEST_PAIR * len(packet.user_properties) <= _SURELY_FITS:
            return
        length = _publish_length(packet)
    else:
        length = _at_most(packet)
    if length > MAX_REMAINING_LENGTH:
        what = f"a packet of {length:,} bytes behind its fixed header, MQTT ends at {MAX_REMAINING_LENGTH:,}"
        raise PacketTooLarge(f"{what} [MQTT-1.5.5-1]")


def _publish_length(packet: PublishPacket) -> int:
    """The remaining length, to the byte: a message of the largest size has to pass."""
    texts = [*(part for pair in packet.user_properties for part in pair), packet.content_type, packet.response_topic]
    length = sum(len(text.encode()) for text in texts if text is not None)
    length += 5 * len(packet.user_properties) + sum(1 + _varint(i) for i in packet.subscription_ids)
    length += 3 * sum(value is not None for value in (packet.content_type, packet.response_topic, packet.topic_alias))
    length += 0 if packet.correlation_data is None else 3 + len(packet.correlation_data)
    length += (0 if packet.message_expiry_interval is None else 5) + (2 if packet.payload_format_indicator else 0)
    return 2 + len(packet.topic.encode()) + 2 * bool(packet.packet_id) + _varint(length) + length + len(packet.payload)


def _varint(value: int) -> int:
    return next((size for size in range(1, _MAX_LENGTH_BYTES) if value < 1 << 7 * size), _MAX_LENGTH_BYTES)


def _at_most(packet: mqtt5.Packet) -> int:
    """An upper bound of the length of a packet without a payload; a dozen strings beside its lists."""
    will = getattr(packet, "will", None)
    pairs = [*getattr(packet, "user_properties", ()), *(will.user_properties if will else ())]
    filters = [wanted.pattern for wanted in getattr(packet, "topic_filters", ())]
    texts = [*(part for pair in pairs for part in pair), *filters, *getattr(packet, "patterns", ())]
    return _FEW_STRINGS + sum(5 + len(text.encode()) for text in texts) + len(getattr(packet, "reason_codes", ()))


# After reading, or instead of it ----------------------------------------------------------------------


def check_topics(topics: Iterable[str]) -> None:
    """Refuse U+0000 and wildcards in topic names (0x90) with a `MalformedPacket`."""
    joined = "".join(topics)
    if "\0" in joined:
        raise MalformedPacket(_NULL)
    if "#" in joined or "+" in joined:
        raise MalformedPacket("a topic name with a wildcard [MQTT-3.3.2-2]", 0x90)


def check_null(joined: str) -> None:
    """Refuse U+0000 with a `MalformedPacket`."""
    if "\0" in joined:
        raise MalformedPacket(_NULL)
