"""What becomes of a Kafka record on the way down: ``[[downlink]]`` as written, its words and what they may name. Pure.

A value is said as a template (``command/{key}/req``) or as Spark SQL (``{ sql = "concat('a/', offset)" }``) over the
columns of Spark's Kafka source. What is not said comes from the record's headers where the way up has written them
(`towline.kafka.properties.HEADERS`), so that a message that went up and down is the same message again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from towline.bridge.config.section import NAME, Section
from towline.bridge.config.sqltext import check_sql, names_a_field
from towline.bridge.messages import COLUMNS, DOCUMENT, FIELDS, VALUES
from towline.bridge.patterns import Template, kafka_name_problem, payload_path
from towline.guarantee import Guarantee

#: Names no field may have: columns of Spark's Kafka source and of the sink.
_COLUMNS: Final = frozenset((*COLUMNS, "timestampType", "fault"))
#: What a pattern does not match [Kafka: Topic.INTERNAL_TOPICS].
_UNLISTED: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
_KNOWN: Final = "known are {key}, {value}, {value.JSON.PATH}, {header.NAME}, " + ", ".join(f"{{{n}}}" for n in FIELDS)


class Sql(Section):
    """A value said in Spark SQL.

    Attributes:
        sql: An expression over ``key, value, topic, partition, offset, timestamp, headers``.
    """

    sql: str = Field(min_length=1)

    @field_validator("sql")
    @classmethod
    def _something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("sql is empty; give an expression in Spark SQL")
        return value


Spoken: TypeAlias = str | Sql


class FailureNotice(Section):
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
        return {"topic": self.topic, "key": self.key, "payload": self.payload, **headers}


class KafkaPattern(Section):
    """Topics by a regular expression, as Spark's ``subscribePattern`` takes it (java.util.regex)."""

    pattern: str = Field(min_length=1)


def _column_of(name: str, fields: Collection[str]) -> str | None:
    """The column behind a field that a template may name; None for another name."""
    if name in ("key", "value") or name in fields:
        return name
    if name.startswith("header.") and name != "header.":
        return "headers"
    return DOCUMENT if payload_path(name, DOCUMENT) else FIELDS.get(name)


def _field_problem(name: str, fields: Collection[str]) -> str:
    return "" if _column_of(name, fields) else f"which a record does not have; {_KNOWN}"


def template_of(text: str, fields: Collection[str] = ()) -> Template:
    """Read a template over the fields of a record.

    Args:
        text: As written.
        fields: Names the line gives beside those that every record has.

    Raises:
        ValueError: As `Template.read`.
    """
    return Template.read(text, partial(_field_problem, fields=fields))


def _plain(said: dict[str, Any]) -> dict[str, Any]:
    return {name: {} if isinstance(value, Sql) else value for name, value in said.items()}


def _sql_of(section: Section | None) -> Iterator[tuple[str, str]]:
    """Keys, and what they say in SQL."""
    for name, value in section or ():
        tables = value if isinstance(value, dict) else {name: value}
        yield from ((key, said.sql) for key, said in tables.items() if isinstance(said, Sql))
        if name in ("where", "reject") and value is not None:
            yield name, value
        yield from value.items() if name == "fields" else ()


class DownlinkSection(Section):
    """``[[downlink]]`` without its tables ``mqtt`` and ``outbox``.

    Attributes:
        name: Unique in the file.
        guarantee: The promise.
        from_: A Kafka topic, a list of them, or ``{ pattern = "REGEX" }``.
        starting_offsets: Where the line begins before it has a checkpoint: ``earliest``, ``latest``, or a table
            ``{ TOPIC = { "0" = 12 } }``.
        isolation_level: Kafka's ``isolation.level``: records of a transaction when it is committed, or as they are
            written, whatever becomes of it.
        on_data_loss: What to do when Kafka has deleted records that were not read yet: ``stop`` the line and say so, or
            ``go_on`` with what is left.
        topic: MQTT topic; where none is said, that of the header ``mqtt.topic``.
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
        failure_notice: What Kafka is told of each dead letter, beside it.
        transform: ``package.module:function``, a deterministic function from DataFrame to DataFrame that keeps the
            columns.
        confirm: When a batch counts as written: on disk in the outbox, or at the broker.
        dead_letter_topic: Where records go that MQTT can't carry; False for nowhere.
        control_characters: What to do with a record that would bring control characters or non-characters into a
            topic or property, at which a broker may end the connection [MQTT 5 section 1.5.4]: ``send`` it, or make it
            a ``dead_letter``. Where it is not said: a dead letter where the line has such a topic.
        max_messages_per_trigger: Most records in one micro-batch.
        trigger_interval_s: Seconds between batches.
        parallelism: Writers of a batch; more than one split it by MQTT topic.
        listen: Where its gateway listens on a network; False for nowhere, None for what ``[gateway]`` says.
    """

    name: str = Field(pattern=NAME)
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
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
    transform: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    confirm: Literal["outbox", "broker"] = "outbox"
    dead_letter_topic: str | Literal[False] | None = None
    control_characters: Literal["send", "dead_letter"] | None = None
    max_messages_per_trigger: Annotated[int, Field(ge=1)] = 50_000
    trigger_interval_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    parallelism: Annotated[int, Field(ge=1, le=256)] = 1
    listen: str | Literal[False] | None = None

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

    @model_validator(mode="after")
    def _words(self) -> DownlinkSection:
        for text in self._texts():
            template_of(text, self.fields)
        for name in self.fields:
            if not names_a_field(name, _COLUMNS):
                raise ValueError(
                    f"\"{name}\" can't name a field; take small letters, digits and _, and no column's name"
                )
        for name, said in (*_sql_of(self), *_sql_of(self.failure_notice)):
            check_sql(name, said, partial(_column_of, fields=self.fields))
        return self

    def rendering(self) -> dict[str, Any]:
        """What `towline.bridge.messages.MessageTable` takes of it: SQL is a table without its text [I12]."""
        notice, told = self.failure_notice, dict[str, Any]()
        if notice is not None:
            told = {**notice.spoken(), "where": notice.where and Sql(sql=notice.where)}
        copied = () if notice is None else notice.copy_headers
        return {
            "values": _plain(self.spoken()),
            "properties": self.properties,
            "notice": _plain(told),
            "copied": copied,
        }

    def spoken(self) -> dict[str, Any]:
        """What is said of the messages: templates, SQL, constants; None for nothing."""
        return {name: getattr(self, name) for name in VALUES}

    @property
    def templates(self) -> tuple[Template, ...]:
        """Those of its messages and of their failure notices."""
        return tuple(template_of(text, self.fields) for text in self._texts())

    def _texts(self) -> Iterator[str]:
        """Its templates, as written."""
        told = self.failure_notice.spoken() if self.failure_notice else {}
        return (said for said in (*self.spoken().values(), *told.values()) if isinstance(said, str))

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
