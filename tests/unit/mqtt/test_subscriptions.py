"""What is known of the broker's subscriptions, step by step, and what is asked for by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from mqtt5 import SubscribePacket, UnsubAckReasonCode

from towline.mqtt.events import Filter
from towline.mqtt.subscriptions import _AFTER, UNSURE, Request, Subscribe, Subscriptions, SubscriptionStep, Unsubscribe

A, B = Filter("a/#", 1), Filter("b", 2)
BOTH = {"a/#": A.terms, "b": B.terms}


def connected(
    wanted: tuple[Filter, ...], known: dict[str, int], connack: SubscriptionStep = SubscriptionStep.RESUMED
) -> Subscriptions:
    subscriptions = Subscriptions(wanted, known)
    subscriptions.step(SubscriptionStep.CONNECT)
    subscriptions.step(connack)
    return subscriptions


def test_the_table_has_every_step() -> None:
    assert set(_AFTER) == set(SubscriptionStep)


def test_nothing_is_sure_between_connect_and_connack() -> None:
    subscriptions = Subscriptions((A, B), BOTH)
    subscriptions.step(SubscriptionStep.CONNECT)
    assert subscriptions.known == dict.fromkeys(BOTH, UNSURE)


@pytest.mark.parametrize(
    ("connack", "known"),
    [
        (SubscriptionStep.REFUSED, BOTH),
        (SubscriptionStep.RESUMED, BOTH),
        (SubscriptionStep.PERHAPS_RESUMED, dict.fromkeys(BOTH, UNSURE)),
        (SubscriptionStep.NEW, {}),
    ],
)
def test_a_connack_says_what_of_it_is_still_there(connack: SubscriptionStep, known: dict[str, int]) -> None:
    assert connected((A, B), BOTH, connack).known == known


def test_a_connack_that_never_came_leaves_nothing_sure() -> None:
    subscriptions = Subscriptions((A, B), BOTH)
    for step in (SubscriptionStep.CONNECT, SubscriptionStep.CONNECT, SubscriptionStep.RESUMED):
        subscriptions.step(step)
    assert handlings(subscriptions.ask()) == {"a/#": 1, "b": 1}


def handlings(requests: Sequence[Request]) -> dict[str, int | None]:
    return {f.pattern: f.retain_handling for one in requests if isinstance(one, Subscribe) for f in one.filters}


def test_retained_messages_come_with_the_first_subscribe_and_not_with_those_after_it() -> None:
    """A session that was lost meanwhile gets them all the same: there the subscription is new."""
    subscriptions = connected((A,), {}, SubscriptionStep.NEW)
    assert handlings(subscriptions.ask()) == {"a/#": 0}
    subscriptions.step(SubscriptionStep.CONNECT)
    subscriptions.step(SubscriptionStep.RESUMED)
    assert handlings(subscriptions.ask()) == {"a/#": 1}


def test_a_filter_with_other_terms_brings_no_retained_message_again() -> None:
    assert handlings(connected((Filter("a/#", 2),), BOTH).ask()) == {"a/#": 1}


@pytest.mark.parametrize("handling", [0, 1, 2])
def test_what_a_filter_says_of_retained_messages_holds(handling: int) -> None:
    for known in ({}, {"a/#": UNSURE}):
        asked = connected((Filter("a/#", retain_handling=handling),), known).ask()
        assert handlings(asked) == {"a/#": handling}


@pytest.mark.parametrize("handling", [0, 1, 2, None])
def test_another_retain_handling_is_no_reason_to_subscribe_again(handling: int | None) -> None:
    assert connected((Filter("a/#", 1, retain_handling=handling),), {"a/#": A.terms}).ask() == []


def test_what_is_there_is_not_asked_for() -> None:
    assert connected((A, B), BOTH).ask() == []


def test_a_filter_with_other_terms_is_asked_for_and_a_surplus_one_given_up() -> None:
    subscriptions = connected((A, B), {"a/#": A.terms, "b": A.terms, "old": 1})
    assert subscriptions.ask() == [Subscribe((replace(B, retain_handling=1),)), Unsubscribe(("old",))]


def test_a_filter_is_unsure_until_its_answer_comes() -> None:
    subscriptions = connected((A,), {"b": B.terms})
    subscribe, unsubscribe = subscriptions.ask()
    assert isinstance(subscribe, Subscribe)
    assert isinstance(unsubscribe, Unsubscribe)
    assert subscriptions.known == {"a/#": UNSURE, "b": UNSURE}
    subscriptions.granted(subscribe)
    assert subscriptions.known == {"a/#": A.terms, "b": UNSURE}
    subscriptions.removed(unsubscribe, [UnsubAckReasonCode.SUCCESS])
    assert subscriptions.known == {"a/#": A.terms}


def test_an_unsuback_of_mqtt_3_has_no_codes_and_takes_all_back() -> None:
    subscriptions = connected((), BOTH)
    (unsubscribe,) = subscriptions.ask()
    assert isinstance(unsubscribe, Unsubscribe)
    subscriptions.removed(unsubscribe, [])
    assert subscriptions.known == {}


def test_a_filter_that_is_not_taken_back_stays_unsure() -> None:
    subscriptions = connected((), BOTH)
    (unsubscribe,) = subscriptions.ask()
    assert isinstance(unsubscribe, Unsubscribe)
    subscriptions.removed(unsubscribe, [UnsubAckReasonCode.NOT_AUTHORIZED, UnsubAckReasonCode.NO_SUBSCRIPTION_EXISTED])
    assert subscriptions.known == {"a/#": UNSURE}


def test_a_subscribe_has_one_identifier() -> None:
    wanted: tuple[Filter, ...] = (Filter("a", identifier=1), Filter("b"), Filter("c", identifier=1))
    requests = connected(wanted, {}).ask()
    wanted = tuple(replace(f, retain_handling=0) for f in wanted)
    assert requests == [Subscribe((wanted[0], wanted[2])), Subscribe((wanted[1],))]
    packet = requests[0].packet(9)
    assert isinstance(packet, SubscribePacket)
    assert (packet.packet_id, packet.subscription_id) == (9, 1)


def test_a_record_keeps_what_it_was_given() -> None:
    subscriptions = connected((A,), BOTH)
    before = subscriptions.known
    subscriptions.ask()
    assert before == BOTH


def test_whatever_is_wanted_in_turn_and_wherever_it_ends_the_record_never_claims_too_much() -> None:
    """Three configurations one after the other; each ends after any number of packets carried out and answers seen."""
    wishes = ((), (A,), (A, B), (Filter("b", 0),))
    ends = [(carried, seen) for carried in range(3) for seen in range(carried + 1)]
    for lives in product(product(wishes, ends), repeat=3):
        broker: dict[str, int] = {}
        record: dict[str, int] = {}
        for wanted, (carried, seen) in lives:
            subscriptions = connected(wanted, record)
            for place, request in enumerate(subscriptions.ask()):
                if place < carried:
                    _carry_out(request, broker)
                if place < seen:
                    _see_answer(request, subscriptions)
            record = subscriptions.known
            assert set(broker) <= set(record), f"a filter nobody will take back: {lives}"
            assert {p: t for p, t in record.items() if t != UNSURE}.items() <= broker.items(), f"silence: {lives}"


def _carry_out(request: Subscribe | Unsubscribe, broker: dict[str, int]) -> None:
    if isinstance(request, Subscribe):
        broker |= {f.pattern: f.terms for f in request.filters}
    else:
        for pattern in request.patterns:
            broker.pop(pattern, None)


def _see_answer(request: Subscribe | Unsubscribe, subscriptions: Subscriptions) -> None:
    if isinstance(request, Subscribe):
        subscriptions.granted(request)
    else:
        subscriptions.removed(request, [UnsubAckReasonCode.SUCCESS] * len(request))
