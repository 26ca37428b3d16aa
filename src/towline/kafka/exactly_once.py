"""Exactly once: records and a marker in one transaction, and a batch whose marker is there is skipped [I9].

For batch b and partition p of one sink:

    1  spool      read all rows; upstream is done, nothing is open
    2  producer   meanwhile: a new one with transactional.id <prefix>.<sink>.<p>; list_topics()
    3  init       init_transactions(): older producers are fenced, their transaction is committed or aborted
    4  marker     read it, read_committed, to the last stable offset
    5  decide     write, skip, or stop with a clear line (`markers.Situation`)
    6  write      begin, records (bad ones as dead letters), marker
    7  commit     once; after an unclear answer a new producer reads the marker and knows

The order of 3 and 4 is what makes a crash at any step harmless.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from towline.checkpoint import Checkpoint
from towline.errors import KafkaError, TowlineError
from towline.kafka import faults, producers, screening
from towline.kafka.admin import KafkaAdmin
from towline.kafka.columns import Rows
from towline.kafka.delivery import AtLeastOnce, AtMostOnce, Delivered, Delivery
from towline.kafka.markers import (
    ANYONE,
    BEFORE_FIRST,
    Marker,
    Situation,
    TaskRefusal,
    situation,
)
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import FORMAT
from towline.kafka.producers import Indefinite, Transactional
from towline.kafka.screening import Lessons, RecordCheck
from towline.kafka.spool import Spool
from towline.kafka.topicids import keep_ids, kept_ids, remade
from towline.sinks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from towline.kafka.columns import Columns, Record
    from towline.kafka.options import SinkSettings

#: Producers one task may use up on errors that pass; then the task fails, and Spark decides.
_TRIES: Final = 3
#: Seconds a stopping query waits for Kafka to end its producers.
_FENCE_S: Final = 3.0


@dataclass(frozen=True)
class BatchOrigin:
    """What the driver knows when it hands out a batch; travels to the tasks.

    Attributes:
        job: Names a batch query, the same for all attempts of its tasks; None for a stream.
        newest: The newest batch in the checkpoint's offset log; None where the checkpoint is not local.
        hashes: SHA-256 of the offset log's entries, of that batch and the one before it.
        rate: Bytes a second that Kafka took of the batch before; None where that is not known.
    """

    job: str | None = None
    newest: int | None = None
    hashes: Mapping[int, str] = field(default_factory=dict)
    rate: float | None = None


class ExactlyOnce(Delivery):
    """One transaction for each batch and partition, with its marker; `origin` is what the driver knows of the batch."""

    def __init__(self, settings: SinkSettings, columns: Columns, origin: BatchOrigin = BatchOrigin()) -> None:
        super().__init__(settings, columns)
        self.origin = origin

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
        starting = producers.Starting(self.settings, self.settings.transactional_id(name, task.partition))
        with starting, Spool(self.settings.spool_memory, self.settings.spool_disk) as spool:
            spool.fill(batches)
            return _Batch(self, task, store, spool, starting).persist()

    def situation(self, marker: Marker | None, task: Task) -> Situation:
        """What the last marker of a task's partition says."""
        return situation(marker, task, self.settings.parallelism, self.origin.hashes)

    def _refuse(self, task: Task, store: MarkerStore) -> KafkaError:
        """A task too many: leave word, so that what partition 0 writes of this batch is never taken for all of it."""
        first, batch = replace(task, partition=0), task.batch or 0
        store.ensure()

        def revised() -> Marker:
            before = store.read(0)
            marker = before or Marker(BEFORE_FIRST, self.settings.parallelism, writer=task.query or ANYONE)
            marker = replace(marker, refused=TaskRefusal(batch, task.run, task.partition))
            found = self.situation(before, first)
            if found not in {Situation.WRITE, Situation.DONE}:  # then the marker already stops every task
                raise store.mismatch(found, marker, first)
            return marker

        marker = store.rewrite(0, revised)
        found = Situation.TORN if marker and marker.batch == batch else Situation.REFUSED
        return store.mismatch(found, marker, first)

    def fence(self, query: str | None) -> None:
        """End open transactions of this sink's tasks, dead or alive; never raises, and gives up soon.

        Args:
            query: The query's id; None if unknown.
        """
        sink_id = self.settings.sink_id or query
        if sink_id is None:
            return
        patience = replace(self.settings, timeout_s=min(self.settings.timeout_s, _FENCE_S))
        for partition in range(self.settings.parallelism):
            try:
                producers.take(patience, self.settings.transactional_id(sink_id, partition)).close()
            except TowlineError:
                return  # Kafka is away: the time-out of the transaction ends it


class _Batch:
    """The rows of one task on their way into Kafka: attempt after attempt, each with a producer of its own."""

    def __init__(
        self, sink: ExactlyOnce, task: Task, store: MarkerStore, spool: Spool, starting: producers.Starting
    ) -> None:
        self._sink, self._settings = sink, sink.settings
        self._task, self._store, self._spool, self._starting = task, store, spool, starting
        self._lessons = Lessons(self._settings)
        #: Bytes that Kafka took in a second; None where nobody has seen it.
        self._rate = sink.origin.rate

    def persist(self) -> Delivered:
        """Write, as long as errors are of the kind that passes."""
        tries_left = _TRIES
        while True:
            try:
                return self._attempt()
            except Indefinite as problem:
                if problem.refusal is not None:
                    self._lessons.take(problem.refusal, problem.told)
                    continue
                before, former, tries_left = self._longer(), self._rate, tries_left - (problem.rate is None)
                if problem.rate is not None:  # a quota lets a burst pass first, so it may be less
                    self._rate = min(problem.rate, former or problem.rate) / 2
                if not tries_left or (self._rate != former and self._longer() == before):
                    raise problem.told from None
                screening.forget(self._settings)

    def _attempt(self) -> Delivered:
        if self._lessons.unclear is not None:
            self._probe(self._looked())
        screen, task = self._looked(), self._task
        if task.batch is not None:
            self._store.ensure()
        producer = self._producer(screen)
        try:
            if task.batch is None:  # a batch query: nothing can be skipped
                return self._write(producer, screen, None)
            marker = self._store.read(task.partition)
            found = self._sink.situation(marker, task)
            return self._write(producer, screen, marker) if found is Situation.WRITE else self._skip(found, marker)
        except BaseException:
            # Also for KeyboardInterrupt and a stopped query: an open transaction would hold back every reader.
            producer.close()
            raise

    def _paced(self) -> SinkSettings:
        return self._settings if self._rate is None else self._settings.in_requests_of(self._rate)

    def _looked(self) -> RecordCheck:
        screen = RecordCheck(self._paced(), self._sink.columns, self._store.sink_id)
        screen.look(self._spool)
        return screen

    def _longer(self) -> dict[str, str]:
        settings = self._settings
        return producers.clock(settings, self._spool.size, self._rate, lambda: producers.longest_ms(settings))

    def _producer(self, screen: RecordCheck) -> Transactional:
        requests = dict(self._paced().client.items() - self._settings.client.items())
        longer = self._longer()
        while True:
            try:
                return self._starting.take({**requests, **screen.fitting(), **longer})
            except KafkaError as problem:
                if not longer or problem.code != "TL-K20":
                    raise
                longer = producers.halved(self._settings, longer)  # the cluster allows no longer one

    def _probe(self, screen: RecordCheck) -> None:
        """Send the unclear topic one record a request, up to the first that it refuses; nothing is committed.

        In one partition, so that they go in order: of too large ones the smallest comes first, else those without key.
        """
        assert self._lessons.unclear is not None, "there was a refusal"
        topic = self._lessons.unclear.topic

        def records(*, keyed: bool) -> Iterator[Record]:
            rows = (one for batch in self._spool for one in screen.rows(batch).records if one[0] == topic)
            return ((*one[:3], 0, *one[4:]) for one in rows if (one[2] is not None) is keyed)

        ordered = chain(records(keyed=False), records(keyed=True))
        if self._lessons.large:
            sized = {screen.size(one): one for one in ordered}
            ordered = chain(sized[size] for size in sorted(sized))
        producer = self._starting.take({**screen.fitting(), "batch.num.messages": "1"})
        try:
            producer.begin()
            alone = self._lessons.alone(ordered, screen.size, producer)
            with suppress(Indefinite, *faults.FOREIGN):  # from the first refusal on
                producer.write(Rows(0, 0, frozenset({topic}), alone))
                producer.flush(self._settings.timeout_s, to_failure=True)
            self._lessons.conclude(producer.refusal)
        finally:
            producer.close()

    def _skip(self, found: Situation, marker: Marker | None) -> Delivered:
        """The batch is in Kafka: say what was written then; TL-K10 to TL-K18 where it can't be told."""
        if found is not Situation.DONE or marker is None:
            raise self._store.mismatch(found, marker, self._task)
        # `situation` has found the two hashes equal if both are there.
        same_offsets = marker.offsets is not None and marker.batch in self._sink.origin.hashes
        by_hand, spool = marker.writer == ANYONE, self._spool  # a person's stands for rows that nobody counted
        if self._settings.verifies(same_offsets=same_offsets) and not by_hand:
            crc = marker.crc  # none where its writer had no use for one
            if spool.rows != marker.rows or (crc is not None and crc != spool.crc()):
                raise self._store.changed(marker, spool.rows, self._task)
        done, dead, marks = marker.rows - marker.dead_lettered, marker.dead_lettered, marker.step(known=not by_hand)
        return Delivered(done, 0, dead_lettered=dead, skipped=True, by_hand=by_hand, marks=marks)

    def _write(self, producer: Transactional, screen: RecordCheck, before: Marker | None) -> Delivered:
        rows = size = 0
        task, hashes, marks = self._task, self._sink.origin.hashes, None
        # The checksum is for a replay to be compared with; it is taken before the transaction is open.
        compared = task.batch is not None and self._settings.verifies(same_offsets=task.batch in hashes)
        crc = self._spool.crc() if compared else None
        begun = time.perf_counter()
        producer.begin()
        for batch in self._spool:
            converted = screen.rows(batch)
            producer.write(converted)
            rows, size = rows + converted.size, size + converted.bytes
        dead = screen.dead_letters
        if task.batch is not None:
            parallelism, writer, offsets = self._settings.parallelism, task.query or ANYONE, hashes.get(task.batch)
            marker = Marker(task.batch, parallelism, rows, crc, writer, offsets, dead).following(before)
            producer.mark(self._store.topic, task.partition, self._store.key(task.partition), marker)
            marks = marker.step(known=before is not None and before.writer != ANYONE)
        producer.commit()
        took = time.perf_counter() - begun
        return Delivered(rows - dead, size, dead_lettered=dead, seconds=took, marks=marks)


def delivery_for(settings: SinkSettings, columns: Columns, origin: BatchOrigin = BatchOrigin()) -> Delivery:
    """The strategy of the sink's guarantee, with the columns bound to the query's schema."""
    if settings.guarantee == "exactly_once":
        return ExactlyOnce(settings, columns, origin)
    return (AtLeastOnce if settings.guarantee == "at_least_once" else AtMostOnce)(settings, columns)


# -- before the tasks of a batch, on the driver --

#: Note in a checkpoint: the id of the topic of its markers.
_MARKERS: Final = "towline.markers"


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
    first = newest == 0 and checkpoint.last_commit_batch() is None
    if first and sink_id:
        _check_first_batch(settings, MarkerStore(settings, sink_id), checkpoint)
    hashes = {batch: checkpoint.offsets_hash(batch) for batch in (newest - 1, newest)}
    return BatchOrigin(newest=newest, hashes={batch: text for batch, text in hashes.items() if text is not None})


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
