"""Arrow Flight service of the gateway: Spark's only access to a journal and an outbox.

Actions carry JSON both ways, rows come as a stream of record batches. Reading consumes nothing [I4]. Only ``wait``
moves a watermark: its ``start`` is the end of the last batch in Spark's commit log [I5], and ``durable_offset`` the
part of it that survives a power failure. Python work is per request and per record batch, never per row: the MQTT pump
needs the same interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import structlog
from pyarrow import flight
from pydantic import Field, ValidationError, validate_call

from towline.delivery.outrows import add_arrival
from towline.errors import GatewayError, GatewayUnreachable, JournalFailed, ReaderFenced, TowlineError
from towline.gateway.access import TicketKey
from towline.gateway.client import HEARTBEAT_TIMEOUT_S
from towline.gateway.endpoint import ENDPOINT_FILE, GatewayEndpoint, error_fields, socket_location, socket_path
from towline.gateway.identity import JournalPosition, check_offset, journal_extent
from towline.gateway.settings import GatewaySettings
from towline.journal import Batch, max_frame_bytes
from towline.journal.segment import split_batch
from towline.logfile import stderr_log
from towline.processes import ProcessIdentity
from towline.schema import MESSAGE_SCHEMA, ROW_SCHEMA
from towline.text import error_text
from towline.threads import Condition, guarded_thread
from towline.timing import Timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from towline.gateway.pump import Pump
    from towline.journal import Journal, Outbox
    from towline.journal.outbox import BatchStatus

#: Longest long poll that a client may request, in seconds: it occupies a server thread.
MAX_WAIT_S = 60.0
#: Actions that are long polls: they check whether their caller is still connected.
_LONG_POLLS: Final = frozenset({"wait", "wait_delivered"})
#: Interval at which a long poll checks for its caller, in seconds.
_POLL_S: Final = 1.0
#: Timeout for a call on the pump's thread, in seconds: it may be connecting.
_PUMP_TIMEOUT_S: Final = 15.0
#: Ended leases that are remembered: a reader does not come back after so many others.
_MAX_ENDED_LEASES: Final = 10_000
#: Characters of the cause of an unexpected error: its text may contain a message.
_MAX_CAUSE_CHARS: Final = 200

#: Fields of a request: text of 1 to 256 characters, the same or "" for none, a number and seconds from 0, and ranges of
#: offsets, each with the incarnation of its end.
Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
OptionalText: TypeAlias = Annotated[str, Field(max_length=256)]
Number: TypeAlias = Annotated[int, Field(ge=0, strict=True)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
#: One range for each slice of a micro-batch: the limit is more than a cluster has cores.
Ranges: TypeAlias = Annotated[list[tuple[Number, Number, OptionalText]], Field(min_length=1, max_length=10_000)]


class ConsumerReader(NamedTuple):
    """Reader of a consumer, in a request: the token of its lease, and its process."""

    consumer: Text
    lease: Text
    pid: Number
    started: Number
    host: Text


@dataclass(slots=True)
class _Lease:
    token: str = field(repr=False)
    holder: ProcessIdentity
    acquired_at: str
    last_call_at: float


class Leases:
    """Leases of one gateway's readers, at most one per consumer [I8].

    A reader draws its lease itself, and the first one gets the consumer: a restarted gateway needs no other record of
    its readers. The next reader follows when the holder's process has ended or, on another host, has not called for
    `HEARTBEAT_TIMEOUT_S`; a newer reader of the same process follows at once. An ended lease is refused for ever.
    """

    def __init__(self, gateway_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway_name = gateway_name
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._ended_tokens = deque[str](maxlen=_MAX_ENDED_LEASES)
        self._lock = threading.Lock()

    def acquire(self, reader: ConsumerReader) -> bool:
        """Acquire or renew a lease; return True if it was acquired. Each call is a heartbeat.

        Raises:
            ReaderFenced: TL-G03 while another living process has the consumer, TL-G07 for a lease that has ended.
        """
        holder = ProcessIdentity(reader.pid, reader.started, reader.host)
        with self._lock:
            current_lease = self._leases.get(reader.consumer)
            if current_lease and current_lease.token == reader.lease:
                current_lease.last_call_at = self._clock()
                return False
            if reader.lease in self._ended_tokens:
                problem = f'this reader no longer holds the consumer "{reader.consumer}"'
                remedy = "A newer reader took over; nothing is lost. Start the query again if it is still wanted."
                raise ReaderFenced("TL-G07", self._gateway_name, problem, remedy)
            if current_lease and current_lease.holder != holder and not self._is_expired(current_lease):
                holder_text = f"the process with pid {current_lease.holder.pid} on {current_lease.holder.host}"
                remedy = (
                    'Give each query an option "consumer" of its own, or write both outputs in one foreachBatch, to '
                    'Kafka with the option "batchId"; if that query has ended, stop its process.'
                )
                problem = f'{holder_text} reads as consumer "{reader.consumer}" since {current_lease.acquired_at}'
                raise ReaderFenced("TL-G03", self._gateway_name, problem, remedy)
            if current_lease:
                self._ended_tokens.append(current_lease.token)
            acquired_at = datetime.now(UTC).isoformat(timespec="seconds")
            self._leases[reader.consumer] = _Lease(reader.lease, holder, acquired_at, self._clock())
            return True

    def release(self, consumer: str, token: str) -> None:
        """End a lease, even one that is not acquired yet; the consumer is free unless another lease has it."""
        with self._lock:
            self._ended_tokens.append(token)
            if (current_lease := self._leases.get(consumer)) and current_lease.token == token:
                del self._leases[consumer]

    def readers(self) -> dict[str, dict[str, object]]:
        """Return the reader of each consumer, for the status."""
        return {
            name: {"pid": lease.holder.pid, "host": lease.holder.host, "since": lease.acquired_at}
            for name, lease in sorted(self._leases.copy().items())
            if not self._is_expired(lease)
        }

    def _is_expired(self, lease: _Lease) -> bool:
        other_host = lease.holder.host != ProcessIdentity.of(os.getpid()).host
        return lease.holder.has_ended() or (other_host and self._clock() - lease.last_call_at > HEARTBEAT_TIMEOUT_S)


class LongPoll:
    """Condition variable for long polls; `waiters` counts the calls that wait."""

    def __init__(self) -> None:
        self._condition = Condition()
        self.waiters = 0
        self._closed = False

    def notify(self) -> None:
        """Wake the waiting calls to check again; cheap if there are none."""
        # A call counts itself before it checks: one that is not counted yet will see the change.
        if self.waiters:
            with self._condition:
                self._condition.notify_all()

    def close(self) -> None:
        """End all waits."""
        self._closed = True
        self.notify()

    def wait(self, is_ready: Callable[[], bool], timeout_s: float, cancelled: Callable[[], bool]) -> bool:
        """Wait until `is_ready` returns True; return False on timeout, cancellation or `close`.

        `is_ready` is called first and after each change; an error of it ends the wait.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self.waiters += 1
            try:
                while not is_ready():
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0 or self._closed or cancelled():
                        return False
                    self._condition.wait(min(remaining_s, _POLL_S))
            finally:
                self.waiters -= 1
        return True


class GatewayService(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Arrow Flight server of one inbox, and of an outbox if there is one; listens once it is constructed.

    Args:
        settings: Their state directory gets ``endpoint.json`` and, if the path is short enough, the socket.
        journal: The open inbox; its owner closes it after this service.
        pump: Gets the committed watermark, and the calls for its thread.
        outbox: Stores messages to send; None for a gateway that only receives.
        status: Returns more fields for the action ``status``; called on a server thread.
        report_failure: Called if a journal fails during a call [I6]; the gateway has to end.

    Raises:
        GatewayError: TL-G02 if the socket can't be bound.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        journal: Journal,
        pump: Pump,
        *,
        outbox: Outbox | None = None,
        status: Callable[[], Mapping[str, object]] = dict,
        report_failure: Callable[[JournalFailed], None] = lambda _: None,
    ) -> None:
        # Calls may come in as soon as the base class is constructed: every field is set before.
        self._name, self._state_dir = settings.name, settings.state_dir
        self._journal, self._pump, self._outbox = journal, pump, outbox
        self._status, self._report_failure = status, report_failure
        self._leases = Leases(self._name)
        self._long_poll = LongPoll()
        self._socket = socket_path(self._state_dir)
        #: Action → method ``_on_<action>``: its arguments, validated by their types, are the request's fields.
        self._actions = {
            name.removeprefix("_on_"): validate_call(getattr(self, name)) for name in dir(self) if name[:4] == "_on_"
        }
        self._read_handler, self._write_handler = validate_call(self._read_range), validate_call(self._store_batch)
        #: Signs the tickets that the network process verifies; callers of this service need none.
        self.tickets = TicketKey.load(self._name, self._state_dir)
        self._socket.unlink(missing_ok=True)  # of a killed gateway: the journal's lock says that we are alone [I8]
        try:
            super().__init__(socket_location(self._socket))
        except Exception as error:
            problem, remedy = f"the socket can't be opened ({error})", "Check the directory's permissions."
            raise GatewayError("TL-G02", str(self._socket), problem, remedy) from error
        self._socket.chmod(0o600)
        self.endpoint = GatewayEndpoint(
            location=socket_location(self._socket),
            **asdict(ProcessIdentity.of(os.getpid())),
            name=self._name,
            journal=journal.journal_id,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            settings=settings.digest(),
            owner_pid=settings.owner_pid,
        )
        self.endpoint.write(self._state_dir)

    def notify(self) -> None:
        """Wake calls that wait for durable or delivered rows; cheap without waiters."""
        self._long_poll.notify()

    def close(self, timeout_s: float = 2.0) -> None:
        """Remove the endpoint file, wake waiting calls and stop serving within `timeout_s` seconds."""
        is_own_endpoint = GatewayEndpoint.read(self._state_dir) == self.endpoint  # another may have the directory now
        if is_own_endpoint:
            (self._state_dir / ENDPOINT_FILE).unlink(missing_ok=True)
        self._long_poll.close()
        shutdown_thread = guarded_thread(self.shutdown, "flight-shutdown")
        shutdown_thread.start()
        shutdown_thread.join(timeout_s)
        if is_own_endpoint:
            self._socket.unlink(missing_ok=True)
            if self._socket.parent != self._state_dir.absolute():
                with contextlib.suppress(OSError):
                    self._socket.parent.rmdir()

    # -- Flight ------------------------------------------------------------------------------------------------

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Run one action and return its JSON answer."""
        with flight_errors(self._name):
            handler = self._actions.get(action.type)
            if handler is None:
                raise bad_request(self._name, f'there is no action "{action.type}"')
            extra_arguments = {"cancelled": context.is_cancelled} if action.type in _LONG_POLLS else {}
            return [json.dumps(self._handle_request(handler, action.body.to_pybytes(), **extra_arguments)).encode()]

    def do_get(self, _context: Any, ticket: Any) -> Any:
        """Stream the rows of ``{journal, start, end, incarnation}``; the same range gives the same rows [I4]."""
        with flight_errors(self._name):
            return flight.GeneratorStream(ROW_SCHEMA, self._handle_request(self._read_handler, ticket.ticket))

    def do_put(self, _context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Store rows of ``{batch, start, is_last}`` in the outbox, exactly once [I10]."""
        with flight_errors(self._name):
            answer = self._handle_request(self._write_handler, descriptor.command, reader=reader)
            writer.write(json.dumps(answer).encode())

    def _handle_request(self, handler: Callable[..., Any], body: bytes, **extra_arguments: object) -> Any:
        """Call a handler with the fields of a JSON request; a failed journal is also reported to the owner [I6]."""
        fields = {**parse_request(self._name, body), **extra_arguments}
        try:
            return handler(**fields)
        except JournalFailed as error:
            self._report_failure(error)
            raise
        except ValidationError as error:
            first_error = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first_error["loc"]))
            raise bad_request(self._name, f'"{name}" is not accepted: {first_error["msg"].lower()}') from None

    def _read_range(self, journal: Text, start: Number, end: Number, incarnation: OptionalText = "") -> Any:
        with flight_errors(self._name):
            self._check_range(journal, start, end, incarnation)
            if start < end:
                yield from self._journal.read(start, end)

    def _store_batch(self, batch: Batch, start: Number, *, is_last: bool, reader: Any) -> Any:
        """Store the record batch of a stream exactly once, in as many frames as it needs [I10]."""
        outbox = self._require_outbox()
        if not reader.schema.equals(MESSAGE_SCHEMA):
            problem = "the rows have other columns than this gateway's outbox"
            raise GatewayError("TL-G21", self._name, problem, "Use the same version of Towline on both sides.")
        record_batches = (chunk.data for chunk in reader)
        if (rows := next(record_batches, None)) is None:
            problem = "the stream of a batch broke off before its rows came"
            raise GatewayUnreachable(
                "TL-G39", self._name, problem, "Its client sends the rest again, if it still runs."
            )
        # gRPC ends the stream of a killed client as if it were complete, so one of several could be missing.
        if next(record_batches, None) is not None:
            raise bad_request(self._name, "the stream of a batch has more than one record batch")
        frames = split_batch(rows, rows.num_rows, max_frame_bytes(outbox.limits.max_bytes)) if rows.num_rows else [rows]
        for frame in frames:
            whole = is_last and frame is frames[-1]
            status = outbox.append_batch(add_arrival(frame, Timestamp.now()), batch, start=start, whole=whole)
            start += frame.num_rows
            self._pump.wake()
        return self._stored_fields(status)

    # -- actions -----------------------------------------------------------------------------------------------

    def _on_status(self) -> Any:
        journal = self._journal
        return {
            "journal": journal.journal_id,
            "epoch": journal.epoch,
            "first": journal.first_offset,
            "name": self._name,
            "incarnation": journal.incarnation,
            "pid": self.endpoint.pid,
            "host": self.endpoint.host,
            "since": self.endpoint.since,
            "end": journal.end,
            "committed": journal.committed,
            "consumers": dict(journal.consumers),
            "readers": self._leases.readers(),
            "bytes_on_disk": journal.bytes_on_disk,
            **self._status(),
        }

    def _on_acquire(self, reader: ConsumerReader) -> Any:
        self._acquire_lease(reader)
        return self._on_status()

    def _on_release(self, consumer: Text, lease: Text) -> Any:
        self._leases.release(consumer, lease)
        self._long_poll.notify()
        return {}

    def _on_wait(
        self,
        reader: ConsumerReader,
        journal: Text,
        start: Number,
        *,
        timeout_s: Seconds,
        cancelled: Callable[[], bool],
        max_rows: Number | None = None,
        max_bytes: Number | None = None,
        durable_offset: Number | None = None,
        incarnation: OptionalText = "",
    ) -> Any:
        self._check_offset(journal, 0)
        self._acquire_lease(reader)
        self._check_range(journal, start, start, incarnation)
        self._commit(reader.consumer, start if durable_offset is None else min(durable_offset, start))
        end = start

        def has_rows() -> bool:
            self._leases.acquire(reader)  # it may be taken over meanwhile
            return self._journal.end > start

        if max_rows != 0 and self._long_poll.wait(has_rows, min(timeout_s, MAX_WAIT_S), cancelled):
            end = self._journal.find_range_end(start, max_rows=max_rows, max_bytes=max_bytes)
        size = self._journal.range_bytes(start, end) if max_bytes is not None else 0
        incarnation = self._journal.incarnation_of(end)
        return {"end": end, "journal_end": self._journal.end, "incarnation": incarnation, "size": size}

    def _on_extent(self, offset: Number, *, outbox: bool) -> Any:
        """Return the offset range of a journal, and the incarnation that wrote the row below ``offset`` [I14]."""
        return journal_extent(self._require_outbox() if outbox else self._journal, offset)._asdict()

    def _on_sign_read(self, journal: Text, ranges: Ranges, valid_s: Seconds) -> Any:
        self._check_offset(journal, 0)  # the rows are checked when the ticket is used
        sign = partial(self.tickets.sign_ticket, valid_s, kind="read", journal=journal)
        return {"tickets": [sign(start=start, end=end, incarnation=incarnation) for start, end, incarnation in ranges]}

    def _on_sign_write(self, writer: Text, valid_s: Seconds) -> Any:
        self._require_outbox()
        return {"ticket": self.tickets.sign_ticket(valid_s, kind="write", writer=writer)}

    def _on_batch_status(self, batch: Batch) -> Any:
        return self._stored_fields(self._require_outbox().batch_status(batch))

    def _stored_fields(self, status: BatchStatus) -> dict[str, object]:
        outbox = self._require_outbox()
        end = outbox.end
        position = JournalPosition("", outbox.journal_id, end, outbox.incarnation_of(end))
        return {**status._asdict(), "outbox": position.to_json()}

    def _on_end_job(self, job: Text) -> Any:
        self._require_outbox().end_job(job)
        self._pump.wake()
        return {}

    def _on_wait_delivered(self, end_offset: Number, timeout_s: Seconds, cancelled: Callable[[], bool]) -> Any:
        """Wait until every message of the outbox below ``end_offset`` is delivered, refused or expired."""
        outbox, timeout_s = self._require_outbox(), min(timeout_s, MAX_WAIT_S)
        return {"done": self._long_poll.wait(lambda: outbox.is_done_below(end_offset), timeout_s, cancelled)}

    def _on_refused(self, operation: Literal["page", "message", "replay", "drop"], offset: Number) -> Any:
        """Call a method of `RefusedMessages`; after TL-G32 it may still run, and each message is moved once."""
        self._require_outbox()
        try:
            return self._pump.refused_messages(operation, offset).result(_PUMP_TIMEOUT_S)
        except (CancelledError, TimeoutError) as error:
            problem, remedy = "the gateway is ending, or connecting", "Retry in a moment."
            raise GatewayError("TL-G32", self._name, problem, remedy) from error

    def _require_outbox(self) -> Outbox:
        if self._outbox is None:
            remedy = "Give the sink a stateDir of its own, or start the gateway with an outbox."
            raise GatewayError("TL-G20", self._name, "this gateway only receives, it has no outbox", remedy)
        return self._outbox

    # -- helpers -----------------------------------------------------------------------------------------------

    def _acquire_lease(self, reader: ConsumerReader) -> None:
        """Acquire or renew a lease; a new consumer starts at the first row, so that no unread row is removed."""
        if self._leases.acquire(reader):
            self._long_poll.notify()  # a reader whose lease was taken over stops waiting
            if reader.consumer not in self._journal.consumers:
                self._commit(reader.consumer, self._journal.first_offset)

    def _commit(self, consumer: str, offset: int) -> None:
        """Move a consumer's watermark forward and notify the pump; it never goes back [I1]."""
        if self._journal.consumers.get(consumer, -1) < offset:
            self._journal.commit(consumer, offset)
            self._pump.set_committed(self._journal.committed)

    def _check_range(self, journal: str, start: int, end: int, incarnation: str) -> None:
        """Check that a range is in this journal and still has the same rows as when its offsets were issued [I14]."""
        self._check_offset(journal, end, incarnation)
        first_offset = self._journal.first_offset
        if not start <= end:
            raise bad_request(self._name, f"{start}..{end} is not a range")
        if start < first_offset:
            removed_range = f"{start}..{min(max(end, start + 1), first_offset) - 1}"
            problem = f"offsets {removed_range} are no longer in the journal, it begins at {first_offset}"
            remedy = (
                "They were committed by every consumer. Start with a new checkpoint directory to go on from what is "
                "there, and set journalRetainBytes to keep committed rows for a replay."
            )
            raise GatewayError("TL-G05", self._name, problem, remedy)

    def _check_offset(self, journal: str, offset: int, incarnation: str = "") -> None:
        """Check that an offset belongs to this journal."""
        position = JournalPosition(self._name, journal, offset, incarnation)
        check_offset(self._name, position, journal_extent(self._journal, offset))


# What a client asks for, and how errors go back ----------------------------------------------------------------------


def bad_request(gateway: str, problem: str) -> GatewayError:
    """Return TL-G08: this version does not support the request."""
    return GatewayError("TL-G08", gateway, problem, "Use the same version of Towline on both sides.")


def parse_request(gateway: str, body: bytes) -> dict[str, Any]:
    """Parse a request, a JSON object; an empty body has no fields. Raises TL-G08 for anything else."""
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(gateway, "the request is not a JSON object")
    return value


@contextlib.contextmanager
def flight_errors(gateway: str) -> Iterator[None]:
    """Raise any error as a Flight error with code, location, problem and remedy only [I12]."""
    try:
        yield
    except TowlineError as error:
        raise flight_error(error) from error
    except Exception as error:
        raise flight_error(unexpected_error(gateway, error)) from error


def unexpected_error(gateway: str, error: BaseException) -> GatewayError:
    """Return TL-G09 with the cause, and log the traceback of an unexpected error."""
    structlog.get_logger("towline.gateway").error("unexpected", line=gateway, code="TL-G09", exc_info=error)
    log = stderr_log() or "the gateway's standard error"
    remedy = f"This is a fault in Towline; please report it with the traceback in {log}."
    problem = f"the gateway failed in an unexpected way ({error_text(error, _MAX_CAUSE_CHARS)})"
    return GatewayError("TL-G09", gateway, problem, remedy)


def flight_error(error: TowlineError, error_class: type[Exception] = flight.FlightServerError) -> Exception:
    """Convert an error to a Flight error, by default a server error."""
    return error_class(error.code, extra_info=json.dumps(error_fields(error)).encode())  # type: ignore[call-arg]
