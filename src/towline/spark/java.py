"""Java, jars by their Maven coordinates in a cache that all processes of a user share, and a quick start of Spark.

What a start takes with and without is in docs/benchmarks.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from enum import StrEnum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline import files
from towline.errors import ConfigError, SetupError
from towline.spark.session import pyspark_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


OLDEST_JAVA = 17
"""Kafka 4 brokers and Spark 4 both ask for Java 17."""

RESOLVE_SECONDS = 600

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>towline</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>
{dependencies}
</dependencies></project>
"""
#: Colours and their resets, which Debian's Maven writes into a pipe too.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>"
ALONE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"


def cache_directory() -> Path | None:
    """Where downloads are kept: ``TOWLINE_CACHE``, else ``towline`` in the user's cache directory (XDG).

    Returns:
        None for a user without a home, as containers have them.

    Raises:
        ConfigError: TL-C193, another user could put jars there.
    """
    named = os.environ.get("TOWLINE_CACHE")
    try:
        place = Path(named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "towline").resolve()
    except RuntimeError:
        return None
    for directory in (place, *place.parents):
        if reason := _exposure(directory, sticky=directory != place):
            what = f"{reason}, and Java runs the jars that are kept there"
            do = "Name a directory of your own in TOWLINE_CACHE; use nothing that lies in this one."
            raise ConfigError("TL-C193", f"cache {place}", what, do)
    return place


def _exposure(directory: Path, *, sticky: bool) -> str:
    """How another user could change what lies there, "" if none can; a sticky directory keeps what is in it."""
    try:
        found = directory.stat()
    except OSError:
        return ""  # made with mode 0700, if it can be
    if found.st_uid not in {0, os.geteuid(), Path("/").stat().st_uid}:  # root may have no number in a container
        return f"{directory} belongs to another user"
    exposed = found.st_mode & stat.S_IWOTH and not (sticky and found.st_mode & stat.S_ISVTX)
    return f"any user may write in {directory}" if exposed else ""


def find_java() -> Path:
    """A Java 17 or newer: that of ``JAVA_HOME`` first, then the one on PATH.

    Raises:
        SetupError: There is none, or only older ones (TL-S14).
    """
    home = os.environ.get("JAVA_HOME")
    found = [shutil.which("java", path=f"{home}/bin")] if home else []
    found.append(shutil.which("java"))
    versions = {Path(java): java_version(java) or 0 for java in found if java}
    for java, version in versions.items():
        if version >= OLDEST_JAVA:
            return java
    seen = ", ".join(f"{java} is version {version}" for java, version in versions.items()) or "there is none"
    advice = f"Install Java {OLDEST_JAVA} (Debian: apt install openjdk-{OLDEST_JAVA}-jre-headless), or set JAVA_HOME."
    raise SetupError("TL-S14", "java", f"Kafka needs Java {OLDEST_JAVA} or newer, and {seen}", advice)


def java_version(java: str) -> int | None:
    """The feature release: 17 for ``17.0.15``, 8 for ``1.8.0_402``, None when it does not say."""
    match = re.search(r'version "(?:1\.)?(\d+)', describe_java(java))
    return int(match[1]) if match else None


@cache
def describe_java(java: str) -> str:
    """What ``java -version`` says: release, build and mode."""
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    return answer.stderr + answer.stdout


def resolve_jars(name: str, coordinates: Sequence[str], *, alone: bool = False) -> Path:
    """The directory with these artifacts and all they need at run time; Maven is asked once for each `name`.

    Two processes that ask at once wait for each other, and a directory appears only when it is complete.

    Args:
        name: The directory's name in the cache, with the version in it: what is there is never looked at again.
        coordinates: ``group:artifact:version`` each.
        alone: Only these, and nothing that they ask for.

    Raises:
        SetupError: Maven is missing, or can't resolve them (TL-S15); the cache can't be written (TL-S18).
        ConfigError: TL-C193, as `cache_directory`.
    """
    cache = cache_directory()
    if cache is None:
        raise SetupError("TL-S18", name, "this user has no home, so there is no cache", "Set TOWLINE_CACHE.")
    target = cache / name
    if target.is_dir():
        return target
    dependencies = [DEPENDENCY.format(*one.split(":"), ALONE if alone else "") for one in coordinates]
    try:
        make_once(target, partial(_download, "\n".join(dependencies)))
    except OSError as error:
        raise SetupError("TL-S18", str(target), error.strerror or str(error), "Set TOWLINE_CACHE.") from error
    return target


def make_once(target: Path, make: Callable[[Path], object]) -> None:
    """Make a file or directory that is not there; of several processes one does it, and it appears when it is whole.

    Args:
        target: Its directory is made too.
        make: Makes it under a name in a directory of its own, which is removed afterwards.

    Raises:
        OSError: The directory does not take it.
    """
    target.parent.mkdir(0o700, parents=True, exist_ok=True)
    with files.alone(target.with_name(f"{target.name}.lock")):
        if target.exists():
            return
        prefix = f".{target.name}."
        for left in target.parent.glob(f"{prefix}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as place:
            draft = Path(place) / target.name
            make(draft)
            if draft.exists():
                draft.rename(target)


def _download(dependencies: str, jars: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise SetupError("TL-S15", "mvn", "Maven is missing, which fetches jars", "Debian: apt install maven.")
    pom = jars.with_name("pom.xml")
    pom.write_text(POM.format(dependencies=dependencies), encoding="utf-8")
    # The plugin in full: of a repository that it can't reach Maven else says that it knows no "dependency".
    goal = ["org.apache.maven.plugins:maven-dependency-plugin:copy-dependencies"]
    settings = [f"-DoutputDirectory={jars}", "-DincludeScope=runtime", "-Dstyle.color=never"]
    command = [maven, "-B", "-q", "-f", str(pom), *goal, *settings]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"gave no answer within {RESOLVE_SECONDS} s"
        raise SetupError("TL-S15", "mvn", what, "Look at the way to your repository.") from error
    if answer.returncode or not any(jars.glob("*.jar")):
        what = _fault(answer.stdout + answer.stderr) or f"ended with exit code {answer.returncode}"
        advice = "Look at Maven's settings and the way to its repository, then try again."
        raise SetupError("TL-S15", "mvn", what, advice)


def _fault(output: str) -> str:
    """The innermost of the causes that Maven nests in the first line of its error, without a login in a URL [I12]."""
    faults = re.findall(r"^\[ERROR\] *(\S.*?)\.?(?: -> \[Help \d+\])?$", _ESCAPES.sub("", output), re.MULTILINE)
    fault = faults[0] if faults else ""
    return re.sub(r"://[^/\s@]+@", "://…@", fault[max(fault.rfind("Could not "), 0) :])


_CONNECTOR: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_PROVIDER: Final = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
#: What the connector needs beside itself, as its own releases name it.
_BESIDE: Final = ("org.apache.kafka:kafka-clients:3.9.2", "org.apache.commons:commons-pool2:2.12.1")
#: Works with PySpark 4.3 where the matching version was never published (batch and stream, read and write).
_TESTED: Final = ("4.2.0", "4.0.0")
#: The tested package of ``format("kafka")``, for ``spark.jars.packages``.
SPARK_KAFKA_PACKAGE: Final = f"{_CONNECTOR}:{_TESTED[0]}"
#: What the package would bring and Spark has.
_BROUGHT: Final = "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime"


def spark_kafka_conf(version: str) -> dict[str, str]:
    """Settings of a session that reads with ``format("kafka")``, for a version of PySpark.

    They name the jars that Maven brings; where it can't, the package that Spark fetches by itself from Maven Central.
    """
    try:
        return {"spark.jars": ",".join(map(str, spark_kafka_jars(version)))}
    except SetupError:
        return {"spark.jars.packages": SPARK_KAFKA_PACKAGE, "spark.jars.excludes": _BROUGHT}


def spark_kafka_jars(version: str) -> list[Path]:
    """The jars of ``format("kafka")``, for ``spark.jars``; Maven is asked once.

    Args:
        version: Of PySpark; its own connector is taken where it can be had, else the tested pair.

    Raises:
        SetupError: TL-S15 when Maven can't bring either.
    """
    if jars := known_spark_kafka_jars(version):
        return jars
    own, tested = _artifacts(version).items()
    try:
        place = resolve_jars(*own, alone=True)
    except SetupError:
        place = resolve_jars(*tested, alone=True)
    return sorted(place.glob("*.jar"))


def known_spark_kafka_jars(version: str) -> list[Path]:
    """The jars as far as they are on this machine; empty when Maven would have to be asked."""
    cache = cache_directory()
    places = [cache / name for name in _artifacts(version)] if cache is not None else []
    return next((sorted(place.glob("*.jar")) for place in places if place.is_dir()), [])


def _artifacts(version: str) -> dict[str, tuple[str, ...]]:
    """The connector of a version, and the tested pair: what belongs into which directory of the cache."""
    return {
        f"spark-kafka-{connector}-{provider}": (f"{_CONNECTOR}:{connector}", f"{_PROVIDER}:{provider}", *_BESIDE)
        for connector, provider in ((version, version), _TESTED)
    }


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
    options = [*QUIET_JVM, *_UNCHECKED, *(QUICK if tier is Tier.QUICK or (tier is Tier.AUTO and few) else ())]
    with contextlib.suppress(SetupError):  # Spark may know a Java that we do not
        if (java_version(str(find_java())) or math.inf) <= _NEWEST_DIRECTLY:
            options.append(_DIRECTLY)
    return options


#: What a local master needs of its home; not ``python/lib``, where the zip is, which only YARN sends to its workers.
_PARTS: Final = ("bin", "sbin", "jars", "data", "conf")


def light_home() -> Path | None:
    """A ``SPARK_HOME`` for local masters without the zip of PySpark, made on first use in the user's cache directory.

    Spark starts some seven Python processes for a query with Python data sources, and puts the zip first on their path
    (`PythonUtils.sparkPythonPath`). Python writes no byte code for a zip, so each compiles PySpark anew: 1.5 s instead
    of 0.35 s. Without it they take the installed PySpark, which is the same (ADR 13).

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
    """The same of a home's classes; raises as `archive_for`."""
    return archive_for(home / "jars", home / "classes")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sharing(archive: Path) -> list[str]:
    """The option that uses an archive; none while there is no archive."""
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []


def archive_once(archive: Path, run: Callable[[Path, str], None]) -> None:
    """Make an archive of classes (JEP 350) if there is none, and remove those of other jars; one process does it.

    It belongs to one build of Java and to the very files of one class path; any other Java ignores it without a word.

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
    """Make the archive of the 15,000 classes that Spark loads until its first micro-batch (160 MB, some 40 s).

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
