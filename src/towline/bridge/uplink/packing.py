"""Records of messages that need no SQL, made of whole columns in the worker that reads them.

Spark makes rows of columns, one by one, and columns of rows again for the sink. Where routes ask for nothing but the
topic, a record can be told by the topic's name alone, so it is found once for each topic; the records of a chunk then
pass Spark as one row (`towline.kafka.packed`). All else goes the way through SQL, in its place between the others: a
message that no route takes, a stub, what would be a dead letter.

`towline.bridge.config.routes` is the reference for both ways.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache, reduce
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from towline.bridge.config.patterns import Pattern, Template, kafka_topic
from towline.guarantee import policy
from towline.kafka.packed import PACKED, pack
from towline.kafka.properties import in_bytes
from towline.schema import OPTIONAL, ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from towline.bridge.config.model import Line
    from towline.bridge.config.routes import Route

__all__ = ["PACKED_SCHEMA", "Packer", "PlainRoute", "as_json", "plain_routes"]

#: What a row may be that stands for many.
PACKED_SCHEMA: Final = ROW_SCHEMA.append(pa.field(PACKED, pa.binary()))

#: The fields that a template may name, beside what the route captures.
_TOPIC: Final = "mqtt.topic"
#: Bytes of rows that are worth a row of their own; more are not waited for.
_ENOUGH: Final = 1 << 20
#: Larger rows on average are left as they are: to copy them would cost more than to turn them into rows and back.
_LARGE: Final = 16 << 10
#: Fewer rows in a row that can be packed, on average, are not worth it.
_SHORT: Final = 50
#: Topics of a line that are remembered; then all are forgotten, so that devices can't fill the memory.
_KEPT: Final = 50_000
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_RARE: Final = ("retain", *OPTIONAL)
#: What all messages of one MQTT topic have in common as records.
#:   taken    whether a route takes them; else all others are null
#:   topic    the Kafka topic
#:   headers  the route's own; null for none
#:   said     the MQTT topic, where the properties travel as headers
#:   facts    twice the number of the route's headers (`towline.kafka.columns.ORIGIN`)
_SAID: Final = pa.schema(
    {
        "taken": pa.bool_(),
        "topic": pa.string(),
        "key": pa.binary(),
        "headers": _HEADERS,
        "said": pa.string(),
        "facts": pa.int32(),
    }
)
#: Columns that have no equal values, or can't be counted by Arrow.
_NEVER_COUNTED: Final = frozenset({"headers", "said"})


@dataclass(frozen=True, slots=True)
class PlainRoute:
    """What of a route tells the record of a topic (`towline.bridge.config.routes.Route`)."""

    pattern: Pattern
    topic: Template
    allowed_topics: tuple[str, ...]
    reserved: str | None
    key: Template | None
    key_required: bool
    headers: tuple[tuple[str, Template], ...]
    properties: bool

    @classmethod
    def of(cls, route: Route) -> Self:
        """The plain part of a route."""
        return cls(
            route.pattern,
            route.topic,
            route.allowed_topics,
            route.reserved,
            route.key,
            route.key_required,
            route.headers,
            route.properties,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From `as_json`."""
        return cls(
            Pattern(**values["pattern"] | {"levels": tuple(values["pattern"]["levels"])}),
            _template(values["topic"]),
            tuple(values["allowed_topics"]),
            values["reserved"],
            values["key"] and _template(values["key"]),
            values["key_required"],
            tuple((name, _template(text)) for name, text in values["headers"]),
            values["properties"],
        )

    def record(self, topic: str) -> dict[str, Any] | None:
        """What messages of a topic become, as `_SAID`; None if they do not match, or can't go where they belong."""
        captures = self.pattern.match(topic)
        if captures is None:
            return None
        values = {_TOPIC: topic, **captures}
        name = kafka_topic(self.topic, values, self.allowed_topics, self.reserved)
        key = None if self.key is None else self.key.render(values)
        if name is None or (key is None and self.key_required):
            return None
        headers = [(header, in_bytes(text.render(values))) for header, text in self.headers]
        return {
            "taken": True,
            "topic": name,
            "key": in_bytes(key),
            "headers": headers or None,
            "said": topic if self.properties else None,
            "facts": 2 * len(headers),
        }


def _template(values: Mapping[str, Any]) -> Template:
    return Template(values["text"], tuple(values["parts"]))


def plain_routes(line: Line) -> str | None:
    """The routes of a line that needs no SQL for most of its messages, as JSON; None for another line.

    Its batches are served whole or not at all, so offsets tell how many messages Spark saw.
    """
    routes, rule = line.routes, policy(line.guarantee)
    whole = rule.serves_again and line.parallelism == 1 and line.within is None
    if not whole or not all(_is_plain(route, signed=line.dead_letter_topic is not None) for route in routes):
        return None
    return as_json(routes)


def as_json(routes: Iterable[Route]) -> str:
    """Routes as `Packer` takes them."""
    return json.dumps([asdict(PlainRoute.of(route)) for route in routes])


def _is_plain(route: Route, *, signed: bool) -> bool:
    templates = [route.topic, route.key, *(text for _, text in route.headers)]
    named = {name for template in templates if template is not None for name in template.fields}
    asks = (route.where, route.reject, route.dedupe, route.fallback_topic, *route.fields)
    told = route.properties or not signed  # a dead letter has the properties of its message, wherever from
    return told and named <= {_TOPIC, *route.pattern.names} and not any(one is not None for one in asks)


class _Topics:
    """The records of the topics that were met: a row each, found once in a process.

    Args:
        routes: Of `as_json`.

    Attributes:
        records: Columns of `_SAID`; only ever appended to, until all is forgotten.
    """

    def __init__(self, routes: str) -> None:
        self._routes = [PlainRoute.from_json(values) for values in json.loads(routes)]
        self._forget()

    def _forget(self) -> None:
        #: Topic -> its row in `records`.
        self._row: dict[str, int] = {}
        self.records = pa.RecordBatch.from_pylist([], schema=_SAID)
        #: Column -> the value of all rows, where they have the same.
        self._same: dict[str, pa.Scalar] = {}

    def rows_of(self, topics: list[str]) -> pa.Array:
        """Where the records of different topics are; until the next call."""
        new = [topic for topic in topics if topic not in self._row]
        if new and len(self._row) + len(new) > _KEPT:
            self._forget()
            new = topics
        if new:
            self._learn(new)
        return pa.array([self._row[topic] for topic in topics], pa.int64())

    def _learn(self, topics: list[str]) -> None:
        self._row.update(zip(topics, count(len(self._row)), strict=False))
        made = pa.RecordBatch.from_pylist([self._record(topic) for topic in topics], schema=_SAID)
        self.records = pa.concat_batches([self.records, made])
        self._same = {
            name: column[0]
            for name, column in zip(_SAID.names, self.records.columns, strict=True)
            if name not in _NEVER_COUNTED and pc.count_distinct(column, mode="all").as_py() == 1
        }

    def _record(self, topic: str) -> dict[str, Any]:
        """By the first route that takes it, as arms of a switch."""
        taker = next((route for route in self._routes if route.pattern.match(topic) is not None), None)
        record = None if taker is None else taker.record(topic)
        return {"taken": False} if record is None else record

    def column(self, name: str, places: pa.Array) -> pa.Array | None:
        """A column of the rows at `places`; None where it says nothing."""
        column = self.records.column(name)
        if column.null_count == len(column):
            return None
        same = self._same.get(name)
        return column.take(places) if same is None else pa.repeat(same, len(places))


@lru_cache(maxsize=4)
def _topics(routes: str) -> _Topics:
    """Of a line; a worker runs tasks of several lines, one after the other."""
    return _Topics(routes)


class Packer:
    """Packs rows of a source.

    Args:
        routes: Of `as_json`.
        signed: Whether the sink makes dead letters, which say where a message came from.
    """

    def __init__(self, routes: str, *, signed: bool) -> None:
        self._routes = routes
        self._signed = signed

    def packed(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same rows, in order, in batches of `PACKED_SCHEMA`."""
        waiting: list[pa.RecordBatch] = []
        size = 0
        for batch in rows:
            waiting.append(batch)
            size += batch.nbytes
            if size >= _ENOUGH:
                yield from self._parts(_joined(waiting))
                waiting, size = [], 0
        if waiting:
            yield from self._parts(_joined(waiting))

    def _parts(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Runs of rows that can be packed, and what is between them."""
        if not rows.num_rows or rows.nbytes > _LARGE * rows.num_rows:
            yield _as_they_are(rows)
            return
        topics, named = _topics(self._routes), rows.column("topic").dictionary_encode()
        places = topics.rows_of(named.dictionary.to_pylist()).take(named.indices)
        fits = pc.and_(topics.column("taken", places), rows.column("payload").is_valid())
        edges = pc.not_equal(fits[1:], fits[:-1])
        ends = [*(at + 1 for at in pc.indices_nonzero(edges).to_pylist()), rows.num_rows]
        if len(ends) > 1 and rows.num_rows < _SHORT * len(ends):
            yield _as_they_are(rows)
            return
        start = 0
        for end in ends:
            part = rows.slice(start, end - start)
            if fits[start].as_py():
                yield _one_row(self._records(part, topics, places[start:end]))
            else:
                yield _as_they_are(part)
            start = end

    def _records(self, rows: pa.RecordBatch, topics: _Topics, places: pa.Array) -> pa.RecordBatch:
        """The records of rows, whose topics' are at `places`."""
        columns = {
            "value": rows.column("payload"),
            "topic": topics.column("topic", places),
            "key": topics.column("key", places),
            "headers": topics.column("headers", places),
            "timestamp": rows.column("received_at"),
            "towline_topic": topics.column("said", places),
            "towline_qos": rows.column("qos"),
            "towline_rare": _rare(rows),
        }
        if self._signed:
            own = topics.column("facts", places)
            columns["towline_gateway"] = rows.column("gateway")
            columns["towline_offset"] = rows.column("offset")
            columns["towline_facts"] = pc.add(own, rows.column("duplicate").fill_null(False).cast(pa.int32()))
        there = {name: column for name, column in columns.items() if column is not None}
        return pa.RecordBatch.from_pydict(there)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _rare(rows: pa.RecordBatch) -> pa.StructArray | None:
    """What only some messages say, as `towline.kafka.columns.PROPERTIES` has it; None where none does."""
    columns = [rows.column(name) for name in _RARE]
    there = [column.is_valid() for column in columns[1:] if column.null_count < rows.num_rows]
    if pc.any(columns[0]).as_py():
        there.append(columns[0].fill_null(False))
    if not there:
        return None
    return pa.StructArray.from_arrays(columns, _RARE, mask=pc.invert(reduce(pc.or_, there)))


def _one_row(records: pa.RecordBatch) -> pa.RecordBatch:
    columns = [pa.nulls(1, field.type) for field in ROW_SCHEMA]
    return pa.RecordBatch.from_arrays([*columns, pa.array([pack(records)], pa.binary())], schema=PACKED_SCHEMA)


def _as_they_are(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*rows.columns, pa.nulls(rows.num_rows, pa.binary())], schema=PACKED_SCHEMA)
