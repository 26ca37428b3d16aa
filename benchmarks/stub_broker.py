"""A broker that only measures: it speaks just enough MQTT 5 to feed one gateway and to time its acknowledgements."""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Self

import mqtt5
from mqtt5 import ConnAckPacket, ConnectPacket, PubAckPacket, PublishPacket, QoS, SubAckPacket, SubscribePacket

IDS = 65_535


def message(packet_id: int, size: int = 150) -> bytes:
    """One QoS 1 PUBLISH."""
    return PublishPacket("telemetry/d01/data", b"x" * size, qos=QoS.AT_LEAST_ONCE, packet_id=packet_id).write()


@dataclass
class StubBroker:
    """Waits for one client at a time.

    Attributes:
        port: On loopback.
        acked: PUBACKs received since `accept`.
        first_ack: When the first one came, `time.monotonic`.
    """

    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    acked: int = 0
    first_ack: float = 0.0
    window: int = IDS
    present: bool = False
    _sock: socket.socket | None = None
    _rest: bytes = b""
    _encoded: list[bytes] = field(default_factory=list)
    sent_at: dict[int, float] = field(default_factory=dict)
    delays: list[float] = field(default_factory=list)

    @property
    def port(self) -> int:
        """Where the gateway connects."""
        return int(self.listener.getsockname()[1])

    def __enter__(self) -> Self:
        self._encoded = [b"", *(message(number) for number in range(1, IDS + 1))]
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.listener.close()

    def close(self) -> None:
        """Drop the client."""
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def accept(self, seconds: float = 30.0) -> Self:
        """Take the next client up to its SUBACK; a session that was there before is told as present."""
        self.acked, self.first_ack, self._rest = 0, 0.0, b""
        self.listener.settimeout(seconds)
        self._sock, _ = self.listener.accept()
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.settimeout(seconds)
        self.window = min(IDS, self._expect(ConnectPacket).receive_max)
        self._sock.sendall(ConnAckPacket(session_present=self.present).write())
        if not self.present:
            self.suback()
        self.present = True
        return self

    def suback(self) -> None:
        """Wait for SUBSCRIBE and grant it."""
        self._grant(self._expect(SubscribePacket))

    def _grant(self, packet: SubscribePacket) -> None:
        assert self._sock is not None
        codes = [mqtt5.SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE for _ in packet.topic_filters]
        self._sock.sendall(SubAckPacket(packet.packet_id, codes).write())

    def _expect(self, kind: type[Any]) -> Any:
        while True:
            for packet in self._packets():
                if isinstance(packet, kind):
                    return packet
            self._rest += self._receive()

    def _receive(self) -> bytes:
        assert self._sock is not None
        data = self._sock.recv(1 << 20)
        if not data:
            raise ConnectionResetError("the gateway has gone")
        return data

    def _packets(self) -> list[Any]:
        view, at = memoryview(self._rest), 0
        packets: list[Any] = []
        while at < len(view):
            try:
                packet, used = mqtt5.read(view[at:])
            except IndexError:
                break
            at += used
            packets.append(packet)
        self._rest = bytes(view[at:])
        return packets

    def _take(self) -> None:
        data = self._receive()
        if not self._rest and not self.sent_at and self._count(data):
            return
        self._rest += data
        now = time.monotonic()
        for packet in self._packets():
            if isinstance(packet, PubAckPacket):
                self.first_ack = self.first_ack or now
                self.acked += 1
                sent = self.sent_at.pop(packet.packet_id, None)
                if sent is not None:
                    self.delays.append(now - sent)
            elif isinstance(packet, SubscribePacket):
                self._grant(packet)

    def _count(self, data: bytes) -> bool:
        """Take a chunk of nothing but plain PUBACKs by its length; False when it is anything else."""
        count, odd = divmod(len(data), 4)
        if odd or data[0::4] != b"\x40" * count or data[1::4] != b"\x02" * count:
            return False
        self.first_ack = self.first_ack or time.monotonic()
        self.acked += count
        return True

    def push(self, count: int, seconds: float = 600.0) -> float:
        """Send as fast as the window allows and wait for every acknowledgement; seconds it took."""
        assert self._sock is not None
        size = len(self._encoded[1])
        block = memoryview(b"".join(self._encoded))
        began, sent, goal = time.monotonic(), 0, self.acked + count
        start = self.acked
        self._sock.settimeout(0)
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while self.acked < goal and time.monotonic() - began < seconds:
                allowed = min(count, self.acked - start + self.window) * size - sent
                place = sent % len(block)
                out = block[place : place + min(allowed, 1 << 20)]
                selector.modify(self._sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0))
                for _, mask in selector.select(1.0):
                    if mask & selectors.EVENT_READ:
                        self._take()
                    if mask & selectors.EVENT_WRITE:
                        sent += self._sock.send(out)
        return time.monotonic() - began

    def pace(self, rate: float, seconds: float) -> list[float]:
        """Send at a rate, one by one, and time each acknowledgement; the delays in seconds."""
        assert self._sock is not None
        self.delays, began, sent = [], time.monotonic(), 0
        total = self.acked + int(rate * seconds)
        first = self.acked
        self._sock.settimeout(0.2)
        while self.acked < total:
            due = min(total - first, int((time.monotonic() - began) * rate) + 1)
            for number in range(sent, due):
                packet_id = number % IDS + 1
                self.sent_at[packet_id] = time.monotonic()
                self._sock.sendall(self._encoded[packet_id])
            sent = due
            self._wait_readable(0.0002)
        return self.delays

    def _wait_readable(self, seconds: float) -> None:
        assert self._sock is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            if selector.select(seconds):
                self._take()
