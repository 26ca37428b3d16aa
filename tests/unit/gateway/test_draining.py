"""A gateway leaves its line: in which order, when its session counts as empty, and which can't."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import mqtt5
import pytest

from tests.helpers import gateway_settings, read_all
from tests.unit.gateway.brokered import Broker, pumping
from towline.errors import BrokerError, ConfigError, Unreachable
from towline.gateway.pump import Pump
from towline.gateway.sessions import Drain, DrainStep, check_drainable, end_session
from towline.gateway.settings import GatewaySettings
from towline.threads import call_in_thread

FACTS: dict[str, Any] = {"activity": (1, 5, 0), "subscribed": False, "probes_answered": True, "work_pending": False}


def test_a_session_is_ended_when_nothing_came_for_a_while_on_a_connection_that_lives_and_nothing_waits() -> None:
    drain, asked = Drain(8.0), list[float]()

    def look(now: float, **changed: Any) -> bool:
        assert not drain.advance(now, lambda: asked.append(now), **FACTS | {"work_pending": True} | changed)
        return drain.step is DrainStep.COMMITTING

    def due() -> float | None:
        return drain.next_check_at

    assert not look(0.0, activity=None)
    assert due() is None
    assert not asked, "not while something is open, or it is offline"
    for now in (1.0, 2.0, 8.9):
        assert not look(now)
        assert due() == 9.0
    assert not asked
    assert not look(9.0)
    assert asked == [9.0], "PINGREQ at the end of the silence"
    assert not look(9.0, probes_answered=False)
    assert due() is None, "the answer wakes"
    assert look(9.1)
    assert asked == [9.0]
    assert look(99.0), "it stays so while commits are waited for"
    assert due() is None
    ended = drain.advance(99.0, pytest.fail, **FACTS | {"subscribed": True})
    assert (ended, drain.step) == (False, DrainStep.UNSUBSCRIBING)
    ended = drain.advance(99.0, pytest.fail, **FACTS)
    assert (ended, drain.step) == (True, DrainStep.ENDING_SESSION)

    for came in ((1, 6, 0), (2, 5, 0), (1, 5, 1), (1, 7, 0)):
        assert not look(100.0, activity=came), "something came, or may come: all of it anew"
    assert not look(100.0, activity=None)
    assert due() is None


def test_what_has_several_sessions_is_not_drained() -> None:
    with pytest.raises(ConfigError, match="TL-G57"):
        check_drainable(gateway_settings(brokers="mqtt://a,mqtt://b"))
    check_drainable(gateway_settings(brokers="mqtt://a,mqtt://b", brokers_share_sessions=True))


def test_a_silent_broker_is_given_up(tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time to connect: a stop waits for it."""
    monkeypatch.setattr("towline.gateway.sessions._SESSION_END_TIMEOUT_S", 0.3)
    began = time.monotonic()
    with pytest.raises(Unreachable):
        end_session(gateway_settings(state_dir=tmp_path, brokers=broker.url, connect_timeout_s=30), "g")
    assert time.monotonic() - began < 10


def test_a_broker_that_is_busy_is_an_error_to_try_again(tmp_path: Path, broker: Broker) -> None:
    answers = [mqtt5.ConnAckReasonCode.SERVER_BUSY, mqtt5.ConnAckReasonCode.SUCCESS]

    def answer() -> None:
        for reason in answers:
            line, _ = broker.listener.accept()
            connect = next(one for one in read_all(line.recv(4096)) if isinstance(one, mqtt5.ConnectPacket))
            assert (connect.clean_start, connect.session_expiry_interval) == (True, 0)
            line.sendall(mqtt5.ConnAckPacket(reason_code=reason).write())
            lines.append(line)

    lines, settings = list[socket.socket](), gateway_settings(state_dir=tmp_path, brokers=broker.url)
    answering = call_in_thread(answer, "broker")
    with pytest.raises(BrokerError):
        end_session(settings, "g")
    end_session(settings, "g")
    answering.result(10)
    for line in lines:
        line.close()


def test_a_session_that_is_not_ended_is_ended_later(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [Unreachable("TL-M01", "b", "no connection"), None]

    def end(_settings: GatewaySettings, _client_id: str) -> None:
        if error := ends.pop(0):
            raise error

    monkeypatch.setattr("towline.gateway.pump.end_session", end)
    monkeypatch.setattr("towline.gateway.pump.RETRY_IDLE_S", 0.0)
    with pumping(tmp_path, broker, unknown_session="adopt", drain_s=0.0) as (pump, _):
        for drained in (False, True):
            broker.accept(pump, session_present=True)
            while pump._driver.connected:
                answer(broker, pump)
            assert pump.is_drained is drained
            assert (pump.status()["last_error"] is None) is drained


def answer(broker: Broker, pump: Pump) -> None:
    answers = list[Any]()
    for packet in broker.heard():
        if isinstance(packet, mqtt5.UnsubscribePacket):
            answers.append(mqtt5.UnsubAckPacket(packet.packet_id, [mqtt5.UnsubAckReasonCode.SUCCESS]))
        elif isinstance(packet, mqtt5.PingReqPacket):
            answers.append(mqtt5.PingRespPacket())
    broker.say(pump, *answers)
