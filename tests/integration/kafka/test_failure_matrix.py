"""The failure matrix of exactly once, a row a test: survived with nothing lost and nothing doubled, or told loudly.

Rows that only a running Spark can show are in test_exactly_once_spark.py; what can't be survived stands in the docs.
"""

from __future__ import annotations

import os
import re
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
from tests.integration.kafka.writing import QUERY, account, committed, counted, exactly_once
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin
from towline.kafka.columns import Columns
from towline.kafka.delivery import BatchOrigin, DeliveryResult, ExactlyOnce, delivery_for
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline.kafka.producers import AttemptError, TransactionalProducer
from towline.sinks import Task
from towline_prove.devstack import Kafka

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
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


def test_a_task_dies_after_its_commit(kafka: Kafka, sink_id: str) -> None:
    done = write(sink(kafka, sink_id), 0)
    again = write(sink(kafka, sink_id), 0)
    assert (again.was_skipped, again.rows) == (True, done.rows)
    check(kafka, sink_id, 1)


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


def test_the_driver_dies_when_all_are_committed(kafka: Kafka, topic: NewTopic) -> None:
    name = topic(partitions=3)
    both = sink(kafka, name, parallelism="2")
    write(both, 0, 0), write(both, 0, 1)
    assert all(write(both, 0, partition).was_skipped for partition in (0, 1))
    check(kafka, name, 1, 2)


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


def test_an_older_checkpoint_is_restored(kafka: Kafka, sink_id: str) -> None:
    for batch in range(4):
        write(sink(kafka, sink_id), batch)
    error = refused(sink(kafka, sink_id), 2, "TL-K12")
    assert "older checkpoint" in error.problem
    assert f"--kafka {kafka.bootstrap} --sink {sink_id} --to-batch 1 --yes" in error.remedy
    check(kafka, sink_id, 4)


def test_an_older_checkpoint_is_restored_and_ran_on_to_the_same_number(kafka: Kafka, sink_id: str) -> None:
    """Skipping would lose the new rows that now have the old number."""
    at = {batch: f"offsets of {batch}" for batch in range(9)}
    for batch in range(4):
        origin = BatchOrigin(newest_batch=batch, hashes={batch: at[batch]})
        write(exactly_once(kafka.bootstrap, topic=sink_id, sinkId=sink_id, origin=origin), batch)
    for batch in (3, 4):
        origin = BatchOrigin(newest_batch=batch, hashes={3: "other offsets", 4: at[4]})
        restored = exactly_once(kafka.bootstrap, topic=sink_id, sinkId=sink_id, origin=origin)
        assert "batch 3 was written with other source offsets" in refused(restored, batch, "TL-K15").problem
    check(kafka, sink_id, 4)


def test_the_checkpoint_is_deleted_and_the_sink_id_is_kept(kafka: Kafka, sink_id: str) -> None:
    write(sink(kafka, sink_id), 0)
    error = refused(sink(kafka, sink_id), 0, "TL-K13", query="another")
    assert f"belongs to query {QUERY}, this is query another" in error.problem
    assert "new sinkId" in error.remedy
    check(kafka, sink_id, 1)


def test_the_checkpoint_of_a_run_that_carried_nothing_is_deleted(kafka: Kafka, sink_id: str) -> None:
    """Its markers stand in nobody's way."""
    sink(kafka, sink_id).deliver(Task(0, batch=0, query="gone"), [])
    assert write(sink(kafka, sink_id), 0).rows == ROWS
    check(kafka, sink_id, 1)


def test_the_marker_is_lost(kafka: Kafka, sink_id: str) -> None:
    write(sink(kafka, sink_id), 0)
    settings = sink(kafka, sink_id).settings
    MarkerStore(settings, sink_id).reset(None)
    assert MarkerStore(settings, sink_id).read_marker(0) is None
    assert "--to-batch 0 --parallelism 1 --yes" in refused(sink(kafka, sink_id), 1, "TL-K10").remedy
    MarkerStore(settings, sink_id).reset(0)
    assert write(sink(kafka, sink_id), 1).rows == ROWS
    check(kafka, sink_id, 2)


def test_markers_fall_behind(kafka: Kafka, sink_id: str) -> None:
    write(sink(kafka, sink_id), 0)
    assert "batch 0, Spark runs batch 3" in refused(sink(kafka, sink_id), 3, "TL-K11").problem


def test_a_reset_is_the_way_on(kafka: Kafka, sink_id: str) -> None:
    write(sink(kafka, sink_id), 0)
    MarkerStore(sink(kafka, sink_id).settings, sink_id).reset(6)
    assert not write(sink(kafka, sink_id), 7, query="another").was_skipped
    assert write(sink(kafka, sink_id), 7, query="another").was_skipped
    marker = MarkerStore(sink(kafka, sink_id).settings, sink_id).read_marker(0)
    assert marker is not None
    assert marker.total_rows == 2 * ROWS


def test_the_plan_is_not_deterministic_with_several_partitions(kafka: Kafka, topic: NewTopic) -> None:
    """Not survived: found, and the query stops. What committed partitions wrote stays."""
    name = topic(partitions=2)
    both = sink(kafka, name, parallelism="2")
    write(both, 0, 0)
    with pytest.raises(KafkaError, match="200 rows, but not the same") as caught:
        both.deliver(Task(0, batch=0, query=QUERY), counted(ROWS, 2 * ROWS))
    assert caught.value.code == "TL-K16"
    with pytest.raises(KafkaError, match="199 rows, 200 were written"):
        both.deliver(Task(0, batch=0, query=QUERY), counted(0, ROWS - 1))
    backwards = list(counted(0, ROWS, 7))[::-1]  # another order is no other set of rows
    assert both.deliver(Task(0, batch=0, query=QUERY), backwards).was_skipped


def test_one_partition_needs_no_deterministic_plan(kafka: Kafka, sink_id: str) -> None:
    """Where the checkpoint is local: its hash tells that it is the same batch."""
    origin = BatchOrigin(newest_batch=0, hashes={0: "offsets of 0"})
    local = exactly_once(kafka.bootstrap, topic=sink_id, sinkId=sink_id, origin=origin)
    write(local, 0)
    assert local.deliver(Task(0, batch=0, query=QUERY), counted(0, ROWS - 7)).was_skipped
    check(kafka, sink_id, 1)


def test_two_copies_of_a_checkpoint_that_is_not_local_run_on(kafka: Kafka, sink_id: str) -> None:
    """Each has its own batch 1; without a hash of its offsets only the rows tell that the second one is not written."""
    first, second = sink(kafka, sink_id), sink(kafka, sink_id)
    write(first, 0)
    write(first, 1)
    assert write(second, 1).was_skipped  # the same rows: it is the same batch
    with pytest.raises(KafkaError, match="Run one query on a checkpoint, not two copies") as caught:
        second.deliver(Task(0, batch=1, query=QUERY), counted(2 * ROWS, 3 * ROWS))
    assert caught.value.code == "TL-K16"
    knowing = BatchOrigin(
        newest_batch=1, hashes={1: "offsets of 1"}
    )  # one copy is local, the marker has no hash to hold it against
    local = exactly_once(kafka.bootstrap, topic=sink_id, sinkId=sink_id, origin=knowing)
    with pytest.raises(KafkaError, match="TL-K16"):
        local.deliver(Task(0, batch=1, query=QUERY), counted(2 * ROWS, 3 * ROWS))
    check(kafka, sink_id, 2)


def test_a_checksum_is_taken_only_where_it_would_be_compared(kafka: Kafka, sink_id: str) -> None:
    """What was written without one is compared by its count when somebody wants it verified after all."""
    origin = BatchOrigin(newest_batch=0, hashes={0: "offsets of 0"})
    crcs: dict[str, int | None] = {}
    for parallelism in ("1", "2"):
        options: dict[str, Any] = {"topic": sink_id, "sinkId": f"{sink_id}-{parallelism}", "parallelism": parallelism}
        write(exactly_once(kafka.bootstrap, origin=origin, **options), 0)
        wary = exactly_once(kafka.bootstrap, origin=origin, verifyOnSkip="true", **options)
        assert write(wary, 0).was_skipped
        with pytest.raises(KafkaError, match="TL-K16"):
            wary.deliver(Task(0, batch=0, query=QUERY), counted(0, ROWS - 7))
        KafkaAdmin(kafka.bootstrap).wait_for_open_transactions(f"towline.{sink_id}-{parallelism}.markers")
        marker = MarkerStore(wary.settings, f"{sink_id}-{parallelism}").read_marker(0)
        assert marker is not None
        crcs[parallelism] = marker.crc
    assert crcs["1"] is None
    assert crcs["2"]


def test_a_batch_set_as_written_by_hand_is_skipped_whatever_its_rows(kafka: Kafka, sink_id: str) -> None:
    write(sink(kafka, sink_id), 0)
    MarkerStore(sink(kafka, sink_id).settings, sink_id).reset(1)
    done = write(sink(kafka, sink_id), 1)
    assert (done.was_skipped, done.has_manual_marker, done.rows) == (True, True, 0), "nobody counted its rows"
    check(kafka, sink_id, 1)


def test_the_source_serves_other_rows_for_the_same_offsets(kafka: Kafka, sink_id: str) -> None:
    """Not survived; verifyOnSkip finds it, and the docs say so."""
    write(sink(kafka, sink_id), 0)
    verifying = sink(kafka, sink_id, verifyOnSkip="true")
    with pytest.raises(KafkaError, match="brings other rows") as caught:
        verifying.deliver(Task(0, batch=0, query=QUERY), counted(ROWS, 2 * ROWS))
    assert caught.value.code == "TL-K16"


def test_a_batch_has_more_partitions_than_one(kafka: Kafka, sink_id: str) -> None:
    """The task too many comes last: half of the batch is in Kafka, and must never pass for all of it."""
    one = sink(kafka, sink_id)
    first, second = (Task(partition, batch=0, query=QUERY, run="r1") for partition in (0, 1))
    one.deliver(first, counted(0, ROWS))
    with pytest.raises(KafkaError, match="half written") as caught:
        one.deliver(second, counted(ROWS, 2 * ROWS))
    assert caught.value.code == "TL-K18"
    with pytest.raises(KafkaError, match="half written"):  # after .coalesce(1), the batch is not skipped
        one.deliver(Task(0, batch=0, query=QUERY, run="r2"), counted(0, 2 * ROWS))


def test_the_task_too_many_comes_first(kafka: Kafka, sink_id: str) -> None:
    """Nothing is in Kafka, and the corrected query simply goes on."""
    one = sink(kafka, sink_id)
    with pytest.raises(KafkaError, match=re.escape("put .coalesce(1) before writeStream")) as caught:
        one.deliver(Task(1, batch=0, query=QUERY, run="r1"), counted(ROWS, 2 * ROWS))
    assert caught.value.code == "TL-K17"
    with pytest.raises(KafkaError) as caught:
        one.deliver(Task(0, batch=0, query=QUERY, run="r1"), counted(0, ROWS))
    assert caught.value.code == "TL-K17"
    assert one.deliver(Task(0, batch=0, query=QUERY, run="r2"), counted(0, ROWS)).rows == ROWS
    check(kafka, sink_id, 1)


def test_empty_batches_have_markers(kafka: Kafka, sink_id: str) -> None:
    one = sink(kafka, sink_id)
    for batch in range(3):
        assert one.deliver(Task(0, batch=batch, query=QUERY), ()).rows == 0
    write(one, 3)
    assert len(committed(kafka, sink_id)) == ROWS


def test_the_offset_log_is_elsewhere(kafka: Kafka, sink_id: str) -> None:
    ahead = exactly_once(kafka.bootstrap, topic=sink_id, sinkId=sink_id, origin=BatchOrigin(newest_batch=4))
    assert "offset log is 4" in refused(ahead, 5, "TL-K24").problem


def test_a_marker_topic_that_forgets(kafka: Kafka, topic: NewTopic, sink_id: str) -> None:
    forgets = topic("markers", 1, {"cleanup.policy": "compact,delete"})
    assert "forgets markers" in refused(sink(kafka, sink_id, markerTopic=forgets), 0, "TL-K22").problem
    absent = sink(kafka, sink_id, markerTopic="towline-nowhere", createMarkerTopic="false")
    assert "--create --topic towline-nowhere" in refused(absent, 0, "TL-K22").remedy


def test_a_time_that_kafka_caps(kafka: Kafka, sink_id: str) -> None:
    error = refused(sink(kafka, sink_id, kafka__transaction__timeout__ms="901000"), 0, "TL-K20")
    assert "transaction.max.timeout.ms" in error.remedy


def test_an_open_transaction_ends_when_the_query_stops(kafka: Kafka, sink_id: str) -> None:
    """Else it would hold back every reader until its time-out."""
    with pytest.raises(ConnectionAbortedError):
        write(sink(kafka, sink_id, Abandoned), 0)
    started = time.monotonic()
    sink(kafka, sink_id).fence(None)
    given = {"kafka.bootstrap.servers": kafka.bootstrap, "guarantee": "at_least_once", "topic": sink_id}
    settings = SinkSettings.parse(given)
    plain = delivery_for(settings, Columns.bind({"value": "binary"}, settings.topic, include_headers=True))
    plain.deliver(Task(0), [pa.record_batch({"value": pa.array([b"7"])})])
    wait_until(lambda: committed(kafka, sink_id) == [7], what="a record behind the transaction")
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "words",
    [
        "other rows for the same offsets",
        "not\n  deterministic with `parallelism` > 1",
        "Unclean leader election",
        "Writes outside Kafka",
        "Duplicates that the publisher made",
        "Batch queries",
        "`spark.speculation=true` is refused",
    ],
)
def test_what_is_not_survived_stands_in_the_docs(words: str) -> None:
    assert words in (DOCS / "exactly-once.md").read_text()
