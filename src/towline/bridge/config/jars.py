"""The jars of Spark's own Kafka source, which the way down reads with: named in the file, or brought by Maven once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline.bridge.config.javaclient import java_client
from towline.errors import ConfigError, SetupError
from towline.spark.connector import known_spark_kafka_jars, spark_kafka_jars, spark_kafka_package

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

__all__ = ["equipped", "source_text"]

_PACKAGES: Final = "spark.jars.packages"
#: What the connector is called among those packages.
_KAFKA: Final = "spark-sql-kafka-0-10"
_CONNECTOR: Final = re.compile(r"^(spark-(?:sql|token-provider)-kafka-[\d-]+_[\d.]+)-(.+)\.jar$")


def equipped(bridge: Bridge) -> Bridge:
    """The bridge with the jars its downlinks need; as it is when it has none, or the file names them.

    Raises:
        ConfigError: TL-B07 when they can't be had; TL-C77 when their client can't have a setting of [kafka].
    """
    if not bridge.downlinks:
        return bridge
    java_client(bridge.kafka.client(), {})
    if bridge.spark.kafka_jars or _fetched(bridge):
        return bridge
    try:
        jars = spark_kafka_jars(version("pyspark"))
    except SetupError as error:
        what = f"a downlink reads with Spark's Kafka source, whose jars can't be had ({error.what})"
        do = (
            'Name them with kafka_jars = ["FILE.jar", ...] in [spark], let Maven reach its repository, or let Spark '
            f'fetch them: in [spark.conf] "{_PACKAGES}" = "{spark_kafka_package()}".'
        )
        raise ConfigError("TL-B07", str(bridge.file), what, do) from error
    return bridge.model_copy(update={"spark": bridge.spark.model_copy(update={"kafka_jars": tuple(jars)})})


def _fetched(bridge: Bridge) -> str:
    """The packages that Spark fetches by itself, if its Kafka source is among them; else ""."""
    packages = str(bridge.spark.conf.get(_PACKAGES, ""))
    return packages if _KAFKA in packages else ""


def source_text(bridge: Bridge) -> str:
    """The pair in use in one line, without a network; "" for a bridge that needs none."""
    if not bridge.downlinks:
        return ""
    ours = version("pyspark")
    if packages := _fetched(bridge):
        return f"Spark's Kafka source for PySpark {ours}: Spark fetches {packages}"
    jars: Sequence[Path] | None = bridge.spark.kafka_jars or known_spark_kafka_jars(ours)
    if not jars:
        return f"Spark's Kafka source for PySpark {ours}: Maven brings its jars at the first start"
    connectors = [match for jar in jars if (match := _CONNECTOR.match(jar.name))]
    pair = " + ".join(f"{one[1]} {one[2]}" for one in connectors) or ", ".join(jar.name for jar in jars)
    same = all(one[2] == ours for one in connectors)
    why = "" if same or bridge.spark.kafka_jars else f" (the tested pair: there is none of {ours})"
    return f"Spark's Kafka source for PySpark {ours}: {pair}{why}"
