"""Routing of uplink messages to Kafka records, over Arrow columns; the downlink uses the same outcomes and templates.

    match    the first route whose filter matches takes the message, like the arms of a switch; so a message makes at
             most one record and the account adds up [I11]
    reject   Spark SQL; its text is the reason why the message is refused
    where    Spark SQL; false filters the message, and so does null, which is counted separately
    render   topic, key, value, headers and time of the record, each a template

Spark evaluates ``reject`` and ``where``; here they are columns. A template with a field that the message lacks gives
null: no key, no topic, no header. A topic name made of fields must be a legal Kafka name, an
allowed one and not reserved; else the message is a dead letter (design section 10: a device never names a topic outside
the allowed list).

Routes and levels are looked up once for each topic of a batch.
`towline.bridge.messages` renders downlink messages with the same outcomes, templates and verdicts.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache, reduce
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
    is_allowed,
    kafka_name_problem,
    payload_path,
)
from towline.bridge.properties import USER_PREFIX, property_headers, to_bytes
from towline.kafka.columns import Columns, Record, header_lists, longest_bytes, longest_list, values_of
from towline.kafka.deadletters import HEADER_OVERHEAD, Header, Reason, reserved_topics_pattern
from towline.kafka.recordcheck import RecordFault
from towline.schema import OPTIONAL_COLUMNS, ROW_SCHEMA

#: Additional columns of a row: the index of its route, and the results of the route's SQL: structs that are null where
#: it raised, the dedupe key as text, and names and texts of further headers. A route's ``fields`` are columns too.
ROUTE: Final = "towline_route"
REJECT, WHERE, DEDUPE, HEADER_MAP = "towline_reject", "towline_where", "towline_dedupe", "towline_headers"

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_NO_HEADERS: Final = pa.array([], _HEADERS.value_type)
_RARE_COLUMNS: Final = ("retain", *OPTIONAL_COLUMNS)
_TIMESTAMP_TYPE: Final = ROW_SCHEMA.field("received_at").type
#: `RowOutcome` of a row; and the reason as text if it is refused.
OUTCOME, FAULT = "__outcome", "fault"
#: A record and its message, whose properties become headers of the record if it is valid, else of its dead letter.
#: Flat, because a struct per row doubles the cost (measured).
#:   headers               the route's own
#:   towline_payload       payload of the message, if a route's `value` may stand in its place; else null
#:   towline_rare          properties that few messages have; else null
#:   towline_properties    whether the properties of the message become headers of the record
RECORD_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("timestamp", _TIMESTAMP_TYPE),
        ("towline_topic", pa.string()),
        ("towline_qos", pa.int8()),
        ("towline_payload", pa.binary()),
        ("towline_rare", pa.struct([ROW_SCHEMA.field(name) for name in _RARE_COLUMNS])),
        ("towline_received_at", _TIMESTAMP_TYPE),
        ("towline_gateway", pa.string()),
        ("towline_offset", pa.int64()),
        ("towline_duplicate", pa.bool_()),
        ("towline_properties", pa.bool_()),
        (OUTCOME, pa.int8()),
        (FAULT, pa.string()),
    ]
)
#: Cached topics of a line, none longer than a Kafka topic name: devices can't fill the memory.
_MAX_CACHED_TOPICS: Final = 50_000
#: Last millisecond of the year 9999, which Kafka clients can still display.
_MAX_TIMESTAMP_MS: Final = 253_402_300_799_999
_MILLISECONDS: Final = re.compile(r"[0-9]{1,15}")


class RowOutcome(IntEnum):
    """Outcome of a message of an uplink, or of a record of a downlink; below zero it is filtered.

    Attributes:
        reason: Reason of the dead letter, for refused rows, from `NOT_WHOLE` on; None for others.
        detail: Text of the reason for users; "" where the SQL of ``reject`` gives it.
    """

    reason: Reason | None
    detail: str

    UNDECIDED = None, ""
    FILTERED = None, ""
    RENDERED = None, ""
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
    MQTT_TOPIC = Reason.TOPIC_ILLEGAL, "MQTT takes no such topic: empty, no UTF-8, over 65,535 bytes, +, # or U+0000"
    PROPERTY = Reason.UNDELIVERABLE, "a property is no UTF-8, over 65,535 bytes, or has U+0000; a response topic + or #"
    CONTROLS = Reason.UNDELIVERABLE, 'a control character in a topic or property; control_characters = "send" sends it'
    TOO_LARGE = Reason.TOO_LARGE, "the broker takes packets of at most {limit} bytes"

    def __new__(cls, reason: Any, detail: str = "") -> Self:
        """Number the members from -2 on: `RENDERED` is 0."""
        outcome = int.__new__(cls, code := len(cls.__members__) - 2)
        outcome._value_, outcome.reason, outcome.detail = code, reason, detail
        return outcome


_RENDERED: Final = int(RowOutcome.RENDERED)


def refused_mask(rows: pa.RecordBatch) -> pa.Array:
    """Return a mask of the refused rows."""
    return pc.greater(rows.column(OUTCOME), _RENDERED)


def count_outcomes(rows: pa.RecordBatch) -> Counter[RowOutcome]:
    """Count the rows of each outcome."""
    counts = pc.value_counts(rows.column(OUTCOME)).to_pylist()
    return Counter({RowOutcome(entry["values"]): entry["counts"] for entry in counts})


def fault_texts(outcomes: pa.Array, refusals: pa.Array, limit: int = 0) -> pa.Array:
    """Return the fault texts of outcomes, null where a row is not refused.

    Args:
        outcomes: Codes of `RowOutcome`.
        refusals: Texts of ``reject``.
        limit: The broker's maximum packet size, in bytes.
    """
    texts = pa.array([outcome.detail.format(limit=limit) or None for outcome in RowOutcome], pa.string())
    return pc.coalesce(texts.take(pc.subtract(outcomes, int(min(RowOutcome)))), refusals)


@dataclass(frozen=True, slots=True)
class Route:
    """Compiled route of a line; `towline.bridge.config.tables.RouteSection` explains the keys.

    Attributes:
        pattern: Topics that it takes.
        headers: Names and templates, in order, after the properties of the message.
        fields: Names and Spark SQL, in order.
        dedupe: Unique name of a message, as a template or as SQL; None to keep repeats.
        key_tells: Whether only the dedupe key recognises a repeat, since the QoS does not: a message without a key is a
            dead letter.
        dead_letter_topics: Dead-letter topics of all lines of the bridge; no message may name one.
        qos: QoS that the route alone would subscribe with.
        repeatable: Whether a message may be delivered twice: it has a dedupe key, or promises at least once only.
    """

    pattern: Pattern
    topic: Template
    key: Template | None = None
    value: Template | None = None
    timestamp: Template | None = None
    headers: tuple[tuple[str, Template], ...] = ()
    where: str | None = None
    allowed_topics: tuple[str, ...] = ()
    properties: bool = True
    key_required: bool = False
    fields: tuple[tuple[str, str], ...] = ()
    reject: str | None = None
    header_map: str | None = None
    dedupe: Template | str | None = None
    key_tells: bool = False
    dead_letter_topics: tuple[str, ...] = ()
    qos: int = 0
    repeatable: bool = False

    @property
    def templates(self) -> tuple[Template, ...]:
        """Templates of its records."""
        templates = (self.topic, self.key, self.value, self.timestamp)
        return (*(template for template in templates if template is not None), *(text for _, text in self.headers))

    @property
    def rendered_fields(self) -> tuple[str, ...]:
        """Names of its fields that the templates of its records use."""
        used_fields = {name for template in self.templates for name in template.fields}
        return tuple(name for name, _ in self.fields if name in used_fields)

    @property
    def sql_texts(self) -> tuple[str, ...]:
        """Texts of its Spark SQL."""
        dedupe = self.dedupe if isinstance(self.dedupe, str) else None
        texts = (self.where, self.reject, self.header_map, dedupe, *(text for _, text in self.fields))
        return tuple(text for text in texts if text is not None)

    def _is_reserved(self, name: str) -> bool:
        """Return whether no message may name a Kafka topic: one of markers or dead letters, or Kafka's own."""
        return re.fullmatch(reserved_topics_pattern(self.dead_letter_topics), name) is not None

    def may_name_topic(self, name: str) -> bool:
        """Return whether a message may name a Kafka topic, judged by the beginning of the template."""
        is_legal = kafka_name_problem(name) is None and not self._is_reserved(name)
        return is_legal and name.startswith(self.topic.parts[0])

    def topic_outcome(self, name: str | None) -> RowOutcome:
        """Return the outcome of a name that the topic's template gives."""
        if self.topic.constant is not None:
            return RowOutcome.RENDERED
        if name is None:
            return RowOutcome.TOPIC_ABSENT
        if self._is_reserved(name):
            return RowOutcome.TOPIC_RESERVED
        if kafka_name_problem(name):
            return RowOutcome.TOPIC_ILLEGAL
        return RowOutcome.RENDERED if is_allowed(name, self.allowed_topics) else RowOutcome.TOPIC_NOT_ALLOWED


#: Keys of a route that map messages to records; the text of its SQL is never passed on [I12].
_MAPPING_KEYS: Final = (
    *("pattern", "topic", "key", "value", "timestamp", "headers", "allowed_topics", "properties"),
    *("key_required", "key_tells", "dead_letter_topics"),
)


def routes_to_json(routes: Sequence[Route]) -> str:
    """Serialise the mapping of messages to records, without SQL, for `routes_from_json`."""
    mappings = [{name: getattr(route, name) for name in _MAPPING_KEYS} for route in routes]
    return json.dumps(mappings, default=attrgetter("text"))


def routes_from_json(text: str) -> tuple[Route, ...]:
    """Return the routes serialised by `routes_to_json`."""
    mappings: list[dict[str, Any]] = json.loads(text)
    for mapping in mappings:
        mapping["pattern"] = Pattern.parse(mapping["pattern"], validate=False)
        mapping["headers"] = tuple((name, Template.parse(template)) for name, template in mapping["headers"])
        for name in ("topic", "key", "value", "timestamp"):
            mapping[name] = None if mapping[name] is None else Template.parse(mapping[name])
    return tuple(Route(**mapping) for mapping in mappings)


def rows_of_writer(records: pa.RecordBatch, writer: int, writers: int) -> pa.RecordBatch:
    """Return the rows of one of several writers: by the key of the record, else by the topic of the message.

    It is a total function of the row: each row belongs to exactly one writer.
    """
    keys = pc.coalesce(records.column("key"), records.column("towline_topic").cast(pa.binary()))
    codes = keys.dictionary_encode()
    writer_numbers = pa.array([crc32c(key) % writers for key in codes.dictionary.to_pylist()], pa.int64())
    return records.filter(pc.equal(writer_numbers.take(codes.indices), writer))


class RouteTable:
    """Routes of a line, in order, applied to columns of its messages."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        numbered = tuple(enumerate(self.routes))
        self.route_number = _cached_by_name(
            lambda topic: next((n for n, r in numbered if r.pattern.matches(topic)), None)
        )
        self.topic_outcome = _cached_by_name(lambda name, number: self.routes[number].topic_outcome(name))

    def match(self, topics: pa.Array) -> pa.Array:
        """Return the index of the route that takes each topic; null if none does."""
        codes = topics.dictionary_encode()
        numbers = pa.array([self.route_number(topic) for topic in codes.dictionary.to_pylist()], pa.int32())
        return numbers.take(codes.indices)

    def add_routes(self, rows: pa.RecordBatch, values: Mapping[str, str]) -> pa.RecordBatch:
        """Add to rows the index of their route in `ROUTE`, and the columns that the line's SQL needs.

        Args:
            rows: Columns of `ROW_SCHEMA`.
            values: Column -> wildcard of a route, or message field as templates name it, that the column has as text;
                null in rows whose route lacks the wildcard.
        """
        rendered = _BatchRendering(self, rows)
        columns = [rendered.join_views([view.field_text(name) for view in rendered.views]) for name in values.values()]
        names = [*rows.schema.names, ROUTE, *values]
        return pa.RecordBatch.from_arrays([*rows.columns, rendered.route_numbers, *columns], names=names)

    def render(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Render messages as rows of `RECORD_SCHEMA`; a refused row has only the cells that could be computed.

        Args:
            rows: Columns of `ROW_SCHEMA`; where Spark has evaluated the line's SQL, `REJECT`, `WHERE`, `DEDUPE`,
                `HEADER_MAP` and the routes' fields too.
        """
        return _BatchRendering(self, rows).records()


def _cached_by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of a name, but not for long names."""
    cached = lru_cache(_MAX_CACHED_TOPICS)(function)
    return lambda name, *args: (function if name is not None and len(name) > MAX_TOPIC_LENGTH else cached)(name, *args)


#: Name from the template of a Kafka topic, and its outcome.
_TOPIC: Final = pa.struct([("name", pa.string()), ("outcome", pa.int8())])


def to_row_schema(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cast a batch of Spark's to the types of `ROW_SCHEMA`: its session may name the time zone otherwise."""
    fields = [ROW_SCHEMA.field(field.name) if field.name in ROW_SCHEMA.names else field for field in batch.schema]
    schema = pa.schema(fields)
    return batch if batch.schema == schema else batch.cast(schema)


@lru_cache(maxsize=4)
def route_table(routes: str) -> RouteTable:
    """Return the table of `routes_to_json`'s text; cached, since a process runs tasks of several lines in turn."""
    return RouteTable(routes_from_json(routes))


class FieldTexts(ABC):
    """Fields of a batch's rows as text columns, and templates over them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._texts: dict[str, pa.Array] = {}

    @abstractmethod
    def _make_text(self, name: str) -> pa.Array:
        """Compute a field of each row as text, null where a row lacks it."""

    def field_text(self, name: str) -> pa.Array:
        """Return a field of each row as text; computed once."""
        if name not in self._texts:
            self._texts[name] = self._make_text(name)
        return self._texts[name]

    def template_text(self, template: Template) -> pa.Array:
        """Return the text of a template for each row, null where a field is."""
        if template.constant is not None:
            return self.constant(template.constant, pa.string())
        numbered = enumerate(template.parts)
        parts = [self.field_text(part) if i % 2 else pa.scalar(part) for i, part in numbered if i % 2 or part]
        return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(""))

    def bytes_of(self, template: Template | None) -> pa.Array | None:
        """Return the text of a template as bytes; None without a template."""
        return None if template is None else self.template_text(template).cast(pa.binary())

    def constant(self, value: Any, arrow_type: pa.DataType) -> pa.Array:
        """Return a column with the same value in each row."""
        return pa.repeat(pa.scalar(value, arrow_type), self.size)


class _RouteView(FieldTexts):
    """View of the rows of one route in a batch, or of unrouted rows; `indices` is None for all rows."""

    def __init__(
        self, rows: pa.RecordBatch, indices: pa.Array | None, route_number: int | None, routes: Sequence[Route]
    ) -> None:
        super().__init__(rows.num_rows if indices is None else len(indices))
        self._rows, self.indices, self.route_number = rows, indices, route_number
        self.route = None if route_number is None else routes[route_number]

    def column(self, name: str) -> pa.Array:
        """Return a column of the rows."""
        column = self._rows.column(name)
        return column if self.indices is None else column.take(self.indices)

    def _make_text(self, name: str) -> pa.Array:
        if self.route is not None and (level := self.route.pattern.wildcard_level(name)) is not None:
            levels, topic_indices = self._levels
            return pc.list_element(levels, level).take(topic_indices)
        if name in FIELDS:
            column = self.column(FIELDS[name])  # a time as microseconds since 1970
            return (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).cast(pa.string())
        if name.startswith(USER_PREFIX):
            return first_value_of(self.column("user_properties"), name.removeprefix(USER_PREFIX))
        if name == PAYLOAD:
            return utf8_text(self.column("payload"))
        if payload_path(name):
            return self.payload_fields.fields[name]
        present = name in self._rows.schema.names
        return self.column(name).cast(pa.string()) if present else pa.nulls(self.size, pa.string())

    @cached_property
    def _levels(self) -> tuple[pa.Array, pa.Array]:
        """Levels of each distinct topic, and the index of each row's topic."""
        codes = self.column("topic").dictionary_encode()
        return pc.split_pattern(codes.dictionary, "/"), codes.indices

    @cached_property
    def payload_fields(self) -> JsonFields:
        """JSON fields of the payloads that the route's templates name."""
        return JsonFields(self.column("payload"), self.route.templates if self.route else ())

    def headers(self, route: Route) -> pa.Array:
        """Return the headers of a route as a list column."""
        lists = []
        for name, template in route.headers:
            columns = [self.constant(name, pa.string()), self.template_text(template).cast(pa.binary())]
            pairs = pa.StructArray.from_arrays(columns, fields=list(_NO_HEADERS.type))
            present = columns[1].is_valid()
            pairs = pairs.filter(present) if columns[1].null_count else pairs
            lists.append(pa.ListArray.from_arrays(running_sums(present).cast(pa.int32()), pairs))
        no_headers = pa.ListArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), self.size + 1), _NO_HEADERS)
        return _concat_lists(lists) if lists else no_headers


def sql_verdicts(rows: pa.RecordBatch) -> tuple[list[tuple[pa.Array, Any]], pa.Array]:
    """Return the cases of ``reject`` and then ``where`` for `first_case`, and the texts of ``reject``."""
    present, refusals = set(rows.schema.names), pa.nulls(rows.num_rows, pa.string())
    cases: list[tuple[pa.Array, Any]] = []
    if REJECT in present:
        column = rows.column(REJECT)
        refusals = utf8_text(pc.struct_field(column, 0), lossy=True)
        cases += [(column.is_null(), RowOutcome.REJECT_RAISED), (refusals.is_valid(), RowOutcome.REJECTED)]
    if WHERE in present:
        column = rows.column(WHERE)
        condition = pc.struct_field(column, 0)
        cases.append((column.is_null(), RowOutcome.WHERE_RAISED))
        cases += [(condition.is_null(), RowOutcome.UNDECIDED), (pc.invert(condition), RowOutcome.FILTERED)]
    return cases, refusals


def first_case(cases: Iterable[tuple[pa.Array, Any]], default: pa.Array) -> pa.Array:
    """Return for each row the code of the first case with a true mask; a case's code may be a column."""
    cases = [(mask, code) for mask, code in cases if pc.any(mask).as_py()]
    if not cases:
        return default
    masks = pa.StructArray.from_arrays([mask.fill_null(False) for mask, _ in cases], list(map(str, range(len(cases)))))
    codes = [code if isinstance(code, pa.Array) else pa.scalar(int(code), pa.int8()) for _, code in cases]
    return pc.case_when(masks, *codes, default)


class JsonFields:
    """Fields of JSON documents that templates name, as text columns; null for a null document.

    Args:
        documents: Bytes.
        templates: They may name other fields too.
        root: Beginning of the path of a field.
    """

    def __init__(self, documents: pa.Array, templates: Iterable[Template], root: str = PAYLOAD) -> None:
        field_names = dict.fromkeys(name for template in templates for name in template.fields)
        paths = {name: path for name in field_names if (path := payload_path(name, root))}
        texts: dict[str, list[str | None]] = {name: [] for name in paths}
        outcomes = [] if paths else [int(RowOutcome.RENDERED)] * len(documents)
        if paths:
            from pydantic_core import from_json  # noqa: PLC0415 - few lines need it
        for document in documents.to_pylist() if paths else ():
            leaves: Iterable[str | None] = repeat(None)
            outcome = RowOutcome.RENDERED
            try:
                value = None if document is None else from_json(document, allow_inf_nan=False, cache_strings="keys")
                leaves = [_text_at_path(value, path) for path in paths.values()]
            except ValueError:
                outcome = RowOutcome.NO_JSON
            except TypeError:
                outcome = RowOutcome.NO_TEXT
            outcomes.append(int(outcome))
            for column, text in zip(texts.values(), leaves, strict=False):
                column.append(text)
        self.fields = {name: pa.array(column, pa.string()) for name, column in texts.items()}
        #: `RowOutcome.RENDERED`, `NO_JSON` or `NO_TEXT`: of a row; the last two: its fields can't be read.
        self.outcomes = pa.array(outcomes, pa.int8())

    @staticmethod
    def fault_case(outcomes: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the case of rows with unreadable fields, for `first_case`."""
        return pc.not_equal(outcomes, int(RowOutcome.RENDERED)), outcomes


def _text_at_path(document: Any, path: Sequence[str | int]) -> str | None:
    """Return the text at a path in a JSON document, None if there is none; TypeError if it is no text or number."""
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


def utf8_text(column: pa.Array, *, lossy: bool = False) -> pa.Array:
    """Decode bytes, or a text that Spark made of bytes; what is no UTF-8 is null, or `lossy` text with U+FFFD [I15]."""
    column = column.cast(pa.binary())
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:  # value by value only if one is no UTF-8
        values = column.to_pylist()
        texts = [None if value is None else value.decode(errors="replace") for value in values]
        if not lossy:
            texts = [
                text if text is None or text.encode() == value else None
                for text, value in zip(texts, values, strict=True)
            ]
        return pa.array(texts, pa.string())


def running_sums(numbers: pa.Array) -> pa.Array:
    """Return the running sums of numbers, beginning with 0; of booleans the running counts of true."""
    return pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(numbers.cast(pa.int64()))])


def first_value_of(lists: pa.Array, key: str) -> pa.Array:
    """Return the value of the first pair with a key in each row, null if there is none."""
    pairs = lists.flatten()
    mask = pc.equal(pairs.field("key"), key)
    rows, values = pc.list_parent_indices(lists).filter(mask), pairs.field("value").filter(mask)
    if not len(rows):
        return pa.nulls(len(lists), values.type)
    is_first = pa.concat_arrays([pa.array([True]), pc.not_equal(rows[1:], rows[:-1])])
    rows, values = rows.filter(is_first), values.filter(is_first)
    return values.take(pc.index_in(pa.array(range(len(lists)), rows.type), value_set=rows))


class _BatchRendering:
    """Rendering of a batch by its routes; `route_numbers` is the index of each row's route."""

    def __init__(self, table: RouteTable, rows: pa.RecordBatch) -> None:
        self._table, self._rows = table, rows
        self.route_numbers = numbers = table.match(rows.column("topic"))
        distinct = pc.unique(numbers).to_pylist() or [None]
        masks = ((n, numbers.is_null() if n is None else pc.equal(numbers, n).fill_null(False)) for n in distinct)
        groups = [(n, pc.indices_nonzero(mask)) for n, mask in masks] if len(distinct) > 1 else [(distinct[0], None)]
        #: Views of the rows of each route; and the routes.
        self.views = [_RouteView(rows, indices_of, n, table.routes) for n, indices_of in groups]
        self._routes = [view.route for view in self.views if view.route is not None]

    @cached_property
    def _row_order(self) -> pa.Array:
        return pc.sort_indices(pa.concat_arrays([view.indices for view in self.views if view.indices is not None]))

    def join_views(self, parts: Sequence[pa.Array]) -> pa.Array:
        """Join the columns of the views into one, in the order of the rows."""
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts).take(self._row_order)

    def _column(self, arrow_type: pa.DataType, make_part: Callable[[_RouteView, Route], pa.Array | None]) -> pa.Array:
        """Return a column, null where `make_part` returns None and in rows without a route."""
        parts = [None if view.route is None else make_part(view, view.route) for view in self.views]
        pairs = zip(self.views, parts, strict=True)
        return self.join_views([pa.nulls(view.size, arrow_type) if part is None else part for view, part in pairs])

    def _topics(self, view: _RouteView, route: Route) -> pa.Array:
        """Return structs of `_TOPIC`."""
        codes = utf8_text(view.template_text(route.topic), lossy=True).dictionary_encode(null_encoding="encode")
        structs = [(name, self._table.topic_outcome(name, view.route_number)) for name in codes.dictionary.to_pylist()]
        return pa.array(structs, _TOPIC).take(codes.indices)

    def records(self) -> pa.RecordBatch:
        """Return the rows in `RECORD_SCHEMA`."""
        rows = self._rows
        topics, codes = self._column(_TOPIC, self._topics).flatten()
        keys = self._column(pa.binary(), lambda view, route: view.bytes_of(route.key))
        headers = self._column(_HEADERS, _RouteView.headers)
        properties = self._column(pa.bool_(), lambda view, route: view.constant(route.properties, pa.bool_()))
        if HEADER_MAP in rows.schema.names and (mapped_headers := rows.column(HEADER_MAP)).null_count < rows.num_rows:
            headers = _concat_lists([headers, mapped_headers.cast(_HEADERS)])
        payload = rows.column("payload")
        values, times, invalid_times = self._record_values(payload), *self._record_times()
        outcomes, refusals = self._outcomes(codes, keys, values, invalid_times)
        columns = {
            "topic": topics,
            "key": keys,
            "value": pc.coalesce(values, rows.column("correlation_data"), pa.scalar(b""))
            if payload.null_count
            else values,
            "headers": headers,
            "timestamp": times,
            "towline_topic": rows.column("topic"),
            "towline_qos": rows.column("qos"),
            "towline_payload": pa.nulls(rows.num_rows, pa.binary()) if values is payload else payload,
            "towline_rare": _rare_properties(rows),
            "towline_received_at": rows.column("received_at"),
            "towline_gateway": rows.column("gateway"),
            "towline_offset": rows.column("offset"),
            "towline_duplicate": rows.column("duplicate"),
            "towline_properties": properties,
            OUTCOME: outcomes,
            FAULT: fault_texts(outcomes, refusals),
        }
        return pa.RecordBatch.from_arrays([*columns.values()], schema=RECORD_SCHEMA)

    def _record_values(self, payload: pa.Array) -> pa.Array:
        if all(route.value is None for route in self._routes):
            return payload
        parts = ((view, None if view.route is None else view.bytes_of(view.route.value)) for view in self.views)
        return self.join_views([view.column("payload") if value is None else value for view, value in parts])

    def _record_times(self) -> tuple[pa.Array, pa.Array | None]:
        """Return the times of the records, and a mask of rows with an invalid time; None if there is no such row."""
        receipt_times = self._rows.column("received_at")
        if all(route.timestamp is None for route in self._routes):
            return receipt_times, None
        raw_texts = self._column(pa.binary(), lambda view, route: view.bytes_of(route.timestamp))
        texts = utf8_text(raw_texts, lossy=True).to_pylist()
        milliseconds = [int(text) if text is not None and _MILLISECONDS.fullmatch(text) else None for text in texts]
        micros = [n * 1000 if n is not None and n <= _MAX_TIMESTAMP_MS else None for n in milliseconds]
        invalid = pa.array([text is not None and n is None for text, n in zip(texts, micros, strict=True)])
        return pc.coalesce(pa.array(micros, pa.int64()).cast(_TIMESTAMP_TYPE), receipt_times), invalid

    def _outcomes(
        self, topic_codes: pa.Array, keys: pa.Array, values: pa.Array, invalid_times: pa.Array | None
    ) -> tuple[pa.Array, pa.Array]:
        """Return `RowOutcome` codes, each of the first reason that applies, and the texts of ``reject``."""
        payload, cases = self._rows.column("payload"), list[tuple[pa.Array, Any]]()
        if payload.null_count:
            reasons = first_value_of(self._rows.column("user_properties"), "towline-reason")
            too_many = pc.and_(payload.is_null(), pc.equal(reasons, Reason.TOO_MANY_PROPERTIES.value).fill_null(False))
            cases += [(too_many, RowOutcome.TOO_MANY), (payload.is_null(), RowOutcome.NOT_WHOLE)]
        if self.route_numbers.null_count:
            cases.append((self.route_numbers.is_null(), RowOutcome.UNROUTED))
        sql_cases, refusals = sql_verdicts(self._rows)
        cases += [*sql_cases, *self._fault_cases(topic_codes, keys, values, invalid_times)]
        return first_case(cases, topic_codes), refusals

    def _fault_cases(
        self, topic_codes: pa.Array, keys: pa.Array, values: pa.Array, invalid_times: pa.Array | None
    ) -> Iterator[tuple[pa.Array, Any]]:
        """Yield cases for which a record can't be rendered: a row mask, and an outcome or a column of outcomes."""
        if any(len(view.payload_fields.fields) for view in self.views):
            yield JsonFields.fault_case(self.join_views([view.payload_fields.outcomes for view in self.views]))
        yield pc.greater(topic_codes, _RENDERED), topic_codes
        if keys.null_count and any(route.key_required for route in self._routes):
            yield pc.and_(keys.is_null(), self._rows_of_routes(lambda route: route.key_required)), RowOutcome.KEY_ABSENT
        if DEDUPE in self._rows.schema.names:
            key_missing = self._rows.column(DEDUPE).is_null()
            yield pc.and_(key_missing, self._rows_of_routes(lambda route: route.key_tells)), RowOutcome.KEY_ABSENT
        if values.null_count:
            yield values.is_null(), RowOutcome.VALUE_ABSENT
        if invalid_times is not None:
            yield invalid_times, RowOutcome.NO_TIME

    def _rows_of_routes(self, condition: Callable[[Route], bool]) -> pa.Array:
        """Return a mask of the rows with a route that meets a condition."""
        numbers = [number for number, route in enumerate(self._table.routes) if condition(route)]
        return pc.is_in(self.route_numbers, pa.array(numbers, pa.int32()))


def _concat_lists(lists: Sequence[pa.Array]) -> pa.Array:
    """Concatenate the entries of list columns, row by row."""
    rows = pa.concat_arrays([pc.list_parent_indices(column) for column in lists])
    entries = pa.concat_arrays([column.flatten() for column in lists]).take(pc.sort_indices(rows))
    lengths = reduce(pc.add, (pc.list_value_length(column).fill_null(0) for column in lists))
    return pa.ListArray.from_arrays(running_sums(lengths).cast(pa.int32()), entries)


def _rare_properties(rows: pa.RecordBatch) -> pa.Array:
    """Return the properties that few messages have, null where a message has none; a truncated one has no data."""
    columns = [rows.column(name) for name in _RARE_COLUMNS]
    payload = rows.column("payload")
    if payload.null_count:
        index = _RARE_COLUMNS.index("correlation_data")
        columns[index] = pc.if_else(payload.is_null(), pa.scalar(None, columns[index].type), columns[index])
    is_present = [column.is_valid() for column in columns[1:] if column.null_count < rows.num_rows]
    if pc.any(columns[0]).as_py():
        is_present.append(columns[0].fill_null(False))
    rare_type = RECORD_SCHEMA.field("towline_rare").type
    if not is_present:
        return pa.nulls(rows.num_rows, rare_type)
    return pa.StructArray.from_arrays(columns, fields=list(rare_type), mask=pc.invert(reduce(pc.or_, is_present)))


# -- records for the producer -----------------------------------------------------------------------------------------

_RECORD_COLUMNS: Final = frozenset(("topic", "key", "value", "headers", "timestamp"))
#: Properties of a message without any.
_NO_PROPERTIES: Final[Mapping[str, Any]] = dict.fromkeys(("retain", *OPTIONAL_COLUMNS))
#: Upper bounds for headers in bytes, without texts, topics and user properties: names, digits, and times.
_FIXED_BYTES: Final = 100
_RARE_BYTES: Final = 200


@dataclass(frozen=True)
class RenderedColumns(Columns):
    """Rendered records: batches of valid rows, and batches of refused rows."""

    def row_faults(self, batch: Any) -> list[RecordFault] | None:
        """Return the faults of a batch of refused rows; None for a batch of valid rows."""
        outcomes = batch.column(OUTCOME)
        if not len(outcomes) or outcomes[0].as_py() <= _RENDERED:
            return None
        reasons = [RowOutcome(code).reason for code in outcomes.to_pylist()]
        texts = batch.column(FAULT).to_pylist()
        return [RecordFault(reason, text) for reason, text in zip(reasons, texts, strict=True) if reason]


@dataclass(frozen=True)
class RecordColumns(RenderedColumns):
    """Rendered records of an uplink: batches of `RECORD_SCHEMA`."""

    topic: str | None = None
    written_columns: frozenset[str] = _RECORD_COLUMNS

    def original(self, batch: Any, row_index: int, record: Record) -> tuple[bytes | None, list[Header]]:
        """Return value and headers of a row's dead letter: payload and properties of its message, and its origin."""
        row = batch.slice(row_index, 1)
        ((topic, qos, received_at),) = _topic_qos_time(row)
        cells = {name: row.column(f"towline_{name}")[0].as_py() for name in ("gateway", "offset", "duplicate", "rare")}
        origin_headers = {"mqtt.gateway": cells["gateway"] or "", "mqtt.offset": str(cells["offset"])}
        origin_headers |= {"mqtt.duplicate": "true"} if cells["duplicate"] else {}
        message_headers = property_headers(topic, qos, received_at, cells["rare"] or _NO_PROPERTIES)
        message_headers += [(name, text.encode()) for name, text in origin_headers.items()]
        payload = row.column("towline_payload")[0].as_py()
        return record[1] if payload is None else payload, message_headers

    def max_record_bytes(self, batch: Any) -> int:
        """As `Columns.largest`."""
        topics, rare = batch.column("towline_topic"), batch.column("towline_rare")
        return super().max_record_bytes(batch) + _FIXED_BYTES + longest_bytes(topics) + _max_rare_bytes(rare)

    def _headers(self, batch: Any) -> Iterator[Any]:
        route_headers, property_flags = batch.column("headers"), batch.column("towline_properties").fill_null(False)
        flag_bounds = pc.min_max(property_flags).as_py()
        if not flag_bounds["max"]:
            return header_lists(route_headers)
        # Equal headers of several messages are one tuple.
        topics = _encoded_headers(batch.column("towline_topic").cast(pa.binary()), "mqtt.topic")
        qos_headers = _encoded_headers(batch.column("towline_qos"), "mqtt.qos")
        time_headers = _encoded_headers(batch.column("towline_received_at").cast(pa.int64()), "mqtt.received-at")
        common_headers, rare = zip(topics, qos_headers, time_headers, strict=True), batch.column("towline_rare")
        has_rare = rare.null_count < batch.num_rows
        if flag_bounds["min"] and not has_rare and not len(route_headers.flatten()):
            return map(list, common_headers)
        rows, names = (rare.to_pylist(), _topic_qos_time(batch)) if has_rare else (repeat(None), repeat((None, 0, 0)))
        flags = repeat(True) if flag_bounds["min"] else property_flags.to_pylist()
        return (
            [*(common if rare_row is None else property_headers(*name, rare_row)), *row_headers]
            if with_properties
            else row_headers
            for with_properties, common, name, rare_row, row_headers in zip(
                flags, common_headers, names, rows, header_lists(route_headers), strict=False
            )
        )


def _topic_qos_time(batch: Any) -> Iterator[tuple[bytes | None, int, int]]:
    """Yield topic, QoS, and microseconds since 1970 of each message."""
    times = values_of(batch.column("towline_received_at").cast(pa.int64()))
    # Equal values of all rows are repeated.
    topics = batch.column("towline_topic").cast(pa.binary()).to_pylist()
    return zip(topics, values_of(batch.column("towline_qos")), times, strict=False)


def _encoded_headers(column: Any, name: str) -> Iterator[Header]:
    codes = column.dictionary_encode(null_encoding="encode")
    pairs = [(name, to_bytes(value)) for value in codes.dictionary.to_pylist()]
    return repeat(pairs[0], len(column)) if len(pairs) == 1 else map(pairs.__getitem__, codes.indices.to_pylist())


def _max_rare_bytes(rare: Any) -> int:
    """Return an upper bound for the bytes of a message's headers from rare properties."""
    if rare.null_count == len(rare):
        return 0
    parts = dict(zip(rare.type.names, rare.flatten(), strict=True))
    texts = sum(longest_bytes(parts[name]) for name in ("content_type", "response_topic", "correlation_data"))
    users, numbers = parts["user_properties"], parts["subscription_ids"]
    pairs = users.flatten()
    pair_bytes = sum(longest_bytes(pairs.field(name)) for name in ("key", "value"))
    user_bytes = longest_list(users) * (HEADER_OVERHEAD + len(USER_PREFIX) + pair_bytes)
    return _RARE_BYTES + texts + user_bytes + longest_list(numbers) * (HEADER_OVERHEAD + _RARE_BYTES)
