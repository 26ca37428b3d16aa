"""What tests of the readers ask of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.unit.gateway.serving import rows
from towline.spark.reader import MqttStreamReader

__all__ = ["ALL", "offset", "table"]

ALL = ReadAllAvailable()


def offset(place: dict[str, Any]) -> int:
    return int(place["gateways"]["plant"]["offset"])


def table(made: MqttStreamReader, start: dict[str, Any], end: dict[str, Any]) -> pa.Table:
    batches = [batch for part in made.partitions(start, end) for batch in made.read(part)]
    return pa.Table.from_batches(batches, schema=rows(0, 0).schema)
