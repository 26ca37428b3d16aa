"""Spark sessions: supported PySpark, masters, settings, and registration of both formats.

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


#: The first version has admission control for Python sources; `make test` runs on the last (docs/install.md#versions).
SUPPORTED_PYSPARK: Final = ((4, 2), (4, 3))


def pyspark_version() -> str | None:
    """Return the version of PySpark, also in ``$SPARK_HOME/python`` or its ``pyspark.zip``; None if missing."""
    spec = find_spec("pyspark")
    data = getattr(spec and spec.loader, "get_data", None)
    if spec is None or spec.origin is None or data is None:
        return None
    text = data(str(Path(spec.origin).with_name("version.py"))).decode()
    version = re.search(r"""^__version__.*?=\s*["'](.+?)["']""", text, re.MULTILINE)
    return version[1] if version else None


def check_pyspark(location: str = "pyspark") -> tuple[str, bool]:
    """Check that PySpark is installed and has the features that Towline uses.

    Args:
        location: What needs PySpark, for the error.

    Returns:
        Its version, and whether Towline is tested with it.

    Raises:
        SetupError: TL-S20, with the command to install it.
    """
    version = pyspark_version()
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[:2]))
    if numbers >= SUPPORTED_PYSPARK[0]:
        return str(version), numbers in SUPPORTED_PYSPARK
    problem = "PySpark is not installed, which runs the lines of a bridge; gateways, Publisher and pub don't need it"
    if version is not None:
        supported = " and ".join(".".join(map(str, numbers)) for numbers in SUPPORTED_PYSPARK)
        problem = f"PySpark is {version}; Towline works with {supported}"
    raise SetupError("TL-S20", location, problem, 'Run: pip install "towline[spark]"')


def spark_conf() -> dict[str, str]:
    """Return the settings for ``SparkSession.builder.config(map=...)``; call it before the session is created.

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
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return {
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


def register(spark: SparkSession) -> None:
    """Register ``format("mqtt")`` and ``format("kafka_transactional")``, unless Spark has discovered them.

    Args:
        spark: The session, classic or Connect. A Connect server runs the formats in its own Python, which must have
            Towline installed.

    Raises:
        SetupError: TL-S20, PySpark is too old.
    """
    check_pyspark("towline.register")
    from towline.spark.kafka_sink import KafkaTransactional  # noqa: PLC0415 - loads PySpark
    from towline.spark.source import MqttDataSource  # noqa: PLC0415 - as above

    _use_this_interpreter(spark)
    for source in (MqttDataSource, KafkaTransactional):
        if _has_py_files(spark) or not _has_format(spark, source.name()):
            spark.dataSource.register(source)


def _has_format(spark: SparkSession, name: str) -> bool:
    """Return whether the session has a format; a second registration logs a warning at every load."""
    try:
        return bool(spark._jsparkSession.sessionState().dataSourceManager().dataSourceExists(name))  # noqa: SLF001
    except Exception:  # noqa: BLE001 - a Connect session has none, and discovery is internal to Spark
        return False


def _has_py_files(spark: SparkSession) -> bool:
    """Return whether the application ships Python files (``--py-files``): only a registered format's tasks get them."""
    return bool(getattr(getattr(spark, "_sc", None), "_python_includes", None))


def _use_this_interpreter(spark: SparkSession) -> None:
    """Make a local session run the formats with this interpreter, where Towline is installed."""
    context = getattr(spark, "_sc", None)  # a Connect session has none
    if context is not None and "PYSPARK_PYTHON" not in os.environ and context.master.startswith("local"):
        context.pythonExec = sys.executable


#: ``local``, ``local[4]``, ``local[*,3]``: driver and executor are one process (`SparkMasterRegex`).
_LOCAL_MASTER: Final = re.compile(r"local(\[[^\[\]]*\])?")
#: Executors are child processes of the driver, on its machine: Spark's imitation of a cluster.
_LOCAL_CLUSTER_MASTER: Final = re.compile(r"local-cluster\[.*\]")
_STANDALONE_MASTER: Final = re.compile(r"spark://(.+)")


def is_cluster(master: str) -> bool:
    """Return whether tasks run in other processes than the driver's, usually on other machines with other files."""
    return _LOCAL_MASTER.fullmatch(master) is None


def shares_files(master: str) -> bool:
    """Return whether executors see this machine's files and sockets, as with ``local-cluster``."""
    return not is_cluster(master) or _LOCAL_CLUSTER_MASTER.fullmatch(master) is not None


def uses_loopback_only(master: str) -> bool:
    """Return whether driver and executors connect on loopback only, so that no other machine must reach them."""
    master_addresses = standalone_addresses(master)
    return all(_is_loopback(host) for host, _ in master_addresses) if master_addresses else shares_files(master)


def standalone_addresses(master: str) -> list[tuple[str, int]]:
    """Return host and port of each standalone master; empty for another kind, or if Spark could not parse one."""
    match = _STANDALONE_MASTER.fullmatch(master)
    parts = [master_address.rpartition(":") for master_address in match[1].split(",")] if match else []
    if not all(host and port.isdecimal() for host, _, port in parts):
        return []
    return [(host.strip("[]"), int(port)) for host, _, port in parts]


def generates_secret(master: str) -> bool:
    """Return whether Spark generates the secret of ``spark.authenticate`` (`SecurityManager.initializeAuth`)."""
    return not is_cluster(master) or master == "yarn"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
