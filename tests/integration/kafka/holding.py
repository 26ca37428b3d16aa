"""A proxy that knows Kafka's frames: it can hold back one EndTxn request, and let it go when it is least welcome."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Self

#: Kafka's protocol: a request is int32 length, int16 api key, int16 version, int32 correlation id.
_END_TXN = 26
_LOOPBACK = "127.0.0.1"


class EndTxnHolder:
    """A loopback proxy in front of a Kafka that advertises the proxy's address; a context manager.

    Attributes:
        held: Set when a request is held.
        answered: Set when Kafka has answered the held request.
        error_code: Kafka's answer to it (0: done; 47 INVALID_PRODUCER_EPOCH; 90 PRODUCER_FENCED).
    """

    def __init__(self) -> None:
        self._listener = socket.create_server((_LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        #: Kafka's own port; known once it has started.
        self.target = 0
        self.held = threading.Event()
        self.answered = threading.Event()
        self.error_code: int | None = None
        self._armed = threading.Event()
        self._released = threading.Event()
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def hold_next(self) -> None:
        """Hold back the next EndTxn; the connection's later requests wait behind it, as in a socket's buffer."""
        self._armed.set()

    def release(self) -> None:
        """Let it go, though its sender may long have closed the connection."""
        self._released.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection((_LOOPBACK, self.target))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                late: list[int] = []  # correlation id of the held request, if it is of this connection
                threading.Thread(target=self._requests, args=(client, server, late), daemon=True).start()
                threading.Thread(target=self._answers, args=(client, server, late), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, late: list[int]) -> None:
        with suppress(OSError, EOFError):
            while True:
                frame = _frame(client)
                api, _, correlation = struct.unpack_from(">hhi", frame)
                if api == _END_TXN and self._armed.is_set():
                    self._armed.clear()
                    late.append(correlation)
                    self.held.set()
                    self._released.wait(60)
                server.sendall(struct.pack(">i", len(frame)) + frame)
        if not late:  # the held request must reach Kafka after its sender has gone
            _close(client, server)

    def _answers(self, client: socket.socket, server: socket.socket, late: list[int]) -> None:
        gone = False
        with suppress(OSError, EOFError):
            while True:
                frame = _frame(server)
                (correlation,) = struct.unpack_from(">i", frame)
                if late and correlation == late[0]:
                    # version 0 and 1: correlation id, throttle time, error code
                    (self.error_code,) = struct.unpack_from(">h", frame, 8)
                    self.answered.set()
                if not gone:
                    try:
                        client.sendall(struct.pack(">i", len(frame)) + frame)
                    except OSError:
                        gone = True
        _close(client, server)


def _close(*socks: socket.socket) -> None:
    for sock in socks:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _frame(sock: socket.socket) -> bytes:
    (length,) = struct.unpack(">i", _exactly(sock, 4))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
