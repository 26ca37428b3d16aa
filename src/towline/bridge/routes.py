"""What becomes of the messages of an uplink, over Arrow columns; and what the other way makes in the same way.

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
`towline.bridge.messages` renders the way down by the same outcomes, templates and verdicts.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache, partial, reduce
from itertools import repeat
from math import isfinite
from operator import attrgetter
from typing import Any, Final, Self

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
from towline.bridge.properties import USER_PREFIX, in_bytes, property_headers
from towline.kafka.columns import Columns, distinct_values, header_lists, longest, most
from towline.kafka.deadletters import A_HEADER, INTERNAL, Header, Reason, reserved
from towline.kafka.screening import Fault
from towline.schema import OPTIONAL, ROW_SCHEMA

#: Columns of a row beside those of the message: the number of its route, and what Spark has made of the route's SQL:
#: structs that are null where it raised an error, the dedupe key as text, and names and texts of further headers. A
#: route's ``fields`` are columns too.
ROUTE: Final = "towline_route"
REJECT, WHERE, DEDUPE, HEADER_MAP = "towline_reject", "towline_where", "towline_dedupe", "towline_headers"

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_RARE: Final = ("retain", *OPTIONAL)
_MOMENT: Final = ROW_SCHEMA.field("received_at").type
#: What becomes of a row, of `RowOutcome`; and why, in words that a person reads, where it is refused.
OUTCOME, FAULT = "__outcome", "fault"
#: A record, and the message that it was: its properties become headers after the record is known to be sound, or those
#: of its dead letter. Flat, because a struct a row doubles what a row costs (measured).
#:   headers               the route's own
#:   towline_rare          what only some messages have; null for the others
#:   towline_properties    whether the properties of the message travel as headers of the record
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
        (OUTCOME, pa.int8()),
        (FAULT, pa.string()),
    ]
)
#: Topics of a line that are remembered, none of them longer than a name of Kafka's: devices can't fill the memory.
_TOPICS: Final = 50_000
#: Last millisecond of the year 9999, which clients of Kafka can still show.
_LAST_MS: Final = 253_402_300_799_999
_MILLIS: Final = re.compile(r"[0-9]{1,15}")
_TOPIC_RULE: Final = "empty, no UTF-8, longer than 65,535 bytes, with +, # or U+0000"
_CONTROLS: Final = "a topic or property has a control character, at which a broker may end the connection"


class RowOutcome(IntEnum):
    """What becomes of a message, or on the way down of a record: below zero it is left out.

    Attributes:
        reason: Of the dead letter, where it is refused, from `NOT_WHOLE` on; None where it is not.
        detail: What a person reads of that; "" where the SQL of ``reject`` says it.
    """

    reason: Reason | None
    detail: str

    UNDECIDED = None, ""
    FILTERED = None, ""
    RENDERED = None, ""
    FALLBACK = None, ""
    NOT_WHOLE = Reason.PACKET_TOO_LARGE, "larger than max_packet_bytes; mqtt.user.towline-* have its size and digest"
    TOO_MANY = Reason.TOO_MANY_PROPERTIES, "more than 1,000 properties; the value is the whole MQTT packet"
    UNROUTED = Reason.UNROUTED, "no route takes this topic"
    REJECT_RAISED = Reason.UNMAPPED, "the SQL of reject raised an error on it"
    REJECTED = Reason.REJECTED, ""
    WHERE_RAISED = Reason.UNMAPPED, "the SQL of where raised an error on it"
    NO_JSON = Reason.UNMAPPED, "a template names a field of the payload or value, which is no JSON"
    NO_TEXT = Reason.UNMAPPED, "a field of the payload or value that a template names is neither text nor a number"
    TOPIC_ABSENT = Reason.TOPIC_ABSENT, "it lacks what its topic is made of, or that is no UTF-8 text"
    TOPIC_RESERVED = Reason.TOPIC_RESERVED, "no message may choose a topic of markers, dead letters, or Kafka's own"
    TOPIC_NOT_ALLOWED = Reason.TOPIC_NOT_ALLOWED, "the name of the Kafka topic is not among allowed_topics"
    TOPIC_ILLEGAL = Reason.TOPIC_ILLEGAL, "Kafka takes no such topic name"
    KEY_ABSENT = Reason.KEY_ABSENT, "the message lacks what its key or its dedupe key is made of"
    VALUE_ABSENT = Reason.UNMAPPED, "the message lacks what the value of its record is made of"
    NO_TIME = Reason.TIMESTAMP, "timestamp gives no whole number of milliseconds since 1970"
    MQTT_TOPIC = Reason.TOPIC_ILLEGAL, f"MQTT takes no such topic: {_TOPIC_RULE}"
    HEADER_NO_TEXT = Reason.UNDELIVERABLE, "a header is no UTF-8 text, as MQTT needs; properties may leave it out"
    RESPONSE_TOPIC = Reason.UNDELIVERABLE, f"MQTT takes no such response topic: {_TOPIC_RULE}"
    PROPERTY = Reason.UNDELIVERABLE, "a property is longer than 65,535 bytes, no UTF-8 text, or has U+0000"
    CONTROLS = Reason.UNDELIVERABLE, f'{_CONTROLS}; control_characters = "send" would send it'
    TOO_LARGE = Reason.TOO_LARGE, "the broker takes packets of at most {limit} bytes"

    def __new__(cls, reason: Any, detail: str = "") -> Self:
        """The next member: `RENDERED` is 0."""
        outcome = int.__new__(cls, code := len(cls.__members__) - 2)
        outcome._value_, outcome.reason, outcome.detail = code, reason, detail
        return outcome


_LAST_SOUND: Final = int(RowOutcome.FALLBACK)


def refused(rows: pa.RecordBatch) -> pa.Array:
    """Which rows are refused."""
    return pc.greater(rows.column(OUTCOME), _LAST_SOUND)


def outcomes_of(rows: pa.RecordBatch) -> Counter[RowOutcome]:
    """How many rows have each outcome."""
    counts = pc.value_counts(rows.column(OUTCOME)).to_pylist()
    return Counter({RowOutcome(entry["values"]): entry["counts"] for entry in counts})


def faults(outcomes: pa.Array, refusals: pa.Array, limit: int = 0) -> pa.Array:
    """The words behind outcomes, null where nothing is refused.

    Args:
        outcomes: Codes of `RowOutcome`.
        refusals: What ``reject`` says.
        limit: Bytes of the largest packet that the broker takes.
    """
    texts = pa.array([one.detail.format(limit=limit) or None for one in RowOutcome], pa.string())
    return pc.coalesce(texts.take(pc.subtract(outcomes, int(min(RowOutcome)))), refusals)


@dataclass(frozen=True, slots=True)
class Route:
    """One arm of a line: what a `towline.bridge.config.tables.RouteSection` says, which has the meaning of each word.

    Attributes:
        pattern: What it takes.
        headers: Names and templates, in order, after the properties of the message.
        fallback_topic: None makes a message whose topic is illegal or not allowed a dead letter, or stops the line
            where there are none.
        fields: Names and Spark SQL, in order.
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

    def destination(self, name: str | None) -> tuple[str | None, RowOutcome]:
        """The Kafka topic behind a name that the template of the topic gives, or why there is none."""
        problem = RowOutcome.RENDERED if self.topic.constant is not None else self._problem(name)
        if problem is RowOutcome.RENDERED:
            return name, RowOutcome.RENDERED
        return self.fallback_topic, problem if self.fallback_topic is None else RowOutcome.FALLBACK

    def _problem(self, name: str | None) -> RowOutcome:
        if name is None:
            return RowOutcome.TOPIC_ABSENT
        if (taken := self.reserved) is not None and re.fullmatch(taken, name):
            return RowOutcome.TOPIC_RESERVED
        if kafka_name_problem(name):
            return RowOutcome.TOPIC_ILLEGAL
        return RowOutcome.RENDERED if allowed(name, self.allowed_topics) else RowOutcome.TOPIC_NOT_ALLOWED


#: What of a route decides what a message becomes; the text of its SQL goes nowhere [I12].
_DECIDING: Final = (
    *("pattern", "topic", "key", "value", "timestamp", "headers", "allowed_topics", "fallback_topic", "properties"),
    *("key_required", "omit_missing", "key_tells", "dead_letter_topics"),
)


def to_json(routes: Sequence[Route]) -> str:
    """What decides what a line's messages become, its SQL aside, as `from_json` takes it."""
    written = [{name: getattr(route, name) for name in _DECIDING} for route in routes]
    return json.dumps(written, default=attrgetter("text"))


def from_json(text: str) -> tuple[Route, ...]:
    """The routes of `to_json`."""
    return tuple(map(_route, json.loads(text)))


def _route(written: dict[str, Any]) -> Route:
    for name in ("topic", "key", "value", "timestamp"):
        written[name] = None if written[name] is None else Template.read(written[name])
    for name in ("allowed_topics", "dead_letter_topics"):
        written[name] = tuple(written[name])
    headers = tuple((name, Template.read(template)) for name, template in written.pop("headers"))
    return Route(Pattern.parse(written.pop("pattern"), checked=False), headers=headers, **written)


def of_writer(records: pa.RecordBatch, writer: int, writers: int) -> pa.RecordBatch:
    """The rows of one of several writers: by the key of the record, else the topic of the message.

    A total function of the row, so the writers of a batch have all rows, and each row one of them.
    """
    keys = pc.coalesce(records.column("key"), records.column("towline_topic").cast(pa.binary()))
    coded = keys.dictionary_encode()
    numbers = pa.array([crc32c(key) % writers for key in coded.dictionary.to_pylist()], pa.int64())
    return records.filter(pc.equal(numbers.take(coded.indices), writer))


class RouteTable:
    """The routes of a line, in order, over columns of its messages."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self.taker = _remembered(self._taker)
        self.destination = _remembered(lambda name, number: self.routes[number].destination(name))

    def _taker(self, topic: str) -> int | None:
        matches = (number for number, route in enumerate(self.routes) if route.pattern.takes(topic))
        return next(matches, None)

    def match(self, topics: pa.Array) -> pa.Array:
        """The number of the route that takes each topic; null for none."""
        coded = topics.dictionary_encode()
        return self._matched(coded.dictionary).take(coded.indices)

    def _matched(self, topics: pa.Array) -> pa.Array:
        """The same of topics that are all different."""
        return pa.array([self.taker(topic) for topic in topics.to_pylist()], pa.int32())

    def routed(self, rows: pa.RecordBatch, values: Mapping[str, str]) -> pa.RecordBatch:
        """Rows with the number of their route in `ROUTE`, and what the SQL of a line names of them.

        Args:
            rows: Columns of `ROW_SCHEMA`.
            values: Column -> the wildcard of any route, or the field of a message as templates name it, that it has as
                text; null in rows whose route does not have the wildcard.
        """
        made = _Rendering(self, rows, self.match(rows.column("topic")))
        columns = [made.joined([view.value(name) for view in made.views]) for name in values.values()]
        names = [*rows.schema.names, ROUTE, *values]
        return pa.RecordBatch.from_arrays([*rows.columns, made.numbers, *columns], names=names)

    def render(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """What becomes of messages, as rows of `RECORD_SCHEMA`; of a row that is no record what can be said.

        Args:
            rows: Columns of `ROW_SCHEMA`; where Spark has evaluated the line's SQL, `REJECT`, `WHERE`, `DEDUPE`,
                `HEADER_MAP` and the routes' fields too.
        """
        coded = rows.column("topic").dictionary_encode()
        numbers, topics = self._matched(coded.dictionary), pa.RecordBatch.from_arrays([coded.dictionary], ["topic"])
        over = _Rendering(self, topics, numbers)
        return _Rendering(self, rows, numbers.take(coded.indices), over, coded.indices).records()


def _remembered(ask: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a name, known again, but for long ones."""
    known = lru_cache(_TOPICS)(ask)
    return lambda name, *of: (ask if name is not None and len(name) > MAX_TOPIC_LENGTH else known)(name, *of)


#: What the template of a Kafka topic gives, where the record goes, and the outcome of that name.
_DESTINATION: Final = pa.struct([("name", pa.string()), ("topic", pa.string()), ("outcome", pa.int8())])


def of_schema(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of Spark's with the types of `ROW_SCHEMA`: its session may name the time zone otherwise."""
    fields = [ROW_SCHEMA.field(one.name) if one.name in ROW_SCHEMA.names else one for one in batch.schema]
    schema = pa.schema(fields)
    return batch if batch.schema == schema else batch.cast(schema)


@lru_cache(maxsize=4)
def route_table(routes: str) -> RouteTable:
    """The table of a line, of `to_json`; a process runs tasks of several lines, one after the other."""
    return RouteTable(from_json(routes))


def _is_static(route: Route, templates: Iterable[Template | None]) -> bool:
    """Whether templates follow from the MQTT topic alone."""
    return all(name == "mqtt.topic" or name in route.pattern.names for one in templates if one for name in one.fields)


class Values(ABC):
    """Fields of the rows of a batch as texts, and templates over them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: dict[str, pa.Array] = {}

    @abstractmethod
    def _value(self, name: str) -> pa.Array:
        """A field of each row as text, null where it has none."""

    def value(self, name: str) -> pa.Array:
        """The same, made once."""
        if name not in self._values:
            self._values[name] = self._value(name)
        return self._values[name]

    def text(self, template: Template) -> pa.Array:
        """The text of a template for each row, null where a field is."""
        if template.constant is not None:
            return self.constant(template.constant, pa.string())
        numbered = enumerate(template.parts)
        parts = [self.value(part) if i % 2 else pa.scalar(part) for i, part in numbered if i % 2 or part]
        return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(""))

    def bytes_of(self, template: Template | None) -> pa.Array | None:
        """The same as bytes; None without a template."""
        return None if template is None else self.text(template).cast(pa.binary())

    def constant(self, value: Any, kind: pa.DataType) -> pa.Array:
        """The same in each row."""
        return pa.repeat(pa.scalar(value, kind), self.size)


class _View(Values):
    """The rows of one route in a batch, or those that no route takes; `at` is where they are, None for all."""

    def __init__(self, rows: pa.RecordBatch, at: pa.Array | None, number: int | None, routes: Sequence[Route]) -> None:
        super().__init__(rows.num_rows if at is None else len(at))
        self._rows, self.at, self.number = rows, at, number
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
        present = name in self._rows.schema.names
        return self.column(name).cast(pa.string()) if present else pa.nulls(self.size, pa.string())

    @cached_property
    def _levels(self) -> pa.Array:
        return pc.split_pattern(self.column("topic"), "/")

    @cached_property
    def payload(self) -> JsonFields:
        """The fields of the payloads that the route's templates name."""
        return JsonFields(self.column("payload"), self.route.templates if self.route else ())

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


def verdicts(rows: pa.RecordBatch) -> tuple[list[tuple[pa.Array, Any]], pa.Array]:
    """What ``reject`` and then ``where`` say, where Spark was asked, for `first_case`; and the texts of ``reject``."""
    present, refusals = set(rows.schema.names), pa.nulls(rows.num_rows, pa.string())
    cases: list[tuple[pa.Array, Any]] = []
    if REJECT in present:
        column = rows.column(REJECT)
        refusals = whole_text(pc.struct_field(column, 0))
        cases += [(column.is_null(), RowOutcome.REJECT_RAISED), (refusals.is_valid(), RowOutcome.REJECTED)]
    if WHERE in present:
        column = rows.column(WHERE)
        wanted = pc.struct_field(column, 0)
        cases.append((column.is_null(), RowOutcome.WHERE_RAISED))
        cases += [(wanted.is_null(), RowOutcome.UNDECIDED), (pc.invert(wanted), RowOutcome.FILTERED)]
    return cases, refusals


def first_case(cases: Iterable[tuple[pa.Array, Any]], otherwise: pa.Array) -> pa.Array:
    """Of each row the code, or that of a column of codes, of the first case whose mask is true there."""
    cases = [(mask, code) for mask, code in cases if pc.any(mask).as_py()]
    if not cases:
        return otherwise
    masks = pa.StructArray.from_arrays([mask.fill_null(False) for mask, _ in cases], list(map(str, range(len(cases)))))
    codes = [one if isinstance(one, pa.Array) else pa.scalar(int(one), pa.int8()) for _, one in cases]
    return pc.case_when(masks, *codes, otherwise)


class JsonFields:
    """The fields of JSON documents that templates name, as texts; none of a document that is null.

    Args:
        documents: Bytes.
        templates: They may name other fields too.
        root: What the path of a field begins with.
    """

    def __init__(self, documents: pa.Array, templates: Iterable[Template], root: str = PAYLOAD) -> None:
        every = dict.fromkeys(name for one in templates for name in one.fields)
        paths = {name: path for name in every if (path := payload_path(name, root))}
        texts: dict[str, list[str | None]] = {name: [] for name in paths}
        outcomes = [] if paths else [int(RowOutcome.RENDERED)] * len(documents)
        if paths:
            from pydantic_core import from_json  # noqa: PLC0415 - few lines need it
        for document in documents.to_pylist() if paths else ():
            leaves: Iterable[str | None] = repeat(None)
            outcome = RowOutcome.RENDERED
            try:
                value = None if document is None else from_json(document, allow_inf_nan=False, cache_strings="keys")
                leaves = [_leaf(value, path) for path in paths.values()]
            except ValueError:
                outcome = RowOutcome.NO_JSON
            except TypeError:
                outcome = RowOutcome.NO_TEXT
            outcomes.append(int(outcome))
            for column, text in zip(texts.values(), leaves, strict=False):
                column.append(text)
        self.fields = {name: pa.array(column, pa.string()) for name, column in texts.items()}
        #: `RowOutcome.RENDERED`, `NO_JSON` or `NO_TEXT`: the fields of a row can't be had.
        self.outcomes = pa.array(outcomes, pa.int8())

    @staticmethod
    def case(outcomes: pa.Array) -> tuple[pa.Array, pa.Array]:
        """That of rows whose fields can't be had, for `first_case`."""
        return pc.not_equal(outcomes, int(RowOutcome.RENDERED)), outcomes


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


class _Rendering:
    """What routes make of rows, whose `numbers` say which route takes each.

    `topics` is the same over the topics of the rows, `indices` the topic of each row there; None where the rows are
    topics themselves.
    """

    def __init__(
        self,
        table: RouteTable,
        rows: pa.RecordBatch,
        numbers: pa.Array,
        topics: _Rendering | None = None,
        indices: pa.Array | None = None,
    ) -> None:
        self._table, self._rows, self.numbers, self._topics, self._indices = table, rows, numbers, topics, indices
        found = pc.unique(numbers).to_pylist() or [None]
        masks = ((one, numbers.is_null() if one is None else pc.equal(numbers, one).fill_null(False)) for one in found)
        places = [(one, pc.indices_nonzero(mask)) for one, mask in masks] if len(found) > 1 else [(found[0], None)]
        #: The rows of each route; and the routes.
        self.views = [_View(rows, at, number, table.routes) for number, at in places]
        self._routes = [view.route for view in self.views if view.route is not None]

    @cached_property
    def _order(self) -> pa.Array:
        return pc.sort_indices(pa.concat_arrays([view.at for view in self.views if view.at is not None]))

    def joined(self, parts: Sequence[pa.Array]) -> pa.Array:
        """The columns of the views as one, in the order of the rows."""
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts).take(self._order)

    def _made(
        self,
        kind: pa.DataType,
        templates: Callable[[Route], Iterable[Template | None]],
        make: Callable[[_View, Route], pa.Array | None],
    ) -> pa.Array:
        """A column, null where ``make`` gives None, and of rows without a route."""
        if self._topics is not None and all(_is_static(route, templates(route)) for route in self._routes):
            column = self._topics._made(kind, templates, make)  # noqa: SLF001 - the same over topics
            none = column.null_count == len(column)
            return pa.nulls(self._rows.num_rows, kind) if none else column.take(self._indices)
        parts = [None if view.route is None else make(view, view.route) for view in self.views]
        pairs = zip(self.views, parts, strict=True)
        return self.joined([pa.nulls(view.size, kind) if part is None else part for view, part in pairs])

    def _destinations(self, view: _View, route: Route) -> pa.Array:
        """Structs of `_DESTINATION`."""
        coded = whole_text(view.text(route.topic)).dictionary_encode(null_encoding="encode")
        made = [(name, *self._table.destination(name, view.number)) for name in coded.dictionary.to_pylist()]
        return pa.array(made, _DESTINATION).take(coded.indices)

    def records(self) -> pa.RecordBatch:
        """The rows as those of `RECORD_SCHEMA`."""
        rows = self._rows
        names, topics, routed = self._made(_DESTINATION, lambda route: [route.topic], self._destinations).flatten()
        keys = self._made(pa.binary(), lambda route: [route.key], lambda view, route: view.bytes_of(route.key))
        headers = self._made(_HEADERS, lambda route: [text for _, text in route.headers], _View.headers)
        properties = self._made(pa.bool_(), lambda _: [], lambda view, one: view.constant(one.properties, pa.bool_()))
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
            "towline_properties": properties,
            OUTCOME: outcomes,
            FAULT: faults(outcomes, refusals),
        }
        return pa.RecordBatch.from_arrays([*columns.values()], schema=RECORD_SCHEMA)

    def _values(self) -> pa.Array:
        if all(route.value is None for route in self._routes):
            return self._rows.column("payload")
        made = ((view, None if view.route is None else view.bytes_of(view.route.value)) for view in self.views)
        return self.joined([view.column("payload") if value is None else value for view, value in made])

    def _moments(self) -> tuple[pa.Array, pa.Array | None]:
        """Times of the records, and in which rows a template gives none; None for no such row."""
        received = self._rows.column("received_at")
        if all(route.timestamp is None for route in self._routes):
            return received, None
        said = self._made(pa.binary(), lambda one: [one.timestamp], lambda view, one: view.bytes_of(one.timestamp))
        texts = whole_text(said).to_pylist()
        millis = [int(text) if text is not None and _MILLIS.fullmatch(text) else None for text in texts]
        made = [one * 1000 if one is not None and one <= _LAST_MS else None for one in millis]
        late = pa.array([text is not None and one is None for text, one in zip(texts, made, strict=True)])
        return pc.coalesce(pa.array(made, pa.int64()).cast(_MOMENT), received), late

    def _outcomes(
        self, routed: pa.Array, keys: pa.Array, values: pa.Array, late: pa.Array | None
    ) -> tuple[pa.Array, pa.Array]:
        """Codes of `RowOutcome`, the first reason that holds; and what ``reject`` says."""
        payload, cases = self._rows.column("payload"), list[tuple[pa.Array, Any]]()
        if payload.null_count:
            why = first_named(self._rows.column("user_properties"), "towline-reason")
            many = pc.and_(payload.is_null(), pc.equal(why, Reason.TOO_MANY_PROPERTIES.value).fill_null(False))
            cases += [(many, RowOutcome.TOO_MANY), (payload.is_null(), RowOutcome.NOT_WHOLE)]
        if self.numbers.null_count:
            cases.append((self.numbers.is_null(), RowOutcome.UNROUTED))
        asked, refusals = verdicts(self._rows)
        return first_case([*cases, *asked, *self._faults(routed, keys, values, late)], routed), refusals

    def _faults(
        self, routed: pa.Array, keys: pa.Array, values: pa.Array, late: pa.Array | None
    ) -> Iterator[tuple[pa.Array, Any]]:
        """Why a record can't be rendered: rows, and an outcome or a column of outcomes."""
        if any(len(view.payload.fields) for view in self.views):
            yield JsonFields.case(self.joined([view.payload.outcomes for view in self.views]))
        yield pc.greater(routed, _LAST_SOUND), routed
        if keys.null_count and any(route.key_required for route in self._routes):
            yield pc.and_(keys.is_null(), self._where(lambda route: route.key_required)), RowOutcome.KEY_ABSENT
        if DEDUPE in self._rows.schema.names:
            absent = self._rows.column(DEDUPE).is_null()
            yield pc.and_(absent, self._where(lambda route: route.key_tells)), RowOutcome.KEY_ABSENT
        if values.null_count:
            yield values.is_null(), RowOutcome.VALUE_ABSENT
        if late is not None:
            yield late, RowOutcome.NO_TIME

    def _where(self, holds: Callable[[Route], bool]) -> pa.Array:
        """The rows of routes of which something holds."""
        numbers = [n for n, route in enumerate(self._table.routes) if holds(route)]
        return pc.is_in(self.numbers, pa.array(numbers, pa.int32()))


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


# -- records for the producer -----------------------------------------------------------------------------------------

_WRITTEN: Final = frozenset(("topic", "key", "value", "headers", "timestamp"))
#: What a message has that says nothing more than all do.
_NOTHING: Final[Mapping[str, Any]] = dict.fromkeys(("retain", *OPTIONAL))
#: What headers take at most beside texts, topics and properties of users: names, digits, and microseconds since 1970.
_FIXED_BYTES: Final = 100
_RARE_BYTES: Final = 200


@dataclass(frozen=True)
class RenderedColumns(Columns):
    """Records with what becomes of them: batches of sound ones, and batches of refused ones."""

    def refusals(self, batch: Any) -> list[Fault] | None:
        """Why its rows are refused, of a batch of those."""
        outcomes = batch.column(OUTCOME)
        if not len(outcomes) or outcomes[0].as_py() <= _LAST_SOUND:
            return None
        reasons = [RowOutcome(code).reason for code in outcomes.to_pylist()]
        texts = batch.column(FAULT).to_pylist()
        return [Fault(reason, text) for reason, text in zip(reasons, texts, strict=True) if reason]


@dataclass(frozen=True)
class RecordColumns(RenderedColumns):
    """Batches of `RECORD_SCHEMA`."""

    topic: str | None = None
    present: frozenset[str] = _WRITTEN

    def originals(self, batch: Any, at: int, headers: Sequence[Header]) -> list[Header]:  # noqa: ARG002 - not the record's
        """The headers of a row's dead letter: all properties of its message, and where it came from."""
        row = batch.slice(at, 1)
        ((topic, qos, received),) = _names(row)
        cells = {name: row.column(f"towline_{name}")[0].as_py() for name in ("gateway", "offset", "duplicate", "rare")}
        place = {"mqtt.gateway": cells["gateway"] or "", "mqtt.offset": str(cells["offset"])}
        place |= {"mqtt.duplicate": "true"} if cells["duplicate"] else {}
        made = property_headers(topic, qos, received, cells["rare"] or _NOTHING)
        return [*made, *((name, text.encode()) for name, text in place.items())]

    def largest(self, batch: Any) -> int:
        """As `Columns.largest`."""
        rest = _FIXED_BYTES + longest(batch.column("towline_topic")) + _most_of(batch.column("towline_rare"))
        return super().largest(batch) + rest

    def _headers(self, batch: Any) -> Iterator[Any]:
        own, travels = batch.column("headers"), batch.column("towline_properties").fill_null(False)
        ends = pc.min_max(travels).as_py()
        if not ends["max"]:
            return header_lists(own)
        # What several messages say is one tuple for all of them.
        topics = _each_header(batch.column("towline_topic").cast(pa.binary()), "mqtt.topic")
        levels = _each_header(batch.column("towline_qos"), "mqtt.qos")
        moments = _each_header(batch.column("towline_received_at").cast(pa.int64()), "mqtt.received-at")
        plain, rare = zip(topics, levels, moments, strict=True), batch.column("towline_rare")
        some = rare.null_count < batch.num_rows
        if ends["min"] and not some and not len(own.flatten()):
            return map(list, plain)
        more, names = (rare.to_pylist(), _names(batch)) if some else (repeat(None), repeat((None, 0, 0)))
        flags = repeat(True) if ends["min"] else travels.to_pylist()
        return (
            [*(always if rest is None else property_headers(*name, rest)), *mine] if travel else mine
            for travel, always, name, rest, mine in zip(flags, plain, names, more, header_lists(own), strict=False)
        )


def _names(batch: Any) -> Iterator[tuple[bytes | None, int, int]]:
    """Topic, QoS, and the microseconds since 1970 of each message."""
    moments = distinct_values(batch.column("towline_received_at").cast(pa.int64()))
    # What is the same in all rows is repeated.
    topics = batch.column("towline_topic").cast(pa.binary()).to_pylist()
    return zip(topics, distinct_values(batch.column("towline_qos")), moments, strict=False)


def _each_header(column: Any, name: str) -> Iterator[Header]:
    coded = column.dictionary_encode(null_encoding="encode")
    made = [(name, in_bytes(value)) for value in coded.dictionary.to_pylist()]
    return repeat(made[0], len(column)) if len(made) == 1 else map(made.__getitem__, coded.indices.to_pylist())


def _most_of(rare: Any) -> int:
    """At least the bytes of the headers that any message's rare properties become."""
    if rare.null_count == len(rare):
        return 0
    parts = dict(zip(rare.type.names, rare.flatten(), strict=True))
    texts = sum(longest(parts[name]) for name in ("content_type", "response_topic", "correlation_data"))
    users, numbers = parts["user_properties"], parts["subscription_ids"]
    pairs = users.flatten()
    one = A_HEADER + len(USER_PREFIX) + longest(pairs.field("key")) + longest(pairs.field("value"))
    return _RARE_BYTES + texts + most(users) * one + most(numbers) * (A_HEADER + _RARE_BYTES)
