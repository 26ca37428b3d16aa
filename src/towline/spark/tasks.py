"""What every sink has in common: what Spark calls, says of the task that writes, and which answers a driver takes."""

from __future__ import annotations

import gc
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from towline.errors import TowlineError, one_line
from towline.sinks import Task

if TYPE_CHECKING:
    from pyarrow import RecordBatch

#: Local properties Spark sets for the tasks of a micro-batch (MicroBatchExecution); the job group is the run's id.
_BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
#: Spark hands a session's settings to its tasks as local properties (SQLExecution.withSQLConfPropagated).
_SPECULATION: Final = "spark.speculation"

Refuse: TypeAlias = Callable[[str, str], TowlineError]
"""Makes the format's error of what is wrong and what to do."""


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


def micro_batch() -> str | None:
    """Number of the micro-batch that this task belongs to; None outside one, and in a thread that the user began."""
    context = TaskContext.get()
    return context.getLocalProperty(_BATCH_ID) if context else None


def streaming_task(refuse: Refuse, given: int | None = None, sink_id: str | None = None) -> Task:
    """The task of a micro-batch that runs here.

    Args:
        refuse: See `Refuse`.
        given: The option ``batchId`` of a write in foreachBatch; None in a stream.
        sink_id: Stands for the query's id in such a write where Spark does not say it: Spark Connect, a user's thread.

    Raises:
        TowlineError: As `refuse` makes it, where Spark does not name batch and query, or runs another batch.
    """
    context, batch = TaskContext.get(), micro_batch()
    query = context.getLocalProperty(_QUERY_ID) if context else None
    if given is not None:
        if batch not in (None, str(given)):
            do = 'Give the id that foreachBatch gives: option("batchId", batch_id). A stream needs none.'
            raise refuse(f'option "batchId" is {given}, and Spark runs batch {batch}', do)
        batch, query = str(given), query or sink_id
    if context is None or not batch or not query:
        what = "Spark does not say which batch this task belongs to, so the guarantee can't be kept"
        raise refuse(what, "Use it with writeStream in micro-batch mode, not inside other code.")
    run = context.getLocalProperty(_RUN_ID)
    return Task(context.partitionId(), context.attemptNumber(), int(batch), query, run)


def batch_task(refuse: Refuse) -> Task:
    """The task of a batch query that runs here.

    Raises:
        TowlineError: As `refuse` makes it, where there is none.
    """
    context = TaskContext.get()
    if context is None:
        raise refuse("there is no Spark task around this call", "Use it as a sink of a Spark query.")
    return Task(context.partitionId(), context.attemptNumber())


def speculates() -> bool:
    """Whether Spark may start this task a second time beside itself."""
    context = TaskContext.get()
    return context is not None and context.getLocalProperty(_SPECULATION) == "true"


def answers(
    messages: Sequence[WriterCommitMessage | None], kind: type[_AnswerT], batch: int | None, refuse: Refuse
) -> list[_AnswerT]:
    """The answers of all tasks of a batch.

    Raises:
        TowlineError: As `refuse` makes it, if one is missing or belongs to another batch.
    """
    given: list[Any] = list(messages)
    strange = [message for message in given if not isinstance(message, kind) or message.batch != batch]
    if strange:
        what = f"{len(strange)} of {len(given)} tasks did not answer for batch {batch}"
        raise refuse(what, "The batch is not committed and runs again when the query restarts.")
    return given


class SinkWriter(DataSourceStreamArrowWriter, DataSourceArrowWriter, Generic[_AnswerT]):
    """What Spark calls of a sink, for the batches of a stream, for one of them in foreachBatch, and for a batch query.

    Each task writes its rows (`_written`); when all have answered, the driver accounts for the batch (`_account`).
    Spark makes one writer for the tasks and another for the commit, so nothing is remembered in between.
    """

    #: Type of its tasks' answers.
    _kind: type[TaskAnswer]

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
        self._account(answers(messages, self._kind, batch, self._refuse), batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name
        """Do nothing: what was written stays."""

    def _number(self, given: int | None) -> int | None:
        """Of the batch, which Spark gives in a stream; None in a batch query."""
        return given

    def _task(self) -> Task:
        """The task that runs here."""
        return streaming_task(self._refuse)

    @staticmethod
    @abstractmethod
    def _refuse(what: str, do: str) -> TowlineError:
        """The format's error of what is wrong and what to do."""

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
