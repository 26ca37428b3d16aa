"""Jet's ``mapToItemFn`` and ``messageFn`` as Python functions.

Expressions over columns are quicker (see `sources` and `sinks`); a function is there for what no expression says. It
runs in Spark's Python workers, so it has to be the same for the same row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.streaming import StreamingQuery

#: What an item is.
ITEM = "driver string, speed double"
#: What a message has; every column but topic and payload may be missing.
MESSAGE = (
    "topic string, payload binary, qos int, retain boolean, content_type string, "
    "user_properties array<struct<key: string, value: string>>"
)


def item_of(topic: str, payload: bytes) -> tuple[str, float]:
    """Jet: ``.mapToItemFn((topic, message) -> ...)``."""
    return topic.rpartition("/")[2], float(json.loads(payload)["speed"])


def message_of(driver: str, speed: float) -> dict[str, Any]:
    """Jet: ``.messageFn(item -> message)``; a topic for each message too."""
    fast = speed > 50
    return {
        "topic": f"{'fast' if fast else 'slow'}/{driver}",
        "payload": f"{speed:.1f}".encode(),
        "qos": 1,
        "retain": fast,
        "content_type": "text/plain",
        "user_properties": [{"key": "driver", "value": driver}],
    }


def items(frame: DataFrame) -> DataFrame:
    """Rows of the source as items."""
    to_item = F.udf(item_of, ITEM, useArrow=False)
    return frame.select(to_item("topic", "payload").alias("item")).select("item.*")


def messages(frame: DataFrame) -> DataFrame:
    """Items as rows of the sink."""
    to_message = F.udf(message_of, MESSAGE, useArrow=False)
    return frame.select(to_message("driver", "speed").alias("message")).select("message.*")


def run(spark: SparkSession, broker: str, directory: Path) -> StreamingQuery:
    """From ``speed/DRIVER`` to ``fast/DRIVER`` or ``slow/DRIVER``."""
    spark.sparkContext.addPyFile(__file__)  # workers need the functions, too
    source = spark.readStream.format("mqtt").options(broker=broker, subscribe="speed/#", stateDir=str(directory / "in"))
    return (
        messages(items(source.load()))
        .writeStream.format("mqtt")
        .options(broker=broker, stateDir=str(directory / "out"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .start()
    )
