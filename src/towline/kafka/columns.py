"""Columns of a row, as Spark's Kafka sink has them, and how an Arrow batch of them becomes arguments of ``produce``.

The hot path of the sink: whole columns are turned into Python values in C, headers are cut out of flat child columns,
and a row costs a tuple and, with headers, a list. The headers that every MQTT message has are made of flat columns,
each once for all rows that say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from towline.errors import KafkaError
from towline.kafka.options import FORMAT
from towline.kafka.packed import PACKED
from towline.kafka.properties import USER_PREFIX, Header, in_bytes, property_headers
from towline.sinks import check_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ACCEPTED", "A_HEADER", "ORIGIN", "PROPERTIES", "Columns", "Record", "Rows", "header_lists"]

#: Positional arguments of `confluent_kafka.Producer.produce`: topic, value, key, partition (-1: the partitioner
#: decides) and, with headers or timestamps, callback, on_delivery (both None), timestamp in ms (0: now), headers.
#: Positional because keywords cost 0.3 to 1 us a record (measured).
Record: TypeAlias = tuple[Any, ...]

#: Column -> its types in Spark's words (``DataType.simpleString``), the first is the one a message offers.
ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "value": ("binary", "string"),
        "key": ("binary", "string"),
        "headers": ("array<struct<key:string,value:binary>>",),
        "topic": ("string",),
        "partition": ("int",),
        "timestamp": ("timestamp",),
    }
)
#: Columns of the bridge's own: what a dead letter has to tell of the MQTT message beside its record's headers. Flat,
#: because a struct a row doubles what a row costs (measured).
#:   gateway   who received it
#:   offset    its number there; null for a record that is a dead letter already
#:   facts     how many of the record's headers are no part of the message, times two; one more if DUP was set
#:   message   all its properties as headers, for records that have none of them; else empty, or not there
ORIGIN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "towline_gateway": "string",
        "towline_offset": "bigint",
        "towline_facts": "int",
        "towline_message": "array<struct<key:string,value:binary>>",
    }
)
#: And what the headers of the MQTT message are made of, which come before those in ``headers``: an array of structs
#: costs four times as much on its way here, and the SQL that builds it is planned anew for every batch.
#:   topic   the topic; null for a record that has no such headers
#:   qos     its QoS
#:   rare    what only some messages have; null for the others
PROPERTIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "towline_topic": "string",
        "towline_qos": "tinyint",
        "towline_rare": (
            "struct<retain:boolean,content_type:string,payload_is_utf8:boolean,response_topic:string,"
            "correlation_data:binary,user_properties:array<struct<key:string,value:string>>,"
            "message_expiry_seconds:bigint,subscription_ids:array<int>>"
        ),
    }
)
_TOPIC, _QOS, _RARE = PROPERTIES
#: What headers take at most beside texts, topics and properties of users: names, digits, and microseconds since 1970.
_FIXED_BYTES: Final = 100
_RARE_BYTES: Final = 200
#: -1 is librdkafka's RD_KAFKA_PARTITION_UA: the partitioner decides.
_UNASSIGNED: Final = -1
#: What Kafka and its client need for a header beside name and value.
A_HEADER: Final = 10
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
        """Check a schema against the contract of the sink.

        Args:
            schema: As `column_types` has it.
            topic: The option ``topic``.
            include_headers: The option ``includeHeaders``.

        Raises:
            ConfigError: TL-C48 for a column that is missing, unknown or of another type.
        """
        own = {**ORIGIN, **PROPERTIES, PACKED: "binary"}
        check_columns(FORMAT, "Kafka", {n: kind for n, kind in schema.items() if own.get(n) != kind}, ACCEPTED, topic)
        unused = {PACKED} if include_headers else {PACKED, "headers"}
        if topic is not None:
            unused.add("topic")
        return cls(topic, frozenset(schema) - unused)

    def rows(self, batch: Any, *, any_topic: bool = False) -> Rows:
        """Convert one ``pyarrow.RecordBatch``.

        Args:
            batch: The rows.
            any_topic: Whether a row may be without a topic; the topic of its record is then None.

        Raises:
            KafkaError: TL-K06 for a row without topic or a header without key.
        """
        values = self._binary(batch, "value")
        keys = self._binary(batch, "key")
        topics, names = self._topics(batch, any_topic=any_topic)
        columns = [topics, _listed(values), _listed(keys), self._partitions(batch), *self._extras(batch)]
        return Rows(batch.num_rows, _size(values) + _size(keys), names, zip(*columns, strict=False))

    def originals(self, batch: Any, at: int, headers: Sequence[Header]) -> list[Header]:
        """The headers of a dead letter: the record's own, or of the MQTT message that it was made of.

        Args:
            batch: As for `rows`.
            at: Which row.
            headers: Of its record.
        """
        cells = [batch.column(name)[at].as_py() if name in self.present else None for name in ORIGIN]
        gateway, offset, facts, message = cells
        if offset is None or facts is None:
            return [*headers]
        own = [(header["key"], header["value"]) for header in message or ()]
        place = {"mqtt.gateway": gateway or "", "mqtt.offset": str(offset)}
        place |= {"mqtt.duplicate": "true"} if facts % 2 else {}
        made = own or headers[: len(headers) - facts // 2]
        return [*made, *((name, text.encode()) for name, text in place.items())]

    def _extras(self, batch: Any) -> list[Iterator[Any]]:
        if self.present.isdisjoint(("headers", "timestamp")):
            return []
        return [repeat(None), repeat(None), self._timestamps(batch), self._headers(batch)]

    def _headers(self, batch: Any) -> Iterator[Any]:
        if "headers" not in self.present:
            return repeat(None)
        column = batch.column("headers")
        if _TOPIC not in self.present or batch.column(_TOPIC).null_count == batch.num_rows:
            return header_lists(column)
        rare, plain = batch.column(_RARE), _plain_headers(batch)
        some = rare.null_count < batch.num_rows
        if not some and not batch.column(_TOPIC).null_count and not len(column.flatten()):
            return plain
        more = rare.to_pylist() if some else repeat(None)
        return map(_joined, plain, _names(batch), more, header_lists(column))

    def largest(self, batch: Any) -> int:
        """At least the bytes of keys, values and headers of any record, and some for what Kafka adds to a header."""
        size = sum(_longest(batch.column(name)) for name in ("key", "value") if name in self.present)
        if "headers" not in self.present:
            return size
        if _TOPIC in self.present:
            size += _FIXED_BYTES + _longest(batch.column(_TOPIC)) + _most_of(batch.column(_RARE))
        column = batch.column("headers")
        pairs = column.flatten()
        return size + _most(column) * (A_HEADER + _longest(pairs.field("key")) + _longest(pairs.field("value")))

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
        return _values(pc.if_else(pc.equal(millis, _NOW), 1, millis).fill_null(_NOW))


def _names(batch: Any) -> Iterator[tuple[bytes | None, int, int]]:
    """Topic, QoS, and the microseconds since 1970 of each message."""
    moments = _values(batch.column("timestamp").cast(pa.int64()))
    # What is the same in all rows is repeated.
    return zip(batch.column(_TOPIC).cast(pa.binary()).to_pylist(), _values(batch.column(_QOS)), moments, strict=False)


def _plain_headers(batch: Any) -> Iterator[list[Header]]:
    """The headers that every message has; what several messages say is one tuple for all of them."""
    topics = _each_header(batch.column(_TOPIC).cast(pa.binary()), "mqtt.topic")
    levels = _each_header(batch.column(_QOS), "mqtt.qos")
    moments = _each_header(batch.column("timestamp").cast(pa.int64()), "mqtt.received-at")
    return map(list, zip(topics, levels, moments, strict=True))


def _each_header(column: Any, name: str) -> Iterator[Header]:
    coded = column.dictionary_encode(null_encoding="encode")
    made = [(name, in_bytes(value)) for value in coded.dictionary.to_pylist()]
    return repeat(made[0], len(column)) if len(made) == 1 else map(made.__getitem__, coded.indices.to_pylist())


def _joined(
    plain: list[Header], name: tuple[bytes | None, int, int], more: Mapping[str, Any] | None, own: list[Header]
) -> list[Header]:
    topic, qos, received = name
    if topic is None:
        return own
    made = plain if more is None else property_headers(topic, qos, received, more)
    return [*made, *own] if own else made


def _most_of(rare: Any) -> int:
    """At least the bytes of the headers that any message's rare properties become."""
    if rare.null_count == len(rare):
        return 0
    parts = dict(zip(rare.type.names, rare.flatten(), strict=True))
    texts = sum(_longest(parts[name]) for name in ("content_type", "response_topic", "correlation_data"))
    users, numbers = parts["user_properties"], parts["subscription_ids"]
    pairs = users.flatten()
    one = A_HEADER + len(USER_PREFIX) + _longest(pairs.field("key")) + _longest(pairs.field("value"))
    return _RARE_BYTES + texts + _most(users) * one + _most(numbers) * (A_HEADER + _RARE_BYTES)


def _most(lists: Any) -> int:
    return pc.max(lists.value_lengths()).as_py() or 0


def _values(column: Any) -> Iterator[Any]:
    """The values of a column of numbers; messages that came together have the same."""
    ends = pc.min_max(column).as_py()
    same = ends["min"] == ends["max"] and not column.null_count
    return repeat(ends["min"]) if same else iter(column.to_pylist())


def _longest(column: Any) -> int:
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
