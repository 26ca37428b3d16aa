"""Finding the message at which a broker ends the connection, against a model of such a broker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt5 import ConnAckPacket, PubAckPacket, PubCompPacket, PublishPacket, PubRecPacket, PubRelPacket, QoS

from tests.helpers import read_all
from tests.unit.mqtt.sessions import CONFIG, online, receive, sent
from towline.mqtt import events
from towline.mqtt.codec import encode
from towline.mqtt.message import OutboundMessage
from towline.mqtt.outbound import CULPRIT_STRIKES, CulpritFinder, Outbound
from towline.mqtt.reasons import CONNECTION_CUT


@dataclass
class World:
    """An `Outbound`, and a broker that ends connections."""

    culprits: frozenset[int]
    random_cuts: frozenset[int] = frozenset()
    window: int = 5
    outbound: Outbound = field(default_factory=lambda: Outbound(encode))
    ack_reasons: dict[events.MessageToken, int] = field(default_factory=dict)
    #: What had left without an answer at each end of a connection.
    ends: list[tuple[events.MessageToken, ...]] = field(default_factory=list)
    seen: int = 0
    found_culprits: list[events.MessageToken] = field(default_factory=list)
    #: When the connection began; what leaves does so after the time of quiet.
    now: float = 0.0

    def sent_actions(self) -> list[events.Action]:
        return list(self.outbound.actions(self.now + 2))

    def publish(self, messages: Iterable[tuple[int, int]]) -> None:
        for token, qos in messages:
            self.outbound.publish(token, OutboundMessage("t", b"%d" % token, qos=qos))

    def run(self, messages: list[tuple[int, int]], most: int) -> None:
        """Connect again and again until all are acknowledged."""
        for _ in range(most):
            todo = [(t, q) for t, q in messages if t not in self.ack_reasons and not self._is_in_flight(t)]
            self.publish(todo)
            if not self.connection():
                return
            self.outbound.withdraw_unsent()
        raise AssertionError(f"not done after {most} connections: {self.ack_reasons}")

    def _is_in_flight(self, token: int) -> bool:
        in_flight_tokens = [message.token for message in self.outbound._unfinished.values()]
        return token in (*in_flight_tokens, *self.found_culprits)

    def connection(self) -> bool:
        """One connection; whether the broker has ended it."""
        self.now += 10
        self.outbound.start_connection(ConnAckPacket(session_present=True), self.window, resumed=True, now=self.now)
        queue = self.handle_actions(self.sent_actions())
        while queue:
            packet = queue.pop(0)
            self.seen += 1
            is_culprit = isinstance(packet, PublishPacket) and int(packet.payload) in self.culprits
            if is_culprit or self.seen in self.random_cuts:
                self.end_by_broker()
                return True
            queue += self.handle_actions(self._answer(packet))
            queue += self.handle_actions(self.sent_actions())
        self.outbound.end_connection(self.now + 2)
        return False

    def _answer(self, packet: Any) -> list[events.Action]:
        if isinstance(packet, PubRelPacket):
            return [*self.outbound.take_ack(PubCompPacket(packet.packet_id)), *self.sent_actions()]
        if packet.qos == QoS.AT_MOST_ONCE:
            return []
        kind = PubAckPacket if packet.qos == QoS.AT_LEAST_ONCE else PubRecPacket
        return [*self.outbound.take_ack(kind(packet.packet_id)), *self.sent_actions()]

    def handle_actions(self, actions: list[events.Action]) -> list[Any]:
        packets = []
        for action in actions:
            if isinstance(action, events.PublishAcknowledged):
                assert self.ack_reasons.setdefault(action.token, action.reason) == action.reason
                self.outbound.culprit_finder.clear_token(action.token)
            elif isinstance(action, events.Send):
                packets += read_all(action.data)
        return packets

    def end_by_broker(self) -> None:
        self.outbound.end_connection(self.now + 2, ended_by_broker=True)
        self.ends.append(self.outbound.unanswered_tokens)
        found = self.outbound.culprit_token
        if found is not None:
            self.found_culprits.append(found)
            assert self.ends[-CULPRIT_STRIKES:] == [(found,)] * CULPRIT_STRIKES


@settings(deadline=None)
@given(st.lists(st.integers(1, 2), min_size=1, max_size=25), st.sets(st.integers(0, 24), max_size=4), st.integers(1, 8))
def test_the_culprits_are_set_aside_and_all_others_arrive(qos: list[int], culprits: set[int], window: int) -> None:
    world = World(frozenset(culprits), window=window)
    world.run(list(enumerate(qos)), most=6 * len(culprits) + 2)
    assert world.ack_reasons == {token: CONNECTION_CUT if token in culprits else 0 for token in range(len(qos))}
    assert not world.outbound.culprit_finder.one_at_a_time


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=25),
    st.sets(st.integers(1, 200), max_size=30),
    st.sets(st.integers(0, 24), max_size=3),
    st.integers(1, 8),
)
def test_nobody_is_set_aside_but_for_three_ends_alone(
    qos: list[int], cuts: set[int], culprits: set[int], window: int
) -> None:
    """The broker ends connections anywhere; `World.end_by_broker` sees that each verdict stands on three of them."""
    world = World(frozenset(t for t in culprits if t < len(qos) and qos[t]), frozenset(cuts), window=window)
    world.run(list(enumerate(qos)), most=60)
    assert all(world.ack_reasons[token] == CONNECTION_CUT for token in world.culprits)
    unlucky = [token for token in world.found_culprits if token not in world.culprits]
    assert {token for token, reason in world.ack_reasons.items() if reason} <= {*world.culprits, *unlucky}


@pytest.mark.parametrize(
    ("tokens", "ended_by_broker", "only_acked_sent", "idle_s", "found"),
    [
        ([1], True, True, 4.9, 1),
        ([1], True, True, 5.0, None),  # long after it has left
        ([1], False, True, 1.0, None),  # it is us who ended it, or the network
        ([1], True, False, 1.0, None),  # something without an answer left beside it
        ([1, 2], True, True, 1.0, None),  # it is not alone
        ([1, 9], True, True, 1.0, None),  # nor beside somebody else's
        ([9], True, True, 1.0, None),
    ],
)
def test_an_end_proves_nothing_unless_it_follows_one_message_at_once_three_times(
    tokens: list[int], ended_by_broker: bool, only_acked_sent: bool, idle_s: float, found: int | None
) -> None:
    finder = CulpritFinder()
    finder.is_droppable = lambda token: token != 9
    ends: dict[str, Any] = {"ended_by_broker": ended_by_broker, "only_acked_sent": only_acked_sent, "idle_s": idle_s}
    verdicts = [finder.find_culprit(tokens, **ends) for _ in range(CULPRIT_STRIKES)]
    assert verdicts == [None, None, found]
    for _ in range(CULPRIT_STRIKES - 1):
        assert finder.find_culprit([3], ended_by_broker=True, only_acked_sent=True) is None
    assert finder.find_culprit([], ended_by_broker=False, only_acked_sent=True) is None
    assert finder.find_culprit([3], ended_by_broker=True, only_acked_sent=True) is None, "three in a row"


def test_only_the_same_messages_twice_in_a_row_make_it_careful() -> None:
    finder = CulpritFinder()
    for token, careful in ((1, False), (2, False), (2, True)):
        finder.find_culprit([token, 7 + token], ended_by_broker=True, only_acked_sent=True)
        assert finder.one_at_a_time is careful


def test_the_first_message_waits_for_quiet_and_the_next_for_its_answer() -> None:
    session = online(replace(CONFIG, keep_alive_s=0))
    messages = [events.Publish(token, OutboundMessage("t", b"%d" % token, qos=1)) for token in (1, 2)]
    session.handle(events.PublishMany(messages), 10.0)
    for now in (20.0, 30.0):
        session.handle(events.ConnectionLost(), now - 9)
        session.handle(events.ConnectionOpened(), now)
        assert bool(sent(receive(session, ConnAckPacket(session_present=True), now=now))) == (now == 20.0)
    assert session.outbound.culprit_finder.one_at_a_time
    due = session.deadline()
    assert due == 31.0
    assert sent(session.handle(events.Tick(), 30.9)) == []
    (first,) = sent(session.handle(events.Tick(), due))
    assert isinstance(first, PublishPacket)
    assert (first.payload, session.deadline()) == (b"1", None)
    (second,) = sent(receive(session, PubAckPacket(first.packet_id or 0), now=due))
    assert isinstance(second, PublishPacket)
    assert second.payload == b"2"
