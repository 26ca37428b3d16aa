"""MQTT 3.1.1 and 3.1 control packets: what a server says, read from bytes, and what a client says, written to them.

Both are packet classes of the `mqtt5` package: the session knows one set of packet types, and only this module knows
how the older protocols say them. Labels [MQTT-x.y.z-n] are those of MQTT 3.1.1.

What a 3.x packet can't say is left out: properties, reasons, receive maximum. That nothing is asked for which would
mean something else without it (No Local, a delayed will) is a rule for configurations (`towline.mqtt.rules`), and the
session says no such thing by itself. Differences of 3.1 (level 3, protocol name "MQIsdp") that are kept: no Session
Present in CONNACK, DUP allowed on PUBREL.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import mqtt5

from towline.mqtt.fence import MAX_REMAINING_LENGTH, Body, check_null, check_topics, text, variable_integer

#: Protocol levels as they stand in CONNECT [MQTT-3.1.2-2].
LEVEL_31: Final = 3
LEVEL_311: Final = 4

# The enumerations of `mqtt5` are no integers, and each member is true: `int()` and `==` are what they know.
CONNECT, CONNACK, _PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBSCRIBE, SUBACK = range(1, 10)
UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = range(10, 15)

NAMES: Final = {LEVEL_31: b"\x00\x06MQIsdp\x03", LEVEL_311: b"\x00\x04MQTT\x04"}
WORD: Final = Struct(">H")
MAX_STRING: Final = 65535
#: Flags that SUBSCRIBE, UNSUBSCRIBE and PUBREL must carry [MQTT-3.8.1-1, MQTT-3.10.1-1, MQTT-3.6.1-1].
FLAGS_0010: Final = 2
_MAX_QOS: Final = 2

#: Return code of CONNACK → reason code of MQTT 5 [MQTT 3.1.1 table 3.1].
CONNACK_CODES: Final = (
    mqtt5.ConnAckReasonCode.SUCCESS,
    mqtt5.ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
    mqtt5.ConnAckReasonCode.CLIENT_ID_NOT_VALID,
    mqtt5.ConnAckReasonCode.SERVER_UNAVAILABLE,
    mqtt5.ConnAckReasonCode.BAD_USER_NAME_OR_PASSWORD,
    mqtt5.ConnAckReasonCode.NOT_AUTHORIZED,
)
#: Return code of SUBACK → reason code [MQTT-3.9.3-2].
_SUBACK_CODES: Final = {
    0: mqtt5.SubAckReasonCode.GRANTED_QOS_AT_MOST_ONCE,
    1: mqtt5.SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE,
    2: mqtt5.SubAckReasonCode.GRANTED_QOS_EXACTLY_ONCE,
    0x80: mqtt5.SubAckReasonCode.UNSPECIFIED_ERROR,
}


def _publish_flags(header: int) -> tuple[mqtt5.QoS, bool, bool, bool] | None:
    qos, duplicate = header >> 1 & 3, bool(header & 8)
    # QoS 3 is malformed [MQTT-3.3.1-4]; DUP is 0 with QoS 0 [MQTT-3.3.1-2].
    if header >> 4 != _PUBLISH or qos > _MAX_QOS or (duplicate and not qos):
        return None
    return mqtt5.QoS(qos), bool(qos), duplicate, bool(header & 1)


#: First byte → (QoS, has a packet id, DUP, RETAIN) of a well-formed PUBLISH, None for anything else.
PUBLISH_FLAGS: Final = tuple(_publish_flags(header) for header in range(256))
#: What is wrong with any other first byte.
NO_PUBLISH: Final = "PUBLISH with QoS 3 or with DUP at QoS 0 [MQTT-3.3.1-2, -4]"
#: First byte of a PUBLISH → QoS, RETAIN, DUP, for `bytes.translate` [MQTT 5 section 3.3.1].
QOS_OF: Final = bytes(byte >> 1 & 3 for byte in range(256))
RETAIN_OF: Final = bytes(byte & 1 for byte in range(256))
DUPLICATE_OF: Final = bytes(byte >> 3 & 1 for byte in range(256))


# Reading -------------------------------------------------------------------------------------------------------------


def read(packet: bytes, version: int) -> mqtt5.Packet:
    """Decode a whole packet that is no PUBLISH, which `towline.mqtt.codec` reads itself.

    UNSUBACK carries no codes in 3.x, so its `reason_codes` are empty whatever was asked for.

    Args:
        packet: From its first byte to its last.
        version: `LEVEL_311` or `LEVEL_31`.

    Raises:
        ValueError: It is none of this version.
    """
    header, kind = packet[0], packet[0] >> 4
    reader = READERS.get(kind)
    if reader is None:
        raise ValueError(f"PacketType {kind} is not part of MQTT 3")
    # Reserved bits of the fixed header are as prescribed [MQTT-2.2.2-1, -2]; 3.1 sets DUP when it sends one again.
    wanted = FLAGS_0010 if kind in {PUBREL, SUBSCRIBE, UNSUBSCRIBE} else 0
    flags = header & 7 if version == LEVEL_31 and wanted else header & 15
    if flags != wanted:
        raise ValueError(f"Invalid flags {flags:#x} for packet type {kind}")
    return reader(Body(packet, variable_integer(packet, 1)[1]), version)


def topic_name(raw: bytes) -> str:
    """The topic of a PUBLISH.

    Raises:
        ValueError: It is none.
    """
    if not raw:
        raise ValueError("topic is empty [MQTT-4.7.3-1]")
    topic = text(raw)
    check_topics((topic,))
    return topic


def _read_connack(body: Body, version: int) -> mqtt5.ConnAckPacket:
    flags, code = body.byte(), body.byte()
    body.end()
    if version == LEVEL_31:
        flags = 0  # the byte is reserved and not used
    if flags > 1:
        raise ValueError("reserved flags of CONNACK are set [MQTT-3.2.2-1]")
    if code >= len(CONNACK_CODES):
        raise ValueError(f"Invalid ConnAckReasonCode value: return code {code}")
    if flags and code:
        raise ValueError("Session Present in a refusal [MQTT-3.2.2-4]")
    return mqtt5.ConnAckPacket(session_present=bool(flags), reason_code=CONNACK_CODES[code])


def _reader_of_ack(kind: Callable[[int], mqtt5.Packet]) -> Callable[[Body, int], mqtt5.Packet]:
    def read_ack(body: Body, _version: int) -> mqtt5.Packet:
        packet_id = body.packet_id()
        body.end()
        return kind(packet_id)

    return read_ack


def _read_suback(body: Body, _version: int) -> mqtt5.SubAckPacket:
    packet_id, codes = body.packet_id(), body.take(body.left)
    if not codes:
        raise ValueError("SUBACK without a return code [MQTT-3.8.4-5]")
    try:
        return mqtt5.SubAckPacket(packet_id, [_SUBACK_CODES[code] for code in codes])
    except KeyError as unknown:
        raise ValueError(f"Invalid SubAckReasonCode value: {unknown} [MQTT-3.9.3-2]") from None


def _read_pingresp(body: Body, _version: int) -> mqtt5.PingRespPacket:
    body.end()
    return mqtt5.PingRespPacket()


#: Packet type → how its body is read; types 0 and 15 are reserved [MQTT 3.1.1 2.2.1].
READERS: Final[dict[int, Callable[[Body, int], mqtt5.Packet]]] = {
    CONNACK: _read_connack,
    PUBACK: _reader_of_ack(mqtt5.PubAckPacket),
    PUBREC: _reader_of_ack(mqtt5.PubRecPacket),
    PUBREL: _reader_of_ack(mqtt5.PubRelPacket),
    PUBCOMP: _reader_of_ack(mqtt5.PubCompPacket),
    SUBACK: _read_suback,
    UNSUBACK: _reader_of_ack(lambda packet_id: mqtt5.UnsubAckPacket(packet_id, [])),
    PINGRESP: _read_pingresp,
}


# Writing -------------------------------------------------------------------------------------------------------------


def write(packet: mqtt5.Packet, version: int) -> bytes:
    """Encode a packet.

    Args:
        packet: What to say. Its properties are left out.
        version: `LEVEL_311` or `LEVEL_31`.

    Raises:
        ValueError: This version has no such packet, or a field can't be said.
    """
    writer = WRITERS.get(type(packet))
    if writer is None:
        raise ValueError(f"MQTT 3 has no {type(packet).__name__}")
    header, body = writer(packet, version)
    length = len(body)
    start = bytes((header, length)) if length < 128 else bytes((header, *_length_bytes(length)))
    return start + body


def _length_bytes(length: int) -> bytes:
    if length > MAX_REMAINING_LENGTH:
        raise ValueError(f"a packet of {length:,} bytes, more than MQTT's {MAX_REMAINING_LENGTH:,}")
    digits = bytearray()
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    digits.append(length)
    return bytes(digits)


def _binary(data: bytes) -> bytes:
    if len(data) > MAX_STRING:
        raise ValueError(f"{len(data):,} bytes in a field that holds {MAX_STRING:,}")
    return WORD.pack(len(data)) + data


def _string(value: str) -> bytes:
    check_null(value)
    return _binary(value.encode())  # a lone surrogate is a UnicodeEncodeError, which is a ValueError


def packet_id_bytes(packet_id: int | None) -> bytes:
    """A packet id, which is never 0."""
    if not packet_id:
        raise ValueError("packet id 0 or none [MQTT-2.3.1-1]")
    return WORD.pack(packet_id)


def _write_connect(packet: mqtt5.ConnectPacket, version: int) -> tuple[int, bytes]:
    flags, fields = packet.clean_start << 1, [_string(packet.client_id)]
    if (will := packet.will) is not None:
        flags |= 4 | int(will.qos) << 3 | will.retain << 5
        fields += [_string(will.topic), _binary(will.payload or b"")]
    if packet.username is not None:
        flags, fields = flags | 0x80, [*fields, _string(packet.username)]
    if packet.password is not None:
        flags, fields = flags | 0x40, [*fields, _binary(packet.password)]
    fixed = NAMES[version] + bytes((flags,)) + WORD.pack(packet.keep_alive)
    return CONNECT << 4, fixed + b"".join(fields)


def _write_publish(packet: mqtt5.PublishPacket, _version: int) -> tuple[int, bytes]:
    if not packet.topic:
        raise ValueError("topic is empty [MQTT-4.7.3-1]")
    qos = int(packet.qos)
    header = 0x30 | packet.duplicate << 3 | qos << 1 | packet.retain
    if PUBLISH_FLAGS[header] is None:
        raise ValueError("DUP at QoS 0 [MQTT-3.3.1-2]")
    number = packet_id_bytes(packet.packet_id) if qos else b""
    return header, _string(packet.topic) + number + packet.payload


def _writer_of_ack(header: int) -> Callable[[Any, int], tuple[int, bytes]]:
    return lambda packet, _version: (header, packet_id_bytes(packet.packet_id))


def _write_subscribe(packet: mqtt5.SubscribePacket, _version: int) -> tuple[int, bytes]:
    parts = [packet_id_bytes(packet.packet_id)]
    for wanted in packet.topic_filters:
        parts += [_pattern(wanted.pattern), bytes((int(wanted.max_qos),))]
    return SUBSCRIBE << 4 | FLAGS_0010, b"".join(parts)


def _pattern(pattern: str) -> bytes:
    if not pattern:
        raise ValueError("topic filter is empty [MQTT-4.7.3-1]")
    return _string(pattern)


def _write_unsubscribe(packet: mqtt5.UnsubscribePacket, _version: int) -> tuple[int, bytes]:
    patterns = b"".join(_pattern(pattern) for pattern in packet.patterns)
    return UNSUBSCRIBE << 4 | FLAGS_0010, packet_id_bytes(packet.packet_id) + patterns


WRITERS: Final[dict[type, Callable[[Any, int], tuple[int, bytes]]]] = {
    mqtt5.ConnectPacket: _write_connect,
    mqtt5.PublishPacket: _write_publish,
    mqtt5.PubAckPacket: _writer_of_ack(PUBACK << 4),
    mqtt5.PubRecPacket: _writer_of_ack(PUBREC << 4),
    mqtt5.PubRelPacket: _writer_of_ack(PUBREL << 4 | FLAGS_0010),
    mqtt5.PubCompPacket: _writer_of_ack(PUBCOMP << 4),
    mqtt5.SubscribePacket: _write_subscribe,
    mqtt5.UnsubscribePacket: _write_unsubscribe,
    mqtt5.PingReqPacket: lambda _packet, _version: (PINGREQ << 4, b""),
    mqtt5.DisconnectPacket: lambda _packet, _version: (DISCONNECT << 4, b""),
}
