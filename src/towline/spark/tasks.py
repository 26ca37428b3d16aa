"""What every sink has in common: what Spark calls, says of the task that writes, and which answers a driver takes."""

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

from towline.errors import TowlineError, one_line
from towline.sinks import Task

if TYPE_CHECKING:
    from pyarrow import RecordBatch

#: Local properties Spark sets for the tasks of a micro-batch (MicroBatchExecution); the job group is the run's id.
BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
#: Spark hands a session's settings to its tasks as local properties (SQLExecution.withSQLConfPropagated).
SPECULATION: Final = "spark.speculation"


@dataclass
class TaskAnswer(WriterCommitMessage):
    """A task's answer to the driver.

    Attributes:
        partition: Spark's partition id.
        batch: Batch id; None in a batch query.
    """

    partition: int
    batch: int | None


_AnswerT = TypeVar("_AnswerT", bound=TaskAnswer)


def task_property(name: str) -> str | None:
    """A local property of the task that runs here; None outside one, and in a thread that the user began."""
    context = TaskContext.get()
    return context.getLocalProperty(name) if context else None


class SinkWriter(DataSourceStreamArrowWriter, DataSourceArrowWriter, Generic[_AnswerT]):
    """What Spark calls of a sink, for the batches of a stream, for one of them in foreachBatch, and for a batch query.

    Each task writes its rows (`_written`); when all have answered, the driver accounts for the batch (`_account`).
    Spark makes one writer for the tasks and another for the commit, so nothing is remembered in between.
    """

    #: Class, code and place of the error of a task, or an answer, that can't be.
    _refusal: tuple[type[TowlineError], str, str]

    @one_line
    def write(self, iterator: Iterator[RecordBatch]) -> _AnswerT:
        """Write a partition.

        Raises:
            TowlineError: The rows are not safely there, or Spark does not say which batch this is.
        """
        settle()
        return self._written(self._task(), iterator)

    @one_line
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name
        """Account for a batch; repeats do no harm.

        Raises:
            TowlineError: An answer is missing or belongs to another batch, or the batch can't be accounted for.
        """
        settle()
        batch = self._number(batchId)
        strange = [one for one in messages if not isinstance(one, TaskAnswer) or one.batch != batch]
        if strange:
            what = f"{len(strange)} of {len(messages)} tasks did not answer for batch {batch}"
            raise self._refuse(what, "The batch is not committed and runs again when the query restarts.")
        self._account(messages, batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name
        """Do nothing: what was written stays."""

    def _number(self, given: int | None) -> int | None:
        """Of the batch, which Spark gives in a stream; None in a batch query."""
        return given

    def _task(self) -> Task:
        """The task that runs here."""
        return self._streaming_task()

    def _streaming_task(self, given: int | None = None, sink_id: str | None = None) -> Task:
        """The task of a micro-batch that runs here.

        Args:
            given: The option ``batchId`` of a write in foreachBatch; None in a stream.
            sink_id: Stands for the query's id in such a write where Spark does not say it: Connect, a user's thread.
        """
        context, batch, query = TaskContext.get(), task_property(BATCH_ID), task_property(_QUERY_ID)
        if given is not None:
            if batch not in (None, str(given)):
                do = 'Give the id that foreachBatch gives: option("batchId", batch_id). A stream needs none.'
                raise self._refuse(f'option "batchId" is {given}, and Spark runs batch {batch}', do)
            batch, query = str(given), query or sink_id
        if context is None or not batch or not query:
            what = "Spark does not say which batch this task belongs to, so the guarantee can't be kept"
            raise self._refuse(what, "Use it with writeStream in micro-batch mode, not inside other code.")
        return Task(context.partitionId(), context.attemptNumber(), int(batch), query, task_property(_RUN_ID))

    def _batch_task(self) -> Task:
        """The task of a batch query that runs here."""
        context = TaskContext.get()
        if context is None:
            raise self._refuse("there is no Spark task around this call", "Use it as a sink of a Spark query.")
        return Task(context.partitionId(), context.attemptNumber())

    def _refuse(self, what: str, do: str) -> TowlineError:
        kind, code, where = self._refusal
        return kind(code, where, what, do)

    @abstractmethod
    def _written(self, task: Task, batches: Iterator[RecordBatch]) -> _AnswerT:
        """Write the rows of a task."""

    @abstractmethod
    def _account(self, written: Sequence[Any], batch: int | None) -> None:
        """Account for the batch of these answers."""


_DAEMON: Final = "pyspark.daemon"


@cache
def settle() -> None:
    """Leave what is loaded by now out of every later search for cycles; for the beginning of whatever Spark calls.

    After every task a worker of Spark looks for cycles in all that it has loaded (``pyspark.daemon.manager`` calls
    ``gc.collect``): 30 ms of CPU in each of the four that a micro-batch with a Python source and sink passes.

    Does something in a worker of Spark, and there at its first call alone: what a task makes, a producer with its
    callbacks for example, must be found when it is thrown away.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if getattr(main, "name", "") == _DAEMON:
        gc.freeze()
