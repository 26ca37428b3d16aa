"""MQTT to Kafka on a cluster, exactly once, as an application of yours; docs/spark.md describes the setup.

    spark-submit --properties-file cluster.properties examples/cluster.py \
        --gateway grpc+tls://g1:8815 --token-file token --ca-file ca.pem --kafka k1:9092 --topic readings \
        --checkpoint /var/lib/towline/readings

The gateway takes the messages in, wherever it runs; the executors read them from it with tickets that the driver gets
for them, and write them into Kafka. Kill what you like and start it again: no message is lost, and none is there twice
for a consumer with isolation.level=read_committed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, element_at, split
from pyspark.sql.streaming.readwriter import DataStreamWriter

import towline
from towline.errors import TowlineError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", required=True, help="grpc+tls://HOST:PORT")
    parser.add_argument("--token-file", required=True, help="read on the driver alone")
    parser.add_argument("--ca-file", required=True, help="who signed the gateway's certificate")
    parser.add_argument("--kafka", required=True, help="HOST:PORT, with commas between")
    parser.add_argument("--topic", required=True, help="it is there already")
    parser.add_argument("--checkpoint", required=True, type=Path, help="keep it, it is half of the promise")
    parser.add_argument("--parallelism", type=int, default=2, help="transactions of a batch, each by one task")
    given = parser.parse_args()

    builder = SparkSession.builder.appName(f"to {given.topic}")
    spark = builder.config(map={**towline.spark_conf()}).getOrCreate()
    towline.register(spark)
    try:
        towline.check_executors(spark)
    except TowlineError as error:
        sys.exit(str(error))
    messages = (
        spark.readStream.format("mqtt")
        .option("gateway", given.gateway)
        .option("gatewayTokenFile", given.token_file)
        .option("gatewayCaFile", given.ca_file)
        .option("guarantee", "exactly_once")
        .option("checkpointLocation", str(given.checkpoint))
        .load()
    )
    query = written(records(messages), given).start()
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()
    spark.stop()


def records(messages: DataFrame) -> DataFrame:
    """``telemetry/DEVICE/...`` with the device as key, so that each device stays in order."""
    device = element_at(split(col("topic"), "/"), 2)
    return messages.select(device.cast("binary").alias("key"), col("payload").alias("value"))


def written(rows: DataFrame, given: argparse.Namespace) -> DataStreamWriter:
    """One transaction for each part of a batch, and each device always in the same part."""
    return (
        rows.repartition(given.parallelism, "key")
        .writeStream.format("kafka_transactional")
        .option("kafka.bootstrap.servers", given.kafka)
        .option("topic", given.topic)
        .option("guarantee", "exactly_once")
        .option("sinkId", f"cluster.{given.topic}")
        .option("parallelism", given.parallelism)
        .option("checkpointLocation", str(given.checkpoint))
    )


if __name__ == "__main__":
    main()
