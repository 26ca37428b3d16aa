"""Readers of ``format("mqtt")`` for streams and batch reads: thin clients of one or several gateways.

Spark creates an object of a reader class in each of several processes (Python Data Source API: the runner on the
driver, the planner, the workers), and they share no memory. So ``__init__`` opens no connection, and partitions hold
all that a worker needs. Only the runner holds leases: it alone calls ``getDefaultReadLimit``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, without_traceback
from towline.gateway.identity import JournalPosition
from towline.spark.batching import TriggerTiming
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.offsets import SourceOffset, check_distinct
from towline.spark.tasks import freeze_gc
from towline.threads import call_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    import pyarrow as pa

    from towline.gateway.client import GatewayClient
    from towline.spark.gateways import BatchPlanner


@dataclass(frozen=True)
class Slice(InputPartition):
    """Rows ``start`` to ``end`` - 1 of one journal, as one input partition.

    Attributes:
        address: Address of the gateway, with the worker's ticket (`slices_of`).
        incarnation: Opening of the journal that wrote the row below `end`; "" for unknown.
        watermark_ms: Watermark of the query, in ms since 1970; None for rows without an event time.
    """

    address: GatewayAddress
    journal: str
    start: int
    end: int
    incarnation: str = ""
    watermark_ms: int | None = None

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Read the rows, the same ones at each call [I4]; raises as `GatewayAddress.rows`."""
        return self.address.rows(self.journal, self.start, self.end, self.incarnation)


def slice_of(client: GatewayClient, address: GatewayAddress, start: int, end: JournalPosition) -> Slice:
    """Return the slice from `start` to `end` of a gateway's journal, on a network with a ticket. On the driver.

    Raises:
        GatewayError: TL-G46, the file with the gateway's CA certificates can't be read.
    """
    rows = (start, end.offset, end.incarnation)
    if address.remote:
        (ticket,) = client.request_read_tickets(end.journal, [rows], valid_s=address.ticket_s)
        address = address.with_ticket(ticket)
    return Slice(address, end.journal, *rows)


def ranges_between(start: SourceOffset, end: SourceOffset) -> list[tuple[int, JournalPosition]]:
    """Return the first offset and the end position of each gateway with rows in a batch, sorted by name.

    A gateway that joins with this batch has no rows in it: only its end position is known. A removed gateway has none
    either.
    """
    starts = {position.gateway: position.offset for position in start.positions}
    ranges = ((starts.get(last.gateway, last.offset), last) for last in end.positions)
    return [(first_offset, last) for first_offset, last in ranges if first_offset < last.offset]


_SOURCE_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"


def is_source_runner() -> bool:
    """Return whether this process is Spark's source runner on the driver."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", "") == _SOURCE_RUNNER


def exit_cleanly_on_sigterm() -> None:
    """Handle SIGTERM in Spark's source runner, so that ``finally: reader.stop()`` runs.

    Spark sends SIGTERM twice, two milliseconds apart, and Python would die at the first. The handler ignores the second
    one, so that the lease is released. In other processes the signal is left alone.
    """
    if not is_source_runner():
        return

    def exit_process(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, exit_process)


#: Shortest time between the starts of two machine syncs, in seconds, and their largest share of the time.
_MIN_SYNC_INTERVAL_S = 1.0
_MAX_SYNC_SHARE = 0.1


class DurableOffsetTracker:
    """Tracker of the source offset up to which the commit log is durable; lives in the runner.

    ``start`` of ``latestOffset`` says which batch is in the commit log, not that the entry is on the disk. If the
    checkpoint is known (option ``checkpointLocation``), its entry is synced first, 1 to 2 ms a batch. Otherwise the
    whole machine is synced in the background, sync(2), at most once a second: Spark does not pass a source the location
    of its checkpoint.
    """

    def __init__(self, location: str) -> None:
        self._checkpoint = Checkpoint(location)
        self._durable_offset = SourceOffset(())
        #: Running machine sync, with the offset that is durable after it; one runs at a time.
        self._running_sync: tuple[SourceOffset, Future[float]] | None = None
        self._next_sync_at = 0.0

    def sync_committed(self, offset: SourceOffset, *, must_sync: bool = False) -> SourceOffset:
        """Return the offset up to which each gateway may remove rows: ``offset`` or an earlier one.

        With `must_sync` it syncs first, however long that takes: it is the last call.

        Raises:
            JournalError: TL-J20, the checkpoint can't be synced.
        """
        if self._durable_offset != offset:
            if self.sync_entry(offset, committed=True, allow_machine_sync=must_sync):
                self._durable_offset = offset
            else:
                self._sync_in_background(offset)
        return self._durable_offset

    def sync_entry(self, offset: SourceOffset, *, committed: bool, allow_machine_sync: bool) -> bool:
        """Sync the checkpoint if its log has the offset, else the machine if allowed; return whether it is durable.

        Raises:
            JournalError: TL-J20, the checkpoint can't be synced.
        """
        if is_logged := self._checkpoint.ends_at(offset.to_json(), committed=committed):
            self._checkpoint.sync()
        elif allow_machine_sync:
            os.sync()
        return is_logged or allow_machine_sync

    def _sync_in_background(self, offset: SourceOffset) -> None:
        """Take the offset of a machine sync that has ended, and start the next sync."""
        now = time.monotonic()
        if self._running_sync is not None and self._running_sync[1].done():
            self._durable_offset, took_s = self._running_sync[0], self._running_sync[1].result()
            self._running_sync = None
            self._next_sync_at = now + max(_MIN_SYNC_INTERVAL_S, took_s / _MAX_SYNC_SHARE) - took_s
        if self._running_sync is None and self._durable_offset != offset and now >= self._next_sync_at:
            self._running_sync = offset, call_in_thread(_sync_machine, "sync")


def _sync_machine() -> float:
    """Sync every file system and return the seconds it took; sync(2) waits for the disks, but reports no error."""
    start = time.monotonic()
    os.sync()
    return time.monotonic() - start


_LOG = logging.getLogger("towline.spark")
#: Default of Mosquitto's queue for a disconnected client, in messages.
_MOSQUITTO_QUEUE: Final = 1000


class MqttStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a stream: offsets are journal offsets, reads are repeatable [I4].

    ``start`` of `latestOffset` is the end of the last batch in the commit log. Only this moves the committed
    watermarks, and only as far as the entry survives a power failure (`DurableOffsetTracker`) [I5]. ``commit`` comes
    late and never for the last batch, so it is not used. ``stop`` may come before a batch is committed, and moves no
    watermark.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        #: Created in the runner, by the first call that only the runner gets: it can't be pickled.
        self._planner: BatchPlanner | None = None
        self._durable_offsets = DurableOffsetTracker(plan.checkpoint)
        self._trigger_timing = TriggerTiming(plan.max_delay_ms / 1000)
        self._error_logged = False
        self._queue_warning_logged = False

    # -- in the runner -----------------------------------------------------------------------------------------

    @without_traceback
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Set the end of the query to the present end of the journals."""
        self._runner_planner.fix_end_offsets()

    @without_traceback
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the most rows of a batch; the first call that only the runner gets.

        Raises:
            ConfigError: TL-C24, a schema or option that a stream can't have.
        """
        _ = self._runner_planner  # checks the plan
        return ReadMaxRows(self._plan.max_rows)

    @without_traceback
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the start of a query without a checkpoint: option ``startingOffset``, at each gateway that answers.

        Raises:
            ConfigError: TL-G50, a gateway is listed twice.
            ReaderFenced: TL-G03, another living query reads as this consumer.
            GatewayUnreachable: No gateway answers.
        """
        return self._runner_planner.initial_offset().to_json()

    @without_traceback
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Commit the durable part of ``start``, then wait for new rows until they are worth a batch, or a while.

        Returns:
            The end of the next batch within the limit, or ``start`` itself without new rows: Spark compares offsets as
            text.

        Raises:
            ConfigError: TL-G50, TL-G51, the list of gateways is invalid.
            ReaderFenced: TL-G03, as `initialOffset`.
            JournalError: TL-J20, the checkpoint can't be synced.
        """
        start_offset, planner, timing = SourceOffset.parse(start), self._runner_planner, self._trigger_timing
        timing.end_batch(time.monotonic())
        durable = self._durable_offsets.sync_committed(start_offset, must_sync=planner.is_finished(start_offset))
        wait_s = timing.poll_timeout_s(self._plan.poll_ms / 1000, time.monotonic(), all_durable=durable == start_offset)
        has_end = planner.end_offsets is not None
        end_offset = planner.plan_batch(start_offset, durable, limit, 0.0 if has_end else wait_s)
        while delay_s := self._trigger_delay_s(planner, start_offset, end_offset):
            time.sleep(delay_s)
            end_offset = planner.plan_batch(start_offset, durable, limit, 0.0)
        now = time.monotonic()
        if end_offset.positions != start_offset.positions:
            timing.start_batch(now)
            return end_offset.to_json()
        if has_end or not timing.start_idle_batch(now):
            return start
        return replace(start_offset, tick=start_offset.tick + 1).to_json()  # a new offset for Spark, without a row

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return queue depth and counters, shown as ``sources[].latestOffset`` in the query's progress.

        ``tip`` is the end of the journal, ``queued`` the rows beyond the planned batch, and ``last_error`` the error
        that stops messages, also logged once. The other keys are the gateway's status. With several gateways these are
        the sums, and ``gateways`` has the same for each, with ``away_since`` for an unavailable one.
        """
        report = self._planner.report() if self._planner else None
        if report is None:
            return None
        error_text = report.get("last_error")
        if error_text and not self._error_logged and "away_since" not in report:  # logged when the outage began
            _LOG.warning(error_text)
        self._error_logged = bool(error_text)
        if self._plan.address.settings and not self._queue_warning_logged and (queue_warning := _queue_warning(report)):
            self._queue_warning_logged = True
            _LOG.warning(queue_warning)
        return report

    @without_traceback
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the slices of a batch; an empty slice for a batch without rows, so that a worker is used.

        The first call after a crash is for the interrupted batch, before any `latestOffset`. Its rows are replayed, or
        dropped with at_most_once. In that case its offset log entry is synced first, so that not even a power failure
        can repeat it.
        """
        plan, start_offset, end_offset = self._plan, SourceOffset.parse(start), SourceOffset.parse(end)
        if start_offset == end_offset:
            return []
        planner = self._runner_planner
        if not plan.replays_batches:
            if planner.planned_range is None:
                return []
            # A crash must not make it a new batch.
            self._durable_offsets.sync_entry(end_offset, committed=False, allow_machine_sync=True)
        slices = planner.slices(start_offset, end_offset)
        if plan.event_time:
            watermark_ms = self._watermark(end_offset)
            slices = [replace(journal_slice, watermark_ms=watermark_ms) for journal_slice in slices]
        return slices

    def stop(self) -> None:
        """Release the leases; a batch may be uncommitted, so no watermark moves."""
        if self._planner:
            self._planner.release()
        self._planner = None
        if is_source_runner() and isinstance(sys.exception(), EOFError | SystemExit):
            os._exit(0)  # the JVM has closed the socket: an error report would only print a traceback

    # -- in the workers ----------------------------------------------------------------------------------------

    @without_traceback
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice, the same ones at each call [I4].

        Raises:
            GatewayError: TL-G62, a second attempt of the task asks for rows that are read once. The first attempt may
                have passed them on, uncounted: so the batch fails, and is repeated empty.
        """
        journal_slice = self._readable_slice(partition)
        rows, watermark_ms = journal_slice.rows(), journal_slice.watermark_ms
        return rows if watermark_ms is None else _with_event_time(rows, watermark_ms)

    def _readable_slice(self, partition: InputPartition) -> Slice:
        """Return the slice of a task, unless a repeated attempt may not read it (TL-G62)."""
        freeze_gc()
        assert isinstance(partition, Slice)
        if not self._plan.replays_batches and partition.start < partition.end and (attempt := _task_attempt()):
            problem = f"attempt {attempt + 1} of a task asks for rows that at_most_once reads only once"
            remedy = "Restart the query: it repeats the batch without them. spark.task.maxFailures=1 saves attempts."
            raise GatewayError("TL-G62", 'format("mqtt")', problem, remedy)
        return partition

    # -- helpers -----------------------------------------------------------------------------------------------

    @property
    def _runner_planner(self) -> BatchPlanner:
        """Batch planner, created in the runner only."""
        if self._planner is None:
            from towline.spark.gateways import BatchPlanner  # noqa: PLC0415 - see above

            if self._plan.options_error:
                raise self._plan.options_error
            if self._plan.end_offset is not None:
                remedy = "Use spark.read for a range, or trigger(availableNow=True) for all present rows."
                raise ConfigError("TL-C24", 'format("mqtt") option "endingOffset"', "a stream has no end", remedy)
            exit_cleanly_on_sigterm()
            self._planner = BatchPlanner(self._plan)
        return self._planner

    def _watermark(self, end_offset: SourceOffset) -> int:
        """Return the watermark of a batch in ms since 1970; Spark logs it before it plans the batch, or replays it."""
        watermark_ms = Checkpoint(self._plan.checkpoint).watermark_ms(end_offset.to_json())
        if watermark_ms is None:
            problem = f'the watermark of this batch can\'t be read in the checkpoint "{self._plan.checkpoint}"'
            remedy = "Give checkpointLocation, the same as the writer's, on a file system of this machine."
            raise ConfigError("TL-C24", 'format("mqtt") option "eventTime"', problem, remedy)
        return watermark_ms

    def _trigger_delay_s(self, planner: BatchPlanner, start_offset: SourceOffset, end_offset: SourceOffset) -> float:
        """Return the seconds until the waiting rows are polled again; 0 to start a batch now, or without rows."""
        rows = sum(end.offset - start for start, end in ranges_between(start_offset, end_offset))
        if not rows or planner.end_offsets is not None or planner.has_backlog:
            return 0.0
        return self._trigger_timing.delay_s(rows, time.monotonic())


class MqttBatchReader(DataSourceReader):
    """Reader of one range of each inbox; moves no watermark and needs no lease. Every gateway must be available."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan

    @without_traceback
    def partitions(self) -> Sequence[InputPartition]:
        """Return the slices from ``startingOffset`` (default earliest) to ``endingOffset`` (default the newest).

        Raises:
            ConfigError: TL-C24, an option that a batch read can't have; TL-C23, an end before the start.
        """
        plan = self._plan
        if plan.options_error:
            raise plan.options_error
        if plan.event_time:
            location, problem = 'format("mqtt") option "eventTime"', "a batch read has no watermark"
            raise ConfigError("TL-C24", location, problem, "Use received_at.")
        slices = dict(map(self._gateway_slice, plan.addresses))
        check_distinct(slices)
        return [slices[end] for end in sorted(slices, key=lambda end: end.gateway)]

    def _gateway_slice(self, address: GatewayAddress) -> tuple[JournalPosition, Slice]:
        """Return the end position and the slice of the range at a gateway."""
        with address.connect() as client:
            status = client.status()
            start_position = self._plan.start_position(client, status, "earliest")
            end_option = self._plan.end_offset
            end_option = end_option.get(start_position.gateway) if isinstance(end_option, Mapping) else end_option
            end = status["end"] if end_option is None else end_option
            if start_position.offset > end:
                problem = f"it is {end}, before the start at {start_position.offset}"
                remedy = f"The journal holds the offsets {status['first']} to {status['end'] - 1}."
                raise ConfigError("TL-C23", 'format("mqtt") option "endingOffset"', problem, remedy)
            end_position = replace(start_position, offset=end, incarnation=client.extent(end).incarnation)
            return end_position, slice_of(client, address, start_position.offset, end_position)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the range."""
        assert isinstance(partition, Slice)
        return partition.rows()


def _queue_warning(report: Mapping[str, Any]) -> str:
    """Return warning TL-G64 if a broker with default limits had dropped messages while no gateway ran, else ""."""
    arrived, absent_s = report.get("arrived", 0), report.get("absent_s", 0.0)
    rate = arrived / max(1.0, report.get("up_s", 0.0))
    if min(arrived, rate * absent_s) < _MOSQUITTO_QUEUE:  # fewer than a full queue came: none was dropped
        return ""
    return (
        f"no gateway ran for {absent_s:,.0f} s, and {rate:,.0f} messages come each second: a Mosquitto with default "
        f"settings queues {_MOSQUITTO_QUEUE:,} for a disconnected client and drops the others silently. The limit of "
        "this broker is not known here. Raise it (max_queued_messages), or set gatewayDetached=true: then the gateway "
        "receives while no driver runs.   [TL-G64]"
    )


def _with_event_time(rows: Iterator[pa.RecordBatch], watermark_ms: int) -> Iterator[pa.RecordBatch]:
    """Add the event time to rows, always after the watermark: Spark drops rows at or before it (`WatermarkSupport`)."""
    import pyarrow as pa  # noqa: PLC0415 - workers only
    import pyarrow.compute as pc  # noqa: PLC0415

    from towline.schema import EVENT_TIME, TIMED_SCHEMA  # noqa: PLC0415

    time_type, min_time_us = TIMED_SCHEMA.field(EVENT_TIME).type, (watermark_ms + 1) * 1000
    for batch in rows:
        times = pc.max_element_wise(batch.column("received_at").cast(pa.int64()), min_time_us)
        yield pa.RecordBatch.from_arrays([*batch.columns, times.cast(time_type)], schema=TIMED_SCHEMA)


def _task_attempt() -> int:
    """Return the attempt number of this task, 0 for the first and outside of a task."""
    context = TaskContext.get()
    return context.attemptNumber() if context else 0
