"""Java, jars from Maven in a cache shared by all processes of a user, and faster starts and checkpoints of Spark.

``python -m towline.spark.java`` prepares both; figures with and without are in docs/benchmarks.md.
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
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline import files
from towline.errors import ConfigError, SetupError
from towline.spark.session import pyspark_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

OLDEST_JAVA = 17
"""Kafka 4 brokers and Spark 4 both require Java 17."""

MAVEN_TIMEOUT_S = 600

POM_TEMPLATE = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>towline</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>
{dependencies}
</dependencies></project>
"""
#: Colour escapes, which Debian's Maven writes to a pipe, too.
_COLOUR_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
DEPENDENCY_TEMPLATE = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>"
EXCLUDE_TRANSITIVE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"


def cache_directory() -> Path | None:
    """Return the directory of downloads: ``TOWLINE_CACHE``, else ``towline`` in the user's cache directory (XDG).

    Returns:
        None for a user without a home, as in containers.

    Raises:
        ConfigError: TL-C193, another user could put jars there.
    """
    cache_variable = os.environ.get("TOWLINE_CACHE")
    try:
        cache = Path(cache_variable or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = (cache if cache_variable else cache / "towline").resolve()
    except RuntimeError:
        return None
    for directory in (cache, *cache.parents):
        if reason := _exposure(directory, sticky=directory != cache):
            problem = f"{reason}, and Java runs the jars in it"
            remedy = "Set TOWLINE_CACHE to a directory of your own; use no file of this one."
            raise ConfigError("TL-C193", f"cache {cache}", problem, remedy)
    return cache


def _exposure(directory: Path, *, sticky: bool) -> str:
    """Return how another user could change the directory's files, "" if none can; a sticky parent is safe."""
    try:
        status = directory.stat()
    except OSError:
        return ""  # will be created with mode 0700
    if status.st_uid not in {0, os.geteuid(), Path("/").stat().st_uid}:  # root may have another uid in a container
        return f"{directory} belongs to another user"
    others_may_write = status.st_mode & stat.S_IWOTH and not (sticky and status.st_mode & stat.S_ISVTX)
    return f"any user may write in {directory}" if others_may_write else ""


def find_java(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of Java as Spark finds it (``bin/spark-class``): of ``JAVA_HOME``, else of PATH.

    Raises:
        SetupError: TL-S21, there is none, or it is older than Java 17.
    """
    home = environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else environ.get("PATH"))
    problem = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is none on PATH"
    if java is not None:
        version = java_version(java)
        if version is None or version >= OLDEST_JAVA:
            return Path(java)
        problem = f"{java} is version {version}"
    remedy = f"Install Java {OLDEST_JAVA} (Debian: apt install openjdk-{OLDEST_JAVA}-jre-headless), or set JAVA_HOME."
    raise SetupError("TL-S21", "java", f"Spark and Kafka need Java {OLDEST_JAVA} or newer, and {problem}", remedy)


def check_java(environ: Mapping[str, str] = os.environ) -> None:
    """Check that Spark finds a Java; an own ``SPARK_HOME`` may name one in its ``spark-env.sh``. See `find_java`."""
    if "SPARK_HOME" not in environ and "SPARK_CONF_DIR" not in environ:
        find_java(environ)


def java_version(java: str) -> int | None:
    """Return Java's feature release: 17 for ``17.0.15``, 8 for ``1.8.0_402``, None if unknown."""
    match = re.search(r'version "(?:1\.)?(\d+)', describe_java(java))
    return int(match[1]) if match else None


def _run(command: list[str], timeout_s: float, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


@cache
def describe_java(java: str) -> str:
    """Return the output of ``java -version``: release, build and mode."""
    java_run = _run([java, "-version"], 30)
    return java_run.stderr + java_run.stdout


def resolve_jars(name: str, coordinates: Sequence[str], *, without_dependencies: bool = False) -> Path:
    """Return the directory with these artifacts and their runtime dependencies; Maven runs once for each `name`.

    Concurrent processes wait for each other, and a directory appears only when it is complete.

    Args:
        name: Directory name in the cache, including the version: an existing directory is never updated.
        coordinates: ``group:artifact:version`` each.
        without_dependencies: Only these artifacts.

    Raises:
        SetupError: TL-S15, Maven is missing or can't resolve them; TL-S18, the cache can't be written.
        ConfigError: TL-C193, as `cache_directory`.
    """
    cache = cache_directory()
    if cache is None:
        raise SetupError("TL-S18", name, "this user has no home, so there is no cache", "Set TOWLINE_CACHE.")
    target = cache / name
    if target.is_dir():
        return target
    exclusions = EXCLUDE_TRANSITIVE if without_dependencies else ""
    dependencies = [DEPENDENCY_TEMPLATE.format(*coordinate.split(":"), exclusions) for coordinate in coordinates]
    try:
        create_once(target, partial(_download, "\n".join(dependencies)))
    except OSError as error:
        raise SetupError("TL-S18", str(target), error.strerror or str(error), "Set TOWLINE_CACHE.") from error
    return target


def create_once(target: Path, create: Callable[[Path], object]) -> None:
    """Create a file or directory that does not exist; one of several processes does it, and it appears when complete.

    Args:
        target: Path to create, with its parent directory.
        create: Creates it under the path it is given, in a temporary directory.

    Raises:
        OSError: The directory can't be written.
    """
    target.parent.mkdir(0o700, parents=True, exist_ok=True)
    with files.exclusive_lock(target.with_name(f"{target.name}.lock")):
        if target.exists():
            return
        prefix = f".{target.name}."
        for stale_directory in target.parent.glob(f"{prefix}*"):  # of a killed process
            shutil.rmtree(stale_directory, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as temporary_directory:
            draft = Path(temporary_directory) / target.name
            create(draft)
            if draft.exists():
                draft.rename(target)


def _download(dependencies: str, jars: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise SetupError("TL-S15", "mvn", "Maven is missing, which downloads jars", "Debian: apt install maven.")
    pom = jars.with_name("pom.xml")
    pom.write_text(POM_TEMPLATE.format(dependencies=dependencies), encoding="utf-8")
    # The full name: with the prefix "dependency" Maven reports an unreachable repository as an unknown plugin.
    goal = ["org.apache.maven.plugins:maven-dependency-plugin:copy-dependencies"]
    settings = [f"-DoutputDirectory={jars}", "-DincludeScope=runtime", "-Dstyle.color=never"]
    command = [maven, "-B", "-q", "-f", str(pom), *goal, *settings]
    try:
        maven_run = _run(command, MAVEN_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        problem = f"gave no answer within {MAVEN_TIMEOUT_S} s"
        raise SetupError("TL-S15", "mvn", problem, "Check the connection to your Maven repository.") from error
    if maven_run.returncode or not any(jars.glob("*.jar")):
        problem = _maven_error(maven_run.stdout + maven_run.stderr) or f"ended with exit code {maven_run.returncode}"
        advice = "Check Maven's settings and the connection to its repository, then try again."
        raise SetupError("TL-S15", "mvn", problem, advice)


def _maven_error(output: str) -> str:
    """Return the innermost cause in Maven's first error line, with credentials in URLs masked [I12]."""
    errors = re.findall(r"^\[ERROR\] *(\S.*?)\.?(?: -> \[Help \d+\])?$", _COLOUR_ESCAPES.sub("", output), re.MULTILINE)
    error = errors[0] if errors else ""
    return re.sub(r"://[^/\s@]+@", "://…@", error[max(error.rfind("Could not "), 0) :])


#: The package of ``format("kafka")``, for ``spark.jars.packages``. It works with PySpark 4.3 too, for which none was
#: published (batch and stream, read and write).
SPARK_KAFKA_PACKAGE: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
#: The same for Maven, with the dependencies that its release declares.
_SPARK_KAFKA_DIRECTORY: Final = "spark-kafka-4.2.0-4.0.0"
_SPARK_KAFKA_ARTIFACTS: Final = (
    SPARK_KAFKA_PACKAGE,
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.12.1",
)
#: Dependencies of the package that Spark already has.
_EXCLUDED_ARTIFACTS: Final = "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime"


def spark_kafka_conf() -> dict[str, str]:
    """Return the session settings for reading with ``format("kafka")``.

    They name the jars from Maven; where it can't resolve them, the package that Spark fetches itself from Maven
    Central.
    """
    try:
        return {"spark.jars": ",".join(map(str, spark_kafka_jars()))}
    except SetupError:
        return {"spark.jars.packages": SPARK_KAFKA_PACKAGE, "spark.jars.excludes": _EXCLUDED_ARTIFACTS}


def spark_kafka_jars() -> list[Path]:
    """Return the jars of ``format("kafka")``, for ``spark.jars``; Maven runs once. Raises as `resolve_jars`."""
    directory = resolve_jars(_SPARK_KAFKA_DIRECTORY, _SPARK_KAFKA_ARTIFACTS, without_dependencies=True)
    return sorted(directory.glob("*.jar"))


QUIET_JVM: Final = [
    "-Xshare:auto",
    *("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off"),  # no log line about another Java's archive
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dlog4j2.disable.jmx=true",
]
#: No bounds checks in Arrow: Spark has checked each value already.
_ARROW_UNCHECKED: Final = ("-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false")
#: Cheaper start of child processes: Hadoop starts a ``chmod`` for each file of a checkpoint. Java 24 has removed it.
_VFORK: Final = "-Djdk.lang.Process.launchMechanism=VFORK"
_NEWEST_VFORK_JAVA: Final = 23
#: Quick start, one compiler: compiler and garbage collector leave the cores to brokers and workers. Java's default is
#: slow until code was compiled twice, the fastest after that (docs/benchmarks.md#starts).
QUICK_JVM: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
#: Most cores without a free one for the second compiler.
_FEW_CORES: Final = 2


def jvm_options(*, quick: bool | None = None) -> list[str]:
    """Return the options of Spark's JVM, except the class archive; `QUICK_JVM` by default on few cores."""
    is_quick = len(os.sched_getaffinity(0)) <= _FEW_CORES if quick is None else quick
    options = [*QUIET_JVM, *_ARROW_UNCHECKED, *(QUICK_JVM if is_quick else ())]
    with contextlib.suppress(SetupError):  # Spark may find another Java
        if (java_version(str(find_java())) or math.inf) <= _NEWEST_VFORK_JAVA:
            options.append(_VFORK)
    return options


#: Directories that a local master needs; not ``python/lib`` with the zip, which only YARN sends to its workers.
_HOME_DIRECTORIES: Final = ("bin", "sbin", "jars", "data", "conf")


def light_spark_home() -> Path | None:
    """Return a ``SPARK_HOME`` for local masters without PySpark's zip, created on first use in the cache.

    Spark starts some seven Python processes for a query with Python data sources, and puts the zip first on their path
    (`PythonUtils.sparkPythonPath`). Python writes no byte code for a zip, so each process compiles PySpark: 1.5 s
    instead of 0.35 s. Without the zip they import the installed PySpark, which is the same (ADR 13).

    Returns:
        None if ``SPARK_HOME`` is set, the cache can't be written, PySpark is missing, or its links are broken: then
        Spark's own home is used.
    """
    spec, cache = find_spec("pyspark"), cache_directory()
    if "SPARK_HOME" in os.environ or spec is None or spec.origin is None or cache is None:
        return None
    package = Path(spec.origin).parent
    # One for each installation: a user may have PySpark in several environments.
    home = cache / f"spark-{pyspark_version()}-{_digest(str(package.resolve()))}"

    def link_directories(draft: Path) -> None:
        draft.mkdir()
        for directory in _HOME_DIRECTORIES:
            (draft / directory).symlink_to(package / directory)

    if not home.is_dir():
        with contextlib.suppress(OSError):  # the cache is read-only
            create_once(home, link_directories)
    return home if (home / "jars").is_dir() else None


def class_archive_path(jars: Path, stem: Path) -> Path:
    """Return the path of the class archive for the Java in use and a directory of jars: ``STEM-JAVA-JARS.jsa``.

    Reinstalled jars have another path.

    Raises:
        SetupError: TL-S21, there is no Java.
    """
    jar_versions = sorted((jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in jars.glob("*.jar"))
    return stem.with_name(f"{stem.name}-{_digest(describe_java(str(find_java())))}-{_digest(repr(jar_versions))}.jsa")


def spark_archive_path(home: Path) -> Path:
    """Return the path of a Spark home's class archive; raises as `class_archive_path`."""
    return class_archive_path(home / "jars", home / "classes")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def archive_options(archive: Path) -> list[str]:
    """Return the JVM option for an archive; empty while the archive does not exist."""
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []


def create_archive_once(archive: Path, run: Callable[[Path, str], None]) -> None:
    """Create an archive of classes (JEP 350) if there is none, and remove those of former jars; one process does it.

    An archive belongs to one build of Java and one class path; any other Java ignores it silently.

    Args:
        archive: Path of the archive; its directory exists.
        run: Runs a JVM in a temporary directory, with the option that writes an archive at exit.
    """
    if not os.access(archive.parent, os.W_OK):
        return

    def create(draft: Path) -> None:
        run(draft.parent, f"-XX:ArchiveClassesAtExit={draft}")
        if draft.exists():
            for old_archive in archive.parent.glob(f"{archive.stem.rpartition('-')[0]}-*.jsa"):  # of former jars
                old_archive.unlink(missing_ok=True)

    create_once(archive, create)


def create_spark_archive() -> Path | None:
    """Create the archive of the 15,000 classes that Spark loads until its first micro-batch (160 MB, some 40 s).

    Returns:
        The Spark home with the archive; None where `light_spark_home` has none.

    Raises:
        SetupError: TL-S21, there is no Java; TL-S19, Spark does not start.
    """
    home = light_spark_home()
    if home is not None:
        create_archive_once(spark_archive_path(home), partial(_run_trial, home))
    return home


_TRIAL_TIMEOUT_S: Final = 300
#: Loads the classes of the archive: a session, a streaming query with a Python data source, SQL, state, shuffle.
_TRIAL_SCRIPT: Final = """
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


def _run_trial(home: Path, _: Path, archive_option: str) -> None:
    options = shlex.join([*jvm_options(quick=True), archive_option])
    environ = {**os.environ, "SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": options}
    trial_run = _run([sys.executable, "-c", _TRIAL_SCRIPT], _TRIAL_TIMEOUT_S, environ)
    if trial_run.returncode:
        error_lines = trial_run.stderr.strip().splitlines() or ["no output"]
        problem = f"the trial run failed: {error_lines[-1]}"
        raise SetupError("TL-S19", "spark", problem, "Check that this machine has 1 GB of free memory.")


#: Local file system for checkpoints that starts no process: ``BareLocalFileSystem`` by GlobalMentor (Apache-2.0).
#: Hadoop's own starts a ``chmod`` for every file, two in a micro-batch: 12 ms of the 75 of a small one. Optional.
_LOCAL_FS_ARTIFACT: Final = "hadoop-bare-naked-local-fs"
_LOCAL_FS_VERSION: Final = "0.1.0"
_LOCAL_FS_STEM: Final = f"{_LOCAL_FS_ARTIFACT}-{_LOCAL_FS_VERSION}"
#: Spark appends it to its own jars (`AbstractCommandBuilder.buildClassPath`): an archive of their classes stays valid,
#: since it depends only on the beginning of the class path.
_EXTRA_CLASS_PATH: Final = "SPARK_DIST_CLASSPATH"


def download_local_fs() -> None:
    """Download the jar of the local file system with Maven, once; raises as `resolve_jars`."""
    coordinates = f"com.globalmentor:{_LOCAL_FS_ARTIFACT}:{_LOCAL_FS_VERSION}"
    resolve_jars(_LOCAL_FS_STEM, [coordinates], without_dependencies=True)


def local_fs_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that add the local file system to the class path of a JVM with `environ`.

    Empty if its jar was not downloaded.
    """
    cache = cache_directory()
    jar = cache / _LOCAL_FS_STEM / f"{_LOCAL_FS_STEM}.jar" if cache is not None else None
    if jar is None or not jar.is_file():
        return {}
    return {_EXTRA_CLASS_PATH: os.pathsep.join(filter(None, (environ.get(_EXTRA_CLASS_PATH), str(jar))))}


def local_fs_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the session settings for the local file system, if its jar is on the class path."""
    if f"{_LOCAL_FS_STEM}.jar" not in environ.get(_EXTRA_CLASS_PATH, ""):
        return {}
    return {"spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"}


if __name__ == "__main__":
    try:
        create_spark_archive()
        download_local_fs()
    except SetupError as error:
        sys.exit(str(error))
