"""Routes as Spark SQL over the columns of the ``mqtt`` source.

Plain expressions, no Python in the row path. Topics are compared and cut at their slashes as bytes: to split one into
an array would cost four times as much, and a regular expression a route more, which needs escaping of what devices may
send.
`towline.bridge.config.routes` is the reference for what they mean.

The headers of the message are left to the sink, which makes them of columns (`towline.kafka.columns.PROPERTIES`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from towline.bridge.config.patterns import FIELDS, LEGAL_TOPIC, MAX_TOPIC_LENGTH, Template
from towline.bridge.config.routes import Route
from towline.bridge.lines.sql import (
    HEADER_TYPE,
    NO_HEADERS,
    NO_TEXT,
    DeadLetterTarget,
    condition,
    header,
    literal,
    observed,
    refusal,
    template,
    tried,
)
from towline.bridge.uplink.headers import dead_letter_headers, property_headers, rare_properties
from towline.bridge.uplink.working import (
    KEEP,
    NAME,
    PACKET,
    REASON,
    REFUSAL,
    REJECT,
    ROUTE,
    SAME,
    STUB,
    TOPIC,
    WHERE,
    to_count,
)
from towline.kafka.columns import ORIGIN, PROPERTIES
from towline.kafka.deadletters import Reason
from towline.kafka.packed import PACKED
from towline.kafka.properties import USER_PREFIX
from towline.schema import EVENT_TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

    from towline.bridge.config.patterns import Pattern

__all__ = ["apply", "expressions", "level_sql", "matches"]

#: Columns of the result; all others are working columns, or a route's fields.
RECORD = frozenset(("topic", "key", "value", "headers", "timestamp", *ORIGIN, *PROPERTIES))
#: The end of the text, for Java; ``$`` would also match before a line feed there.
END = r"\z"


def matches(pattern: Pattern) -> str:
    """Whether the row's topic matches [MQTT 5 section 4.7]."""
    levels = pattern.levels
    start, end = _start(levels), _end(pattern)
    wild = len(levels) - start - end
    if not levels:
        return f"NOT startswith(topic, {literal('$')})"
    if not wild:
        below = f" OR startswith(topic, {literal(_text_of(levels) + '/')})" if pattern.deep else ""
        return f"(topic = {literal(_text_of(levels))}{below})"
    tests = [f"startswith(topic, {literal(_text_of(levels[:start]) + '/')})"] if start else []
    tests += [f"NOT startswith(topic, {literal('$')})"] if pattern.wild_start else []
    if wild == 1 and not pattern.deep:
        least = len("".join(level or "" for level in levels).encode()) + len(levels) - 1
        tests += [f"endswith(topic, {literal('/' + _text_of(levels[-end:]))})"] if end else []
        tests += [f"octet_length(topic) >= {least}", f"NOT contains({level_sql(pattern, start)}, '/')"]
    else:
        tests += [f"{_part(len(levels) - 1)} < octet_length(topic)"] if start < len(levels) - 1 else []
        tests += [] if pattern.deep else [f"{_part(len(levels))} = octet_length(topic)"]
        known = ((i, text) for i, text in enumerate(levels) if i > start and text is not None)
        tests += [f"{level_sql(pattern, i)} = {literal(text)}" for i, text in known]
    return " AND ".join(tests)


def _start(levels: Sequence[str | None]) -> int:
    """How many levels from the first on are known."""
    return len(list(takewhile(lambda level: level is not None, levels)))


def _end(pattern: Pattern) -> int:
    """How many of the last levels are known, behind one that is not."""
    return 0 if pattern.deep or None not in pattern.levels else _start(pattern.levels[::-1])


def _text_of(levels: Sequence[str | None]) -> str:
    return "/".join(level or "" for level in levels)


def _part(levels: int) -> str:
    """How many bytes the first levels of the topic have; all of them if there are no more levels."""
    return f"octet_length(substring_index(topic, '/', {levels}))"


def level_sql(pattern: Pattern, position: int) -> str:
    """A level of a topic that matches."""
    start, end = _start(pattern.levels), _end(pattern)
    if len(pattern.levels) - start - end > 1 or pattern.deep:
        return f"substring_index(substring_index(topic, '/', {position + 1}), '/', -1)"
    before = len(_text_of(pattern.levels[:start])) + 1 if start else 0
    behind = len(_text_of(pattern.levels[-end:])) + 1 if end else 0
    return f"substring(topic, {before + 1}, length(topic) - {before + behind})"


def _text(parsed: Template, route: Route) -> str:
    """The text of a template as a SQL string, null when a field is."""
    return template(parsed, lambda name: _field(name, route))


def _field(name: str, route: Route) -> str:
    if name in route.pattern.names:
        return level_sql(route.pattern, route.pattern.names[name])
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


def _own_headers(route: Route) -> str:
    """The headers that the route names, as an array."""
    texts = [(literal(name), _text(text, route)) for name, text in route.headers]
    if not route.omit_missing:
        return f"array({', '.join(header(name, text) for name, text in texts)})"
    some = (f"CASE WHEN {text} IS NOT NULL THEN {header(name, text)} END" for name, text in texts)
    return f"array_compact(array({', '.join(some)}))"


def _headers(route: Route) -> str:
    """The headers that come after those of the message, which the sink makes."""
    return f"CAST({_own_headers(route)} AS {HEADER_TYPE})" if route.headers else NO_HEADERS


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


def _unmappable(route: Route, *, repeats: bool) -> str:
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
    if repeats and route.told_by_key:
        cases.append(f"WHEN {SAME[1]} IS NULL THEN '{Reason.KEY_ABSENT}'")
    if not cases:
        return NO_TEXT
    return f"CASE WHEN NOT coalesce({WHERE}, true) THEN NULL {' '.join(cases)} END"


def expressions(
    routes: Sequence[Route], dead_letters: DeadLetterTarget | None = None, *, repeats: bool = False
) -> dict[str, str]:
    """The SQL of a line: working columns first (in this order), then the columns of the record.

    Args:
        routes: The arms, in order.
        dead_letters: Where rows go that can't be mapped; None stops the line at the first.
        repeats: Whether they are dropped.
    """
    cases = " ".join(f"WHEN {matches(route.pattern)} THEN {i}" for i, route in enumerate(routes))
    refusing = any(route.reject is not None for route in routes)
    columns = {
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
        "headers": _switch(routes, _headers, NO_HEADERS),
        "timestamp": "received_at",
        **_properties(routes, dead_letters),
    }
    return columns if dead_letters is None else _with_dead_letters(columns, routes, dead_letters, repeats=repeats)


def _properties(routes: Sequence[Route], dead_letters: DeadLetterTarget | None) -> dict[str, str]:
    """What the sink makes the message's headers of: the columns of `PROPERTIES`, where a route wants them.

    A dead letter has them among its own.
    """
    if not any(route.properties for route in routes):
        return {}
    topic = _switch(routes, lambda route: "topic" if route.properties else NO_TEXT, NO_TEXT)
    topic = topic if dead_letters is None else f"CASE WHEN {REASON} IS NULL THEN {topic} END"
    return dict(zip(PROPERTIES, (topic, "qos", rare_properties()), strict=True))


def _with_dead_letters(
    columns: dict[str, str], routes: Sequence[Route], dead_letters: DeadLetterTarget, *, repeats: bool
) -> dict[str, str]:
    reason = _switch(routes, lambda route: _unmappable(route, repeats=repeats), NO_TEXT)
    fallback = _switch(
        routes, lambda route: NO_TEXT if route.fallback_topic is None else literal(route.fallback_topic), NO_TEXT
    )
    dead = f"{REASON} IS NOT NULL"
    refusing = f"WHEN '{Reason.REJECTED}' THEN {REFUSAL} " if REJECT in columns else ""
    return columns | {
        REASON: f"CASE WHEN {STUB} THEN {_not_whole()} WHEN {ROUTE} IS NULL THEN '{Reason.UNROUTED}' ELSE {reason} END",
        "topic": f"CASE WHEN {dead} THEN {literal(dead_letters.topic)} ELSE coalesce({TOPIC}, {fallback}) END",
        "key": f"CASE WHEN {ROUTE} IS NOT NULL THEN {columns['key']} END",
        "headers": f"CASE WHEN {dead} THEN {dead_letter_headers(dead_letters, refusing)} ELSE {columns['headers']} END",
        **_origin(routes),
    }


def _origin(routes: Sequence[Route]) -> dict[str, str]:
    """What the sink needs to make a dead letter of a record that Kafka would refuse: the columns of `ORIGIN`."""
    own = _switch(
        routes,
        lambda route: f"2 * size({_own_headers(route)})" if route.omit_missing else str(2 * len(route.headers)),
        "0",
    )
    message = _switch(routes, lambda route: NO_HEADERS if route.properties else property_headers(), NO_HEADERS)
    values = (
        "gateway",
        f"CASE WHEN {REASON} IS NULL THEN offset END",
        f"CAST({own} + CAST(coalesce(duplicate, false) AS INT) AS INT)",
        f"CASE WHEN {REASON} IS NULL THEN {message} ELSE {NO_HEADERS} END",
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
    *,
    dead_letters: DeadLetterTarget | None = None,
    within: str | None = None,
    counters: tuple[str | Observation, str | Observation] | None = None,
    sink_counts: bool = True,
    parallelism: int = 1,
    packed: bool = False,
) -> DataFrame:
    """Turn rows of the source into records for the sink and count on the way what only this way knows.

    Args:
        frame: Rows as the ``mqtt`` source gives them.
        routes: The arms, in order.
        dead_letters: Where rows go that can't be mapped; None stops the line at the first.
        within: How long keys are remembered at least, by which repeats are dropped; None to keep them.
        counters: Take what `to_count` says, before repeats are dropped and after that: names among the query's
            observed metrics, or observations of a batch read. None to leave it uncounted.
        sink_counts: The sink counts dead letters.
        parallelism: Parts of the result; more than one are split by key.
        packed: Rows may hold records already (`towline.kafka.packed`), which pass as they are.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

    sql = expressions(routes, dead_letters, repeats=within is not None)
    packet = F.when(F.expr(STUB), F.col("correlation_data"))
    frame = frame.withColumn(PACKET, packet).withColumn(
        "correlation_data", F.expr(f"IF({STUB}, NULL, correlation_data)")
    )
    own = {name for route in routes for name, _ in route.fields}
    risky = own | {WHERE, REJECT, SAME[1]} if dead_letters else frozenset()
    for name in [name for name in sql if name not in RECORD]:
        column = F.expr(sql[name])
        frame = frame.withColumn(name, tried(column) if name in risky else column)
    before, after = to_count(
        routes,
        dead_letters=dead_letters is not None,
        repeats=within is not None,
        sink_counts=sink_counts,
    )
    if counters is not None and before:
        frame = observed(frame, counters[0], before)
    passes = f"{PACKED} IS NOT NULL OR " if packed else ""
    frame = frame.where(f"{passes}{KEEP} OR {REASON} IS NOT NULL")
    if within is not None:
        frame = frame.withWatermark(EVENT_TIME, within).dropDuplicatesWithinWatermark(list(SAME))
    if counters is not None and after:
        frame = observed(frame, counters[1], after)
    columns = {name: text for name, text in sql.items() if name in RECORD}
    if packed:
        columns = {name: f"CASE WHEN {PACKED} IS NULL THEN {text} END" for name, text in columns.items()}
        columns[PACKED] = PACKED
    result = frame.select(*(F.expr(text).alias(name) for name, text in columns.items()))
    return result.repartition(parallelism, "key") if parallelism > 1 else result.coalesce(1)
