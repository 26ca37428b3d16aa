"""A chunk is stored in pieces when it is large, and no packet id is parted from its row."""

from __future__ import annotations

import pytest
from mqtt5 import PublishPacket, QoS

from towline.delivery.inbound import _split_delivery, to_rows
from towline.mqtt.codec import PublishRun
from towline.mqtt.events import Deliver, Messages, UnreleasedMessage


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
