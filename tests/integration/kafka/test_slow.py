"""A Kafka that takes little in a second: what is planned arrives, once where that is promised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.integration.kafka.quotas import limit_bytes
from tests.integration.kafka.reading import records
from tests.integration.kafka.writing import QUERY, delivery
from towline.errors import KafkaError
from towline.kafka.delivery import Delivery
from towline.sinks import Task
from towline_prove.devstack import Kafka

#: Bytes a second; ten seconds of them pass at once.
RATE = 100_000
SIZE = 3_000
ROWS = 600
TASK = Task(0, batch=0, query=QUERY)


def slow_sink(kafka: Kafka, topic: str, **options: str) -> Delivery:
    limit_bytes(kafka, topic, RATE)
    return delivery(
        kafka.bootstrap, kafka__client__id=topic, kafka__batch__size="65536", topic=topic, sinkId=topic, **options
    )


def rows() -> Iterator[Any]:
    for first in range(0, ROWS, 100):
        values = [b"%d " % number + os.urandom(SIZE) for number in range(first, first + 100)]
        yield pa.record_batch({"value": pa.array(values)})


def numbers(kafka: Kafka, topic: str) -> list[int]:
    return [int(record.value().partition(b" ")[0]) for record in records(kafka.bootstrap, topic)]


def test_a_batch_that_takes_longer_than_its_transaction_is_given_the_time(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    sink = slow_sink(kafka, name, deliveryTimeout="4")
    done = sink.deliver(TASK, rows())
    assert done.rows == ROWS
    assert done.seconds is not None
    assert done.seconds > 4
    assert numbers(kafka, name) == list(range(ROWS))


def test_at_least_once_waits_as_long_as_records_arrive(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    sink = slow_sink(kafka, name, deliveryTimeout="8", guarantee="at_least_once")
    done = sink.deliver(TASK, rows())
    assert done.rows == ROWS
    assert done.seconds is not None
    assert done.seconds > 8
    assert numbers(kafka, name) == list(range(ROWS)), "none came twice"


def test_a_transaction_that_is_too_slow_names_its_remedy(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    sink = slow_sink(kafka, name, deliveryTimeout="4", kafka__transaction__timeout__ms="4001")
    with pytest.raises(KafkaError, match=r"too slow: [0-9,]+ of 1,8[0-9,]+ bytes in 4 s, [0-9,]+ bytes/s") as caught:
        sink.deliver(TASK, rows())
    assert caught.value.code == "TL-K28"
    assert "transaction.max.timeout.ms" in caught.value.remedy
    assert numbers(kafka, name) == []
