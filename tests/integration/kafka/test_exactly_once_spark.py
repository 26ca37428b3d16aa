"""Exactly once through a real Spark: restarts, replays, and what Spark itself must refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.conftest import NewTopic
from tests.helpers import present
from tests.integration.kafka.reading import numbers
from tests.integration.kafka.test_sink import ROWS_A_BATCH, counting, failure, line, running, to_kafka
from tests.integration.kafka.writing import account
from tests.integration.spark.collecting import configured, forget_last_commit
from towline.kafka.markers import Marker
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline.kafka.producers import TransactionalProducer
from towline_prove.devstack import Kafka


def query_id(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "metadata").read_text())["id"])


def markers(kafka: Kafka, checkpoint: Path, partitions: int = 1) -> list[Marker | None]:
    """Markers of an ended query, read as the sink does: Kafka answers a commit before its transaction has ended."""
    settings, sink_id = SinkSettings.parse({"kafka.bootstrap.servers": kafka.bootstrap}), query_id(checkpoint)
    for partition in range(partitions):
        TransactionalProducer(settings, settings.transactional_id(sink_id, partition)).close()
    store = MarkerStore(settings, sink_id)
    return [store.read_marker(partition) for partition in range(partitions)]


def run_to_end(writer: DataStreamWriter, runs: int = 1) -> None:
    """Runs that each end with their last batch: none is left half done, and no task outlives its run."""
    for _ in range(runs):
        with running(writer.trigger(availableNow=True)) as query:
            assert query.awaitTermination(90)


def check(kafka: Kafka, topic: str) -> int:
    found = numbers(kafka.bootstrap, topic)
    assert account(found, max(found) + 1) == (0, 0)
    return len(found)


def test_a_batch_that_is_in_kafka_is_skipped_when_spark_runs_it_again(
    spark: SparkSession, kafka: Kafka, topic: NewTopic, tmp_path: Path
) -> None:
    name = topic(partitions=1)
    run_to_end(to_kafka(counting(spark), kafka, name, tmp_path))
    before = present(*markers(kafka, tmp_path))
    assert forget_last_commit(tmp_path) <= before.batch
    run_to_end(to_kafka(counting(spark), kafka, name, tmp_path))
    marker = present(*markers(kafka, tmp_path))
    assert marker.writer == query_id(tmp_path)
    assert marker.offsets is not None
    assert marker.total_rows == check(kafka, name) == (marker.batch + 1) * ROWS_A_BATCH


def test_a_partition_without_a_task_gets_its_marker_from_the_driver(
    spark: SparkSession, kafka: Kafka, topic: NewTopic, tmp_path: Path
) -> None:
    name = topic(partitions=1)
    run_to_end(to_kafka(counting(spark).coalesce(1), kafka, name, tmp_path, parallelism="2"), 2)
    run_to_end(to_kafka(counting(spark), kafka, name, tmp_path, parallelism="2"), 2)
    first, second = map(present, markers(kafka, tmp_path, 2))
    assert first.batch == second.batch
    check(kafka, name)


def test_speculation_is_refused(spark: SparkSession, kafka: Kafka, topic: NewTopic, tmp_path: Path) -> None:
    """A query hands its session's settings to its tasks as local properties."""
    lenient = {"spark.sql.legacy.setCommandRejectsSparkCoreConfs": "false", "spark.speculation": "true"}
    with configured(spark, lenient):
        told = line(failure(to_kafka(counting(spark).coalesce(1), kafka, topic(), tmp_path, parallelism="1")))
    assert "[TL-K25]" in told


def saved(frame: DataFrame, **given: Any) -> str:
    """What the user reads when a batch query fails; "" where it is written."""
    try:
        frame.write.format("kafka_transactional").mode("append").options(**given).save()
    except PySparkException as problem:
        return line(str(problem))
    return ""


def test_each_output_of_a_foreach_batch_is_written_once(
    spark: SparkSession, kafka: Kafka, topic: NewTopic, tmp_path: Path
) -> None:
    """What TL-G03 advises: one query reads, and its batch is written twice; the second write fails, once."""
    first, second = topic(), topic()
    checkpoint, broken = tmp_path / "checkpoint", iter([True])
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).option("numPartitions", 2).load()
    named = {"kafka.bootstrap.servers": kafka.bootstrap, "sinkId": first}
    refused = list[str]()

    def both(batch: DataFrame, batch_id: int) -> None:
        one = {**named, "topic": first, "checkpointLocation": checkpoint}
        if told := saved(batch, **one, batchId=batch_id):
            raise RuntimeError(told)
        if next(broken, False):
            refused.extend([saved(batch, **one, batchId=batch_id + 1), saved(batch, **one)])
            raise RuntimeError("the second output is away")
        assert not saved(batch.coalesce(1), **named, topic=second, batchId=batch_id), "by the same name"

    values = rows.selectExpr("CAST(value AS STRING) AS value").writeStream.foreachBatch(both)
    writer = values.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    with pytest.raises(StreamingQueryException, match="the second output is away"):
        run_to_end(writer)
    assert (len(numbers(kafka.bootstrap, first)), numbers(kafka.bootstrap, second)) == (20, [])
    assert 'option "batchId" is 1, and Spark runs batch 0' in refused[0]
    assert "[TL-K80]" in refused[1]
    run_to_end(writer)
    assert (arrived := check(kafka, first)) == check(kafka, second) >= 20

    shutil.rmtree(checkpoint)
    with pytest.raises(StreamingQueryException, match="TL-K13"):
        run_to_end(writer)
    assert arrived == check(kafka, first) == check(kafka, second)


def test_a_batch_query_that_names_its_batch_is_written_once(spark: SparkSession, kafka: Kafka, topic: NewTopic) -> None:
    name = topic()

    def save(start: int, end: int, **more: Any) -> str:
        frame = spark.range(start, end, 1, 3).selectExpr("CAST(id AS STRING) AS value")
        return saved(frame, **{"kafka.bootstrap.servers": kafka.bootstrap, "topic": name}, **more)

    assert "[TL-C200]" in save(0, 20, batchId=0)
    for _ in range(2):
        assert not save(0, 20, batchId=0, sinkId="jobs")
    assert not save(20, 20, batchId=1, sinkId="jobs")
    assert "[TL-K16]" in save(20, 40, batchId=1, sinkId="jobs"), "of other rows"
    assert "skipped in foreachBatch" in (told := save(20, 40, batchId=3, sinkId="jobs"))
    assert "[TL-K11]" in told
    assert "[TL-K12]" in save(0, 20, batchId=0, sinkId="jobs"), "its numbers begin again"
    assert account(numbers(kafka.bootstrap, name), 20) == (0, 0)
