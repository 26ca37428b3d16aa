"""What is known of the broker's subscriptions, step by step, and what is asked for by it."""

from __future__ import annotations

from itertools import product

import pytest

from towline.mqtt.events import Filter
from towline.mqtt.session import UNSURE, Subscriptions

A, B = Filter("a/#", 1), Filter("b", 2)
BOTH = {"a/#": A.encoded_options, "b": B.encoded_options}


def connected(wanted: tuple[Filter, ...], known: dict[str, int]) -> Subscriptions:
    """A session that the broker has kept; without anything known a new one."""
    subscriptions = Subscriptions(wanted, known)
    subscriptions.expect_connack()
    if known:
        subscriptions.restore_options()
    else:
        subscriptions.clear_options()
    return subscriptions


def handlings(subscriptions: Subscriptions) -> dict[str, int | None]:
    return {f.pattern: f.retain_handling for f in subscriptions.pending_changes()[0]}


@pytest.mark.parametrize("handling", [0, 1, 2])
def test_what_a_filter_says_of_retained_messages_holds(handling: int) -> None:
    for known in ({}, {"a/#": UNSURE}):
        assert handlings(connected((Filter("a/#", retain_handling=handling),), known)) == {"a/#": handling}


@pytest.mark.parametrize("handling", [0, 1, 2, None])
def test_another_retain_handling_is_no_reason_to_subscribe_again(handling: int | None) -> None:
    assert connected((Filter("a/#", 1, retain_handling=handling),), {"a/#": A.encoded_options}).pending_changes() == (
        [],
        [],
    )


def test_whatever_is_wanted_in_turn_and_wherever_it_ends_the_record_never_claims_too_much() -> None:
    """Three configurations one after the other; each ends after any number of packets carried out and answers seen."""
    wishes = ((), (A,), (A, B), (Filter("b", 0),))
    ends = [(carried, seen) for carried in range(3) for seen in range(carried + 1)]
    for lives in product(product(wishes, ends), repeat=3):
        broker: dict[str, int] = {}
        record: dict[str, int] = {}
        for wanted, (carried, seen) in lives:
            subscriptions = connected(wanted, record)
            filters, surplus = subscriptions.pending_changes()
            if filters and carried > 0:
                broker |= {f.pattern: f.encoded_options for f in filters}
            if filters and seen > 0:
                subscriptions.confirm_granted([f.pattern for f in filters])
            place = int(bool(filters))  # of UNSUBSCRIBE
            if carried > place:
                broker = {pattern: terms for pattern, terms in broker.items() if pattern not in surplus}
            if seen > place:
                subscriptions.confirm_removed(surplus)
            record = subscriptions.known_options
            assert set(broker) <= set(record), f"a filter nobody will take back: {lives}"
            assert {p: t for p, t in record.items() if t != UNSURE}.items() <= broker.items(), f"silence: {lives}"
