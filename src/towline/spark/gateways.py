"""Batch planning over all gateways of a stream: polls, outages, limits. Used in Spark's source runner only.

Each gateway is polled on a thread of its own, because a long poll blocks its call. The first result with rows wakes the
reader. The other polls go on and stay valid for the next call while that gateway's position is the same. Only the
reader's thread handles results. An unavailable gateway delays no other gateway's rows. A single gateway is a list of
one.

The checkpoint holds the end positions of each planned batch. All else follows from start, end and the options, so that
a batch is repeated with the same rows [I4].
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, JournalFailed, TowlineError
from towline.gateway.access import ACCESS_ERROR_CODES
from towline.gateway.client import Lease, call_interruptibly
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.identity import JournalPosition, own_positions
from towline.spark.batching import BatchByteLimit
from towline.spark.link import GATEWAY_TIMEOUT_S, retry_while_unreachable
from towline.spark.offsets import GATEWAYS_OPTION, SourceOffset, check_distinct
from towline.spark.reader import Slice, ranges_between, slice_of
from towline.spark.sink_note import read_throughput
from towline.threads import call_in_thread, guarded_thread
from towline.timing import Backoff

if TYPE_CHECKING:
    from towline.gateway.client import GatewayClient
    from towline.spark.link import GatewayAddress, ReadPlan

#: Pause before an unreachable gateway is polled again, in seconds.
_RETRY_S: Final = 0.25
#: The same after a refusal: the gateway counts each attempt, and a file must be changed first.
_REFUSED_RETRY_S: Final = 5.0
#: Longest wait for the lease of the reader before, in seconds: a stopped query's process needs a moment to end.
LEASE_WAIT_S = 5.0
#: Longest wait for further gateways after the first result, in seconds: a gateway with rows answers a poll at once, so
#: one that takes longer has none.
POLL_GRACE_S: Final = 0.02
#: The same for a gateway that is known to have rows, until it answers again; of a new query for further gateways; and
#: of a restarted query for the first result, in seconds.
SLOW_POLL_GRACE_S: Final = 5.0

#: A future for `futures.wait`, which returns at once without any.
_PENDING_FOREVER: Final[futures.Future[Any]] = futures.Future()

_LOG = logging.getLogger("towline.spark")
_T = TypeVar("_T")


def is_refusal(error: TowlineError) -> bool:
    """Return whether an error is a refused token or certificate, by the gateway or by this query."""
    return isinstance(error, GatewayError) and error.code in ACCESS_ERROR_CODES


def is_outage(error: TowlineError) -> bool:
    """Return whether an error delays the rows of that gateway only; it ends by itself, or when a file is changed.

    Another journal than the checkpoint's, or another reader's lease, stops the query: to go on would lose rows
    silently.
    """
    return isinstance(error, (GatewayUnreachable, JournalFailed)) or is_refusal(error)


class GatewayOutage(NamedTuple):
    """Outage of a gateway: `started_at` in seconds since 1970, `retry_at` on `time.monotonic`."""

    error: TowlineError
    started_at: float
    retry_at: float


class PollRequest(NamedTuple):
    """Poll of a gateway: commit up to `durable_offset`, and return the rows after `start` within the limits."""

    start: JournalPosition
    durable_offset: int
    max_rows: int | None = None
    max_bytes: int | None = None


class PollResult(NamedTuple):
    """Rows available for the next batch: count, bytes in the journal, end position, and the journal's end offset."""

    rows: int
    size: int
    end: JournalPosition
    journal_end: int


class SourceGateway:
    """Connection of a source to one gateway, with its polls and outages.

    Args:
        lease: Lease of the reader, the same at all gateways: a gateway listed twice fences off nobody.

    Attributes:
        start: First position for a query without one in this journal; None until the first connection.
        outage: None while the gateway is available.
        journal_end: Offset after the newest row that the gateway reported.
        pending_poll: Result of the running poll; None when there is none.
        poll_started: Start of that poll, on `time.monotonic`.
        overdue_since: Since when it polls for rows that are known to wait there; 0 for not.
    """

    def __init__(self, address: GatewayAddress, plan: ReadPlan, lease: Lease) -> None:
        self.address = address
        self.start: JournalPosition | None = None
        self.outage: GatewayOutage | None = None
        self.journal_end = 0
        self.pending_poll: futures.Future[PollResult | None] | None = None
        self.poll_started = self.overdue_since = 0.0
        self._pending_request: PollRequest | None = None
        self._plan = plan
        self._lease = lease
        #: None before the first connection, and after a failed one was closed; one thread at a time connects.
        self._client: GatewayClient | None = None
        self._connect_lock = threading.Lock()
        self._release_event = threading.Event()
        self._restart_thread = guarded_thread(self._restart_gateway, "keep-gateway", retry_s=1.0)

    @property
    def display_name(self) -> str:
        """Name in messages: gateway name, if known, and location."""
        location = self.address.location
        return f"{self.start.gateway} ({location})" if self.start else location

    def start_poll(self, request: PollRequest | None, timeout_s: float) -> None:
        """Start a poll, or only connect if `request` is None; no-op if the same poll runs or a retry is not due."""
        now = time.monotonic()
        overdue = request is not None and request.max_rows != 0 and self.journal_end > request.start.offset
        self.overdue_since = (self.overdue_since or now) if overdue else 0.0
        if self.pending_poll and self._pending_request == request:
            return
        self.pending_poll, self._pending_request, self.poll_started = None, request, now
        if self.outage is None or self.poll_started >= self.outage.retry_at:
            call = partial(self.poll_rows, request, timeout_s) if request else partial(self._call, lambda _: None)
            self.pending_poll = call_in_thread(call, f"gateway {self.address.location}")

    def finish_poll(self) -> PollResult | None:
        """Return the result of a finished poll, else None; an outage is logged and gives None.

        Raises:
            TowlineError: The error of the poll, unless it is an outage.
        """
        if self.pending_poll is None or not self.pending_poll.done():
            return None
        finished_poll, self.pending_poll, self.overdue_since = self.pending_poll, None, 0.0
        try:
            result = finished_poll.result()
        except TowlineError as error:
            if not is_outage(error):
                raise
            self._record_outage(error)
            return None
        if self.outage is not None:
            since = f"{datetime.fromtimestamp(self.outage.started_at).astimezone():%H:%M:%S}"
            _LOG.warning("gateway %s is available again; it was unavailable since %s", self.display_name, since)
            self.outage = None
        self.journal_end = result.journal_end if result else self.journal_end
        return result

    def _record_outage(self, error: TowlineError) -> None:
        """Record an outage, and log its start."""
        previous, is_refused = self.outage, is_refusal(error)
        if previous is None or is_refusal(previous.error) is not is_refused:
            state, code = ("refuses this query", error.code) if is_refused else ("is unavailable", "TL-G54")
            message = "gateway %s %s: %s; its messages wait there. %s   [%s]"
            _LOG.warning(message, self.display_name, state, error.problem, error.remedy, code)
        started_at = previous.started_at if previous else time.time()
        self.outage = GatewayOutage(
            error, started_at, time.monotonic() + (_REFUSED_RETRY_S if is_refused else _RETRY_S)
        )

    def poll_rows(self, request: PollRequest, timeout_s: float) -> PollResult:
        """Connect, start the gateway if it belongs to this query, take the lease, commit, and wait for rows.

        Raises:
            ReaderFenced: TL-G03, another living reader has the lease; as `GatewayClient.wait`.
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        start, values = request.start, request._asdict()
        values |= {"start": start.offset, "journal": start.journal, "incarnation": start.incarnation}

        def poll(client: GatewayClient) -> PollResult:
            window = client.wait(self._lease, **values, timeout_s=timeout_s)
            if self.address.remote and timeout_s and window.end > start.offset:
                # The token of the poll may have been revoked while it waited.
                window = client.wait(self._lease, **values, timeout_s=0.0)
            end = replace(start, offset=window.end, incarnation=window.incarnation)
            return PollResult(window.end - start.offset, window.size, end, window.journal_end)

        return self._call(poll)

    def slice(self, start: int, end: JournalPosition) -> Slice:
        """Return the slice of a range of its journal. Raises as `poll_rows`."""

        def create_slice(client: GatewayClient) -> Slice:
            if self.start and self.start.journal != end.journal:  # the gateway refuses it
                client.wait(self._lease, end.offset, journal=end.journal, timeout_s=0.0, durable_offset=0)
            return slice_of(client, self.address, start, end)

        return self._call(create_slice)

    def report(self, queued_rows: int) -> dict[str, Any]:
        """Return the gateway's status, polled within a second, its waiting rows and its outage, as plain values."""
        status: Mapping[str, Any] = {}
        if self.outage is None and (client := self._client):
            with contextlib.suppress(GatewayError):  # the next poll reports the error
                status = client.status(timeout_s=1.0)
        report = {key: value for key, value in status.items() if isinstance(value, bool | int | float | str)}
        if error_text := (status.get("last_error") or {}).get("text"):
            report["last_error"] = error_text
        if outage := self.outage:
            report["away_since"] = datetime.fromtimestamp(outage.started_at, UTC).isoformat(timespec="seconds")
            report["last_error"] = outage.error.problem
            if is_refusal(outage.error):
                report |= {"refused": True, "last_error": f"{outage.error.problem}. {outage.error.remedy}"}
        return {**report, "tip": self.journal_end, "queued": queued_rows}

    def release(self) -> None:
        """Release the lease and close; commits nothing, and never connects again."""
        self._release_event.set()
        if client := self._client:
            with contextlib.suppress(GatewayError):
                client.release(self._lease)
            self._close_client(client)

    def _call(self, call: Callable[[GatewayClient], _T]) -> _T:
        """Call the gateway while signals are handled; close a connection that failed."""

        def call_connected() -> _T:
            with self._connect_lock:
                client = self._client or self._connect()
            try:
                return call(client)
            except TowlineError as error:
                if is_outage(error):  # the next connection reads the files of the credentials again
                    self._close_client(client)
                raise

        return call_interruptibly(call_connected)

    def _connect(self) -> GatewayClient:
        client = self.address.connect()
        if self.address.settings and not self._restart_thread.is_alive():
            self._restart_thread.start()
        try:
            status = client.acquire(self._lease, wait_s=LEASE_WAIT_S)
            start = self._plan.start_position(client, status, "committed")
        except BaseException:
            client.close()
            raise
        self._client, self.start, self.journal_end = client, start, max(self.journal_end, status["end"])
        if self._release_event.is_set():  # meanwhile: nobody would stop this reader
            self.release()
            raise GatewayUnreachable("TL-G01", self.address.location, "its reader was stopped", "Restart the query.")
        return client

    def _restart_gateway(self) -> None:
        """Restart the gateway when its process has ended, also while a batch runs."""
        backoff = Backoff(first_s=0.5, max_s=10.0)
        while not self._release_event.wait(backoff.next_pause()):
            endpoint = GatewayEndpoint.read(Path(self.address.location))
            if endpoint is None or endpoint.process.has_ended():
                with contextlib.suppress(TowlineError):  # the next poll reports it
                    self.address.connect().close()
            else:
                backoff.reset()

    def _close_client(self, client: GatewayClient) -> None:
        """Close a connection, unless a newer one has replaced it; the next call connects again."""
        if self._client is client:
            self._client = None
            client.close()


#: Results of the polls of a batch.
_Results: TypeAlias = dict[SourceGateway, PollResult]


class BatchPlanner:
    """Planner of a stream's batches.

    Attributes:
        gateways: Gateways of the list.
        end_offsets: End of the query in each journal (AvailableNow); None for a query without an end.
        planned_range: Start and end of the last planned batch, which may grow until Spark runs it; None before the
            first.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        lease = Lease(plan.consumer)
        self.gateways = tuple(SourceGateway(address, plan, lease) for address in plan.addresses)
        self.end_offsets: dict[str, int] | None = None
        self.planned_range: tuple[SourceOffset, SourceOffset] | None = None
        #: Number of consecutive batches whose limits left no room for a gateway.
        self._skipped_batches = Counter[SourceGateway]()
        #: Limit by the sink's write throughput, from the checkpoint; None if its location is unknown.
        sink_throughput = partial(read_throughput, Checkpoint(plan.checkpoint))
        self._byte_limit = BatchByteLimit(sink_throughput) if plan.checkpoint else None

    def release(self) -> None:
        """Release all leases; commits nothing. An unavailable gateway has no lease, and is not polled again."""
        for gateway in self.gateways:
            gateway.release()

    def connect(self) -> None:
        """Take the leases of at least one gateway, and of those that answer within `SLOW_POLL_GRACE_S`.

        Raises:
            TowlineError: Error of the first unavailable gateway, if all are unavailable.
        """
        self._poll_gateways({}, GATEWAY_TIMEOUT_S, SLOW_POLL_GRACE_S)
        if all(gateway.outage or not gateway.start for gateway in self.gateways):
            location = self.gateways[0].address.location
            error = GatewayUnreachable("TL-G01", location, "no gateway answers", "Is it running?")
            raise next((gateway.outage.error for gateway in self.gateways if gateway.outage), error)

    def fix_end_offsets(self) -> None:
        """Set the end of the query to the present end of each available journal; other gateways have no part in it."""
        self.connect()
        self.end_offsets = {gateway.start.journal: gateway.journal_end for gateway in self.gateways if gateway.start}

    def is_finished(self, offset: SourceOffset) -> bool:
        """Return whether a query with an end has reached it."""
        return self.end_offsets is not None and not any(map(self._remaining_rows, offset.positions))

    def _remaining_rows(self, position: JournalPosition) -> int:
        """Return the rows between a position and the end of a query that has one."""
        return max(0, (self.end_offsets or {}).get(position.journal, 0) - position.offset)

    def initial_offset(self) -> SourceOffset:
        """Return the start of a query without a checkpoint, at each gateway that answers."""
        self.connect()
        return SourceOffset(tuple(gateway.start for gateway in self.gateways if gateway.start))

    def plan_batch(self, start: SourceOffset, durable: SourceOffset, limit: ReadLimit, wait_s: float) -> SourceOffset:
        """Return the end of the next batch within the limit; `start` itself when there are no new rows.

        Args:
            start: End of the last batch in the commit log.
            durable: Offset up to which each gateway may remove rows: `start` or an earlier one.
            limit: Limit of the batch, all gateways together.
            wait_s: Longest wait for rows, in seconds.

        Raises:
            ConfigError: TL-G50, TL-G51, the list of gateways is invalid.
            TowlineError: The error of a gateway.
        """
        if self._byte_limit and not (self.planned_range and start.positions == self.planned_range[0].positions):
            self._byte_limit.next_limit()
        if not any(gateway.start for gateway in self.gateways):
            self._poll_gateways({}, max(wait_s, SLOW_POLL_GRACE_S))
            wait_s = 0.0
        positions = {gateway: self._position_of(gateway.start, start) for gateway in self.gateways if gateway.start}
        removed_names = self._removed_names(start, positions.values())
        # First positions of gateways that join; their rows come with the next batch, none beyond the end of the query.
        joining = [gateway.start for gateway, position in positions.items() if gateway.start and not position]
        joining = [first for first in joining if self.end_offsets is None or first.journal in self.end_offsets]
        max_rows, max_bytes = self._batch_limits(limit)
        requests: dict[SourceGateway, PollRequest] = {}
        for gateway, position in positions.items():
            if position:
                rows_to_end = None if self.end_offsets is None else self._remaining_rows(position)
                row_limit = _lowest_limit(max_rows, rows_to_end)
                requests[gateway] = PollRequest(position, durable.offset_in(position.journal), row_limit, max_bytes)
        results = self._poll_gateways(requests, 0.0 if removed_names or joining else wait_s)
        end_positions = self._end_positions(requests, results, max_rows, max_bytes)
        end = start.update([*end_positions, *joining], removed_names)
        self.planned_range = start, end
        unavailable = [
            gateway for gateway in requests if gateway.outage and self._remaining_rows(requests[gateway].start)
        ]
        if end == start and unavailable:  # the query does not end without their rows
            gateway = unavailable[0]
            self._poll_gateways({gateway: requests[gateway]}, GATEWAY_TIMEOUT_S)
            if gateway.outage:
                raise gateway.outage.error
            return self.plan_batch(start, durable, limit, wait_s)
        return end

    def _position_of(self, first_position: JournalPosition, offset: SourceOffset) -> JournalPosition | None:
        """Return the position of a connected gateway, by its journal id, else by its name."""
        name, journal, is_only_gateway = first_position.gateway, first_position.journal, not self._plan.gateways
        return next(iter(own_positions(offset.positions, name, journal, is_only_gateway=is_only_gateway)), None)

    def _batch_limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """Return the limits of rows and bytes; None for all rows, as Spark wants with Trigger.Once."""
        if not isinstance(limit, ReadMaxRows):
            return None, None
        throughput_limit = self._byte_limit.max_bytes if self._byte_limit else None
        return limit.max_rows, _lowest_limit(self._plan.max_bytes, throughput_limit)

    def _end_positions(
        self,
        requests: Mapping[SourceGateway, PollRequest],
        results: Mapping[SourceGateway, PollResult],
        *limits: int | None,
    ) -> list[JournalPosition]:
        """Return the end positions of the batch at each gateway with rows in it, within its limits."""

        def poll_within(gateway: SourceGateway, max_rows: int | None, max_bytes: int | None) -> PollResult | None:
            max_rows = _lowest_limit(max_rows, requests[gateway].max_rows)
            try:
                return gateway.poll_rows(requests[gateway]._replace(max_rows=max_rows, max_bytes=max_bytes), 0.0)
            except TowlineError as error:
                if not is_outage(error):
                    raise
                return None  # the next poll reports it

        usable = {gateway: result for gateway, result in results.items() if result.rows}
        shares = share_limits(usable, self._skipped_batches, limits, poll_within)
        skipped = usable.keys() - shares.keys()
        self._skipped_batches = Counter({gateway: self._skipped_batches[gateway] + 1 for gateway in skipped})
        if self._byte_limit and shares:
            self._byte_limit.record_planned(sum(result.size for result in shares.values()))
        return [result.end for result in shares.values()]

    @property
    def has_backlog(self) -> bool:
        """Whether more rows wait than the planned batch takes within its limits."""
        return any(self._queued_rows(gateway) for gateway in self.gateways if not gateway.outage)

    def _queued_rows(self, gateway: SourceGateway) -> int:
        """Return the number of rows that wait at a gateway beyond the planned batch."""
        if not self.planned_range or not gateway.start:
            return 0
        position = self._position_of(gateway.start, self.planned_range[1])
        return max(0, gateway.journal_end - position.offset) if position else 0

    def _poll_gateways(
        self, requests: Mapping[SourceGateway, PollRequest], timeout_s: float, grace_s: float = 0.0
    ) -> _Results:
        """Poll each gateway, which also commits, until one has rows, or is connected, and others had a grace time."""
        unknown = [gateway for gateway in self.gateways if not gateway.start]
        polls: dict[SourceGateway, PollRequest | None] = {**dict.fromkeys(unknown), **requests}
        deadline = time.monotonic() + (timeout_s or GATEWAY_TIMEOUT_S)
        results: _Results = {}

        def grace_is_over(gateway: SourceGateway) -> bool:
            if gateway.overdue_since:
                return now - gateway.overdue_since >= SLOW_POLL_GRACE_S
            return now - gateway.poll_started >= max(grace_s, POLL_GRACE_S)

        self._finish_polls(polls)  # and repeat them: a gateway may have become unavailable since
        while True:
            for gateway in polls.keys() - results.keys():
                gateway.start_poll(polls[gateway], min(timeout_s, max(0.0, deadline - time.monotonic())))
            finished = self._finish_polls(polls)
            results |= {gateway: result for gateway, result in finished.items() if result.rows or not timeout_s}
            now = time.monotonic()
            pending = [gateway for gateway in requests or polls if gateway.pending_poll and not gateway.outage]
            if requests:
                has_rows = any(result.rows for result in results.values())
            else:
                has_rows = any(gateway.start and not gateway.outage for gateway in self.gateways)
            # Without a timeout each available gateway answers.
            is_over = all(map(grace_is_over, pending)) if has_rows else not timeout_s and not pending
            if is_over or now >= deadline:
                return results
            # A wait also ends when the grace time of a poll is over, or a retry is due.
            retries = [gateway.outage.retry_at for gateway in polls if gateway.outage and not gateway.pending_poll]
            wait_s = min(min((deadline, *retries)) - now, POLL_GRACE_S if has_rows else 1.0)
            running = [gateway.pending_poll for gateway in polls if gateway.pending_poll]
            futures.wait([_PENDING_FOREVER, *running], max(0.0, wait_s), futures.FIRST_COMPLETED)

    def _finish_polls(self, gateways: Iterable[SourceGateway]) -> _Results:
        """Return the results of finished polls; raises first if two gateways of the list are the same."""
        check_distinct(gateway.start for gateway in self.gateways if gateway.start)
        results: dict[SourceGateway, PollResult] = {}
        errors: list[TowlineError] = []
        for gateway in gateways:
            try:
                if result := gateway.finish_poll():
                    results[gateway] = result
            except TowlineError as error:
                errors.append(error)
        outages = [gateway.outage.error for gateway in self.gateways if gateway.outage]
        if len(outages) == len(self.gateways) and all(map(is_refusal, outages)):  # only a person can change that
            raise outages[0]
        if errors:
            raise errors[0]
        return results

    def report(self) -> dict[str, Any] | None:
        """Return the status of each gateway and the sums of waiting rows; None if nothing is known yet.

        With the option ``gateway`` it is that gateway's status.
        """
        reports: dict[str, dict[str, Any]] = {}
        for gateway in self.gateways:
            if gateway.start or gateway.outage:
                name = gateway.start.gateway if gateway.start else gateway.address.location
                reports[name] = gateway.report(self._queued_rows(gateway))
        if not self._plan.gateways:
            report = next(iter(reports.values()), {})
            return report if report.keys() - {"tip", "queued"} else None
        available = [report for report in reports.values() if "away_since" not in report]  # an outage was logged
        errors = [report["last_error"] for report in available if "last_error" in report]
        totals = {key: sum(report[key] for report in reports.values()) for key in ("tip", "queued")}
        last_error = {"last_error": errors[0]} if errors else {}
        return {**totals, **last_error, "gateways": dict(sorted(reports.items()))}

    def _removed_names(self, offset: SourceOffset, listed_positions: Iterable[object]) -> list[str]:
        """Return the gateways to remove from the checkpoint; raises TL-G51 for one that the options do not name."""
        other_positions = [position for position in offset.positions if position not in listed_positions]
        names = [position.gateway for position in other_positions]
        removed_names = [name for name in names if name in self._plan.removed_gateways]
        unnamed = [name for name in names if name not in removed_names]
        # Each gateway that was never connected may be one of them; as many others at least left the list.
        unknown_count = sum(not gateway.start for gateway in self.gateways)
        if (left_count := len(unnamed) - unknown_count) > 0:
            gateways_text = f"{left_count} of the checkpoint's gateways ({', '.join(unnamed)})"
            problem = f"{gateways_text} left the list, and messages may wait there"
            remedy = (
                f"Put it back, and drain it; then name it: removedGateways={unnamed[0]} "
                f'(in a bridge file, removed_gateways = ["{unnamed[0]}"]).'
            )
            raise ConfigError("TL-G51", GATEWAYS_OPTION, problem, remedy)
        if len(removed_names) > len(names) - unknown_count:
            return []
        for name in removed_names:
            _LOG.warning("gateway %s is removed from the checkpoint, as in removedGateways", name)
        return removed_names

    def slices(self, start: SourceOffset, end: SourceOffset) -> list[Slice]:
        """Return the partitions of the batch between two offsets: the same ones, with the same rows, at each call.

        Raises:
            ReaderFenced: TL-G04, a gateway serves another journal.
            GatewayUnreachable: TL-G53, a gateway with rows of the batch is unavailable.
        """
        slices, idle = [self._gateway_slice(*rows) for rows in ranges_between(start, end)], end.positions[0]
        return slices or [Slice(self._plan.address, idle.journal, idle.offset, idle.offset, idle.incarnation)]

    def _gateway_slice(self, start: int, end: JournalPosition) -> Slice:
        try:
            return retry_while_unreachable(partial(self._create_slice, start, end), timeout_s=GATEWAY_TIMEOUT_S)
        except TowlineError as error:
            if not is_outage(error):
                raise
            rows_text = f"its messages {start:,} to {end.offset - 1:,}"
            problem = f"it is unavailable ({error.problem}), and an interrupted batch needs {rows_text}"
            restart_hint = error.remedy if is_refusal(error) else f"Start it at {error.location}."
            remedy = f"Nothing is lost; the batch is then replayed as planned. {restart_hint}"
            raise GatewayUnreachable("TL-G53", f'gateway "{end.gateway}"', problem, remedy) from error

    def _create_slice(self, start: int, end: JournalPosition) -> Slice:
        """Return the slice of a range from its gateway; raises the outage of one that is not connected."""
        if not self._gateway_of(end):
            self.connect()
        if gateway := self._gateway_of(end):
            return gateway.slice(start, end)
        unconnected = [gateway for gateway in self.gateways if not gateway.start]
        if not unconnected:
            problem = f'"{end.gateway}" left the list, and an interrupted batch needs its messages'
            raise ConfigError("TL-G51", GATEWAYS_OPTION, problem, "Put it back until they are written.")
        error = GatewayUnreachable("TL-G01", unconnected[0].address.location, "it does not answer", "Is it running?")
        raise next((gateway.outage.error for gateway in unconnected if gateway.outage), error)

    def _gateway_of(self, end: JournalPosition) -> SourceGateway | None:
        """Return the connected gateway of a position, else None."""
        end_offset = SourceOffset((end,))
        connected = ((gateway, gateway.start) for gateway in self.gateways if gateway.start)
        return next((gateway for gateway, start in connected if self._position_of(start, end_offset)), None)


def _lowest_limit(*limits: int | None) -> int | None:
    """Return the lowest limit; None stands for no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def share_limits(
    results: Mapping[_T, PollResult],
    skipped_batches: Mapping[_T, int],
    limits: Sequence[int | None],
    poll_within: Callable[[_T, int | None, int | None], PollResult | None],
) -> dict[_T, PollResult]:
    """Share the row and byte limits of a batch among gateways by max-min fairness.

    Each gateway gets all its waiting rows or an even part of the remaining limits, smallest demand first. So its
    messages never wait behind another gateway's backlog. The gateway left out of most batches comes first, and the
    first result is taken whatever its size: a huge message passes, and no gateway starves, however small the limits
    are.

    Args:
        results: Waiting rows of each gateway, as far as the whole batch could take them.
        skipped_batches: Number of consecutive batches without rows of each gateway.
        limits: Most rows and most bytes.
        poll_within: Polls a gateway within limits, one row at least; None if it is unavailable.
    """
    budget = [math.inf if limit is None else limit for limit in limits]
    fractions = {gateway: max(result.rows / budget[0], result.size / budget[1]) for gateway, result in results.items()}
    shares: dict[_T, PollResult] = {}
    order = sorted(results, key=lambda gateway: (-skipped_batches.get(gateway, 0), fractions[gateway]))
    for count, gateway in zip(range(len(order), 0, -1), order, strict=True):
        even_share, result = [limit / count for limit in budget], results[gateway]
        share: PollResult | None = result
        if len(order) > 1 and (result.rows > even_share[0] or result.size > even_share[1]):
            share = poll_within(gateway, *(None if limit == math.inf else max(1, int(limit)) for limit in even_share))
        if share and (not shares or (share.rows <= budget[0] and share.size <= budget[1])):
            shares[gateway], budget = share, [budget[0] - share.rows, budget[1] - share.size]
    return shares
