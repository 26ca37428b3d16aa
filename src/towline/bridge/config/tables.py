"""Tables of a bridge file as written: the models that validate it, and from which its JSON Schema is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic.alias_generators import to_camel

from towline.bridge.config.document import KeyPath
from towline.bridge.messages import MESSAGE_FIELDS
from towline.bridge.patterns import Pattern, Template, kafka_name_problem
from towline.bridge.profiles import HonoSection
from towline.bridge.routes import Route
from towline.gateway.access import DEFAULT_TICKET_S, MAX_TICKET_S, ClientAccess, parse_gateways
from towline.gateway.settings import ListenAddress, OutboxLimits, ReceiptSettings, ShareMethod
from towline.guarantee import AckAfter, Guarantee, policy
from towline.journal import Limits
from towline.net.settings import MqttSettings
from towline.options import is_loopback
from towline.spark.batching import LONGEST_DELAY_MS
from towline.validation import SettingsModel

#: Names of bridges and lines: they become file names, client ids and metric labels.
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
#: The tables of lines.
LINES: Final = ("uplink", "downlink")
#: Default maximum of a micro-batch, in bytes: it may be in memory twice on its way to the sink.
DEFAULT_BATCH_BYTES: Final = 64 << 20
#: Files that every network listener needs.
LISTENER_FILES: Final = ("cert_file", "key_file", "token_file")


# -- [kafka], [spark], [gateway], [monitor] -------------------------------------------------------------------------


#: Credential keys of ``[gateway]`` by the equivalent options of ``format("mqtt")``.
_ACCESS_KEYS: Final = {to_camel(f"gateway_{key}"): key for key in ("token_file", "ca_file", "server_name")}


class CreateTopics(SettingsModel):
    """Creation of missing topics; off unless the table is present.

    Attributes:
        partitions: Partitions of a new topic.
        replication_factor: Copies; -1 takes the cluster's default.
    """

    partitions: Annotated[int, Field(ge=1)] = 6
    replication_factor: Annotated[int, Field(ge=-1)] = -1


_JOIN_LIST: Final = BeforeValidator(
    lambda value: ",".join(map(str, value)) if isinstance(value, list) else value,
    json_schema_input_type=str | list[str],
)
_SWITCH: Final = BeforeValidator(
    lambda value: ({} if value else None) if isinstance(value, bool) else value,
    json_schema_input_type=CreateTopics | bool,
)


class KafkaSection(SettingsModel):
    """Connection to the Kafka cluster.

    Attributes:
        bootstrap_servers: ``host:port,host:port``.
        settings: Further librdkafka client settings, no secrets.
        password_file: Holds ``sasl.password``.
        key_password_file: Holds ``ssl.key.password``.
        token_provider: ``module:function`` that gives tokens for OAUTHBEARER (AWS MSK IAM, Azure).
        create_topics: Make the topics that are missing and known: fixed ones, and those that ``allowed_topics`` names.
    """

    bootstrap_servers: Annotated[str, _JOIN_LIST] = Field(min_length=1)
    settings: dict[str, str | bool | int | float] = Field(default_factory=dict)
    password_file: Path | None = None
    key_password_file: Path | None = None
    token_provider: str | None = None
    create_topics: Annotated[CreateTopics | None, _SWITCH] = None

    def client_settings(self) -> dict[str, str]:
        """Return the settings under librdkafka's names; secrets as names of files (`towline.kafka.clientconfig`)."""
        config = {"bootstrap.servers": self.bootstrap_servers}
        for name, value in self.settings.items():
            config[name] = str(value).lower() if isinstance(value, bool) else str(value)
        files = {"sasl.password.file": self.password_file, "ssl.key.password.file": self.key_password_file}
        config |= {name: str(file) for name, file in files.items() if file}
        if self.token_provider:
            config = {"sasl.mechanism": "OAUTHBEARER", **config, "sasl.oauthbearer.token.provider": self.token_provider}
        return config


class SparkSection(SettingsModel):
    """The Spark session of the bridge.

    Attributes:
        master: Where Spark runs, ``local[*]`` or a cluster (docs/spark.md#spark-cluster).
        secret_file: Holds the secret of ``spark.authenticate``, for a standalone cluster or Kubernetes; elsewhere Spark
            makes one by itself.
        ui: Whether Spark's web page is served (on loopback).
        conf: Further Spark settings.
        kafka_jars: Jars of Spark's Kafka source, for downlinks: files and directories; by default Maven's.
    """

    master: str = Field(default="local[*]", min_length=1)
    secret_file: Path | None = None
    ui: bool = False
    conf: dict[str, str | bool | int | float] = Field(default_factory=dict)
    kafka_jars: tuple[Path, ...] = ()


class GatewaySection(SettingsModel):
    """Network listeners of gateways, and Spark's access to remote gateways.

    Attributes:
        listen: ``HOST:PORT`` of the gateway on a network; it needs ``cert_file``, ``key_file`` and ``token_file``.
            Default its unix socket alone. The address is one gateway's: with several lines each has a ``listen`` of its
            own, or ``listen = false``.
        cert_file: Certificate chain of a gateway that listens (PEM).
        key_file: Its private key (PEM).
        token_file: Tokens, one a line, mode 0600; a gateway accepts each, Spark sends the first.
        ca_file: Certificate authorities that Spark trusts for remote gateways; default the system's.
        server_name: Name in their certificates; default the host in the address.
        ticket_valid_s: Seconds for which a ticket of Spark's workers is valid.
    """

    listen: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    server_name: str = Field(default="", max_length=253)
    ticket_valid_s: Annotated[float, Field(ge=60, le=MAX_TICKET_S)] = DEFAULT_TICKET_S

    def access(self) -> ClientAccess:
        """Return the credentials with which Spark connects to gateways."""
        return ClientAccess(str(self.token_file or ""), str(self.ca_file or ""), self.server_name)

    def spark_options(self) -> dict[str, str]:
        """Return the credentials as options of Spark's source and sink."""
        options = {option: str(value) for option, key in _ACCESS_KEYS.items() if (value := getattr(self, key))}
        return {**options, "gatewayTicketValidity": f"{self.ticket_valid_s:g}"}


def with_file_keys(message: str) -> str:
    """Replace Spark options in an error by the keys of ``[gateway]`` that set them."""
    return re.sub("|".join(_ACCESS_KEYS), lambda match: f"{_ACCESS_KEYS[match[0]]} of [gateway]", message)


class MonitorSection(SettingsModel):
    """Endpoint for metrics, health and control of lines.

    Attributes:
        listen: ``HOST:PORT`` of the endpoint with metrics, health and lines (docs/monitoring.md); a port alone is one
            of 127.0.0.1; default no endpoint.
        page: Whether the endpoint serves the page of the bridge, too (docs/page.md); off loopback it needs the three
            files below.
        read_only: Whether nobody may pause, resume and restart lines, replay messages or run doctor there; default
            true off loopback, else false.
        token_file: Tokens, one a line; each lets a client act there (docs/monitoring.md#lines-over-http), and opens a
            session of the page. Without it nobody may act.
        cert_file: Certificate chain (PEM) of the endpoint; without it there is no TLS, and who reaches the address may
            read metrics and lines. A changed file is read again.
        key_file: Its private key (PEM).
        broker_queue_messages: Most messages that the broker queues for one offline client, such as Mosquitto's
            ``max_queued_messages``; for the metric of that outage budget. Default no limit, or not known.
    """

    listen: ListenAddress | None = None
    page: bool = False
    read_only: bool | None = None
    token_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    broker_queue_messages: Annotated[int, Field(ge=1)] | None = None

    def access_problem(self, address: str | None, *, has_page: bool) -> str:
        """Return what its files lack to be served at an address, as text; "" for nothing."""
        if (self.cert_file is None) != (self.key_file is None):
            return "cert_file and key_file are needed together"
        is_remote = has_page and address is not None and not is_loopback(address)
        if is_remote and (self.cert_file is None or self.token_file is None):
            return "the page is served to other machines only with TLS and a token: cert_file, key_file, token_file"
        return ""


# -- routes ---------------------------------------------------------------------------------------------------------


class Dedupe(SettingsModel):
    """Deduplication of repeats by a key.

    Attributes:
        key: Unique name of a message for ever: a template such as ``{mqtt.user.id}``, or Spark SQL over the columns of
            the source. It must never be used again for another message of the same topic.
        within: Minimum time for which a key is remembered, by the time of receipt: ``10 minutes``.
    """

    key: str = Field(min_length=1)
    within: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5} (second|minute|hour|day)s?$")] = "10 minutes"

    @property
    def is_template(self) -> bool:
        """Whether the key is a template; else it is SQL."""
        return "{" in self.key


#: Keys that a compiled route has unchanged.
_COPIED_KEYS: Final = ("where", "allowed_topics", "key_required", "reject", "header_map")


class RouteSection(SettingsModel):
    """``[[uplink.route]]`` as written; `compile` makes it a `Route`.

    Attributes:
        from_: Topic filter; ``{name}`` is a wildcard of one level with a name.
        topic: Kafka topic, a template (docs/configure.md#templates): ``{name}`` of ``from``, ``{mqtt.topic}``,
            ``{mqtt.user.NAME}``, ``{payload.PATH}`` of a JSON payload.
        promise: ``at_most_once`` (QoS 0) or ``at_least_once`` (QoS 1) on an ``exactly_once`` line
            (docs/guarantees.md#promises-on-one-line); default the line's guarantee.
        qos: QoS of the subscription; default by the promise: ``exactly_once`` 2, and 1 with a ``dedupe`` key;
            ``at_least_once`` 1 or 2.
        key: Key of the record, a template: records with the same key go to the same partition, and so stay in order.
        value: Value of the record, a template; a message that gives none is a dead letter. Default the payload.
        timestamp: Time of the record, a template that gives milliseconds since 1970, anything else is a dead letter;
            without it, or where it gives nothing, the time of receipt.
        headers: Further headers of the record, each a template; one that gives nothing is omitted.
        where: Spark SQL, evaluated after ``reject`` (docs/configure.md#order-of-evaluation); messages for which it is
            false are filtered and counted, those for which it is null are counted apart; one on which it raises is a
            dead letter.
        allowed_topics: Names, or globs with ``*`` and ``?``, of what a topic with fields may become; reserved names
            never (docs/security.md#names-that-a-device-chooses). ``create_topics`` creates the listed names. A message
            with another name is a dead letter, and so is one for a topic behind a ``*`` that does not exist.
        properties: Whether MQTT properties become headers of the record: ``all`` or ``none``.
        key_required: Whether a message that gives no key is a dead letter.
        fields: Names for templates and SQL, each with Spark SQL over the source's columns, the wildcards and the fields
            before it: ``{ site = "upper(machine)" }``, then ``key = "{site}"``. Null where the SQL raises.
        reject: Spark SQL that gives the reason why a message is rejected, null for none; a rejected message is a dead
            letter.
        header_map: Spark SQL of a ``MAP<STRING, STRING>``: headers whose names are data, after the others. A null value
            is omitted, and so are names that begin with ``mqtt.`` or ``towline.``; no headers where the SQL raises.
        dedupe: Deduplication by a key of the route; ``within`` is the same for the whole line.
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
    properties: Literal["all", "none"] = "all"
    key_required: bool = False
    fields: dict[str, str] = Field(default_factory=dict)
    reject: str | None = None
    header_map: str | None = None
    dedupe: Dedupe | None = None

    def template_texts(self) -> dict[KeyPath, str]:
        """Return the templates of the route by their keys."""
        texts: dict[KeyPath, str | None] = {("headers", name): text for name, text in self.headers.items()}
        texts |= {(key,): getattr(self, key) for key in ("topic", "key", "value", "timestamp")}
        return {key: text for key, text in texts.items() if text is not None}

    def compile(
        self, guarantee: Guarantee, dedupe: Dedupe | None = None, dead_letter_topics: tuple[str, ...] = ()
    ) -> Route:
        """Compile the validated route, with the default QoS of the line's guarantee (design section 4).

        A route without ``dedupe`` has the line's; ``dead_letter_topics`` are those of all lines.
        """
        pattern, dedupe, rules = (Pattern.parse(self.from_), self.dedupe or dedupe, policy(self.promise or guarantee))
        qos = rules.qos if self.qos is None else self.qos
        route_values: dict[str, Any] = {
            f"{key[0]}": Template.parse(text) for key, text in self.template_texts().items() if len(key) == 1
        }
        route_values |= {key: getattr(self, key) for key in _COPIED_KEYS}
        return Route(
            pattern=pattern,
            **route_values,
            headers=tuple((name, Template.parse(text)) for name, text in self.headers.items()),
            properties=self.properties == "all",
            fields=tuple(self.fields.items()),
            dedupe=None if dedupe is None else Template.parse(dedupe.key) if dedupe.is_template else dedupe.key,
            key_tells=qos < rules.qos,
            dead_letter_topics=dead_letter_topics,
            qos=qos,
            repeatable=dedupe is not None or (self.promise or guarantee) is Guarantee.AT_LEAST_ONCE,
        )


# -- lines ----------------------------------------------------------------------------------------------------------


def _check_gateways(value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return parse_gateways(json.dumps(value))
    except ValueError as error:
        remedy = 'write each as "grpc+tls://HOST:PORT" or as the state directory of a gateway of this machine'
        raise ValueError(f"{error}; {remedy}") from None


class LineTable(SettingsModel):
    """A line in either direction; ``profile``, ``listen`` and ``mqtt`` become settings of its gateway.

    Attributes:
        name: Part of the client id, the sink id, and the name of its state directory; unique in the file.
        guarantee: ``at_least_once``, ``at_most_once`` or ``exactly_once`` (docs/guarantees.md).
        max_messages_per_trigger: Most messages, or records, in one micro-batch. A task of a downlink sorts its part, on
            disk (``TMPDIR``) above 64 MiB.
        parallelism: Writers of a batch; with more than one an uplink's batch is split by key (else by MQTT topic; with
            ``exactly_once`` into as many transactions), a downlink's by MQTT topic. Each writer reads the whole batch.
        dead_letter_topic: Kafka topic of messages that can't be mapped, written or stored whole
            (docs/guarantees.md#truncated-messages); ``false`` stops the line at the first one instead. Default
            ``<bridge>.dead-letters`` where missing topics are created, else none.
        profile: A named set of routes and mappings: ``hono`` (also for commands), or ``hono-errors`` for rejected
            messages (docs/hono.md).
        listen: ``HOST:PORT`` of its gateway on a network; ``false`` for no listener. Default that of ``[gateway]``.
        mqtt: A table: the differences from ``[mqtt]``.
    """

    name: str = Field(pattern=NAME)
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    max_messages_per_trigger: Annotated[int, Field(ge=1)] = 50_000
    parallelism: Annotated[int, Field(ge=1, le=256)] = 1
    dead_letter_topic: str | Literal[False] | None = None
    profile: str | None = None
    listen: str | Literal[False] | None = None
    mqtt: MqttSettings = MqttSettings()


class MemberSection(SettingsModel):
    """``[[uplink.member]]`` as written.

    Attributes:
        name: Permanent name: its journal, its client id and its rows are named after it; with the line's name at most
            63 characters.
        filters: Topic filters of its share of the line's messages, with ``share = "filters"``.
    """

    name: Annotated[str, Field(pattern=NAME)]
    filters: tuple[str, ...] = ()


class UplinkTable(LineTable):
    """A line from MQTT to Kafka.

    Attributes:
        max_bytes_per_trigger: Most bytes in one micro-batch, as a number or as ``"64 MiB"``, in the size of journal
            rows; both limits hold, and one message is always allowed. Above the default Spark measures the rows one by
            one on their way to the sink, which is slower.
        max_trigger_delay_ms: Longest delay between two batches while messages wait, in milliseconds, at most 30000; the
            more wait, the shorter it is (docs/options.md#when-a-batch-begins). 0 for the lowest latency. Default 1000,
            and 0 where a broker or publisher waits for Kafka, with ``ack_after = "kafka"`` or receipts.
        dedupe: ``{ key = "...", within = "10 minutes" }``: deduplication of repeats on routes without a ``dedupe`` of
            their own (docs/guarantees.md#repeats).
        gateways: State directories and addresses of gateways that run elsewhere, which the line reads instead of
            starting one; ``[gateway]`` has the credentials, and ``[mqtt]`` is not needed if no line has a gateway
            of its own (docs/scaling.md#in-a-bridge).
        removed_gateways: Names of gateways that are removed from the line, with any messages that wait there.
        route: The first route that matches takes the message.
        ack_after: When the broker gets its acknowledgement, as far as the guarantee leaves it open: ``journal``;
            ``kafka`` with ``at_least_once`` (docs/operate.md#when-a-machine-may-be-lost); ``received`` with
            ``at_most_once``.
        receipts: A table with ``key_file``: publishers that ask learn when a message is in Kafka, and their repeats are
            dropped (docs/publishers.md#receipt-keys).
        journal: A table: the limit of its disk usage.
        share: With members: how they share the line's messages, ``filters`` or ``subscription``
            (docs/scaling.md#members).
        member: Gateways that share the line's messages.
    """

    max_messages_per_trigger: Annotated[int, Field(ge=1)] = 200_000
    max_bytes_per_trigger: Annotated[int, Field(ge=1)] = DEFAULT_BATCH_BYTES
    max_trigger_delay_ms: Annotated[int, Field(ge=0, le=LONGEST_DELAY_MS)] | None = None
    dedupe: Dedupe | None = None
    gateways: Annotated[tuple[str, ...], AfterValidator(_check_gateways)] = ()
    removed_gateways: tuple[str, ...] = ()
    route: tuple[RouteSection, ...] = Field(description="Add [[uplink.route]] with from and topic.")
    ack_after: AckAfter | None = None
    receipts: ReceiptSettings | None = None
    journal: Limits = Limits()
    share: ShareMethod | None = None
    member: tuple[MemberSection, ...] = ()

    @property
    def share_way(self) -> ShareMethod | None:
        """How the members share the line's messages; None without members, or if it is not configured."""
        share_way = self.share or (ShareMethod.FILTERS if any(member.filters for member in self.member) else None)
        return share_way if self.member else None


# -- a downlink -----------------------------------------------------------------------------------------------------


#: Topics that a pattern never matches [Kafka: Topic.INTERNAL_TOPICS].
_INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class Sql(SettingsModel):
    """Value as a Spark SQL expression.

    Attributes:
        sql: An expression over ``key, value, topic, partition, offset, timestamp, headers``.
    """

    sql: str


TemplateOrSql: TypeAlias = str | Sql


class FailureNotice(SettingsModel):
    """Additional Kafka record for each record that MQTT can't carry, beside its dead letter.

    Its SQL may name ``fault``, the reason, beside the columns of Spark's Kafka source.

    Attributes:
        topic: Kafka topic of the notice; no notice where it is null.
        key: Default no key.
        payload: Default an empty one.
        headers: In order; one whose value is null is omitted.
        copy_headers: Names of the record's headers to copy unchanged; ``name*`` for all with a prefix.
        where: Spark SQL; no notice for records for which it is not true.
        allowed_topics: Topics that ``create_topics`` creates with the others.
    """

    topic: TemplateOrSql
    key: TemplateOrSql | None = None
    payload: TemplateOrSql | None = None
    headers: dict[str, TemplateOrSql] = Field(default_factory=dict)
    copy_headers: tuple[str, ...] = ()
    where: str | None = None
    allowed_topics: tuple[str, ...] = ()

    def expressions(self) -> dict[str, TemplateOrSql | None]:
        """Return the expressions of the notice by column; header names in hexadecimal, with a prefix."""
        headers = {f"header_{name.encode().hex()}": text for name, text in self.headers.items()}
        where = None if self.where is None else Sql(sql=self.where)
        return {"topic": self.topic, "key": self.key, "payload": self.payload, "where": where, **headers}


class KafkaPattern(SettingsModel):
    """Kafka topics as a regular expression, as in Spark's ``subscribePattern`` (java.util.regex)."""

    pattern: str = Field(min_length=1)


def sql_texts(section: SettingsModel) -> Iterator[tuple[KeyPath, str]]:
    """Yield the Spark SQL texts of a section with their keys."""
    for name, value in section:
        if name in ("where", "reject", "sql", "header_map") and value is not None:
            yield (name,), value
        elif name == "fields":
            yield from (((name, field), text) for field, text in value.items())
        elif isinstance(value, Dedupe):
            yield from [] if value.is_template else [((name, "key"), value.key)]
        else:
            values = {(name, key): item for key, item in value.items()} if isinstance(value, dict) else {(name,): value}
            tables = [(path, table) for path, table in values.items() if isinstance(table, SettingsModel)]
            yield from (((*path, *key), text) for path, table in tables for key, text in sql_texts(table))


class DownlinkTable(LineTable):
    """A line from Kafka to MQTT.

    Attributes:
        from_: A Kafka topic, a list of them, or ``{ pattern = "REGEX" }``.
        starting_offsets: Start of the line before it has a checkpoint: ``earliest``, ``latest``, or a table
            ``{ TOPIC = { "0" = 12 } }``.
        on_data_loss: Reaction to records that Kafka deleted before they were read: ``stop`` the line with an error, or
            ``go_on`` with the remaining ones.
        topic: MQTT topic: a template or ``{ sql = "..." }``, as all that follows
            (docs/kafka.md#downlink-kafka-to-mqtt).
        qos: QoS of every PUBLISH; default by the guarantee.
        retain: RETAIN flag; default the header ``mqtt.retain``.
        expiry: Seconds the message lives from its arrival in the outbox on; default the header ``mqtt.message-expiry``.
        content_type: Content type; default the header ``mqtt.content-type``.
        response_topic: Topic for an answer; default the header ``mqtt.response-topic``.
        correlation_data: Id that an answer repeats; default the header ``mqtt.correlation-data``.
        payload: Payload; default the record's value.
        properties: Headers that are sent: ``all`` (MQTT's own as properties, the others as user properties), ``mqtt``
            (only MQTT's own), ``none``.
        fields: Names for templates and SQL beside those of a record, with the Spark SQL of each, in order; it may name
            the columns of Spark's Kafka source and the fields before it.
        where: Spark SQL; records for which it is not true are filtered and counted.
        reject: Spark SQL that gives the reason why a record is rejected, null for none; a rejected record is a dead
            letter.
        failure_notice: A table: one more Kafka record for each dead letter: ``topic``, ``key``, ``payload``,
            ``headers``, whose SQL may name ``fault`` (the reason); ``copy_headers`` (``"name*"`` for a prefix),
            ``where``, ``allowed_topics`` (created by ``create_topics``).
        confirm: When a batch counts as written: on disk in the outbox, or at the broker.
        control_characters: Reaction to a record with control characters or non-characters in a topic or property, at
            which a broker may end the connection [MQTT 5 section 1.5.4]: ``send`` it, or make it a ``dead_letter``
            (docs/kafka.md#dead-letters-of-a-downlink). Default a dead letter where the line has such a topic.
        trigger_interval_s: Seconds between batches.
        outbox: Limits of its disk usage and of the age of a message.
    """

    from_: str | tuple[str, ...] | KafkaPattern = Field(alias="from")
    starting_offsets: Literal["earliest", "latest"] | dict[str, dict[str, int]] = "earliest"
    on_data_loss: Literal["stop", "go_on"] = "stop"
    topic: TemplateOrSql = "{header.mqtt.topic}"
    qos: Annotated[int, Field(ge=0, le=2)] | None = None
    retain: bool | Sql | None = None
    expiry: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] | str | Sql | None = None
    content_type: TemplateOrSql | None = None
    response_topic: TemplateOrSql | None = None
    correlation_data: TemplateOrSql | None = None
    payload: TemplateOrSql | None = None
    properties: Literal["all", "mqtt", "none"] = "all"
    fields: dict[str, str] = Field(default_factory=dict)
    where: str | None = None
    reject: str | None = None
    failure_notice: FailureNotice | None = None
    confirm: Literal["outbox", "broker"] = "outbox"
    control_characters: Literal["send", "dead_letter"] | None = None
    trigger_interval_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    outbox: OutboxLimits = OutboxLimits()

    @field_validator("from_")
    @classmethod
    def _check_topics(cls, value: str | tuple[str, ...] | KafkaPattern) -> str | tuple[str, ...] | KafkaPattern:
        if isinstance(value, KafkaPattern):
            try:
                re.compile(value.pattern)  # Java's syntax is similar; Spark reports the rest
            except re.error as error:
                raise ValueError(f"pattern is no regular expression ({error}); correct it") from None
            return value
        names = (value,) if isinstance(value, str) else value
        problem = next((name_problem for name in names if (name_problem := kafka_name_problem(name))), None)
        if problem or not names:
            raise ValueError(f"{problem or 'from names no topic'}; name one, several in a list, or {{ pattern = ... }}")
        return value

    def message_table_config(self) -> dict[str, Any]:
        """Return the config of a `towline.bridge.messages.MessageTable`; SQL is passed without its text [I12]."""
        notice = self.failure_notice
        expressions = {"values": self.expressions(), "notice": dict[str, Any](notice.expressions() if notice else {})}
        for fields in expressions.values():
            fields |= {name: {} for name, value in fields.items() if isinstance(value, Sql)}
        return {**expressions, "properties": self.properties, "copied": notice.copy_headers if notice else ()}

    def expressions(self) -> dict[str, Any]:
        """Return the expression of each message field: a template, SQL or a constant; None for none."""
        return {name: getattr(self, name) for name in MESSAGE_FIELDS}

    def template_texts(self) -> dict[KeyPath, str]:
        """Return the templates of the messages and of their failure notices, by their keys."""
        expressions: dict[KeyPath, Any] = {(name,): value for name, value in self.expressions().items()}
        if notice := self.failure_notice:
            expressions |= {("failure_notice", key): getattr(notice, key) for key in ("topic", "key", "payload")}
            expressions |= {("failure_notice", "headers", name): text for name, text in notice.headers.items()}
        return {key: text for key, text in expressions.items() if isinstance(text, str)}

    @property
    def templates(self) -> tuple[Template, ...]:
        """Parsed templates of the messages and of their failure notices."""
        return tuple(map(Template.parse, self.template_texts().values()))

    @property
    def topics(self) -> tuple[str, ...]:
        """Kafka topics by name; none for a pattern."""
        if isinstance(self.from_, KafkaPattern):
            return ()
        return (self.from_,) if isinstance(self.from_, str) else self.from_

    def reads(self, topic: str) -> bool:
        """Return whether the line reads a Kafka topic; a pattern is searched in the name, as in Spark."""
        if isinstance(self.from_, KafkaPattern):
            return topic not in _INTERNAL_TOPICS and re.search(self.from_.pattern, topic) is not None
        return topic in self.topics


# -- the file --------------------------------------------------------------------------------------------------------


class BridgeSection(SettingsModel):
    """Keys of a bridge, without its lines.

    Attributes:
        name: Name of the bridge.
        state_dir: State directory; each line has a directory of its name inside.
        leave_waiting: Removed lines that may leave messages waiting in state_dir; retire them instead.
        kafka: Connection to the Kafka cluster.
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


class BridgeTable(BridgeSection):
    """A bridge file of Towline.

    Attributes:
        mqtt: Connection to the MQTT broker.
        hono: What Hono's device registry would know, and where devices publish.
        uplink: Lines from MQTT to Kafka.
        downlink: Lines from Kafka to MQTT.
    """

    mqtt: MqttSettings = MqttSettings()
    hono: HonoSection = HonoSection()
    uplink: tuple[UplinkTable, ...] = ()
    downlink: tuple[DownlinkTable, ...] = ()
