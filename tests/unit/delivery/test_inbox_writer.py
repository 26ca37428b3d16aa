"""Inbox writer: no acknowledgement before the guarantee holds; without free space all deliveries wait in order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import ConnAckPacket, PublishPacket, PubRelPacket, QoS
from structlog.testing import capture_logs

from tests.helpers import read_all
from tests.unit.delivery.receipts.marks import CONTENT, KEYS, NOW, mark, sent
from tests.unit.journal.support import FillingDisk
from towline.delivery.inbound import InboxWriter
from towline.delivery.receipts.ledger import ReceiptLedger
from towline.errors import JournalFull
from towline.guarantee import AckAfter
from towline.journal import Journal, Limits
from towline.mqtt.codec import Decoder
from towline.mqtt.events import ConnectionOpened, Deliver, Event, PacketsReceived, Send, SessionConfig
from towline.mqtt.session import Session
from towline.schema import ROW_SCHEMA


class Line:
    """A session and its inbox writer; `answers` is what the broker has got, with the journal's end at that moment."""

    def __init__(
        self, directory: Path, acks: AckAfter = AckAfter.JOURNAL, *, qos: int = 0, ledger: ReceiptLedger | None = None
    ) -> None:
        self.disk = FillingDisk()
        self.inbox = Journal.open(
            directory / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0), disk=self.disk
        )
        self.session = Session(SessionConfig("c", "w", unknown_session="adopt"), None, self.inbox.end)
        if ledger is not None:
            self.session.inbound.duplicate_filter = lambda packets, topics: ledger.deduplicate(packets, topics, NOW)
        self.answers: list[tuple[str, int | None, int]] = []
        self.refusals: list[JournalFull] = []
        self.rows_came = 0
        self.decoder = Decoder(1 << 10)
        self.writer = InboxWriter(
            self.inbox,
            name="plant",
            acks=acks,
            least_qos=qos,
            handle_event=self.handle,
            on_rows=self.came,
            on_full=self.refusals.append,
            receipt_ledger=ledger,
        )
        self.connect()

    def came(self) -> None:
        self.rows_came += 1

    def handle(self, event: Event) -> None:
        for action in self.session.handle(event, 0.0):
            if isinstance(action, Send):
                for packet in read_all(action.data):
                    name = type(packet).__name__.removesuffix("Packet")
                    self.answers.append((name, getattr(packet, "packet_id", None), self.inbox.end))
            elif isinstance(action, Deliver):
                self.writer.deliver(action, self.session.inbound)

    def connect(self) -> None:
        self.handle(ConnectionOpened())
        self.handle(PacketsReceived([ConnAckPacket(session_present=True)]))
        self.answers.clear()

    def say(self, *packets: PublishPacket | PubRelPacket) -> list[tuple[str, int | None, int]]:
        """The broker sends these in one piece; what it gets in return."""
        self.answers.clear()
        self.handle(PacketsReceived(self.decoder.feed(b"".join(packet.write() for packet in packets))))
        return self.answers

    def payloads(self) -> list[bytes]:
        """Of all rows, whose offsets are checked."""
        rows = [row for batch in self.inbox.read(0, self.inbox.end) for row in batch.to_pylist()]
        assert [row["offset"] for row in rows] == list(range(self.inbox.end))
        return [row["payload"] for row in rows]


def publish(number: int, qos: int = 1, size: int = 0, **more: Any) -> PublishPacket:
    payload = b"%d" % number + bytes(size)
    return PublishPacket("t", payload, qos=QoS(qos), packet_id=number if qos else None, **more)


def test_an_acknowledgement_leaves_when_the_row_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """[I2]: at the end of the journal that the row is below."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_456_789)
    line = Line(tmp_path)
    assert line.say(publish(1), publish(2, qos=2)) == [("PubAck", 1, 2), ("PubRec", 2, 2)]
    assert line.say(PubRelPacket(2), publish(3)) == [("PubAck", 3, 3), ("PubComp", 2, 3)]
    assert (line.rows_came, line.payloads()) == (2, [b"1", b"2", b"3"])
    (row, *_) = (row for batch in line.inbox.read(0, 3) for row in batch.to_pylist())
    assert (row["gateway"], row["received_at"].timestamp()) == ("plant", 1_700_000_000.123456)
    assert dict(line.inbox.held_ids) == {}


def test_acknowledged_is_what_was_received_or_what_kafka_has_where_that_is_the_promise(tmp_path: Path) -> None:
    line = Line(tmp_path / "received", AckAfter.RECEIVED)
    line.disk.full = True
    assert line.say(publish(1), publish(2, qos=2)) == [("PubAck", 1, 0), ("PubRec", 2, 0)]
    assert line.say(PubRelPacket(2)) == [], "its packet id is not free before that is durable [I3]"
    line = Line(tmp_path / "kafka", AckAfter.KAFKA, qos=1)
    assert line.say(publish(1), publish(2), publish(3, qos=0), publish(4)) == []
    for upto in (0, 2, 1, 2):
        line.writer.allow_acknowledgements(line.session.inbound, upto)
    assert line.answers == [("PubAck", 1, 4), ("PubAck", 2, 4)]
    assert line.inbox.ledger["lower_qos"] == 1


def test_without_space_all_waits_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """[I7]: nothing is acknowledged, nothing lost; asked again after a while, and not in each turn."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    line = Line(tmp_path)
    line.disk.full = True
    assert [line.say(publish(1)), line.say(publish(2), publish(3, qos=2))] == [[], []]
    waits = line.writer.is_full
    assert [error.code for error in line.refusals] == ["TL-J02"] * 2
    assert line.writer.retry_at > 100.0
    line.disk.full = False
    line.writer.retry_when_due((100.0 + line.writer.retry_at) / 2)
    assert line.answers == []
    line.writer.retry_when_due(line.writer.retry_at)
    assert (waits, line.writer.is_full) == (True, False)
    assert line.answers == [("PubAck", 1, 1), ("PubAck", 2, 3), ("PubRec", 3, 3)]
    assert line.payloads() == [b"1", b"2", b"3"]
    assert line.writer.received_count == 3


def test_a_delivery_that_is_stored_in_part_continues_where_it_stopped(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.writer._max_frame_bytes = 1  # a frame a message

    def came() -> None:
        line.rows_came += 1
        line.disk.full = line.rows_came == 2

    line.writer._on_rows = came
    assert line.say(*(publish(number, qos=2) for number in range(1, 5))) == [("PubRec", 1, 1), ("PubRec", 2, 2)]
    line.disk.full = False
    line.writer.retry_when_due(line.writer.retry_at)
    assert line.answers[2:] == [("PubRec", 3, 3), ("PubRec", 4, 4)]
    assert (line.payloads(), sorted(line.inbox.held_ids)) == ([b"1", b"2", b"3", b"4"], [1, 2, 3, 4])


def test_repeats_are_in_the_account_over_the_life_of_the_journal(tmp_path: Path) -> None:
    """[I11]: received = stored + deduplicated."""
    line = Line(tmp_path)
    line.say(publish(1, qos=2), publish(2))
    line.say(publish(1, qos=2), publish(1, qos=2, size=1))
    with capture_logs() as log:
        line.writer.count_duplicates(line.session.inbound, "broker")
        line.writer.count_duplicates(line.session.inbound, "broker")
    assert [(entry["code"], entry["count"]) for entry in log] == [("TL-M24", 1)]
    assert (line.writer.received_count, line.writer.acknowledged_count) == (4, 4)
    assert {name: line.inbox.ledger[name] for name in ("deduplicated", "packet_ids_reused")} == {
        "deduplicated": 1,
        "packet_ids_reused": 1,
    }
    line.inbox.close()
    assert Line(tmp_path).writer.received_count == 4


def test_a_truncated_message_is_counted(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.decoder = Decoder(8 << 10)
    crowded = publish(3, user_properties=[("", "")] * 1001)
    line.say(publish(1), publish(2, size=9000), crowded)
    line.say(publish(4, size=9000))
    assert {name: line.inbox.ledger[name] for name in ("packets_too_large", "too_many_properties")} == {
        "packets_too_large": 2,
        "too_many_properties": 1,
    }
    assert line.payloads() == [b"1", None, None, None]


def test_a_marked_message_is_remembered_with_its_row(tmp_path: Path) -> None:
    ledger = ReceiptLedger({}, 0, keys=KEYS)
    line = Line(tmp_path, ledger=ledger)
    signed = mark(0, nonce="ab").sign(KEYS, CONTENT)
    line.say(sent(signed))
    line.say(publish(9))
    assert ledger.receipts(1)[0].nonces == "ab", "it is stored"
    assert (
        ReceiptLedger(line.inbox.notes, line.inbox.end, keys=KEYS)
        .deduplicate([sent(signed)], ["t"], NOW)
        .duplicate_flags
        == b"\x01"
    )
    (batch,) = line.inbox.read(0, 1)
    assert batch.column("user_properties").to_pylist() == [[{"key": "a", "value": "1"}]], "the mark is not carried on"
    line.disk.full = True
    line.say(publish(1), sent(mark(1, nonce="cd").sign(KEYS, CONTENT)))
    assert [waiting.number for waiting in line.writer.pending_marks] == [1]
    assert ledger.receipts(1)[0].nonces == "ab", "it is not stored yet"
    line.disk.full = False
    line.writer.retry_when_due(line.writer.retry_at)
    assert line.writer.pending_marks == []
    assert ledger.receipts(1)[0].nonces == "ab cd"
