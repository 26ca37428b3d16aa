"""Spark's JVM started in a third of the time, for tests and the demo: an archive of its classes, and one compiler.

Of the 25 s of CPU that a JVM takes until its first micro-batch, most goes into loading and verifying 15,000 classes and
into compiling them twice. Java's class data sharing (JEP 350) spares the one; stopping at the first compiler spares the
other, and costs throughput later, which is why only what starts Spark again and again wants it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline.errors import SetupError
from towline.spark.home import light_home, sweep
from towline.spark.java import find_java
from towline_prove.devstack.classes import QUIET_JVM, archive_for, archive_once, recording, sharing
from towline_prove.devstack.kafka import PERFORMANCE

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["prepare_spark", "start_quickly"]

#: spark-submit adds what this variable holds to its JVM.
_VARIABLE: Final = "SPARK_SUBMIT_OPTS"
_QUICK: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_TRIAL_SECONDS: Final = 300

#: What is loaded here is in the archive: a session, a streaming query from a Python data source, SQL, state, shuffle.
_TRIAL: Final = """
import tempfile, time
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
import towline

class Reader(SimpleDataSourceStreamReader):
    def initialOffset(self):
        return {"at": 0}
    def read(self, start):
        return iter([(start["at"],)]), {"at": start["at"] + 1}
    def readBetweenOffsets(self, start, end):
        return iter([(start["at"],)])

class Numbers(DataSource):
    @classmethod
    def name(cls):
        return "numbers"
    def schema(self):
        return "value long"
    def simpleStreamReader(self, schema):
        return Reader()

builder = SparkSession.builder.master("local[2]").config(map=towline.spark_conf())
spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "1").getOrCreate()
towline.register(spark)
spark.dataSource.register(Numbers)
rows = spark.readStream.format("numbers").load().selectExpr("*", "value % 3 AS rest").dropDuplicates(["value"])
with tempfile.TemporaryDirectory() as checkpoint:
    query = rows.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    while query.isActive and not query.lastProgress:
        time.sleep(0.1)
    query.stop()
spark.stop()
"""


def prepare_spark() -> Path | None:
    """Make the archive of Spark's classes (160 MB, some 40 s) if there is none for this Java and these jars.

    Returns:
        The archive; another Java ignores it. None where `light_home` has none.

    Raises:
        SetupError: There is no Java (TL-S14), or Spark does not start (TL-S19).
    """
    home = light_home()
    if home is None:
        return None
    sweep()
    archive = _archive(home)
    archive_once(archive, partial(_trial, home))
    return archive


def start_quickly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let every local Spark and every Kafka that is started with this environment start quickly, and run less quickly.

    Args:
        environment: Gets ``SPARK_HOME`` and ``SPARK_SUBMIT_OPTS``; what the latter holds already stays, and wins. And
            ``KAFKA_JVM_PERFORMANCE_OPTS``, where there is none.

    Raises:
        SetupError: There is no Java (TL-S14).
    """
    home = light_home()
    options = [*QUIET_JVM, *_QUICK]
    if home is not None:
        environment["SPARK_HOME"] = str(home)
        options += sharing(_archive(home))
    environment.setdefault(PERFORMANCE, " ".join(_QUICK))
    environment[_VARIABLE] = " ".join([shlex.join(options), environment.get(_VARIABLE, "")]).strip()


def _archive(home: Path) -> Path:
    return archive_for(find_java(), home / "jars", home / "classes")


def _trial(home: Path, draft: Path) -> None:
    options = shlex.join([*QUIET_JVM, *_QUICK, recording(draft)])
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL],
        env={**os.environ, "SPARK_HOME": str(home), _VARIABLE: options},
        capture_output=True,
        text=True,
        timeout=_TRIAL_SECONDS,
        check=False,
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        what = f"a first trial failed: {words[-1]}"
        raise SetupError("TL-S19", "spark", what, "Has this machine 1 GB of memory free?")
