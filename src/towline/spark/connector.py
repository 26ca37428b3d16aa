"""Spark's own Kafka source: jars that Spark does not bring along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from towline.errors import SetupError
from towline.spark.java import cache_directory, resolve_jars

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["known_spark_kafka_jars", "spark_kafka_conf", "spark_kafka_jars", "spark_kafka_package"]

#: What the connector needs beside itself, as its own releases name it.
_BESIDE: Final = ("org.apache.kafka:kafka-clients:3.9.2", "org.apache.commons:commons-pool2:2.12.1")
#: Works with PySpark 4.3 where the matching version was never published (batch and stream, read and write).
_TESTED: Final = ("4.2.0", "4.0.0")
_CONNECTOR: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
#: What the package would bring and Spark has.
_BROUGHT: Final = "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime"


def spark_kafka_jars(version: str) -> list[Path]:
    """The jars of ``format("kafka")``, for ``spark.jars``; Maven is asked once.

    Args:
        version: Of PySpark; its own connector is taken where it can be had, else the tested pair.

    Raises:
        SetupError: TL-S15 when Maven can't bring either.
    """
    if jars := known_spark_kafka_jars(version):
        return jars
    try:
        return _fetched(version, version)
    except SetupError:
        return _fetched(*_TESTED)


def spark_kafka_conf(version: str) -> dict[str, str]:
    """Settings of a session that reads with ``format("kafka")``.

    Args:
        version: Of PySpark, as for `spark_kafka_jars`.

    Returns:
        The jars that Maven brings; where it can't, the package that Spark fetches by itself from Maven Central.
    """
    try:
        return {"spark.jars": ",".join(map(str, spark_kafka_jars(version)))}
    except SetupError:
        return {"spark.jars.packages": spark_kafka_package(), "spark.jars.excludes": _BROUGHT}


def spark_kafka_package() -> str:
    """The tested package of ``format("kafka")``, for ``spark.jars.packages``."""
    return f"{_CONNECTOR}:{_TESTED[0]}"


def known_spark_kafka_jars(version: str) -> list[Path]:
    """The jars as far as they are on this machine; empty when Maven would have to be asked."""
    cache = cache_directory()
    for connector, provider in ((version, version), _TESTED):
        if cache is not None and (jars := cache / _name(connector, provider)).is_dir():
            return sorted(jars.glob("*.jar"))
    return []


def _name(connector: str, provider: str) -> str:
    return f"spark-kafka-{connector}-{provider}"


def _fetched(connector: str, provider: str) -> list[Path]:
    wanted = (
        f"{_CONNECTOR}:{connector}",
        f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{provider}",
        *_BESIDE,
    )
    return sorted(resolve_jars(_name(connector, provider), wanted, alone=True).glob("*.jar"))
