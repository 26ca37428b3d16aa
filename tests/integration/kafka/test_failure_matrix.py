"""Failures of exactly once that need a real Kafka: fencing, time-outs, kills; nothing is lost or doubled.

The rules of markers are in unit/kafka/test_markers.py and test_exactly_once.py; test_exactly_once_spark.py has Spark.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.kafka.writing import QUERY, account, committed, counted, delivery, exactly_once
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin
from towline.kafka.delivery import DeliveryResult, ExactlyOnce
from towline.kafka.markerstore import MarkerStore
from towline.kafka.producers import AttemptError, TransactionalProducer
from towline.sinks import Task
from towline_prove.devstack import Kafka

ROOT = Path(__file__).parents[3]
ROWS = 200


def write(sink: ExactlyOnce, batch: int, partition: int = 0, query: str = QUERY) -> DeliveryResult:
    """A batch of ROWS rows for each partition, numbered by batch and partition."""
    first = (batch * sink.settings.parallelism + partition) * ROWS
    return sink.deliver(Task(partition, batch=batch, query=query), counted(first, first + ROWS))


def refused(sink: ExactlyOnce, batch: int, code: str, partition: int = 0, query: str = QUERY) -> KafkaError:
    with pytest.raises(KafkaError) as caught:
        write(sink, batch, partition, query)
    assert caught.value.code == code, str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


class Abandoned(ExactlyOnce):
    """A task that dies within its transaction, as far as Kafka can tell: it never says another word."""

    left: TransactionalProducer | None = None

    def deliver(self, task: Task, batches: Iterable[Any]) -> DeliveryResult:
        name = self.settings.transactional_id(str(self.settings.sink_id), task.partition)
        producer = TransactionalProducer(self.settings, name)
        producer.begin()
        for batch in batches:
            producer.write(self.columns.rows(batch))
        producer._producer.flush(10)
        type(self).left = producer
        raise ConnectionAbortedError


@pytest.fixture
def sink_id(topic: NewTopic) -> str:
    return topic(partitions=1)


def sink(kafka: Kafka, name: str, kind: type[ExactlyOnce] = ExactlyOnce, **options: Any) -> ExactlyOnce:
    return exactly_once(kafka.bootstrap, kind=kind, **{"topic": name, "sinkId": name, **options})


def check(kafka: Kafka, name: str, batches: int, partitions: int = 1) -> None:
    assert account(committed(kafka, name), batches * partitions * ROWS) == (0, 0)


def test_a_task_dies_before_its_commit(kafka: Kafka, sink_id: str) -> None:
    write(sink(kafka, sink_id), 0)
    with pytest.raises(ConnectionAbortedError):
        write(sink(kafka, sink_id, Abandoned), 1)
    assert not write(sink(kafka, sink_id), 1).was_skipped
    check(kafka, sink_id, 2)


def test_a_zombie_is_fenced(kafka: Kafka, sink_id: str) -> None:
    """A worker of a lost executor goes on with its transaction after another attempt has committed."""
    with pytest.raises(ConnectionAbortedError):
        write(sink(kafka, sink_id, Abandoned), 0)
    write(sink(kafka, sink_id), 0)
    zombie = Abandoned.left
    assert zombie is not None
    with pytest.raises(KafkaError, match="took over the transactional id") as caught:
        zombie.commit()
    assert caught.value.code == "TL-K19"
    check(kafka, sink_id, 1)


def test_a_zombie_that_is_still_sending_stops(kafka: Kafka, sink_id: str) -> None:
    """A new producer for it would fence the newer attempt in turn (`produce` says "fatal", and not why)."""
    one = sink(kafka, sink_id)
    zombie = TransactionalProducer(one.settings, f"towline.{sink_id}.0")
    zombie.begin()
    newer = TransactionalProducer(one.settings, f"towline.{sink_id}.0")
    (batch,) = counted(0, 1)

    def send() -> None:
        zombie.write(one.columns.rows(batch))

    with pytest.raises(KafkaError, match="took over the transactional id") as caught:
        wait_until(send, what="word from Kafka")
    assert caught.value.code == "TL-K19"
    zombie.close()
    newer.close()


def test_a_broker_refuses_a_record_amid_its_batch(kafka: Kafka, topic: NewTopic) -> None:
    """The limits were changed since they were looked at. `produce` says "state", and not why; nobody waits for it."""
    name = topic(config={"max.message.bytes": "1000"})
    one = sink(kafka, name)
    producer = TransactionalProducer(one.settings, f"towline.{name}.0", {})
    producer.begin()
    batch = pa.record_batch({"value": pa.array([os.urandom(2000)])})

    def send() -> None:
        producer.write(one.columns.rows(batch))

    with pytest.raises(AttemptError, match=r"to send: .*essage size too large.*Raise the topic's.*TL-K20"):
        wait_until(send, what="word from Kafka")
    assert KafkaAdmin(kafka.bootstrap, 5.0).wait_for_open_transactions(name), "its transaction is aborted"
    producer.close()


def test_the_last_record_takes_the_last_place_in_the_queue(kafka: Kafka, sink_id: str) -> None:
    one = sink(kafka, sink_id, kafka__queue__buffering__max__messages="1")
    assert one.deliver(Task(0, batch=0, query=QUERY), counted(0, 5)).rows == 5
    assert account(committed(kafka, sink_id), 5) == (0, 0)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        ("after the rows are spooled", "0 skipped"),
        ("after begin", "TL-K19"),
        ("all flushed, before the commit request", "TL-K19"),
        ("after the commit, before Spark knows", "0 written"),
    ],
)
def test_a_paused_worker_wakes_up_late(kafka: Kafka, sink_id: str, step: str, outcome: str) -> None:
    arguments = [kafka.bootstrap, sink_id, "0", "0", str(ROWS), step, "0", "SIGSTOP"]
    command = [sys.executable, "-m", "tests.integration.kafka.dying", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        try:
            assert worker.stdout.readline() == "at the step\n"
            wait_until(lambda: _state(worker.pid) == "T", what="a stopped worker")
            assert write(sink(kafka, sink_id), 0).was_skipped == (outcome == "0 written")
            os.kill(worker.pid, signal.SIGCONT)
            told = worker.stdout.read()
        finally:
            worker.kill()
    assert outcome in told
    check(kafka, sink_id, 1)
    write(sink(kafka, sink_id), 1)
    check(kafka, sink_id, 2)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_the_driver_dies_when_some_partitions_are_committed(kafka: Kafka, topic: NewTopic) -> None:
    name = topic(partitions=3)
    both = sink(kafka, name, parallelism="2")
    write(both, 0, 0), write(both, 0, 1)
    write(both, 1, 0)
    assert (write(both, 1, 0).was_skipped, write(both, 1, 1).was_skipped) == (True, False)
    check(kafka, name, 2, 2)


def test_two_drivers_on_one_checkpoint(kafka: Kafka, sink_id: str) -> None:
    """Both run the same batches; they fence each other, and what one loses the other wins."""
    codes: list[str] = []

    def drive() -> None:
        batch, deadline = 0, time.monotonic() + 60
        mine = sink(kafka, sink_id)
        while batch < 5 and time.monotonic() < deadline:
            try:
                write(mine, batch)
            except KafkaError as error:
                codes.append(error.code)
                if error.code == "TL-K12":  # the other one is further: Spark's offset log stops this one
                    batch += 1
            else:
                batch += 1

    drivers = [threading.Thread(target=drive) for _ in range(2)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(90)
        assert not driver.is_alive()
    assert set(codes) <= {"TL-K12", "TL-K19", "TL-K20"}, codes
    check(kafka, sink_id, 5)


def test_the_time_of_a_transaction_passes(kafka: Kafka, sink_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka aborts it and fences its producer: the batch runs again, nothing is lost."""
    mark = TransactionalProducer.write_marker

    def slowly(self: TransactionalProducer, *args: Any) -> None:
        time.sleep(3.5)  # the transaction is open; Kafka looks every second
        mark(self, *args)

    slow = sink(kafka, sink_id, deliveryTimeout="1", kafka__transaction__timeout__ms="1500")
    with monkeypatch.context() as patch:
        patch.setattr(TransactionalProducer, "write_marker", slowly)
        assert "outlived its transaction" in refused(slow, 0, "TL-K19").problem
    assert committed(kafka, sink_id) == []
    write(sink(kafka, sink_id), 0)
    check(kafka, sink_id, 1)


@pytest.mark.long  # bridge/test_delivery_semantics.py kills Kafka under a line of exactly_once
@pytest.mark.faults
def test_the_broker_dies_within_a_transaction(own_kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    own_kafka.create_topics({"t": 1})
    write(sink(own_kafka, "t"), 0)
    killed, mark = threading.Event(), TransactionalProducer.write_marker

    def unlucky(self: TransactionalProducer, *args: Any) -> None:
        if not killed.is_set():
            killed.set()
            own_kafka.kill()
            threading.Thread(target=own_kafka.start).start()
        mark(self, *args)

    monkeypatch.setattr(TransactionalProducer, "write_marker", unlucky)
    assert write(sink(own_kafka, "t"), 1).rows == ROWS
    assert killed.is_set()
    check(own_kafka, "t", 2)
    own_kafka.kill()
    error = refused(sink(own_kafka, "t", deliveryTimeout="2"), 2, "TL-K01")
    assert "did not answer for 2 s" in error.problem
    own_kafka.start()
    write(sink(own_kafka, "t"), 2)
    check(own_kafka, "t", 3)


def test_the_parallelism_is_changed(kafka: Kafka, topic: NewTopic) -> None:
    name = topic(partitions=1)
    write(sink(kafka, name), 0)
    two = sink(kafka, name, parallelism="2")
    assert "has 1 partitions, parallelism 2" in refused(two, 1, "TL-K22").problem
    wide = topic("markers", 2, {"cleanup.policy": "compact"})
    other = topic(partitions=1)
    write(sink(kafka, other, markerTopic=wide), 0)
    two = sink(kafka, other, markerTopic=wide, parallelism="2")
    error = refused(two, 1, "TL-K14")
    assert "parallelism 1, now it is 2" in error.problem
    assert "--to-batch 0 --parallelism 2 --yes" in error.remedy
    refused(two, 1, "TL-K10", partition=1)
    MarkerStore(two.settings, other).reset(0)
    assert [write(two, 1, partition).was_skipped for partition in (0, 1)] == [False, False]


def test_empty_batches_have_markers(kafka: Kafka, sink_id: str) -> None:
    one = sink(kafka, sink_id)
    for batch in range(3):
        assert one.deliver(Task(0, batch=batch, query=QUERY), ()).rows == 0
    write(one, 3)
    assert len(committed(kafka, sink_id)) == ROWS


def test_a_time_that_kafka_caps(kafka: Kafka, sink_id: str) -> None:
    error = refused(sink(kafka, sink_id, kafka__transaction__timeout__ms="901000"), 0, "TL-K20")
    assert "transaction.max.timeout.ms" in error.remedy


def test_an_open_transaction_ends_when_the_query_stops(kafka: Kafka, sink_id: str) -> None:
    """Else it would hold back every reader until its time-out."""
    with pytest.raises(ConnectionAbortedError):
        write(sink(kafka, sink_id, Abandoned), 0)
    started = time.monotonic()
    sink(kafka, sink_id).fence(None)
    plain = delivery(kafka.bootstrap, guarantee="at_least_once", topic=sink_id)
    plain.deliver(Task(0), [pa.record_batch({"value": pa.array([b"7"])})])
    wait_until(lambda: committed(kafka, sink_id) == [7], what="a record behind the transaction")
    assert time.monotonic() - started < 30
