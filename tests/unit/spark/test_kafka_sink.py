"""The sink without a running Spark: its accounts, what it refuses, and rows that tasks leave for the driver."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StringType, StructField, StructType

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, KafkaError
from towline.kafka.delivery import BatchOrigin, DeliveryResult, ExactlyOnce
from towline.sinks import Task
from towline.spark import kafka_sink
from towline.spark.batching import WriteThroughput
from towline.spark.kafka_sink import KafkaTaskResult, KafkaTaskRows, KafkaTransactional, TaskRowDirectory
from towline.spark.sink_note import SinkNote, read_throughput

OPTIONS = {"kafka.bootstrap.servers": "k1:9092", "guarantee": "at_least_once", "topic": "t"}
SCHEMA = StructType([StructField("value", StringType())])


@pytest.fixture(autouse=True)
def no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at k1; what is asked there is tested on a real Kafka."""
    monkeypatch.setattr(kafka_sink, "require_configured_topics", lambda _: None)


def noted(checkpoint: Path, batch: int) -> dict[str, int]:
    totals = SinkNote.read(Checkpoint(str(checkpoint))).totals_of(batch)
    assert totals is not None
    return dict(totals.counts)


def written(batch: int | None = 7, rows: int = 10, **more: Any) -> KafkaTaskResult:
    return KafkaTaskResult(0, batch, "q", DeliveryResult(rows, rows * 3, **more), rows)


@pytest.mark.parametrize("strange", [None, written(batch=6), written(batch=None)])
def test_an_answer_that_is_missing_or_of_another_batch(strange: KafkaTaskResult | None) -> None:
    sink = KafkaTransactional(OPTIONS).streamWriter(SCHEMA, overwrite=False)
    with pytest.raises(KafkaError, match=r"1 of 2 tasks did not answer for batch 7.*TL-K08"):
        sink.commit([written(), strange], 7)


def test_what_became_of_the_rows_is_noted(tmp_path: Path) -> None:
    """Of a task that was skipped what its marker says; of one by a person's marker nobody knows."""
    sink = KafkaTransactional(OPTIONS).streamWriter(SCHEMA, overwrite=False)
    sink._checkpoint_location = str(tmp_path)
    sink.commit(
        [written(rows=7, dead_lettered=3), KafkaTaskResult(1, 7, "q", DeliveryResult(4, 0, was_skipped=True), 9)], 7
    )
    assert noted(tmp_path, 7) == {"given": 11, "acknowledged": 11, "dead_lettered": 3}
    by_hand = KafkaTaskResult(1, 8, "q", DeliveryResult(0, 0, was_skipped=True, has_manual_marker=True), 9)
    sink.commit([written(batch=8, rows=10), by_hand], 8)
    assert noted(tmp_path, 8) == {"given": 30, "acknowledged": 21, "dead_lettered": 3, "unknown": 9}


def test_how_kafka_took_a_batch_is_noted_and_goes_with_the_next(tmp_path: Path) -> None:
    given = {**OPTIONS, "checkpointlocation": str(tmp_path), "guarantee": "at_least_once"}
    sink = KafkaTransactional(given).streamWriter(SCHEMA, overwrite=False)
    slow = KafkaTaskResult(1, 7, "q", DeliveryResult(4, 44_000, seconds=12.0), 4)
    sink.commit([slow, written(rows=10)], 7)
    assert read_throughput(Checkpoint(str(tmp_path))) == WriteThroughput(7, 44_000, 12.0, 15.0)
    once = KafkaTransactional({**OPTIONS, "guarantee": "exactly_once"})
    one = once._delivery(SCHEMA, BatchOrigin(newest_batch=8), str(tmp_path))
    assert isinstance(one, ExactlyOnce)
    assert one.origin == BatchOrigin(newest_batch=8, rate=4000.0)
    sink.commit([written(batch=8, rows=10)], 8)
    assert read_throughput(Checkpoint(str(tmp_path))) == WriteThroughput(7, 44_000, 12.0, 15.0), "nobody has seen it"
    sink.abort([], 9)
    assert read_throughput(Checkpoint(str(tmp_path))) == WriteThroughput(9, 0, 15.0, 15.0)


@pytest.mark.parametrize("location", [{}, {"checkpointlocation": "hdfs://name/checkpoint"}], ids=["unknown", "hdfs"])
def test_topic_ids_that_can_be_kept_nowhere_are_not_called_verified(location: dict[str, str]) -> None:
    sink = KafkaTransactional({**OPTIONS, **location, "verifySourceTopics": "true"})
    with pytest.raises(ConfigError, match=r"on no disk of this machine.*TL-C23"):
        sink.streamWriter(SCHEMA, overwrite=False)


def test_without_a_task_nothing_is_written() -> None:
    """A task that does not know its batch must refuse, never guess."""
    sink = KafkaTransactional(OPTIONS)
    with pytest.raises(KafkaError, match=r"the batch of this task.*TL-K08"):
        sink.streamWriter(SCHEMA, overwrite=False).write(iter([]))
    with pytest.raises(KafkaError, match=r"not in a Spark task.*TL-K08"):
        sink.writer(SCHEMA, overwrite=False).write(iter([]))


def test_a_write_without_a_batch_id_is_not_exactly_once() -> None:
    with pytest.raises(KafkaError, match=r'option\("batchId", NUMBER\).*at_least_once.*TL-K80'):
        KafkaTransactional({**OPTIONS, "guarantee": "exactly_once"}).writer(SCHEMA, overwrite=False)


def test_what_travels_to_the_tasks_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    sink = KafkaTransactional({**OPTIONS, "kafka.sasl.password": "${KAFKA_PASSWORD}"})
    sent = pickle.dumps(sink.streamWriter(SCHEMA, overwrite=False))
    assert b"hunter2" not in sent
    assert b"${KAFKA_PASSWORD}" in sent


def test_the_checkpoint_is_synced_before_the_tasks_of_what_must_not_run_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(Checkpoint, "sync", lambda self: synced.append(self._location))
    for guarantee in ("at_least_once", "at_most_once", "exactly_once"):
        given = {**OPTIONS, "guarantee": guarantee, "checkpointlocation": str(tmp_path / guarantee)}
        KafkaTransactional(given).streamWriter(SCHEMA, overwrite=False)
    assert synced == [str(tmp_path / guarantee) for guarantee in ("at_most_once", "exactly_once")]


def test_two_columns_of_one_name_are_refused() -> None:
    """Names are compared as Spark compares them."""
    fields = [StructField("value", StringType()), StructField("Value", StringType())]
    with pytest.raises(ConfigError, match=r"two of the columns value have one name.*TL-C48"):
        KafkaTransactional(OPTIONS).writer(StructType(fields), overwrite=False)


# -- rows that tasks leave for the driver: all of them, in their order, wherever they lie --

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def batch_of(*values: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})


TASK = Task(2, batch=3, query="q", run="r")


def values(left: KafkaTaskRows) -> list[bytes]:
    travelled: KafkaTaskRows = pickle.loads(pickle.dumps(left))  # noqa: S301 - our own bytes
    return [value for one in travelled.batches() for value in one.column("value").to_pylist()]


@given(st.lists(st.lists(st.integers(0, LARGE), max_size=4), max_size=4), st.booleans())
def test_rows_come_back_as_they_were_left(sizes: list[list[int]], shared: bool) -> None:
    place = TaskRowDirectory.for_batch("/ck", 3) if shared else TaskRowDirectory()
    rows = [[b"%d" % number * (size // 4) for number, size in enumerate(part)] for part in sizes]
    left = place.store_rows(TASK, (batch_of(*part) for part in rows))
    assert (left.partition, left.batch, left.query, left.run) == (2, 3, "q", "r")
    assert values(left) == [value for part in rows for value in part]
    assert left.rows == sum(map(len, rows))
    assert bool(left.file) == (shared and bool(rows)), "what both can see travels by no answer"
    assert bool(left.content) == (bool(rows) and not shared)
    place.remove_files([left])
    assert not left.file or not Path(left.file).exists()


def test_both_writers_of_a_batch_find_one_place_and_the_next_batch_cleans_it() -> None:
    first = TaskRowDirectory.for_batch("/ck", 3)
    left = first.store_rows(TASK, [batch_of(b"x" * (2 * LARGE))])
    assert TaskRowDirectory.for_batch("/ck", 3) == first
    other = TaskRowDirectory.for_batch("/other", 4)
    kept = other.store_rows(TASK, [batch_of(b"y" * (2 * LARGE))])
    assert values(left)
    TaskRowDirectory.for_batch("/ck", 4)
    with pytest.raises(KafkaError, match="TL-K65"):
        values(left)
    assert values(kept)


def test_half_a_file_is_not_taken_for_a_whole_one() -> None:
    left = TaskRowDirectory.for_batch("/ck", 0).store_rows(TASK, [batch_of(b"x" * (2 * LARGE))])
    with Path(left.file).open("r+b") as file:
        file.truncate(left.file_size - 1)
    with pytest.raises(KafkaError, match="TL-K65"):
        values(left)


def test_a_second_attempt_leaves_its_own() -> None:
    place = TaskRowDirectory.for_batch("/ck", 0)
    one, two = (place.store_rows(TASK, [batch_of(text * (2 * LARGE))]) for text in (b"a", b"b"))
    assert one.file != two.file
    assert values(one)[0][:1] == b"a"
    assert values(two)[0][:1] == b"b"


def test_a_limit_on_what_comes_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_sink, "MAX_ANSWER_BYTES", 1000)

    def rows() -> Iterator[pa.RecordBatch]:
        while True:
            yield batch_of(b"x" * 100)

    with pytest.raises(KafkaError, match="TL-K66"):
        TaskRowDirectory().store_rows(TASK, rows())


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    place = TaskRowDirectory.for_batch("/ck", 0)
    assert place.directory
    Path(place.directory).parent.chmod(0o777)
    assert not TaskRowDirectory.for_batch("/ck", 0).directory
    assert Path(place.directory).is_relative_to(tmp_path)
