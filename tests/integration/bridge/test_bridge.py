"""`towline run` with real brokers, a real Spark and real kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, TopicPartition
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.conftest import NewMosquitto, NewTopic
from tests.helpers import wait_until
from towline.devstack import Kafka, Mosquitto, free_port

#: A Spark start takes 10 s alone and a minute on a machine that is busy.
PATIENCE = 240.0

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@dataclass
class Running:
    """A bridge as a user runs it."""

    directory: Path
    file: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        with (self.directory / "out").open("ab") as out:
            command = [sys.executable, "-m", "towline.cli", "run", str(self.file)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text()

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def said(self, text: str) -> None:
        wait_until(lambda: text in self.out, PATIENCE, f"{text!r} in {self.out[-500:]!r}")

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.ended()

    def status(self) -> dict[str, Any]:
        made = subprocess.run(
            [sys.executable, "-m", "towline.cli", "status", "--json", str(self.file)],
            capture_output=True,
            check=False,
            timeout=60,
        )
        known: dict[str, Any] = json.loads(made.stdout)
        return known

    def line(self) -> dict[str, Any]:
        known: dict[str, Any] = self.status()["lines"]["line"]
        return known

    def child(self, part: str) -> psutil.Process | None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if part in " ".join(process.cmdline()):
                    return process
        return None

    def kill(self, part: str) -> None:
        found = wait_until(lambda: self.child(part), PATIENCE, part)
        os.kill(found.pid, signal.SIGKILL)


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path, tmp_path / "bridge.toml")
    yield made
    if hasattr(made, "process") and made.process.poll() is None:
        made.process.send_signal(signal.SIGINT)
        made.process.send_signal(signal.SIGINT)
        try:
            made.process.wait(20)
        except subprocess.TimeoutExpired:
            made.process.kill()
            made.process.wait()


def write(bridge: Running, mqtt: int, kafka: str, topic: str, more: str = "") -> None:
    bridge.file.write_text(f"""
name = "tests"
state_dir = "state"
mqtt = {{ brokers = "mqtt://127.0.0.1:{mqtt}" }}
kafka = {{ bootstrap_servers = "{kafka}" }}
spark = {{ master = "local[2]" }}
[[uplink]]
name = "line"
[[uplink.route]]
from = "t/{{device}}/#"
topic = "{topic}"
key = "{{device}}"
where = "length(payload) > 1"
{more}
""")


def publish(broker: Mosquitto, first: int, count: int, *, topic: str = "t/d/x", text: str = "m{}") -> None:
    device = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    device.connect("127.0.0.1", broker.port)
    device.loop_start()
    sent = [device.publish(topic, text.format(n), qos=1) for n in range(first, first + count)]
    for each in sent:
        each.wait_for_publish(PATIENCE)
    device.disconnect()
    device.loop_stop()


def _headers(record: Any) -> dict[str, Any]:
    return dict(record.headers() or [])


def in_kafka(bootstrap: str, topic: str) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Key, value and headers of every record."""
    settings = {"bootstrap.servers": bootstrap, "group.id": str(uuid.uuid4()), "enable.auto.commit": False}
    consumer = Consumer(settings)
    try:
        place = TopicPartition(topic, 0, 0)
        consumer.assign([place])
        end = consumer.get_watermark_offsets(place, timeout=20)[1]
        made: list[tuple[Any, Any, dict[str, Any]]] = []
        while len(made) < end:
            records = consumer.consume(end - len(made), timeout=20)
            assert records, f"{len(made)} of {end} records came"
            made += [(r.key(), r.value(), _headers(r)) for r in records]
        return made
    finally:
        consumer.close()


def test_messages_arrive_whatever_is_killed(
    bridge: Running, new_mosquitto: NewMosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    name = topic()
    write(bridge, broker.port, kafka.bootstrap, name)
    bridge.start()
    wait_until(lambda: bridge.status()["lines"]["line"]["gateway_running"], PATIENCE, "the gateway")
    publish(broker, 0, 500)
    publish(broker, 0, 7, text="x")
    wait_until(lambda: bridge.line()["account"]["waiting"] == 0, PATIENCE, "the first batch")
    known = wait_until(lambda: (a := bridge.line()["account"])["filtered"] == 7 and a, PATIENCE, "the counts")
    assert (known["received"], known["in_kafka"], known["adds_up"]) == (507, 500, True)
    record = in_kafka(kafka.bootstrap, name)[0]
    assert (record[0], record[2]["mqtt.topic"], record[2]["mqtt.qos"]) == (b"d", b"t/d/x", b"1")

    bridge.kill("towline.gateway")
    publish(broker, 500, 500)
    wait_until(lambda: bridge.line()["account"]["received"] >= 1007, PATIENCE, "the gateway again")
    bridge.kill("towline.bridge.driver")
    publish(broker, 1000, 500)
    bridge.said("starting again in")
    bridge.kill("org.apache.spark.deploy.SparkSubmit")
    publish(broker, 1500, 500)
    wait_until(lambda: (a := bridge.line()["account"])["received"] >= 2007 and not a["waiting"], PATIENCE, "all of it")
    assert bridge.interrupt() == 0

    values = [value for _, value, _ in in_kafka(kafka.bootstrap, name)]
    assert set(values) == {f"m{n}".encode() for n in range(2000)}
    first_seen = list(dict.fromkeys(values))
    assert first_seen == [f"m{n}".encode() for n in range(2000)], "order, repeats aside"
    assert "adds up ✓" in bridge.out
    assert "the broker keeps the session tests-line" in bridge.out
    assert "Traceback" not in bridge.out


def test_intake_goes_on_while_kafka_is_down(bridge: Running, new_mosquitto: NewMosquitto) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    write(bridge, broker.port, f"127.0.0.1:{free_port()}", "t")
    bridge.start()
    bridge.said("messages go on being received and wait on disk")
    wait_until(lambda: bridge.line()["gateway_running"], PATIENCE, "the gateway")
    publish(broker, 0, 100)
    wait_until(lambda: (bridge.line()["account"] or {}).get("waiting") == 100, PATIENCE, "100 waiting")
    assert bridge.out.count("[TL-K01]") == 1
    other = subprocess.run(
        [sys.executable, "-m", "towline.cli", "run", str(bridge.file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert other.returncode == 2
    assert f"a bridge runs here (pid {bridge.process.pid})" in other.stderr
    assert bridge.interrupt() == 0
    assert "100 messages wait on disk; the next start carries them on" in bridge.out
    known = bridge.line()
    assert (known["gateway_running"], known["account"]["waiting"]) == (False, 100)


def test_a_missing_topic_is_one_line_and_the_end(bridge: Running, mosquitto: Mosquitto, kafka: Kafka) -> None:
    write(bridge, mosquitto.port, kafka.bootstrap, "nowhere")
    bridge.start()
    assert bridge.ended() == 1
    told = [line for line in bridge.out.splitlines() if "TL-" in line]
    do = "Create it, or let Towline do it with create_topics = { partitions = 6 } in [kafka]."
    assert told == [f'{kafka.bootstrap}: the topic "nowhere" is not there. {do}   [TL-B03]']


def test_a_wrong_where_stops_its_line(bridge: Running, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic) -> None:
    write(
        bridge,
        mosquitto.port,
        kafka.bootstrap,
        topic(),
        '[[uplink.route]]\nfrom="x"\ntopic="nope"\nwhere="no_such = 1"',
    )
    bridge.file.write_text(bridge.file.read_text().replace('"nope"', f'"{topic()}"'))
    bridge.start()
    assert bridge.ended() == 2
    assert "[TL-C74]" in bridge.out
    assert "`no_such` cannot be resolved" in bridge.out


def test_the_children_end_with_the_bridge(bridge: Running, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic) -> None:
    write(bridge, mosquitto.port, kafka.bootstrap, topic())
    bridge.start()
    bridge.said("is up after")
    children = psutil.Process(bridge.process.pid).children(recursive=True)
    assert children
    bridge.process.kill()
    bridge.process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
