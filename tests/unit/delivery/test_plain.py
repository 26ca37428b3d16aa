"""Packets without properties as columns: any bytes give the same packets, errors and rows as one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import PublishPacket

from tests.helpers import publish
from towline.delivery.inbound import plain_run
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import AckRun, Decoder, PublishRun, encode
from towline.mqtt.plain import PlainReader, PlainRun

EVERY_RUN = partial(plain_run, min_packets=1)
#: Two kinds of topics, because the first byte of one is part of what a packet's shape is remembered by.
_TOPICS = st.sampled_from(["a/b", "x", "dev/1/t", "dev/22/t", "größe/ü", "🚀"])
_QOS = st.sampled_from([0, 1, 1, 1, 2])


@st.composite
def _publish(draw: st.DrawFn) -> PublishPacket:
    qos = draw(_QOS)
    said: list[dict[str, Any]] = [{}, {}, {}, {}, {"content_type": "t"}, {"user_properties": [("a", "1")]}]
    payload = draw(st.binary(max_size=20)) * draw(st.sampled_from([1, 1, 1, 10, 1000]))
    more = {
        "retain": draw(st.booleans()),
        "duplicate": bool(qos) and draw(st.booleans()),
        **draw(st.sampled_from(said)),
    }
    return publish(draw(_TOPICS), payload, qos, draw(st.integers(1, 0xFFFF)), **more)


@st.composite
def _stream(draw: st.DrawFn, version: int) -> bytes:
    """Mostly plain packets; others between them, a byte that is wrong, and an end in the midst of one."""
    parts = [encode(packet, version) for packet in draw(st.lists(_publish(), max_size=30))]
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
    assert read(stream, version, EVERY_RUN, cut) == read(stream, version, None, cut)


def packets(count: int) -> list[PublishPacket]:
    return [publish(f"t/{n % 7}", b"%d" % n, packet_id=n + 1) for n in range(count)]


def test_a_long_run_is_columns_and_a_short_one_is_not() -> None:
    decoder = Decoder(plain_reader=plain_run)
    (run,) = decoder.feed(b"".join(packet.write() for packet in packets(500)))
    assert isinstance(run, PlainRun)
    assert (len(run), run.packet_ids[0], run.packet_ids[499]) == (500, 1, 500)
    (run,) = decoder.feed(b"".join(packet.write() for packet in packets(5)))
    assert isinstance(run, PublishRun)


@pytest.mark.parametrize("first", [1, 1000])
def test_packet_ids_of_3_1_1_are_no_property_lengths(first: int) -> None:
    """With ids above 255 no run was of columns: its high byte was taken for a length."""
    stream = b"".join(b"\x32\x06\x00\x01t" + (first + n).to_bytes(2) + b"x" for n in range(200))
    (run,) = Decoder(1 << 16, 4, plain_run).feed(stream)
    assert isinstance(run, PlainRun)
    assert list(run.packet_ids) == [*range(first, first + 200)]


@pytest.mark.parametrize(
    ("topic", "packet_id"),
    [(b"a/#", 1), (b"a+", 1), (b"\0", 1), (b"\xff", 1), (b"\xed\xa0\x80", 1), (b"", 1), (b"a", 0)],
)
@pytest.mark.parametrize("version", [5, 4])
def test_what_is_forbidden_is_refused_in_the_midst_of_a_run(version: int, topic: bytes, packet_id: int) -> None:
    rest = topic + packet_id.to_bytes(2) + (b"\0" if version == 5 else b"") + b"x"
    wrong = bytes((0x32, len(rest) + 2)) + len(topic).to_bytes(2) + rest
    good = b"".join(encode(packet, version) for packet in packets(100))
    reasons = []
    for plain in (plain_run, None):
        with pytest.raises(MalformedPacket) as caught:
            Decoder(1 << 20, version, plain).feed(good + wrong + good)
        reasons.append((caught.value.reason, str(caught.value)))
    assert reasons[0] == reasons[1]
