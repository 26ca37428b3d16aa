"""Receipts on their way: what is durable before one leaves, how many are under way, and what is said again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mqtt5 import ConnAckPacket, PubAckPacket, PubAckReasonCode, PublishPacket

from tests.helpers import read_all
from tests.unit.delivery.receipts.marks import CONTENT, KEYS, NOW, later, mark, sent
from tests.unit.journal.support import FillingDisk
from towline import files
from towline.delivery.inbound import to_rows
from towline.delivery.receipts.ledger import MarkVerdict, ReceiptLedger, ReceiptSender
from towline.delivery.receipts.mark import Mark, ReceiptKeys
from towline.delivery.receipts.payload import ReceiptPayload
from towline.journal import Journal, Limits
from towline.mqtt import events
from towline.mqtt.codec import PublishRun
from towline.mqtt.message import OutboundMessage
from towline.mqtt.session import Session
from towline.schema import ROW_SCHEMA
from towline.timing import Timestamp


class Gateway:
    """A sender of receipts with its inbox and its session; `sent` is what the broker has got."""

    def __init__(self, directory: Path, keep_s: float = 100) -> None:
        key = directory / "key"
        files.replace(key, bytes(range(32)).hex())
        self.disk = FillingDisk()
        self.inbox = Journal.open(
            directory / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0), disk=self.disk
        )
        keys = ReceiptKeys.read_file(key)
        notes, end = self.inbox.notes, self.inbox.end
        self.ledger = ReceiptLedger(notes, end, max_ranges=10, retention_s=keep_s, keys=keys)
        self.ledger.commit(self.inbox.committed)
        self.session = Session(events.SessionConfig("c", "w", unknown_session="adopt"))
        self.sent: list[PublishPacket] = []
        #: The watermark on the disk, as each receipt left.
        self.durable: list[int] = []
        self.logged: list[object] = []
        self.sender = ReceiptSender("told", self.ledger, self.inbox, self.handle, self)
        self.connect()

    def warning(self, _event: str, **facts: object) -> None:
        self.logged.append(facts["code"])

    def handle(self, event: events.Event) -> None:
        for action in self.session.handle(event, 0.0):
            if isinstance(action, events.Send):
                for packet in read_all(action.data):
                    if isinstance(packet, PublishPacket):
                        self.sent.append(packet)
                        note = self.inbox.notes.get(f"publisher:{packet.topic.removeprefix('told/')}")
                        self.durable.append(note[3] if note else 0)
            elif isinstance(action, events.PublishAcknowledged):
                assert self.sender.perform(action)

    def connect(self, window: int = 65_535) -> None:
        self.handle(events.ConnectionOpened())
        self.handle(events.PacketsReceived([ConnAckPacket(session_present=True, receive_max=window)]))

    def lose_connection(self) -> None:
        self.handle(events.ConnectionLost())
        self.sender.connection_lost(self.session.outbound.withdraw_unsent())

    def arrive(self, number: int, publisher: str = "p", nonce: str = "") -> None:
        """A message comes, is stored, and reaches Kafka."""
        made = Mark(publisher, 1, number, 0, nonce)
        assert self.ledger.record_mark(made, NOW) is MarkVerdict.NEW
        notes = self.ledger.notes_for_frame([made])
        row = to_rows(
            events.Messages([PublishRun.from_packets([PublishPacket("t", b"")], b"\x30")]), self.inbox.end, 0, "plant"
        )
        self.ledger.frame_stored([made], self.inbox.append(row, notes=notes))
        self.inbox.commit("spark", self.inbox.end)
        self.ledger.commit(self.inbox.committed)

    def turn(self, now: float, *, online: bool = True) -> list[tuple[str, int]]:
        """Publisher and watermark of each receipt that leaves."""
        before = len(self.sent)
        self.sender.turn(now, online=online)
        receipts = [ReceiptPayload.decode(packet.payload) for packet in self.sent[before:]]
        return [(receipt.publisher, receipt.watermark) for receipt in receipts if receipt is not None]

    def answer(self, reason: PubAckReasonCode = PubAckReasonCode.SUCCESS) -> None:
        answers = [PubAckPacket(packet.packet_id or 0, reason_code=reason) for packet in self.sent]
        self.sent.clear()
        self.handle(events.PacketsReceived(answers))


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    monkeypatch.setattr(Timestamp, "now", lambda: NOW)
    return Gateway(tmp_path)


def test_a_receipt_leaves_for_its_publisher_and_stays_at_the_broker(gateway: Gateway, tmp_path: Path) -> None:
    """Its watermark is durable before: a crash that came between would let the next process tell less."""
    assert (gateway.turn(5.0), gateway.sender.next_turn_at()) == ([], None)
    gateway.arrive(0)
    assert gateway.turn(5.0, online=False) == []
    assert gateway.turn(5.0) == [("p", 1)]
    (packet,) = gateway.sent
    assert (packet.topic, int(packet.qos), packet.retain) == ("told/p", 1, True)
    assert (packet.content_type, packet.payload_format_indicator) == ("application/json", 1)
    assert ReceiptPayload.verify_payload(KEYS, "p", packet.payload)
    gateway.arrive(1)
    assert gateway.turn(6.0) == [], "one for a publisher is in flight"
    gateway.answer()
    due = gateway.sender.next_turn_at()
    assert due is not None
    assert 5.0 < due < 6.0
    assert gateway.turn(due) == [("p", 2)]
    gateway.answer()
    assert (gateway.sender.sent_count, gateway.sender.next_turn_at(), gateway.turn(100.0)) == (2, None, [])
    assert gateway.durable == [1, 2]
    gateway.inbox.close()
    after = Gateway(tmp_path)
    assert after.turn(0.0) == [("p", 2)], "a new process tells everybody what it knows"
    receipt = ReceiptPayload.decode(after.sent[0].payload)
    assert receipt is not None
    assert receipt.restarted


def test_so_many_are_in_flight_and_the_others_follow_the_answers(gateway: Gateway) -> None:
    for publisher in range(203):
        assert gateway.ledger.record_mark(Mark(f"p{publisher}", 1, 0, 0), NOW) is MarkVerdict.NEW
    gateway.ledger.resend_receipts()
    first = gateway.turn(5.0)
    assert len(first) == 200
    assert (gateway.sender.next_turn_at(), gateway.turn(10.0)) == (None, [])
    kept, gateway.sent = gateway.sent[2:], gateway.sent[:2]
    gateway.answer()
    second = gateway.turn(15.0)
    assert len(second) == 2
    gateway.sent += kept
    gateway.answer()
    assert len({*first, *second, *gateway.turn(20.0)}) == 203


def test_a_receipt_that_the_broker_refuses_is_logged_once(gateway: Gateway) -> None:
    for number in range(3):
        gateway.arrive(number)
        gateway.turn(10.0 * number)
        gateway.answer(PubAckReasonCode.NOT_AUTHORIZED)
    assert (gateway.logged, gateway.sender.sent_count) == (["TL-M41"], 0)
    assert not gateway.sender.perform(events.PublishAcknowledged(1, 0)), "the outbox names its messages by numbers"
    gateway.arrive(3)
    gateway.turn(40.0)
    gateway.sender.reset()
    gateway.answer()
    assert gateway.sender.sent_count == 0, "of a session before this one"


def test_what_never_left_is_said_again_and_what_left_is_the_session_s(gateway: Gateway) -> None:
    gateway.lose_connection()
    gateway.connect(window=1)
    gateway.arrive(0)
    gateway.arrive(0, "q")
    assert gateway.turn(5.0) == [("p", 1)], "the window lets one of them leave"
    gateway.session.outbound.publish(7, OutboundMessage("else", qos=1))
    gateway.lose_connection()
    gateway.sent.clear()
    gateway.connect()
    assert [packet.topic for packet in gateway.sent] == ["told/p"]
    assert gateway.turn(10.0) == [("q", 1)]
    gateway.session = Session(events.SessionConfig("c", "w", unknown_session="adopt"))
    gateway.connect()
    gateway.sender.reset()
    gateway.sent.clear()
    assert {*gateway.turn(15.0)} == {("p", 1), ("q", 1)}
    gateway.answer()
    gateway.sender.session_lost()
    assert {*gateway.turn(20.0)} == {("p", 1), ("q", 1)}, "the broker may have kept neither"
    assert all(b'"restarted":true' in packet.payload for packet in gateway.sent)


def test_without_space_for_a_watermark_no_receipt_leaves(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.arrive(0)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    gateway.disk.full = True
    assert gateway.turn(5.0) == []
    due = gateway.sender.next_turn_at()
    assert due is not None
    assert due > 5.0
    gateway.disk.full = False
    assert gateway.turn((5.0 + due) / 2) == [], "a full disk is not asked in each turn"
    assert gateway.turn(due) == [("p", 1)]
    gateway.answer()
    gateway.disk.full = True
    gateway.sender.session_lost()
    assert gateway.turn(20.0) == [("p", 1)], "this one is durable"


def test_a_silent_publisher_is_forgotten_on_the_disk_too(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.arrive(0)
    packet = PublishPacket("t", b"", user_properties=Mark("p", 1, 0, 0).properties())
    for now in (0.0, 10.0):
        gateway.ledger.deduplicate([packet], ["t"], NOW)
        gateway.turn(now)
    assert (gateway.logged, gateway.sender.status()["forged"]) == (["TL-M35"], 2), "a wrong code, once"
    assert "publisher:p" in gateway.inbox.notes
    monkeypatch.setattr(Timestamp, "now", lambda: later(101))
    gateway.turn(50.0)
    assert gateway.sender.status()["publishers"] == 1, "nobody is looked for in each turn"
    gateway.turn(1000.0)
    assert gateway.sender.status()["publishers"] == 0
    assert "publisher:p" not in gateway.inbox.notes


def test_keys_are_changed_in_their_file_while_it_runs(gateway: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "key"
    other = ReceiptKeys([("", bytes([7] * 32))])

    def judged(keys: ReceiptKeys, number: int) -> bool:
        message = sent(mark(number).sign(keys, CONTENT))
        return gateway.ledger.deduplicate([message], ["t"], NOW).tags[0] is not None

    assert judged(KEYS, 0)
    assert not judged(other, 1)
    files.replace(path, bytes([7] * 32).hex() + "\n" + bytes(range(32)).hex())
    assert judged(other, 1), "at once"
    assert judged(KEYS, 2), "both count"
    files.replace(path, "half wri")
    gateway.sender.turn(time.monotonic() + 100, online=True)
    assert gateway.logged[-1] == "TL-C85"
    assert judged(KEYS, 3), "those before count on"
    files.replace(path, bytes([7] * 32).hex())
    gateway.sender.turn(time.monotonic() + 200, online=True)
    assert not judged(KEYS, 4), "it was taken away"
    assert judged(other, 4)
    assert ReceiptKeys.read_file(path).refresh() is False
