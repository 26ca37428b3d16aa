"""What a bridge's uplink passes through Spark, and makes records of where it is written.

Its source is ``format("mqtt")`` with the slices of a batch, or its rows with their routes. A line that asks nothing in
SQL needs no rows in Spark: Spark plans the slices of the journal, and each passes it as one row, the ticket by which
the task that writes fetches it. Any other line gets the rows, and beside them the number of each one's route and the
wildcards and fields that its SQL may name.

Its sink is ``format("kafka_transactional")`` for messages, which it makes records of: columns, with the headers that
every message has each made once for all rows that say the same. Each format is the bridge's own: a place that data
names is fetched from here and by no sink that users have [I13].
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from towline.bridge.routes import ROUTE, Rendered, RouteOutcome, route_table
from towline.bridge.uplink.statements import of_schema
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError, one_line
from towline.gateway.access import Access
from towline.kafka.columns import Columns, distinct_values, header_lists, longest, most
from towline.kafka.deadletters import A_HEADER, Reason
from towline.kafka.options import FORMAT
from towline.kafka.properties import USER_PREFIX, Header, in_bytes, property_headers
from towline.kafka.screening import Fault
from towline.processes import ProcessMark
from towline.schema import OPTIONAL
from towline.spark.kafka_sink import KafkaTransactional, KafkaWritten, StreamWriter
from towline.spark.link import GatewayPlace
from towline.spark.offsets import places_at
from towline.spark.reader import MqttStreamReader
from towline.spark.source import MqttDataSource
from towline.spark.tally import BatchMessages, BatchResult
from towline.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

    from towline.kafka.delivery import Delivery
    from towline.sinks import Task
    from towline.spark.readplan import ReadPlan, Slice
    from towline.spark.tally import SinkNote

_WRITTEN: Final = frozenset(("topic", "key", "value", "headers", "timestamp"))
#: What a message has that says nothing more than all do.
_NOTHING: Final[Mapping[str, Any]] = dict.fromkeys(("retain", *OPTIONAL))
#: What headers take at most beside texts, topics and properties of users: names, digits, and microseconds since 1970.
_FIXED_BYTES: Final = 100
_RARE_BYTES: Final = 200


@dataclass(frozen=True)
class RecordColumns(Columns):
    """Batches of `towline.bridge.routes.RECORD_SCHEMA`."""

    topic: str | None = None
    present: frozenset[str] = _WRITTEN

    def refusals(self, batch: Any) -> list[Fault] | None:
        """Why its rows are refused, of a batch of those that the routes refuse."""
        reasons = batch.column("towline_reason")
        if reasons.null_count == batch.num_rows:
            return None
        details = batch.column("towline_detail").to_pylist()
        return [Fault(Reason(one), text) for one, text in zip(reasons.to_pylist(), details, strict=True)]

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
        rare, plain = batch.column("towline_rare"), _plain_headers(batch)
        some = rare.null_count < batch.num_rows
        if ends["min"] and not some and not len(own.flatten()):
            return plain
        more = rare.to_pylist() if some else repeat(None)
        flags = repeat(True) if ends["min"] else travels.to_pylist()
        return map(_joined, flags, plain, _names(batch), more, header_lists(own))


def _names(batch: Any) -> Iterator[tuple[bytes | None, int, int]]:
    """Topic, QoS, and the microseconds since 1970 of each message."""
    moments = distinct_values(batch.column("towline_received_at").cast(pa.int64()))
    # What is the same in all rows is repeated.
    topics = batch.column("towline_topic").cast(pa.binary()).to_pylist()
    return zip(topics, distinct_values(batch.column("towline_qos")), moments, strict=False)


def _plain_headers(batch: Any) -> Iterator[list[Header]]:
    """The headers that every message has; what several messages say is one tuple for all of them."""
    topics = _each_header(batch.column("towline_topic").cast(pa.binary()), "mqtt.topic")
    levels = _each_header(batch.column("towline_qos"), "mqtt.qos")
    moments = _each_header(batch.column("towline_received_at").cast(pa.int64()), "mqtt.received-at")
    return map(list, zip(topics, levels, moments, strict=True))


def _each_header(column: Any, name: str) -> Iterator[Header]:
    coded = column.dictionary_encode(null_encoding="encode")
    made = [(name, in_bytes(value)) for value in coded.dictionary.to_pylist()]
    return repeat(made[0], len(column)) if len(made) == 1 else map(made.__getitem__, coded.indices.to_pylist())


def _joined(
    travels: bool,  # noqa: FBT001 - of one row, mapped
    plain: list[Header],
    name: tuple[bytes | None, int, int],
    more: Mapping[str, Any] | None,
    own: list[Header],
) -> list[Header]:
    if not travels:
        return own
    topic, qos, received = name
    made = plain if more is None else property_headers(topic, qos, received, more)
    return [*made, *own] if own else made


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


#: Name of the source.
MESSAGES: Final = "towline_messages"
#: The one column of slices.
SLICE: Final = "towline_slice"
_ROUTES, _VALUES, _WRITERS = "routes", "values", "writers"


def parted(options: Mapping[str, str], *names: str) -> tuple[dict[str, str], dict[str, str]]:
    """The options of these names, by their names in lower case, and the others as they are."""
    own = {name.lower(): value for name, value in options.items() if name.lower() in names}
    return own, {name: value for name, value in options.items() if name.lower() not in names}


class LineSource(MqttDataSource):
    """Slices of a batch, a row each, for each of several writers; or rows of ``mqtt`` with what SQL names of them.

    Its own options are ``writers``: how many tasks write a batch; and where rows pass, ``routes``, of
    `towline.bridge.routes.to_json`, and ``values``, of `Statements.values` as JSON.
    """

    def __init__(self, options: dict[str, str]) -> None:
        own, rest = parted(options, _WRITERS, _ROUTES, _VALUES)
        super().__init__(rest)
        self._writers = int(own[_WRITERS])
        self._routing = Routing(own[_ROUTES], json.loads(own[_VALUES])) if _ROUTES in own else None

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return MESSAGES

    def schema(self) -> str:
        """The one column of slices; or those of the ``mqtt`` source, and of `Routing`."""
        columns = super().schema()
        if self._routing is None:
            return f"{SLICE} string"
        return f"{columns}, {ROUTE} int" + "".join(f", `{name}` string" for name in self._routing.values)

    @one_line
    def streamReader(self, schema: StructType) -> SliceReader | RoutedReader:  # noqa: ARG002, N802 - Spark's signature
        """Make the reader of a stream."""
        if self._routing is None:
            return SliceReader(self._plan, self._writers)
        return RoutedReader(self._plan, self._routing)


@dataclass(frozen=True)
class WriterPartition(InputPartition):
    """All slices of a batch, for one of its writers."""

    slices: Sequence[InputPartition]
    writer: int
    writers: int


class SliceReader(MqttStreamReader):
    """Plans as `MqttStreamReader`, and leaves the rows where they are."""

    def __init__(self, plan: ReadPlan, writers: int) -> None:
        super().__init__(plan)
        self._writers = writers

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """A partition for each writer, each with all slices of the batch: a record's key tells whose it is."""
        slices = super().partitions(start, end)
        return [WriterPartition(slices, writer, self._writers) for writer in range(self._writers)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the slices as they are.

        Raises:
            GatewayError: TL-G62.
        """
        assert isinstance(partition, WriterPartition)
        parts = [part for one in partition.slices if (part := self._begun(one)).start < part.end]
        texts = [_to_json(part, partition) for part in parts]
        if texts:
            yield pa.RecordBatch.from_pydict({SLICE: pa.array(texts, pa.string())})


def _to_json(part: Slice, of: WriterPartition) -> str:
    """A slice as text: plain values, none of which is a secret but its ticket, which is worth this slice alone."""
    rows = [part.journal, part.start, part.end, part.incarnation]
    return json.dumps({"rows": rows, "place": asdict(part.place), "writer": [of.writer, of.writers]})


def slice_of(text: str) -> tuple[Iterator[RecordBatch], int, int]:
    """A slice as the task that writes it gets it, of a value of the column `SLICE`.

    Returns:
        Its rows, to be read once, the same ones each time [I4]; the number of the writer, and how many there are.
        Reading raises GatewayError where the journal is another one or does not have them, GatewayUnreachable when no
        gateway answers for a minute.
    """
    entry = json.loads(text)
    place = entry["place"]
    place["access"] = Access(**place["access"])
    place["owner"] = place["owner"] and ProcessMark(**place["owner"])
    writer, writers = entry["writer"]
    return GatewayPlace(**place).rows(*entry["rows"]), writer, writers


class RoutedReader(MqttStreamReader):
    """Reads as `MqttStreamReader`, and matches in the worker."""

    def __init__(self, plan: ReadPlan, routing: Routing) -> None:
        super().__init__(plan)
        self._routing = routing

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice, the same ones each time [I4]."""
        return map(self._routing.added, super().read(partition))


@dataclass(frozen=True)
class Routing:
    """What the SQL of a line asks of a message beside its own columns.

    Attributes:
        routes: Of `towline.bridge.routes.to_json`.
        values: Column -> the wildcard or field of a message that it has as text.
    """

    routes: str
    values: Mapping[str, str]

    def added(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with the number of their route in `ROUTE`, and the values."""
        table = route_table(self.routes)
        columns = [table.match(rows.column("topic")), *table.values(rows, list(self.values.values()))]
        names = [*rows.schema.names, ROUTE, *self.values]
        return pa.RecordBatch.from_arrays([*rows.columns, *columns], names=names)


#: Name of the format.
RECORDS: Final = "towline_records"
_LETTERS, _DEDUPES, _EMPTY = "letters", "dedupes", "empty"
#: Messages, the number of the writer that reads them, and how many writers there are.
Part: TypeAlias = "tuple[RecordBatch, int, int]"
#: Outcomes that are counted apart, and their names in the account.
_COUNTED: Final = {
    RouteOutcome.FILTERED: "filtered",
    RouteOutcome.UNDECIDED: "undecided",
    RouteOutcome.FALLBACK: "fallback",
}
#: Of those that a writer counts, and ``unrouted``: what did not come to the sink.
_LEFT_OUT: Final = ("filtered", "undecided", "unrouted")
#: What a fallback topic would have taken.
_NAMES: Final = frozenset(one for one in RouteOutcome if one.reason and one.reason.startswith("topic_"))


class RecordSink(KafkaTransactional):
    """Makes records of messages, and writes them as ``kafka_transactional`` does.

    Its own options are ``routes``, of `towline.bridge.routes.to_json`; ``letters``: the dead-letter topic under any
    guarantee, "" for none; ``dedupes``: whether Spark drops repeats; ``empty``: the batch that was begun before and is
    served empty, "" for none.
    """

    def __init__(self, options: dict[str, str]) -> None:
        own, rest = parted(options, _ROUTES, _LETTERS, _DEDUPES, _EMPTY)
        super().__init__(rest)
        self._routes, self._dedupes = own[_ROUTES], own[_DEDUPES] == "true"
        self._empty = int(own[_EMPTY]) if own[_EMPTY] else None
        self._settings = replace(self._settings, dead_letter_topic=own[_LETTERS] or None)

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return RECORDS

    def _columns(self, schema: StructType) -> Columns:  # noqa: ARG002 - the rows are the bridge's own
        return RecordColumns()

    def _stream_writer(self, delivery: Delivery, location: str) -> StreamWriter:
        return LineWriter(delivery, location, self._routes, dedupes=self._dedupes, empty=self._empty)


#: The bridge's own formats, for its session.
FORMATS: Final = (LineSource, RecordSink)


@dataclass
class LineWritten(KafkaWritten):
    """What a writer of a line has in Kafka.

    Attributes:
        seen: How many messages it has read.
        own: How many of those are its own.
    """

    seen: int = 0
    own: int = 0


class LineWriter(StreamWriter):
    """Writes the micro-batches of a line.

    Args:
        delivery: The strategy.
        location: The checkpoint.
        routes: Of `towline.bridge.routes.to_json`.
        dedupes: Whether Spark drops repeats.
        empty: The batch that is served empty; None for none.
    """

    def __init__(
        self, delivery: Delivery, location: str, routes: str, *, dedupes: bool = False, empty: int | None = None
    ) -> None:
        super().__init__(delivery, location)
        self._routes, self._dedupes, self._empty = routes, dedupes, empty

    def _written(self, task: Task, batches: Iterator[RecordBatch]) -> LineWritten:
        """Write the rows of a task; TL-B02, TL-B29, TL-B33 for a message that has nowhere to go."""
        mapping = RecordMapping(self._routes, letters=self._delivery.settings.dead_letter_topic is not None)
        done = super()._written(task, mapping.records(_parts(batches)))
        left_out = dict(mapping.left_out)
        return LineWritten(done.partition, done.batch, done.query, done.done, done.given, left_out, *mapping.rows)

    def _result(self, written: Sequence[KafkaWritten], batch: int, note: SinkNote) -> BatchResult:
        """What became of the batch's messages, as the offset log numbers them.

        Counted are, beside what the sink was given and what a writer left out: ``messages``; of those ``unwitnessed``,
        between the batches before and this one; and of those that did not come to the sink ``skipped``, given up by
        at_most_once, ``dropped`` by Spark, ``left_out`` for a reason that nobody knows, as Kafka had the batch already,
        ``astray`` for no reason that there is.
        """
        _check_slices(written, batch)
        result, logs = super()._result(written, batch, note), Checkpoint(self._location)
        messages = BatchMessages.of(note.before(batch), places_at(logs, batch - 1), places_at(logs, batch))
        if messages.own is None:  # they are before what is counted
            return replace(result, counts=Counter(), spans=messages.spans)
        counts = result.counts
        missing = messages.own - counts["given"] - sum(counts[name] for name in _LEFT_OUT)
        certain = all(answer.marked in (None, answer.given) for answer in written)
        why = "skipped" if batch == self._empty else "dropped" if self._dedupes else "astray"
        why = "astray" if missing < 0 else why if certain else "left_out"
        counts.update({"messages": messages.own + messages.gap, "unwitnessed": messages.gap})
        counts[why] += missing
        return replace(result, spans=messages.spans)


def _check_slices(written: Sequence[KafkaWritten], batch: int) -> None:
    """See that the writers have read the same slices, and that each message is one's own."""
    each = [answer for answer in written if isinstance(answer, LineWritten)]
    seen, rows = {answer.seen for answer in each}, sum(answer.own for answer in each)
    if any(answer.seen != answer.own for answer in each) and seen != {rows}:
        counts = " and ".join(f"{count:,}" for count in sorted(seen))
        what = f"the writers of batch {batch} have read {counts} messages, and {rows:,} are theirs together"
        raise KafkaError("TL-K26", FORMAT, what, "The batch is not committed. Report it, with the bridge's file.")


class RecordMapping:
    """From messages to records, and what is left out on the way.

    Args:
        routes: Of `towline.bridge.routes.to_json`.
        letters: Whether what can't be a record goes to a dead-letter topic; else the first one ends the batch, but for
            messages that no route takes, which are left out.
    """

    def __init__(self, routes: str, *, letters: bool) -> None:
        self._table = route_table(routes)
        self._letters = letters
        #: How many messages had an outcome that is counted apart.
        self.left_out: Counter[str] = Counter()
        self._seen = self._own = 0

    @property
    def rows(self) -> tuple[int, int]:
        """How many messages were read, and how many of those were this writer's."""
        return self._seen, self._own

    def records(self, parts: Iterable[Part]) -> Iterator[RecordBatch]:
        """Records and refused messages, in batches of `towline.bridge.routes.RECORD_SCHEMA`.

        Raises:
            KafkaError: TL-B02, TL-B29, TL-B33.
        """
        for rows, writer, writers in parts:
            rendered = self._table.render(rows)
            self._seen += rows.num_rows
            if writers > 1:
                rendered = rendered.of_writer(writer, writers)
            self._own += len(rendered.outcomes)
            counts = rendered.tally()
            self.left_out += Counter({name: counts[one] for one, name in _COUNTED.items()})
            if not self._letters:
                self.left_out += Counter(unrouted=counts.pop(RouteOutcome.UNROUTED, 0))
                if any(one.reason for one in counts):
                    raise _nowhere(rendered)
            yield from rendered.parts(unrouted=self._letters)


def _nowhere(rendered: Rendered) -> KafkaError:
    """The end of a line that has nowhere to put a refused message."""
    codes = [RouteOutcome(code) for code in rendered.outcomes.to_pylist()]
    at = next(n for n, code in enumerate(codes) if code.reason and code is not RouteOutcome.UNROUTED)
    outcome, detail = codes[at], codes[at].detail or f"reject: {rendered.refusals[at].as_py()}"
    code, do = "TL-B02", "Give the line a dead_letter_topic"
    if outcome in (RouteOutcome.NOT_WHOLE, RouteOutcome.TOO_MANY):
        code, detail = "TL-B29", "a message was not taken in whole, see towline-reason and max_packet_bytes"
    elif outcome is RouteOutcome.REJECTED:
        code = "TL-B33"
    elif outcome in _NAMES:
        do += ", or the route a fallback_topic"
    topic = printable(rendered.records.column("towline_topic")[at].as_py() or "")
    stop = "The line stops there rather than lose it"
    return KafkaError(code, f'message of topic "{topic}"', f"{printable(detail)}. {stop}", f"{do}.")


def _parts(batches: Iterable[RecordBatch]) -> Iterator[Part]:
    """Messages with what Spark says of them, of slices or of rows."""
    for batch in batches:
        if batch.schema.names != [SLICE]:
            yield of_schema(batch), 0, 1
            continue
        for rows, writer, writers in map(slice_of, batch.column(SLICE).to_pylist()):
            yield from ((one, writer, writers) for one in rows)
