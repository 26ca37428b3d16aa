"""Finding the message at which a broker ends the connection, against a model of such a broker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt5 import ConnAckPacket, PubAckPacket, PubCompPacket, PublishPacket, PubRecPacket, PubRelPacket, QoS

from tests.helpers import read_all
from towline.mqtt.codec import encode
from towline.mqtt.events import (
    Action,
    ConnectionLost,
    ConnectionOpened,
    Event,
    MessageToken,
    PacketsReceived,
    Publish,
    PublishAcknowledged,
    PublishMany,
    Send,
    SessionConfig,
    Stop,
    Tick,
)
from towline.mqtt.message import OutboundMessage
from towline.mqtt.outbound import CULPRIT_STRIKES, CulpritFinder, Outbound
from towline.mqtt.reasons import CONNECTION_CUT
from towline.mqtt.session import Session


@dataclass
class World:
    """An `Outbound`, and a broker that ends connections."""

    culprits: frozenset[int]
    random_cuts: frozenset[int] = frozenset()
    window: int = 5
    outbound: Outbound = field(default_factory=lambda: Outbound(encode))
    ack_reasons: dict[MessageToken, int] = field(default_factory=dict)
    #: What had left without an answer at each end of a connection.
    ends: list[tuple[MessageToken, ...]] = field(default_factory=list)
    seen: int = 0
    found_culprits: list[MessageToken] = field(default_factory=list)
    #: When the connection began; what leaves does so after the time of quiet.
    now: float = 0.0

    @property
    def culprit_finder(self) -> CulpritFinder:
        return self.outbound.culprit_finder

    def sent_actions(self) -> list[Action]:
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
        in_flight_tokens = [found for found, _ in self.outbound.in_flight.values()]
        return token in (*in_flight_tokens, *self.found_culprits)

    def connection(self) -> bool:
        """One connection; whether the broker has ended it."""
        self.now += 10
        self.outbound.start_connection(ConnAckPacket(session_present=True), self.window, resumed=True, now=self.now)
        queue = self.handle_actions(self.sent_actions())
        while queue:
            packet = queue.pop(0)
            self.seen += 1
            if self.seen in self.random_cuts or self._ends_connection_at(packet):
                self.end_by_broker()
                return True
            queue += self.handle_actions(self._answer(packet))
            queue += self.handle_actions(self.sent_actions())
            self.outbound.validate()
        self.outbound.end_connection(self.now + 2)
        return False

    def _ends_connection_at(self, packet: Any) -> bool:
        return isinstance(packet, PublishPacket) and int(packet.payload) in self.culprits

    def _answer(self, packet: Any) -> list[Action]:
        if isinstance(packet, PubRelPacket):
            return [*self.outbound.take_ack(PubCompPacket(packet.packet_id)), *self.sent_actions()]
        if packet.qos == QoS.AT_MOST_ONCE:
            return []
        kind = PubAckPacket if packet.qos == QoS.AT_LEAST_ONCE else PubRecPacket
        return [*self.outbound.take_ack(kind(packet.packet_id)), *self.sent_actions()]

    def handle_actions(self, actions: list[Action]) -> list[Any]:
        packets = []
        for action in actions:
            if isinstance(action, PublishAcknowledged):
                assert self.ack_reasons.setdefault(action.token, action.reason) == action.reason
                self.culprit_finder.clear_token(action.token)
            elif isinstance(action, Send):
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
    assert not world.culprit_finder.one_at_a_time


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


class Line:
    """A session of a publisher."""

    def __init__(self, *others: MessageToken) -> None:
        """`others` are messages of somebody else."""
        self.session = Session(SessionConfig("c", "w", unknown_session="adopt", keep_alive_s=0))
        self.culprit_finder = self.session.outbound.culprit_finder
        self.culprit_finder.is_droppable = lambda token: token not in others
        self.ack_reasons: dict[MessageToken, int] = {}

    def handle(self, event: Event, now: float) -> list[MessageToken]:
        """Tokens of the messages that leave."""
        left: list[MessageToken] = []
        for action in self.session.handle(event, now):
            if isinstance(action, Send):
                left += [int(p.payload) for p in read_all(action.data) if isinstance(p, PublishPacket)]
            elif isinstance(action, PublishAcknowledged):
                self.ack_reasons[action.token] = action.reason
        return left

    def connect(self, now: float) -> list[MessageToken]:
        return self.handle(ConnectionOpened(), now) + self.handle(
            PacketsReceived([ConnAckPacket(session_present=True)]), now
        )

    def publish(self, now: float, *messages: int, qos: int = 1) -> list[MessageToken]:
        many = [Publish(token, OutboundMessage("t", b"%d" % token, qos=qos)) for token in messages]
        return self.handle(PublishMany(many), now)

    def end(self, now: float, event: Event | None = None) -> MessageToken | None:
        self.handle(event or ConnectionLost(), now)
        return self.session.outbound.culprit_token

    def due(self) -> float:
        """When the time of quiet ends."""
        due = self.session.deadline()
        assert due is not None
        return due


def searching_line() -> Line:
    """Two connections in a row ended with the same messages unanswered, and it is online again at 100."""
    line = Line()
    for now in (10.0, 20.0):
        line.connect(now)
        line.publish(now, *([] if line.culprit_finder.candidate_cuts else [1, 2]))
        assert line.end(now + 1) is None
    assert line.culprit_finder.one_at_a_time
    assert line.connect(100.0) == []
    return line


def test_the_first_message_waits_for_quiet_and_the_next_for_its_answer() -> None:
    line = searching_line()
    due = line.due()
    assert 100.0 < due <= 105.0
    assert line.handle(Tick(), (100.0 + due) / 2) == []
    assert line.handle(Tick(), due) == [1]
    assert (line.handle(Tick(), due), line.session.deadline()) == ([], None)
    assert line.handle(PacketsReceived([PubAckPacket(1)]), due) == [2]
    assert line.culprit_finder.one_at_a_time
    line.handle(PacketsReceived([PubAckPacket(2)]), due)
    assert line.publish(due, 3, 4, 5) == [3, 4, 5], "no culprit is searched for any more"
    assert line.session.deadline() is None


def test_the_message_is_given_up_after_three_ends_alone_and_told_with_the_next_connection() -> None:
    line = searching_line()
    for now in (100.0, 200.0, 300.0):
        due = line.due()
        assert line.handle(Tick(), due) == [1]
        assert line.end(due + 1) == (1 if now == 300.0 else None)
        assert line.connect(now + 100) == ([2] if now == 300.0 else [])
    assert line.ack_reasons == {1: CONNECTION_CUT}


@pytest.mark.parametrize(
    ("others", "qos_0", "after_s", "event", "found"),
    [
        ((), False, 4.9, None, 1),
        ((), False, 5.0, None, None),  # long after it has left
        ((), False, 1.0, Stop(), None),  # it is us who ended it
        ((), True, 1.0, None, None),  # something without an answer left beside it
        ((2,), False, 1.0, None, None),  # it is not alone
        ((1,), False, 1.0, None, None),  # it is somebody else's
    ],
)
def test_an_end_proves_nothing_unless_it_follows_one_message_at_once(
    others: tuple[int, ...], qos_0: bool, after_s: float, event: Event | None, found: MessageToken | None
) -> None:
    line = Line(*others)
    verdicts = []
    for now in (100.0, 200.0, 300.0):
        if now == 100.0:
            line.connect(now)
            line.publish(now, *sorted({1, *others}))
        else:
            line.connect(now)
            if (due := line.session.deadline()) is not None:
                line.handle(Tick(), now := due)
        if qos_0:
            line.publish(now, 9, qos=0)
        verdicts.append(line.end(now + after_s, event))
    assert verdicts == [None, None, found]
