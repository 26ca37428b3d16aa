"""Columns of the sink, as of Spark's Kafka sink, and conversion of an Arrow batch to arguments of ``produce``.

The hot path of the sink: whole columns are turned into Python values in C, headers are cut out of flat child columns,
and a row costs a tuple and, with headers, a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from towline.errors import KafkaError
from towline.kafka.deadletters import HEADER_OVERHEAD
from towline.kafka.options import FORMAT
from towline.sinks import check_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from towline.kafka.deadletters import Header
    from towline.kafka.recordcheck import RecordFault

#: Positional arguments of `confluent_kafka.Producer.produce`: topic, value, key, partition (-1: the partitioner
#: decides), callback, on_delivery (both None), timestamp in ms (0: now), headers. Keywords cost 0.3 to 1 us a record
#: (measured).
Record: TypeAlias = tuple[Any, ...]

#: Column -> its types as Spark names them (``DataType.simpleString``); error texts suggest the first.
COLUMN_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}
_NO_PARTITION: Final = -1  #: librdkafka's RD_KAFKA_PARTITION_UA: the partitioner decides.
_TIME_OF_CALL: Final = 0  #: For librdkafka a timestamp of 0 is the time of the call.


class Rows(NamedTuple):
    """Rows of one Arrow batch, as arguments of ``produce``.

    Attributes:
        size: Number of rows.
        bytes: Bytes of keys and values.
        topics: Distinct topics of the rows.
        records: One record per row; can be iterated once.
    """

    size: int
    bytes: int
    topics: frozenset[str]
    records: Iterator[Record]


@dataclass(frozen=True)
class Columns:
    """Columns that the sink writes; created on the driver, used in the tasks.

    Attributes:
        topic: Topic of every record; None for the topic of each row. The option wins, as in Spark's Kafka sink.
        written_columns: Names of the columns that are written.
    """

    topic: str | None
    written_columns: frozenset[str]

    @classmethod
    def bind(cls, schema: Mapping[str, str], topic: str | None, *, include_headers: bool) -> Columns:
        """Check a schema, as `column_types` returns it, and select the columns to write.

        Raises:
            ConfigError: TL-C48 for a column that is missing, unknown or of another type.
        """
        check_columns(FORMAT, "Kafka", schema, COLUMN_TYPES, topic)
        unused = [*["headers"] * (not include_headers), *["topic"] * (topic is not None)]
        return cls(topic, frozenset(schema).difference(unused))

    def row_faults(self, batch: Any) -> list[RecordFault] | None:  # noqa: ARG002 - used by subclasses
        """Return the fault of each row if the batch has refused rows only; None for a batch of valid rows."""
        return None

    def rows(self, batch: Any, *, any_topic: bool = False) -> Rows:
        """Convert one ``pyarrow.RecordBatch``; with `any_topic` a row may have no topic, which is then None.

        Raises:
            KafkaError: TL-K06 for a row without topic or a header without key.
        """
        values = self._binary(batch, "value")
        keys = self._binary(batch, "key")
        topics, names = self._topics(batch, any_topic=any_topic)
        leading = topics, _python_values(values), _python_values(keys), self._partitions(batch)
        records = zip(*leading, repeat(None), repeat(None), self._timestamps(batch), self._headers(batch), strict=False)
        return Rows(batch.num_rows, _total_bytes(values) + _total_bytes(keys), names, records)

    def original(self, batch: Any, row_index: int, record: Record) -> tuple[bytes | None, list[Header]]:  # noqa: ARG002 - see row_faults
        """Return value and headers to keep in the dead letter of the row at `row_index`: those of its record."""
        return record[1], [*(record[7] or ())]

    def _headers(self, batch: Any) -> Iterator[Any]:
        return header_lists(batch.column("headers")) if "headers" in self.written_columns else repeat(None)

    def max_record_bytes(self, batch: Any) -> int:
        """Return an upper bound of the bytes of any record: key, value, headers and Kafka's overhead per header."""
        size = sum(longest_bytes(batch.column(name)) for name in ("key", "value") if name in self.written_columns)
        if "headers" not in self.written_columns:
            return size
        column = batch.column("headers")
        headers = column.flatten()
        header_bytes = HEADER_OVERHEAD + longest_bytes(headers.field("key")) + longest_bytes(headers.field("value"))
        return size + longest_list(column) * header_bytes

    def extreme_values(self, batch: Any) -> Iterator[tuple[int, int]]:
        """Return two pairs of partition and timestamp: the lowest and the highest values of the batch."""
        names = self.written_columns & {"partition", "timestamp"}
        ranges = {name: pc.min_max(batch.column(name)) for name in names}
        rows = pa.record_batch({n: pa.array([*ends.values()], batch.column(n).type) for n, ends in ranges.items()})
        return islice(zip(self._partitions(rows), self._timestamps(rows), strict=False), 2)

    def _binary(self, batch: Any, name: str) -> Any:
        # A string is its UTF-8 bytes; the cast copies nothing.
        return batch.column(name).cast(pa.binary()) if name in self.written_columns else None

    def _topics(self, batch: Any, *, any_topic: bool) -> tuple[Iterator[str], frozenset[str]]:
        if self.topic is not None:
            return repeat(self.topic), frozenset({self.topic})
        column = batch.column("topic")
        if column.null_count and not any_topic:
            row = column.is_null().index(True).as_py()
            raise KafkaError(
                "TL-K06",
                FORMAT,
                f"a row has no topic (row {row:,} of its Arrow batch)",
                "Give every row a topic, or set the option topic.",
            )
        names = column.unique()
        topics = repeat(names[0].as_py()) if len(names) == 1 else iter(column.to_pylist())
        return topics, frozenset(names.drop_null().to_pylist())

    def _partitions(self, batch: Any) -> Iterator[int]:
        if "partition" not in self.written_columns:
            return repeat(_NO_PARTITION)
        return iter(batch.column("partition").fill_null(_NO_PARTITION).to_pylist())

    def _timestamps(self, batch: Any) -> Iterator[int]:
        if "timestamp" not in self.written_columns:
            return repeat(_TIME_OF_CALL)
        # Kafka has milliseconds, Spark microseconds; the rest is cut off.
        millis = pc.divide(batch.column("timestamp").cast(pa.int64()), 1000)
        # For librdkafka 0 is the time of the call, so 1970-01-01 00:00:00 becomes a millisecond later.
        return values_of(pc.if_else(pc.equal(millis, _TIME_OF_CALL), 1, millis).fill_null(_TIME_OF_CALL))


def longest_list(column: Any) -> int:
    """Return the length of the longest list in a column."""
    return pc.max(column.value_lengths()).as_py() or 0


def values_of(column: Any) -> Iterator[Any]:
    """Return the values of a numeric column; one repeated object where all are equal, as after one MQTT read."""
    bounds = pc.min_max(column).as_py()
    is_constant = bounds["min"] == bounds["max"] and not column.null_count
    return repeat(bounds["min"]) if is_constant else iter(column.to_pylist())


def longest_bytes(column: Any) -> int:
    """Return the bytes of the longest value of a column."""
    return pc.max(pc.binary_length(column.cast(pa.binary()))).as_py() or 0


def _python_values(column: Any) -> Iterator[bytes | None]:
    return repeat(None) if column is None else iter(column.to_pylist())


def _total_bytes(column: Any) -> int:
    return 0 if column is None else pc.sum(pc.binary_length(column)).as_py() or 0


def header_lists(column: Any) -> Iterator[list[Header]]:
    """Return the header lists of an array<struct<key, value>> column, in order, with duplicates; empty for a null row.

    Raises:
        KafkaError: TL-K06 for a null header or one without key, which Kafka can't hold.
    """
    structs = column.flatten()
    keys = structs.field("key")
    if structs.null_count or keys.null_count:
        raise KafkaError("TL-K06", FORMAT, "a header has no key", "Give every header a key; its value may be null.")
    pairs = zip(keys.to_pylist(), structs.field("value").to_pylist(), strict=True)
    lengths = column.value_lengths().fill_null(0).to_pylist()
    return map(list, map(islice, repeat(pairs), lengths))
