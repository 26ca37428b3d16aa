"""What the gateway speaks: older versions of MQTT, the will, topic aliases."""

from __future__ import annotations

import signal
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.gateway.conftest import NewGateway, publish
from towline_prove.devstack import Mosquitto


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


def test_a_broker_of_an_older_version_is_told_as_such(old_broker: str, new_gateway: NewGateway) -> None:
    line = new_gateway(old_broker).fail()
    assert "unsupported protocol version" in line
    assert "3.1.1" in line


def test_auto_finds_the_version_the_broker_speaks(old_broker: str, new_gateway: NewGateway) -> None:
    gateway = new_gateway(old_broker, protocol="auto")
    gateway.start()
    gateway.until(state="online", protocol="3.1.1")


def test_the_will_is_published_when_the_gateway_is_killed(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    watcher = new_gateway(mosquitto, name="watcher", subscriptions=[{"pattern": "will/#", "qos": 1}])
    watcher.connect()
    gateway = new_gateway(
        mosquitto, will={"topic": "will/plant-7", "payload": "0", "qos": 1, "content_type": "text/plain"}
    )
    gateway.connect()
    gateway.stop(signal.SIGKILL)
    watcher.until(journaled=1)
    watcher.stop()
    (row,) = watcher.rows()
    assert (row["topic"], row["payload"], row["content_type"]) == ("will/plant-7", b"0", "text/plain")


def test_a_clean_stop_publishes_no_will(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    gateway = new_gateway(mosquitto, subscriptions=[{"pattern": "#", "qos": 1}], will={"topic": "will", "payload": "0"})
    gateway.connect()
    gateway.stop()
    publish(mosquitto, range(1))
    gateway.start()
    gateway.until(journaled=1)


def test_topic_aliases_of_the_broker_are_resolved(new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    gateway = new_gateway(broker, topic_alias_maximum=10)
    gateway.connect()
    for number in range(30):
        publish(broker, range(number, number + 1), f"t/{number % 15}")
    gateway.until(journaled=30)
    gateway.stop()
    assert [(row["topic"], int(row["payload"])) for row in gateway.rows()] == [(f"t/{n % 15}", n) for n in range(30)]
