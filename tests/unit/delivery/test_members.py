"""Which member stores a message, and that columns, objects and odd packet ids come to the same."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import PublishPacket, QoS

from tests.unit.delivery.receipts.marks import mark
from towline.delivery.intake import to_rows
from towline.delivery.members import BothScreens, HashedShare, KeyLevel, MemberScreen, member_of
from towline.delivery.plain import plain_run
from towline.delivery.receipts.ledger import Ledger
from towline.delivery.receipts.screen import MarkScreen
from towline.mqtt.codec import Decoder, PublishRun, encode
from towline.mqtt.inbound import Inbound
from towline.mqtt.plain import PlainRun
from towline.mqtt.screens import LeftOut

BY_DEVICE = (KeyLevel("t/+/+/#", 2), KeyLevel("s/#", 1))
_TOPICS = [f"t/a/d{n}/x" for n in range(6)] + ["t/a/d1", "s", "s/d1/y", "other", "größe/ü"]


def test_the_hash_is_the_one_of_the_page() -> None:
    """It never changes: a device's messages would go to another journal. CRC32C of RFC 3720, appendix B.4."""
    assert member_of("123456789", 1 << 32) == 0xE3069283
    assert [member_of(key, 2) for key in ("d1", "d2", "größe", "")] == [0, 0, 1, 0]
    assert [member_of(f"dev-{n:02}", 3) for n in range(6)] == [2, 0, 0, 1, 0, 2]


def test_devices_are_spread_evenly() -> None:
    for of in (2, 3, 4, 5, 8, 16):
        for name in ("dev-{:02}", "device{}", "{:05}", "AA:BB:{:06X}"):
            counts = Counter(member_of(name.format(n), of) for n in range(10_000))
            assert all(0.9 <= counts[place] * of / 10_000 <= 1.1 for place in range(of)), (of, name, counts)


@pytest.mark.parametrize(
    ("topic", "key"),
    [
        ("t/a/d7/x", "d7"),
        ("t/b/d7", "d7"),
        ("s/d7/x", "d7"),
        ("s", "s"),  # "s/#" takes it too, and it has no such level
        ("t/a", "t/a"),
        ("u/d7", "u/d7"),
    ],
)
def test_the_key_is_a_level_or_the_whole_topic(topic: str, key: str) -> None:
    assert HashedShare(2, 0, BY_DEVICE).key(topic) == key


@given(st.text(), st.integers(1, 9))
def test_every_topic_has_one_member(topic: str, of: int) -> None:
    assert sum(HashedShare(of, place, BY_DEVICE).has(topic) for place in range(of)) == 1


@st.composite
def _stream(draw: st.DrawFn) -> list[PublishPacket]:
    """QoS 2 ids that come again, in any mixture of QoS."""
    packets = []
    for _ in range(draw(st.integers(1, 40))):
        qos = draw(st.sampled_from([0, 1, 1, 2, 2]))
        content = draw(st.sampled_from([None, None, "t"]))
        packet_id = draw(st.integers(1, 50)) if qos else None
        topic = draw(st.sampled_from(_TOPICS))
        packets.append(PublishPacket(topic, b"x", qos=QoS(qos), packet_id=packet_id, content_type=content))
    return packets


def _received(packets: list[PublishPacket], reader: Any, share: HashedShare | None) -> tuple[Any, ...]:
    """What is stored, what is answered and in which order, what is counted, and which ids are held."""
    inbound = Inbound(3)
    inbound.screen = MemberScreen(share) if share else None
    for item in Decoder(1 << 16, 5, reader).feed(b"".join(encode(packet, 5) for packet in packets)):
        if isinstance(item, PlainRun):
            inbound.plain(item)
        else:
            assert isinstance(item, PublishRun)
            inbound.publishes(item)
    delivery = inbound.hand_over()
    early = inbound.settle(inbound.settled)
    rows = to_rows(delivery.messages, delivery.first, 0, "g").to_pylist() if delivery else []
    held = {i: h.number for i, h in delivery.held.items()} if delivery else {}
    answers = [early, *(inbound.settle(number + 1) for number in range(3, 3 + len(rows)))]
    inbound.validate()
    return rows, answers, dict(+inbound.left_out), held, {i: h.number for i, h in inbound.held.items()}


@given(_stream(), st.integers(1, 3), st.integers(0, 2))
def test_columns_and_objects_leave_the_same_out(packets: list[PublishPacket], of: int, place: int) -> None:
    share = HashedShare(of, place % of, BY_DEVICE)
    columns = _received(packets, partial(plain_run, worth=1), share)
    objects = _received(packets, None, share)
    assert columns == objects
    rows, answers, left_out, _, _ = columns
    own = [packet for packet in packets if share.has(packet.topic)]
    assert left_out.get(LeftOut.OTHER_MEMBER, 0) == len(packets) - len(own)
    assert len(rows) + left_out.get(LeftOut.REPEAT, 0) == len(own)
    assert len(b"".join(answers)) == 4 * sum(1 for packet in packets if packet.packet_id)


@given(_stream())
def test_with_one_member_nothing_changes(packets: list[PublishPacket]) -> None:
    reader = partial(plain_run, worth=1)
    assert _received(packets, reader, HashedShare(1, 0)) == _received(packets, reader, None)


def test_marks_are_looked_at_among_the_members_own() -> None:
    ledger = Ledger({}, 0)
    share = HashedShare(2, 0, BY_DEVICE)
    screen = BothScreens(MemberScreen(share), MarkScreen(ledger, lambda: 1000.0))
    own, other = (next(t for t in _TOPICS if share.has(t) is mine) for mine in (True, False))

    def sent(number: int, topic: str) -> PublishPacket:
        return PublishPacket(topic, b"x", user_properties=mark(number).properties())

    packets = [sent(0, other), sent(1, own), sent(1, own), PublishPacket(own, b"plain"), sent(2, own)]
    left_out, tags = screen.packets(packets, [packet.topic for packet in packets])
    assert left_out == b"\2\0\1\0\0"
    assert [tag.number if tag else None for tag in tags] == [None, 1, None, None, 2]
    assert screen.packets(packets[1:2], [own]).left_out == b"\1"
    assert screen.packets(packets[:1], [other]) == (b"\2", [None]), "not seen by this member's ledger"
