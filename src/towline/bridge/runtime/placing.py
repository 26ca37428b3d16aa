"""What a bridge needs of a cluster: a master that answers, and executors that have what its lines use."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from towline import files
from towline.errors import SetupError
from towline.spark.executors import check_executors
from towline.spark.masters import addresses

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from towline.bridge.config.model import Bridge

__all__ = ["files_of", "look_at_executors", "look_at_master", "shared_of"]

#: Settings of Kafka's client that name a file, beside the secrets.
_FILES: Final = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location")
#: Of ``ssl.ca.location``: librdkafka looks for the machine's own certificates.
_PROBE: Final = "probe"
#: Seconds that one master may take to answer.
_ANSWER_S: Final = 5.0


def look_at_master(master: str) -> None:
    """See that a standalone master can be reached: Spark tries for a minute, and then says that it was stopped.

    Args:
        master: Spark's; of several one is enough. Another kind is left to Spark.

    Raises:
        SetupError: TL-S34, none answers.
    """
    silent = []
    for host, port in addresses(master):
        try:
            socket.create_connection((host, port), timeout=_ANSWER_S).close()
        except OSError as error:
            silent.append(f"{host}:{port} ({files.why(error)})")
        else:
            return
    if silent:
        what = f"no master answers at {', '.join(silent)}"
        raise SetupError("TL-S34", "spark", what, "Start it, or correct --master, or master in [spark].")


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
