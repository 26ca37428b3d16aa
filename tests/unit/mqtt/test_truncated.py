"""A PUBLISH that is not taken in whole stays in its place as a truncated message, wherever the bytes are cut."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest
from mqtt5 import ConnAckPacket, PublishPacket, QoS

from tests.fuzz.codec import check
from towline.mqtt.checks import MAX_PROPERTIES, MalformedPacket
from towline.mqtt.codec import Decoder, Item, PublishRun, encode
from towline.mqtt.events import Deliver
from towline.mqtt.inbound import Inbound
from towline.mqtt.truncated import PACKET_TOO_LARGE, TOO_MANY_PROPERTIES, ReceivedPublish, TruncatedMessage

LIMIT = 1024
PAYLOAD = bytes(range(256)) * 8


def publish(number: int, payload: bytes = b"x", topic: str = "t/1", qos: int = 1, **properties: Any) -> PublishPacket:
    return PublishPacket(topic, payload, qos=QoS(qos), packet_id=number if qos else None, **properties)


def published(items: Sequence[Item]) -> list[ReceivedPublish]:
    packets: list[ReceivedPublish] = []
    for item in items:
        assert isinstance(item, PublishRun)
        assert len(item.headers) == len(item.packets)
        packets += item.packets
    return packets


def take(inbound: Inbound, data: bytes, limit: int = LIMIT) -> Deliver | None:
    for item in Decoder(limit).feed(data):
        assert isinstance(item, PublishRun)
        inbound.take_publishes(item)
    return inbound.next_delivery()


def truncated_of(data: bytes, limit: int = LIMIT, version: int = 5) -> TruncatedMessage:
    (truncated,) = published(Decoder(limit, version).feed(data))
    assert isinstance(truncated, TruncatedMessage)
    return truncated


def many_properties(users: int = 0, identifiers: int = 0, **more: Any) -> bytes:
    pairs = [("k", str(number)) for number in range(users)]
    ids = [1 + number % 100 for number in range(identifiers)]
    return publish(7, PAYLOAD, user_properties=pairs, subscription_ids=ids, **more).write()


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [5, 4, 3])
def test_a_message_too_large_keeps_its_place(version: int, qos: int) -> None:
    large = publish(7, PAYLOAD, "größe/ü", qos, retain=True, duplicate=qos > 0, content_type="c", topic_alias=9)
    if version == 5:
        large = publish(
            7, PAYLOAD, "größe/ü", qos, retain=True, user_properties=[("k" * 300, "v"), ("towline-id", "p")]
        )
    data = encode(large, version)
    stream = encode(publish(1), version) + data + encode(publish(2), version) + data + encode(publish(3), version)

    whole = published(Decoder(LIMIT, version).feed(stream))
    before, truncated, between, again, after = whole
    assert [p.packet_id for p in (before, between, after)] == [1, 2, 3]
    assert isinstance(truncated, TruncatedMessage)
    assert (truncated.topic, int(truncated.qos), truncated.retain) == ("größe/ü", qos, True)
    assert truncated.packet_id == (7 if qos else None)
    assert (truncated.payload, truncated.correlation_data, truncated.reason) == (None, None, PACKET_TOO_LARGE)
    facts = dict(truncated.user_properties)
    assert facts["towline-size"] == str(len(data))
    assert facts["towline-sha256"] == sha256(PAYLOAD).hexdigest()
    assert facts["towline-properties"] == ("2" if version == 5 else "0")
    assert facts.get("towline-id") == ("p" if version == 5 else None), "the mark of a publisher that wants receipts"
    assert again == truncated
    check(stream, version)


def test_a_message_of_the_limit_is_whole_and_one_byte_more_is_not() -> None:
    empty = len(publish(1, b"").write())
    at_limit = publish(1, bytes(LIMIT - empty - 1))  # a second byte of the length
    assert len(at_limit.write()) == LIMIT
    assert published(Decoder(LIMIT).feed(at_limit.write())) == [at_limit]
    assert truncated_of(publish(1, bytes(LIMIT - empty)).write()).reason == PACKET_TOO_LARGE


def test_256_mb_pass_without_being_held() -> None:
    start = b"\x32\xff\xff\xff\x7f" + b"\x00\x01t" + b"\x00\x07" + b"\x00"
    piece, left = bytes(1 << 20), 268_435_460 - len(start)
    decoder = Decoder(1 << 16)
    tracemalloc.start()
    try:
        items = decoder.feed(start)
        while left:
            items += decoder.feed(piece[:left])
            left -= min(left, len(piece))
            assert not decoder._buffered_bytes
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    (truncated,) = published(items)
    assert (truncated.topic, truncated.packet_id) == ("t", 7)


@pytest.mark.parametrize("padding", [b"", publish(1, bytes(100)).write() * 200], ids=["small chunk", "large chunk"])
@pytest.mark.parametrize(
    ("users", "identifiers", "taken"),
    [(MAX_PROPERTIES, MAX_PROPERTIES, True), (MAX_PROPERTIES + 1, 0, False), (0, MAX_PROPERTIES + 1, False)],
)
def test_too_many_properties_truncate_a_message_and_keep_every_byte(
    padding: bytes, users: int, identifiers: int, taken: bool
) -> None:
    data = many_properties(users, identifiers)
    packets = published(Decoder().feed(padding + data + publish(2).write()))
    packet = packets[-2]
    assert packets[-1].packet_id == 2
    if taken:
        assert packet.payload == PAYLOAD
        return
    assert isinstance(packet, TruncatedMessage)
    assert (packet.reason, packet.correlation_data, packet.packet_id) == (TOO_MANY_PROPERTIES, data, 7)
    facts = dict(packet.user_properties)
    assert facts["towline-properties"] == str(users)
    assert facts["towline-sha256"] == sha256(PAYLOAD).hexdigest()


def test_a_bomb_of_properties_costs_no_more_than_its_bytes() -> None:
    block = b"\x26\x00\x00\x00\x00" * 20_000  # 100 kB, and 6 MB as objects
    body = b"\x00\x01t\x00\x07" + b"\xa0\x8d\x06" + block
    data = b"\x32" + bytes((len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14)) + body
    tracemalloc.start()
    try:
        truncated = truncated_of(data, 64 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
    finally:
        tracemalloc.stop()
    assert (truncated.correlation_data, dict(truncated.user_properties)["towline-properties"]) == (data, "20000")


def head(topic: bytes = b"t", properties: bytes = b"", header: int = 0x32) -> bytes:
    """A PUBLISH of 1,408 bytes and more behind its fixed header, up to where its payload begins."""
    body = (
        len(topic).to_bytes(2) + topic + (b"\x00\x07" if header & 6 else b"") + bytes((len(properties),)) + properties
    )
    return bytes((header, 0x80, 0x0B)) + body


@pytest.mark.parametrize(
    ("start", "reason", "words"),
    [
        (head(b"a/#"), 0x90, "wildcard"),
        (head(b"a\0"), 0x81, "U\\+0000"),
        (head(b"\xff\xfe"), 0x81, "ill-formed UTF-8"),
        (head(b""), 0x81, "topic is empty"),
        (head(header=0x36), 0x81, "QoS 3"),
        (head(header=0x38), 0x81, "DUP"),
        (head().replace(b"\x00\x07", b"\x00\x00"), 0x81, "packet id 0"),
        (head(properties=b"\x7e\x00"), 0x81, "property 0x7e"),
        (head(properties=b"\x23\x00\x01\x23\x00\x02"), 0x81, "two topic aliases"),
        (head(properties=b"\x26\x00\x09k"), 0x81, "property length"),
        (head()[:-1] + b"\xff\x7f", 0x81, "property length beyond"),
        (head()[:-1] + b"\xff\xff\xff\xff\xff", 0x81, "variable byte integer"),
        (b"\x32\x80\x0b\xff\xff", 0x81, "too short"),
    ],
)
def test_a_malformed_publish_is_refused_and_not_truncated(start: bytes, reason: int, words: str) -> None:
    data = start.ljust(1408 + 3, b"x")
    for pieces in ([data], [data[:4], data[4:]], [data[at : at + 1] for at in range(len(data))]):
        with pytest.raises(MalformedPacket, match=words) as caught:
            [*map(Decoder(LIMIT).feed, pieces)]
        assert caught.value.reason == reason


def test_other_packets_with_too_many_properties_end_the_connection() -> None:
    pairs = [("", "")] * (MAX_PROPERTIES + 1)
    assert len(Decoder().feed(ConnAckPacket(user_properties=pairs[1:]).write())) == 1
    with pytest.raises(MalformedPacket, match="1,000 user properties") as caught:
        Decoder().feed(ConnAckPacket(user_properties=pairs).write())
    assert caught.value.reason == 0x97


@pytest.mark.parametrize(
    "large", [publish(9, PAYLOAD, "a/b", topic_alias=4).write(), many_properties(2000, topic_alias=4)]
)
def test_a_topic_alias_of_a_truncated_message_holds_for_what_follows(large: bytes) -> None:
    inbound = Inbound(topic_alias_maximum=10)
    limit = LIMIT if len(large) < 3_000 else 1 << 20
    data = large + publish(2, topic="", topic_alias=4).write()
    data += publish(3, PAYLOAD, topic="", topic_alias=4).write()
    delivery = take(inbound, data, limit)
    assert delivery is not None
    topics = delivery.messages.topics
    assert topics == [topics[0]] * 3
    assert topics[0]


@pytest.mark.parametrize(("qos", "answer"), [(2, b"\x50\x02\x00\x07" * 3), (1, b"\x40\x02\x00\x07" * 2)])
def test_a_truncated_duplicate_is_told_from_another_message(qos: int, answer: bytes) -> None:
    """The same message again is a repeat; another under an id of QoS 2 is the broker's fault [I3]."""
    inbound = Inbound()
    sent = [(PAYLOAD, False), (PAYLOAD, True), (PAYLOAD[::-1], qos == 1)]
    data = [publish(7, payload, qos=qos, duplicate=duplicate).write() for payload, duplicate in sent]
    assert [take(inbound, packet) is not None for packet in data] == [True, False, True]
    assert (inbound.duplicates, inbound.reused_ids) == (1, int(qos == 2))
    assert inbound.raise_ack_watermark(9) == answer


@pytest.mark.parametrize("limit", [LIMIT, 1 << 20])
def test_a_truncated_message_sent_again_with_other_properties_is_a_duplicate(limit: int) -> None:
    """Alias, expiry, and subscription identifiers may differ, and so may the size, and the limit may be another now."""
    inbound = Inbound(topic_alias_maximum=10)
    pairs = [("", "")] * (MAX_PROPERTIES + 1)
    ways: list[dict[str, Any]] = [{"topic_alias": 1}, {"topic": "", "topic_alias": 1}, {"subscription_ids": [1, 999]}]
    for now, properties in itertools.product((limit, LIMIT), [*ways, {"message_expiry_interval": 5}]):
        take(inbound, publish(7, PAYLOAD, qos=2, user_properties=pairs, **properties).write(), now)
    assert (inbound.next_number, inbound.duplicates, inbound.reused_ids) == (1, 7, 0)
