"""A session and the clock: keep alive, back-pressure, answers that do not come."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mqtt5
import pytest
from mqtt5 import ConnAckPacket, PingRespPacket

from tests.helpers import publish
from tests.unit.mqtt.sessions import CONFIG, KNOWN, connect, online, only, receive, sent
from towline.mqtt import events
from towline.mqtt.session import Session, SessionState

# Keep alive


def test_pings_only_when_nothing_else_was_sent() -> None:
    """[MQTT-3.1.2-20], [MQTT-3.1.2-23 of 3.1.1]."""
    session = online()
    assert session.deadline() == pytest.approx(0.0 + 45.0)
    receive(session, publish(packet_id=1), now=30.0)
    session.handle(events.AckWatermark(1), 30.0)
    assert session.deadline() == pytest.approx(75.0)
    assert session.handle(events.Tick(), 74.0) == []
    assert isinstance(sent(session.handle(events.Tick(), 75.0))[0], mqtt5.PingReqPacket)
    receive(session, PingRespPacket(), now=75.1)
    assert session.deadline() == pytest.approx(120.0)


def test_a_connection_leaves_nothing_behind() -> None:
    """Neither a PINGREQ that is owed an answer, nor that it was not read."""
    session = online()
    session.handle(events.PingRequest(), 10.0)
    session.handle(events.ReadingToggled(False), 11.0)
    session.handle(events.ConnectionLost(), 12.0)
    session.handle(events.ConnectionOpened(), 200.0)
    assert session.deadline() == pytest.approx(210.0), "CONNACK is waited for"
    receive(session, ConnAckPacket(session_present=True), now=201.0)
    assert session.state is SessionState.ONLINE
    assert session.deadline() == pytest.approx(200.0 + 45.0), "no PINGRESP is owed"
    assert sent(session.handle(events.Tick(), 245.0)) == [mqtt5.PingReqPacket()]
    assert "TL-M04" in str(only(session.handle(events.Tick(), 290.0), events.Close).error), "this answer is missed"


def test_a_packet_that_takes_long_to_arrive_is_a_sign_of_life() -> None:
    session = online()
    session.handle(events.Tick(), 45.0)
    session.handle(events.PacketsReceived([]), 80.0)
    assert sent(session.handle(events.Tick(), 90.0)), "the broker wants to hear from us all the same [MQTT-3.1.2-22]"
    assert session.deadline() == pytest.approx(80.0 + 45.0)
    assert "TL-M04" in str(only(session.handle(events.Tick(), 125.0), events.Close).error), "it stopped in the middle"


@pytest.mark.parametrize("record", [KNOWN, None])
def test_a_packet_that_takes_longer_than_any_keep_alive_does_not_silence_us(
    record: events.SessionRecord | None,
) -> None:
    """Were the broker to hear nothing for 1.5 keep alives, it would end the connection, and so for ever."""
    session = Session(CONFIG, record)
    connect(session, ConnAckPacket(session_present=record is not None), now=0.0)
    pings = []
    for now in range(1, 600):
        assert session.handle(events.PacketsReceived([]), float(now)) == []
        if (due := session.deadline()) is not None and now >= due:
            pings += [
                now for packet in sent(session.handle(events.Tick(), float(now))) if packet == mqtt5.PingReqPacket()
            ]
    assert max(later - at for at, later in itertools.pairwise([0, *pings, 600])) <= 60
    assert session.state is not SessionState.OFFLINE


def test_a_pingreq_behind_a_packet_that_takes_long_to_leave_is_waited_for() -> None:
    """Otherwise a message that takes longer than that would end each connection, and never arrive."""
    session = online()
    for now in range(1, 600):
        session.handle(events.BytesWritten(), float(now))
        session.handle(events.Tick(), float(now))
    assert session.state is SessionState.ONLINE
    while (due := session.deadline()) is not None:
        assert due <= 600 + 45, "a line that takes nothing more is found"
        session.handle(events.Tick(), due)
    assert session.server_limits is None


def test_back_pressure_keeps_pinging_and_expects_no_answer() -> None:
    session = online()
    session.handle(events.ReadingToggled(False), 10.0)
    for _ in range(5):
        now = session.deadline()
        assert now is not None
        assert isinstance(sent(session.handle(events.Tick(), now))[0], mqtt5.PingReqPacket)
    assert now is not None
    session.handle(events.ReadingToggled(True), now + 1)
    assert sent(session.handle(events.Tick(), now + 45)), "the answer may lie in what was not read"
    assert session.deadline() == pytest.approx(now + 1 + 45.0)
    assert "TL-M04" in str(only(session.handle(events.Tick(), now + 46), events.Close).error), "it died meanwhile"


def pings_answered(session: Session) -> bool:
    """Asked as a call, because a type checker takes the answer of a property for lasting."""
    return session.pings_answered


@pytest.mark.parametrize("first", ["probe", "keep alive"])
def test_every_pingreq_has_its_answer(first: str) -> None:
    session = online()
    assert pings_answered(session)
    if first == "probe":
        assert [type(packet) for packet in sent(session.handle(events.PingRequest(), 2.0))] == [mqtt5.PingReqPacket]
    else:
        assert [type(packet) for packet in sent(session.handle(events.Tick(), 60.0))] == [mqtt5.PingReqPacket]
    session.handle(events.PingRequest(), 60.5)
    receive(session, PingRespPacket(), now=60.6)
    assert not pings_answered(session), "the answer to the first one says nothing of the second"
    receive(session, PingRespPacket(), now=60.7)
    assert pings_answered(session)


def test_without_a_connection_no_pingreq_is_sent() -> None:
    session = online()
    session.handle(events.PingRequest(), 2.0)
    session.handle(events.ConnectionLost(), 2.1)
    assert session.handle(events.PingRequest(), 3.0) == []
    assert pings_answered(session)


@pytest.mark.parametrize(
    ("ours", "given", "used"), [(60, 10, 10), (60, None, 60), (60, 0, 60), (60, 600, 60), (0, 10, 10), (0, 0, 0)]
)
def test_the_shorter_keep_alive_wins(ours: int, given: int | None, used: int) -> None:
    """The server's must be kept [MQTT-3.1.2-21], [MQTT-3.2.2-21]; with none or a longer one, dead lines are found."""
    connack = ConnAckPacket(session_present=True, server_keep_alive=given)
    session = online(replace(CONFIG, keep_alive_s=ours), connack=connack)
    assert session.keep_alive_s == used
    assert session.deadline() == (pytest.approx(0.75 * used) if used else None)


def test_no_connack_in_time_is_an_error() -> None:
    session = Session(CONFIG)
    session.handle(events.ConnectionOpened(), 5.0)
    assert session.deadline() == 15.0
    assert session.handle(events.Tick(), 14.9) == []
    close = only(session.handle(events.Tick(), 15.0), events.Close)
    assert "no CONNACK within 10 s" in str(close.error)
    assert (close.no_connack, close.reconnect_at_once, close.fatal) == (True, False, False)


def test_a_subscribe_without_answer_is_an_error() -> None:
    session = Session(CONFIG)
    connect(session, ConnAckPacket(), opened=5.0, now=6.0)
    assert session.state is SessionState.SUBSCRIBING
    assert session.deadline() == 16.0
    session.handle(events.PacketsReceived([]), 12.0)
    assert session.handle(events.Tick(), 16.0) == [], "a large message may be arriving"
    close = only(session.handle(events.Tick(), 22.0), events.Close)
    assert "no answer to SUBSCRIBE within 10 s. Trying again." in str(close.error)
    assert not close.no_connack


def test_a_suback_is_not_missed_while_we_do_not_read() -> None:
    session = Session(CONFIG)
    connect(session, ConnAckPacket(), opened=5.0, now=6.0)
    session.handle(events.ReadingToggled(False), 7.0)
    assert not [a for a in session.handle(events.Tick(), 60.0) if isinstance(a, events.Close)]
    session.handle(events.ReadingToggled(True), 61.0)
    assert not [a for a in session.handle(events.Tick(), 70.0) if isinstance(a, events.Close)]
    assert [a for a in session.handle(events.Tick(), 71.0) if isinstance(a, events.Close)]
