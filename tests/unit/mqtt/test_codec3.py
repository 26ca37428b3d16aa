"""MQTT 3.1.1 and 3.1: bytes as the standard and a foreign encoder write them, refusals as the statements demand.

Labels [MQTT-x.y.z-n] are those of MQTT 3.1.1.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as paho
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mqtt5 import (
    AuthPacket,
    ConnAckPacket,
    ConnAckReasonCode,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PingReqPacket,
    PingRespPacket,
    PubAckPacket,
    PubAckReasonCode,
    PubCompPacket,
    PubCompReasonCode,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
    PubRelReasonCode,
    QoS,
    SubAckPacket,
    SubAckReasonCode,
    SubscribePacket,
    TopicFilter,
    UnsubAckPacket,
    UnsubAckReasonCode,
    UnsubscribePacket,
    Will,
)
from paho.mqtt.enums import CallbackAPIVersion

from tests.helpers import packets_in
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Decoder, Item, encode
from towline.mqtt.codec3 import LEVEL_31, LEVEL_311, write_packet

LEVELS = (LEVEL_31, LEVEL_311)
NEVER = 0xFFFFFFFF
FAILED = SubAckReasonCode.UNSPECIFIED_ERROR


def session(client_id: str, **fields: Any) -> ConnectPacket:
    """A CONNECT with CleanSession 0."""
    return ConnectPacket(client_id, session_expiry_interval=NEVER, **fields)


def read(data: bytes, version: int) -> tuple[Packet, int]:
    """The packet that bytes are, and how many of them; IndexError while it is not whole."""
    decoder = Decoder(version=version)
    packets = flat(decoder.feed(data))
    return packets[0], len(data) - decoder._buffered_bytes


def filters(*wanted: tuple[str, int]) -> list[TopicFilter]:
    return [TopicFilter(pattern, max_qos=QoS(qos), retain_as_published=False) for pattern, qos in wanted]


def publish(
    topic: str = "a/b", payload: bytes = b"x", qos: int = 1, packet_id: int = 1, **fields: Any
) -> PublishPacket:
    return PublishPacket(topic, payload, qos=QoS(qos), packet_id=packet_id if qos else None, **fields)


WILL = Will("w", payload=b"gone", qos=QoS(1), retain=True)

#: (packet, bytes of 3.1.1), written by hand from chapter 3 of the standard.
BY_HAND: list[tuple[Packet, str]] = [
    (ConnectPacket("fuzzish", clean_start=True, keep_alive=60), "10 13 0004 4D515454 04 02 003C 0007 66757A7A697368"),
    (session("c"), "10 0D 0004 4D515454 04 00 0000 0001 63"),
    (ConnectPacket("", clean_start=True), "10 0C 0004 4D515454 04 02 0000 0000"),
    (
        session("c", will=WILL, username="u", password=b"\x00\xff", keep_alive=10),
        "10 1D 0004 4D515454 04 EC 000A 0001 63 0001 77 0004 676F6E65 0001 75 0002 00FF",
    ),
    (ConnAckPacket(), "20 02 00 00"),
    (ConnAckPacket(session_present=True), "20 02 01 00"),
    (ConnAckPacket(reason_code=ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION), "20 02 00 01"),
    (ConnAckPacket(reason_code=ConnAckReasonCode.CLIENT_ID_NOT_VALID), "20 02 00 02"),
    (ConnAckPacket(reason_code=ConnAckReasonCode.SERVER_UNAVAILABLE), "20 02 00 03"),
    (ConnAckPacket(reason_code=ConnAckReasonCode.BAD_USER_NAME_OR_PASSWORD), "20 02 00 04"),
    (ConnAckPacket(reason_code=ConnAckReasonCode.NOT_AUTHORIZED), "20 02 00 05"),
    (publish("a/b", b"", 0), "30 05 0003 612F62"),
    (publish("a/b", b"hi", 0, retain=True), "31 07 0003 612F62 6869"),
    (publish("a/b", b"hi", 1, 10), "32 09 0003 612F62 000A 6869"),
    (publish("é", b"", 2, 65535, duplicate=True), "3C 06 0002 C3A9 FFFF"),
    (publish("a", b"y" * 200, 0), "30 CB01 0001 61" + "79" * 200),
    (PubAckPacket(258), "40 02 0102"),
    (PubRecPacket(258), "50 02 0102"),
    (PubRelPacket(258), "62 02 0102"),
    (PubCompPacket(258), "70 02 0102"),
    (SubscribePacket(10, filters(("a/b", 1), ("c/d", 2))), "82 0E 000A 0003 612F62 01 0003 632F64 02"),
    (SubAckPacket(10, [SubAckReasonCode(0), SubAckReasonCode(2), FAILED]), "90 05 000A 00 02 80"),
    (UnsubscribePacket(10, ["a/b", "c/d"]), "A2 0C 000A 0003 612F62 0003 632F64"),
    (UnsubAckPacket(10, []), "B0 02 000A"),
    (PingReqPacket(), "C0 00"),
    (PingRespPacket(), "D0 00"),
    (DisconnectPacket(), "E0 00"),
]
EXAMPLES = [(packet, bytes.fromhex(text)) for packet, text in BY_HAND]
names = [f"{type(packet).__name__}-{data[:4].hex()}" for packet, data in EXAMPLES]


@pytest.mark.parametrize(("packet", "data"), EXAMPLES, ids=names)
def test_each_packet_is_written_and_read_as_the_standard_says(packet: Packet, data: bytes) -> None:
    """CONNECT's fields in order [MQTT-3.1.3-1, -3]; fields as their flags say [MQTT-3.1.2-9, -11, -18, -19, -20, -21].

    No packet id at QoS 0 [MQTT-2.3.1-5]; acknowledgements carry the id of what they answer [MQTT-2.3.1-6, -7].
    """
    assert write_packet(packet, LEVEL_311) == data
    assert read(data + b"\xff", LEVEL_311) == (packet, len(data))


@pytest.mark.parametrize(("packet", "data"), EXAMPLES, ids=names)
def test_a_cut_at_every_byte_is_incomplete_and_nothing_else(packet: Packet, data: bytes) -> None:
    for cut in range(len(data)):
        with pytest.raises(IndexError):
            read(data[:cut], LEVEL_311)
        decoder = Decoder(version=LEVEL_311)
        assert flat(decoder.feed(data[:cut]) + decoder.feed(data[cut:])) == [packet]


def flat(items: list[Item]) -> list[Packet]:
    packets: list[Packet] = []
    for item in items:
        packets += packets_in(item)
    return packets


def test_the_bytes_of_3_1() -> None:
    connect = ConnectPacket("fuzzish", clean_start=True, keep_alive=60)
    data = bytes.fromhex("10 15 0006 4D5149736470 03 02 003C 0007 66757A7A697368")
    assert write_packet(connect, LEVEL_31) == data
    assert read(data, LEVEL_31) == (connect, len(data))


def test_3_1_has_no_session_present() -> None:
    assert write_packet(ConnAckPacket(session_present=True), LEVEL_31) == b"\x20\x02\x00\x00"
    assert read(b"\x20\x02\x01\x00", LEVEL_31)[0] == ConnAckPacket(session_present=False)


@pytest.mark.parametrize("data", [b"\x6a\x02\x00\x01", b"\x8a\x06\x00\x01\x00\x01a\x01", b"\xaa\x05\x00\x01\x00\x01a"])
def test_3_1_sets_dup_on_what_it_sends_again(data: bytes) -> None:
    read(data, LEVEL_31)
    with pytest.raises(ValueError, match="flags"):
        read(data, LEVEL_311)


# Against a foreign encoder


def paho_writes(act: Callable[[Any], object], version: int) -> bytes:
    """What a paho client puts on the wire when `act` is done to it."""
    client: Any = paho.Client(CallbackAPIVersion.VERSION2, "plant-7", protocol=version, clean_session=False)  # type: ignore[arg-type]
    client._sock, far_end = socket.socketpair()
    sent: list[bytes] = []
    client._packet_queue = lambda _command, packet, *_rest: sent.append(bytes(packet))
    act(client)
    client._sock.close()
    client._sock = None
    far_end.close()
    return b"".join(sent)


@pytest.mark.parametrize("version", LEVELS)
@pytest.mark.parametrize(
    ("act", "packet"),
    [
        (lambda c: c._send_connect(60), session("plant-7", keep_alive=60)),
        (
            lambda c: c._send_publish(7, b"t/\xc3\xa9", b"x" * 300, 1, retain=True),
            publish("t/é", b"x" * 300, 1, 7, retain=True),
        ),
        (lambda c: c._send_publish(8, b"t", b"", 2, dup=True), publish("t", b"", 2, 8, duplicate=True)),
        (lambda c: c._send_publish(0, b"t", b"p", 0), publish("t", b"p", 0)),
        (lambda c: c._send_puback(9), PubAckPacket(9)),
        (lambda c: c._send_pubrec(9), PubRecPacket(9)),
        (lambda c: c._send_pubrel(9), PubRelPacket(9)),
        (lambda c: c._send_pubcomp(9), PubCompPacket(9)),
        (
            lambda c: c._send_subscribe(False, [(b"a/#", 1), (b"+", 2)]),
            SubscribePacket(1, filters(("a/#", 1), ("+", 2))),
        ),
        (lambda c: c._send_unsubscribe(False, [b"a/#", b"+"]), UnsubscribePacket(1, ["a/#", "+"])),
        (lambda c: c._send_pingreq(), PingReqPacket()),
        (lambda c: c._send_disconnect(), DisconnectPacket()),
    ],
)
def test_paho_writes_the_same_bytes(act: Callable[[Any], object], packet: Packet, version: int) -> None:
    sent = paho_writes(act, version)
    assert sent == write_packet(packet, version)
    assert read(sent, version) == (packet, len(sent))


# Round trip

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
topics = texts.filter(lambda text: text and not set(text) & set("#+"))
patterns = st.lists(st.just("+") | topics.filter(lambda text: "/" not in text), min_size=1, max_size=4).map("/".join)
ids = st.integers(1, 65535)
payloads = st.binary(max_size=300)
qos_levels = st.sampled_from([QoS(0), QoS(1), QoS(2)])
wills = st.builds(Will, topics, payload=payloads, qos=qos_levels, retain=st.booleans())


@st.composite
def connects(draw: st.DrawFn) -> ConnectPacket:
    clean = draw(st.booleans())
    username = draw(st.none() | texts)
    return ConnectPacket(
        draw(texts.filter(bool)),
        username=username,
        password=None if username is None else draw(st.none() | payloads),
        clean_start=clean,
        will=draw(st.none() | wills),
        keep_alive=draw(st.integers(0, 65535)),
        session_expiry_interval=0 if clean else NEVER,
    )


@st.composite
def publishes(draw: st.DrawFn) -> PublishPacket:
    qos = draw(qos_levels)
    return PublishPacket(
        draw(topics),
        draw(payloads),
        qos=qos,
        retain=draw(st.booleans()),
        packet_id=draw(ids) if int(qos) else None,
        duplicate=bool(int(qos)) and draw(st.booleans()),
    )


wanted_filters = st.lists(
    st.builds(TopicFilter, patterns, max_qos=qos_levels, retain_as_published=st.just(value=False)),
    min_size=1,
    max_size=5,
)
codes = st.lists(st.sampled_from([SubAckReasonCode(0), SubAckReasonCode(1), SubAckReasonCode(2), FAILED]), min_size=1)
packets: st.SearchStrategy[Packet] = st.one_of(
    connects(),
    st.sampled_from([ConnAckReasonCode(code) for code in (0, 0x84, 0x85, 0x86, 0x87, 0x88)]).map(
        lambda code: ConnAckPacket(reason_code=code)
    ),
    publishes(),
    *(st.builds(kind, ids) for kind in (PubAckPacket, PubRecPacket, PubRelPacket, PubCompPacket)),
    st.builds(SubscribePacket, ids, wanted_filters),
    st.builds(SubAckPacket, ids, codes),
    st.builds(UnsubscribePacket, ids, st.lists(patterns, min_size=1, max_size=5)),
    st.builds(UnsubAckPacket, ids, st.just([])),
    st.sampled_from([PingReqPacket(), PingRespPacket(), DisconnectPacket()]),
)


@given(st.lists(packets, min_size=1, max_size=20), st.integers(1, 100), st.sampled_from(LEVELS))
def test_round_trip_in_pieces(sent: list[Packet], piece: int, version: int) -> None:
    data = b"".join(encode(packet, version) for packet in sent)
    decoder, items = Decoder(version=version), list[Item]()
    for start in range(0, len(data), piece):
        items += decoder.feed(data[start : start + piece])
    assert flat(items) == sent
    assert decoder._buffered_bytes == 0


@given(st.binary(max_size=200), st.sampled_from(LEVELS))
@example(b"0\x80\x80\x40", LEVEL_311)
def test_any_bytes_give_packets_or_malformed(data: bytes, version: int) -> None:
    decoder = Decoder(1 << 29, version)  # above any Remaining Length: of a PUBLISH too large no byte would be held
    try:
        items = decoder.feed(data)
    except MalformedPacket:
        return
    assert b"".join(write_packet(packet, LEVEL_311) for packet in flat(items)) == data[
        : len(data) - decoder._buffered_bytes
    ] or (version == LEVEL_31)


@given(packets, st.data())
def test_a_packet_with_one_byte_changed_never_reads_beyond_its_end(packet: Packet, data: st.DataObject) -> None:
    good = bytearray(write_packet(packet, LEVEL_311))
    good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, length = read(bytes(good), LEVEL_311)
    except (IndexError, ValueError):
        return
    assert length <= len(good)


# Refusals


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("00 00", "PacketType 0"),
        ("F0 00", "PacketType 15"),
        ("21 02 00 00", "flags"),  # [MQTT-2.2.2-1, -2]
        ("60 02 0001", "flags"),
        ("80 06 0001 0001 61 00", "flags"),
        ("E1 00", "flags"),
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
        ("82 06 0001 0001 00 00", "U\\+0000"),
        ("20 03 00 00 00", "too many"),
        ("20 01 00", "too short"),
        ("20 02 02 00", "reserved flags"),
        ("20 02 00 06", "return code 6"),
        ("20 02 01 05", "Session Present"),  # [MQTT-3.2.2-4]
        ("40 03 0001 00", "too many"),
        ("40 01 01", "too short"),
        ("82 02 0001", "without a topic filter"),  # [MQTT-3.8.3-3]
        ("82 05 0001 0000 00", "filter is empty"),
        ("82 06 0001 0001 61 03", "QoS"),
        ("82 06 0001 0001 61 04", "QoS"),
        ("82 05 0001 0001 61", "too short"),
        ("90 02 0001", "without a return code"),
        ("90 03 0001 03", "SubAckReasonCode"),  # [MQTT-3.9.3-2]
        ("A2 02 0001", "without a topic filter"),  # [MQTT-3.10.3-2]
        ("B0 03 0001 00", "too many"),
        ("D0 01 00", "too many"),
        ("10 0D 0004 4D515454 05 00 0000 0001 63", "protocol name or level"),
        ("10 0F 0006 4D5149736470 03 00 0000 0001 63", "protocol name or level"),
        ("10 0D 0004 4D515454 04 01 0000 0001 63", "reserved flag"),  # [MQTT-3.1.2-3]
        ("10 0D 0004 4D515454 04 20 0000 0001 63", "will flags"),  # [MQTT-3.1.2-15]
        ("10 0D 0004 4D515454 04 08 0000 0001 63", "will flags"),  # [MQTT-3.1.2-13]
        ("10 14 0004 4D515454 04 1E 0000 0001 63 0001 77 0002 6869", "will flags"),  # [MQTT-3.1.2-14]
        ("10 10 0004 4D515454 04 40 0000 0001 63 0001 70", "password"),  # [MQTT-3.1.2-22]
        ("10 0C 0004 4D515454 04 00 0000 0000", "empty client id"),  # [MQTT-3.1.3-7]
        ("10 0E 0004 4D515454 04 02 0000 0001 63 00", "too many"),
    ],
)
def test_malformed_bytes_are_refused(data: str, words: str) -> None:
    raw = bytes.fromhex(data)
    with pytest.raises(MalformedPacket, match=words):
        Decoder(version=LEVEL_311).feed(raw)


def test_a_wildcard_in_a_topic_name_has_a_reason_of_its_own() -> None:
    """[MQTT-3.3.2-2, MQTT-4.7.1-1]."""
    for data in ("30 05 0003 612F23", "32 05 0001 2B 0001"):
        with pytest.raises(MalformedPacket, match=r"MQTT-3\.3\.2-2") as caught:
            Decoder(version=LEVEL_311).feed(bytes.fromhex(data))
        assert caught.value.reason == 0x90


# What 3.x can't say


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (AuthPacket(), "AuthPacket"),
        (ConnectPacket(""), "empty client id"),
        (session("c", password=b"p"), "password"),
        (ConnAckPacket(reason_code=ConnAckReasonCode.BANNED), "0x8a"),
        (ConnAckPacket(session_present=True, reason_code=ConnAckReasonCode.NOT_AUTHORIZED), "Session Present"),
        (PublishPacket("", b"x", topic_alias=1), "topic is empty"),
        (PublishPacket("a", b"x", duplicate=True), "DUP"),
        (PublishPacket("a\0", b"x"), "U\\+0000"),
        (PublishPacket("a", b"x", qos=QoS(1), packet_id=0), "packet id 0"),
        (SubscribePacket(1, filters(("", 1))), "filter is empty"),
        (UnsubAckPacket(1, [UnsubAckReasonCode.NOT_AUTHORIZED]), "UNSUBSCRIBE"),
    ],
)
def test_what_can_not_be_said_is_refused(packet: Packet, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write_packet(packet, LEVEL_311)


@pytest.mark.parametrize(
    ("rich", "plain"),
    [
        (session("c", receive_max=20, max_packet_size=999, topic_alias_max=3), session("c")),
        (ConnectPacket("c", session_expiry_interval=3600), session("c")),
        (PubAckPacket(1, reason_code=PubAckReasonCode.NO_MATCHING_SUBSCRIBERS), PubAckPacket(1)),
        (PubRelPacket(1, reason_code=PubRelReasonCode.PACKET_ID_NOT_FOUND), PubRelPacket(1)),
        (PubCompPacket(1, reason_code=PubCompReasonCode.PACKET_ID_NOT_FOUND, reason_str="?"), PubCompPacket(1)),
        (SubscribePacket(1, [TopicFilter("a")]), SubscribePacket(1, filters(("a", 2)))),
        (SubAckPacket(1, [SubAckReasonCode.NOT_AUTHORIZED]), SubAckPacket(1, [FAILED])),
        (UnsubAckPacket(1, [UnsubAckReasonCode.NO_SUBSCRIPTION_EXISTED]), UnsubAckPacket(1, [])),
        (DisconnectPacket(reason_str="bye"), DisconnectPacket()),
        (publish(content_type="t", user_properties=[("a", "b")], topic_alias=3), publish()),
        (publish(message_expiry_interval=5), publish()),
    ],
)
def test_what_means_the_same_without_is_left_out(rich: Packet, plain: Packet) -> None:
    assert write_packet(rich, LEVEL_311) == write_packet(plain, LEVEL_311)


@pytest.mark.parametrize("length", [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_every_size_of_the_remaining_length(length: int) -> None:
    packet = publish("t", bytes(max(0, length - 3)), 0)
    data = write_packet(packet, LEVEL_311)
    assert read(data, LEVEL_311) == (packet, len(data))
    assert flat(Decoder(version=LEVEL_311).feed(data)) == [packet]
