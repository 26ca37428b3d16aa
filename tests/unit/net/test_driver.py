"""The session driver against a scripted transport: what an end means, and what its owner is asked for."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from mqtt5 import (
    ConnAckPacket,
    DisconnectPacket,
    DisconnectReasonCode,
    SubAckPacket,
    SubAckReasonCode,
)

from towline.errors import BrokerError, Unreachable
from towline.mqtt.events import Action, Filter, Publish, SaveSessionRecord, SessionConfig
from towline.mqtt.message import OutboundMessage
from towline.mqtt.session import Session
from towline.net import settings as connection_settings
from towline.net.connecting import Transport
from towline.net.driver import Hooks, SessionDriver
from towline.net.endpoint import Endpoint
from towline.net.settings import BrokerConnection, ClientSettings

FIRST, SECOND = Endpoint("mqtt", "first", 1883), Endpoint("mqtt", "second", 1883)


class Line:
    """A transport that a test plays the broker on."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.incoming: deque[bytes] = deque()
        self.sent = b""
        self.unsent_bytes = 0
        self.has_buffered_input = True
        self.error = None
        self.broken = False

    def fileno(self) -> int:
        return self.ours.fileno()

    def read(self) -> bytes | None:
        return self.incoming.popleft() if self.incoming else b"" if self.broken else None

    def write(self, data: bytes) -> bool:
        if self.broken:
            self.unsent_bytes += len(data)
        self.sent += data
        return not self.broken

    def flush(self) -> bool:
        return not self.broken

    def drain(self, _timeout_s: float) -> bool:
        return not self.broken

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


class World:
    """A driver with all that it asks its owner for, on one line or on none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, line: Any = None, **settings: Any) -> None:
        self.performed: list[Action] = []
        self.failures: list[str] = []
        self.notices: list[str] = []
        self.ends = 0
        connection = BrokerConnection(
            settings=ClientSettings(**settings),
            brokers=(Endpoint("mqtt", "broker", 1883),),
            session=SessionConfig("c", "test", (Filter("t", 1),)),
        )
        monkeypatch.setattr(connection_settings, "connect", lambda *_args, **_options: line)
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


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


def test_the_last_words_of_a_broker_are_heard_though_it_takes_nothing_more(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, line)
    world.driver.run_once(0)
    line.incoming += [ConnAckPacket().write(), SubAckPacket(1, [SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE]).write()]
    for _ in range(2):
        world.driver.run_once(0)
    assert world.driver.online
    line.broken = True
    line.incoming.append(DisconnectPacket(reason_code=DisconnectReasonCode.SERVER_SHUTTING_DOWN).write())
    world.driver.handle(Publish(1, OutboundMessage("t", qos=1)))
    assert world.ends == 0, "there may be a word of the broker's to read"
    world.driver.run_once(0)
    assert world.ends == 1
    assert isinstance(world.driver.error, BrokerError)
    assert "shutting down" in str(world.driver.error)


@pytest.mark.parametrize("error", [None, Unreachable("TL-M13", "test", "no room")])
def test_what_a_session_decided_is_void_once_it_is_renewed(
    line: Line, monkeypatch: pytest.MonkeyPatch, error: Unreachable | None
) -> None:
    """The record can't be made durable, so CONNECT does not leave."""
    world = World(monkeypatch, line)

    def perform(action: Action) -> None:
        world.performed.append(action)
        if isinstance(action, SaveSessionRecord):
            world.driver.restart_session(error)

    object.__setattr__(world.driver._hooks, "perform", perform)
    before = world.driver.session
    world.driver.run_once(0)
    assert [type(action) for action in world.performed] == [SaveSessionRecord]
    assert world.driver.session is not before
    assert line.sent == b""
    assert world.failures == (["TL-M13"] if error else [])


def test_an_end_in_place_of_connack_is_a_guess_at_the_version_and_told(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session renewed then only looks for an answer: else the newest version would not be tried once more."""
    world = World(monkeypatch, line, protocol="auto")
    world.driver.run_once(0)
    line.broken = True
    world.driver.run_once(0)
    assert world.notices == ["TL-M25"]
    world.driver.restart_session()
    assert (world.driver.session.config.protocol, world.driver.session.probing_version) == (4, True)


def test_no_connection_is_made_while_the_owner_says_so(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, line)
    world.driver.run_once(0, may_connect=False)
    assert not world.driver.connected
    world.driver.run_once(0)
    assert world.driver.connected


def test_a_line_that_breaks_while_it_is_not_read_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of the end again and again, to whoever asks for nothing else: the loop would spin."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    ours.setblocking(False)
    world = World(monkeypatch, Transport(ours, "test"))
    world.driver.run_once(0)
    world.driver.pause_reading(pause=True)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()  # a reset
    began = time.monotonic()
    world.driver.run_once(began + 0.2)
    assert time.monotonic() - began >= 0.19
    world.driver.dispose()


def test_waking_it_is_safe_after_its_end_and_within_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler wakes it on a thread that may be in `wake` already."""
    world = World(monkeypatch)
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
