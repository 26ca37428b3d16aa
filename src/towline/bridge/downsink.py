"""``format("towline_downlink")``: rows to the outbox of a gateway, and dead letters to Kafka, as one sink of one query.

The rows of a part are sorted by where they stand in Kafka: a batch that is run again has to be the same rows in the
same order, because the outbox remembers how many of them it has [I10].

Spark gives a query one sink, and a dead letter has to be in Kafka before the batch that left it out is committed. So
this sink hands the rows to ``format("mqtt")`` and the letters to ``format("kafka_transactional")``, each with its own
way of not writing a batch twice: the outbox remembers the batch, Kafka the marker [I9, I10]. A crash in between repeats
the batch, and each side leaves out what it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from towline.bridge.downsql import LETTER, PLACE
from towline.errors import ConfigError
from towline.kafka.datasource import KafkaTransactional
from towline.spark.sink import stream_writer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FORMAT", "LETTERS", "MQTT", "DownlinkSink", "DownlinkWriter", "sorted_out"]

FORMAT: Final = "towline_downlink"
#: What options of either side begin with.
MQTT, LETTERS = "mqtt.", "letters."
_CHECKPOINT: Final = "checkpointlocation"
#: Rows handed on at a time.
_ROWS: Final = 10_000


@dataclass
class Both(WriterCommitMessage):
    """A task's two answers.

    Attributes:
        sent: Of the outbox.
        letters: Of Kafka; None for a line without dead letters.
    """

    sent: WriterCommitMessage
    letters: WriterCommitMessage | None


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

    def streamWriter(self, schema: StructType, overwrite: bool) -> DownlinkWriter:  # noqa: N802, FBT001 - Spark's signature
        """Bind both sides; what they raise, this raises."""
        rows = StructType([field for field in schema.fields if field.name not in (LETTER, PLACE)])
        kafka = None
        if LETTER in schema.names:
            letters = schema[LETTER].dataType
            assert isinstance(letters, StructType)
            kafka = KafkaTransactional(_part(self.options, LETTERS)).streamWriter(letters, overwrite)
        return DownlinkWriter(stream_writer(_part(self.options, MQTT), rows), kafka)


def _part(options: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The options of one side, and the checkpoint, which both know."""
    found = {key[len(prefix) :]: value for key, value in options.items() if key.lower().startswith(prefix)}
    return found | {key: value for key, value in options.items() if key.lower() == _CHECKPOINT}


class DownlinkWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a downlink.

    Args:
        mqtt: Takes the rows.
        kafka: Takes the dead letters; None for a line that has none.
    """

    def __init__(self, mqtt: DataSourceStreamArrowWriter, kafka: DataSourceStreamArrowWriter | None) -> None:
        self._mqtt = mqtt
        self._kafka = kafka

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Both:
        """Bring the rows of a partition to the outbox, then its letters to Kafka.

        They are in memory meanwhile; ``max_messages_per_trigger`` bounds them.
        """
        rows, letters = sorted_out(iterator)
        sent = self._mqtt.write(iter(rows))
        return Both(sent, self._kafka.write(iter(letters)) if self._kafka else None)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Let both sides account for the batch."""
        both = [one if isinstance(one, Both) else None for one in messages]
        self._mqtt.commit([one and one.sent for one in both], batchId)
        if self._kafka:
            self._kafka.commit([one and one.letters for one in both], batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Let both sides give up the batch."""
        both = [one if isinstance(one, Both) else None for one in messages]
        self._mqtt.abort([one and one.sent for one in both], batchId)
        if self._kafka:
            self._kafka.abort([one and one.letters for one in both], batchId)


def sorted_out(batches: Iterator[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """The rows for MQTT and the letters, each in the order of Kafka's topics, partitions and offsets."""
    rows: list[pa.RecordBatch] = []
    letters: list[pa.RecordBatch] = []
    for batch in _in_order(list(batches)):
        names = [name for name in batch.schema.names if name != LETTER]
        column = batch.column(LETTER) if LETTER in batch.schema.names else None
        if column is None or column.null_count == batch.num_rows:
            rows.append(batch.select(names))
            continue
        dead = pc.is_valid(column)
        letters.append(pa.RecordBatch.from_struct_array(column.filter(dead)))
        rows.append(batch.select(names).filter(pc.invert(dead)))
    return [batch for batch in rows if batch.num_rows], letters


def _in_order(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The same rows, sorted by their place, which they leave behind."""
    if not batches:
        return []
    table = pa.Table.from_batches(batches)
    places = pa.Table.from_batches([pa.RecordBatch.from_struct_array(batch.column(PLACE)) for batch in batches])
    order = pc.sort_indices(places, sort_keys=[(name, "ascending") for name in ("topic", "partition", "offset")])
    made: list[pa.RecordBatch] = table.drop_columns([PLACE]).take(order).to_batches(max_chunksize=_ROWS)
    return made
