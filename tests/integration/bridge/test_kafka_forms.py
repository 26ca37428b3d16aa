"""Kafka as users have it: SCRAM over TLS, and three brokers.

On each of them a whole bridge: up, down and dead letters, exactly once. What is said for librdkafka in ``[kafka]``
reaches Spark's Java client by that, too. Whoever sends and reads here knows nothing of Towline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from tests.helpers import produce_all, wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from tests.integration.conftest import Ear
from towline import files
from towline_prove.devstack import Mosquitto
from towline_prove.devstack.kafka import ClusterNode, KafkaCluster
from towline_prove.devstack.secured import USER, SecuredKafka

pytestmark = [pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark, pytest.mark.long]

LINES = """
[[uplink]]
name = "up"
guarantee = "exactly_once"
route = [{ from = "up/{name}", topic = "forms.{name}", allowed_topics = ["forms.kept"], properties = "none" }]
[[downlink]]
name = "down"
guarantee = "exactly_once"
from = "forms.down"
topic = "back/{key}"
"""


@dataclass
class Line:
    """A bridge, a broker with a device that hears what comes back, and an application at Kafka's `servers`."""

    bridge: Running
    broker: Mosquitto
    ear: Ear
    servers: str

    def start(self) -> None:
        self.bridge.start()
        for name in ("up", "down"):
            wait_until(lambda name=name: self.bridge.online(name), PATIENCE, name)  # type: ignore[misc]
            wait_until(lambda name=name: self.bridge.line(name)["query"] == "running", PATIENCE, name)  # type: ignore[misc]

    def send(self, ups: range, downs: range, topic: str = "up/kept", key: bytes = b"d") -> None:
        publish(self.broker, ups.start, len(ups), topic=topic, text="{}", qos=2)
        produce_all(self.servers, "forms.down", ((key, b"%d" % number, []) for number in downs))

    def until(self, what: str, condition: Callable[[dict[str, Any], dict[str, Any]], bool]) -> None:
        wait_until(lambda: condition(self.bridge.account("up"), self.bridge.account("down")), PATIENCE, what)

    def has_everything_once(self, ups: int, downs: int) -> None:
        """What was sent is there once, in order, both accounts add up, and a dead letter of each line is set aside."""
        # No topic that is allowed, and a topic that MQTT does not take.
        self.send(range(-1, 0), range(0), "up/other")
        self.send(range(0), range(-1, 0), key=b"#")
        self.until("up", lambda up, _: (up["waiting"], up["received"], up["dead_lettered"]) == (0, ups + 1, 1))
        self.until("down", lambda _, down: (down["waiting"], down["taken"], down["dead_lettered"]) == (0, downs + 1, 1))
        wait_until(lambda: len(self.ear.messages) >= downs, PATIENCE, "what comes back")
        up, down = self.bridge.account("up"), self.bridge.account("down")
        assert (up["in_kafka"], up["adds_up"]) == (ups, True)
        assert (down["delivered"], down["adds_up"]) == (downs, True)
        assert [int(value) for _, value, _ in in_kafka(self.servers, "forms.kept")] == list(range(ups))
        assert self.ear.numbers() == list(range(downs))
        assert len(in_kafka(self.servers, "forms.dead-letters")) == 2
        assert self.bridge.interrupt() == 0


@contextlib.contextmanager
def line(bridge: Running, broker: Mosquitto, kafka: str, servers: str, login: str = "") -> Iterator[Line]:
    """A bridge between a broker and a Kafka at `servers`, ready for messages; the application is at `kafka`."""
    bridge.write(broker.uri, servers, LINES, name="forms", create_topics=True, kafka_settings=login)
    with contextlib.closing(Ear(broker, "back/#")) as ear:
        one = Line(bridge, broker, ear, kafka)
        one.start()
        yield one


def test_a_password_that_is_rotated(tmp_path: Path, bridge: Running, mosquitto: Mosquitto) -> None:
    """At Kafka first, then in the file: the uplink goes on by itself, the downlink with the next start."""
    often = {"listener.name.sasl_ssl.scram-sha-512.connections.max.reauth.ms": "3000"}  # KIP-368
    password = tmp_path / "password"
    with SecuredKafka(tmp_path / "kafka", settings=often) as kafka:
        files.replace(password, former := kafka.password_file.read_text(), sync=False)
        said = ", ".join(f'"{name}" = "{value}"' for name, value in kafka.settings_of().items())
        login = f', settings = {{ {said} }}, password_file = "{password}"'
        with line(bridge, mosquitto, kafka.internal_bootstrap, kafka.bootstrap, login) as one:
            one.send(range(50), range(50))
            one.until("the beginning", lambda up, down: up["in_kafka"] == 50 and down["delivered"] == 50)
            credential = UserScramCredentialUpsertion(
                USER, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192), b"a.new.one"
            )
            admin = AdminClient({"bootstrap.servers": kafka.internal_bootstrap})
            for change in admin.alter_user_scram_credentials([credential]).values():
                change.result(30)
            one.send(range(50, 100), range(0))
            bridge.said("uthentication failed")
            files.replace(password, "a.new.one", sync=False)
            one.until("what waited", lambda up, _: (up["in_kafka"], up["waiting"]) == (100, 0))
            one.send(range(0), range(50, 100))
            assert bridge.interrupt() == 0
            one.start()
            one.has_everything_once(100, 100)
            assert bridge.out.count("is up after") == 2, "Spark was started once, and once more at the restart"
            text = bridge.out + "".join(log.read_text() for log in (bridge.directory / "state" / "logs").iterdir())
            assert [secret for secret in (former, "a.new.one") if secret in text] == []


def leader(cluster: KafkaCluster) -> tuple[ClusterNode, list[int]]:
    """The node that leads the partition of the uplink's topic, and who is in sync with it."""
    found = AdminClient(cluster.client).list_topics("forms.kept", timeout=10).topics["forms.kept"].partitions[0]
    return cluster.node(found.leader), sorted(found.isrs)


def test_everything_once_while_brokers_of_three_are_killed(
    tmp_path: Path, bridge: Running, mosquitto: Mosquitto, record_property: Callable[[str, object], None]
) -> None:
    """kill -9 of the leader in the middle of a flow in both directions; and of one whose follower lags.

    Then one replica in sync is left, which is fewer than min.insync.replicas, so nothing is acknowledged until the
    others are back; and the one that lags leads nobody.
    """
    with KafkaCluster(tmp_path / "cluster") as cluster:
        servers = cluster.client["bootstrap.servers"]
        with line(bridge, mosquitto, servers, servers) as one:
            one.send(range(500), range(200))
            one.until("the beginning", lambda up, down: up["in_kafka"] > 0 and down["delivered"] > 0)
            victim, in_sync = leader(cluster)
            assert in_sync == [1, 2, 3]
            one.send(range(500, 1000), range(200, 300))
            victim.kill()
            one.until("the next leader", lambda up, down: up["in_kafka"] == 1000 and down["delivered"] == 300)
            assert "did not answer for 60 s" not in bridge.out, "the lost leader was not waited for"
            victim.start()
            wait_until(lambda: leader(cluster)[1] == [1, 2, 3], PATIENCE, "all in sync")

            first, _ = leader(cluster)
            lagging = next(node for node in cluster.nodes if node is not first)
            lagging.pause()
            wait_until(lambda: lagging.number not in leader(cluster)[1], PATIENCE, "the follower to lag")
            one.send(range(1000, 1500), range(0))
            one.until("what two replicas have", lambda up, _: up["in_kafka"] >= 1500)
            first.kill()
            lagging.resume()
            one.send(range(1500, 2000), range(0))
            first.start()
            one.send(range(0), range(300, 400))
            one.has_everything_once(2000, 400)
            record_property("carried", 2400)
