"""The decoder: any cut gives the same packets, any bytes give packets or `MalformedPacket`."""

from __future__ import annotations

import mqtt5
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import (
    ConnAckPacket,
    PingRespPacket,
    PubAckPacket,
    PubAckReasonCode,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
    QoS,
)

from tests.helpers import packets_in
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Acknowledgement, AckRun, Decoder, Item, PublishRun
from towline.mqtt.codec3 import QOS_OF_HEADER


def publish(number: int, topic: str = "a/b", payload: bytes = b"x") -> PublishPacket:
    return PublishPacket(topic, payload, qos=QoS.AT_LEAST_ONCE, packet_id=number)


STREAM = b"".join(
    [
        ConnAckPacket(session_present=True, receive_max=20, reason_str="hello").write(),
        publish(1).write(),
        publish(2, payload=b"y" * 300).write(),
        PingRespPacket().write(),
        PublishPacket("t", b"", retain=True).write(),
        publish(3).write(),
        PubAckPacket(7).write(),
    ]
)


def flat(items: list[Item]) -> list[bytes]:
    packets: list[mqtt5.Packet] = []
    for item in items:
        packets += packets_in(item)
    return [packet.write() for packet in packets]


def test_packets_come_in_order_and_publishes_as_runs() -> None:
    items = Decoder().feed(STREAM)
    assert [type(item).__name__ for item in items] == [
        "ConnAckPacket",
        "PublishRun",
        "PingRespPacket",
        "PublishRun",
        "PubAckPacket",
    ]
    first, second = (item for item in items if isinstance(item, PublishRun))
    assert [p.packet_id for p in first.packets] == [1, 2]
    assert first.headers.translate(QOS_OF_HEADER) == bytes([1, 1])
    assert second.headers.translate(QOS_OF_HEADER) == bytes([0, 1])
    assert len(second) == 2


@pytest.mark.parametrize("version", [5, 4, 3])
@pytest.mark.parametrize("kind", [PubAckPacket, PubRecPacket, PubRelPacket, PubCompPacket])
def test_short_answers_that_follow_each_other_come_as_one_run(kind: type[Acknowledgement], version: int) -> None:
    ids = [*range(1, 301), 0xFFFF]
    data = b"".join(kind(packet_id).write() for packet_id in ids)
    (run,) = Decoder(version=version).feed(data)
    assert isinstance(run, AckRun)
    assert (run.packet_type, list(run.packet_ids), len(run)) == (kind, ids, 301)
    assert list(run.packets) == [kind(packet_id) for packet_id in ids]


@pytest.mark.parametrize("cut", range(13))
def test_a_run_of_answers_ends_where_another_kind_or_a_part_begins(cut: int) -> None:
    answers = b"".join(packet.write() for packet in (PubAckPacket(1), PubAckPacket(2), PubAckPacket(3)))
    whole = flat(Decoder().feed(answers + PubRelPacket(3).write()))
    decoder = Decoder()
    assert flat(decoder.feed(answers[:cut]) + decoder.feed(answers[cut:] + PubRelPacket(3).write())) == whole


def test_a_reason_is_never_lost_in_a_run() -> None:
    refused = PubAckPacket(2, reason_code=PubAckReasonCode.QUOTA_EXCEEDED)
    items = Decoder().feed(PubAckPacket(1).write() + refused.write() + PubAckPacket(3).write())
    assert flat(items) == [PubAckPacket(1).write(), refused.write(), PubAckPacket(3).write()]


@pytest.mark.parametrize("version", [5, 4, 3])
def test_packet_id_0_is_refused_in_a_run_too(version: int) -> None:
    with pytest.raises(MalformedPacket, match="packet id 0"):
        Decoder(version=version).feed(b"\x40\x02\x00\x01" + b"\x40\x02\x00\x00")


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_cut_anywhere_changes_nothing(cut: int) -> None:
    decoder = Decoder()
    assert flat(decoder.feed(STREAM[:cut]) + decoder.feed(STREAM[cut:])) == flat(Decoder().feed(STREAM))
    assert decoder._buffered_bytes == 0


def test_a_large_packet_is_collected_without_being_decoded_again_and_again() -> None:
    decoder = Decoder()
    whole = publish(1, payload=bytes(5_000_000)).write()
    pieces = [whole[i : i + 4096] for i in range(0, len(whole), 4096)]
    for piece in pieces[:-1]:
        assert decoder.feed(piece) == []
    assert flat(decoder.feed(pieces[-1])) == [whole]


# A panic inside the codec leaves an exception that nothing can catch; the fence is about the one it raises.
@pytest.mark.parametrize("version", [5, 4])
@pytest.mark.parametrize("arrived", [5, 100, 2000])
def test_a_packet_too_large_is_refused_before_it_is_collected(arrived: int, version: int) -> None:
    suback = b"\x90\xdc\x0b\x00\x01" + bytes(1500)
    with pytest.raises(MalformedPacket, match="1,000") as caught:
        Decoder(1000, version).feed(PubAckPacket(7).write() + suback[:arrived])
    assert caught.value.reason == 0x95


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # which a panic of the codec leaves
@given(st.binary(max_size=200))
def test_any_bytes_give_packets_or_malformed(data: bytes) -> None:
    decoder = Decoder(max_packet_bytes=1 << 20)
    try:
        items = decoder.feed(data)
    except MalformedPacket:
        return
    # The CONNACK of an older server is a byte shorter than ours.
    assert sum(len(packet) for packet in flat(items)) <= len(data) + data.count(b"\x20\x02\x00\x01")
    assert decoder._buffered_bytes <= len(data)


@given(
    st.lists(st.tuples(st.text("abc/é", min_size=1), st.binary(max_size=50), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 40),
)
def test_round_trip_in_pieces(messages: list[tuple[str, bytes, bool]], piece: int) -> None:
    packets = [PublishPacket(topic, payload, retain=retain) for topic, payload, retain in messages]
    data = b"".join(packet.write() for packet in packets)
    decoder, items = Decoder(), list[Item]()
    for start in range(0, len(data), piece):
        items += decoder.feed(data[start : start + piece])
    assert flat(items) == [packet.write() for packet in packets]
