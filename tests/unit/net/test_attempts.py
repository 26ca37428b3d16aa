"""Which broker is tried next, and when: a list is an order of preference, with one pause a round."""

from __future__ import annotations

import pytest

from towline import ClientSettings
from towline.net.driver import Attempts
from towline.net.endpoint import Endpoint

FIRST, SECOND = Endpoint("mqtt", "first", 1883), Endpoint("mqtt", "second", 1883)
LONG = 3600.0


@pytest.fixture
def attempts() -> Attempts:
    return Attempts((FIRST, SECOND), ClientSettings())


def test_the_next_of_the_list_is_tried_at_once_and_a_round_ends_with_a_pause(attempts: Attempts) -> None:
    """Whatever the first has said, be it a refusal: that is no reason to let the second wait."""
    for number in range(1, 4):
        now = LONG * number
        assert attempts.begin() == FIRST
        attempts.failed(now, served=False)
        assert attempts.due <= now
        assert attempts.begin() == SECOND
        attempts.failed(now, served=False)
        assert attempts.due > now
        assert attempts.rounds == number


def test_after_a_connection_that_worked_the_first_is_tried_again(attempts: Attempts) -> None:
    attempts.begin()
    attempts.failed(0.0, served=False)
    assert attempts.begin() == SECOND
    attempts.online(1.0)
    attempts.failed(1.1, served=True)
    assert attempts.begin() == FIRST


@pytest.mark.parametrize("place", [FIRST, SECOND])
def test_a_broker_that_takes_us_in_only_to_end_it_is_left_and_not_hammered(attempts: Attempts, place: Endpoint) -> None:
    """The list goes on behind it, and each round has its pause, though every connection comes online."""
    now, tried, pauses = 0.0, [], 0
    for _ in range(40):
        now = max(now, attempts.due) + 0.01
        served = attempts.begin() == place
        tried.append(attempts.endpoint)
        if served:
            attempts.online(now)
        attempts.failed(now, served=served)
        pauses += attempts.due > now
    assert pauses >= 19
    assert {FIRST, SECOND} <= set(tried[-4:])


def test_a_culprit_that_was_found_is_no_reason_for_a_long_pause(attempts: Attempts) -> None:
    for now in range(0, 200, 10):
        attempts.begin()
        attempts.failed(now, served=False)
    attempts.begin()
    attempts.online(300.0)
    attempts.culprit_found()
    attempts.failed(300.1, served=True)
    assert attempts.due - 300.1 <= 0.25


def test_an_id_taken_over_twice_in_a_minute_is_fought_for(attempts: Attempts) -> None:
    assert [attempts.taken_over(now) for now in (0.0, 61.0, 100.0)] == [False, False, True]
