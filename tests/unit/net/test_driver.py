"""The session driver, on a line to a broker that a test plays; its next attempt; what a chunk of packets waits for."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import (
    ConnAckPacket,
    DisconnectPacket,
    DisconnectReasonCode,
    SubAckPacket,
    SubAckReasonCode,
)

from towline.errors import BrokerError, Unreachable
from towline.mqtt.events import Action, Close, Filter, Publish, SaveSessionRecord, SessionConfig
from towline.mqtt.message import OutboundMessage
from towline.mqtt.session import Session
from towline.net import settings as connection_settings
from towline.net.connecting import Transport
from towline.net.driver import MAX_REDIRECTS, Hooks, Linger, ReconnectSchedule, SessionDriver, parse_references
from towline.net.endpoint import Endpoint
from towline.net.settings import BrokerConnection, ClientSettings


class World:
    """A driver with all that it asks its owner for."""

    def __init__(self, **settings: Any) -> None:
        self.performed: list[Action] = []
        self.failures: list[str] = []
        self.notices: list[str] = []
        self.ends = 0
        connection = BrokerConnection(
            settings=ClientSettings(**settings),
            brokers=(Endpoint("mqtt", "broker", 1883),),
            session=SessionConfig("c", "test", (Filter("t", 1),)),
        )
        hooks = Hooks(
            new_session=lambda level: Session(connection.session_config_for(level)),
            perform=self.performed.append,
            connection_ended=self.ended,
            attempt_failed=lambda error: self.failures.append(error.code),
            log_notice=lambda _what, code, **_facts: self.notices.append(code),
        )
        self.driver = SessionDriver(connection, hooks)

    def ended(self) -> None:
        self.ends += 1


def connected_to(monkeypatch: pytest.MonkeyPatch, ours: socket.socket) -> None:
    ours.setblocking(False)
    monkeypatch.setattr(connection_settings, "connect", lambda *_args, **_options: Transport(ours, "test"))


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The other end of the line that a driver gets."""
    ours, theirs = socket.socketpair()
    connected_to(monkeypatch, ours)
    with ours, theirs:
        yield theirs


def test_the_last_words_of_a_broker_are_heard_though_it_takes_nothing_more(broker: socket.socket) -> None:
    world = World()
    world.driver.run_once(0)
    for packet in (ConnAckPacket(), SubAckPacket(1, [SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE])):
        broker.sendall(packet.write())
        world.driver.run_once(0)
    assert world.driver.online
    broker.sendall(DisconnectPacket(reason_code=DisconnectReasonCode.SERVER_SHUTTING_DOWN).write())
    broker.shutdown(socket.SHUT_RD)
    world.driver.handle(Publish(1, OutboundMessage("t", qos=1)))
    assert world.ends == 0, "there may be a word of the broker's to read"
    world.driver.run_once(0)
    assert world.ends == 1
    assert isinstance(world.driver.error, BrokerError)
    assert "shutting down" in str(world.driver.error)


@pytest.mark.parametrize("error", [None, Unreachable("TL-M13", "test", "no room")])
def test_what_a_session_decided_is_void_once_it_is_renewed(broker: socket.socket, error: Unreachable | None) -> None:
    """The record can't be made durable, so CONNECT does not leave."""
    world = World()

    def perform(action: Action) -> None:
        world.performed.append(action)
        if isinstance(action, SaveSessionRecord):
            world.driver.restart_session(error)

    object.__setattr__(world.driver._hooks, "perform", perform)
    before = world.driver.session
    world.driver.run_once(0)
    assert [type(action) for action in world.performed] == [SaveSessionRecord]
    assert world.driver.session is not before
    world.driver.dispose()
    assert broker.recv(100) == b""
    assert world.failures == (["TL-M13"] if error else [])


def test_an_end_in_place_of_connack_is_a_guess_at_the_version_and_told(broker: socket.socket) -> None:
    """A session renewed then only looks for an answer: else the newest version would not be tried once more."""
    world = World(protocol="auto")
    world.driver.run_once(0)
    broker.close()
    world.driver.run_once(0)
    assert world.notices == ["TL-M25"]
    world.driver.restart_session()
    assert (world.driver.session.config.protocol, world.driver.session.probing_version) == (4, True)


@pytest.mark.usefixtures("broker")
def test_no_connection_is_made_while_the_owner_says_so() -> None:
    world = World()
    world.driver.run_once(0, may_connect=False)
    assert not world.driver.connected
    world.driver.run_once(0)
    assert world.driver.connected


def test_a_line_that_breaks_while_it_is_not_read_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of the end again and again, to whoever asks for nothing else: the loop would spin."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    connected_to(monkeypatch, ours)
    world = World()
    world.driver.run_once(0)
    world.driver.pause_reading(pause=True)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()  # a reset
    began = time.monotonic()
    world.driver.run_once(began + 0.2)
    assert time.monotonic() - began >= 0.19
    world.driver.dispose()


def test_waking_it_is_safe_after_its_end_and_within_itself() -> None:
    """A signal handler wakes it on a thread that may be in `wake` already."""
    world = World()
    done = threading.Event()

    def wake() -> None:
        with world.driver._pipe_lock:
            world.driver.wake()
        done.set()

    threading.Thread(target=wake, daemon=True).start()
    assert done.wait(10)
    world.driver.dispose()
    world.driver.dispose()
    world.driver.wake()


# -- the next attempt --


FIRST, SECOND, HOME, A, B, C = (
    Endpoint.parse(f"mqtt://{name}.example") for name in ("first", "second", "home", *"abc")
)


def schedule_of(*brokers: Endpoint, **settings: Any) -> ReconnectSchedule:
    return ReconnectSchedule(brokers, ClientSettings(**settings))


def pause_after(schedule: ReconnectSchedule, now: float, failures: int = 1, *, was_online: bool = False) -> float:
    """Pause after so many failures of a schedule, in seconds."""
    for _ in range(failures):
        schedule.record_failure(now, was_online=was_online)
    return schedule.due_at - now


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
    assert pause_after(schedule, 40.0, 8) >= 7.5, "a connection resets it once, not each failure behind it"


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


# -- waiting for more --


LINGER_S = 0.001


def chunk(linger: Linger, *arrivals: int) -> float:
    """Let a chunk wait while packets arrive, at first and during each pause; the seconds that it waited."""
    coming, came, waits = iter(arrivals[1:]), [arrivals[0]], list[float]()
    early = linger.initial_pause()
    for pause in [early] if early else linger.further_pauses(lambda: sum(came)):
        waits.append(pause)
        came.append(next(coming, 0))
    linger.record_chunk(sum(came))
    return sum(waits)


def test_a_window_that_fills_packet_by_packet_ends_the_wait() -> None:
    linger = Linger(LINGER_S)
    for _ in range(2):
        chunk(linger, 1, 19)
    assert chunk(linger, 1, 19) == pytest.approx(LINGER_S / 4)
    assert chunk(linger, 1, 5, 14) == pytest.approx(LINGER_S / 2)
    assert chunk(linger, 20) == 0.0


def test_a_window_is_put_to_the_test_and_forgotten_when_more_comes() -> None:
    linger = Linger(LINGER_S)
    waits = [chunk(linger, 1) for _ in range(200)]
    assert [number for number, waited in enumerate(waits) if waited] == [0, 65, 130, 195]
    waits = [chunk(linger, 1, *[1] * (3 + number % 5)) for number in range(100)]
    assert all(waits[70:]), "it is a low rate, and no window"


def test_a_stream_waits_once_and_before_it_is_looked_at() -> None:
    linger = Linger(LINGER_S)
    assert linger.initial_pause() == 0.0
    chunk(linger, 150)
    assert chunk(linger, 150, 30) == 2 * LINGER_S
    assert chunk(linger, 150, 30) == 2 * LINGER_S, "equal numbers of a stream are no window"
    chunk(linger, 10)
    assert linger.initial_pause() == 0.0


def after(linger: Linger, silence_s: float, *arrivals: int) -> float:
    """As `chunk`, so long after the last acknowledgement; the seconds that it waited before it was looked at."""
    waited = linger.initial_pause(silence_s)
    linger.record_chunk(sum(arrivals), wait_was_idle=len(arrivals) == 1)
    return waited


def test_a_chunk_after_a_silence_waits_long() -> None:
    linger = Linger(LINGER_S, 0.02)
    assert [after(linger, 0.01, 1, 1) for _ in range(5)] == [0.02] * 5
    assert after(linger, 0.001, 1, 1) == 0.0, "the broker waited for us"
    assert after(Linger(LINGER_S), 0.01, 1, 1) == 0.0, "who is in a hurry waits no longer than before"


def test_a_long_wait_in_vain_is_not_repeated_for_a_while() -> None:
    """Messages that come one by one win nothing by it; and so it is with a window of one, on a long way."""
    linger = Linger(LINGER_S, 0.02)
    waits = [after(linger, 0.05, 1) for _ in range(200)]
    assert [number for number, waited in enumerate(waits) if waited] == [0, 65, 130, 195]
    assert after(linger, 0.05, 1) == 0.0


@given(st.lists(st.lists(st.integers(0, 150), max_size=20).map(lambda more: [1, *more]), max_size=150))
def test_no_chunk_waits_longer_than_it_may(chunks: Sequence[Sequence[int]]) -> None:
    linger = Linger(LINGER_S)
    for arrivals in chunks:
        assert chunk(linger, *arrivals) <= 3 * LINGER_S + 1e-9
