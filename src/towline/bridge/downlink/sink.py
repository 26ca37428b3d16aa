"""``format("towline_downlink")``: one sink that writes messages to a gateway's outbox, and dead letters to Kafka.

Spark gives a query one sink, and a dead letter has to be in Kafka before its batch is committed. So this sink makes
both of the records (`towline.bridge.messages`). It passes the messages to ``format("mqtt")`` and the dead letters to
``format("kafka_transactional")``. Each side avoids writing a batch twice: the outbox counts the rows of the batch that
it has, Kafka has the marker [I9, I10]. A crash in between repeats the batch, sorted by topic, partition and offset, and
each side skips the rows that it has.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import from_arrow_schema

from towline.bridge.messages import (
    DEAD_LETTER_SCHEMA,
    POSITION_COLUMNS,
    DeadLetterColumns,
    MessageTable,
    internal,
    message_table,
)
from towline.bridge.routes import FAULT, OUTCOME, RowOutcome, count_outcomes, refused_mask
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError, without_traceback
from towline.journal.segment import BATCH_BYTES, RowSlice, combine_slices
from towline.kafka.admin import check_source_topics
from towline.kafka.delivery import MEMORY_BYTES, Spool
from towline.kafka.options import SinkSettings
from towline.schema import MESSAGE_SCHEMA
from towline.spark.kafka_sink import FailingWriter, KafkaTransactional, StreamWriter
from towline.spark.sink import MqttStreamWriter, MqttTaskResult, stream_writer
from towline.spark.sink_note import BatchResult, SinkNote

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from towline.kafka.columns import Columns

FORMAT: Final = "towline_downlink"
#: Options: those of either side, as JSON; of `message_table`; location and remedy in errors about a recreated topic.
MQTT, LETTERS, MESSAGES, LOCATION, REMEDY = "mqtt", "letters", "messages", "topics.where", "topics.do"
_CHECKPOINT: Final = "checkpointlocation"
_MAX_ROWS: Final = 10_000  #: Rows of a batch that is passed on.
#: Columns that the sink ``mqtt`` takes.
_MQTT_COLUMNS: Final = [name for name in MESSAGE_SCHEMA.names if name != "qos"]


@dataclass
class DownlinkResult(WriterCommitMessage):
    """Results of one task, from the outbox and from Kafka.

    Attributes:
        mqtt_result: Result of the outbox.
        dead_letters: Result of Kafka; None for a line without dead letters.
        counts: ``records`` received; of those ``filtered``, ``undecided`` as their ``where`` is null, and ``unfit`` for
            a message; and messages ``sent``, as the outbox reports.
    """

    mqtt_result: MqttTaskResult
    dead_letters: Any
    counts: Counter[str]


class DownlinkSink(DataSource):
    """Sink of a line from Kafka to MQTT; internal to the bridge."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: ARG002, N802, FBT001 - Spark's signature
        """Check the topics of the batch, and create the writers of both sides; raises their errors."""
        checkpoint_option = {key: value for key, value in self.options.items() if key.lower() == _CHECKPOINT}
        mqtt, letters = (json.loads(self.options[side]) | checkpoint_option for side in (MQTT, LETTERS))
        settings, checkpoint_path = SinkSettings.parse(letters), letters.get(_CHECKPOINT, "")
        try:
            check_source_topics(settings.client, checkpoint_path, self.options[LOCATION], self.options[REMEDY])
        except KafkaError as error:
            return FailingWriter(error)
        sent = from_arrow_schema(pa.schema(map(MESSAGE_SCHEMA.field, _MQTT_COLUMNS)))
        mqtt_writer = stream_writer(mqtt, sent)
        kafka_writer: StreamWriter | None = None
        if settings.dead_letter_topic is not None:
            kafka_writer = LetterSink(letters).streamWriter(from_arrow_schema(DEAD_LETTER_SCHEMA), overwrite)
        return DownlinkWriter(self.options[MESSAGES], mqtt_writer, kafka_writer, checkpoint_path)


class LetterSink(KafkaTransactional):
    """Sink of refused records as dead letters."""

    def _columns(self, schema: StructType) -> Columns:  # noqa: ARG002 - the bridge's fixed schema
        return DeadLetterColumns()


@dataclass
class DownlinkWriter(DataSourceStreamArrowWriter):
    """Writer of a downlink's micro-batches; `messages` are options of `message_table`."""

    messages: str
    mqtt_writer: MqttStreamWriter
    kafka_writer: StreamWriter | None
    checkpoint_path: str

    @without_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> DownlinkResult:
        """Write the messages of a partition to the outbox, then its dead letters to Kafka.

        The rows are spooled meanwhile, to be read twice and in any order; on disk where they are large.

        Raises:
            KafkaError: TL-B05, a record can't be a message, and the line has no dead-letter topic.
        """
        table, counts = message_table(self.messages), Counter[str]()
        with Spool(MEMORY_BYTES) as spool:
            spool.fill(render_rows(table, iterator, counts, has_dead_letter_topic=self.kafka_writer is not None))
            messages, refused = split_by_outcome(list(spool))
            mqtt_result = self.mqtt_writer.write(messages)
            letters = chain.from_iterable(map(table.dead_letters, refused))
            kafka_result = self.kafka_writer and self.kafka_writer.write(letters)
            counts["sent"] = mqtt_result.rows
            return DownlinkResult(mqtt_result, kafka_result or None, counts)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Commit the batch on both sides; the writer of dead letters writes the note, if there is one."""
        results = [result if isinstance(result, DownlinkResult) else None for result in messages]
        self.mqtt_writer.commit([result and result.mqtt_result for result in results], batchId)
        if self.kafka_writer is not None:
            letters = [result and replace(result.dead_letters, counts=result.counts) for result in results]
            self.kafka_writer.commit(letters, batchId)
            return
        counts = sum((result.counts for result in results if result), Counter[str]())
        checkpoint = Checkpoint(self.checkpoint_path)
        SinkNote.read(checkpoint).with_batch(batchId, BatchResult(counts)).write(checkpoint)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Abort the batch on both sides."""
        results = [result if isinstance(result, DownlinkResult) else None for result in messages]
        self.mqtt_writer.abort([result and result.mqtt_result for result in results], batchId)
        if self.kafka_writer:
            self.kafka_writer.abort([result and result.dead_letters for result in results], batchId)


def render_rows(
    table: MessageTable, batches: Iterable[pa.RecordBatch], counts: Counter[str], *, has_dead_letter_topic: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a task with their outcome, without filtered records; counts all.

    Args:
        table: Message table of the line.
        batches: Records, rendered or not.
        counts: As those of `DownlinkResult`.
        has_dead_letter_topic: Whether a record that can't be a message goes to a dead-letter topic; else the first ends
            the batch (TL-B05).
    """
    for batch in batches:
        rows = batch if OUTCOME in batch.schema.names else table.render(batch)
        outcomes = count_outcomes(rows)
        unfit = sum(count for outcome, count in outcomes.items() if outcome.reason)
        skipped = {outcome.name.lower(): outcomes[outcome] for outcome in (RowOutcome.FILTERED, RowOutcome.UNDECIDED)}
        counts += Counter(records=rows.num_rows, unfit=unfit, **skipped)
        if unfit and not has_dead_letter_topic:
            (row,) = rows.filter(refused_mask(rows)).slice(0, 1).select([*POSITION_COLUMNS, FAULT]).to_pylist()
            location = f"line {table.line}: record {row['topic']}/{row['partition']} offset {row['offset']}"
            problem = f"{row[FAULT]}. The line stops there rather than lose it"
            raise KafkaError("TL-B05", location, problem, "Give it a dead_letter_topic.")
        has_skipped = any(skipped.values())
        yield (rows.filter(pc.greater_equal(rows.column(OUTCOME), int(RowOutcome.RENDERED))) if has_skipped else rows)


def split_by_outcome(
    batches: Sequence[pa.RecordBatch], max_bytes: int = BATCH_BYTES
) -> tuple[Iterator[pa.RecordBatch], Iterator[pa.RecordBatch]]:
    """Return the messages, and the refused records, each in the order of Kafka's topics, partitions and offsets.

    Args:
        batches: All of them, with `OUTCOME`.
        max_bytes: Largest batch returned, in bytes, unless it is one row.
    """
    runs, columns = _sorted_runs(batches), list(map(internal, _MQTT_COLUMNS))

    def select_rows(compare: Callable[[pa.Array, int], pa.Array]) -> Iterator[pa.RecordBatch]:
        slices = (batches[number].slice(first_row, count) for number, first_row, count in runs)
        ordered = combine_slices((RowSlice(rows, rows.nbytes) for rows in slices), _MAX_ROWS, max_bytes)
        return (rows for batch in ordered if (rows := batch.filter(compare(batch.column(OUTCOME), 0))).num_rows)

    messages = (rows.select(columns).rename_columns(_MQTT_COLUMNS) for rows in select_rows(pc.equal))
    return messages, select_rows(pc.greater)


def _sorted_runs(batches: Sequence[pa.RecordBatch]) -> list[tuple[int, int, int]]:
    """Return runs of adjacent rows in the order of their offsets: number of the batch, first row, length."""
    if not batches:
        return []
    positions = pa.Table.from_batches([batch.select(POSITION_COLUMNS) for batch in batches])
    order = pc.sort_indices(positions, sort_keys=[(name, "ascending") for name in POSITION_COLUMNS]).cast(pa.int64())
    starts = list(accumulate((batch.num_rows for batch in batches), initial=0))
    follows = pc.equal(pc.pairwise_diff(order), 1).fill_null(False)
    heads = pc.indices_nonzero(pc.or_(pc.invert(follows), pc.is_in(order, pa.array(starts, pa.int64()))))
    runs = []
    bounds = pairwise([*heads.to_pylist(), len(order)])
    for first_row, (run_start, run_end) in zip(order.take(heads).to_pylist(), bounds, strict=True):
        number = bisect_right(starts, first_row) - 1
        runs.append((number, first_row - starts[number], run_end - run_start))
    return runs
