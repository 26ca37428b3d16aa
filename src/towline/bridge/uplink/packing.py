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
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from towline.bridge.config.patterns import Pattern, Template, kafka_topic
from towline.guarantee import policy
from towline.kafka.packed import PACKED, pack
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
#: Topics remembered; then all are forgotten, so that devices can't fill the memory.
_KEPT: Final = 50_000
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_RARE: Final = ("retain", *OPTIONAL)


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

    def record(self, topic: str) -> _Record | None:
        """What messages of a topic become; None if they do not match, or can't go where they belong."""
        captures = self.pattern.match(topic)
        if captures is None:
            return None
        values = {_TOPIC: topic, **captures}
        name = kafka_topic(self.topic, values, self.allowed_topics, self.reserved)
        key = None if self.key is None else self.key.render(values)
        if name is None or (key is None and self.key_required):
            return None
        headers = [(header, _bytes(text.render(values))) for header, text in self.headers]
        return _Record(name, _bytes(key), headers or None, topic if self.properties else None)


@dataclass(frozen=True, slots=True)
class _Record:
    """What all messages of one MQTT topic have in common as records.

    Attributes:
        topic: Kafka topic.
        key: Record key.
        headers: The route's own; None for none.
        said: The MQTT topic, where the properties travel as headers.
    """

    topic: str
    key: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    said: str | None


def _template(values: Mapping[str, Any]) -> Template:
    return Template(values["text"], tuple(values["parts"]))


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def plain_routes(line: Line) -> str | None:
    """The routes of a line that needs no SQL for most of its messages, as JSON; None for another line.

    Its batches are served whole or not at all, so offsets tell how many messages Spark saw.
    """
    routes, rule = line.routes, policy(line.guarantee)
    whole = rule.once_below == 0 and line.parallelism == 1 and line.within is None
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


class Packer:
    """Packs rows of a source.

    Args:
        routes: Of `as_json`.
        signed: Whether the sink makes dead letters, which say where a message came from.
    """

    def __init__(self, routes: str, *, signed: bool) -> None:
        self._routes = [PlainRoute.from_json(values) for values in json.loads(routes)]
        self._signed = signed
        self._known: dict[str, _Record | None] = {}

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
        topics = rows.column("topic").dictionary_encode()
        records = [self._record(topic) for topic in topics.dictionary.to_pylist()]
        if None not in records and not rows.column("payload").null_count:
            yield _one_row(self._records(rows, topics.indices, records))
            return
        fits = pc.and_(
            pa.array([record is not None for record in records], pa.bool_()).take(topics.indices),
            rows.column("payload").is_valid(),
        )
        edges = pc.not_equal(fits[1:], fits[:-1])
        ends = [*(at + 1 for at in pc.indices_nonzero(edges).to_pylist()), rows.num_rows]
        if rows.num_rows < _SHORT * len(ends):
            yield _as_they_are(rows)
            return
        start = 0
        for end in ends:
            part = rows.slice(start, end - start)
            if fits[start].as_py():
                yield _one_row(self._records(part, topics.indices[start:end], records))
            else:
                yield _as_they_are(part)
            start = end

    def _record(self, topic: str) -> _Record | None:
        """By the first route that takes it, as arms of a switch."""
        if topic not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            taker = next((route for route in self._routes if route.pattern.match(topic) is not None), None)
            self._known[topic] = None if taker is None else taker.record(topic)
        return self._known[topic]

    def _records(self, rows: pa.RecordBatch, places: pa.Array, records: Sequence[_Record | None]) -> pa.RecordBatch:
        """The records of rows.

        Args:
            rows: Of messages.
            places: For each row, where its record is.
            records: By topic; None for those of no row.
        """
        columns = {
            "value": rows.column("payload"),
            "topic": _of(records, "topic", places, pa.string()),
            "key": _of(records, "key", places, pa.binary()),
            "headers": _of(records, "headers", places, _HEADERS),
            "timestamp": rows.column("received_at"),
            "towline_topic": _of(records, "said", places, pa.string()),
            "towline_qos": rows.column("qos"),
            "towline_rare": _rare(rows),
        }
        if self._signed:
            own = pa.array([record and 2 * len(record.headers or ()) for record in records], pa.int32()).take(places)
            columns["towline_gateway"] = rows.column("gateway")
            columns["towline_offset"] = rows.column("offset")
            columns["towline_facts"] = pc.add(own, rows.column("duplicate").fill_null(False).cast(pa.int32()))
        there = {name: column for name, column in columns.items() if column is not None}
        return pa.RecordBatch.from_pydict(there)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _of(records: Sequence[_Record | None], name: str, places: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """A column of what the records of topics have; None where none has it."""
    values = [record and getattr(record, name) for record in records]
    if all(value is None for value in values):
        return None
    first = values[0]
    if all(value == first for value in values):
        return pa.repeat(pa.scalar(first, kind), len(places))
    return pa.array(values, kind).take(places)


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
