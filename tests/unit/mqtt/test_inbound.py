"""Receiving: what tells two messages apart, what a duplicate is answered with, and order across everything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
from mqtt5 import PublishPacket, QoS

from towline.delivery.inbound import plain_run
from towline.mqtt import inbound as module
from towline.mqtt.codec import Decoder, PublishRun
from towline.mqtt.events import BrokerProtocolError, Deliver
from towline.mqtt.inbound import FilterResult, Inbound
from towline.mqtt.plain import PlainRun
from towline.mqtt.truncated import ReceivedPublish


def publish(packet_id: int, payload: bytes = b"x", *, qos: int = 2, dup: bool = False, topic: str = "t") -> bytes:
    identified = packet_id if qos else None
    return PublishPacket(topic, payload, qos=QoS(qos), packet_id=identified, duplicate=dup).write()


def take(inbound: Inbound, *packets: bytes, plain: bool = False) -> Deliver | None:
    for item in Decoder(plain_reader=partial(plain_run, min_packets=1) if plain else None).feed(b"".join(packets)):
        assert isinstance(item, PublishRun | PlainRun)
        inbound.take_publishes(item)
    return inbound.next_delivery()


def deliver(inbound: Inbound, *packets: bytes, plain: bool = False) -> Deliver:
    delivery = take(inbound, *packets, plain=plain)
    assert delivery is not None
    return delivery


def acknowledgements(header: int, *packet_ids: int) -> bytes:
    return b"".join(bytes((header, 2)) + i.to_bytes(2) for i in packet_ids)


puback, pubrec, pubcomp = (partial(acknowledgements, header) for header in (0x40, 0x50, 0x70))


def stored(inbound: Inbound, delivery: Deliver | None) -> bytes:
    """What leaves once a delivery is durable."""
    assert delivery is not None
    return inbound.raise_ack_watermark(delivery.first_number + len(delivery.messages)) + inbound.confirm_stored(
        delivery.delivery_id
    )


PROPERTIES: dict[str, list[Any]] = {
    "retain": [False, True],
    "payload_format_indicator": [0, 1],
    "content_type": [None, "", "a"],
    "response_topic": [None, "b", "a"],
    "correlation_data": [None, b"", b"a"],
    "user_properties": [[], [("a", "b")], [("b", "a")], [("a", "b"), ("a", "b")], [("ab", "")], [("", "ab")]],
}


def with_properties(packet_id: int = 7, **properties: Any) -> bytes:
    return PublishPacket("t", b"x", qos=QoS.EXACTLY_ONCE, packet_id=packet_id, **properties).write()


def test_the_order_and_the_place_of_properties_count() -> None:
    every = [dict(zip(PROPERTIES, values, strict=True)) for values in product(*PROPERTIES.values())]
    every += [{"user_properties": [("a", "b"), ("c", "d")]}, {"user_properties": [("c", "d"), ("a", "b")]}]
    digests = set()
    for properties in every:
        inbound = Inbound()
        take(inbound, with_properties(**properties))
        digests.add(inbound.unreleased_messages[7].digest)
    assert len(digests) == len(every)


def test_what_a_server_may_change_when_it_sends_again_does_not_count() -> None:
    """The expiry counts down [MQTT-3.3.2-6], subscriptions and aliases are another connection's."""
    inbound = Inbound(topic_alias_maximum=5)
    take(inbound, with_properties(message_expiry_interval=60, subscription_ids=[1], topic_alias=5, content_type="a"))
    again = with_properties(message_expiry_interval=3, subscription_ids=[2, 3], duplicate=True, content_type="a")
    assert take(inbound, again) is None
    assert inbound.duplicates == 1


def test_publish_and_pubrel_of_one_id_in_one_chunk_leave_nothing_held() -> None:
    """Some brokers send both again after a crash of theirs."""
    inbound = Inbound()
    for item in Decoder().feed(publish(7)):
        assert isinstance(item, PublishRun)
        inbound.take_publishes(item)
    inbound.take_pubrels([7])
    delivery = deliver(inbound)
    assert (dict(delivery.unreleased_messages), delivery.released_ids, len(delivery.messages)) == ({}, (), 1)
    assert stored(inbound, delivery) == pubrec(7) + pubcomp(7)


def test_aliases_are_resolved_and_forgotten_with_the_connection() -> None:
    """[MQTT-3.3.2-7], [MQTT-3.3.2-8], [MQTT-3.3.2-10]: from 1 to the maximum we named."""

    def aliased(topic: str, alias: int) -> PublishRun:
        packet = PublishPacket(topic, b"", topic_alias=alias)
        return PublishRun.from_packets([packet], packet.write()[:1])

    inbound = Inbound(topic_alias_maximum=2)
    inbound.take_publishes(aliased("a/b", 1))
    inbound.take_publishes(aliased("", 1))
    inbound.take_publishes(aliased("c", 1))
    inbound.take_publishes(aliased("", 1))
    delivery = deliver(inbound)
    assert delivery.messages.topics == ["a/b", "a/b", "c", "c"]
    for wrong in (aliased("x", 3), aliased("", 2)):
        with pytest.raises(BrokerProtocolError, match="topic alias") as refused:
            inbound.take_publishes(wrong)
        assert refused.value.reason == 0x94
    inbound.drop_connection_state()
    with pytest.raises(BrokerProtocolError, match="before it gave it a topic"):
        inbound.take_publishes(aliased("", 1))


def known_by_payload(inbound: Inbound) -> None:
    """Messages that say `b"old"` are stored already; the tag of each is what it says."""

    def said(packets: Sequence[ReceivedPublish], _topics: Sequence[str]) -> FilterResult:
        return FilterResult(
            bytes(packet.payload == b"old" for packet in packets), [packet.payload for packet in packets]
        )

    inbound.duplicate_filter = said


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_known_by_its_publishers_name_is_answered_and_not_stored(qos: int) -> None:
    inbound = Inbound(5)
    known_by_payload(inbound)
    ids = (1, 2, 3) if qos else (0, 0, 0)
    delivery = deliver(inbound, *(publish(i, p, qos=qos) for i, p in zip(ids, (b"old", b"new", b"old"), strict=True)))
    assert [packet.payload for packet in delivery.messages.packets] == [b"new"] == delivery.messages.tags
    assert (delivery.first_number, inbound.next_number, inbound.duplicates) == (5, 6, 2)
    assert delivery.unreleased_messages.keys() == ({2} if qos == 2 else set())
    answer = {0: b"", 1: b"\x40\x02\x00\x01", 2: pubrec(1)}[qos]
    assert inbound.raise_ack_watermark(inbound.ack_watermark) == answer, "only what stands before the new one"
    assert stored(inbound, delivery) == {0: b"", 1: b"\x40\x02\x00\x02\x40\x02\x00\x03", 2: pubrec(2, 3)}[qos]


def test_the_id_of_a_message_left_out_is_freed_without_a_word_to_the_disk() -> None:
    inbound = Inbound()
    known_by_payload(inbound)
    assert take(inbound, publish(7, b"old")) is None
    assert inbound.raise_ack_watermark(inbound.ack_watermark) == pubrec(7)
    assert inbound.take_pubrels((7,)) == pubcomp(7)
    assert inbound.next_delivery() is None
    delivery = deliver(inbound, publish(7, b"new"))
    assert len(delivery.messages) == 1


# QoS 1 that comes again within a connection --------------------------------------------------------------------------


def again(packet_id: int, payload: bytes = b"x", **others: Any) -> bytes:
    return publish(packet_id, payload, qos=1, dup=True, **others)


@pytest.mark.parametrize(
    "other",
    [
        publish(7, qos=1),  # no DUP: aedes never sets it, and nobody can tell
        again(7, b"other"),
        again(7, topic="other"),
        again(8),
        publish(7, qos=2, dup=True),
        PublishPacket("t", b"x", qos=QoS(1), packet_id=7, duplicate=True, content_type="a").write(),
        PublishPacket("t", b"x", qos=QoS(1), packet_id=7, duplicate=True, retain=True).write(),
    ],
    ids=["no DUP", "payload", "topic", "id", "QoS", "property", "RETAIN"],
)
def test_another_message_is_never_taken_for_a_repeat_of_qos_1(other: bytes) -> None:
    inbound = Inbound()
    take(inbound, publish(7, qos=1))
    delivery = deliver(inbound, other)
    assert len(delivery.messages) == 1
    assert inbound.duplicates == 0


def test_qos_1_is_new_after_its_puback_and_in_another_connection() -> None:
    """[MQTT-4.3.2-5], whatever DUP says: what crosses our PUBACK is doubled."""
    inbound = Inbound()
    assert stored(inbound, take(inbound, publish(7, qos=1))) == puback(7)
    assert stored(inbound, take(inbound, again(7))) == puback(7)
    take(inbound, publish(8, qos=1))
    inbound.drop_connection_state()
    assert stored(inbound, take(inbound, again(8))) == puback(8)
    assert (inbound.next_number, inbound.duplicates) == (4, 0)


@pytest.mark.parametrize("plain", [False, True])
def test_what_waits_long_for_its_puback_is_not_kept_in_memory(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bytes a message are, once it is stored: a window may have 65,535 messages of any size."""
    monkeypatch.setattr(module, "_MAX_UNDIGESTED_BYTES", 5_000)
    inbound = Inbound()
    for first in range(1, 100, 3):
        delivery = deliver(inbound, *(publish(i, bytes(1000), qos=1) for i in range(first, first + 3)), plain=plain)
        inbound.confirm_stored(delivery.delivery_id)
        assert inbound._undigested_bytes == sum(pending.undigested_bytes for pending in inbound._pending) <= 5_000
    assert take(inbound, *(again(i, bytes(1000)) for i in range(1, 100)), plain=plain) is None
    assert inbound._undigested_bytes == 0
    assert inbound.raise_ack_watermark(99) == puback(*range(1, 100))
