"""Model of a bridge: its lines, each with the settings of its gateways.

The lines are completed sections of the file; they are passed to the driver process as JSON and hold no secret.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from towline.bridge.config.tables import BridgeSection, DownlinkTable, LineTable, UplinkTable
from towline.bridge.routes import Route
from towline.errors import ConfigError, did_you_mean
from towline.gateway.settings import GatewaySettings
from towline.guarantee import policy

#: Directory of Spark's checkpoint in a line's state directory.
CHECKPOINT: Final = "checkpoint"
#: Name under which a bridge reads a gateway.
CONSUMER: Final = "bridge"


class AnyLine(LineTable):
    """Line of a bridge: one MQTT client id, one Spark query, one direction.

    Attributes:
        kind: Name of its table in the file.
        gateway: Settings of its gateway.
        dead_letter_topic: Kafka topic of records that can't be mapped or written; None: the line stops at the first
            one.
    """

    kind: ClassVar[str]
    gateway: GatewaySettings
    dead_letter_topic: str | None = None

    @property
    def all_gateways(self) -> tuple[GatewaySettings, ...]:
        """Settings of all gateways of the line: of the only one, or of each member."""
        return (self.gateway,)

    @property
    def checkpoint(self) -> Path:
        """Directory of the query's Spark checkpoint."""
        return self.gateway.state_dir / CHECKPOINT

    @property
    def transactional(self) -> bool:
        """Whether batches are written in Kafka transactions; a downlink writes only its dead letters to Kafka."""
        return policy(self.guarantee).transactions and (self.kind == "uplink" or self.dead_letter_topic is not None)


class Uplink(AnyLine, UplinkTable):
    """Line from MQTT to Kafka.

    Attributes:
        dead_letter_topics: Dead-letter topics of all lines of the bridge.
        gateways: Remote gateways as in the file; with any, only the checkpoint's directory is used of `gateway`.
        members: Settings of the gateways that share the line's messages, each on its machine; empty for one gateway.
    """

    kind: ClassVar[str] = "uplink"
    direction: Literal["up"] = "up"
    max_trigger_delay_ms: int = 0
    dead_letter_topics: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    members: tuple[GatewaySettings, ...] = ()

    @property
    def all_gateways(self) -> tuple[GatewaySettings, ...]:
        """Settings of all gateways of the line; empty if they run elsewhere by another file."""
        return self.members or (() if self.gateways else (self.gateway,))

    def member_settings(self, name: str, file: Path) -> GatewaySettings:
        """Return the gateway settings of a member; ``file`` is the location in errors.

        Raises:
            ConfigError: TL-C120, there is no member of this name.
        """
        for member in self.members:
            if member.share is not None and member.share.member == name:
                return member
        names = [member.share.member for member in self.members if member.share]
        hint = did_you_mean(name, names) if names else "Add it as [[uplink.member]], or omit --member."
        raise ConfigError("TL-C120", str(file), f'line "{self.name}" has no member "{name}"', hint)

    @property
    def routes(self) -> tuple[Route, ...]:
        """Compiled routes, in order."""
        return tuple(section.compile(self.guarantee, self.dedupe, self.dead_letter_topics) for section in self.route)

    @property
    def dedupe_window(self) -> str | None:
        """Minimum time for which dedupe keys are remembered; None if no route drops repeats."""
        return next((d.within for d in (*(route.dedupe for route in self.route), self.dedupe) if d), None)

    @property
    def fixed_topics(self) -> tuple[str, ...]:
        """Kafka topics that don't depend on a message, sorted; the dead-letter topic is included."""
        topics = {route.topic.constant for route in self.routes} | {self.dead_letter_topic}
        return tuple(sorted(name for name in topics if name))

    @property
    def listed_topics(self) -> frozenset[str]:
        """Kafka topics with fields that ``allowed_topics`` names in full."""
        pairs = [(route, name) for route in self.routes if route.topic.fields for name in route.allowed_topics]
        return frozenset(name for route, name in pairs if route.may_name_topic(name))


class Downlink(AnyLine, DownlinkTable):
    """Line from Kafka to MQTT."""

    kind: ClassVar[str] = "downlink"
    direction: Literal["down"] = "down"
    qos: int
    control_characters: Literal["send", "dead_letter"]

    @property
    def fixed_topics(self) -> tuple[str, ...]:
        """Kafka topics that must exist, the dead-letter topic included, sorted; none for a pattern."""
        return tuple(sorted({*self.topics, *([self.dead_letter_topic] if self.dead_letter_topic else [])}))

    @property
    def listed_topics(self) -> frozenset[str]:
        """Kafka topics of failure notices, as far as ``allowed_topics`` names them."""
        return frozenset(self.failure_notice.allowed_topics if self.failure_notice else ()) - {""}


class Bridge(BridgeSection):
    """Bridge of one file.

    Attributes:
        file: Path that it was read from.
        lines: At least one.
    """

    file: Path
    lines: tuple[Annotated[Uplink | Downlink, Field(discriminator="direction")], ...]

    @property
    def uplinks(self) -> tuple[Uplink, ...]:
        """Lines from MQTT to Kafka."""
        return tuple(line for line in self.lines if isinstance(line, Uplink))

    @property
    def downlinks(self) -> tuple[Downlink, ...]:
        """Lines from Kafka to MQTT."""
        return tuple(line for line in self.lines if isinstance(line, Downlink))

    def required_topics(self, *lines: Uplink | Downlink) -> tuple[str, ...]:
        """Return the Kafka topics that some lines need, or all, sorted; with ``create_topics`` also topics on lists."""
        lines = lines or self.lines
        created_topics = (line.listed_topics for line in lines if self.kafka.create_topics)
        return tuple(sorted({name for line in lines for name in line.fixed_topics}.union(*created_topics)))

    def sink_options(self, line: AnyLine, sink_id: str) -> dict[str, str]:
        """Return the options of a line's Kafka sink: client settings, sink id, transactions per batch."""
        client = {f"kafka.{name}": value for name, value in self.kafka.client_settings().items()}
        transactions = {"parallelism": str(line.parallelism)} if policy(line.guarantee).transactions else {}
        return {**client, "sinkId": sink_id, **transactions}

    @property
    def log_dir(self) -> Path:
        """Directory of the log files of the bridge's child processes."""
        return self.state_dir / "logs"

    def line(self, name: str) -> Uplink | Downlink:
        """Return the line of a name.

        Raises:
            ConfigError: TL-C73, there is none.
        """
        for line in self.lines:
            if line.name == name:
                return line
        hint = did_you_mean(name, [line.name for line in self.lines])
        raise ConfigError("TL-C73", str(self.file), f'no line is named "{name}"', hint)

    def uplink(self, name: str | None) -> Uplink:
        """Return the uplink of a name, or the only one; raises ConfigError, TL-C73, where there is none or several."""
        if name is None and len(self.uplinks) > 1:
            names = ", ".join(line.name for line in self.uplinks)
            raise ConfigError("TL-C73", str(self.file), f"there are several uplinks: {names}", "Name one with --line.")
        line = (*self.uplinks, *self.lines)[0] if name is None else self.line(name)
        if isinstance(line, Uplink):
            return line
        remedy = "Name an uplink with --line; for a downlink see towline status and towline refused show."
        raise ConfigError("TL-C73", str(self.file), f'line "{line.name}" is a downlink', remedy)
