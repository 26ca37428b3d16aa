"""``format("mqtt")`` as a sink: a batch enters a gateway's outbox exactly once, and the gateway publishes it.

A task's batch is identified by query, partition and batch id; rows already in the outbox are not added again [I10]. So
a batch that Spark repeats after a crash, or a task that it starts twice, sends no message twice. A full outbox blocks
the task [I7].
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, JournalError, JournalFull
from towline.gateway.identity import JournalPosition, check_offset
from towline.schema import MESSAGE_SCHEMA, NO_MESSAGES
from towline.sinks import check_append, check_columns, column_types, with_lower_case_names
from towline.spark.link import GatewayAddress, retry_while_unreachable
from towline.spark.tasks import SinkWriter, TaskResult
from towline.timing import Backoff

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from towline.gateway.client import GatewayClient
    from towline.gateway.identity import StoredBatch
    from towline.sinks import Task

_FORMAT: Final = 'format("mqtt")'
#: Approximate bytes sent to the gateway at a time, and buffered for a retry.
_CHUNK_BYTES: Final = 16 << 20
#: Longest wait for the broker in one call, in seconds; repeated until confirmTimeout.
_BROKER_POLL_S: Final = 30.0

_WriterT = TypeVar("_WriterT", bound="MqttStreamWriter")


@dataclass
class MqttTaskResult(TaskResult):
    """Result of a task that wrote to the outbox.

    Attributes:
        rows: Number of its rows in the outbox.
        already_stored: Whether they were in the outbox before.
        outbox_offset: End of the outbox.
    """

    rows: int
    already_stored: bool
    outbox_offset: JournalPosition


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Yield rows in chunks of about `_CHUNK_BYTES`, and whether a chunk is the last; one empty chunk without rows."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for rows in _halve(batch):
            if pending and size + rows.nbytes > _CHUNK_BYTES:
                yield pa.concat_batches(pending), False
                pending, size = [], 0
            pending.append(rows)
            size += rows.nbytes
    yield pa.concat_batches(pending) if pending else NO_MESSAGES, True


def _halve(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each piece is at most `_CHUNK_BYTES` or one row; no row is copied."""
    if batch.num_rows < 2 or batch.nbytes <= _CHUNK_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _halve(batch.slice(0, half))
    yield from _halve(batch.slice(half))


@dataclass(frozen=True)
class MqttStreamWriter(SinkWriter[MqttTaskResult]):
    """Writer of a stream's micro-batches; picklable, and free of secrets [I12].

    The commit of a batch stores the end of the outbox in the checkpoint. Rows in the outbox are sent even if their
    batch is aborted, and are not added again when Spark repeats the batch.

    Attributes:
        address: Address of the gateway.
        columns: Columns of the rows.
        retry_timeout_s: Longest wait for room in a full outbox, or for an unreachable gateway, in seconds.
        confirm_timeout_s: Longest wait until the broker has acknowledged a batch; None for no wait.
        checkpoint: Location of the query's checkpoint; "" for unknown.
        offset_hash: Hash of the batch's offset log entry; "" for unknown.
        name_prefix: Prefix of the query's id in the name of the batches.
        checkpointed_offset: End of the outbox, as stored in the checkpoint.
    """

    address: GatewayAddress
    columns: SinkColumns
    retry_timeout_s: float
    confirm_timeout_s: float | None
    checkpoint: str = ""
    offset_hash: str = ""
    name_prefix: str = ""
    checkpointed_offset: JournalPosition | None = None

    _task_error = GatewayError, "TL-G25", _FORMAT

    def _write_rows(self, task: Task, batches: Iterator[pa.RecordBatch]) -> MqttTaskResult:
        """Store all rows of a task in the outbox, and wait for the broker if configured; TL-G22 to TL-G24."""
        batch, name = task.batch or 0, f"{self.name_prefix}{task.query or ''}/{task.partition}"
        attempt, origin = uuid.uuid4().hex, self.offset_hash
        state: StoredBatch = self._call_with_retry(methodcaller("stored_batch", name, batch, origin, attempt))
        if state.newest > batch:
            problem = f"the outbox has batch {state.newest} of this query, which now writes batch {batch}"
            remedy = "bring back the newest one, or start the query with a new checkpoint directory."
            raise GatewayError("TL-G22", _FORMAT, problem, f"Its checkpoint is an older copy: {remedy}")
        if not state.whole:
            first_row, origins = 0, {"origin": origin, "attempt": attempt}
            for rows, is_last in _chunks(map(self.columns.rows, batches)):
                send = methodcaller("send", name, batch, rows, start=first_row, is_last=is_last, **origins)
                state = self._call_with_retry(send)
                first_row += rows.num_rows
        if self.confirm_timeout_s is not None:
            self._await_confirmation(state.end, self.confirm_timeout_s)
        return MqttTaskResult(task.partition, task.batch, state.rows, state.already, state.outbox)

    def _call_with_retry(self, call: Callable[[GatewayClient], Any]) -> Any:
        """Repeat a call while the outbox is full or the gateway is unreachable, up to `retry_timeout_s`."""
        backoff, deadline = Backoff(first_s=0.1, max_s=5.0), time.monotonic() + self.retry_timeout_s
        while True:
            try:
                with self.address.connect() as client:
                    return call(client)
            except (JournalFull, GatewayUnreachable) as error:
                if time.monotonic() >= deadline:
                    problem = f"the outbox accepted no rows within {self.retry_timeout_s:g} s: {error.problem}"
                    remedy = "deliver messages or make room, then restart the query; retryTimeout = inf never gives up."
                    raise GatewayError("TL-G23", _FORMAT, problem, f"Nothing is lost: {remedy}") from error
                time.sleep(backoff.next_pause())

    def _await_confirmation(self, end_offset: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            poll_s = min(remaining_s, _BROKER_POLL_S)
            if self._call_with_retry(methodcaller("wait_delivered", end_offset, timeout_s=poll_s)):
                return
        problem = f"the broker has not confirmed a batch within {timeout_s:g} s"
        remedy = "Its messages are in the outbox and are sent; restart the query, it stores no batch twice."
        raise GatewayError("TL-G24", _FORMAT, problem, remedy)

    def _record_batch(self, answers: Sequence[MqttTaskResult], batch: int | None) -> None:  # noqa: ARG002 - the outbox has it
        newest = max((answer.outbox_offset for answer in answers), key=attrgetter("offset"), default=None)
        if newest is not None and newest != self.checkpointed_offset:
            newest.write_outbox_note(self.checkpoint)


@dataclass(frozen=True)
class MqttBatchWriter(MqttStreamWriter):
    """Writer of a batch query's result; a task that Spark repeats sends no message twice, a repeated query does.

    After the job the outbox forgets its names. Of an aborted job, complete partitions in the outbox are sent, others
    never. The name prefix is unique to this run.
    """

    def _task(self) -> Task:
        return self._batch_task()

    def _record_batch(self, answers: Sequence[MqttTaskResult], batch: int | None) -> None:
        """Remove the job's names from the outbox; an unavailable gateway removes them itself, days later."""
        del answers, batch
        with contextlib.suppress(GatewayError, JournalError), replace(self.address, ticket="").connect() as client:
            client.end_job(self.name_prefix)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: ARG002, N803 - Spark's
        """Remove the job's names from the outbox."""
        self._record_batch((), None)


def stream_writer(options: Mapping[str, str], schema: StructType) -> MqttStreamWriter:
    """Bind a stream's options and columns, and connect to or start the gateway; on the driver, before each batch.

    The checkpoint is synced: a power failure must not remove a batch from Spark's log that is in the outbox. The outbox
    must be the one stored in the checkpoint, not an older copy [I14].

    Raises:
        ConfigError: Invalid options or columns.
        GatewayError: TL-G35 to TL-G37, checkpoint and outbox do not match; TL-G48, tasks of a gateway on a network need
            a ticket for this query, and its id is unknown.
        JournalError: TL-J20, the checkpoint can't be synced.
        TowlineError: Why the gateway can't start.
    """
    location = next((value for key, value in options.items() if key.lower() == "checkpointlocation"), "")
    writer = _create_writer(MqttStreamWriter, options, schema, location)
    checkpoint = Checkpoint(location)
    checkpoint.sync()
    batch = checkpoint.last_planned_batch()
    offset_hash = "" if batch is None else checkpoint.offsets_hash(batch) or ""
    offset = JournalPosition.read_outbox_note(location)
    prefix, subject = _writer_names(checkpoint, location) if writer.address.remote else ("", "")
    address = _checked_address(writer.address, subject, offset)
    writer = replace(writer, address=address, checkpoint=location, offset_hash=offset_hash)
    return replace(writer, name_prefix=prefix, checkpointed_offset=offset)


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> MqttBatchWriter:
    """Bind a batch query's options and columns.

    Raises:
        ConfigError: Invalid options or columns; TL-C49 for ``mode("overwrite")``.
    """
    check_append(_FORMAT, overwrite=overwrite)
    writer, job = _create_writer(MqttBatchWriter, options, schema), f"job-{uuid.uuid4().hex}"
    address = _checked_address(writer.address, job) if writer.address.remote else writer.address
    return replace(writer, address=address, name_prefix=job)


def _create_writer(
    writer_type: type[_WriterT], texts: Mapping[str, str], schema: StructType, checkpoint: str = ""
) -> _WriterT:
    from towline.spark.options import parse_sink_options  # noqa: PLC0415 - workers need no pydantic

    options = parse_sink_options(texts, checkpoint)
    defaults = {"topic": options.topic, "qos": options.qos, "retain": options.retain}
    columns = SinkColumns.bind(column_types(schema.fields, _FORMAT), options.qos_levels, **defaults)
    timeout_s = options.confirm_timeout_s if options.confirm == "broker" else None
    return writer_type(options.address, columns, options.retry_timeout_s, timeout_s)


def _checked_address(address: GatewayAddress, subject: str, offset: JournalPosition | None = None) -> GatewayAddress:
    """Check that an outbox matches the checkpointed offset; return the address with a ticket. Awaits the gateway."""

    def check_once() -> GatewayAddress:
        with address.connect() as client:
            if offset is not None:
                extent = client.extent(offset.offset, outbox=True)
                check_offset(address.location, offset, extent, kind="outbox")
            if not address.remote:
                return address
            return address.with_ticket(client.request_write_ticket(subject, valid_s=address.ticket_s))

    return retry_while_unreachable(check_once)


def _writer_names(checkpoint: Checkpoint, checkpoint_location: str) -> tuple[str, str]:
    """Return the name prefix of a query's writers, and the subject of the ticket for them."""
    # Tasks get the query's id from Spark, this process only from the checkpoint, without Hadoop's file systems.
    if checkpoint_hash := checkpoint.location_id:
        return f"checkpoint-{checkpoint_hash}/", f"checkpoint-{checkpoint_hash}"
    if not (query_id := checkpoint.query_id):
        unreadable = f'the checkpoint "{checkpoint_location}" can\'t be read on the driver'
        problem = f"a ticket for this query needs its id, and {unreadable}"
        remedy = "Give checkpointLocation with the name of its file system (hdfs://..., s3a://...)"
        raise GatewayError("TL-G48", _FORMAT, problem, f"{remedy}, or run the gateway beside Spark.")
    return "", query_id


#: Types of each column (``DataType.simpleString``); error messages suggest the first.
ACCEPTED_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "payload": ("binary", "string"),
    "topic": ("string",),
    "qos": ("tinyint", "smallint", "int", "bigint"),
    "retain": ("boolean",),
    "content_type": ("string",),
    "payload_is_utf8": ("boolean",),
    "response_topic": ("string",),
    "correlation_data": ("binary", "string"),
    "user_properties": ("array<struct<key:string,value:string>>",),
    "message_expiry_seconds": ("bigint", "int", "smallint", "tinyint"),
}
#: Columns of the source that are not sent; they are accepted.
_IGNORED_COLUMNS: Final = frozenset({"duplicate", "subscription_ids", "received_at", "gateway", "offset"})


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """Columns of a sink's rows, with defaults for the missing ones.

    Attributes:
        columns: Columns that are sent.
        qos_levels: QoS levels that the guarantee allows.
        defaults: Default ``topic``, ``qos`` and ``retain``; None for no default.
    """

    columns: frozenset[str]
    qos_levels: tuple[int, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def bind(cls, schema: Mapping[str, str], qos_levels: tuple[int, ...], **defaults: Any) -> SinkColumns:
        """Check a schema, as returned by `column_types`, against the columns that the sink accepts.

        Raises:
            ConfigError: TL-C48 for a column that is missing, unknown or of another type.
        """
        column_types = {name: kind for name, kind in schema.items() if name not in _IGNORED_COLUMNS}
        check_columns(_FORMAT, "MQTT", column_types, ACCEPTED_TYPES, defaults["topic"])
        return cls(frozenset(schema) & ACCEPTED_TYPES.keys(), qos_levels, defaults)

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Convert rows to `MESSAGE_SCHEMA`.

        Raises:
            ConfigError: TL-C12, a row's QoS contradicts the guarantee.
        """
        batch = with_lower_case_names(batch)
        columns = [self._column(batch, field) for field in MESSAGE_SCHEMA]
        rows = pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)
        if "qos" in self.columns:
            self._check_qos(rows.column("qos"))
        return rows

    def _column(self, batch: pa.RecordBatch, field: pa.Field) -> Any:
        default = self.defaults.get(field.name)
        if field.name not in self.columns:
            return pa.repeat(pa.scalar(default, field.type), batch.num_rows)
        column = batch.column(field.name)
        if field.name == "qos":
            column = _clamp_qos(column)
        column = column.cast(field.type)
        return column if default is None else column.fill_null(pa.scalar(default, field.type))

    def _check_qos(self, column: Any) -> None:
        invalid_levels = [level for level in column.unique().to_pylist() if level not in self.qos_levels]
        if invalid_levels:
            allowed = " or ".join(map(str, self.qos_levels))
            problem = f"a row has QoS {invalid_levels[0]}, the guarantee publishes with {allowed}"
            remedy = "Change the row, or the option guarantee. Only rows in the outbox are sent."
            raise ConfigError("TL-C12", f'{_FORMAT} column "qos"', problem, remedy)


def _clamp_qos(column: Any) -> Any:
    """Replace each invalid QoS by 127, so that the column fits into a byte."""
    is_valid = pc.or_(pc.is_null(column), pc.is_in(column, pa.array([0, 1, 2], column.type)))
    return pc.if_else(is_valid, column, pa.scalar(127, column.type))
