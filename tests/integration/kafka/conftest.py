"""One Spark for all tests of the room: local, small, with the settings a user of Towline has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from towline.spark.connector import spark_kafka_conf
from towline.spark.kafka_sink import KafkaTransactional


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts Spark."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")


def end_jvm() -> None:
    """End the JVM of another room, if one runs: a JVM has the jars that it was started with."""
    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)
        SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture(scope="package")  # a process has one SparkContext, and the next room has other settings
def spark() -> Iterator[SparkSession]:
    """Two cores and three attempts a task, so that a failed task is really tried again."""
    end_jvm()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    root = Path(__file__).parents[3]  # workers import classes of the tests, and the product they belong to
    os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{root / 'src'}"
    manager = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    session = (
        SparkSession.builder.master("local[2,3]")
        .config(map=dict[str, bool | float | int | str | None](spark_kafka_conf(pyspark.__version__)))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.streaming.checkpointFileManagerClass", manager)
        .config("spark.sql.adaptive.streaming.stateless.enabled", "false")
        .config("spark.executorEnv.TOWLINE_TEST_USER", "u")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    session.dataSource.register(KafkaTransactional)
    yield session
    session.stop()
