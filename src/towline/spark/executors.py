"""Check of a cluster's executors before the first batch: Python, packages, files.

An executor runs on another machine, where any of these may be missing. Without this check a line would fail in the
middle of a batch, again and again, with the traceback of any one executor.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
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
_FIRST_EXECUTOR_S: Final = 60.0
_FURTHER_EXECUTOR_S: Final = 2.0
_POLL_S: Final = 0.1
#: Checks at a time; each is a job, so that a failing executor does not affect the check of another.
_PARALLEL_CHECKS: Final = 16
#: Most executors that an error names.
_MAX_NAMED: Final = 3
#: Most characters of Spark's error text that are shown.
_MAX_ERROR_LENGTH: Final = 200
_INSTALL_ADVICE: Final = "Install the driver's packages there, or ship them (docs/spark.md#spark-cluster)."
#: Reasons in Spark's error text: another Python, none at this path, or one without PySpark.
_PYTHON_ERROR: Final = re.compile(r"\[PYTHON_VERSION_MISMATCH\].*|Cannot run program.*|No module named.*")
#: Ids of the executors that passed the check, by application.
_checked_executors: Final[dict[str, set[str]]] = {}


def check_executors(
    spark: SparkSession,
    *,
    shared_directories: Iterable[Path] = (),
    files: Iterable[str] = (),
) -> None:
    """Check that each executor of a cluster meets Towline's requirements, once; with a local master there is none.

    Args:
        spark: The session. A Connect session is not checked: its executors belong to its server.
        shared_directories: Directories that each executor must read and write as the driver does: a query's state.
        files: Files that each executor must be able to read: secrets, certificates.

    Raises:
        SetupError: TL-S31 an executor lacks a requirement; TL-S32 no executor came.
    """
    context = getattr(spark, "_sc", None)
    if context is None or not is_cluster(context.master):
        return
    checked_ids = _checked_executors.setdefault(context.applicationId, set())
    required_versions = {_TOWLINE: version(), **REQUIRED_VERSIONS}
    with ExitStack() as stack, ThreadPoolExecutor(_PARALLEL_CHECKS) as pool:
        create_file = partial(NamedTemporaryFile, prefix=".towline-")
        probe_files = tuple(stack.enter_context(create_file(dir=directory)).name for directory in shared_directories)
        check = partial(missing_requirements, required_versions, probe_files, tuple(files))
        registered = _await_executors(context)
        executors = (executor for executor in registered if executor[0] not in checked_ids)
        answers = {executor: pool.submit(_check_executor, context, *executor, check) for executor in executors}
        problems = list(filter(None, (answer.result() for answer in answers.values())))
    if problems:
        raise missing_error(problems)
    checked_ids.update(executor_id for executor_id, _ in answers)


def missing_error(problems: Sequence[str]) -> SetupError:
    """Return one error for all executors with missing requirements. Pure."""
    further_count = len(problems) - _MAX_NAMED
    further_text = [f"and {further_count} more executors"] if further_count > 0 else []
    location, _, problem = "; ".join([*problems[:_MAX_NAMED], *further_text]).partition(": ")
    return SetupError("TL-S31", location, problem, _INSTALL_ADVICE)


def failure_reason(error: str) -> str:
    """Return the reason, from Spark's error text, why an executor's Python did not answer. Pure."""
    match = _PYTHON_ERROR.search(error) or re.search(r"\S.*", error)
    return f"its Python gave no answer ({match[0][:_MAX_ERROR_LENGTH] if match else 'no reason given'})"


# -- asking --------------------------------------------------------------------------------------------------------


def _await_executors(context: Any) -> Iterator[tuple[str, str]]:
    """Yield id and ``HOST:PORT`` of executors as they register, until none comes for `_FURTHER_EXECUTOR_S`."""
    deadline = time.monotonic() + _FIRST_EXECUTOR_S
    executor_ids: set[str] = set()
    while True:
        for executor_id, address in _live_executors(context):
            if executor_id not in executor_ids:
                executor_ids.add(executor_id)
                deadline = time.monotonic() + _FURTHER_EXECUTOR_S
                yield executor_id, address
        if time.monotonic() >= deadline:
            if executor_ids:
                return
            problem = f"no executor registered within {_FIRST_EXECUTOR_S:.0f} s"
            remedy = (
                "Check in its web UI that a worker has the requested memory and cores, and that it reaches the driver "
                f"at {context.getConf().get('spark.driver.host', 'its address')}."
            )
            raise SetupError("TL-S32", context.master, problem, remedy)
        time.sleep(_POLL_S)


def _live_executors(context: Any) -> list[tuple[str, str]]:
    """Return id and ``HOST:PORT`` of Spark's live executors, without the driver."""
    executors = context._jsc.sc().statusStore().executorList(True)  # noqa: SLF001 - there is no public API
    summaries = [executors.apply(index) for index in range(executors.size())]
    return [(summary.id(), summary.hostPort()) for summary in summaries if summary.id() != "driver"]


def _check_executor(context: Any, executor_id: str, address: str, check: Callable[[], tuple[str, list[str]]]) -> str:
    """Run the check as a task on one executor, sent as code; return what is missing there, "" for nothing."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    host = address.rpartition(":")[0]
    try:
        rdd = _rdd_on_executor(context, f"executor_{host}_{executor_id}")
        ((machine, missing),) = rdd.map(lambda _: check()).collect()
    except Exception as error:  # noqa: BLE001 - Spark's error is the result of the check
        return f"executor {executor_id} on {host}: {failure_reason(str(error))}"
    return f"executor {executor_id} on {machine} ({host}): {', '.join(missing)}" if missing else ""


def _rdd_on_executor(context: Any, location: str) -> RDD[Any]:
    """Return an RDD of one element with a preferred location (`ExecutorCacheTaskLocation`)."""
    jvm, serializer = context._jvm, CPickleSerializer()  # noqa: SLF001 - PySpark can't choose an executor
    element = bytearray(serializer.dumps(None))  # type: ignore[no-untyped-call]
    locations = jvm.PythonUtils.toSeq([location])
    kind = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    rdd = context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq([jvm.scala.Tuple2(element, locations)]), kind)  # noqa: SLF001
    return RDD(jvm.org.apache.spark.api.java.JavaRDD(rdd, kind), context, serializer)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def missing_requirements(
    required_versions: Mapping[str, str], probe_files: tuple[str, ...], files: tuple[str, ...]
) -> tuple[str, list[str]]:
    """Return an executor's missing requirements; runs in a task, sent as code, since Towline may be missing there.

    Args:
        required_versions: Distributions, as PyPI names them, with their oldest versions; for Towline the driver's exact
            version. A module has the same name with underscores.
        probe_files: A file of each shared directory, which it must read and write.
        files: Files that must be readable.

    Returns:
        Host name, and missing requirements in words.
    """
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
        elif name != "towline" and installed_version and _numbers(installed_version) < _numbers(min_version):
            missing.append(f"{name} {installed_version} is older than {min_version}")
    missing += [f"the file {file} can't be read" for file in files if not os.access(Path(file).expanduser(), os.R_OK)]
    for probe_file in probe_files:
        try:
            Path(probe_file).open("r+b").close()
        except OSError:
            directory = Path(probe_file).parent
            missing.append(f"it can't read and write {directory} as the driver does, for a line with dedupe")
    return socket.gethostname(), missing
