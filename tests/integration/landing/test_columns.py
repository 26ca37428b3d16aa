"""Spark makes of a row's record the row that was received: every column, whatever is in it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.integration.bridge.conftest import spark  # noqa: F401 - a fixture
from towline.bridge.uplink.landed import KEY_SCHEMA, columns
from towline.landing.records import to_records
from towline.schema import ROW_SCHEMA

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

_STRANGE = ["", "a/ü/☃/\U0001f680", '"quoted\\" \n\t\r', "\u0000\u0001\u2028\ud7ff\uffff", "null", "{}", "x" * 5000]


def _rows() -> list[dict[str, Any]]:
    full = {
        "topic": "t/1",
        "payload": bytes(range(256)),
        "qos": 2,
        "retain": True,
        "duplicate": False,
        "content_type": "text/plain",
        "payload_is_utf8": True,
        "response_topic": "r",
        "correlation_data": bytes(range(255, -1, -1)),
        "user_properties": [{"key": text, "value": text[::-1]} for text in _STRANGE],
        "message_expiry_seconds": 2**32 - 1,
        "subscription_ids": [1, 268_435_455],
        "received_at": 1_790_000_000_123_456,
        "gateway": "plant-7",
        "offset": 2**62,
    }
    empty = dict.fromkeys(full)
    rows = [full, empty]
    for name, value in full.items():
        rows += [{**empty, name: value}, {**full, name: None}]
    rows += [{**empty, "topic": text, "gateway": text, "content_type": text} for text in _STRANGE]
    rows += [{**empty, "payload": b"", "correlation_data": b"", "user_properties": [], "subscription_ids": []}]
    return [*rows, {**empty, "received_at": -1}, {**empty, "received_at": 0, "offset": 0, "qos": 0}]


def test_every_column_comes_back(spark: SparkSession) -> None:  # noqa: F811
    wanted = pa.RecordBatch.from_arrays(
        [
            pa.array([row[field.name] for row in _rows()], pa.int64()).cast(field.type)
            if pa.types.is_timestamp(field.type)
            else pa.array([row[field.name] for row in _rows()], field.type)
            for field in ROW_SCHEMA
        ],
        schema=ROW_SCHEMA,
    )
    records, _ = to_records(wanted, 0, 1 << 30)
    frame = spark.createDataFrame([(record.key, record.value) for record in records], "key binary, value binary")
    parsed = f"from_json(CAST(key AS STRING), '{KEY_SCHEMA}', map('mode', 'FAILFAST')) AS row"
    made = frame.coalesce(1).selectExpr(parsed, "value").selectExpr(*columns(ROW_SCHEMA.names)).toArrow()
    for name in ROW_SCHEMA.names:
        assert made.column(name).to_pylist() == wanted.column(name).to_pylist(), name
