"""What the `mqtt5` codec lets pass, or dies of, and MQTT 5 forbids.

Three kinds of check, because the codec is written in Rust:

- before it writes: a packet longer than MQTT can say makes it panic;
- before it reads: ill-formed UTF-8 makes it panic, which prints on stderr whatever the caller does. `check_fields`
  walks the fields of a packet and costs more than decoding it, so `publish_is_sound` is the quick form for the one
  packet type that comes by the thousand;
- after it has read: packet id 0, DUP at QoS 0, U+0000 and wildcards, checked by the column, a few ns a packet.

All functions raise `ValueError` with the statement that was broken; a topic name that is invalid has a reason code of
its own and is told apart by `InvalidTopic`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import mqtt5
from mqtt5 import PublishPacket

if TYPE_CHECKING:
    from towline.mqtt.stubs import Published

__all__ = [
    "MAX_PROPERTIES",
    "MAX_REMAINING_LENGTH",
    "InvalidTopic",
    "PacketTooLarge",
    "TooManyProperties",
    "check_fields",
    "check_packet",
    "check_run",
    "check_size",
    "check_written",
    "is_panic",
    "publish_is_sound",
]

#: Most user properties of a packet, and most subscription identifiers. One is 5 bytes on the wire at least and some
#: 280 as objects: 1,000 are 280 kB, and 64 MiB of them would be 3.6 GB. HTTP servers stop at 100 header fields
#: (Apache httpd LimitRequestFields, Tomcat maxHeaderCount).
MAX_PROPERTIES: Final = 1_000
#: Bytes of the value of each property that is neither text nor binary [MQTT 5 section 2.2.2.2].
_FIXED: Final = {
    **dict.fromkeys((0x01, 0x17, 0x19, 0x25, 0x28, 0x29, 0x2A), 1),
    **dict.fromkeys((0x13, 0x21, 0x22, 0x23), 2),
    **dict.fromkeys((0x02, 0x11, 0x18, 0x27), 4),
}
_TEXT: Final = frozenset({0x03, 0x08, 0x12, 0x15, 0x1A, 0x1C, 0x1F})
_BINARY: Final = frozenset({0x09, 0x16})
_SUBSCRIPTION_ID: Final = 0x0B
_MAX_LENGTH_BYTES: Final = 4
_MAXIMUM_QOS: Final = 0x24
_USER_PROPERTY: Final = 0x26
#: Four bytes of seven bits each [MQTT-1.5.5-1].
MAX_REMAINING_LENGTH: Final = 268_435_455
#: A user property with both strings of 65,535 bytes.
_LONGEST_PAIR: Final = 5 + 2 * 65_535
#: Every string of CONNECT at its longest: client id, user name, password, two of authentication, five of the will.
_FEW_STRINGS: Final = 12 * (3 + 65_535)
_SURELY_FITS: Final = MAX_REMAINING_LENGTH - _FEW_STRINGS
_NULL: Final = "a string with U+0000 [MQTT-1.5.4-2]"
_ILL_FORMED: Final = "ill-formed UTF-8 [MQTT-1.5.4-1]"
_DUP: Final = "DUP at QoS 0 [MQTT-3.3.1-2]"
_ID_ZERO: Final = "packet id 0 [MQTT-2.2.1-3, -4]"
#: First bytes of a PUBLISH with DUP and QoS 0.
_DUP_AT_QOS_0: Final = (b"\x38", b"\x39")


class InvalidTopic(ValueError):
    """A topic name with a wildcard [MQTT-3.3.2-2, -14]."""


class PacketTooLarge(ValueError):
    """A packet longer than MQTT has a length for [MQTT-1.5.5-1]."""


class TooManyProperties(ValueError):
    """A packet other than PUBLISH whose user properties would cost too much to decode."""


def is_panic(error: BaseException) -> bool:
    """Whether the codec died of something; its exception has no name that could be imported."""
    return type(error).__name__ == "PanicException"


# Before reading ------------------------------------------------------------------------------------------------------


def check_fields(packet: bytes) -> None:
    """Refuse ill-formed UTF-8 and U+0000 in any string of one whole packet, and a Maximum QoS other than 0 and 1.

    Whatever else is wrong with the packet ends the walk silently: the codec refuses it at the same place.

    Raises:
        TooManyProperties: More than `MAX_PROPERTIES`, which the codec would make objects of.
        ValueError: A field breaks [MQTT-1.5.4-1], [MQTT-1.5.4-2] or MQTT 5 section 3.2.2.3.4.
    """
    try:
        for raw in _strings(packet):
            if b"\0" in raw:
                raise ValueError(_NULL)
            str(raw, "utf-8")
    except UnicodeDecodeError:
        raise ValueError(_ILL_FORMED) from None
    except IndexError:
        return


def publish_is_sound(buffer: bytes, position: int, known: set[bytes]) -> bool:
    """Whether the PUBLISH at `position` surely holds no ill-formed UTF-8; False means: look closer with `check_fields`.

    Args:
        buffer: Received bytes; the packet need not be there as a whole.
        position: Where it begins.
        known: Topics seen to be sound; grows.
    """
    at = position + 1
    try:
        while buffer[at] > 127:  # the remaining length itself is not needed
            if at - position == _MAX_LENGTH_BYTES:
                return False
            at += 1
        at += 1
        end = at + 2 + (buffer[at] << 8 | buffer[at + 1])
        topic = buffer[at + 2 : end]
        if topic not in known:
            if not topic.isascii():
                return False
            known.add(topic)
        end += 2 if buffer[position] & 6 else 0
        properties = buffer[end]
    except IndexError:
        return False  # not there as a whole, or too short for what it claims to be
    return not properties or (properties < 128 and buffer[end + 1 : end + 1 + properties].isascii())


class _Walk:
    """Reads fields from left to right; the end of the packet is an `IndexError`."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 1
        self.integer()  # the remaining length

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def skip(self, count: int) -> None:
        self.at += count

    def integer(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def binary(self) -> bytes:
        length = self.byte() << 8 | self.byte()
        self.at += length
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - length : self.at]

    @property
    def more(self) -> bool:
        return self.at < len(self.data)


def _strings(packet: bytes) -> Iterator[bytes]:
    walk = _Walk(packet)
    yield from _LAYOUT.get(packet[0] >> 4, _no_strings)(walk, packet[0])


def _properties(walk: _Walk) -> Iterator[bytes]:
    length = walk.integer()
    end = walk.at + length
    users = 0
    while walk.at < end:
        kind = walk.integer()
        if kind in _TEXT:
            yield walk.binary()
        elif kind == _USER_PROPERTY:
            users += 1
            if users > MAX_PROPERTIES:
                raise TooManyProperties(f"a packet with more than {MAX_PROPERTIES:,} user properties")
            yield walk.binary()
            yield walk.binary()
        elif kind in _BINARY:
            walk.binary()
        elif kind == _SUBSCRIPTION_ID:
            walk.integer()
        elif kind == _MAXIMUM_QOS:
            if walk.byte() > 1:
                raise ValueError("Maximum QoS is neither 0 nor 1 [MQTT 5 section 3.2.2.3.4]")
        elif kind in _FIXED:
            walk.skip(_FIXED[kind])
        else:
            raise IndexError  # unknown: the codec stops here too


def _publish(walk: _Walk, header: int) -> Iterator[bytes]:
    yield walk.binary()
    walk.skip(2 if header & 6 else 0)
    yield from _properties(walk)


def _properties_after(count: int) -> Callable[[_Walk, int], Iterator[bytes]]:
    def layout(walk: _Walk, _header: int) -> Iterator[bytes]:
        walk.skip(count)
        yield from _properties(walk)

    return layout


def _filters(options: int) -> Callable[[_Walk, int], Iterator[bytes]]:
    def layout(walk: _Walk, _header: int) -> Iterator[bytes]:
        walk.skip(2)
        yield from _properties(walk)
        while walk.more:
            yield walk.binary()
            walk.skip(options)

    return layout


def _connect(walk: _Walk, _header: int) -> Iterator[bytes]:
    yield walk.binary()
    walk.skip(1)
    flags = walk.byte()
    walk.skip(2)
    yield from _properties(walk)
    yield walk.binary()
    if flags & 4:
        yield from _properties(walk)
        yield walk.binary()
        walk.binary()
    if flags & 0x80:
        yield walk.binary()


def _no_strings(_walk: _Walk, _header: int) -> Iterator[bytes]:
    return iter(())


#: Packet type → its strings in order [MQTT 5 chapter 3].
_LAYOUT: Final[dict[int, Callable[[_Walk, int], Iterator[bytes]]]] = {
    1: _connect,
    2: _properties_after(2),
    3: _publish,
    **dict.fromkeys((4, 5, 6, 7), _properties_after(3)),
    8: _filters(1),
    9: _properties_after(2),
    10: _filters(0),
    11: _properties_after(2),
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


# After reading -------------------------------------------------------------------------------------------------------


def check_packet(packet: mqtt5.Packet) -> None:
    """Refuse what the codec lets pass in packets other than PUBLISH.

    Raises:
        ValueError: Packet id 0 [MQTT-2.2.1-3, -4].
    """
    if getattr(packet, "packet_id", 1) == 0:
        raise ValueError(_ID_ZERO)


def check_run(run: Sequence[Published], headers: bytes) -> None:
    """Refuse what the codec lets pass in PUBLISH packets.

    Raises:
        InvalidTopic: A wildcard in a topic name or response topic [MQTT-3.3.2-2, -14].
        ValueError: Packet id 0, DUP at QoS 0 or U+0000.
    """
    if any(header in headers for header in _DUP_AT_QOS_0):
        raise ValueError(_DUP)
    if 0 in [packet.packet_id for packet in run]:
        raise ValueError(_ID_ZERO)
    _check_topics([packet.topic for packet in run])
    _check_topics(filter(None, [packet.response_topic for packet in run]))
    texts = list(filter(None, [packet.content_type for packet in run]))
    for pairs in filter(None, [packet.user_properties for packet in run]):
        for pair in pairs:
            texts += pair
    _check_null("".join(texts))


def check_written(packet: mqtt5.Packet, data: bytes) -> None:
    """Refuse to say what we would refuse to hear.

    Args:
        packet: What the codec has written.
        data: Its bytes.

    Raises:
        ValueError: As `check_run`, `check_packet` and `check_fields`.
    """
    if not isinstance(packet, PublishPacket):
        check_packet(packet)
        check_fields(data)
    elif packet.user_properties or packet.response_topic is not None or packet.content_type:
        if packet.response_topic == "":
            raise InvalidTopic("an empty response topic [MQTT-4.7.3-1]")
        check_run([packet], data[:1])
    else:  # the same for what most messages have
        if data[:1] in _DUP_AT_QOS_0:
            raise ValueError(_DUP)
        if packet.packet_id == 0:
            raise ValueError(_ID_ZERO)
        _check_null(packet.topic)  # wildcards are refused when the packet is built


def _check_topics(topics: Iterable[str]) -> None:
    joined = "".join(topics)
    _check_null(joined)
    if "#" in joined or "+" in joined:
        raise InvalidTopic("a topic name with a wildcard [MQTT-3.3.2-2]")


def _check_null(joined: str) -> None:
    if "\0" in joined:
        raise ValueError(_NULL)
