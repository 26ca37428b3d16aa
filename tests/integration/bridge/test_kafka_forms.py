"""Kafka as users have it: three brokers, SCRAM over TLS, the connection string of Event Hubs; and a closed Mosquitto.

On each of them a whole bridge: up, down and dead letters, exactly once. What is said for librdkafka in ``[kafka]``
reaches Spark's Java client by that, too. Whoever sends and reads here knows nothing of Towline.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.helpers import wait_until
from tests.integration.bridge.conftest import ended
from tests.integration.bridge.running import PATIENCE, Running
from towline import files
from towline_prove.devstack import Mosquitto
from towline_prove.devstack.kafka import ClusterNode, KafkaCluster
from towline_prove.devstack.secured import CONNECTION_STRING, USER, SecuredKafka, SecuredMosquitto

pytestmark = [pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark, pytest.mark.long]

FILE = """
name = "{tag}"
state_dir = "state"
[mqtt]
brokers = ["{broker}"]
{mqtt}
[kafka]
bootstrap_servers = "{bootstrap}"
{kafka}
create_topics = {{ partitions = 1 }}
[spark]
master = "local[2]"
[[uplink]]
name = "up"
guarantee = "exactly_once"
route = [{{ from = "up/{{name}}", topic = "{tag}.{{name}}", allowed_topics = ["{tag}.kept"], properties = "none" }}]
[[downlink]]
name = "down"
guarantee = "exactly_once"
from = "{tag}.down"
topic = "back/{{key}}"
"""
LOGIN = """
username = "towline"
password_file = "{password}"
tls = {{ ca_file = "{ca}", cert_file = "{cert}", key_file = "{key}" }}
"""


@dataclass
class Line:
    """A bridge, a device and an application.

    Attributes:
        tag: Name of the bridge, and what its topics begin with.
        bridge: As a user runs it.
        device: Publishes, and keeps what comes back.
        client: Settings of a Kafka client.
        heard: Payloads that came back to the device.
    """

    tag: str
    bridge: Running
    device: paho.Client
    client: dict[str, Any]
    heard: list[bytes] = field(default_factory=list)

    def publish(self, first: int, count: int, topic: str = "up/kept") -> None:
        for number in range(first, first + count):
            self.device.publish(topic, b"%d" % number, qos=2)

    def command(self, first: int, count: int, key: bytes = b"d") -> None:
        producer = Producer({**self.client, "acks": "all", "enable.idempotence": True})
        for number in range(first, first + count):
            producer.produce(f"{self.tag}.down", b"%d" % number, key)
        assert producer.flush(60) == 0

    def accounts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.bridge.account("up"), self.bridge.account("down")

    def until(self, what: str, condition: Callable[[dict[str, Any], dict[str, Any]], bool]) -> None:
        wait_until(lambda: condition(*self.accounts()), PATIENCE, what)

    def committed(self, name: str) -> list[int]:
        """Every committed value of a topic's partition, in order."""
        topic = f"{self.tag}.{name}"
        settings = {"group.id": str(uuid.uuid4()), "enable.partition.eof": True, "auto.offset.reset": "earliest"}
        consumer = Consumer({**self.client, **settings, "isolation.level": "read_committed"})
        consumer.assign([TopicPartition(topic, 0, 0)])
        values: list[int] = []
        end = time.monotonic() + 60
        while time.monotonic() < end:
            record = consumer.poll(1)
            if record is None:
                continue
            if (error := record.error()) is None:
                values.append(int(record.value() or b""))
            elif error.name() == "_PARTITION_EOF":
                break
        consumer.close()
        return values


@contextlib.contextmanager
def line(tag: str, place: Path, broker: Mosquitto, client: dict[str, Any], kafka: str = "") -> Iterator[Line]:
    """A bridge between a broker and a Kafka, ready for messages."""
    device = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    mqtt = ""
    if isinstance(broker, SecuredMosquitto):
        made = broker.certificates
        names = {"ca": made.authority, "cert": made.client, "key": made.client_key, "password": broker.password_file}
        mqtt = LOGIN.format(**names)
        device.tls_set(str(made.authority), str(made.client), str(made.client_key))
        device.username_pw_set(USER, broker.password_file.read_text())
    running = Running(place, place / "bridge.toml")
    bootstrap = client["bootstrap.servers"]
    running.file.write_text(FILE.format(tag=tag, broker=broker.uri, mqtt=mqtt, bootstrap=bootstrap, kafka=kafka))
    one = Line(tag, running, device, client)
    device.on_message = lambda _client, _data, message: one.heard.append(bytes(message.payload))
    device.max_inflight_messages_set(10)  # Mosquitto takes 20
    device.max_queued_messages_set(0)
    with ended(running):
        running.start()
        try:
            device.connect("127.0.0.1", broker.port)
            device.loop_start()
            device.subscribe("back/#", 2)
            wait_until(lambda: ready(running, "up") and ready(running, "down"), PATIENCE, "the lines")
            yield one
        finally:
            device.disconnect()
            device.loop_stop()


def ready(bridge: Running, name: str) -> bool:
    assert bridge.process.poll() is None, bridge.out
    one = bridge.line(name)
    return (one["gateway"] or {}).get("state") == "online" and one["query"] == "running"


def everything_once(one: Line, ups: int, downs: int, dead: int = 1) -> None:
    """What was sent is there once, in order, and both accounts add up."""
    # The word that a batch had a dead letter comes after the batch.
    one.until("up", lambda up, _: (up["waiting"], up["received"], up["dead_lettered"]) == (0, ups + dead, dead))
    one.until(
        "down", lambda _, down: (down["waiting"], down["taken"], down["dead_lettered"]) == (0, downs + dead, dead)
    )
    wait_until(lambda: len(one.heard) >= downs, PATIENCE, "what comes back")
    up, down = one.accounts()
    assert (up["in_kafka"], up["dead_lettered"], up["adds_up"]) == (ups, dead, True)
    assert (down["delivered"], down["dead_lettered"], down["adds_up"]) == (downs, dead, True)
    assert one.committed("kept") == list(range(ups))
    assert [int(payload) for payload in one.heard] == list(range(downs))
    assert len(one.committed("dead-letters")) == 2 * dead
    assert one.bridge.interrupt() == 0


def poison(one: Line) -> None:
    """A dead letter for each direction: no topic that is allowed, and a topic that MQTT does not take."""
    one.device.publish("up/other", b"-1", qos=2)
    one.command(-1, 1, b"#")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("secured")) as kafka:
        yield kafka


#: Of the two, `make test` has the one with the longer handshake.
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
def test_everything_once_with_tls_and_sasl(secured: SecuredKafka, tmp_path: Path, mechanism: Any) -> None:
    """PLAIN with ``$ConnectionString`` is what Azure Event Hubs takes."""
    settings = secured.settings_of(mechanism)
    assert settings["sasl.username"] == (CONNECTION_STRING if mechanism == "PLAIN" else USER)
    secret = secured.secret_file(mechanism).read_text()
    said = ", ".join(f'"{name}" = "{value}"' for name, value in settings.items())
    kafka = f'settings = {{ {said} }}\npassword_file = "{secured.secret_file(mechanism)}"'
    with (
        SecuredMosquitto(tmp_path / "mosquitto") as broker,
        line(mechanism.lower(), tmp_path, broker, secured.client_of(mechanism), kafka) as one,
    ):
        poison(one)
        one.publish(0, 50)
        one.command(0, 50)
        everything_once(one, 50, 50)
        logs = "".join(file.read_text(errors="replace") for file in (tmp_path / "state" / "logs").iterdir())
        assert secret not in one.bridge.out + logs


def test_a_password_that_is_rotated(tmp_path: Path, mosquitto: Mosquitto) -> None:
    """At Kafka first, then in the file: the uplink goes on by itself, the downlink with the next start."""
    often = {"listener.name.sasl_ssl.scram-sha-512.connections.max.reauth.ms": "3000"}  # KIP-368
    password = tmp_path / "password"
    with SecuredKafka(tmp_path / "kafka", settings=often) as kafka:
        files.replace(password, former := kafka.password_file.read_text(), sync=False)
        said = ", ".join(f'"{name}" = "{value}"' for name, value in kafka.settings_of().items())
        login = f'settings = {{ {said} }}\npassword_file = "{password}"'
        with line("rotated", tmp_path, mosquitto, kafka.client, login) as one:
            one.client = {"bootstrap.servers": kafka.internal_bootstrap}
            poison(one)
            one.publish(0, 50)
            one.command(0, 50)
            one.until("the beginning", lambda up, down: up["in_kafka"] == 50 and down["delivered"] == 50)
            credential = UserScramCredentialUpsertion(
                USER, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192), b"a.new.one"
            )
            admin = AdminClient(one.client)
            for change in admin.alter_user_scram_credentials([credential]).values():
                change.result(30)
            one.publish(50, 50)
            one.bridge.said("uthentication failed")
            files.replace(password, "a.new.one", sync=False)
            one.until("what waited", lambda up, _: (up["in_kafka"], up["waiting"]) == (100, 0))
            one.command(50, 50)
            assert one.bridge.interrupt() == 0
            one.bridge.start()
            wait_until(lambda: ready(one.bridge, "up") and ready(one.bridge, "down"), PATIENCE, "the next start")
            everything_once(one, 100, 100)
            assert one.bridge.out.count("is up after") == 2, "Spark was started once, and once more at the restart"
            logs = "".join(file.read_text(errors="replace") for file in (tmp_path / "state" / "logs").iterdir())
            for secret in (former, "a.new.one"):
                assert secret not in one.bridge.out + logs


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("cluster")) as kafka:
        yield kafka


@contextlib.contextmanager
def whole(cluster: KafkaCluster) -> Iterator[None]:
    """Leave all brokers running, whatever happens to them meanwhile."""
    try:
        yield
    finally:
        cluster.start()


def leader(cluster: KafkaCluster, topic: str) -> tuple[ClusterNode, list[int]]:
    """The node that leads the partition of a topic, and who is in sync with it."""
    found = AdminClient(cluster.client).list_topics(topic, timeout=10).topics[topic].partitions[0]
    return cluster.node(found.leader), list(found.isrs)


def test_everything_once_while_a_broker_of_three_is_killed(
    cluster: KafkaCluster, tmp_path: Path, mosquitto: Mosquitto
) -> None:
    """kill -9 of the leader, in the middle of a flow in both directions."""
    with line("killed", tmp_path, mosquitto, cluster.client) as one, whole(cluster):
        one.publish(0, 500)
        one.command(0, 200)
        one.until("the beginning", lambda up, down: up["in_kafka"] > 0 and down["delivered"] > 0)
        victim, in_sync = leader(cluster, "killed.kept")
        assert sorted(in_sync) == [1, 2, 3]
        one.publish(500, 500)
        victim.kill()
        one.publish(1000, 500)
        one.command(200, 200)
        poison(one)
        everything_once(one, 1500, 400)
        assert "did not answer for 60 s" not in one.bridge.out, "the lost leader was not waited for"


def test_nothing_is_lost_with_a_follower_that_lags(
    cluster: KafkaCluster, tmp_path: Path, mosquitto: Mosquitto, record_property: Callable[[str, object], None]
) -> None:
    """A follower stands still and falls behind, then the leader is killed: one replica in sync is left, which is fewer
    than min.insync.replicas, so nothing is acknowledged until the others are back; and the one that lags leads nobody.
    """
    with line("lagging", tmp_path, mosquitto, cluster.client) as one, whole(cluster):
        one.publish(0, 500)
        one.command(0, 100)
        one.until("the beginning", lambda up, down: up["in_kafka"] > 0 and down["delivered"] > 0)
        first, _ = leader(cluster, "lagging.kept")
        lagging = next(node for node in cluster.nodes if node is not first)
        lagging.pause()
        wait_until(lambda: lagging.number not in leader(cluster, "lagging.kept")[1], PATIENCE, "the follower to lag")
        one.publish(500, 500)
        one.until("what two replicas have", lambda up, _: up["in_kafka"] >= 1000)
        first.kill()
        lagging.resume()
        one.publish(1000, 500)
        one.command(100, 100)
        poison(one)
        first.start()
        everything_once(one, 1500, 200)
        record_property("carried", 1700)
