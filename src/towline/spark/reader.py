"""What Spark calls: a reader for streams and one for batches, both thin clients of one gateway or several.

One object of a reader class lives in each of several processes (reference of the Python Data Source API: the runner on
the driver, the planner, the workers) and they share nothing. So nothing connects in ``__init__``, partitions carry
all that a worker needs, and only the runner, which alone gets ``getDefaultReadLimit``, holds leases.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, one_line
from towline.mosquitto_conf import DEFAULTS
from towline.spark.cadence import Cadence
from towline.spark.offsets import JournalPlace, Position
from towline.spark.readplan import ReadPlan, Slice, check_distinct, divided, for_gateway, ranges_between, slices_of
from towline.spark.tasks import settle
from towline.threads import later

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from types import FrameType

    import pyarrow as pa

    from towline.spark.gateways import BatchPlanner
    from towline.spark.link import GatewayPlace


_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"


def is_runner() -> bool:
    """Whether this process is Spark's source runner on the driver."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", "") == _RUNNER


def end_in_order() -> None:
    """Let SIGTERM end Spark's source runner through ``finally: reader.stop()``.

    Spark sends SIGTERM twice, two milliseconds apart, and Python would die at the first: the handler ignores the
    second one, so that the lease is given back. Only in the runner: elsewhere the signal is not ours.
    """
    if not is_runner() or threading.current_thread() is not threading.main_thread():
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)


#: Shortest time between two syncs of the machine, in seconds, and their largest share of the time.
_EVERY_S = 1.0
_SHARE = 0.1


class Cut:
    """Tells how much of a stream's past is safe to forget; lives in the runner.

    ``start`` of ``latestOffset`` says which batch is in the commit log, not that the entry is on the disk. Where the
    checkpoint is known (option ``checkpointLocation``) its entry is synced first, 1 to 2 ms a batch. Elsewhere the
    whole machine is synced in the background, sync(2), at most once a second, and the cut follows it: Spark does not
    tell a source where its checkpoint is.
    """

    def __init__(self, location: str) -> None:
        self._checkpoint = Checkpoint(location)
        self._safe: Position | None = None
        #: A sync of the machine that runs, and what is safe when it ends; the next one begins no sooner.
        self._sync: tuple[Position, Future[float]] | None = None
        self._rests_until = 0.0

    def upto(self, here: Position, *, wait: bool = False) -> Position | None:
        """Up to where rows may be removed at each gateway, ``here`` or one before it; None when nothing may be yet.

        With `wait` it syncs before it answers, whatever it takes: there will be no other call.

        Raises:
            JournalError: TL-J20, the checkpoint can't be made durable.
        """
        if self._safe is None or self._safe != here:
            if self._checkpoint.ends_at(here.to_json(), done=True):
                self._checkpoint.sync()
                self._safe = here
            else:
                self._safe = self._synced(here, wait=wait)
        return self._safe

    def remember(self, there: Position) -> None:
        """Make durable that the batch up to ``there`` has been begun, so that it is never taken for a new one.

        Raises:
            JournalError: TL-J20, the checkpoint can't be made durable.
        """
        if self._checkpoint.ends_at(there.to_json(), done=False):
            self._checkpoint.sync()
        else:
            os.sync()

    def _synced(self, here: Position, *, wait: bool) -> Position | None:
        """The newest place that was asked for before a sync of the machine that has ended."""
        if wait:
            os.sync()
            return here
        now, safe = time.monotonic(), self._safe
        if self._sync is not None and self._sync[1].done():
            safe, took_s = self._sync[0], self._sync[1].result()
            self._sync, self._rests_until = None, now + max(_EVERY_S, took_s / _SHARE) - took_s
        if self._sync is None and safe != here and now >= self._rests_until:
            self._sync = here, later(_sync_machine, "sync")
        return safe


def _sync_machine() -> float:
    """Sync every file system; sync(2) waits for the disks, but tells no error. How long it took, in seconds."""
    began = time.monotonic()
    os.sync()
    return time.monotonic() - began


#: An idle stream makes an empty batch this often, in seconds: Spark ends Python workers that idle for 60 s
#: (PythonWorkerFactory.IDLE_WORKER_TIMEOUT_NS), and the next batch would then take five seconds instead of 0.2.
TICK_S = 45.0

#: Longest wait for a message while rows are in the commit log and not yet safe to remove, in seconds.
SETTLE_S = 0.25

_LOG = logging.getLogger("towline.spark")
#: Messages that a Mosquitto keeps for a client that is away, unless its file says something else.
_QUEUE: Final = DEFAULTS["max_queued_messages"]


class MqttStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams inboxes: offsets are journal offsets, reads are repeatable [I4].

    ``start`` of `latestOffset` is the end of the last batch whose commit-log entry is written; it alone moves the
    committed watermarks, and only as far as the entry survives a power failure (`Cut`) [I5]. ``commit``
    comes late and never for the last batch, ``stop`` may come with a batch uncommitted: neither moves anything.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        #: Made in the runner, by the first call that only it gets: what it holds does not travel.
        self._planner: BatchPlanner | None = None
        self._cut = Cut(plan.checkpoint)
        self._cadence = Cadence(plan.max_delay_s)
        self._planned = False
        #: Whether the query ends at what was there when it began.
        self._ends = False
        #: When the offset changed last. Never, at first: a query that starts idle ticks at once, so that Spark's Python
        #: workers and the sink's producer are warm when the first message comes.
        self._moved = float("-inf")
        self._warned = False
        self._told_short = False

    # -- in the runner -----------------------------------------------------------------------------------------

    @one_line
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query at what is durable now."""
        self._opened.fix_end()
        self._ends = True

    @one_line
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Most rows or bytes of a batch; the first call that only the runner gets.

        Raises:
            ConfigError: TL-C24 for a schema or an option that a stream can't have.
        """
        _ = self._opened  # which looks at the plan
        if self._plan.max_rows is not None:
            return ReadMaxRows(self._plan.max_rows)
        return ReadAllAvailable() if self._plan.max_bytes is None else ReadMaxBytes(self._plan.max_bytes)

    @one_line
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins: option ``startingOffset``, at each gateway that answers.

        Raises:
            ConfigError: TL-G50 for two gateways that are one.
            Fenced: TL-G03 when another living query reads as this consumer.
            GatewayUnreachable: None answers.
        """
        return self._opened.beginning().to_json()

    @one_line
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Commit what of ``start`` is durable, then wait for new rows for a while, and until they are worth a batch.

        Returns:
            The end of the next batch within the limit, or ``start`` itself when nothing is new: Spark compares
            offsets as text.

        Raises:
            ConfigError: TL-G50 to TL-G52, the list of gateways can't be.
            Fenced: TL-G03, as `initialOffset`.
            JournalError: TL-J20, the checkpoint can't be made durable.
        """
        here, planner = Position.parse(start), self._opened
        self._planned = True
        self._cadence.asks(time.monotonic())
        safe = self._cut.upto(here, wait=planner.ended(here))
        there = planner.next(here, safe, limit, self._patience(settled=safe == here))
        while rest := self._rest(here, there):
            time.sleep(rest)
            there = planner.next(here, safe, limit, 0.0)
        if there.places != here.places:
            self._moved = time.monotonic()
            self._cadence.begins(self._moved)
            return there.to_json()
        return self._ticked(here) or start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Queue depth and counters; they appear as ``sources[].latestOffset`` in the query's progress.

        ``tip`` is the end of the journal, ``queued`` what lies beyond the planned batch, and ``last_error`` what keeps
        messages from coming, which is also warned of once; the rest is the gateway's own account. Of several gateways
        these are the sums, and ``gateways`` has the same for each, with ``away_since`` for one that does not answer.
        """
        report = self._planner.report() if self._planner else None
        if report is None:
            return None
        if trouble := report.get("last_error"):
            from towline.spark.options import in_options  # noqa: PLC0415 - workers need no pydantic

            report["last_error"] = trouble = in_options(str(trouble))
            if not self._warned and "away_since" not in report:  # that was told when it went
                _LOG.warning(trouble)
        self._warned = bool(trouble)
        if self._plan.place.settings and not self._told_short and (short := _short_queue(report)):
            self._told_short = True
            _LOG.warning(short)
        return report

    @one_line
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The slices of a batch; an empty one for a batch without rows, so that a worker is used.

        The first call after a crash is for the interrupted batch, before any `latestOffset`. It is served again, or
        empty where nothing is served twice; then it must not be forgotten that a batch was begun, not by a power
        failure either.
        """
        plan, here, there = self._plan, Position.parse(start), Position.parse(end)
        if here == there or not (plan.serves_again or self._planned):
            return []
        planner = self._opened
        if not plan.serves_again:
            self._cut.remember(there)
        slices = planner.slices(here, there)
        if plan.event_time:
            watermark_ms = self._watermark(there)
            slices = [replace(part, watermark_ms=watermark_ms) for part in slices]
        return slices

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: ``start`` of the next `latestOffset` says the same earlier and for the last batch too [I5]."""

    def stop(self) -> None:
        """Give the leases back; a batch may be uncommitted, so no watermark moves."""
        if self._planner:
            self._planner.release()
        self._planner = None
        if is_runner() and isinstance(sys.exception(), EOFError | SystemExit):
            os._exit(0)  # the JVM has closed the socket: reporting there would only print a traceback

    # -- in the workers ----------------------------------------------------------------------------------------

    @one_line
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice, the same ones each time [I4].

        Raises:
            GatewayError: TL-G62, a second attempt of the task asks for rows that are served once. The first may have
                passed them on, and nobody could count them: so the batch fails, and comes again empty.
        """
        part = self._begun(partition)
        rows = _rows(part)
        return rows if part.watermark_ms is None else _timed(rows, part.watermark_ms)

    def _begun(self, partition: InputPartition) -> Slice:
        """The slice of a task, which may be read.

        Raises:
            GatewayError: TL-G62.
        """
        settle()
        assert isinstance(partition, Slice)
        if not self._plan.serves_again and partition.start < partition.end and (attempt := _attempt()):
            what = f"attempt {attempt + 1} of a task asks for rows that this guarantee hands out once"
            do = "Start the query again: the batch then comes without them. spark.task.maxFailures=1 saves attempts."
            raise GatewayError("TL-G62", 'format("mqtt")', what, do)
        return partition

    # -- helpers -----------------------------------------------------------------------------------------------

    @property
    def _opened(self) -> BatchPlanner:
        """The planner, which only the runner needs."""
        if self._planner is None:
            from towline.spark.gateways import BatchPlanner  # noqa: PLC0415 - see above

            self._plan.check(streaming=True)
            end_in_order()
            self._planner = BatchPlanner(self._plan)
        return self._planner

    def _watermark(self, there: Position) -> int:
        """The watermark of the batch that ends there, in ms since 1970.

        From the offset log, where Spark has written it before it asks for slices: the same again for a replay.
        """
        found = Checkpoint(self._plan.checkpoint).watermark_ms(there.to_json())
        if found is None:
            what = f'the watermark of this batch can\'t be read in the checkpoint "{self._plan.checkpoint}"'
            do = "Give checkpointLocation, the same as the writer's, on a file system of this machine."
            raise ConfigError("TL-C24", 'format("mqtt") option "eventTime"', what, do)
        return found

    def _patience(self, *, settled: bool) -> float:
        """How long this call may wait, in seconds: not at all for AvailableNow, and not beyond the next tick.

        Where not all that is done could be removed, the next call is to come soon.
        """
        if self._ends:
            return 0.0
        longest = self._plan.poll_s if settled else min(self._plan.poll_s, SETTLE_S)
        return max(0.0, min(longest, self._moved + TICK_S - time.monotonic()))

    def _rest(self, here: Position, there: Position) -> float:
        """Seconds until what waits is to be looked at again; 0 for a batch now, or for none."""
        rows = sum(end.offset - start for start, end in ranges_between(here, there))
        if not rows or self._ends or self._opened.cut_short:
            return 0.0
        return self._cadence.wait_s(rows, time.monotonic())

    def _ticked(self, here: Position) -> dict[str, Any] | None:
        if self._ends or time.monotonic() - self._moved < TICK_S:
            return None
        self._moved = time.monotonic()
        return here.ticked().to_json()


class MqttBatchReader(DataSourceReader):
    """Reads a range of each inbox once; moves no watermark and needs no lease. Every gateway has to be there."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan

    @one_line
    def partitions(self) -> Sequence[InputPartition]:
        """Slices from ``startingOffset`` (default earliest) to ``endingOffset`` (default the newest)."""
        plan = self._plan
        plan.check(streaming=False)
        ranges = sorted(((*self._range(place), place) for place in plan.places), key=lambda one: one[1].gateway)
        check_distinct(end for _, end, _ in ranges)
        rows = [max(1, end.offset - start) for start, end, _ in ranges]
        slices: list[Slice] = []
        for (start, end, place), sizes in zip(
            ranges, divided(rows, plan.min_partitions, plan.max_records), strict=True
        ):
            with place.connect() as client:
                slices += slices_of(client, place, start, end, sizes if start < end.offset else [0])
        return slices

    def _range(self, place: GatewayPlace) -> tuple[int, JournalPlace]:
        """What is read of a gateway: its first offset, and the place where it ends."""
        with place.connect() as client:
            status = client.status()
            here = self._plan.entry(client, status, place.text, "earliest")
            ending: int | None = for_gateway(self._plan.ending, here.gateway)
            end = status["end"] if ending is None else ending
            there = here.moved(end, client.extent(end).incarnation)
        if here.offset > end:
            what = f"it is {end}, before the start at {here.offset}"
            do = f"The journal holds the offsets {status['first']} to {status['end'] - 1}."
            raise ConfigError("TL-C23", 'format("mqtt") option "endingOffset"', what, do)
        return here.offset, there

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the range."""
        assert isinstance(partition, Slice)
        return _rows(partition)


def _short_queue(report: Mapping[str, Any]) -> str:
    """TL-G64: a broker as installed would not have kept what came while no gateway was there; "" where it would."""
    came, away = report.get("arrived", 0), report.get("absent_s", 0.0)
    rate = came / max(1.0, report.get("up_s", 0.0))
    if min(came, rate * away) < _QUEUE:  # had it dropped any, so many would have come at once
        return ""
    return (
        f"no gateway was there for {away:,.0f} s, and {rate:,.0f} messages come each second: a Mosquitto as installed "
        f"keeps {_QUEUE:,} for a client that is away, and drops the rest without a word. What this broker keeps is not "
        "known here. Raise its limit (max_queued_messages), or set gatewayLife=detached: then the gateway receives "
        "while no driver runs.   [TL-G64]"
    )


def _rows(part: Slice) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, as a worker reads them."""
    return part.place.rows(part.journal, part.start, part.end, part.incarnation)


def _timed(rows: Iterator[pa.RecordBatch], watermark_ms: int) -> Iterator[pa.RecordBatch]:
    """Rows with their event time: a row is late at or before the watermark (`WatermarkSupport`), and none is."""
    import pyarrow as pa  # noqa: PLC0415 - workers only
    import pyarrow.compute as pc  # noqa: PLC0415

    from towline.schema import EVENT_TIME, TIMED_SCHEMA  # noqa: PLC0415

    kind, earliest = TIMED_SCHEMA.field(EVENT_TIME).type, (watermark_ms + 1) * 1000
    for batch in rows:
        times = pc.max_element_wise(batch.column("received_at").cast(pa.int64()), earliest)
        yield pa.RecordBatch.from_arrays([*batch.columns, times.cast(kind)], schema=TIMED_SCHEMA)


def _attempt() -> int:
    """Which attempt of a task this is, 0 for the first and outside of a task."""
    context = TaskContext.get()
    return context.attemptNumber() if context else 0
