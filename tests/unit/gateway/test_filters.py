"""Other filters for a gateway that runs: asked for by a call, and told when the broker has answered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mqtt5 import SubAckPacket, SubAckReasonCode, SubscribePacket, UnsubAckPacket, UnsubAckReasonCode, UnsubscribePacket

from tests.unit.gateway.brokered import Broker, turn
from tests.unit.mqtt.sessions import CONFIG, granted, online, receive, sent
from towline.errors import GatewayError
from towline.gateway.filters import WantedFilters
from towline.gateway.pump import Pump
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits
from towline.mqtt.codec import Packet
from towline.mqtt.events import Event, Filter, Lost
from towline.schema import ROW_SCHEMA

A, B, C = ({"filter": one, "qos": 1} for one in ("a/#", "b", "c"))


class Line:
    """A gateway's filters over a real session, whose broker answers what the test says."""

    def __init__(self, place: Path) -> None:
        given = {"name": "g", "state_dir": place, "brokers": "mqtt://b", "subscriptions": [A, B]}
        self.settings = GatewaySettings.model_validate(given)
        self.woken, self.least = 0, -1
        self.session = online(CONFIG)
        self.sent: list[Packet] = []
        self.filters = WantedFilters(self.settings, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def handle(self, event: Event) -> None:
        self.sent += sent(self.session.handle(event, 2.0))

    def expect(self, least_qos: int) -> None:
        self.least = least_qos

    def turn(self) -> None:
        driver: Any = SimpleNamespace(session=self.session, handle=self.handle)
        uplink: Any = SimpleNamespace(expect=self.expect)
        self.filters.turn(driver, uplink)

    def asked(self, kind: type[Any]) -> Any:
        packet = self.sent.pop(0)
        assert isinstance(packet, kind)
        return packet


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_the_same_words_ask_and_tell_how_far_it_is(line: Line) -> None:
    assert line.filters.ask("1", [A, B, C]) == {"state": "asked", "text": ""}
    assert line.woken == 1
    line.turn()
    assert line.filters.ask("1", [A, B, C])["state"] == "asked"
    assert line.woken == 1, "it is asked for once"
    receive(line.session, granted(line.asked(SubscribePacket).packet_id, 1), now=2.1)
    line.turn()
    assert line.filters.ask("1", [A, B, C]) == {"state": "granted", "text": ""}
    assert line.filters.wanted == tuple(Filter(one, 1) for one in ("a/#", "b", "c"))
    assert line.filters.ask("2", [A]) == {"state": "asked", "text": ""}
    line.turn()
    unsubscribe = line.asked(UnsubscribePacket)
    assert sorted(unsubscribe.patterns) == ["b", "c"]
    line.turn()
    assert line.filters.ask("2", [A])["state"] == "asked", "until UNSUBACK"
    receive(line.session, UnsubAckPacket(unsubscribe.packet_id, [UnsubAckReasonCode.SUCCESS] * 2), now=2.2)
    line.turn()
    assert line.filters.ask("2", [A])["state"] == "granted"
    assert line.sent == []


def test_what_is_refused_is_told_when_the_filters_before_are_there_again(line: Line) -> None:
    line.filters.ask("1", [A, B, {"filter": "c", "qos": 0}])
    line.turn()
    assert line.least == 0
    subscribe = line.asked(SubscribePacket)
    line.sent += sent(receive(line.session, SubAckPacket(subscribe.packet_id, [SubAckReasonCode.NOT_AUTHORIZED])))
    line.turn()
    assert line.filters.ask("1", [A, B, {"filter": "c", "qos": 0}])["state"] == "asked"
    unsubscribe = line.asked(UnsubscribePacket)
    receive(line.session, UnsubAckPacket(unsubscribe.packet_id, [UnsubAckReasonCode.SUCCESS]), now=2.2)
    line.turn()
    told = line.filters.ask("1", [A, B, {"filter": "c", "qos": 0}])
    assert told["state"] == "refused"
    assert '"c"' in told["text"]
    assert [one.pattern for one in line.filters.wanted] == ["a/#", "b"]
    assert line.least == 1


def test_without_a_connection_it_is_wanted_with_the_next(line: Line) -> None:
    line.session.handle(Lost(), 2.0)
    line.filters.ask("1", [A])
    line.turn()
    assert line.sent == []
    assert line.session.config.filters == (Filter("a/#", 1),)
    assert line.filters.ask("1", [A])["state"] == "asked"


def test_what_can_not_be_wanted_is_refused_at_once(line: Line) -> None:
    for filters in ([{"filter": "a#"}], [{"qos": 1}], ["a"]):
        with pytest.raises(GatewayError, match=r"TL-G08"):
            line.filters.ask("1", filters)
    assert line.woken == 0


def test_a_session_that_begins_anew_wants_what_was_wanted_last(tmp_path: Path, broker: Broker) -> None:
    """Not what the gateway was started with: the disk was full."""
    given = {"name": "g", "state_dir": tmp_path, "brokers": broker.url, "linger_ms": 0, "subscriptions": [A]}
    with Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as inbox:
        pump = Pump(GatewaySettings.model_validate(given), inbox)
        broker.accept(pump, session_present=False)
        assert pump.filters is not None
        pump.filters.ask("1", [A, C])
        turn(pump)
        broker.say(pump, granted(2, 1))
        assert pump.filters.ask("1", [A, C])["state"] == "granted"
        assert pump._recalled(5).config.filters == pump._driver.session.config.filters == pump.filters.wanted
        pump.stop()
        pump.run()
