"""What the SQL of an uplink makes of rows, with the headers that its sink adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from towline.bridge.config.routes import Route
from towline.bridge.lines.sql import HEADER_TYPE
from towline.bridge.uplink.sql import apply
from towline.kafka.columns import PLAIN

__all__ = ["mapped"]

_PLAIN = (
    "array(named_struct('key', 'mqtt.topic', 'value', CAST(towline_topic AS BINARY)), "
    "named_struct('key', 'mqtt.qos', 'value', CAST(CAST(towline_qos AS STRING) AS BINARY)), "
    "named_struct('key', 'mqtt.received-at', 'value', CAST(CAST(unix_micros(timestamp) AS STRING) AS BINARY)))"
)


def mapped(frame: DataFrame, routes: Sequence[Route], **more: Any) -> DataFrame:
    """As `apply`; the headers that `towline.kafka.columns` makes are in the column headers too."""
    rows = apply(frame, routes, **more)
    if not set(PLAIN) <= set(rows.columns):
        return rows
    headers = F.expr(f"CASE WHEN towline_topic IS NULL THEN headers ELSE CAST({_PLAIN} AS {HEADER_TYPE}) END")
    return rows.withColumn("headers", headers).drop(*PLAIN)
