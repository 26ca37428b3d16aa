"""Random lives of Session and Journal against the model broker: `model_world` tells what may happen and what must hold.

The suite lives 100,000 steps; `make fuzz` as many as one likes, from the same list of steps. What was found once is
named in `FINDINGS` and lived again each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from mqtt5 import PubCompPacket, PubRecPacket, QoS

from tests.unit.mqtt.model_broker import Dup, Habits, ModelBroker
from tests.unit.mqtt.model_world import STEPS, Acks, Plan, Step, World, draw_plan, draw_steps, live
from towline.mqtt import outbound
from towline.mqtt.codec import PublishRun
from towline.mqtt.events import Filter
from towline.mqtt.inbound import Inbound
from towline.mqtt.outbound import Outbound
from towline.mqtt.plain import PlainRun
from towline.mqtt.session import Subscriptions

FIVE: Final[Step] = ("offer", 2, 2, 2, 2, 2)
ONLINE: Final[tuple[Step, ...]] = (("connect",), ("exchange",), ("exchange",))

FINDINGS: Final[dict[str, tuple[Plan, tuple[Step, ...]]]] = {
    # The broker's session was taken for a foreign one, and the line stopped for good (TL-M20) [MQTT-3.2.2-4].
    "the very first CONNACK is lost": (Plan(), (("connect",), ("cut", 100))),
    # Session Present 1 meant a session that our own CONNECT had made: without a subscription, silent for ever.
    "the CONNACK that tells of a lost session is lost": (
        Plan(),
        (*ONLINE, ("lose_session",), ("read", 1), ("connect",), ("cut", 100)),
    ),
    "the process ends before it notes that the session is lost": (
        Plan(),
        (*ONLINE, ("lose_session",), ("read", 1), ("connect",), ("crash", 100, 0.0)),
    ),
    # A filter whose SUBACK never came was not known when it was to be taken back.
    "a filter is given up before its SUBACK came": (
        Plan(),
        (("change_filters", True), ("connect",), ("exchange",), ("change_filters", False)),
    ),
    "a filter is given up on MQTT 3.1": (
        Plan(Habits(version=3)),
        (("change_filters", True), *ONLINE, ("change_filters", False)),
    ),
    # The broker had carried out an UNSUBSCRIBE whose UNSUBACK never came; the filter was still taken for subscribed.
    "a filter is given up and wanted again before its UNSUBACK came": (
        Plan(Habits(version=4)),
        (("change_filters", True), *ONLINE, ("change_filters", False), *ONLINE[:2], ("change_filters", True)),
    ),
    # The model broker stood still: no PUBREL before all was sent again, no quota for that before the PUBCOMP.
    "what comes again waits for the quota of what is to be released": (
        Plan(Habits(republishes=True, receive_maximum=1), acks=Acks.RECEIVED, receive_maximum=1),
        (
            *ONLINE[:2],
            ("arm", 9),
            ("offer", 2, 1),
            ("exchange",),
            ("connect",),
            ("carry", 40),
            ("flow", 2),
            ("restart_broker",),
        ),
    ),
    # The model's sender forgot its packet ids a moment too soon: before the last bytes of its connection arrived.
    "a PUBLISH arrives with the end of a connection that a full disk gave up": (
        Plan(Habits(receive_maximum=1, window_3=1), Acks.RECEIVED, receive_maximum=10),
        (
            ("arm", 12),
            *ONLINE[:2],
            ("fill_disk",),
            *ONLINE[:2],
            ("answer", 1),
            ("publish", 2),
            ("read", 100),
            *ONLINE[:2],
            ("publish", 1),
        ),
    ),
    # PUBCOMP 0x92 on a PUBREL sent again is no error [MQTT 5 section 3.7.2.1]; it was told as a message dropped.
    "our PUBREL comes again to a broker that had finished": (
        Plan(),
        (("publish", 2), ("connect",), ("exchange",), ("exchange",), ("restart_broker",)),
    ),
    # PUBRECs of repeats left behind those of the new messages of the same chunk [MQTT-4.6.0-3].
    "repeats and new messages come in one chunk": (
        Plan(Habits(version=4, window_3=20), receive_maximum=10),
        (*ONLINE, FIVE, ("flow", 9), ("read", 100), ("cut", 0), ("read", 1), ("offer", 2, 2)),
    ),
    "repeats and new messages come in one chunk after a crash": (
        Plan(Habits(version=4, dup=Dup.NEVER), receive_maximum=1),
        (
            *ONLINE,
            FIVE,
            ("exchange",),
            ("cut", 1),
            ("arm", 13),
            ("exchange",),
            ("offer", 2, 2),
            *ONLINE,
            ("offer", 0, 2),
        ),
    ),
    # An id of the old session was held, and DUP made a new message its repeat: acknowledged and not stored.
    "a session is lost unseen on MQTT 3.1 and DUP says nothing": (
        Plan(Habits(version=3, dup=Dup.ALWAYS, lowest_id=True, window_3=1), receive_maximum=10),
        (*ONLINE, FIVE, ("exchange",), ("lose_session",), ("exchange",), ("connect",), ("exchange",), FIVE),
    ),
    # What the record said of the subscriptions was learnt at the other server: here the new filter stayed silent.
    "a filter is added while we are at another server": (
        Plan(several=True),
        (*ONLINE, ("fail_over",), ("change_filters", True), *ONLINE, ("fail_over",), *ONLINE),
    ),
    # The model wanted DUP of a message that another server's session had made new again.
    "a publish is unanswered at one server, then at the other, and the first is back": (
        Plan(Habits(receive_maximum=1, window_3=1), Acks.RECEIVED, receive_maximum=1, several=True),
        (
            ("connect",),
            ("publish", 1),
            ("exchange",),
            ("fail_over",),
            ("publish", 0),
            ("connect",),
            ("exchange",),
            ("fail_over",),
        ),
    ),
    "ids of one server are held when another takes over": (
        Plan(Habits(receive_maximum=10), receive_maximum=10, several=True),
        (*ONLINE, FIVE, ("exchange",), ("fail_over",), ("read", 1), *ONLINE, FIVE, ("exchange",), ("fail_over",)),
    ),
    # SUBSCRIBE left before the ids of the lost session were free on disk: after a crash a message with one of them and
    # the same content would have been taken for a repeat.
    "a session is lost while ids are held": (
        Plan(Habits(receive_maximum=1), receive_maximum=10),
        (*ONLINE, FIVE, ("flow", 9), ("read", 100), ("lose_session",), *ONLINE),
    ),
    "a session is lost while ids are held and the disk is full": (
        Plan(receive_maximum=10),
        (*ONLINE, FIVE, ("flow", 9), ("read", 100), ("lose_session",), ("read", 1), ("fill_disk",), *ONLINE, *ONLINE),
    ),
    # The journal went on to hold the id of the older message: lost memory, then a repeat that is none.
    "an id is used again and released in one chunk": (
        Plan(Habits(reuses_ids=True), receive_maximum=10),
        (*ONLINE, ("offer", 2, 2), ("exchange",), ("offer", 2, 2), ("flow", 1)),
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_was_found_once_does_not_come_again(name: str) -> None:
    live(*FINDINGS[name])


class Life(RuleBasedStateMachine):
    """One rule a step; a step of more weight has more rules."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.world = World(draw_plan(lambda domain: data.draw(st.sampled_from(domain))))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.finish()
            finally:
                self.world.close()


def _rule(name: str, domains: tuple[tuple[Any, ...], ...]) -> Callable[..., None]:
    def step(self: Life, **arguments: Any) -> None:
        self.world.do((name, *arguments.values()))

    drawn: Any = {f"a{index}": st.sampled_from(domain) for index, domain in enumerate(domains)}
    decorate: Callable[[Callable[..., None]], Callable[..., None]] = rule(**drawn)
    return decorate(step)


for index, (weight, name, domains) in enumerate(STEPS):
    for copy in range(weight):
        setattr(Life, f"{name}_{index}_{copy}", _rule(name, domains))

TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=5 * settings().max_examples,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


def test_the_same_steps_are_the_same_life() -> None:
    """What the long runs print as steps can be lived again."""

    def lived() -> list[int]:
        random = Random(5)
        world = World(draw_plan(random.choice))
        try:
            for step in draw_steps(random, 60):
                world.do(step)
            world.finish()
            return world.rows
        finally:
            world.close()

    assert lived() == lived()


# The model itself: a referee that sees nothing would let everything pass. --------------------------------------------


def _broken(monkeypatch: pytest.MonkeyPatch, target: str, substitute: Any) -> None:
    monkeypatch.setattr(f"towline.mqtt.{target}", substitute)
    random = Random(1)
    for _ in range(300):
        live(draw_plan(random.choice), draw_steps(random, 60))


def test_the_model_sees_an_ack_before_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Inbound.raise_ack_watermark
    with pytest.raises(AssertionError, match=r"\[I[123]\]|is lost|settled"):
        _broken(monkeypatch, "inbound.Inbound.raise_ack_watermark", lambda self, _upto: settle(self, self.next_number))


def test_the_model_sees_a_pubcomp_before_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: Inbound, packet_ids: Sequence[int]) -> bytes:
        for packet_id in packet_ids:
            self.unreleased_messages.pop(packet_id, None)
        return b"".join(b"\x70\x02" + packet_id.to_bytes(2) for packet_id in packet_ids)

    with pytest.raises(AssertionError, match="held ids differ"):
        _broken(monkeypatch, "inbound.Inbound.take_pubrels", release)


def test_the_model_sees_a_receiver_that_trusts_dup(monkeypatch: pytest.MonkeyPatch) -> None:
    publishes = Inbound.take_publishes

    def trusting(self: Inbound, run: PublishRun | PlainRun) -> None:
        for packet in run.packets:
            if packet.qos == QoS.EXACTLY_ONCE and not packet.duplicate:
                self.unreleased_messages.pop(packet.packet_id or 0, None)
        publishes(self, run)

    with pytest.raises(AssertionError, match=r"twice \[MQTT-4.3.3-10\]"):
        _broken(monkeypatch, "inbound.Inbound.take_publishes", trusting)


def test_the_model_sees_a_publish_after_pubrel(monkeypatch: pytest.MonkeyPatch) -> None:
    received = Outbound._on_pubrec

    def forgetful(self: Any, packet: Any, message: Any) -> Any:
        yield from received(self, packet, message)
        message.phase = outbound.Phase.PUBLISHED

    steps = {**outbound._TRANSITIONS, (2, outbound.Phase.PUBLISHED, PubRecPacket): forgetful}
    steps[2, outbound.Phase.PUBLISHED, PubCompPacket] = Outbound._finish_message
    with pytest.raises(AssertionError, match=r"\[MQTT-4.3.3-6\]"):
        _broken(monkeypatch, "outbound._TRANSITIONS", steps)


def test_the_model_sees_a_window_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = Outbound.start_connection

    def greedy(self: Outbound, server: Any, window: int, **more: Any) -> None:
        connected(self, server, window + 1, **more)

    with pytest.raises(AssertionError, match=r"\[MQTT-3.3.4-9\]"):
        _broken(monkeypatch, "outbound.Outbound.start_connection", greedy)


def test_the_model_sees_a_session_that_is_taken_for_that_of_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subscriptions, "mark_unsure", lambda _self: None)
    with pytest.raises(AssertionError, match=r"online with \{.*\} instead of"):
        live(*FINDINGS["a filter is added while we are at another server"])


def test_the_model_sees_a_subscribe_before_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = Inbound.drop_session_state
    with pytest.raises(AssertionError, match=r"SUBSCRIBE in a new session leaves before .* \[I3\]"):
        _broken(monkeypatch, "inbound.Inbound.drop_session_state", lambda self: forget(self) and None)


def test_the_model_sees_retained_messages_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(_self: Subscriptions, wanted: Filter) -> Filter:
        return replace(wanted, retain_handling=0)

    with pytest.raises(AssertionError, match=r"retained messages of . would come again"):
        _broken(monkeypatch, "session.Subscriptions._with_retain_handling", careless)


def test_the_model_keeps_to_our_receive_maximum() -> None:
    """[MQTT-3.3.4-9]: what the session counts as an overrun is a fault of other brokers."""
    random = Random(2)
    for _ in range(200):
        world = World(draw_plan(random.choice))
        try:
            for step in draw_steps(random, 40):
                world.do(step)
                habits = world.plan.habits
                if habits.version == 5 and not habits.reuses_ids:  # there two messages may count as one
                    assert world._driver.session.inbound.window_overruns == 0
        finally:
            world.close()


def test_acks_after_the_commit_are_acks_after_the_commit() -> None:
    world = World(Plan(acks=Acks.KAFKA))
    try:
        for step in (*ONLINE, ("offer", 1, 2), ("exchange",), ("exchange",)):
            world.do(step)
        assert isinstance(world.broker, ModelBroker)
        assert len(world.rows) == 2
        assert len(world.broker.in_flight) == 2
        world.do(("commit", 1.0))
        world.do(("exchange",))
        assert not any(m.qos == 1 for m in world.broker.in_flight.values())
        world.finish()
    finally:
        world.close()


@pytest.mark.parametrize("version", [5, 4])
def test_what_comes_again_while_its_puback_is_owed_is_one_message_with_one_puback(version: int) -> None:
    world = World(Plan(Habits(version=version), acks=Acks.KAFKA))
    try:
        for step in (*ONLINE, ("offer", 1, 2), ("exchange",), ("offer", 1, 0), ("retry",), ("retry",)):
            world.do(step)
        assert len(world.rows) == 4
        assert world._driver.session.inbound.duplicates == 2 * 2
        for step in (("commit", 0.3), ("offer", 1), ("retry",), ("commit", 1.0), ("exchange",), ("retry",)):
            world.do(step)
        world.finish()
        assert sorted(world.rows) == list(range(5))
    finally:
        world.close()
