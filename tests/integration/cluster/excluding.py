"""An application whose tasks fail on one worker's host, which Spark then leaves out; it writes 0, 1, 2 ... once.

spark-submit tests/integration/cluster/excluding.py BOOTSTRAP TOPIC CHECKPOINT HOST BATCHES [SETTING=VALUE ...]
"""

from __future__ import annotations

import os
import sys
import time

from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

import towline


def main(bootstrap: str, topic: str, checkpoint: str, host: str, batches: str, *more: str) -> None:
    """Stream until so many batches are done."""
    conf = {
        **towline.spark_conf(),
        "spark.excludeOnFailure.enabled": "true",
        "spark.excludeOnFailure.task.maxTaskAttemptsPerNode": "1",
        "spark.sql.execution.pythonUDF.arrow.enabled": "false",  # it would want pandas
        "spark.ui.enabled": "false",
        **dict(setting.split("=", 1) for setting in more),
    }
    spark = SparkSession.builder.config(map={**conf}).getOrCreate()
    towline.register(spark)
    towline.check_executors(spark)

    @udf("string")
    def text(value: int) -> str:
        if os.environ["SPARK_LOCAL_IP"] == host:
            raise RuntimeError(f"not on {host}")
        return str(value)

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).load()
    rows = source.repartition(2, "value").select(text("value").alias("value"))
    writer = rows.writeStream.format("kafka_transactional").option("checkpointLocation", checkpoint)
    writer = writer.option("kafka.bootstrap.servers", bootstrap).option("topic", topic).option("parallelism", 2)
    query = writer.start()
    while query.isActive and (query.lastProgress or {"batchId": -1})["batchId"] < int(batches):
        time.sleep(0.1)
    query.stop()
    spark.stop()
    if query.exception():
        sys.exit(str(query.exception()))


if __name__ == "__main__":
    main(*sys.argv[1:])
