"""Rows whose messages have their receipt go, and nothing that is still on its way under a packet id needs them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import (
    ConnAckPacket,
    PubAckPacket,
    PubAckReasonCode,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
    QoS,
)

from tests.helpers import read_all
from tests.unit.delivery.receipts.marks import KEYS
from towline.delivery import outbound
from towline.delivery.outbound import OutboxSender
from towline.delivery.outrows import add_arrival, rows_from_messages
from towline.delivery.receipts.payload import ReceiptPayload
from towline.journal import Batch, Limits, Outbox
from towline.mqtt.codec import Packet
from towline.mqtt.events import ConnectionOpened, Event, PacketsReceived, Send, SessionConfig
from towline.mqtt.session import Session
from towline.publisher.pending_receipts import RECEIPT_CONSUMER, PendingReceipts
from towline.schema import OUTBOX_SCHEMA
from towline.timing import Timestamp

LIMITS = Limits(min_free_bytes=0, segment_bytes=4096)
ROWS = 20


class Log:
    def warning(self, event: str, **facts: object) -> None:
        pass


class Life:
    """One life of a publisher without threads; `sent` is what the broker has got."""

    def __init__(self, directory: Path, *, receipts: bool = True, rows: int = 0, qos: int = 2) -> None:
        self.outbox = Outbox.open(directory / "outbox", schema=OUTBOX_SCHEMA, limits=LIMITS)
        for number in range(rows):
            row = rows_from_messages([{"topic": "d", "payload": b"%d" % number + bytes(1000), "qos": qos}])
            self.outbox.append_batch(add_arrival(row, Timestamp(0)))
        self.awaited: PendingReceipts | None = PendingReceipts(self.outbox, 1.0, KEYS) if receipts else None
        if not receipts:
            self.outbox.forget(RECEIPT_CONSUMER)
        self.sent: list[Any] = []
        self.downlink = OutboxSender(
            self.outbox,
            handle_event=self.handle,
            log=Log(),
            refused_dir=directory / "refused",
            mark=self.awaited.mark_properties if self.awaited else None,
        )
        self.session = Session(SessionConfig("c", "w", unknown_session="adopt", durable_ids=True))
        self.downlink.attach_session(self.session)

    def handle(self, event: Event) -> None:
        for action in self.session.handle(event, time.monotonic()):
            if isinstance(action, Send):
                self.sent += read_all(action.data)
            else:
                self.downlink.perform(action)

    def connect(self) -> None:
        self.handle(ConnectionOpened())
        self.sent.clear()
        self.handle(PacketsReceived([ConnAckPacket(session_present=True)]))
        self.downlink.turn()

    def serve(self) -> list[int]:
        """Answer as a broker does until nothing is open; returns the packet ids of PUBREL."""
        released = []
        while self.sent:
            answers: list[Packet] = []
            for packet in self.sent:
                if isinstance(packet, PublishPacket):
                    assert packet.packet_id
                    kind = PubAckPacket if packet.qos == QoS.AT_LEAST_ONCE else PubRecPacket
                    answers.append(kind(packet.packet_id))
                elif isinstance(packet, PubRelPacket):
                    answers.append(PubCompPacket(packet.packet_id))
                    released.append(packet.packet_id)
            self.sent.clear()
            self.handle(PacketsReceived(answers))
            self.downlink.turn()
        self.downlink.flush()
        return released

    def ask(self) -> PublishPacket:
        """Send the oldest without a receipt once more, and leave it without an answer."""
        self.downlink.resend([(0, 1)], lambda _: True)
        self.downlink.turn()
        (packet,) = self.sent
        assert isinstance(packet, PublishPacket)
        self.sent.clear()
        return packet

    def all_arrived(self) -> None:
        assert self.awaited is not None
        receipt = ReceiptPayload(self.outbox.journal_id, 1, ROWS, incarnations=((0, self.outbox.incarnation),))
        self.awaited.apply_receipt(receipt, 0.0)
        self.awaited.persist(self.downlink.oldest_number)

    def close(self) -> None:
        self.outbox.close()


@pytest.mark.parametrize("receipts", [True, False])
def test_a_packet_id_in_use_is_given_back_when_its_row_is_gone(tmp_path: Path, receipts: bool) -> None:
    """The message has its receipt; the broker may hold it all the same, and would take the next with its id for it."""
    life = Life(tmp_path, rows=ROWS)
    life.connect()
    life.serve()
    packet_id = life.ask().packet_id
    life.all_arrived()
    life.close()
    life = Life(tmp_path, receipts=receipts)
    life.connect()
    assert life.serve() == [packet_id]
    assert life.outbox.in_flight == {}
    status = life.downlink.status()
    assert (status["delivered"], status["queued"], status["in_flight"]) == (ROWS, 0, 0)
    life.close()
    Life(tmp_path, receipts=receipts).close()


def test_a_row_to_be_set_aside_stays(tmp_path: Path) -> None:
    """The broker refuses what it had taken before, and the receipt comes at the same time."""
    life = Life(tmp_path, rows=ROWS, qos=1)
    life.connect()
    life.serve()
    packet = life.ask()
    assert packet.packet_id
    life.handle(PacketsReceived([PubAckPacket(packet.packet_id, reason_code=PubAckReasonCode.NOT_AUTHORIZED)]))
    life.all_arrived()
    life.downlink.turn()
    assert life.downlink.status()["refused"] == 1
    life.close()


def test_what_waits_for_its_second_turn_may_be_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt comes with the last answer to what is under way; the rest was to be sent again."""
    monkeypatch.setattr(outbound, "_MAX_IN_FLIGHT", 2)
    monkeypatch.setattr(outbound, "_READ_BYTES", 1500)
    life = Life(tmp_path, rows=ROWS, qos=1)
    life.connect()
    life.serve()
    life.downlink.resend([(0, ROWS)], lambda number: number in range(ROWS))
    life.downlink.turn()
    assert len(life.sent) == 2
    life.handle(PacketsReceived([PubAckPacket(packet.packet_id) for packet in life.sent]))
    life.all_arrived()
    assert life.outbox.first_offset > 2
    life.sent.clear()
    life.downlink.turn()
    life.serve()
    assert life.outbox.waiting_rows == 0
    life.close()


def test_rows_read_again_behind_a_batch_that_became_whole_may_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came after the batch was delivered before it, and goes as soon as the batch is done too."""
    monkeypatch.setattr(outbound, "_MAX_IN_FLIGHT", 2)
    monkeypatch.setattr(outbound, "_READ_BYTES", 1500)
    monkeypatch.setattr(outbound, "_FLUSH_DELAY_S", 0.0)
    life = Life(tmp_path, receipts=False)
    row = add_arrival(rows_from_messages([{"topic": "d", "payload": bytes(1000), "qos": 1}]), Timestamp(0))
    for start in (0, 1):
        life.outbox.append_batch(row, Batch("q/0", 0, attempt="a"), start=start, whole=False)
    for number in range(ROWS):
        life.outbox.append_batch(row, Batch("q/1", number))
    life.connect()
    life.serve()
    assert life.outbox.waiting_rows == 0
    life.outbox.append_batch(row, Batch("q/0", 0, attempt="a"), start=2)
    life.downlink.turn()
    assert len(life.sent) == 2
    life.serve()
    assert life.outbox.waiting_rows == 0
    assert life.outbox.first_offset > 0
    life.close()
