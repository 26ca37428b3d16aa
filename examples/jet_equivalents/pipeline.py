"""A pipeline from MQTT to MQTT, as Jet's examples build it.

    python examples/jet_equivalents/pipeline.py mqtt://127.0.0.1:1883 /tmp/jet

Jet::

    pipeline.readFrom(MqttSources.mqtt(broker, "drivers/#"))
            .withIngestionTimestamps().map(bytes -> new String(bytes).toUpperCase())
            .writeTo(MqttSinks.mqtt(broker, "shouts"));
    jet.newJob(pipeline, new JobConfig().setProcessingGuarantee(AT_LEAST_ONCE)).join();

Publish to drivers/ANYTHING and subscribe to shouts. Kill it as you like and start it again: nothing is lost.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sinks
import sources
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import towline


def run(spark: SparkSession, broker: str, directory: Path) -> StreamingQuery:
    """Start the pipeline."""
    items = sources.shortcut(spark, broker, directory / "source").selectExpr("upper(CAST(payload AS STRING)) AS item")
    return sinks.shortcut(items, broker, directory / "sink")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("broker", help="mqtt://HOST:PORT")
    parser.add_argument("directory", type=Path, help="state and checkpoints")
    given = parser.parse_args()
    builder = SparkSession.builder.appName("jet-equivalents").master("local[2]")
    for key, value in towline.spark_conf().items():
        builder = builder.config(key, value)
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    towline.register(spark)
    run(spark, given.broker, given.directory).awaitTermination()


if __name__ == "__main__":
    main()
