"""Check of records before the transaction opens: one record that Kafka refuses would cost the whole batch.

Whole Arrow columns are compared with the limits of the topics first, which costs next to nothing; only a batch that
does not pass is checked record by record. A bad record becomes a dead letter where the sink has a dead-letter topic,
else the task fails and names it, with nothing written.
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
from towline.kafka.admin import NO_LIMITS, KafkaAdmin, TopicLimits, min_limit
from towline.kafka.clientconfig import max_message_bytes
from towline.kafka.deadletters import RECORD_OVERHEAD, DeadLetter, Reason, record_bytes, to_records
from towline.kafka.faults import ErrorKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from towline.kafka.columns import Columns, Record, Rows
    from towline.kafka.options import SinkSettings
    from towline.kafka.producers import AttemptError

_CACHE_S: Final = 300.0  #: Seconds for which described limits of topics are cached.
_BATCH_SIZE: Final = "batch.size"
#: Bytes of a request to a Kafka that needs over a second for a larger one. Five are in flight at a time.
_SLOW_REQUEST_BYTES: Final = 64 << 10
#: Clocks differ: the learned limit is this many ms below a timestamp that was refused for being ahead.
_CLOCK_SKEW_MS: Final = 60_000
#: org.apache.kafka.common.internals.Topic.validate
_LEGAL_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
#: Kafka's default max.message.bytes, for a dead-letter topic whose limit is unknown.
_DEFAULT_MAX_BYTES: Final = 1_048_588
#: Bytes that are enough for a chunk of any dead letter: its headers take some 7,000 at most.
_MIN_CHUNK_BYTES: Final = 8192
_COMPRESSION_MARGIN: Final = 1.1  #: Safety factor of an estimated compressed size.


class RecordFault(NamedTuple):
    """Fault of a record that Kafka would refuse: a reason, and one line of detail."""

    reason: Reason
    detail: str


#: Fault of a record with a reserved topic (`SinkSettings.is_reserved`).
RESERVED_TOPIC_FAULT: Final = RecordFault(Reason.TOPIC_RESERVED, "the topic is reserved: markers, dead letters, Kafka")


class RecordLimits(NamedTuple):
    """Limits that records are compared with.

    Attributes:
        topics: Limits by topic; a topic that is missing here does not exist.
        client_bytes: The client's message.max.bytes.
        codec: Compression as pyarrow names it; None without.
        now_ms: The current time in ms since 1970.
        is_reserved: Whether a topic is reserved; reserved topics are not in ``topics``.
    """

    topics: Mapping[str, TopicLimits]
    client_bytes: int
    codec: str | None
    now_ms: int
    is_reserved: Callable[[str], bool] = lambda _: False


def record_fault(record: Record, limits: RecordLimits) -> RecordFault | None:
    """Return why Kafka would refuse a record, given as arguments of ``produce``; None for a valid record."""
    topic = limits.topics.get(record[0])
    if topic is None:
        return _topic_fault(record[0], limits)
    return next(_record_faults(record, _uncompressed_size(record), topic, limits), None)


def _topic_fault(topic: str | None, limits: RecordLimits) -> RecordFault:
    if topic is None:
        return RecordFault(Reason.TOPIC_ABSENT, "the record has no topic")
    if limits.is_reserved(topic):
        return RESERVED_TOPIC_FAULT
    if not _LEGAL_NAME.fullmatch(topic) or topic in (".", ".."):
        return RecordFault(Reason.TOPIC_ILLEGAL, "Kafka has no topic of that name: 1 to 249 of a-z A-Z 0-9 . _ -")
    return RecordFault(Reason.TOPIC_MISSING, "the topic does not exist, or this user may not see it")


def _record_faults(record: Record, size: int, topic: TopicLimits, limits: RecordLimits) -> Iterator[RecordFault]:
    if not -1 <= record[3] < topic.partitions:
        yield RecordFault(Reason.PARTITION, f"the topic has partitions 0 to {topic.partitions - 1}, not {record[3]}")
    timestamp, ms_ahead = record[6], record[6] - limits.now_ms
    if timestamp < 0:
        yield RecordFault(Reason.TIMESTAMP, f"{timestamp} ms is before 1970")
    if timestamp and topic.max_ahead_ms is not None and ms_ahead > topic.max_ahead_ms:
        yield RecordFault(Reason.TIMESTAMP, f"{timestamp} ms is further ahead than message.timestamp.after.max.ms")
    if timestamp and topic.max_behind_ms is not None and -ms_ahead > topic.max_behind_ms:
        yield RecordFault(Reason.TIMESTAMP, f"{timestamp} ms is further back than message.timestamp.before.max.ms")
    if topic.is_compacted and record[2] is None:
        yield RecordFault(Reason.KEY_ABSENT, "a compacted topic takes no record without a key")
    limit = topic.max_bytes
    if size > limits.client_bytes:
        yield RecordFault(
            Reason.TOO_LARGE, f"{size:,} bytes, the client takes {limits.client_bytes:,} (kafka.message.max.bytes)"
        )
    if limit is not None and size > limit and _compressed_size(record, size, limits.codec) > limit:
        yield RecordFault(
            Reason.TOO_LARGE, f"{size:,} bytes, the topic takes {limit:,} (max.message.bytes, segment.bytes)"
        )


def _compressed_size(record: Record, size: int, codec: str | None) -> int:
    """Return the size that the broker compares with the topic's limit: after compression."""
    if codec is None or not record[1]:
        return size
    compressed_value = pa.compress(record[1], codec=codec, asbytes=True)
    return int(len(compressed_value) * _COMPRESSION_MARGIN) + size - len(record[1])


def _uncompressed_size(record: Record) -> int:
    return record_bytes(record[2], record[1], record[7] or ())


class RecordCheck:
    """Check of one task's batches before they are sent; `source` is named in its dead letters."""

    def __init__(self, settings: SinkSettings, columns: Columns, source: str) -> None:
        self._settings = settings
        self._columns = columns
        self._source = source
        self._limits = RecordLimits({}, 0, None, 0)
        #: Number of rows that `checked_rows` has replaced by dead letters so far.
        self.dead_letters = 0

    def batch_settings(self, rate: float | None = None) -> dict[str, str]:
        """Return producer settings whose batches fit the topics, and take a second at most at `rate`.

        A topic's limit is on the batch, not on the record. `rate` is in bytes/s, None if unknown.
        """
        topic_limits = reduce(TopicLimits.intersect, self._limits.topics.values(), NO_LIMITS)
        batch_size = int(self._settings.client[_BATCH_SIZE])
        slow_limit = _SLOW_REQUEST_BYTES if rate is not None and rate < batch_size else None
        max_bytes = min_limit(topic_limits.batch_bytes, topic_limits.max_bytes, slow_limit)
        return {} if max_bytes is None or batch_size <= max_bytes else {_BATCH_SIZE: str(max_bytes)}

    def check_batches(self, batches: Iterable[Any]) -> Self:
        """Read the limits of the topics of these batches; without a dead-letter topic check every record now.

        Raises:
            KafkaError: TL-K01 no answer; TL-K04, TL-K05 or TL-K06 for a record that can't be written; TL-K71, TL-K72
                for a dead-letter topic that does not keep every dead letter.
        """
        settings, client = self._settings, self._settings.client
        topic_names = {name for batch in batches for name in self._topics(batch) if not settings.is_reserved(name)}
        required_topics = {name for name in (settings.topic, settings.dead_letter_topic) if name}
        topics = topic_limits(settings, topic_names | required_topics)
        if missing := required_topics.difference(topics):
            raise faults.missing_topics_error(settings.servers, missing)
        codec = client.get("compression.type", client.get("compression.codec", "none"))
        pyarrow_codec, now_ms = None if codec == "none" else codec, int(time.time() * 1000)
        self._limits = RecordLimits(topics, max_message_bytes(client), pyarrow_codec, now_ms, settings.is_reserved)
        self._check_dead_letter_topic()
        if self._settings.dead_letter_topic is None:
            for batch in batches:
                for record in self._columns.rows(batch).records if self._may_have_faults(batch) else ():
                    if fault := record_fault(record, self._limits):
                        raise faults.bad_record_error(self._settings.servers, record[0], fault.reason, fault.detail)
        return self

    def check_batch(self, batch: Any) -> Any:
        """Check one batch as `check_batches`, and return it."""
        self.check_batches([batch])
        return batch

    def checked_rows(self, batch: Any) -> Rows:
        """Return the rows of a batch to send, bad records replaced by dead letters."""
        dlq = self._settings.dead_letter_topic
        rows = self._columns.rows(batch, any_topic=dlq is not None)
        if dlq is None:
            return rows
        if (faults := self._columns.row_faults(batch)) is not None:
            self.dead_letters += rows.size
            letter_records = map(self._dead_letter_records, repeat(batch), count(), rows.records, faults)
            return rows._replace(topics=frozenset({dlq}), records=chain.from_iterable(letter_records))
        if not self._may_have_faults(batch):
            return rows
        records = chain.from_iterable(map(self._replace_if_faulty, repeat(batch), count(), rows.records))
        return rows._replace(topics=rows.topics.intersection(self._limits.topics) | {dlq}, records=records)

    def record_size(self, record: Record) -> int:
        """Return the bytes of a record as its topic's limit counts them."""
        size = _uncompressed_size(record)
        return min(size, _compressed_size(record, size, self._limits.codec))

    def _check_dead_letter_topic(self) -> None:
        """Check that the dead-letter topic is not compacted (TL-K71), and that a chunk fits (TL-K72)."""
        name, max_bytes = self._settings.dead_letter_topic, self._letter_bytes()
        if name is not None and self._limits.topics[name].is_compacted:
            code, problem = "TL-K71", "is compacted: it keeps one letter per key, and refuses letters without a key"
            remedy = "Set cleanup.policy=delete for it."
        elif name is not None and max_bytes < _MIN_CHUNK_BYTES:
            code, problem = "TL-K72", f"takes {max_bytes:,} bytes: not every letter fits, not even in chunks"
            remedy = f"Raise its max.message.bytes, or kafka.message.max.bytes, to {_MIN_CHUNK_BYTES:,} at least."
        else:
            return
        problem, remedy = f'the dead-letter topic "{name}" {problem}', f"{remedy} {faults.NOT_COMMITTED}"
        raise KafkaError(code, self._settings.servers, problem, remedy)

    def _topics(self, batch: Any) -> set[str]:
        if self._columns.topic is not None:
            return {self._columns.topic}
        if self._columns.row_faults(batch) is not None:
            return set()
        return {name for name in batch.column("topic").unique().to_pylist() if name is not None}

    def _may_have_faults(self, batch: Any) -> bool:
        """Return whether a record of the batch might be bad: checks two records with the extreme column values."""
        columns = self._columns
        if not batch.num_rows:
            return False
        if columns.topic is None and batch.column("topic").null_count:
            return True
        topic_limits = [self._limits.topics.get(name) for name in self._topics(batch)]
        if None in topic_limits:
            return True
        combined_limits, size = (
            reduce(TopicLimits.intersect, filter(None, topic_limits), NO_LIMITS),
            RECORD_OVERHEAD + columns.max_record_bytes(batch),
        )
        key = None if "key" not in columns.written_columns or batch.column("key").null_count else b""
        records = (("", None, key, part, None, None, at, None) for part, at in columns.extreme_values(batch))
        return any(fault for record in records for fault in _record_faults(record, size, combined_limits, self._limits))

    def _replace_if_faulty(self, batch: Any, row: int, record: Record) -> Iterable[Record]:
        fault = record_fault(record, self._limits)
        if fault is None:
            return (record,)
        self.dead_letters += 1
        return self._dead_letter_records(batch, row, record, fault)

    def _dead_letter_records(self, batch: Any, row: int, record: Record, fault: RecordFault) -> list[Record]:
        """Return the dead letter of a record, in as many chunks as the topic's limit requires."""
        topic, _, key, partition, _, _, timestamp, _ = record
        value, originals = self._columns.original(batch, row, record)
        to_partition = None if partition == -1 else partition
        when = timestamp or None
        letter = DeadLetter(
            fault.reason, topic, key, value, tuple(originals), to_partition, when, fault.detail, self._source
        )
        name = self._settings.dead_letter_topic
        # The dead letter has the current time: its original timestamp may be the fault, and would be refused again.
        return [(name, v, k, -1, None, None, 0, h) for k, v, h in to_records(letter, self._letter_bytes())]

    def _letter_bytes(self) -> int:
        topic_limits = self._limits.topics.get(self._settings.dead_letter_topic or "")  # unknown before `check_batches`
        topic_bytes = (topic_limits and topic_limits.max_bytes) or _DEFAULT_MAX_BYTES
        return min(max_message_bytes(self._settings.client), topic_bytes)


#: (Servers, topic) -> expiry and limits: as Kafka describes them, and as learned from refused records.
_described_limits: Final[dict[tuple[str, str], tuple[float, TopicLimits]]] = {}
_learned_limits: Final[dict[tuple[str, str], tuple[float, TopicLimits]]] = {}


def topic_limits(settings: SinkSettings, names: Iterable[str]) -> dict[str, TopicLimits]:
    """Return the limits of topics, cached for 5 minutes; a topic that did not exist is always looked up again.

    Raises:
        KafkaError: TL-K01.
    """
    now, keys = time.monotonic(), {name: (settings.servers, name) for name in names}
    # Outdated limits of a deleted topic would let its records pass.
    for table in (_described_limits, _learned_limits):
        for key in [key for key, (expires_at, _) in table.items() if expires_at < now]:
            del table[key]
    if uncached_topics := [name for name, key in keys.items() if key not in _described_limits]:
        new_limits = KafkaAdmin(settings.client, settings.timeout_s).topic_limits(uncached_topics)
        _described_limits.update({keys[name]: (now + _CACHE_S, limits) for name, limits in new_limits.items()})
    cached = {name: _described_limits[key][1] for name, key in keys.items() if key in _described_limits}
    return {name: limits.intersect(_learned_limits_of(keys[name])) for name, limits in cached.items()}


def _learned_limits_of(key: tuple[str, str]) -> TopicLimits:
    return _learned_limits[key][1] if key in _learned_limits else NO_LIMITS


def require_topics(settings: SinkSettings, names: Iterable[str]) -> None:
    """Check that topics exist and are not reserved, in the cluster's whole list: a request by name could create one.

    Raises:
        KafkaError: TL-K06 for a reserved topic; TL-K01 without an answer in time; TL-K04 for missing ones.
    """
    for topic in filter(settings.is_reserved, names):
        raise faults.bad_record_error(settings.servers, topic, *RESERVED_TOPIC_FAULT)
    if missing := set(names).difference(topic_limits(settings, names)):
        raise faults.missing_topics_error(settings.servers, missing)


def forget_limits(settings: SinkSettings) -> None:
    """Drop the cached limits of this Kafka, after it refused a record that passed the check."""
    for key in [key for key in _described_limits if key[0] == settings.servers]:
        del _described_limits[key]


_MAX_KINDS: Final = 16  #: Refusals that one task learns from at most; more have another cause.
_LEARNED_CACHE_S: Final = 3600.0  #: Seconds for which learned limits are cached: the topic may have been changed since.
#: Batch size in bytes that nearly every topic takes, after it refused a larger batch within its limit.
_SMALL_BATCH_BYTES: Final = 16 << 10


class FailedRecord(NamedTuple):
    """Record that Kafka did not take.

    Attributes:
        topic: Its topic.
        error: Its librdkafka error.
        limits: Limits of the topic learned from refused records that were a request each; in a larger request another
            record may be the cause.
    """

    topic: str
    error: Any
    limits: TopicLimits = NO_LIMITS

    def learn_limits(self, error: Any, message: Any, size: int) -> FailedRecord:
        """Add the limits learned from a delivery report on a record of `size` bytes that was a request of its own."""
        limits, ms_ahead = NO_LIMITS, message.timestamp()[1] - int(time.time() * 1000)
        if faults.is_kind(error, ErrorKind.TOO_LARGE):
            limits = replace(NO_LIMITS, max_bytes=size - 1)
        elif faults.error_name(error) == "INVALID_TIMESTAMP":  # clocks go on until the next check
            if ms_ahead > 0:
                limits = replace(NO_LIMITS, max_ahead_ms=max(0, ms_ahead - _CLOCK_SKEW_MS))
            else:
                limits = replace(NO_LIMITS, max_behind_ms=-ms_ahead)
        # Of a record with a key a rule of the broker is the cause.
        elif faults.is_kind(error, ErrorKind.INVALID_RECORD) and message.key() is None:
            limits = replace(NO_LIMITS, cleanup_policy="compact")
        return self._replace(limits=self.limits.intersect(limits))


class RefusalLearner:
    """Learner of topic limits from a task's refused records; the limits are kept for the whole process."""

    def __init__(self, settings: SinkSettings) -> None:
        self._settings = settings
        self._refusal_kinds = 0
        #: Error to raise if nothing new is learned.
        self._final_error: KafkaError
        #: Refusal of a request with many records. The next attempt sends one record per request to find the bad one:
        #: librdkafka reports all records of a request alike, but for some of INVALID_RECORD (KIP-467).
        self.refusal: FailedRecord | None = None

    @property
    def is_size_refusal(self) -> bool:
        """True if a record was refused for its size, or for the size of the whole request."""
        return self.refusal is not None and faults.is_kind(self.refusal.error, ErrorKind.TOO_LARGE)

    def learn(self, error: AttemptError) -> None:
        """Learn from the refused record of a failed attempt, or note that the next attempt must find the record.

        Raises:
            KafkaError: The final error, if no record was refused or nothing new was learned; TL-K29, too many kinds.
        """
        if (failed_record := error.refusal) is None:
            raise error.final_error from None
        if self.refusal is not None:
            self.resolve_refusal(failed_record)
        else:
            self._final_error, self.refusal = error.final_error, failed_record
            if self.is_size_refusal and self._limits_changed(failed_record.topic):
                self.refusal = None

    def resolve_refusal(self, failed_record: FailedRecord | None = None) -> None:
        """Learn from the requests of one record each, and the record refused among them, if any; raises as `learn`."""
        assert self.refusal is not None, "there was a refusal"
        topic, code = self.refusal.topic, faults.error_name(self.refusal.error)
        key = self._settings.servers, topic
        record_limits = NO_LIMITS if failed_record is None else failed_record.limits
        known_limits, max_bytes = _learned_limits_of(key), record_limits.max_bytes
        if max_bytes is not None or (self.is_size_refusal and record_limits == NO_LIMITS):
            batch_bytes = known_limits.batch_bytes
            if batch_bytes is not None:
                batch_bytes = max(1, batch_bytes // 4)
            elif max_bytes is None or max_bytes < int(self._settings.client[_BATCH_SIZE]):
                batch_bytes = _SMALL_BATCH_BYTES
            if max_bytes is not None and topic == self._settings.dead_letter_topic:
                max_bytes //= 2  # letters are cut to this size, so each would be as large as allowed
            record_limits = replace(record_limits, max_bytes=max_bytes, batch_bytes=batch_bytes)
        self.refusal, new_limits = None, known_limits.intersect(record_limits)
        if new_limits == known_limits:
            raise self._final_error
        self._refusal_kinds += 1
        if self._refusal_kinds > _MAX_KINDS:
            problem = f'Kafka refuses records of more than {_MAX_KINDS} kinds, the last for topic "{topic}": {code}'
            raise KafkaError("TL-K29", self._settings.servers, problem, faults.remedy_for(code))
        _learned_limits[key] = time.monotonic() + _LEARNED_CACHE_S, new_limits

    def _limits_changed(self, topic: str) -> bool:
        """Return whether the size limit of a topic has changed since it was cached; reads it again."""
        key = (self._settings.servers, topic)
        old_entry, new_limits = _described_limits.pop(key, None), topic_limits(self._settings, [topic]).get(topic)
        if old_entry is None or new_limits is None:
            return False
        return old_entry[1].intersect(_learned_limits_of(key)).max_bytes != new_limits.max_bytes
