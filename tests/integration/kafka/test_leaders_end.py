"""What the last marker is, is the leader's to say: on a real Kafka, whose partition is made to look shorter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.conftest import NewTopic
from tests.integration.kafka.writing import QUERY, counted, exactly_once
from towline.bridge import deadletters
from towline.kafka import markerstore
from towline.kafka.admin import KafkaAdmin
from towline.kafka.delivery import ExactlyOnce
from towline.kafka.markerstore import MarkerStore
from towline.sinks import Task
from towline_prove.devstack import Kafka


@pytest.fixture
def sink(kafka: Kafka, topic: NewTopic) -> Iterator[ExactlyOnce]:
    """One that names a rack, and has written batch 0; it waits 3 s at most."""
    name = topic()
    made = exactly_once(kafka.bootstrap, topic=name, sinkId=name, deliveryTimeout="3", kafka__client__rack="west")
    made.deliver(Task(0, batch=0, query=QUERY), counted(0, 10))
    KafkaAdmin(kafka.bootstrap).wait_for_open_transactions(made.settings.marker_topic_of(name))
    yield made
    markerstore._highest_ends.clear()
    markerstore._consumers.clear()


class Behind:
    """The consumer of this process, to whom the leader's end is further than what it can read yet.

    Args:
        consumer: The real one.
        more: By how much.
    """

    def __init__(self, consumer: Any, more: int) -> None:
        self._consumer = consumer
        self._more = more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def get_watermark_offsets(self, *place: Any, **settings: Any) -> tuple[int, int]:
        low, high = self._consumer.get_watermark_offsets(*place, **settings)
        return low, high + self._more


def test_an_open_transaction_of_another_writer_is_not_waited_for(sink: ExactlyOnce) -> None:
    store = MarkerStore(sink.settings, sink.settings.sink_id or "")
    producer = Producer({"bootstrap.servers": sink.settings.servers, "transactional.id": f"open-{store.topic}"})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(store.topic, b"{}", b"else", 0)
    assert producer.flush(10) == 0
    found = store.read_marker(0)
    producer.abort_transaction(10)
    assert found is not None
    assert found.batch == 0


def test_dead_letters_are_read_to_the_leaders_end(
    kafka: Kafka, topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = topic("dead")
    client = {"bootstrap.servers": kafka.bootstrap, "client.rack": "west"}
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(name, b"one")
    assert producer.flush(10) == 0
    ledger = deadletters.DeadLetterTopic(client, name, {})
    assert [record.value for record in ledger._read_records(ledger._end_offsets())] == [b"one"]

    real = ledger._new_consumer
    monkeypatch.setattr(deadletters.DeadLetterTopic, "_new_consumer", lambda _, *isolation: Behind(real(*isolation), 1))
    later = threading.Timer(1.0, producer.produce, (name, b"two"))
    later.start()
    assert [record.value for record in ledger._read_records(ledger._end_offsets())] == [b"one", b"two"]
    assert producer.flush(10) == 0
