"""A server's half of MQTT 3.1.1 and 3.1, added to the tables of `towline.mqtt.codec3` when it is imported."""

from __future__ import annotations

from typing import Final

import mqtt5

from towline.mqtt.checks import FieldReader
from towline.mqtt.codec3 import (
    CONNACK,
    CONNACK_CODES,
    CONNECT,
    DISCONNECT,
    LEVEL_31,
    PINGREQ,
    PINGRESP,
    PROTOCOL_NAMES,
    READERS,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    WRITERS,
    packet_id_bytes,
)

_MAX_QOS: Final = 2
#: Return codes of a refusal begin here.
_NEGATIVE: Final = 0x80
#: In 3.x a session that outlives its connection has no end of its own.
_NEVER: Final = 0xFFFFFFFF


def _read_connect(body: FieldReader, version: int) -> mqtt5.ConnectPacket:
    name = PROTOCOL_NAMES[version]
    if body.take_bytes(len(name)) != name:
        raise ValueError("another protocol name or level [MQTT-3.1.2-1, -2]")
    flags, keep_alive = body.byte(), body.uint16()
    _check_connect_flags(flags)
    client_id = body.string()
    will = _read_will(body, flags) if flags & 4 else None
    username = body.string() if flags & 0x80 else None
    password = body.binary() if flags & 0x40 else None
    body.check_end()
    clean = bool(flags & 2)
    if not client_id and (not clean or version == LEVEL_31):
        raise ValueError("an empty client id needs MQTT 3.1.1 and a clean session [MQTT-3.1.3-7]")
    return mqtt5.ConnectPacket(
        client_id,
        username=username,
        password=password,
        clean_start=clean,
        will=will,
        keep_alive=keep_alive,
        session_expiry_interval=0 if clean else _NEVER,
    )


def _check_connect_flags(flags: int) -> None:
    if flags & 1:
        raise ValueError("reserved flag of CONNECT is set [MQTT-3.1.2-3]")
    will_flags = flags & 0x38
    if (will_flags and not flags & 4) or will_flags & 0x18 == 0x18:
        raise ValueError("will flags contradict each other [MQTT-3.1.2-13, -14, -15]")
    if flags & 0x40 and not flags & 0x80:
        raise ValueError("a password without a user name [MQTT-3.1.2-22]")


def _read_will(body: FieldReader, flags: int) -> mqtt5.Will:
    topic, payload = body.string(), body.binary()
    return mqtt5.Will(topic, payload=payload, qos=mqtt5.QoS(flags >> 3 & 3), retain=bool(flags & 0x20))


def _read_subscribe(body: FieldReader, _version: int) -> mqtt5.SubscribePacket:
    packet_id, filters = body.packet_id(), []
    while body.remaining_bytes:
        pattern, qos = _filter(body), body.byte()
        if qos > _MAX_QOS:
            raise ValueError("requested QoS is above 2 or reserved bits are set [MQTT-3.8.3-4]")
        filters.append(mqtt5.TopicFilter(pattern, max_qos=mqtt5.QoS(qos), retain_as_published=False))
    if not filters:
        raise ValueError("SUBSCRIBE without a topic filter [MQTT-3.8.3-3]")
    return mqtt5.SubscribePacket(packet_id, filters)


def _read_unsubscribe(body: FieldReader, _version: int) -> mqtt5.UnsubscribePacket:
    packet_id, patterns = body.packet_id(), []
    while body.remaining_bytes:
        patterns.append(_filter(body))
    if not patterns:
        raise ValueError("UNSUBSCRIBE without a topic filter [MQTT-3.10.3-2]")
    return mqtt5.UnsubscribePacket(packet_id, patterns)


def _filter(body: FieldReader) -> str:
    pattern = body.string()
    if not pattern:
        raise ValueError("topic filter is empty [MQTT-4.7.3-1]")
    return pattern


def _read_pingreq(body: FieldReader, _version: int) -> mqtt5.PingReqPacket:
    body.check_end()
    return mqtt5.PingReqPacket()


def _read_disconnect(body: FieldReader, _version: int) -> mqtt5.DisconnectPacket:
    body.check_end()
    return mqtt5.DisconnectPacket()


def _write_connack(packet: mqtt5.ConnAckPacket, version: int) -> tuple[int, bytes]:
    code = CONNACK_CODES.index(packet.reason_code)
    return CONNACK << 4, bytes((packet.session_present and version != LEVEL_31, code))


def _write_suback(packet: mqtt5.SubAckPacket, _version: int) -> tuple[int, bytes]:
    codes = bytes(min(int(code), _NEGATIVE) for code in packet.reason_codes)
    return SUBACK << 4, packet_id_bytes(packet.packet_id) + codes


def _write_unsuback(packet: mqtt5.UnsubAckPacket, _version: int) -> tuple[int, bytes]:
    return UNSUBACK << 4, packet_id_bytes(packet.packet_id)


READERS.update(
    {
        CONNECT: _read_connect,
        SUBSCRIBE: _read_subscribe,
        UNSUBSCRIBE: _read_unsubscribe,
        PINGREQ: _read_pingreq,
        DISCONNECT: _read_disconnect,
    }
)
WRITERS.update(
    {
        mqtt5.ConnAckPacket: _write_connack,
        mqtt5.SubAckPacket: _write_suback,
        mqtt5.UnsubAckPacket: _write_unsuback,
        mqtt5.PingRespPacket: lambda _packet, _version: (PINGRESP << 4, b""),
    }
)
