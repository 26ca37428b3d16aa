"""Failures of exactly once that need a real Kafka: fencing, time-outs, pauses; nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.kafka.dying import ROOT, dying
from tests.integration.kafka.reading import numbers
from tests.integration.kafka.writing import QUERY, account, counted, delivery, exactly_once
from towline.errors import KafkaError
from towline.kafka.delivery import DeliveryResult, ExactlyOnce
from towline.kafka.producers import TransactionalProducer
from towline.sinks import Task
from towline_prove.devstack import Kafka

ROWS = 200


def write(sink: ExactlyOnce, batch: int) -> DeliveryResult:
    return sink.deliver(Task(0, batch=batch, query=QUERY), counted(batch * ROWS, batch * ROWS + ROWS))


@pytest.fixture
def sink_id(topic: NewTopic) -> str:
    return topic(partitions=1)


def sink(kafka: Kafka, name: str, **options: Any) -> ExactlyOnce:
    return exactly_once(kafka.bootstrap, **{"topic": name, "sinkId": name, **options})


def check(kafka: Kafka, name: str, batches: int) -> None:
    assert account(numbers(kafka.bootstrap, name), batches * ROWS) == (0, 0)


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
    command = dying(kafka, sink_id, range(1), ROWS, step, number=signal.SIGSTOP)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        try:
            assert worker.stdout.readline() == "at the step\n"
            wait_until(lambda: _state(worker.pid) == "T", what="a stopped worker")
            assert write(sink(kafka, sink_id), 0).was_skipped == (outcome == "0 written")
            os.kill(worker.pid, signal.SIGCONT)
            said = worker.stdout.read()
        finally:
            worker.kill()
    assert outcome in said
    check(kafka, sink_id, 1)
    write(sink(kafka, sink_id), 1)
    check(kafka, sink_id, 2)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_two_drivers_on_one_checkpoint(kafka: Kafka, sink_id: str) -> None:
    """Both run the same batches; they fence each other, and what one loses the other wins."""

    def drive(_: int) -> list[str]:
        batch, deadline = 0, time.monotonic() + 60
        mine, codes = sink(kafka, sink_id), list[str]()
        while batch < 5 and time.monotonic() < deadline:
            try:
                write(mine, batch)
            except KafkaError as error:
                codes.append(error.code)
                if error.code == "TL-K12":  # the other one is further: Spark's offset log stops this one
                    batch += 1
            else:
                batch += 1
        return codes

    with ThreadPoolExecutor(2) as pool:
        codes = {code for driver in pool.map(drive, range(2), timeout=90) for code in driver}
    assert codes <= {"TL-K12", "TL-K19", "TL-K20"}
    check(kafka, sink_id, 5)


def test_the_time_of_a_transaction_passes(kafka: Kafka, sink_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka aborts it and fences its producer: the batch runs again, nothing is lost."""
    mark = TransactionalProducer.write_marker

    def slowly(self: TransactionalProducer, *args: Any) -> None:
        time.sleep(3.5)  # the transaction is open; Kafka looks every second
        mark(self, *args)

    slow = sink(kafka, sink_id, deliveryTimeout="1.5")
    with monkeypatch.context() as patch:
        patch.setattr(TransactionalProducer, "write_marker", slowly)
        with pytest.raises(KafkaError, match=r"outlived its transaction.*TL-K19"):
            write(slow, 0)
    assert numbers(kafka.bootstrap, sink_id) == []
    write(sink(kafka, sink_id), 0)
    check(kafka, sink_id, 1)


def test_an_open_transaction_ends_when_the_query_stops(kafka: Kafka, sink_id: str) -> None:
    """Else it would hold back every reader until its time-out."""
    stopped = sink(kafka, sink_id)
    producer = TransactionalProducer(stopped.settings, f"towline.{sink_id}.0")
    producer.begin()
    (batch,) = counted(0, 1)
    producer.write(stopped.columns.rows(batch))
    assert producer.flush(10) == 0
    started = time.monotonic()
    stopped.fence(None)
    plain = delivery(kafka.bootstrap, guarantee="at_least_once", topic=sink_id)
    plain.deliver(Task(0), [pa.record_batch({"value": pa.array([b"7"])})])
    wait_until(lambda: numbers(kafka.bootstrap, sink_id) == [7], what="a record behind the transaction")
    assert time.monotonic() - started < 30
