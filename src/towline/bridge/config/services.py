"""``[kafka]`` and ``[spark]`` of a bridge file: the services that a bridge works with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from towline.bridge.config.section import Section
from towline.spark.quickstart import Tier

__all__ = ["CreateTopics", "KafkaSection", "SparkSection"]


class CreateTopics(Section):
    """How missing topics are made; off unless the table is there.

    Attributes:
        partitions: Partitions of a new topic.
        replication_factor: Copies; -1 takes the cluster's default.
    """

    partitions: Annotated[int, Field(ge=1)] = 6
    replication_factor: Annotated[int, Field(ge=-1)] = -1


class KafkaSection(Section):
    """Where records go.

    Attributes:
        bootstrap_servers: ``host:port,host:port``.
        settings: Further librdkafka client settings, no secrets.
        password_file: Holds ``sasl.password``.
        key_password_file: Holds ``ssl.key.password``.
        create_topics: Make the topics that are missing and known: fixed ones, and those that ``allowed_topics`` names.
    """

    bootstrap_servers: str = Field(min_length=1)
    settings: dict[str, str | bool | int | float] = Field(default_factory=dict)
    password_file: Path | None = None
    key_password_file: Path | None = None
    create_topics: CreateTopics | None = None

    def client(self) -> dict[str, str]:
        """The settings as librdkafka names them; secrets as names of files (`towline.kafka.clientconfig`)."""
        made = {"bootstrap.servers": self.bootstrap_servers}
        made |= {name: _as_text(value) for name, value in self.settings.items()}
        if self.password_file:
            made["sasl.password.file"] = str(self.password_file)
        if self.key_password_file:
            made["ssl.key.password.file"] = str(self.key_password_file)
        return made


class SparkSection(Section):
    """The Spark session of the bridge.

    Attributes:
        master: ``local[*]``, or a cluster (docs/cluster.md).
        secret_file: Holds the secret of ``spark.authenticate``, for a standalone cluster or Kubernetes; elsewhere Spark
            makes one by itself.
        ui: Whether Spark's web page is served (on loopback).
        conf: Further Spark settings.
        kafka_jars: Jars of Spark's Kafka source, for downlinks; none lets Maven bring them at the start.
        tier: How Spark's JVM is tuned, with a local master: ``quick`` for a quick start and low rates, ``peak`` for
            full load over hours, ``auto`` for the one that suits the machine's cores.
    """

    master: str = Field(default="local[*]", min_length=1)
    secret_file: Path | None = None
    ui: bool = False
    conf: dict[str, str | bool | int | float] = Field(default_factory=dict)
    kafka_jars: tuple[Path, ...] = ()
    tier: Tier = Tier.AUTO


def _as_text(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
