"""What the SQL of an uplink makes of rows, with the headers that its sink adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from towline.bridge.config.routes import Route
from towline.bridge.lines.sql import HEADER_TYPE
from towline.bridge.uplink.headers import property_headers
from towline.bridge.uplink.sql import apply
from towline.kafka.columns import PROPERTIES

__all__ = ["mapped"]


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
