"""A gateway on a network under a real Spark: rows arrive once though it is killed, and no secret is anywhere.

The driver comes in with its token, tasks with their tickets.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.conftest import Gateway, NewGateway
from tests.integration.spark.searching import contents, crawled, rest_of, running
from tests.unit.gateway.remote import Pki
from towline.gateway.access import KEY_FILE
from towline.mqtt.events import Filter
from towline.net.client import Client
from towline_prove.devstack.process import free_port

pytestmark = [pytest.mark.spark, pytest.mark.broker]

LONG = 150
#: How every ticket begins: its first key.
TICKET = "eyJlbmQiO"


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    made = Pki.made(tmp_path / "pki")
    made.tokens(secrets.token_hex(32))
    return made


@pytest.fixture
def gateway(new_mosquitto: NewMosquitto, new_gateway: NewGateway, pki: Pki) -> Gateway:
    broker, filters = new_mosquitto(max_queued_messages="0", persistence="true"), [{"pattern": "in/#", "qos": 2}]
    listen = pki.settings(address=f"127.0.0.1:{free_port()}")
    return new_gateway(broker, "plant", qos=2, subscriptions=filters, outbox={}, listen=listen).connect()


class Driver:
    """The driver's process."""

    def __init__(self, place: Path, access: dict[str, str]) -> None:
        self.log = place / "driver.log"
        command = [sys.executable, "-m", "tests.integration.spark.networking", str(place), json.dumps(access)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
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


@pytest.fixture
def driver(gateway: Gateway, pki: Pki, tmp_path: Path) -> Iterator[Driver]:
    files, listen = pki.access(), gateway.settings.listen
    assert listen is not None
    access = {"gateway": listen.location, "gatewayTokenFile": files.token_file, "gatewayCaFile": files.ca_file}
    started = Driver(tmp_path, access)
    yield started
    with started.process:  # closes the pipes
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGTERM)


def test_rows_arrive_once_through_a_gateway_that_is_killed_and_no_secret_is_shown(
    gateway: Gateway, driver: Driver, pki: Pki, tmp_path: Path
) -> None:
    broker = str(gateway.settings.brokers[0])
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
            gateway.stop(signal.SIGKILL)
            gateway.start()
            more = [device.publish(f"in/{number % 3}", b"%d" % number, qos=2) for number in range(2000, 2500)]
            for result in (*first, *more):
                result.result(60)
        wait_until(lambda: hear(2500), LONG, "all rows")
        # A batch query reads what is in the journal when it is planned; a stream that commits meanwhile cuts it [I5].
        wait_until(lambda: not gateway.status()["waiting"], LONG, "the last batch committed")
        driver.go_on()
        assert int(driver.until("rows ").split()[1]) <= 2500
        progress = driver.until("[")
        wait_until(lambda: hear(2501), LONG, "the row of the batch query")
    assert heard == Counter([b"whole", *(b"%d" % number for number in range(2500))])

    own = psutil.Process(driver.process.pid)
    seen = {
        "page": "".join([*crawled(ui).values(), *rest_of(ui).values()]),
        "processes": running([own, *own.children(recursive=True)]),
    }
    status = gateway.status()
    driver.go_on()
    assert driver.process.wait(120) == 0
    own_files = [pki.directory / "token", pki.directory / "server.key", gateway.settings.state_dir / KEY_FILE]
    seen |= {
        "events": contents(tmp_path / "events"),
        "checkpoint": contents(tmp_path / "checkpoint"),
        "plan": "".join(driver.said) + progress,
        "driver's log": driver.log.read_text(),
        "gateway's log": gateway.log.read_text(),
        "gateway's directory": contents(gateway.settings.state_dir, *own_files),
        "status": json.dumps(status),
    }
    #: What is there, so that it was looked for in the right place.
    known = {
        "page": "spark.driver.host",
        "processes": "SparkSubmit",
        "events": "SparkListenerApplicationEnd",
        "checkpoint": "incarnation",
        "plan": "Physical Plan",
        "driver's log": "ResolveWriteToStream",
        "gateway's log": "listening",
        "gateway's directory": "journal",
        "status": "listen",
    }
    assert {place: known[place] in text for place, text in seen.items()} == dict.fromkeys(known, True)
    hidden = [file.read_text().splitlines()[:2][-1] for file in own_files]  # of a key in PEM its first line
    for place, text in seen.items():
        for secret in (*hidden, TICKET):
            assert secret not in text, f"a secret in {place}"
    assert status["listen"]["refused"] == 0
