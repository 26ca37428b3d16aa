"""Spark and its sessions: which PySpark, on which master, with which settings, and both formats registered.

PySpark itself is not imported.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: The first brought admission control for Python sources, the last is what `make test` runs on (docs/versions.md).
PYSPARK: Final = ((4, 2), (4, 3))


def pyspark_version() -> str | None:
    """As it says itself, also in ``$SPARK_HOME/python`` or its ``pyspark.zip``; None where there is none."""
    spec = find_spec("pyspark")
    data = getattr(spec and spec.loader, "get_data", None)
    if spec is None or spec.origin is None or data is None:
        return None
    text = data(str(Path(spec.origin).with_name("version.py"))).decode()
    version = re.search(r"""^__version__.*?=\s*["'](.+?)["']""", text, re.MULTILINE)
    return version[1] if version else None


def check_pyspark(where: str = "pyspark") -> tuple[str, bool]:
    """See that there is a PySpark that has what Towline is built on.

    Args:
        where: It is needed; begins the error.

    Returns:
        Its version, and whether Towline is tried with it.

    Raises:
        SetupError: TL-S20, with the line to type.
    """
    installed = pyspark_version()
    numbers = tuple(map(int, re.findall(r"\d+", installed or "")[:2]))
    if numbers >= PYSPARK[0]:
        return str(installed), numbers in PYSPARK
    what = "PySpark is not installed, which runs the lines of a bridge; a gateway, Publisher and pub do without"
    if installed is not None:
        what = f"PySpark is {installed}; Towline works with {' and '.join('.'.join(map(str, one)) for one in PYSPARK)}"
    raise SetupError("TL-S20", where, what, 'Type: pip install "towline[spark]"')


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


def register(spark: SparkSession) -> None:
    """Register ``format("mqtt")`` and ``format("kafka_transactional")`` where Spark has not found them by itself.

    Args:
        spark: The session, classic or Connect. A Connect server runs the formats in its own Python, which has to have
            Towline.

    Raises:
        SetupError: TL-S20, PySpark is too old; TL-S24, a Connect server's Python lacks Towline.
    """
    check_pyspark("towline.register")
    from towline.spark.kafka_sink import KafkaTransactional  # noqa: PLC0415 - loads PySpark
    from towline.spark.source import MqttDataSource  # noqa: PLC0415 - as above

    _run_our_python(spark)
    for source in (MqttDataSource, KafkaTransactional):
        if _ships_python(spark) or not _knows(spark, source.name()):
            spark.dataSource.register(source)
    if not hasattr(spark, "_jsparkSession"):
        _ask_server(spark)


def _ask_server(spark: SparkSession) -> None:
    """Let a Connect server make the source once: what it takes over is a name, which its own Python has to find."""
    try:
        _ = spark.read.format("mqtt").load().schema
    except Exception as error:  # noqa: BLE001 - Towline's own word for a source without options, or Spark's for the rest
        if "ModuleNotFoundError" not in str(error):
            return
        what = "the Python of the Spark Connect server has no Towline"
        do = "Install towline[spark] there, or start the server with PYSPARK_PYTHON set to a Python that has it."
        raise SetupError("TL-S24", "towline.register", what, do) from None


def _knows(spark: SparkSession, name: str) -> bool:
    """Whether the session has a format: what is registered beside one that Spark found is warned of at every load."""
    try:
        return bool(spark._jsparkSession.sessionState().dataSourceManager().dataSourceExists(name))  # noqa: SLF001
    except Exception:  # noqa: BLE001 - a Connect session has none, and discovery is no promise of Spark's
        return False


def _ships_python(spark: SparkSession) -> bool:
    """Whether the application brings Python files along (``--py-files``).

    Tasks of a format that Spark has found by itself do not get them (`UserDefinedPythonDataSource`, whose function for
    such a one has no includes); those of a format that is registered do.
    """
    return bool(getattr(getattr(spark, "_sc", None), "_python_includes", None))


def _run_our_python(spark: SparkSession) -> None:
    """Let a local session run the formats with this interpreter, where Towline is installed, not with any python3."""
    context = getattr(spark, "_sc", None)  # a Connect session has none
    if context is not None and "PYSPARK_PYTHON" not in os.environ and context.master.startswith("local"):
        context.pythonExec = sys.executable


#: ``local``, ``local[4]``, ``local[*,3]``: driver and executor are one process (`SparkMasterRegex`).
_ONE_PROCESS: Final = re.compile(r"local(\[[^\[\]]*\])?")
#: Executors that are children of the driver, on its machine: Spark's own imitation of a cluster.
_CHILDREN: Final = re.compile(r"local-cluster\[.*\]")
_STANDALONE: Final = re.compile(r"spark://(.+)")


def is_cluster(master: str) -> bool:
    """Whether tasks run in other processes than the driver's, as a rule on other machines with other files."""
    return _ONE_PROCESS.fullmatch(master) is None


def shares_files(master: str) -> bool:
    """Whether executors see this machine's files and sockets, as those of ``local-cluster`` do."""
    return not is_cluster(master) or _CHILDREN.fullmatch(master) is not None


def stays_here(master: str) -> bool:
    """Whether driver and executors reach each other on loopback, so that nobody else has to reach them."""
    standalone = addresses(master)
    return all(_is_loopback(host) for host, _ in standalone) if standalone else shares_files(master)


def addresses(master: str) -> list[tuple[str, int]]:
    """Host and port of each standalone master; none for another kind, or where Spark would not understand them."""
    found = _STANDALONE.fullmatch(master)
    parts = [one.rpartition(":") for one in found[1].split(",")] if found else []
    if not all(host and port.isdecimal() for host, _, port in parts):
        return []
    return [(host.strip("[]"), int(port)) for host, _, port in parts]


def brings_a_secret(master: str) -> bool:
    """Whether Spark makes the secret of ``spark.authenticate`` by itself (`SecurityManager.initializeAuth`)."""
    return not is_cluster(master) or master == "yarn"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
