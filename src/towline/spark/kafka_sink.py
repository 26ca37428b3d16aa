"""``format("kafka_transactional")`` as Spark sees it: options in, one writer for streams and one for batch queries.

Mistakes in options show from ``__init__``, mistakes in columns from ``writer()`` and ``streamWriter()``: those are the
places whose exceptions Spark shows as they are. What is pickled to the tasks holds no secret and no connection.
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
from towline.errors import ConfigError, JournalError, KafkaError, one_line
from towline.guarantee import policy
from towline.kafka.admin import check_source_topics
from towline.kafka.clientconfig import insecurities
from towline.kafka.columns import Columns
from towline.kafka.delivery import (
    BatchOrigin,
    Delivered,
    ExactlyOnce,
    Spool,
    batch_origin,
    delivery_for,
    require_named_topics,
)
from towline.kafka.markers import MarkerStep
from towline.kafka.options import FORMAT, SinkSettings
from towline.sinks import Task, check_append, column_types, lower_case
from towline.spark.pace import WritePace
from towline.spark.session import check_pyspark
from towline.spark.tally import BatchResult, SinkNote, pace_of
from towline.spark.tasks import BATCH_ID, SPECULATION, SinkWriter, TaskAnswer, settle, task_property
from towline.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyarrow import RecordBatch
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from towline.kafka.delivery import Delivery

_log = logging.getLogger("towline.kafka")


@dataclass
class KafkaWritten(TaskAnswer):
    """What a task has in Kafka.

    Attributes:
        query: Streaming query id; None in a batch query.
        done: What became of its rows.
        given: How many rows the task was given, whatever became of them.
        counts: Further counts of the task, for the note.
    """

    query: str | None
    done: Delivered
    given: int
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def marked(self) -> int | None:
        """How many rows the marker says there were, of a task whose rows Kafka had already; None for another."""
        done = self.done
        return done.rows + done.dead_lettered if done.skipped and not done.by_hand else None


@dataclass
class KafkaGathered(TaskAnswer):
    """What a task has left for the driver to write.

    Attributes:
        run: Id of this run of the query; None if unknown.
        content: The Arrow stream with them; empty where they are in a file, or there are none.
        file: Path of a file with that stream; "" for none.
        file_size: Its bytes.
    """

    query: str | None
    run: str | None
    rows: int = 0
    content: bytes = b""
    file: str = ""
    file_size: int = 0

    def batches(self) -> Iterator[Any]:
        """The rows, as ``pyarrow.RecordBatch``es.

        Raises:
            KafkaError: TL-K65, the file is not there, or not whole.
        """
        if self.content:
            yield from pa.ipc.open_stream(pa.py_buffer(self.content))
        if not self.file:
            return
        try:
            mapped = pa.memory_map(self.file)
        except OSError as problem:
            raise self._gone(problem.strerror or str(problem)) from None
        with mapped:
            if mapped.size() != self.file_size:
                raise self._gone(f"it has {mapped.size():,} bytes and not {self.file_size:,}")
            yield from pa.ipc.open_stream(mapped)

    def _gone(self, why: str) -> KafkaError:
        what = f"the rows that a task left for the driver in {self.file} can not be read: {why}"
        do = "Does something clear that directory, or a second query use this checkpoint? The batch runs again."
        return KafkaError("TL-K65", FORMAT, what, do)


class KafkaTransactional(DataSource):
    """Sink of Kafka records with a guarantee; columns as of Spark's own Kafka sink, options in docs/options.md."""

    @one_line
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        check_pyspark(FORMAT)
        self._settings = SinkSettings.parse(options)

    @classmethod
    def name(cls) -> str:
        """The word for ``format()``."""
        return FORMAT

    @one_line
    def schema(self) -> StructType:
        """Refuse to be read.

        Raises:
            ConfigError: TL-C49, always.
        """
        do = 'Read with format("kafka"), kafka.isolation.level=read_committed.'
        raise ConfigError("TL-C49", FORMAT, "this format only writes", do)

    @one_line
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: ARG002, N802, FBT001 - Spark's signature
        """Bind the columns of a stream; complete mode appends, as in Spark's Kafka sink.

        Spark calls this on the driver before the tasks of every batch. The checkpoint is synced here, but for
        at_least_once: a batch of which something must not come twice must not be forgotten by Spark.

        Raises:
            ConfigError: TL-C48 for columns; TL-C23 for verifySourceTopics without a checkpoint on this machine.
            JournalError: TL-J20.
            KafkaError: TL-K04 for a topic that is not there; TL-K10, TL-K13, as `batch_origin` says.
        """
        settle()
        location = self.options.get("checkpointlocation", "")
        if not policy(self._settings.guarantee).serves_again:
            Checkpoint(location).sync()
        if self._settings.batch is not None:
            location = ""  # what is noted there is of a query's one sink; a foreachBatch may have several
        looks = self._settings.guarantee == "exactly_once" and location
        if self._settings.source_topics and (not location or Checkpoint(location).place):
            what = "the ids of the topics are kept in the query's checkpoint, which is on no disk of this machine"
            do = "Give the option checkpointLocation a path of the driver's machine, or leave verifySourceTopics out."
            raise ConfigError("TL-C23", f"{FORMAT} verifySourceTopics", what, do)
        try:
            if self._settings.source_topics:
                check_source_topics(self._settings.client, location, FORMAT, _ANEW)
            origin = batch_origin(self._settings, location) if looks else BatchOrigin()
        except KafkaError as problem:
            return FailingWriter(problem)
        delivery = self._delivery(schema, origin, location)
        if not self._settings.gather:
            return self._stream_writer(delivery, location)
        of = location or f"{self._settings.servers} {self._settings.sink_id}"
        batch = origin.newest if self._settings.batch is None else self._settings.batch
        return StreamWriter(delivery, location, RowsForDriver.beside(of, batch, self._settings.spool_disk))

    @one_line
    def writer(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: FBT001 - Spark's signature
        """Bind the columns of a batch query, or of a write in foreachBatch.

        Raises:
            ConfigError: TL-C49 for mode("overwrite"): Kafka can only append.
            TowlineError: With batchId, as `streamWriter`.
        """
        check_append(FORMAT, overwrite=overwrite)
        if self._settings.batch is not None:
            return self.streamWriter(schema, overwrite)
        return BatchWriter(self._delivery(schema, BatchOrigin(job=uuid.uuid4().hex)))

    def _stream_writer(self, delivery: Delivery, location: str) -> StreamWriter:
        return StreamWriter(delivery, location)

    def _delivery(self, schema: StructType, origin: BatchOrigin, location: str = "") -> Delivery:
        for insecurity in sorted(insecurities(self._settings.client)):
            _warn_of(insecurity)
        if location and (pace := pace_of(Checkpoint(location))):
            origin = replace(origin, rate=pace.rate)
        columns = self._columns(schema)
        require_named_topics(self._settings)
        return delivery_for(self._settings, columns, origin)

    def _columns(self, schema: StructType) -> Columns:
        types = column_types(schema.fields, FORMAT)
        return Columns.bind(types, self._settings.topic, include_headers=self._settings.include_headers)


_ANEW: Final = (
    "To read the new one, start the query with a new checkpoint and a new sinkId; startingOffsets says from where."
)


@cache
def _warn_of(insecurity: str) -> None:
    """Once in a process, not at every batch."""
    _log.warning("%s: insecure: kafka.%s", FORMAT, insecurity)


class StreamWriter(SinkWriter[KafkaWritten]):
    """Writes the micro-batches of a stream, or one of them in foreachBatch, which the option ``batchId`` names.

    The commit of a batch writes the markers of partitions that had no task, and makes durable what a stateful query
    remembers after it, before Spark's entry in the commit log.

    Args:
        delivery: How rows reach Kafka.
        location: Of the checkpoint; "" for unknown.
        gathered: Where tasks leave their rows: a transaction belongs to one producer, and that to one process, and
            ``coalesce(1)`` would put all work since the last shuffle into one task. The commit writes them, in the
            order of the partitions. A second attempt of a task does no harm, and its plan need not be deterministic:
            what counts is the answers that Spark takes, and they reach Kafka all at once (TL-K23, TL-K65, TL-K66).
    """

    _refusal = KafkaError, "TL-K08", FORMAT

    def __init__(self, delivery: Delivery, location: str = "", gathered: RowsForDriver | None = None) -> None:
        self._delivery, self._location, self._gathered = delivery, location, gathered

    def _task(self) -> Task:
        settings = self._delivery.settings
        return self._streaming_task(settings.batch, settings.sink_id)

    def _number(self, given: int | None) -> int | None:
        return self._delivery.settings.batch if given is None else given

    def _written(self, task: Task, batches: Iterator[RecordBatch]) -> Any:
        if self._gathered is not None:
            return self._gathered.leave(task, map(lower_case, batches))
        return self._delivered(task, batches)

    def _delivered(self, task: Task, batches: Iterator[RecordBatch]) -> KafkaWritten:
        if isinstance(self._delivery, ExactlyOnce) and task.batch is not None and task_property(SPECULATION) == "true":
            what = "spark.speculation is on: two attempts of one task would write beside each other"
            raise KafkaError("TL-K25", FORMAT, what, "Set spark.speculation=false for this application.")
        given = 0

        def counted() -> Iterator[RecordBatch]:
            nonlocal given
            for batch in map(lower_case, batches):
                given += batch.num_rows
                yield batch

        done = self._delivery.deliver(task, counted())
        return KafkaWritten(task.partition, task.batch, task.query, done, given)

    def _account(self, written: Sequence[Any], batch: int | None) -> None:
        assert batch is not None
        if self._gathered is not None:
            written = [self._written_together(sorted(written, key=lambda answer: answer.partition), batch)]
        log_outcome(written, batch)
        checkpoint = Checkpoint(self._location)
        note = SinkNote.read_to_write(checkpoint)
        note.after(batch, self._result(written, batch, note), self._pace(written, batch)).keep(checkpoint)
        checkpoint.sync_state()

    def _written_together(self, gathered: Sequence[KafkaGathered], batch: int) -> KafkaWritten:
        """Write the rows of all tasks and the marker in one transaction."""
        if not gathered:
            raise self._refuse("no task answered for the batch", "It is not committed and runs again.")
        assert self._gathered is not None
        first = gathered[0]
        rows = (rows for answer in gathered for rows in answer.batches())
        done = self._delivery.deliver(Task(0, batch=batch, query=first.query, run=first.run), rows)
        self._gathered.clear(gathered)
        return KafkaWritten(0, batch, first.query, done, sum(answer.rows for answer in gathered))

    def _result(self, written: Sequence[KafkaWritten], batch: int, note: SinkNote) -> BatchResult:  # noqa: ARG002 - a line's own asks
        """What the sink says of a batch; `note` is of those before."""
        others = self._write_missing_markers(written, batch)
        counted = [answer.done for answer in written if not answer.done.by_hand]
        counts = sum((Counter(answer.counts) for answer in written), Counter[str]())
        counts["given"] = sum(answer.given if answer.marked is None else answer.marked for answer in written)
        counts["acknowledged"] = sum(done.rows for done in counted)
        counts["dead_lettered"] = sum(done.dead_lettered for done in counted)
        counts["lost"] = sum(done.lost for done in counted)
        counts["unknown"] = sum(answer.given for answer in written if answer.done.by_hand)
        marks = MarkerStep.over([*(answer.done.marks for answer in written), *(one.marks for one in others)])
        seconds = [one.seconds for one in counted if one.marks is not None and one.seconds is not None]
        return BatchResult(counts, marks, self._sink(written), seconds)

    def _write_missing_markers(self, written: Sequence[KafkaWritten], batch: int) -> list[Delivered]:
        """Write the markers of the partitions that had no task."""
        if not isinstance(self._delivery, ExactlyOnce) or not written:
            return []
        rest = set(range(self._delivery.settings.parallelism)) - {answer.partition for answer in written}
        tasks = (Task(partition, batch=batch, query=written[0].query) for partition in sorted(rest))
        return [self._delivery.deliver(task, ()) for task in tasks]

    def _pace(self, written: Sequence[KafkaWritten], batch: int) -> WritePace | None:
        slowest = max((one.done for one in written), key=lambda done: done.seconds or 0.0, default=None)
        if slowest is None or slowest.seconds is None:
            return None
        return WritePace(batch, slowest.bytes, slowest.seconds, self._delivery.settings.budget_s)

    def _sink(self, written: Sequence[KafkaWritten]) -> str:
        settings = self._delivery.settings
        query = next((answer.query for answer in written if answer.query), "")
        return f"{settings.sink_id or query}/{settings.parallelism}"

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: ARG002, N803 - Spark's
        """End what tasks may have left open, so that readers need not wait; what is committed stays committed."""
        budget_s = self._delivery.settings.budget_s
        checkpoint = Checkpoint(self._location)
        with suppress(JournalError):  # then the next one is tried as this one was
            pace = WritePace(self._number(batchId) or 0, 0, budget_s, budget_s)
            replace(SinkNote.read_to_write(checkpoint), pace=pace).keep(checkpoint)
        if isinstance(self._delivery, ExactlyOnce):
            self._delivery.fence(Checkpoint(self._location).query or None)


class FailingWriter(StreamWriter):
    """Writes nothing and says why.

    Spark makes a writer anew to abort a batch whose commit failed; an error of that one would hide the error of the
    commit from the user ("Writing job failed"). Each task says what the problem is, and so does the commit.
    """

    def __init__(self, problem: KafkaError) -> None:  # it has no delivery
        self._problem = problem

    def _task(self) -> Task:
        raise self._problem

    def _number(self, given: int | None) -> int | None:
        """Raise it: Spark makes the writer anew for a commit, too."""
        del given
        raise self._problem

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's
        """Do nothing: nothing was begun."""


class BatchWriter(StreamWriter):
    """Writes the result of a batch query.

    exactly_once: one transaction for each partition, and a newer attempt of a task fences the older. There is no batch
    id and so no marker: a query that is run again writes its rows again, so in foreachBatch it is refused (TL-K80).
    at_least_once: so does a repeated task.
    """

    def _task(self) -> Task:
        if isinstance(self._delivery, ExactlyOnce) and (batch := task_property(BATCH_ID)):
            what = f"batch {batch} of a stream is written in foreachBatch without its id: its repeat would be doubled"
            do = 'Add option("batchId", batch_id) and option("sinkId", NAME), or choose guarantee at_least_once.'
            raise KafkaError("TL-K80", FORMAT, what, do)
        return self._batch_task()

    def _account(self, written: Sequence[KafkaWritten], batch: int | None) -> None:
        log_outcome(written, batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's
        """Do nothing: what is in Kafka stays."""


def log_outcome(written: Sequence[KafkaWritten], batch: int | None) -> None:
    """Log what a person should know of a batch: rows given up, and dead letters."""
    parts = [answer.done for answer in written]
    rows, lost, dead = (sum(getattr(one, name) for one in parts) for name in ("rows", "lost", "dead_lettered"))
    why = next((one.why for one in parts if one.why), "")
    if lost:
        what = f"{lost:,} of {rows + lost:,} rows lost (at_most_once): {printable(why)}"
        _log.warning("%s: batch %s: %s", FORMAT, batch, what)
    if dead:
        _log.warning("%s: batch %s: %s rows went to the dead-letter topic", FORMAT, batch, f"{dead:,}")
    if skipped := sum(one.skipped for one in parts):
        _log.info("%s: batch %s: %s of %s partitions were in Kafka already", FORMAT, batch, skipped, len(parts))


#: Most bytes of rows in one answer: Java's arrays end at 2 GiB, and Spark copies an answer several times.
ANSWER_BYTES: Final = 512 << 20
_PRIVATE: Final = 0o700
_SMALLER: Final = (
    "Make batches smaller (maxOffsetsPerTrigger), or set parallelism=1 and put .coalesce(1) before writeStream."
)


@dataclass(frozen=True)
class RowsForDriver:
    """Where the tasks of one batch leave their rows; made on the driver, travels to the tasks.

    Attributes:
        directory: Of the query, made by the driver; "" where it could make none.
        disk: Bytes of rows that a task leaves there at most; None for what it holds.
    """

    directory: str = ""
    disk: int | None = None

    @classmethod
    def beside(cls, location: str, batch: int | None, disk: int | None) -> RowsForDriver:
        """A place for the batch that is about to run of the query with a checkpoint, which runs one at a time.

        What other batches of it left is removed, unless it is not known which one this is. Spark makes one writer for
        the tasks of a batch and another one for its commit, so the same batch may ask twice.
        """
        root = Path(tempfile.gettempdir()) / f"towline-rows-{os.geteuid()}"
        directory = root / hashlib.sha256(location.encode()).hexdigest()[:16]
        try:
            root.mkdir(_PRIVATE, exist_ok=True)
            if not _is_private(root):
                return cls(disk=disk)
            directory.mkdir(_PRIVATE, exist_ok=True)
            for file in directory.iterdir() if batch is not None else ():
                if not file.name.startswith(f"{batch}-"):
                    file.unlink()
        except OSError:
            return cls(disk=disk)  # rows come with the answers
        return cls(str(directory), disk)

    def leave(self, task: Task, batches: Iterable[Any]) -> KafkaGathered:
        """Take all rows of a task.

        Raises:
            KafkaError: TL-K23, the disk is full or the limit is reached; TL-K66, too many for an answer.
        """
        left = KafkaGathered(task.partition, task.batch, task.query, task.run)
        if self.directory and Path(self.directory).is_dir():
            file = Path(self.directory) / f"{task.batch}-{uuid.uuid4().hex}"  # a second attempt may be at work
            # Nothing stays in memory, not even a batch without a byte.
            with Spool(-1, self.disk, partial(pa.OSFile, str(file), "wb")) as spool:
                spool.fill(batches)
            left.rows = spool.rows
            if file.exists():
                left.file, left.file_size = str(file), file.stat().st_size
            return left
        answer, writer = pa.BufferOutputStream(), None
        for batch in batches:
            writer = writer or pa.ipc.new_stream(answer, batch.schema)
            writer.write_batch(batch)
            left.rows += batch.num_rows
            if answer.tell() > ANSWER_BYTES:
                what = f"a task has {answer.tell() >> 20:,} MiB of rows for the driver, which is on another machine"
                raise KafkaError("TL-K66", FORMAT, what, _SMALLER)
        if writer is not None:
            writer.close()
        left.content = answer.getvalue().to_pybytes()
        return left

    def clear(self, answers: Iterable[KafkaGathered]) -> None:
        """Remove what tasks left, and the directory when nothing else lies in it; never raises."""
        for file in (answer.file for answer in answers if answer.file):
            with suppress(OSError):
                Path(file).unlink()
        with suppress(OSError):
            if self.directory:
                Path(self.directory).rmdir()


def _is_private(directory: Path) -> bool:
    """Whether nobody else could have put it there, or can write into it: a temporary directory is everybody's."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
