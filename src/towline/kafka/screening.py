"""Records that Kafka would refuse are found before the transaction opens: one of them would cost the whole batch.

Whole Arrow columns are compared with the limits of the topics first, which costs next to nothing; only a batch that
does not pass goes record by record. A bad record becomes a dead letter where the sink has a dead-letter topic, else
the task fails and names it, with nothing written.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import reduce
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import pyarrow as pa

from towline.errors import KafkaError
from towline.kafka import faults
from towline.kafka.admin import ANY, KafkaAdmin, TopicFacts, least
from towline.kafka.clientconfig import largest_message
from towline.kafka.deadletters import FRAME, DeadLetter, Reason, record_bytes, to_records
from towline.kafka.faults import Meaning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from towline.kafka.columns import Columns, Record, Rows
    from towline.kafka.options import SinkSettings
    from towline.kafka.producers import AttemptFailed

#: Seconds for which limits of topics are believed.
_FRESH_S: Final = 300.0
_BATCH_SIZE: Final = "batch.size"
#: Bytes of a request to a Kafka that takes less than a larger one in a second. Five are on the way at a time.
_SLOW_REQUEST: Final = 64 << 10
#: Clocks differ: the limit is so many ms below a time that was refused for being ahead.
_CLOCKS_MS: Final = 60_000
#: org.apache.kafka.common.internals.Topic.validate
_LEGAL: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
#: What a dead-letter topic takes if nobody says: Kafka's default max.message.bytes.
_TOPIC_MAX: Final = 1_048_588
#: Bytes that a part of a dead letter fits into for sure: its headers take some 7,000 at most.
_LEAST_ROOM: Final = 8192
#: Compressed sizes are guessed with this much to spare.
_SPARE: Final = 1.1


class Fault(NamedTuple):
    """Why a record can't be written, in one word and in one line."""

    reason: Reason
    detail: str


#: Of a record whose topic `SinkSettings.reserves`.
RESERVED: Final = Fault(Reason.TOPIC_RESERVED, "no message may choose this topic: markers, dead letters, Kafka's own")


class RecordLimits(NamedTuple):
    """What records are compared with.

    Attributes:
        topics: What each topic takes; one that is not here does not exist.
        client: The client's message.max.bytes.
        codec: Compression as pyarrow names it; None without.
        now_ms: The time.
        reserves: Whether no record may name a topic; such a one is not in ``topics``.
    """

    topics: Mapping[str, TopicFacts]
    client: int
    codec: str | None
    now_ms: int
    reserves: Callable[[str], bool] = lambda _: False


def fault_of(record: Record, limits: RecordLimits) -> Fault | None:
    """Why Kafka would refuse a record, the arguments of ``produce``; None if it should not."""
    facts = limits.topics.get(record[0])
    return _no_topic(record[0], limits) if facts is None else next(_faults(record, _bytes(record), facts, limits), None)


def _no_topic(topic: str | None, limits: RecordLimits) -> Fault:
    if topic is None:
        return Fault(Reason.TOPIC_ABSENT, "the record has no topic")
    if limits.reserves(topic):
        return RESERVED
    if not _LEGAL.fullmatch(topic) or topic in (".", ".."):
        return Fault(Reason.TOPIC_ILLEGAL, "Kafka has no topic of that name: 1 to 249 of a-z A-Z 0-9 . _ -")
    return Fault(Reason.TOPIC_MISSING, "the topic does not exist, or this user may not see it")


def _faults(record: Record, size: int, facts: TopicFacts, limits: RecordLimits) -> Iterator[Fault]:
    if not -1 <= record[3] < facts.partitions:
        yield Fault(Reason.PARTITION, f"the topic has partitions 0 to {facts.partitions - 1}, not {record[3]}")
    moment, ahead = record[6], record[6] - limits.now_ms
    if moment < 0:
        yield Fault(Reason.TIMESTAMP, f"{moment} ms is before 1970")
    if moment and facts.after_ms is not None and ahead > facts.after_ms:
        yield Fault(Reason.TIMESTAMP, f"{moment} ms is further ahead than message.timestamp.after.max.ms")
    if moment and facts.before_ms is not None and -ahead > facts.before_ms:
        yield Fault(Reason.TIMESTAMP, f"{moment} ms is further back than message.timestamp.before.max.ms")
    if facts.compacted and record[2] is None:
        yield Fault(Reason.KEY_ABSENT, "a compacted topic takes no record without a key")
    most = facts.max_bytes
    if size > limits.client:
        yield Fault(Reason.TOO_LARGE, f"{size:,} bytes, the client takes {limits.client:,} (kafka.message.max.bytes)")
    if most is not None and size > most and _compressed(record, size, limits.codec) > most:
        yield Fault(Reason.TOO_LARGE, f"{size:,} bytes, the topic takes {most:,} (max.message.bytes, segment.bytes)")


def _compressed(record: Record, size: int, codec: str | None) -> int:
    """What the broker compares with the topic's limit: the size after compression."""
    if codec is None or not record[1]:
        return size
    packed = pa.compress(record[1], codec=codec, asbytes=True)
    return int(len(packed) * _SPARE) + size - len(record[1])


def _bytes(record: Record) -> int:
    return record_bytes(record[2], record[1], record[7] or ())


class RecordCheck:
    """Looks at the batches of one task before they are sent; `source` is who is named in dead letters."""

    def __init__(self, settings: SinkSettings, columns: Columns, source: str) -> None:
        self._settings = settings
        self._columns = columns
        self._source = source
        self._limits = RecordLimits({}, 0, None, 0)
        #: Rows that `rows` has made dead letters of so far; only grows.
        self.dead_letters = 0

    def fitting(self, rate: float | None = None) -> dict[str, str]:
        """Settings of a producer whose batches fit into the topics, and into a second of a Kafka of that rate.

        A topic's limit is on the batch, not on the record. `rate` is in bytes a second, None if it is not known.
        """
        facts = reduce(TopicFacts.narrowed, self._limits.topics.values(), ANY)
        usual = int(self._settings.client[_BATCH_SIZE])
        slow = _SLOW_REQUEST if rate is not None and rate < usual else None
        most = least(facts.batch_bytes, facts.max_bytes, slow)
        return {} if most is None or usual <= most else {_BATCH_SIZE: str(most)}

    def look(self, batches: Iterable[Any]) -> Self:
        """Ask Kafka about the topics of these batches; without a dead-letter topic every record is checked now.

        Raises:
            KafkaError: TL-K01 no answer; TL-K04, TL-K05 or TL-K06 for what can't be written; TL-K71, TL-K72 for a
                dead-letter topic that does not keep every dead letter.
        """
        settings, client = self._settings, self._settings.client
        named = {name for batch in batches for name in self._topics(batch) if not settings.reserves(name)}
        required = {name for name in (settings.topic, settings.dead_letter_topic) if name}
        topics = facts_of(settings, named | required)
        if absent := required.difference(topics):
            raise faults.missing(settings.servers, absent)
        codec = client.get("compression.type", client.get("compression.codec", "none"))
        of_codec, now_ms = None if codec == "none" else codec, int(time.time() * 1000)
        self._limits = RecordLimits(topics, largest_message(client), of_codec, now_ms, settings.reserves)
        self._check_place()
        if self._settings.dead_letter_topic is None:
            for batch in batches:
                for record in self._columns.rows(batch).records if self._suspicious(batch) else ():
                    if fault := fault_of(record, self._limits):
                        raise faults.unfit(self._settings.servers, record[0], fault.reason, fault.detail)
        return self

    def rows(self, batch: Any) -> Rows:
        """A batch to be sent, bad records replaced by dead letters."""
        dead = self._settings.dead_letter_topic
        rows = self._columns.rows(batch, any_topic=dead is not None)
        if dead is None:
            return rows
        if (refusals := self._columns.refusals(batch)) is not None:
            self.dead_letters += rows.size
            letters = map(self._letter, repeat(batch), count(), rows.records, refusals)
            return rows._replace(topics=frozenset({dead}), records=chain.from_iterable(letters))
        if not self._suspicious(batch):
            return rows
        sifted = chain.from_iterable(self._sift(batch, at, record) for at, record in enumerate(rows.records))
        return rows._replace(topics=rows.topics.intersection(self._limits.topics) | {dead}, records=sifted)

    def size(self, record: Record) -> int:
        """Bytes of a record as its topic's limit counts them."""
        size = _bytes(record)
        return min(size, _compressed(record, size, self._limits.codec))

    def _check_place(self) -> None:
        """Letters have the keys of their records, or none, and headers that must fit beside a part of them."""
        name, room = self._settings.dead_letter_topic, self._room()
        if name is not None and self._limits.topics[name].compacted:
            code, what = "TL-K71", "is compacted: it keeps one letter a key, and takes none without"
            do = "Set cleanup.policy=delete for it."
        elif name is not None and room < _LEAST_ROOM:
            code, what = "TL-K72", f"takes {room:,} bytes: not every letter fits, not even in parts"
            do = f"Raise its max.message.bytes, or kafka.message.max.bytes, to {_LEAST_ROOM:,} at least."
        else:
            return
        raise KafkaError(code, self._settings.servers, f'the dead-letter topic "{name}" {what}', f"{do} {faults.KEPT}")

    def _topics(self, batch: Any) -> set[str]:
        if self._columns.topic is not None:
            return {self._columns.topic}
        if self._columns.refusals(batch) is not None:
            return set()
        return {name for name in batch.column("topic").unique().to_pylist() if name is not None}

    def _suspicious(self, batch: Any) -> bool:
        """Whether a record of the batch might be bad, by two that have the extremes of its columns."""
        columns = self._columns
        if not batch.num_rows:
            return False
        if columns.topic is None and batch.column("topic").null_count:
            return True
        found = [self._limits.topics.get(name) for name in self._topics(batch)]
        if None in found:
            return True
        facts, size = reduce(TopicFacts.narrowed, filter(None, found), ANY), FRAME + columns.largest(batch)
        key = None if "key" not in columns.present or batch.column("key").null_count else b""
        records = (("", None, key, partition, None, None, at, None) for partition, at in columns.extremes(batch))
        return any(fault for one in records for fault in _faults(one, size, facts, self._limits))

    def _sift(self, batch: Any, at: int, record: Record) -> Iterable[Record]:
        fault = fault_of(record, self._limits)
        if fault is None:
            return (record,)
        self.dead_letters += 1
        return self._letter(batch, at, record, fault)

    def _letter(self, batch: Any, at: int, record: Record, fault: Fault) -> list[Record]:
        """The dead letter of a record, in as many parts as the topic asks for."""
        topic, value, key, partition, _, _, moment, headers = record
        originals, asked = self._columns.originals(batch, at, headers or ()), None if partition == -1 else partition
        dead_letter = DeadLetter(
            fault.reason, topic, key, value, tuple(originals), asked, moment or None, fault.detail, self._source
        )
        name = self._settings.dead_letter_topic
        # The dead letter has the time of now: its own may be what was wrong, and would be refused again.
        return [(name, v, k, -1, None, None, 0, h) for k, v, h in to_records(dead_letter, self._room())]

    def _room(self) -> int:
        facts = self._limits.topics.get(self._settings.dead_letter_topic or "")  # none where nobody has looked
        return min(largest_message(self._settings.client), (facts and facts.max_bytes) or _TOPIC_MAX)


#: (Servers, topic) -> until when it is believed what the topic takes: as Kafka describes it, and as its refusals told.
_facts: Final[dict[tuple[str, str], tuple[float, TopicFacts]]] = {}
_lessons: Final[dict[tuple[str, str], tuple[float, TopicFacts]]] = {}


def facts_of(settings: SinkSettings, names: Iterable[str]) -> dict[str, TopicFacts]:
    """What topics take; asked again after some minutes, and always about one that was not there.

    Raises:
        KafkaError: TL-K01.
    """
    now, places = time.monotonic(), {name: (settings.servers, name) for name in names}
    # An old answer about a topic that is gone now would let its records pass.
    for table in (_facts, _lessons):
        for place in [place for place, (until, _) in table.items() if until < now]:
            del table[place]
    if unknown := [name for name, place in places.items() if place not in _facts]:
        found = KafkaAdmin(settings.client, settings.timeout_s).facts(unknown)
        _facts.update({places[name]: (now + _FRESH_S, facts) for name, facts in found.items()})
    known = {name: _facts[place][1] for name, place in places.items() if place in _facts}
    return {name: facts.narrowed(_learned(places[name])) for name, facts in known.items()}


def _learned(place: tuple[str, str]) -> TopicFacts:
    return _lessons[place][1] if place in _lessons else ANY


def require_topics(settings: SinkSettings, names: Iterable[str]) -> None:
    """See that topics may be written to and exist, by the cluster's whole list: asking by name could create one.

    Raises:
        KafkaError: TL-K06 for one that no row may name; TL-K01 without an answer in time; TL-K04 for missing ones.
    """
    for topic in filter(settings.reserves, names):
        raise faults.unfit(settings.servers, topic, *RESERVED)
    if absent := set(names).difference(facts_of(settings, names)):
        raise faults.missing(settings.servers, absent)


def forget(settings: SinkSettings) -> None:
    """Ask anew next time: Kafka refused something that looked right."""
    for place in [place for place in _facts if place[0] == settings.servers]:
        del _facts[place]


#: Most kinds of fault that one task learns; with more, something else is the matter.
_KINDS: Final = 16
#: Seconds for which it is believed what a refusal told: the topic may have been changed since.
_BELIEVED_S: Final = 3600.0
#: Bytes of a batch that nearly every topic takes, where one that is allowed to be larger was refused.
_SMALL: Final = 16 << 10


def has_learned(settings: SinkSettings) -> bool:
    """Whether this process knows of records that its Kafka refuses."""
    return any(servers == settings.servers for servers, _ in _lessons)


class FailedRecord(NamedTuple):
    """A record that Kafka did not take.

    Attributes:
        topic: Its topic.
        error: librdkafka's.
        lesson: What the topic takes, by those refused that were a request each: one among others may not be to blame.
    """

    topic: str
    error: Any
    lesson: TopicFacts = ANY

    def alone(self, error: Any, message: Any, size: int) -> FailedRecord:
        """With what a report tells on a record of so many bytes that was a request of its own."""
        lesson, ahead = ANY, message.timestamp()[1] - int(time.time() * 1000)
        if faults.means(error, Meaning.SIZE):
            lesson = replace(ANY, max_bytes=size - 1)
        elif faults.name_of(error) == "INVALID_TIMESTAMP":  # clocks go on until it is looked at again
            late = replace(ANY, before_ms=-ahead)
            lesson = replace(ANY, after_ms=max(0, ahead - _CLOCKS_MS)) if ahead > 0 else late
        elif faults.means(error, Meaning.RECORD) and message.key() is None:  # else the reason is the broker's own
            lesson = replace(ANY, policy="compact")
        return self._replace(lesson=self.lesson.narrowed(lesson))


class Lessons:
    """What a task learns from the records that Kafka refuses; from then on it is known in this process."""

    def __init__(self, settings: SinkSettings) -> None:
        self._settings = settings
        self._count = 0
        #: What ends the task if nothing new is learned: no attempt comes after it.
        self._final: KafkaError
        #: What came of a request of many records, of which the next attempt is to tell which it was: it sends them one
        #: a request. librdkafka blames all records of a request alike, but for some of INVALID_RECORD (KIP-467).
        self.unclear: FailedRecord | None = None

    @property
    def large(self) -> bool:
        """Whether something was refused for its size, or that of the others."""
        return self.unclear is not None and faults.means(self.unclear.error, Meaning.SIZE)

    def take(self, problem: AttemptFailed) -> None:
        """Learn from what was refused in an attempt: which records it were, or that this has to be found out.

        Raises:
            KafkaError: The problem, if nothing was refused or nothing new can be learned; TL-K29, too many kinds are.
        """
        if (failed := problem.refused) is None:
            raise problem.final from None
        if self.unclear is not None:
            self.conclude(failed)
        else:
            self._final, self.unclear = problem.final, failed
            if self.large and self._changed(failed.topic):
                self.unclear = None

    def conclude(self, failed: FailedRecord | None = None) -> None:
        """Learn what was unclear, after requests of one record, and what was refused of them; raises as `take`."""
        assert self.unclear is not None, "there was a refusal"
        topic, code = self.unclear.topic, faults.name_of(self.unclear.error)
        place, lesson = (self._settings.servers, topic), ANY if failed is None else failed.lesson
        former, size = _learned(place), lesson.max_bytes
        if size is not None or (self.large and lesson == ANY):
            batch = former.batch_bytes
            if batch is not None:
                batch = max(1, batch // 4)
            elif size is None or size < int(self._settings.client[_BATCH_SIZE]):
                batch = _SMALL
            if size is not None and topic == self._settings.dead_letter_topic:
                size //= 2  # letters are cut to what it takes, so each would be as large as it may
            lesson = replace(lesson, max_bytes=size, batch_bytes=batch)
        self.unclear, now = None, former.narrowed(lesson)
        if now == former:
            raise self._final
        self._count += 1
        if self._count > _KINDS:
            what = f'Kafka refuses records of more than {_KINDS} kinds, the last for topic "{topic}": {code}'
            raise KafkaError("TL-K29", self._settings.servers, what, faults.advice(code))
        _lessons[place] = time.monotonic() + _BELIEVED_S, now

    def _changed(self, topic: str) -> bool:
        """Whether a limit that was compared with is another one by now: it is read anew, and teaches nothing."""
        place = (self._settings.servers, topic)
        former, now = _facts.pop(place, None), facts_of(self._settings, [topic]).get(topic)
        if former is None or now is None:
            return False
        return former[1].narrowed(_learned(place)).max_bytes != now.max_bytes
