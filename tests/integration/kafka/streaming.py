"""A Spark application of its own that writes 0, 1, 2 ... exactly once until it is killed.

python -m tests.integration.kafka.streaming BOOTSTRAP TOPIC CHECKPOINT
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from towline.spark.kafka_sink import KafkaTransactional


def main(bootstrap: str, topic: str, checkpoint: str) -> None:
    """Stream until the end of this process."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .getOrCreate()
    )
    spark.dataSource.register(KafkaTransactional)
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 200).load()
    rows = source.selectExpr("CAST(value AS STRING) AS value")
    writer = rows.writeStream.format("kafka_transactional").option("checkpointLocation", checkpoint)
    writer.option("kafka.bootstrap.servers", bootstrap).option("topic", topic).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
