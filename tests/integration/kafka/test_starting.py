"""A transaction's producer that is started while its rows are still coming."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.kafka.writing import QUERY, committed, exactly_once
from towline.errors import KafkaError
from towline.kafka.options import SinkSettings
from towline.kafka.producers import StartingProducer, TransactionalProducer
from towline.sinks import Task
from towline_prove.devstack import Kafka

ID = "towline.starting.0"


def settings(bootstrap: str, **more: str) -> SinkSettings:
    return SinkSettings.parse({"kafka.bootstrap.servers": bootstrap, "topic": "t", **more})


def closed(monkeypatch: pytest.MonkeyPatch) -> list[TransactionalProducer]:
    """Producers that were closed since."""
    gone: list[TransactionalProducer] = []
    close = TransactionalProducer.close

    def noted(producer: TransactionalProducer) -> None:
        gone.append(producer)
        close(producer)

    monkeypatch.setattr(TransactionalProducer, "close", noted)
    return gone


def test_it_is_taken_once_and_only_with_the_settings_that_it_has(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = closed(monkeypatch)
    for more in ({}, {"batch.size": "5000"}):
        gone.clear()
        with closing(StartingProducer(settings(kafka.bootstrap), ID)) as starting:
            producer = starting.take(more)
            assert producer.extra == more
            assert len(gone) == bool(more), "one of other settings is closed, not used"
            again = starting.take(more)
            assert again is not producer
        assert len(gone) == bool(more), "what was taken is its taker's"
        producer.close()
        again.close()


def test_one_that_nobody_takes_is_closed(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = closed(monkeypatch)
    with pytest.raises(ZeroDivisionError), closing(StartingProducer(settings(kafka.bootstrap), ID)):
        raise ZeroDivisionError
    wait_until(lambda: len(gone) == 1, 30, "the producer to be closed")


def test_what_went_wrong_is_told_to_who_takes_it_and_holds_up_nobody_else() -> None:
    nobody = settings("127.0.0.1:1", deliveryTimeout="1")
    with closing(StartingProducer(nobody, ID)):
        pass  # does not wait for Kafka
    with closing(StartingProducer(nobody, ID)) as starting, pytest.raises(KafkaError) as caught:
        starting.take({})
    assert caught.value.code == "TL-K01"


def test_it_is_there_before_the_rows_are(kafka: Kafka, topic: NewTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    name = topic(partitions=1)
    sink = exactly_once(kafka.bootstrap, topic=name)
    started, start = threading.Event(), TransactionalProducer.start

    def noted(producer: TransactionalProducer) -> None:
        start(producer)
        started.set()

    def rows() -> Iterator[pa.RecordBatch]:
        assert started.wait(30), "it waits for the rows"
        yield pa.record_batch({"value": pa.array([b"7"])})

    monkeypatch.setattr(TransactionalProducer, "start", noted)
    done = sink.deliver(Task(0, batch=0, query=QUERY), rows())
    assert (done.rows, committed(kafka, name)) == (1, [7])
