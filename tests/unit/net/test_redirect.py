"""Reading a Server Reference, and what is remembered of it."""

from __future__ import annotations

import pytest

from towline import ClientSettings
from towline.errors import Unreachable
from towline.mqtt.events import Close
from towline.net.driver import MAX_REDIRECTS, ReconnectSchedule, parse_references
from towline.net.endpoint import Endpoint

HOME = Endpoint.parse("mqtt://home.example")
A, B, C = (Endpoint.parse(f"mqtt://{name}.example") for name in "abc")


def sent_to(reference: str, *, moved: bool = False) -> Close:
    return Close(Unreachable("TL-M26", "x", "y"), fatal=moved, server_reference=reference, permanent_redirect=moved)


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


@pytest.fixture
def attempts() -> ReconnectSchedule:
    return ReconnectSchedule((HOME,), ClientSettings(follow_redirects=True))


def test_nothing_is_followed_unless_asked_for() -> None:
    attempts = ReconnectSchedule((HOME,), ClientSettings())
    close = sent_to("a.example")
    assert attempts.follow_redirect(close) is close
    assert attempts.next_endpoint() == HOME


def test_for_now_means_the_next_connection(attempts: ReconnectSchedule) -> None:
    assert attempts.follow_redirect(sent_to("a.example")).reconnect_at_once
    assert attempts.next_endpoint() == A
    attempts.record_online(0.0)
    assert attempts.next_endpoint() == HOME


def test_for_good_counts_from_the_moment_the_new_server_serves(attempts: ReconnectSchedule) -> None:
    judged = attempts.follow_redirect(sent_to("a.example b.example", moved=True))
    assert (judged.reconnect_at_once, judged.fatal) == (True, False)
    assert attempts.next_endpoint() == A
    attempts.record_failure(0.0, was_online=False)
    assert attempts.rounds == 0, "the other server comes first"
    assert attempts.next_endpoint() == B
    attempts.record_online(0.0)
    assert attempts.next_endpoint() == B
    attempts.follow_redirect(sent_to("c.example", moved=True))
    assert attempts.next_endpoint() == C
    attempts.record_online(0.0)
    assert attempts.next_endpoint() == C


def test_servers_that_moved_to_each_other_end_where_one_serves(attempts: ReconnectSchedule) -> None:
    for here, there in ((HOME, A), (A, HOME)):
        assert attempts.endpoint == here
        attempts.follow_redirect(sent_to(there.host, moved=True))
        assert attempts.next_endpoint() == there
        attempts.record_online(0.0)
    assert attempts.next_endpoint() == HOME


def test_a_move_to_servers_that_are_not_there_is_forgotten(attempts: ReconnectSchedule) -> None:
    attempts.follow_redirect(sent_to("a.example", moved=True))
    assert attempts.next_endpoint() == A
    assert attempts.next_endpoint() == HOME


@pytest.mark.parametrize("reference", ["", "home.example", "n@me!"])
def test_a_reference_to_nobody_else_is_an_error_to_show(attempts: ReconnectSchedule, reference: str) -> None:
    close = sent_to(reference, moved=True)
    assert attempts.follow_redirect(close) is close


def test_after_a_few_hops_it_is_given_up_and_begun_anew(attempts: ReconnectSchedule) -> None:
    for there in [A, B] * (MAX_REDIRECTS // 2):
        assert attempts.follow_redirect(sent_to(there.host)).reconnect_at_once
        assert attempts.next_endpoint() == there
    judged = attempts.follow_redirect(sent_to("a.example"))
    assert not judged.reconnect_at_once
    assert judged.error is not None
    assert judged.error.code == "TL-M27"
    assert attempts.next_endpoint() == HOME
    assert attempts.follow_redirect(sent_to("a.example")).reconnect_at_once
