"""Dead-letter topics of a bridge: which dead letters wait in them, and their way on, each at most once.

A dead-letter topic is its own ledger: one transaction writes the mended records to their topics and, into the
dead-letter topic, a mark that names the dead letters they came from; who replays later leaves those out. So the
position needs no file, and can't be forgotten before the dead letters themselves are: both have one retention.

The marks are read up to the end of each partition, not to its last stable offset: one may lie above a transaction that
another writer of the topic has open, where no reader sees it yet. Each transaction has a producer of its own, whose
`init_transactions` comes before the marks are read [I9]: a replay that died is committed or aborted by then, one that
still runs is fenced, and a commit request that arrives late is refused (KIP-890; `towline.kafka.producers`).

Spark is started only for lines whose routes say something in SQL.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from towline.bridge.config.model import Line
from towline.bridge.lines.identity import Identity, former_topics
from towline.bridge.lines.statements import Statements
from towline.bridge.properties import TRACE_CONTEXT, user_property
from towline.bridge.routes import FAULT, OUTCOME, RecordColumns, RouteTable, RowOutcome, of_schema
from towline.errors import ConfigError, KafkaError
from towline.kafka import faults
from towline.kafka.admin import KafkaAdmin, remade, watermarks
from towline.kafka.clientconfig import connect, largest_message
from towline.kafka.columns import Record, Rows
from towline.kafka.deadletters import PREFIX, Collector, DeadLetter, Header, Reason, reserved
from towline.kafka.markerstore import READER
from towline.kafka.options import SinkSettings
from towline.kafka.producers import Transactional
from towline.kafka.screening import RecordLimits, fault_of
from towline.schema import ROW_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from towline.bridge.config.model import AnyLine, Bridge

#: Header of a mark; its value is the JSON of one.
MARK: Final = PREFIX + "replayed"
#: Seconds without a word from Kafka before reading is given up.
_SILENCE_S: Final = 30.0
#: Seconds that transactions of others are waited for: their usual time-out, and the broker's next look at it.
_OTHERS_S: Final = 75.0
#: First and last offset.
Range: TypeAlias = tuple[int, int]

#: Not `message.headers()`: the interpreter calls a method that it has met often without a look at what comes back.
_HEADERS: Final[Callable[[Any], Any]] = methodcaller("headers")


class _Record(NamedTuple):
    """What is read of a record."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]

    @classmethod
    def of(cls, message: Any) -> _Record:
        """Take a message of the client's apart; headers with a name that is no UTF-8 are left out, ours never are.

        confluent-kafka gives such headers back together with an exception, and whoever looks at them ends the process.
        They are asked for once, in the one way where Python notices the exception.
        """
        try:
            headers = _HEADERS(message) or ()
        except SystemError:
            headers = ()
        place = message.partition(), message.offset(), message.timestamp()[1]
        return cls(*place, message.key(), message.value(), headers)


class Entry(NamedTuple):
    """A dead letter and its last record in the topic, which names it for ever; written at so many ms since 1970."""

    partition: int
    offset: int
    timestamp: int
    dead_letter: DeadLetter


class Wanted(NamedTuple):
    """Which dead letters are meant: those of a line, and those with a reason; None for all."""

    line: str | None = None
    reason: str | None = None


@dataclass
class DeadLetterTopic:
    """A dead-letter topic.

    Attributes:
        client: Kafka's client configuration, unresolved.
        lines: The lines that write to it, by the names they sign with.
        former: Whether no line of the file has it any more.
        absent: Whether the topic was not there when it was read; a former one may have been deleted since.
        nobodys: Letters that wait and no line here has signed, as far as `entries` has come: by who did.
        strange: Records that are no letter and no mark, or pieces that fit no letter, as far as `entries` has come.
    """

    client: Mapping[str, str]
    topic: str
    lines: Mapping[str, AnyLine]
    former: bool = False
    absent: bool = field(default=False, init=False)
    nobodys: Counter[str] = field(default_factory=Counter, init=False)
    strange: int = field(default=0, init=False)
    _ids: dict[str, str] = field(default_factory=dict, init=False)
    #: Partition -> offsets of the dead letters that were replayed: whoever writes to the topic may name any number.
    _replayed: dict[int, list[Range]] = field(default_factory=dict, init=False)
    #: Partition -> end up to which its marks were read.
    _known: dict[int, int] = field(default_factory=dict, init=False)

    def entries(self, wanted: Wanted) -> Iterator[Entry]:
        """The dead letters that wait, in the order of each partition; those replayed before are left out.

        What comes later than the first one is asked for is left out too: a line that runs may give up again what a
        replay gives back. A topic that is not there, as before the first start, has none. Raises TL-K01.
        """
        self._replayed, self._known, self.nobodys, self.strange = {}, {}, Counter(), 0
        self._ids = KafkaAdmin(self.client).ids([self.topic])
        self._read_marks(self._ends())
        return (entry for entry in self._letters() if not self._settled(entry) and self._chosen(entry, wanted))

    def waiting(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those that still wait; asked when a new producer has fenced all others, so that no mark can follow.

        Raises:
            KafkaError: TL-K01; TL-B30 when it is another topic now, in which a mark would name other dead letters;
                TL-B31 when somebody's transaction stays open in the topic.
        """
        if remade(self._ids, KafkaAdmin(self.client).ids([self.topic])):
            what = f'the topic "{self.topic}" was deleted and made again while it was replayed'
            raise KafkaError("TL-B30", self._servers, what, "Run it again: it begins with the new one.")
        what = f'a transaction of another writer is open in "{self.topic}", and may hide what was replayed before'
        do = "Run it again when that has ended; Kafka ends it by itself after its time-out."
        stuck = KafkaError("TL-B31", self._servers, what, do)
        self._read_marks(self._ends("read_uncommitted"), stuck)
        return [entry for entry in entries if not self._settled(entry)]

    def _read_marks(self, ends: dict[int, int], stuck: KafkaError | None = None) -> None:
        left = {number: end for number, end in ends.items() if self._known.get(number, -1) < end}
        for record in self._records(left, self._known, stuck):
            self._replayed.setdefault(record.partition, []).extend(_marked(record))
        self._replayed, self._known = {number: joined(each) for number, each in self._replayed.items()}, ends

    def _settled(self, entry: Entry) -> bool:
        ranges = self._replayed.get(entry.partition, [])
        at = bisect(ranges, entry.offset, key=itemgetter(0))
        return at > 0 and entry.offset <= ranges[at - 1][1]

    def line_of(self, dead_letter: DeadLetter) -> AnyLine | None:
        """The line that signed a dead letter; None for one of another bridge."""
        return self.lines.get(dead_letter.source)

    def _chosen(self, entry: Entry, wanted: Wanted) -> bool:
        line = self.line_of(entry.dead_letter)
        if line is None:
            self.nobodys[entry.dead_letter.source] += 1
            return False
        return wanted.line in (None, line.name) and wanted.reason in (None, entry.dead_letter.reason.value)

    def _letters(self) -> Iterator[Entry]:
        collectors: dict[int, Collector] = {}
        for record in self._records(self._ends()):
            if _mark_of(record) is not None:
                continue
            collector = collectors.setdefault(record.partition, Collector())
            try:
                dead_letter = collector.add(record.key, record.value, record.headers)
            except ValueError:
                self.strange += 1  # somebody else's record, or a piece of a letter whose others are not there
                continue
            if dead_letter is not None:
                yield Entry(record.partition, record.offset, record.timestamp, dead_letter)
        for one in collectors.values():
            self.strange += one.left_out + sum(map(len, one.waiting.values()))

    def _ends(self, isolation: str = "read_committed") -> dict[int, int]:
        """The end of each partition by its leader: at or above it, and not before, everything has been read."""
        consumer = self._consumer(isolation)
        try:
            found = consumer.list_topics(timeout=_SILENCE_S).topics.get(self.topic)
            places = [TopicPartition(self.topic, number) for number in sorted(found.partitions if found else ())]
            ends = {place.partition: watermarks(consumer, place, _SILENCE_S)[1] for place in places}
        except faults.FOREIGN as error:
            raise self._silent(faults.reason(error)) from None
        finally:
            consumer.close()
        self.absent = found is None and not self.former
        return ends

    def _records(
        self, ends: Mapping[int, int], start: Mapping[int, int] | None = None, stuck: KafkaError | None = None
    ) -> Iterator[_Record]:
        """Every committed record below the ends, and no more: a topic that is written to all the time has no other.

        Raises `stuck`, or TL-K01, when it goes no further.
        """
        if not ends:
            return
        left, first, consumer = dict(ends), start or {}, self._consumer()
        patience = _SILENCE_S if stuck is None else _OTHERS_S
        try:
            consumer.assign([TopicPartition(self.topic, n, first.get(n, OFFSET_BEGINNING)) for n in ends])
            deadline = time.monotonic() + patience
            while left:
                record = consumer.poll(1.0)
                if record is None or (end := left.get(record.partition())) is None:
                    if time.monotonic() > deadline:
                        raise stuck or self._silent("the topic can't be read to its end")
                    continue
                if record.error() is None and record.offset() < end:
                    yield _Record.of(record)
                deadline = time.monotonic() + patience  # after it: whoever took it may have taken his time
                last = end - 1 if record.error() is None else end
                if (record.error() is None or record.error().name() == "_PARTITION_EOF") and record.offset() >= last:
                    del left[record.partition()]
        finally:
            consumer.close()

    def _silent(self, why: str) -> KafkaError:
        return faults.unreachable(self._servers, _SILENCE_S, why)

    @property
    def _servers(self) -> str:
        return self.client["bootstrap.servers"]

    def _consumer(self, isolation: str = "read_committed") -> Any:
        """Reads from the leader: a mark that is not read yet would have its dead letters replayed again."""
        own: dict[str, Any] = {
            **READER,
            "fetch.wait.max.ms": 500,  # a transaction of another may be waited for, for a minute
            "group.id": f"towline.dlq.{self.topic}",  # the client demands one; nothing is ever committed to it
            "isolation.level": isolation,  # ListOffsets has it too: the end is the last stable offset, or the very end
        }
        return connect(Consumer, self.client, own)


def _mark_of(record: _Record) -> bytes | None:
    """The value of a mark, None for other records: a mark has nothing but its header.

    A dead letter has headers of ours before its own, so a device's property of that name marks nothing [I13].
    """
    match list(record.headers):
        case [(name, value)] if name == MARK and not record.key and not record.value:
            return value or b""
    return None


def _marked(record: _Record) -> list[Range]:
    """The dead letters a mark names, all before it; none if the record is no mark of ours."""
    value = _mark_of(record)
    try:
        named = [] if value is None else json.loads(value)["offsets"]
        ranges = [(max(0, first), min(last, record.offset - 1)) for first, last in named]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [(first, last) for first, last in ranges if type(first) is type(last) is int and first <= last]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in their order, those that touch as one."""
    made: list[Range] = []
    for first, last in sorted(ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(last, made[-1][1])
        else:
            made.append((first, last))
    return made


def shelves(bridge: Bridge) -> list[DeadLetterTopic]:
    """The dead-letter topics of a bridge, those of former files included [I18].

    A line may have written to each of them before the file was changed: every line's signs are looked for in each.

    Raises:
        ConfigError: TL-C75 when no line has one.
    """
    signs: dict[str, AnyLine] = {}
    before: dict[str, AnyLine] = {}
    for line in bridge.lines:
        identity = Identity.of(bridge, line)
        signs |= dict.fromkeys((line.name, identity.sink), line)
        before |= dict.fromkeys(_former(identity, bridge.name), line)
    lines = before | signs  # a line that has the name now is meant first
    named = dict.fromkeys(line.dead_letter_topic for line in bridge.lines if line.dead_letter_topic)
    former = former_topics(bridge)
    if not named and not former:
        do = 'Give the line dead_letter_topic = "NAME", or let topics be created with create_topics in [kafka].'
        raise ConfigError("TL-C75", str(bridge.file), "no line has a dead-letter topic", do)
    return [DeadLetterTopic(bridge.kafka.client(), topic, lines, topic in former) for topic in (*named, *former)]


def _former(identity: Identity, bridge: str) -> Iterator[str]:
    """What a line signed with before it was told to begin again, or had another name."""
    base = identity.first_sink
    yield base
    yield base.removeprefix(f"{bridge}.")
    yield from (f"{base}.{number}" for number in range(2, identity.generation))


# -- what they become ------------------------------------------------------------------------------------------------

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: Columns of numbers: their headers, and the largest of each; what is larger was not written by a gateway.
_NUMBERS: Final = {
    "qos": ("mqtt.qos", 2),
    "message_expiry_seconds": ("mqtt.message-expiry", 0xFFFFFFFF),
    "offset": ("mqtt.offset", (1 << 63) - 1),
}
_SUBSCRIPTION, _MOMENT = 268_435_455, 1 << 57
_DECIMAL: Final = re.compile(rb"[0-9]{1,19}")
#: Letters that are not the message: no route can make of them what it was.
_NOT_WHOLE: Final = {
    Reason.PACKET_TOO_LARGE: "too large for the gateway's max_packet_bytes; its publisher has to send it again",
    Reason.TOO_MANY_PROPERTIES: "more than 1,000 properties; its value is the MQTT packet, for a program of yours",
}


@dataclass(frozen=True, slots=True)
class Remapped:
    """The fate of one dead letter: a record, or why it is still dead; with neither a ``where`` leaves it out now."""

    record: Record | None = None
    why: str = ""


def row_of(dead_letter: DeadLetter) -> dict[str, Any] | None:
    """The source's row that a dead letter was; None if it is not from MQTT, or its properties were not kept."""
    headers = [one for one in dead_letter.headers if one[0].startswith("mqtt.") or one[0] in TRACE_CONTEXT]
    known: Mapping[str, bytes | None] = dict(reversed(headers))
    if known.get("mqtt.topic") is None:
        return None
    users = [{"key": key, "value": _text(value)} for name, value in headers if (key := user_property(name)) is not None]
    ids = [_number(value, _SUBSCRIPTION) for name, value in headers if name == "mqtt.subscription-id"]
    texts = ("topic", "content_type", "response_topic", "gateway")
    form = known.get("mqtt.payload-format")
    return {
        **{name: _text(known.get(f"mqtt.{name.replace('_', '-')}")) for name in texts},
        **{name: _number(known.get(header), most) for name, (header, most) in _NUMBERS.items()},
        "payload": dead_letter.value,
        "retain": known.get("mqtt.retain") == b"true",
        "duplicate": known.get("mqtt.duplicate") == b"true",
        "payload_is_utf8": None if form is None else form == b"1",
        "correlation_data": known.get("mqtt.correlation-data"),
        "user_properties": users or None,
        "subscription_ids": [number for number in ids if number is not None] or None,
        "received_at": _EPOCH + timedelta(microseconds=_number(known.get("mqtt.received-at"), _MOMENT) or 0),
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _number(value: bytes | None, most: int) -> int | None:
    number = int(value) if value is not None and _DECIMAL.fullmatch(value) else None
    return number if number is None or number <= most else None


class Mapper:
    """Maps the dead letters of one line; those of a downlink go back to Kafka, where the line takes them once more.

    The session that evaluates the SQL of its routes is made at most once, and only where there is some.
    """

    def __init__(self, line: AnyLine, spark: Callable[[], SparkSession]) -> None:
        routes = line.routes if isinstance(line, Line) else ()
        self._statements, self._table, self._spark = Statements(routes), RouteTable(routes), spark

    def outcomes(self, dead_letters: Sequence[DeadLetter]) -> list[Remapped]:
        """The fate of each, in order."""
        rows = {
            index: row
            for index, dead_letter in enumerate(dead_letters)
            if self._table.routes and dead_letter.reason not in _NOT_WHOLE and (row := row_of(dead_letter)) is not None
        }
        mapped = dict(zip(rows, self._mapped([*rows.values()]), strict=True))
        return [mapped.get(index) or _as_it_was(dead_letter) for index, dead_letter in enumerate(dead_letters)]

    def _mapped(self, rows: list[dict[str, Any]]) -> Iterator[Remapped]:
        if not rows:
            return
        batch = pa.RecordBatch.from_pylist(rows, schema=ROW_SCHEMA)
        if self._statements.needed:
            batch = self._evaluated(self._table.routed(batch, self._statements.values))
        made = self._table.render(batch)
        records = RecordColumns().rows(made, any_topic=True).records
        for code, fault, record in zip(*(made.column(n).to_pylist() for n in (OUTCOME, FAULT)), records, strict=True):
            outcome = RowOutcome(code)
            if outcome.reason:
                yield Remapped(why=f"it is refused: {fault}" if outcome is RowOutcome.REJECTED else fault)
            else:
                yield Remapped(None if outcome < RowOutcome.RENDERED else record)

    def _evaluated(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with what Spark says of them."""
        frame = self._spark().createDataFrame(pa.Table.from_batches([rows]))
        (batch,) = self._statements.applied(frame, tolerant=True).toArrow().combine_chunks().to_batches()
        return of_schema(batch)


def _as_it_was(dead_letter: DeadLetter) -> Remapped:
    """A record that was mapped well and could not be written; what was wrong with it is left to Kafka."""
    if (why := _NOT_WHOLE.get(dead_letter.reason)) or dead_letter.topic is None:
        return Remapped(why=why or "it names no topic")
    partition = -1 if dead_letter.partition is None or dead_letter.reason is Reason.PARTITION else dead_letter.partition
    moment = 0 if dead_letter.timestamp is None or dead_letter.reason is Reason.TIMESTAMP else dead_letter.timestamp
    headers = list(dead_letter.headers) or None
    return Remapped((dead_letter.topic, dead_letter.value, dead_letter.key, partition, None, None, moment, headers))


# -- each at most once ------------------------------------------------------------------------------------------------

#: Dead letters of one transaction.
CHUNK: Final = 500
#: Bytes of them at which it ends earlier: they and their records are kept in memory.
_CHUNK_BYTES: Final = 16 * 1024 * 1024
#: Seconds for one transaction; the broker aborts it then by itself.
_TRANSACTION_S: Final = 60
#: The lines' own says how long *their* transactions may take.
_CLOCK: Final = "transaction.timeout.ms"


@dataclass(slots=True)
class Replay:
    """What a replay did, or would do: letters by the topic of their record, left out now, and by why they stay."""

    mended: Counter[str] = field(default_factory=Counter)
    filtered: int = 0
    dead: Counter[str] = field(default_factory=Counter)

    @property
    def letters(self) -> int:
        """How many were looked at."""
        return self.mended.total() + self.filtered + self.dead.total()

    def add(self, outcome: Remapped) -> None:
        """Count one dead letter."""
        if outcome.why:
            self.dead[outcome.why] += 1
        elif outcome.record is None:
            self.filtered += 1
        else:
            self.mended[outcome.record[0]] += 1

    def include(self, other: Replay) -> None:
        """Count what was done on another topic too."""
        self.mended += other.mended
        self.filtered += other.filtered
        self.dead += other.dead


def replay(
    ledger: DeadLetterTopic,
    wanted: Wanted,
    spark: Callable[[], SparkSession],
    *,
    limit: int | None = None,
    dry_run: bool = False,
) -> Replay:
    """Put the mended dead letters of a topic back on their way; each dead letter at most once, also over crashes.

    `spark` makes a session for routes with SQL. At most `limit` letters are taken; a `dry_run` writes nothing.

    Raises:
        KafkaError: TL-K01; TL-B30 when a transaction failed, TL-B31 when another writer's stays open: what was
            not committed waits as before.
    """
    mappers = {line.name: Mapper(line, spark) for line in ledger.lines.values()}
    done = Replay()
    entries = ledger.entries(wanted)
    # Counts under the fence: what the search takes for waiting may have been replayed (see `waiting`).
    left = sys.maxsize if limit is None else limit
    while chunk := _chunk(entries, min(left, CHUNK)):
        if dry_run:
            outcomes = _outcomes(ledger, mappers, chunk)
        else:
            with contextlib.closing(_Writer(ledger)) as writer:
                chunk = ledger.waiting(chunk)
                outcomes = _outcomes(ledger, mappers, chunk)
                writer.write(ledger.topic, chunk, outcomes)
        left -= len(chunk)
        for outcome in outcomes:
            done.add(outcome)
    return done


def _chunk(entries: Iterator[Entry], limit: int) -> list[Entry]:
    """The next dead letters, as many as one transaction carries and no more than the limit."""
    made: list[Entry] = []
    size = 0
    for entry in islice(entries, limit):
        made.append(entry)
        size += len(entry.dead_letter.value or b"")
        if size > _CHUNK_BYTES:
            break
    return made


def _outcomes(ledger: DeadLetterTopic, mappers: Mapping[str, Mapper], chunk: list[Entry]) -> list[Remapped]:
    """The fate of each dead letter, and whether Kafka takes what it becomes."""
    fates: dict[int, Remapped] = {}
    owners = [line and line.name for line in (ledger.line_of(entry.dead_letter) for entry in chunk)]
    for name, mapper in mappers.items():
        mine = [at for at, owner in enumerate(owners) if owner == name]
        fates |= dict(zip(mine, mapper.outcomes([chunk[at].dead_letter for at in mine]), strict=True))
    topics = {fate.record[0] for fate in fates.values() if fate.record}
    taken, now = re.compile(reserved([ledger.topic])), int(time.time() * 1000)
    facts = KafkaAdmin(ledger.client).facts({topic for topic in topics if not taken.fullmatch(topic)})
    most = largest_message(ledger.client)
    limits = RecordLimits(facts, most, None, now, lambda topic: bool(taken.fullmatch(topic)))
    return [_checked(fates[at], limits) for at in range(len(chunk))]


def _checked(fate: Remapped, limits: RecordLimits) -> Remapped:
    if fate.record and (fault := fault_of(fate.record, limits)):
        return Remapped(why=f"topic {fate.record[0]}: {fault.detail}")
    return fate


class _Writer:
    """A transactional producer for one transaction, the sink's own; whoever starts later fences it."""

    def __init__(self, ledger: DeadLetterTopic) -> None:
        client = {f"kafka.{name}": value for name, value in ledger.client.items() if name != _CLOCK}
        settings = SinkSettings.parse({"deliveryTimeout": str(_TRANSACTION_S), **client})
        # Of the topic alone: bridges that share one may both take a dead letter for theirs.
        self._servers = settings.servers
        with self._one_error():
            self._producer = Transactional(settings, f"towline.dlq.{ledger.topic}")

    def write(self, topic: str, chunk: list[Entry], outcomes: list[Remapped]) -> None:
        """One transaction: the records, and the marks of the dead letters they came from.

        After TL-B30 nothing of it counts, or nobody knows whether it does: the next replay finds out.
        """
        settled = [entry for entry, outcome in zip(chunk, outcomes, strict=True) if not outcome.why]
        if not settled:
            return
        records = [outcome.record for outcome in outcomes if outcome.record is not None]
        records += [(topic, b"", None, partition, None, None, 0, [(MARK, mark)]) for partition, mark in _marks(settled)]
        with self._one_error():
            self._producer.begin()
            self._producer.write(Rows(len(records), 0, frozenset(), iter(records)))
            self._producer.commit()

    def close(self) -> None:
        """Let go of the producer; what was not committed is aborted."""
        self._producer.close()

    @contextlib.contextmanager
    def _one_error(self) -> Iterator[None]:
        try:
            yield
        except KafkaError as error:
            what = f"Kafka did not take what was replayed: {error.what}"
            do = "Run it again: what was replayed is left out then, the rest waits as before."
            raise KafkaError("TL-B30", self._servers, what, do) from None


def _marks(entries: Iterable[Entry]) -> Iterator[tuple[int, bytes]]:
    """Partition and mark, for each partition with dead letters that are settled."""
    settled: dict[int, list[Range]] = {}
    for entry in entries:
        settled.setdefault(entry.partition, []).append((entry.offset, entry.offset))
    for partition, each in sorted(settled.items()):
        yield partition, json.dumps({"v": 1, "offsets": joined(each)}, separators=(",", ":")).encode()
