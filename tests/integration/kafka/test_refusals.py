"""Records that a topic's settings forbid and nobody may read these: Kafka's refusal tells, and the others arrive."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.integration.kafka.reading import dead_letters, records
from tests.integration.kafka.writing import QUERY, delivery
from towline.kafka import recordcheck
from towline.kafka.admin import KafkaAdmin
from towline.kafka.deadletters import Reason
from towline.kafka.delivery import DeliveryResult
from towline.kafka.producers import TransactionalProducer
from towline.sinks import Task
from towline_prove.devstack import Kafka

BOTH = pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
_batches = itertools.count()


@pytest.fixture(autouse=True)
def aborted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A user without the right DescribeConfigs, in a process that has learned nothing; the transactions that failed."""
    monkeypatch.setattr(KafkaAdmin, "configs", lambda *_: {})
    failed: list[str] = []
    abort = TransactionalProducer.abort

    def counted(producer: TransactionalProducer) -> None:
        failed.extend([producer.transactional_id] * producer._in_transaction)
        abort(producer)

    monkeypatch.setattr(TransactionalProducer, "abort", counted)
    recordcheck._learned_limits.clear()
    recordcheck._described_limits.clear()
    yield failed
    recordcheck._learned_limits.clear()
    recordcheck._described_limits.clear()


def write(kafka: Kafka, guarantee: str, dead: str | None, *cells: tuple[str, bytes | None, bytes]) -> DeliveryResult:
    """Topic, key and value of each record, as a batch of a process's life."""
    more = {} if dead is None else {"deadLetterTopic": dead}
    named = {"guarantee": guarantee, "sinkId": f"refusals.{next(_batches)}", "kafka__message__max__bytes": "3000000"}
    sink = delivery(kafka.bootstrap, "topic", "key", "value", **named, **more)
    arrays = [pa.array([cell[at] for cell in cells], kind) for at, kind in enumerate((pa.string(), *[pa.binary()] * 2))]
    batch = pa.record_batch(arrays, names=["topic", "key", "value"])
    half = len(cells) // 2
    return sink.deliver(Task(0, batch=0, query=QUERY), [batch.slice(0, half), batch.slice(half)])


def values(kafka: Kafka, topic: str) -> list[bytes]:
    return [record.value() for record in records(kafka.bootstrap, topic)]


def mixed(topic: str, bad: Mapping[int, tuple[bytes | None, bytes]], count: int = 40) -> list[Any]:
    """Numbers with keys, some of them replaced."""
    return [(topic, *bad.get(number, (b"k", b"%d" % number))) for number in range(count)]


@BOTH
@pytest.mark.parametrize(
    ("config", "reason"),
    [({"cleanup.policy": "compact"}, Reason.KEY_ABSENT), ({"max.message.bytes": "20000"}, Reason.TOO_LARGE)],
)
def test_refused_records_become_dead_letters_and_are_known_from_then_on(
    kafka: Kafka, topic: NewTopic, guarantee: str, config: dict[str, str], reason: Reason, aborted: list[str]
) -> None:
    """The largest come first: each refusal by itself would tell of one only."""
    name, dead = topic("refusing", 1, config), topic("dead")
    large = reason is Reason.TOO_LARGE
    bad = {
        number: (b"k", os.urandom(60_000 - 1000 * number)) if large else (None, b"bad %d" % number)
        for number in range(0, 40, 3)
    }
    done = write(kafka, guarantee, dead, *mixed(name, bad))
    assert (done.rows, done.dead_lettered) == (40 - len(bad), len(bad))
    found = dead_letters(kafka.bootstrap, dead)
    assert {letter.reason for letter in found} == {reason}
    assert [letter.value for letter in found] == [value for _, value in bad.values()]
    good = [b"%d" % number for number in range(40) if number not in bad]
    arrived = values(kafka, name)
    assert arrived[-len(good) :] == good, "in order, after what came before the refusal"
    assert set(arrived) == set(good)
    assert arrived == good or guarantee == "at_least_once"
    assert len(aborted) <= 3
    aborted.clear()
    assert write(kafka, guarantee, dead, *mixed(name, bad)).dead_lettered == len(bad)
    assert not aborted, "it is known by now"
    assert values(kafka, name) == arrived + good


@BOTH
def test_many_records_of_which_only_a_request_is_too_large(kafka: Kafka, topic: NewTopic, guarantee: str) -> None:
    small = topic("small", 1, {"max.message.bytes": "20000"})
    cells = [(small, b"k", b"%04d" % number + b"x" * 1000) for number in range(100)]
    assert write(kafka, guarantee, None, *cells).rows == 100
    assert {value[:4] for value in values(kafka, small)} == {value[:4] for _, _, value in cells}
