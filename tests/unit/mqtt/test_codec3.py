"""MQTT 3.1.1 and 3.1: bytes as the standard writes them, refusals as the statements demand.

Labels [MQTT-x.y.z-n] are those of MQTT 3.1.1.
"""

from __future__ import annotations

from typing import Any

import mqtt5
import pytest

from tests.helpers import packets_in, publish
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Decoder
from towline.mqtt.codec3 import LEVEL_31, LEVEL_311, write_packet

NEVER = 0xFFFFFFFF
FAILED = mqtt5.SubAckReasonCode.UNSPECIFIED_ERROR


def session(client_id: str, **fields: Any) -> mqtt5.ConnectPacket:
    """A CONNECT with CleanSession 0."""
    return mqtt5.ConnectPacket(client_id, session_expiry_interval=NEVER, **fields)


def read(data: bytes, version: int) -> tuple[mqtt5.Packet, int]:
    """The packet that bytes are, and how many of them; IndexError while it is not whole."""
    decoder = Decoder(version=version)
    packets = packets_in(decoder.feed(data)[0])
    return packets[0], len(data) - decoder._buffered_bytes


def filters(*wanted: tuple[str, int]) -> list[mqtt5.TopicFilter]:
    return [mqtt5.TopicFilter(pattern, max_qos=mqtt5.QoS(qos), retain_as_published=False) for pattern, qos in wanted]


WILL = mqtt5.Will("w", payload=b"gone", qos=mqtt5.QoS(1), retain=True)

#: (packet, bytes of 3.1.1), written by hand from chapter 3 of the standard.
BY_HAND: list[tuple[mqtt5.Packet, str]] = [
    (
        mqtt5.ConnectPacket("fuzzish", clean_start=True, keep_alive=60),
        "10 13 0004 4D515454 04 02 003C 0007 66757A7A697368",
    ),
    (session("c"), "10 0D 0004 4D515454 04 00 0000 0001 63"),
    (mqtt5.ConnectPacket("", clean_start=True), "10 0C 0004 4D515454 04 02 0000 0000"),
    (
        session("c", will=WILL, username="u", password=b"\x00\xff", keep_alive=10),
        "10 1D 0004 4D515454 04 EC 000A 0001 63 0001 77 0004 676F6E65 0001 75 0002 00FF",
    ),
    (mqtt5.ConnAckPacket(), "20 02 00 00"),
    (mqtt5.ConnAckPacket(session_present=True), "20 02 01 00"),
    (mqtt5.ConnAckPacket(reason_code=mqtt5.ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION), "20 02 00 01"),
    (mqtt5.ConnAckPacket(reason_code=mqtt5.ConnAckReasonCode.CLIENT_ID_NOT_VALID), "20 02 00 02"),
    (mqtt5.ConnAckPacket(reason_code=mqtt5.ConnAckReasonCode.SERVER_UNAVAILABLE), "20 02 00 03"),
    (mqtt5.ConnAckPacket(reason_code=mqtt5.ConnAckReasonCode.BAD_USER_NAME_OR_PASSWORD), "20 02 00 04"),
    (mqtt5.ConnAckPacket(reason_code=mqtt5.ConnAckReasonCode.NOT_AUTHORIZED), "20 02 00 05"),
    (publish("a/b", b"", 0), "30 05 0003 612F62"),
    (publish("a/b", b"hi", 0, retain=True), "31 07 0003 612F62 6869"),
    (publish("a/b", b"hi", 1, 10), "32 09 0003 612F62 000A 6869"),
    (publish("é", b"", 2, 65535, duplicate=True), "3C 06 0002 C3A9 FFFF"),
    (publish("a", b"y" * 200, 0), "30 CB01 0001 61" + "79" * 200),
    (mqtt5.PubAckPacket(258), "40 02 0102"),
    (mqtt5.PubRecPacket(258), "50 02 0102"),
    (mqtt5.PubRelPacket(258), "62 02 0102"),
    (mqtt5.PubCompPacket(258), "70 02 0102"),
    (mqtt5.SubscribePacket(10, filters(("a/b", 1), ("c/d", 2))), "82 0E 000A 0003 612F62 01 0003 632F64 02"),
    (mqtt5.SubAckPacket(10, [mqtt5.SubAckReasonCode(0), mqtt5.SubAckReasonCode(2), FAILED]), "90 05 000A 00 02 80"),
    (mqtt5.UnsubscribePacket(10, ["a/b", "c/d"]), "A2 0C 000A 0003 612F62 0003 632F64"),
    (mqtt5.UnsubAckPacket(10, []), "B0 02 000A"),
    (mqtt5.PingReqPacket(), "C0 00"),
    (mqtt5.PingRespPacket(), "D0 00"),
    (mqtt5.DisconnectPacket(), "E0 00"),
]


@pytest.mark.parametrize(("packet", "text"), BY_HAND)
def test_each_packet_is_written_and_read_as_the_standard_says(packet: mqtt5.Packet, text: str) -> None:
    """CONNECT's fields in order [MQTT-3.1.3-1, -3]; fields as their flags say [MQTT-3.1.2-9, -11, -18, -19, -20, -21].

    The flags of a will as it is, none without one [MQTT-3.1.2-13, -14, -15]; a topic filter at least [MQTT-3.8.3-3],
    [MQTT-3.10.3-2]. No packet id at QoS 0 [MQTT-2.3.1-5]; acknowledgements carry the id of what they answer
    [MQTT-2.3.1-6, -7].
    """
    data = bytes.fromhex(text)
    assert write_packet(packet, LEVEL_311) == data
    assert read(data + b"\xff", LEVEL_311) == (packet, len(data))


def test_the_bytes_of_3_1() -> None:
    connect = mqtt5.ConnectPacket("fuzzish", clean_start=True, keep_alive=60)
    data = bytes.fromhex("10 15 0006 4D5149736470 03 02 003C 0007 66757A7A697368")
    assert write_packet(connect, LEVEL_31) == data
    assert read(data, LEVEL_31) == (connect, len(data))
    assert read(b"\x20\x02\x01\x00", LEVEL_31)[0] == mqtt5.ConnAckPacket(), "no Session Present"
    assert read(b"\x6a\x02\x00\x01", LEVEL_31)[0] == mqtt5.PubRelPacket(1), "DUP on what comes again"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("00 00", "PacketType 0"),
        ("F0 00", "PacketType 15"),
        ("21 02 00 00", "flags"),  # [MQTT-2.2.2-1, -2]
        ("60 02 0001", "flags"),
        ("30 FF FF FF FF 01", "variable byte integer"),
        ("D0 80 00", "longer than needed"),
        ("30 83 00 0001 61", "longer than needed"),
        ("36 05 0001 61 0001", "QoS 3"),  # [MQTT-3.3.1-4]
        ("38 03 0001 61", "DUP"),  # [MQTT-3.3.1-2]
        ("32 05 0001 61 0000", "packet id 0"),  # [MQTT-2.3.1-1]
        ("40 02 0000", "packet id 0"),
        ("90 03 0000 00", "packet id 0"),
        ("30 02 0000", "topic is empty"),
        ("30 03 0000 61", "topic is empty"),  # [MQTT-4.7.3-1]
        ("30 00", "too short"),
        ("30 03 0002 61", "too short"),
        ("32 04 0001 61 00", "too short"),
        ("32 05 0005 61 0001", "too short"),
        ("30 05 0003 61ff62", "ill-formed UTF-8"),  # [MQTT-1.5.3-1]
        ("30 05 0003 EDA080", "ill-formed UTF-8"),
        ("30 05 0003 610062", "U\\+0000"),  # [MQTT-1.5.3-2]
        ("20 03 00 00 00", "too many"),
        ("20 01 00", "too short"),
        ("20 02 02 00", "reserved flags"),
        ("20 02 00 06", "return code 6"),
        ("20 02 00 7F", "return code 127"),
        ("20 02 00 C0", "ConnAckReasonCode value: 192"),
        ("20 02 01 05", "Session Present"),  # [MQTT-3.2.2-4]
        ("40 03 0001 00", "too many"),
        ("40 01 01", "too short"),
        ("90 02 0001", "without a return code"),
        ("90 03 0001 03", "SubAckReasonCode"),  # [MQTT-3.9.3-2]
        ("B0 03 0001 00", "too many"),
        ("D0 01 00", "too many"),
        ("6A 02 0001", "flags"),
        ("30 05 0003 612F23", "MQTT-3.3.2-2"),  # [MQTT-3.3.2-2, MQTT-4.7.1-1]
        ("32 05 0001 2B 0001", "MQTT-3.3.2-2"),
    ],
)
def test_malformed_bytes_are_refused(data: str, words: str) -> None:
    with pytest.raises(MalformedPacket, match=words) as caught:
        Decoder(version=LEVEL_311).feed(bytes.fromhex(data))
    assert caught.value.reason == (0x90 if words == "MQTT-3.3.2-2" else 0x81)


# What 3.x can't say


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (mqtt5.AuthPacket(), "AuthPacket"),
        (mqtt5.ConnectPacket(""), "empty client id"),
        (session("c", password=b"p"), "password"),
        (mqtt5.PublishPacket("", b"x", topic_alias=1), "topic is empty"),
        (mqtt5.PublishPacket("a", b"x", duplicate=True), "DUP"),
        (mqtt5.PublishPacket("a", b"x", qos=mqtt5.QoS(1), packet_id=0), "packet id 0"),
        (mqtt5.SubscribePacket(1, filters(("", 1))), "filter is empty"),
    ],
)
def test_what_can_not_be_said_is_refused(packet: mqtt5.Packet, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write_packet(packet, LEVEL_311)


@pytest.mark.parametrize("length", [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_every_size_of_the_remaining_length(length: int) -> None:
    packet = publish("t", bytes(max(0, length - 3)), 0)
    data = write_packet(packet, LEVEL_311)
    assert read(data, LEVEL_311) == (packet, len(data))
