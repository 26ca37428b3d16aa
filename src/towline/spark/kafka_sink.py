"""``format("kafka_transactional")``: Spark's data source with one writer for streams and one for batch queries.

Errors in options are raised by ``__init__``, errors in columns by ``writer()`` and ``streamWriter()``: Spark shows
exceptions of these calls unchanged. Pickled writers hold no secret and no connection.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, JournalError, KafkaError, without_traceback
from towline.guarantee import policy
from towline.kafka.admin import check_source_topics
from towline.kafka.clientconfig import insecure_settings
from towline.kafka.columns import Columns
from towline.kafka.delivery import (
    BatchOrigin,
    DeliveryResult,
    ExactlyOnce,
    Spool,
    batch_origin,
    delivery_for,
    require_configured_topics,
)
from towline.kafka.markers import MarkerStep
from towline.kafka.options import FORMAT, SinkSettings
from towline.sinks import Task, check_append, column_types, with_lower_case_names
from towline.spark.batching import WriteThroughput
from towline.spark.session import check_pyspark
from towline.spark.sink_note import BatchResult, SinkNote, read_throughput
from towline.spark.tasks import SPECULATION, SinkWriter, TaskResult, freeze_gc, task_property
from towline.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyarrow import RecordBatch
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from towline.kafka.delivery import Delivery

_log = logging.getLogger("towline.kafka")


@dataclass
class KafkaTaskResult(TaskResult):
    """Result of a task that wrote to Kafka.

    Attributes:
        query: Streaming query id; None in a batch query.
        delivery: Delivery result of its rows.
        input_rows: Number of rows that the task received.
        counts: Further counts of the task, for the sink note.
    """

    query: str | None
    delivery: DeliveryResult
    input_rows: int
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def marker_rows(self) -> int | None:
        """Row count in the marker, for a task whose rows Kafka already had; None for other tasks."""
        result = self.delivery
        return result.rows + result.dead_lettered if result.was_skipped and not result.has_manual_marker else None


@dataclass
class KafkaTaskRows(TaskResult):
    """Rows of a task for the driver to write.

    Attributes:
        run: Id of this run of the query; None if unknown.
        content: Arrow stream of the rows; empty if they are in a file, or there are none.
        file: Path of a file with that stream; "" for none.
        file_size: Size of the file in bytes.
    """

    query: str | None
    run: str | None
    rows: int = 0
    content: bytes = b""
    file: str = ""
    file_size: int = 0

    def batches(self) -> Iterator[Any]:
        """Read the rows, as ``pyarrow.RecordBatch``es.

        Raises:
            KafkaError: TL-K65, the file is missing or incomplete.
        """
        if self.content:
            yield from pa.ipc.open_stream(pa.py_buffer(self.content))
        if not self.file:
            return
        try:
            mapped_file = pa.memory_map(self.file)
        except OSError as error:
            raise self._read_error(error.strerror or str(error)) from None
        with mapped_file:
            if mapped_file.size() != self.file_size:
                raise self._read_error(f"it has {mapped_file.size():,} bytes and not {self.file_size:,}")
            yield from pa.ipc.open_stream(mapped_file)

    def _read_error(self, reason: str) -> KafkaError:
        problem = f"the rows of a task for the driver can't be read from {self.file}: {reason}"
        remedy = "Check what clears that directory, or which second query uses this checkpoint. The batch runs again."
        return KafkaError("TL-K65", FORMAT, problem, remedy)


class KafkaTransactional(DataSource):
    """Sink of Kafka records with a guarantee; columns as of Spark's own Kafka sink, options in docs/options.md."""

    @without_traceback
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        check_pyspark(FORMAT)
        self._settings = SinkSettings.parse(options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    @without_traceback
    def schema(self) -> StructType:
        """Refuse reads.

        Raises:
            ConfigError: TL-C49, always.
        """
        remedy = 'Read with format("kafka"), kafka.isolation.level=read_committed.'
        raise ConfigError("TL-C49", FORMAT, "this format only writes", remedy)

    @without_traceback
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: ARG002, N802, FBT001 - Spark's signature
        """Bind the columns of a stream; complete mode appends, as in Spark's Kafka sink.

        Spark calls this on the driver before the tasks of every batch. Except for at_least_once the checkpoint is
        synced here: a batch whose rows must not be written twice must survive a power failure in Spark's offset log.

        Raises:
            ConfigError: TL-C48 for columns; TL-C23 for verifySourceTopics without a checkpoint on this machine.
            JournalError: TL-J20, the checkpoint can't be synced.
            KafkaError: TL-K04, a topic is missing; TL-K10, TL-K13, as `batch_origin`.
        """
        freeze_gc()
        checkpoint_location = self.options.get("checkpointlocation", "")
        if not policy(self._settings.guarantee).replays_batches:
            Checkpoint(checkpoint_location).sync()
        if self._settings.batch is not None:
            checkpoint_location = ""  # its note is for the one sink of a query; a foreachBatch may have several
        reads_markers = self._settings.guarantee == "exactly_once" and checkpoint_location
        if self._settings.source_topics and (not checkpoint_location or Checkpoint(checkpoint_location).location_id):
            problem = "topic ids are stored in the query's checkpoint, which is on no disk of this machine"
            remedy = "Give checkpointLocation a path of the driver's machine, or leave verifySourceTopics out."
            raise ConfigError("TL-C23", f"{FORMAT} verifySourceTopics", problem, remedy)
        try:
            if self._settings.source_topics:
                check_source_topics(self._settings.client, checkpoint_location, FORMAT, _RECREATED_TOPIC_ADVICE)
            origin = batch_origin(self._settings, checkpoint_location) if reads_markers else BatchOrigin()
        except KafkaError as error:
            return FailingWriter(error)
        delivery = self._delivery(schema, origin, checkpoint_location)
        if not self._settings.gather:
            return self._stream_writer(delivery, checkpoint_location)
        query_key = checkpoint_location or f"{self._settings.servers} {self._settings.sink_id}"
        batch = origin.newest_batch if self._settings.batch is None else self._settings.batch
        row_directory = TaskRowDirectory.for_batch(query_key, batch)
        return StreamWriter(delivery, checkpoint_location, row_directory)

    @without_traceback
    def writer(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: FBT001 - Spark's signature
        """Bind the columns of a batch query, or of a write in foreachBatch.

        Raises:
            ConfigError: TL-C49 for mode("overwrite"): Kafka can only append.
            KafkaError: TL-K80, exactly once without batchId: Spark runs a query, its batch or a task again, and only a
                marker of the batch tells.
            TowlineError: With batchId, as `streamWriter`.
        """
        check_append(FORMAT, overwrite=overwrite)
        if self._settings.batch is not None:
            return self.streamWriter(schema, overwrite)
        delivery = self._delivery(schema, BatchOrigin())
        if isinstance(delivery, ExactlyOnce):
            problem = "without a batch id the rows are duplicated when the write, or one of its tasks, is repeated"
            remedy = 'Add option("batchId", NUMBER) and option("sinkId", NAME), or choose guarantee at_least_once.'
            raise KafkaError("TL-K80", FORMAT, problem, remedy)
        return BatchWriter(delivery)

    def _stream_writer(self, delivery: Delivery, checkpoint_location: str) -> StreamWriter:
        return StreamWriter(delivery, checkpoint_location)

    def _delivery(self, schema: StructType, origin: BatchOrigin, checkpoint_location: str = "") -> Delivery:
        for insecurity in sorted(insecure_settings(self._settings.client)):
            _warn_insecure(insecurity)
        if checkpoint_location and (throughput := read_throughput(Checkpoint(checkpoint_location))):
            origin = replace(origin, rate=throughput.rate)
        columns = self._columns(schema)
        require_configured_topics(self._settings)
        return delivery_for(self._settings, columns, origin)

    def _columns(self, schema: StructType) -> Columns:
        types = column_types(schema.fields, FORMAT)
        return Columns.bind(types, self._settings.topic, include_headers=self._settings.include_headers)


_RECREATED_TOPIC_ADVICE: Final = "To read the new one, start with a new checkpoint and sinkId, from startingOffsets."


@cache
def _warn_insecure(insecurity: str) -> None:
    """Log an insecure Kafka setting, once in a process."""
    _log.warning("%s: insecure: kafka.%s", FORMAT, insecurity)


class StreamWriter(SinkWriter[KafkaTaskResult]):
    """Writer of a stream's micro-batches, or of one in foreachBatch, named by the option ``batchId``.

    The commit of a batch writes the markers of partitions without a task. It syncs the state of a stateful query before
    Spark's entry in the commit log.

    Args:
        delivery: Delivery of rows to Kafka.
        location: Location of the checkpoint; "" if unknown.
        row_directory: Directory for the rows of tasks, which the driver writes in one transaction; None if tasks write.
            A transaction belongs to one producer in one process, and ``coalesce(1)`` would put all work since the last
            shuffle into one task. The commit writes the rows in the order of the partitions. A second attempt of a task
            does no harm, and its plan need not be deterministic: only the results that Spark takes count, and Kafka
            gets them all at once (TL-K23, TL-K65, TL-K66).
    """

    _task_error = KafkaError, "TL-K08", FORMAT

    def __init__(self, delivery: Delivery, location: str = "", row_directory: TaskRowDirectory | None = None) -> None:
        self._delivery, self._checkpoint_location, self._row_directory = delivery, location, row_directory

    def _task(self) -> Task:
        settings = self._delivery.settings
        return self._streaming_task(settings.batch, settings.sink_id)

    def _batch_id(self, batch_id: int | None) -> int | None:
        return self._delivery.settings.batch if batch_id is None else batch_id

    def _write_rows(self, task: Task, batches: Iterator[RecordBatch]) -> Any:
        if self._row_directory is not None:
            return self._row_directory.store_rows(task, map(with_lower_case_names, batches))
        return self._deliver_task(task, batches)

    def _deliver_task(self, task: Task, batches: Iterator[RecordBatch]) -> KafkaTaskResult:
        if isinstance(self._delivery, ExactlyOnce) and task_property(SPECULATION) == "true":
            problem = "spark.speculation is on: two attempts of a task would write concurrently"
            raise KafkaError("TL-K25", FORMAT, problem, "Set spark.speculation=false for this application.")
        input_rows = 0

        def count_rows() -> Iterator[RecordBatch]:
            nonlocal input_rows
            for batch in map(with_lower_case_names, batches):
                input_rows += batch.num_rows
                yield batch

        result = self._delivery.deliver(task, count_rows())
        return KafkaTaskResult(task.partition, task.batch, task.query, result, input_rows)

    def _record_batch(self, answers: Sequence[Any], batch: int | None) -> None:
        assert batch is not None
        if self._row_directory is not None:
            answers = [self._write_task_rows(sorted(answers, key=lambda answer: answer.partition), batch)]
        log_outcome(answers, batch)
        checkpoint = Checkpoint(self._checkpoint_location)
        note = SinkNote.read(checkpoint)
        result, throughput = self._batch_result(answers, batch, note), self._write_throughput(answers, batch)
        note.with_batch(batch, result, throughput).write(checkpoint)
        checkpoint.sync_state()

    def _write_task_rows(self, answers: Sequence[KafkaTaskRows], batch: int) -> KafkaTaskResult:
        """Write the rows of all tasks and the marker in one transaction."""
        if not answers:
            raise self._create_error("no task answered for the batch", "It is not committed and runs again.")
        assert self._row_directory is not None
        query, run = answers[0].query, answers[0].run
        batches = (rows for answer in answers for rows in answer.batches())
        result = self._delivery.deliver(Task(0, batch=batch, query=query, run=run), batches)
        self._row_directory.remove_files(answers)
        return KafkaTaskResult(0, batch, query, result, sum(answer.rows for answer in answers))

    def _batch_result(self, answers: Sequence[KafkaTaskResult], batch: int, note: SinkNote) -> BatchResult:  # noqa: ARG002 - LineWriter needs it
        """Return the counts of a batch; `note` holds the totals of the batches before."""
        settings, empty_partitions = self._delivery.settings, self._write_missing_markers(answers, batch)
        counted_results = [answer.delivery for answer in answers if not answer.delivery.has_manual_marker]
        counts = sum((Counter(answer.counts) for answer in answers), Counter[str]())
        for answer in answers:
            counts["given"] += answer.input_rows if answer.marker_rows is None else answer.marker_rows
            counts["unknown"] += answer.input_rows if answer.delivery.has_manual_marker else 0
        counts["acknowledged"] = sum(result.rows for result in counted_results)
        counts["dead_lettered"] = sum(result.dead_lettered for result in counted_results)
        counts["lost"] = sum(result.dropped_rows for result in counted_results)
        results = (*(answer.delivery for answer in answers), *empty_partitions)
        marks = MarkerStep.sum_partitions([result.marker_step for result in results])
        transactions = (result for result in counted_results if result.marker_step is not None)
        seconds = [result.seconds for result in transactions if result.seconds is not None]
        query = next((answer.query for answer in answers if answer.query), "")
        return BatchResult(counts, marks, f"{settings.sink_id or query}/{settings.parallelism}", seconds)

    def _write_missing_markers(self, answers: Sequence[KafkaTaskResult], batch: int) -> list[DeliveryResult]:
        """Write the markers of the partitions without a task."""
        if not isinstance(self._delivery, ExactlyOnce) or not answers:
            return []
        partitions = set(range(self._delivery.settings.parallelism)) - {answer.partition for answer in answers}
        tasks = (Task(partition, batch=batch, query=answers[0].query) for partition in sorted(partitions))
        return [self._delivery.deliver(task, ()) for task in tasks]

    def _write_throughput(self, answers: Sequence[KafkaTaskResult], batch: int) -> WriteThroughput | None:
        results = (answer.delivery for answer in answers)
        slowest = max(results, key=lambda result: result.seconds or 0.0, default=None)
        if slowest is None or slowest.seconds is None:
            return None
        return WriteThroughput(batch, slowest.bytes, slowest.seconds, self._delivery.settings.budget_s)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: ARG002, N803 - Spark's
        """Abort open transactions of the tasks, so that readers need not wait; committed ones stay."""
        budget_s = self._delivery.settings.budget_s
        checkpoint = Checkpoint(self._checkpoint_location)
        with suppress(JournalError):  # then the next batch has the same limit
            throughput = WriteThroughput(self._batch_id(batchId) or 0, 0, budget_s, budget_s)
            replace(SinkNote.read(checkpoint), throughput=throughput).write(checkpoint)
        if isinstance(self._delivery, ExactlyOnce):
            self._delivery.fence(Checkpoint(self._checkpoint_location).query_id or None)


class FailingWriter(StreamWriter):
    """Writer that raises an error in each task and in the commit.

    Spark creates a new writer to abort a batch whose commit failed. An error of that writer would hide the error of the
    commit from the user ("Writing job failed").
    """

    def __init__(self, error: KafkaError) -> None:  # it has no delivery
        self._write_error = error

    def _task(self) -> Task:
        raise self._write_error

    def _batch_id(self, batch_id: int | None) -> int | None:
        """Raise the error: Spark creates a new writer for a commit, too."""
        del batch_id
        raise self._write_error

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's
        """Do nothing: no transaction is open."""


class BatchWriter(StreamWriter):
    """Writer of a batch query's result: a query or a task that is repeated writes its rows again."""

    def _task(self) -> Task:
        return self._batch_task()

    def _record_batch(self, answers: Sequence[KafkaTaskResult], batch: int | None) -> None:
        log_outcome(answers, batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's
        """Do nothing: records in Kafka stay."""


def log_outcome(answers: Sequence[KafkaTaskResult], batch: int | None) -> None:
    """Log the lost rows, dead letters and skipped partitions of a batch."""
    results = [answer.delivery for answer in answers]
    rows, lost_rows = sum(result.rows for result in results), sum(result.dropped_rows for result in results)
    dead_letters = sum(result.dead_lettered for result in results)
    reason = next((result.drop_reason for result in results if result.drop_reason), "")
    if lost_rows:
        summary = f"{lost_rows:,} of {rows + lost_rows:,} rows lost (at_most_once): {printable(reason)}"
        _log.warning("%s: batch %s: %s", FORMAT, batch, summary)
    if dead_letters:
        _log.warning("%s: batch %s: %s rows went to the dead-letter topic", FORMAT, batch, f"{dead_letters:,}")
    if skipped := sum(result.was_skipped for result in results):
        _log.info("%s: batch %s: %s of %s partitions were in Kafka already", FORMAT, batch, skipped, len(results))


#: Most bytes of rows in a commit message: Java's arrays end at 2 GiB, and Spark copies a message several times.
MAX_ANSWER_BYTES: Final = 512 << 20
_PRIVATE_MODE: Final = 0o700
_SMALLER_BATCH_ADVICE: Final = "Lower maxOffsetsPerTrigger, or set parallelism=1 with .coalesce(1) before writeStream."


@dataclass(frozen=True)
class TaskRowDirectory:
    """Directory for the rows of one batch's tasks; created on the driver, sent to the tasks.

    Attributes:
        directory: Path of the query's directory; "" if the driver could not create it.
    """

    directory: str = ""

    @classmethod
    def for_batch(cls, query_key: str, batch: int | None) -> TaskRowDirectory:
        """Create the directory of a query for the batch that is about to run; a query runs one batch at a time.

        Rows of other batches are removed, unless `batch` is None for unknown. Spark creates one writer for the tasks of
        a batch and another one for its commit, so this may be called twice for a batch.
        """
        root = Path(tempfile.gettempdir()) / f"towline-rows-{os.geteuid()}"
        directory = root / hashlib.sha256(query_key.encode()).hexdigest()[:16]
        try:
            root.mkdir(_PRIVATE_MODE, exist_ok=True)
            if not _is_private(root):
                return cls()
            directory.mkdir(_PRIVATE_MODE, exist_ok=True)
            for file in directory.iterdir() if batch is not None else ():
                if not file.name.startswith(f"{batch}-"):
                    file.unlink()
        except OSError:
            return cls()  # rows are sent in the commit messages
        return cls(str(directory))

    def store_rows(self, task: Task, batches: Iterable[Any]) -> KafkaTaskRows:
        """Store all rows of a task: in a file, or in the result where there is no directory.

        Raises:
            KafkaError: TL-K23, the disk is full; TL-K66, too many rows for a result.
        """
        task_rows = KafkaTaskRows(task.partition, task.batch, task.query, task.run)
        if self.directory and Path(self.directory).is_dir():
            file = Path(self.directory) / f"{task.batch}-{uuid.uuid4().hex}"  # two attempts may run
            # No batch stays in memory, not even an empty one.
            with Spool(-1, partial(pa.OSFile, str(file), "wb")) as spool:
                spool.fill(batches)
            task_rows.rows = spool.rows
            if file.exists():
                task_rows.file, task_rows.file_size = str(file), file.stat().st_size
            return task_rows
        buffer, writer = pa.BufferOutputStream(), None
        for batch in batches:
            writer = writer or pa.ipc.new_stream(buffer, batch.schema)
            writer.write_batch(batch)
            task_rows.rows += batch.num_rows
            if buffer.tell() > MAX_ANSWER_BYTES:
                problem = f"a task has {buffer.tell() >> 20:,} MiB of rows for the driver, which is on another machine"
                raise KafkaError("TL-K66", FORMAT, problem, _SMALLER_BATCH_ADVICE)
        if writer is not None:
            writer.close()
        task_rows.content = buffer.getvalue().to_pybytes()
        return task_rows

    def remove_files(self, answers: Iterable[KafkaTaskRows]) -> None:
        """Remove the files of the tasks, and the directory if it is empty; never raises."""
        for file in (answer.file for answer in answers if answer.file):
            with suppress(OSError):
                Path(file).unlink()
        with suppress(OSError):
            if self.directory:
                Path(self.directory).rmdir()


def _is_private(directory: Path) -> bool:
    """Return whether no other user could have created the directory or can write to it: /tmp is everybody's."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
