"""Records Kafka would refuse, against a real Kafka: kept in the same transaction, every byte, and the rest goes on."""

from __future__ import annotations

import datetime as dt
import os
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.integration.kafka.reading import records
from tests.integration.kafka.writing import QUERY, delivery
from tests.unit.kafka.memory import RECORD_TYPES
from towline.kafka.deadletters import ChunkAssembler, DeadLetter, Reason
from towline.sinks import Task
from towline_prove.devstack import Kafka

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
