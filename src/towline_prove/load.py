"""Numbered messages from many devices to a broker, with a claim on disk for each before and after.

One thread drives all publishers through a selector: the load must leave the two cores to what is measured. A lost
connection is made anew until the plan's time is up, and the session resumes (Clean Start 0, expiry > 0).
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mqtt5
from mqtt5 import ConnAckPacket, ConnectPacket, DisconnectPacket

from towline.errors import ConfigError, Refused, Unreachable
from towline_prove.history import HistoryWriter, SenderRecord
from towline_prove.numbered import MIN_SIZE
from towline_prove.sender import NumberedSender, own_devices, share

__all__ = ["LoadPlan", "LoadResult", "connect", "run_load"]

_BURST = 256
#: Bytes encoded at a time, unless it is one message.
_BURST_BYTES = 1 << 22
#: Payload bytes: the longest MQTT packet has 268,435,455 behind its fixed header [MQTT-1.5.5], less room for a topic.
_LARGEST = 268_000_000
_RECV = 1 << 18
_RETRY_S = 0.2
_TICK_S = 0.005
#: A broker that never answered within this time was never there; later losses are part of the run.
_FIRST_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A bounded load.

    Attributes:
        host: The broker's host.
        port: The broker's port, plain TCP.
        run: Names the run in every payload.
        publishers: MQTT connections.
        devices: Keys, spread over the publishers; at least as many as publishers.
        messages: All messages of all publishers.
        rate: Messages a second over all publishers; 0 for as fast as the broker takes them.
        qos: 0, 1 or 2.
        size: Payload bytes.
        topic: Topic template with ``{device}``.
        window: Most unacknowledged messages of one publisher; the server's Receive Maximum limits it further.
        seconds: The load ends after this time, finished or not.
        username: For brokers that want one.
        password: Never written to the history.
    """

    port: int
    host: str = "127.0.0.1"
    run: str = "run"
    publishers: int = 8
    devices: int = 50
    messages: int = 20_000
    rate: float = 0.0
    qos: int = 1
    size: int = 150
    topic: str = "telemetry/{device}/data"
    window: int = 1000
    seconds: float = 600.0
    username: str | None = None
    password: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        wrong = [
            (not 1 <= self.publishers <= 1000, "publishers is from 1 to 1000"),
            (self.devices < self.publishers, "devices is at least publishers, so that each device has one author"),
            (not 1 <= self.messages <= 100_000_000, "messages is from 1 to 100,000,000"),
            (self.qos not in {0, 1, 2}, "qos is 0, 1 or 2"),
            (not MIN_SIZE <= self.size <= _LARGEST, f"size is from {MIN_SIZE} to {_LARGEST:,} bytes"),
            (self.rate < 0 or self.seconds <= 0, "rate is at least 0 and seconds above 0"),
            ("{device}" not in self.topic, "topic holds {device}"),
            (not 1 <= self.window <= 65_535, "window is from 1 to 65,535"),
        ]
        for bad, rule in wrong:
            if bad:
                raise ConfigError("TL-C80", "load", f"not a load that can be run: {rule}", "Change that option.")

    def public(self) -> dict[str, Any]:
        """The plan without the password, for the history file."""
        return {name: value for name, value in asdict(self).items() if name != "password"}


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended.

    Attributes:
        attempted: Messages sent at least once.
        acked: Messages whose flow was completed by the broker.
        refused: Messages the broker answered with an error.
        resent: Messages published again after a reconnect.
        reconnects: Connections made after the first one of each publisher.
        seconds: Wall time.
    """

    attempted: int
    acked: int
    refused: int
    resent: int
    reconnects: int
    seconds: float


def connect(
    packet: ConnectPacket, host: str, port: int, *, timeout: float = 10.0
) -> tuple[socket.socket, ConnAckPacket, bytes]:
    """Open a connection and wait for CONNACK.

    Returns:
        The socket (blocking), the CONNACK, and bytes that came behind it.

    Raises:
        Unreachable: No TCP connection or no CONNACK within `timeout` seconds (TL-M60).
        Refused: The broker answered with an error (TL-M61).
    """
    where = f"mqtt://{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
    except OSError as error:
        raise Unreachable("TL-M60", where, f"no connection ({error})", "Is the broker running?") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(packet.write())
        connack, rest = _await_connack(sock)
    except (OSError, ValueError) as error:
        sock.close()
        raise Unreachable("TL-M60", where, f"no CONNACK ({error})", "Does the broker speak MQTT 5?") from error
    if connack.reason_code != mqtt5.ConnAckReasonCode.SUCCESS:
        sock.close()
        raise Refused("TL-M61", where, f"refused with {connack.reason_code.name}", "Check user name and rights.")
    sock.settimeout(None)
    return sock, connack, rest


def _await_connack(sock: socket.socket) -> tuple[ConnAckPacket, bytes]:
    data = b""
    while True:
        more = sock.recv(65536)
        if not more:
            raise ConnectionResetError("closed before CONNACK")
        data += more
        with suppress(IndexError):
            packet, used = mqtt5.read(memoryview(data))
            if not isinstance(packet, ConnAckPacket):
                raise ConnectionError(f"{type(packet).__name__} before CONNACK")
            return packet, data[used:]


class _Link:
    """A sender and its socket, for as long as it has one."""

    def __init__(self, plan: LoadPlan, publisher: int) -> None:
        self.sender = NumberedSender(
            run=plan.run,
            publisher=publisher,
            devices=own_devices(publisher, plan.publishers, plan.devices),
            total=share(publisher, plan.publishers, plan.messages),
            qos=plan.qos,
            size=plan.size,
            topic=plan.topic,
            window=plan.window,
        )
        self.sock: socket.socket | None = None
        self.out = bytearray()
        self.retry_at = 0.0
        self.connections = 0
        self._hello = ConnectPacket(
            f"prove-{plan.run}-{publisher}",
            username=plan.username,
            password=plan.password,
            clean_start=False,
            session_expiry_interval=3600,
        )
        self._place = (plan.host, plan.port)

    def open(self) -> list[int]:
        """Connect; returns numbers that go out a second time. Raises Unreachable or Refused."""
        self.sock, connack, rest = connect(self._hello, *self._place, timeout=5.0)
        self.sock.settimeout(0)
        self.connections += 1
        self.out[:], again = self.sender.connected(connack)
        self.out += self.sender.feed(rest).reply
        return again

    def close(self) -> None:
        """Drop the connection and what was not sent; the sender remembers it as unfinished."""
        if self.sock is not None:
            self.sock.close()
        self.sock = None
        self.out.clear()
        self.retry_at = time.monotonic() + _RETRY_S

    def push(self) -> None:
        """Send what the socket takes. Raises OSError when the connection is gone."""
        if self.sock is not None and self.out:
            with suppress(BlockingIOError):
                del self.out[: self.sock.send(self.out)]

    @property
    def done(self) -> bool:
        return self.sender.done and not self.out


class _Load:
    def __init__(self, plan: LoadPlan, history: HistoryWriter, progress: Callable[[int, int], None] | None) -> None:
        self._plan = plan
        self._history = history
        self._progress = progress
        self._links = [_Link(plan, index) for index in range(plan.publishers)]
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._resent = 0

    def run(self, stop: threading.Event | None) -> LoadResult:
        deadline = self._began + self._plan.seconds
        try:
            while time.monotonic() < deadline and not (stop is not None and stop.is_set()):
                if not self._step():
                    break
        finally:
            self._end()
        return self._result()

    def _step(self) -> bool:
        """One round: connect, fill, note, send, listen; False when everything is answered."""
        open_links = [link for link in self._links if not link.done]
        if not open_links:
            return False
        self._connect(open_links)
        self._fill(open_links)
        self._history.flush()  # the claim is on disk before its bytes are on the wire
        for link in open_links:
            self._push(link)
        self._listen()
        if self._progress is not None:
            self._progress(
                sum(link.sender.next for link in self._links), sum(link.sender.acked for link in self._links)
            )
        return True

    def _connect(self, links: list[_Link]) -> None:
        for link in links:
            if link.sock is None and time.monotonic() >= link.retry_at:
                try:
                    again = link.open()
                except Unreachable:
                    if self._never_connected():
                        raise
                    link.close()
                    return  # one failure a round is enough: the others meet the same broker
                self._welcome(link, again)

    def _welcome(self, link: _Link, again: list[int]) -> None:
        self._history.note_all(SenderRecord.RESENT, link.sender.publisher, again)
        self._resent += len(again)
        if link.sock is not None:
            self._selector.register(link.sock, selectors.EVENT_READ, link)

    def _never_connected(self) -> bool:
        patience = min(_FIRST_CONNECT_S, self._plan.seconds / 2)
        return time.monotonic() - self._began > patience and not any(link.connections for link in self._links)

    def _fill(self, links: list[_Link]) -> None:
        allowed = self._allowed()
        ready = [link for link in links if link.sock is not None and len(link.out) < _RECV and link.sender.room() > 0]
        # The links take turns at the front, so that a rate below one burst a round is still spread over all devices.
        turn = int(time.monotonic() * 1000) % max(1, len(ready))
        each = min(_BURST, -(-allowed // max(1, len(ready))), max(1, _BURST_BYTES // self._plan.size))
        for link in ready[turn:] + ready[:turn]:
            data, first, count = link.sender.burst(min(each, allowed))
            if count:
                link.out += data
                self._history.note(SenderRecord.ATTEMPTED, link.sender.publisher, first, count)
                allowed -= count

    def _allowed(self) -> int:
        if not self._plan.rate:
            return self._plan.messages
        due = int((time.monotonic() - self._began) * self._plan.rate)
        return max(0, due - sum(link.sender.next for link in self._links))

    def _push(self, link: _Link) -> None:
        if link.sock is None:
            return
        try:
            link.push()
            self._selector.modify(link.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.out else 0), link)
        except OSError:
            self._drop(link)

    def _listen(self) -> None:
        if self._plan.rate:  # paced loads act in ticks, or each answer would cost a round of its own
            time.sleep(max(0.0, _TICK_S - (time.monotonic() - self._began) % _TICK_S))
        for key, mask in self._selector.select(0 if self._plan.rate else 0.02):
            link: _Link = key.data
            if mask & selectors.EVENT_READ:
                self._receive(link)

    def _receive(self, link: _Link) -> None:
        assert link.sock is not None
        try:
            data = link.sock.recv(_RECV)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        answers = link.sender.feed(data)
        link.out += answers.reply
        self._history.note_all(SenderRecord.ACKED, link.sender.publisher, answers.acked)
        self._history.note_all(SenderRecord.REFUSED, link.sender.publisher, answers.refused)
        if not data or answers.closed is not None:
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        if link.sock is not None:
            self._selector.unregister(link.sock)
        link.close()

    def _end(self) -> None:
        for link in self._links:
            if link.sock is not None and link.done:
                with suppress(OSError):
                    link.sock.settimeout(5)
                    link.sock.sendall(DisconnectPacket().write())
            if link.sock is not None:
                link.sock.close()
        self._selector.close()
        self._history.flush()

    def _result(self) -> LoadResult:
        senders = [link.sender for link in self._links]
        return LoadResult(
            attempted=sum(sender.next for sender in senders),
            acked=sum(sender.acked for sender in senders),
            refused=sum(sender.refused for sender in senders),
            resent=self._resent,
            reconnects=sum(max(0, link.connections - 1) for link in self._links),
            seconds=time.monotonic() - self._began,
        )


def run_load(
    plan: LoadPlan,
    history: Path,
    *,
    stop: threading.Event | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadResult:
    """Run a load until everything is answered, its time is up, or `stop` is set.

    Args:
        plan: What to send and where.
        history: File for the claims; must not exist.
        stop: Set it to end early.
        progress: Called after every round with (attempted, acked).

    Raises:
        ConfigError: The history exists already (TL-C81).
        Refused: The broker refuses the connection (TL-M61).
        Unreachable: No connection was ever made within the first ten seconds (TL-M60).
    """
    with HistoryWriter(history, plan.public()) as writer:
        return _Load(plan, writer, progress).run(stop)
