"""The server answers what it has, and neither slow nor many nor rude clients stop it or cost more than they may."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tests.helpers import wait_until
from towline.errors import ConfigError
from towline.monitor import server as serving
from towline.monitor.server import ListenAddress, MetricsServer

HOME = ListenAddress(("127.0.0.1", 0))


class Verdicts:
    def __init__(self) -> None:
        self.well = True

    def __call__(self) -> tuple[bool, dict[str, Any]]:
        return self.well, {"well": self.well}


@pytest.fixture
def verdicts() -> Verdicts:
    return Verdicts()


@pytest.fixture
def server(verdicts: Verdicts) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("a_gauge", "one", registry=registry).set(7)
    with MetricsServer(HOME, registry, verdicts, verdicts) as running:
        yield running


def get(server: MetricsServer, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - ours
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_serves_metrics_and_verdicts(server: MetricsServer, verdicts: Verdicts) -> None:
    status, text = get(server, "/metrics")
    assert (status, "a_gauge 7.0" in text) == (200, True)
    assert get(server, "/healthz") == (200, '{"well": true}\n')
    verdicts.well = False
    status, text = get(server, "/readyz")
    assert (status, json.loads(text)) == (503, {"well": False})
    assert get(server, "/")[0] == 200
    assert get(server, "/etc/passwd")[0] == 404
    assert get(server, "/metrics", "POST")[0] == 405


def test_a_port_that_is_taken_is_one_clear_line(server: MetricsServer, verdicts: Verdicts) -> None:
    with pytest.raises(ConfigError, match=r"127.0.0.1:\d+: metrics can't be served there \(address already in use\)"):
        MetricsServer(server.address, CollectorRegistry(), verdicts, verdicts)
    elsewhere = ListenAddress(("192.0.2.1", 9464))  # RFC 5737: nobody's
    with pytest.raises(ConfigError, match=r"192.0.2.1:9464: .*TL-C146"):
        MetricsServer(elsewhere, CollectorRegistry(), verdicts, verdicts)


def test_who_takes_all_places_and_says_nothing_is_cut_off(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are places, a byte at a time each: no step takes too long, and all together they do."""
    monkeypatch.setattr(serving, "_WHOLE_S", 0.5)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(server.address, 30)) for _ in range(4)]
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                for one in slow:
                    with contextlib.suppress(OSError):
                        one.sendall(b"G")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            wait_until(lambda: _answers(server), what="an answer for somebody else")
        finally:
            ended.set()
            dripping.join()


def test_rude_clients_stop_nothing(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    for data in (b"\x16\x03\x01\x02\x00", b"GET " + b"x" * 70_000 + b"\r\n\r\n", b"", b"GET / HTTP/1.1\r\n"):
        with contextlib.suppress(OSError), socket.create_connection(server.address, 30) as one:
            one.sendall(data)
    wait_until(lambda: _answers(server), what="an answer for somebody else")
    assert capfd.readouterr().err == "", "nobody can fill a log"


def test_a_collector_that_fails_costs_one_answer(verdicts: Verdicts) -> None:
    class Failing(CollectorRegistry):
        def collect(self) -> Any:
            raise RuntimeError("no")

    with MetricsServer(HOME, Failing(), verdicts, verdicts) as running:
        assert get(running, "/metrics")[0] == 500
        assert get(running, "/healthz")[0] == 200


def _answers(server: MetricsServer) -> bool:
    with contextlib.suppress(OSError):
        return get(server, "/healthz")[0] == 200
    return False
