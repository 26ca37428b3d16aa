"""Numbered messages from many devices to a broker, with a claim on disk for each before and after.

One thread drives all publishers: the load must leave the two cores to what is measured. A lost
connection is made anew until the plan's time is up, and the session resumes (Clean Start 0, expiry > 0).
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mqtt5
from mqtt5 import (
    ConnAckPacket,
    ConnectPacket,
    DisconnectPacket,
    PubAckPacket,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
    QoS,
)

from towline.errors import ConfigError, Refused, Unreachable
from towline_prove.history import HistoryWriter, SenderRecord
from towline_prove.numbered import MIN_SIZE, encoder

_LAST_ID = 65535
_REFUSAL = 0x80
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
        port: The broker's port, plain TCP.
        host: The broker's host.
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
    """

    port: int = 1883
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


def own_devices(publisher: int, publishers: int, devices: int) -> list[str]:
    """Devices that this publisher alone speaks for, so that order per device has one author."""
    width = len(str(devices - 1))
    return [f"d{index:0{width}}" for index in range(publisher, devices, publishers)]


def share(publisher: int, publishers: int, messages: int) -> int:
    """How many of all messages this publisher sends; the first ones take the remainder."""
    return messages // publishers + (publisher < messages % publishers)


@dataclass(slots=True)
class Answers:
    """What one chunk of bytes from the broker says.

    Attributes:
        acked: Numbers whose flow is complete.
        refused: Numbers the broker answered with a reason >= 0x80; it will never deliver them.
        reply: Bytes that must go back (PUBREL).
        closed: Reason code of a DISCONNECT from the server, if one came.
    """

    acked: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    reply: bytearray = field(default_factory=bytearray)
    closed: int | None = None


@dataclass(slots=True)
class _Open:
    number: int
    released: bool = False


class NumberedSender:
    """One publisher's numbers, from 0 on, as MQTT 5 bytes, without a socket: messages out, answers in, resends.

    Deliberately not the product's Session: the judge of a client must not be that client. The rules it keeps: never
    more unacknowledged messages than the server's Receive Maximum [MQTT-3.3.4-9]; after a resume everything unfinished
    again with its packet id and DUP, in the original order [MQTT-4.4.0-1, MQTT-4.6.0-1]; never PUBLISH again after
    PUBREC [MQTT-4.3.3-6]; state is dropped when the server has none [MQTT-3.2.2-5], and what was unfinished is then
    published anew, as an application would.

    Args:
        plan: Of the whole load.
        publisher: Its number in it, from 0.
    """

    def __init__(self, plan: LoadPlan, publisher: int) -> None:
        self.publisher = publisher
        self.total = share(publisher, plan.publishers, plan.messages)
        self.next = self.acked = self.refused = 0
        self._qos = QoS(plan.qos)
        self._devices = own_devices(publisher, plan.publishers, plan.devices)
        self._topics = [plan.topic.format(device=device) for device in self._devices]
        self._encode = encoder(plan.run, publisher, plan.size)
        self._wanted_window = self._window = plan.window
        self._open: dict[int, _Open] = {}
        self._ids = itertools.cycle(range(1, _LAST_ID + 1))
        self._rest = b""

    @property
    def done(self) -> bool:
        """Everything is sent and, above QoS 0, answered."""
        return self.next == self.total and not self._open

    def connected(self, connack: ConnAckPacket) -> tuple[bytes, list[int]]:
        """Begin on a new connection.

        Returns:
            Bytes to send first, and the numbers among them that are published a second time.
        """
        self._rest = b""
        self._window = min(self._wanted_window, connack.receive_max)
        waiting = list(self._open.items())
        if not connack.session_present:  # [MQTT-3.2.2-5]: nothing of the old flows may go on
            for _, entry in waiting:
                entry.released = False
        out = [self._again(packet_id, entry, dup=connack.session_present) for packet_id, entry in waiting]
        return b"".join(out), [entry.number for _, entry in waiting if not entry.released]

    def _again(self, packet_id: int, entry: _Open, *, dup: bool) -> bytes:
        if entry.released:
            return PubRelPacket(packet_id).write()
        return self._publish(packet_id, entry.number, dup=dup)

    def _publish(self, packet_id: int | None, number: int, *, dup: bool = False) -> bytes:
        turn = number % len(self._devices)
        payload = self._encode(number, self._devices[turn], time.time_ns())
        return PublishPacket(self._topics[turn], payload, qos=self._qos, packet_id=packet_id, duplicate=dup).write()

    def room(self) -> int:
        """How many messages may be sent now."""
        left = self.total - self.next
        return left if self._qos == 0 else min(left, self._window - len(self._open))

    def burst(self, limit: int) -> tuple[bytes, int, int]:
        """Encode the next messages.

        Returns:
            The bytes, the first number in them, and how many.
        """
        first = self.next
        count = max(0, min(limit, self.room()))
        self.next += count
        if self._qos == 0:
            return b"".join(self._publish(None, number) for number in range(first, self.next)), first, count
        return b"".join(map(self._new, range(first, self.next))), first, count

    def _new(self, number: int) -> bytes:
        packet_id = next(candidate for candidate in self._ids if candidate not in self._open)
        self._open[packet_id] = _Open(number)
        return self._publish(packet_id, number)

    def feed(self, data: bytes) -> Answers:
        """Take bytes from the broker in."""
        answers = Answers()
        for packet in self._packets(data):
            match packet:
                case PubAckPacket():
                    self._finish(packet.packet_id, int(packet.reason_code), answers)
                case PubRecPacket() if int(packet.reason_code) >= _REFUSAL:
                    self._finish(packet.packet_id, int(packet.reason_code), answers)
                case PubRecPacket():
                    if (entry := self._open.get(packet.packet_id)) is not None:
                        entry.released = True
                    answers.reply += PubRelPacket(packet.packet_id).write()
                case PubCompPacket():
                    # "Packet id not found" ends the flow as well: the server has nothing more to do [MQTT-4.3.3-11].
                    self._finish(packet.packet_id, 0, answers)
                case DisconnectPacket():
                    answers.closed = int(packet.reason_code)
        self.acked += len(answers.acked)
        self.refused += len(answers.refused)
        return answers

    def _packets(self, data: bytes) -> Iterator[object]:
        view = memoryview(self._rest + data)
        at = 0
        while at < len(view):
            try:
                packet, used = mqtt5.read(view[at:])
            except IndexError:  # the codec's word for "not whole yet"
                break
            at += used
            yield packet
        self._rest = bytes(view[at:])

    def _finish(self, packet_id: int, reason: int, answers: Answers) -> None:
        entry = self._open.pop(packet_id, None)
        if entry is not None:
            (answers.refused if reason >= _REFUSAL else answers.acked).append(entry.number)


def connect(
    packet: ConnectPacket, host: str, port: int, *, timeout: float = 10.0, tls: ssl.SSLContext | None = None
) -> tuple[socket.socket, ConnAckPacket, bytes]:
    """Open a connection and wait for CONNACK.

    Args:
        packet: What is sent first.
        host: The broker's host.
        port: The broker's port.
        timeout: Longest wait for a connection and for the answer, in seconds.
        tls: How to speak TLS; None for plain TCP.

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
        sock = sock if tls is None else tls.wrap_socket(sock)
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


class _Load:
    def __init__(self, plan: LoadPlan, history: HistoryWriter) -> None:
        self._plan = plan
        self._history = history
        self._senders = [NumberedSender(plan, publisher) for publisher in range(plan.publishers)]
        self._burst = max(1, min(_BURST, _BURST_BYTES // plan.size))
        self._began = time.monotonic()
        self._resent = 0
        #: Connections made, by publisher.
        self._connections: Counter[int] = Counter()

    async def run(self, stop: threading.Event | None) -> LoadResult:
        """Publish until everything is answered, time is up or `stop` is set."""
        publishing = asyncio.gather(*map(self._publish, self._senders))
        while not publishing.done() and self._elapsed < self._plan.seconds and not (stop is not None and stop.is_set()):
            await asyncio.wait([publishing], timeout=_RETRY_S)
        publishing.cancel()  # nothing, where it is done
        with suppress(asyncio.CancelledError):
            await publishing
        return LoadResult(
            attempted=sum(sender.next for sender in self._senders),
            acked=sum(sender.acked for sender in self._senders),
            refused=sum(sender.refused for sender in self._senders),
            resent=self._resent,
            reconnects=self._connections.total() - len(self._connections),
            seconds=self._elapsed,
        )

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    async def _publish(self, sender: NumberedSender) -> None:
        """Connect, and again where that is lost, until all of the sender's messages are answered."""
        client_id = f"prove-{self._plan.run}-{sender.publisher}"
        hello = ConnectPacket(client_id, clean_start=False, session_expiry_interval=3600)
        while not sender.done:
            try:
                sock, connack, rest = await asyncio.to_thread(
                    connect, hello, self._plan.host, self._plan.port, timeout=5.0
                )
            except Unreachable:
                if self._elapsed > min(_FIRST_CONNECT_S, self._plan.seconds / 2) and not self._connections:
                    raise
            else:
                self._connections[sender.publisher] += 1
                await self._converse(sender, sock, connack, rest)
            if not sender.done:
                await asyncio.sleep(_RETRY_S)

    async def _converse(self, sender: NumberedSender, sock: socket.socket, connack: ConnAckPacket, rest: bytes) -> None:
        """Send and listen on one connection until it ends."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=_RECV)
        answered = asyncio.Event()
        data, again = sender.connected(connack)
        self._history.note_all(SenderRecord.RESENT, sender.publisher, again)
        self._resent += len(again)
        self._history.flush()
        writer.write(data + sender.feed(rest).reply)
        both = [
            asyncio.create_task(self._send(sender, writer, answered)),
            asyncio.create_task(self._listen(sender, reader, writer, answered)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            ends = await asyncio.gather(*both, return_exceptions=True)
            if sender.done:
                writer.close()
            else:
                writer.transport.abort()
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, OSError):
                raise end

    async def _send(self, sender: NumberedSender, writer: asyncio.StreamWriter, answered: asyncio.Event) -> None:
        """Send what the plan allows now, in bursts, until all is answered."""
        while not sender.done:
            data, first, count = sender.burst(min(self._burst, self._allowed(sender)))
            if count:
                self._history.note(SenderRecord.ATTEMPTED, sender.publisher, first, count)
                self._history.flush()  # the claim is on disk before its bytes are on the wire
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)  # the answers come meanwhile
            elif self._plan.rate:  # paced loads act in ticks, or each answer would cost a round of its own
                await asyncio.sleep(_TICK_S - self._elapsed % _TICK_S)
            else:
                answered.clear()
                await answered.wait()
        writer.write(DisconnectPacket().write())
        await writer.drain()

    def _allowed(self, sender: NumberedSender) -> int:
        """How many more messages of the sender are due; the senders take turns within the time of one message."""
        if not self._plan.rate:
            return sender.total
        share = self._elapsed * self._plan.rate * sender.total / self._plan.messages
        return max(0, int(share + sender.publisher / self._plan.publishers) - sender.next)

    async def _listen(
        self,
        sender: NumberedSender,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answered: asyncio.Event,
    ) -> None:
        """Take answers in until the broker ends the connection."""
        while data := await reader.read(_RECV):
            answers = sender.feed(data)
            self._history.note_all(SenderRecord.ACKED, sender.publisher, answers.acked)
            self._history.note_all(SenderRecord.REFUSED, sender.publisher, answers.refused)
            self._history.flush()
            writer.write(answers.reply)
            answered.set()
            if answers.closed is not None:
                return


def run_load(plan: LoadPlan, history: Path, *, stop: threading.Event | None = None) -> LoadResult:
    """Run a load until everything is answered, its time is up, or `stop` is set.

    Args:
        plan: What to send and where.
        history: File for the claims; must not exist.
        stop: Set it to end early.

    Raises:
        ConfigError: The history exists already (TL-C81).
        Refused: The broker refuses the connection (TL-M61).
        Unreachable: No connection was ever made within the first ten seconds (TL-M60).
    """
    with HistoryWriter(history, asdict(plan)) as writer:
        return asyncio.run(_Load(plan, writer).run(stop))
