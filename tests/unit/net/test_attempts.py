"""Which broker is tried next, and when: a list is an order of preference, with one pause a round."""

from __future__ import annotations

import pytest

from towline import ClientSettings
from towline.net.driver import ReconnectSchedule
from towline.net.endpoint import Endpoint

FIRST, SECOND = Endpoint("mqtt", "first", 1883), Endpoint("mqtt", "second", 1883)
LONG = 3600.0


@pytest.fixture
def attempts() -> ReconnectSchedule:
    return ReconnectSchedule((FIRST, SECOND), ClientSettings())


def test_the_next_of_the_list_is_tried_at_once_and_a_round_ends_with_a_pause(attempts: ReconnectSchedule) -> None:
    """Whatever the first has said, be it a refusal: that is no reason to let the second wait."""
    for number in range(1, 4):
        now = LONG * number
        assert attempts.next_endpoint() == FIRST
        attempts.record_failure(now, was_online=False)
        assert attempts.due_at <= now
        assert attempts.next_endpoint() == SECOND
        attempts.record_failure(now, was_online=False)
        assert attempts.due_at > now
        assert attempts.rounds == number


def test_after_a_connection_that_worked_the_first_is_tried_again(attempts: ReconnectSchedule) -> None:
    attempts.next_endpoint()
    attempts.record_failure(0.0, was_online=False)
    assert attempts.next_endpoint() == SECOND
    attempts.record_online(1.0)
    attempts.record_failure(1.1, was_online=True)
    assert attempts.next_endpoint() == FIRST


@pytest.mark.parametrize("place", [FIRST, SECOND])
def test_a_broker_that_takes_us_in_only_to_end_it_is_left_and_not_hammered(
    attempts: ReconnectSchedule, place: Endpoint
) -> None:
    """The list goes on behind it, and each round has its pause, though every connection comes online."""
    now, tried, pauses = 0.0, [], 0
    for _ in range(40):
        now = max(now, attempts.due_at) + 0.01
        served = attempts.next_endpoint() == place
        tried.append(attempts.endpoint)
        if served:
            attempts.record_online(now)
        attempts.record_failure(now, was_online=served)
        pauses += attempts.due_at > now
    assert pauses >= 19
    assert {FIRST, SECOND} <= set(tried[-4:])


def test_a_culprit_that_was_found_is_no_reason_for_a_long_pause(attempts: ReconnectSchedule) -> None:
    for now in range(0, 200, 10):
        attempts.next_endpoint()
        attempts.record_failure(now, was_online=False)
    attempts.next_endpoint()
    attempts.record_online(300.0)
    attempts.record_culprit()
    attempts.record_failure(300.1, was_online=True)
    assert attempts.due_at - 300.1 <= 0.25


def test_an_id_taken_over_twice_in_a_minute_is_fought_for(attempts: ReconnectSchedule) -> None:
    assert [attempts.record_takeover(now) for now in (0.0, 61.0, 100.0)] == [False, False, True]
