"""Common base of the sinks: Spark's writer API, the identity of the writing task, and the check of results."""

from __future__ import annotations

import gc
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from towline.errors import TowlineError, without_traceback
from towline.sinks import Task

if TYPE_CHECKING:
    from pyarrow import RecordBatch

#: Local properties of a micro-batch's tasks (MicroBatchExecution); the job group is the run id.
BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
#: Spark passes session settings to tasks as local properties (SQLExecution.withSQLConfPropagated).
SPECULATION: Final = "spark.speculation"


@dataclass
class TaskResult(WriterCommitMessage):
    """Commit message of a task to the driver.

    Attributes:
        partition: Spark's partition id.
        batch: Batch id; None in a batch query.
    """

    partition: int
    batch: int | None


_ResultT = TypeVar("_ResultT", bound=TaskResult)


def task_property(name: str) -> str | None:
    """Return a local property of the running task; None outside a task, and in a thread of the user."""
    context = TaskContext.get()
    return context.getLocalProperty(name) if context else None


class SinkWriter(DataSourceStreamArrowWriter, DataSourceArrowWriter, Generic[_ResultT]):
    """Base of the sink writers: for a stream's batches, for one batch in foreachBatch, and for a batch query.

    Each task writes its rows (`_write_rows`). After all results the driver records the batch (`_record_batch`). Spark
    creates one writer for the tasks and another for the commit, so a writer has no state in between.
    """

    #: Class, code and location of the error for an invalid task or result.
    _task_error: tuple[type[TowlineError], str, str]

    @without_traceback
    def write(self, iterator: Iterator[RecordBatch]) -> _ResultT:
        """Write a partition.

        Raises:
            TowlineError: The rows are not durably written, or Spark does not name the batch.
        """
        freeze_gc()
        return self._write_rows(self._task(), iterator)

    @without_traceback
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name
        """Record a batch; idempotent.

        Raises:
            TowlineError: A result is missing or belongs to another batch, or the batch can't be recorded.
        """
        freeze_gc()
        batch = self._batch_id(batchId)
        invalid_answers = [answer for answer in messages if not isinstance(answer, TaskResult) or answer.batch != batch]
        if invalid_answers:
            problem = f"{len(invalid_answers)} of {len(messages)} tasks did not answer for batch {batch}"
            raise self._create_error(problem, "The batch is not committed and runs again when the query restarts.")
        self._record_batch(messages, batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name
        """Do nothing: rows that were written stay."""

    def _batch_id(self, batch_id: int | None) -> int | None:
        """Return the batch id that Spark passes in a stream; None in a batch query."""
        return batch_id

    def _task(self) -> Task:
        """Return the running task."""
        return self._streaming_task()

    def _streaming_task(self, batch_option: int | None = None, sink_id: str | None = None) -> Task:
        """Return the running task of a micro-batch; in foreachBatch with the option ``batchId``, and a query's name."""
        context, batch, query = TaskContext.get(), task_property(BATCH_ID), task_property(_QUERY_ID)
        if batch_option is not None:
            if batch not in (None, str(batch_option)):
                remedy = 'Give the id that foreachBatch gives: option("batchId", batch_id). A stream needs none.'
                raise self._create_error(f'option "batchId" is {batch_option}, and Spark runs batch {batch}', remedy)
            batch, query = str(batch_option), query or sink_id  # Connect and threads of a user get no query id
        if context is None or not batch or not query:
            problem = "Spark does not report the batch of this task, so the guarantee can't be kept"
            raise self._create_error(problem, "Use it with writeStream in micro-batch mode, not inside other code.")
        return Task(context.partitionId(), context.attemptNumber(), int(batch), query, task_property(_RUN_ID))

    def _batch_task(self) -> Task:
        """Return the running task of a batch query."""
        context = TaskContext.get()
        if context is None:
            raise self._create_error("this call is not in a Spark task", "Use it as a sink of a Spark query.")
        return Task(context.partitionId(), context.attemptNumber())

    def _create_error(self, problem: str, remedy: str) -> TowlineError:
        error_type, code, location = self._task_error
        return error_type(code, location, problem, remedy)

    @abstractmethod
    def _write_rows(self, task: Task, batches: Iterator[RecordBatch]) -> _ResultT:
        """Write the rows of a task."""

    @abstractmethod
    def _record_batch(self, answers: Sequence[Any], batch: int | None) -> None:
        """Record the batch of these results."""


_DAEMON_MODULE: Final = "pyspark.daemon"


@cache
def freeze_gc() -> None:
    """Freeze the loaded objects of a Spark worker, so that its garbage collections skip them.

    After every task a worker of Spark runs ``gc.collect`` over all loaded modules (``pyspark.daemon.manager``): 30 ms
    of CPU in each of the four workers of a micro-batch with a Python source and sink.

    Has an effect only in a worker of Spark, and at the first call: objects of a task, such as a producer with its
    callbacks, must still be collected. Call it at the start of each method that Spark calls.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if getattr(main, "name", "") == _DAEMON_MODULE:
        gc.freeze()
