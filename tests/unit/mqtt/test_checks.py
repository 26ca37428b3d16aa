"""What the codec of MQTT 5 lets pass or dies of never gets through the decoder, and its panic is seen once at most."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import mqtt5
import pytest
from mqtt5 import (
    ConnAckPacket,
    ConnAckReasonCode,
    ConnectPacket,
    DisconnectPacket,
    PubAckPacket,
    PublishPacket,
    QoS,
    SubscribePacket,
    TopicFilter,
    UnsubscribePacket,
    Will,
)

from tests.helpers import packets_in
from tests.unit.mqtt import strict
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Decoder, PublishRun

# A panic inside the codec leaves an exception that nothing can catch; the fence is about the one it raises.
panics = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _trust_again() -> Iterator[None]:
    yield
    Decoder._codec_panicked = False


#: One packet per place where a string can stand; each string is "ST" + a mark that the test replaces.
WITH_STRINGS: list[mqtt5.Packet] = [
    ConnectPacket("ST1", username="ST2", will=Will("ST3", content_type="ST4", payload=b"\xff"), password=b"\xff\xfe"),
    ConnAckPacket(reason_str="ST1", assigned_client_id="ST2", user_properties=[("ST3", "ST4")], server_keep_alive=1),
    ConnAckPacket(authentication_method="ST1", authentication_data=b"\xff", response_info="ST2"),
    PublishPacket("ST1", b"\xff", content_type="ST2", response_topic="ST3", correlation_data=b"\xff", topic_alias=3),
    PublishPacket("ST1", b"", qos=QoS(2), packet_id=9, user_properties=[("ST2", "ST3")], subscription_ids=[1, 300]),
    PubAckPacket(1, reason_str="ST1"),
    SubscribePacket(1, [TopicFilter("ST1"), TopicFilter("ST2")], subscription_id=200, user_properties=[("ST3", "")]),
    UnsubscribePacket(1, ["ST1", "ST2"], user_properties=[("ST3", "ST4")]),
    DisconnectPacket(reason_str="ST1", server_reference="ST2", session_expiry_interval=5),
]
PLACES = [(packet, mark) for packet in WITH_STRINGS for mark in range(1, 5) if b"ST%d" % mark in packet.write()]


def with_bytes(packet: mqtt5.Packet, mark: int, text: bytes) -> bytes:
    assert len(text) == 3
    return packet.write().replace(b"ST%d" % mark, text)


@pytest.mark.parametrize(("packet", "mark"), PLACES)
def test_text_is_judged_in_every_place_and_the_codec_never_sees_what_it_dies_of(
    packet: mqtt5.Packet, mark: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """[MQTT-1.5.4-1, -2, MQTT-4.7.3-2]; noncharacters are legal, and U+FEFF is kept [MQTT-1.5.4-3]."""
    for text in (b"a\xff\xfe", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"ab\xc3", b"a\0b"):
        with pytest.raises(MalformedPacket, match=r"MQTT-1\.5\.4-[12]") as caught:
            Decoder().feed(with_bytes(packet, mark, text))
        assert caught.value.reason == 0x81
    for legal in ("\ufffe", "\ufeff", "日"):
        data = with_bytes(packet, mark, legal.encode())
        (item,) = Decoder().feed(data)
        (read,) = packets_in(item)
        assert read.write() == data
    assert capfd.readouterr().err == ""


@panics
@pytest.mark.parametrize("topic", [b"a\xff\xfe", b"a\0b"])
def test_a_large_chunk_is_judged_the_same_and_panics_once_at_most(
    topic: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    good = PublishPacket("topic", bytes(100)).write() * 400
    bad = with_bytes(PublishPacket("ST1", b""), 1, topic)
    for _ in range(5):
        with pytest.raises(MalformedPacket):
            Decoder().feed(good + bad + good)
    assert capfd.readouterr().err.count("panicked") <= 1


@pytest.mark.parametrize("session_present", [0, 1])
@pytest.mark.parametrize("code", range(6))
def test_a_server_that_answers_in_3_x_does_not_speak_5(code: int, session_present: int) -> None:
    """[MQTT-3.1.2-2 of 3.1.1]. Whatever it says, it has read our CONNECT as one of 3.x."""
    (packet,) = Decoder().feed(bytes((0x20, 2, session_present, code)))
    assert packet == ConnAckPacket(reason_code=ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION)


#: Return code of 3.x → what it means [MQTT 3.1.1 table 3.1].
MEANT = {
    1: ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
    2: ConnAckReasonCode.CLIENT_ID_NOT_VALID,
    3: ConnAckReasonCode.SERVER_UNAVAILABLE,
    4: ConnAckReasonCode.BAD_USER_NAME_OR_PASSWORD,
    5: ConnAckReasonCode.NOT_AUTHORIZED,
}


@pytest.mark.parametrize("rest", [b"\0", b"\x04\x1f\0\1a"], ids=["no properties", "a reason string"])
@pytest.mark.parametrize("code", MEANT)
def test_a_refusal_of_3_x_in_the_form_of_5_is_understood(code: int, rest: bytes) -> None:
    """Moquette 0.17 answers ``20 03 00 01 00`` to any CONNECT of version 5 (taken from it)."""
    packet, _ = Decoder().feed(bytes((0x20, 2 + len(rest), 0, code)) + rest + b"\xd0\0")
    assert isinstance(packet, ConnAckPacket)
    assert (packet.reason_code, packet.reason_str) == (MEANT[code], "a" if rest != b"\0" else None)


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("form", ["20 02 00 {:02X}", "20 03 00 {:02X} 00", "20 07 00 {:02X} 04 1F 0001 61"])
@pytest.mark.parametrize("code", sorted(strict.REASONS[2] - {0}), ids=hex)
def test_a_refusal_of_5_is_understood_in_each_form_and_version(
    code: ConnAckReasonCode, form: str, version: int
) -> None:
    """MQTT 5 section 3.1.2.2: a server that speaks only version 5 answers 3.x with 0x84, as it knows to say it."""
    data = bytes.fromhex(form.format(code))
    (packet,) = Decoder(version=version).feed(data)
    assert isinstance(packet, ConnAckPacket)
    assert int(packet.reason_code) == code
    decoder, found = Decoder(version=version), list[object]()
    for index in range(len(data)):
        found += decoder.feed(data[index : index + 1])
    assert found == [packet]


@pytest.mark.parametrize(
    "data", ["20 01 00", "20 03 00 00 00", "20 03 00 06 00", "20 02 00 06", "20 02 00 7F", "20 02 00 C0"]
)
def test_what_no_version_says_is_refused_in_3_x(data: str) -> None:
    with pytest.raises(MalformedPacket):
        Decoder(version=4).feed(bytes.fromhex(data) + b"\xd0\0")


def by_hand(header: int, topic: bytes, properties: bytes, payload: bytes) -> bytes:
    """A PUBLISH as section 3.3 of MQTT 5 lays it out, with whatever bytes."""

    def length(value: int) -> bytes:
        return bytes((value,)) if value < 128 else bytes((value & 127 | 128,)) + length(value >> 7)

    packet_id = b"\x00\x07" if header & 6 else b""
    body = len(topic).to_bytes(2) + topic + packet_id + length(len(properties)) + properties + payload
    return bytes((header,)) + length(len(body)) + body


@pytest.mark.parametrize("payload", [b"", b"\xff", b"\xff" * 200, b"\xff" * 16_000])
def test_the_quick_look_finds_what_is_wrong_wherever_it_stands(
    payload: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    topics = [b"t", b"t" * 300, "ü".encode(), b"t\xff"]
    blocks = [b"", b"\x01\x00", b"\x03\x00\x01c", b"\x03\x00\x01\xff", b"\x02\x00\x00\x00\x80"]
    blocks += [b"\x26\x00\x01k" + size.to_bytes(2) + b"v" * size for size in (120, 121, 122)]
    for header, topic, block in product((0x30, 0x32, 0x34), topics, blocks):
        packet, decoder = by_hand(header, topic, block, payload), Decoder()
        assert decoder.feed(packet[: len(packet) - len(payload) - 1]) == []
        rest = packet[len(packet) - len(payload) - 1 :] + b"\xd0\x00"
        if b"\xff" in topic or b"\xff" in block:
            with pytest.raises(MalformedPacket, match=r"MQTT-1\.5\.4-1"):
                decoder.feed(rest)
            continue
        run, _ = decoder.feed(rest)
        assert isinstance(run, PublishRun)
        assert (run.packets[0].topic.encode(), run.packets[0].payload) == (topic, payload)
    assert capfd.readouterr().err == "", "the codec never saw what it dies of"
