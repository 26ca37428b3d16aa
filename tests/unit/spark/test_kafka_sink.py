"""What can be said of the sink without a running Spark: its accounts, and what it refuses."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, KafkaError
from towline.kafka.delivery import BatchOrigin, DeliveryResult, ExactlyOnce
from towline.spark import kafka_sink
from towline.spark.batching import WriteThroughput
from towline.spark.kafka_sink import KafkaTaskResult, KafkaTransactional
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
