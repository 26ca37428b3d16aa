"""Rows and frames of messages: each column as the publisher set it, and no packet id parted from its row."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt5 import PublishPacket, QoS

from tests.unit.mqtt.test_plain import Lists
from towline.delivery.inbound import _split_delivery, to_rows
from towline.delivery.receipts.mark import Mark
from towline.mqtt.codec import PublishRun
from towline.mqtt.events import Deliver, Messages, UnreleasedMessage
from towline.mqtt.message import LARGE_PAYLOAD_BYTES
from towline.mqtt.plain import PlainRun
from towline.schema import ROW_SCHEMA

_TEXT = st.none() | st.text(max_size=3)
_PACKETS = st.builds(
    lambda topic, payload, qos, retain, duplicate, rest: PublishPacket(
        topic,
        payload,
        qos=QoS(qos),
        packet_id=1 if qos else None,
        retain=retain,
        duplicate=duplicate and qos > 0,
        **rest,
    ),
    st.sampled_from(["a", "b/ü"]),
    st.binary(max_size=3),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.booleans(),
    st.fixed_dictionaries(
        {},
        optional={
            "content_type": _TEXT,
            "payload_format_indicator": st.sampled_from([0, 1]),
            "response_topic": st.none() | st.sampled_from(["r"]),
            "correlation_data": st.none() | st.binary(max_size=2),
            "user_properties": st.lists(st.tuples(st.text(max_size=2), st.text(max_size=2)), max_size=2),
            "message_expiry_interval": st.none() | st.integers(0, 9),
            "subscription_ids": st.lists(st.integers(1, 9), max_size=2),
        },
    ),
)


def messages(*packets: PublishPacket) -> Messages:
    return Messages([PublishRun.from_packets(packets, b"".join(packet.write()[:1] for packet in packets))])


def row(packet: PublishPacket, offset: int) -> dict[str, Any]:
    """What a row says of a packet."""
    return {
        "topic": packet.topic,
        "payload": packet.payload,
        "qos": int(packet.qos),
        "retain": packet.retain,
        "duplicate": packet.duplicate,
        "content_type": packet.content_type,
        "payload_is_utf8": True if packet.payload_format_indicator else None,
        "response_topic": packet.response_topic,
        "correlation_data": packet.correlation_data,
        "user_properties": [{"key": key, "value": value} for key, value in packet.user_properties] or None,
        "message_expiry_seconds": packet.message_expiry_interval,
        "subscription_ids": list(packet.subscription_ids) or None,
        "gateway": "g",
        "offset": offset,
    }


@settings(deadline=None)
@given(st.lists(_PACKETS, min_size=1, max_size=6), st.integers(0, 1 << 40))
def test_a_row_says_what_its_packet_says(packets: list[PublishPacket], first: int) -> None:
    batch = to_rows(messages(*packets), first, 1_700_000_000_123_456, "g")
    batch.validate(full=True)
    assert batch.schema.equals(ROW_SCHEMA)
    assert batch.column("received_at").cast(pa.int64()).to_pylist() == [1_700_000_000_123_456] * len(packets)
    assert batch.drop_columns(["received_at"]).to_pylist() == [row(p, n) for n, p in enumerate(packets, first)]


@pytest.mark.parametrize("count", [3, 1, 5, 0])
def test_columns_of_one_value_are_as_long_as_their_batch(count: int) -> None:
    """They are cut off one that is kept from batch to batch."""
    batch = to_rows(messages(*[PublishPacket("t", b"%d" % n) for n in range(count)]), 7, 0, "kept")
    batch.validate(full=True)
    assert batch.num_rows == count
    assert batch.column("gateway").to_pylist() == ["kept"] * count
    assert batch.column("offset").to_pylist() == list(range(7, 7 + count))


@pytest.mark.parametrize("size", [LARGE_PAYLOAD_BYTES - 1, LARGE_PAYLOAD_BYTES])
def test_a_large_payload_is_the_same_alone_and_among_others(size: int) -> None:
    large = PublishPacket("t", bytes(range(256)) * (size // 256) + bytes(size % 256))
    alone, among = to_rows(messages(large), 0, 0, "g"), to_rows(messages(large, PublishPacket("t", b"")), 0, 0, "g")
    alone.validate(full=True)
    assert alone.equals(among.slice(0, 1))


def test_marks_are_removed_where_they_end_and_nothing_else_is() -> None:
    own = [("a", "1"), ("towline-reason", "x")]
    packets = [
        PublishPacket("t", b"", user_properties=[own[0], *Mark("p", 1, 2, 0).properties(), own[1]]),
        PublishPacket("t", b"", user_properties=Mark("p", 1, 3, 0).properties()),
        PublishPacket("t", b"", user_properties=own),
        PublishPacket("t", b""),
    ]
    for strip, expected in ((True, [own, None, own, None]), (False, [p.user_properties or None for p in packets])):
        batch = to_rows(messages(*packets), 0, 0, "g", strip_marks=strip)
        rows = [[*map(tuple, map(dict.values, pairs))] if pairs else None for pairs in batch.column(9).to_pylist()]
        assert rows == expected


def test_columns_that_are_lists_make_the_same_rows() -> None:
    run = PlainRun(b"\x33\x30", array("H", [1, 0]), Lists(["a", "b"], [b"1", b""]))
    plain = Messages([run, PlainRun(b"\x3a", array("H", [2]), Lists(["c"], [b"3"]))])
    packets = [
        PublishPacket("a", b"1", qos=QoS(1), packet_id=1, retain=True),
        PublishPacket("b", b""),
        PublishPacket("c", b"3", qos=QoS(1), packet_id=2, duplicate=True),
    ]
    assert to_rows(plain, 5, 0, "g").equals(to_rows(messages(*packets), 5, 0, "g"))


def delivery(count: int, size: int) -> Deliver:
    packets = [PublishPacket("t", bytes(size), qos=QoS(2), packet_id=n + 1) for n in range(count)]
    held = {n + 1: UnreleasedMessage(100 + n, 0) for n in range(count)}
    return Deliver(7, 100, Messages([PublishRun.from_packets(packets, b"\x34" * count)]), held, (500,))


@pytest.mark.parametrize("most", [100, 1000, 5000, 1 << 20])
def test_pieces_hold_everything_once_and_in_order(most: int) -> None:
    whole = delivery(50, 200)
    rows = to_rows(whole.messages, whole.first_number, 0, "g")
    frames = list(_split_delivery(rows, whole, most))
    offsets = [offset for frame in frames for offset in frame.rows.column("offset").to_pylist()]
    assert offsets == list(range(100, 150))
    assert {i: h for frame in frames for i, h in frame.held_ids.items()} == whole.unreleased_messages
    for frame in frames:
        inside = set(frame.rows.column("offset").to_pylist())
        assert all(entry.number in inside for entry in frame.held_ids.values())
    assert [frame.released_ids for frame in frames] == [(500,)] + [()] * (len(frames) - 1)
    assert [frame.ticket for frame in frames] == [0] * (len(frames) - 1) + [7]


def test_a_delivery_of_releases_alone_is_one_frame() -> None:
    releases = Deliver(3, 0, Messages([]), {}, (1, 2))
    (frame,) = _split_delivery(to_rows(releases.messages, 0, 0, "g"), releases, 100)
    assert (frame.released_ids, frame.ticket) == ((1, 2), 3)


def test_one_packet_is_never_parted() -> None:
    large = delivery(1, 10_000)
    assert len(list(_split_delivery(to_rows(large.messages, 100, 0, "g"), large, 100))) == 1
