"""Columns of a row, as Spark's Kafka sink has them, and how an Arrow batch of them becomes arguments of ``produce``.

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
from towline.kafka.deadletters import A_HEADER
from towline.kafka.options import FORMAT
from towline.sinks import check_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from towline.kafka.deadletters import Header
    from towline.kafka.screening import Fault

#: Positional arguments of `confluent_kafka.Producer.produce`: topic, value, key, partition (-1: the partitioner
#: decides), callback, on_delivery (both None), timestamp in ms (0: now), headers. Keywords cost 0.3 to 1 us a record
#: (measured).
Record: TypeAlias = tuple[Any, ...]

#: Column -> its types in Spark's words (``DataType.simpleString``), the first is the one a message offers.
ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}
#: -1 is librdkafka's RD_KAFKA_PARTITION_UA: the partitioner decides.
_UNASSIGNED: Final = -1
#: For librdkafka timestamp 0 is the time of the call.
_NOW: Final = 0


class Rows(NamedTuple):
    """One Arrow batch, ready to be produced.

    Attributes:
        size: Rows.
        bytes: Bytes of keys and values.
        topics: Distinct topics among the rows.
        records: One for each row, to be read once.
    """

    size: int
    bytes: int
    topics: frozenset[str]
    records: Iterator[Record]


@dataclass(frozen=True)
class Columns:
    """Which columns are written; made on the driver, used in the tasks.

    Attributes:
        topic: Topic of every record; None when the column says it. The option wins, as in Spark's Kafka sink.
        present: Columns that are written.
    """

    topic: str | None
    present: frozenset[str]

    @classmethod
    def bind(cls, schema: Mapping[str, str], topic: str | None, *, include_headers: bool) -> Columns:
        """Check a schema, as `column_types` has it, against the contract of the sink and its options.

        Raises:
            ConfigError: TL-C48 for a column that is missing, unknown or of another type.
        """
        check_columns(FORMAT, "Kafka", schema, ACCEPTED, topic)
        unused = {name for name, without in (("headers", not include_headers), ("topic", topic is not None)) if without}
        return cls(topic, frozenset(schema) - unused)

    def refusals(self, batch: Any) -> list[Fault] | None:  # noqa: ARG002 - of columns that have them
        """Why each row of a batch can't be a record, where whoever made the batch knows; None for rows that can."""
        return None

    def rows(self, batch: Any, *, any_topic: bool = False) -> Rows:
        """Convert one ``pyarrow.RecordBatch``; with `any_topic` a row may be without a topic, which is then None.

        Raises:
            KafkaError: TL-K06 for a row without topic or a header without key.
        """
        values = self._binary(batch, "value")
        keys = self._binary(batch, "key")
        topics, names = self._topics(batch, any_topic=any_topic)
        places = topics, _listed(values), _listed(keys), self._partitions(batch)
        records = zip(*places, repeat(None), repeat(None), self._timestamps(batch), self._headers(batch), strict=False)
        return Rows(batch.num_rows, _size(values) + _size(keys), names, records)

    def originals(self, batch: Any, at: int, headers: Sequence[Header]) -> list[Header]:  # noqa: ARG002 - see refusals
        """The headers of the dead letter of the row that is `at` a place in a batch: those of its record."""
        return [*headers]

    def _headers(self, batch: Any) -> Iterator[Any]:
        return header_lists(batch.column("headers")) if "headers" in self.present else repeat(None)

    def largest(self, batch: Any) -> int:
        """At least the bytes of keys, values and headers of any record, and some for what Kafka adds to a header."""
        size = sum(longest(batch.column(name)) for name in ("key", "value") if name in self.present)
        if "headers" not in self.present:
            return size
        column = batch.column("headers")
        pairs = column.flatten()
        return size + most(column) * (A_HEADER + longest(pairs.field("key")) + longest(pairs.field("value")))

    def extremes(self, batch: Any) -> Iterator[tuple[int, int]]:
        """Partition and time, as records have them, of two rows: no row asks for less than one, nor for more."""
        ends = {name: pc.min_max(batch.column(name)) for name in ("partition", "timestamp") if name in self.present}
        rows = pa.record_batch({name: pa.array([*end.values()], batch.column(name).type) for name, end in ends.items()})
        return islice(zip(self._partitions(rows), self._timestamps(rows), strict=False), 2)

    def _binary(self, batch: Any, name: str) -> Any:
        # A string is its UTF-8 bytes; the cast copies nothing.
        return batch.column(name).cast(pa.binary()) if name in self.present else None

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
        if "partition" not in self.present:
            return repeat(_UNASSIGNED)
        return iter(batch.column("partition").fill_null(_UNASSIGNED).to_pylist())

    def _timestamps(self, batch: Any) -> Iterator[int]:
        if "timestamp" not in self.present:
            return repeat(_NOW)
        # Kafka counts milliseconds, Spark microseconds; what is finer is cut off.
        millis = pc.divide(batch.column("timestamp").cast(pa.int64()), 1000)
        # librdkafka has no way to say 1970-01-01 00:00:00; a millisecond later is the nearest moment that it has.
        return distinct_values(pc.if_else(pc.equal(millis, _NOW), 1, millis).fill_null(_NOW))


def most(lists: Any) -> int:
    """The length of the longest list of a column."""
    return pc.max(lists.value_lengths()).as_py() or 0


def distinct_values(column: Any) -> Iterator[Any]:
    """The values of a column of numbers; messages that came together have the same."""
    ends = pc.min_max(column).as_py()
    same = ends["min"] == ends["max"] and not column.null_count
    return repeat(ends["min"]) if same else iter(column.to_pylist())


def longest(column: Any) -> int:
    """Bytes of the longest value of a column."""
    return pc.max(pc.binary_length(column.cast(pa.binary()))).as_py() or 0


def _listed(column: Any) -> Iterator[bytes | None]:
    return repeat(None) if column is None else iter(column.to_pylist())


def _size(column: Any) -> int:
    return 0 if column is None else pc.sum(pc.binary_length(column)).as_py() or 0


def header_lists(column: Any) -> Iterator[list[Header]]:
    """Header lists of an array<struct<key, value>> column, order and repetition kept; empty for a null row.

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
