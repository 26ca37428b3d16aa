"""The proxy against a plain echo server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from towline_prove.proxy import FaultProxy


@pytest.fixture
def echo() -> Iterator[int]:
    server = socket.create_server(("127.0.0.1", 0))
    threads = []

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                thread = threading.Thread(target=answer, args=(server.accept()[0],), daemon=True)
                thread.start()
                threads.append(thread)

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    acceptor.join(60)
    for thread in threads:
        thread.join(60)


def client(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def ask(sock: socket.socket, data: bytes = b"hello") -> bytes:
    sock.sendall(data)
    answer = b""
    while len(answer) < len(data) and (more := sock.recv(65536)):
        answer += more
    return answer


def test_bytes_pass_both_ways(echo: int) -> None:
    with FaultProxy(echo) as proxy, client(proxy) as sock:
        assert ask(sock) == b"hello"
        big = bytes(range(256)) * 4096
        sender = threading.Thread(target=sock.sendall, args=(big,))
        sender.start()
        answer = b""
        while len(answer) < len(big):
            answer += sock.recv(65536)
        sender.join(60)
        assert answer == big
        assert proxy.connections == 1


def test_hang_keeps_the_connection_and_passes_nothing_until_forward(echo: int) -> None:
    with FaultProxy(echo) as proxy, client(proxy) as sock:
        assert ask(sock) == b"hello"
        proxy.hang()
        sock.sendall(b"late")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(10)
        proxy.forward()
        sock.settimeout(5)
        assert sock.recv(10) == b"late"


def test_refuse_lets_nobody_in_and_the_port_stays(echo: int) -> None:
    with FaultProxy(echo) as proxy:
        with client(proxy) as sock:
            assert ask(sock) == b"hello"
            proxy.refuse()
            assert sock.recv(10) == b""
        with pytest.raises(ConnectionRefusedError):
            client(proxy)
        proxy.forward()
        with client(proxy) as sock:
            assert ask(sock) == b"hello"


def test_cut_after_ends_inside_a_message(echo: int) -> None:
    with FaultProxy(echo) as proxy, client(proxy) as sock:
        proxy.cut_after(7)
        sock.sendall(b"0123456789")
        answer = b""
        with suppress(ConnectionResetError):
            while more := sock.recv(10):
                answer += more
        assert answer == b"0123456"


def test_a_dead_server_closes_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with FaultProxy(port) as proxy, client(proxy) as sock:
        assert sock.recv(10) == b""


def test_no_connection_lives_on_that_came_while_it_began_to_refuse(echo: int) -> None:
    """A break that leaves the peer there is none."""

    def connect(sock: socket.socket, port: int) -> None:
        with suppress(OSError):
            sock.connect(("127.0.0.1", port))

    with FaultProxy(echo) as proxy:
        for _ in range(100):
            with socket.socket() as sock:
                sock.settimeout(5)
                thread = threading.Thread(target=connect, args=(sock, proxy.port))
                thread.start()
                proxy.refuse()
                thread.join(60)
                answer = b""
                with suppress(OSError):
                    sock.sendall(b"x")
                    answer = sock.recv(1)
                assert answer == b""
            proxy.forward()
