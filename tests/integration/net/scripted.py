"""A server that does what a test tells it, packet by packet, on a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Self, TypeVar

from mqtt5 import ConnAckPacket, ConnectPacket, Packet, SubAckPacket, SubAckReasonCode, SubscribePacket

from tests.helpers import packets_in
from towline.mqtt.codec import Decoder, encode

P = TypeVar("P")


class Line:
    """The server's end of one connection; every wait ends after ten seconds."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(10.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = Decoder()
        self._packets: deque[Packet] = deque()

    def send(self, *packets: Packet) -> None:
        self.sock.sendall(b"".join(encode(packet) for packet in packets))

    def receive(self) -> Packet | None:
        """The next packet, None when the client has closed."""
        while not self._packets:
            try:
                data = self.sock.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                return None
            for item in self._decoder.feed(data):
                self._packets.extend(packets_in(item))
        return self._packets.popleft()

    def expect(self, kind: type[P]) -> P:
        packet = self.receive()
        assert isinstance(packet, kind), packet
        return packet

    def closed(self) -> bool:
        """The client closes, and says nothing more but what was on its way."""
        while self.receive() is not None:
            pass
        return True

    def welcome(self, **connack: object) -> ConnectPacket:
        """Take CONNECT, send CONNACK, and confirm what is subscribed."""
        connect = self.expect(ConnectPacket)
        self.send(ConnAckPacket(**connack))  # type: ignore[arg-type]
        return connect

    def subscribed(self) -> SubscribePacket:
        packet = self.expect(SubscribePacket)
        codes = [SubAckReasonCode(int(asked.max_qos)) for asked in packet.topic_filters]
        self.send(SubAckPacket(packet.packet_id, codes))
        return packet


class Scripted:
    """Plays one script a connection, in order; a connection too many is closed."""

    def __init__(self, *scripts: Callable[[Line], object]) -> None:
        self._scripts = deque(scripts)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.05)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._problem: BaseException | None = None
        self.connections = 0
        self.uri = f"mqtt://127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)
        self._server.close()
        if self._problem is not None:
            raise self._problem
        assert kind is not None or not self._scripts, "scripts are left that nobody asked for"

    def _serve(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = self._server.accept()
                self.connections += 1
                with sock:
                    self._play(sock)

    def _play(self, sock: socket.socket) -> None:
        if not self._scripts:
            return
        try:
            self._scripts.popleft()(Line(sock))
        except BaseException as error:  # noqa: BLE001  # told to the test at its end
            self._problem = self._problem or error
