"""Kafka records as rows of the ``mqtt`` sink, in Spark SQL: `towline.bridge.uplink.sql` the other way round.

Every text is taken as UTF-8 or not at all: a key or header with other bytes is missing where a template names it, and
what would be lost by it makes the record a dead letter. Nothing here raises on a record; what a user's SQL raises on is
a dead letter too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from towline.bridge.config.downlink import FIELDS, OURS, DownlinkSection, FailureNotice, Spoken, Sql
from towline.bridge.lines.sql import (
    HEADER_TYPE,
    NO_HEADERS,
    DeadLetterTarget,
    condition,
    header,
    literal,
    observed,
    refusal,
    template,
    tried,
)
from towline.bridge.patterns import Template
from towline.errors import ConfigError
from towline.kafka.deadletters import PREFIX, Reason
from towline.kafka.properties import TRACE_CONTEXT, USER_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

__all__ = ["COLUMNS", "COUNTS", "DEAD_LETTER", "KEPT", "NOTICE", "PLACE", "apply", "columns", "packet_size"]

#: Columns of Spark's Kafka source; a transform has to keep them.
COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
#: The column with what goes to the dead-letter topic, null for a row that goes to MQTT.
DEAD_LETTER: Final = "__letter"
#: The column with what Kafka is told of a dead letter; of the same type, and null without one.
NOTICE: Final = "__notice"
#: The column with the place of a record in Kafka.
PLACE: Final = "__place"
_WHERE, _REJECT, _FAULT = "__where", "__reject", "__fault"
#: Longest text or binary property, and longest topic [MQTT 5 section 1.5.4].
_LONGEST: Final = 65535
#: Longest Message Expiry Interval, in seconds [MQTT 5 section 3.3.2.3.3].
_LONGEST_EXPIRY: Final = 0xFFFFFFFF
#: Characters that a string should not have, and at which a receiver may end the connection [MQTT 5 section 1.5.4].
_CONTROLS: Final = (
    r"[\x{1}-\x{1F}\x{7F}-\x{9F}\x{FDD0}-\x{FDEF}"
    + "".join(rf"\x{{{plane:X}FFFE}}\x{{{plane:X}FFFF}}" for plane in range(17))
    + "]"
)
#: Columns of one text.
_TEXTS: Final = ("topic", "response_topic", "content_type")
_CONTROLS_WORDS: Final = (
    "a topic or property has a control character, at which a broker may end the connection; "
    'control_characters = "send" would send it'
)

#: Counted in every batch: of all records, and after the transform.
COUNTS: Final = {"rows": "count(1)"}
KEPT: Final = {
    "kept": "count(1)",
    "filtered": f"count_if({_FAULT} IS NULL AND NOT {_WHERE})",
    "dead_lettered": f"count_if({_FAULT} IS NOT NULL)",
}


def text(column: str) -> str:
    """Bytes as text, null where they are no UTF-8."""
    return f"try_validate_utf8(CAST({column} AS STRING))"


def _first(name: str) -> str:
    """The first header of a name, null where there is none."""
    return f"get(filter(headers, h -> h.key = {literal(name)}), 0)"


def _field(name: str) -> str:
    if name in FIELDS:
        return f"CAST({FIELDS[name]} AS STRING)"
    if name in ("key", "value"):
        return text(name)
    kind, _, rest = name.partition(".")
    if not rest:
        return f"CAST({name} AS STRING)"  # a field of the line
    if kind == "header":
        return text(f"{_first(rest)}.value")
    return f"get_json_object({text('value')}, {literal('$' + ('' if rest.startswith('[') else '.') + rest)})"


def _spoken(value: Spoken, kind: str = "STRING") -> str:
    """A value as it is said, of a type."""
    inner = f"(\n{value.sql}\n)" if isinstance(value, Sql) else template(Template.read(value, lambda _: ""), _field)
    return f"CAST({inner} AS {kind})"


def _users(properties: str) -> str:
    """User properties: those the way up has written, and with ``all`` every other header; a null value is empty.

    Trace context comes in headers of its own names, whoever wrote them.
    """
    if properties == "none":
        return "CAST(NULL AS array<struct<key: string, value: string>>)"
    ours, trace = (", ".join(map(literal, names)) for names in (OURS, TRACE_CONTEXT))
    others = (
        f" OR NOT (h.key IN ({ours}) OR startswith(h.key, 'towline.'))"
        if properties == "all"
        else f" OR h.key IN ({trace})"
    )
    user = literal(USER_PREFIX)
    name = f"CASE WHEN startswith(h.key, {user}) THEN substr(h.key, {len(USER_PREFIX) + 1}) ELSE h.key END"
    value = f"CASE WHEN h.value IS NULL THEN '' ELSE {text('h.value')} END"
    chosen = f"filter(headers, h -> startswith(h.key, {user}){others})"
    pairs = f"transform({chosen}, h -> named_struct('key', {name}, 'value', {value}))"
    return f"CASE WHEN coalesce(size(headers), 0) > 0 THEN {pairs} END"


def _from_header(section: DownlinkSection, name: str) -> str:
    return "CAST(NULL AS BINARY)" if section.properties == "none" else f"{_first(name)}.value"


def _retain(section: DownlinkSection) -> str:
    if isinstance(section.retain, bool):
        return str(section.retain).lower()
    if section.retain is not None:
        return f"coalesce({_spoken(section.retain, 'BOOLEAN')}, false)"
    return f"coalesce({text(_from_header(section, 'mqtt.retain'))} = 'true', false)"


def _expiry(section: DownlinkSection) -> str:
    expiry = section.expiry
    if isinstance(expiry, int):
        return f"{expiry}L"
    if expiry is not None:
        return _spoken(expiry, "BIGINT")
    seconds = f"CAST({text(_from_header(section, 'mqtt.message-expiry'))} AS BIGINT)"
    most = f"{_LONGEST_EXPIRY}L"
    return f"CASE WHEN {seconds} > {most} THEN {most} WHEN {seconds} < 0 THEN 0L ELSE {seconds} END"


def columns(section: DownlinkSection) -> dict[str, str]:
    """The columns of the sink, in order; QoS only where it is not one for the line."""
    none = section.properties == "none"
    form = "CAST(NULL AS BOOLEAN)" if none else f"{text(_first('mqtt.payload-format') + '.value')} = '1'"

    def string(value: Spoken | None, name: str) -> str:
        return text(_from_header(section, name)) if value is None else _spoken(value)

    def binary(value: Spoken | None, otherwise: str) -> str:
        return otherwise if value is None else _spoken(value, "BINARY")

    return {
        "topic": _spoken(section.topic),
        "payload": binary(section.payload, "value"),
        "retain": _retain(section),
        "content_type": string(section.content_type, "mqtt.content-type"),
        "payload_is_utf8": form if section.payload is None else "CAST(NULL AS BOOLEAN)",
        "response_topic": string(section.response_topic, "mqtt.response-topic"),
        "correlation_data": binary(section.correlation_data, _from_header(section, "mqtt.correlation-data")),
        "user_properties": _users(section.properties),
        "message_expiry_seconds": _expiry(section),
    }


def _own(name: str) -> str:
    """A column of ours: what a record has may have the same name."""
    return f"__{name}"


def packet_size(qos: int) -> str:
    """Bytes of the PUBLISH, a few too many: room for the longest length and a topic alias [MQTT 5 section 3.3]."""
    pairs = (
        "coalesce(aggregate(__user_properties, 0, (n, p) -> n + 5 + octet_length(p.key) + octet_length(p.value)), 0)"
    )
    three = " + ".join(
        f"coalesce(3 + octet_length({_own(name)}), 0)"
        for name in ("content_type", "response_topic", "correlation_data")
    )
    flags = "CASE WHEN __message_expiry_seconds IS NULL THEN 0 ELSE 5 END + 2 + 3"
    properties = f"({pairs} + {three} + {flags})"
    rest = f"2 + octet_length(__topic) + {2 if qos else 0} + coalesce(octet_length(__payload), 0)"
    return f"({properties} + {rest} + {_varint(properties)} + 5)"


def _varint(number: str) -> str:
    """Bytes of a variable byte integer [MQTT 5 section 1.5.5]."""
    return f"CASE WHEN {number} < 128 THEN 1 WHEN {number} < 16384 THEN 2 WHEN {number} < 2097152 THEN 3 ELSE 4 END"


def _bad_text(column: str) -> str:
    """Whether MQTT can't carry a text [MQTT-1.5.4-2]."""
    return (
        f"(octet_length({column}) > {_LONGEST} OR contains({column}, {literal(chr(0))}) OR NOT is_valid_utf8({column}))"
    )


def _illegal_topic(column: str) -> str:
    """Whether no message can be published there [MQTT-3.3.2-2, MQTT-4.7.3-1]."""
    return f"({column} = '' OR {_bad_text(column)} OR contains({column}, '+') OR contains({column}, '#'))"


def _controls() -> str:
    """Whether a topic or property has control characters or non-characters."""
    pattern = literal(_CONTROLS)
    one = " OR ".join(f"coalesce(__{name} RLIKE {pattern}, false)" for name in _TEXTS)
    return f"{one} OR coalesce(exists(__user_properties, p -> p.key RLIKE {pattern} OR p.value RLIKE {pattern}), false)"


def _not_text(section: DownlinkSection) -> str:
    """Whether a header that has to be text is none, so that it would be lost."""
    if section.properties == "none":
        return "false"
    spoken = {"mqtt.content-type": section.content_type, "mqtt.response-topic": section.response_topic}
    lost = [
        f"({_first(name)}.value IS NOT NULL AND {_own(name.removeprefix('mqtt.').replace('-', '_'))} IS NULL)"
        for name, value in spoken.items()
        if value is None
    ]
    return " OR ".join(["coalesce(exists(__user_properties, p -> p.value IS NULL), false)", *lost])


def _faults(section: DownlinkSection, qos: int, limit: int) -> list[tuple[str, Reason, str]]:
    """Why a record can't go: condition, reason and words in SQL, the first that holds counts."""
    plain = [(test, reason, literal(words)) for test, reason, words in _impossible(section, qos, limit)]
    if section.reject is None:
        return plain
    unsaid = (f"{_REJECT} IS NULL", Reason.UNMAPPED, literal("the SQL of reject raised an error on this record"))
    return [plain[0], unsaid, (f"{_REJECT}.why IS NOT NULL", Reason.REJECTED, f"{_REJECT}.why"), *plain[1:]]


def _impossible(section: DownlinkSection, qos: int, limit: int) -> list[tuple[str, Reason, str]]:
    """What MQTT can't carry, and first what the line could not judge."""
    users = (
        f"coalesce(exists(__user_properties, p -> {_bad_text('p.key')} OR {_bad_text('p.value')}), false) "
        f"OR {_bad_text('__content_type')} OR octet_length(__correlation_data) > {_LONGEST}"
    )
    faults = [
        (f"{_WHERE} IS NULL", Reason.UNMAPPED, "the condition where raised an error on this record"),
        (
            "__topic IS NULL",
            Reason.TOPIC_ABSENT,
            "the record lacks what its MQTT topic is made of, or that is no UTF-8 text",
        ),
        (
            _illegal_topic("__topic"),
            Reason.TOPIC_ILLEGAL,
            "MQTT takes no such topic: empty, no UTF-8, longer than 65,535 bytes, with +, # or U+0000",
        ),
        (
            _not_text(section),
            Reason.UNDELIVERABLE,
            "a header is no UTF-8 text, and MQTT has no other; properties may leave it out",
        ),
        (
            _illegal_topic("__response_topic"),
            Reason.UNDELIVERABLE,
            "MQTT takes no such response topic: empty, no UTF-8, longer than 65,535 bytes, with +, # or U+0000",
        ),
        (users, Reason.UNDELIVERABLE, "a property is longer than 65,535 bytes, no UTF-8 text, or has U+0000"),
    ]
    if section.control_characters == "dead_letter":
        faults.append((_controls(), Reason.UNDELIVERABLE, _CONTROLS_WORDS))
    if limit:
        words = f"the broker takes packets of at most {limit} bytes"
        faults.append((f"{packet_size(qos)} > {limit}", Reason.TOO_LARGE, words))
    return faults


def _fault(section: DownlinkSection, qos: int, limit: int) -> str:
    """Number of the first fault, null for none and for what ``where`` leaves out."""
    cases = " ".join(f"WHEN {test} THEN {i}" for i, (test, _, _) in enumerate(_faults(section, qos, limit)))
    return f"CASE WHEN NOT coalesce({_WHERE}, true) THEN NULL {cases} END"


def _dead_letter(section: DownlinkSection, dead_letters: DeadLetterTarget, qos: int, limit: int) -> str:
    """The record of a dead letter (`towline.kafka.deadletters`): ours, then its own headers as they were."""
    faults = _faults(section, qos, limit)
    ours = {
        "reason": f"CASE {_FAULT} {' '.join(f'WHEN {i} THEN {literal(r)}' for i, (_, r, _) in enumerate(faults))} END",
        "detail": _fault_words(section, qos, limit),
        "topic": "topic",
        "partition": "CAST(partition AS STRING)",
        "timestamp": "CAST(unix_millis(timestamp) AS STRING)",
        "source": literal(dead_letters.source),
        "headers": "CAST(greatest(coalesce(size(headers), 0), 0) AS STRING)",
    }
    first = ", ".join(header(literal(PREFIX + name), value) for name, value in ours.items())
    joined = f"CAST(concat(array({first}), coalesce(headers, {NO_HEADERS})) AS {HEADER_TYPE})"
    return f"CASE WHEN {_FAULT} IS NOT NULL THEN {_record(literal(dead_letters.topic), 'key', 'value', joined)} END"


def _record(topic: str, key: str, value: str, headers: str) -> str:
    """A record for Kafka."""
    return f"named_struct('topic', {topic}, 'key', {key}, 'value', {value}, 'headers', {headers})"


def _fault_words(section: DownlinkSection, qos: int, limit: int) -> str:
    """Why a record can't go, for a person."""
    cases = (f"WHEN {i} THEN {words}" for i, (_, _, words) in enumerate(_faults(section, qos, limit)))
    return f"CASE {_FAULT} {' '.join(cases)} END"


def _notice(notice: FailureNotice) -> str:
    """What Kafka is told of a dead letter; null where nothing is."""
    topic, key = _spoken(notice.topic), "NULL" if notice.key is None else _spoken(notice.key)
    value = "X''" if notice.payload is None else _spoken(notice.payload)
    own = (
        f"CASE WHEN {text} IS NOT NULL THEN {header(literal(name), text)} END"
        for name, text in ((name, _spoken(said)) for name, said in notice.headers.items())
    )
    copied = [
        f"startswith(h.key, {literal(name[:-1])})" if name.endswith("*") else f"h.key = {literal(name)}"
        for name in notice.copy_headers
    ]
    more = f"coalesce(filter(headers, h -> {' OR '.join(copied)}), {NO_HEADERS})" if copied else NO_HEADERS
    headers = f"CAST(concat(array_compact(array({', '.join(own)})), {more}) AS {HEADER_TYPE})"
    record = _record(topic, f"CAST({key} AS BINARY)", f"CAST({value} AS BINARY)", headers)
    return f"CASE WHEN fault IS NOT NULL AND {condition(notice.where)} AND {topic} IS NOT NULL THEN {record} END"


def _raised(section: DownlinkSection, qos: int, limit: int, name: str) -> str:
    """The topic, or the end of a line that has nowhere to keep a record."""
    words = _fault_words(section, qos, limit)
    place = "topic, '/', partition, ' offset ', offset"
    do = ". The line stops there rather than lose it. Give it a dead_letter_topic.   [TL-B05]"
    sentence = f"concat({literal(f'line {name}: record ')}, {place}, ': ', {words}, {literal(do)})"
    return f"CASE WHEN {_FAULT} IS NULL THEN __topic ELSE raise_error({sentence}) END"


@dataclass(frozen=True, slots=True)
class DownlinkStatements:
    """How a line's records go down.

    Attributes:
        section: As written.
        name: Of the line.
        qos: Of every PUBLISH.
        limit: Largest packet the broker takes, in bytes; 0 for no limit.
        dead_letters: Where records go that MQTT can't carry; None stops the line at the first.
        parallelism: Parts of the result; more than one are split by MQTT topic.
    """

    section: DownlinkSection
    name: str
    qos: int
    limit: int = 0
    dead_letters: DeadLetterTarget | None = None
    parallelism: int = 1


def apply(
    frame: DataFrame,
    way: DownlinkStatements,
    counter: str | Observation,
    kept: str | Observation | None = None,
    transform: Callable[[DataFrame], DataFrame] | None = None,
) -> DataFrame:
    """Turn records of Spark's Kafka source into rows of the sink.

    Each row brings its place in Kafka along, so that the sink can sort a part: Spark promises no order between Kafka's
    partitions, and a streaming query can't sort.

    Args:
        frame: Records, with headers.
        way: How.
        counter: Takes `COUNTS`, of all records.
        kept: Takes `KEPT`; None to leave them uncounted.
        transform: Of the user, before everything else.

    Raises:
        ConfigError: TL-C76 when the transform does not keep the columns.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

    section = way.section
    frame = observed(frame.select(*COLUMNS), counter, COUNTS)
    if transform is not None:
        frame = _transformed(frame, transform, way)
    for name, said in section.fields.items():
        frame = frame.withColumn(name, tried(F.expr(said)))
    frame = frame.withColumn(_WHERE, tried(F.expr(condition(section.where))))
    if section.reject is not None:
        frame = frame.withColumn(_REJECT, tried(F.expr(refusal(section.reject))))
    values = columns(section)
    frame = frame.withColumns({_own(name): tried(F.expr(value)) for name, value in values.items()})
    frame = frame.withColumn(_FAULT, F.expr(_fault(section, way.qos, way.limit)))
    if kept is not None:
        frame = observed(frame, kept, KEPT)
    frame = frame.where(f"{_FAULT} IS NOT NULL OR {_WHERE}")
    frame = frame.coalesce(1) if way.parallelism == 1 else frame.repartition(way.parallelism, "__topic")
    final = {name: _own(name) for name in values}
    final[PLACE] = "struct(topic, partition, offset)"
    if way.dead_letters is None:
        final["topic"] = _raised(section, way.qos, way.limit, way.name)
    else:
        final[DEAD_LETTER] = _dead_letter(section, way.dead_letters, way.qos, way.limit)
        if section.failure_notice is not None:
            frame = frame.withColumn("fault", F.expr(_fault_words(section, way.qos, way.limit)))
            frame = frame.withColumn(NOTICE, tried(F.expr(_notice(section.failure_notice))))
            final[NOTICE] = NOTICE
    return frame.select(*(F.expr(value).alias(name) for name, value in final.items()))


def _transformed(frame: DataFrame, transform: Callable[[DataFrame], DataFrame], way: DownlinkStatements) -> DataFrame:
    transformed = transform(frame)
    before, after = dict(frame.dtypes), dict(getattr(transformed, "dtypes", ()))
    wrong = [name for name in COLUMNS if after.get(name) != before[name]]
    if wrong:
        what = f'transform "{way.section.transform}" does not keep the column {wrong[0]} ({before[wrong[0]]})'
        raise ConfigError("TL-C76", f'line "{way.name}"', what, "Return a DataFrame with the columns it was given.")
    return transformed.select(*COLUMNS)
