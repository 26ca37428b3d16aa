"""What a bridge file becomes: its lines, each with what its gateways are told.

The lines are the file's own sections, completed; they travel to the driver process as JSON, and hold no secret.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from towline.bridge.config.subscriptions import SubscribedRoute
from towline.bridge.config.tables import BridgeSection, DownlinkSection, LineSection, UplinkSection
from towline.errors import ConfigError, did_you_mean
from towline.gateway.settings import GatewaySettings, ShareWay
from towline.guarantee import policy

#: Directory of Spark's checkpoint in a line's state directory.
CHECKPOINT: Final = "checkpoint"
#: Name under which a bridge reads a gateway.
CONSUMER: Final = "bridge"


class AnyLine(LineSection):
    """One MQTT identity, one query, one direction.

    Attributes:
        kind: Name of its table in the file.
        gateway: What its gateway is told.
        dead_letter_topic: Where records go that can't be mapped or written; None for nowhere, the line stops then.
    """

    kind: ClassVar[str]
    gateway: GatewaySettings
    dead_letter_topic: str | None = None

    @property
    def each_gateway(self) -> tuple[GatewaySettings, ...]:
        """What its gateways are told: one, or a member each."""
        return (self.gateway,)

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint of the line's query."""
        return self.gateway.state_dir / CHECKPOINT

    @property
    def transacts(self) -> bool:
        """Whether a batch is a transaction of Kafka's; a line from Kafka writes its dead letters alone."""
        return policy(self.guarantee).transactions and (self.kind == "uplink" or self.dead_letter_topic is not None)


class Line(AnyLine, UplinkSection):
    """A line from MQTT to Kafka.

    Attributes:
        dead_letter_topics: Of all lines of the bridge.
        gateways: As in the file; where there are any, `gateway` says little more than where the checkpoint is.
        members: What the gateways are told that share its messages, each on its machine; none for one gateway alone.
    """

    kind: ClassVar[str] = "uplink"
    direction: Literal["up"] = "up"
    max_trigger_delay_ms: int = 0
    dead_letter_topics: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    members: tuple[GatewaySettings, ...] = ()

    @property
    def each_gateway(self) -> tuple[GatewaySettings, ...]:
        """What its gateways are told: one, or a member each; nothing where they run elsewhere by another file."""
        return self.members or (() if self.gateways else (self.gateway,))

    def member(self, name: str, file: Path) -> GatewaySettings:
        """What a member's gateway is told; ``file`` is for messages.

        Raises:
            ConfigError: TL-C120, there is none of this name.
        """
        for one in self.members:
            if one.share is not None and one.share.member == name:
                return one
        names = [one.share.member for one in self.members if one.share]
        hint = did_you_mean(name, names) if names else "Add it as [[uplink.member]], or leave out --member."
        raise ConfigError("TL-C120", str(file), f'line "{self.name}" has no member "{name}"', hint)

    @property
    def way(self) -> ShareWay | None:
        """How its members share it; None for a line with one gateway."""
        return next((one.share.way for one in self.members if one.share), None)

    @property
    def routes(self) -> tuple[SubscribedRoute, ...]:
        """The routes, compiled."""
        return tuple(section.compile(self.guarantee, self.dedupe, self.dead_letter_topics) for section in self.route)

    @property
    def within(self) -> str | None:
        """How long dedupe keys are remembered; None when no route drops repeats."""
        return next((one.within for one in (*(s.dedupe for s in self.route), self.dedupe) if one), None)

    @property
    def fixed_topics(self) -> tuple[str, ...]:
        """Kafka topics known without a message, fallbacks and dead letters included, sorted."""
        routes = self.routes
        named = {route.topic.constant for route in routes} | {route.fallback_topic for route in routes}
        named.add(self.dead_letter_topic)
        return tuple(sorted(name for name in named if name))

    @property
    def listed_topics(self) -> frozenset[str]:
        """Kafka topics that a message may name and that a list names in full."""
        values = [(route, name) for route in self.routes if route.topic.fields for name in route.allowed_topics]
        return frozenset(name for route, name in values if route.may_become(name))


class DownLine(AnyLine, DownlinkSection):
    """A line from Kafka to MQTT."""

    kind: ClassVar[str] = "downlink"
    direction: Literal["down"] = "down"
    qos: int
    control_characters: Literal["send", "dead_letter"]

    @property
    def fixed_topics(self) -> tuple[str, ...]:
        """Kafka topics that must be there, the dead letters' included, sorted; those of a pattern are not known."""
        return tuple(sorted({*self.topics, *([self.dead_letter_topic] if self.dead_letter_topic else [])}))

    @property
    def listed_topics(self) -> frozenset[str]:
        """Kafka topics of failure notices, as far as they are named."""
        return frozenset(self.failure_notice.allowed_topics if self.failure_notice else ()) - {""}


class Bridge(BridgeSection):
    """A whole file.

    Attributes:
        file: Where it was read from.
        lines: At least one.
    """

    file: Path
    lines: tuple[Annotated[Line | DownLine, Field(discriminator="direction")], ...]

    @property
    def uplinks(self) -> tuple[Line, ...]:
        """The lines from MQTT to Kafka."""
        return tuple(line for line in self.lines if isinstance(line, Line))

    @property
    def downlinks(self) -> tuple[DownLine, ...]:
        """The lines from Kafka to MQTT."""
        return tuple(line for line in self.lines if isinstance(line, DownLine))

    @property
    def topics(self) -> tuple[str, ...]:
        """`topics_of` all lines."""
        return self.topics_of(*self.lines)

    def topics_of(self, *lines: Line | DownLine) -> tuple[str, ...]:
        """Kafka topics that lines must have, and where topics are created those that a list names too, sorted."""
        listed = (line.listed_topics for line in lines if self.kafka.create_topics)
        return tuple(sorted({name for line in lines for name in line.fixed_topics}.union(*listed)))

    def sink_options(self, line: AnyLine, sink: str) -> dict[str, str]:
        """Options of a line's sink to Kafka: its client's settings, its id, and how many transactions a batch is."""
        client = {f"kafka.{name}": value for name, value in self.kafka.client().items()}
        parts = {"parallelism": str(line.parallelism)} if policy(line.guarantee).transactions else {}
        return {**client, "sinkId": sink, **parts}

    @property
    def logs(self) -> Path:
        """Directory of the children's standard error."""
        return self.state_dir / "logs"

    def line(self, name: str) -> Line | DownLine:
        """The line of that name.

        Raises:
            ConfigError: If there is none.
        """
        for line in self.lines:
            if line.name == name:
                return line
        hint = did_you_mean(name, [line.name for line in self.lines])
        raise ConfigError("TL-C73", str(self.file), f'no line is named "{name}"', hint)
