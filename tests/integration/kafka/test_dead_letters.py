"""Records Kafka would refuse, against a real Kafka: kept in the same transaction, every byte, and the rest goes on."""

from __future__ import annotations

import datetime as dt
import os
from typing import Any

import confluent_kafka.admin
import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.integration.kafka.reading import records
from tests.integration.kafka.writing import QUERY, delivery, exactly_once
from tests.unit.kafka.memory import RECORD_TYPES
from towline.errors import KafkaError
from towline.kafka.deadletters import ChunkAssembler, DeadLetter, Reason
from towline.sinks import Task
from towline_prove.devstack import Kafka

#: Untyped in part.
api: Any = confluent_kafka.admin
#: Random, so that no compression makes it small.
LARGE = os.urandom(300_000)


def rows(*cells: dict[str, Any]) -> Any:
    return pa.record_batch(
        {name: pa.array([cell.get(name) for cell in cells], kind) for name, kind in RECORD_TYPES.items()}
    )


def letters(kafka: Kafka, topic: str) -> list[DeadLetter]:
    collector = ChunkAssembler()
    found = [collector.add(m.key(), m.value(), m.headers()) for m in records(kafka.bootstrap, topic)]
    assert not collector.incomplete
    return [letter for letter in found if letter is not None]


def batch_of(good: str, small: str, compacted: str) -> Any:
    headers = [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "towline.dlq.reason", "value": b"x"}]
    ahead = dt.datetime.now(dt.UTC) + dt.timedelta(days=2)
    return rows(
        {"topic": good, "value": b"first", "key": b"k"},
        {"topic": good, "value": b"partition", "partition": 7, "headers": headers},
        {"topic": good, "value": b"late", "timestamp": ahead},
        {"topic": good, "value": b"old", "timestamp": dt.datetime(1960, 1, 1, tzinfo=dt.UTC)},
        {"topic": small, "value": LARGE, "key": b"large", "headers": headers},
        {"topic": compacted, "value": b"no key"},
        {"topic": "towline-nowhere", "value": b"nowhere"},
        {"topic": "a b", "value": b"illegal"},
        {"topic": None, "value": b"absent"},
        {"topic": good, "value": None, "key": b"k", "partition": 0},
    )


REASONS = [
    Reason.PARTITION,
    Reason.TIMESTAMP,
    Reason.TIMESTAMP,
    Reason.TOO_LARGE,
    Reason.KEY_ABSENT,
    Reason.TOPIC_MISSING,
    Reason.TOPIC_ILLEGAL,
    Reason.TOPIC_ABSENT,
]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_every_bad_record_is_a_dead_letter_and_the_others_arrive(kafka: Kafka, topic: NewTopic, guarantee: str) -> None:
    good, small = topic("good"), topic("small", 1, {"max.message.bytes": "50000"})
    compacted = topic("compacted", 1, {"cleanup.policy": "compact"})
    # Its own limit is small as well, so the large one becomes chunks.
    dead = topic("dead", 1, {"max.message.bytes": "60000"})
    sink = delivery(kafka.bootstrap, *RECORD_TYPES, guarantee=guarantee, deadLetterTopic=dead, sinkId=good)
    batch = batch_of(good, small, compacted)
    done = sink.deliver(Task(0, batch=0, query=QUERY), [batch])
    assert (done.rows, done.dead_lettered) == (2, 8)
    assert [m.value() for m in records(kafka.bootstrap, good)] == [b"first", None]
    found = letters(kafka, dead)
    assert [letter.reason for letter in found] == REASONS
    assert [letter.value for letter in found] == batch.column("value").to_pylist()[1:9]
    assert [letter.topic for letter in found] == batch.column("topic").to_pylist()[1:9]
    assert {letter.source for letter in found} == {good}
    original = (("a", b"1"), ("a", None), ("towline.dlq.reason", b"x"))
    assert found[0].headers == found[3].headers == original
    assert (found[0].partition, found[3].key) == (7, b"large")
    assert found[2].timestamp == -315619200000
    assert len(records(kafka.bootstrap, dead)) > len(found)


def test_without_a_dead_letter_topic_nothing_of_the_batch_is_written(kafka: Kafka, topic: NewTopic) -> None:
    small = topic("small", 1, {"max.message.bytes": "50000"})
    sink = exactly_once(kafka.bootstrap, topic=small, sinkId=small)
    batch = pa.record_batch({"value": pa.array([b"good", LARGE])})
    with pytest.raises(KafkaError, match="the topic takes 50,000") as caught:
        sink.deliver(Task(0, batch=0, query=QUERY), [batch])
    assert caught.value.code == "TL-K05"
    assert "deadLetterTopic" in caught.value.remedy
    assert records(kafka.bootstrap, small) == []


def test_many_records_for_a_topic_with_small_batches(kafka: Kafka, topic: NewTopic) -> None:
    """The limit is on the batch: librdkafka must not fill it with more than the topic takes."""
    small = topic("small", 1, {"max.message.bytes": "2000"})
    sink = exactly_once(kafka.bootstrap, topic=small, sinkId=small)
    values = [b"x" * 500 for _ in range(200)]
    assert sink.deliver(Task(0, batch=0, query=QUERY), [pa.record_batch({"value": pa.array(values)})]).rows == 200
    assert len(records(kafka.bootstrap, small)) == 200


def test_a_limit_that_shrank_meanwhile(kafka: Kafka, topic: NewTopic) -> None:
    """Kafka refuses what looked right: the transaction is aborted, the limits are read again, the letter is written."""
    name, dead = topic(), topic("dead")
    sink = exactly_once(kafka.bootstrap, topic=name, sinkId=name, deadLetterTopic=dead)
    sink.deliver(Task(0, batch=0, query=QUERY), [pa.record_batch({"value": pa.array([b"0"])})])
    entry = api.ConfigEntry("max.message.bytes", "1000", incremental_operation=api.AlterConfigOpType.SET)
    resource = api.ConfigResource(api.ResourceType.TOPIC, name, incremental_configs=[entry])
    client = api.AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in client.incremental_alter_configs([resource]).values():
        future.result(60)
    batch = pa.record_batch({"value": pa.array([b"1", b"x" * 5000, b"2"])})
    done = sink.deliver(Task(0, batch=1, query=QUERY), [batch])
    assert (done.rows, done.dead_lettered) == (2, 1)
    assert [m.value() for m in records(kafka.bootstrap, name)] == [b"0", b"1", b"2"]
    assert [letter.value for letter in letters(kafka, dead)] == [b"x" * 5000]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_record_that_is_larger_than_a_segment(kafka: Kafka, topic: NewTopic, guarantee: str) -> None:
    limits = {"segment.bytes": "1048576", "max.message.bytes": "3000000"}
    name, dead = topic("segment", 1, limits), topic("dead")
    named = {"guarantee": guarantee, "deadLetterTopic": dead, "sinkId": name}
    sink = delivery(kafka.bootstrap, *RECORD_TYPES, **named, kafka__message__max__bytes="2000000")
    large = os.urandom(1_200_000)
    batch = rows(*({"topic": name, "value": value, "key": b"k"} for value in (b"1", large, b"2")))
    done = sink.deliver(Task(0, batch=0, query=QUERY), [batch])
    assert (done.rows, done.dead_lettered) == (2, 1)
    assert [m.value() for m in records(kafka.bootstrap, name)] == [b"1", b"2"]
    assert [(letter.reason, letter.value) for letter in letters(kafka, dead)] == [(Reason.TOO_LARGE, large)]
