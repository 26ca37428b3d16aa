"""docs/production.md, typed on one machine with the files of examples/production: TLS, passwords, ACLs, all commands.

What is not as the page says is in `Machine.table`. Users are names, and what ``systemctl`` would start the test starts.
Kafka is one broker, or the page's three in the long tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import require
from tests.engines.kafka_tools import client_settings
from tests.helpers import ServiceManager, lacking, wait_until
from tests.integration.bridge.conftest import ended
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.conftest import towline_command
from towline import Client, Filter
from towline.doctor.mosquitto import read_conf
from towline.errors import BrokerRefused
from towline.net.endpoint import Tls
from towline.net.settings import ClientSettings
from towline.spark.java import archive_options, class_archive_path, find_java
from towline_prove.devstack import Mosquitto
from towline_prove.devstack.kafka import FORMAT_JVM, ClusterNode, kafka_jars
from towline_prove.devstack.mosquitto import SBIN_PATH, find_mosquitto
from towline_prove.devstack.process import free_port
from towline_prove.devstack.server import Server, ServerGroup

pytestmark = [pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark]

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs" / "production.md").read_text()
BRIDGE: Final = "plant-7"
#: Of the page, each a free one here.
PORTS: Final = (8883, 9093, 9094, 9095, 9464)
#: Of one root for all, and of one for each of Kafka's machines.
PLACES: Final = (
    *("/etc/mosquitto", "/etc/towline", "/etc/prometheus", "/etc/systemd"),
    *("/var/lib/mosquitto", "/var/lib/towline"),
)
KAFKA_PLACES: Final = ("/etc/kafka", "/var/lib/kafka")
#: What the page's device publishes on each line: how many, and each payload.
SENT: Final = {"telemetry": (1000, b"21.5"), "events": (100, b"open")}
#: Doctor's rows about this machine: its disk, memory and clock are not the example's.
OF_THE_MACHINE: Final = {"TL-D42", "TL-D43", "TL-D44", "TL-D46", "TL-D47"}
#: Of one broker instead of three; doctor says so in a row.
ALONE: Final = {
    ",2@k2.example:9095,3@k3.example:9095": "",
    ",k2.example:9093,k3.example:9093": "",
    "replication.factor=3": "replication.factor=1",
    "replication_factor = 3": "replication_factor = 1",
    "min.isr=2": "min.isr=1",
    "min.insync.replicas=2": "min.insync.replicas=1",
}
ONE_BROKER: Final = "TL-D27"
#: ``install`` without owner and group.
INSTALL: Final = """
for word; do
    shift
    case "$word" in
        -o | -g) skip=1 ;;
        *) [ "$skip" ] || set -- "$@" "$word"; skip= ;;
    esac
done
exec PROGRAM "$@"
"""
#: Programs that change a machine: their calls are recorded, and nothing is done.
RECORDED: Final = ("useradd", "systemctl")


def page_blocks() -> dict[str, list[str]]:
    """The commands of the page by section, in order."""
    sections = [text.partition("\n") for text in PAGE.removeprefix("# ").split("\n## ")]
    blocks = {title: re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for title, _, text in sections}
    return {title: texts for title, texts in blocks.items() if texts}


@dataclass
class Machine:
    """All machines of the page in one directory.

    Attributes:
        root: Of their file systems.
        brokers: Numbers of Kafka's machines.
        blocks: Commands of the page that were not typed yet.
    """

    root: Path
    brokers: Sequence[int]
    blocks: dict[str, list[str]] = field(default_factory=page_blocks)
    ports: dict[int, int] = field(default_factory=lambda: {port: free_port() for port in PORTS})

    def __post_init__(self) -> None:
        self.work, self.tools = self.root / "work", self.root / "tools"
        for directory in (self.work, self.tools, self.root / "etc/systemd/system", self.root / "etc/mosquitto"):
            directory.mkdir(parents=True)
        java, jars = find_java(), kafka_jars()
        run_java = [java, *archive_options(class_archive_path(jars, jars)), *FORMAT_JVM, "-cp", f"{jars}/*"]
        python = [sys.executable, "-m", "tests.engines.kafka_tools"]
        programs = {
            "sudo": 'shift 2; exec "$@"',
            "install": INSTALL.replace("PROGRAM", shutil.which("install") or ""),
            "kafka-storage.sh": f'exec {shlex.join(map(str, run_java))} kafka.tools.StorageTool "$@"',
            "kafka-configs.sh": f'exec {shlex.join(map(str, run_java))} kafka.admin.ConfigCommand "$@"',
            **{name: f'exec {shlex.join(python)} {name} "$@"' for name in ("kafka-topics.sh", "kafka-acls.sh")},
            **{name: f'echo "{name} $*" >> {self.root}/calls' for name in RECORDED},
        }
        for name in ("promtool", "systemd-analyze"):
            if shutil.which(name) is None:
                programs[name] = "true"  # tests/unit/test_deploy.py and test_alert_rules.py ask for them
        for name, script in programs.items():
            (self.tools / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.tools / name).chmod(0o755)

    def table(self, number: int = 1) -> dict[str, str]:
        """What the page says → what it is here, seen from one of Kafka's machines."""
        return {
            **(ALONE if len(self.brokers) == 1 else {}),
            **{place: f"{self.root}{place}" for place in PLACES},
            **{place: f"{self.root}/k{number}{place}" for place in KAFKA_PLACES},
            "/opt/towline": sys.prefix,
            "listener 8883": f"listener {self.ports[8883]} 127.0.0.1",
            # Each of Kafka's machines listens on an address of its own, not on all.
            **{f"://:{port}": f"://127.0.1.{number}:{own_port}" for port, own_port in self.ports.items()},
            **{f":{port}": f":{own_port}" for port, own_port in self.ports.items()},
            "mqtt.example": "127.0.0.1",
            **{f"k{n}.example": f"127.0.1.{n}" for n in (1, 2, 3, "$n")},
            "DNS:": "IP:",
            "n=1 ": f"n={number} ",
            "towline doctor": "towline doctor --json",
        }

    def translate(self, text: str, number: int = 1) -> str:
        """A text of the page or of an example, as it is here."""
        table = self.table(number)
        return re.sub("|".join(map(re.escape, table)), lambda match: table[match[0]], text)

    def path(self, text: str, number: int = 1) -> Path:
        return Path(self.translate(text, number))

    def place_examples(self, number: int = 1) -> None:
        """Give the written examples the addresses, ports and paths of this machine."""
        for directory in ("production", "monitoring", "deploy"):
            for file in (ROOT / "examples" / directory).iterdir():
                (self.work / "examples" / directory / file.name).write_text(self.translate(file.read_text(), number))
        if os.geteuid() == 0:  # it would become the user mosquitto, who can't read here
            with (self.work / "examples" / "production" / "mosquitto.conf").open("a") as conf:
                conf.write("user root\n")

    def type(self, section: str, *, expected: Sequence[int] = (0,), numbers: Sequence[int] = (1,)) -> str:
        """Type the next block of a section, on each of these machines; the output."""
        blocks = self.blocks[section]
        block = blocks.pop(0)
        if not blocks:
            del self.blocks[section]
        output = ""
        for number in numbers:
            path = f"{self.tools}:{Path(sys.executable).parent}:{os.environ['PATH']}:{SBIN_PATH}"
            environ = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
            if number != 1:
                self.place_examples(number)
            command = ["bash", "-euo", "pipefail", "-c", self.translate(block, number)]
            done = subprocess.run(
                command, cwd=self.work, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE
            )
            assert done.returncode in expected, f"{block}{done.stdout[-2000:]}{done.stderr[-2000:]}"
            output += done.stdout
        return output

    def was_called(self, text: str) -> bool:
        """Whether one of `RECORDED` was called so."""
        return f"{text}\n" in (self.root / "calls").read_text()

    @property
    def administrator(self) -> dict[str, Any]:
        """Settings of a client that may do everything in Kafka."""
        return client_settings(self.translate("k1.example:9094"), self.path("/etc/kafka/admin.properties"))


class Broker(Mosquitto):
    """Mosquitto with the files that the page has installed."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.root / "mosquitto", port=machine.ports[8883])
        self.conf = machine.path("/etc/mosquitto/mosquitto.conf")

    @property
    def _tls(self) -> bool:
        return True

    def _command(self, _ports: tuple[int, ...]) -> list[str | Path]:
        return [find_mosquitto().binary, "-c", self.conf]


class Node(ClusterNode):
    """A broker of Kafka with the files that the page has installed, and formatted."""

    def __init__(self, machine: Machine, number: int) -> None:
        super().__init__(machine.root / f"k{number}" / "run", number, "", {})
        self._machine = machine

    def _properties(self, *_ports: int) -> str:
        return self._machine.path("/etc/kafka/server.properties", self.number).read_text()

    def stop(self) -> None:
        """Kill it: without a quorum it would not end in order, and nobody needs its data."""
        self._end_process(signal.SIGKILL, self.stop_seconds)

    @property
    def _data(self) -> Path:
        return self._machine.path("/var/lib/kafka", self.number)

    def _answers(self, _port: int) -> bool:
        mine = self._machine.translate(f"k{self.number}.example:9094")
        settings = {**self._machine.administrator, "bootstrap.servers": mine, "log_level": 0}
        with contextlib.suppress(KafkaException):
            return len(AdminClient(settings).list_topics(timeout=2).brokers) == len(self._machine.brokers)
        return False


class Cluster(ServerGroup):
    """All of them."""

    def __init__(self, machine: Machine) -> None:
        self.nodes = tuple(Node(machine, number) for number in machine.brokers)

    @property
    def servers(self) -> Sequence[Server]:
        return self.nodes


@dataclass
class Plant:
    """What the page leads to."""

    machine: Machine
    broker: Broker
    bridge: Running
    report: dict[str, Any]

    def get(self, path: str) -> str:
        """What the bridge answers where Prometheus asks."""
        (scrape,) = yaml.safe_load(self.machine.path("/etc/prometheus/prometheus.yml").read_text())["scrape_configs"]
        (target,) = scrape["static_configs"][0]["targets"]
        with urllib.request.urlopen(f"http://{target}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def device(self, *filters: Filter) -> Client:
        settings = ClientSettings(
            username="d7",
            password_file=self.machine.work / "d7.password",
            tls=Tls(ca_file=self.machine.work / "ca" / "ca.pem"),
        )
        uri = self.machine.translate("mqtts://mqtt.example:8883")
        return Client(uri, client_id="d7", subscribe=[*filters], settings=settings)

    def values(self, topic: str, count: int) -> list[bytes]:
        """The committed values of so many records of a topic."""
        client = {**self.machine.administrator, "group.id": "reader", "isolation.level": "read_committed"}
        with contextlib.closing(Consumer({**client, "auto.offset.reset": "earliest"})) as consumer:
            partitions = consumer.list_topics(topic, timeout=60).topics[topic].partitions
            consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
            values: list[bytes] = []

            def read() -> bool:
                messages = consumer.consume(10_000, 0.5)
                values.extend(message.value() or b"" for message in messages if not message.error())
                return len(values) >= count

            wait_until(read, PATIENCE, f"{count} records of {topic}")
            return values


def _is_carried(bridge: Running, line: str) -> bool:
    account = bridge.account(line)
    return (account["waiting"], account.get("in_kafka")) == (0, SENT[line][0])


@pytest.fixture(scope="module", params=[1, pytest.param(3, marks=pytest.mark.long)], ids="{}-brokers".format)
def plant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    """Everything on the page up to the first messages."""
    for find in (find_mosquitto, find_java, kafka_jars):
        require(find)
    for program in ("openssl", "mosquitto_passwd"):
        if shutil.which(program) is None:
            lacking(f"{program} is not on this machine")
    machine = Machine(tmp_path_factory.mktemp("plant"), range(1, request.param + 1))
    with contextlib.ExitStack() as running:
        machine.type("In production")
        machine.place_examples()
        for section in ("Users and directories", "Certificates", "Mosquitto"):
            machine.type(section)
        assert machine.was_called("systemctl restart mosquitto")
        broker = running.enter_context(Broker(machine))
        machine.type("Kafka")
        machine.type("Kafka", numbers=machine.brokers)
        machine.place_examples()
        assert machine.was_called("systemctl enable --now kafka")
        running.enter_context(Cluster(machine))
        for section in ("Topics and rights", "The bridge file"):
            machine.type(section)
        report = json.loads(machine.type("Doctor", expected=(0, 1, 3)))
        machine.type("Service")
        assert machine.was_called(f"systemctl enable --now towline@{BRIDGE}")
        manager = running.enter_context(ServiceManager())
        file, state = machine.path(f"/etc/towline/{BRIDGE}.toml"), machine.path(f"/var/lib/towline/{BRIDGE}")
        bridge = running.enter_context(ended(Running(machine.work, file, state=str(state), environ=manager.environ)))
        unit = machine.path("/etc/systemd/system/towline@.service").read_text().replace("%i", BRIDGE)
        assert f"\nExecStart={machine.path('/opt/towline/bin/towline')} run {file}\n" in unit
        bridge.start()
        wait_until(lambda: "READY=1" in manager.received, PATIENCE, "the start of the service")
        machine.type("Service")
        for line in SENT:
            wait_until(lambda line=line: _is_carried(bridge, line), PATIENCE, line)  # type: ignore[misc]
        wait_until(lambda: bridge.line("commands")["query"] == "running", PATIENCE, "commands")
        status = " ".join(machine.type("Service").split())
        assert "received 1,000 = in Kafka 1,000 + waiting 0 adds up ✓" in status
        machine.type("Metrics and alerts")
        machine.type("Back up")
        assert machine.blocks == {}, "what nobody typed"
        yield Plant(machine, broker, bridge, report)


def test_files_agree_with_each_other() -> None:
    production = ROOT / "examples" / "production"
    monitor = tomllib.loads((production / "bridge.toml").read_text())["monitor"]
    assert monitor["broker_queue_messages"] == read_conf(production / "mosquitto.conf").number("max_queued_messages")
    (scrape,) = yaml.safe_load((ROOT / "examples/monitoring/prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [monitor["listen"]]}]


def test_doctor_has_nothing_against_broker_and_kafka(plant: Plant) -> None:
    rows, brokers = plant.report["findings"], len(plant.machine.brokers)
    wrong = {row["code"] for row in rows if row["verdict"] not in {"holds", "limited"}}
    assert wrong - OF_THE_MACHINE == ({ONE_BROKER} if brokers == 1 else set())
    assert plant.report["exit_code"] == 0 or wrong
    because = {row["code"]: row["evidence"] for row in rows}
    assert because["TL-D25"].startswith(f"{brokers} broker")
    if brokers > 1:
        assert because["TL-D27"].endswith("3 replicas or more, on 3 brokers")
        assert because["TL-D28"] == "every replica is in sync, min.insync.replicas 2"


def test_mosquitto_finds_its_files_as_they_should_be(plant: Plant) -> None:
    """It warns where other users may read them."""
    assert "Warning: File" not in plant.broker.log.read_text()
    modes = {path.stat().st_mode & 0o007 for path in plant.machine.path("/etc/towline/secrets").iterdir()}
    assert modes == {0}


def test_what_a_device_publishes_is_in_kafka_and_the_account_adds_up(plant: Plant) -> None:
    for line, (count, value) in SENT.items():
        account = plant.bridge.account(line)
        assert (account["received"], account["in_kafka"], account["adds_up"]) == (count, count, True)
        assert plant.values(f"plant-7.{line}", count) == [value] * count


def test_a_command_reaches_its_device_and_one_for_nobody_is_a_dead_letter(plant: Plant) -> None:
    with plant.device(Filter("command/d7/#", qos=2)) as device:
        producer = Producer(plant.machine.administrator)
        for key in (b"d7", b"#"):
            producer.produce("plant-7.commands", b"close", key)
        assert producer.flush(60) == 0
        message = wait_until(lambda: device.receive(1), PATIENCE, "the command")
        assert (message.topic, message.payload, message.qos) == ("command/d7", b"close", 2)
        message.ack()
    wait_until(lambda: plant.bridge.account("commands")["dead_lettered"] == 1, PATIENCE, "the dead letter")
    wait_until(lambda: plant.bridge.account("commands")["delivered"] == 1, PATIENCE, "the command's account")
    assert plant.bridge.account("commands")["adds_up"]
    assert "plant-7.dead-letters" in towline_command("dlq", "show", plant.bridge.file, check=True).stdout


def test_a_device_publishes_under_its_own_name_only(plant: Plant) -> None:
    with plant.device() as device, pytest.raises(BrokerRefused, match="not authorized"):
        device.publish("telemetry/d8/temperature", b"0").result(60)


def test_prometheus_and_a_browser_find_the_bridge(plant: Plant) -> None:
    def scraped(name: str) -> dict[str, float]:
        families = text_string_to_metric_families(plant.get("/metrics"))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {sample.labels["line"]: sample.value for sample in samples}

    assert scraped("towline_broker_connected") == {"telemetry": 1, "events": 1, "commands": 1}
    budget = wait_until(lambda: scraped("towline_outage_budget_broker_seconds"), 60, "a rate between two scrapes")
    assert budget.keys() == {"telemetry", "events"}
    assert "<title>" in plant.get("/")
