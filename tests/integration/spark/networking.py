"""A driver whose gateway is on a network: MQTT in, MQTT out, both with tickets. Run as a process by `test_network`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

import towline


def tell(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def session(place: Path) -> SparkSession:
    (place / "events").mkdir()
    settings: dict[str, bool | float | int | str | None] = {
        **towline.spark_conf(),
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": (place / "events").as_uri(),
        # A file system of Hadoop's that has a name of its own, and needs no server.
        "spark.hadoop.fs.viewfs.mounttable.here.link./checkpoint": (place / "checkpoint").as_uri(),
    }
    return SparkSession.builder.master("local[2]").appName("network").config(map=settings).getOrCreate()


def main(place: Path, access: dict[str, str]) -> None:
    spark = session(place)
    (place / "checkpoint").mkdir()
    checkpoint = "viewfs://here/checkpoint"
    rows = spark.readStream.format("mqtt").options(**access, checkpointLocation=checkpoint, maxMessagesPerTrigger="200")
    out = rows.load().selectExpr("concat('out/', substr(topic, 4)) AS topic", "payload")
    writer = out.writeStream.format("mqtt").options(**access, guarantee="exactly_once")
    query = writer.option("checkpointLocation", checkpoint).start()
    while not query.recentProgress:
        time.sleep(0.1)
    query.stop()  # in the midst of a batch, as a rule: it comes again
    query = writer.start()
    tell(str(spark.sparkContext.uiWebUrl))
    sys.stdin.readline()
    query.explain(extended=True)
    table = spark.read.format("mqtt").options(**access).load()
    table.explain(extended=True)
    tell(f"rows {table.count()}")
    spark.sql("SELECT 'batch/1' AS topic, 'whole' AS payload").write.format("mqtt").options(**access).mode(
        "append"
    ).save()
    tell(json.dumps([json.loads(one.json) for one in query.recentProgress]))
    sys.stdin.readline()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
