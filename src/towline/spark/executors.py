"""Check of a cluster's executors before the first batch: Python, packages, files.

An executor runs on another machine, where any of these may be missing. Without this check a line would fail in the
middle of a batch, again and again, with the traceback of any one executor.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark import RDD, cloudpickle
from pyspark.serializers import CPickleSerializer

from towline.errors import SetupError
from towline.spark.session import is_cluster
from towline.version import version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Distributions that a worker imports to read from a gateway and to write to Kafka, with their oldest versions
#: (pyproject.toml).
REQUIRED_VERSIONS: Final[Mapping[str, str]] = {"pyarrow": "20", "confluent-kafka": "2.13.2", "crc32c": "2.7"}
_TOWLINE: Final = "towline"

#: Longest wait for the first executor to register, and for each further one, in seconds.
FIRST_EXECUTOR_S: Final = 60.0
_FURTHER_EXECUTOR_S: Final = 2.0
_POLL_S: Final = 0.1
#: Checks at a time; each is a job, so that a failing executor does not affect the check of another.
_PARALLEL_CHECKS: Final = 16
#: Most executors that an error names.
_MAX_NAMED: Final = 3
#: Most characters of Spark's error text that are shown.
_MAX_ERROR_LENGTH: Final = 200
_INSTALL_ADVICE: Final = "Install the driver's packages there, or ship them (docs/spark.md#spark-cluster)."
_SHARED_DIRECTORY_ADVICE: Final = (
    "Move state_dir to a file system that all of them share, as the same user; or run that line with a local master, "
    "in a bridge file of its own."
)
_OTHER_PYTHON: Final = re.compile(r"PYTHON_VERSION_MISMATCH\].*?version: (\S+?) than that in driver: (\S+?)[,\s]")
_NO_MODULE: Final = re.compile(r"No module named '?([\w.]+)")
_NO_PYTHON: Final = re.compile(r'Cannot run program "([^"]+)"')
#: Ids of the executors that passed the check, by application.
_checked_executors: Final[dict[str, set[str]]] = {}


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """Result of the check of one executor.

    Attributes:
        name: Spark's executor id.
        address: ``HOST:PORT`` of the executor, as Spark reports it.
        host: Host name of its machine; "" when its Python did not answer.
        missing: Missing requirements, in words.
        unshared_directories: Directories of the driver that the executor can't read and write.
    """

    name: str
    address: str
    host: str = ""
    missing: Sequence[str] = ()
    unshared_directories: Sequence[str] = ()

    @property
    def display_name(self) -> str:
        """Name in messages: executor id and host."""
        host = self.address.rpartition(":")[0]
        return f"executor {self.name} on {f'{self.host} ({host})' if self.host else host}"


def check_executors(
    spark: SparkSession,
    *,
    shared_directories: Iterable[Path] = (),
    files: Iterable[str] = (),
    timeout_s: float = FIRST_EXECUTOR_S,
) -> int:
    """Check that each executor of a cluster meets Towline's requirements; with a local master there is none.

    Args:
        spark: The session. A Connect session is not checked: its executors belong to its server.
        shared_directories: Directories that each executor must read and write as the driver does: a query's state.
        files: Files that each executor must be able to read: secrets, certificates.
        timeout_s: Seconds to wait for the first executor.

    Returns:
        Number of executors checked by this call; an executor that passed is not checked again.

    Raises:
        SetupError: TL-S31 an executor lacks a requirement; TL-S32 no executor came; TL-S33 a directory is not shared.
    """
    context = getattr(spark, "_sc", None)
    if context is None or not is_cluster(context.master):
        return 0
    checked_names = _checked_executors.setdefault(context.applicationId, set())
    required_versions = {_TOWLINE: version(), **REQUIRED_VERSIONS}
    with _probe_files(shared_directories) as probe_files, ThreadPoolExecutor(_PARALLEL_CHECKS) as pool:
        check = partial(missing_requirements, required_versions, probe_files, tuple(files))
        registered = _await_executors(context, timeout_s)
        executors = (executor for executor in registered if executor.name not in checked_names)
        answers = [pool.submit(_check_executor, context, executor, check) for executor in executors]
        reports = [answer.result() for answer in answers]
    if error := missing_error(reports):
        raise error
    for executor in reports:
        for directory in executor.unshared_directories:
            problem = f"it can't read and write {directory} as the driver does, the directory of a line with dedupe"
            raise SetupError("TL-S33", executor.display_name, problem, _SHARED_DIRECTORY_ADVICE)
    checked_names.update(executor.name for executor in reports)
    return len(reports)


def missing_error(reports: Sequence[ExecutorReport]) -> SetupError | None:
    """Return one error for all executors with missing requirements, else None. Pure."""
    executors = [(report.display_name, ", ".join(report.missing)) for report in reports if report.missing]
    if not executors:
        return None
    (location, problem), *other_executors = executors
    problem += "".join(f"; {name}: {missing}" for name, missing in other_executors[: _MAX_NAMED - 1])
    if len(executors) > _MAX_NAMED:
        problem += f"; and {len(executors) - _MAX_NAMED} more executors"
    return SetupError("TL-S31", location, problem, _INSTALL_ADVICE)


def failure_reason(error: str) -> str:
    """Return the reason, from Spark's error text, why an executor's Python did not answer. Pure."""
    if version := _OTHER_PYTHON.search(error):
        return f"its Python is {version[1]}, the driver's is {version[2]}"
    if executable := _NO_PYTHON.search(error):
        return f"it has no {executable[1]}, the Python of the driver's PYSPARK_PYTHON"
    if module := _NO_MODULE.search(error):
        return f"its Python has no {module[1]}"
    first_line = next((line.strip() for line in error.splitlines() if line.strip()), "no reason given")
    return f"its Python gave no answer ({first_line[:_MAX_ERROR_LENGTH]})"


# -- asking --------------------------------------------------------------------------------------------------------


@contextmanager
def _probe_files(directories: Iterable[Path]) -> Iterator[tuple[str, ...]]:
    """Create a uniquely named probe file in each shared directory, and remove it afterwards."""
    probe_files = [directory / f".towline-{secrets.token_hex(16)}" for directory in directories]
    try:
        for probe_file in probe_files:
            probe_file.touch(0o600)
        yield tuple(map(str, probe_files))
    finally:
        for probe_file in probe_files:
            probe_file.unlink(missing_ok=True)


def _await_executors(context: Any, timeout_s: float) -> Iterator[ExecutorReport]:
    """Yield the executors as they register, until no further one comes for `_FURTHER_EXECUTOR_S`."""
    deadline = time.monotonic() + timeout_s
    names: set[str] = set()
    while True:
        for executor in _live_executors(context):
            if executor.name not in names:
                names.add(executor.name)
                deadline = time.monotonic() + _FURTHER_EXECUTOR_S
                yield executor
        if time.monotonic() >= deadline:
            if names:
                return
            problem = f"no executor registered within {timeout_s:.0f} s"
            remedy = (
                "Check in its web UI that a worker has the requested memory and cores, and that it reaches the driver "
                f"at {context.getConf().get('spark.driver.host', 'its address')}."
            )
            raise SetupError("TL-S32", context.master, problem, remedy)
        time.sleep(_POLL_S)


def _live_executors(context: Any) -> list[ExecutorReport]:
    """Return Spark's live executors, without the driver."""
    executors = context._jsc.sc().statusStore().executorList(True)  # noqa: SLF001 - there is no public API
    summaries = [executors.apply(index) for index in range(executors.size())]
    return [ExecutorReport(summary.id(), summary.hostPort()) for summary in summaries if summary.id() != "driver"]


def _check_executor(context: Any, executor: ExecutorReport, check: Callable[[], tuple[Any, ...]]) -> ExecutorReport:
    """Run the check as one task on one executor; it is sent as code, so no module is imported there."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    try:
        ((host, missing, unshared_directories),) = _rdd_on_executor(context, executor).map(lambda _: check()).collect()
    except Exception as error:  # noqa: BLE001 - Spark's error is the result of the check
        return replace(executor, missing=[failure_reason(str(error))])
    return replace(executor, host=host, missing=missing, unshared_directories=unshared_directories)


def _rdd_on_executor(context: Any, executor: ExecutorReport) -> RDD[Any]:
    """Return an RDD of one element with this executor as its preferred location (`ExecutorCacheTaskLocation`)."""
    jvm, serializer = context._jvm, CPickleSerializer()  # noqa: SLF001 - PySpark can't choose an executor
    element = bytearray(serializer.dumps(None))  # type: ignore[no-untyped-call]
    locations = jvm.PythonUtils.toSeq([f"executor_{executor.address.rpartition(':')[0]}_{executor.name}"])
    kind = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    rdd = context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq([jvm.scala.Tuple2(element, locations)]), kind)  # noqa: SLF001
    return RDD(jvm.org.apache.spark.api.java.JavaRDD(rdd, kind), context, serializer)


def missing_requirements(
    required_versions: Mapping[str, str], probe_files: tuple[str, ...], files: tuple[str, ...]
) -> tuple[str, list[str], list[str]]:
    """Return an executor's missing requirements; runs in a task, sent as code, since Towline may be missing there.

    Args:
        required_versions: Distributions, as PyPI names them, with their oldest versions; for Towline the driver's exact
            version. A module has the same name with underscores.
        probe_files: A file of each shared directory, which it must read and write.
        files: Files that must be readable.

    Returns:
        Host name, missing requirements in words, and the directories that are not shared.
    """
    import os  # noqa: PLC0415 - the code is sent without its module
    import re  # noqa: PLC0415
    import socket  # noqa: PLC0415
    from importlib import import_module, metadata  # noqa: PLC0415

    def numbers(text: str) -> list[int]:
        """Return the leading numbers of a version: ``2.13.2rc1`` is 2, 13, 2."""
        return [int(part) for part in re.findall(r"^[\d.]*", text.strip())[0].split(".") if part]

    missing = []
    for name, min_version in required_versions.items():
        try:
            import_module(name.replace("-", "_"))
            installed_version = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed_version = ""  # importable, but of an unknown version
        except ModuleNotFoundError:
            missing.append(f"{name} is missing")
            continue
        except Exception as error:  # noqa: BLE001 - a system library is missing, another libc, ...
            missing.append(f"{name} can't be loaded ({type(error).__name__}: {error})")
            continue
        if name == "towline" and installed_version != min_version:
            missing.append(f"towline is {installed_version or 'of an unknown version'}, the driver's is {min_version}")
        elif name != "towline" and installed_version and numbers(installed_version) < numbers(min_version):
            missing.append(f"{name} {installed_version} is older than {min_version}")
    missing += [f"the file {file} can't be read" for file in files if not os.access(os.path.expanduser(file), os.R_OK)]  # noqa: PTH111
    unshared_directories = []
    for probe_file in probe_files:
        try:
            open(probe_file, "r+b").close()  # noqa: PTH123 - without pathlib
        except OSError:
            unshared_directories.append(os.path.dirname(probe_file))  # noqa: PTH120
    return socket.gethostname(), missing, unshared_directories
