"""What each guarantee does with the rows of a task: one strategy class each, the same records and the same client.

A strategy sees one task: its identity and an iterator of Arrow batches. It returns what became of them, or raises, in
which case Spark does not commit the batch and runs it again.

Exactly once: records and a marker in one transaction, and a batch whose marker is there is skipped [I9]. The steps are
those of docs/exactly-once.md#the-algorithm. That the marker is read after `init_transactions`, which commits or aborts
what older producers have open, makes a crash at any step harmless.
"""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from towline.checkpoint import Checkpoint
from towline.errors import KafkaError, TowlineError
from towline.kafka import faults, producers, screening
from towline.kafka.admin import KafkaAdmin, keep_ids, kept_ids, remade
from towline.kafka.columns import Rows
from towline.kafka.faults import KEPT, Meaning
from towline.kafka.markers import ANYONE, BEFORE_FIRST, Marker, Situation, TaskRefusal, situation
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import FORMAT
from towline.kafka.producers import AttemptFailed, Transactional
from towline.kafka.screening import Lessons, RecordCheck, has_learned, require_topics
from towline.sinks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from towline.kafka.columns import Columns, Record
    from towline.kafka.markers import MarkerStep
    from towline.kafka.options import SinkSettings

#: Producers one task may use up on errors that pass; then the task fails, and Spark decides.
_TRIES: Final = 3
#: Seconds a stopping query waits for Kafka to end its producers.
_FENCE_S: Final = 3.0
#: Seconds that the driver waits for Kafka's list of topics.
_LOOK_S: Final = 2.0
#: Note in a checkpoint: the id of the topic of its markers.
_MARKERS: Final = "towline.markers"


@dataclass(frozen=True)
class BatchOrigin:
    """What the driver knows when it hands out a batch; travels to the tasks.

    Attributes:
        job: Names a batch query, the same for all attempts of its tasks; None for a stream.
        newest: The newest batch in the checkpoint's offset log; None where the checkpoint is not local.
        hashes: SHA-256 of the offset log's entries, of that batch and the one before it.
        rate: Bytes a second that Kafka took of the batch before, 0 if that failed; None where that is not known.
    """

    job: str | None = None
    newest: int | None = None
    hashes: Mapping[int, str] = field(default_factory=dict)
    rate: float | None = None


@dataclass(frozen=True)
class Delivered:
    """What became of a task's rows.

    Attributes:
        rows: Rows that reached Kafka where they belong; with acks=0, that were handed to the network.
        bytes: Bytes of keys and values of all rows seen; 0 if skipped.
        lost: Rows given up; always 0 but for at_most_once.
        why: Why rows were given up, in a few words.
        dead_lettered: Rows that became dead letters, by whoever made the row or because Kafka would refuse it.
        skipped: The batch was in Kafka already; the numbers are those of then.
        seconds: How long it was written, from the first record to Kafka's last answer; None where none is waited for.
        by_hand: It was skipped because a marker says so that a person set: nobody counted its rows.
        marks: What its markers said before and say after it; None without.
    """

    rows: int
    bytes: int
    lost: int = 0
    why: str = ""
    dead_lettered: int = 0
    skipped: bool = False
    seconds: float | None = field(default=None, compare=False)
    by_hand: bool = False
    marks: MarkerStep | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Delivery(ABC):
    """How the rows of one task reach Kafka, in columns bound to the query's schema; picklable, made on the driver."""

    settings: SinkSettings
    columns: Columns
    origin: BatchOrigin = BatchOrigin()

    @abstractmethod
    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:
        """Write ``pyarrow.RecordBatch``es.

        Raises:
            KafkaError: The rows are not safely in Kafka; the task must fail.
            ConfigError: A secret can't be read here.
        """


class AtLeastOnce(Delivery):
    """Idempotent producer, acks=all, and no success before every record is confirmed."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:  # noqa: ARG002 - who writes is all one here
        """Write and wait; any record without confirmation fails the task (TL-K02, TL-K03, TL-K29).

        No record has a time of its own: what Kafka takes slowly is waited for as long as it takes anything. Rows among
        which it refuses one are written again with what that tells, as far as they are at hand.
        """
        copies = _Copies(batches, self.settings.spool_memory)
        lessons = Lessons(self.settings)
        if self.settings.dead_letter_topic is None and has_learned(self.settings):
            copies.complete()
        while True:
            screen = RecordCheck(self.settings, self.columns, self.settings.sink_id or "")
            rows = iter(copies)
            first = [*islice(rows, 1)]
            screen.look(copies.batches or first)  # all that are at hand, before any is written
            fitting = screen.fitting(self.origin.rate) if lessons.unclear is None else {"batch.num.messages": "1"}
            settings = replace(self.settings, client={**self.settings.client, "message.timeout.ms": "0", **fitting})
            try:
                with producers.borrowed(settings) as client:
                    return self._write(client, screen, chain(first, rows), lessons)
            except AttemptFailed as problem:
                lessons.take(problem)
                if not copies.complete():
                    raise problem.final from None

    def _write(
        self, client: producers.KafkaProducer, screen: RecordCheck, batches: Iterable[Any], lessons: Lessons
    ) -> Delivered:
        rows = size = 0
        begun = time.perf_counter()
        try:
            for batch in batches:
                screen.look([batch])
                converted = screen.rows(batch)
                rows += converted.size
                size += converted.bytes
                if (unclear := lessons.unclear) is not None:
                    alone = client.alone(converted.records, unclear.topic, screen.size)
                    converted = converted._replace(records=alone)
                client.send(converted)
                if client.failures and lessons.unclear is None:
                    break
            left = client.flush(self.settings.timeout_s)
        except producers.QueueStuck:
            left = client.pending
        except faults.FOREIGN as problem:
            raise AttemptFailed(faults.gave_up(self.settings.servers, problem), client.refused) from None
        if lost := left + client.failures:
            raise AttemptFailed(self._undelivered(client, lost, rows), client.refused)
        if lessons.unclear is not None:  # each alone was taken
            lessons.conclude()
        dead = screen.dead_letters
        return Delivered(rows - dead, size, dead_lettered=dead, seconds=time.perf_counter() - begun)

    def _undelivered(self, client: producers.KafkaProducer, lost: int, rows: int) -> KafkaError:
        """TL-K02: Kafka did not confirm records in time; TL-K03: it refused them."""
        failed, why = client.failed, client.last.why
        if failed is None or faults.means(failed.error, Meaning.TIMEOUT):
            within = f"within {self.settings.timeout_s:g} s{why and f': {why}'}"
            what = f"Kafka did not take {lost:,} of {rows:,} records {within}"
            return KafkaError("TL-K02", self.settings.servers, what, f"Is it up and reachable? {KEPT}")
        why = f'the first for topic "{failed.topic}": {faults.reason(failed.error)}'
        what = f"Kafka refused {lost:,} of {rows:,} records, {why}"
        return KafkaError("TL-K03", self.settings.servers, what, faults.advice(faults.name_of(failed.error)))


class _Copies:
    """Rows as they come, and again as long as there is room for all of them."""

    def __init__(self, batches: Iterable[Any], room: int) -> None:
        self._rest = iter(batches)
        #: Bytes that more rows may have; below 0 there is no room.
        self._room = room
        self.batches: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from [*self.batches]
        for batch in self._rest:
            self._keep(batch)
            if self._room < 0:
                self.batches.clear()
            yield batch

    def _keep(self, batch: Any) -> None:
        self._room -= batch.nbytes
        self.batches.append(batch)

    def complete(self) -> bool:
        """Read the rest, as far as there is room; whether all rows are at hand."""
        while self._room >= 0:
            if (batch := next(self._rest, None)) is None:
                return True
            self._keep(batch)
        return False


class AtMostOnce(Delivery):
    """acks=0, nothing sent twice: a repeated attempt writes nothing, and Kafka's silence costs rows, not time."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:
        """Write what can be written now; the rest is counted as lost."""
        if task.attempt > 0:
            return _count(batches, f"attempt {task.attempt + 1} of a task writes nothing")
        rows = size = sent = 0
        remaining = iter(batches)
        why, screen = "", RecordCheck(self.settings, self.columns, self.settings.sink_id or "")
        with producers.borrowed(self.settings) as client:
            try:
                for batch in remaining:
                    refused = self.columns.refusals(batch) is not None
                    converted = screen.rows(batch) if refused else self.columns.rows(batch)
                    rows, size = rows + converted.size, size + converted.bytes
                    require_topics(self.settings, converted.topics)
                    client.send(converted)
                    sent = rows
                client.flush(self.settings.timeout_s)
            except (KafkaError, producers.QueueStuck, *faults.FOREIGN) as problem:
                if isinstance(problem, KafkaError) and problem.code not in faults.SILENCE:
                    raise
                why = problem.what if isinstance(problem, KafkaError) else faults.reason(problem)
            rest = _count(remaining)
            reached = max(0, sent - client.pending - client.failures)
            if lost := rows + rest.lost - reached:
                client.healthy, failed = False, client.failed
                why = why or ("Kafka did not take them in time" if failed is None else faults.reason(failed.error))
        dead = min(screen.dead_letters, reached)
        return Delivered(reached - dead, size + rest.bytes, lost, why, dead)


def _count(batches: Iterable[Any], why: str = "") -> Delivered:
    """Read rows to the end without writing them."""
    rows = size = 0
    for batch in batches:
        rows, size = rows + batch.num_rows, size + batch.nbytes
    return Delivered(0, size, rows, why)


class ExactlyOnce(Delivery):
    """One transaction for each batch and partition, with its marker."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> Delivered:
        """Write a partition of a batch, or find that it is written.

        Raises:
            KafkaError: TL-K01 no answer; TL-K04 to K06 what can't be written; TL-K10 to K18 marker and checkpoint do
                not belong together; TL-K19 fenced; TL-K20 aborted; TL-K21 undecided; TL-K23 to K25 the surroundings;
                TL-K28 Kafka is too slow; TL-K29 it refuses records of too many kinds.
            ConfigError: A secret can't be read here.
        """
        newest = self.origin.newest
        if task.batch is not None and newest is not None and newest != task.batch:
            what = f"Spark runs batch {task.batch}, but the newest batch in the checkpoint's offset log is {newest}"
            do = "Two queries on one checkpoint? Asynchronous progress tracking can't be exactly once: switch it off."
            raise KafkaError("TL-K24", FORMAT, what, do)
        store = MarkerStore(self.settings, self.settings.sink_id or task.query or self.origin.job or FORMAT)
        if task.partition >= self.settings.parallelism and task.batch is not None:
            raise self._refuse(task, store)
        # A batch query has a job; its id keeps two queries of one sink apart, and lets attempts of a task fence.
        name = f"{store.sink_id}.{self.origin.job}" if task.batch is None else store.sink_id
        # As far as it is known before the rows are: of what their topics take, nothing.
        requests = RecordCheck(self.settings, self.columns, "").fitting(self.origin.rate)
        starting = producers.Starting(self.settings, self.settings.transactional_id(name, task.partition), requests)
        with closing(starting), Spool(self.settings.spool_memory, self.settings.spool_disk) as spool:
            spool.fill(batches)
            return _Batch(self, task, store, spool, starting, Lessons(self.settings), self.origin.rate).persist()

    def _refuse(self, task: Task, store: MarkerStore) -> KafkaError:
        """A task too many: leave word, so that what partition 0 writes of this batch is never taken for all of it."""
        first, batch = replace(task, partition=0), task.batch or 0
        store.ensure()

        def revised(before: Marker | None) -> Marker:
            marker = before or Marker(BEFORE_FIRST, self.settings.parallelism, writer=task.query or ANYONE)
            marker = replace(marker, refused=TaskRefusal(batch, task.run, task.partition))
            found = situation(before, first, self.settings.parallelism, self.origin.hashes)
            if found not in {Situation.WRITE, Situation.DONE}:  # then the marker already stops every task
                raise store.mismatch(found, marker, first)
            return marker

        marker = store.rewrite(0, revised)
        found = Situation.TORN if marker and marker.batch == batch else Situation.REFUSED
        return store.mismatch(found, marker, first)

    def fence(self, query: str | None) -> None:
        """End open transactions of this sink's tasks, dead or alive; never raises, and gives up soon."""
        sink_id = self.settings.sink_id or query
        if sink_id is None:
            return
        patience = replace(self.settings, timeout_s=min(self.settings.timeout_s, _FENCE_S))
        for partition in range(self.settings.parallelism):
            try:
                Transactional(patience, self.settings.transactional_id(sink_id, partition)).close()
            except TowlineError:
                return  # Kafka is away: the time-out of the transaction ends it


@dataclass
class _Batch:
    """The rows of one task on their way into Kafka: attempt after attempt, each with a producer of its own.

    `rate` is how many bytes Kafka took in a second; None where nobody has seen it.
    """

    sink: ExactlyOnce
    task: Task
    store: MarkerStore
    spool: Spool
    starting: producers.Starting
    lessons: Lessons
    rate: float | None

    def persist(self) -> Delivered:
        """Write, as long as errors are of the kind that passes."""
        tries_left = _TRIES
        while True:
            try:
                return self._attempt()
            except AttemptFailed as problem:
                if problem.refused is not None:
                    self.lessons.take(problem)
                    continue
                tries_left -= problem.rate is None
                if not tries_left or (problem.rate is not None and not self._slowed(problem.rate)):
                    raise problem.final from None
                screening.forget(self.sink.settings)

    def _slowed(self, rate: float) -> bool:
        """Whether a batch that Kafka took too slowly gets more time."""
        before = self._longer()
        self.rate = min(rate, self.rate or rate) / 2  # a quota lets a burst pass first, so it may be less
        return self._longer() != before

    def _attempt(self) -> Delivered:
        if self.lessons.unclear is not None:
            self._probe(self._looked())
        screen, task = self._looked(), self.task
        if task.batch is not None:
            self.store.ensure()
        producer = self._producer(screen)
        try:
            if task.batch is None:  # a batch query: nothing can be skipped
                return self._write(producer, screen, None)
            marker = self.store.read(task.partition)
            found = situation(marker, task, self.sink.settings.parallelism, self.sink.origin.hashes)
            return self._write(producer, screen, marker) if found is Situation.WRITE else self._skip(found, marker)
        except BaseException:
            # Also for KeyboardInterrupt and a stopped query: an open transaction would hold back every reader.
            producer.close()
            raise

    def _looked(self) -> RecordCheck:
        return RecordCheck(self.sink.settings, self.sink.columns, self.store.sink_id).look(self.spool)

    def _longer(self, most: int | None = None) -> dict[str, str]:
        longest = self.store.cluster.longest_transaction_ms if most is None else lambda: most
        return producers.clock(self.sink.settings, self.spool.size, self.rate, longest)

    def _producer(self, screen: RecordCheck) -> Transactional:
        most: int | None = None
        while True:
            longer = self._longer(most)
            try:
                return self.starting.take({**screen.fitting(self.rate), **longer})
            except KafkaError as problem:
                if not longer or problem.code != "TL-K20":
                    raise
                most = int(longer[producers.MESSAGE_TIMEOUT]) // 2  # the cluster allows no longer one

    def _probe(self, screen: RecordCheck) -> None:
        """Send the unclear topic one record a request, up to the first that it refuses; nothing is committed.

        In one partition, so that they go in order: of too large ones the smallest comes first, else those without key.
        """
        assert self.lessons.unclear is not None, "there was a refusal"
        topic = self.lessons.unclear.topic

        def records(*, keyed: bool) -> Iterator[Record]:
            rows = (one for batch in self.spool for one in screen.rows(batch).records if one[0] == topic)
            return ((*one[:3], 0, *one[4:]) for one in rows if (one[2] is not None) is keyed)

        ordered: Iterable[Record] = chain(records(keyed=False), records(keyed=True))
        if self.lessons.large:
            sized = {screen.size(one): one for one in ordered}
            ordered = map(sized.__getitem__, sorted(sized))
        producer = self.starting.take({**screen.fitting(self.rate), "batch.num.messages": "1"})
        try:
            producer.begin()
            with suppress(AttemptFailed, *faults.FOREIGN):  # from the first refusal on
                producer.write(Rows(0, 0, frozenset({topic}), producer.alone(ordered, topic, screen.size)))
                producer.flush(self.sink.settings.timeout_s, to_failure=True)
            self.lessons.conclude(producer.refused)
        finally:
            producer.close()

    def _skip(self, found: Situation, marker: Marker | None) -> Delivered:
        """The batch is in Kafka: say what was written then; TL-K10 to TL-K18 where it can't be told."""
        if found is not Situation.DONE or marker is None:
            raise self.store.mismatch(found, marker, self.task)
        # `situation` has found the two hashes equal if both are there.
        same_offsets = marker.offsets is not None and marker.batch in self.sink.origin.hashes
        by_hand, spool = marker.writer == ANYONE, self.spool  # a person's stands for rows that nobody counted
        if self.sink.settings.verifies(same_offsets=same_offsets) and not by_hand:
            crc = marker.crc  # none where its writer had no use for one
            if spool.rows != marker.rows or (crc is not None and crc != spool.crc()):
                raise self.store.changed(marker, spool.rows, self.task)
        done, dead, marks = marker.rows - marker.dead_lettered, marker.dead_lettered, marker.step(known=not by_hand)
        return Delivered(done, 0, dead_lettered=dead, skipped=True, by_hand=by_hand, marks=marks)

    def _write(self, producer: Transactional, screen: RecordCheck, before: Marker | None) -> Delivered:
        rows = size = 0
        task, hashes, marks = self.task, self.sink.origin.hashes, None
        # The checksum is for a replay to be compared with; it is taken before the transaction is open.
        compared = task.batch is not None and self.sink.settings.verifies(same_offsets=task.batch in hashes)
        crc = self.spool.crc() if compared else None
        begun = time.perf_counter()
        producer.begin()
        for batch in self.spool:
            converted = screen.rows(batch)
            producer.write(converted)
            rows, size = rows + converted.size, size + converted.bytes
        dead = screen.dead_letters
        if task.batch is not None:
            parallelism, writer, offsets = self.sink.settings.parallelism, task.query or ANYONE, hashes.get(task.batch)
            marker = Marker(task.batch, parallelism, rows, crc, writer, offsets, dead).following(before)
            producer.mark(self.store.topic, task.partition, self.store.key(task.partition), marker)
            marks = marker.step(known=before is not None and before.writer != ANYONE)
        producer.commit()
        took = time.perf_counter() - begun
        return Delivered(rows - dead, size, dead_lettered=dead, seconds=took, marks=marks)


def delivery_for(settings: SinkSettings, columns: Columns, origin: BatchOrigin = BatchOrigin()) -> Delivery:
    """The strategy of the sink's guarantee, with the columns bound to the query's schema."""
    if settings.guarantee == "exactly_once":
        return ExactlyOnce(settings, columns, origin)
    return (AtLeastOnce if settings.guarantee == "at_least_once" else AtMostOnce)(settings, columns, origin)


# -- before the tasks of a batch, on the driver --


def require_named_topics(settings: SinkSettings) -> None:
    """See that the topics that are always written to are there, before a task or a row asks.

    Raises:
        KafkaError: TL-K04. No answer is no reason: the tasks wait longer for Kafka, and tell it.
    """
    named = {name for name in (settings.topic, settings.dead_letter_topic) if name}
    try:
        require_topics(replace(settings, timeout_s=_LOOK_S), named)
    except KafkaError as problem:
        if problem.code == "TL-K04":
            raise


def batch_origin(settings: SinkSettings, location: str) -> BatchOrigin:
    """Sync the query's checkpoint, and learn which batch is about to run.

    Raises:
        JournalError: TL-J20, the checkpoint can't be made durable.
        KafkaError: Before a first batch: TL-K10 the marker topic was made anew; TL-K13 the markers are another query's;
            TL-K22 they can't be read.
    """
    checkpoint = Checkpoint(location)
    checkpoint.sync()
    newest = checkpoint.last_offsets_batch()
    if newest is None:
        return BatchOrigin()
    sink_id = settings.sink_id or checkpoint.query
    if sink_id and newest == 0 and checkpoint.last_commit_batch() is None:
        _check_first_batch(settings, MarkerStore(settings, sink_id), checkpoint)
    batches = (newest - 1, newest)
    return BatchOrigin(newest=newest, hashes={one: text for one in batches if (text := checkpoint.offsets_hash(one))})


def _check_first_batch(settings: SinkSettings, store: MarkerStore, checkpoint: Checkpoint) -> None:
    """Check the markers before any task of batch 0: none is another query's, and their topic is not made anew [I17].

    The marker of one partition may say less than that of another: a task that looks at its own would write its part.
    """
    try:
        store.ensure()
        now, markers = KafkaAdmin(settings.client).ids([store.topic]), store.read_all()
    except KafkaError as problem:
        if problem.code not in faults.SILENCE:  # then the tasks wait longer for Kafka, and tell it
            raise
        return
    for partition, marker in markers.items():
        task = Task(partition, batch=0, query=checkpoint.query)
        # The query is unknown where no disk of ours has its checkpoint.
        if checkpoint.query and situation(marker, task, settings.parallelism, {}) is Situation.FOREIGN:
            raise store.mismatch(Situation.FOREIGN, marker, task)
    if remade(kept_ids(checkpoint, _MARKERS), now) and not any(markers.values()):
        raise store.mismatch(Situation.MISSING, None, Task(0, batch=0))
    keep_ids(checkpoint, now, _MARKERS)


# -- rows of a task, kept until the transaction opens --

# The clock of ``transaction.timeout.ms`` starts with the first record of a transaction, and an open transaction holds
# back every read_committed consumer. So upstream finishes first; a slow query never has an open transaction.


def checksum(batch: Any) -> int:
    """Sum of the rows' checksums, each a CRC32C over topic, key and then value; null counts as empty.

    Other columns are left out: the sum tells whether a replay brings other messages, and has to be cheap
    (some 0.3 us a row). So they are joined in C: one object and one call a row instead of three.
    """
    parts = [_bytes(batch.column(name)) for name in ("topic", "key", "value") if name in batch.schema.names]
    joined = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    return sum(map(crc32c, joined.to_pylist()))


def _bytes(column: Any) -> Any:
    # Large: key and value of a batch together may be more than the 2 GiB that 32-bit offsets can tell.
    binary = column.cast(pa.large_binary())
    return binary.fill_null(b"") if binary.null_count else binary


class Spool:
    """Arrow batches of one task, in memory, then in an unnamed file, to be read again and again; a context manager.

    Args:
        memory: Bytes kept in memory; what comes after goes to the disk.
        disk: Bytes taken on the disk at most; None for what it holds. A batch that is planned does not shrink, so a
            limit that it exceeds stops the query until the limit is raised.
        create: Makes the file; without it the rows are on the disk for this object alone.
    """

    def __init__(self, memory: int, disk: int | None, create: Callable[[], Any] | None = None) -> None:
        self._memory = memory
        self._disk = disk
        # Spark's workers have their temporary directory in TMPDIR; the file vanishes with the process.
        self._create = create or partial(tempfile.TemporaryFile, prefix="towline-")
        self._kept: list[Any] = []
        self._file: Any = None
        self._writer: Any = None
        #: Rows taken.
        self.rows = 0
        #: Bytes in memory and on the disk; in_memory <= memory, on_disk <= disk.
        self.in_memory = self.on_disk = 0

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.in_memory + self.on_disk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        for opened in (self._writer, self._file):
            if opened is not None:
                with suppress(OSError):  # what was not written is not wanted any more
                    opened.close()

    def fill(self, batches: Iterable[Any]) -> None:
        """Take all batches; upstream has finished when this returns.

        Raises:
            KafkaError: TL-K23, the disk is full or the limit is reached.
        """
        for batch in batches:
            self.rows += batch.num_rows
            if self._file is None and self.in_memory + batch.nbytes <= self._memory:
                self._kept.append(batch)
                self.in_memory += batch.nbytes
                continue
            self.on_disk += batch.nbytes
            if self._disk is not None and self.on_disk > self._disk:
                why = f"a batch needs more than {self._disk:,} bytes there"
                raise _full(why, "Raise spoolDiskBytes, or leave it out")
            with _disk_errors():
                self._write(batch)
        if self._writer is not None:
            with _disk_errors():
                self._writer.close()
                self._file.flush()
            self._writer = None

    def crc(self) -> int:
        """The sum over all rows of their `checksum`, modulo 2**64: the same for the same rows in any order.

        It costs 0.3 us a row and is taken when it is asked for: most batches are never compared.
        """
        return sum(map(checksum, self)) % (1 << 64)

    def _write(self, batch: Any) -> None:
        if self._file is None:
            self._file = self._create()
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)

    def __iter__(self) -> Iterator[Any]:
        """The batches in their order; those of the file are mapped, their pages are the kernel's to take back."""
        yield from self._kept
        if self._file is not None:
            yield from pa.ipc.open_stream(pa.memory_map(f"/proc/self/fd/{self._file.fileno()}"))


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        why = problem.strerror or str(problem)
        raise _full(why, "Free that disk, or name a directory on a larger one in TMPDIR") from None


def _full(why: str, do: str) -> KafkaError:
    """TL-K23: the rows of a batch find no room on the disk; `do` says what makes room."""
    what = f"the rows of a batch do not fit into the spool on {tempfile.gettempdir()}: {why}"
    later = "Later ones do, with maxBytesPerTrigger (max_bytes_per_trigger in a bridge file) or maxOffsetsPerTrigger."
    return KafkaError("TL-K23", FORMAT, what, f"{do}: a batch that is planned does not shrink. {later}")
