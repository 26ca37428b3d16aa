"""Records that a topic's settings forbid and nobody may read these: Kafka's refusal tells, and the others arrive."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.integration.kafka.reading import records
from tests.integration.kafka.test_dead_letters import letters
from tests.integration.kafka.writing import QUERY, delivery
from towline.errors import KafkaError
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
def test_records_without_a_key_for_a_compacted_topic(
    kafka: Kafka, topic: NewTopic, guarantee: str, aborted: list[str]
) -> None:
    compacted, dead = topic("compacted", 1, {"cleanup.policy": "compact"}), topic("dead")
    bad = {number: (None, b"bad %d" % number) for number in range(3, 40, 5)}
    done = write(kafka, guarantee, dead, *mixed(compacted, bad))
    assert (done.rows, done.dead_lettered) == (40 - len(bad), len(bad))
    found = letters(kafka, dead)
    assert {letter.reason for letter in found} == {Reason.KEY_ABSENT}
    assert [letter.value for letter in found] == [value for _, value in bad.values()]
    good = [b"%d" % number for number in range(40) if number not in bad]
    arrived = values(kafka, compacted)
    assert arrived[-len(good) :] == good, "in order, after what came before the refusal"
    assert set(arrived) == set(good)
    assert arrived == good or guarantee == "at_least_once"
    assert len(aborted) <= 3
    aborted.clear()
    assert write(kafka, guarantee, dead, *mixed(compacted, bad)).dead_lettered == len(bad)
    assert not aborted, "it is known by now"
    assert values(kafka, compacted)[-len(good) :] == good


@BOTH
def test_records_that_are_too_large(kafka: Kafka, topic: NewTopic, guarantee: str, aborted: list[str]) -> None:
    """The largest come first: each refusal by itself would tell of one only."""
    small, dead = topic("small", 1, {"max.message.bytes": "20000"}), topic("dead")
    bad = {number: (b"k", os.urandom(60_000 - 1000 * number)) for number in range(0, 40, 3)}
    done = write(kafka, guarantee, dead, *mixed(small, bad))
    assert (done.rows, done.dead_lettered) == (40 - len(bad), len(bad))
    found = letters(kafka, dead)
    assert {letter.reason for letter in found} == {Reason.TOO_LARGE}
    assert [letter.value for letter in found] == [value for _, value in bad.values()]
    good = [b"%d" % number for number in range(40) if number not in bad]
    arrived = values(kafka, small)
    assert arrived[-len(good) :] == good, "in order, after what came before the refusal"
    assert set(arrived) == set(good)
    assert arrived == good or guarantee == "at_least_once"
    assert len(aborted) <= 3
    assert write(kafka, guarantee, dead, *mixed(small, bad)).dead_lettered == len(bad)
    assert values(kafka, small) == arrived + good, "what was learned once costs nothing any more"


@BOTH
def test_many_records_of_which_only_a_request_is_too_large(kafka: Kafka, topic: NewTopic, guarantee: str) -> None:
    small = topic("small", 1, {"max.message.bytes": "20000"})
    cells = [(small, b"k", b"%04d" % number + b"x" * 1000) for number in range(100)]
    assert write(kafka, guarantee, None, *cells).rows == 100
    assert {value[:4] for value in values(kafka, small)} == {value[:4] for _, _, value in cells}


@BOTH
def test_without_a_dead_letter_topic_the_line_names_topic_and_reason(
    kafka: Kafka, topic: NewTopic, guarantee: str
) -> None:
    compacted = topic("compacted", 1, {"cleanup.policy": "compact"})
    cells = mixed(compacted, {3: (None, b"bad")})
    with pytest.raises(KafkaError, match=rf'"{compacted}" can not be written: a compacted topic takes no') as caught:
        write(kafka, guarantee, None, *cells)
    assert caught.value.code == "TL-K06"
    before = values(kafka, compacted)
    with pytest.raises(KafkaError, match="takes no record without a key"):
        write(kafka, guarantee, None, *cells)
    assert values(kafka, compacted) == before, "nothing is written again"


def test_more_kinds_than_can_be_learned_stop_the_line(kafka: Kafka, topic: NewTopic) -> None:
    compacted = {"cleanup.policy": "compact"}
    topics, dead = [topic("compacted", 1, compacted) for _ in range(17)], topic("dead")
    with pytest.raises(KafkaError, match=r"more than 16 kinds, the last for topic .*INVALID_RECORD") as caught:
        write(kafka, "exactly_once", dead, *[(name, None, b"x") for name in topics])
    assert caught.value.code == "TL-K29"
    assert records(kafka.bootstrap, dead) == []
