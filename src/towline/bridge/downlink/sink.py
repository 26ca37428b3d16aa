"""``format("towline_downlink")``: rows to the outbox of a gateway, and dead letters to Kafka, as one sink of one query.

The rows of a part are sorted by where they stand in Kafka: a batch that is run again has to be the same rows in the
same order, because the outbox remembers how many of them it has [I10].

Spark gives a query one sink, and a dead letter has to be in Kafka before the batch that left it out is committed. So
this sink hands the rows to ``format("mqtt")`` and the dead letters to ``format("kafka_transactional")``, each with its
way of not writing a batch twice: the outbox remembers the batch, Kafka the marker [I9, I10]. A crash in between repeats
the batch, and each side leaves out what it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from towline.bridge.downlink.sql import DEAD_LETTER, NOTICE, PLACE
from towline.errors import ConfigError, KafkaError
from towline.journal.reading import BATCH_BYTES, RowSlice, combined
from towline.kafka.options import SinkSettings
from towline.kafka.spool import Spool
from towline.kafka.topicids import SourceTopics
from towline.spark.kafka_sink import FailingWriter, KafkaTransactional
from towline.spark.sink import stream_writer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEAD_LETTERS", "FORMAT", "MQTT", "DownlinkSink", "DownlinkWriter", "sorted_out"]

FORMAT: Final = "towline_downlink"
#: What options of either side begin with.
MQTT, DEAD_LETTERS = "mqtt.", "letters."
#: Options: whose topics they are, and what to do about one that was made anew.
WHERE, WAYS_OUT = "topics.where", "topics.do"
_CHECKPOINT: Final = "checkpointlocation"
#: Bytes of a part that are kept in memory.
_MEMORY: Final = 64 << 20
#: Rows handed on at a time.
_ROWS: Final = 10_000


@dataclass
class DownlinkWritten(WriterCommitMessage):
    """A task's two answers.

    Attributes:
        sent: Of the outbox.
        dead_letters: Of Kafka; None for a line without dead letters.
    """

    sent: WriterCommitMessage
    dead_letters: WriterCommitMessage | None


class DownlinkSink(DataSource):
    """The sink of a line from Kafka to MQTT; the bridge's own, not for the public."""

    @classmethod
    def name(cls) -> str:
        """The word for ``format()``."""
        return FORMAT

    def schema(self) -> StructType:
        """Refuse to be read.

        Raises:
            ConfigError: TL-C49, always.
        """
        raise ConfigError("TL-C49", FORMAT, "this format only writes", 'Read with format("mqtt").')

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802, FBT001 - Spark's signature
        """Look at the topics of the batch, and bind both sides; what they raise, this raises."""
        letters = _part(self.options, DEAD_LETTERS)
        client, location = SinkSettings.parse(letters).client, letters.get(_CHECKPOINT, "")
        try:
            SourceTopics(client, location, self.options[WHERE], self.options[WAYS_OUT]).look()
        except KafkaError as problem:
            return FailingWriter(problem)
        rows = StructType([field for field in schema.fields if field.name not in (DEAD_LETTER, NOTICE, PLACE)])
        kafka = None
        if DEAD_LETTER in schema.names:
            dead_letters = schema[DEAD_LETTER].dataType
            assert isinstance(dead_letters, StructType)
            kafka = KafkaTransactional(letters).streamWriter(dead_letters, overwrite)
        return DownlinkWriter(stream_writer(_part(self.options, MQTT), rows), kafka)


def _part(options: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The options of one side, and the checkpoint, which both know."""
    own = {key[len(prefix) :]: value for key, value in options.items() if key.lower().startswith(prefix)}
    return own | {key: value for key, value in options.items() if key.lower() == _CHECKPOINT}


class DownlinkWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a downlink.

    Args:
        mqtt: Takes the rows.
        kafka: Takes the dead letters; None for a line that has none.
    """

    def __init__(self, mqtt: DataSourceStreamArrowWriter, kafka: DataSourceStreamArrowWriter | None) -> None:
        self._mqtt = mqtt
        self._kafka = kafka

    def write(self, iterator: Iterator[pa.RecordBatch]) -> DownlinkWritten:
        """Bring the rows of a partition to the outbox, then its dead letters to Kafka.

        Meanwhile they are kept where they can be read twice and in any order, on disk where they are large.
        """
        with Spool(_MEMORY, None) as spool:
            spool.fill(iterator)
            rows, dead_letters = sorted_out(list(spool))
            sent = self._mqtt.write(rows)
            return DownlinkWritten(sent, self._kafka.write(dead_letters) if self._kafka else None)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Let both sides account for the batch."""
        both = [one if isinstance(one, DownlinkWritten) else None for one in messages]
        self._mqtt.commit([one and one.sent for one in both], batchId)
        if self._kafka:
            self._kafka.commit([one and one.dead_letters for one in both], batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Let both sides give up the batch."""
        both = [one if isinstance(one, DownlinkWritten) else None for one in messages]
        self._mqtt.abort([one and one.sent for one in both], batchId)
        if self._kafka:
            self._kafka.abort([one and one.dead_letters for one in both], batchId)


def sorted_out(
    batches: Sequence[pa.RecordBatch], most: int = BATCH_BYTES
) -> tuple[Iterator[pa.RecordBatch], Iterator[pa.RecordBatch]]:
    """The rows for MQTT and the dead letters, each in the order of Kafka's topics, partitions and offsets.

    Args:
        batches: All of them.
        most: Most bytes of a batch that is handed on, unless it is one row.
    """
    runs = _runs(batches)
    rows = (kept for batch in _in_order(batches, runs, most) if (kept := _rows(batch)).num_rows)
    dead_letters = (dead for batch in _in_order(batches, runs, most) if (dead := _dead_letters(batch)) is not None)
    return rows, dead_letters


def _rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Those for MQTT."""
    if DEAD_LETTER not in batch.schema.names:
        return batch
    column = batch.column(DEAD_LETTER)
    rows = batch.drop_columns([name for name in (DEAD_LETTER, NOTICE) if name in batch.schema.names])
    return rows if column.null_count == batch.num_rows else rows.filter(pc.is_null(column))


def _dead_letters(batch: pa.RecordBatch) -> pa.RecordBatch | None:
    """The dead letters, each followed by its notice; None where there are none."""
    column = batch.column(DEAD_LETTER) if DEAD_LETTER in batch.schema.names else None
    if column is None or column.null_count == batch.num_rows:
        return None
    if NOTICE in batch.schema.names:
        notices = batch.column(NOTICE)
        both = pa.concat_arrays([column.cast(notices.type), notices])  # Spark says of one only that it may be null
        column = both.take(pa.array(i + n for i in range(batch.num_rows) for n in (0, batch.num_rows)))
    return pa.RecordBatch.from_struct_array(column.filter(pc.is_valid(column)))


def _runs(batches: Sequence[pa.RecordBatch]) -> list[tuple[int, int, int]]:
    """Where the rows lie, in the order of their places: number of a batch, first row, rows that follow each other."""
    if not batches:
        return []
    places = pa.Table.from_batches([pa.RecordBatch.from_struct_array(batch.column(PLACE)) for batch in batches])
    order = pc.sort_indices(places, sort_keys=[(name, "ascending") for name in ("topic", "partition", "offset")])
    starts = list(accumulate((batch.num_rows for batch in batches), initial=0))
    heads, runs = set(starts), list[tuple[int, int, int]]()
    following = -1
    for index in order.to_pylist():
        if index == following and index not in heads:
            number, first, count = runs[-1]
            runs[-1] = (number, first, count + 1)
        else:
            number = bisect_right(starts, index) - 1
            runs.append((number, index - starts[number], 1))
        following = index + 1
    return runs


def _in_order(
    batches: Sequence[pa.RecordBatch], runs: Sequence[tuple[int, int, int]], most: int
) -> Iterator[pa.RecordBatch]:
    """The same rows, sorted by their place, which they leave behind."""
    plain = [batch.drop_columns([PLACE]) for batch in batches]
    slices = (plain[number].slice(first, count) for number, first, count in runs)
    return combined((RowSlice(rows, rows.nbytes) for rows in slices), _ROWS, most)
