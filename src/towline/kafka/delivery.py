"""Delivery of a task's rows to Kafka: one class per guarantee, with the same records and the same client.

A delivery sees one task: its identity and an iterator of Arrow batches. It returns the counts of its rows, or raises;
then Spark does not commit the batch and runs it again.

Exactly once: records and a marker in one transaction, and a batch whose marker is there is skipped [I9]. The steps are
those of docs/exactly-once.md#the-algorithm. The marker is read after `init_transactions`, which commits or aborts the
open transactions of older producers; so a crash at any step is harmless.
"""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from towline.checkpoint import Checkpoint
from towline.errors import KafkaError, TowlineError
from towline.kafka import faults, producers, recordcheck
from towline.kafka.admin import KafkaAdmin, recreated_topics, save_topic_ids, saved_topic_ids
from towline.kafka.columns import Rows
from towline.kafka.faults import NOT_COMMITTED, ErrorKind
from towline.kafka.markers import ANY_QUERY, NO_BATCH, Marker, MarkerVerdict, TaskRefusal, compare_marker
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import FORMAT
from towline.kafka.producers import AttemptError, KafkaProducer, TransactionalProducer
from towline.kafka.recordcheck import RecordCheck, RefusalLearner, require_topics
from towline.sinks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from towline.kafka.columns import Columns, Record
    from towline.kafka.markers import MarkerStep
    from towline.kafka.options import SinkSettings

#: Producers that one task may use up on retriable errors; then the task fails, and Spark decides.
_MAX_ATTEMPTS: Final = 3
_FENCE_TIMEOUT_S: Final = 3.0  #: Seconds a stopping query waits for Kafka to end its producers.
_METADATA_TIMEOUT_S: Final = 2.0  #: Seconds that the driver waits for Kafka's list of topics.
MEMORY_BYTES: Final = 64 << 20  #: Bytes of a task's rows that are kept in memory.
_MARKER_TOPIC_NOTE: Final = "towline.markers"  #: File in a checkpoint with the id of the marker topic.


@dataclass(frozen=True)
class BatchOrigin:
    """Data about the batch that the driver passes to the tasks.

    Attributes:
        newest_batch: Newest batch in the checkpoint's offset log; None where the checkpoint is not local.
        hashes: SHA-256 of the offset log's entries, of that batch and the one before it, by batch.
        rate: Throughput of the batch before, in bytes/s, 0 if that failed; None where unknown.
    """

    newest_batch: int | None = None
    hashes: Mapping[int, str] = field(default_factory=dict)
    rate: float | None = None


@dataclass(frozen=True)
class DeliveryResult:
    """Delivery result of one task.

    Attributes:
        rows: Rows acknowledged by Kafka in their topics; with acks=0, rows handed to the network.
        bytes: Bytes of keys and values of all rows read; 0 if skipped.
        dropped_rows: Rows dropped; always 0 but for at_most_once.
        drop_reason: Why rows were dropped, in a few words.
        dead_lettered: Rows that became dead letters: refused by the route or mapping, or because Kafka would refuse
            them.
        was_skipped: Whether the batch was in Kafka already; the numbers are then those of its first delivery.
        seconds: From the first record to Kafka's last acknowledgement; None where none is waited for.
        has_manual_marker: Whether a marker set by hand skipped it: its rows are not counted.
        marker_step: Totals of its markers before and after; None without markers.
    """

    rows: int
    bytes: int
    dropped_rows: int = 0
    drop_reason: str = ""
    dead_lettered: int = 0
    was_skipped: bool = False
    seconds: float | None = field(default=None, compare=False)
    has_manual_marker: bool = False
    marker_step: MarkerStep | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Delivery(ABC):
    """Delivery of the rows of one task to Kafka; picklable, created on the driver."""

    settings: SinkSettings
    columns: Columns
    origin: BatchOrigin = BatchOrigin()

    @abstractmethod
    def deliver(self, task: Task, batches: Iterable[Any]) -> DeliveryResult:
        """Write ``pyarrow.RecordBatch``es.

        Raises:
            KafkaError: The rows are not safely in Kafka; the task must fail.
            ConfigError: A secret can't be read here.
        """


class AtLeastOnce(Delivery):
    """Delivery at least once: idempotent producer, acks=all, success only after every record is acknowledged."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> DeliveryResult:  # noqa: ARG002 - the same for all tasks
        """Write and wait; a record without acknowledgement fails the task (TL-K02, TL-K03, TL-K29).

        No record has a time limit of its own: the task waits as long as Kafka accepts anything. After a refused record
        the rows are written again with the limits learned from it, if all of them fit into `MEMORY_BYTES`.
        """
        remaining, first_batches, free_bytes = iter(batches), list[Any](), MEMORY_BYTES
        for batch in remaining:
            first_batches.append(batch)
            if (free_bytes := free_bytes - batch.nbytes) < 0:
                break
        learner = RefusalLearner(self.settings)
        while True:
            check = RecordCheck(self.settings, self.columns, self.settings.sink_id or "").check_batches(first_batches)
            sizing = {"batch.num.messages": "1"} if learner.refusal else check.batch_settings(self.origin.rate)
            settings = replace(self.settings, client={**self.settings.client, "message.timeout.ms": "0", **sizing})
            try:
                with producers.pooled_producer(settings) as client:
                    checked_batches = chain(first_batches, map(check.check_batch, remaining))
                    return self._write(client, check, checked_batches, learner)
            except AttemptError as error:
                learner.learn(error)
                if free_bytes < 0:  # further rows were read meanwhile
                    raise error.final_error from None

    def _write(
        self, client: KafkaProducer, check: RecordCheck, batches: Iterable[Any], learner: RefusalLearner
    ) -> DeliveryResult:
        rows = size = 0
        started_at = time.perf_counter()
        try:
            for batch in batches:
                batch_rows = check.checked_rows(batch)
                rows += batch_rows.size
                size += batch_rows.bytes
                if (refusal := learner.refusal) is not None:
                    single_records = client.one_per_request(batch_rows.records, refusal.topic, check.record_size)
                    batch_rows = batch_rows._replace(records=single_records)
                client.send(batch_rows)
                if client.failure_count and learner.refusal is None:
                    break
            pending_count = client.flush(self.settings.timeout_s)
        except producers.QueueStuck:
            pending_count = client.pending
        except faults.CLIENT_ERRORS as error:
            raise AttemptError(faults.fatal_client_error(self.settings.servers, error), client.refusal) from None
        if failed_count := pending_count + client.failure_count:
            raise AttemptError(self._delivery_error(client, failed_count, rows), client.refusal)
        if learner.refusal is not None:  # Kafka took each record alone
            learner.resolve_refusal()
        dead_letters = check.dead_letters
        seconds = time.perf_counter() - started_at
        return DeliveryResult(rows - dead_letters, size, dead_lettered=dead_letters, seconds=seconds)

    def _delivery_error(self, client: KafkaProducer, failed_count: int, rows: int) -> KafkaError:
        """Return TL-K02: Kafka did not acknowledge records in time; or TL-K03: it refused them."""
        failure, reason = client.failure, client.last_error.reason
        if failure is None or faults.is_kind(failure.error, ErrorKind.TIMEOUT):
            time_limit = f"within {self.settings.timeout_s:g} s{reason and f': {reason}'}"
            problem = f"Kafka did not take {failed_count:,} of {rows:,} records {time_limit}"
            return KafkaError("TL-K02", self.settings.servers, problem, f"Is it up and reachable? {NOT_COMMITTED}")
        reason = f'the first for topic "{failure.topic}": {faults.error_text(failure.error)}'
        problem = f"Kafka refused {failed_count:,} of {rows:,} records, {reason}"
        return KafkaError("TL-K03", self.settings.servers, problem, faults.remedy_for(faults.error_name(failure.error)))


class AtMostOnce(Delivery):
    """Delivery at most once: acks=0, nothing sent twice. Rows that Kafka does not take in time are dropped."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> DeliveryResult:
        """Write the rows that can be written now; count the others as dropped."""
        if task.attempt > 0:
            return _count_rows(batches, f"attempt {task.attempt + 1} of a task writes nothing")
        rows = size = sent_rows = 0
        unread_batches = iter(batches)
        drop_reason, check = "", RecordCheck(self.settings, self.columns, self.settings.sink_id or "")
        with producers.pooled_producer(self.settings) as client:
            try:
                for batch in unread_batches:
                    has_faults = self.columns.row_faults(batch) is not None
                    batch_rows = check.checked_rows(batch) if has_faults else self.columns.rows(batch)
                    rows, size = rows + batch_rows.size, size + batch_rows.bytes
                    require_topics(self.settings, batch_rows.topics)
                    client.send(batch_rows)
                    sent_rows = rows
                client.flush(self.settings.timeout_s)
            except (KafkaError, producers.QueueStuck, *faults.CLIENT_ERRORS) as error:
                if isinstance(error, KafkaError) and error.code not in faults.NO_ANSWER_CODES:
                    raise
                drop_reason = error.problem if isinstance(error, KafkaError) else faults.error_text(error)
            unsent = _count_rows(unread_batches)
            delivered_rows = max(0, sent_rows - client.pending - client.failure_count)
            if dropped_rows := rows + unsent.dropped_rows - delivered_rows:
                client.is_healthy, failure = False, client.failure
                late = "Kafka did not take them in time"
                drop_reason = drop_reason or (faults.error_text(failure.error) if failure else late)
        letters = min(check.dead_letters, delivered_rows)
        return DeliveryResult(delivered_rows - letters, size + unsent.bytes, dropped_rows, drop_reason, letters)


def _count_rows(batches: Iterable[Any], drop_reason: str = "") -> DeliveryResult:
    """Read rows to the end without writing them, and count them as dropped."""
    rows = size = 0
    for batch in batches:
        rows, size = rows + batch.num_rows, size + batch.nbytes
    return DeliveryResult(0, size, rows, drop_reason)


class ExactlyOnce(Delivery):
    """Delivery exactly once: one transaction per batch and partition, with its marker."""

    def deliver(self, task: Task, batches: Iterable[Any]) -> DeliveryResult:
        """Write a partition of a batch, or skip it if its marker is in Kafka.

        Raises:
            KafkaError: TL-K01 no answer; TL-K04 to K06 a record that can't be written; TL-K10 to K18 marker and
                checkpoint do not belong together; TL-K19 fenced; TL-K20 aborted; TL-K21 undecided; TL-K23 to K25 the
                environment; TL-K28 Kafka is too slow; TL-K29 it refuses records of too many kinds.
            ConfigError: A secret can't be read here.
        """
        assert task.batch is not None, "without a batch id nothing could be skipped"
        newest = self.origin.newest_batch
        if newest is not None and newest != task.batch:
            problem = f"Spark runs batch {task.batch}, but the newest batch in the checkpoint's offset log is {newest}"
            remedy = "Two queries on one checkpoint? Asynchronous progress tracking is not exactly once: switch it off."
            raise KafkaError("TL-K24", FORMAT, problem, remedy)
        store = MarkerStore(self.settings, self.settings.sink_id or task.query or FORMAT)
        if task.partition >= self.settings.parallelism:
            raise self._refuse_task(task, store)
        # Without the topics' limits, which are unknown before the rows are read.
        sizing = RecordCheck(self.settings, self.columns, "").batch_settings(self.origin.rate)
        transactional_id = self.settings.transactional_id(store.sink_id, task.partition)
        starting = producers.StartingProducer(self.settings, transactional_id, sizing)
        with closing(starting), Spool(MEMORY_BYTES) as spool:
            spool.fill(batches)
            learner = RefusalLearner(self.settings)
            return _BatchWriter(self, task, store, spool, starting, learner, self.origin.rate).persist()

    def _refuse_task(self, task: Task, store: MarkerStore) -> KafkaError:
        """Record in the marker that the batch has too many tasks, so that partition 0 never passes for all of it."""
        first_task, batch = replace(task, partition=0), task.batch or 0
        store.ensure_topic()

        def add_refusal(previous: Marker | None) -> Marker:
            marker = previous or Marker(NO_BATCH, self.settings.parallelism, writer=task.query or ANY_QUERY)
            marker = replace(marker, refused=TaskRefusal(batch, task.run, task.partition))
            verdict = compare_marker(previous, first_task, self.settings.parallelism, self.origin.hashes)
            if verdict not in {MarkerVerdict.WRITE, MarkerVerdict.ALREADY_WRITTEN}:  # the marker stops every task
                raise store.mismatch_error(verdict, marker, first_task)
            return marker

        marker = store.rewrite(0, add_refusal)
        verdict = MarkerVerdict.HALF_WRITTEN if marker.batch == batch else MarkerVerdict.TASK_REFUSED
        return store.mismatch_error(verdict, marker, first_task)

    def fence(self, query: str | None) -> None:
        """Fence the producers of this sink's tasks, which ends open transactions; never raises, waits at most 3 s."""
        sink_id = self.settings.sink_id or query
        if sink_id is None:
            return
        fence_settings = replace(self.settings, timeout_s=min(self.settings.timeout_s, _FENCE_TIMEOUT_S))
        for partition in range(self.settings.parallelism):
            try:
                TransactionalProducer(fence_settings, self.settings.transactional_id(sink_id, partition)).close()
            except TowlineError:
                return  # Kafka does not answer: the time-out of the transaction aborts it


@dataclass
class _BatchWriter:
    """Writer of one task's rows: attempt after attempt, each with a new producer."""

    sink: ExactlyOnce
    task: Task
    store: MarkerStore
    spool: Spool
    starting: producers.StartingProducer
    learner: RefusalLearner
    rate: float | None  #: Kafka's throughput in bytes/s; None where unknown.

    def persist(self) -> DeliveryResult:
        """Write the rows, and retry on errors that a new producer may avoid."""
        remaining_attempts = _MAX_ATTEMPTS
        while True:
            try:
                return self._attempt()
            except AttemptError as error:
                if error.refusal is not None:
                    self.learner.learn(error)
                    continue
                remaining_attempts -= error.rate is None
                if not remaining_attempts or (error.rate is not None and not self._extend_timeouts(error.rate)):
                    raise error.final_error from None
                recordcheck.forget_limits(self.sink.settings)

    def _extend_timeouts(self, rate: float) -> bool:
        """Halve the expected rate; return whether the next attempt has longer time-outs."""
        old_timeouts = self._longer_timeouts()
        self.rate = min(rate, self.rate or rate) / 2  # a quota lets a burst pass first, so it may be less
        return self._longer_timeouts() != old_timeouts

    def _attempt(self) -> DeliveryResult:
        if self.learner.refusal is not None:
            self._probe_refusal(self._check_records())
        check, task = self._check_records(), self.task
        self.store.ensure_topic()
        producer = self._take_producer(check)
        try:
            marker = self.store.read_marker(task.partition)
            verdict = compare_marker(marker, task, self.sink.settings.parallelism, self.sink.origin.hashes)
            if verdict is MarkerVerdict.WRITE:
                return self._write(producer, check, marker)
            return self._skip(verdict, marker)
        except BaseException:
            # Also for KeyboardInterrupt and a stopped query: an open transaction would block every reader.
            producer.close()
            raise

    def _check_records(self) -> RecordCheck:
        return RecordCheck(self.sink.settings, self.sink.columns, self.store.sink_id).check_batches(self.spool)

    def _longer_timeouts(self, max_ms: int | None = None) -> dict[str, str]:
        max_transaction_ms = self.store.admin.max_transaction_ms if max_ms is None else lambda: max_ms
        return producers.longer_timeouts(self.sink.settings, self.spool.size, self.rate, max_transaction_ms)

    def _take_producer(self, check: RecordCheck) -> TransactionalProducer:
        max_ms: int | None = None
        while True:
            timeouts = self._longer_timeouts(max_ms)
            try:
                return self.starting.take({**check.batch_settings(self.rate), **timeouts})
            except KafkaError as error:
                if not timeouts or error.code != "TL-K20":
                    raise
                max_ms = int(timeouts[producers.MESSAGE_TIMEOUT]) // 2  # the cluster does not allow it

    def _probe_refusal(self, check: RecordCheck) -> None:
        """Send the topic with the unclear refusal one record per request, up to the first refusal; commits nothing."""
        # All go to one partition, to keep their order: too large records smallest first, else those without key first.
        assert self.learner.refusal is not None, "there was a refusal"
        topic = self.learner.refusal.topic

        def records(*, has_key: bool) -> Iterator[Record]:
            rows = (row for batch in self.spool for row in check.checked_rows(batch).records if row[0] == topic)
            return ((*record[:3], 0, *record[4:]) for record in rows if (record[2] is not None) is has_key)

        probe_order: Iterable[Record] = chain(records(has_key=False), records(has_key=True))
        if self.learner.is_size_refusal:
            records_by_size = {check.record_size(record): record for record in probe_order}
            probe_order = map(records_by_size.__getitem__, sorted(records_by_size))
        producer = self.starting.take({**check.batch_settings(self.rate), "batch.num.messages": "1"})
        try:
            producer.begin()
            with suppress(AttemptError, *faults.CLIENT_ERRORS):  # raised after the first refusal
                probes = producer.one_per_request(probe_order, topic, check.record_size)
                producer.write(Rows(0, 0, frozenset({topic}), probes))
                producer.flush(self.sink.settings.timeout_s, until_failure=True)
            self.learner.resolve_refusal(producer.refusal)
        finally:
            producer.close()

    def _skip(self, verdict: MarkerVerdict, marker: Marker | None) -> DeliveryResult:
        """Return the result of the batch that is already in Kafka; raise TL-K10 to TL-K18 on a mismatch."""
        if verdict is not MarkerVerdict.ALREADY_WRITTEN or marker is None:
            raise self.store.mismatch_error(verdict, marker, self.task)
        # `compare_marker` has found the two hashes equal if both are known.
        same_offsets = marker.offsets is not None and marker.batch in self.sink.origin.hashes
        # A marker set by hand has no row count.
        has_manual_marker, spool = marker.writer == ANY_QUERY, self.spool
        if self.sink.settings.verifies(same_offsets=same_offsets) and not has_manual_marker:
            crc = marker.crc  # None where its writer did not compute one
            if spool.rows != marker.rows or (crc is not None and crc != spool.crc()):
                raise self.store.changed_rows_error(marker, spool.rows, self.task)
        return DeliveryResult(
            marker.rows - marker.dead_lettered,
            0,
            dead_lettered=marker.dead_lettered,
            was_skipped=True,
            has_manual_marker=has_manual_marker,
            marker_step=marker.step(has_previous=not has_manual_marker),
        )

    def _write(self, producer: TransactionalProducer, check: RecordCheck, previous: Marker | None) -> DeliveryResult:
        rows = size = 0
        task, settings, hashes, number = self.task, self.sink.settings, self.sink.origin.hashes, self.task.batch or 0
        # A replay is compared with the checksum; it is computed before the transaction is open.
        crc = self.spool.crc() if settings.verifies(same_offsets=number in hashes) else None
        started_at = time.perf_counter()
        producer.begin()
        for batch in self.spool:
            batch_rows = check.checked_rows(batch)
            producer.write(batch_rows)
            rows, size = rows + batch_rows.size, size + batch_rows.bytes
        dead_letters = check.dead_letters
        writer = task.query or ANY_QUERY
        marker = Marker(number, settings.parallelism, rows, crc, writer, hashes.get(number), dead_letters)
        marker = marker.with_totals_after(previous)
        producer.write_marker(self.store.topic, task.partition, self.store.key(task.partition), marker)
        step = marker.step(has_previous=previous is not None and previous.writer != ANY_QUERY)
        producer.commit()
        seconds = time.perf_counter() - started_at
        return DeliveryResult(rows - dead_letters, size, dead_lettered=dead_letters, seconds=seconds, marker_step=step)


def delivery_for(settings: SinkSettings, columns: Columns, origin: BatchOrigin = BatchOrigin()) -> Delivery:
    """Return the delivery of the sink's guarantee."""
    if settings.guarantee == "exactly_once":
        return ExactlyOnce(settings, columns, origin)
    return (AtLeastOnce if settings.guarantee == "at_least_once" else AtMostOnce)(settings, columns, origin)


# -- before the tasks of a batch, on the driver --


def require_configured_topics(settings: SinkSettings) -> None:
    """Check that the sink's configured topics exist, before any task starts.

    Raises:
        KafkaError: TL-K04. A missing answer is not raised: the tasks wait longer for Kafka, and report it.
    """
    topics = {name for name in (settings.topic, settings.dead_letter_topic) if name}
    try:
        require_topics(replace(settings, timeout_s=_METADATA_TIMEOUT_S), topics)
    except KafkaError as error:
        if error.code == "TL-K04":
            raise


def batch_origin(settings: SinkSettings, checkpoint_path: str) -> BatchOrigin:
    """Sync the query's checkpoint, and read the number of the batch that is about to run.

    Raises:
        JournalError: TL-J20, the checkpoint can't be synced.
        KafkaError: Before a first batch: TL-K10 the marker topic was recreated; TL-K13 the markers belong to another
            query; TL-K22 they can't be read.
    """
    checkpoint = Checkpoint(checkpoint_path)
    checkpoint.sync()
    newest_batch = checkpoint.last_planned_batch()
    if newest_batch is None:
        return BatchOrigin()
    sink_id = settings.sink_id or checkpoint.query_id
    if sink_id and newest_batch == 0 and checkpoint.last_committed_batch() is None:
        _check_first_batch(settings, MarkerStore(settings, sink_id), checkpoint)
    hashes = {batch: checkpoint.offsets_hash(batch) for batch in (newest_batch - 1, newest_batch)}
    return BatchOrigin(newest_batch=newest_batch, hashes={batch: text for batch, text in hashes.items() if text})


def _check_first_batch(settings: SinkSettings, store: MarkerStore, checkpoint: Checkpoint) -> None:
    """Check all markers before any task of batch 0: none is another query's, their topic was not recreated [I17]."""
    # Each task reads only the marker of its own partition, and would write before another one finds a mismatch.
    try:
        store.ensure_topic()
        current_ids, markers = KafkaAdmin(settings.client).topic_ids([store.topic]), store.read_markers()
    except KafkaError as error:
        if error.code not in faults.NO_ANSWER_CODES:  # then the tasks wait longer for Kafka, and report it
            raise
        return
    for partition, marker in markers.items():
        task = Task(partition, batch=0, query=checkpoint.query_id)
        # The query is unknown where its checkpoint is on no local disk.
        if checkpoint.query_id and compare_marker(marker, task, settings.parallelism, {}) is MarkerVerdict.OTHER_QUERY:
            raise store.mismatch_error(MarkerVerdict.OTHER_QUERY, marker, task)
    if recreated_topics(saved_topic_ids(checkpoint, _MARKER_TOPIC_NOTE), current_ids) and not any(markers.values()):
        raise store.mismatch_error(MarkerVerdict.NO_MARKER, None, Task(0, batch=0))
    save_topic_ids(checkpoint, current_ids, _MARKER_TOPIC_NOTE)


# -- rows of a task, spooled until the transaction opens --

# The clock of ``transaction.timeout.ms`` starts with the first record of a transaction, and an open transaction blocks
# every read_committed consumer. So upstream finishes first; a slow query never has an open transaction.


def checksum(batch: Any) -> int:
    """Return the sum of the rows' checksums, each a CRC32C over topic, key and then value; null counts as empty.

    Other columns are left out: the sum detects a replay with other messages, and has to be cheap (some 0.3 us a row).
    So they are joined in C: one object and one call a row instead of three.
    """
    columns = [_large_binary(batch.column(name)) for name in ("topic", "key", "value") if name in batch.schema.names]
    empty = pa.scalar(b"", pa.large_binary())
    joined = columns[0] if len(columns) == 1 else pc.binary_join_element_wise(*columns, empty)
    return sum(map(crc32c, joined.to_pylist()))


def _large_binary(column: Any) -> Any:
    # Large: key and value of a batch together may exceed the 2 GiB of 32-bit offsets.
    binary = column.cast(pa.large_binary())
    return binary.fill_null(b"") if binary.null_count else binary


class Spool:
    """Spool of one task's Arrow batches: in memory, then in an unnamed file; can be read repeatedly. A context manager.

    Args:
        memory_limit: Bytes kept in memory; later batches go to disk.
        create_file: Creates the file; by default an unnamed temporary file.
    """

    def __init__(self, memory_limit: int, create_file: Callable[[], Any] | None = None) -> None:
        self._memory_limit = memory_limit
        # Spark's workers have their temporary directory in TMPDIR; the file is deleted with the process.
        self._create_file = create_file or partial(tempfile.TemporaryFile, prefix="towline-")
        self._batches_in_memory: list[Any] = []
        self._file: Any = None
        self._writer: Any = None
        #: Number of rows, and their bytes.
        self.rows = self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches_in_memory.clear()
        for stream in (self._writer, self._file):
            if stream is not None:
                with suppress(OSError):  # unwritten rows are not needed any more
                    stream.close()

    def fill(self, batches: Iterable[Any]) -> None:
        """Store all batches; upstream has finished when this returns.

        Raises:
            KafkaError: TL-K23, the disk is full.
        """
        for batch in batches:
            self.rows, self.size = self.rows + batch.num_rows, self.size + batch.nbytes
            if self._file is None and self.size <= self._memory_limit:
                self._batches_in_memory.append(batch)
                continue
            with _disk_errors():
                if self._file is None:
                    self._file = self._create_file()
                    self._writer = pa.ipc.new_stream(self._file, batch.schema)
                self._writer.write_batch(batch)
        if self._writer is not None:
            with _disk_errors():
                self._writer.close()
                self._file.flush()
            self._writer = None

    def crc(self) -> int:
        """Return the sum of `checksum` over all rows, modulo 2**64: equal for equal rows in any order.

        It costs 0.3 us a row and is computed on demand: most batches are never compared.
        """
        return sum(map(checksum, self)) % (1 << 64)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches in order; batches on disk are memory-mapped."""
        yield from self._batches_in_memory
        if self._file is not None:
            yield from pa.ipc.open_stream(pa.memory_map(f"/proc/self/fd/{self._file.fileno()}"))


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        problem = f"the rows of a batch do not fit into the spool on {tempfile.gettempdir()}: {reason}"
        remedy = (
            "Free that disk, or name a directory on a larger one in TMPDIR: a batch that is planned does not shrink. "
            "Later ones do, with maxBytesPerTrigger (max_bytes_per_trigger in a bridge file) or maxOffsetsPerTrigger."
        )
        raise KafkaError("TL-K23", FORMAT, problem, remedy) from None
