"""Pauses between connections grow until one was of use."""

from __future__ import annotations

from towline.net.reconnect import Pauses


def test_pauses_grow_although_each_connection_comes_online() -> None:
    pauses, now, taken = Pauses(30.0), 0.0, []
    for _ in range(12):
        pauses.online(now)
        taken.append(pauses.next(now + 0.1))
        now += 1.0
    assert taken[0] <= 0.25
    assert all(0.25 * 2**n / 4 <= pause <= 0.25 * 2**n for n, pause in enumerate(taken[:7]))
    assert all(7.5 <= pause <= 30 for pause in taken[8:])


def test_a_message_that_went_through_begins_anew() -> None:
    pauses = Pauses(30.0)
    for _ in range(8):
        pauses.next(0.0)
    pauses.useful()
    assert pauses.next(0.0) <= 0.25


def test_so_does_a_connection_that_lasted() -> None:
    pauses = Pauses(30.0)
    for _ in range(8):
        pauses.next(0.0)
    pauses.online(0.0)
    assert pauses.next(20.0) <= 0.25
    pauses.online(20.0)
    assert pauses.next(21.0) <= 0.5


def test_a_culprit_found_begins_anew_a_few_times_in_a_row() -> None:
    pauses = Pauses(30.0)
    for _ in range(8):
        for _ in range(3):
            pauses.next(0.0)
        pauses.culprit_found()
        assert pauses.next(0.0) <= 0.25
    for _ in range(8):
        pauses.next(0.0)
    pauses.culprit_found()  # a broker that likes none of them
    assert pauses.next(0.0) >= 7.5
    pauses.useful()
    pauses.culprit_found()
    assert pauses.next(0.0) <= 0.25


def test_connections_of_no_use_are_seen_as_such_until_one_is() -> None:
    pauses = Pauses(30.0)
    for now in range(4):
        assert not pauses.in_vain(now)
        pauses.online(now)
        pauses.next(now + 0.1)
    pauses.online(5.0)
    assert pauses.in_vain(5.1)
    assert not pauses.in_vain(20.0)
    pauses.useful()
    assert not pauses.in_vain(5.1)
