"""Outbox sender and session without a network: outcomes of messages when connections end."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mqtt5
import pyarrow as pa
import pytest

from tests.helpers import read_all
from towline.bridge.lines.account import LineNotes, downlink_account
from towline.delivery.outbound import OutboxSender, load_session_record
from towline.delivery.outrows import add_arrival, rows_from_messages
from towline.errors import ConfigError, JournalFull
from towline.journal import Batch, Disk, Limits, Outbox
from towline.journal.disk import journal_full
from towline.mqtt import events
from towline.mqtt.session import Session
from towline.schema import OUTBOX_SCHEMA
from towline.timing import Timestamp


def outbox_rows(*messages: dict[str, Any], arrival: Timestamp = Timestamp(0)) -> pa.RecordBatch:  # noqa: B008 frozen
    return add_arrival(rows_from_messages(messages), arrival)


class Log:
    def __init__(self) -> None:
        self.codes: list[object] = []

    def warning(self, _event: str, **facts: object) -> None:
        self.codes.append(facts.get("code"))


class Line:
    """An outbox sender and its session; `sent` is what the broker has got on this connection."""

    def __init__(
        self,
        directory: Path,
        messages: int,
        topics: int = 1,
        qos: int = 1,
        *,
        exactly_once: bool = False,
        disk: Disk | None = None,
        limits: Limits = Limits(min_free_bytes=0, segment_bytes=1 << 20),  # noqa: B008 frozen
        **more: Any,
    ) -> None:
        self.outbox = Outbox.open(directory / "outbox", schema=OUTBOX_SCHEMA, limits=limits, disk=disk)
        if messages:
            rows = [{"topic": f"d{n % topics}", "payload": b"%d" % n, "qos": qos} for n in range(messages)]
            self.outbox.append_batch(outbox_rows(*rows))
        self.config = events.SessionConfig(
            "c", "w", unknown_session="adopt", durable_ids=True, exactly_once=exactly_once
        )
        self.session = Session(self.config)
        self.sent: list[mqtt5.PublishPacket] = []
        self.packets: list[Any] = []
        self.log = Log()
        self.sender = OutboxSender(
            self.outbox,
            handle_event=self.handle,
            log=self.log,
            refused_dir=directory / "refused",
            exactly_once=exactly_once,
            **more,
        )
        self.sender.attach_session(self.session)

    def renew(self) -> None:
        """Go on with a new session, as after an action that could not be made durable."""
        self.session = Session(self.config)
        self.sender.attach_session(self.session)

    def handle(self, event: events.Event) -> None:
        for action in self.session.handle(event, time.monotonic()):
            if isinstance(action, events.Send):
                self.packets += read_all(action.data)
                self.sent += [packet for packet in read_all(action.data) if isinstance(packet, mqtt5.PublishPacket)]
            else:
                self.sender.perform(action)

    def connect(self, window: int = 65535, *, present: bool = True, **connack: Any) -> list[int]:
        """Come online, and return what is published then."""
        self.sent.clear()
        self.handle(events.ConnectionOpened())
        self.handle(
            events.PacketsReceived([mqtt5.ConnAckPacket(session_present=present, receive_max=window, **connack)])
        )
        self.sender.turn()
        self.sender.turn()
        return [int(packet.payload) for packet in self.sent]

    def end(self, event: events.Event) -> bool:
        """Whether the message is found at which the broker ended the connection."""
        self.handle(event)
        self.sender.connection_lost(self.session.outbound.withdraw_unsent())
        return self.session.outbound.culprit_token is not None

    def answer(self, reason: mqtt5.PubAckReasonCode = mqtt5.PubAckReasonCode.SUCCESS) -> None:
        ids = [packet.packet_id for packet in self.sent if packet.packet_id]
        self.sent.clear()
        self.handle(events.PacketsReceived([mqtt5.PubAckPacket(packet_id, reason_code=reason) for packet_id in ids]))
        self.sender.turn()

    def drain(self) -> list[int]:
        """Answer until nothing more is published, and return all that was."""
        published: list[int] = []
        while self.sent:
            published += [int(packet.payload) for packet in self.sent]
            self.answer()
        return published

    def refused(self) -> list[tuple[int, int]]:
        self.sender.turn()
        return [(row["number"], row["reason"]) for row in self.sender.refused_messages.page(0)["rows"]]


def test_a_refused_message_that_could_not_be_stored_is_not_sent_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might be accepted now, and be delivered twice with a replay."""
    line = Line(tmp_path, 2, topics=2)
    line.connect()
    monkeypatch.setattr(line.sender.refused_messages, "store", Mock(side_effect=journal_full("refused", "no room")))
    line.answer(mqtt5.PubAckReasonCode.NOT_AUTHORIZED)
    line.end(events.ConnectionLost())
    assert line.connect() == []
    assert line.log.codes == ["TL-M49"]


def test_rows_that_a_crash_left_dropped_free_space_after_the_start(tmp_path: Path) -> None:
    """An attempt of a batch fills the outbox, the next one drops its rows, and the process ends before it is noted."""
    limits = Limits(max_bytes=100_000, min_free_bytes=0)
    rows = outbox_rows({"topic": "d", "payload": bytes(9_000), "qos": 1})
    outbox = Line(tmp_path, 0, limits=limits).outbox
    for start in range(8):
        outbox.append_batch(rows, Batch("q/0", 0, attempt="a"), start=start, whole=False)
    with pytest.raises(JournalFull):
        outbox.append_batch(pa.concat_batches([rows] * 8), Batch("q/0", 0, attempt="b"))
    outbox.close()
    line = Line(tmp_path, 0, limits=limits)
    line.sender.turn()
    line.outbox.append_batch(pa.concat_batches([rows] * 8), Batch("q/0", 0, attempt="b"))
    assert line.outbox.waiting_rows == 8


def test_exactly_once_stands_still_at_the_first_qos_2_message_that_was_acknowledged_as_qos_1(tmp_path: Path) -> None:
    """RabbitMQ 3.10 does so, and MQTT 3.1.1 has no Maximum QoS that would tell before."""
    line = Line(tmp_path, 5, qos=2, exactly_once=True)
    assert line.connect() == [0], "no second one before the broker has shown that it knows QoS 2"
    line.answer()
    assert line.sent == []
    status = line.sender.status()
    assert (status["delivered"], status["degraded"], status["queued"] + status["in_flight"]) == (1, 1, 4)
    assert "exactly once" in status["held_back"]
    assert line.log.codes == ["TL-M44"]
    line.end(events.ConnectionLost())
    assert line.connect() == []


def test_exactly_once_continues_at_a_broker_that_knows_qos_2_and_refuses_nothing_at_another(tmp_path: Path) -> None:
    line = Line(tmp_path / "one", 5, qos=2, exactly_once=True)
    line.connect()
    line.handle(events.PacketsReceived([mqtt5.PubRecPacket(line.sent[0].packet_id or 0)]))
    line.sender.turn()
    assert [int(packet.payload) for packet in line.sent] == [0, 1, 2, 3, 4]
    assert line.sender.blocked_reason is None
    line = Line(tmp_path / "other", 3, qos=2, exactly_once=True)
    assert line.connect(max_qos=mqtt5.QoS.AT_LEAST_ONCE) == []
    assert line.refused() == []
    assert line.sender.status()["queued"] == 3
    assert "Maximum QoS" in (line.sender.blocked_reason or "")


def test_at_least_once_counts_what_was_acknowledged_at_qos_1(tmp_path: Path) -> None:
    line = Line(tmp_path, 3, qos=2)
    assert line.connect() == [0, 1, 2]
    line.answer()
    assert line.sender.status()["degraded"] == 3
    assert line.sender.blocked_reason is None


def test_after_a_crash_qos_1_goes_out_again_under_the_same_packet_ids_with_dup(tmp_path: Path) -> None:
    """[MQTT-4.4.0-1], [MQTT-3.3.1-1], where the broker has kept the session."""
    line = Line(tmp_path, 30)
    line.connect(window=10)
    line.handle(events.PacketsReceived([mqtt5.PubAckPacket(packet.packet_id or 0) for packet in line.sent[:4]]))
    line.sender.turn()
    before = {int(packet.payload): packet.packet_id for packet in line.sent}
    assert list(before) == list(range(14))
    line.sender.flush()
    line.outbox.close()

    after = Line(tmp_path, 0)
    assert after.connect(window=10) == list(range(4, 14)), "in the original order, and nothing new before"
    assert all(packet.duplicate for packet in after.sent)
    assert [packet.packet_id for packet in after.sent] == [before[number] for number in range(4, 14)]
    assert after.drain() == list(range(4, 30))
    assert after.outbox.waiting_rows == 0
    assert after.outbox.in_flight == {}


def test_after_a_crash_and_a_lost_session_qos_1_is_sent_as_new(tmp_path: Path) -> None:
    """[MQTT-3.2.2-5]: no state of the old session goes on, so no DUP."""
    line = Line(tmp_path, 5)
    line.connect()
    line.outbox.close()
    after = Line(tmp_path, 0)
    assert after.connect(present=False) == [0, 1, 2, 3, 4]
    assert not any(packet.duplicate for packet in after.sent)
    status = after.sender.status()
    told = [status["resent_after_lost_session"], status["unsure_after_lost_session"], status["degraded"]]
    assert told == [0, 0, 0], "at least once: nothing to tell"
    after.answer()
    assert after.outbox.in_flight == {}


def test_a_message_that_is_done_and_that_no_broker_acknowledged_is_reported(tmp_path: Path) -> None:
    """The planted fault: a row is done, and its acknowledgement is in no count [I11]."""
    line = Line(tmp_path, 5)
    line.connect(window=4)
    line.outbox.mark_done((4,))
    line.answer()
    told = downlink_account(LineNotes(), {"outbox": line.sender.status()}).sentence()
    assert "does not add up ✗ (the outbox says 5 delivered · the broker has acknowledged 4)" in told


def test_a_refused_message_of_qos_0_is_counted_as_refused_alone(tmp_path: Path) -> None:
    """It is done before it is sent, and so acknowledged; the refusal takes that back [I11]."""
    line = Line(tmp_path, 3, qos=0)
    assert line.connect(max_packet_size=5) == []
    assert [number for number, _ in line.refused()] == [0, 1, 2]
    status = line.sender.status()
    assert (status["delivered"], status["refused"], status["acknowledged"]) == (0, 3, 0)


CONFIG = events.SessionConfig("me", "line", session_expiry_s=600)
RECORD = events.SessionRecord("me", established=True, subscriptions={"a/#": 9, "b": -1}, servers=("one", "two"))


@pytest.mark.parametrize(
    ("established", "expiry_s", "abandoned", "refused"),
    [
        (True, 600, "", True),
        (True, 600, "another", True),
        (True, 600, "before", False),
        (False, 600, "", False),  # the broker holds nothing for it
        (True, 0, "", False),
    ],
)
def test_the_session_of_another_client_id_is_dropped_only_where_nothing_waits_in_it_or_a_user_says_so(
    established: bool, expiry_s: int, abandoned: str, refused: bool
) -> None:
    for record in (RECORD, events.SessionRecord("me")):
        assert load_session_record(asdict(record), "here", CONFIG) == record, "as it was stored"
    assert load_session_record({}, "here", CONFIG) is None
    stored: dict[str, Any] = asdict(replace(RECORD, client_id="before", established=established))
    config = replace(CONFIG, session_expiry_s=expiry_s)
    if not refused:
        assert load_session_record(stored, "here", config, abandoned) is None
        return
    with pytest.raises(ConfigError, match=r'here.*"before".*"me".*TL-M23'):
        load_session_record(stored, "here", config, abandoned)
