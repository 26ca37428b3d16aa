"""Routes as Spark SQL over the columns of the ``mqtt`` source.

Plain expressions, no Python in the row path: the topic is split once, its levels are compared as array elements (a
regular expression a route would cost more and needs escaping of what devices may send), and `get` gives null beyond
the end where an index would raise under ANSI rules. `towline.bridge.config.routes` is the reference for what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from towline.bridge.config.routes import FIELDS, LEGAL_TOPIC, MAX_TOPIC_LENGTH, USER_PREFIX, Route, Template
from towline.bridge.lines.sql import (
    HEADER_TYPE,
    NO_HEADERS,
    NO_TEXT,
    DeadLetterTarget,
    analyse,
    concatenated,
    condition,
    header,
    literal,
    observed,
    refusal,
    template,
    tried,
)
from towline.kafka.columns import ORIGIN
from towline.kafka.deadletters import PREFIX, Reason
from towline.schema import EVENT_TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

    from towline.bridge.config.routes import Pattern

__all__ = [
    "COUNTS",
    "KEPT",
    "LEVELS",
    "Repeats",
    "apply",
    "expressions",
    "matches",
]

#: Names of the working columns; a source column never begins with two underscores.
LEVELS, ROUTE, WHERE, REJECT, KEEP, NAME, TOPIC, REASON = (
    "__levels",
    "__route",
    "__where",
    "__reject",
    "__keep",
    "__name",
    "__topic",
    "__reason",
)
#: Why a message is refused; the struct around it is null where finding that out raised an error.
REFUSAL = f"{REJECT}.why"
#: Columns of the result; all others are working columns, or a route's fields.
RECORD = frozenset(("topic", "key", "value", "headers", "timestamp", *ORIGIN))
#: The packet of a message that was not taken in whole, as it came; null where it was too large to be kept.
PACKET = "__packet"
#: Whether a row is the stub of such a message (`towline.mqtt.stubs`): no payload of MQTT is null. Devices can't make
#: one, and whoever writes a condition or a key is not asked about it.
STUB = "payload IS NULL"
#: What makes two messages the same: topic, key, and for those without a key the offset, which no other has. The topic,
#: because a device may write any key: on its own topics, which the broker guards, it can only drop its own [I13].
SAME = ("__scope", "__dedupe", "__unique")

#: The end of the text, for Java; ``$`` would also match before a line feed there.
END = r"\z"

#: Counted in every batch by `observe`, of all rows: name → SQL aggregate.
COUNTS = {
    "rows": "count(1)",
    "filtered": f"count_if({ROUTE} IS NOT NULL AND NOT {KEEP} AND {REASON} IS NULL)",
    "unrouted": f"count_if({ROUTE} IS NULL AND {REASON} IS NULL)",
}
#: The same of the rows that go on to Kafka, repeats dropped.
KEPT = {
    "kept": "count(1)",
    "fallback": f"count_if({TOPIC} IS NULL AND {REASON} IS NULL)",
    "dead_lettered": f"count_if({REASON} IS NOT NULL)",
}


@dataclass(frozen=True, slots=True)
class Repeats:
    """How repeats are dropped.

    Attributes:
        within: How long keys are remembered at least.
        strict: Whether a message without a key, which can't be recognised again, is a dead letter.
    """

    within: str
    strict: bool = False


def matches(pattern: Pattern) -> str:
    """Whether the row's topic matches [MQTT 5 section 4.7]."""
    tests = [f"size({LEVELS}) {'>=' if pattern.deep else '='} {len(pattern.levels)}"]
    tests += [f"{_level(i)} = {literal(text)}" for i, text in enumerate(pattern.levels) if text is not None]
    if pattern.wild_start:
        tests.append(f"NOT startswith(topic, {literal('$')})")
    return " AND ".join(tests)


def _level(position: int) -> str:
    return f"get({LEVELS}, {position})"


def _text(parsed: Template, route: Route) -> str:
    """The text of a template as a SQL string, null when a field is."""
    return template(parsed, lambda name: _field(name, route))


def _field(name: str, route: Route) -> str:
    if name in route.pattern.names:
        return _level(route.pattern.names[name])
    if name in route.said_fields:
        return f"CAST({name} AS STRING)"
    if name in FIELDS:
        return f"CAST({FIELDS[name]} AS STRING)"
    key = literal(name.removeprefix(USER_PREFIX))
    return f"get(filter(user_properties, p -> p.key = {key}), 0).value"


def _topic(route: Route) -> str:
    if route.topic.constant is not None:
        return NAME
    free = f" AND NOT {_reserved(route)}" if route.reserved else ""
    return f"CASE WHEN {_legal(NAME)}{_listed(route)}{free} THEN {NAME} END"


def _legal(name: str) -> str:
    """Whether Kafka takes the name [Kafka: Topic.validate]."""
    return f"length({name}) <= {MAX_TOPIC_LENGTH} AND {name} RLIKE {literal(LEGAL_TOPIC)} AND {name} NOT IN ('.', '..')"


def _reserved(route: Route) -> str:
    return f"{NAME} RLIKE {literal(f'^(?:{route.reserved})' + END)}"


def _listed(route: Route) -> str:
    return f" AND {NAME} RLIKE {literal(_globs(route.allowed_topics))}" if route.allowed_topics else ""


def _globs(globs: Sequence[str]) -> str:
    """One regular expression for names and globs; the names hold legal characters only."""
    patterns = [re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".") for glob in globs]
    return f"^(?:{'|'.join(patterns)})\\z"


def _switch(routes: Sequence[Route], arm: Callable[[Route], str], otherwise: str) -> str:
    """``CASE`` on the route; one expression when all arms are the same."""
    arms = [arm(route) for route in routes]
    if len(set(arms)) == 1:
        return arms[0]
    cases = " ".join(f"WHEN {i} THEN {text}" for i, text in enumerate(arms))
    return f"CASE {ROUTE} {cases} ELSE {otherwise} END"


def _some(column: str, name: str, value: str | None = None) -> str:
    """A header when the column has a value, else null."""
    return f"CASE WHEN {column} IS NOT NULL THEN {header(literal(name), value or f'CAST({column} AS STRING)')} END"


_ALWAYS = [header("'mqtt.topic'", "topic"), header("'mqtt.qos'", "CAST(qos AS STRING)")]
_RECEIVED = header("'mqtt.received-at'", "CAST(unix_micros(received_at) AS STRING)")
_RARE = (
    "coalesce(retain, false)",
    "content_type IS NOT NULL",
    "response_topic IS NOT NULL",
    "correlation_data IS NOT NULL",
    "message_expiry_seconds IS NOT NULL",
    "payload_is_utf8 IS NOT NULL",
    "coalesce(size(subscription_ids), 0) > 0",
    "coalesce(size(user_properties), 0) > 0",
)


def _property_headers() -> str:
    """All properties as headers, in the order of `towline.bridge.config.routes.HEADERS`.

    Most messages carry none of the optional ones; they take a branch without lambdas, which Spark would interpret.
    """
    optional = ", ".join(
        [
            f"CASE WHEN retain THEN {header(literal('mqtt.retain'), literal('true'))} END",
            _some("content_type", "mqtt.content-type"),
            _some("response_topic", "mqtt.response-topic"),
            _some("correlation_data", "mqtt.correlation-data", "correlation_data"),
            _some("message_expiry_seconds", "mqtt.message-expiry"),
            _some("payload_is_utf8", "mqtt.payload-format", "CAST(CAST(payload_is_utf8 AS INT) AS STRING)"),
        ]
    )
    identifiers = f"transform(subscription_ids, i -> {header(literal('mqtt.subscription-id'), 'CAST(i AS STRING)')})"
    users = f"transform(user_properties, p -> {header(f'concat({literal(USER_PREFIX)}, p.key)', 'p.value')})"
    always = f"array({', '.join(_ALWAYS)})"
    full = (
        f"concat({always}, array_compact(array({optional})), coalesce({identifiers}, {NO_HEADERS}), "
        f"array({_RECEIVED}), coalesce({users}, {NO_HEADERS}))"
    )
    return f"CASE WHEN {' OR '.join(_RARE)} THEN {full} ELSE array({', '.join([*_ALWAYS, _RECEIVED])}) END"


def _own_headers(route: Route) -> str:
    """The headers that the route names, as an array."""
    texts = [(literal(name), _text(text, route)) for name, text in route.headers]
    if not route.omit_missing:
        return f"array({', '.join(header(name, text) for name, text in texts)})"
    some = (f"CASE WHEN {text} IS NOT NULL THEN {header(name, text)} END" for name, text in texts)
    return f"array_compact(array({', '.join(some)}))"


def _headers(route: Route) -> str:
    parts = [_property_headers()] if route.properties else []
    parts += [_own_headers(route)] if route.headers else []
    if not parts:
        return f"CAST(NULL AS {HEADER_TYPE})"
    return f"CAST({concatenated(parts)} AS {HEADER_TYPE})"


def _key(route: Route) -> str:
    return "CAST(NULL AS BINARY)" if route.key is None else f"CAST({_text(route.key, route)} AS BINARY)"


def _fallback(route: Route) -> str:
    if route.fallback_topic is not None:
        return literal(route.fallback_topic)
    sentence = (
        f'route from "{route.pattern.text}": a message gives a Kafka topic that is not legal, not allowed or reserved'
        ". The line stops there rather than lose it. "
        "Give the line a dead_letter_topic, or the route a fallback_topic.   [TL-B02]"
    )
    return f"raise_error({literal(sentence)})"


def _not_whole() -> str:
    """Why a stub is one."""
    reason = "get(filter(user_properties, p -> p.key = 'towline-reason'), 0).value"
    return f"CASE WHEN {reason} = '{Reason.TOO_MANY_PROPERTIES}' THEN {reason} ELSE '{Reason.PACKET_TOO_LARGE}' END"


def _no_place(topic: str, *, refusing: bool) -> str:
    """The topic, or the end of a line that has nowhere to put a refused message, or a stub, which were a tombstone."""
    sentence = (
        "a message was not taken in whole, see towline-reason and max_packet_bytes"
        ". The line stops there rather than lose it. Give the line a dead_letter_topic.   [TL-B29]"
    )
    refused = (
        f"concat('reject: ', {REFUSAL}, '. The line stops there rather than "
        "lose it. Give the line a dead_letter_topic.   [TL-B33]')"
    )
    case = f"WHEN {REFUSAL} IS NOT NULL THEN raise_error({refused}) " if refusing else ""
    return f"CASE WHEN {STUB} THEN raise_error({literal(sentence)}) {case}ELSE {topic} END"


def _unmappable(route: Route, repeats: Repeats | None) -> str:
    """Why a message of this route can't go where it belongs, null if it can."""
    cases = [f"WHEN {WHERE} IS NULL THEN '{Reason.UNMAPPED}'"] if route.where is not None else []
    if route.reject is not None:
        cases += [
            f"WHEN {REJECT} IS NULL THEN '{Reason.UNMAPPED}'",
            f"WHEN {REFUSAL} IS NOT NULL THEN '{Reason.REJECTED}'",
        ]
    if route.topic.constant is None and route.fallback_topic is None:
        cases += [
            f"WHEN {NAME} IS NULL THEN '{Reason.TOPIC_ABSENT}'",
            *([f"WHEN {_reserved(route)} THEN '{Reason.TOPIC_RESERVED}'"] if route.reserved else []),
            f"WHEN {TOPIC} IS NULL AND {_legal(NAME)} THEN '{Reason.TOPIC_NOT_ALLOWED}'",
            f"WHEN {TOPIC} IS NULL THEN '{Reason.TOPIC_ILLEGAL}'",
        ]
    if route.key_required:
        cases.append(f"WHEN {_key(route)} IS NULL THEN '{Reason.KEY_ABSENT}'")
    if repeats is not None and repeats.strict and route.dedupe is not None and route.qos < 2:
        cases.append(f"WHEN {SAME[1]} IS NULL THEN '{Reason.KEY_ABSENT}'")
    if not cases:
        return NO_TEXT
    return f"CASE WHEN NOT coalesce({WHERE}, true) THEN NULL {' '.join(cases)} END"


#: What a person reads in ``towline.dlq.detail``.
_DETAILS = {
    Reason.UNMAPPED: "the SQL of where or reject raised an error on this message",
    Reason.UNROUTED: "no route takes this topic",
    Reason.TOPIC_ABSENT: "the message lacks what the name of the Kafka topic is made of",
    Reason.TOPIC_NOT_ALLOWED: "the name of the Kafka topic is not among allowed_topics",
    Reason.TOPIC_RESERVED: "no message may choose this Kafka topic: markers, dead letters, Kafka's own",
    Reason.TOPIC_ILLEGAL: "Kafka takes no such topic name",
    Reason.KEY_ABSENT: "the message lacks what its key or its dedupe key is made of",
    Reason.PACKET_TOO_LARGE: "larger than max_packet_bytes; headers mqtt.user.towline-* hold its size and digest",
    Reason.TOO_MANY_PROPERTIES: "more than 1,000 properties; the value is the whole MQTT packet",
}


def _dead_letter_headers(dead_letters: DeadLetterTarget, refusing: str) -> str:
    """The headers of a dead letter (`towline.kafka.deadletters`): ours, then every property and where it came from.

    All in one lambda: Spark interprets that, so the rare case does not swell the generated code of the usual one.
    """
    details = " ".join(f"WHEN '{reason}' THEN {literal(text)}" for reason, text in _DETAILS.items())
    ours = {
        "reason": REASON,
        "detail": f"CASE {REASON} {details} {refusing}END",
        "topic": NAME,
        "timestamp": "CAST(unix_millis(received_at) AS STRING)",
        "source": literal(dead_letters.source),
    }
    first = ", ".join(
        f"CASE WHEN {value} IS NOT NULL THEN {header(literal(PREFIX + name), value)} END"
        for name, value in ours.items()
    )
    place = ", ".join(
        header(literal(name), f"CAST({column} AS STRING)")
        for name, column in (("mqtt.gateway", "gateway"), ("mqtt.offset", "offset"))
    )
    again = f"CASE WHEN duplicate THEN {header(literal('mqtt.duplicate'), literal('true'))} END"
    original = f"concat({_property_headers()}, array_compact(array({place}, {again})))"
    count = header(literal(PREFIX + "headers"), "CAST(size(original) AS STRING)")
    whole = f"concat(array_compact(array({first})), array({count}), original)"
    return f"get(transform(array({original}), original -> {whole}), 0)"


def expressions(
    routes: Sequence[Route], dead_letters: DeadLetterTarget | None = None, repeats: Repeats | None = None
) -> dict[str, str]:
    """The SQL of a line: working columns first (in this order), then the columns of the record.

    Args:
        routes: The arms, in order.
        dead_letters: Where rows go that can't be mapped; None stops the line at the first.
        repeats: How repeats are dropped; None to keep them.
    """
    cases = " ".join(f"WHEN {matches(route.pattern)} THEN {i}" for i, route in enumerate(routes))
    refusing = any(route.reject is not None for route in routes)
    columns = {
        LEVELS: "split(topic, '/')",
        ROUTE: f"CASE {cases} END",
        **_fields(routes),
        WHERE: _switch(routes, _wanted, "false"),
        **({REJECT: _switch(routes, _refused, "NULL")} if refusing else {}),
        KEEP: f"{ROUTE} IS NOT NULL AND coalesce({WHERE}, false)",
        NAME: _switch(routes, lambda route: _text(route.topic, route), NO_TEXT),
        TOPIC: _switch(routes, _topic, NO_TEXT),
        **(_sameness(routes) if repeats else {}),
        REASON: NO_TEXT,
        "topic": _no_place(f"coalesce({TOPIC}, {_switch(routes, _fallback, NO_TEXT)})", refusing=refusing),
        "key": _switch(routes, _key, "CAST(NULL AS BINARY)"),
        "value": f"coalesce(payload, {PACKET}, X'')",
        "headers": _switch(routes, _headers, f"CAST(NULL AS {HEADER_TYPE})"),
        "timestamp": "received_at",
    }
    return columns if dead_letters is None else _with_dead_letters(columns, routes, dead_letters, repeats)


def _with_dead_letters(
    columns: dict[str, str], routes: Sequence[Route], dead_letters: DeadLetterTarget, repeats: Repeats | None
) -> dict[str, str]:
    reason = _switch(routes, lambda route: _unmappable(route, repeats), NO_TEXT)
    fallback = _switch(
        routes, lambda route: NO_TEXT if route.fallback_topic is None else literal(route.fallback_topic), NO_TEXT
    )
    dead = f"{REASON} IS NOT NULL"
    refusing = f"WHEN '{Reason.REJECTED}' THEN {REFUSAL} " if REJECT in columns else ""
    return columns | {
        REASON: f"CASE WHEN {STUB} THEN {_not_whole()} WHEN {ROUTE} IS NULL THEN '{Reason.UNROUTED}' ELSE {reason} END",
        "topic": f"CASE WHEN {dead} THEN {literal(dead_letters.topic)} ELSE coalesce({TOPIC}, {fallback}) END",
        "key": _switch(routes, _key, "CAST(NULL AS BINARY)"),
        "headers": f"CASE WHEN {dead} THEN {_dead_letter_headers(dead_letters, refusing)} "
        f"ELSE {columns['headers']} END",
        **_origin(routes),
    }


def _origin(routes: Sequence[Route]) -> dict[str, str]:
    """What the sink needs to make a dead letter of a record that Kafka would refuse: the columns of `ORIGIN`."""
    own = _switch(
        routes,
        lambda route: f"2 * size({_own_headers(route)})" if route.omit_missing else str(2 * len(route.headers)),
        "0",
    )
    none = f"CAST(NULL AS {HEADER_TYPE})"
    message = _switch(routes, lambda route: none if route.properties else _property_headers(), none)
    values = (
        "gateway",
        f"CASE WHEN {REASON} IS NULL THEN offset END",
        f"CAST({own} + CAST(coalesce(duplicate, false) AS INT) AS INT)",
        f"CASE WHEN {REASON} IS NULL THEN {message} END",
    )
    columns = dict(zip(ORIGIN, values, strict=True))
    if all(route.properties for route in routes):
        columns.popitem()  # no record lacks them
    return columns


def _sameness(routes: Sequence[Route]) -> dict[str, str]:
    """The columns of `SAME`."""
    return {
        SAME[0]: "topic",
        SAME[1]: _switch(routes, _dedupe_key, NO_TEXT),
        SAME[2]: f"CASE WHEN {SAME[1]} IS NULL THEN offset END",
    }


def _dedupe_key(route: Route) -> str:
    if route.dedupe is None:
        return NO_TEXT
    said = route.dedupe
    key = _text(said, route) if isinstance(said, Template) else f"CAST((\n{said}\n) AS STRING)"
    return f"CASE WHEN {ROUTE} IS NOT NULL AND NOT {STUB} THEN {key} END"


def _wanted(route: Route) -> str:
    """The condition, which no stub is asked."""
    return "true" if route.where is None else f"{STUB} OR {condition(route.where)}"


def _refused(route: Route) -> str:
    """Why a message is refused, which no stub is asked."""
    return f"IF({STUB}, {refusal(None)}, {refusal(route.reject)})"


def _fields(routes: Sequence[Route]) -> dict[str, str]:
    """The fields that routes give to messages, in an order in which each finds those before it."""
    names = dict.fromkeys(name for route in routes for name, _ in route.fields)
    return {name: _switch(routes, partial(_field_sql, name), "NULL") for name in names}


def _field_sql(name: str, route: Route) -> str:
    sql = dict(route.fields).get(name)
    return "NULL" if sql is None else f"IF({STUB}, NULL, (\n{sql}\n))"


def apply(
    frame: DataFrame,
    routes: Sequence[Route],
    counter: str | Observation,
    *,
    dead_letters: DeadLetterTarget | None = None,
    repeats: Repeats | None = None,
    kept: str | Observation | None = None,
    parallelism: int = 1,
) -> DataFrame:
    """Turn rows of the source into records for the sink and count what is left out.

    Args:
        frame: Rows as the ``mqtt`` source gives them.
        routes: The arms, in order.
        counter: Takes `COUNTS`: a name among the query's observed metrics, or an observation of a batch read.
        dead_letters: Where rows go that can't be mapped; None stops the line at the first.
        repeats: How repeats are dropped; None to keep them.
        kept: Takes `KEPT`, as `counter`; None to leave them uncounted.
        parallelism: Parts of the result; more than one are split by key.

    Raises:
        pyspark.errors.AnalysisException: If a ``where`` or a dedupe key is no SQL over these columns.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

    for route in routes:
        analyse(frame, route.fields, route.where, (route.reject, route.dedupe))
    sql = expressions(routes, dead_letters, repeats)
    packet = F.when(F.expr(STUB), F.col("correlation_data"))
    frame = frame.withColumn(PACKET, packet).withColumn(
        "correlation_data", F.expr(f"IF({STUB}, NULL, correlation_data)")
    )
    own = {name for route in routes for name, _ in route.fields}
    risky = own | {WHERE, REJECT, SAME[1]} if dead_letters else frozenset()
    for name in [name for name in sql if name not in RECORD]:
        column = F.expr(sql[name])
        frame = frame.withColumn(name, tried(column) if name in risky else column)
    frame = observed(frame, counter, COUNTS)
    frame = frame.where(f"{KEEP} OR {REASON} IS NOT NULL")
    if repeats is not None:
        frame = frame.withWatermark(EVENT_TIME, repeats.within).dropDuplicatesWithinWatermark(list(SAME))
    if kept is not None:
        frame = observed(frame, kept, KEPT)
    columns = [name for name in sql if name in RECORD]
    result = frame.select(*(F.expr(sql[name]).alias(name) for name in columns))
    return result.repartition(parallelism, "key") if parallelism > 1 else result.coalesce(1)
