"""The server answers what it has, and neither slow nor many nor rude clients stop it or cost more than they may.

It is there only where it was asked for.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.helpers import wait_until
from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.runtime.state import BridgeState
from towline.errors import ConfigError
from towline.monitor import server
from towline.monitor.server import monitor_routes
from towline.monitor.server import serve as serve_routes
from towline.monitor.serving import bridge_endpoint, gateway_endpoint
from towline.options import parse_host_port

HOME = "127.0.0.1:0"
#: More than the kernel keeps for a connection that nobody reads (tcp_wmem: 4 MiB).
LARGE = bytes(8 << 20)


class Verdicts:
    """A monitor whose verdict is set; `held` says what an answer waits for."""

    def __init__(self) -> None:
        self.well = True
        self.held = threading.Event()

    def samples(self) -> Any:
        return iter(())

    def alive(self) -> tuple[bool, dict[str, Any]]:
        return self.well, {"well": self.well}

    ready = alive

    def held_answer(self, _: Request) -> Response:
        self.held.wait(60)
        return Response("at last")


class Served:
    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        answer, body = self.answer(path, method, **headers)
        return answer.status, body.decode()

    def answer(self, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer, answer.read()

    def answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/healthz")[0] == 200
        return False

    def connect(self) -> socket.socket:
        one = socket.socket()
        one.settimeout(30)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", self.port))
        return one


def serve(monitor: Any, address: str, more: Sequence[Route] = ()) -> contextlib.AbstractContextManager[int]:
    return serve_routes([*monitor_routes(monitor), *more], address)


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(server, "_ACCEPT_INTERVAL_S", 0.0)  # one test has the pace
    made = Verdicts()
    yield made
    made.held.set()


@pytest.fixture
def served(verdicts: Any) -> Iterator[Served]:
    more = [Route("/large", lambda _: Response(LARGE)), Route("/held", verdicts.held_answer)]
    with serve(verdicts, HOME, more) as port:
        yield Served(port)


def test_it_serves_metrics_and_verdicts(served: Served, verdicts: Any) -> None:
    answer, text = served.answer("/metrics")
    assert (answer.status, b"towline_build_info{" in text) == (200, True)
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    assert (answer.headers["Connection"], answer.headers["Cache-Control"]) == ("close", "no-store")
    assert served.get("/healthz") == (200, '{"well": true}\n')
    verdicts.well = False
    status, verdict = served.get("/readyz")
    assert (status, json.loads(verdict)) == (503, {"well": False})
    assert served.get("/", "HEAD") == (200, "")
    assert served.get("/")[1].split() == ["/metrics", "/healthz", "/readyz", "/large", "/held"]
    assert served.get("/etc/passwd")[0] == 404
    assert served.get("/metrics", "POST")[0] == 405
    headers = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}
    assert gzip.decompress(served.answer("/metrics", **headers)[1]).endswith(b"# EOF\n")


def test_a_page_of_another_name_reads_nothing(served: Served) -> None:
    """A browser on this machine whose page's name began to mean 127.0.0.1 (DNS rebinding)."""
    for host, status in (("localhost:9464", 200), ("[::1]:9464", 200), ("evil.example", 400), ("evil:9464", 400)):
        assert served.get("/healthz", Host=host)[0] == status, host


def test_a_port_that_is_taken_is_one_clear_line(served: Served, verdicts: Any) -> None:
    taken = rf"127.0.0.1:{served.port}: metrics and page can't be served there \(address already in use\).*TL-C146"
    for address, said in ((f"127.0.0.1:{served.port}", taken), ("192.0.2.1:9464", r"192.0.2.1:9464: .*TL-C146")):
        with pytest.raises(ConfigError, match=said), serve(verdicts, address):  # RFC 5737: nobody's
            pass


@pytest.mark.parametrize(
    ("request_s", "connection_s", "data"),
    [(0.5, 600.0, b"G"), (600.0, 0.5, b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")],
)
def test_who_takes_all_places_is_cut_off(
    verdicts: Any, monkeypatch: pytest.MonkeyPatch, request_s: float, connection_s: float, data: bytes
) -> None:
    """As many as there are places: with a byte of a request at a time each, or with an answer that nobody takes."""
    monkeypatch.setattr(server, "_REQUEST_TIMEOUT_S", request_s)
    monkeypatch.setattr(server, "_CONNECTION_TIMEOUT_S", connection_s)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serve(verdicts, HOME, [Route("/large", lambda _: Response(LARGE))]))
        slow = [stack.enter_context(Served(port).connect()) for _ in range(8)]
        for one in slow:
            one.sendall(data)

        def answers() -> bool:
            for one in slow:
                with contextlib.suppress(OSError):
                    one.sendall(b"G")
            return Served(port).answers()

        wait_until(answers, what="an answer for somebody else")


def test_one_too_many_is_sent_away_and_answers_under_way_count(served: Served, verdicts: Any) -> None:
    """Who went away keeps his place while his answer is still being made: no more threads than places."""
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            one = stack.enter_context(served.connect())
            one.sendall(b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: not served.answers(), what="all places taken")
    wait_until(lambda: not served.answers(), what="places kept")
    verdicts.held.set()
    wait_until(served.answers, what="an answer again")


def test_clients_come_at_a_pace(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ACCEPT_INTERVAL_S", 0.1)
    began = time.monotonic()
    assert all(served.answers() for _ in range(4))
    assert time.monotonic() - began >= 0.19


def test_rude_clients_stop_nothing(
    served: Served, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong_chunk = b"GET /large HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n"
    long_line, half = b"GET " + b"x" * 70_000 + b"\r\n\r\n", b"GET / HTTP/1.1\r\n"
    for data in (b"\x16\x03\x01\x02\x00", long_line, b"", half, wrong_chunk):
        with contextlib.suppress(OSError), served.connect() as one:
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            one.recv(1)
    wait_until(served.answers, what="an answer for somebody else")
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    assert served.get("/healthz", **headers)[0] == 200
    assert (caplog.messages, capfd.readouterr().err) == ([], ""), "nobody can fill a log"


def test_it_ends_at_once_whoever_is_connected(verdicts: Any) -> None:
    """With one who says nothing, one who reads nothing, and one whose answer is being made; the port is free then."""
    more = [Route("/large", lambda _: Response(LARGE)), Route("/held", verdicts.held_answer)]
    with contextlib.ExitStack() as stack:
        with serve(verdicts, HOME, more) as port:
            for request in (
                b"",
                b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n",
                b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n",
            ):
                stack.enter_context(Served(port).connect()).sendall(request)
            assert Served(port).answers()
            began = time.monotonic()
        assert time.monotonic() - began < 5, "a second, and what a busy machine takes"
        with serve(verdicts, f"127.0.0.1:{port}") as again:
            assert Served(again).answers()


def test_an_address() -> None:
    assert [parse_host_port(text) for text in ("9464", "[::1]:80")] == [("127.0.0.1", 9464), ("::1", 80)]


@pytest.mark.parametrize("text", ["", "host", "host:", ":9464", "1:2:3", "host:65536", "http://h:1", "h:1/x"])
def test_no_address(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r'bridge.toml:17  \[monitor\]: .*Write it as "127.0.0.1:9464".*TL-C05'):
        read(f'{GOOD}[monitor]\nlisten = "{text}"\n', tmp_path)
    with (
        pytest.raises(ConfigError, match=r"--metrics, --listen: .*TL-C145"),
        bridge_endpoint(read(GOOD, tmp_path), text or " "),
    ):
        pass


def listening() -> set[Any]:
    """Where this process takes connections."""
    return {one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def test_nothing_listens_that_was_not_asked_for(tmp_path: Path) -> None:
    before = listening()
    with bridge_endpoint(read(GOOD, tmp_path), None) as observe:
        observe(BridgeState("b", tmp_path, {"line": "up"}))
        assert listening() == before
    plan = read(f'{GOOD}[monitor]\nlisten = "{HOME}"\n', tmp_path)
    with gateway_endpoint(plan, None, plan.lines[0].gateway):  # the file's address is the bridge's
        assert listening() == before
    with bridge_endpoint(plan, None):
        assert len(listening() - before) == 1
