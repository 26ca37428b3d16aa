"""Spark's JVM and its Python processes started in a third of the time; docs/benchmarks.md has the figures.

home       Spark starts some seven Python processes for a query with Python data sources, and puts ``$SPARK_HOME``'s
           zipped copy of PySpark first on their path (`PythonUtils.sparkPythonPath`). Python writes no byte code for a
           zip, so each compiles PySpark anew: 1.5 s instead of 0.35 s. Without it they take the installed PySpark,
           which is the same (ADR 13).
archive    of the 15,000 classes that a JVM loads and verifies until its first micro-batch (class data sharing, JEP
           350): ``python -m towline.spark.quickstart`` makes it, once. It belongs to one build of Java and to the very
           files of one class path; beside any other Java ignores it without a word.
compilers  code that is compiled twice is the fastest later on; `Tier` says when one compiler is enough.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline.errors import SetupError
from towline.spark.java import cache_directory, describe_java, find_java, java_version, make_once
from towline.spark.session import pyspark_version

if TYPE_CHECKING:
    from collections.abc import Callable


class Tier(StrEnum):
    """How Spark's JVM is tuned; docs/benchmarks.md has the figures."""

    #: `QUICK` on a machine of up to two cores, else `PEAK`.
    AUTO = "auto"
    #: A quick start and few compilers: they and the collector leave the cores to brokers and workers.
    QUICK = "quick"
    #: Java's own choice: slow code until it has been compiled twice, and the fastest after that.
    PEAK = "peak"


QUIET_JVM: Final = [
    "-Xshare:auto",
    *("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off"),  # another Java's archive is no news
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dlog4j2.disable.jmx=true",
]
#: Arrow checks the bounds of every value that Spark reads and writes, which Spark has done already.
_UNCHECKED: Final = ("-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false")
#: Of a process that Java starts: Hadoop starts a ``chmod`` for each file of a checkpoint. Java 24 has it no more.
_DIRECTLY: Final = "-Djdk.lang.Process.launchMechanism=VFORK"
_NEWEST_DIRECTLY: Final = 23
QUICK: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
#: On more cores than these the second compiler has one to itself.
_FEW_CORES: Final = 2


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


#: What a local master needs of its home; not ``python/lib``, where the zip is, which only YARN sends to its workers.
_PARTS: Final = ("bin", "sbin", "jars", "data", "conf")


def light_home() -> Path | None:
    """A ``SPARK_HOME`` for local masters, made on first use in the user's cache directory.

    Returns:
        None where the user has a ``SPARK_HOME``, the cache can't be written, there is no PySpark, or it was moved and
        links lead nowhere: Spark's own home will do.
    """
    spec, cache = find_spec("pyspark"), cache_directory()
    if "SPARK_HOME" in os.environ or spec is None or spec.origin is None or cache is None:
        return None
    package = Path(spec.origin).parent
    # One for each installation: two environments of a user have PySpark in two places.
    home = cache / f"spark-{pyspark_version()}-{_digest(str(package.resolve()))}"

    def link(draft: Path) -> None:
        draft.mkdir()
        for part in _PARTS:
            (draft / part).symlink_to(package / part)

    if not home.is_dir():
        with contextlib.suppress(OSError):  # nobody may write here
            make_once(home, link)
    return home if (home / "jars").is_dir() else None


def archive_for(jars: Path, stem: Path) -> Path:
    """Where the archive for the Java that is found and a directory of jars is: ``STEM-JAVA-JARS.jsa``.

    Jars installed anew have another.

    Raises:
        SetupError: There is no Java (TL-S14).
    """
    there = sorted((jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in jars.glob("*.jar"))
    return stem.with_name(f"{stem.name}-{_digest(describe_java(str(find_java())))}-{_digest(repr(there))}.jsa")


def archive_of(home: Path) -> Path:
    """The same of a home's classes.

    Raises:
        SetupError: There is no Java (TL-S14).
    """
    return archive_for(home / "jars", home / "classes")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sharing(archive: Path) -> list[str]:
    """The option that uses an archive; none while there is no archive."""
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []


def archive_once(archive: Path, run: Callable[[Path, str], None]) -> None:
    """Make an archive if there is none, and remove those of other jars; of several processes one does it.

    Args:
        archive: Where it is to be; the directory exists.
        run: Runs a JVM in a directory that is removed afterwards, with the option that writes an archive when it ends.
    """
    if not os.access(archive.parent, os.W_OK):
        return

    def make(draft: Path) -> None:
        run(draft.parent, f"-XX:ArchiveClassesAtExit={draft}")
        if draft.exists():
            for other in archive.parent.glob(f"{archive.stem.rpartition('-')[0]}-*.jsa"):  # jars that are gone
                other.unlink(missing_ok=True)

    make_once(archive, make)


def prepare_spark() -> Path | None:
    """Make the archive of Spark's classes (160 MB, some 40 s) if there is none for this Java and these jars.

    Returns:
        The home that it is in; None where `light_home` has none.

    Raises:
        SetupError: There is no Java (TL-S14), or Spark does not start (TL-S19).
    """
    home = light_home()
    if home is not None:
        archive_once(archive_of(home), partial(_trial, home))
    return home


_TRIAL_SECONDS: Final = 300
#: What is loaded here is in the archive: a session, a streaming query from a Python data source, SQL, state, shuffle.
_TRIAL: Final = """
import tempfile, time
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
import towline

class Numbers(DataSource, SimpleDataSourceStreamReader):
    def schema(self):
        return "value long"
    def simpleStreamReader(self, schema):
        return self
    def initialOffset(self):
        return {"at": 0}
    def read(self, start):
        return iter([(start["at"],)]), {"at": start["at"] + 1}
    def readBetweenOffsets(self, start, end):
        return iter([(start["at"],)])

builder = SparkSession.builder.master("local[2]").config(map=towline.spark_conf())
spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "1").getOrCreate()
towline.register(spark)
spark.dataSource.register(Numbers)
rows = spark.readStream.format("Numbers").load().selectExpr("*", "value % 3 AS rest").dropDuplicates(["value"])
with tempfile.TemporaryDirectory() as checkpoint:
    query = rows.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    while query.isActive and not query.lastProgress:
        time.sleep(0.1)
    query.stop()
spark.stop()
"""


def _trial(home: Path, _: Path, recording: str) -> None:
    options = shlex.join([*jvm_options(Tier.QUICK), recording])
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL],
        env={**os.environ, "SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": options},
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
    prepare_spark()
