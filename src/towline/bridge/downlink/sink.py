"""``format("towline_downlink")``: messages to the outbox of a gateway, and dead letters to Kafka, as one sink.

Spark gives a query one sink, and a dead letter has to be in Kafka before the batch that left it out is committed. So
this sink makes both of the records (`towline.bridge.messages`), and hands the messages to ``format("mqtt")`` and the
dead letters to ``format("kafka_transactional")``, each with its way of not writing a batch twice: the outbox remembers
how many rows of the batch it has, Kafka the marker [I9, I10]. A crash in between repeats the batch, sorted by where the
records stand in Kafka, and each side leaves out what it has.
"""

from __future__ import annotations

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

from towline.bridge.messages import LETTER_SCHEMA, PLACE, LetterColumns, MessageTable, message_table, own
from towline.bridge.routes import FAULT, OUTCOME, RowOutcome, outcomes_of, refused
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, KafkaError, one_line
from towline.journal.segment import BATCH_BYTES, RowSlice, combined
from towline.kafka.admin import check_source_topics
from towline.kafka.delivery import Spool
from towline.kafka.options import SinkSettings
from towline.schema import MESSAGE_SCHEMA
from towline.spark.kafka_sink import FailingWriter, KafkaTransactional, StreamWriter
from towline.spark.sink import MqttStreamWriter, MqttWritten, stream_writer
from towline.spark.tally import BatchResult, SinkNote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.types import StructType

    from towline.kafka.columns import Columns

FORMAT: Final = "towline_downlink"
#: What options of either side begin with.
MQTT, DEAD_LETTERS = "mqtt.", "letters."
#: Options: of `message_table`; whose topics they are, and what to do about one that was made anew.
MESSAGES, LINE_NAME, WAYS_OUT = "messages", "topics.where", "topics.do"
_CHECKPOINT: Final = "checkpointlocation"
#: Bytes of a part that are kept in memory.
_MEMORY: Final = 64 << 20
#: Rows handed on at a time.
_ROWS: Final = 10_000
#: Columns that the sink ``mqtt`` takes.
_SENT: Final = [name for name in MESSAGE_SCHEMA.names if name != "qos"]


@dataclass
class DownlinkWritten(WriterCommitMessage):
    """A task's two answers.

    Attributes:
        sent: Of the outbox.
        dead_letters: Of Kafka; None for a line without dead letters.
        counts: ``records`` that it was given; of those ``filtered``, ``undecided`` as their ``where`` is null, and
            ``unfit`` for a message, and of those ``unlettered``, no dead letters in Kafka; and messages ``sent``, of
            which the outbox has told.
    """

    sent: MqttWritten
    dead_letters: Any
    counts: Counter[str]


class DownlinkSink(DataSource):
    """The sink of a line from Kafka to MQTT; the bridge's own, not for the public."""

    @classmethod
    def name(cls) -> str:
        """The word for ``format()``."""
        return FORMAT

    def schema(self) -> StructType:
        """Refuse to be read: raises TL-C49."""
        raise ConfigError("TL-C49", FORMAT, "this format only writes", 'Read with format("mqtt").')

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: ARG002, N802, FBT001 - Spark's signature
        """Look at the topics of the batch, and bind both sides; what they raise, this raises."""
        letters = _part(self.options, DEAD_LETTERS)
        client, location = SinkSettings.parse(letters).client, letters.get(_CHECKPOINT, "")
        try:
            check_source_topics(client, location, self.options[LINE_NAME], self.options[WAYS_OUT])
        except KafkaError as problem:
            return FailingWriter(problem)
        mqtt = stream_writer(_part(self.options, MQTT), from_arrow_schema(pa.schema(map(MESSAGE_SCHEMA.field, _SENT))))
        sink = LetterSink(letters)
        kafka = sink.streamWriter(from_arrow_schema(LETTER_SCHEMA), overwrite) if sink.takes_letters else None
        return DownlinkWriter(self.options[MESSAGES], mqtt, kafka, location)


class LetterSink(KafkaTransactional):
    """Writes refused records as dead letters, and what Kafka is told of them."""

    @property
    def takes_letters(self) -> bool:
        """Whether the line has a dead-letter topic."""
        return self._settings.dead_letter_topic is not None

    def _columns(self, schema: StructType) -> Columns:  # noqa: ARG002 - the rows are the bridge's own
        return LetterColumns()


def _part(options: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The options of one side, and the checkpoint, which both know."""
    own = {key[len(prefix) :]: value for key, value in options.items() if key.lower().startswith(prefix)}
    return own | {key: value for key, value in options.items() if key.lower() == _CHECKPOINT}


@dataclass
class DownlinkWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a downlink; `messages` is of `message_table`, `location` the checkpoint."""

    messages: str
    mqtt: MqttStreamWriter
    kafka: StreamWriter | None
    location: str

    @one_line
    def write(self, iterator: Iterator[pa.RecordBatch]) -> DownlinkWritten:
        """Bring the messages of a partition to the outbox, then its dead letters to Kafka.

        Meanwhile they are kept where they can be read twice and in any order, on disk where they are large.

        Raises:
            KafkaError: TL-B05, a record can't be a message, and has nowhere to go.
        """
        table, counts = message_table(self.messages), Counter[str]()
        with Spool(_MEMORY, None) as spool:
            spool.fill(rendered(table, iterator, counts, letters=self.kafka is not None))
            messages, dead = sorted_out(list(spool))
            sent = self.mqtt.write(messages)
            letters = self.kafka and self.kafka.write(chain.from_iterable(map(table.dead_letters, dead)))
            counts["sent"] = sent.rows
            # A failure notice that Kafka refuses is a dead letter too, and is none of the records.
            counts["unlettered"] = max(0, counts["unfit"] - (letters.done.dead_lettered if letters else 0))
            return DownlinkWritten(sent, letters or None, counts)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Let both sides account for the batch; the note is the writer's of dead letters, if there is one."""
        both = [one if isinstance(one, DownlinkWritten) else None for one in messages]
        self.mqtt.commit([one and one.sent for one in both], batchId)
        if self.kafka is not None:
            self.kafka.commit([one and replace(one.dead_letters, counts=one.counts) for one in both], batchId)
            return
        counts = sum((one.counts for one in both if one), Counter[str]())
        checkpoint = Checkpoint(self.location)
        SinkNote.read_to_write(checkpoint).after(batchId, BatchResult(counts)).keep(checkpoint)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Let both sides give up the batch."""
        both = [one if isinstance(one, DownlinkWritten) else None for one in messages]
        self.mqtt.abort([one and one.sent for one in both], batchId)
        if self.kafka:
            self.kafka.abort([one and one.dead_letters for one in both], batchId)


def rendered(
    table: MessageTable, batches: Iterable[pa.RecordBatch], counts: Counter[str], *, letters: bool
) -> Iterator[pa.RecordBatch]:
    """The records of a task with what becomes of them, but for those that are left out; all are counted.

    Args:
        table: Of the line.
        batches: Records, rendered or not.
        counts: As those of `DownlinkWritten`.
        letters: Whether what can't be a message goes to a dead-letter topic; else the first ends the batch (TL-B05).
    """
    for batch in batches:
        rows = batch if OUTCOME in batch.schema.names else table.rendered(batch)
        outcomes = outcomes_of(rows)
        unfit = sum(count for one, count in outcomes.items() if one.reason)
        left_out = {one.name.lower(): outcomes[one] for one in (RowOutcome.FILTERED, RowOutcome.UNDECIDED)}
        counts += Counter(records=rows.num_rows, unfit=unfit, **left_out)
        if unfit and not letters:
            (row,) = rows.filter(refused(rows)).slice(0, 1).select([*PLACE, FAULT]).to_pylist()
            where = f"line {table.line}: record {row['topic']}/{row['partition']} offset {row['offset']}"
            what = f"{row[FAULT]}. The line stops there rather than lose it"
            raise KafkaError("TL-B05", where, what, "Give it a dead_letter_topic.")
        gone = any(left_out.values())
        yield rows.filter(pc.greater_equal(rows.column(OUTCOME), int(RowOutcome.RENDERED))) if gone else rows


def sorted_out(
    batches: Sequence[pa.RecordBatch], most: int = BATCH_BYTES
) -> tuple[Iterator[pa.RecordBatch], Iterator[pa.RecordBatch]]:
    """The messages, and the refused records, each in the order of Kafka's topics, partitions and offsets.

    Args:
        batches: All of them, with `OUTCOME`.
        most: Most bytes of a batch that is handed on, unless it is one row.
    """
    runs, columns = _runs(batches), list(map(own, _SENT))

    def those(test: Callable[[pa.Array, int], pa.Array]) -> Iterator[pa.RecordBatch]:
        slices = (batches[number].slice(first, count) for number, first, count in runs)
        ordered = combined((RowSlice(rows, rows.nbytes) for rows in slices), _ROWS, most)
        return (rows for batch in ordered if (rows := batch.filter(test(batch.column(OUTCOME), 0))).num_rows)

    return (rows.select(columns).rename_columns(_SENT) for rows in those(pc.equal)), those(pc.greater)


def _runs(batches: Sequence[pa.RecordBatch]) -> list[tuple[int, int, int]]:
    """Where the rows lie, in the order of their places: number of a batch, first row, rows that follow each other."""
    if not batches:
        return []
    places = pa.Table.from_batches([batch.select(PLACE) for batch in batches])
    order = pc.sort_indices(places, sort_keys=[(name, "ascending") for name in PLACE]).cast(pa.int64())
    starts = list(accumulate((batch.num_rows for batch in batches), initial=0))
    follows = pc.equal(pc.pairwise_diff(order), 1).fill_null(False)
    heads = pc.indices_nonzero(pc.or_(pc.invert(follows), pc.is_in(order, pa.array(starts, pa.int64()))))
    runs = []
    for first, (at, end) in zip(order.take(heads).to_pylist(), pairwise([*heads.to_pylist(), len(order)]), strict=True):
        number = bisect_right(starts, first) - 1
        runs.append((number, first - starts[number], end - at))
    return runs
