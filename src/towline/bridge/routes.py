"""Routes of an uplink over Arrow columns: which route takes a message, and the Kafka record that it becomes.

    match    the first route whose filter matches takes the message, like the arms of a switch; so a message makes at
             most one record and the account adds up [I11]
    reject   Spark SQL; its text says why the message is refused
    where    Spark SQL; false leaves the message out, and so does null, which is counted apart
    render   topic, key, value, headers and time of the record, each a template

``reject`` and ``where`` are Spark's to evaluate; here they are columns. A template with a field that the message does
not have gives null: no key, no topic, a header without value (or none). A topic name made of fields must be a legal
Kafka name, an allowed one and not reserved, else the message goes to the route's fallback topic (design section 10: a
device never names a topic outside the allowed list).

All that follows from the MQTT topic alone is made once for each topic of a batch, the rest of each row.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache, partial, reduce
from math import isfinite
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from towline.bridge.patterns import (
    FIELDS,
    MAX_TOPIC_LENGTH,
    PAYLOAD,
    Pattern,
    Template,
    allowed,
    kafka_name_problem,
    payload_path,
)
from towline.kafka.deadletters import INTERNAL, Reason, reserved
from towline.kafka.properties import USER_PREFIX
from towline.schema import OPTIONAL, ROW_SCHEMA

#: Columns of a row beside those of the message: the number of its route, and what Spark has made of the route's SQL:
#: structs that are null where it raised an error, the dedupe key as text, and names and texts of further headers. A
#: route's ``fields`` are columns too.
ROUTE: Final = "towline_route"
REJECT, WHERE, DEDUPE, HEADER_MAP = "towline_reject", "towline_where", "towline_dedupe", "towline_headers"

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_RARE: Final = ("retain", *OPTIONAL)
_MOMENT: Final = ROW_SCHEMA.field("received_at").type
#: A record, and the message that it was: its properties become headers after the record is known to be sound, or those
#: of its dead letter. Flat, because a struct a row doubles what a row costs (measured).
#:   headers               the route's own
#:   towline_rare          what only some messages have; null for the others
#:   towline_properties    whether the properties of the message travel as headers of the record
#:   towline_reason, towline_detail    why it can't be a record (`towline.kafka.deadletters`); null in all rows or none
RECORD_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("timestamp", _MOMENT),
        ("towline_topic", pa.string()),
        ("towline_qos", pa.int8()),
        ("towline_rare", pa.struct([ROW_SCHEMA.field(name) for name in _RARE])),
        ("towline_received_at", _MOMENT),
        ("towline_gateway", pa.string()),
        ("towline_offset", pa.int64()),
        ("towline_duplicate", pa.bool_()),
        ("towline_properties", pa.bool_()),
        ("towline_reason", pa.string()),
        ("towline_detail", pa.string()),
    ]
)
#: Topics of a line that are remembered, and characters of them; then all are forgotten, so that devices can't fill the
#: memory.
_TOPICS: Final = 50_000
_CHARACTERS: Final = 16 << 20
#: Last millisecond of the year 9999, which clients of Kafka can still show.
_LAST_MS: Final = 253_402_300_799_999
_MILLIS: Final = re.compile(r"[0-9]{1,15}")


class RowOutcome(IntEnum):
    """What becomes of a row, of a code.

    Attributes:
        reason: Of the dead letter, where it is refused; None where it is not.
        detail: What a person reads of that; "" where the SQL of ``reject`` says it.
    """

    reason: Reason | None
    detail: str

    def __new__(cls, code: int, reason: Reason | None = None, detail: str = "") -> Self:
        """A member, written as its attributes."""
        outcome = int.__new__(cls, code)
        outcome._value_, outcome.reason, outcome.detail = code, reason, detail
        return outcome


class RouteOutcome(RowOutcome):
    """What becomes of a message: below zero it is left out, from `NOT_WHOLE` on it is refused."""

    UNDECIDED = -2
    FILTERED = -1
    RECORD = 0
    FALLBACK = 1
    NOT_WHOLE = (
        2,
        Reason.PACKET_TOO_LARGE,
        "larger than max_packet_bytes; headers mqtt.user.towline-* hold its size and digest",
    )
    TOO_MANY = 3, Reason.TOO_MANY_PROPERTIES, "more than 1,000 properties; the value is the whole MQTT packet"
    UNROUTED = 4, Reason.UNROUTED, "no route takes this topic"
    REJECT_RAISED = 5, Reason.UNMAPPED, "the SQL of reject raised an error on this message"
    REJECTED = 6, Reason.REJECTED
    WHERE_RAISED = 7, Reason.UNMAPPED, "the SQL of where raised an error on this message"
    NO_JSON = 8, Reason.UNMAPPED, "the route names a field of the payload, which is no JSON"
    NO_TEXT = 9, Reason.UNMAPPED, "a field of the payload that the route names is neither text nor a number"
    TOPIC_ABSENT = 10, Reason.TOPIC_ABSENT, "the message lacks what the name of the Kafka topic is made of"
    TOPIC_RESERVED = (
        11,
        Reason.TOPIC_RESERVED,
        "no message may choose this Kafka topic: markers, dead letters, Kafka's own",
    )
    TOPIC_NOT_ALLOWED = 12, Reason.TOPIC_NOT_ALLOWED, "the name of the Kafka topic is not among allowed_topics"
    TOPIC_ILLEGAL = 13, Reason.TOPIC_ILLEGAL, "Kafka takes no such topic name"
    KEY_ABSENT = 14, Reason.KEY_ABSENT, "the message lacks what its key or its dedupe key is made of"
    VALUE_ABSENT = 15, Reason.UNMAPPED, "the message lacks what the value of its record is made of"
    NO_TIME = 16, Reason.TIMESTAMP, "timestamp gives no whole number of milliseconds since 1970"


@dataclass(frozen=True, slots=True)
class Route:
    """One arm of a line.

    Attributes:
        pattern: What it takes.
        topic: Kafka topic.
        key: Record key, or None for none.
        value: Record value; None for the payload.
        timestamp: Milliseconds since 1970 of the record; None, or null, for the time of receipt.
        headers: Names and templates, in order, after the properties of the message.
        where: Spark SQL over the source's columns, the wildcards and the fields, or None.
        allowed_topics: Names and globs a topic with fields is checked against.
        fallback_topic: Where a message goes whose topic is illegal or not allowed; None makes it a dead letter, or
            stops the line where there are none.
        properties: Whether the MQTT properties travel as headers (`towline.kafka.properties.HEADERS`).
        key_required: Whether a message that gives no key is a dead letter.
        fields: Names that templates and SQL may use beside those of the message, and the Spark SQL of each, in order;
            it may name the columns of the source, the wildcards and the fields before it.
        reject: Spark SQL that says why a message is refused, null where it is not; what is refused is a dead letter.
        header_map: Spark SQL of a map of texts: further headers of the record; one without text is left out.
        omit_missing: Whether a header whose template gives null is left out, rather than be there without value.
        dedupe: What names a message for ever, as a template or as SQL; None to keep repeats.
        key_tells: Whether that alone tells a repeat, as its QoS can't: a message without a key is a dead letter.
        dead_letter_topics: Of all lines of the bridge; no message may name one.
    """

    pattern: Pattern
    topic: Template
    key: Template | None = None
    value: Template | None = None
    timestamp: Template | None = None
    headers: tuple[tuple[str, Template], ...] = ()
    where: str | None = None
    allowed_topics: tuple[str, ...] = ()
    fallback_topic: str | None = None
    properties: bool = True
    key_required: bool = False
    fields: tuple[tuple[str, str], ...] = ()
    reject: str | None = None
    header_map: str | None = None
    omit_missing: bool = False
    dedupe: Template | str | None = None
    key_tells: bool = False
    dead_letter_topics: tuple[str, ...] = ()

    @property
    def templates(self) -> tuple[Template, ...]:
        """Those that its records are made of."""
        single = (self.topic, self.key, self.value, self.timestamp)
        return (*(one for one in single if one is not None), *(text for _, text in self.headers))

    @property
    def rendered_fields(self) -> tuple[str, ...]:
        """Those of its own fields that its records are made of."""
        named = {name for template in self.templates for name in template.fields}
        return tuple(name for name, _ in self.fields if name in named)

    @property
    def sql(self) -> tuple[str, ...]:
        """Whatever it says in Spark SQL."""
        dedupe = self.dedupe if isinstance(self.dedupe, str) else None
        said = (self.where, self.reject, self.header_map, dedupe, *(text for _, text in self.fields))
        return tuple(text for text in said if text is not None)

    @property
    def reserved(self) -> str | None:
        """What a name with fields must not be, as a regular expression; None where it can't become that."""
        head = self.topic.parts[0]
        reach = (INTERNAL, "towline.", *self.dead_letter_topics)
        near = self.topic.fields and any(head.startswith(name) or name.startswith(head) for name in reach)
        return reserved(self.dead_letter_topics) if near else None

    def may_become(self, name: str) -> bool:
        """Whether a message may name a topic, as far as its beginning tells."""
        taken = self.reserved
        free = taken is None or not re.fullmatch(taken, name)
        return free and kafka_name_problem(name) is None and name.startswith(self.topic.parts[0])

    def destination(self, name: str | None) -> tuple[str | None, RouteOutcome]:
        """The Kafka topic behind a name that the template of the topic gives, or why there is none."""
        problem = RouteOutcome.RECORD if self.topic.constant is not None else self._problem(name)
        if problem is RouteOutcome.RECORD:
            return name, RouteOutcome.RECORD
        return self.fallback_topic, problem if self.fallback_topic is None else RouteOutcome.FALLBACK

    def _problem(self, name: str | None) -> RouteOutcome:
        if name is None:
            return RouteOutcome.TOPIC_ABSENT
        if (taken := self.reserved) is not None and re.fullmatch(taken, name):
            return RouteOutcome.TOPIC_RESERVED
        if kafka_name_problem(name):
            return RouteOutcome.TOPIC_ILLEGAL
        return RouteOutcome.RECORD if allowed(name, self.allowed_topics) else RouteOutcome.TOPIC_NOT_ALLOWED

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Self:
        """From an entry of `to_json`."""
        made: dict[str, Any] = {name: written[name] and Template.read(written[name]) for name in _TEMPLATES}
        made |= {name: tuple(written[name]) for name in ("allowed_topics", "dead_letter_topics")}
        made |= {name: written[name] for name in _PLAIN}
        pattern = Pattern.parse(written["from"], checked=False)
        headers = tuple((name, Template.read(text)) for name, text in written["headers"])
        return cls(pattern, headers=headers, fields=tuple((name, "") for name in written["fields"]), **made)


#: Attributes of a route that its JSON has as texts, and as they are.
_TEMPLATES: Final = ("topic", "key", "value", "timestamp")
_PLAIN: Final = ("fallback_topic", "properties", "key_required", "omit_missing", "key_tells")


def to_json(routes: Sequence[Route]) -> str:
    """What tells the records of a line's messages, its SQL aside, as `from_json` takes it."""
    return json.dumps(
        [
            {
                "from": route.pattern.text,
                **{name: None if (one := getattr(route, name)) is None else one.text for name in _TEMPLATES},
                "headers": [(name, template.text) for name, template in route.headers],
                "fields": [name for name, _ in route.fields],
                **{name: getattr(route, name) for name in ("allowed_topics", "dead_letter_topics", *_PLAIN)},
            }
            for route in routes
        ]
    )


def from_json(text: str) -> tuple[Route, ...]:
    """The routes of `to_json`."""
    return tuple(map(Route.of, json.loads(text)))


class Rendered(NamedTuple):
    """What becomes of the rows of a batch, in their order.

    Attributes:
        records: Columns of `RECORD_SCHEMA`, but for the last two; of a row that is no record what can be said.
        outcomes: Codes of `RouteOutcome`.
        refusals: What ``reject`` says.
    """

    records: pa.RecordBatch
    outcomes: pa.Array
    refusals: pa.Array

    def parts(self, *, unrouted: bool = True) -> Iterator[pa.RecordBatch]:
        """Records, then what is refused, each as batches of `RECORD_SCHEMA`; what is left out is in neither.

        Args:
            unrouted: Whether messages that no route takes are among the refused ones.
        """
        size = len(self.outcomes)
        if (ends := pc.min_max(self.outcomes).as_py())["min"] is None:
            return
        if ends["min"] >= RouteOutcome.RECORD and ends["max"] <= RouteOutcome.FALLBACK:
            yield _with_reasons(self.records, pa.nulls(size, pa.string()), pa.nulls(size, pa.string()))
            return
        sound = pc.is_in(self.outcomes, pa.array([RouteOutcome.RECORD, RouteOutcome.FALLBACK], pa.int8()))
        good = self.records.filter(sound)
        if good.num_rows:
            yield _with_reasons(good, *[pa.nulls(good.num_rows, pa.string())] * 2)
        bad = pc.greater_equal(self.outcomes, int(RouteOutcome.NOT_WHOLE))
        if not unrouted:
            bad = pc.and_(bad, pc.not_equal(self.outcomes, int(RouteOutcome.UNROUTED)))
        if pc.any(bad).as_py():
            codes = [RouteOutcome(code) for code in self.outcomes.filter(bad).to_pylist()]
            refusals = zip(codes, self.refusals.filter(bad).to_pylist(), strict=True)
            yield _with_reasons(
                self.records.filter(bad),
                pa.array([code.reason for code in codes], pa.string()),
                pa.array([code.detail or refusal for code, refusal in refusals], pa.string()),
            )

    def of_writer(self, writer: int, writers: int) -> Self:
        """The rows of one of several writers: by the key of the record, else the topic of the message.

        A total function of the row, so the writers of a batch have all rows, and each row one of them.
        """
        keys = pc.coalesce(self.records.column("key"), self.records.column("towline_topic").cast(pa.binary()))
        coded = keys.dictionary_encode()
        numbers = pa.array([crc32c(key) % writers for key in coded.dictionary.to_pylist()], pa.int64())
        own = pc.equal(numbers.take(coded.indices), writer)
        return type(self)(self.records.filter(own), self.outcomes.filter(own), self.refusals.filter(own))

    def tally(self) -> Counter[RouteOutcome]:
        """How many rows have each outcome."""
        counts = pc.value_counts(self.outcomes)
        return Counter({RouteOutcome(entry["values"]): entry["counts"] for entry in counts.to_pylist()})


def _with_reasons(records: pa.RecordBatch, reasons: pa.Array, details: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*records.columns, reasons, details], schema=RECORD_SCHEMA)


class RouteTable:
    """Routes of a line, over columns of its messages.

    Args:
        routes: The arms, in order.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        #: Topic -> the number of the route that takes it; and characters of the topics.
        self._numbers: dict[str, int | None] = {}
        self._characters = 0
        self._destination = lru_cache(_TOPICS)(lambda number, name: self.routes[number].destination(name))

    def match(self, topics: pa.Array) -> pa.Array:
        """The number of the route that takes each topic; null for none."""
        coded = topics.dictionary_encode()
        return self._matched(coded.dictionary).take(coded.indices)

    def _matched(self, topics: pa.Array) -> pa.Array:
        """The same of topics that are all different."""
        names, known = topics.to_pylist(), self._numbers
        new = [name for name in names if name not in known]
        if new and (len(known) + len(new) > _TOPICS or self._characters > _CHARACTERS):
            known.clear()
            new, self._characters = names, 0
        known.update((name, self._taker(name)) for name in new)
        self._characters += sum(map(len, new))
        return pa.array([known[name] for name in names], pa.int32())

    def _taker(self, topic: str) -> int | None:
        matches = (number for number, route in enumerate(self.routes) if route.pattern.match(topic) is not None)
        return next(matches, None)

    def values(self, rows: pa.RecordBatch, names: Sequence[str]) -> list[pa.Array]:
        """What wildcards and fields of messages are, as texts; null in rows whose route does not have the wildcard.

        Args:
            rows: Columns of `ROW_SCHEMA`.
            names: Wildcards of any route, and fields of a message as templates name them.
        """
        made = _Columns(self, rows, self.match(rows.column("topic")))
        return [made.joined(view.value(name) for view in made.views) for name in names]

    def render(self, rows: pa.RecordBatch) -> Rendered:
        """What becomes of messages.

        What follows from the topic alone is made of the topics of the batch, and each row has it from there.

        Args:
            rows: Columns of `ROW_SCHEMA`; where Spark has evaluated the line's SQL, `REJECT`, `WHERE`, `DEDUPE`,
                `HEADER_MAP` and the routes' fields too.
        """
        coded = rows.column("topic").dictionary_encode()
        numbers, topics = self._matched(coded.dictionary), pa.RecordBatch.from_arrays([coded.dictionary], ["topic"])
        over = _Columns(self, topics, numbers)
        return _Rendering(self, rows, numbers.take(coded.indices), over, coded.indices).result()

    def destinations(self, number: int, names: pa.Array) -> pa.Array:
        """Structs of `_DESTINATION` behind names that a route's messages give."""
        coded = names.dictionary_encode(null_encoding="encode")
        made = []
        for name in coded.dictionary.to_pylist():
            long = name is not None and len(name) > MAX_TOPIC_LENGTH  # not remembered
            topic, outcome = self.routes[number].destination(name) if long else self._destination(number, name)
            made.append({"name": name, "topic": topic, "outcome": int(outcome)})
        return pa.array(made, _DESTINATION).take(coded.indices)


#: What the template of a Kafka topic gives, where the record goes, and the outcome of that name.
_DESTINATION: Final = pa.struct([("name", pa.string()), ("topic", pa.string()), ("outcome", pa.int8())])


@lru_cache(maxsize=4)
def route_table(routes: str) -> RouteTable:
    """The table of a line, of `to_json`; a process runs tasks of several lines, one after the other."""
    return RouteTable(from_json(routes))


def _is_static(route: Route, templates: Iterable[Template | None]) -> bool:
    """Whether templates follow from the MQTT topic alone."""
    return all(name == "mqtt.topic" or name in route.pattern.names for one in templates if one for name in one.fields)


class Values:
    """Fields of the rows of a batch as texts, and templates over them.

    Args:
        size: Rows.
        column: The column of a field, null where a row has none; asked once for each.
    """

    def __init__(self, size: int, column: Callable[[str], pa.Array]) -> None:
        self.size = size
        self._column_of = column
        self._values: dict[str, pa.Array] = {}

    def value(self, name: str) -> pa.Array:
        """A field of each row as text, null where it has none."""
        if name not in self._values:
            self._values[name] = self._column_of(name)
        return self._values[name]

    def text(self, template: Template) -> pa.Array:
        """The text of a template for each row, null where a field is."""
        if template.constant is not None:
            return pa.repeat(pa.scalar(template.constant, pa.string()), self.size)
        parts = [
            pa.scalar(part) if i % 2 == 0 else self.value(part)
            for i, part in enumerate(template.parts)
            if i % 2 or part
        ]
        return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(""))


class _View(Values):
    """The rows of one route in a batch, and the values of fields in them.

    Args:
        rows: The batch.
        at: Where they are; None for all.
        number: Of the route; None for rows that no route takes.
        routes: Of the line.
    """

    def __init__(self, rows: pa.RecordBatch, at: pa.Array | None, number: int | None, routes: Sequence[Route]) -> None:
        super().__init__(rows.num_rows if at is None else len(at), self._value)
        self._rows = rows
        self.at = at
        self.number = number
        self.route = None if number is None else routes[number]

    def column(self, name: str) -> pa.Array:
        """A column of the rows."""
        column = self._rows.column(name)
        return column if self.at is None else column.take(self.at)

    def _value(self, name: str) -> pa.Array:
        if self.route is not None and (level := self.route.pattern.level_of(name)) is not None:
            return pc.list_element(self._levels, level)
        if name in FIELDS:
            return _text(self.column(FIELDS[name]))
        if name.startswith(USER_PREFIX):
            return first_named(self.column("user_properties"), name.removeprefix(USER_PREFIX))
        if name == PAYLOAD:
            return utf8_text(self.column("payload"))
        if payload_path(name):
            return self.payload.fields[name]
        return (
            self.column(name).cast(pa.string()) if name in self._rows.schema.names else pa.nulls(self.size, pa.string())
        )

    @cached_property
    def _levels(self) -> pa.Array:
        return pc.split_pattern(self.column("topic"), "/")

    @cached_property
    def payload(self) -> JsonFields:
        """The fields of the payloads that the route's templates name."""
        return JsonFields.read(self.column("payload"), self.route.templates if self.route else ())

    def headers(self, route: Route) -> pa.Array:
        """The headers that a route names."""
        kind, wide = _HEADERS.value_type, len(route.headers)
        if not wide:
            return pa.ListArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), self.size + 1), pa.array([], kind))
        texts = [self.text(template).cast(pa.binary()) for _, template in route.headers]
        numbers = _numbers(wide * self.size)  # of the headers, row after row
        row = pc.divide(numbers, wide)
        which = pc.subtract(numbers, pc.multiply(row, wide))
        values = pa.concat_arrays(texts).take(pc.add(pc.multiply(which, self.size), row))
        names = pa.array([name for name, _ in route.headers], pa.string()).take(which)
        pairs = pa.StructArray.from_arrays([names, values], fields=list(kind))
        ends = pc.multiply(_numbers(self.size + 1), wide)
        if route.omit_missing and values.null_count:
            there = values.is_valid()
            pairs, ends = pairs.filter(there), running_sums(there).take(ends)
        return pa.ListArray.from_arrays(ends.cast(pa.int32()), pairs)


class _Columns:
    """What routes make of rows that may be no more than topics, as columns.

    Args:
        table: Of the routes.
        rows: What they are made of.
        numbers: Of the routes that take them.
        topics: The same over the topics of the rows; None where these are topics themselves.
        indices: The topic of each row there.
    """

    def __init__(
        self,
        table: RouteTable,
        rows: pa.RecordBatch,
        numbers: pa.Array,
        topics: _Columns | None = None,
        indices: pa.Array | None = None,
    ) -> None:
        self._table, self._rows, self._numbers = table, rows, numbers
        self._topics, self._indices = topics, indices
        found = pc.unique(numbers).to_pylist() or [None]
        masks = ((one, numbers.is_null() if one is None else pc.equal(numbers, one).fill_null(False)) for one in found)
        places = [(one, pc.indices_nonzero(mask)) for one, mask in masks] if len(found) > 1 else [(found[0], None)]
        #: The rows of each route; and the routes.
        self.views = [_View(rows, at, number, table.routes) for number, at in places]
        self._routes = [view.route for view in self.views if view.route is not None]

    @cached_property
    def _order(self) -> pa.Array:
        return pc.sort_indices(pa.concat_arrays([view.at for view in self.views if view.at is not None]))

    def joined(self, columns: Iterable[pa.Array]) -> pa.Array:
        """The columns of the views as one, in the order of the rows."""
        parts = list(columns)
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts).take(self._order)

    def _made(
        self,
        kind: pa.DataType,
        templates: Callable[[Route], Iterable[Template | None]],
        made: Callable[[_View, Route], pa.Array | None],
    ) -> pa.Array:
        """A column, null where ``made`` gives None, and of rows without a route."""
        if self._topics is not None and all(_is_static(route, templates(route)) for route in self._routes):
            column = self._topics._made(kind, templates, made)  # noqa: SLF001 - the same over topics
            return (
                pa.nulls(self._rows.num_rows, kind) if column.null_count == len(column) else column.take(self._indices)
            )
        parts = [None if view.route is None else made(view, view.route) for view in self.views]
        return self.joined(
            pa.nulls(view.size, kind) if part is None else part for view, part in zip(self.views, parts, strict=True)
        )

    def destinations(self) -> list[pa.Array]:
        """The columns of `_DESTINATION`."""
        structs = self._made(
            _DESTINATION,
            lambda route: [route.topic],
            lambda view, route: self._table.destinations(view.number or 0, whole_text(view.text(route.topic))),
        )
        return [pc.struct_field(structs, at) for at in range(len(_DESTINATION))]

    def keys(self) -> pa.Array:
        """The keys of the records."""
        return self._made(
            pa.binary(),
            lambda route: [route.key],
            lambda view, route: None if route.key is None else view.text(route.key).cast(pa.binary()),
        )

    def headers(self) -> pa.Array:
        """The headers that the routes name."""
        return self._made(
            _HEADERS, lambda route: [text for _, text in route.headers], lambda view, route: view.headers(route)
        )

    def properties(self) -> pa.Array:
        """Whether the properties of the messages travel."""
        return self._made(
            pa.bool_(), lambda _: [], lambda view, route: pa.repeat(pa.scalar(route.properties), view.size)
        )


def verdicts(rows: pa.RecordBatch, codes: type[IntEnum]) -> tuple[list[tuple[pa.Array, Any]], pa.Array]:
    """What ``reject`` and then ``where`` say of rows, for `first_case`; and the texts of ``reject``.

    Args:
        rows: With `REJECT` and `WHERE` where Spark has evaluated them.
        codes: Have the names of `RouteOutcome`.
    """
    present, refusals = set(rows.schema.names), pa.nulls(rows.num_rows, pa.string())
    cases: list[tuple[pa.Array, Any]] = []
    if REJECT in present:
        column = rows.column(REJECT)
        refusals = whole_text(pc.struct_field(column, 0))
        cases += [(column.is_null(), codes["REJECT_RAISED"]), (refusals.is_valid(), codes["REJECTED"])]
    if WHERE in present:
        column = rows.column(WHERE)
        wanted = pc.struct_field(column, 0)
        cases.append((column.is_null(), codes["WHERE_RAISED"]))
        cases += [(wanted.is_null(), codes["UNDECIDED"]), (pc.invert(wanted), codes["FILTERED"])]
    return cases, refusals


def first_case(cases: Iterable[tuple[pa.Array, Any]], otherwise: pa.Array) -> pa.Array:
    """Of each row the code of the first case whose mask is true there.

    Args:
        cases: Masks, and a code or a column of codes each.
        otherwise: Codes of rows of no case.
    """
    cases = [(mask, code) for mask, code in cases if pc.any(mask).as_py()]
    if not cases:
        return otherwise
    masks = pa.StructArray.from_arrays([mask.fill_null(False) for mask, _ in cases], list(map(str, range(len(cases)))))
    codes = [one if isinstance(one, pa.Array) else pa.scalar(int(one), pa.int8()) for _, one in cases]
    return pc.case_when(masks, *codes, otherwise)


class JsonFields(NamedTuple):
    """Fields of JSON documents.

    Attributes:
        fields: Name of a field -> texts.
        outcomes: `RouteOutcome.RECORD`, `NO_JSON` or `NO_TEXT`: the fields of a row can't be had.
    """

    fields: Mapping[str, pa.Array]
    outcomes: pa.Array

    @classmethod
    def read(cls, payloads: pa.Array, templates: Iterable[Template], root: str = PAYLOAD) -> Self:
        """Read the fields that templates name of each payload; none of a payload that is null.

        Args:
            payloads: Bytes.
            templates: They may name other fields too.
            root: What the path of a field begins with.
        """
        from pydantic_core import from_json  # noqa: PLC0415 - few lines need it

        every = dict.fromkeys(name for one in templates for name in one.fields)
        named = {name: path for name in every if (path := payload_path(name, root))}
        names, paths = list(named), list(named.values())
        texts: list[list[str | None]] = [[] for _ in names]
        outcomes = []
        for payload in payloads.to_pylist():
            found: list[str | None] = [None] * len(names)
            outcome = RouteOutcome.RECORD
            try:
                document = None if payload is None else from_json(payload, allow_inf_nan=False, cache_strings="keys")
                found = [_leaf(document, path) for path in paths]
            except ValueError:
                outcome = RouteOutcome.NO_JSON
            except TypeError:
                outcome = RouteOutcome.NO_TEXT
            outcomes.append(int(outcome))
            for column, text in zip(texts, found, strict=True):
                column.append(text)
        fields = {name: pa.array(column, pa.string()) for name, column in zip(names, texts, strict=True)}
        return cls(fields, pa.array(outcomes, pa.int8()))


def _leaf(document: Any, path: Sequence[str | int]) -> str | None:
    """The text at a path in a JSON document; None where there is none.

    Raises:
        TypeError: It is neither text nor a number.
    """
    for step in path:
        if isinstance(step, int):
            document = document[step] if isinstance(document, list) and step < len(document) else None
        else:
            document = document.get(step) if isinstance(document, dict) else None
    if document is None or isinstance(document, str):
        return document
    if isinstance(document, bool) or not isinstance(document, int | float) or not isfinite(document):
        raise TypeError
    return str(document)


def utf8_text(column: pa.Array) -> pa.Array:
    """Bytes, or a text that Spark has made of bytes, as text; null where they are no UTF-8."""
    return _decoded(column, _utf8)


def whole_text(column: pa.Array) -> pa.Array:
    """The same of a text that Spark may have made of a payload, with U+FFFD for what is no UTF-8 [I15]."""
    return _decoded(column, partial(bytes.decode, errors="replace"))


def _decoded(column: pa.Array, decode: Callable[[bytes], str | None]) -> pa.Array:
    """Bytes as text, value by value only where one is no UTF-8."""
    column = column.cast(pa.binary())
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if one is None else decode(one) for one in column.to_pylist()], pa.string())


def _utf8(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def running_sums(numbers: pa.Array) -> pa.Array:
    """The sum of no number, of the first, of the first two ...; of truth values the count of true ones."""
    return pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(numbers.cast(pa.int64()))])


def _numbers(size: int) -> pa.Array:
    """From zero on."""
    return pc.subtract(pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), size)), 1)


def _text(column: pa.Array) -> pa.Array:
    """Values as text; a time as microseconds since 1970."""
    numbers = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
    return numbers.cast(pa.string())


def first_named(lists: pa.Array, key: str) -> pa.Array:
    """The value of the first pair of a name in each row, null where there is none."""
    pairs = lists.flatten()
    mask = pc.equal(pairs.field("key"), key)
    rows, values = pc.list_parent_indices(lists).filter(mask), pairs.field("value").filter(mask)
    if not len(rows):
        return pa.nulls(len(lists), values.type)
    first = pa.concat_arrays([pa.array([True]), pc.not_equal(rows[1:], rows[:-1])])
    rows, values = rows.filter(first), values.filter(first)
    return values.take(pc.index_in(pa.array(range(len(lists)), rows.type), value_set=rows))


class _Rendering(_Columns):
    """The records of one batch."""

    def result(self) -> Rendered:
        """What becomes of the rows."""
        rows = self._rows
        names, topics, routed = self.destinations()
        keys, headers = self.keys(), self.headers()
        if HEADER_MAP in rows.schema.names and (more := rows.column(HEADER_MAP)).null_count < rows.num_rows:
            headers = _both(headers, more.cast(_HEADERS))
        values, moments, late = self._values(), *self._moments()
        outcomes, refusals = self._outcomes(routed, keys, values, late)
        stubs = rows.column("payload").null_count
        columns = {
            "topic": topics if topics.null_count == 0 else pc.coalesce(topics, names),
            "key": keys,
            "value": pc.coalesce(values, rows.column("correlation_data"), pa.scalar(b"")) if stubs else values,
            "headers": headers,
            "timestamp": moments,
            "towline_topic": rows.column("topic"),
            "towline_qos": rows.column("qos"),
            "towline_rare": _rare(rows),
            "towline_received_at": rows.column("received_at"),
            "towline_gateway": rows.column("gateway"),
            "towline_offset": rows.column("offset"),
            "towline_duplicate": rows.column("duplicate"),
            "towline_properties": self.properties(),
        }
        schema = pa.schema(list(RECORD_SCHEMA)[: len(columns)])
        return Rendered(pa.RecordBatch.from_arrays([*columns.values()], schema=schema), outcomes, refusals)

    def _values(self) -> pa.Array:
        if all(route.value is None for route in self._routes):
            return self._rows.column("payload")
        values = [None if view.route is None else view.route.value for view in self.views]
        return self.joined(
            view.column("payload") if value is None else view.text(value).cast(pa.binary())
            for view, value in zip(self.views, values, strict=True)
        )

    def _moments(self) -> tuple[pa.Array, pa.Array | None]:
        """Times of the records, and in which rows a template gives none; None for no such row."""
        received = self._rows.column("received_at")
        if all(route.timestamp is None for route in self._routes):
            return received, None
        texts = self._made(
            pa.string(),
            lambda route: [route.timestamp],
            lambda view, route: None if route.timestamp is None else whole_text(view.text(route.timestamp)),
        ).to_pylist()
        millis = [int(text) if text is not None and _MILLIS.fullmatch(text) else None for text in texts]
        made = [one * 1000 if one is not None and one <= _LAST_MS else None for one in millis]
        late = pa.array([text is not None and one is None for text, one in zip(texts, made, strict=True)])
        return pc.coalesce(pa.array(made, pa.int64()).cast(_MOMENT), received), late

    def _outcomes(
        self, routed: pa.Array, keys: pa.Array, values: pa.Array, late: pa.Array | None
    ) -> tuple[pa.Array, pa.Array]:
        """Codes of `RouteOutcome`, the first reason that holds; and what ``reject`` says."""
        payload, cases = self._rows.column("payload"), list[tuple[pa.Array, Any]]()
        if payload.null_count:
            why = first_named(self._rows.column("user_properties"), "towline-reason")
            many = pc.and_(payload.is_null(), pc.equal(why, Reason.TOO_MANY_PROPERTIES.value).fill_null(False))
            cases += [(many, RouteOutcome.TOO_MANY), (payload.is_null(), RouteOutcome.NOT_WHOLE)]
        if self._numbers.null_count:
            cases.append((self._numbers.is_null(), RouteOutcome.UNROUTED))
        asked, refusals = verdicts(self._rows, RouteOutcome)
        return first_case([*cases, *asked, *self._faults(routed, keys, values, late)], routed), refusals

    def _faults(
        self, routed: pa.Array, keys: pa.Array, values: pa.Array, late: pa.Array | None
    ) -> Iterator[tuple[pa.Array, Any]]:
        """Why a record can't be rendered: rows, and an outcome or a column of outcomes."""
        if any(map(_reads_payload, self._routes)):
            fine = pa.scalar(int(RouteOutcome.RECORD), pa.int8())
            reads = (view.route is not None and _reads_payload(view.route) for view in self.views)
            read = self.joined(
                view.payload.outcomes if one else pa.repeat(fine, view.size)
                for view, one in zip(self.views, reads, strict=True)
            )
            yield pc.not_equal(read, fine), read
        yield pc.greater(routed, int(RouteOutcome.FALLBACK)), routed
        if keys.null_count and any(route.key_required for route in self._routes):
            yield pc.and_(keys.is_null(), self._where(lambda route: route.key_required)), RouteOutcome.KEY_ABSENT
        if DEDUPE in self._rows.schema.names:
            absent = self._rows.column(DEDUPE).is_null()
            yield pc.and_(absent, self._where(lambda route: route.key_tells)), RouteOutcome.KEY_ABSENT
        if values.null_count:
            yield values.is_null(), RouteOutcome.VALUE_ABSENT
        if late is not None:
            yield late, RouteOutcome.NO_TIME

    def _where(self, holds: Callable[[Route], bool]) -> pa.Array:
        """The rows of routes of which something holds."""
        numbers = [n for n, route in enumerate(self._table.routes) if holds(route)]
        return pc.is_in(self._numbers, pa.array(numbers, pa.int32()))


def _reads_payload(route: Route) -> bool:
    return any(payload_path(name) for template in route.templates for name in template.fields)


def _both(first: pa.Array, second: pa.Array) -> pa.Array:
    """The entries of two columns of lists in one, row by row."""
    rows = pa.concat_arrays([pc.list_parent_indices(first), pc.list_parent_indices(second)])
    entries = pa.concat_arrays([first.flatten(), second.flatten()]).take(pc.sort_indices(rows))
    lengths = pc.add(pc.list_value_length(first).fill_null(0), pc.list_value_length(second).fill_null(0))
    return pa.ListArray.from_arrays(running_sums(lengths).cast(pa.int32()), entries)


def _rare(rows: pa.RecordBatch) -> pa.Array:
    """What only some messages say; null where one says nothing of it. A message not taken in whole has no data."""
    columns = [rows.column(name) for name in _RARE]
    payload = rows.column("payload")
    if payload.null_count:
        at = _RARE.index("correlation_data")
        columns[at] = pc.if_else(payload.is_null(), pa.scalar(None, columns[at].type), columns[at])
    there = [column.is_valid() for column in columns[1:] if column.null_count < rows.num_rows]
    if pc.any(columns[0]).as_py():
        there.append(columns[0].fill_null(False))
    kind = RECORD_SCHEMA.field("towline_rare").type
    if not there:
        return pa.nulls(rows.num_rows, kind)
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=pc.invert(reduce(pc.or_, there)))
