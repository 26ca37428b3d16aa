"""Dead-letter topics of a bridge: which dead letters wait in them.

A dead-letter topic is its own ledger. Whoever replays writes a mark into it that names the dead letters that were
mended (`towline.bridge.deadletters.replay`); who replays later leaves those out. So the position needs no file, and
can't be forgotten before the dead letters themselves are: both have one retention.

The marks are read up to the end of each partition, not to its last stable offset: one may lie above a transaction that
another writer of the topic has open, where no reader sees it yet.
"""

from __future__ import annotations

import json
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from towline.bridge.lines.identity import Identity, former_topics
from towline.errors import ConfigError, KafkaError
from towline.kafka import faults
from towline.kafka.admin import KafkaAdmin, remade, watermarks
from towline.kafka.clientconfig import connect
from towline.kafka.deadletters import PREFIX, Collector, DeadLetter, Header
from towline.kafka.markerstore import READER

if TYPE_CHECKING:
    from towline.bridge.config.model import AnyLine, Bridge

#: Header of a mark; its value is the JSON of one.
MARK: Final = PREFIX + "replayed"
#: Seconds without a word from Kafka before reading is given up.
_SILENCE_S: Final = 30.0
#: Seconds that transactions of others are waited for: their usual time-out, and the broker's next look at it.
_OTHERS_S: Final = 75.0


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

        confluent-kafka gives such headers back together with an exception, with holes where the names were, and whoever
        looks at them ends the process. They are asked for once, in the one way where Python notices the exception.
        """
        try:
            headers = _HEADERS(message) or ()
        except SystemError:
            headers = ()
        place = message.partition(), message.offset(), message.timestamp()[1]
        return cls(*place, message.key(), message.value(), headers)


@dataclass(frozen=True, slots=True)
class Entry:
    """A dead letter and its place.

    Attributes:
        partition: Of the dead-letter topic.
        offset: Of its last record there; names the dead letter for ever.
        timestamp: When it was written, ms since 1970.
        dead letter: What could not be delivered.
    """

    partition: int
    offset: int
    timestamp: int
    dead_letter: DeadLetter


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which dead letters are meant.

    Attributes:
        line: Of this line; None for all lines of the bridge.
        reason: With this reason; None for all.
    """

    line: str | None = None
    reason: str | None = None


class _Settled:
    """Places of dead letters that were replayed, as ranges: whoever writes to the topic may name any number of them."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def add(self, record: _Record) -> None:
        """Take what a mark names."""
        for first, last in _marked(record):
            known = self._ranges.setdefault(record.partition, [])
            start = bisect(known, first, key=lambda one: one[1] + 1)  # those that end before it, and do not touch it
            end = bisect(known, last + 1, key=lambda one: one[0])
            joined = [*known[start:end], (first, last)]
            known[start:end] = [(min(one[0] for one in joined), max(one[1] for one in joined))]

    def __contains__(self, place: tuple[int, int]) -> bool:
        partition, offset = place
        known = self._ranges.get(partition, [])
        at = bisect(known, offset, key=lambda one: one[0])
        return at > 0 and offset <= known[at - 1][1]


@dataclass
class DeadLetterTopic:
    """A dead-letter topic.

    Attributes:
        client: Kafka's client configuration, unresolved.
        topic: Its name.
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
    _replayed: _Settled = field(default_factory=_Settled, init=False)
    #: Partition -> end up to which its marks were read.
    _known: dict[int, int] = field(default_factory=dict, init=False)

    def entries(self, wanted: Wanted) -> Iterator[Entry]:
        """The dead letters that wait, in the order of each partition; those replayed before are left out.

        What comes later than the first one is asked for is left out too: a line that runs may give up again what a
        replay gives back. A topic that is not there, as before the first start, has none.

        Raises:
            KafkaError: TL-K01.
        """
        self._replayed, self._known, self.nobodys, self.strange = _Settled(), {}, Counter(), 0
        self._ids = KafkaAdmin(self.client).ids([self.topic])
        self._read_marks(self._ends())
        return (entry for entry in self._letters() if self._chosen(entry, wanted))

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
        return [entry for entry in entries if (entry.partition, entry.offset) not in self._replayed]

    def _read_marks(self, ends: dict[int, int], stuck: KafkaError | None = None) -> None:
        left = {number: end for number, end in ends.items() if self._known.get(number, -1) < end}
        for record in self._records(left, self._known, stuck):
            self._replayed.add(record)
        self._known = ends

    def line_of(self, dead_letter: DeadLetter) -> AnyLine | None:
        """The line that signed a dead letter; None for one of another bridge."""
        return self.lines.get(dead_letter.source)

    def _chosen(self, entry: Entry, wanted: Wanted) -> bool:
        if (entry.partition, entry.offset) in self._replayed:
            return False
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


def _marked(record: _Record) -> list[tuple[int, int]]:
    """First and last offset of the dead letters a mark names, all before it; none if the record is no mark of ours."""
    value = _mark_of(record)
    try:
        named = [] if value is None else json.loads(value)["offsets"]
        ranges = [(max(0, first), min(last, record.offset - 1)) for first, last in named]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [(first, last) for first, last in ranges if type(first) is type(last) is int and first <= last]


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
