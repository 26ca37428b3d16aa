"""Load generator: numbered messages from many devices to a broker, with a claim on disk before and after each.

One thread drives all publishers: the load must leave the two cores to the processes under test. A lost connection is
opened again until the plan's time is up, and the session resumes (Clean Start 0, expiry > 0).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mqtt5
from mqtt5 import ConnAckPacket, ConnectPacket, DisconnectPacket, PublishPacket, PubRelPacket, QoS

from towline.errors import BrokerRefused, ConfigError, Unreachable
from towline_prove.history import MIN_SIZE, HistoryWriter, SenderClaim, encoder

_MAX_PACKET_ID = 65535
_FIRST_ERROR_CODE = 0x80
_BURST_MESSAGES = 256
#: Bytes encoded at a time, unless it is one message.
_BURST_BYTES = 1 << 22
#: Payload bytes: the longest MQTT packet has 268,435,455 behind its fixed header [MQTT-1.5.5], less room for a topic.
_MAX_PAYLOAD_BYTES = 268_000_000
_RECEIVE_BYTES = 1 << 18
_RETRY_S = 0.2
_TICK_S = 0.005
#: Most seconds of a pause that a publisher with receipts makes up for.
_MAX_CATCH_UP_S = 0.05
#: A broker that never answered within this time was never there; later losses are part of the run.
_FIRST_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Plan of a bounded load.

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
        rules = [
            (not 1 <= self.publishers <= 1000, "publishers is from 1 to 1000"),
            (self.devices < self.publishers, "devices is at least publishers, so that each device has one author"),
            (not 1 <= self.messages <= 100_000_000, "messages is from 1 to 100,000,000"),
            (self.qos not in {0, 1, 2}, "qos is 0, 1 or 2"),
            (
                not MIN_SIZE <= self.size <= _MAX_PAYLOAD_BYTES,
                f"size is from {MIN_SIZE} to {_MAX_PAYLOAD_BYTES:,} bytes",
            ),
            (self.rate < 0 or self.seconds <= 0, "rate is at least 0 and seconds above 0"),
            ("{device}" not in self.topic, "topic holds {device}"),
            (not 1 <= self.window <= 65_535, "window is from 1 to 65,535"),
        ]
        for broken, rule in rules:
            if broken:
                raise ConfigError("TL-C80", "load", f"not a load that can be run: {rule}", "Change that option.")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load.

    Attributes:
        acked: Messages whose flow was completed by the broker.
        reconnects: Connections after the first one of each publisher.
    """

    attempted: int
    acked: int
    refused: int
    resent: int
    reconnects: int
    seconds: float


def devices_of_publisher(publisher: int, publishers: int, devices: int) -> list[str]:
    """Return the devices that this publisher alone sends for, so that order per device has one author."""
    width = len(str(devices - 1))
    return [f"d{index:0{width}}" for index in range(publisher, devices, publishers)]


def message_share(publisher: int, publishers: int, messages: int) -> int:
    """Return this publisher's number of messages; the first publishers take the remainder."""
    return messages // publishers + (publisher < messages % publishers)


@dataclass(slots=True)
class BrokerAnswers:
    """Answers in one chunk of bytes from the broker.

    Attributes:
        acked_numbers: Numbers whose flow is complete.
        refused_numbers: Numbers that the broker answered with a reason >= 0x80; it will never deliver them.
        reply_bytes: Bytes to send in reply (PUBREL).
        disconnect_reason: Reason code of a DISCONNECT from the server, if one came.
    """

    acked_numbers: list[int] = field(default_factory=list)
    refused_numbers: list[int] = field(default_factory=list)
    reply_bytes: bytearray = field(default_factory=bytearray)
    disconnect_reason: int | None = None


@dataclass(slots=True)
class _UnackedMessage:
    number: int
    pubrec_received: bool = False


class NumberedSender:
    """One publisher's numbers, from 0 on, as MQTT 5 bytes without a socket: messages, answers and resends.

    Deliberately not the product's Session: the referee of a client must not be that client. Its rules: never
    more unacknowledged messages than the server's Receive Maximum [MQTT-3.3.4-9]; after a resume everything unfinished
    again with its packet id and DUP, in the original order [MQTT-4.4.0-1, MQTT-4.6.0-1]; never PUBLISH again after
    PUBREC [MQTT-4.3.3-6]; state is dropped when the server has none [MQTT-3.2.2-5], and unfinished messages are then
    published as new ones, as an application would.

    Args:
        plan: Plan of the whole load.
        publisher: Number of the publisher, from 0.
    """

    def __init__(self, plan: LoadPlan, publisher: int) -> None:
        self.publisher = publisher
        self.total = message_share(publisher, plan.publishers, plan.messages)
        self.next_number = self.acked_count = self.refused_count = 0
        self._qos = QoS(plan.qos)
        self._devices = devices_of_publisher(publisher, plan.publishers, plan.devices)
        self._topics = [plan.topic.format(device=device) for device in self._devices]
        self._encode = encoder(plan.run, publisher, plan.size)
        self._max_window = self._window = plan.window
        self._unacked_messages: dict[int, _UnackedMessage] = {}
        self._packet_ids = itertools.cycle(range(1, _MAX_PACKET_ID + 1))
        self._partial_packet = b""

    @property
    def is_done(self) -> bool:
        """True if all messages are sent and, above QoS 0, answered."""
        return self.next_number == self.total and not self._unacked_messages

    def resume(self, connack: ConnAckPacket) -> tuple[bytes, list[int]]:
        """Return bytes to send first on a new connection, and the numbers of repeated messages in them."""
        self._partial_packet = b""
        self._window = min(self._max_window, connack.receive_max)
        messages = list(self._unacked_messages.items())
        if not connack.session_present:  # [MQTT-3.2.2-5]: nothing of the old flows may go on
            for _, message in messages:
                message.pubrec_received = False
        packets = [self._resend(packet_id, message, dup=connack.session_present) for packet_id, message in messages]
        return b"".join(packets), [message.number for _, message in messages if not message.pubrec_received]

    def _resend(self, packet_id: int, message: _UnackedMessage, *, dup: bool) -> bytes:
        if message.pubrec_received:
            return PubRelPacket(packet_id).write()
        return self._encode_one(packet_id, message.number, dup=dup)

    def _encode_one(self, packet_id: int | None, number: int, *, dup: bool = False) -> bytes:
        index = number % len(self._devices)
        payload = self._encode(number, self._devices[index], time.time_ns())
        return PublishPacket(self._topics[index], payload, qos=self._qos, packet_id=packet_id, duplicate=dup).write()

    def sendable_count(self) -> int:
        """Return the number of messages that may be sent now."""
        unsent_count = self.total - self.next_number
        return unsent_count if self._qos == 0 else min(unsent_count, self._window - len(self._unacked_messages))

    def encode_burst(self, limit: int) -> tuple[bytes, int, int]:
        """Return the bytes of the next messages, their first number and their count."""
        count = max(0, min(limit, self.sendable_count()))
        numbers = range(self.next_number, self.next_number + count)
        self.next_number += count
        if self._qos == 0:
            return b"".join(self._encode_one(None, number) for number in numbers), numbers.start, count
        return b"".join(map(self._encode_next, numbers)), numbers.start, count

    def _encode_next(self, number: int) -> bytes:
        packet_id = next(candidate for candidate in self._packet_ids if candidate not in self._unacked_messages)
        self._unacked_messages[packet_id] = _UnackedMessage(number)
        return self._encode_one(packet_id, number)

    def feed(self, data: bytes) -> BrokerAnswers:
        """Decode bytes from the broker and return its answers."""
        answers = BrokerAnswers()
        for packet in self._read_packets(data):
            match packet:
                case mqtt5.PubAckPacket():
                    self._finish_message(packet.packet_id, int(packet.reason_code), answers)
                case mqtt5.PubRecPacket() if int(packet.reason_code) >= _FIRST_ERROR_CODE:
                    self._finish_message(packet.packet_id, int(packet.reason_code), answers)
                case mqtt5.PubRecPacket():
                    if (message := self._unacked_messages.get(packet.packet_id)) is not None:
                        message.pubrec_received = True
                    answers.reply_bytes += PubRelPacket(packet.packet_id).write()
                case mqtt5.PubCompPacket():
                    # "Packet id not found" ends the flow as well: the server has nothing more to do [MQTT-4.3.3-11].
                    self._finish_message(packet.packet_id, 0, answers)
                case DisconnectPacket():
                    answers.disconnect_reason = int(packet.reason_code)
        self.acked_count += len(answers.acked_numbers)
        self.refused_count += len(answers.refused_numbers)
        return answers

    def _read_packets(self, data: bytes) -> Iterator[object]:
        view = memoryview(self._partial_packet + data)
        position = 0
        while position < len(view):
            try:
                packet, packet_size = mqtt5.read(view[position:])
            except IndexError:  # the packet is incomplete
                break
            position += packet_size
            yield packet
        self._partial_packet = bytes(view[position:])

    def _finish_message(self, packet_id: int, reason: int, answers: BrokerAnswers) -> None:
        message = self._unacked_messages.pop(packet_id, None)
        if message is not None:
            (answers.refused_numbers if reason >= _FIRST_ERROR_CODE else answers.acked_numbers).append(message.number)


def connect(
    packet: ConnectPacket, host: str, port: int, *, timeout: float = 10.0, tls: ssl.SSLContext | None = None
) -> tuple[socket.socket, ConnAckPacket, bytes]:
    """Open a connection, send CONNECT, and return the blocking socket, the CONNACK and the bytes behind it.

    Raises:
        Unreachable: No TCP connection or no CONNACK within `timeout` seconds (TL-M60).
        BrokerRefused: The broker answered with an error (TL-M61).
    """
    location = f"mqtt://{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
    except OSError as error:
        raise Unreachable("TL-M60", location, f"no connection ({error})", "Is the broker running?") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = sock if tls is None else tls.wrap_socket(sock)
        sock.sendall(packet.write())
        connack, rest = _await_connack(sock)
    except (OSError, ValueError) as error:
        sock.close()
        raise Unreachable("TL-M60", location, f"no CONNACK ({error})", "Does the broker speak MQTT 5?") from error
    if connack.reason_code != mqtt5.ConnAckReasonCode.SUCCESS:
        sock.close()
        problem = f"refused with {connack.reason_code.name}"
        raise BrokerRefused("TL-M61", location, problem, "Check user name and rights.")
    sock.settimeout(None)
    return sock, connack, rest


def _await_connack(sock: socket.socket) -> tuple[ConnAckPacket, bytes]:
    data = b""
    while True:
        chunk = sock.recv(65536)
        if not chunk:
            raise ConnectionResetError("closed before CONNACK")
        data += chunk
        with suppress(IndexError):
            packet, packet_size = mqtt5.read(memoryview(data))
            if not isinstance(packet, ConnAckPacket):
                raise ConnectionError(f"{type(packet).__name__} before CONNACK")
            return packet, data[packet_size:]


class _LoadRun:
    def __init__(self, plan: LoadPlan, history: HistoryWriter) -> None:
        self._plan = plan
        self._history = history
        self._senders = [NumberedSender(plan, publisher) for publisher in range(plan.publishers)]
        self._burst_messages = max(1, min(_BURST_MESSAGES, _BURST_BYTES // plan.size))
        self._began_at = time.monotonic()
        self._resent_count = 0
        #: Connections made, by publisher.
        self._connection_counts: Counter[int] = Counter()

    async def run(self, stop: threading.Event | None) -> LoadResult:
        """Publish until everything is answered, time is up or `stop` is set."""
        publish_tasks = asyncio.gather(*map(self._publish_all, self._senders))
        while not (publish_tasks.done() or self._elapsed >= self._plan.seconds or (stop is not None and stop.is_set())):
            await asyncio.wait([publish_tasks], timeout=_RETRY_S)
        publish_tasks.cancel()  # nothing, where it is done
        with suppress(asyncio.CancelledError):
            await publish_tasks
        return LoadResult(
            attempted=sum(sender.next_number for sender in self._senders),
            acked=sum(sender.acked_count for sender in self._senders),
            refused=sum(sender.refused_count for sender in self._senders),
            resent=self._resent_count,
            reconnects=self._connection_counts.total() - len(self._connection_counts),
            seconds=self._elapsed,
        )

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began_at

    async def _publish_all(self, sender: NumberedSender) -> None:
        """Connect, and reconnect after a loss, until all messages of the sender are answered."""
        plan = self._plan
        hello = ConnectPacket(f"prove-{plan.run}-{sender.publisher}", clean_start=False, session_expiry_interval=3600)
        while not sender.is_done:
            try:
                sock, connack, rest = await asyncio.to_thread(connect, hello, plan.host, plan.port, timeout=5.0)
            except Unreachable:
                if self._elapsed > min(_FIRST_CONNECT_S, plan.seconds / 2) and not self._connection_counts:
                    raise
            else:
                self._connection_counts[sender.publisher] += 1
                await self._use_connection(sender, sock, connack, rest)
            if not sender.is_done:
                await asyncio.sleep(_RETRY_S)

    async def _use_connection(
        self, sender: NumberedSender, sock: socket.socket, connack: ConnAckPacket, rest: bytes
    ) -> None:
        """Send messages and read answers on one connection until it ends."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=_RECEIVE_BYTES)
        answer_event = asyncio.Event()
        data, resent_numbers = sender.resume(connack)
        self._history.add_claims(SenderClaim.RESENT, sender.publisher, resent_numbers)
        self._resent_count += len(resent_numbers)
        self._history.flush()
        writer.write(data + sender.feed(rest).reply_bytes)
        tasks = [
            asyncio.create_task(self._send_bursts(sender, writer, answer_event)),
            asyncio.create_task(self._read_answers(sender, reader, writer, answer_event)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            if sender.is_done:
                writer.close()
            else:
                writer.transport.abort()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result

    async def _send_bursts(
        self, sender: NumberedSender, writer: asyncio.StreamWriter, answer_event: asyncio.Event
    ) -> None:
        """Send messages in bursts as the plan allows, until all are answered."""
        while not sender.is_done:
            data, first_number, count = sender.encode_burst(min(self._burst_messages, self._due_count(sender)))
            if count:
                self._history.add_claim(SenderClaim.ATTEMPTED, sender.publisher, first_number, count)
                self._history.flush()  # the claim is on disk before its bytes are on the wire
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)  # the answers come meanwhile
            elif self._plan.rate:  # paced loads act in ticks, or each answer would cost a round of its own
                await asyncio.sleep(_TICK_S - self._elapsed % _TICK_S)
            else:
                answer_event.clear()
                await answer_event.wait()
        writer.write(DisconnectPacket().write())
        await writer.drain()

    def _due_count(self, sender: NumberedSender) -> int:
        """Return the number of due messages of the sender; the senders take turns within the time of one message."""
        if not self._plan.rate:
            return sender.total
        due_share = self._elapsed * self._plan.rate * sender.total / self._plan.messages
        return max(0, int(due_share + sender.publisher / self._plan.publishers) - sender.next_number)

    async def _read_answers(
        self,
        sender: NumberedSender,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer_event: asyncio.Event,
    ) -> None:
        """Read answers until the broker ends the connection."""
        while data := await reader.read(_RECEIVE_BYTES):
            answers = sender.feed(data)
            self._history.add_claims(SenderClaim.ACKED, sender.publisher, answers.acked_numbers)
            self._history.add_claims(SenderClaim.REFUSED, sender.publisher, answers.refused_numbers)
            self._history.flush()
            writer.write(answers.reply_bytes)
            answer_event.set()
            if answers.disconnect_reason is not None:
                return


def run_load(plan: LoadPlan, history: Path, *, stop: threading.Event | None = None) -> LoadResult:
    """Run a load until everything is answered, its time is up, or `stop` is set.

    Raises:
        ConfigError: The history exists already (TL-C81).
        BrokerRefused: The broker refuses the connection (TL-M61).
        Unreachable: No connection was ever made within the first ten seconds (TL-M60).
    """
    with HistoryWriter(history, asdict(plan)) as writer:
        return asyncio.run(_LoadRun(plan, writer).run(stop))


def publish_with_receipts(plan: LoadPlan, history: Path, outbox: Path, key_file: Path) -> int:
    """Publish numbered messages with receipts and return 0 when all have theirs; a restart continues after a kill.

    A message counts as acknowledged when `Publisher.publish` has returned. At the end the receipt counts are printed as
    JSON. The plan's `messages` is the total of all starts, `history` a new file for each.
    """
    from towline.publisher import Publisher  # noqa: PLC0415  the devstack needs only `connect`

    devices = devices_of_publisher(0, 1, plan.devices)
    encode = encoder(plan.run, 0, plan.size)
    broker = f"mqtt://{plan.host}:{plan.port}"
    with HistoryWriter(history, asdict(plan)) as claims:
        publisher = Publisher(broker, state_dir=outbox, receipts=True, receipt_key_file=key_file, receipt_patience_s=2)
        number = publisher.status()["accepted"]
        last_check_at, due_messages = time.monotonic(), 0.0
        while publisher.flush(0) or number < plan.messages:
            now = time.monotonic()
            due_messages, last_check_at = due_messages + min(now - last_check_at, _MAX_CATCH_UP_S) * plan.rate, now
            while number < plan.messages and due_messages >= 1:
                device = devices[number % len(devices)]
                claims.add_claim(SenderClaim.ATTEMPTED, 0, number)
                claims.flush()  # before it may be on its way
                payload = encode(number, device, time.time_ns())
                publisher.publish(plan.topic.format(device=device), payload, qos=plan.qos)
                claims.add_claim(SenderClaim.ACKED, 0, number)
                number, due_messages = number + 1, due_messages - 1
            claims.flush()
            time.sleep(0.01)
        sys.stdout.write(json.dumps(publisher.status()["receipts"]) + "\n")
        return 1 if publisher.close() else 0
