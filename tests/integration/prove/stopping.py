"""A query of the product that stops for ever at a named step of a batch: ``python -m`` with its places as arguments.

A file ``stop-at`` in its control directory names the step; when a batch with rows comes there, a file ``reached``
appears and nothing moves any more, so that the test can take the power away.

    planned   offsets/N is written, not synced; no task has run
    writing   offsets/N is synced, the tasks begin
    written   the records are in Kafka (committed), commits/N is not written
    done      commits/N is written, not synced; the inbox is not cut
    cut       the inbox is cut
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

import towline
from towline.spark.kafka_sink import KafkaTaskResult, KafkaTransactional, StreamWriter
from towline.spark.offsets import SourceOffset
from towline.spark.reader import MqttStreamReader
from towline.spark.source import MqttDataSource

STEPS = ("planned", "writing", "written", "done", "cut")


def pause(step: str) -> None:
    """Stop here for ever when it is this step's turn."""
    control = Path(os.environ["TOWLINE_TEST_CONTROL"])
    if (control / "stop-at").exists() and (control / "stop-at").read_text() == step:
        (control / "reached").touch()
        time.sleep(3600)


def rows_before(offset: dict[str, Any]) -> int:
    return sum(place.offset for place in SourceOffset.parse(offset).positions)


class Reader(MqttStreamReader):
    _last: int | None = None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if rows_before(end) > rows_before(start):
            pause("planned")
        return super().partitions(start, end)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        here = rows_before(start)
        moved, self._last = self._last is not None and here > self._last, here
        if moved:
            pause("done")
        end = super().latestOffset(start, limit)
        if moved:
            pause("cut")
        return end


class Source(MqttDataSource):
    def streamReader(self, schema: StructType) -> Reader:  # noqa: N802 - Spark's name
        return Reader(super().streamReader(schema)._plan)


class Writer(StreamWriter):
    """Wraps another, whatever that was made of."""

    def __init__(self, inner: StreamWriter) -> None:
        self.inner = inner

    def write(self, iterator: Iterator[pa.RecordBatch]) -> KafkaTaskResult:
        first = next(iterator, None)
        if first is None:
            return self.inner.write(iter(()))
        pause("writing")
        return self.inner.write(chain([first], iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's
        if any(isinstance(message, KafkaTaskResult) and message.delivery.rows for message in messages):
            pause("written")
        self.inner.commit(messages, batchId)


class Sink(KafkaTransactional):
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's signature
        return Writer(super().streamWriter(schema, overwrite))


def main() -> None:
    """Run the query until killed: STATE_DIR CHECKPOINT BOOTSTRAP TOPIC."""
    state_dir, checkpoint, bootstrap, topic = sys.argv[1:]
    settings: dict[str, Any] = {**towline.spark_conf(), "spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    settings |= dict.fromkeys(("spark.driver.bindAddress", "spark.driver.host"), "127.0.0.1")
    spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
    spark.dataSource.register(Source)
    spark.dataSource.register(Sink)
    both = {"guarantee": "exactly_once", "checkpointLocation": checkpoint}
    rows = spark.readStream.format("mqtt").options(gateway=state_dir, pollMs=500, **both).load()
    records = rows.selectExpr("split(topic, '/')[1] AS key", "payload AS value")
    # One task writes, so that it can be stopped after it.
    writer = records.writeStream.format("kafka_transactional").options(topic=topic, parallelism=1, **both)
    writer = writer.option("kafka.bootstrap.servers", bootstrap)
    for _ in range(5):  # Spark gives a new Python process ten seconds, too little on a busy machine
        query = writer.start()
        try:
            query.awaitTermination()
        except Exception as error:
            if "failed to connect back" not in str(error):
                raise


if __name__ == "__main__":
    main()
