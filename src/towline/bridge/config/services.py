"""``[kafka]``, ``[spark]``, ``[gateway]`` and ``[monitor]`` of a bridge file, as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, field_validator

from towline.bridge.config.section import Section
from towline.gateway.access import Access
from towline.gateway.tickets import DEFAULT_VALID_S, LONGEST_VALID_S
from towline.spark.quickstart import Tier

__all__ = [
    "LISTENING",
    "CreateTopics",
    "GatewaySection",
    "KafkaSection",
    "MonitorSection",
    "SparkSection",
    "in_the_file",
    "read_address",
]

#: Files without which nothing listens on a network.
LISTENING: Final = ("cert_file", "key_file", "token_file")
#: Keys that let Spark in, and the options of ``format("mqtt")`` that say the same.
_OPTIONS: Final = {
    "token_file": "gatewayTokenFile",
    "ca_file": "gatewayCaFile",
    "server_name": "gatewayServerName",
}
_KEYS: Final = {option: key for key, option in _OPTIONS.items()}
#: ``HOST:PORT``, or a port of the loopback address; an address of IP version 6 in brackets.
_ADDRESS: Final = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):)?(?P<port>[0-9]{1,5})")
_LOOPBACK: Final = "127.0.0.1"


class CreateTopics(Section):
    """How missing topics are made; off unless the table is there.

    Attributes:
        partitions: Partitions of a new topic.
        replication_factor: Copies; -1 takes the cluster's default.
    """

    partitions: Annotated[int, Field(ge=1)] = 6
    replication_factor: Annotated[int, Field(ge=-1)] = -1


def _joined(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _switched(value: object) -> object:
    return {} if value is True else None if value is False else value


class KafkaSection(Section):
    """Where records go.

    Attributes:
        bootstrap_servers: ``host:port,host:port``.
        settings: Further librdkafka client settings, no secrets.
        password_file: Holds ``sasl.password``.
        key_password_file: Holds ``ssl.key.password``.
        token_provider: ``module:function`` that gives tokens for OAUTHBEARER (AWS MSK IAM, Azure).
        create_topics: Make the topics that are missing and known: fixed ones, and those that ``allowed_topics`` names.
    """

    bootstrap_servers: Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[str])] = Field(
        min_length=1
    )
    settings: dict[str, str | bool | int | float] = Field(default_factory=dict)
    password_file: Path | None = None
    key_password_file: Path | None = None
    token_provider: str | None = None
    create_topics: Annotated[
        CreateTopics | None, BeforeValidator(_switched, json_schema_input_type=CreateTopics | bool)
    ] = None

    def client(self) -> dict[str, str]:
        """The settings as librdkafka names them; secrets as names of files (`towline.kafka.clientconfig`)."""
        made = {"bootstrap.servers": self.bootstrap_servers}
        made |= {name: _as_text(value) for name, value in self.settings.items()}
        if self.password_file:
            made["sasl.password.file"] = str(self.password_file)
        if self.key_password_file:
            made["ssl.key.password.file"] = str(self.key_password_file)
        if self.token_provider:
            made = {"sasl.mechanism": "OAUTHBEARER", **made, "sasl.oauthbearer.token.provider": self.token_provider}
        return made


class SparkSection(Section):
    """The Spark session of the bridge.

    Attributes:
        master: ``local[*]``, or a cluster (docs/cluster.md).
        secret_file: Holds the secret of ``spark.authenticate``, for a standalone cluster or Kubernetes; elsewhere Spark
            makes one by itself.
        ui: Whether Spark's web page is served (on loopback).
        conf: Further Spark settings.
        kafka_jars: Jars of Spark's Kafka source, for downlinks: files, directories, patterns; by default Maven's.
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


class GatewaySection(Section):
    """Where gateways listen on a network, and what lets Spark in to gateways elsewhere.

    Attributes:
        listen: ``HOST:PORT`` of the gateway on a network; None for its unix socket alone. A line may have its own.
        cert_file: Certificate chain of a gateway that listens (PEM).
        key_file: Its private key (PEM).
        token_file: Tokens, one a line; a gateway takes each, Spark shows the first.
        ca_file: Authorities that Spark trusts in gateways elsewhere; None for the system's.
        server_name: Name in their certificates, where it is not the host that is named.
        ticket_valid_s: Seconds that a ticket of Spark's workers is worth something.
    """

    listen: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    server_name: str = Field(default="", max_length=253)
    ticket_valid_s: Annotated[float, Field(ge=60, le=LONGEST_VALID_S)] = DEFAULT_VALID_S

    def access(self) -> Access:
        """What lets Spark in."""
        return Access(str(self.token_file or ""), str(self.ca_file or ""), self.server_name)

    def options(self) -> dict[str, str]:
        """What lets Spark in, as options of its source and sink."""
        access = self.access()
        said = {option: getattr(access, key) for key, option in _OPTIONS.items()}
        said |= {"gatewayTicketValidity": f"{self.ticket_valid_s:g}"}
        return {option: value for option, value in said.items() if value}


def in_the_file(message: str) -> str:
    """Name options of Spark in an error as the keys of ``[gateway]`` that hold them."""
    return re.sub("|".join(_KEYS), lambda found: f"{_KEYS[found[0]]} of [gateway]", message)


def read_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; without a host it is the loopback address.

    Raises:
        ValueError: It is neither; the message says what is wanted.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if not found or int(found["port"]) > 0xFFFF:
        raise ValueError('it is no address to listen on; write it as "127.0.0.1:9464"')
    return (found["host"] or _LOOPBACK).strip("[]"), int(found["port"])


class MonitorSection(Section):
    """Where metrics are served, and what has to be told for them.

    Attributes:
        listen: ``HOST:PORT`` of the endpoint with metrics, health and status; None for none. There is no TLS: another
            address than loopback is for a network on which everybody may read them.
        token_file: Tokens, one a line; each lets a client pause, resume and restart lines there. Without it nobody may.
        broker_queue_messages: Most messages that the broker keeps for one client while it is away, such as Mosquitto's
            ``max_queued_messages``; for the metric of that outage budget. None where it has no limit or is not known.
    """

    listen: str | None = None
    token_file: Path | None = None
    broker_queue_messages: Annotated[int, Field(ge=1)] | None = None

    @field_validator("listen")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is not None:
            read_address(value)
        return value if value is None or ":" in value else f"{_LOOPBACK}:{value}"
