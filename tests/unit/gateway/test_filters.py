"""Other filters for a gateway that runs: asked for by a call, and told when the broker has answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import SubAckPacket, SubAckReasonCode, SubscribePacket, UnsubAckPacket, UnsubAckReasonCode, UnsubscribePacket
from pydantic import TypeAdapter

from tests.unit.gateway.brokered import Broker, turn
from tests.unit.mqtt.sessions import CONFIG, granted, online, receive, sent
from towline.gateway.pump import Pump
from towline.gateway.sessions import RequestedFilters
from towline.gateway.settings import GatewaySettings, SubscribedFilter
from towline.journal import Journal, Limits
from towline.mqtt.codec import Packet
from towline.mqtt.events import Action, ConnectionLost, Event, Filter
from towline.schema import ROW_SCHEMA

FILTERS = TypeAdapter(tuple[SubscribedFilter, ...])
A, B, C = ({"pattern": one, "qos": 1} for one in ("a/#", "b", "c"))


class Line:
    """A gateway's filters over a real session, whose broker answers what the test says."""

    def __init__(self, place: Path) -> None:
        given = {"name": "g", "state_dir": place, "brokers": "mqtt://b", "subscriptions": [A, B]}
        self.session = online(CONFIG)
        self.sent: list[Packet] = []
        self.filters = RequestedFilters(GatewaySettings.model_validate(given), self._handle)

    def _handle(self, event: Event) -> None:
        self._perform(self.session.handle(event, 2.0))

    def _perform(self, actions: list[Action]) -> None:
        self.sent += sent(actions)

    def ask(self, change: str, filters: list[dict[str, Any]]) -> dict[str, str]:
        return self.filters.request(change, FILTERS.validate_python(filters), self.session)

    def hears(self, packet: Packet) -> None:
        self._perform(receive(self.session, packet, now=2.1))

    def asked(self, kind: type[Any]) -> Any:
        packet = self.sent.pop(0)
        assert isinstance(packet, kind)
        return packet


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_the_same_words_ask_and_tell_how_far_it_is(line: Line) -> None:
    assert line.ask("1", [A, B, C]) == {"state": "asked", "text": ""}
    assert line.ask("1", [A, B, C])["state"] == "asked"
    line.hears(granted(line.asked(SubscribePacket).packet_id, 1))
    assert line.sent == [], "it is asked for once"
    assert line.ask("1", [A, B, C]) == {"state": "granted", "text": ""}
    assert line.filters.for_session(line.session) == tuple(Filter(one, 1) for one in ("a/#", "b", "c"))
    assert line.ask("2", [A]) == {"state": "asked", "text": ""}
    unsubscribe = line.asked(UnsubscribePacket)
    assert sorted(unsubscribe.patterns) == ["b", "c"]
    assert line.ask("2", [A])["state"] == "asked", "until UNSUBACK"
    line.hears(UnsubAckPacket(unsubscribe.packet_id, [UnsubAckReasonCode.SUCCESS] * 2))
    assert line.ask("2", [A])["state"] == "granted"
    assert line.sent == []


def test_what_is_subscribed_already_is_granted_at_once(line: Line) -> None:
    assert line.ask("1", [B, A])["state"] == "granted"
    assert line.sent == []


def test_what_is_refused_is_told_when_the_filters_before_are_there_again(line: Line) -> None:
    line.ask("1", [A, B, {"pattern": "c", "qos": 0}])
    line.hears(SubAckPacket(line.asked(SubscribePacket).packet_id, [SubAckReasonCode.NOT_AUTHORIZED]))
    assert line.ask("1", [A, B, {"pattern": "c", "qos": 0}])["state"] == "asked"
    line.hears(UnsubAckPacket(line.asked(UnsubscribePacket).packet_id, [UnsubAckReasonCode.SUCCESS]))
    told = line.ask("1", [A, B, {"pattern": "c", "qos": 0}])
    assert told["state"] == "refused"
    assert '"c"' in told["text"]
    assert [one.pattern for one in line.filters.for_session(line.session)] == ["a/#", "b"]
    line.session = online(replace(CONFIG, filters=line.filters.for_session(line.session)))
    assert line.ask("1", [A, B, {"pattern": "c", "qos": 0}])["state"] == "refused", "of the session after it too"
    assert [one.pattern for one in line.filters.for_session(line.session)] == ["a/#", "b"], "and the one after that"


def test_without_a_connection_it_is_wanted_with_the_next(line: Line) -> None:
    line.session.handle(ConnectionLost(), 2.0)
    line.ask("1", [A])
    assert line.sent == []
    assert line.session.config.filters == (Filter("a/#", 1),)
    assert line.ask("1", [A])["state"] == "asked"


def test_a_session_that_begins_anew_wants_what_was_wanted_last(tmp_path: Path, broker: Broker) -> None:
    """Not what the gateway was started with: the disk was full."""
    given = {"name": "g", "state_dir": tmp_path, "brokers": broker.url, "linger_ms": 0, "subscriptions": [A]}
    with Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as inbox:
        pump = Pump(GatewaySettings.model_validate(given), inbox)
        broker.accept(pump, session_present=False)
        wanted = FILTERS.validate_python([A, {"pattern": "c", "qos": 0}])
        asked = pump.request_filters("1", wanted)
        turn(pump)
        assert asked.result(0)["state"] == "asked"
        assert pump._uplink._least_qos == 1
        broker.say(pump, granted(2, 1))
        told = pump.request_filters("1", wanted)
        turn(pump)
        assert told.result(0)["state"] == "granted"
        assert pump._uplink._least_qos == 0, "what is taken with less is no longer counted as less"
        again = pump._restore_session(5).config.filters
        assert again == pump._driver.session.config.filters
        assert [one.pattern for one in again] == ["a/#", "c"]
        pump.stop()
        pump.run()


def test_a_call_of_another_thread_is_answered_in_the_next_turn(tmp_path: Path, broker: Broker) -> None:
    given = {"name": "g", "state_dir": tmp_path, "brokers": broker.url, "subscriptions": [A]}
    with Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as inbox:
        pump = Pump(GatewaySettings.model_validate(given), inbox)
        broker.accept(pump, session_present=False)
        answer, wrong = pump.submit(lambda: 7), pump.submit(lambda: int("seven"))
        assert not answer.done()
        turn(pump)
        assert answer.result(0) == 7
        assert isinstance(wrong.exception(0), ValueError)
        late = pump.submit(lambda: 8)
        pump.stop()
        pump.run()
        assert late.cancelled()
