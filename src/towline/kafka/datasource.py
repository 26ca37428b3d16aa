"""``format("kafka_transactional")`` as Spark sees it: options in, one writer for streams and one for batch queries.

Mistakes in options show from ``__init__``, mistakes in columns from ``writer()`` and ``streamWriter()``: those are the
places whose exceptions Spark shows as they are. What is pickled to the tasks holds no secret and no connection.
"""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from towline.errors import ConfigError, KafkaError, TowlineError
from towline.kafka.columns import Columns
from towline.kafka.delivery import Task, delivery_for
from towline.kafka.options import FORMAT, SinkSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

    from towline.kafka.delivery import Delivery

__all__ = ["BatchWriter", "KafkaTransactional", "StreamWriter", "Written"]

#: Local properties Spark sets for the tasks of a micro-batch (MicroBatchExecution).
_BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("towline.kafka")


@dataclass
class Written(WriterCommitMessage):
    """A task's answer to the driver.

    Attributes:
        partition: Spark's partition id.
        batch: Batch id; None in a batch query.
        query: Streaming query id; None in a batch query.
        rows: Rows that reached Kafka.
        bytes: Bytes of their keys and values.
        lost: Rows given up (at_most_once only).
        why: Why.
    """

    partition: int
    batch: int | None
    query: str | None
    rows: int
    bytes: int
    lost: int = 0
    why: str = ""


def _one_line(method: Callable[P, R]) -> Callable[P, R]:
    """Show our own errors to Spark without the frames they came through: they tell their story themselves."""

    @functools.wraps(method)
    def bordered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except TowlineError as error:
            told = copy.copy(error)  # the same words; frames and causes stay behind
        raise told

    return bordered


class KafkaTransactional(DataSource):
    """Sink of Kafka records with a guarantee; options and columns as Spark's own Kafka sink has them."""

    @_one_line
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._settings = SinkSettings.parse(options)

    @classmethod
    def name(cls) -> str:
        """The word for ``format()``."""
        return FORMAT

    @_one_line
    def schema(self) -> StructType:
        """Refuse to be read.

        Raises:
            ConfigError: TL-C49, always.
        """
        raise ConfigError(
            "TL-C49",
            FORMAT,
            "this format only writes",
            'Read with format("kafka"), kafka.isolation.level=read_committed.',
        )

    @_one_line
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: ARG002, N802, FBT001 - Spark's signature
        """Bind the columns of a stream; complete mode appends, as in Spark's Kafka sink."""
        return StreamWriter(self._delivery(schema))

    @_one_line
    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:  # noqa: FBT001 - Spark's signature
        """Bind the columns of a batch query.

        Raises:
            ConfigError: TL-C49 for mode("overwrite"): Kafka can only append.
        """
        if overwrite:
            raise ConfigError(
                "TL-C49",
                FORMAT,
                'mode("overwrite") is not possible, a topic can only be appended to',
                'Use mode("append").',
            )
        return BatchWriter(self._delivery(schema))

    def _delivery(self, schema: StructType) -> Delivery:
        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        columns = Columns.bind(types, self._settings.topic, include_headers=self._settings.include_headers)
        return delivery_for(self._settings, columns)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    @_one_line
    def write(self, iterator: Iterator[RecordBatch]) -> Written:
        """Write a partition of a micro-batch.

        Raises:
            KafkaError: The rows are not safely in Kafka; TL-K08 if Spark does not say which batch this is.
        """
        return _write(self._delivery, iterator, _streaming_task())

    @_one_line
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Account for a batch; there is nothing left to do in Kafka, so repeats do no harm.

        Raises:
            KafkaError: TL-K08 if an answer is missing or belongs to another batch.
        """
        account(messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: what is in Kafka stays, and Spark runs the batch again."""


class BatchWriter(DataSourceArrowWriter):
    """Writes the result of a batch query; at_least_once: a failed and repeated task writes its rows again."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    @_one_line
    def write(self, iterator: Iterator[RecordBatch]) -> Written:
        """Write a partition.

        Raises:
            KafkaError: The rows are not safely in Kafka.
        """
        return _write(self._delivery, iterator, _task(None, None))

    @_one_line
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Account for the query."""
        account(messages, None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: what is in Kafka stays."""


def _write(delivery: Delivery, batches: Iterator[RecordBatch], task: Task) -> Written:
    done = delivery.deliver(task, batches)
    return Written(task.partition, task.batch, task.query, done.rows, done.bytes, done.lost, done.why)


def _streaming_task() -> Task:
    context = TaskContext.get()
    batch = context.getLocalProperty(_BATCH_ID) if context else None
    query = context.getLocalProperty(_QUERY_ID) if context else None
    if not batch or not query:
        what = "Spark does not say which batch this task belongs to, so the guarantee can't be kept"
        raise KafkaError("TL-K08", FORMAT, what, "Use it with writeStream in micro-batch mode, not inside other code.")
    return _task(int(batch), query)


def _task(batch: int | None, query: str | None) -> Task:
    context = TaskContext.get()
    if context is None:
        raise KafkaError(
            "TL-K08", FORMAT, "there is no Spark task around this call", "Use it as a sink of a Spark query."
        )
    return Task(context.partitionId(), context.attemptNumber(), batch, query)


def account(messages: Sequence[WriterCommitMessage | None], batch: int | None) -> Written:
    """Sum the answers of a batch's tasks; rows given up are logged as a warning.

    Returns:
        The sums, with partition -1.

    Raises:
        KafkaError: TL-K08 if an answer is missing or belongs to another batch.
    """
    answers: list[Any] = list(messages)
    strange = [m for m in answers if not isinstance(m, Written) or m.batch != batch]
    if strange:
        what = f"{len(strange)} of {len(answers)} tasks did not answer for batch {batch}"
        raise KafkaError("TL-K08", FORMAT, what, "The batch is not committed and runs again when the query restarts.")
    rows, size, lost = (sum(getattr(m, name) for m in answers) for name in ("rows", "bytes", "lost"))
    why = next((m.why for m in answers if m.why), "")
    if lost:
        _log.warning(
            "%s: batch %s: %s of %s rows lost (at_most_once): %s", FORMAT, batch, f"{lost:,}", f"{rows + lost:,}", why
        )
    query = answers[0].query if answers else None
    return Written(-1, batch, query, rows, size, lost, why)
