"""MQTT into Spark without the bridge: one stream to the console, one to Parquet files.

    python examples/plain_pyspark.py mqtt://127.0.0.1:1883 'telemetry/#:1' /tmp/plain

The source starts a gateway for its state directory by itself; both queries read from it, each under a `consumer` name
of its own, so that each has its own committed watermark. Stop it with Ctrl-C and start it again: nothing is lost
meanwhile, the broker keeps the session and the gateway's journal keeps what is not committed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, split

import towline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("broker", help="mqtt://HOST:PORT")
    parser.add_argument("subscribe", help="FILTER:QOS, several with commas")
    parser.add_argument("directory", type=Path, help="state, checkpoints and Parquet files")
    parser.add_argument("--messages", type=int, help="end after so many rows in the Parquet files")
    given = parser.parse_args()

    spark = session()
    console = (
        readings(spark, given, consumer="console")
        .writeStream.format("console")
        .option("truncate", "true")
        .option("checkpointLocation", str(given.directory / "checkpoint-console"))
        .start()
    )
    files = (
        readings(spark, given, consumer="files")
        .writeStream.format("parquet")
        .option("path", str(given.directory / "parquet"))
        .option("checkpointLocation", str(given.directory / "checkpoint-files"))
        .start()
    )
    try:
        while console.isActive and files.isActive and not enough(spark, given):
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    for query in (console, files):
        if query.exception():
            raise SystemExit(str(query.exception()))
        query.stop()
    spark.stop()


def session() -> SparkSession:
    """A local Spark with the settings that matter to Towline."""
    builder = SparkSession.builder.appName("plain-pyspark").master("local[2]")
    for key, value in towline.spark_conf().items():
        builder = builder.config(key, value)
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    towline.register(spark)
    return spark


def readings(spark: SparkSession, given: argparse.Namespace, consumer: str) -> DataFrame:
    """The messages, with the second level of the topic as the device."""
    messages = (
        spark.readStream.format("mqtt")
        .option("broker", given.broker)
        .option("clientId", f"plain-pyspark-{given.directory.resolve().name}")  # one name, one session at the broker
        .option("subscribe", given.subscribe)
        .option("stateDir", str(given.directory / "gateway"))
        .option("consumer", consumer)
        .load()
    )
    return messages.select(
        split(col("topic"), "/")[1].alias("device"), col("payload").cast("string"), "received_at", "gateway", "offset"
    )


def enough(spark: SparkSession, given: argparse.Namespace) -> bool:
    """Whether the files hold what was asked for."""
    written = given.directory / "parquet" / "_spark_metadata"
    if given.messages is None or not any(written.glob("[0-9]*")):
        return False
    return spark.read.schema("offset long").parquet(str(written.parent)).count() >= given.messages


if __name__ == "__main__":
    main()
