"""The tables of a bridge file as written: what reads a file, and what its JSON Schema is made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from towline.bridge.config.document import KeyPath
from towline.bridge.config.subscriptions import SubscribedRoute
from towline.bridge.messages import VALUES
from towline.bridge.patterns import Pattern, Template, kafka_name_problem
from towline.gateway.access import DEFAULT_VALID_S, LONGEST_VALID_S, Access, gateway_list
from towline.gateway.settings import ListenAddress, OutboxLimits, ReceiptSettings, ShareWay
from towline.guarantee import AckAfter, Guarantee, policy
from towline.journal import Limits
from towline.mqtt.events import Filter
from towline.net.settings import FunctionName, MqttSettings
from towline.options import path
from towline.spark.cadence import LONGEST_DELAY_MS
from towline.spark.java import Tier
from towline.validation import SettingsModel

#: Names of bridges and lines: they become file names, client ids and metric labels.
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
#: The tables of lines.
LINES: Final = ("uplink", "downlink")
#: Most bytes of a micro-batch, if the file says nothing: a whole one may be in memory twice on its way to the sink.
BATCH_BYTES: Final = 64 << 20
#: Files without which nothing listens on a network.
LISTENING: Final = ("cert_file", "key_file", "token_file")


# -- [kafka], [spark], [gateway], [monitor] -------------------------------------------------------------------------


#: Keys of ``[gateway]`` that let Spark in, by the options of ``format("mqtt")`` that say the same.
_KEYS: Final = {to_camel(f"gateway_{key}"): key for key in ("token_file", "ca_file", "server_name")}


class CreateTopics(SettingsModel):
    """How missing topics are made; off unless the table is there.

    Attributes:
        partitions: Partitions of a new topic.
        replication_factor: Copies; -1 takes the cluster's default.
    """

    partitions: Annotated[int, Field(ge=1)] = 6
    replication_factor: Annotated[int, Field(ge=-1)] = -1


_JOINED: Final = BeforeValidator(
    lambda value: ",".join(map(str, value)) if isinstance(value, list) else value,
    json_schema_input_type=str | list[str],
)
_SWITCHED: Final = BeforeValidator(
    lambda value: ({} if value else None) if isinstance(value, bool) else value,
    json_schema_input_type=CreateTopics | bool,
)


class KafkaSection(SettingsModel):
    """Where records go.

    Attributes:
        bootstrap_servers: ``host:port,host:port``.
        settings: Further librdkafka client settings, no secrets.
        password_file: Holds ``sasl.password``.
        key_password_file: Holds ``ssl.key.password``.
        token_provider: ``module:function`` that gives tokens for OAUTHBEARER (AWS MSK IAM, Azure).
        create_topics: Make the topics that are missing and known: fixed ones, and those that ``allowed_topics`` names.
    """

    bootstrap_servers: Annotated[str, _JOINED] = Field(min_length=1)
    settings: dict[str, str | bool | int | float] = Field(default_factory=dict)
    password_file: Path | None = None
    key_password_file: Path | None = None
    token_provider: str | None = None
    create_topics: Annotated[CreateTopics | None, _SWITCHED] = None

    def client(self) -> dict[str, str]:
        """The settings as librdkafka names them; secrets as names of files (`towline.kafka.clientconfig`)."""
        made = {"bootstrap.servers": self.bootstrap_servers}
        for name, value in self.settings.items():
            made[name] = str(value).lower() if isinstance(value, bool) else str(value)
        files = {"sasl.password.file": self.password_file, "ssl.key.password.file": self.key_password_file}
        made |= {name: str(file) for name, file in files.items() if file}
        if self.token_provider:
            made = {"sasl.mechanism": "OAUTHBEARER", **made, "sasl.oauthbearer.token.provider": self.token_provider}
        return made


class SparkSection(SettingsModel):
    """The Spark session of the bridge.

    Attributes:
        master: Where Spark runs, ``local[*]`` or a cluster (docs/cluster.md); ``towline run --master URL`` wins.
        secret_file: Holds the secret of ``spark.authenticate``, for a standalone cluster or Kubernetes; elsewhere Spark
            makes one by itself.
        ui: Whether Spark's web page is served (on loopback).
        conf: Further Spark settings.
        kafka_jars: Jars of Spark's Kafka source, for downlinks: files, directories, patterns; by default Maven's.
        tier: How the JVM of a local master, or of the driver of a standalone cluster, is tuned: ``quick`` (one
            compiler, the serial collector) starts in half the CPU and is best at low rates and on few cores; ``peak``
            (Java's own choice) is faster under full load for hours; ``auto`` is ``quick`` on up to two cores
            (docs/benchmarks.md#starts). Options in ``SPARK_SUBMIT_OPTS`` win.
    """

    master: str = Field(default="local[*]", min_length=1)
    secret_file: Path | None = None
    ui: bool = False
    conf: dict[str, str | bool | int | float] = Field(default_factory=dict)
    kafka_jars: tuple[Path, ...] = ()
    tier: Tier = Tier.AUTO


class GatewaySection(SettingsModel):
    """Where gateways listen on a network, and what lets Spark in to gateways elsewhere.

    Attributes:
        listen: ``HOST:PORT`` of the gateway on a network, with ``cert_file``, ``key_file`` and ``token_file`` or not at
            all; default its unix socket alone. It is one gateway's: with several lines each has a ``listen`` of its
            own, or ``listen = false``.
        cert_file: Certificate chain of a gateway that listens (PEM).
        key_file: Its private key (PEM).
        token_file: Tokens, one a line, mode 0600; a gateway takes each, Spark shows the first.
        ca_file: Authorities that Spark trusts in gateways elsewhere; default the system's.
        server_name: Name in their certificates; default the host that is named.
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
        said = {option: str(value) for option, key in _KEYS.items() if (value := getattr(self, key))}
        return {**said, "gatewayTicketValidity": f"{self.ticket_valid_s:g}"}


def in_the_file(message: str) -> str:
    """Name options of Spark in an error as the keys of ``[gateway]`` that hold them."""
    return re.sub("|".join(_KEYS), lambda found: f"{_KEYS[found[0]]} of [gateway]", message)


class MonitorSection(SettingsModel):
    """Where metrics are served, and what has to be told for them.

    Attributes:
        listen: ``HOST:PORT`` of the endpoint with metrics, health and lines (docs/monitoring.md); a port alone is one
            of 127.0.0.1; default no endpoint. There is no TLS: another address than loopback is for a network on which
            everybody may read them.
        token_file: Tokens, one a line; each lets a client pause, resume and restart lines there
            (docs/monitoring.md#lines). Without it nobody may.
        broker_queue_messages: Most messages that the broker keeps for one client while it is away, such as Mosquitto's
            ``max_queued_messages``; for the metric of that outage budget. Default no limit, or not known.
    """

    listen: ListenAddress | None = None
    token_file: Path | None = None
    broker_queue_messages: Annotated[int, Field(ge=1)] | None = None


# -- routes ---------------------------------------------------------------------------------------------------------


#: How long keys are remembered: ``10 minutes``, at least a second, at most 30 days.
_WITHIN = re.compile(r"^([1-9][0-9]{0,6}) ?(second|minute|hour|day)s?$")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_LONGEST_S = 30 * 86400


class Dedupe(SettingsModel):
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

    @property
    def templated(self) -> bool:
        """Whether the key is a template; else it is SQL."""
        return "{" in self.key

    @property
    def compiled(self) -> Template | str:
        """The key, judged before."""
        return Template.read(self.key) if self.templated else self.key


#: Keys of a route that a compiled one has as they are written.
_AS_WRITTEN: Final = ("where", "allowed_topics", "fallback_topic", "key_required", "reject", "header_map")


class RouteSection(SettingsModel):
    """``[[uplink.route]]`` as written; `compile` makes it a `SubscribedRoute`.

    Attributes:
        from_: Topic filter; ``{name}`` is a wildcard of one level with a name.
        topic: Kafka topic, a template (docs/routes.md#templates): ``{name}`` of ``from``, ``{mqtt.topic}``,
            ``{mqtt.user.NAME}``, ``{payload.PATH}`` of a JSON payload.
        promise: ``at_most_once`` (QoS 0) or ``at_least_once`` (QoS 1) on an ``exactly_once`` line
            (docs/guarantees.md#promises-on-one-line); default the line's guarantee.
        qos: Of the subscription; default what the promise takes: ``exactly_once`` 2, and 1 with a ``dedupe`` key;
            ``at_least_once`` 1 or 2.
        key: Of the record, a template: the same key is the same partition, and so in order.
        value: Of the record, a template; a message that gives none is a dead letter. Default the payload.
        timestamp: Of the record, a template that gives milliseconds since 1970, anything else is a dead letter; without
            it, or where it gives nothing, the time of receipt.
        headers: Further headers of the record, each a template.
        where: Spark SQL, asked after ``reject`` (docs/routes.md#in-which-order); messages for which it is not true are
            left out and counted, those for which it is null apart; one on which it raises is a dead letter.
        allowed_topics: Names, or globs with ``*`` and ``?``, of what a topic with fields may become; reserved names
            never (docs/security.md#names-that-a-device-chooses). ``create_topics`` makes the listed names; a topic
            behind a ``*`` that is not there is a dead letter (``topic_missing``), not a case for the fallback.
        fallback_topic: Where a message goes whose topic is illegal or not allowed, before it is a dead letter.
        properties: Whether MQTT's properties travel as headers: ``all`` or ``none``.
        key_required: Whether a message that gives no key is a dead letter.
        fields: Names for templates and SQL, and the Spark SQL of each over the source's columns, the wildcards and the
            fields before it: ``{ site = "upper(machine)" }``, then ``key = "{site}"``. Null where the SQL raises.
        reject: Spark SQL that says why a message is refused, null where it is not; what is refused is a dead letter.
        header_map: Spark SQL of a ``MAP<STRING, STRING>``: headers whose names are data, after the others. One without
            text is left out, and so are names that begin with ``mqtt.`` or ``towline.``; none where the SQL raises.
        missing_headers: Whether a header whose template gives nothing is there without a value (``null``) or left out
            (``omit``).
        no_local: Whether the broker leaves out what this client published itself (MQTT 5).
        retain_as_published: Whether the RETAIN flag comes as it was published (MQTT 5).
        retain_handling: Retained messages at a SUBSCRIBE: 0 always, 1 for a new subscription, 2 never (MQTT 5).
        subscription_id: Subscription identifier (MQTT 5). Routes whose filters cover each other are one subscription,
            and have to agree about it.
        dedupe: How repeats are recognised, by a key of its own; ``within`` is one for the whole line.
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

    def texts(self) -> dict[KeyPath, str]:
        """Its templates, by their keys."""
        texts: dict[KeyPath, str | None] = {("headers", name): text for name, text in self.headers.items()}
        texts |= {(key,): getattr(self, key) for key in ("topic", "key", "value", "timestamp")}
        return {key: text for key, text in texts.items() if text is not None}

    def compile(
        self, guarantee: Guarantee, dedupe: Dedupe | None = None, dead_letter_topics: tuple[str, ...] = ()
    ) -> SubscribedRoute:
        """The route, judged before, with the QoS the line's guarantee takes when none is given (design section 4).

        A route without ``dedupe`` has the line's; ``dead_letter_topics`` are those of all lines.
        """
        pattern, dedupe, promise = Pattern.parse(self.from_), self.dedupe or dedupe, policy(self.promise or guarantee)
        qos = promise.qos if self.qos is None else self.qos
        made: dict[str, Any] = {f"{key[0]}": Template.read(text) for key, text in self.texts().items() if len(key) == 1}
        made |= {key: getattr(self, key) for key in _AS_WRITTEN}
        return SubscribedRoute(
            pattern=pattern,
            **made,
            headers=tuple((name, Template.read(text)) for name, text in self.headers.items()),
            properties=self.properties == "all",
            fields=tuple(self.fields.items()),
            omit_missing=self.missing_headers == "omit",
            dedupe=dedupe.compiled if dedupe else None,
            key_tells=qos < promise.qos,
            dead_letter_topics=dead_letter_topics,
            subscription=Filter(
                pattern.filter, qos, self.no_local, self.retain_as_published, self.retain_handling, self.subscription_id
            ),
            repeatable=dedupe is not None or (self.promise or guarantee) is Guarantee.AT_LEAST_ONCE,
        )


# -- lines ----------------------------------------------------------------------------------------------------------


#: For editors: of such tables there is one at least.
_SOME: Final = Field(json_schema_extra={"minItems": 1})


def _tables(code: str, mistake: str) -> BeforeValidator:
    """Tables that are written with two brackets each, of which there is one at least."""

    def listed(value: object) -> object:
        if not isinstance(value, list | tuple) or not value:
            raise PydanticCustomError(code, mistake)
        return value

    return BeforeValidator(listed)


def _gateways(value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return gateway_list(json.dumps(value))
    except ValueError as error:
        do = 'write each as "grpc+tls://HOST:PORT" or as the state directory of a gateway of this machine'
        raise PydanticCustomError("TL-C110", "{what}", {"what": f"{error}; {do}"}) from None


class LineSection(SettingsModel):
    """What a line of either direction says.

    Attributes:
        name: Part of the client id, the sink id, and the name of its state directory; unique in the file.
        guarantee: ``at_least_once``, ``at_most_once`` or ``exactly_once`` (docs/guarantees.md).
        max_messages_per_trigger: Most messages, or records, in one micro-batch. A task of a downlink sorts its part, on
            disk (``TMPDIR``) above 64 MiB.
        parallelism: Writers of a batch; more than one split it, by key on the way up (else by MQTT topic; with
            ``exactly_once`` into as many transactions) and by MQTT topic on the way down. Each reads the whole batch.
        dead_letter_topic: Where goes what can't be mapped, written or taken in whole
            (docs/guarantees.md#what-is-not-taken-in-whole); ``false`` stops the line there instead. Default
            ``<bridge>.dead-letters`` where missing topics are created, else nowhere.
    """

    name: str = Field(pattern=NAME)
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    max_messages_per_trigger: Annotated[int, Field(ge=1)] = 50_000
    parallelism: Annotated[int, Field(ge=1, le=256)] = 1
    dead_letter_topic: str | Literal[False] | None = None


class LineTable(SettingsModel):
    """What the table of a line says beside that; its gateway has it all.

    Attributes:
        profile: A convention that says the rest: ``hono`` (of commands too, ``hono-errors`` of what was refused), or
            the path of a profile of your own, ``PATH.toml`` or ``PATH.toml#NAME`` (docs/hono.md#a-profile-of-your-own).
        listen: ``HOST:PORT`` of its gateway on a network; ``false`` for nowhere. Default that of ``[gateway]``.
        mqtt: A table: what differs from ``[mqtt]``.
    """

    profile: str | None = None
    listen: str | Literal[False] | None = None
    mqtt: MqttSettings = MqttSettings()


class MqttTable(MqttSettings):
    """The MQTT broker, and what is said to it.

    Attributes:
        client_id_prefix: Begins client ids, in place of the bridge's name.
    """

    client_id_prefix: str | None = None


class MemberSection(SettingsModel):
    """``[[uplink.member]]`` as written.

    Attributes:
        name: Fixed: its journal, its client id and its rows are named after it; with the line's name at most 63
            characters.
        filters: What it takes of the line's messages, with ``share = "filters"``.
    """

    name: Annotated[str, Field(pattern=NAME)]
    filters: tuple[str, ...] = ()


class UplinkSection(LineSection):
    """What becomes of the messages of a line from MQTT to Kafka.

    Attributes:
        max_bytes_per_trigger: Most bytes in one micro-batch, as a number or as ``"64 MiB"``, as the rows lie in the
            journal; both limits hold, and one message is always allowed. With more than the default Spark measures the
            rows one by one on their way to the sink, which is slower.
        max_trigger_delay_ms: Longest rest between two batches while messages wait, in milliseconds, at most 30000; the
            more wait, the shorter it is (docs/options.md#when-a-batch-begins). 0 for the lowest latency. Default 1000,
            and 0 where somebody waits for Kafka, with ``ack_after = "kafka"`` or receipts.
        dedupe: ``{ key = "...", within = "10 minutes" }``: how repeats are recognised on routes that do not say it
            themselves (docs/guarantees.md#repeats).
        gateways: State directories and locations of gateways that run elsewhere, which the line reads instead of
            starting one; ``[gateway]`` says what lets it in, and ``[mqtt]`` is not needed where no line has a gateway
            of its own (docs/several-gateways.md#a-bridge).
        removed_gateways: Names of gateways that leave the line without being asked what waits there.
        route: The first route that matches takes the message.
    """

    max_messages_per_trigger: Annotated[int, Field(ge=1)] = 200_000
    max_bytes_per_trigger: Annotated[int, Field(ge=1)] = BATCH_BYTES
    max_trigger_delay_ms: Annotated[int, Field(ge=0, le=LONGEST_DELAY_MS)] | None = None
    dedupe: Dedupe | None = None
    gateways: Annotated[tuple[str, ...], AfterValidator(_gateways)] = ()
    removed_gateways: tuple[str, ...] = ()
    route: Annotated[
        tuple[RouteSection, ...],
        _SOME,
        _tables("TL-C61", "a line needs at least one [[uplink.route]]; add one with from and topic"),
    ] = Field(default=(), validate_default=True)


class UplinkTable(LineTable, UplinkSection):
    """A line from MQTT to Kafka.

    Attributes:
        ack_after: When the broker is answered, as far as the guarantee leaves it open: ``journal``; ``kafka`` with
            ``at_least_once`` (docs/lost-machine.md); ``received`` with ``at_most_once``.
        receipts: A table with ``key_file``: publishers that ask learn what is in Kafka, and their repeats are dropped
            (docs/receipts.md#the-key).
        journal: A table: how much disk it may take.
        share: With members: how they share the line's messages, ``filters`` or ``subscription`` (docs/sharing.md).
        share_group: With ``subscription``: NAME in ``$share/NAME/FILTER``; default ``<bridge>-<line>``.
        member: Gateways that share the line's messages.
    """

    ack_after: AckAfter | None = None
    receipts: ReceiptSettings | None = None
    journal: Limits = Limits()
    share: ShareWay | None = None
    share_group: Annotated[str, Field(pattern=NAME)] | None = None
    member: Annotated[
        tuple[MemberSection, ...],
        _SOME,
        _tables("TL-C122", "members are written [[uplink.member]]; add one with a name"),
    ] = ()

    @property
    def way(self) -> ShareWay | None:
        """How its members share it; None for no members, and where nothing says it."""
        way = self.share or (ShareWay.FILTERS if any(member.filters for member in self.member) else None)
        return way if self.member else None


# -- a downlink -----------------------------------------------------------------------------------------------------


#: What a pattern does not match [Kafka: Topic.INTERNAL_TOPICS].
_UNLISTED: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class Sql(SettingsModel):
    """A value said in Spark SQL.

    Attributes:
        sql: An expression over ``key, value, topic, partition, offset, timestamp, headers``.
    """

    sql: str


Spoken: TypeAlias = str | Sql


class FailureNotice(SettingsModel):
    """What Kafka is told of a record that MQTT can't carry, beside its dead letter: one more record.

    Its SQL may name ``fault``, why the record can't go, beside the columns of Spark's Kafka source.

    Attributes:
        topic: Where it goes; no notice where that is null.
        key: None for no key.
        payload: None for an empty one.
        headers: In order; one whose value is null is left out.
        copy_headers: Names of the record's headers that come along, as they are; ``name*`` for all that begin so.
        where: Spark SQL; of records for which it is not true nothing is told.
        allowed_topics: Topics that are made with the others where missing ones are created.
    """

    topic: Spoken
    key: Spoken | None = None
    payload: Spoken | None = None
    headers: dict[str, Spoken] = Field(default_factory=dict)
    copy_headers: tuple[str, ...] = ()
    where: str | None = None
    allowed_topics: tuple[str, ...] = ()

    def spoken(self) -> dict[str, Spoken | None]:
        """What is said of the record; headers by their names in hexadecimal, with a prefix."""
        headers = {f"header_{name.encode().hex()}": text for name, text in self.headers.items()}
        where = None if self.where is None else Sql(sql=self.where)
        return {"topic": self.topic, "key": self.key, "payload": self.payload, "where": where, **headers}


class KafkaPattern(SettingsModel):
    """Topics by a regular expression, as Spark's ``subscribePattern`` takes it (java.util.regex)."""

    pattern: str = Field(min_length=1)


def said_in_sql(section: SettingsModel) -> Iterator[tuple[KeyPath, str]]:
    """What a section says in Spark SQL, with its keys."""
    for name, value in section:
        if name in ("where", "reject", "sql", "header_map") and value is not None:
            yield (name,), value
        elif name == "fields":
            yield from (((name, field), text) for field, text in value.items())
        elif isinstance(value, Dedupe):
            yield from [] if value.templated else [((name, "key"), value.key)]
        else:
            inner = {(name, key): one for key, one in value.items()} if isinstance(value, dict) else {(name,): value}
            tables = [(path, one) for path, one in inner.items() if isinstance(one, SettingsModel)]
            yield from (((*path, *key), text) for path, one in tables for key, text in said_in_sql(one))


class DownlinkSection(LineSection):
    """What becomes of the records of a line from Kafka to MQTT.

    Attributes:
        from_: A Kafka topic, a list of them, or ``{ pattern = "REGEX" }``.
        starting_offsets: Where the line begins before it has a checkpoint: ``earliest``, ``latest``, or a table
            ``{ TOPIC = { "0" = 12 } }``.
        isolation_level: Kafka's ``isolation.level``: records of a transaction when it is committed, or as they are
            written, whatever becomes of it; not with ``exactly_once``.
        on_data_loss: What to do when Kafka has deleted records that were not read yet: ``stop`` the line and say so, or
            ``go_on`` with what is left.
        topic: MQTT topic: a template or ``{ sql = "..." }``, as all that follows (docs/downlink.md).
        qos: Of every PUBLISH; where none is said, what the guarantee takes.
        retain: Keep it for later subscribers; where it is not said, the header ``mqtt.retain``.
        expiry: Seconds the message lives from its arrival in the outbox on; where it is not said, the header
            ``mqtt.message-expiry``.
        content_type: Where it is not said, the header ``mqtt.content-type``.
        response_topic: Where an answer is expected; where it is not said, the header ``mqtt.response-topic``.
        correlation_data: What an answer repeats; where it is not said, the header ``mqtt.correlation-data``.
        payload: Where it is not said, the record's value.
        properties: Which headers travel: ``all`` (those of MQTT as what they are, the others as user properties),
            ``mqtt`` (only those of MQTT), ``none``.
        fields: Names for templates and SQL beside those of a record, and the Spark SQL of each, in order; it may name
            the columns of Spark's Kafka source and the fields before it.
        where: Spark SQL; records for which it is not true are left out and counted.
        reject: Spark SQL that says why a record is refused, null where it is not; what is refused is a dead letter.
        failure_notice: A table: what Kafka is told of each dead letter, one record beside it: ``topic``, ``key``,
            ``payload``, ``headers``, whose SQL may name ``fault`` (why); ``copy_headers`` (``"name*"`` for all that
            begin so), ``where``, ``allowed_topics`` (made by ``create_topics``).
        transform: ``package.module:function``, a deterministic function from DataFrame to DataFrame that keeps the
            columns.
        confirm: When a batch counts as written: on disk in the outbox, or at the broker.
        control_characters: What to do with a record that would bring control characters or non-characters into a
            topic or property, at which a broker may end the connection [MQTT 5 section 1.5.4]: ``send`` it, or make it
            a ``dead_letter`` (docs/downlink.md#what-mqtt-cant-carry). Default a dead letter where the line has such a
            topic.
        trigger_interval_s: Seconds between batches.
    """

    from_: str | tuple[str, ...] | KafkaPattern = Field(alias="from")
    starting_offsets: Literal["earliest", "latest"] | dict[str, dict[str, int]] = "earliest"
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    on_data_loss: Literal["stop", "go_on"] = "stop"
    topic: Spoken = "{header.mqtt.topic}"
    qos: Annotated[int, Field(ge=0, le=2)] | None = None
    retain: bool | Sql | None = None
    expiry: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] | str | Sql | None = None
    content_type: Spoken | None = None
    response_topic: Spoken | None = None
    correlation_data: Spoken | None = None
    payload: Spoken | None = None
    properties: Literal["all", "mqtt", "none"] = "all"
    fields: dict[str, str] = Field(default_factory=dict)
    where: str | None = None
    reject: str | None = None
    failure_notice: FailureNotice | None = None
    transform: FunctionName | None = None
    confirm: Literal["outbox", "broker"] = "outbox"
    control_characters: Literal["send", "dead_letter"] | None = None
    trigger_interval_s: Annotated[float, Field(ge=0, le=3600)] = 0.0

    @field_validator("from_")
    @classmethod
    def _legal(cls, value: str | tuple[str, ...] | KafkaPattern) -> str | tuple[str, ...] | KafkaPattern:
        if isinstance(value, KafkaPattern):
            try:
                re.compile(value.pattern)  # Java's are much the same; Spark tells the rest
            except re.error as error:
                raise ValueError(f"pattern is no regular expression ({error}); correct it") from None
            return value
        names = (value,) if isinstance(value, str) else value
        problem = next((found for name in names if (found := kafka_name_problem(name))), None)
        if problem or not names:
            raise ValueError(f"{problem or 'from names no topic'}; name one, several in a list, or {{ pattern = ... }}")
        return value

    def rendering(self) -> dict[str, Any]:
        """What `towline.bridge.messages.MessageTable` takes of it: SQL is a table without its text [I12]."""
        notice = self.failure_notice
        said: dict[str, dict[str, Any]] = {"values": self.spoken(), "notice": notice.spoken() if notice else {}}
        for texts in said.values():
            texts |= {name: {} for name, value in texts.items() if isinstance(value, Sql)}
        return {**said, "properties": self.properties, "copied": notice.copy_headers if notice else ()}

    def spoken(self) -> dict[str, Any]:
        """What is said of the messages: templates, SQL, constants; None for nothing."""
        return {name: getattr(self, name) for name in VALUES}

    def texts(self) -> dict[KeyPath, str]:
        """The templates of its messages and of their failure notices, by their keys."""
        said: dict[KeyPath, Any] = {(name,): value for name, value in self.spoken().items()}
        if notice := self.failure_notice:
            said |= {("failure_notice", key): getattr(notice, key) for key in ("topic", "key", "payload")}
            said |= {("failure_notice", "headers", name): text for name, text in notice.headers.items()}
        return {key: text for key, text in said.items() if isinstance(text, str)}

    @property
    def templates(self) -> tuple[Template, ...]:
        """Those of its messages and of their failure notices."""
        return tuple(map(Template.read, self.texts().values()))

    @property
    def topics(self) -> tuple[str, ...]:
        """The Kafka topics that are named; none for a pattern."""
        if isinstance(self.from_, KafkaPattern):
            return ()
        return (self.from_,) if isinstance(self.from_, str) else self.from_

    def reads(self, topic: str) -> bool:
        """Whether a Kafka topic is among those it comes from; a pattern is looked for in the name, as Spark does."""
        if isinstance(self.from_, KafkaPattern):
            return topic not in _UNLISTED and re.search(self.from_.pattern, topic) is not None
        return topic in self.topics


class DownlinkTable(LineTable, DownlinkSection):
    """A line from Kafka to MQTT.

    Attributes:
        outbox: How much disk it may take, and how old a message may be.
    """

    outbox: OutboxLimits = OutboxLimits()


# -- the file --------------------------------------------------------------------------------------------------------


def _lines(kind: str) -> BeforeValidator:
    return _tables("TL-C60", f"[[{kind}]] must be written [[{kind}]]; add one with a name")


class BridgeSection(SettingsModel):
    """What a bridge has, its lines apart.

    Attributes:
        name: Of the bridge.
        state_dir: Of all its lines; each has a directory of its name inside.
        leave_waiting: Lines taken out of the file that may leave messages waiting in state_dir; retire them instead.
        kafka: Where records go.
        spark: The Spark session of the bridge.
        gateway: Gateways on a network.
        monitor: Metrics and health.
    """

    name: str = Field(pattern=NAME, description="Name the bridge; it becomes part of the MQTT client ids.")
    state_dir: Path = Field(description="Name a directory on a local disk; the journals live there.")
    leave_waiting: tuple[str, ...] = ()
    kafka: KafkaSection
    spark: SparkSection = SparkSection()
    gateway: GatewaySection = GatewaySection()
    monitor: MonitorSection = MonitorSection()

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


class BridgeTable(BridgeSection):
    """A bridge file of Towline.

    Attributes:
        mqtt: The MQTT broker, and what is said to it.
        uplink: Lines from MQTT to Kafka.
        downlink: Lines from Kafka to MQTT.
    """

    mqtt: MqttTable = MqttTable()
    uplink: Annotated[tuple[UplinkTable, ...], _SOME, _lines("uplink")] = ()
    downlink: Annotated[tuple[DownlinkTable, ...], _SOME, _lines("downlink")] = ()
