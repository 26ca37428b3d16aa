"""Kafka to Kafka, exactly once: Spark's own Kafka source, any transformation, and the transactional sink.

    python examples/kafka_to_kafka.py 127.0.0.1:9092 readings alarms /tmp/kafka-to-kafka

Reads JSON such as ``{"number": 1, "celsius": 81.5}`` and writes an alarm for everything above 80 degrees. Kill it with
-9 as often as you like and start it again: no alarm is lost and none is there twice, for a consumer with
isolation.level=read_committed. To change a query that writes with ``format("kafka")``, change the name of the format,
give it a ``sinkId`` that no other query has, and bring its rows into one partition: one transaction a batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, from_json, struct, to_json

import towline
from towline.spark.java import spark_kafka_conf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of Kafka")
    parser.add_argument("source", help="topic to read")
    parser.add_argument("target", help="topic to write")
    parser.add_argument("directory", type=Path, help="the checkpoint; keep it, it is half of the promise")
    parser.add_argument("--once", action="store_true", help="end when all that is there now is written")
    given = parser.parse_args()

    spark = session()
    query = (
        alarms(readings(spark, given.bootstrap, given.source))
        .writeStream.format("kafka_transactional")
        .option("kafka.bootstrap.servers", given.bootstrap)
        .option("topic", given.target)
        .option("guarantee", "exactly_once")
        .option("sinkId", f"kafka-to-kafka.{given.target}")
        .option("verifySourceTopics", "true")  # not from old offsets of a recreated topic [TL-B06]
        .option("checkpointLocation", str(given.directory / "checkpoint"))
    )
    started = query.trigger(availableNow=True).start() if given.once else query.start()
    try:
        started.awaitTermination()
    except KeyboardInterrupt:
        started.stop()
    spark.stop()


def session() -> SparkSession:
    """A local Spark with the settings that matter, and the jars of Spark's Kafka source."""
    builder = SparkSession.builder.appName("kafka-to-kafka").master("local[2]")
    for key, value in {**towline.spark_conf(), **spark_kafka_conf()}.items():
        builder = builder.config(key, value)
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    towline.register(spark)
    return spark


def readings(spark: SparkSession, bootstrap: str, topic: str) -> DataFrame:
    """Key and parsed value of what is committed."""
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("kafka.isolation.level", "read_committed")  # Spark's source reads uncommitted records without it
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 2000)
        .load()
    )
    parsed = from_json(col("value").cast("string"), "number long, celsius double")
    return records.select("key", parsed.alias("reading"))


def alarms(readings: DataFrame) -> DataFrame:
    """The columns of the sink: a key and a value."""
    hot = readings.where("reading.celsius > 80")
    return hot.select("key", to_json(struct("reading.number", "reading.celsius")).alias("value"))


if __name__ == "__main__":
    main()
