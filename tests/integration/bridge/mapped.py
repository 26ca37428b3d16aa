"""What the routes of an uplink make of messages, with Spark's answer to their SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from towline.bridge.lines.sql import RouteSql
from towline.bridge.routes import FAULT, OUTCOME, RecordColumns, Route, RouteTable, RowOutcome, to_row_schema
from towline.kafka.deadletters import DeadLetter
from towline.schema import ROW_SCHEMA

#: When messages came, and in milliseconds.
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


#: What Spark's Kafka source gives.
RECORD = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)


def message(topic: str, payload: bytes | None = b"x", qos: int = 1, **more: Any) -> dict[str, Any]:
    """One that says nothing more."""
    row = dict.fromkeys(ROW_SCHEMA.names) | {"topic": topic, "payload": payload, "qos": qos, "received_at": NOW}
    return {**row, "retain": False, "duplicate": False, "gateway": "g", "offset": 0, **more}


def frame_of(
    spark: SparkSession, routes: Sequence[Route], messages: Sequence[Mapping[str, Any]], statements: RouteSql
) -> DataFrame:
    """Messages as the source of a line with SQL gives them, in one partition."""
    batch = pa.RecordBatch.from_pylist([*messages], schema=ROW_SCHEMA)
    rows = RouteTable(routes).add_routes(batch, statements.value_columns)
    return spark.createDataFrame(pa.Table.from_batches([rows])).coalesce(1)


def mapped(spark: SparkSession, routes: Sequence[Route], messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Of each message the arguments of ``produce``, or its dead letter, or why it is left out."""
    statements = RouteSql(routes)
    return outcomes(routes, statements.writer_frame(frame_of(spark, routes, messages, statements)))


def outcomes(routes: Sequence[Route], rows: DataFrame) -> list[Any]:
    """The same of rows that Spark has evaluated."""
    batch = to_row_schema(rows.toArrow().combine_chunks().to_batches()[0])
    rendered = RouteTable(routes).render(batch)
    columns = RecordColumns()
    records = columns.rows(rendered, any_topic=True).records
    made: list[Any] = []
    codes, faults = (rendered.column(name).to_pylist() for name in (OUTCOME, FAULT))
    for at, (code, fault, record) in enumerate(zip(codes, faults, records, strict=True)):
        if reason := (outcome := RowOutcome(code)).reason:
            topic, _, key, _, _, _, moment, _ = record
            value, headers = columns.original(rendered, at, record)
            made.append(DeadLetter(reason, topic, key, value, tuple(headers), None, moment, fault, "line"))
        else:
            made.append(record if outcome >= RowOutcome.RENDERED else outcome.name.lower())
    return made
