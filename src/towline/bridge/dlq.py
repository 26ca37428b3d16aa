"""Dead letters, read and carried on: each at most once, whatever happens in between.

A dead-letter topic is its own ledger. Replaying writes, in one transaction, the mended records to their topics and a
mark into the dead-letter topic that names the letters they came from; who replays later leaves those out. So the
position needs no file, and can't be forgotten before the letters themselves are: both have one retention.

The producer's `init_transactions` comes before the marks are read [I9]: a replay that died is committed or aborted by
then, and one that still runs is fenced.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final

import confluent_kafka
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from towline.bridge.identity import Identity
from towline.bridge.remap import Fate, Mapper, Outcome, Returner, mapper_of
from towline.errors import ConfigError, KafkaError
from towline.kafka import faults
from towline.kafka.admin import client_config, topic_facts
from towline.kafka.clientconfig import QUIET
from towline.kafka.deadletters import PREFIX, Collector, Letter, from_record
from towline.kafka.screening import Limits, fault_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from towline.bridge.model import AnyLine, Bridge

__all__ = ["Entry", "Ledger", "Replay", "Wanted", "replay", "shelves"]

#: Header of a mark; its value is the JSON of one.
MARK: Final = PREFIX + "replayed"
#: Letters of one transaction.
CHUNK: Final = 500
#: Seconds without a word from Kafka before reading is given up.
_SILENCE_S: Final = 30.0
#: Seconds for one transaction; the broker aborts it then by itself.
_TRANSACTION_S: Final = 60.0
#: librdkafka's default message.max.bytes.
_CLIENT_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A letter and its place.

    Attributes:
        partition: Of the dead-letter topic.
        offset: Of its last record there; names the letter for ever.
        timestamp: When it was written, ms since 1970.
        letter: What could not be delivered.
    """

    partition: int
    offset: int
    timestamp: int
    letter: Letter


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which letters are meant.

    Attributes:
        line: Of this line; None for all lines of the bridge.
        reason: With this reason; None for all.
        limit: At most so many; None for all.
    """

    line: str | None = None
    reason: str | None = None
    limit: int | None = None


@dataclass
class Ledger:
    """A dead-letter topic.

    Attributes:
        client: Kafka's client configuration, unresolved.
        topic: Its name.
        lines: The lines that write to it, by the names they sign with.
    """

    client: Mapping[str, str]
    topic: str
    lines: Mapping[str, AnyLine]
    _replayed: set[tuple[int, int]] = field(default_factory=set, init=False)

    def entries(self, wanted: Wanted) -> Iterator[Entry]:
        """The letters that wait, in the order of each partition; those replayed before are left out.

        Raises:
            KafkaError: TL-K01, TL-K04.
        """
        self._replayed = {place for record in self._records() for place in _marked(record)}
        chosen = (entry for entry in self._letters() if self._chosen(entry, wanted))
        return islice(chosen, wanted.limit)

    def line_of(self, letter: Letter) -> AnyLine | None:
        """The line that signed a letter; None for one of another bridge."""
        return self.lines.get(letter.source)

    def _chosen(self, entry: Entry, wanted: Wanted) -> bool:
        line = self.line_of(entry.letter)
        return (
            (entry.partition, entry.offset) not in self._replayed
            and line is not None
            and wanted.line in (None, line.name)
            and wanted.reason in (None, entry.letter.reason.value)
        )

    def _letters(self) -> Iterator[Entry]:
        collectors: dict[int, Collector] = {}
        for record in self._records():
            if _mark_of(record) is not None:
                continue
            collector = collectors.setdefault(record.partition(), Collector())
            try:
                letter = collector.add(record.key(), record.value(), record.headers())
            except ValueError:
                continue  # somebody else's record: none of ours to carry on
            if letter is not None:
                yield Entry(record.partition(), record.offset(), record.timestamp()[1], _innermost(letter, self.topic))

    def _records(self) -> Iterator[Any]:
        """Every committed record up to the end of each partition at the time it is reached."""
        consumer = self._consumer()
        try:
            partitions = _partitions(consumer, self.client, self.topic)
            consumer.assign([TopicPartition(self.topic, number, OFFSET_BEGINNING) for number in partitions])
            yield from _to_the_ends(consumer, set(partitions), _servers(self.client))
        finally:
            consumer.close()

    def _consumer(self) -> Any:
        settings: dict[str, Any] = {
            **client_config(self.client),
            "group.id": f"towline.dlq.{self.topic}",  # the client demands one; nothing is ever committed to it
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
        return Consumer(settings, logger=QUIET)


def _partitions(consumer: Any, client: Mapping[str, str], topic: str) -> list[int]:
    try:
        found = consumer.list_topics(timeout=_SILENCE_S).topics.get(topic)
    except faults.FOREIGN as error:
        raise faults.unreachable(_servers(client), _SILENCE_S, faults.reason(error)) from None
    if found is None:
        raise faults.missing(_servers(client), [topic])
    return sorted(found.partitions)


def _to_the_ends(consumer: Any, left: set[int], servers: str) -> Iterator[Any]:
    deadline = time.monotonic() + _SILENCE_S
    while left:
        record = consumer.poll(1.0)
        if record is None:
            if time.monotonic() > deadline:
                raise faults.unreachable(servers, _SILENCE_S, "the topic can't be read to its end")
            continue
        deadline = time.monotonic() + _SILENCE_S
        if record.error() is None:
            yield record
        elif record.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
            left.discard(record.partition())


def _mark_of(record: Any) -> bytes | None:
    return next((value or b"" for name, value in record.headers() or () if name == MARK), None)


def _marked(record: Any) -> Iterator[tuple[int, int]]:
    """The letters a mark names; none if the record is no mark."""
    value = _mark_of(record)
    if value is not None:
        for first, last in json.loads(value)["offsets"]:
            yield from ((record.partition(), offset) for offset in range(first, last + 1))


def _innermost(letter: Letter, topic: str) -> Letter:
    """A letter that was itself too large for one record was put into a letter about the dead-letter topic."""
    while letter.topic == topic:
        try:
            inner = from_record(letter.key, letter.value, letter.headers)
        except ValueError:
            return letter
        if not isinstance(inner, Letter):
            return letter
        letter = inner
    return letter


def _servers(client: Mapping[str, str]) -> str:
    return client["bootstrap.servers"]


def shelves(bridge: Bridge) -> list[Ledger]:
    """The dead-letter topics of a bridge.

    Raises:
        ConfigError: TL-C75 when no line has one.
    """
    topics: dict[str, dict[str, AnyLine]] = {}
    for line in bridge.lines:
        if line.dead_letter_topic:
            identity = Identity.read(line.gateway.state_dir) or Identity.new(bridge.name, line.name)
            signs = topics.setdefault(line.dead_letter_topic, {})
            signs |= dict.fromkeys((line.name, identity.sink), line)
            # It signed with these before it was told to begin again.
            signs |= dict.fromkeys((name for name in _former(identity)), line)
    if not topics:
        do = 'Give the line dead_letter_topic = "NAME", or let topics be created with create_topics in [kafka].'
        raise ConfigError("TL-C75", str(bridge.file), "no line has a dead-letter topic", do)
    return [Ledger(bridge.kafka.client(), topic, lines) for topic, lines in topics.items()]


def _former(identity: Identity) -> Iterator[str]:
    base = identity.sink.removesuffix(f".{identity.generation}") if identity.generation > 1 else identity.sink
    yield base
    yield from (f"{base}.{number}" for number in range(2, identity.generation))


@dataclass(slots=True)
class Replay:
    """What a replay did, or would do.

    Attributes:
        mended: Letters whose record was written, by topic.
        filtered: Letters that a ``where`` leaves out now.
        dead: Letters that stay, by why.
    """

    mended: Counter[str] = field(default_factory=Counter)
    filtered: int = 0
    dead: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one letter."""
        if outcome.fate is Fate.DEAD:
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
    bridge: Bridge,
    ledger: Ledger,
    wanted: Wanted,
    spark: Callable[[], SparkSession],
    *,
    dry_run: bool = False,
    on_chunk: Callable[[Replay], None] = lambda _: None,
) -> Replay:
    """Put the mended letters of a topic back on their way; each letter at most once, also over crashes.

    Args:
        bridge: Whose lines map them.
        ledger: The dead-letter topic.
        wanted: Which letters.
        spark: Makes a session, for routes with a ``where``.
        dry_run: Write nothing.
        on_chunk: Called after each transaction with what was done so far.

    Raises:
        KafkaError: TL-K01, TL-K04; TL-B30 when a transaction failed: what was not committed waits as before.
    """
    mappers = {line.name: mapper_of(line, spark) for line in ledger.lines.values()}
    done = Replay()
    writer = None if dry_run else _Writer(bridge, ledger)
    try:
        entries = ledger.entries(wanted)
        while chunk := list(islice(entries, CHUNK)):
            outcomes = _outcomes(ledger, mappers, chunk)
            if writer is not None:
                writer.write(ledger.topic, chunk, outcomes)
            for outcome in outcomes:
                done.add(outcome)
            on_chunk(done)
    finally:
        if writer is not None:
            writer.close()
    return done


def _outcomes(ledger: Ledger, mappers: Mapping[str, Mapper | Returner], chunk: list[Entry]) -> list[Outcome]:
    """The fate of each letter, and whether Kafka takes what it becomes."""
    found: dict[int, Outcome] = {}
    for name, mapper in mappers.items():
        mine = [i for i, entry in enumerate(chunk) if (line := ledger.line_of(entry.letter)) and line.name == name]
        found |= dict(zip(mine, mapper.outcomes([chunk[i].letter for i in mine]), strict=True))
    topics = {outcome.record[0] for outcome in found.values() if outcome.record}
    most = int(ledger.client.get("message.max.bytes", _CLIENT_MAX))
    limits = Limits(topic_facts(ledger.client, topics), most, None, int(time.time() * 1000))
    return [_checked(found[i], limits) for i in range(len(chunk))]


def _checked(outcome: Outcome, limits: Limits) -> Outcome:
    fault = fault_of(outcome.record, limits) if outcome.record else None
    return outcome if fault is None else Outcome(Fate.DEAD, why=f"topic {outcome.record[0]}: {fault.detail}")  # type: ignore[index] # there is a record


class _Writer:
    """One transactional producer; whoever starts later fences it."""

    def __init__(self, bridge: Bridge, ledger: Ledger) -> None:
        self._servers = _servers(ledger.client)
        settings: dict[str, Any] = {
            **client_config(ledger.client),
            "transactional.id": f"towline.dlq.{bridge.name}.{ledger.topic}",
            "transaction.timeout.ms": int(_TRANSACTION_S * 1000),
            "message.timeout.ms": int(_TRANSACTION_S * 1000),
            "partitioner": "murmur2_random",  # a key's place, as the sink has it
        }
        self._producer = Producer(settings, logger=QUIET)
        self._asked("to begin", lambda: self._producer.init_transactions(_TRANSACTION_S))

    def write(self, topic: str, chunk: list[Entry], outcomes: list[Outcome]) -> None:
        """One transaction: the records, and the marks of the letters they came from."""
        settled = [entry for entry, outcome in zip(chunk, outcomes, strict=True) if outcome.fate is not Fate.DEAD]
        if not settled:
            return
        self._asked("to begin", self._producer.begin_transaction)
        try:
            for outcome in outcomes:
                if outcome.record is not None:
                    self._produce(outcome.record)
            for partition, mark in _marks(settled):
                self._produce((topic, b"", None, partition, None, None, 0, [(MARK, mark)]))
            self._commit()
        except BaseException:
            self._abort()
            raise

    def close(self) -> None:
        """Let go of the producer; what was not committed is aborted by the broker."""
        self._producer.purge()

    def _produce(self, record: tuple[Any, ...]) -> None:
        while True:
            try:
                self._asked("to write", lambda: self._producer.produce(*record))
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def _commit(self) -> None:
        deadline = time.monotonic() + 2 * _TRANSACTION_S
        while True:
            try:
                self._producer.commit_transaction(_TRANSACTION_S)
            except confluent_kafka.KafkaException as error:
                if error.args[0].retriable() and time.monotonic() < deadline:
                    continue
                raise self._failed("to commit", error) from None
            else:
                return

    def _abort(self) -> None:
        try:
            self._producer.abort_transaction(10)
        except (confluent_kafka.KafkaException, SystemError):
            self._producer.purge()

    def _asked(self, doing: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (confluent_kafka.KafkaException, SystemError) as error:
            raise self._failed(doing, error) from None

    def _failed(self, doing: str, error: BaseException) -> KafkaError:
        what = f"Kafka refused {doing} what was replayed: {faults.reason(error)}"
        return KafkaError(
            "TL-B30",
            self._servers,
            what,
            "Run it again: what was replayed is left out then, the rest waits as before.",
        )


def _marks(entries: Iterable[Entry]) -> Iterator[tuple[int, bytes]]:
    """Partition and mark, for each partition with letters that are settled."""
    places = sorted((entry.partition, entry.offset) for entry in entries)
    for partition, group in groupby(places, key=lambda place: place[0]):
        ranges: list[list[int]] = []
        for _, offset in group:
            if ranges and ranges[-1][1] == offset - 1:
                ranges[-1][1] = offset
            else:
                ranges.append([offset, offset])
        yield partition, json.dumps({"v": 1, "offsets": ranges}, separators=(",", ":")).encode()
