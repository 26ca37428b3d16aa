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
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, one_line
from towline.mosquitto_conf import DEFAULTS
from towline.spark.cadence import Cadence
from towline.spark.link import GatewayPlace, ReadPlan
from towline.spark.offsets import JournalPlace, Position, check_distinct
from towline.spark.tasks import settle
from towline.threads import later

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    import pyarrow as pa

    from towline.gateway.client import GatewayClient
    from towline.spark.gateways import BatchPlanner


@dataclass(frozen=True)
class Slice(InputPartition):
    """The rows ``start`` to ``end`` - 1 of one journal: all that a worker is told.

    Attributes:
        place: Where the gateway is, and what lets the worker in there (`slices_of`).
        incarnation: Which opening of the journal wrote the row below `end`; "" for unknown.
        watermark_ms: The query's watermark, in ms since 1970; None for rows without an event time.
    """

    place: GatewayPlace
    journal: str
    start: int
    end: int
    incarnation: str = ""
    watermark_ms: int | None = None

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Read them, the same ones each time [I4]; raises as `GatewayPlace.rows`."""
        return self.place.rows(self.journal, self.start, self.end, self.incarnation)


def slices_of(
    client: GatewayClient, place: GatewayPlace, start: int, end: JournalPlace, sizes: Sequence[int]
) -> list[Slice]:
    """The rows from `start` to `end` of a gateway's journal in parts of these sizes, as tasks get them. On the driver.

    Those of a gateway on a network have a ticket each. Only of the end it is known which opening of the journal wrote
    the row below.

    Raises:
        GatewayError: TL-G46, the file with the authorities of the gateway's certificate can't be read.
    """
    bounds = pairwise(accumulate(sizes, initial=start))
    ranges = [(low, high, end.incarnation if high == end.offset else "") for low, high in bounds]
    at, tickets = place, [""] * len(ranges)
    if place.remote:
        at, tickets = place.admitted(""), client.sign(end.journal, ranges, valid_s=place.ticket_s)
    return [Slice(replace(at, ticket=one), end.journal, *part) for one, part in zip(tickets, ranges, strict=True)]


def ranges_between(start: Position, end: Position) -> list[tuple[int, JournalPlace]]:
    """What a batch has of each gateway, in the order of their names: its first offset, and the place where it ends.

    A gateway that comes in with this batch has no rows in it: where it begins is only known from its end. One that
    leaves with it has none either.
    """
    known = ((start.place(place.gateway), place) for place in end.places)
    return [(here.offset, there) for here, there in known if here and here.offset < there.offset]


def divided(rows: Sequence[int], min_partitions: int | None, max_records: int | None) -> list[list[int]]:
    """How many rows each part of each range has, in order: all parts of a range about the same, at least 1 if it can.

    Args:
        rows: Of each range.
        min_partitions: Wanted number of all parts together, a hint: one for each range, and the others in proportion to
            their rows, rounded. None for one each.
        max_records: Most rows of a part; None for no limit.
    """
    total, others = max(1, sum(rows)), max(0, (min_partitions or 0) - len(rows))

    def cut(count: int) -> list[int]:
        wanted = 1 + (2 * count * others + total) // (2 * total)  # a half is rounded up
        parts = max(1, min(count, max(wanted, -(-count // max_records) if max_records else 1)))
        least, more = divmod(count, parts)
        return [least] * (parts - more) + [least + 1] * more

    return [cut(count) for count in rows]


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
    if not is_runner():
        return

    def leave(number: int, _: object) -> None:
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
        self._safe = Position(())
        #: A sync of the machine that runs, and what is safe when it ends; the next one begins no sooner.
        self._sync: tuple[Position, Future[float]] | None = None
        self._rests_until = 0.0

    def upto(self, here: Position, *, wait: bool = False) -> Position:
        """Up to where rows may be removed at each gateway, ``here`` or one before it.

        With `wait` it syncs before it answers, whatever it takes: there will be no other call.

        Raises:
            JournalError: TL-J20, the checkpoint can't be made durable.
        """
        if self._safe != here:
            if self._synced(here, done=True, machine=wait):
                self._safe = here
            else:
                self._follow(here)
        return self._safe

    def remember(self, there: Position) -> None:
        """Make durable that the batch up to ``there`` has been begun, so that it is never taken for a new one.

        Raises:
            JournalError: TL-J20, the checkpoint can't be made durable.
        """
        self._synced(there, done=False, machine=True)

    def _synced(self, place: Position, *, done: bool, machine: bool) -> bool:
        """Sync the checkpoint if it says so of a place, else the machine if that may be; whether it is durable now."""
        if known := self._checkpoint.ends_at(place.to_json(), done=done):
            self._checkpoint.sync()
        elif machine:
            os.sync()
        return known or machine

    def _follow(self, here: Position) -> None:
        """Take the newest place that was asked for before a sync of the machine that has ended, and begin the next."""
        now = time.monotonic()
        if self._sync is not None and self._sync[1].done():
            self._safe, took_s = self._sync[0], self._sync[1].result()
            self._sync, self._rests_until = None, now + max(_EVERY_S, took_s / _SHARE) - took_s
        if self._sync is None and self._safe != here and now >= self._rests_until:
            self._sync = here, later(_sync_machine, "sync")


def _sync_machine() -> float:
    """Sync every file system; sync(2) waits for the disks, but tells no error. How long it took, in seconds."""
    began = time.monotonic()
    os.sync()
    return time.monotonic() - began


_LOG = logging.getLogger("towline.spark")
#: Messages that a Mosquitto keeps for a client that is away, unless its file says something else.
_QUEUE: Final = DEFAULTS["max_queued_messages"]


class MqttStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams inboxes: offsets are journal offsets, reads are repeatable [I4].

    ``start`` of `latestOffset` is the end of the last batch whose commit-log entry is written; it alone moves the
    committed watermarks, and only as far as the entry survives a power failure (`Cut`) [I5]. ``commit``, which comes
    late and never for the last batch, is not needed; ``stop`` may come with a batch uncommitted and moves nothing.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        #: Made in the runner, by the first call that only it gets: what it holds does not travel.
        self._planner: BatchPlanner | None = None
        self._cut = Cut(plan.checkpoint)
        self._cadence = Cadence(plan.max_delay_s)
        self._warned = False
        self._told_short = False

    # -- in the runner -----------------------------------------------------------------------------------------

    @one_line
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query at what is durable now."""
        self._opened.fix_end()

    @one_line
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Most rows of a batch; the first call that only the runner gets.

        Raises:
            ConfigError: TL-C24 for a schema or an option that a stream can't have.
        """
        _ = self._opened  # which looks at the plan
        return ReadMaxRows(self._plan.max_rows)

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
        self._cadence.asks(time.monotonic())
        safe = self._cut.upto(here, wait=planner.ended(here))
        patience_s = self._cadence.patience_s(self._plan.poll_s, time.monotonic(), settled=safe == here)
        there = planner.next(here, safe, limit, patience_s if planner.ends is None else 0.0)
        while rest := self._rest(planner, here, there):
            time.sleep(rest)
            there = planner.next(here, safe, limit, 0.0)
        now = time.monotonic()
        if there.places != here.places:
            self._cadence.begins(now)
            return there.to_json()
        return here.ticked().to_json() if planner.ends is None and self._cadence.ticks(now) else start

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
        if here == there:
            return []
        planner = self._opened
        if not plan.serves_again:
            if planner.planned is None:
                return []
            self._cut.remember(there)
        slices = planner.slices(here, there)
        if plan.event_time:
            watermark_ms = self._watermark(there)
            slices = [replace(part, watermark_ms=watermark_ms) for part in slices]
        return slices

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
        return part.rows() if part.watermark_ms is None else _timed(part.rows(), part.watermark_ms)

    def _begun(self, partition: InputPartition) -> Slice:
        """The slice of a task, which may be read; else TL-G62."""
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

            if self._plan.refused:
                raise self._plan.refused
            if self._plan.ending is not None:
                do = "Use spark.read for a range, or trigger(availableNow=True) for all that is there."
                raise ConfigError("TL-C24", 'format("mqtt") option "endingOffset"', "a stream has no end", do)
            end_in_order()
            self._planner = BatchPlanner(self._plan)
        return self._planner

    def _watermark(self, there: Position) -> int:
        """The watermark of a batch in ms since 1970; Spark logs it before it asks for slices, for a replay too."""
        found = Checkpoint(self._plan.checkpoint).watermark_ms(there.to_json())
        if found is None:
            what = f'the watermark of this batch can\'t be read in the checkpoint "{self._plan.checkpoint}"'
            do = "Give checkpointLocation, the same as the writer's, on a file system of this machine."
            raise ConfigError("TL-C24", 'format("mqtt") option "eventTime"', what, do)
        return found

    def _rest(self, planner: BatchPlanner, here: Position, there: Position) -> float:
        """Seconds until what waits is to be looked at again; 0 for a batch now, or for none."""
        rows = sum(end.offset - start for start, end in ranges_between(here, there))
        if not rows or planner.ends is not None or planner.cut_short:
            return 0.0
        return self._cadence.wait_s(rows, time.monotonic())


class MqttBatchReader(DataSourceReader):
    """Reads a range of each inbox once; moves no watermark and needs no lease. Every gateway has to be there."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan

    @one_line
    def partitions(self) -> Sequence[InputPartition]:
        """Slices from ``startingOffset`` (default earliest) to ``endingOffset`` (default the newest).

        Raises:
            ConfigError: TL-C24 for what a batch read can't have, TL-C23 for an end before the start.
        """
        plan = self._plan
        if plan.refused:
            raise plan.refused
        if plan.event_time:
            where, what = 'format("mqtt") option "eventTime"', "a batch read has no watermark"
            raise ConfigError("TL-C24", where, what, "Use received_at.")
        ranges = sorted(((*self._range(place), place) for place in plan.places), key=lambda one: one[1].gateway)
        check_distinct(end for _, end, _ in ranges)
        sizes = divided([end.offset - start for start, end, _ in ranges], plan.min_partitions, plan.max_records)
        slices: list[Slice] = []
        for (start, end, place), each in zip(ranges, sizes, strict=True):
            with place.connect() as client:
                slices += slices_of(client, place, start, end, each)
        return slices

    def _range(self, place: GatewayPlace) -> tuple[int, JournalPlace]:
        """What is read of a gateway: its first offset, and the place where it ends."""
        with place.connect() as client:
            status = client.status()
            here = self._plan.entry(client, status, place.text, "earliest")
            ending = self._plan.ending
            ending = ending.get(here.gateway) if isinstance(ending, Mapping) else ending
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
        return partition.rows()


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
