"""The tables of a bridge file as written: what reads a file, and what its JSON Schema is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from towline.bridge.config.downlink import DownlinkSection
from towline.bridge.config.model import BATCH_BYTES, Dedupe, RouteSection
from towline.bridge.config.section import NAME, Section, SettingError
from towline.bridge.config.services import GatewaySection, KafkaSection, MonitorSection, SparkSection
from towline.gateway.settings import OutboxLimits, ReceiptSettings, ShareWay
from towline.guarantee import AckAfter, Guarantee
from towline.journal import Limits
from towline.net.settings import MqttSettings
from towline.options import path
from towline.spark.cadence import LONGEST_DELAY_MS
from towline.spark.link import gateway_list

#: The tables of lines.
LINES: Final = ("uplink", "downlink")


def _tables(code: str, what: str, do: str) -> BeforeValidator:
    """Tables that are written with two brackets each, of which there is one at least."""

    def listed(value: object) -> object:
        if not isinstance(value, list | tuple) or not value:
            raise SettingError(code, what, do)
        return value

    return BeforeValidator(listed)


def _gateways(value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return gateway_list(json.dumps(value))
    except ValueError as error:
        do = 'Write each as "grpc+tls://HOST:PORT" or as the state directory of a gateway of this machine.'
        raise SettingError("TL-C110", str(error), do) from None


class MqttTable(MqttSettings):
    """The MQTT broker, and what is said to it.

    Attributes:
        client_id_prefix: Begins client ids, in place of the bridge's name.
    """

    client_id_prefix: str | None = None


class MemberSection(Section):
    """``[[uplink.member]]`` as written.

    Attributes:
        name: Fixed: its journal, its client id and its rows are named after it.
        filters: What it takes of the line's messages, with ``share = "filters"``.
    """

    name: Annotated[str, Field(pattern=NAME)]
    filters: tuple[str, ...] = ()


class UplinkTable(Section):
    """A line from MQTT to Kafka.

    Attributes:
        name: Part of the client id, the sink id, and the name of its state directory; unique in the file.
        profile: A convention that says the rest, such as Eclipse Hono's.
        guarantee: The promise.
        ack_after: When the broker is answered, as far as the guarantee leaves it open.
        max_messages_per_trigger: Most messages in one micro-batch.
        max_bytes_per_trigger: Most bytes in one micro-batch, as a number or as ``"64 MiB"``; both limits hold.
        max_trigger_delay_ms: Longest rest between two batches while messages wait, in milliseconds; the more wait, the
            shorter it is (`towline.spark.cadence`). 0 for the lowest latency. Where it is not said: 1000, and 0 where
            somebody waits for Kafka, with ``ack_after = "kafka"`` or receipts.
        parallelism: Writers of a batch; more than one split it by key.
        dead_letter_topic: Where messages go that can't be mapped or written; ``false`` stops the line there instead.
        dedupe: How repeats are recognised.
        receipts: Publishers that ask learn what is in Kafka: a table with ``key_file``.
        listen: ``HOST:PORT`` of its gateway on a network; ``false`` for nowhere.
        gateways: State directories and locations of gateways that run elsewhere, which the line reads.
        removed_gateways: Names of gateways that leave the line unasked.
        share: How members share the line's messages.
        share_group: With ``subscription``: NAME in ``$share/NAME/FILTER``.
        mqtt: What differs from [mqtt].
        journal: How much disk it may take.
        route: The first route that matches takes the message.
        member: Gateways that share the line's messages.
    """

    name: str = Field(pattern=NAME)
    profile: str | None = None
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    ack_after: AckAfter | None = None
    max_messages_per_trigger: Annotated[int, Field(ge=1)] = 200_000
    max_bytes_per_trigger: Annotated[int, Field(ge=1)] = BATCH_BYTES
    max_trigger_delay_ms: Annotated[int, Field(ge=0, le=LONGEST_DELAY_MS)] | None = None
    parallelism: Annotated[int, Field(ge=1, le=256)] = 1
    dead_letter_topic: str | Literal[False] | None = None
    dedupe: Dedupe | None = None
    receipts: ReceiptSettings | None = None
    listen: str | Literal[False] | None = None
    gateways: Annotated[tuple[str, ...], AfterValidator(_gateways)] = ()
    removed_gateways: tuple[str, ...] = ()
    share: ShareWay | None = None
    share_group: Annotated[str, Field(pattern=NAME)] | None = None
    mqtt: MqttSettings = MqttSettings()
    journal: Limits = Limits()
    route: Annotated[
        tuple[RouteSection, ...],
        _tables("TL-C61", "a line needs at least one [[uplink.route]]", "Add one with from and topic."),
    ] = Field(default=(), validate_default=True)
    member: Annotated[
        tuple[MemberSection, ...],
        _tables("TL-C122", "members are written [[uplink.member]]", "Add one with a name."),
    ] = ()


class DownlinkTable(DownlinkSection):
    """A line from Kafka to MQTT.

    Attributes:
        profile: A convention that says the rest, such as Eclipse Hono's.
        mqtt: What differs from [mqtt].
        outbox: How much disk it may take, and how old a message may be.
    """

    profile: str | None = None
    mqtt: MqttSettings = MqttSettings()
    outbox: OutboxLimits = OutboxLimits()


def _lines(kind: str) -> BeforeValidator:
    return _tables("TL-C60", f"[[{kind}]] must be written [[{kind}]]", "Add one with a name.")


class BridgeTable(Section):
    """A bridge file of Towline.

    Attributes:
        name: Of the bridge.
        state_dir: Of all its lines.
        leave_waiting: Lines taken out of the file that may leave messages waiting in state_dir; retire them instead.
        mqtt: The MQTT broker, and what is said to it.
        kafka: Where records go.
        spark: The Spark session of the bridge.
        gateway: Gateways on a network.
        monitor: Metrics and health.
        uplink: Lines from MQTT to Kafka.
        downlink: Lines from Kafka to MQTT.
    """

    name: str = Field(pattern=NAME, description="Name the bridge; it becomes part of the MQTT client ids.")
    state_dir: Path = Field(description="Name a directory on a local disk; the journals live there.")
    leave_waiting: tuple[str, ...] = ()
    mqtt: MqttTable
    kafka: KafkaSection
    spark: SparkSection = SparkSection()
    gateway: GatewaySection = GatewaySection()
    monitor: MonitorSection = MonitorSection()
    uplink: Annotated[tuple[UplinkTable, ...], _lines("uplink")] = ()
    downlink: Annotated[tuple[DownlinkTable, ...], _lines("downlink")] = ()

    @field_validator("state_dir", mode="before")
    @classmethod
    def _somewhere(cls, value: object) -> object:
        if value == "":
            raise PydanticCustomError("path_type", "Input is not a valid path")
        try:
            path(str(value))
        except ValueError as error:
            raise ValueError(f'"state_dir": {error}; name a directory on a local disk') from None
        return value
