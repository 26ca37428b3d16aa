"""What Spark calls: a reader for streams and one for batches, both thin clients of a gateway.

One object of a reader class lives in each of several processes (reference of the Python Data Source API: the runner on
the driver, the planner, the workers) and they share nothing. So nothing connects in ``__init__``, partitions carry
all that a worker needs, and only the runner, which alone gets ``getDefaultReadLimit``, holds a lease.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, Fenced, GatewayError, GatewayUnreachable, one_line
from towline.guarantee import HIGHEST_QOS
from towline.spark.cut import Cut
from towline.spark.link import PATIENCE_S, GatewayPlace, patiently
from towline.spark.offsets import Position
from towline.spark.runner import end_in_order, is_runner
from towline.spark.served import timed, unrepeated
from towline.spark.workers import settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from towline.gateway.client import GatewayClient, Lease, Window

__all__ = ["TICK_S", "MqttBatchReader", "MqttStreamReader", "ReadPlan", "Slice"]

#: An idle stream makes an empty batch this often, in seconds: Spark ends Python workers that idle for 60 s
#: (PythonWorkerFactory.IDLE_WORKER_TIMEOUT_NS), and the next batch would then take five seconds instead of 0.2.
TICK_S = 45.0

#: Longest wait for a message while rows are in the commit log and not yet safe to remove, in seconds.
SETTLE_S = 0.25

#: How long a new reader waits for the one before it to end, in seconds: a stopped query's process needs a moment.
TAKEOVER_S = 5.0

_LOG = logging.getLogger("towline.spark")


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a reader was told, in plain values that every process can unpickle quickly.

    Attributes:
        place: Where the gateway is.
        consumer: Name under which rows are committed.
        once_below: Rows with a QoS below this one are never served twice (`towline.guarantee.Policy.once_below`).
        repeated_below: Rows below this offset may have been served before, to a query with another checkpoint.
        max_rows: Most rows of a micro-batch.
        max_bytes: Most bytes of a micro-batch; both limits hold, where both are there.
        starting: ``committed``, ``earliest``, ``latest``, an offset, or None for the default of the kind of read.
        ending: Offset after the last row, batch reads only.
        poll_s: Longest wait for a message in ``latestOffset``, in seconds.
        own_schema: Whether the rows have the source's schema, as they must.
        checkpoint: Location of the query's checkpoint, "" when it was not told.
        event_time: Whether rows have an event time that is never late.
    """

    place: GatewayPlace
    consumer: str
    once_below: int = 0
    repeated_below: int = 0
    max_rows: int | None = None
    max_bytes: int | None = None
    starting: str | int | None = None
    ending: int | None = None
    poll_s: float = 5.0
    own_schema: bool = True
    checkpoint: str = ""
    event_time: bool = False


class Slice(InputPartition):
    """The rows ``start`` to ``end`` - 1 of one journal, and the query's watermark: all that a worker is told.

    ``fresh`` is where rows begin that nobody was served before; what is never served twice is left out below it.
    ``ticket`` and ``authority`` let the worker in to a gateway on a network (`GatewayPlace.admitted`).
    """

    def __init__(
        self,
        journal: str,
        start: int,
        end: int,
        incarnation: str = "",
        watermark_ms: int | None = None,
        fresh: int = 0,
        ticket: str = "",
        authority: str = "",
    ) -> None:
        super().__init__((journal, start, end))
        self.journal = journal
        self.start = start
        self.end = end
        self.incarnation = incarnation
        self.watermark_ms = watermark_ms
        self.fresh = fresh
        self.ticket = ticket
        self.authority = authority


class _Hold:
    """A lease on a consumer, kept over restarts of the gateway; lives in the runner only."""

    def __init__(self, place: GatewayPlace, consumer: str, max_bytes: int | None) -> None:
        self._place = place
        self._consumer = consumer
        self._max_bytes = max_bytes
        self._client: GatewayClient | None = None
        self._lease: Lease | None = None

    def lease(self) -> Lease:
        """The lease; connects, and starts the gateway, at the first call.

        Raises:
            Fenced: TL-G03 when another living reader has it.
        """
        if self._lease is None:
            end_in_order()
            self._client = self._place.connect()
            self._lease = self._client.open(self._consumer, patience_s=TAKEOVER_S)
        return self._lease

    def wait(self, here: Position, safe: int, timeout_s: float, limit: ReadLimit, target: int | None) -> Window:
        """Commit up to ``safe`` and wait for more than ``here``; a gateway that is gone is waited for or started."""
        rows = [limit.max_rows] if isinstance(limit, ReadMaxRows) else []
        rows += [] if target is None else [max(1, target - here.offset)]
        max_rows = min(rows, default=None)
        # Spark has no limit of rows and bytes in one; where it wants all there is (Trigger.Once), it gets all.
        max_bytes = None if isinstance(limit, ReadAllAvailable) else self._max_bytes
        if isinstance(limit, ReadMaxBytes):
            max_bytes = limit.max_bytes

        def attempt() -> Window:
            lease = self.lease()
            _same(here, lease)
            assert self._client is not None
            try:
                return self._client.wait(
                    lease,
                    here.offset,
                    timeout_s=timeout_s,
                    max_rows=max_rows,
                    max_bytes=max_bytes,
                    safe=safe,
                    incarnation=here.incarnation,
                )
            except GatewayUnreachable:
                self.drop()
                raise
            except Fenced as error:
                if error.code == "TL-G07" and self._client.status()["epoch"] != lease.epoch:
                    self.drop()  # not taken over: the gateway was started again and knows no leases
                    raise GatewayUnreachable(error.code, error.where, error.what, error.do) from error
                raise

        return patiently(attempt, patience_s=PATIENCE_S)

    def incarnation(self, offset: int) -> str:
        """Which opening of the journal wrote the row below ``offset``."""

        def attempt() -> str:
            self.lease()
            assert self._client is not None
            try:
                return self._client.incarnation(offset)
            except GatewayUnreachable:
                self.drop()
                raise

        return patiently(attempt)

    def admission(self, journal: str, start: int, end: int, incarnation: str) -> tuple[str, str]:
        """Ticket and authority of a slice: what lets its worker in to a gateway on a network; "" for a local one."""

        def attempt() -> list[str]:
            self.lease()
            assert self._client is not None
            try:
                return self._place.tickets(self._client, journal, [(start, end)], [incarnation])
            except GatewayUnreachable:
                self.drop()
                raise

        return patiently(attempt)[0], self._place.trusted()

    def status(self) -> dict[str, Any]:
        """The account of the gateway; empty while there is no connection."""
        return self._client.status(timeout_s=1.0) if self._client else {}

    def drop(self) -> None:
        """Forget the connection; the next call makes a new one."""
        client, self._client, self._lease = self._client, None, None
        if client:
            client.close()

    def release(self) -> None:
        """Give the lease back and close; never commits anything."""
        client, lease = self._client, self._lease
        with contextlib.suppress(GatewayError):
            if client and lease:
                client.release(lease)
        self.drop()


class MqttStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams an inbox: offsets are journal offsets, reads are repeatable [I4].

    ``start`` of `latestOffset` is the end of the last batch whose commit-log entry is written; it alone moves the
    committed watermark, and only as far as the entry survives a power failure (`towline.spark.cut`) [I5]. ``commit``
    comes late and never for the last batch, ``stop`` may come with a batch uncommitted: neither moves anything.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._hold = _Hold(plan.place, plan.consumer, plan.max_bytes)
        self._cut = Cut(plan.checkpoint)
        self._target: int | None = None
        self._planned = False
        #: When the offset changed last. Never, at first: a query that starts idle ticks at once, so that Spark's Python
        #: workers and the sink's producer are warm when the first message comes.
        self._moved = float("-inf")
        self._reached = 0
        self._tip = 0
        self._warned = False

    # -- in the runner -----------------------------------------------------------------------------------------

    @one_line
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query at what is durable now."""
        self._target = self._opened().tip

    @one_line
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Most rows or bytes of a batch; the first call that only the runner gets, so the lease is taken here.

        Raises:
            ConfigError: TL-C24 for a schema or an option that a stream can't have.
            Fenced: TL-G03 when another living query reads as this consumer.
        """
        self._opened()
        if self._plan.max_rows is not None:
            return ReadMaxRows(self._plan.max_rows)
        return ReadAllAvailable() if self._plan.max_bytes is None else ReadMaxBytes(self._plan.max_bytes)

    @one_line
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins: option ``startingOffset``."""
        lease = self._opened()
        starts = {"committed": max(lease.committed, lease.first), "earliest": lease.first, "latest": lease.tip}
        wanted = self._plan.starting if self._plan.starting is not None else "committed"
        offset = wanted if isinstance(wanted, int) else starts[wanted]
        incarnation = self._hold.incarnation(offset)
        return Position(lease.name, lease.journal, offset, incarnation=incarnation).to_json()

    @one_line
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Commit what of ``start`` is durable, then wait for new rows for a while.

        Returns:
            The end of the next batch within the limit, or ``start`` itself when nothing is new: Spark compares
            offsets as text.

        Raises:
            JournalError: TL-J20, the checkpoint can't be made durable.
        """
        here = Position.parse(start)
        self._planned = True
        last_call = self._target is not None and here.offset >= self._target
        safe = self._cut.upto(here, wait=last_call) or 0
        window = self._hold.wait(here, safe, self._patience(settled=safe == here.offset), limit, self._target)
        end = window.end if self._target is None else max(here.offset, min(window.end, self._target))
        self._reached, self._tip = end, window.tip
        if end > here.offset:
            self._moved = time.monotonic()
            return here.at(end, window.incarnation).to_json()
        return self._ticked(here) or start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Queue depth and counters; they appear as ``sources[].latestOffset`` in the query's progress.

        ``tip`` is the end of the journal, ``queued`` what lies beyond the planned batch, and ``last_error`` what keeps
        messages from coming, which is also warned of once; the rest is the gateway's own account.
        """
        try:
            status = self._hold.status()
        except GatewayError:
            return None  # the next latestOffset tells it better
        plain = {key: value for key, value in status.items() if isinstance(value, bool | int | float | str)}
        if trouble := (status.get("last_error") or {}).get("text"):
            from towline.spark.gateway_options import in_options  # noqa: PLC0415 - workers need no pydantic

            plain["last_error"] = trouble = in_options(trouble)
            if not self._warned:
                _LOG.warning(trouble)
        self._warned = bool(trouble)
        return {**plain, "tip": self._tip, "queued": max(0, self._tip - self._reached)} if plain else None

    @one_line
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One slice a batch; an empty one for a tick, so that a worker is used.

        The first call after a crash is for the interrupted batch, before any `latestOffset`. It is served again, but
        for what is never served twice. Where there is such a thing, it must not be forgotten that a batch was begun,
        not by a power failure either.
        """
        plan, here, there = self._plan, Position.parse(start), Position.parse(end)
        if here == there or (plan.once_below > HIGHEST_QOS and not self._planned):
            return []
        for place in (here, there):
            _same(place, self._opened())
        if plan.once_below:
            self._cut.remember(there)
        fresh = plan.repeated_below if self._planned else there.offset
        watermark = self._watermark(there) if plan.event_time else None
        admission = self._hold.admission(there.journal, here.offset, there.offset, there.incarnation)
        return [Slice(there.journal, here.offset, there.offset, there.incarnation, watermark, fresh, *admission)]

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: ``start`` of the next `latestOffset` says the same earlier and for the last batch too [I5]."""

    def stop(self) -> None:
        """Give the lease back; a batch may be uncommitted, so no watermark moves."""
        self._hold.release()
        if is_runner() and isinstance(sys.exception(), EOFError | SystemExit):
            os._exit(0)  # the JVM has closed the socket: reporting there would only print a traceback

    # -- in the workers ----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice, the same ones each time [I4], but for those that are never served twice.

        For them a repeated task is as a repeated batch: the first attempt may have passed rows on.
        """
        settle()
        assert isinstance(partition, Slice)
        plan = self._plan
        fresh = partition.end if plan.once_below and _attempt() > 0 else partition.fresh
        if plan.once_below > HIGHEST_QOS and fresh >= partition.end:
            return iter(())
        place = plan.place.admitted(partition.ticket, partition.authority)
        rows = place.rows(partition.journal, partition.start, partition.end, partition.incarnation)
        if plan.once_below and fresh > partition.start:
            rows = unrepeated(rows, plan.once_below, fresh)
        return rows if partition.watermark_ms is None else timed(rows, partition.watermark_ms)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _opened(self) -> Lease:
        _check(self._plan, streaming=True)
        return patiently(self._hold.lease)

    def _watermark(self, there: Position) -> int:
        """The watermark of the batch that ends there, in ms since 1970.

        From the offset log, where Spark has written it before it asks for slices: the same again for a replay.
        """
        found = Checkpoint(self._plan.checkpoint).watermark_ms(there.to_json())
        if found is None:
            raise ConfigError(
                "TL-C24",
                'format("mqtt") option "eventTime"',
                f'the watermark of this batch can\'t be read in the checkpoint "{self._plan.checkpoint}"',
                "Give checkpointLocation, the same as the writer's, on a file system of this machine.",
            )
        return found

    def _patience(self, *, settled: bool) -> float:
        """How long this call may wait, in seconds: not at all for AvailableNow, and not beyond the next tick.

        Args:
            settled: Whether all that is done could be removed; else the next call is to come soon.
        """
        if self._target is not None:
            return 0.0
        longest = self._plan.poll_s if settled else min(self._plan.poll_s, SETTLE_S)
        return max(0.0, min(longest, self._moved + TICK_S - time.monotonic()))

    def _ticked(self, here: Position) -> dict[str, Any] | None:
        if self._target is not None or time.monotonic() - self._moved < TICK_S:
            return None
        self._moved = time.monotonic()
        return here.ticked().to_json()


class MqttBatchReader(DataSourceReader):
    """Reads a range of an inbox once; moves no watermark and needs no lease."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan

    @one_line
    def partitions(self) -> Sequence[InputPartition]:
        """One slice from ``startingOffset`` (default earliest) to ``endingOffset`` (default the newest)."""
        _check(self._plan, streaming=False)
        with self._plan.place.connect() as client:
            status = client.status()
            end = int(status["end"]) if self._plan.ending is None else self._plan.ending
            incarnation = client.incarnation(end)
            start = self._start(status, end)
            journal = str(status["journal"])
            (ticket,) = self._plan.place.tickets(client, journal, [(start, end)], [incarnation])
        authority = self._plan.place.trusted()
        return [Slice(journal, start, end, incarnation, ticket=ticket, authority=authority)]

    def _start(self, status: Mapping[str, Any], end: int) -> int:
        first, tip = int(status["first"]), int(status["end"])
        committed = max(first, int(status["consumers"].get(self._plan.consumer, first)))
        starts = {"committed": committed, "earliest": first, "latest": tip}
        wanted = self._plan.starting if self._plan.starting is not None else "earliest"
        start = wanted if isinstance(wanted, int) else starts[wanted]
        if start > end:
            raise ConfigError(
                "TL-C23",
                'format("mqtt") option "endingOffset"',
                f"it is {end}, before the start at {start}",
                f"The journal holds the offsets {first} to {tip - 1}.",
            )
        return start

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the range."""
        assert isinstance(partition, Slice)
        place = self._plan.place.admitted(partition.ticket, partition.authority)
        return place.rows(partition.journal, partition.start, partition.end, partition.incarnation)


def _check(plan: ReadPlan, *, streaming: bool) -> None:
    """Refuse what only shows once Spark has said how it reads."""
    if not plan.own_schema:
        raise ConfigError(
            "TL-C24", 'format("mqtt")', "the schema of this source is fixed", "Leave out schema() and select columns."
        )
    if plan.event_time and not streaming:
        raise ConfigError(
            "TL-C24", 'format("mqtt") option "eventTime"', "a batch read has no watermark", "Use received_at."
        )
    if streaming and plan.ending is not None:
        raise ConfigError(
            "TL-C24",
            'format("mqtt") option "endingOffset"',
            "a stream has no end",
            "Use spark.read for a range, or trigger(availableNow=True) for all that is there.",
        )


def _same(here: Position, lease: Lease) -> None:
    """See that the checkpoint's journal is the one that the gateway serves."""
    if here.journal != lease.journal:
        raise _foreign(here, lease.journal)


def _foreign(here: Position, journal: str) -> Fenced:
    return Fenced(
        "TL-G04",
        here.gateway,
        f"the checkpoint belongs to journal {here.journal} (offset {here.offset}), this gateway serves journal "
        f"{journal}",
        "Bring back the state directory of that journal, or start the query with a new checkpoint directory and get "
        "what waits here; rows that only the other journal held stay there.",
    )


def _attempt() -> int:
    """Which attempt of a task this is, 0 for the first and outside of a task."""
    from pyspark import TaskContext  # noqa: PLC0415 - workers only

    context = TaskContext.get()
    return context.attemptNumber() if context else 0
