"""What a bridge needs of the executors of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from towline.spark.executors import check_executors

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from towline.bridge.config.model import Bridge

__all__ = ["files_of", "look_at_executors", "shared_of"]

#: Settings of Kafka's client that name a file, beside the secrets.
_FILES: Final = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location")
#: Of ``ssl.ca.location``: librdkafka looks for the machine's own certificates.
_PROBE: Final = "probe"


def look_at_executors(spark: SparkSession, bridge: Bridge) -> int:
    """Ask those that were not asked before; nothing with a local master.

    Raises:
        SetupError: As `towline.spark.executors.check_executors`.
    """
    return check_executors(spark, shared=shared_of(bridge), files=files_of(bridge))


def files_of(bridge: Bridge) -> list[str]:
    """The files that a task reads where it runs: secrets and certificates of Kafka's client."""
    client = bridge.kafka.client()
    return [value for name, value in client.items() if name.endswith(".file") or (name in _FILES and value != _PROBE)]


def shared_of(bridge: Bridge) -> list[Path]:
    """The directories that tasks write and read as the driver does: state of lines that drop repeats."""
    return [bridge.state_dir] if any(line.within for line in bridge.uplinks) else []
