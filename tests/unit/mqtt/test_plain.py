"""Packets without properties: the walk says of their fields what the codec reads there, a session does the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt5 import ConnAckPacket, PublishPacket

from tests.helpers import publish
from towline.delivery.inbound import plain_run, to_rows
from towline.mqtt import events
from towline.mqtt.codec import Decoder, Item, encode
from towline.mqtt.inbound import FilterResult
from towline.mqtt.plain import PlainReader, PlainRun, PlainRuns
from towline.mqtt.session import Session
from towline.mqtt.truncated import ReceivedPublish

#: The longest that two bytes of a remaining length can say [MQTT 5 section 1.5.5].
TWO_BYTES = 16_383
#: Runs of columns however short they are.
EVERY_RUN = partial(plain_run, min_packets=1)


def is_plain(data: bytes, *, limit: int = 1 << 20, version: int = 5) -> bool:
    """Whether the walk calls the first packet plain."""
    seen: list[bytes] = []

    def reader(buffer: bytes, position: int, fields: Sequence[bytes], *, properties: bool) -> None:
        assert properties is (version == 5)
        seen.extend(fields)

    PlainRuns(reader, limit, properties=version == 5).find_run(data, 0)
    return bool(seen)


@pytest.mark.parametrize("version", [5, 4])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_length_is_read_as_the_codec_reads_it(version: int, qos: int) -> None:
    """A remaining length of one and of two bytes, a topic's length of one byte and of two [MQTT 5 section 2.1.4]."""
    for topic, remaining in product(("t", "t" * 255, "ü" * 150, "t" * 12_000), (0, 127, 128, 255, 256, TWO_BYTES)):
        beside = len(encode(publish(topic, b"", qos), version)) - 2 - (len(topic) > 100)
        if topic != "t":
            remaining = max(remaining, beside)  # noqa: PLW2901 - such a topic needs more
        packet = publish(topic, bytes(max(0, remaining - beside)), qos, 0xABCD, retain=True, duplicate=qos > 0)
        data = encode(publish(), version) + encode(packet, version) + encode(publish(), version)
        (run,) = Decoder(1 << 20, version, EVERY_RUN).feed(data)
        assert isinstance(run, PlainRun)
        assert run.packets == [publish(), packet, publish()]
        assert run.headers[1] == data[len(encode(publish(), version))]


@pytest.mark.parametrize("version", [5, 4])
def test_a_length_of_three_bytes_is_not_plain_nor_is_a_packet_above_the_limit(version: int) -> None:
    beside = len(encode(publish(payload=b""), version)) - 2
    for size, plain_too in ((TWO_BYTES, True), (TWO_BYTES + 1, False)):
        data = encode(publish(payload=bytes(size - beside)), version)
        assert is_plain(data, version=version) is plain_too
        assert not is_plain(data, version=version, limit=len(data) - 1)
        assert is_plain(data, version=version, limit=len(data)) is plain_too


def test_a_first_byte_that_is_no_sound_publish_is_not_plain() -> None:
    """[MQTT-3.3.1-2, -4]: no QoS 3, no DUP at QoS 0."""
    for header in range(256):
        sound = header >> 4 == 3 and header & 6 != 6 and header & 0b1110 != 0b1000
        assert is_plain(bytes((header, 8)) + b"\x00\x01t\x00\x07\x00xy") is sound, hex(header)


def test_tries_in_vain_become_rare_and_a_run_ends_that() -> None:
    worth, asked = False, list[int]()

    def reader(
        buffer: bytes, position: int, fields: Sequence[bytes], *, properties: bool
    ) -> tuple[PlainRun, int] | None:
        asked.append(len(fields))
        return EVERY_RUN(buffer, position, fields, properties=properties) if worth else None

    runs, data = PlainRuns(reader, 1 << 20, properties=True), publish().write() * 300

    def tries(packets: int) -> list[int]:
        return [at for at in range(packets) if len(asked) < (runs.find_run(data, 0), len(asked))[1]]

    at = tries(4000)
    pauses = [after - before for before, after in pairwise(at)]
    assert pauses == sorted(pauses)
    assert (pauses[0] <= 3, len(at) < 20) == (True, True)
    assert (asked[0], max(asked[1:])) == (300, 200), "after the first only some are looked at"
    worth = True
    assert tries(pauses[-1] + 1), "not for ever"
    assert tries(5) == [0, 1, 2, 3, 4]
    assert asked[-5:] == [300] * 5
    worth = False
    assert tries(4)[:2] == [0, 2], "as at the beginning"


def said_by_property(packets: Sequence[ReceivedPublish], _topics: Sequence[str]) -> FilterResult:
    """An owner that has stored what says so in a property, and tags what has one."""
    known = [("known", "1") in packet.user_properties for packet in packets]
    return FilterResult(bytes(known) if any(known) else b"", [packet.user_properties or None for packet in packets])


class Twin:
    """A session, the bytes that it gets, and all that comes of them."""

    def __init__(self, reader: PlainReader | None, version: int, *, screened: bool) -> None:
        self.session = Session(events.SessionConfig("c", "w", protocol=version, receive_maximum=20))
        self.session.handle(events.ConnectionOpened(), 0.0)
        self.session.handle(events.PacketsReceived([ConnAckPacket()]), 0.0)
        if screened:
            self.session.inbound.duplicate_filter = said_by_property
        self._decoder = Decoder(1 << 20, version, reader)
        self.items: list[Item] = []

    def receive(self, data: bytes) -> list[Any]:
        self.items = self._decoder.feed(data)
        return self._told(self.session.handle(events.PacketsReceived(self.items), 1.0))

    def make_durable(self) -> list[Any]:
        """All that was delivered is on the disk."""
        inbound = self.session.inbound
        actions = self.session.handle(events.AckWatermark(inbound.next_number), 2.0)
        return self._told([*actions, *self.session.handle(events.DeliveryStored(inbound._last_delivery_id), 2.0)])

    def _told(self, actions: list[events.Action]) -> list[Any]:
        return [_content(action) if isinstance(action, events.Deliver) else action for action in actions]

    def state(self) -> list[Any]:
        inbound = self.session.inbound
        counts = [
            inbound.next_number,
            inbound.duplicates,
            inbound.reused_ids,
            inbound.window_overruns,
            inbound.acknowledged_count,
        ]
        return [self.session.state, self.session.window_full, inbound.unreleased_messages, counts]


def _content(delivery: events.Deliver) -> list[Any]:
    messages = delivery.messages
    tags = list(messages.tags) or [None] * len(messages)
    rows = list(zip(messages.headers, messages.packets, messages.topics, tags, strict=True))
    stored = to_rows(messages, delivery.first_number, 5, "g").to_pylist()
    ids = [dict(delivery.unreleased_messages), delivery.released_ids]
    return [delivery.delivery_id, delivery.first_number, rows, stored, *ids]


#: Few packet ids and contents, so that some are repeats, and some used again too early.
_PUBLISHES = st.builds(
    lambda said, qos, packet_id, retain, more: publish(said[0], said[1], qos, packet_id, retain=retain, **more),
    st.sampled_from([("a", b"x"), ("a/b", b"x"), ("größe/ü", bytes(1000)), ("🚀", b"")]),
    st.sampled_from([0, 1, 2, 2]),
    st.integers(1, 4),
    st.sampled_from([False, False, True]),
    st.sampled_from([*[dict[str, Any]()] * 4, {"content_type": "t"}, {"user_properties": [("known", "1")]}]),
)
_RELEASES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda ids: b"".join(b"\x62\x02" + packet_id.to_bytes(2) for packet_id in ids)
)
_READS = st.lists(st.one_of(_PUBLISHES, _PUBLISHES, _PUBLISHES, _RELEASES), min_size=1, max_size=8)


@pytest.mark.parametrize("version", [5, 4])
@settings(max_examples=30)
@given(st.lists(st.tuples(_READS, st.booleans()), min_size=1, max_size=4), st.booleans())
def test_a_session_does_the_same_with_columns_as_with_packets(
    version: int, reads: list[tuple[list[PublishPacket | bytes], bool]], screened: bool
) -> None:
    columns, packets = (Twin(reader, version, screened=screened) for reader in (EVERY_RUN, None))
    for read, durable in reads:
        data = b"".join(part if isinstance(part, bytes) else encode(part, version) for part in read)
        assert columns.receive(data) == packets.receive(data)
        assert columns.state() == packets.state()
        if durable:
            assert columns.make_durable() == packets.make_durable()
    assert columns.make_durable() == packets.make_durable()
    assert columns.state() == packets.state()
