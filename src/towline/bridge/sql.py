"""Routes as Spark SQL over the columns of the ``mqtt`` source.

Plain expressions, no Python in the row path: the topic is split once, its levels are compared as array elements (a
regular expression a route would cost more and needs escaping of what devices may send), and `get` gives null beyond
the end where an index would raise under ANSI rules. `towline.bridge.routes` is the reference for what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from towline.bridge.routes import FIELDS, LEGAL_TOPIC, MAX_TOPIC_LENGTH, USER_PREFIX, Route, Template

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

    from towline.bridge.routes import Pattern

__all__ = ["COUNTS", "LEVELS", "apply", "expressions", "literal", "matches", "template"]

#: Names of the working columns; a source column never begins with two underscores.
LEVELS, ROUTE, KEEP, TOPIC = "__levels", "__route", "__keep", "__topic"

_SAFE = re.compile(r"[A-Za-z0-9 _./:,;-]")
_HEADER_TYPE = "array<struct<key: string, value: binary>>"

#: Counted in every batch by `observe`: name → SQL aggregate.
COUNTS = {
    "rows": "count(1)",
    "filtered": f"count_if({ROUTE} IS NOT NULL AND NOT {KEEP})",
    "unrouted": f"count_if({ROUTE} IS NULL)",
    "fallback": f"count_if({KEEP} AND {TOPIC} IS NULL)",
}


def literal(text: str) -> str:
    """A SQL string literal; whatever the parser or ``${...}`` substitution could read is written as an escape."""
    return "'" + "".join(c if _SAFE.fullmatch(c) else _escape(c) for c in text) + "'"


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def matches(pattern: Pattern) -> str:
    """Whether the row's topic matches [MQTT 5 section 4.7]."""
    tests = [f"size({LEVELS}) {'>=' if pattern.deep else '='} {len(pattern.levels)}"]
    tests += [f"{_level(i)} = {literal(text)}" for i, text in enumerate(pattern.levels) if text is not None]
    if pattern.wild_start:
        tests.append("NOT startswith(topic, '\\u0024')")
    return " AND ".join(tests)


def _level(position: int) -> str:
    return f"get({LEVELS}, {position})"


def template(made: Template, pattern: Pattern) -> str:
    """The text of a template as a SQL string, null when a field is."""
    parts = [
        literal(part) if i % 2 == 0 else _field(part, pattern) for i, part in enumerate(made.parts) if i % 2 or part
    ]
    return "''" if not parts else parts[0] if len(parts) == 1 else f"concat({', '.join(parts)})"


def _field(name: str, pattern: Pattern) -> str:
    if name in pattern.names:
        return _level(pattern.names[name])
    if name in FIELDS:
        return f"CAST({FIELDS[name]} AS STRING)"
    key = literal(name.removeprefix(USER_PREFIX))
    return f"get(filter(user_properties, p -> p.key = {key}), 0).value"


def _topic(route: Route) -> str:
    name = template(route.topic, route.pattern)
    if route.topic.constant is not None:
        return name
    legal = (
        f"length({name}) <= {MAX_TOPIC_LENGTH} AND {name} RLIKE {literal(LEGAL_TOPIC)} AND {name} NOT IN ('.', '..')"
    )
    if route.allowed_topics:
        legal += f" AND {name} RLIKE {literal(_globs(route.allowed_topics))}"
    return f"CASE WHEN {legal} THEN {name} END"


def _globs(globs: Sequence[str]) -> str:
    """One regular expression for names and globs; the names hold legal characters only."""
    made = [re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".") for glob in globs]
    return f"^(?:{'|'.join(made)})\\z"


def _switch(routes: Sequence[Route], arm: Callable[[Route], str], otherwise: str) -> str:
    """``CASE`` on the route; one expression when all arms are the same."""
    arms = [arm(route) for route in routes]
    if len(set(arms)) == 1:
        return arms[0]
    cases = " ".join(f"WHEN {i} THEN {text}" for i, text in enumerate(arms))
    return f"CASE {ROUTE} {cases} ELSE {otherwise} END"


def _header(name: str, value: str) -> str:
    return f"named_struct('key', {name}, 'value', CAST({value} AS BINARY))"


def _some(column: str, name: str, value: str | None = None) -> str:
    """A header when the column has a value, else null."""
    return f"CASE WHEN {column} IS NOT NULL THEN {_header(literal(name), value or f'CAST({column} AS STRING)')} END"


_ALWAYS = [_header("'mqtt.topic'", "topic"), _header("'mqtt.qos'", "CAST(qos AS STRING)")]
_RECEIVED = _header("'mqtt.received-at'", "CAST(unix_micros(received_at) AS STRING)")
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
    """All properties as headers, in the order of `towline.bridge.routes.HEADERS`.

    Most messages carry none of the optional ones; they take a branch without lambdas, which Spark would interpret.
    """
    optional = ", ".join(
        [
            f"CASE WHEN retain THEN {_header(literal('mqtt.retain'), literal('true'))} END",
            _some("content_type", "mqtt.content-type"),
            _some("response_topic", "mqtt.response-topic"),
            _some("correlation_data", "mqtt.correlation-data", "correlation_data"),
            _some("message_expiry_seconds", "mqtt.message-expiry"),
            _some("payload_is_utf8", "mqtt.payload-format", "CAST(CAST(payload_is_utf8 AS INT) AS STRING)"),
        ]
    )
    identifiers = f"transform(subscription_ids, i -> {_header(literal('mqtt.subscription-id'), 'CAST(i AS STRING)')})"
    users = f"transform(user_properties, p -> {_header(f'concat({literal(USER_PREFIX)}, p.key)', 'p.value')})"
    none = f"CAST(array() AS {_HEADER_TYPE})"
    always = f"array({', '.join(_ALWAYS)})"
    full = (
        f"concat({always}, array_compact(array({optional})), coalesce({identifiers}, {none}), "
        f"array({_RECEIVED}), coalesce({users}, {none}))"
    )
    return f"CASE WHEN {' OR '.join(_RARE)} THEN {full} ELSE array({', '.join([*_ALWAYS, _RECEIVED])}) END"


def _headers(route: Route) -> str:
    own = [_header(literal(name), template(text, route.pattern)) for name, text in route.headers]
    parts = [_property_headers()] if route.properties else []
    parts += [f"array({', '.join(own)})"] if own else []
    if not parts:
        return f"CAST(NULL AS {_HEADER_TYPE})"
    joined = parts[0] if len(parts) == 1 else f"concat({', '.join(parts)})"
    return f"CAST({joined} AS {_HEADER_TYPE})"


def _key(route: Route) -> str:
    return "CAST(NULL AS BINARY)" if route.key is None else f"CAST({template(route.key, route.pattern)} AS BINARY)"


def _fallback(route: Route) -> str:
    if route.fallback_topic is not None:
        return literal(route.fallback_topic)
    sentence = (
        f'route from "{route.pattern.text}": a message gives a Kafka topic that is not legal or not allowed'
        ". The line stops there rather than lose it. Give the route a fallback_topic.   [TL-B02]"
    )
    return f"raise_error({literal(sentence)})"


def expressions(routes: Sequence[Route]) -> dict[str, str]:
    """The SQL of a line: working columns first (in this order), then the columns of the record."""
    cases = " ".join(f"WHEN {matches(route.pattern)} THEN {i}" for i, route in enumerate(routes))
    return {
        LEVELS: "split(topic, '/')",
        ROUTE: f"CASE {cases} END",
        KEEP: f"{ROUTE} IS NOT NULL AND {_switch(routes, _where, 'false')}",
        TOPIC: _switch(routes, _topic, "CAST(NULL AS STRING)"),
        "topic": f"coalesce({TOPIC}, {_switch(routes, _fallback, 'CAST(NULL AS STRING)')})",
        "key": _switch(routes, _key, "CAST(NULL AS BINARY)"),
        "value": "payload",
        "headers": _switch(routes, _headers, f"CAST(NULL AS {_HEADER_TYPE})"),
        "timestamp": "received_at",
    }


def _where(route: Route) -> str:
    """The user's condition on lines of its own, so that a comment at its end ends there."""
    return "true" if route.where is None else f"coalesce((\n{route.where}\n), false)"


def apply(frame: DataFrame, routes: Sequence[Route], counter: str | Observation) -> DataFrame:
    """Turn rows of the source into records for the sink and count what is left out.

    Args:
        frame: Rows as the ``mqtt`` source gives them.
        routes: The arms, in order.
        counter: Takes `COUNTS`: a name among the query's observed metrics, or an observation of a batch read.

    Raises:
        pyspark.errors.AnalysisException: If a ``where`` is no SQL over these columns.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

    for route in routes:
        if route.where is not None:
            # Analysed on its own first: half a condition must not be completed by what stands around it.
            frame.where(F.expr(route.where))
    made = expressions(routes)
    for name in (LEVELS, ROUTE, KEEP, TOPIC):
        frame = frame.withColumn(name, F.expr(made[name]))
    frame = frame.observe(counter, *(F.expr(text).alias(name) for name, text in COUNTS.items()))
    columns = [F.expr(made[name]).alias(name) for name in ("topic", "key", "value", "headers", "timestamp")]
    return frame.where(KEEP).select(*columns)
