"""What the gateway speaks: older versions of MQTT."""

from __future__ import annotations

import signal
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.conftest import NewGateway, publish


@pytest.mark.parametrize("protocol", ["3.1.1", "3.1"])
@pytest.mark.parametrize("qos", [1, 2])
def test_older_protocols_keep_the_same_promise(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, protocol: str, qos: int
) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    guarantee = "exactly_once" if qos == 2 else "at_least_once"
    gateway = new_gateway(
        broker, protocol=protocol, guarantee=guarantee, subscriptions=[{"pattern": "t/#", "qos": qos}]
    )
    gateway.start()
    gateway.until(state="online", protocol=protocol)
    publish(broker, range(200), qos=qos)
    gateway.stop(signal.SIGKILL)
    publish(broker, range(200, 400), qos=qos)
    gateway.start()
    wait_until(lambda: len(set(gateway.seen())) == 400, what="all 400")
    seen = gateway.seen()
    assert list(dict.fromkeys(seen)) == list(range(400))
    assert qos == 1 or len(seen) == 400


class _OldBroker(socketserver.BaseRequestHandler):
    """Says to a version 5 CONNECT what a 3.1.1 broker says, and nothing to any other."""

    refusal = b"\x20\x02\x00\x01"

    def handle(self) -> None:
        connect = self.request.recv(1000)
        if connect[8] == 5:
            self.request.sendall(self.refusal)
            return
        assert connect[8] == 4
        self.request.sendall(b"\x20\x02\x00\x00")
        subscribe = self.request.recv(1000)
        self.request.sendall(b"\x90\x03" + subscribe[2:4] + b"\x01")
        self.request.recv(1000)


class _Moquette(_OldBroker):
    """Moquette 0.17, taken from it: a return code of 3.1.1 in the form of the CONNECT."""

    refusal = b"\x20\x03\x00\x01\x00"


@pytest.fixture(params=[_OldBroker, _Moquette])
def old_broker(request: pytest.FixtureRequest) -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), request.param) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"mqtt://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_auto_finds_the_version_the_broker_speaks(old_broker: str, new_gateway: NewGateway) -> None:
    gateway = new_gateway(old_broker, protocol="auto")
    gateway.start()
    gateway.until(state="online", protocol="3.1.1")
