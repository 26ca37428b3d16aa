"""What the routes of an uplink make of messages, with Spark's answer to their SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from towline.bridge.routes import REFUSALS, ROUTE, Route, RouteOutcome, RouteTable, to_json
from towline.bridge.uplink.records import RecordColumns
from towline.bridge.uplink.source import Routing
from towline.bridge.uplink.statements import Statements, of_schema
from towline.kafka.deadletters import DeadLetter
from towline.schema import ROW_SCHEMA, SPARK_SCHEMA

__all__ = ["Planned", "frame_of", "mapped", "message"]

#: When messages came, and in milliseconds.
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def message(topic: str, payload: bytes | None = b"x", qos: int = 1, **more: Any) -> dict[str, Any]:
    """One that says nothing more."""
    row = dict.fromkeys(ROW_SCHEMA.names) | {"topic": topic, "payload": payload, "qos": qos, "received_at": NOW}
    return {**row, "retain": False, "duplicate": False, "gateway": "g", "offset": 0, **more}


def frame_of(
    spark: SparkSession, routes: Sequence[Route], messages: Sequence[Mapping[str, Any]], statements: Statements
) -> DataFrame:
    """Messages as the source of a line with SQL gives them, in one partition."""
    batch = pa.RecordBatch.from_pylist([*messages], schema=ROW_SCHEMA)
    rows = Routing(to_json(routes), statements.values).added(batch)
    return spark.createDataFrame(pa.Table.from_batches([rows])).coalesce(1)


def mapped(
    spark: SparkSession, routes: Sequence[Route], messages: Sequence[Mapping[str, Any]], *, tolerant: bool = True
) -> list[Any]:
    """Of each message the arguments of ``produce``, or its dead letter, or why it is left out."""
    statements = Statements(routes)
    return outcomes(routes, statements.applied(frame_of(spark, routes, messages, statements), tolerant=tolerant))


def outcomes(routes: Sequence[Route], rows: DataFrame) -> list[Any]:
    """The same of rows that Spark has evaluated."""
    batch = of_schema(rows.toArrow().combine_chunks().to_batches()[0])
    rendered = RouteTable(routes).render(batch)
    columns = RecordColumns()
    records = columns.rows(rendered.records, any_topic=True).records
    made: list[Any] = []
    for at, (code, refusal, record) in enumerate(
        zip(rendered.outcomes.to_pylist(), rendered.refusals.to_pylist(), records, strict=True)
    ):
        if (outcome := RouteOutcome(code)) in REFUSALS:
            reason, detail = REFUSALS[outcome]
            headers = tuple(columns.originals(rendered.records, at, ()))
            topic, value, key, _, _, _, moment, _ = record
            made.append(DeadLetter(reason, topic, key, value, headers, None, moment, detail or refusal, "line"))
        else:
            made.append(record if outcome >= RouteOutcome.RECORD else outcome.name.lower())
    return made


class Planned:
    """A mapping of messages whose plan Spark makes once, because that takes longer than the mapping.

    Args:
        spark: The session.
        source: File from which the plan reads the messages of a call.
        routes: Of the line.

    Attributes:
        frame: What Spark says of the messages.
    """

    def __init__(self, spark: SparkSession, source: Path, routes: Sequence[Route]) -> None:
        self._source, self._routes = source, routes
        statements = Statements(routes)
        self._routing = Routing(to_json(routes), statements.values)
        more = "".join(f", `{name}` string" for name in statements.values)
        spark.dataSource.register(_messages_in(str(source), f"{SPARK_SCHEMA}, {ROUTE} int{more}"))
        self.frame = statements.applied(spark.read.format("messages").load(), tolerant=True)

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """As `mapped`."""
        rows = self._routing.added(pa.RecordBatch.from_pylist([*messages], schema=ROW_SCHEMA))
        with ipc.new_file(str(self._source), rows.schema) as file:
            file.write_batch(rows)
        return outcomes(self._routes, self.frame)


def _messages_in(source: str, columns: str) -> type[DataSource]:
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
            return columns

        def reader(self, schema: StructType) -> Reader:  # noqa: ARG002 - it is the one above
            return Reader()

    return Messages
