"""One call makes both formats known to a Spark session."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from towline.errors import SetupError
from towline.spark.versions import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]

#: Format → module and class.
_SOURCES = {
    "mqtt": ("towline.spark.source", "MqttDataSource"),
    "kafka_transactional": ("towline.spark.kafka_sink", "KafkaTransactional"),
}


def register(spark: SparkSession) -> None:
    """Register ``format("mqtt")`` and ``format("kafka_transactional")`` where Spark has not found them by itself.

    Args:
        spark: The session, classic or Connect. A Connect server runs the formats in its own Python, which has to have
            Towline.

    Raises:
        SetupError: TL-S20, PySpark is too old; TL-S24, a Connect server's Python lacks Towline.
    """
    check_pyspark("towline.register")
    _run_our_python(spark)
    known = set() if _ships_python(spark) else _known(spark)
    for word, (module, name) in _SOURCES.items():
        if word in known:
            continue
        spark.dataSource.register(getattr(importlib.import_module(module), name))
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


def _known(spark: SparkSession) -> set[str]:
    """The formats that the session has: what is registered beside one that Spark found is warned of at every load."""
    try:
        manager = spark._jsparkSession.sessionState().dataSourceManager()  # noqa: SLF001
        return {name for name in _SOURCES if manager.dataSourceExists(name)}
    except Exception:  # noqa: BLE001 - a Connect session has none, and discovery is no promise of Spark's
        return set()


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
