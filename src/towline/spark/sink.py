"""``format("mqtt")`` as a sink: a batch enters the outbox of a gateway exactly once, the gateway delivers it.

A task's batch has a name, query and partition, and a number; what of it is in the outbox already stays out [I10]. So a
batch that Spark runs again after a crash, or a task that it starts twice, sends nothing twice. A full outbox holds the
task back [I7].
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, JournalError, JournalFull
from towline.gateway.identity import KnownOffset, check_offset
from towline.schema import MESSAGE_SCHEMA, NO_MESSAGES
from towline.sinks import check_append, check_columns, column_types, lower_case
from towline.spark.link import GatewayPlace, patiently
from towline.spark.tasks import SinkWriter, TaskAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from towline.gateway.client import GatewayClient
    from towline.gateway.identity import StoredBatch
    from towline.sinks import Task

_WHERE: Final = 'format("mqtt")'
#: Bytes brought to the gateway at a time, and kept for a repeat, about.
_CHUNK_BYTES: Final = 16 << 20
#: Longest single wait for the broker, in seconds; repeated until the option's time is over.
_GLANCE_S: Final = 30.0

_T = TypeVar("_T")
_WriterT = TypeVar("_WriterT", bound="MqttStreamWriter")


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, and how soon, a full outbox or a gateway that does not answer is tried again.

    Attributes:
        strategy: ``never``, ``constant``, ``exponential`` or ``capped`` (exponential up to a cap).
        interval_s: First pause, in seconds.
        multiplier: Of each pause over the one before.
        cap_s: Longest pause, in seconds.
        attempts: Repeats; 0 for one try only, below 0 for ever.
    """

    strategy: Literal["never", "constant", "exponential", "capped"] = "capped"
    interval_s: Annotated[float, Ge(0.001)] = 0.1
    multiplier: Annotated[float, Ge(1)] = 2.0
    cap_s: Annotated[float, Ge(0.001)] = 5.0
    attempts: Annotated[int, Ge(-1)] = 120

    def pauses(self) -> Iterator[float]:
        """The pause before each repeat, in seconds."""
        pause, left = self.interval_s, 0 if self.strategy == "never" else self.attempts
        while left:
            left -= 1
            yield pause
            if self.strategy != "constant":
                pause = min(pause * self.multiplier, self.cap_s if self.strategy == "capped" else 86_400.0)


@dataclass
class MqttWritten(TaskAnswer):
    """What a task has in the outbox.

    Attributes:
        rows: Rows that are in the outbox now.
        already: They were there before.
        outbox: How far the outbox had come then; None from a gateway that does not say.
    """

    rows: int
    already: bool
    outbox: KnownOffset | None = None


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Rows in pieces of about `_CHUNK_BYTES`, and whether a piece is the last; without any row one empty piece."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for rows in _slices(batch):
            if waiting and size + rows.nbytes > _CHUNK_BYTES:
                yield pa.concat_batches(waiting), False
                waiting, size = [], 0
            waiting.append(rows)
            size += rows.nbytes
    yield pa.concat_batches(waiting) if waiting else NO_MESSAGES, True


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each piece is at most `_CHUNK_BYTES` or one row; nothing is copied."""
    if batch.num_rows < 2 or batch.nbytes <= _CHUNK_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _slices(batch.slice(0, half))
    yield from _slices(batch.slice(half))


@dataclass(frozen=True)
class MqttStreamWriter(SinkWriter[MqttWritten]):
    """Writes the micro-batches of a stream; picklable, and free of secrets [I12].

    The commit of a batch remembers how far the outbox has come. What is in the outbox when a batch is given up is sent,
    and does not enter again when Spark runs the batch again.

    Attributes:
        places: Where the gateways of the clients are; a part of a batch goes to the one of its number, modulo theirs.
        columns: Which columns there are.
        retry: Patience with a full outbox.
        confirm_s: Longest wait until the broker has a batch; None where the outbox is enough.
        checkpoint: Where the query's checkpoint is; "" for unknown.
        origins: Hash of what the offset log says about a batch, of the newest.
        scope: What stands before the query's id in the name of the batches.
        remembered: How far the outbox of each client had come, as the checkpoint has it.
    """

    places: tuple[GatewayPlace, ...]
    columns: SinkColumns
    retry: Retry
    confirm_s: float | None
    checkpoint: str = ""
    origins: Mapping[int, str] = field(default_factory=dict)
    scope: str = ""
    remembered: Sequence[KnownOffset | None] = ()

    _refusal = GatewayError, "TL-G25", _WHERE

    def _written(self, task: Task, batches: Iterator[pa.RecordBatch]) -> MqttWritten:
        stored = self.bring(f"{self.scope}{task.query or ''}", task.partition, task.batch or 0, batches)
        return MqttWritten(task.partition, task.batch, stored.rows, stored.already, stored.outbox)

    def bring(self, owner: str, partition: int, batch: int, batches: Iterator[pa.RecordBatch]) -> StoredBatch:
        """Bring all rows of a part of a query's or job's batch, and wait for the broker if that was asked for.

        Raises:
            GatewayError: TL-G22 a checkpoint that is too old, TL-G23 no room for too long, TL-G24 not confirmed.
            TowlineError: What the gateway says.
        """
        place, origin = self.places[partition % len(self.places)], self.origins.get(batch, "")
        writer, attempt = f"{owner}/{partition}", uuid.uuid4().hex
        stored = self._patiently(place, lambda client: client.place(writer, batch, origin, attempt))
        if stored.newest > batch:
            what = f"this query has brought batch {stored.newest} to the outbox, now it comes with batch {batch}"
            do = "bring back the newest one, or start the query with a new checkpoint directory."
            raise GatewayError("TL-G22", _WHERE, what, f"Its checkpoint was restored from an older copy: {do}")
        if not stored.whole:
            start, names = 0, {"origin": origin, "attempt": attempt}
            for rows, last in _chunks(map(self.columns.rows, batches)):
                send = methodcaller("send", writer, batch, rows, start=start, whole=last, **names)
                stored = self._patiently(place, send)
                start += rows.num_rows
        if self.confirm_s is not None:
            self._confirmed(place, stored.end, self.confirm_s)
        return stored

    def _patiently(self, place: GatewayPlace, call: Callable[[GatewayClient], _T]) -> _T:
        """Repeat a call as the retry strategy says, while the outbox is full or no gateway answers."""
        pauses = self.retry.pauses()
        while True:
            try:
                with place.connect() as client:
                    return call(client)
            except (JournalFull, GatewayUnreachable) as error:
                if (pause := next(pauses, None)) is None:
                    what = f"the outbox took nothing for the whole retry strategy: {error.what}"
                    do = "deliver or make room, then start the query again; retryAttempts = -1 waits for ever."
                    raise GatewayError("TL-G23", _WHERE, what, f"Nothing is lost: {do}") from error
                time.sleep(pause)

    def _confirmed(self, place: GatewayPlace, upto: int, confirm_s: float) -> None:
        left = confirm_s
        deadline = time.monotonic() + confirm_s
        while not self._patiently(place, methodcaller("sent", upto, timeout_s=max(0.0, min(left, _GLANCE_S)))):
            if left <= 0:
                what = f"the broker has not confirmed a batch within {confirm_s:g} s"
                do = "Its messages are in the outbox and go on; start the query again, the batch does not enter twice."
                raise GatewayError("TL-G24", _WHERE, what, do)
            left = deadline - time.monotonic()

    def _account(self, written: Sequence[MqttWritten], batch: int | None) -> None:  # noqa: ARG002 - the outbox knows it
        clients = len(self.places)
        for number in range(clients):
            own = [one for one in written if one.partition % clients == number]
            newest = max((one.outbox for one in own if one.outbox), key=lambda place: place.offset, default=None)
            before = self.remembered[number] if self.remembered else None
            if newest is not None and newest != before:
                newest.keep(self.checkpoint, number)


@dataclass(frozen=True)
class MqttBatchWriter(MqttStreamWriter):
    """Writes the result of a batch query; a task that Spark repeats sends nothing twice, a repeated query does.

    When it is over, the outbox forgets the job: of one that is given up what is there of whole partitions is sent, the
    rest never. Its scope is the name of this run, which no other has.
    """

    def _task(self) -> Task:
        return self._batch_task()

    def _account(self, written: Sequence[MqttWritten], batch: int | None) -> None:
        """Nothing depends on it: a gateway that is away lets go of the job's names by itself, days later."""
        del written, batch
        for place in self.places:
            with contextlib.suppress(GatewayError, JournalError), replace(place, ticket="").connect() as client:
                client.end_job(self.scope)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: ARG002, N803 - Spark's
        """Let the outbox forget the job."""
        self._account((), None)


def stream_writer(options: Mapping[str, str], schema: StructType) -> MqttStreamWriter:
    """Bind a stream's options and columns, and find or start the gateway; on the driver, before each batch.

    The checkpoint is synced: a batch that is in the outbox must not be forgotten by Spark in a power failure. And the
    outbox has to be the one that the checkpoint remembers, not an older copy [I14].

    Raises:
        ConfigError: Options or columns that can't be.
        GatewayError: TL-G35 to TL-G37, checkpoint and outbox do not belong together; TL-G48, tasks of a gateway on a
            network need a ticket for this query, and nothing tells which it is.
        JournalError: TL-J20, the checkpoint can't be made durable.
        TowlineError: Whatever keeps the gateway from starting.
    """
    location = next((value for key, value in options.items() if key.lower() == "checkpointlocation"), "")
    writer = _bound(MqttStreamWriter, options, schema, location)
    checkpoint = Checkpoint(location)
    checkpoint.sync()
    batch = checkpoint.last_offsets_batch()
    origins = {batch: checkpoint.offsets_hash(batch) or ""} if batch is not None else {}
    remembered = [KnownOffset.read(location, number) for number in range(len(writer.places))]
    scope, owner = _named(checkpoint, location) if any(place.remote for place in writer.places) else ("", "")
    places = tuple(_admitted(place, owner, known) for place, known in zip(writer.places, remembered, strict=True))
    return replace(writer, places=places, checkpoint=location, origins=origins, scope=scope, remembered=remembered)


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> MqttBatchWriter:
    """Bind a batch query's options and columns.

    Raises:
        ConfigError: Options or columns that can't be; TL-C49 for ``mode("overwrite")``.
    """
    check_append(_WHERE, overwrite=overwrite)
    writer, job = _bound(MqttBatchWriter, options, schema), f"job-{uuid.uuid4().hex}"
    places = tuple(_admitted(place, job) if place.remote else place for place in writer.places)
    return replace(writer, places=places, scope=job)


def _bound(kind: type[_WriterT], options: Mapping[str, str], schema: StructType, checkpoint: str = "") -> _WriterT:
    from towline.spark.options import parse_sink_options, places_of  # noqa: PLC0415 - workers need no pydantic

    parsed = parse_sink_options(options, checkpoint)
    types = column_types(schema.fields, _WHERE)
    columns = SinkColumns.bind(types, parsed.levels, topic=parsed.topic, qos=parsed.qos, retain=parsed.retain)
    return kind(places_of(parsed), columns, parsed.retry, parsed.confirm_s if parsed.to_broker else None)


def _admitted(place: GatewayPlace, writer: str, known: KnownOffset | None = None) -> GatewayPlace:
    """See that an outbox is the one that is known, and get a ticket for the tasks where they need one.

    A gateway that is just being started again is waited for: Spark makes a writer for each commit too.
    """

    def attempt() -> GatewayPlace:
        with place.connect() as client:
            if known is not None:
                here = client.extent(known.offset, outbox=True)
                check_offset(place.text, known, here, rows="outbox")
            if not place.remote:
                return place
            return place.admitted(client.sign_writer(writer, valid_s=place.ticket_s))

    return patiently(attempt)


def _named(checkpoint: Checkpoint, location: str) -> tuple[str, str]:
    """What the names of a query's writers begin with, and whom a ticket for them is for.

    Tasks know the query's id from Spark, the driver only from the checkpoint: Spark makes a writer in a process of
    Python that has no way to the JVM, and so none to Hadoop's file systems. Where the checkpoint is on one of those,
    its place stands before the id, and a ticket is for the queries with this checkpoint: this one, and those before it.
    """
    if place := checkpoint.place:
        return f"checkpoint-{place}/", f"checkpoint-{place}"
    if not (query := checkpoint.query):
        what = f'a ticket for this query needs its id, and the checkpoint "{location}" can\'t be read on the driver'
        do = "Give checkpointLocation with the name of its file system (hdfs://..., s3a://...)"
        raise GatewayError("TL-G48", _WHERE, what, f"{do}, or run the gateway beside Spark.")
    return "", query


#: Column → its types in Spark's words (``DataType.simpleString``), the first is the one a message offers.
ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = {
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
#: Columns of the source that say nothing about a message to be sent; they may stay.
_IGNORED: Final = frozenset({"duplicate", "subscription_ids", "received_at", "gateway", "offset"})


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """Which columns there are, and what stands in for those that are not.

    Attributes:
        present: Columns that are sent.
        levels: QoS that the guarantee allows.
        instead: ``topic``, ``qos`` and ``retain`` of rows without one; None for none.
    """

    present: frozenset[str]
    levels: tuple[int, ...]
    instead: Mapping[str, Any]

    @classmethod
    def bind(cls, schema: Mapping[str, str], levels: tuple[int, ...], **instead: Any) -> SinkColumns:
        """Check a schema, as `column_types` has it, against the contract of the sink.

        Raises:
            ConfigError: TL-C48 for a column that is missing, unknown or of another type.
        """
        sent = {name: kind for name, kind in schema.items() if name not in _IGNORED}
        check_columns(_WHERE, "MQTT", sent, ACCEPTED, instead["topic"])
        return cls(frozenset(schema) & ACCEPTED.keys(), levels, instead)

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turn rows into rows of `MESSAGE_SCHEMA`.

        Raises:
            ConfigError: TL-C12, a row's QoS contradicts the guarantee.
        """
        named = lower_case(batch)
        rows = pa.RecordBatch.from_arrays(
            [self._column(named, field) for field in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA
        )
        if "qos" in self.present:
            self._check_levels(rows.column("qos"))
        return rows

    def _column(self, batch: pa.RecordBatch, field: pa.Field) -> Any:
        instead = self.instead.get(field.name)
        if field.name not in self.present:
            return pa.repeat(pa.scalar(instead, field.type), batch.num_rows)
        column = batch.column(field.name)
        if field.name == "qos":
            column = _within_a_byte(column)
        column = column.cast(field.type)
        return column if instead is None else column.fill_null(pa.scalar(instead, field.type))

    def _check_levels(self, column: Any) -> None:
        strange = [level for level in column.unique().to_pylist() if level not in self.levels]
        if strange:
            what = f"a row has QoS {strange[0]}, the guarantee publishes with {' or '.join(map(str, self.levels))}"
            do = "Change the row, or the option guarantee. Nothing of this batch was sent beyond what is in the outbox."
            raise ConfigError("TL-C12", f'{_WHERE} column "qos"', what, do)


def _within_a_byte(column: Any) -> Any:
    """Numbers that are no QoS, as one number that is none either and fits."""
    fine = pc.or_(pc.is_null(column), pc.is_in(column, pa.array([0, 1, 2], column.type)))
    return pc.if_else(fine, column, pa.scalar(127, column.type))
