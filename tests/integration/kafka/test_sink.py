"""format("kafka_transactional") in a real Spark, writing to a real Kafka."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StringType, StructField, StructType

from tests.conftest import NewTopic
from tests.helpers import present, wait_until
from tests.integration.kafka.reading import numbers, records
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, KafkaError
from towline.kafka.columns import COLUMN_TYPES as KAFKA_COLUMNS
from towline.kafka.columns import Columns
from towline.kafka.delivery import BatchOrigin
from towline.spark.kafka_sink import KafkaTaskResult, KafkaTransactional, StreamWriter
from towline.spark.sink import ACCEPTED_TYPES as MQTT_COLUMNS
from towline.spark.sink import SinkColumns
from towline_prove.devstack import Kafka

ROWS_A_BATCH = 200


def counting(spark: SparkSession, partitions: int = 2) -> DataFrame:
    """A replayable stream 0, 1, 2 ...; the same rows for the same batch, for ever."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS_A_BATCH)
    return source.option("numPartitions", partitions).load().selectExpr("CAST(value AS STRING) AS value")


@contextlib.contextmanager
def running(writer: DataStreamWriter) -> Iterator[StreamingQuery]:
    query = writer.start()
    try:
        yield query
    finally:
        query.stop()


def options(kafka: Kafka, topic: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": kafka.bootstrap, "topic": topic, "guarantee": "at_least_once"}


def to_kafka(frame: DataFrame, kafka: Kafka, topic: str, checkpoint: Path, **more: str) -> DataStreamWriter:
    given = {"kafka.bootstrap.servers": kafka.bootstrap, "topic": topic, **more}
    writer = frame.writeStream.format("kafka_transactional").options(**given)
    return writer.option("checkpointLocation", str(checkpoint))


def failure(writer: DataStreamWriter) -> str:
    """What the user reads when a query ends by an error."""
    with running(writer) as query:
        wait_until(lambda: not query.isActive, 60, "the end of the query")
        error = query.exception()
    assert error is not None
    return str(error)


def line(text: str) -> str:
    """Our line in what Spark shows; there is one, and no frames of Python before it."""
    (found,) = set(re.findall(r"towline\.errors\.\w+: ([^\n]+)", text))
    assert 'File "' not in text
    return str(found)


def test_a_batch_query_with_every_column(spark: SparkSession, kafka: Kafka, topic: NewTopic) -> None:
    name = topic(partitions=3)
    bytes_of_id = "CAST(CAST(id AS STRING) AS BINARY)"
    frame = spark.range(100).selectExpr(
        "CAST(id AS STRING) AS KEY",
        f"{bytes_of_id} AS Value",
        f"'{name}' AS Topic",
        "CAST(id % 3 AS INT) AS `partition`",
        "IF(id = 7, NULL, TIMESTAMP_SECONDS(IF(id = 0, 0, 1700000000 + id))) AS TimeStamp",
        f"""array(struct('a' AS key, {bytes_of_id} AS value), struct('b' AS key, CAST(NULL AS BINARY) AS value),
            struct('a' AS key, CAST('again' AS BINARY) AS value)) AS HEADERS""",
    )
    given = options(kafka, name)
    del given["topic"]
    begun = time.time()
    frame.write.format("kafka_transactional").mode("append").options(**given).save()
    arrived = {int(m.key()): m for m in records(kafka.bootstrap, name)}
    assert sorted(arrived) == list(range(100))
    for number, message in arrived.items():
        value = b"%d" % number
        assert message.value() == value
        assert message.partition() == number % 3
        if number == 7:
            assert message.timestamp()[1] >= int(begun * 1000), "null is now"
        else:
            assert message.timestamp()[1] == ((1700000000 + number) * 1000 if number else 1), "librdkafka has no 0"
        assert message.headers() == [("a", value), ("b", None), ("a", b"again")]


def test_spark_finds_the_format_by_itself(spark: SparkSession, kafka: Kafka, topic: NewTopic) -> None:
    """A new session has nothing registered, so the package pyspark_kafka_transactional is what it finds."""
    name = topic()
    fresh = spark.newSession()
    frame = fresh.range(7).selectExpr("CAST(id AS STRING) AS value")
    frame.write.format("kafka_transactional").mode("append").options(**options(kafka, name)).save()
    assert sorted(numbers(kafka.bootstrap, name)) == list(range(7))


@pytest.mark.parametrize(
    ("columns", "change", "says"),
    [
        ("value", {"topik": "x"}, 'unknown option "topik". Did you mean "topic"?   [TL-C01]'),
        (
            "CAST(value AS INT) AS value",
            {},
            "Kafka takes binary or string. Write it as: CAST(value AS string) AS value.",
        ),
    ],
)
def test_errors_in_options_and_columns_are_one_line(
    spark: SparkSession, kafka: Kafka, tmp_path: Path, columns: str, change: dict[str, str], says: str
) -> None:
    given = {**options(kafka, "t"), **change}
    frame = counting(spark).selectExpr(*columns.split(", ", 1))
    assert says in line(failure(to_kafka(frame, kafka, "t", tmp_path, guarantee="at_least_once", **change)))
    batch = spark.range(1).selectExpr("CAST(id AS STRING) AS value").selectExpr(*columns.split(", ", 1))
    with pytest.raises(PySparkException) as caught:
        batch.write.format("kafka_transactional").mode("append").options(**given).save()
    assert says in line(str(caught.value).splitlines()[0])


#: SQL of a value of each kind of type.
KINDS = (
    *("true", "1", "1L", "1D", "1.5BD", "date'2026-01-02'", "timestamp'2026-01-02 03:04:05'", "null", "x'ff'", "'1'"),
    *("interval '1' day", "named_struct('a', 1)", "array(1)", "parse_json('{}')", "map('a', 'b')", "map('a', 1)"),
    *("map('a', x'ff')", "array(named_struct('k', 'a', 'v', 'b'))", "array(named_struct('key', 'a', 'value', x'ff'))"),
)


def advice(kind: str, name: str, types: dict[str, str]) -> str:
    """What is said of a column of that type, in a schema that is sound but for it."""
    try:
        if kind == "kafka":
            Columns.bind(types, None, include_headers=True)
        else:
            SinkColumns.bind(types, topic=None, qos=1, retain=False, qos_levels=(1,))
    except ConfigError as problem:
        return problem.remedy.removeprefix("Write it as: ").removesuffix(f" AS {name}.")
    return ""


@pytest.mark.parametrize(("kind", "accepted"), [("kafka", KAFKA_COLUMNS), ("mqtt", MQTT_COLUMNS)])
def test_each_advice_for_a_column_is_taken_by_spark_and_then_by_the_sink(
    spark: SparkSession, kind: str, accepted: Mapping[str, tuple[str, ...]]
) -> None:
    others = dict.fromkeys(("topic", next(iter(accepted))), "string")
    values = {f"{name}__{number}": sql for name in accepted for number, sql in enumerate(KINDS)}
    values |= {name: "'2026-01-02'" for name, sql in values.items() if name.startswith("timestamp") and sql == "'1'"}
    fields = spark.sql("SELECT " + ", ".join(f"{sql} AS {name}" for name, sql in values.items()))
    mended = []
    for field in fields.schema.fields:
        name = field.name.rpartition("__")[0]
        told = advice(kind, name, {**others, name: field.dataType.simpleString()})
        if told and not told.startswith("Select it as"):
            mended.append(re.sub(rf"\b{name}\b", field.name, told, count=1) + f" AS {field.name}")
    frame = fields.selectExpr(*mended)
    assert len(frame.collect()) == 1
    for field in frame.schema.fields:
        name = field.name.rpartition("__")[0]
        assert not advice(kind, name, {**others, name: field.dataType.simpleString()}), field


def test_overwriting_a_topic_is_refused(spark: SparkSession, kafka: Kafka) -> None:
    frame = spark.range(1).selectExpr("CAST(id AS STRING) AS value")
    with pytest.raises(PySparkException) as caught:
        frame.write.format("kafka_transactional").mode("overwrite").options(**options(kafka, "t")).save()
    assert 'mode("overwrite") is not possible' in line(str(caught.value))


@pytest.mark.parametrize("guarantee", ["at_most_once", "at_least_once", "exactly_once"])
def test_a_missing_topic_is_an_error_before_the_first_row(kafka: Kafka, topic: NewTopic, guarantee: str) -> None:
    """An idle source has no tasks that could tell it: the driver asks, before the first batch."""
    value = StructType([StructField("value", StringType())])
    for given in ({"topic": "towline-nowhere"}, {"topic": topic(), "deadLetterTopic": "towline-nowhere"}):
        if guarantee == "at_most_once" and len(given) > 1:
            continue  # gives up what can't be written
        sink = KafkaTransactional({"kafka.bootstrap.servers": kafka.bootstrap, "guarantee": guarantee, **given})
        for bind in (sink.streamWriter, sink.writer):
            with pytest.raises(KafkaError, match=r'topic "towline-nowhere" does not exist.*TL-K04'):
                bind(value, overwrite=False)


class FailsOnceWritten(StreamWriter):
    """The first attempt of each task of batch 1 fails after its rows are in Kafka."""

    def write(self, iterator: Iterator[Any]) -> KafkaTaskResult:
        done = super().write(iterator)
        context = present(TaskContext.get())
        if done.batch == 1 and context.attemptNumber() == 0:
            raise RuntimeError("the task fails after it wrote")
        return done


class Failing(KafkaTransactional):
    @classmethod
    def name(cls) -> str:
        return "failing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: ARG002, N802
        return FailsOnceWritten(self._delivery(schema, BatchOrigin()))


@pytest.mark.parametrize(("guarantee", "copies"), [("exactly_once", 1), ("at_least_once", 2), ("at_most_once", 1)])
def test_a_task_tried_again(
    spark: SparkSession, kafka: Kafka, topic: NewTopic, tmp_path: Path, guarantee: str, copies: int
) -> None:
    """At least once writes the rows again, the others do not; none loses these."""
    name = topic()
    spark.dataSource.register(Failing)
    writer = to_kafka(counting(spark).coalesce(1), kafka, name, tmp_path, guarantee=guarantee).format("failing")
    with running(writer) as query:
        wait_until(lambda: (Checkpoint(str(tmp_path)).last_committed_batch() or 0) >= 2, 60, "three batches")
        assert query.exception() is None
    times = Counter(numbers(kafka.bootstrap, name))
    assert {times[number] for number in range(ROWS_A_BATCH, 2 * ROWS_A_BATCH)} == {copies}
    assert {times[number] for number in range(ROWS_A_BATCH)} == {1}
