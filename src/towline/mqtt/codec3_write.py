"""MQTT 3.1.1 and 3.1 control packets written to bytes, from the packet classes of the `mqtt5` package.

What a 3.x packet can't say is left out where the exchange means the same without it (reason strings, receive maximum, a
PUBCOMP's 0x92); it is a `ValueError` where it would mean something else (a negative PUBACK, a delayed will, No Local, a
DISCONNECT that keeps the will). `uncarried` names what a PUBLISH loses. Labels are those of MQTT 3.1.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from mqtt5 import (
    ConnAckPacket,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PingReqPacket,
    PingRespPacket,
    PubAckPacket,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
    SubAckPacket,
    SubscribePacket,
    UnsubAckPacket,
    UnsubscribePacket,
    Will,
)

from towline.mqtt.codec3 import (
    CONNACK,
    CONNACK_CODES,
    CONNECT,
    DISCONNECT,
    FLAGS_0010,
    LEVEL_31,
    MAX_STRING,
    NAMES,
    NEGATIVE,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH_FLAGS,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    WORD,
    check_client_id,
    no_null,
)
from towline.mqtt.fence import MAX_REMAINING_LENGTH

__all__ = ["uncarried", "write"]


def write(packet: Packet, version: int) -> bytes:
    """Encode a packet.

    Args:
        packet: What to say. Its properties are left out; see `uncarried`.
        version: `LEVEL_311` or `LEVEL_31`.

    Raises:
        ValueError: This version can't say it, or would say something else.
    """
    writer = _WRITERS.get(type(packet))
    if writer is None:
        raise ValueError(f"MQTT 3 has no {type(packet).__name__}")
    header, body = writer(packet, version)
    length = len(body)
    start = bytes((header, length)) if length < 128 else bytes((header, *_length_bytes(length)))
    return start + body


def uncarried(packet: PublishPacket) -> tuple[str, ...]:
    """Names of the properties that `packet` carries and `write` leaves out because 3.x has no place for them."""
    return tuple(name for name in _PUBLISH_PROPERTIES if getattr(packet, name) not in (None, 0, []))


_PUBLISH_PROPERTIES: Final = (
    "payload_format_indicator",
    "message_expiry_interval",
    "content_type",
    "response_topic",
    "correlation_data",
    "subscription_ids",
    "user_properties",
)


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


def _string(text: str) -> bytes:
    return _binary(no_null(text).encode())  # a lone surrogate is a UnicodeEncodeError, which is a ValueError


def _id(packet_id: int | None) -> bytes:
    if not packet_id:
        raise ValueError("packet id 0 or none [MQTT-2.3.1-1]")
    return WORD.pack(packet_id)


def _refuse(problems: Iterable[tuple[object, str]]) -> None:
    for present, what in problems:
        if present:
            raise ValueError(f"MQTT 3 can't carry {what}")


def _write_connect(packet: ConnectPacket, version: int) -> tuple[int, bytes]:
    clean, lasting = packet.clean_start, packet.session_expiry_interval > 0
    _refuse(
        [
            (packet.authentication_method is not None, "an authentication method"),
            (clean and lasting, "a clean start of a session that outlives the connection"),
            (not clean and not lasting, "the resumption of a session that ends with the connection"),
            (packet.password is not None and packet.username is None, "a password without a user name"),
        ]
    )
    check_client_id(packet.client_id, clean=clean, version=version)
    flags, will = clean << 1, b""
    if packet.will is not None:
        flags, will = flags | _will_flags(packet.will), _will_bytes(packet.will)
    fields = [_string(packet.client_id), will]
    if packet.username is not None:
        flags, fields = flags | 0x80, [*fields, _string(packet.username)]
    if packet.password is not None:
        flags, fields = flags | 0x40, [*fields, _binary(packet.password)]
    fixed = NAMES[version] + bytes((flags,)) + WORD.pack(packet.keep_alive)
    return CONNECT << 4, fixed + b"".join(fields)


def _will_flags(will: Will) -> int:
    return 4 | int(will.qos) << 3 | will.retain << 5


def _will_bytes(will: Will) -> bytes:
    _refuse([(will.will_delay_interval, "a will delay")])
    return _string(will.topic) + _binary(will.payload or b"")


def _write_connack(packet: ConnAckPacket, version: int) -> tuple[int, bytes]:
    if packet.reason_code not in CONNACK_CODES:
        raise ValueError(f"MQTT 3 can't carry reason code {int(packet.reason_code):#x} in CONNACK")
    code = CONNACK_CODES.index(packet.reason_code)
    if packet.session_present and code:
        raise ValueError("Session Present in a refusal [MQTT-3.2.2-4]")
    return CONNACK << 4, bytes((packet.session_present and version != LEVEL_31, code))


def _write_publish(packet: PublishPacket, _version: int) -> tuple[int, bytes]:
    if not packet.topic:
        raise ValueError("topic is empty [MQTT-4.7.3-1]")
    qos = int(packet.qos)
    header = 0x30 | packet.duplicate << 3 | qos << 1 | packet.retain
    if PUBLISH_FLAGS[header] is None:
        raise ValueError("DUP at QoS 0 [MQTT-3.3.1-2]")
    number = _id(packet.packet_id) if qos else b""
    return header, _string(packet.topic) + number + packet.payload


def _writer_of_ack(header: int, *, negative: bool) -> Callable[[Any, int], tuple[int, bytes]]:
    """`negative`: whether a reason of 0x80 and more may be left out without a change of meaning."""

    def write_ack(packet: PubAckPacket | PubRecPacket | PubRelPacket | PubCompPacket, _v: int) -> tuple[int, bytes]:
        if int(packet.reason_code) >= NEGATIVE and not negative:
            raise ValueError("MQTT 3 can't carry a negative acknowledgement")
        return header, _id(packet.packet_id)

    return write_ack


def _write_subscribe(packet: SubscribePacket, _version: int) -> tuple[int, bytes]:
    _refuse([(packet.subscription_id is not None, "a subscription identifier")])
    parts = [_id(packet.packet_id)]
    for wanted in packet.topic_filters:
        _refuse([(wanted.no_local, "No Local"), (int(wanted.retain_handling), "Retain Handling")])
        parts += [_pattern(wanted.pattern), bytes((int(wanted.max_qos),))]
    return SUBSCRIBE << 4 | FLAGS_0010, b"".join(parts)


def _pattern(pattern: str) -> bytes:
    if not pattern:
        raise ValueError("topic filter is empty [MQTT-4.7.3-1]")
    return _string(pattern)


def _write_suback(packet: SubAckPacket, _version: int) -> tuple[int, bytes]:
    codes = bytes(min(int(code), NEGATIVE) for code in packet.reason_codes)
    return SUBACK << 4, _id(packet.packet_id) + codes


def _write_unsubscribe(packet: UnsubscribePacket, _version: int) -> tuple[int, bytes]:
    patterns = b"".join(_pattern(pattern) for pattern in packet.patterns)
    return UNSUBSCRIBE << 4 | FLAGS_0010, _id(packet.packet_id) + patterns


def _write_unsuback(packet: UnsubAckPacket, _version: int) -> tuple[int, bytes]:
    _refuse([(any(int(code) >= NEGATIVE for code in packet.reason_codes), "a refused UNSUBSCRIBE")])
    return UNSUBACK << 4, _id(packet.packet_id)


def _write_disconnect(packet: DisconnectPacket, _version: int) -> tuple[int, bytes]:
    # A DISCONNECT of 3.x takes the will back [MQTT-3.14.4-3]: with another reason the connection is just closed.
    _refuse(
        [
            (int(packet.reason_code), "a reason in DISCONNECT"),
            (packet.session_expiry_interval is not None, "another session expiry"),
        ]
    )
    return DISCONNECT << 4, b""


_WRITERS: Final[dict[type, Callable[[Any, int], tuple[int, bytes]]]] = {
    ConnectPacket: _write_connect,
    ConnAckPacket: _write_connack,
    PublishPacket: _write_publish,
    PubAckPacket: _writer_of_ack(PUBACK << 4, negative=False),
    PubRecPacket: _writer_of_ack(PUBREC << 4, negative=False),
    PubRelPacket: _writer_of_ack(PUBREL << 4 | FLAGS_0010, negative=True),
    PubCompPacket: _writer_of_ack(PUBCOMP << 4, negative=True),
    SubscribePacket: _write_subscribe,
    SubAckPacket: _write_suback,
    UnsubscribePacket: _write_unsubscribe,
    UnsubAckPacket: _write_unsuback,
    PingReqPacket: lambda _packet, _version: (PINGREQ << 4, b""),
    PingRespPacket: lambda _packet, _version: (PINGRESP << 4, b""),
    DisconnectPacket: _write_disconnect,
}
