"""Deliveries to a real Kafka, without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.kafka.reading import numbers
from tests.integration.kafka.writing import counted, delivery
from towline.errors import KafkaError
from towline.kafka import producers
from towline.kafka.admin import KafkaAdmin
from towline.kafka.delivery import DeliveryResult
from towline.sinks import Task
from towline_prove.devstack import Kafka

FIRST = Task(partition=0)


@pytest.fixture(autouse=True)
def _no_producers_left() -> Iterator[None]:
    yield
    for key in list(producers._clients):
        producers._clients.pop(key).close()


def test_reading_topic_metadata_creates_no_topic(kafka: Kafka, topic: NewTopic) -> None:
    there = topic()
    for _ in range(2):
        assert KafkaAdmin(kafka.bootstrap).topic_limits(["towline-a", there]).keys() == {there}


@pytest.mark.faults
def test_kafka_down_fails_with_one_line_and_no_noise(own_kafka: Kafka, capfd: pytest.CaptureFixture[str]) -> None:
    own_kafka.create_topics({"t": 1})
    sink = delivery(own_kafka.bootstrap, guarantee="at_least_once", topic="t", deliveryTimeout="2")
    assert sink.deliver(FIRST, counted(0, 10)).rows == 10
    own_kafka.kill()
    capfd.readouterr()
    with pytest.raises(KafkaError, match="Kafka did not take 2,500 of 2,500 records within 2 s") as caught:
        sink.deliver(FIRST, counted(10, 2510))
    assert caught.value.code == "TL-K02"
    with pytest.raises(KafkaError, match=r"within 2 s: .*Connection refused") as caught:
        sink.deliver(FIRST, counted(10, 2510))
    assert caught.value.code == "TL-K02"
    assert "rdkafka" not in capfd.readouterr().err, "a JVM of another test may write there, the client not"
    own_kafka.start()
    assert sink.deliver(FIRST, counted(10, 2510)).rows == 2500
    assert set(numbers(own_kafka.bootstrap, "t")) == set(range(2510))


@pytest.mark.faults
def test_at_most_once_counts_what_a_dead_kafka_costs(own_kafka: Kafka) -> None:
    own_kafka.create_topics({"t": 1})
    sink = delivery(own_kafka.bootstrap, guarantee="at_most_once", topic="t", deliveryTimeout="1")
    assert sink.deliver(FIRST, counted(0, 10)).dropped_rows == 0
    wait_until(lambda: numbers(own_kafka.bootstrap, "t") == list(range(10)), what="10 records")
    own_kafka.kill()
    for _ in range(2):
        done = sink.deliver(FIRST, counted(10, 2510))
        assert done.rows + done.dropped_rows == 2500
        assert done.dropped_rows > 0
        assert done.drop_reason
    own_kafka.start()
    assert sink.deliver(FIRST, counted(2510, 2520)) == DeliveryResult(rows=10, bytes=40)
    wait_until(lambda: 2519 in numbers(own_kafka.bootstrap, "t"), what="the last record")
    arrived = numbers(own_kafka.bootstrap, "t")
    assert len(arrived) == len(set(arrived))
