"""Pauses between connections grow until one was of use."""

from __future__ import annotations

from towline.net.backoff import Backoff


def test_pauses_grow_although_each_connection_comes_online() -> None:
    backoff, now, pauses = Backoff(30.0), 0.0, []
    for _ in range(12):
        backoff.online(now)
        pauses.append(backoff.pause(now + 0.1))
        now += 1.0
    assert pauses[0] <= 0.25
    assert all(0.25 * 2**n / 4 <= pause <= 0.25 * 2**n for n, pause in enumerate(pauses[:7]))
    assert all(7.5 <= pause <= 30 for pause in pauses[8:])


def test_a_message_that_went_through_begins_anew() -> None:
    backoff = Backoff(30.0)
    for _ in range(8):
        backoff.pause(0.0)
    backoff.useful()
    assert backoff.pause(0.0) <= 0.25


def test_so_does_a_connection_that_lasted() -> None:
    backoff = Backoff(30.0)
    for _ in range(8):
        backoff.pause(0.0)
    backoff.online(0.0)
    assert backoff.pause(20.0) <= 0.25
    backoff.online(20.0)
    assert backoff.pause(21.0) <= 0.5


def test_a_culprit_found_begins_anew_a_few_times_in_a_row() -> None:
    backoff = Backoff(30.0)
    for _ in range(8):
        for _ in range(3):
            backoff.pause(0.0)
        backoff.culprit_found()
        assert backoff.pause(0.0) <= 0.25
    for _ in range(8):
        backoff.pause(0.0)
    backoff.culprit_found()  # a broker that likes none of them
    assert backoff.pause(0.0) >= 7.5
    backoff.useful()
    backoff.culprit_found()
    assert backoff.pause(0.0) <= 0.25


def test_connections_of_no_use_are_seen_as_such_until_one_is() -> None:
    backoff = Backoff(30.0)
    for now in range(4):
        assert not backoff.in_vain(now)
        backoff.online(now)
        backoff.pause(now + 0.1)
    backoff.online(5.0)
    assert backoff.in_vain(5.1)
    assert not backoff.in_vain(20.0)
    backoff.useful()
    assert not backoff.in_vain(5.1)
