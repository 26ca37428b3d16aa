"""Small real things between a client and a broker: a relay, an HTTP proxy, a SOCKS5 proxy."""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

LOOPBACK = "127.0.0.1"


class Relay:
    """Forwards each connection to `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._server = socket.create_server((LOOPBACK, 0))
        self.port: int = self._server.getsockname()[1]
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self.connections = 0

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)
        self._server.close()
        assert not any(thread.is_alive() for thread in self._threads)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def meet(self, client: socket.socket) -> socket.socket | None:  # noqa: ARG002  # proxies do talk
        """Talk to the client first, and connect to where it wants to go."""
        return socket.create_connection(self.target, 5)

    def _start(self, call: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=call, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            if select.select([self._server], [], [], 0.05)[0]:
                self.connections += 1
                self._start(self._serve, self._server.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(5)
            broker = self.meet(client)
            if broker is not None:
                with broker:
                    self._forward({client: broker, broker: client})

    def _forward(self, peers: dict[socket.socket, socket.socket]) -> None:
        while not self._ended.is_set():
            for sock in select.select(list(peers), [], [], 0.05)[0]:
                data = sock.recv(65536)
                if not data:
                    return
                peers[sock].sendall(data)


class HttpProxy(Relay):
    """An HTTP proxy that knows CONNECT only."""

    def __init__(self, login: str, names: dict[str, tuple[str, int]] | None = None) -> None:
        super().__init__((LOOPBACK, 0))
        self.login = login
        self.names = names or {}
        self.requests: list[str] = []

    def meet(self, client: socket.socket) -> socket.socket | None:
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += exactly(client, 1)
        lines = request.decode().split("\r\n")
        self.requests.append(lines[0])
        wanted = f"Proxy-Authorization: Basic {base64.b64encode(self.login.encode()).decode()}"
        if wanted.lower() not in [line.lower() for line in lines]:
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n")
            return None
        host, _, port = lines[0].split()[1].rpartition(":")
        where = self.names.get(host, (host.strip("[]"), int(port)))
        broker = socket.create_connection(where, 5)
        client.sendall(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 test\r\n\r\n")
        return broker


class SocksProxy(HttpProxy):
    """A SOCKS5 proxy (RFC 1928, RFC 1929) that knows CONNECT only."""

    def meet(self, client: socket.socket) -> socket.socket | None:
        _version, count = exactly(client, 2)
        offered = exactly(client, count)
        if 2 not in offered:  # user and password
            client.sendall(b"\x05\xff")
            return None
        client.sendall(b"\x05\x02")
        return self._lead(client) if self._logged_in(client) else None

    def _logged_in(self, client: socket.socket) -> bool:
        user = exactly(client, exactly(client, 2)[1]).decode()
        password = exactly(client, exactly(client, 1)[0]).decode()
        right = f"{user}:{password}" == self.login
        client.sendall(bytes([1, 0 if right else 1]))
        return right

    def _lead(self, client: socket.socket) -> socket.socket | None:
        _version, _command, _reserved, kind = exactly(client, 4)
        size = {1: 4, 4: 16}.get(kind) or exactly(client, 1)[0]
        address = exactly(client, size)
        port = struct.unpack("!H", exactly(client, 2))[0]
        family = {1: socket.AF_INET, 4: socket.AF_INET6}.get(kind)
        host = socket.inet_ntop(family, address) if family else address.decode()
        self.requests.append(f"{host}:{port}")
        try:
            broker = socket.create_connection(self.names.get(host, (host, port)), 5)
        except OSError:
            client.sendall(b"\x05\x05\x00\x01" + bytes(6))  # connection refused
            return None
        client.sendall(b"\x05\x00\x00\x01" + bytes(6))
        return broker


def exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes; ConnectionError where the stream ends before."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data
