"""An inbox in a replicated Kafka, one of whose three brokers is killed while messages are taken in."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.integration.landing.test_takeover import Around, Pair, paired, took_over
from towline_prove.devstack import Mosquitto, MosquittoTooOld
from towline_prove.devstack.cluster import ClusterNode, KafkaCluster

pytestmark = [pytest.mark.kafka, pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("cluster")) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MosquittoTooOld)
        with Mosquitto(tmp_path_factory.mktemp("mosquitto"), settings={"max_queued_messages": "0"}) as one:
            yield one


@pytest.fixture
def pair(cluster: KafkaCluster, broker: Mosquitto, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    end = Around(broker.port, cluster.bootstrap)
    with paired(request.node.name, tmp_path, end, end) as made:
        yield made
    cluster.start()


def leader(cluster: KafkaCluster, place: TopicPartition) -> ClusterNode:
    """The node that leads a partition, all of whose replicas are in sync."""
    found = AdminClient(cluster.client).list_topics(place.topic, timeout=10).topics[place.topic]
    partition = found.partitions[place.partition]
    assert sorted(partition.isrs) == [1, 2, 3]
    return cluster.node(partition.leader)


def topics_of(pair: Pair) -> list[TopicPartition]:
    name = pair.active.settings.name
    return [TopicPartition(f"towline.{name}.{kind}", number) for kind, number in (("landing", 0), ("state", 0))]


@pytest.mark.parametrize("which", [0, 1], ids=["landing", "state"])
def test_nothing_is_lost_or_doubled_when_its_leader_dies(
    cluster: KafkaCluster,
    broker: Mosquitto,
    pair: Pair,
    tmp_path: Path,
    which: int,
    record_property: Callable[[str, object], None],
) -> None:
    """The owner goes on with the next leader, or gives way to the standby: in either case everything is there once."""
    victim = leader(cluster, topics_of(pair)[which])
    seconds = took_over(broker.port, pair, tmp_path, victim.kill, may_stay=True)
    record_property("seconds to the first acknowledgement", round(seconds, 2))
    record_property("taken over", pair.said(pair.standby, "journal taken") is not None)


def test_a_standby_takes_over_when_the_machine_of_both_is_lost(
    cluster: KafkaCluster,
    broker: Mosquitto,
    pair: Pair,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The owner, and the broker that leads its signs of life, at the same moment."""
    victim = leader(cluster, TopicPartition(topics_of(pair)[1].topic, 1))

    def lost() -> None:
        os.kill(pair.active.pid, signal.SIGKILL)
        victim.kill()

    seconds = took_over(broker.port, pair, tmp_path, lost)
    record_property("seconds to the first acknowledgement", round(seconds, 2))
