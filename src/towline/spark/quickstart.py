"""Spark's JVM started in a third of the time: an archive of its classes, and where that is enough one compiler.

Of the 25 s of CPU that a JVM takes until its first micro-batch, most goes into loading and verifying 15,000 classes and
into compiling them twice. Java's class data sharing (JEP 350) spares the one. Stopping at the first compiler spares the
other, and its code is slower once the second compiler would have done its work: `Tier` says when which is better.

``python -m towline.spark.quickstart`` makes the archive and gives way to all other processes meanwhile.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

from towline.errors import SetupError
from towline.spark.classes import QUIET_JVM, archive_for, archive_once, recording
from towline.spark.home import light_home, sweep
from towline.spark.java import find_java, java_version

__all__ = ["QUICK", "Tier", "archive_of", "jvm_options", "prepare_spark"]


class Tier(StrEnum):
    """How Spark's JVM is tuned; docs/benchmarks.md has the figures."""

    #: `QUICK` on a machine of up to two cores, else `PEAK`.
    AUTO = "auto"
    #: A quick start and few compilers: they and the collector leave the cores to brokers and workers.
    QUICK = "quick"
    #: Java's own choice: slow code until it has been compiled twice, and the fastest after that.
    PEAK = "peak"


#: Arrow checks the bounds of every value that Spark reads and writes, which Spark has done already.
_UNCHECKED: Final = ("-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false")
#: Of a process that Java starts: Hadoop starts a ``chmod`` for each file of a checkpoint. Java 24 has it no more.
_DIRECTLY: Final = "-Djdk.lang.Process.launchMechanism=VFORK"
_NEWEST_DIRECTLY: Final = 23
QUICK: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
#: On more cores than these the second compiler has one to itself.
_FEW_CORES: Final = 2
_VARIABLE: Final = "SPARK_SUBMIT_OPTS"
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


def jvm_options(tier: Tier) -> list[str]:
    """What Spark's JVM is started with, beside the archive."""
    few = len(os.sched_getaffinity(0)) <= _FEW_CORES
    quick = tier is Tier.QUICK or (tier is Tier.AUTO and few)
    return [*QUIET_JVM, *_UNCHECKED, *_directly(), *(QUICK if quick else ())]


def _directly() -> list[str]:
    try:
        release = java_version(str(find_java()))
    except SetupError:
        return []  # Spark may know a Java that we do not
    return [_DIRECTLY] if release is not None and release <= _NEWEST_DIRECTLY else []


def archive_of(home: Path) -> Path:
    """Where the archive of a home's classes is, or is to be; another Java ignores it.

    Raises:
        SetupError: There is no Java (TL-S14).
    """
    return archive_for(find_java(), home / "jars", home / "classes")


def prepare_spark() -> Path | None:
    """Make the archive of Spark's classes (160 MB, some 40 s) if there is none for this Java and these jars.

    Returns:
        The archive; None where `light_home` has none.

    Raises:
        SetupError: There is no Java (TL-S14), or Spark does not start (TL-S19).
    """
    home = light_home()
    if home is None:
        return None
    sweep()
    archive = archive_of(home)
    archive_once(archive, partial(_trial, home))
    return archive


def _trial(home: Path, draft: Path) -> None:
    options = shlex.join([*jvm_options(Tier.QUICK), recording(draft)])
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


if __name__ == "__main__":
    os.nice(19)
    prepare_spark()
