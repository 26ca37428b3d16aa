"""Other filters for a gateway that runs: asked for by a call, and told when the broker has answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import SubAckPacket, SubAckReasonCode, SubscribePacket, UnsubAckPacket, UnsubAckReasonCode, UnsubscribePacket
from pydantic import TypeAdapter

from tests.unit.mqtt.sessions import CONFIG, granted, online, receive, sent
from towline.gateway.sessions import RequestedFilters
from towline.gateway.settings import GatewaySettings, SubscribedFilter
from towline.mqtt.codec import Packet
from towline.mqtt.events import Action, ConnectionLost, Event, Filter

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
    assert line.ask("0", [B, A])["state"] == "granted"
    assert line.sent == [], "it is subscribed to these already"
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
    line.session.handle(ConnectionLost(), 2.0)
    assert line.ask("3", [C])["state"] == "asked"
    assert line.sent == []
    assert line.session.config.filters == (Filter("c", 1),), "of the next connection"


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
