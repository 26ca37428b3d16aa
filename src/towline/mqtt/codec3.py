"""Codec of MQTT 3.1.1 and 3.1: decodes packets of a server, encodes packets of a client.

Both use packet classes of the `mqtt5` package, so the session has one set of packet types; only this module knows the
older formats. Labels [MQTT-x.y.z-n] are those of MQTT 3.1.1.

Fields that 3.x lacks are omitted: properties, reasons, receive maximum. `towline.mqtt.rules` refuses configurations
whose meaning depends on them (No Local, a delayed will), and the session never uses them by itself. Differences of 3.1
(level 3, protocol name "MQIsdp") that are kept: no Session Present in CONNACK, DUP allowed on PUBREL.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import mqtt5

from towline.mqtt.checks import MAX_REMAINING_LENGTH, FieldReader, check_null, check_topics, decode_text, read_varint

#: Protocol levels as they stand in CONNECT [MQTT-3.1.2-2].
LEVEL_31: Final = 3
LEVEL_311: Final = 4

# The enumerations of `mqtt5` are no integers, and each member is true: compare with `int()` or `==`.
CONNECT, CONNACK, _PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBSCRIBE, SUBACK = range(1, 10)
UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = range(10, 15)

PROTOCOL_NAMES: Final = {LEVEL_31: b"\x00\x06MQIsdp\x03", LEVEL_311: b"\x00\x04MQTT\x04"}
UINT16: Final = Struct(">H")
MAX_STRING_BYTES: Final = 65535
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
#: Error text for any other first byte.
INVALID_PUBLISH_HEADER: Final = "PUBLISH with QoS 3 or with DUP at QoS 0 [MQTT-3.3.1-2, -4]"
#: First byte of a PUBLISH → QoS, RETAIN, DUP, for `bytes.translate` [MQTT 5 section 3.3.1].
QOS_OF_HEADER: Final = bytes(byte >> 1 & 3 for byte in range(256))
RETAIN_OF_HEADER: Final = bytes(byte & 1 for byte in range(256))
DUPLICATE_OF_HEADER: Final = bytes(byte >> 3 & 1 for byte in range(256))


# Reading -------------------------------------------------------------------------------------------------------------


def read_packet(packet: bytes, version: int) -> mqtt5.Packet:
    """Decode a whole packet other than PUBLISH, which `towline.mqtt.codec` reads itself.

    UNSUBACK has no codes in 3.x, so its `reason_codes` are empty.

    Args:
        packet: The whole packet.
        version: `LEVEL_311` or `LEVEL_31`.

    Raises:
        ValueError: It is no packet of this version.
    """
    header, packet_type = packet[0], packet[0] >> 4
    reader = READERS.get(packet_type)
    if reader is None:
        raise ValueError(f"PacketType {packet_type} is not part of MQTT 3")
    # Reserved bits of the fixed header are as prescribed [MQTT-2.2.2-1, -2]; 3.1 sets DUP on a repeat.
    expected_flags = FLAGS_0010 if packet_type in {PUBREL, SUBSCRIBE, UNSUBSCRIBE} else 0
    flags = header & 7 if version == LEVEL_31 and expected_flags else header & 15
    if flags != expected_flags:
        raise ValueError(f"Invalid flags {flags:#x} for packet type {packet_type}")
    return reader(FieldReader(packet, read_varint(packet, 1)[1]), version)


def topic_name(raw: bytes) -> str:
    """Decode the topic of a PUBLISH.

    Raises:
        ValueError: It is not a topic name.
    """
    if not raw:
        raise ValueError("topic is empty [MQTT-4.7.3-1]")
    topic = decode_text(raw)
    check_topics((topic,))
    return topic


def _read_connack(body: FieldReader, version: int) -> mqtt5.ConnAckPacket:
    flags, code = body.byte(), body.byte()
    body.check_end()
    if version == LEVEL_31:
        flags = 0  # the byte is reserved
    if flags > 1:
        raise ValueError("reserved flags of CONNACK are set [MQTT-3.2.2-1]")
    if code >= len(CONNACK_CODES):
        raise ValueError(f"Invalid ConnAckReasonCode value: return code {code}")
    if flags and code:
        raise ValueError("Session Present in a refusal [MQTT-3.2.2-4]")
    return mqtt5.ConnAckPacket(session_present=bool(flags), reason_code=CONNACK_CODES[code])


def _ack_reader(packet_class: Callable[[int], mqtt5.Packet]) -> Callable[[FieldReader, int], mqtt5.Packet]:
    def read_ack(body: FieldReader, _version: int) -> mqtt5.Packet:
        packet_id = body.packet_id()
        body.check_end()
        return packet_class(packet_id)

    return read_ack


def _read_suback(body: FieldReader, _version: int) -> mqtt5.SubAckPacket:
    packet_id, codes = body.packet_id(), body.take_bytes(body.remaining_bytes)
    if not codes:
        raise ValueError("SUBACK without a return code [MQTT-3.8.4-5]")
    try:
        return mqtt5.SubAckPacket(packet_id, [_SUBACK_CODES[code] for code in codes])
    except KeyError as error:
        raise ValueError(f"Invalid SubAckReasonCode value: {error} [MQTT-3.9.3-2]") from None


def _read_pingresp(body: FieldReader, _version: int) -> mqtt5.PingRespPacket:
    body.check_end()
    return mqtt5.PingRespPacket()


#: Packet type → reader of its body; types 0 and 15 are reserved [MQTT 3.1.1 2.2.1].
READERS: Final[dict[int, Callable[[FieldReader, int], mqtt5.Packet]]] = {
    CONNACK: _read_connack,
    PUBACK: _ack_reader(mqtt5.PubAckPacket),
    PUBREC: _ack_reader(mqtt5.PubRecPacket),
    PUBREL: _ack_reader(mqtt5.PubRelPacket),
    PUBCOMP: _ack_reader(mqtt5.PubCompPacket),
    SUBACK: _read_suback,
    UNSUBACK: _ack_reader(lambda packet_id: mqtt5.UnsubAckPacket(packet_id, [])),
    PINGRESP: _read_pingresp,
}


# Writing -------------------------------------------------------------------------------------------------------------


def write_packet(packet: mqtt5.Packet, version: int) -> bytes:
    """Encode a packet.

    Args:
        packet: Packet to encode, without its properties.
        version: `LEVEL_311` or `LEVEL_31`.

    Raises:
        ValueError: This version has no such packet, or can't encode a field.
    """
    writer = WRITERS.get(type(packet))
    if writer is None:
        raise ValueError(f"MQTT 3 has no {type(packet).__name__}")
    header, body = writer(packet, version)
    length = len(body)
    fixed_header = bytes((header, length)) if length < 128 else bytes((header, *_length_bytes(length)))
    return fixed_header + body


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
    if len(data) > MAX_STRING_BYTES:
        raise ValueError(f"{len(data):,} bytes in a field that holds {MAX_STRING_BYTES:,}")
    return UINT16.pack(len(data)) + data


def _string(value: str) -> bytes:
    check_null(value)
    return _binary(value.encode())  # a lone surrogate is a UnicodeEncodeError, which is a ValueError


def packet_id_bytes(packet_id: int | None) -> bytes:
    """Encode a packet id, which is never 0."""
    if not packet_id:
        raise ValueError("packet id 0 or none [MQTT-2.3.1-1]")
    return UINT16.pack(packet_id)


def _write_connect(packet: mqtt5.ConnectPacket, version: int) -> tuple[int, bytes]:
    if not packet.client_id and (version == LEVEL_31 or not packet.clean_start):
        raise ValueError("an empty client id needs MQTT 3.1.1 and a clean session [MQTT-3.1.3-7]")
    if packet.password is not None and packet.username is None:
        raise ValueError("a password without a user name [MQTT-3.1.2-22]")
    flags, fields = packet.clean_start << 1, [_string(packet.client_id)]
    if (will := packet.will) is not None:
        flags |= 4 | int(will.qos) << 3 | will.retain << 5
        fields += [_string(will.topic), _binary(will.payload or b"")]
    if packet.username is not None:
        flags, fields = flags | 0x80, [*fields, _string(packet.username)]
    if packet.password is not None:
        flags, fields = flags | 0x40, [*fields, _binary(packet.password)]
    fixed = PROTOCOL_NAMES[version] + bytes((flags,)) + UINT16.pack(packet.keep_alive)
    return CONNECT << 4, fixed + b"".join(fields)


def _write_publish(packet: mqtt5.PublishPacket, _version: int) -> tuple[int, bytes]:
    if not packet.topic:
        raise ValueError("topic is empty [MQTT-4.7.3-1]")
    qos = int(packet.qos)
    header = 0x30 | packet.duplicate << 3 | qos << 1 | packet.retain
    if PUBLISH_FLAGS[header] is None:
        raise ValueError("DUP at QoS 0 [MQTT-3.3.1-2]")
    packet_id = packet_id_bytes(packet.packet_id) if qos else b""
    return header, _string(packet.topic) + packet_id + packet.payload


def _ack_writer(header: int) -> Callable[[Any, int], tuple[int, bytes]]:
    return lambda packet, _version: (header, packet_id_bytes(packet.packet_id))


def _write_subscribe(packet: mqtt5.SubscribePacket, _version: int) -> tuple[int, bytes]:
    fields = [packet_id_bytes(packet.packet_id)]
    for topic_filter in packet.topic_filters:
        fields += [_topic_filter(topic_filter.pattern), bytes((int(topic_filter.max_qos),))]
    return SUBSCRIBE << 4 | FLAGS_0010, b"".join(fields)


def _topic_filter(pattern: str) -> bytes:
    if not pattern:
        raise ValueError("topic filter is empty [MQTT-4.7.3-1]")
    return _string(pattern)


def _write_unsubscribe(packet: mqtt5.UnsubscribePacket, _version: int) -> tuple[int, bytes]:
    patterns = b"".join(_topic_filter(pattern) for pattern in packet.patterns)
    return UNSUBSCRIBE << 4 | FLAGS_0010, packet_id_bytes(packet.packet_id) + patterns


WRITERS: Final[dict[type, Callable[[Any, int], tuple[int, bytes]]]] = {
    mqtt5.ConnectPacket: _write_connect,
    mqtt5.PublishPacket: _write_publish,
    mqtt5.PubAckPacket: _ack_writer(PUBACK << 4),
    mqtt5.PubRecPacket: _ack_writer(PUBREC << 4),
    mqtt5.PubRelPacket: _ack_writer(PUBREL << 4 | FLAGS_0010),
    mqtt5.PubCompPacket: _ack_writer(PUBCOMP << 4),
    mqtt5.SubscribePacket: _write_subscribe,
    mqtt5.UnsubscribePacket: _write_unsubscribe,
    mqtt5.PingReqPacket: lambda _packet, _version: (PINGREQ << 4, b""),
    mqtt5.DisconnectPacket: lambda _packet, _version: (DISCONNECT << 4, b""),
}
