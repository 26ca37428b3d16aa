"""What a bridge file says, as validated values; they travel to the driver process as JSON, and hold no secret."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from towline.bridge.config.downlink import DownlinkSection
from towline.bridge.config.section import NAME, Section
from towline.bridge.config.services import GatewaySection, KafkaSection, MonitorSection, SparkSection
from towline.bridge.config.subscriptions import SubscribedRoute
from towline.bridge.patterns import Pattern, Template
from towline.errors import ConfigError, did_you_mean
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy
from towline.mqtt.events import Filter

__all__ = [
    "BATCH_BYTES",
    "CHECKPOINT",
    "CONSUMER",
    "NAME",
    "AnyLine",
    "Bridge",
    "Dedupe",
    "DownLine",
    "DownlinkSection",
    "KafkaSection",
    "Line",
    "RouteSection",
    "Section",
    "SparkSection",
]


#: Directory of Spark's checkpoint in a line's state directory.
CHECKPOINT = "checkpoint"
#: Name under which a bridge reads a gateway.
CONSUMER = "bridge"
#: Most bytes of a micro-batch, if the file says nothing: a whole one may be in memory twice on its way to the sink.
BATCH_BYTES = 64 << 20


#: How long keys are remembered: ``10 minutes``, at least a second, at most 30 days.
_WITHIN = re.compile(r"^([1-9][0-9]{0,6}) ?(second|minute|hour|day)s?$")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_LONGEST_S = 30 * 86400


class Dedupe(Section):
    """How repeats are recognised.

    Attributes:
        key: What names a message for ever: a template such as ``{mqtt.user.id}``, or Spark SQL over the columns of the
            source. It must never be used again for another message of the same topic.
        within: How long a key is remembered at least, by the time of receipt: ``10 minutes``.
    """

    key: str = Field(min_length=1)
    within: str = "10 minutes"

    @field_validator("within")
    @classmethod
    def _a_time(cls, value: str) -> str:
        found = _WITHIN.match(value.strip().lower())
        if not found or int(found[1]) * _SECONDS[found[2]] > _LONGEST_S:
            raise ValueError('within is a time of at most 30 days; write it as "10 minutes" or "2 hours"')
        return f"{found[1]} {found[2]}s"

    def compile(self, captures: Iterable[str]) -> Template | str:
        """The key as a template where it has braces, else the SQL it is.

        Raises:
            ValueError: As `Template.parse`.
        """
        return Template.parse(self.key, captures) if "{" in self.key else self.key


class RouteSection(Section):
    """``[[uplink.route]]`` as written; `compile` makes it a `SubscribedRoute`.

    Attributes:
        from_: Topic filter; ``{name}`` is a wildcard of one level with a name.
        topic: Kafka topic, a template: ``{name}`` of ``from``, ``{mqtt.topic}``, ``{mqtt.user.NAME}``,
            ``{payload.PATH}`` of a JSON payload.
        promise: ``at_most_once`` or ``at_least_once`` on an ``exactly_once`` line: subscribed with QoS 0 or 1.
        qos: Of the subscription; without it what the promise takes.
        key: Of the record, a template: the same key is the same partition, and so in order.
        value: Of the record, a template; without it the payload.
        timestamp: Of the record, a template that gives milliseconds since 1970; without it, or where it gives nothing,
            the time of receipt.
        headers: Further headers of the record, each a template.
        where: Spark SQL; messages for which it is not true are left out and counted, those for which it is null apart.
        allowed_topics: Names, or globs with ``*`` and ``?``, of what a topic with fields may become.
        fallback_topic: Where a message goes whose topic is illegal or not allowed.
        properties: Whether MQTT's properties travel as headers: ``all`` or ``none``.
        key_required: Whether a message that gives no key is a dead letter.
        fields: Names for templates and SQL, and the Spark SQL of each, in order.
        reject: Spark SQL that says why a message is refused, null where it is not; what is refused is a dead letter.
        header_map: Spark SQL of a map of texts: further headers, after the others; one without text is left out.
        missing_headers: Whether a header whose template gives nothing is there without a value (``null``) or left out
            (``omit``).
        no_local: Whether the broker leaves out what this client published itself (MQTT 5).
        retain_as_published: Whether the RETAIN flag comes as it was published (MQTT 5).
        retain_handling: Retained messages at a SUBSCRIBE: 0 always, 1 for a new subscription, 2 never (MQTT 5).
        subscription_id: Subscription identifier (MQTT 5).
        dedupe: How repeats are recognised; without it as the line says.
    """

    from_: str = Field(alias="from", min_length=1)
    topic: str = Field(min_length=1)
    promise: Guarantee | None = None
    qos: Annotated[int, Field(ge=0, le=2)] | None = None
    key: str | None = None
    value: str | None = None
    timestamp: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    where: str | None = None
    allowed_topics: tuple[str, ...] = ()
    fallback_topic: str | None = None
    properties: Literal["all", "none"] = "all"
    key_required: bool = False
    fields: dict[str, str] = Field(default_factory=dict)
    reject: str | None = None
    header_map: str | None = None
    missing_headers: Literal["null", "omit"] = "null"
    no_local: bool = False
    retain_as_published: bool = True
    retain_handling: Annotated[int, Field(ge=0, le=2)] | None = None
    subscription_id: Annotated[int, Field(ge=1, le=268_435_455)] | None = None
    dedupe: Dedupe | None = None

    def compile(
        self, guarantee: Guarantee, dedupe: Dedupe | None = None, dead_letter_topics: tuple[str, ...] = ()
    ) -> SubscribedRoute:
        """The route, with the QoS the guarantee takes when none is given (design section 4).

        Args:
            guarantee: Of the line.
            dedupe: Of the line, for a route without its own.
            dead_letter_topics: Of all lines.

        Raises:
            ValueError: As `Pattern.parse` and `Template.parse` say.
        """
        pattern = Pattern.parse(self.from_)
        names = (*pattern.names, *self.fields)
        dedupe, promise = self.dedupe or dedupe, policy(self.promise or guarantee)
        qos = promise.qos if self.qos is None else self.qos
        return SubscribedRoute(
            pattern=pattern,
            qos=qos,
            topic=Template.parse(self.topic, names),
            key=None if self.key is None else Template.parse(self.key, names),
            value=None if self.value is None else Template.parse(self.value, names),
            timestamp=None if self.timestamp is None else Template.parse(self.timestamp, names),
            headers=tuple((name, Template.parse(text, names)) for name, text in self.headers.items()),
            where=self.where,
            allowed_topics=self.allowed_topics,
            fallback_topic=self.fallback_topic,
            properties=self.properties == "all",
            key_required=self.key_required,
            fields=tuple(self.fields.items()),
            reject=self.reject,
            header_map=self.header_map,
            omit_missing=self.missing_headers == "omit",
            terms=Filter(
                "",
                no_local=self.no_local,
                retain_as_published=self.retain_as_published,
                retain_handling=self.retain_handling,
                identifier=self.subscription_id,
            ),
            dedupe=None if dedupe is None else dedupe.compile(names),
            key_tells=qos < promise.least_qos,
            repeatable=dedupe is not None or (self.promise or guarantee) is Guarantee.AT_LEAST_ONCE,
            dead_letter_topics=dead_letter_topics,
        )


class AnyLine(Section):
    """One MQTT identity, one query, one direction.

    Attributes:
        kind: Name of its table in the file.
        name: Unique in the file.
        guarantee: The promise.
        gateway: What its gateway is told.
        max_messages_per_trigger: Most messages in one micro-batch.
        parallelism: Writers of a batch; more than one split it, by key on the way up and by topic on the way down.
        dead_letter_topic: Where records go that can't be mapped or written; None for nowhere, the line stops then.
    """

    kind: ClassVar[str]
    name: str
    guarantee: Guarantee
    gateway: GatewaySettings
    max_messages_per_trigger: int
    parallelism: int = 1
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


class Line(AnyLine):
    """A line from MQTT to Kafka.

    Attributes:
        direction: Tells the kinds apart in JSON.
        max_bytes_per_trigger: Most bytes in one micro-batch; both limits hold.
        max_trigger_delay_ms: Longest rest between two batches while messages wait, in milliseconds.
        sections: Its routes as written.
        dedupe: How repeats are recognised on routes that do not say it themselves.
        dead_letter_topics: Of all lines of the bridge.
        gateways: State directories and locations of gateways that run already, which the line reads instead of one of
            its own; `gateway` then says little more than where its checkpoint is.
        removed_gateways: Names of gateways that may leave the line without being asked what waits there.
        members: What the gateways are told that share its messages, each on its machine; none for one gateway alone.
    """

    kind: ClassVar[str] = "uplink"
    direction: Literal["up"] = "up"
    max_bytes_per_trigger: int = BATCH_BYTES
    max_trigger_delay_ms: int = 0
    sections: tuple[RouteSection, ...]
    dedupe: Dedupe | None = None
    dead_letter_topics: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    removed_gateways: tuple[str, ...] = ()
    members: tuple[GatewaySettings, ...] = ()

    @property
    def each_gateway(self) -> tuple[GatewaySettings, ...]:
        """What its gateways are told: one, or a member each; nothing where they run elsewhere by another file."""
        return self.members or (() if self.gateways else (self.gateway,))

    def member(self, name: str, file: Path) -> GatewaySettings:
        """What a member's gateway is told.

        Args:
            name: Of the member.
            file: For messages.

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
    def routes(self) -> tuple[SubscribedRoute, ...]:
        """The routes, compiled."""
        return tuple(section.compile(self.guarantee, self.dedupe, self.dead_letter_topics) for section in self.sections)

    @property
    def within(self) -> str | None:
        """How long dedupe keys are remembered; None when no route drops repeats."""
        return next((one.within for one in (*(s.dedupe for s in self.sections), self.dedupe) if one), None)

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


class DownLine(AnyLine):
    """A line from Kafka to MQTT.

    Attributes:
        direction: Tells the kinds apart in JSON.
        section: What becomes of a record, as written.
    """

    kind: ClassVar[str] = "downlink"
    direction: Literal["down"] = "down"
    section: DownlinkSection

    @property
    def fixed_topics(self) -> tuple[str, ...]:
        """Kafka topics that must be there, the dead letters' included, sorted; those of a pattern are not known."""
        return tuple(sorted({*self.section.topics, *([self.dead_letter_topic] if self.dead_letter_topic else [])}))

    @property
    def listed_topics(self) -> frozenset[str]:
        """Kafka topics of failure notices, as far as they are named."""
        notice = self.section.failure_notice
        return frozenset(notice.allowed_topics if notice else ()) - {""}

    @property
    def control_characters(self) -> Literal["send", "dead_letter"]:
        """What becomes of a record whose text a broker may refuse; without a place for dead letters it is sent."""
        return self.section.control_characters or ("dead_letter" if self.dead_letter_topic else "send")

    @property
    def qos(self) -> int:
        """QoS of every PUBLISH."""
        return policy(self.guarantee).publish_qos if self.section.qos is None else self.section.qos


class Bridge(Section):
    """A whole file.

    Attributes:
        name: Of the bridge.
        file: Where it was read from.
        state_dir: Directory of the bridge; each line has one of its name inside.
        leave_waiting: Lines that the file does not have any more, and that may go on holding messages in `state_dir`.
        kafka: Where records go.
        spark: The Spark session.
        gateway: What lets Spark in to gateways elsewhere, and where those of the lines listen.
        monitor: Where metrics are served.
        lines: At least one.
    """

    name: str
    file: Path
    state_dir: Path
    leave_waiting: tuple[str, ...] = ()
    kafka: KafkaSection
    spark: SparkSection
    gateway: GatewaySection = GatewaySection()
    monitor: MonitorSection = MonitorSection()
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
