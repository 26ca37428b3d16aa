"""A gateway on a network under a real Spark: rows arrive once though it is killed, and no secret is anywhere.

The driver comes in with its token, tasks with their tickets.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import NewMosquitto
from tests.helpers import lacking, wait_until
from tests.integration.spark.searching import contents, crawled, rest_of, running
from tests.unit.gateway.remote import Pki
from towline.errors import SetupError
from towline.gateway.access import KEY_FILE, ClientAccess
from towline.gateway.client import GatewayClient
from towline.gateway.launch import find_running
from towline.mqtt.events import Filter
from towline.net.client import Client
from towline.spark.java import find_java
from towline_prove.devstack import Mosquitto
from towline_prove.devstack.process import free_port

pytestmark = [pytest.mark.spark, pytest.mark.broker]

LONG = 150
#: How every ticket begins: its first key.
TICKET = "eyJlbmQiO"


class Network:
    """A gateway that listens on a network, and what a driver is told of it."""

    def __init__(self, broker: Mosquitto, place: Path) -> None:
        self.pki = Pki.made(place / "pki")
        self.token = secrets.token_hex(32)
        self.pki.tokens(self.token)
        self.place = place
        self.state = place / "gateway"
        self.log = place / "gateway.log"
        self.address = f"127.0.0.1:{free_port()}"
        self._settings = {
            "name": "plant",
            "state_dir": str(self.state),
            "brokers": [broker.uri],
            "subscriptions": [{"pattern": "in/#", "qos": 2}],
            "guarantee": "exactly_once",
            "outbox": {},
            "owner_pid": os.getpid(),
            "listen": json.loads(self.pki.settings(address=self.address).model_dump_json()),
        }
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "towline.gateway"], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._settings).encode())
        process.stdin.close()
        wait_until(lambda: self._listens(process.pid), what="a gateway that listens")
        return process

    def _listens(self, pid: int) -> bool:
        if (client := find_running(self.state)) is None:
            return False
        with client:
            status = client.status()
        return status["pid"] == pid and "listen" in status

    def again(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self.start()

    @property
    def files(self) -> ClientAccess:
        return self.pki.access()

    @property
    def access(self) -> dict[str, str]:
        files = self.files
        options = {"gatewayTokenFile": files.token_file, "gatewayCaFile": files.ca_file}
        return {"gateway": f"grpc+tls://{self.address}", **options}

    @property
    def secrets(self) -> list[str]:
        """What must be nowhere but in its file."""
        key = (self.pki.directory / "server.key").read_text().splitlines()[1]
        return [self.token, (self.state / KEY_FILE).read_text().strip(), key]


class Driver:
    """The driver's process."""

    def __init__(self, network: Network) -> None:
        try:
            find_java()
        except SetupError as error:
            lacking(str(error))
        self.log = network.place / "driver.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.spark.networking", network.place, json.dumps(network.access)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.said: list[str] = []

    def until(self, start: str) -> str:
        """The next line that begins so; what comes before it is kept."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith(start):
                return line.strip()
        raise AssertionError(f"the driver ended before it said {start}: {self.log.read_text()[-3000:]}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


@pytest.fixture
def network(new_mosquitto: NewMosquitto, tmp_path: Path) -> Iterator[Network]:
    running = Network(new_mosquitto(max_queued_messages="0", persistence="true"), tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


@pytest.fixture
def driver(network: Network) -> Iterator[Driver]:
    running = Driver(network)
    yield running
    with running.process:  # closes the pipes
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGTERM)


def told(network: Network) -> dict[str, Any]:
    with GatewayClient(network.access["gateway"], network.files) as client:
        return client.status()


def test_rows_arrive_once_through_a_gateway_that_is_killed_and_no_secret_is_shown(
    network: Network, driver: Driver, tmp_path: Path
) -> None:
    broker = str(network._settings["brokers"][0])
    heard: Counter[bytes] = Counter()
    with Client(broker, client_id="ear", subscribe=[Filter("out/#", qos=2), Filter("batch/#", qos=2)]) as ear:

        def hear(count: int) -> bool:
            while (message := ear.receive(0)) is not None:
                message.ack()
                heard[message.payload or b""] += 1
            return len(heard) >= count

        with Client(broker, client_id="device") as device:
            first = [device.publish(f"in/{number % 3}", b"%d" % number, qos=2) for number in range(2000)]
            ui = driver.until("http")
            wait_until(lambda: hear(300), LONG, "the first rows")
            network.again()
            more = [device.publish(f"in/{number % 3}", b"%d" % number, qos=2) for number in range(2000, 2500)]
            for result in (*first, *more):
                result.wait(60)
        wait_until(lambda: hear(2500), LONG, "all rows")
        # A batch query reads what is in the journal when it is planned; a stream that commits meanwhile cuts it [I5].
        wait_until(lambda: not told(network)["waiting"], LONG, "the last batch committed")
        driver.go_on()
        assert int(driver.until("rows ").split()[1]) <= 2500
        progress = driver.until("[")
        wait_until(lambda: hear(2501), LONG, "the row of the batch query")
    assert heard == Counter([b"whole", *(b"%d" % number for number in range(2500))])

    pages = "".join([*crawled(ui).values(), *rest_of(ui).values()])
    seen = {"page": pages, "processes": running([*driver.processes(), psutil.Process(network.process.pid)])}
    status = told(network)
    driver.go_on()
    assert driver.process.wait(120) == 0
    own_files = [network.pki.directory / "token", network.pki.directory / "server.key", network.state / KEY_FILE]
    seen |= {
        "events": contents(tmp_path / "events"),
        "checkpoint": contents(tmp_path / "checkpoint"),
        "plan": "".join(driver.said) + progress,
        "driver's log": driver.log.read_text(),
        "gateway's log": network.log.read_text(),
        "gateway's directory": contents(network.state, *own_files),
        "status": json.dumps(status),
    }
    #: What is there, so that it was looked for in the right place.
    known = {
        "page": "spark.driver.host",
        "processes": "towline.gateway",
        "events": "SparkListenerApplicationEnd",
        "checkpoint": "incarnation",
        "plan": "Physical Plan",
        "driver's log": "ResolveWriteToStream",
        "gateway's log": "listening",
        "gateway's directory": "journal",
        "status": network.address,
    }
    assert {place: known[place] in text for place, text in seen.items()} == dict.fromkeys(known, True)
    for place, text in seen.items():
        for secret in (*network.secrets, TICKET):
            assert secret not in text, f"a secret in {place}"
    assert status["listen"]["refused"] == 0
