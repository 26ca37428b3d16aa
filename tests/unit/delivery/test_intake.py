"""Rows and frames of messages: each column as the publisher set it, and no packet id parted from its row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt5 import PublishPacket

from tests.helpers import publish
from towline.delivery.inbound import _split_delivery, to_rows
from towline.delivery.receipts.mark import Mark
from towline.mqtt.codec import PublishRun
from towline.mqtt.events import Deliver, Messages, UnreleasedMessage
from towline.schema import ROW_SCHEMA

_TEXT = st.none() | st.text(max_size=3)
_PACKETS = st.builds(
    lambda topic, payload, qos, retain, again, rest: publish(
        topic, payload, qos, retain=retain, duplicate=again and qos > 0, **rest
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


def delivery(count: int, size: int) -> Deliver:
    packets = [publish("t", bytes(size), 2, n + 1) for n in range(count)]
    held = {n + 1: UnreleasedMessage(100 + n, 0) for n in range(count)}
    marks = [Mark("p", 1, 100 + n, 0) if n % 3 else None for n in range(count)]
    return Deliver(7, 100, Messages([PublishRun.from_packets(packets, b"\x34" * count)], marks), held, (500,))


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
        assert {mark.number for mark in frame.marks} == {number for number in inside if (number - 100) % 3}
    assert [frame.released_ids for frame in frames] == [(500,)] + [()] * (len(frames) - 1)
    assert [frame.ticket for frame in frames] == [0] * (len(frames) - 1) + [7]
