"""Schedule of connection attempts: the next broker, its pause, and redirects by a Server Reference."""

from __future__ import annotations

from typing import Any

import pytest

from towline import ClientSettings
from towline.errors import Unreachable
from towline.mqtt.events import Close
from towline.net.driver import MAX_REDIRECTS, ReconnectSchedule, parse_references
from towline.net.endpoint import Endpoint

FIRST, SECOND, HOME, A, B, C = (
    Endpoint.parse(f"mqtt://{name}.example") for name in ("first", "second", "home", *"abc")
)
LONG = 3600.0


def schedule_of(*brokers: Endpoint, **settings: Any) -> ReconnectSchedule:
    return ReconnectSchedule(brokers, ClientSettings(**settings))


def pause_after(schedule: ReconnectSchedule, now: float, failures: int = 1, *, was_online: bool = False) -> float:
    """Pause after so many failures of a schedule, in seconds."""
    for _ in range(failures):
        schedule.record_failure(now, was_online=was_online)
    return schedule.due_at - now


@pytest.mark.parametrize("closing", [FIRST, SECOND])
def test_a_broker_that_accepts_and_closes_is_skipped_and_each_round_has_a_pause(closing: Endpoint) -> None:
    schedule, now, tried, pauses = schedule_of(FIRST, SECOND), 0.0, list[Endpoint](), 0
    for _ in range(40):
        now = max(now, schedule.due_at) + 0.01
        tried.append(schedule.next_endpoint())
        if online := tried[-1] == closing:
            schedule.record_online(now)
        schedule.record_failure(now, was_online=online)
        pauses += schedule.due_at > now
    assert pauses >= 19
    assert {FIRST, SECOND} <= set(tried[-4:])


@pytest.mark.parametrize(
    ("ends", "seconds", "delivers", "expected"),
    [(4, 0.1, False, FIRST), (5, 0.1, False, SECOND), (5, 10.0, False, FIRST), (5, 0.1, True, FIRST)],
)
def test_a_broker_is_skipped_after_five_useless_connections(
    ends: int, seconds: float, delivers: bool, expected: Endpoint
) -> None:
    schedule = schedule_of(FIRST, SECOND)
    for number in range(ends):
        schedule.record_online(now := 100.0 * number)
        if delivers:
            schedule.record_delivery()
        schedule.record_failure(now + seconds, was_online=True)
    assert schedule.next_endpoint() == expected


def test_pauses_grow_although_each_connection_comes_online() -> None:
    schedule, now, pauses = schedule_of(HOME), 0.0, []
    for _ in range(12):
        schedule.record_online(now)
        pauses.append(pause_after(schedule, now + 0.1, was_online=True))
        now += 1.0
    assert pauses[0] <= 0.25
    assert all(0.25 * 2**n / 4 <= pause + 1e-9 and pause <= 0.25 * 2**n + 1e-9 for n, pause in enumerate(pauses[:7]))
    assert all(7.5 <= pause <= 30 for pause in pauses[8:])


def test_a_delivered_message_and_a_stable_connection_reset_the_pause() -> None:
    schedule = schedule_of(HOME)
    pause_after(schedule, 0.0, 8)
    schedule.record_delivery()
    assert pause_after(schedule, 0.0) <= 0.25
    pause_after(schedule, 0.0, 8)
    schedule.record_online(0.0)
    assert pause_after(schedule, 20.0, was_online=True) <= 0.25
    schedule.record_online(20.0)
    assert pause_after(schedule, 21.0, was_online=True) <= 0.5


def test_a_culprit_resets_the_pause_a_few_times_in_a_row() -> None:
    schedule = schedule_of(HOME)
    for _ in range(8):
        pause_after(schedule, 0.0, 3)
        schedule.record_culprit()
        assert pause_after(schedule, 0.0) <= 0.25
    pause_after(schedule, 0.0, 8)
    schedule.record_culprit()  # a broker that likes none of them
    assert pause_after(schedule, 0.0) >= 7.5
    schedule.record_delivery()
    schedule.record_culprit()
    assert pause_after(schedule, 0.0) <= 0.25


def test_a_client_id_taken_over_twice_in_a_minute_is_contended() -> None:
    schedule = schedule_of(FIRST, SECOND)
    assert [schedule.record_takeover(now) for now in (0.0, 61.0, 100.0)] == [False, False, True]


# -- redirects --


def redirect(reference: str, *, moved: bool = False) -> Close:
    error = Unreachable("TL-M26", "x", "y")
    return Close(error, fatal=moved, server_reference=reference, permanent_redirect=moved)


@pytest.fixture
def schedule() -> ReconnectSchedule:
    return schedule_of(HOME, follow_redirects=True)


def test_for_good_counts_from_the_moment_the_new_server_serves(schedule: ReconnectSchedule) -> None:
    close = schedule.follow_redirect(redirect("a.example b.example", moved=True))
    assert (close.reconnect_at_once, close.fatal) == (True, False)
    assert schedule.next_endpoint() == A
    schedule.record_failure(0.0, was_online=False)
    assert schedule.rounds == 0, "the other server comes first"
    assert schedule.next_endpoint() == B
    schedule.record_online(0.0)
    assert schedule.next_endpoint() == B
    schedule.follow_redirect(redirect("c.example", moved=True))
    assert schedule.next_endpoint() == C
    schedule.record_online(0.0)
    assert schedule.next_endpoint() == C


@pytest.mark.parametrize("reference", ["", "home.example", "n@me!"])
def test_a_reference_to_nobody_else_is_an_error_to_show(schedule: ReconnectSchedule, reference: str) -> None:
    close = redirect(reference, moved=True)
    assert schedule.follow_redirect(close) is close


def test_after_a_few_hops_it_is_given_up_and_begun_anew(schedule: ReconnectSchedule) -> None:
    for there in [A, B] * (MAX_REDIRECTS // 2):
        assert schedule.follow_redirect(redirect(there.host)).reconnect_at_once
        assert schedule.next_endpoint() == there
    close = schedule.follow_redirect(redirect("a.example"))
    assert not close.reconnect_at_once
    assert close.error is not None
    assert close.error.code == "TL-M27"
    assert schedule.next_endpoint() == HOME
    assert schedule.follow_redirect(redirect("a.example")).reconnect_at_once


@pytest.mark.parametrize(
    ("text", "like", "found"),
    [
        ("a.example", "mqtt://h", ["mqtt://a.example:1883"]),
        ("a.example", "mqtts://h", ["mqtts://a.example:8883"]),
        ("a.example:1234 b", "mqtt://h:99", ["mqtt://a.example:1234", "mqtt://b:1883"]),
        ("[fe80::1]:1884 [::1]", "mqtt://h", ["mqtt://[fe80::1]:1884", "mqtt://[::1]:1883"]),
        ("a", "wss://h/path", ["wss://a:443/path"]),
        ("mqtts://a b", "mqtts://h", ["mqtts://a:8883", "mqtts://b:8883"]),
        ("mqtt://a", "mqtts://h", []),  # it would take the encryption away
        ("a", "unix:///run/mqtt.sock", []),
        ("user:secret@a a/b a:0 a:65536 fe80::1 [a b] a\r\nb", "mqtt://h", []),
        ("a" * 254, "mqtt://h", []),
        ("a a a", "mqtt://h", ["mqtt://a:1883"]),
        (" ".join("abcdefghijkl"), "mqtt://h", [f"mqtt://{c}:1883" for c in "abcdefgh"]),
        ("", "mqtt://h", []),
    ],
)
def test_references(text: str, like: str, found: list[str]) -> None:
    assert [str(endpoint) for endpoint in parse_references(text, Endpoint.parse(like))] == found
