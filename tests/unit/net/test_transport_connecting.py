"""Connecting, and failing to, with sockets of our own on the other side."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.integration.net.ways import HttpProxy, SocksProxy
from towline import ClientSettings
from towline.errors import TowlineError
from towline.net.connecting import Transport, call_with_timeout, connect
from towline.net.endpoint import Endpoint
from towline_prove.devstack.process import free_port

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """A server that sends this to each connection after its first bytes, and closes: its port."""

    def serve() -> None:
        for answer in answers:
            with contextlib.suppress(OSError), server.accept()[0] as sock:
                sock.settimeout(5)
                sock.recv(65536)
                sock.sendall(answer)

    with socket.create_server((LOOPBACK, 0)) as server:
        server.settimeout(5)
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(60)


def connected(endpoint: str | Endpoint, timeout_s: float = 10, **settings: Any) -> Transport:
    where = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
    return connect(where, ClientSettings(connect_timeout_s=timeout_s, **settings))


def refusal(uri: str, proxy: str | None = None, timeout_s: float = 3, **settings: Any) -> str:
    with pytest.raises(TowlineError) as caught:
        connected(uri, timeout_s, proxy=proxy, **settings)
    return str(caught.value)


def test_what_arrives_is_confirmed_at_once() -> None:
    """Linux waits for our next packet otherwise, and a broker without TCP_NODELAY for the confirmation (RFC 896)."""
    with answering(b"a") as port:
        transport = connected(f"mqtt://127.0.0.1:{port}")
        with socket.socket(fileno=os.dup(transport.fileno())) as same:
            transport.write(b"b")
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            wait_until(lambda: transport.read() == b"a")
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)
        transport.close()


def test_nobody_listens(tmp_path: Path) -> None:
    port = free_port()
    assert refusal(f"mqtt://127.0.0.1:{port}") == (
        f"mqtt://127.0.0.1:{port}: no connection (connection refused). Is the broker up, and the port right?   [TL-M01]"
    )
    assert refusal(f"unix://{tmp_path}/x") == (
        f"unix://{tmp_path}/x: no connection (no such file or directory). "
        "Is the broker up, and its socket accessible?   [TL-M01]"
    )


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object, **_options: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert refusal("mqtt://nowhere.invalid") == (
        'mqtt://nowhere.invalid:1883: no address for "nowhere.invalid" (name or service not known). '
        "Check the broker's host, and the DNS of this machine.   [TL-M01]"
    )
    assert "no address" in refusal("mqtt://" + "a" * 70), "a label too long for the DNS"


def addresses(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int]) -> None:
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: answers)


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, int]]:
    """An address that answers no connection attempt: its queue is full."""
    with socket.create_server((LOOPBACK, 0), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server.getsockname()


def test_a_silent_address_does_not_keep_the_next_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent() as hole, socket.create_server((LOOPBACK, 0)) as server:
        addresses(monkeypatch, hole, server.getsockname())
        began = time.monotonic()
        transport = connected("mqtt://two.example")
        assert time.monotonic() - began < 2, "not the whole time for the first"
        peer, _ = server.accept()
        with peer:
            assert transport.write(b"x")
            assert peer.recv(1) == b"x"
        transport.close()


def test_all_addresses_fail_and_each_reason_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    addresses(monkeypatch, (LOOPBACK, port), ("127.0.0.2", port), ("127.0.0.3", port))
    assert "no connection to any of 3 addresses (connection refused)" in refusal("mqtt://many.example")
    with silent() as hole:
        addresses(monkeypatch, (LOOPBACK, port), hole)
        said = refusal("mqtt://many.example", timeout_s=0.5)
        assert "to any of 2 addresses (connection refused; no answer within 0.5 s)" in said


def test_a_result_that_comes_too_late_is_discarded() -> None:
    go = threading.Event()
    discarded: list[int] = []

    def slow() -> int:
        go.wait(60)
        return 7

    with pytest.raises(TimeoutError):
        call_with_timeout(0.05, lambda: False, slow, discarded.append)
    go.set()
    wait_until(lambda: discarded == [7], what="the discarded result")


@pytest.mark.parametrize(("keep_alive_s", "probes"), [(20, [20, 3, 3]), (1, [1, 1, 3]), (65535, [32767, 10922, 3])])
def test_the_system_drops_a_dead_peer_after_one_and_a_half_keep_alives(keep_alive_s: int, probes: list[int]) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        endpoint = Endpoint("mqtt", LOOPBACK, server.getsockname()[1])
        transport = connect(endpoint, ClientSettings(), keep_alive_s=keep_alive_s)
        with socket.socket(fileno=transport.fileno()) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == keep_alive_s * 1500
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = [getattr(socket, f"TCP_KEEP{name}") for name in ("IDLE", "INTVL", "CNT")]
            assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == probes
            sock.detach()
        transport.close()


def test_what_the_system_does_not_take_is_kept_and_flushed() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        transport = connected(Endpoint("mqtt", LOOPBACK, server.getsockname()[1]))
        peer, _ = server.accept()
        data = bytes(range(256)) * 80_000
        assert transport.write(data)
        assert transport.unsent_bytes > 0
        assert not transport.drain(0.05)
        got = bytearray()
        with peer:
            while len(got) < len(data):
                assert transport.flush()
                got += peer.recv(1 << 20)
        assert got == data
        assert transport.unsent_bytes == 0
        wait_until(lambda: transport.read() == b"", what="the end")
        transport.close()


def test_an_attempt_that_was_given_up_ends_though_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then of an answer without end: each attempt would leave a thread and a socket behind."""
    monkeypatch.setattr("towline.net.connecting._ABANDONED_ATTEMPT_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as server:
        uri = f"ws://127.0.0.1:{server.getsockname()[1]}/mqtt"
        assert "[TL-M14]" in refusal(uri, timeout_s=0.2)
        line, _ = server.accept()
        with line:
            line.recv(4096)
            line.sendall(b"HTTP/1.1 101 x\r\nX: ")

            def closed() -> bool:
                try:
                    line.sendall(b"x")
                except OSError:
                    return True
                return False

            wait_until(closed, 20)


def test_a_connection_is_made_also_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of threads, and as an interpreter exits (CPython 3.12)."""

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("towline.net.connecting.call_in_thread", refused)
    with socket.create_server((LOOPBACK, 0)) as server:
        connect(Endpoint.parse(f"mqtt://127.0.0.1:{server.getsockname()[1]}"), ClientSettings()).close()
    assert "[TL-M01]" in refusal(f"mqtt://127.0.0.1:{free_port()}")


def test_a_proxy_password_is_read_each_time(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with HttpProxy("me:right") as proxy, socket.create_server((LOOPBACK, 0)) as server:
        uri = f"mqtt://{LOOPBACK}:{server.getsockname()[1]}"
        way: dict[str, Any] = {"proxy": f"http://me@{proxy.address}", "proxy_password_file": secret}
        assert "no such file" in refusal(uri, **way)
        for content, said in ((b"\xff", "no text in UTF-8"), (b"wrong", "HTTP 407")):
            secret.write_bytes(content)
            assert said in refusal(uri, **way)
        secret.write_text("right\r\n")
        connected(uri, **way).close()


@pytest.mark.parametrize("kind", [HttpProxy, SocksProxy])
def test_a_login_that_a_proxy_does_not_take_is_not_shown(kind: type[HttpProxy], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wrongword")
    with kind("me:right") as proxy:
        scheme = "http" if kind is HttpProxy else "socks5"
        login: dict[str, Any] = {"proxy": f"{scheme}://me@{proxy.address}", "proxy_password_file": secret}
        for way in ({"proxy": f"{scheme}://{proxy.address}"}, login):
            said = refusal("mqtt://broker:1", **way)
            assert said.startswith(f"mqtt://broker:1: the proxy {scheme}://{proxy.address} refused the connection: ")
            assert said.endswith("are its user and proxy_password_file right?   [TL-M15]")
            assert "wrongword" not in said
        secret.write_text("geheimnisvoll-\N{EURO SIGN}", "utf-8")
        said = refusal("mqtt://broker:1", **login)
        assert "geheimnis" not in said
        assert said.endswith("Use ASCII.   [TL-C31]")


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (b"HTTP/1.1 403 Secret words\r\n\r\n", "refused the connection: HTTP 403. Does it reach and allow"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\nabc", "HTTP 502. Does it reach"),
        (b"SSH-2.0-x\r\n\r\n", "refused the connection: no answer in HTTP"),
        (b"", "refused the connection: no answer in HTTP"),
        (b"HTTP/1.1 407 " + b"x" * 100_000, "HTTP 407. Does it reach"),
    ],
)
def test_what_an_http_proxy_may_answer(reply: bytes, what: str) -> None:
    with answering(reply) as port:
        said = refusal("mqtt://broker:1", f"http://{LOOPBACK}:{port}")
    assert what in said
    assert "Secret" not in said
    assert said.endswith("[TL-M15]")


@pytest.mark.parametrize("scheme", ["http", "socks5"])
def test_a_proxy_that_is_not_there_or_says_nothing(scheme: str) -> None:
    way = f"{scheme}://{LOOPBACK}:{free_port()}"
    assert refusal("mqtt://broker:1", way) == (
        f"mqtt://broker:1 through {way}: no connection (connection refused). "
        "Is the proxy up, and the port right?   [TL-M01]"
    )
    with socket.create_server((LOOPBACK, 0)) as server:
        way = f"{scheme}://{LOOPBACK}:{server.getsockname()[1]}"
        began = time.monotonic()
        assert refusal("mqtt://broker:1", way, timeout_s=0.4).endswith("[TL-M15]")
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("scheme", ["http", "socks5"])
def test_a_proxy_without_its_package(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setitem(sys.modules, "python_socks", None)
    assert refusal("mqtt://broker:1", f"{scheme}://proxy:1080") == (
        f'{scheme}://proxy:1080: a proxy needs the package python-socks. Run: pip install "towline[proxy]"   [TL-C34]'
    )
