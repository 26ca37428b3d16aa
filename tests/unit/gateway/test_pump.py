"""The pump between a broker that says one packet at a time and the disk."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mqtt5
import pytest

from tests.unit.gateway.brokered import Broker, pumping, turn
from tests.unit.gateway.serving import rows
from tests.unit.journal.support import FillingDisk
from towline.delivery.outrows import add_arrival, rows_from_messages
from towline.gateway.process import oldest_waiting_time
from towline.journal import Journal, Limits, Outbox
from towline.schema import OUTBOX_SCHEMA, ROW_SCHEMA
from towline.timing import Timestamp


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("qos", "stored"), [(1, 2), (2, 1)])
def test_what_comes_again_is_answered_when_all_before_it_is_in_kafka(
    tmp_path: Path, broker: Broker, qos: int, stored: int, restarts: bool
) -> None:
    """QoS 1 is stored again, as nothing tells it from another message; QoS 2 is not, and waits all the same."""

    def answered() -> list[int]:
        return [one.packet_id for one in broker.heard() if isinstance(one, mqtt5.PubAckPacket | mqtt5.PubRecPacket)]

    def message(*, again: bool) -> mqtt5.PublishPacket:
        return mqtt5.PublishPacket("t", b"1", qos=mqtt5.QoS(qos), packet_id=7, duplicate=again)

    with contextlib.ExitStack() as life:
        pump, inbox = life.enter_context(pumping(tmp_path, broker, ack_after="kafka"))
        broker.accept(pump, session_present=False)
        inbox.commit("spark", 0)
        broker.say(pump, message(again=False))
        assert (inbox.end, answered()) == (1, [])
        if restarts:
            life.close()
            pump, inbox = life.enter_context(pumping(tmp_path, broker, ack_after="kafka"))
        else:
            broker.line.close()
            turn(pump)
        broker.accept(pump, session_present=True)
        broker.say(pump, message(again=True))
        assert inbox.end == stored
        for upto in range(1, stored + 1):
            assert answered() == [], "not all of it is in Kafka"
            inbox.commit("spark", upto)
            pump.set_committed(inbox.committed)
            turn(pump)
        assert answered() == [7]


def test_a_session_made_anew_while_rows_wait(tmp_path: Path, broker: Broker) -> None:
    """No room for what comes in and none for what goes out: the new one goes on after those rows, with their ids."""
    disk = FillingDisk()
    with (
        Outbox.open(tmp_path / "out", schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=0), disk=disk) as outbox,
        pumping(tmp_path, broker, limits=Limits(max_bytes=64 << 10, min_free_bytes=0), outbox=outbox) as (pump, inbox),
    ):
        inbox.commit("spark", 0)
        broker.accept(pump, session_present=False)
        last = -1
        while not pump._uplink.is_full:
            last += 1
            broker.say(pump, numbered(last))
        assert 0 < inbox.end <= last
        outbox.append_batch(add_arrival(rows_from_messages([{"topic": "out", "payload": b"", "qos": 2}]), Timestamp(0)))
        disk.full = True
        turn(pump)  # what is to be sent can't be recorded
        assert not pump._driver.connected
        disk.full = False
        pump._driver.schedule.due_at = 0.0
        turn(pump)
        assert pump._uplink.is_full
        assert not pump._driver.connected, "a new session would number those rows' packets anew"
        inbox.commit("spark", inbox.end)
        pump._uplink.retry_at = 0.0
        turn(pump)
        assert inbox.end == last + 1
        broker.accept(pump, session_present=True)
        broker.say(pump, numbered(last), numbered(last + 1))  # the first again: its PUBREC never left
        stored = [row for batch in inbox.read(inbox.first_offset, inbox.end) for row in batch.to_pylist()]
        assert [row["offset"] for row in stored] == list(range(inbox.first_offset, last + 2))
        assert [row["payload"][0] for row in stored] == list(range(inbox.first_offset, last + 2))


def numbered(number: int) -> mqtt5.PublishPacket:
    return mqtt5.PublishPacket("t", bytes([number]) * 6000, qos=mqtt5.QoS.EXACTLY_ONCE, packet_id=number + 1)


def test_a_call_of_another_thread_is_answered_in_the_next_turn(tmp_path: Path, broker: Broker) -> None:
    with pumping(tmp_path, broker) as (pump, _):
        broker.accept(pump, session_present=False)
        answer, wrong = pump.submit(lambda: 7), pump.submit(lambda: int("seven"))
        assert not answer.done()
        turn(pump)
        assert answer.result(0) == 7
        assert isinstance(wrong.exception(0), ValueError)
        late = pump.submit(lambda: 8)
    assert late.cancelled()


def test_a_drain_elsewhere_takes_all_filters_back_and_rests_while_commits_are_waited_for(
    tmp_path: Path, broker: Broker
) -> None:
    """The journal does not know the session, as its machine is gone: ended while subscribed, it would lose messages."""
    wanted = [{"pattern": "a/#"}, {"pattern": "$share/s/b"}]
    with pumping(tmp_path, broker, ack_after="kafka", subscriptions=wanted, drain_s=0.0) as (pump, _):
        broker.accept(pump, session_present=True)
        (unsubscribe,) = [one for one in broker.heard() if isinstance(one, mqtt5.UnsubscribePacket)]
        assert sorted(unsubscribe.patterns) == ["$share/s/b", "a/#"]
        broker.say(pump, mqtt5.UnsubAckPacket(unsubscribe.packet_id, [mqtt5.UnsubAckReasonCode.SUCCESS] * 2))
        turn(pump)
        assert pump.status()["drain"] == "taking what the broker holds"
        broker.say(pump, mqtt5.PublishPacket("a/1", b"1"))
        for _ in range(4):
            broker.say(
                pump, *(mqtt5.PingRespPacket() for one in broker.heard() if isinstance(one, mqtt5.PingReqPacket))
            )
        assert pump.status()["drain"] == "waiting for commits"
        assert all(at is None or at > time.monotonic() + 1 for at in pump._send_pending(time.monotonic()))


def test_the_oldest_waiting_message_is_told_over_restarts(tmp_path: Path) -> None:
    limits = Limits(min_free_bytes=0)
    with Journal.open(tmp_path, schema=ROW_SCHEMA, limits=limits) as journal:
        assert oldest_waiting_time(journal, "received_at")() is None
        for first in (0, 3):
            journal.append(rows(first, 3))
        journal.commit("bridge", 0)
    with Journal.open(tmp_path, schema=ROW_SCHEMA, limits=limits) as journal:
        oldest = oldest_waiting_time(journal, "received_at")
        times = [row["received_at"].timestamp() for batch in journal.read(0, 6) for row in batch.to_pylist()]
        for upto, at in enumerate(times):
            journal.commit("bridge", upto)
            assert (oldest(), oldest()) == (at, at)
        journal.commit("bridge", 6)
        assert oldest() is None


def calls_between(first: str, last: str, work: Callable[[], None]) -> list[str]:
    """The Python functions that are called from the first call of one method of a socket to that of another."""
    calls: list[str] = []
    counting = False

    def profile(frame: Any, event: str, called: Any) -> None:
        nonlocal counting
        if event == "c_call" and called.__name__ in (first, last):
            counting = called.__name__ == first
        elif event == "call" and counting:
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_a_publish_alone_is_acknowledged_after_a_hundred_calls_at_most(tmp_path: Path, broker: Broker) -> None:
    """Most of what one costs is Python calls, whose number does not vary."""
    turns = list[list[str]]()
    with pumping(tmp_path, broker) as (pump, _):
        broker.accept(pump, session_present=False)
        broker.line.recv(4096)  # CONNECT and SUBSCRIBE
        for packet_id in range(1, 11):  # the first make what the others use again, and a busy machine makes some wait
            broker.line.sendall(mqtt5.PublishPacket("t", b"21.5", qos=mqtt5.QoS(1), packet_id=packet_id).write())
            turns.append(calls_between("recv_into", "send", lambda: turn(pump)))
            assert broker.line.recv(100) == bytes((0x40, 2, 0, packet_id))
    fewest = min(turns, key=len)
    assert 50 < len(fewest) <= 100, fewest
