"""The proxy against a plain echo server: a fault that it only pretends would prove nothing."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from towline_prove.proxy import FaultProxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):
            while data := self.request.recv(65536):
                self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with FaultProxy(server.server_address[1]) as proxy:
            yield proxy
        server.shutdown()
        thread.join(60)


def client(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def ask(sock: socket.socket, data: bytes = b"hello") -> bytes:
    sock.sendall(data)
    answer = b""
    while len(answer) < len(data) and (more := sock.recv(65536)):
        answer += more
    return answer


def test_hang_keeps_the_connection_and_passes_nothing_until_forward(proxy: FaultProxy) -> None:
    with client(proxy) as sock:
        assert ask(sock, large := bytes(range(256)) * 400) == large
        proxy.hang()
        sock.sendall(b"late")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(10)
        proxy.forward()
        sock.settimeout(5)
        assert sock.recv(10) == b"late"


def test_refuse_lets_nobody_in_and_the_port_stays(proxy: FaultProxy) -> None:
    with client(proxy) as sock:
        assert ask(sock) == b"hello"
        proxy.refuse()
        assert sock.recv(10) == b""
    with pytest.raises(ConnectionRefusedError):
        client(proxy)
    proxy.forward()
    with client(proxy) as sock:
        assert ask(sock) == b"hello"


def test_cut_after_ends_inside_a_message(proxy: FaultProxy) -> None:
    with client(proxy) as sock:
        proxy.cut_after(7)
        sock.sendall(b"0123456789")
        answer = b""
        with suppress(ConnectionResetError):
            while more := sock.recv(10):
                answer += more
        assert answer == b"0123456"
