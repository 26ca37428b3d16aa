"""What the SQL of an uplink makes of rows, with the headers that its sink adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from towline.bridge.config.routes import Route
from towline.bridge.lines.sql import HEADER_TYPE
from towline.bridge.uplink.headers import property_headers
from towline.bridge.uplink.sql import apply
from towline.kafka.columns import PROPERTIES
from towline.schema import ROW_SCHEMA, SPARK_SCHEMA

__all__ = ["Planned", "mapped"]


def mapped(frame: DataFrame, routes: Sequence[Route], **more: Any) -> DataFrame:
    """As `apply`; the headers that `towline.kafka.columns` makes are in the column headers too."""
    rows = apply(frame, routes, **more)
    if not set(PROPERTIES) <= set(rows.columns):
        return rows
    message = rows.select(
        F.struct("*").alias("record"),
        F.col("towline_topic").alias("topic"),
        F.col("towline_qos").alias("qos"),
        F.col("timestamp").alias("received_at"),
        "towline_rare.*",
    )
    both = message.select("record.*", F.expr(f"CAST({property_headers()} AS {HEADER_TYPE})").alias("made"))
    headers = F.expr("CASE WHEN towline_topic IS NULL THEN headers ELSE concat(made, headers) END")
    return both.withColumn("headers", headers).drop("made", *PROPERTIES)


class Planned:
    """A mapping of messages whose plan Spark makes once, because that takes longer than the mapping.

    Args:
        spark: The session.
        source: File from which the plan reads the messages of a call.
        mapping: From a frame of messages to what is asked of it.

    Attributes:
        frame: What is asked of them.
    """

    def __init__(self, spark: SparkSession, source: Path, mapping: Callable[[DataFrame], DataFrame]) -> None:
        self._source = source
        spark.dataSource.register(_messages_in(str(source)))
        self.frame = mapping(spark.read.format("messages").load())

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> list[Row]:
        """What becomes of them, in their order."""
        with ipc.new_file(str(self._source), ROW_SCHEMA) as file:
            file.write_table(pa.Table.from_pylist(list(messages), ROW_SCHEMA))
        return self.frame.collect()


def _messages_in(source: str) -> type[DataSource]:
    """A format whose rows are those that the file has when a query runs."""

    class Reader(DataSourceReader):
        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - there is one
            with ipc.open_file(source) as file:
                yield from (file.get_batch(n) for n in range(file.num_record_batches))

    class Messages(DataSource):
        @classmethod
        def name(cls) -> str:
            return "messages"

        def schema(self) -> str:
            return SPARK_SCHEMA

        def reader(self, schema: StructType) -> Reader:  # noqa: ARG002 - it is the one above
            return Reader()

    return Messages
