"""Rows and frames of messages: each column as the publisher set it, and no packet id parted from its row.

Of packets without properties as columns: any bytes give the same packets, errors and rows as one by one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt5 import PublishPacket

from tests.helpers import publish
from towline.delivery.inbound import _split_delivery, plain_run, to_rows
from towline.delivery.receipts.mark import Mark
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import AckRun, Decoder, PublishRun, encode
from towline.mqtt.events import Deliver, Messages, UnreleasedMessage
from towline.mqtt.plain import PlainReader, PlainRun
from towline.schema import ROW_SCHEMA

#: No MQTT text has U+0000; the decoder refuses it [MQTT-1.5.4-2].
_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3)
_TEXT = st.none() | _WORDS
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
            "user_properties": st.lists(st.tuples(_WORDS, _WORDS), max_size=2),
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


# -- packets without properties as columns --

#: Two kinds of topics, because the first byte of one is part of what a packet's shape is remembered by.
_TOPICS = st.sampled_from(["a/b", "x", "dev/1/t", "dev/22/t", "größe/ü", "🚀"])
_PLAIN_PACKETS = st.builds(
    publish,
    _TOPICS,
    st.binary(max_size=200),
    st.sampled_from([0, 1, 1, 1, 2]),
    st.integers(1, 0xFFFF),
    retain=st.booleans(),
)


@st.composite
def _stream(draw: st.DrawFn, version: int) -> bytes:
    """Mostly plain packets; others between them, a byte that is wrong, and an end in the midst of one."""
    parts = [encode(packet, version) for packet in draw(st.lists(_PLAIN_PACKETS | _PACKETS, max_size=30))]
    for at in draw(st.lists(st.integers(0, len(parts)), max_size=3)):
        parts.insert(at, draw(st.sampled_from([b"\x62\x02\x00\x05" * 3, b"\xd0\x00", b"\x40\x02\x00\x07"])))
    data = b"".join(parts)
    if data and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.binary(min_size=1, max_size=1)) + data[at + 1 :]
    return data[: draw(st.integers(len(data) // 2, len(data)))]


def read(data: bytes, version: int, plain: PlainReader | None, cut: int) -> tuple[list[Any] | None, int]:
    """Packets with their first bytes, and the bytes kept for the next; None for malformed."""
    decoder, came = Decoder(1 << 16, version, plain), list[Any]()
    try:
        for piece in (data[:cut], data[cut:]):
            for item in decoder.feed(piece):
                if isinstance(item, PublishRun | PlainRun):
                    came += zip(item.headers, item.packets, strict=True)
                else:
                    came += item.packets if isinstance(item, AckRun) else [item]
    except MalformedPacket:
        return None, 0
    return came, decoder._buffered_bytes


# The codec panics at ill-formed UTF-8, which the decoder catches, and drops the error of Python that it fell over.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("version", [5, 4, 3])
@given(st.data())
def test_any_bytes_give_the_same_packets_both_ways(version: int, data: st.DataObject) -> None:
    stream = data.draw(_stream(version))
    cut = data.draw(st.integers(0, len(stream)))
    assert read(stream, version, partial(plain_run, min_packets=1), cut) == read(stream, version, None, cut)


def numbered(count: int) -> list[PublishPacket]:
    return [publish(f"t/{n % 7}", b"%d" % n, packet_id=n + 1) for n in range(count)]


def test_a_long_run_is_columns_and_a_short_one_is_not() -> None:
    decoder = Decoder(plain_reader=plain_run)
    (run,) = decoder.feed(b"".join(packet.write() for packet in numbered(500)))
    assert isinstance(run, PlainRun)
    assert (len(run), run.packet_ids[0], run.packet_ids[499]) == (500, 1, 500)
    (run,) = decoder.feed(b"".join(packet.write() for packet in numbered(5)))
    assert isinstance(run, PublishRun)


@pytest.mark.parametrize(
    ("topic", "packet_id"),
    [(b"a/#", 1), (b"a+", 1), (b"\0", 1), (b"\xff", 1), (b"\xed\xa0\x80", 1), (b"", 1), (b"a", 0)],
)
@pytest.mark.parametrize("version", [5, 4])
def test_what_is_forbidden_is_refused_in_the_midst_of_a_run(version: int, topic: bytes, packet_id: int) -> None:
    rest = topic + packet_id.to_bytes(2) + (b"\0" if version == 5 else b"") + b"x"
    wrong = bytes((0x32, len(rest) + 2)) + len(topic).to_bytes(2) + rest
    good = b"".join(encode(packet, version) for packet in numbered(100))
    reasons = []
    for plain in (plain_run, None):
        with pytest.raises(MalformedPacket) as caught:
            Decoder(1 << 20, version, plain).feed(good + wrong + good)
        reasons.append((caught.value.reason, str(caught.value)))
    assert reasons[0] == reasons[1]
