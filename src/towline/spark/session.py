"""Settings of a Spark session that Towline's sources and sinks want."""

from __future__ import annotations

import os
import sys

__all__ = ["spark_conf"]


def spark_conf(**more: str) -> dict[str, str]:
    """Settings for ``SparkSession.builder.config(map=...)``; call it before the session is made.

    It also sets ``PYSPARK_PYTHON`` in this process's environment to the running interpreter, unless it is set: PySpark
    started from Python reads the variable, not ``spark.pyspark.python``, and would take any ``python3`` on the PATH.

    ==================================================  =======================================================
    ``spark.pyspark.python``                            the same for spark-submit
    ``spark.python.unix.domain.socket.enabled``         true: loopback TCP costs 40 ms a Python task
    ``spark.sql.streaming.checkpointFileManagerClass``  the plain one: 30 ms less a batch on a local disk
    ``spark.sql.adaptive.streaming.stateless.enabled``  false: a replayed batch keeps its partitions
    ``spark.speculation``                               false: attempts of a task would fence each other
    ``spark.python.worker.reuse``                       true: a new worker costs 2.7 s a batch
    ``spark.sql.execution.arrow.maxBytesPerBatch``      64m: rows handed to a sink at a time, whatever their size
    ==================================================  =======================================================

    Args:
        more: Further settings, dots written as two underscores (``spark__sql__shuffle__partitions="2"``); they win.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.pyspark.python": os.environ["PYSPARK_PYTHON"],
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.speculation": "false",
        "spark.python.worker.reuse": "true",
        "spark.sql.execution.arrow.maxBytesPerBatch": "64m",
    }
    return settings | {key.replace("__", "."): value for key, value in more.items()}
