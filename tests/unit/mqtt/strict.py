"""A reader of MQTT 5 packets that follows the standard to the letter, as the measure of the decoder.

It shares nothing with `towline.mqtt`: one table of properties [MQTT 5 table 2-4], one of reason codes [table 2-6], and
a cursor that knows where its packet ends. It reads what a server may send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH = 2, 3, 4, 5, 6, 7, 9, 11, 14, 15
_ANSWERS: Final = {PUBACK, PUBREC, PUBREL, PUBCOMP}
_WITH_REASON_STRING: Final = {CONNACK, *_ANSWERS, SUBACK, UNSUBACK, DISCONNECT, AUTH}


class Broken(Exception):
    """What the standard forbids; `reason` is what it wants said in DISCONNECT."""

    def __init__(self, what: str, reason: int = 0x81) -> None:
        super().__init__(what)
        self.reason = reason


class Message(NamedTuple):
    """What a PUBLISH says."""

    topic: str
    packet_id: int | None
    payload: bytes
    user_properties: list[tuple[str, str]]


class Cursor:
    """Reads fields from left to right, never beyond the end it is given."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        if end > len(data):
            raise Broken("a length beyond the end of the packet")
        self.data, self.at, self.end = data, at, end

    @property
    def left(self) -> int:
        return self.end - self.at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise Broken("a field beyond its end")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def varint(self) -> int:
        value = 0
        for index in range(4):
            byte = self.number(1)
            value |= (byte & 127) << 7 * index
            if byte < 128:
                if index and not byte:
                    raise Broken("more bytes than needed [MQTT-1.5.5-1]")
                return value
        raise Broken("more than four bytes [MQTT 5 section 1.5.5]")

    def binary(self) -> bytes:
        return self.take(self.number(2))

    def text(self) -> str:
        raw = self.binary()
        try:
            value = raw.decode()  # surrogates and overlong forms are refused, too
        except UnicodeDecodeError:
            raise Broken("[MQTT-1.5.4-1]") from None
        if "\0" in value:
            raise Broken("[MQTT-1.5.4-2]")
        return value

    def topic(self) -> str:
        value = self.text()
        if "+" in value or "#" in value:
            raise Broken("[MQTT-3.3.2-2, -14]", 0x90)
        return value

    def packet_id(self) -> int:
        value = self.number(2)
        if not value:
            raise Broken("[MQTT-2.2.1-3]")
        return value


def _not_zero(size: int, reason: int = 0x82) -> Callable[[Cursor], int]:
    def reader(cursor: Cursor) -> int:
        value = cursor.varint() if not size else cursor.number(size)
        if not value:
            raise Broken("0 is no value of it", reason)
        return value

    return reader


def _bit(cursor: Cursor) -> int:
    value = cursor.number(1)
    if value > 1:
        raise Broken("neither 0 nor 1", 0x82)
    return value


def _number(size: int) -> Callable[[Cursor], int]:
    return lambda cursor: cursor.number(size)


def _response_topic(cursor: Cursor) -> str:
    value = cursor.topic()
    if not value:
        raise Broken("[MQTT-4.7.3-1]", 0x90)
    return value


def _pair(cursor: Cursor) -> tuple[str, str]:
    return cursor.text(), cursor.text()


_TEXT: Final = Cursor.text
#: Identifier → its type, and the packets of a server that may have it.
PROPERTIES: Final[dict[int, tuple[Callable[[Cursor], Any], set[int]]]] = {
    0x01: (_bit, {PUBLISH}),
    0x02: (_number(4), {PUBLISH}),
    0x03: (_TEXT, {PUBLISH}),
    0x08: (_response_topic, {PUBLISH}),
    0x09: (Cursor.binary, {PUBLISH}),
    0x0B: (_not_zero(0), {PUBLISH}),
    0x11: (_number(4), {CONNACK, DISCONNECT}),
    0x12: (_TEXT, {CONNACK}),
    0x13: (_number(2), {CONNACK}),
    0x15: (_TEXT, {CONNACK, AUTH}),
    0x16: (Cursor.binary, {CONNACK, AUTH}),
    0x17: (_bit, set()),
    0x18: (_number(4), set()),
    0x19: (_bit, set()),
    0x1A: (_TEXT, {CONNACK}),
    0x1C: (_TEXT, {CONNACK, DISCONNECT}),
    0x1F: (_TEXT, _WITH_REASON_STRING),
    0x21: (_not_zero(2), {CONNACK}),
    0x22: (_number(2), {CONNACK}),
    0x23: (_not_zero(2, 0x94), {PUBLISH}),
    0x24: (_bit, {CONNACK}),
    0x25: (_bit, {CONNACK}),
    0x26: (_pair, {PUBLISH, *_WITH_REASON_STRING}),
    0x27: (_not_zero(4), {CONNACK}),
    0x28: (_bit, {CONNACK}),
    0x29: (_bit, {CONNACK}),
    0x2A: (_bit, {CONNACK}),
}
#: Packet type → the properties it may have.
ALLOWED: Final = {
    kind: [one for one, (_, packets) in PROPERTIES.items() if kind in packets]
    for kind in (PUBLISH, *_WITH_REASON_STRING)
}
_PUBLISH_ANSWERS: Final = {0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99}
#: Packet type → reason codes; 0x04 of DISCONNECT is the client's to say, and ends a connection as any other.
REASONS: Final[dict[int, set[int]]] = {
    CONNACK: {0, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F},
    PUBACK: _PUBLISH_ANSWERS,
    PUBREC: _PUBLISH_ANSWERS,
    PUBREL: {0, 0x92},
    PUBCOMP: {0, 0x92},
    SUBACK: {0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2},
    UNSUBACK: {0, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91},
    DISCONNECT: {0, 4, *range(0x80, 0x84), 0x87, 0x89, 0x8B, *range(0x8D, 0x91), *range(0x93, 0xA3)},
    AUTH: {0, 0x18, 0x19},
}


def read(packet: bytes) -> Message | None:
    """Read one whole packet of a server; of one that is no PUBLISH only whether it may be."""
    kind, flags = packet[0] >> 4, packet[0] & 15
    body = Cursor(packet, 1, len(packet))
    if body.varint() != body.left:
        raise Broken("a remaining length that is another")
    if kind == PUBLISH:
        return _publish(flags, body)
    if kind not in READERS or flags != (2 if kind == PUBREL else 0):
        raise Broken("no packet of a server [MQTT-2.1.3-1]")
    READERS[kind](kind, body)
    if body.left:
        raise Broken("bytes behind the last field")
    return None


def _several_codes(kind: int, body: Cursor) -> None:
    body.packet_id()
    _properties(kind, body)
    codes = set(body.take(body.left))
    if not codes <= REASONS[kind]:
        raise Broken("a reason code of another packet")
    if not codes:
        raise Broken("no reason codes")


def _one_code(kind: int, body: Cursor) -> None:
    if kind in _ANSWERS:
        body.packet_id()
    if body.left and body.number(1) not in REASONS[kind]:
        raise Broken("no reason code of this packet")
    properties = _properties(kind, body) if body.left else []
    if kind == AUTH and 0x15 not in dict(properties):
        raise Broken("no Authentication Method", 0x82)


def _publish(flags: int, body: Cursor) -> Message:
    qos = flags >> 1 & 3
    if qos == 3 or (flags & 8 and not qos):
        raise Broken("[MQTT-3.3.1-2, -4]")
    topic = body.topic()
    packet_id = body.packet_id() if qos else None
    properties = _properties(PUBLISH, body)
    if not topic and 0x23 not in dict(properties):
        raise Broken("[MQTT-4.7.3-1]")
    return Message(topic, packet_id, body.take(body.left), [value for one, value in properties if one == 0x26])


def _connack(_kind: int, body: Cursor) -> None:
    short = body.left == 2
    flags, reason = body.number(1), body.number(1)
    if short or 0 < reason < 6:
        raise Broken("a CONNACK of 3.x")
    if flags > 1 or reason not in REASONS[CONNACK]:
        raise Broken("[MQTT-3.2.2-1, -8]")
    if flags and reason:
        raise Broken("Session Present in a refusal [MQTT-3.2.2-6]")
    _properties(CONNACK, body)


def _properties(kind: int, body: Cursor) -> list[tuple[int, Any]]:
    length = body.varint()
    block = Cursor(body.data, body.at, body.at + length)
    if block.end > body.end:
        raise Broken("a property length beyond the end of the packet")
    found: list[tuple[int, Any]] = []
    while block.left:
        one = block.varint()
        if one not in PROPERTIES or kind not in PROPERTIES[one][1]:
            raise Broken(f"property {one:#x} is none of this packet")
        if one in dict(found) and one not in {0x0B, 0x26}:
            raise Broken(f"property {one:#x} twice", 0x82)
        found.append((one, PROPERTIES[one][0](block)))
    body.at = block.end
    return found


READERS: Final[dict[int, Callable[[int, Cursor], None]]] = {
    CONNACK: _connack,
    **dict.fromkeys((*_ANSWERS, DISCONNECT, AUTH), _one_code),
    **dict.fromkeys((SUBACK, UNSUBACK), _several_codes),
}
