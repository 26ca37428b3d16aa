"""Random lives of Session and Journal against the model broker; `make soak` has more of them."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.mqtt.model_broker import Dup, Habits
from tests.unit.mqtt.model_world import STEPS, Plan, Step, draw_plan, live

FIVE: Final[Step] = ("offer", 2, 2, 2, 2, 2)
ONLINE: Final[tuple[Step, ...]] = (("connect",), ("exchange",), ("exchange",))

FINDINGS: Final[dict[str, tuple[Plan, tuple[Step, ...]]]] = {
    # Not found once, but what every life may have: answers in one chunk, a repeat of either side.
    "several PUBRECs come in one chunk, and their PUBRELs a second time": (
        Plan(),
        (*ONLINE, ("publish", 2, 2, 2), ("exchange",), ("read", 100), ("cut", 0), ("read", 1)),
    ),
    "publishes and messages come again": (
        Plan(),
        (*ONLINE, FIVE, ("publish", 1, 2, 1, 2), ("flow", 9), ("read", 100), ("carry", 40), ("cut", 0), ("read", 1)),
    ),
    # The broker's session was taken for a foreign one, and the line stopped for good (TL-M20) [MQTT-3.2.2-4].
    "the very first CONNACK is lost": (Plan(), (("connect",), ("cut", 100))),
    # Session Present 1 meant a session that our own CONNECT had made: without a subscription, silent for ever.
    "the CONNACK that tells of a lost session is lost": (
        Plan(),
        (*ONLINE, ("lose_session",), ("read", 1), ("connect",), ("cut", 100)),
    ),
    "the process ends before it notes that the session is lost": (
        Plan(),
        (*ONLINE, ("lose_session",), ("read", 1), ("connect",), ("crash", 100)),
    ),
    # A filter whose SUBACK never came was not known when it was to be taken back.
    "a filter is given up before its SUBACK came": (
        Plan(),
        (("change_filters", True), ("connect",), ("exchange",), ("change_filters", False)),
    ),
    # The broker had carried out an UNSUBSCRIBE whose UNSUBACK never came; the filter was still taken for subscribed.
    "a filter is given up and wanted again before its UNSUBACK came": (
        Plan(Habits(version=4)),
        (("change_filters", True), *ONLINE, ("change_filters", False), *ONLINE[:2], ("change_filters", True)),
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


#: As many of a kind as it weighs.
_STEPS = st.one_of(
    [st.tuples(st.just(name), *map(st.sampled_from, domains)) for weight, name, domains in STEPS for _ in range(weight)]
)


@settings(max_examples=3 * settings().max_examples, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.data(), st.lists(_STEPS, min_size=20, max_size=60))
def test_whatever_happens_in_a_life_nothing_is_lost_or_doubled(data: st.DataObject, steps: list[Step]) -> None:
    """The model broker asserts what a client has to do, in each version and across connections, crashes and sessions.

    Packet ids, DUP and order of what is published, and its repeats: [MQTT-2.2.1-3, -5], [MQTT-3.3.1-1],
    [MQTT-4.3.2-1, -2, -3], [MQTT-4.3.3-1, -2, -3, -4, -5], [MQTT-3.6.2-1], [MQTT-4.6.0-1, -4], [MQTT-4.4.0-1];
    [MQTT-2.3.1-2 of 3.1.1], [MQTT-2.3.1-3 of 3.1.1], [MQTT-3.3.1-1 of 3.1.1], [MQTT-4.3.1-1 of 3.1.1],
    [MQTT-4.3.2-1 of 3.1.1], [MQTT-4.3.3-1 of 3.1.1], [MQTT-4.4.0-1 of 3.1.1], [MQTT-4.6.0-1 of 3.1.1],
    [MQTT-4.6.0-4 of 3.1.1]. Within its limits [MQTT-4.9.0-1], [MQTT-3.3.4-7, -9], without an alias
    [MQTT-3.2.2-17, -18], [MQTT-3.3.2-9]. Order and number of what is received, its answers: [MQTT-4.3.2-5],
    [MQTT-4.3.3-10, -11, -12], [MQTT-4.6.0-2, -3]; [MQTT-4.3.2-2 of 3.1.1], [MQTT-4.3.3-2 of 3.1.1],
    [MQTT-4.6.0-2 of 3.1.1], [MQTT-4.6.0-3 of 3.1.1]. State of both directions: [MQTT-3.1.2-23], [MQTT-4.1.0-1];
    [MQTT-3.1.2-4 of 3.1.1], [MQTT-4.1.0-1 of 3.1.1], [MQTT-4.1.0-2 of 3.1.1].
    """
    live(draw_plan(lambda domain: data.draw(st.sampled_from(domain))), steps)
