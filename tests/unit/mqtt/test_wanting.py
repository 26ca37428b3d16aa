"""Other filters while a session lives, and a PINGREQ that asks whether the broker has read all."""

from __future__ import annotations

import pytest
from mqtt5 import (
    ConnAckPacket,
    PingReqPacket,
    PingRespPacket,
    SubAckPacket,
    SubAckReasonCode,
    SubscribePacket,
    UnsubAckPacket,
    UnsubAckReasonCode,
    UnsubscribePacket,
)

from tests.unit.mqtt.sessions import A, B, connect, online, only, only_sent, receive, sent
from towline.mqtt.events import (
    ChangeSubscriptions,
    Close,
    ConnectionLost,
    Filter,
    Online,
    PingRequest,
    SaveSessionRecord,
    Subscribed,
    Tick,
)
from towline.mqtt.session import Session, SessionState

SUCCESS, REFUSED = UnsubAckReasonCode.SUCCESS, UnsubAckReasonCode.NOT_AUTHORIZED


def probed(session: Session) -> bool:
    """Asked as a call, because a type checker takes the answer of a property for lasting."""
    return session.pings_answered


def subscribed(session: Session) -> bool:
    """Asked as a call, as `probed`."""
    return session.subscribed


def why(session: Session) -> str:
    """Why the last change was taken back; "" where it was not."""
    return str(session.filter_refusal or "")


def test_nothing_wanted_any_more_is_unsubscribed_on_the_same_connection() -> None:
    session = online()
    actions = session.handle(ChangeSubscriptions(()), 2.0)
    unsubscribe = only_sent(actions, UnsubscribePacket)
    assert sorted(unsubscribe.patterns) == ["a/#", "b"]
    remembered = only(actions, SaveSessionRecord).record
    assert remembered is not None
    assert set(remembered.subscriptions.values()) == {-1}, "unsure before it leaves"
    actions = receive(session, UnsubAckPacket(unsubscribe.packet_id, [SUCCESS, SUCCESS]))
    assert session.subscriptions.known_options == {}
    assert session.state is SessionState.ONLINE
    assert not [action for action in actions if isinstance(action, Online)], "it was online all the time"
    assert session.handle(ChangeSubscriptions(()), 3.0) == [Subscribed()]


C, D = Filter("c", 1), Filter("d", 2, identifier=7)
GRANTED, DENIED = SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE, SubAckReasonCode.NOT_AUTHORIZED


def asked(session: Session, *filters: Filter) -> list[SubscribePacket]:
    packets = sent(session.handle(ChangeSubscriptions((A, B, *filters), revert_on_refusal=True), 2.0))
    return [packet for packet in packets if isinstance(packet, SubscribePacket)]


def test_a_filter_that_is_refused_takes_the_change_back_and_not_the_connection() -> None:
    """Of two packets, the second granted: what was granted with it is unsubscribed again."""
    session = online()
    first, second = asked(session, C, D)
    assert receive(session, SubAckPacket(first.packet_id, [DENIED]), now=2.1) == []
    unsubscribe = only_sent(receive(session, SubAckPacket(second.packet_id, [GRANTED]), now=2.2), UnsubscribePacket)
    assert sorted(unsubscribe.patterns) == ["c", "d"]
    assert not subscribed(session)
    receive(session, UnsubAckPacket(unsubscribe.packet_id, [SUCCESS, SUCCESS]), now=2.3)
    assert '"c"' in why(session)
    assert subscribed(session)
    assert session.subscriptions.known_options == {"a/#": A.encoded_options, "b": B.encoded_options}
    (again,) = asked(session, C)
    assert why(session) == ""
    receive(session, SubAckPacket(again.packet_id, [GRANTED]), now=2.4)
    assert subscribed(session)
    assert session.config.filters == (A, B, C)


def test_other_filters_that_are_wanted_meanwhile_are_what_counts() -> None:
    session = online()
    (first,) = asked(session, C)
    session.handle(ChangeSubscriptions((A,)), 2.1)
    unsubscribe = only_sent(receive(session, SubAckPacket(first.packet_id, [DENIED]), now=2.2), UnsubscribePacket)
    assert sorted(unsubscribe.patterns) == ["b", "c"]
    receive(session, UnsubAckPacket(unsubscribe.packet_id, [SUCCESS, SUCCESS]), now=2.3)
    assert session.config.filters == (A,)
    assert subscribed(session)


def test_a_connection_that_ends_in_a_change_asks_for_it_with_the_next() -> None:
    session = online()
    asked(session, C)
    session.handle(ConnectionLost(), 2.1)
    subscribe = only_sent(connect(session, ConnAckPacket(session_present=True), now=3.0, opened=3.0), SubscribePacket)
    assert [one.pattern for one in subscribe.topic_filters] == ["c"]
    assert only(receive(session, SubAckPacket(subscribe.packet_id, [DENIED]), now=3.1), Close).error is not None


@pytest.mark.parametrize("first", ["probe", "keep alive"])
def test_every_pingreq_has_its_answer(first: str) -> None:
    session = online()
    assert probed(session)
    if first == "probe":
        assert [type(packet) for packet in sent(session.handle(PingRequest(), 2.0))] == [PingReqPacket]
    else:
        assert [type(packet) for packet in sent(session.handle(Tick(), 60.0))] == [PingReqPacket]
    session.handle(PingRequest(), 60.5)
    receive(session, PingRespPacket(), now=60.6)
    assert not probed(session), "the answer to the first one says nothing of the second"
    receive(session, PingRespPacket(), now=60.7)
    assert probed(session)
