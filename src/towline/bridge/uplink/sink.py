"""The formats of a bridge's uplink: what it passes through Spark, and makes records of where it is written.

A line that asks nothing in SQL needs no rows in Spark: Spark plans the slices of the journal, and each passes as one
row, the ticket by which the task that writes fetches it. Any other line gets the rows. Each format is the bridge's own:
a place that data names is fetched from here and by no sink that users have [I13].
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from towline.bridge.routes import (
    FAULT,
    OUTCOME,
    ROUTE,
    RecordColumns,
    RouteTable,
    RowOutcome,
    of_schema,
    of_writer,
    outcomes_of,
    refused,
    route_table,
)
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError, one_line
from towline.gateway.access import Access
from towline.kafka.columns import Columns
from towline.kafka.options import FORMAT
from towline.processes import ProcessMark
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
    from towline.spark.link import ReadPlan
    from towline.spark.reader import Slice
    from towline.spark.tally import SinkNote

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
        self._writers, self._routes = int(own[_WRITERS]), own.get(_ROUTES)
        self._values: dict[str, str] = json.loads(own.get(_VALUES, "{}"))

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return MESSAGES

    def schema(self) -> str:
        """The one column of slices; or those of the ``mqtt`` source, and of `RouteTable.routed`."""
        columns = super().schema()
        if self._routes is None:
            return f"{SLICE} string"
        return f"{columns}, {ROUTE} int" + "".join(f", `{name}` string" for name in self._values)

    @one_line
    def streamReader(self, schema: StructType) -> LineReader:  # noqa: ARG002, N802 - Spark's signature
        """Make the reader of a stream."""
        return LineReader(self._plan, self._writers, self._routes, self._values)


@dataclass(frozen=True)
class WriterPartition(InputPartition):
    """All slices of a batch, for one of its writers."""

    slices: Sequence[InputPartition]
    writer: int
    writers: int


class LineReader(MqttStreamReader):
    """Plans as `MqttStreamReader`; without `routes` it leaves the rows where they are, else it matches them."""

    def __init__(self, plan: ReadPlan, writers: int, routes: str | None, values: Mapping[str, str]) -> None:
        super().__init__(plan)
        self._writers, self._routes, self._values = writers, routes, values

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Where slices pass, a partition for each writer with all of the batch: a record's key tells whose it is."""
        slices = super().partitions(start, end)
        if self._routes is not None:
            return slices
        return [WriterPartition(slices, writer, self._writers) for writer in range(self._writers)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the slices as they are, or the rows of one, the same ones each time [I4].

        Raises:
            GatewayError: TL-G62; for rows what `MqttStreamReader.read` raises.
        """
        if self._routes is not None:
            table = route_table(self._routes)
            yield from (table.routed(rows, self._values) for rows in super().read(partition))
            return
        assert isinstance(partition, WriterPartition)
        parts = [part for one in partition.slices if (part := self._begun(one)).start < part.end]
        if texts := [_to_json(part, partition) for part in parts]:
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


#: Name of the format.
RECORDS: Final = "towline_records"
_LETTERS, _DEDUPES, _EMPTY = "letters", "dedupes", "empty"
#: Messages, the number of the writer that reads them, and how many writers there are.
Part: TypeAlias = "tuple[RecordBatch, int, int]"
#: What a writer counts: the messages that it has read, those of them that are its own, those that it does not write.
_OF_WRITERS: Final = ("seen", "own")
_LEFT_OUT: Final = ("filtered", "undecided", "unrouted")


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


class LineWriter(StreamWriter):
    """Writes the micro-batches of a line; its arguments are those of `RecordSink`."""

    def __init__(
        self, delivery: Delivery, location: str, routes: str, *, dedupes: bool = False, empty: int | None = None
    ) -> None:
        super().__init__(delivery, location)
        self._routes, self._dedupes, self._empty = routes, dedupes, empty

    def _delivered(self, task: Task, batches: Iterator[RecordBatch]) -> KafkaWritten:
        """Write the rows of a task; TL-B02, TL-B29, TL-B33 for a message that has nowhere to go."""
        counts, letters = Counter[str](), self._delivery.settings.dead_letter_topic is not None
        parts = records(route_table(self._routes), _parts(batches), counts, letters=letters)
        return replace(super()._delivered(task, parts), counts=counts)

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
        counts = result.counts - Counter({name: result.counts[name] for name in _OF_WRITERS})
        missing = messages.own - counts["given"] - sum(counts[name] for name in _LEFT_OUT)
        certain = all(answer.marked in (None, answer.given) for answer in written)
        why = "skipped" if batch == self._empty else "dropped" if self._dedupes else "astray"
        why = "astray" if missing < 0 else why if certain else "left_out"
        counts.update({"messages": messages.own + messages.gap, "unwitnessed": messages.gap})
        counts[why] += missing
        return replace(result, counts=counts, spans=messages.spans)


def _check_slices(written: Sequence[KafkaWritten], batch: int) -> None:
    """See that the writers have read the same slices, and that each message is one's own."""
    each = [[answer.counts.get(name, 0) for name in _OF_WRITERS] for answer in written]
    seen, rows = {count for count, _ in each}, sum(own for _, own in each)
    if any(count != own for count, own in each) and seen != {rows}:
        counts = " and ".join(f"{count:,}" for count in sorted(seen))
        what = f"the writers of batch {batch} have read {counts} messages, and {rows:,} are theirs together"
        raise KafkaError("TL-K26", FORMAT, what, "The batch is not committed. Report it, with the bridge's file.")


def records(table: RouteTable, parts: Iterable[Part], counts: Counter[str], *, letters: bool) -> Iterator[RecordBatch]:
    """Records, then what is refused, in batches of `towline.bridge.routes.RECORD_SCHEMA`; all are counted.

    Args:
        table: Of the line.
        parts: The messages of a task.
        counts: Gets how many messages were ``seen``, how many of them are this writer's ``own``, and of those the ones
            that are ``filtered``, ``undecided`` or ``unrouted``, or go to a ``fallback``.
        letters: Whether what can't be a record goes to a dead-letter topic; else the first one ends the batch (TL-B02,
            TL-B29, TL-B33), but for messages that no route takes, which are left out.
    """
    for rows, writer, writers in parts:
        made = table.render(rows)
        if writers > 1:
            made = of_writer(made, writer, writers)
        outcomes = outcomes_of(made)
        if not letters:
            counts += Counter(unrouted=outcomes.pop(RowOutcome.UNROUTED, 0))
            if any(one.reason for one in outcomes):
                raise _nowhere(made)
        counted = {one.name.lower(): outcomes[one] for one in _COUNTED}
        counts += Counter(seen=rows.num_rows, own=made.num_rows, **counted)
        sound = pc.is_in(made.column(OUTCOME), _SOUND)
        for mask in (sound, *([refused(made)] if letters else ())):
            ends = pc.min_max(mask).as_py()
            if ends["max"]:
                yield made if ends["min"] else made.filter(mask)


_COUNTED: Final = (RowOutcome.FILTERED, RowOutcome.UNDECIDED, RowOutcome.FALLBACK)
_SOUND: Final = pa.array([RowOutcome.RENDERED, RowOutcome.FALLBACK], pa.int8())


def _nowhere(made: RecordBatch) -> KafkaError:
    """The end of a line that has nowhere to put a refused message."""
    codes = [RowOutcome(code) for code in made.column(OUTCOME).to_pylist()]
    at = next(n for n, code in enumerate(codes) if code.reason and code is not RowOutcome.UNROUTED)
    outcome, fault, topic = codes[at], made.column(FAULT)[at].as_py(), made.column("towline_topic")[at].as_py()
    code, do = "TL-B02", "Give the line a dead_letter_topic"
    if outcome in (RowOutcome.NOT_WHOLE, RowOutcome.TOO_MANY):
        code, fault = "TL-B29", "a message was not taken in whole, see towline-reason and max_packet_bytes"
    elif outcome is RowOutcome.REJECTED:
        code, fault = "TL-B33", f"reject: {fault}"
    elif str(outcome.reason).startswith("topic_"):
        do += ", or the route a fallback_topic"
    what = f"{printable(fault)}. The line stops there rather than lose it"
    return KafkaError(code, f'message of topic "{printable(topic or "")}"', what, f"{do}.")


def _parts(batches: Iterable[RecordBatch]) -> Iterator[Part]:
    """Messages with what Spark says of them, of slices or of rows."""
    for batch in batches:
        if batch.schema.names != [SLICE]:
            yield of_schema(batch), 0, 1
            continue
        for rows, writer, writers in map(slice_of, batch.column(SLICE).to_pylist()):
            yield from ((one, writer, writers) for one in rows)
