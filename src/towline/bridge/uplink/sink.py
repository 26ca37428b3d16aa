"""Spark formats of an uplink: a source of journal slices or rows, and a sink that makes Kafka records of them.

A line without SQL needs no rows in Spark: Spark plans slices of the journal, each passed as one row, and the writing
task reads it. A line with SQL passes its rows through Spark. Both formats are internal to the bridge: an address in
data is connected to only here, by no public sink [I13].
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
    count_outcomes,
    refused_mask,
    route_table,
    rows_of_writer,
    to_row_schema,
)
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError, without_traceback
from towline.gateway.access import ClientAccess
from towline.kafka.columns import Columns
from towline.kafka.options import FORMAT
from towline.processes import ProcessIdentity
from towline.spark.kafka_sink import KafkaTaskResult, KafkaTransactional, StreamWriter
from towline.spark.link import GatewayAddress
from towline.spark.offsets import positions_at
from towline.spark.reader import MqttStreamReader
from towline.spark.sink_note import BatchMessages, BatchResult
from towline.spark.source import MqttDataSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

    from towline.kafka.delivery import Delivery
    from towline.sinks import Task
    from towline.spark.link import ReadPlan
    from towline.spark.reader import Slice
    from towline.spark.sink_note import SinkNote

#: Format name of the source.
SOURCE_FORMAT: Final = "towline_messages"
#: Column of the serialized slices.
SLICE_COLUMN: Final = "towline_slice"
_ROUTES, _VALUES, _WRITERS = "routes", "values", "writers"


def split_options(options: Mapping[str, str], *names: str) -> tuple[dict[str, str], dict[str, str]]:
    """Split options into those of these names, with keys in lower case, and the others."""
    selected_options = {name.lower(): value for name, value in options.items() if name.lower() in names}
    return selected_options, {name: value for name, value in options.items() if name.lower() not in names}


class LineSource(MqttDataSource):
    """Source of an uplink: all slices of a batch for each writer; or the rows of ``mqtt`` with the columns of SQL.

    Options beside those of ``mqtt``: ``writers``, number of tasks that write a batch; and to pass rows, ``routes``, of
    `towline.bridge.routes.routes_to_json`, and ``values``, of `RouteSql.value_columns` as JSON.
    """

    def __init__(self, options: dict[str, str]) -> None:
        self._line_options, mqtt_options = split_options(options, _WRITERS, _ROUTES, _VALUES)
        super().__init__(mqtt_options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return SOURCE_FORMAT

    def schema(self) -> str:
        """Return the one column of slices; or the columns of the ``mqtt`` source and of `RouteTable.add_routes`."""
        if _ROUTES not in self._line_options:
            return f"{SLICE_COLUMN} string"
        names = json.loads(self._line_options[_VALUES])
        return f"{super().schema()}, {ROUTE} int" + "".join(f", `{name}` string" for name in names)

    @without_traceback
    def streamReader(self, schema: StructType) -> LineReader:  # noqa: ARG002, N802 - Spark's signature
        """Create the reader of a stream."""
        return LineReader(self._plan, self._line_options)


@dataclass(frozen=True)
class WriterPartition(InputPartition):
    """Input partition of one writer: all slices of a batch."""

    slices: Sequence[InputPartition]
    writer: int
    writers: int


class LineReader(MqttStreamReader):
    """Reader with the batches of `MqttStreamReader`; without ``routes`` it yields slices, else routed rows."""

    def __init__(self, plan: ReadPlan, options: Mapping[str, str]) -> None:
        super().__init__(plan)
        self._writers, self._routes = int(options[_WRITERS]), options.get(_ROUTES)
        self._values: dict[str, str] = json.loads(options.get(_VALUES, "{}"))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the slices; without routes a partition for each writer, with all slices."""
        slices = super().partitions(start, end)
        if self._routes is not None:
            return slices
        return [WriterPartition(slices, writer, self._writers) for writer in range(self._writers)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the slices as text, or the rows of one slice, the same ones at each call [I4].

        Raises:
            GatewayError: TL-G62; for rows as `MqttStreamReader.read`.
        """
        if self._routes is not None:
            table = route_table(self._routes)
            yield from (table.add_routes(rows, self._values) for rows in super().read(partition))
            return
        assert isinstance(partition, WriterPartition)
        slices = map(self._readable_slice, partition.slices)
        if slice_texts := [_to_json(part, partition) for part in slices if part.start < part.end]:
            yield pa.RecordBatch.from_pydict({SLICE_COLUMN: pa.array(slice_texts, pa.string())})


def _to_json(journal_slice: Slice, partition: WriterPartition) -> str:
    """Serialize a slice as plain values; the only secret is its ticket, valid for this slice alone."""
    rows = [journal_slice.journal, journal_slice.start, journal_slice.end, journal_slice.incarnation]
    writer = [partition.writer, partition.writers]
    return json.dumps({"rows": rows, "gateway": asdict(journal_slice.address), "writer": writer})


def open_slice(text: str) -> tuple[Iterator[RecordBatch], int, int]:
    """Open the slice in a value of the column `SLICE_COLUMN`, in the writing task.

    Returns:
        Its rows, to be read once, the same ones at each call [I4]; the number of the writer, and the count of writers.
        Reading raises GatewayError if the journal is another one or lacks the rows, GatewayUnreachable if no gateway
        answers for a minute.
    """
    entry = json.loads(text)
    address = entry["gateway"]
    address["access"] = ClientAccess(**address["access"])
    address["owner"] = address["owner"] and ProcessIdentity(**address["owner"])
    writer, writers = entry["writer"]
    return GatewayAddress(**address).rows(*entry["rows"]), writer, writers


#: Format name of the sink.
SINK_FORMAT: Final = "towline_records"
_SINK_OPTIONS: Final = ("letters", "dedupes", "empty")
#: Messages, the number of the writer that reads them, and how many writers there are.
WriterMessages: TypeAlias = "tuple[RecordBatch, int, int]"
#: Counts of a writer: messages read, and its share of them; and messages of its share without a record.
_WRITER_COUNTS: Final = ("seen", "own")
_UNWRITTEN_COUNTS: Final = ("filtered", "undecided", "unrouted")


class RecordSink(KafkaTransactional):
    """Sink that makes records of messages, and writes them as ``kafka_transactional`` does.

    Options beside those: ``routes``, of `towline.bridge.routes.routes_to_json`; ``letters``: the dead-letter topic
    under any guarantee, "" for none; ``dedupes``: whether Spark drops duplicates; ``empty``: the batch that is replayed
    empty after a crash, "" for none.
    """

    def __init__(self, options: dict[str, str]) -> None:
        self._line_options, kafka_options = split_options(options, _ROUTES, *_SINK_OPTIONS)
        super().__init__(kafka_options)
        self._settings = replace(self._settings, dead_letter_topic=self._line_options["letters"] or None)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return SINK_FORMAT

    def _columns(self, schema: StructType) -> Columns:  # noqa: ARG002 - the schema is fixed
        return RecordColumns()

    def _stream_writer(self, delivery: Delivery, checkpoint_location: str) -> StreamWriter:
        return LineWriter(delivery, checkpoint_location, self._line_options)


#: Formats to register in the bridge's session.
FORMATS: Final = (LineSource, RecordSink)


class LineWriter(StreamWriter):
    """Writer of a line's micro-batches; the options are those of `RecordSink`."""

    def __init__(self, delivery: Delivery, location: str, options: Mapping[str, str]) -> None:
        super().__init__(delivery, location)
        self._routes, self._drops_duplicates = options[_ROUTES], options["dedupes"] == "true"
        self._empty_batch = int(options["empty"]) if options["empty"] else None

    def _deliver_task(self, task: Task, batches: Iterator[RecordBatch]) -> KafkaTaskResult:
        """Write the rows of a task; TL-B02 for a message that can't be written anywhere."""
        counts, has_dead_letters = Counter[str](), self._delivery.settings.dead_letter_topic is not None
        parts = records(route_table(self._routes), _writer_messages(batches), counts, has_dead_letters=has_dead_letters)
        return replace(super()._deliver_task(task, parts), counts=counts)

    def _batch_result(self, answers: Sequence[KafkaTaskResult], batch: int, note: SinkNote) -> BatchResult:
        """Return the counts of the batch's messages, by its offset log entry.

        Counts beside the sink's and the writers': ``unwitnessed`` messages, between the batches before and this one.
        Messages that did not reach the sink are ``skipped``, dropped by at_most_once; ``dropped`` by Spark;
        ``left_out``, unknown because Kafka already had the batch; else ``astray``, missing without a reason.
        """
        _check_slices(answers, batch)
        result, checkpoint = super()._batch_result(answers, batch, note), Checkpoint(self._checkpoint_location)
        start, end = positions_at(checkpoint, batch - 1), positions_at(checkpoint, batch)
        messages = BatchMessages.from_positions(note.totals_before(batch), start, end)
        if messages.row_count is None:  # from before the first counted batch
            return replace(result, counts=Counter(), spans=messages.spans)
        counts = result.counts - Counter({name: result.counts[name] for name in _WRITER_COUNTS})
        missing_rows = messages.row_count - counts["given"] - sum(counts[name] for name in _UNWRITTEN_COUNTS)
        rows_are_known = all(answer.marker_rows in (None, answer.input_rows) for answer in answers)
        reason = "skipped" if batch == self._empty_batch else "dropped" if self._drops_duplicates else "astray"
        reason = "astray" if missing_rows < 0 else reason if rows_are_known else "left_out"
        counts["unwitnessed"] += messages.uncounted_rows
        counts[reason] += missing_rows
        return replace(result, counts=counts, spans=messages.spans)


def _check_slices(answers: Sequence[KafkaTaskResult], batch: int) -> None:
    """Check that all writers have read the same slices, and that each message belongs to one writer."""
    writer_counts = [[answer.counts.get(name, 0) for name in _WRITER_COUNTS] for answer in answers]
    read_counts, rows = {count for count, _ in writer_counts}, sum(own_rows for _, own_rows in writer_counts)
    if any(count != own_rows for count, own_rows in writer_counts) and read_counts != {rows}:
        counts = " and ".join(f"{count:,}" for count in sorted(read_counts))
        problem = f"the writers of batch {batch} read {counts} messages, and their shares sum up to {rows:,}"
        raise KafkaError("TL-K26", FORMAT, problem, "The batch is not committed. Report it, with the bridge's file.")


def records(
    table: RouteTable, messages: Iterable[WriterMessages], counts: Counter[str], *, has_dead_letters: bool
) -> Iterator[RecordBatch]:
    """Yield records, then refused messages, in batches of `towline.bridge.routes.RECORD_SCHEMA`, and count them all.

    Args:
        table: Routes of the line.
        messages: Messages of a task.
        counts: Gets the number of messages ``seen``, of this writer's ``own``, and of those that are ``filtered``,
            ``undecided`` or ``unrouted``.
        has_dead_letters: Whether there is a dead-letter topic; without one the first invalid message fails the batch
            (TL-B02), and unrouted messages are dropped.
    """
    for rows, writer, writers in messages:
        record_batch = table.render(rows)
        if writers > 1:
            record_batch = rows_of_writer(record_batch, writer, writers)
        outcomes = count_outcomes(record_batch)
        if not has_dead_letters:
            counts += Counter(unrouted=outcomes.pop(RowOutcome.UNROUTED, 0))
            if any(outcome.reason for outcome in outcomes):
                raise _undeliverable_error(record_batch)
        outcome_counts = {outcome.name.lower(): outcomes[outcome] for outcome in _COUNTED_OUTCOMES}
        counts += Counter(seen=rows.num_rows, own=record_batch.num_rows, **outcome_counts)
        valid_rows = pc.equal(record_batch.column(OUTCOME), int(RowOutcome.RENDERED))
        for mask in (valid_rows, *([refused_mask(record_batch)] if has_dead_letters else ())):
            mask_range = pc.min_max(mask).as_py()
            if mask_range["max"]:
                yield record_batch if mask_range["min"] else record_batch.filter(mask)


_COUNTED_OUTCOMES: Final = (RowOutcome.FILTERED, RowOutcome.UNDECIDED)


def _undeliverable_error(record_batch: RecordBatch) -> KafkaError:
    """Return the error for a refused message of a line without a dead-letter topic."""
    is_routed = pc.not_equal(record_batch.column(OUTCOME), int(RowOutcome.UNROUTED))
    refused = record_batch.filter(pc.and_(refused_mask(record_batch), is_routed)).slice(0, 1)
    (row,) = refused.select(["towline_topic", FAULT]).to_pylist()
    problem = f"{row[FAULT]}. The line stops, so that it is not lost"
    remedy = "Give the line a dead_letter_topic."
    return KafkaError("TL-B02", f'message of topic "{row["towline_topic"] or ""}"', problem, remedy)


def _writer_messages(batches: Iterable[RecordBatch]) -> Iterator[WriterMessages]:
    """Yield the messages of slices, or of rows with Spark's columns."""
    for batch in batches:
        if batch.schema.names != [SLICE_COLUMN]:
            yield to_row_schema(batch), 0, 1
            continue
        for rows, writer, writers in map(open_slice, batch.column(SLICE_COLUMN).to_pylist()):
            yield from ((message_batch, writer, writers) for message_batch in rows)
