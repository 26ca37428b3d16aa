"""The decoders: whatever bytes come, and however they are cut, they give packets or `MalformedPacket`."""

from __future__ import annotations

import mqtt5
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.codec import check
from tests.helpers import packets_in, publish
from tests.unit.mqtt import strict
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Acknowledgement, AckRun, Decoder, Item, encode

LEVELS = (3, 4, 5)
versions = st.sampled_from(LEVELS)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9)
topics = texts.filter(lambda text: text and not set(text) & set("#+"))
patterns = st.lists(st.just("+") | topics.filter(lambda text: "/" not in text), min_size=1, max_size=4).map("/".join)
ids = st.integers(1, 65535)
qos_levels = st.sampled_from([mqtt5.QoS(0), mqtt5.QoS(1), mqtt5.QoS(2)])
_CODES = [mqtt5.SubAckReasonCode(code) for code in (0, 1, 2, 0x80)]

packets: st.SearchStrategy[mqtt5.Packet] = st.one_of(
    st.builds(
        lambda name, user, will, alive: mqtt5.ConnectPacket(
            name, username=user, clean_start=True, will=will, keep_alive=alive
        ),
        texts.filter(bool),
        st.none() | texts,
        st.none() | st.builds(mqtt5.Will, topics, payload=st.binary(max_size=9), qos=qos_levels, retain=st.booleans()),
        st.integers(0, 65535),
    ),
    st.sampled_from([0, 0x84, 0x85, 0x86, 0x87, 0x88]).map(
        lambda code: mqtt5.ConnAckPacket(reason_code=mqtt5.ConnAckReasonCode(code))
    ),
    st.builds(
        lambda qos, again, **more: publish(qos=qos, duplicate=again and qos > 0, **more),
        st.integers(0, 2),
        st.booleans(),
        topic=topics,
        payload=st.binary(max_size=300),
        packet_id=ids,
        retain=st.booleans(),
    ),
    *(
        st.builds(kind, ids)
        for kind in (mqtt5.PubAckPacket, mqtt5.PubRecPacket, mqtt5.PubRelPacket, mqtt5.PubCompPacket)
    ),
    st.builds(
        mqtt5.SubscribePacket,
        ids,
        st.lists(
            st.builds(mqtt5.TopicFilter, patterns, max_qos=qos_levels, retain_as_published=st.just(value=False)),
            min_size=1,
        ),
    ),
    st.builds(mqtt5.SubAckPacket, ids, st.lists(st.sampled_from(_CODES), min_size=1)),
    st.builds(mqtt5.UnsubscribePacket, ids, st.lists(patterns, min_size=1, max_size=5)),
    st.sampled_from([mqtt5.PingReqPacket(), mqtt5.PingRespPacket(), mqtt5.DisconnectPacket()]),
)
streams = st.lists(packets, min_size=1, max_size=12)


def flat(items: list[Item]) -> list[mqtt5.Packet]:
    return [packet for item in items for packet in packets_in(item)]


@given(streams, versions)
def test_what_was_written_is_read_wherever_it_is_cut(sent: list[mqtt5.Packet], version: int) -> None:
    data = b"".join(encode(packet, version) for packet in sent)
    decoder = Decoder(version=version)
    assert flat(decoder.feed(data)) == sent
    assert decoder._buffered_bytes == 0
    check(data, version)


@given(streams, versions, st.integers(0, 1 << 16), st.integers(1, 255))
def test_a_byte_that_is_another_gives_packets_or_malformed(
    sent: list[mqtt5.Packet], version: int, at: int, change: int
) -> None:
    data = bytearray(b"".join(encode(packet, version) for packet in sent))
    data[at % len(data)] ^= change
    check(bytes(data), version)


@given(st.binary(max_size=200), versions)
@example(b"0\x80\x80\x40", 4)
@example(bytes.fromhex("31 e0 00 00 00 00 00 00 03 00 23 16"), 5)  # refused in one piece, waited for byte by byte
def test_any_bytes_give_packets_or_malformed(data: bytes, version: int) -> None:
    check(data, version)


@pytest.mark.parametrize("version", LEVELS)
@pytest.mark.parametrize("kind", [mqtt5.PubAckPacket, mqtt5.PubRecPacket, mqtt5.PubRelPacket, mqtt5.PubCompPacket])
def test_short_answers_that_follow_each_other_come_as_one_run(kind: type[Acknowledgement], version: int) -> None:
    numbers = [*range(1, 301), 0xFFFF]
    data = b"".join(kind(packet_id).write() for packet_id in numbers)
    (run,) = Decoder(version=version).feed(data)
    assert isinstance(run, AckRun)
    assert (run.packet_type, list(run.packet_ids), len(run)) == (kind, numbers, 301)
    with pytest.raises(MalformedPacket, match="packet id 0"):
        Decoder(version=version).feed(data + data[:2] + b"\0\0")


def test_a_reason_is_never_lost_in_a_run() -> None:
    answers = [
        mqtt5.PubAckPacket(1),
        mqtt5.PubAckPacket(2),
        mqtt5.PubAckPacket(3, reason_code=mqtt5.PubAckReasonCode.QUOTA_EXCEEDED),
        mqtt5.PubAckPacket(4),
    ]
    assert flat(Decoder().feed(b"".join(answer.write() for answer in answers))) == answers


def test_a_large_packet_is_collected_without_being_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tries = mqtt5.PublishPacket("a", bytes(5_000_000)).write(), list[int]()
    decode = Decoder._decode_packets

    def counted(decoder: Decoder, buffer: bytes, items: list[Item]) -> int:
        tries.append(len(buffer))
        return decode(decoder, buffer, items)

    monkeypatch.setattr(Decoder, "_decode_packets", counted)
    decoder, pieces = Decoder(), [whole[i : i + 4096] for i in range(0, len(whole), 4096)]
    assert not any(decoder.feed(piece) for piece in pieces[:-1])
    assert [packet.write() for packet in flat(decoder.feed(pieces[-1]))] == [whole]
    assert tries == [4096, len(whole)]


@pytest.mark.parametrize("version", [5, 4])
@pytest.mark.parametrize("header", [0x20, 0x90])
@pytest.mark.parametrize("arrived", [5, 2000])
def test_a_packet_too_large_is_refused_before_it_is_collected(arrived: int, header: int, version: int) -> None:
    packet = bytes((header, 0xDC, 0x0B, 0, 1)) + bytes(1500)
    with pytest.raises(MalformedPacket, match="1,000") as caught:
        Decoder(1000, version).feed(mqtt5.PubAckPacket(7).write() + packet[:arrived])
    assert caught.value.reason == 0x95


# What the codec of MQTT 5 lets pass or dies of, and what servers of other versions say


# A panic inside the codec leaves an exception that nothing can catch; the fence is about the one it raises.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("topic", [b"a\xff\xfe", b"a\0b"])
def test_a_large_chunk_is_judged_the_same_and_panics_once_at_most(
    topic: bytes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "_codec_panicked", False)
    good = mqtt5.PublishPacket("topic", bytes(100)).write() * 400
    bad = mqtt5.PublishPacket("ST1", b"").write().replace(b"ST1", topic)
    for _ in range(5):
        with pytest.raises(MalformedPacket):
            Decoder().feed(good + bad + good)
    assert capfd.readouterr().err.count("panicked") <= 1


@pytest.mark.parametrize("session_present", [0, 1])
@pytest.mark.parametrize("code", range(6))
def test_a_server_that_answers_in_3_x_does_not_speak_5(code: int, session_present: int) -> None:
    """[MQTT-3.1.2-2 of 3.1.1]. Whatever it says, it has read our CONNECT as one of 3.x."""
    (packet,) = Decoder().feed(bytes((0x20, 2, session_present, code)))
    assert packet == mqtt5.ConnAckPacket(reason_code=mqtt5.ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION)


#: Return code of 3.x → what it means [MQTT 3.1.1 table 3.1].
MEANT = {
    1: mqtt5.ConnAckReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
    2: mqtt5.ConnAckReasonCode.CLIENT_ID_NOT_VALID,
    3: mqtt5.ConnAckReasonCode.SERVER_UNAVAILABLE,
    4: mqtt5.ConnAckReasonCode.BAD_USER_NAME_OR_PASSWORD,
    5: mqtt5.ConnAckReasonCode.NOT_AUTHORIZED,
}


@pytest.mark.parametrize("rest", [b"\0", b"\x04\x1f\0\1a"], ids=["no properties", "a reason string"])
@pytest.mark.parametrize("code", MEANT)
def test_a_refusal_of_3_x_in_the_form_of_5_is_understood(code: int, rest: bytes) -> None:
    """Moquette 0.17 answers ``20 03 00 01 00`` to any CONNECT of version 5 (taken from it)."""
    packet, _ = Decoder().feed(bytes((0x20, 2 + len(rest), 0, code)) + rest + b"\xd0\0")
    assert isinstance(packet, mqtt5.ConnAckPacket)
    assert (packet.reason_code, packet.reason_str) == (MEANT[code], "a" if rest != b"\0" else None)


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("form", ["20 02 00 {:02X}", "20 03 00 {:02X} 00", "20 07 00 {:02X} 04 1F 0001 61"])
@pytest.mark.parametrize("code", sorted(strict.REASONS[2] - {0}), ids=hex)
def test_a_refusal_of_5_is_understood_in_each_form_and_version(
    code: mqtt5.ConnAckReasonCode, form: str, version: int
) -> None:
    """MQTT 5 section 3.1.2.2: a server that speaks only version 5 answers 3.x with 0x84, as it knows to say it."""
    data = bytes.fromhex(form.format(code))
    (packet,) = Decoder(version=version).feed(data)
    assert isinstance(packet, mqtt5.ConnAckPacket)
    assert int(packet.reason_code) == code
    decoder, found = Decoder(version=version), list[object]()
    for index in range(len(data)):
        found += decoder.feed(data[index : index + 1])
    assert found == [packet]


def test_a_payload_format_that_does_not_exist_ends_the_connection_alone_and_among_many() -> None:
    good = mqtt5.PublishPacket("t", b"x", payload_format_indicator=1).write()
    for packets in (1, 50):
        with pytest.raises(MalformedPacket, match="Payload Format") as caught:
            Decoder().feed(good * (packets - 1) + good.replace(b"\x02\x01\x01", b"\x02\x01\x02"))
        assert caught.value.reason == 0x82
