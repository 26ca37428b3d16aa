"""Look-ups in a real cluster, and in none."""

from __future__ import annotations

import socket
import time

import pytest
from confluent_kafka import Producer

from tests.conftest import NewTopic
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline_prove.devstack import Kafka


def test_reading_topic_metadata_creates_no_topic(kafka: Kafka, topic: NewTopic) -> None:
    there = topic()
    for _ in range(2):
        absent = {"towline-b", there, "towline-a"} - set(KafkaAdmin(kafka.bootstrap).info().topics)
        assert absent == {"towline-a", "towline-b"}
        assert KafkaAdmin(kafka.bootstrap).topic_limits(["towline-a", there]).keys() == {there}


@pytest.mark.parametrize(("name", "replication"), [("no blanks", 1), ("towline-many", 9)])
def test_a_topic_kafka_refuses(kafka: Kafka, name: str, replication: int) -> None:
    with pytest.raises(KafkaError, match=name) as caught:
        KafkaAdmin(kafka.bootstrap).create({name: 1}, replication=replication)
    assert caught.value.code == "TL-K09"
    assert caught.value.location == kafka.bootstrap


def test_open_transactions_of_a_topic_are_waited_for(kafka: Kafka, topic: NewTopic) -> None:
    name = topic(partitions=2)
    assert KafkaAdmin(kafka.bootstrap).wait_for_open_transactions(name)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(name, b"x", partition=1)
    producer.flush(30)
    assert not KafkaAdmin(kafka.bootstrap, 1).wait_for_open_transactions(name)
    producer.commit_transaction(30)
    assert KafkaAdmin(kafka.bootstrap).wait_for_open_transactions(name)
    assert KafkaAdmin(kafka.bootstrap).wait_for_open_transactions(f"{name}.absent")


def test_the_offsets_of_a_new_topic_are_retried(own_kafka: Kafka) -> None:
    """A broker tells of a topic before it leads it; a fresh Kafka takes some 100 ms for the first 50 partitions."""
    servers = own_kafka.bootstrap
    settings = SinkSettings.parse({"kafka.bootstrap.servers": servers, "topic": "t", "parallelism": "50"})
    markers = MarkerStore(settings, "sink")
    markers.ensure_topic()
    assert [markers.read_marker(partition) for partition in (0, 25, 49)] == [None] * 3
    for number in range(3):
        KafkaAdmin(servers).create({f"t{number}": 50})
        assert KafkaAdmin(servers).wait_for_open_transactions(f"t{number}")


def closed_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_closed_port(capfd: pytest.CaptureFixture[str]) -> None:
    server = closed_port()
    begin = time.monotonic()
    with pytest.raises(KafkaError, match="Connection refused") as caught:
        KafkaAdmin(server, 1).info()
    assert time.monotonic() - begin < 10
    assert caught.value.code == "TL-K01"
    assert str(caught.value).startswith(f"{server}: Kafka did not answer for 1 s: ")
    assert capfd.readouterr().err == ""


def test_an_unknown_host() -> None:
    with pytest.raises(KafkaError, match=r"resolve 'kafka\.invalid:9092'"):
        KafkaAdmin("kafka.invalid:9092", 1.5).info()


def test_wrong_credentials_show_no_password(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    client = {
        "bootstrap.servers": kafka.bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "u",
        "sasl.password": "${KAFKA_PASSWORD}",
    }
    with pytest.raises(KafkaError, match="authentication failed") as caught:
        KafkaAdmin(client, 1.5).info()
    assert "hunter2" not in str(caught.value)
    assert capfd.readouterr().err == ""
