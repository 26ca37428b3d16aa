"""Dead-letter topics of a bridge: the dead letters that wait in them, and their replay, each at most once.

A dead-letter topic is its own ledger: one transaction writes the remapped records to their topics and, into the
dead-letter topic, a replay mark with the offsets of their dead letters; a later replay skips those. So the position
needs no file, and can't be lost before the dead letters themselves are: both have one retention.

The marks are read up to the end of each partition, not to its last stable offset: one may lie above a transaction that
another writer of the topic has open, where no reader sees it yet. Each transaction has a producer of its own, whose
`init_transactions` comes before the marks are read [I9]: a replay that died is committed or aborted by then, one that
still runs is fenced, and a commit request that arrives late is refused (KIP-890; `towline.kafka.producers`).

Spark is started only for lines whose routes have SQL.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from towline.bridge.config.model import Uplink
from towline.bridge.lines.identity import Identity, former_dead_letter_topics
from towline.bridge.lines.sql import RouteSql
from towline.bridge.properties import TRACE_CONTEXT, user_property
from towline.bridge.routes import FAULT, OUTCOME, RecordColumns, RouteTable, RowOutcome, to_row_schema
from towline.errors import ConfigError, KafkaError
from towline.kafka import faults
from towline.kafka.admin import KafkaAdmin, recreated_topics, watermarks
from towline.kafka.clientconfig import connect, max_message_bytes
from towline.kafka.columns import Record, Rows
from towline.kafka.deadletters import PREFIX, ChunkAssembler, DeadLetter, Header, Reason, reserved_topics_pattern
from towline.kafka.markerstore import READER_CONFIG
from towline.kafka.options import SinkSettings
from towline.kafka.producers import TransactionalProducer
from towline.kafka.recordcheck import RecordLimits, record_fault
from towline.schema import ROW_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from towline.bridge.config.model import AnyLine, Bridge

REPLAY_MARK: Final = PREFIX + "replayed"  #: Header of a replay mark; its value is JSON.
_ANSWER_TIMEOUT_S: Final = 30.0  #: Seconds without a record before reading fails.
#: Seconds to wait for transactions of other writers: their usual time-out, and the broker's next check of it.
_OPEN_TRANSACTION_S: Final = 75.0
#: First and last offset.
OffsetRange: TypeAlias = tuple[int, int]

#: Not `message.headers()`: a specialised method call of the interpreter does not check for a set exception.
_HEADERS: Final[Callable[[Any], Any]] = methodcaller("headers")


class TopicRecord(NamedTuple):
    """Fields of a record; its timestamp is in ms since 1970."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]
    topic: str = ""

    @classmethod
    def of(cls, message: Any) -> TopicRecord:
        """Read the fields of a client's message; drops headers whose name is not UTF-8, which Towline never writes.

        confluent-kafka returns such headers together with an exception, and reading them ends the process. So they are
        read once, by the only call after which Python sees the exception.
        """
        try:
            headers = _HEADERS(message) or ()
        except SystemError:
            headers = ()
        position = message.partition(), message.offset(), message.timestamp()[1]
        return cls(*position, message.key(), message.value(), headers, message.topic())


@dataclass
class TopicReader:
    """Reader of committed records of a topic by their offsets; it joins no consumer group and commits nothing.

    Attributes:
        client: Kafka's client configuration, unresolved.
        is_missing: Whether the topic did not exist when its end offsets were read.
    """

    client: Mapping[str, str]
    topic: str
    is_missing: bool = field(default=False, init=False)

    def end_offsets(self, isolation: str = "read_committed") -> dict[int, int]:
        """Return the end offset of each partition, from its leader."""
        consumer = self._new_consumer(isolation)
        try:
            metadata = consumer.list_topics(timeout=_ANSWER_TIMEOUT_S).topics.get(self.topic)
            numbers = sorted(metadata.partitions if metadata else ())
            partitions = [TopicPartition(self.topic, number) for number in numbers]
            ends = {tp.partition: watermarks(consumer, tp, _ANSWER_TIMEOUT_S)[1] for tp in partitions}
        except faults.CLIENT_ERRORS as error:
            raise self._no_answer_error(faults.error_text(error)) from None
        finally:
            consumer.close()
        self.is_missing = metadata is None
        return ends

    def read_records(
        self,
        ends: Mapping[int, int],
        start_offsets: Mapping[int, int] | None = None,
        open_transaction: KafkaError | None = None,
    ) -> Iterator[TopicRecord]:
        """Yield every committed record below the end offsets, and no later one: the topic may grow all the time.

        Raises `open_transaction`, or TL-K01, when there is no progress.
        """
        if not ends:
            return
        remaining, starts, consumer = dict(ends), start_offsets or {}, self._new_consumer()
        timeout_s = _ANSWER_TIMEOUT_S if open_transaction is None else _OPEN_TRANSACTION_S
        try:
            consumer.assign([TopicPartition(self.topic, n, starts.get(n, OFFSET_BEGINNING)) for n in ends])
            deadline = time.monotonic() + timeout_s
            while remaining:
                record = consumer.poll(1.0)
                if record is None or (end := remaining.get(record.partition())) is None:
                    if time.monotonic() > deadline:
                        raise open_transaction or self._no_answer_error("the topic can't be read to its end")
                    continue
                if record.error() is None and record.offset() < end:
                    yield TopicRecord.of(record)
                deadline = time.monotonic() + timeout_s  # after the yield: the caller may have been slow
                last_offset = end - 1 if record.error() is None else end
                at_end = record.error() is None or record.error().name() == "_PARTITION_EOF"
                if at_end and record.offset() >= last_offset:
                    del remaining[record.partition()]
        finally:
            consumer.close()

    def _no_answer_error(self, reason: str) -> KafkaError:
        return faults.unreachable_error(self._servers, _ANSWER_TIMEOUT_S, reason)

    @property
    def _servers(self) -> str:
        return self.client["bootstrap.servers"]

    def _new_consumer(self, isolation: str = "read_committed") -> Any:
        """Create a consumer that reads from the leader: an unread mark would have its dead letters replayed again."""
        config: dict[str, Any] = {
            **READER_CONFIG,
            "fetch.wait.max.ms": 500,  # it may wait a minute for another writer's transaction
            "group.id": f"towline.dlq.{self.topic}",  # required by the client; nothing is committed to it
            "isolation.level": isolation,  # ListOffsets has it too: the end is the last stable offset, or the very end
        }
        return connect(Consumer, self.client, config)


class StoredLetter(NamedTuple):
    """Dead letter with the offset of its last record, which identifies it; `timestamp` in ms since 1970."""

    partition: int
    offset: int
    timestamp: int
    dead_letter: DeadLetter


@dataclass
class DeadLetterTopic(TopicReader):
    """Dead-letter topic of a bridge, with its letters and replay marks.

    Attributes:
        lines: The lines that write to it, by the source that their dead letters name.
        is_former: Whether no line of the file writes to it any more.
        unknown_sources: Number of waiting letters by source, of sources that are no line of this bridge; read so far.
        unreadable_records: Number of records that are no letter and no mark, or chunks without the others; read so far.
    """

    lines: Mapping[str, AnyLine]
    is_former: bool = False
    unknown_sources: Counter[str] = field(default_factory=Counter, init=False)
    unreadable_records: int = field(default=0, init=False)
    _ids: dict[str, str] = field(default_factory=dict, init=False)
    #: Partition -> offsets of replayed dead letters; a foreign writer may name any number.
    _replayed_ranges: dict[int, list[OffsetRange]] = field(default_factory=dict, init=False)
    #: Partition -> end offset up to which its marks were read.
    _mark_ends: dict[int, int] = field(default_factory=dict, init=False)

    def waiting_letters(
        self, line: str | None = None, reason: Reason | None = None, names: Collection[str] | None = None
    ) -> Iterator[StoredLetter]:
        """Yield the dead letters that wait, in offset order of each partition; skips replayed letters.

        Without a line they are those of all lines, without a reason those of all reasons, without names, each
        ``TOPIC/PARTITION/OFFSET``, all. Reads up to the end offsets at the time of the call: a running line may write a
        replayed letter again. A topic that does not exist, as before the first start, has none. Raises TL-K01.
        """
        self._replayed_ranges, self._mark_ends, self.unknown_sources, self.unreadable_records = {}, {}, Counter(), 0
        self._ids = KafkaAdmin(self.client).topic_ids([self.topic])
        self._read_marks(self.end_offsets())
        waiting = (letter for letter in self._read_letters() if not self._is_replayed(letter))
        chosen = (one for one in waiting if names is None or f"{self.topic}/{one.partition}/{one.offset}" in names)
        return (letter for letter in chosen if self._matches(letter, line, reason))

    def still_waiting(self, letters: Iterable[StoredLetter]) -> list[StoredLetter]:
        """Return the letters that are still not replayed; call it when a new producer has fenced all others.

        Raises:
            KafkaError: TL-K01; TL-B30 when the topic was recreated, and a mark would name other dead letters;
                TL-B31 when another writer's transaction stays open in the topic.
        """
        if recreated_topics(self._ids, KafkaAdmin(self.client).topic_ids([self.topic])):
            problem = f'the topic "{self.topic}" was deleted and recreated during the replay'
            raise KafkaError("TL-B30", self._servers, problem, "Run it again: it reads the new topic.")
        problem = f'a transaction of another writer is open in "{self.topic}", and may hide marks of earlier replays'
        remedy = "Run it again when that transaction has ended; Kafka aborts it after its time-out."
        open_transaction = KafkaError("TL-B31", self._servers, problem, remedy)
        self._read_marks(self.end_offsets("read_uncommitted"), open_transaction)
        return [letter for letter in letters if not self._is_replayed(letter)]

    def _read_marks(self, ends: dict[int, int], open_transaction: KafkaError | None = None) -> None:
        remaining = {partition: end for partition, end in ends.items() if self._mark_ends.get(partition, -1) < end}
        for record in self.read_records(remaining, self._mark_ends, open_transaction):
            self._replayed_ranges.setdefault(record.partition, []).extend(_replayed_by_mark(record))
        self._replayed_ranges = {part: merge_ranges(ranges) for part, ranges in self._replayed_ranges.items()}
        self._mark_ends = ends

    def _is_replayed(self, letter: StoredLetter) -> bool:
        ranges = self._replayed_ranges.get(letter.partition, [])
        index = bisect(ranges, letter.offset, key=itemgetter(0))
        return index > 0 and letter.offset <= ranges[index - 1][1]

    def line_of(self, dead_letter: DeadLetter) -> AnyLine | None:
        """Return the line that wrote a dead letter; None for one of another bridge."""
        return self.lines.get(dead_letter.source)

    def _matches(self, letter: StoredLetter, line: str | None, reason: Reason | None) -> bool:
        owner = self.line_of(letter.dead_letter)
        if owner is None:
            self.unknown_sources[letter.dead_letter.source] += 1
            return False
        return line in (None, owner.name) and reason in (None, letter.dead_letter.reason)

    def _read_letters(self) -> Iterator[StoredLetter]:
        collectors: dict[int, ChunkAssembler] = {}
        for record in self.read_records(self.end_offsets()):
            if _mark_value(record) is not None:
                continue
            collector = collectors.setdefault(record.partition, ChunkAssembler())
            try:
                dead_letter = collector.add(record.key, record.value, record.headers)
            except ValueError:
                self.unreadable_records += 1  # a foreign record, or a chunk without the others of its letter
                continue
            if dead_letter is not None:
                yield StoredLetter(record.partition, record.offset, record.timestamp, dead_letter)
        for collector in collectors.values():
            self.unreadable_records += sum(map(len, collector.incomplete.values()))


def _mark_value(record: TopicRecord) -> bytes | None:
    """Return the value of a replay mark, None for other records: a mark has nothing but its header.

    A dead letter has Towline's headers before its original ones, so a device's property of that name is no mark [I13].
    """
    match list(record.headers):
        case [(name, value)] if name == REPLAY_MARK and not record.key and not record.value:
            return value or b""
    return None


def _replayed_by_mark(record: TopicRecord) -> list[OffsetRange]:
    """Return the offset ranges that a replay mark names, all below it; empty if the record is no mark."""
    value = _mark_value(record)
    try:
        named_ranges = [] if value is None else json.loads(value)["offsets"]
        ranges = [(max(0, low), min(high, record.offset - 1)) for low, high in named_ranges]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [
        (first_offset, last_offset)
        for first_offset, last_offset in ranges
        if type(first_offset) is type(last_offset) is int and first_offset <= last_offset
    ]


def merge_ranges(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Sort ranges, and merge ranges that overlap or touch."""
    merged_ranges: list[OffsetRange] = []
    for first_offset, last_offset in sorted(ranges):
        if merged_ranges and first_offset <= merged_ranges[-1][1] + 1:
            merged_ranges[-1] = merged_ranges[-1][0], max(last_offset, merged_ranges[-1][1])
        else:
            merged_ranges.append((first_offset, last_offset))
    return merged_ranges


def dead_letter_topics(bridge: Bridge) -> list[DeadLetterTopic]:
    """Return the dead-letter topics of a bridge, also the topics of former files [I18].

    A line may have written to each of them before the file was changed: the sources of every line are looked for in
    each.

    Raises:
        ConfigError: TL-C75 when no line has one.
    """
    sources: dict[str, AnyLine] = {}
    former_sources: dict[str, AnyLine] = {}
    for line in bridge.lines:
        identity = Identity.of_line(bridge, line)
        sources |= dict.fromkeys((line.name, identity.sink), line)
        former_sources |= dict.fromkeys(_former_sources(identity, bridge.name), line)
    lines = former_sources | sources  # the current owner of a name wins
    topics = dict.fromkeys(line.dead_letter_topic for line in bridge.lines if line.dead_letter_topic)
    old_topics = former_dead_letter_topics(bridge)
    if not topics and not old_topics:
        remedy = 'Give the line dead_letter_topic = "NAME", or let topics be created with create_topics in [kafka].'
        raise ConfigError("TL-C75", str(bridge.file), "no line has a dead-letter topic", remedy)
    client = bridge.kafka.client_settings()
    return [DeadLetterTopic(client, topic, lines, topic in old_topics) for topic in (*topics, *old_topics)]


def _former_sources(identity: Identity, bridge_name: str) -> Iterator[str]:
    """Yield the sources that a line's dead letters named before its last reset, or under a former name."""
    first_source = identity.first_sink
    yield first_source
    yield first_source.removeprefix(f"{bridge_name}.")
    yield from (f"{first_source}.{generation}" for generation in range(2, identity.generation))


# -- remapping ------------------------------------------------------------------------------------------------

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: Numeric columns: header and largest value; a gateway writes no larger one.
_NUMBER_HEADERS: Final = {
    "qos": ("mqtt.qos", 2),
    "message_expiry_seconds": ("mqtt.message-expiry", 0xFFFFFFFF),
    "offset": ("mqtt.offset", (1 << 63) - 1),
}
_MAX_SUBSCRIPTION, _MAX_TIMESTAMP_US = 268_435_455, 1 << 57
_DECIMAL: Final = re.compile(rb"[0-9]{1,19}")
#: Reasons of letters without the whole message: no route can rebuild it.
_INCOMPLETE_REASONS: Final = {
    Reason.PACKET_TOO_LARGE: "too large for the gateway's max_packet_bytes; its publisher has to send it again",
    Reason.TOO_MANY_PROPERTIES: "more than 1,000 properties; its value is the MQTT packet, for a program of yours",
}


#: Result of remapping one dead letter: a record, or the reason it stays; None if a ``where`` filters it now.
RemapResult: TypeAlias = "Record | str | None"


def source_row(dead_letter: DeadLetter) -> dict[str, Any] | None:
    """Rebuild the source row of a dead letter; None if it is not from MQTT, or has lost its properties."""
    headers = [pair for pair in dead_letter.headers if pair[0].startswith("mqtt.") or pair[0] in TRACE_CONTEXT]
    first_values: Mapping[str, bytes | None] = dict(reversed(headers))
    if first_values.get("mqtt.topic") is None:
        return None
    keys = [(user_property(name), value) for name, value in headers]
    user_properties = [{"key": key, "value": _text(value)} for key, value in keys if key is not None]
    subscription_ids = [_number(value, _MAX_SUBSCRIPTION) for name, value in headers if name == "mqtt.subscription-id"]
    text_columns = ("topic", "content_type", "response_topic", "gateway")
    payload_format = first_values.get("mqtt.payload-format")
    return {
        **{name: _text(first_values.get(f"mqtt.{name.replace('_', '-')}")) for name in text_columns},
        **{name: _number(first_values.get(header), max_value) for name, (header, max_value) in _NUMBER_HEADERS.items()},
        "payload": dead_letter.value,
        "retain": first_values.get("mqtt.retain") == b"true",
        "duplicate": first_values.get("mqtt.duplicate") == b"true",
        "payload_is_utf8": None if payload_format is None else payload_format == b"1",
        "correlation_data": first_values.get("mqtt.correlation-data"),
        "user_properties": user_properties or None,
        "subscription_ids": [number for number in subscription_ids if number is not None] or None,
        "received_at": _EPOCH
        + timedelta(microseconds=_number(first_values.get("mqtt.received-at"), _MAX_TIMESTAMP_US) or 0),
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _number(value: bytes | None, max_value: int) -> int | None:
    number = int(value) if value is not None and _DECIMAL.fullmatch(value) else None
    return number if number is None or number <= max_value else None


class LetterMapper:
    """Mapper of one line's dead letters; a downlink's letters go back to Kafka, where the line reads them again.

    The Spark session for the SQL of its routes is created at most once, and only where there is SQL.
    """

    def __init__(self, line: AnyLine, spark: Callable[[], SparkSession]) -> None:
        routes = line.routes if isinstance(line, Uplink) else ()
        self._statements, self._table, self._spark = RouteSql(routes), RouteTable(routes), spark

    def remap(self, dead_letters: Sequence[DeadLetter]) -> list[RemapResult]:
        """Remap dead letters; return one result for each, in order."""
        rows = {
            index: row
            for index, dead_letter in enumerate(dead_letters)
            if self._table.routes
            and dead_letter.reason not in _INCOMPLETE_REASONS
            and (row := source_row(dead_letter)) is not None
        }
        results = dict(zip(rows, self._map_rows([*rows.values()]), strict=True))
        numbered = enumerate(dead_letters)
        return [results[index] if index in results else _unchanged_record(letter) for index, letter in numbered]

    def _map_rows(self, rows: list[dict[str, Any]]) -> Iterator[RemapResult]:
        if not rows:
            return
        batch = pa.RecordBatch.from_pylist(rows, schema=ROW_SCHEMA)
        if self._statements.needs_spark:
            batch = self._evaluate_sql(self._table.add_routes(batch, self._statements.value_columns))
        rendered = self._table.render(batch)
        records = RecordColumns().rows(rendered, any_topic=True).records
        codes, texts = (rendered.column(name).to_pylist() for name in (OUTCOME, FAULT))
        for code, fault, record in zip(codes, texts, records, strict=True):
            outcome = RowOutcome(code)
            if outcome.reason:
                yield f"it is refused: {fault}" if outcome is RowOutcome.REJECTED else fault
            else:
                yield None if outcome < RowOutcome.RENDERED else record

    def _evaluate_sql(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Add the columns that Spark evaluates from the SQL of the routes."""
        data_frame = self._spark().createDataFrame(pa.Table.from_batches([rows]))
        (batch,) = self._statements.writer_frame(data_frame).toArrow().combine_chunks().to_batches()
        return to_row_schema(batch)


def _unchanged_record(dead_letter: DeadLetter) -> RemapResult:
    """Return the original record of a dead letter that was mapped and could not be written; Kafka may take it now."""
    if (reason := _INCOMPLETE_REASONS.get(dead_letter.reason)) or dead_letter.topic is None:
        return reason or "it names no topic"
    partition = -1 if dead_letter.partition is None or dead_letter.reason is Reason.PARTITION else dead_letter.partition
    timestamp = 0 if dead_letter.timestamp is None or dead_letter.reason is Reason.TIMESTAMP else dead_letter.timestamp
    headers = list(dead_letter.headers) or None
    return dead_letter.topic, dead_letter.value, dead_letter.key, partition, None, None, timestamp, headers


# -- replay, at most once ---------------------------------------------------------------------------------------------

LETTERS_PER_TRANSACTION: Final = 500  #: Dead letters of one transaction.
#: Bytes at which a transaction ends earlier: its letters and records are in memory.
_BYTES_PER_TRANSACTION: Final = 16 * 1024 * 1024
_TRANSACTION_TIMEOUT_S: Final = 60  #: Time-out of a transaction in seconds; then the broker aborts it.


def replay(
    letter_topic: DeadLetterTopic,
    spark: Callable[[], SparkSession],
    *,
    line: str | None = None,
    reason: Reason | None = None,
    names: Collection[str] | None = None,
    limit: int | None = None,
    dry_run: bool = False,
) -> Iterator[RemapResult]:
    """Replay the dead letters of a topic, each at most once, also over crashes; yield their results after each commit.

    `spark` creates a session for routes with SQL. At most `limit` results are yielded; a `dry_run` writes nothing.

    Raises:
        KafkaError: TL-K01; TL-B30 when a transaction failed, TL-B31 when another writer's stays open: letters without a
            commit wait as before.
    """
    mappers = {owner.name: LetterMapper(owner, spark) for owner in letter_topic.lines.values()}
    letters, remaining = letter_topic.waiting_letters(line, reason, names), sys.maxsize if limit is None else limit
    while batch := _next_letters(letters, min(remaining, LETTERS_PER_TRANSACTION)):
        with contextlib.nullcontext() if dry_run else contextlib.closing(_ReplayWriter(letter_topic)) as writer:
            batch = letter_topic.still_waiting(batch) if writer else batch
            results = _remap_letters(letter_topic, mappers, batch)
            if writer:
                writer.write(letter_topic.topic, batch, results)
        remaining -= len(results)  # after fencing: a letter that seems to wait may have been replayed
        yield from results


def _next_letters(letters: Iterator[StoredLetter], limit: int) -> list[StoredLetter]:
    """Return the next dead letters, as many as fit one transaction and the limit."""
    batch: list[StoredLetter] = []
    size = 0
    for letter in islice(letters, limit):
        batch.append(letter)
        size += len(letter.dead_letter.value or b"")
        if size > _BYTES_PER_TRANSACTION:
            break
    return batch


def _remap_letters(
    letter_topic: DeadLetterTopic, mappers: Mapping[str, LetterMapper], letters: list[StoredLetter]
) -> list[RemapResult]:
    """Remap dead letters, and check that Kafka takes the records; return one result for each."""
    results: dict[int, RemapResult] = {}
    line_names = [line and line.name for line in (letter_topic.line_of(letter.dead_letter) for letter in letters)]
    for name, mapper in mappers.items():
        indexes = [index for index, line_name in enumerate(line_names) if line_name == name]
        results |= dict(zip(indexes, mapper.remap([letters[index].dead_letter for index in indexes]), strict=True))
    topics = {result[0] for result in results.values() if isinstance(result, tuple)}
    reserved, now = re.compile(reserved_topics_pattern([letter_topic.topic])), int(time.time() * 1000)
    open_topics = {topic for topic in topics if not reserved.fullmatch(topic)}
    topic_limits = KafkaAdmin(letter_topic.client).topic_limits(open_topics)
    max_bytes = max_message_bytes(letter_topic.client)
    limits = RecordLimits(topic_limits, max_bytes, None, now, lambda topic: bool(reserved.fullmatch(topic)))
    for index, result in results.items():
        if isinstance(result, tuple) and (fault := record_fault(result, limits)):
            results[index] = f"topic {result[0]}: {fault.detail}"
    return [results[index] for index in range(len(letters))]


class _ReplayWriter:
    """Transactional producer of one replay transaction; a later one fences it."""

    def __init__(self, letter_topic: DeadLetterTopic) -> None:
        client = {f"kafka.{name}": value for name, value in letter_topic.client.items()}
        settings = SinkSettings.parse({"deliveryTimeout": str(_TRANSACTION_TIMEOUT_S), **client})
        # By topic alone: two bridges that share one may both own a dead letter.
        self._servers = settings.servers
        with self._convert_errors():
            self._producer = TransactionalProducer(settings, f"towline.dlq.{letter_topic.topic}")

    def write(self, topic: str, letters: list[StoredLetter], results: list[RemapResult]) -> None:
        """Write the records, and the replay marks of their dead letters, in one transaction.

        After TL-B30 it is not committed, or that is not known: the next replay reads it from the marks.
        """
        replayed = [letter for letter, result in zip(letters, results, strict=True) if not isinstance(result, str)]
        if not replayed:
            return
        records: list[Record] = [result for result in results if isinstance(result, tuple)]
        records += [(topic, b"", None, part, None, None, 0, [(REPLAY_MARK, mark)]) for part, mark in _marks(replayed)]
        with self._convert_errors():
            self._producer.begin()
            self._producer.write(Rows(len(records), 0, frozenset(), iter(records)))
            self._producer.commit()

    def close(self) -> None:
        """Close the producer; aborts an open transaction."""
        self._producer.close()

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except KafkaError as error:
            problem = f"Kafka did not take the replayed records: {error.problem}"
            remedy = "Run it again: replayed letters are skipped, the others wait as before."
            raise KafkaError("TL-B30", self._servers, problem, remedy) from None


def _marks(letters: Iterable[StoredLetter]) -> Iterator[tuple[int, bytes]]:
    """Yield partition and replay mark, for each partition with replayed letters."""
    ranges_by_partition: dict[int, list[OffsetRange]] = {}
    for letter in letters:
        ranges_by_partition.setdefault(letter.partition, []).append((letter.offset, letter.offset))
    for partition, ranges in sorted(ranges_by_partition.items()):
        yield partition, json.dumps({"v": 1, "offsets": merge_ranges(ranges)}, separators=(",", ":")).encode()
