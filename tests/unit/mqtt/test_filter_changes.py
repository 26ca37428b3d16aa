"""Filters that differ from those of the broker's session, and a PINGREQ that asks whether the broker has read all."""

from __future__ import annotations

from dataclasses import replace

import mqtt5
import pytest

from tests.unit.mqtt.sessions import CONFIG, KNOWN, A, connect, online, only, only_sent, receive, sent
from towline.mqtt.events import Close, ConnectionLost, Filter, PingRequest, Tick
from towline.mqtt.session import Session

C = Filter("c", 1)


def reconnected() -> tuple[Session, mqtt5.SubscribePacket]:
    """A session at the broker with the filters ``a/#`` and ``b``, of a client that asks for ``a/#`` and ``c``."""
    session = Session(replace(CONFIG, filters=(A, C)), KNOWN)
    subscribe = only_sent(connect(session, mqtt5.ConnAckPacket(session_present=True)), mqtt5.SubscribePacket)
    assert [topic_filter.pattern for topic_filter in subscribe.topic_filters] == ["c"]
    return session, subscribe


def test_without_a_durable_session_removed_filters_are_unsubscribed_first() -> None:
    """A broker may send a message once for each of two filters that overlap [MQTT-3.3.4-2]."""
    session = Session(replace(CONFIG, filters=(A, C), durable=False), KNOWN)
    packets = sent(connect(session, mqtt5.ConnAckPacket(session_present=True)))
    assert [type(packet) for packet in packets] == [mqtt5.UnsubscribePacket, mqtt5.SubscribePacket]


def test_a_refused_filter_leaves_the_removed_ones_at_the_broker() -> None:
    """So the settings of before lose nothing when they come back."""
    session, subscribe = reconnected()
    actions = receive(
        session, mqtt5.SubAckPacket(subscribe.packet_id, [mqtt5.SubAckReasonCode.NOT_AUTHORIZED]), now=2.0
    )
    assert not [packet for packet in sent(actions) if isinstance(packet, mqtt5.UnsubscribePacket)]
    close = only(actions, Close)
    assert close.fatal
    assert '"c"' in str(close.error)
    former = Session(CONFIG, session.record)
    repeated = only_sent(
        connect(former, mqtt5.ConnAckPacket(session_present=True), now=3.0, opened=3.0), mqtt5.SubscribePacket
    )
    assert [topic_filter.pattern for topic_filter in repeated.topic_filters] == ["b"], "it was unsure"


def pings_answered(session: Session) -> bool:
    """Asked as a call, because a type checker takes the answer of a property for lasting."""
    return session.pings_answered


@pytest.mark.parametrize("first", ["probe", "keep alive"])
def test_every_pingreq_has_its_answer(first: str) -> None:
    session = online()
    assert pings_answered(session)
    if first == "probe":
        assert [type(packet) for packet in sent(session.handle(PingRequest(), 2.0))] == [mqtt5.PingReqPacket]
    else:
        assert [type(packet) for packet in sent(session.handle(Tick(), 60.0))] == [mqtt5.PingReqPacket]
    session.handle(PingRequest(), 60.5)
    receive(session, mqtt5.PingRespPacket(), now=60.6)
    assert not pings_answered(session), "the answer to the first one says nothing of the second"
    receive(session, mqtt5.PingRespPacket(), now=60.7)
    assert pings_answered(session)


def test_without_a_connection_no_pingreq_is_sent() -> None:
    session = online()
    session.handle(PingRequest(), 2.0)
    session.handle(ConnectionLost(), 2.1)
    assert session.handle(PingRequest(), 3.0) == []
    assert pings_answered(session)
