"""Outbox sender: back-pressure, expiry, next turn, rows that must stay, a full disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mqtt5
import pytest

from tests.unit.delivery.test_outbound import Line, outbox_rows
from tests.unit.journal.support import FillingDisk
from towline import timing
from towline.delivery import outbound as module
from towline.delivery.outbound import Outcome
from towline.journal import Limits
from towline.mqtt.events import ConnectionLost, PacketsReceived
from towline.mqtt.outbound import Phase
from towline.timing import Timestamp

#: Microseconds since 1970, and seconds of the clock that never goes back.
WALL_US = 1_700_000_000_000_000


class Clock:
    """The clocks, as a test sets them; `ahead_s` is how much the wall clock is, `boot` names the boot."""

    def __init__(self) -> None:
        self.now, self.ahead_s, self.boot = 1000.0, 0, 1

    def wall_ns(self) -> int:
        return (WALL_US + int((self.now - 1000.0 + self.ahead_s) * 1e6)) * 1000

    def boottime_ns(self, _clock: int) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    set_by_test = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: set_by_test.now)
    monkeypatch.setattr(time, "time_ns", set_by_test.wall_ns)
    monkeypatch.setattr(time, "clock_gettime_ns", set_by_test.boottime_ns)
    monkeypatch.setattr(timing, "_boot_id", lambda: set_by_test.boot)
    monkeypatch.setattr(timing, "_PROCESS_START_US", 1_000_000_000)
    return set_by_test


def arrive(line: Line, *expiries: int | None, age_s: int = 0, qos: int = 1) -> None:
    """Messages that came `age_s` ago; of each the seconds after which nobody wants it."""
    first = line.outbox.end
    message: dict[str, Any] = {"topic": "d", "qos": qos}
    messages = [message | {"payload": b"%d" % n, "message_expiry_seconds": s} for n, s in enumerate(expiries, first)]
    wall_us, boottime_us, boot = Timestamp.now()
    arrival = Timestamp(wall_us - age_s * 1_000_000, boottime_us - age_s * 1_000_000, boot)
    line.outbox.append_batch(outbox_rows(*messages, arrival=arrival))


def test_nothing_more_is_sent_while_the_transport_holds_much(tmp_path: Path) -> None:
    """[I7]."""
    line = Line(tmp_path, 0)
    line.connect()
    arrive(line, None)
    line.sender.turn(unsent=module._MAX_UNSENT_BYTES)
    assert line.sent == []
    line.sender.turn(unsent=module._MAX_UNSENT_BYTES - 1)
    assert len(line.sent) == 1


def test_an_expiry_counts_from_the_arrival_and_what_is_left_of_it_leaves(tmp_path: Path, clock: Clock) -> None:
    """[MQTT-3.3.2-6]."""
    line = Line(tmp_path, 0)
    arrive(line, 60, None, 20, 21, age_s=20)
    assert line.connect() == [0, 1, 3], "one is too old"
    assert [packet.message_expiry_interval for packet in line.sent] == [40, None, 1]
    assert line.sender.status()["expired"] == 1
    line.sender.flush()
    line.outbox.close()
    clock.now += 10
    again = Line(tmp_path, 0)
    assert again.connect() == [0, 1, 3], "they may have come: with the packet id, and for a last second"
    assert [packet.message_expiry_interval for packet in again.sent] == [30, None, 1]


YEAR_S = 365 * 86_400


@pytest.mark.parametrize("step_s", [-YEAR_S, 0, 56 * YEAR_S])
def test_setting_the_clock_makes_nothing_older_and_nothing_younger(tmp_path: Path, clock: Clock, step_s: int) -> None:
    """What came before NTP did is not dropped; what came by a clock that was ahead does not live longer."""
    line = Line(tmp_path, 0, max_age_s=100)
    arrive(line, 60, 20, None)
    clock.ahead_s += step_s
    clock.now += 30
    assert line.connect() == [0, 2]
    assert [packet.message_expiry_interval for packet in line.sent] == [30, None]
    line.outbox.close()
    clock.now += 20
    again = Line(tmp_path, 0, max_age_s=100)
    arrive(again, None, age_s=100)
    assert again.connect() == [0, 2], "after a restart in the same boot, too"
    assert [packet.message_expiry_interval for packet in again.sent] == [10, None]
    assert again.sender.status()["expired"] == 2


@pytest.mark.parametrize(
    ("off_s", "up_s", "left"),
    [
        (10, 0, [50, 10, None]),
        (30, 0, [30, None]),
        (YEAR_S, 0, [None]),
        (-YEAR_S, 0, [60, 20, None]),
        (-YEAR_S, 30, [30, None]),
        (-YEAR_S, 60, [None]),
    ],
)
def test_across_boots_the_wall_clock_counts(
    tmp_path: Path, clock: Clock, off_s: int, up_s: int, left: list[int | None]
) -> None:
    """One that is behind what it was makes nothing older; but as old as this process is all that it finds."""
    line = Line(tmp_path, 0)
    arrive(line, 60, 20, None)
    line.outbox.close()
    clock.boot, clock.ahead_s = 2, off_s
    clock.now += up_s
    again = Line(tmp_path, 0)
    again.connect()
    assert [packet.message_expiry_interval for packet in again.sent] == left


def test_what_expires_while_it_is_postponed_lets_the_next_go(tmp_path: Path, clock: Clock) -> None:
    line = Line(tmp_path, 0)
    arrive(line, 2, None)
    line.connect(window=1)
    line.answer(mqtt5.PubAckReasonCode.QUOTA_EXCEEDED)
    assert (line.sent, line.sender.status()["put_off"]) == ([], 2)
    clock.now += 3
    line.sender.turn()
    line.sender.turn()
    assert line.drain() == [1]
    assert line.sender.status()["expired"] == 1


def test_a_turn_is_due_when_the_clock_alone_has_something_to_do(tmp_path: Path, clock: Clock) -> None:
    line = Line(tmp_path, 2, topics=2)
    line.connect()
    assert line.sender.next_turn_at() is None
    line.answer()
    due = line.sender.next_turn_at()
    assert due is not None
    assert 0 < due - clock.now <= 1, "what is done reaches the disk"
    clock.now = due
    line.sender.turn()
    assert line.sender.next_turn_at() is None
    arrive(line, None)
    line.sender.turn()
    line.answer(mqtt5.PubAckReasonCode.QUOTA_EXCEEDED)
    line.sender.flush()
    assert line.sender.next_turn_at() == clock.now + 1.0, "what was put off"
    line.end(ConnectionLost())
    assert line.sender.next_turn_at() is None, "nothing by the clock without a connection"


def test_qos_0_waits_while_there_is_no_space_to_mark_it_as_sent(tmp_path: Path, clock: Clock) -> None:
    """A crash would send it again; one behind the mark loses it, as QoS 0 may."""
    disk = FillingDisk()
    line = Line(tmp_path, 1, qos=0, disk=disk)
    disk.full = True
    assert (line.connect(), line.log.codes) == ([], ["TL-J02"])
    disk.full = False
    arrive(line, None, qos=0)
    line.sender.turn()
    assert line.sent == [], "sending pauses"
    clock.now += 1
    line.sender.turn()
    assert [int(packet.payload) for packet in line.sent] == [0, 1]
    line.outbox.close()
    assert Line(tmp_path, 0).connect() == []


def test_a_message_that_was_sent_a_second_time_continues_after_a_crash(tmp_path: Path) -> None:
    """Its owner waits for a receipt, and the broker for its PUBREL or the same packet again [MQTT-4.4.0-1]."""

    def line(messages: int) -> Line:
        return Line(tmp_path, messages, qos=2, mark=lambda number, _: [("n", str(number))])

    before = line(1)
    before.connect()
    before.answer()
    before.sender.resend([(0, 1)], lambda _: True)
    before.sender.turn()
    before.sender.resend([(0, 1)], lambda _: True)
    before.sender.turn()
    (sent,) = before.sent
    assert (sent.payload, sent.user_properties) == (b"0", [("n", "0")])
    before.sender.flush()
    before.outbox.close()
    after = line(0)
    assert after.connect() == [0]
    assert [(packet.packet_id, packet.duplicate) for packet in after.sent] == [(sent.packet_id, True)]


@pytest.mark.parametrize(("qos", "pubrel"), [(1, False), (2, True)])
def test_of_a_row_that_is_gone_only_the_packet_id_is_given_back(tmp_path: Path, qos: int, pubrel: bool) -> None:
    """Sent a second time while the first was enough: the broker may hold it under its id [MQTT-4.3.3-6]."""

    def line() -> Line:
        return Line(tmp_path, 0, limits=Limits(min_free_bytes=0, segment_bytes=4096), mark=lambda *_: [])

    before = line()
    for number in range(4):
        payload = b"%d" % number + b" " * 2000
        before.outbox.append_batch(outbox_rows({"topic": "d", "payload": payload, "qos": qos}))
    before.connect()
    before.answer()
    before.sender.resend([(0, 1)], lambda _: True)
    before.sender.turn()
    before.sender.flush()
    ((packet_id, flight),) = before.outbox.in_flight.items()
    assert (flight.row_number, [int(packet.payload) for packet in before.sent]) == (0, [0])
    assert before.outbox.first_offset > 0
    before.outbox.close()
    after = line()
    assert after.connect() == []
    unfinished = {i: (message.token, message.phase) for i, message in after.session.outbound._unfinished.items()}
    assert unfinished == ({packet_id: (0, Phase.RELEASED)} if pubrel else {})
    after.handle(PacketsReceived([mqtt5.PubCompPacket(packet_id)]))
    assert after.outbox.in_flight == {}


@pytest.mark.parametrize("killed", [False, True])
def test_what_nobody_is_subscribed_to_is_counted_over_a_restart_too(tmp_path: Path, killed: bool) -> None:
    """Of QoS 2 PUBREC says it, and PUBCOMP, which may come to another process, does not."""
    outcomes: list[tuple[int, Outcome, int]] = []
    line = Line(tmp_path, 2, qos=2, on_outcome=lambda *outcome: outcomes.append(outcome))
    line.connect()
    first, second = (packet.packet_id or 0 for packet in line.sent)
    nobody = mqtt5.PubRecPacket(first, reason_code=mqtt5.PubRecReasonCode.NO_MATCHING_SUBSCRIBERS)
    line.handle(PacketsReceived([nobody, mqtt5.PubRecPacket(second)]))
    if killed:
        line.outbox.close()
        line = Line(tmp_path, 0, on_outcome=lambda *outcome: outcomes.append(outcome))
        line.connect()
    line.handle(PacketsReceived([mqtt5.PubCompPacket(first), mqtt5.PubCompPacket(second)]))
    status = line.sender.status()
    assert (status["delivered"], status["acknowledged"], status["unmatched"]) == (2, 2, 1)
    assert outcomes == [(0, Outcome.DELIVERED, 0x10), (1, Outcome.DELIVERED, 0)]
