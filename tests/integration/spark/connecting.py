"""A client of Spark Connect: an MQTT stream into a table, and a table into MQTT. Run as a process by `test_connect`."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

import towline


def tell(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main(broker: str, place: str) -> None:
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    towline.register(spark)
    rows = (
        spark.readStream.format("mqtt")
        .options(broker=broker, subscribe="in/#:1", stateDir=f"{place}/source", clientId="connect-source")
        .load()
    )
    out = rows.selectExpr("concat('out/', substr(topic, 4)) AS topic", "payload")
    query = (
        out.writeStream.format("mqtt")
        .options(broker=broker, stateDir=f"{place}/sink", clientId="connect-sink")
        .option("checkpointLocation", f"{place}/checkpoint")
        .start()
    )
    tell("running")
    sys.stdin.readline()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
