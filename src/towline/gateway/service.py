"""The gateway's Arrow Flight service: Spark's only way to a journal and an outbox.

Actions carry JSON both ways, rows come as a stream of record batches. Reading never consumes [I4]; the only call
that moves a watermark is ``wait``, because the ``start`` it carries is the end of the last batch in Spark's commit log
[I5], and ``safe`` what of it survives a power failure. Python work is per request and per record batch, never per row:
the MQTT pump needs the same interpreter lock.
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
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import structlog
from pyarrow import flight
from pydantic import Field, ValidationError, validate_call

from towline.delivery.outrows import arrived
from towline.errors import Fenced, GatewayError, GatewayUnreachable, JournalFailed, TowlineError
from towline.gateway.access import TicketKey
from towline.gateway.client import FOREIGN_LEASE_S
from towline.gateway.endpoint import ENDPOINT_FILE, GatewayEndpoint, error_fields, location_of, socket_path
from towline.gateway.identity import KnownOffset, check_offset, extent
from towline.gateway.sessions import ChangeState
from towline.gateway.settings import GatewaySettings, SubscribedFilter
from towline.journal import Batch, largest_frame
from towline.journal.segment import cut
from towline.logfile import own_log
from towline.processes import ProcessMark
from towline.schema import MESSAGE_SCHEMA, ROW_SCHEMA
from towline.text import cause
from towline.threads import Condition, guarded_thread
from towline.timing import Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from towline.gateway.pump import Pump
    from towline.journal import Journal, Outbox
    from towline.journal.outbox import Appended

#: Longest long poll a client may ask for, in seconds: a server thread is held that long.
MAX_WAIT_S = 60.0
#: Actions that wait, and have to know whether their caller is still there.
_WAITING: Final = frozenset({"wait", "sent"})
#: How often a waiting call looks whether its caller is still there, in seconds.
_GLANCE_S: Final = 1.0
#: Patience with the thread the refused messages belong to, in seconds: it may be connecting.
_ASK_S: Final = 15.0
#: So many leases that have ended are remembered: a reader that comes back after as many others is long gone.
_ENDED_LEASES: Final = 10_000
#: Characters of an unforeseen cause: its text may hold a message.
_LONGEST_CAUSE: Final = 200

#: Fields of a request: text of 1 to 256 characters, the same or "" for none, a number and seconds from 0, and ranges of
#: offsets, each with what its end came with.
Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
OptionalText: TypeAlias = Annotated[str, Field(max_length=256)]
Number: TypeAlias = Annotated[int, Field(ge=0, strict=True)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
#: As many as slices of a micro-batch: more than a cluster has cores.
Ranges: TypeAlias = Annotated[list[tuple[Number, Number, OptionalText]], Field(min_length=1, max_length=10_000)]


class ConsumerReader(NamedTuple):
    """Who reads as a consumer, in a request: the lease that it has drawn, and its process."""

    consumer: Text
    lease: Text
    pid: Number
    started: Number
    host: Text


@dataclass(slots=True)
class _Lease:
    token: str = field(repr=False)
    holder: ProcessMark
    since: str
    seen: float


class Leases:
    """The readers of one gateway [I8].

    A reader draws its lease itself, and the first that comes has the consumer: a gateway that was started again needs
    no other word of who reads. When a holder's process is gone, or on another host has not called for
    `FOREIGN_LEASE_S`, the next reader follows; a newer one of the same process does so at once. What has ended is
    refused for ever.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._held: dict[str, _Lease] = {}
        self._ended = deque[str](maxlen=_ENDED_LEASES)
        self._lock = threading.Lock()

    def hold(self, reader: ConsumerReader) -> bool:
        """Take a lease, or renew it: each call is a sign of life. Whether it was taken.

        Raises:
            Fenced: TL-G03 while another living process has the consumer, TL-G07 for a lease that has ended.
        """
        holder = ProcessMark(reader.pid, reader.started, reader.host)
        with self._lock:
            held = self._held.get(reader.consumer)
            if held and held.token == reader.lease:
                held.seen = self._clock()
                return False
            if reader.lease in self._ended:
                what = f'this reader no longer holds the consumer "{reader.consumer}"'
                do = "A newer reader took over; nothing is lost. Start the query again if it is still wanted."
                raise Fenced("TL-G07", self._where, what, do)
            if held and held.holder != holder and not self._is_over(held):
                who = f"the process with pid {held.holder.pid} on {held.holder.host}"
                do = (
                    'Give each query an option "consumer" of its own, or write both outputs in one foreachBatch, to '
                    'Kafka with the option "batchId"; if that query has ended, stop its process.'
                )
                what = f'{who} reads as consumer "{reader.consumer}" since {held.since}'
                raise Fenced("TL-G03", self._where, what, do)
            if held:
                self._ended.append(held.token)
            since = datetime.now(UTC).isoformat(timespec="seconds")
            self._held[reader.consumer] = _Lease(reader.lease, holder, since, self._clock())
            return True

    def release(self, consumer: str, token: str) -> None:
        """End a lease, also one that is asked with only later; the consumer is free unless another has it."""
        with self._lock:
            self._ended.append(token)
            if (held := self._held.get(consumer)) and held.token == token:
                del self._held[consumer]

    def readers(self) -> dict[str, dict[str, object]]:
        """Say who reads, by consumer."""
        return {
            name: {"pid": lease.holder.pid, "host": lease.holder.host, "since": lease.since}
            for name, lease in sorted(self._held.copy().items())
            if not self._is_over(lease)
        }

    def _is_over(self, lease: _Lease) -> bool:
        foreign = lease.holder.host != ProcessMark.of(os.getpid()).host
        return lease.holder.gone() or (foreign and self._clock() - lease.seen > FOREIGN_LEASE_S)


class LongPoll:
    """A condition that any number of calls, `waiting` of them now, wait for."""

    def __init__(self) -> None:
        self._changed = Condition()
        self.waiting = 0
        self._closing = False

    def notify(self) -> None:
        """Something has happened: whoever waits looks again; cheap when nobody does."""
        # A call counts itself before it looks: one that is not counted yet will see what has happened.
        if self.waiting:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        """Let all who wait go."""
        self._closing = True
        self.notify()

    def wait(self, happened: Callable[[], bool], timeout_s: float, cancelled: Callable[[], bool]) -> bool:
        """Wait until something has happened; False when the time is over, the caller has gone, or this is closed.

        `happened` is asked first, and after each change; what it raises ends the wait.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self.waiting += 1
            try:
                while not happened():
                    left = deadline - time.monotonic()
                    if left <= 0 or self._closing or cancelled():
                        return False
                    self._changed.wait(min(left, _GLANCE_S))
            finally:
                self.waiting -= 1
        return True


class InboxService(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Serves one inbox, and an outbox where there is one; listens as soon as it is constructed.

    Args:
        settings: ``endpoint.json`` and, where the path is short enough, the socket go to their state directory.
        journal: The open inbox; its owner closes it after this service.
        pump: Takes what is committed, and calls for its thread.
        outbox: Takes what is to be sent; None for a gateway that only receives.
        status: More facts for the action ``status``; called on a server thread.
        failed: Called when a journal has failed under a call [I6]; the gateway has to end.

    Raises:
        GatewayError: TL-G02 when the socket can't be bound.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        journal: Journal,
        pump: Pump,
        *,
        outbox: Outbox | None = None,
        status: Callable[[], Mapping[str, object]] = dict,
        failed: Callable[[JournalFailed], None] = lambda _: None,
    ) -> None:
        # Calls may come in as soon as the base class is constructed: every field is set before.
        self._name, self._state_dir = settings.name, settings.state_dir
        self._journal, self._pump, self._outbox = journal, pump, outbox
        self._status, self._failed = status, failed
        self._leases = Leases(self._name)
        self._polls = LongPoll()
        self._socket = socket_path(self._state_dir)
        #: Of a name, the method with ``_on_`` before it: its arguments, checked by their types, are a request's fields.
        self._actions = {
            name.removeprefix("_on_"): validate_call(getattr(self, name)) for name in dir(self) if name[:4] == "_on_"
        }
        self._reads, self._takes = validate_call(self._read), validate_call(self._take)
        #: Signs what the network's process then takes; who may call here may do all of it anyway.
        self.tickets = TicketKey.of(self._name, self._state_dir)
        self._socket.unlink(missing_ok=True)  # of a killed gateway: the journal's lock says that we are alone [I8]
        try:
            super().__init__(location_of(self._socket))
        except Exception as error:
            what, do = f"the socket can't be opened ({error})", "Look at the directory's rights."
            raise GatewayError("TL-G02", str(self._socket), what, do) from error
        self._socket.chmod(0o600)
        self._publish(
            GatewayEndpoint(
                location=location_of(self._socket),
                **asdict(ProcessMark.of(os.getpid())),
                name=self._name,
                journal=journal.journal_id,
                since=datetime.now(UTC).isoformat(timespec="seconds"),
                settings=settings.digest(),
                owner_pid=settings.owner_pid,
            )
        )

    def _publish(self, endpoint: GatewayEndpoint) -> None:
        self.endpoint = endpoint
        endpoint.write(self._state_dir)

    def notify(self) -> None:
        """Wake who waits for rows or for the broker; cheap when nobody does. Call it when rows are durable, or done."""
        self._polls.notify()

    def close(self, timeout_s: float = 2.0) -> None:
        """Withdraw the endpoint, wake the waiting and stop serving; a reader that hangs is not waited for."""
        ours = GatewayEndpoint.read(self._state_dir) == self.endpoint  # another may have the directory now
        if ours:
            (self._state_dir / ENDPOINT_FILE).unlink(missing_ok=True)
        self._polls.close()
        stopping = guarded_thread(self.shutdown, "flight-shutdown")
        stopping.start()
        stopping.join(timeout_s)
        if ours:
            self._socket.unlink(missing_ok=True)
        if ours and self._socket.parent != self._state_dir.absolute():
            with contextlib.suppress(OSError):
                self._socket.parent.rmdir()

    # -- Flight ------------------------------------------------------------------------------------------------

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Answer one action."""
        with errors_on_the_wire(self._name):
            handler = self._actions.get(action.type)
            if handler is None:
                raise bad_request(self._name, f'there is no action "{action.type}"')
            more = {"cancelled": context.is_cancelled} if action.type in _WAITING else {}
            return [json.dumps(self._answer(handler, action.body.to_pybytes(), **more)).encode()]

    def do_get(self, _context: Any, ticket: Any) -> Any:
        """Stream the rows of ``{journal, start, end, incarnation}``; the same range gives the same rows [I4]."""
        with errors_on_the_wire(self._name):
            return flight.GeneratorStream(ROW_SCHEMA, self._answer(self._reads, ticket.ticket))

    def do_put(self, _context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Take rows of ``{batch, start, whole}`` into the outbox, once [I10]."""
        with errors_on_the_wire(self._name):
            writer.write(json.dumps(self._answer(self._takes, descriptor.command, reader=reader)).encode())

    def _answer(self, handler: Callable[..., Any], body: bytes, **more: object) -> Any:
        """What a handler answers to a request, whose fields are its arguments; TL-G08 for what it does not take.

        That a journal has failed under it is told to the owner, too [I6].
        """
        fields = {**fields_of(self._name, body), **more}
        try:
            return handler(**fields)
        except JournalFailed as error:
            self._failed(error)
            raise
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise bad_request(self._name, f'"{name}" is not accepted: {first["msg"].lower()}') from None

    def _read(self, journal: Text, start: Number, end: Number, incarnation: OptionalText = "") -> Any:
        with errors_on_the_wire(self._name):
            self._there(journal, start, end, incarnation)
            if start < end:
                yield from self._journal.read(start, end)

    def _take(self, batch: Batch, start: Number, *, whole: bool, reader: Any) -> Any:
        outbox, wake = self._outgoing(), self._pump.wake
        return self._stored(take_batch(outbox, self._name, batch, reader, start=start, whole=whole, wake=wake))

    # -- actions -----------------------------------------------------------------------------------------------

    def _on_status(self) -> Any:
        journal = self._journal
        return {
            "journal": journal.journal_id,
            "epoch": journal.epoch,
            "first": journal.first,
            "name": self._name,
            "incarnation": journal.incarnation,
            "openings": journal.openings,
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

    def _on_hold(self, reader: ConsumerReader) -> Any:
        self._hold(reader)
        return self._on_status()

    def _on_release(self, consumer: Text, lease: Text) -> Any:
        self._leases.release(consumer, lease)
        self._polls.notify()
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
        safe: Number | None = None,
        incarnation: OptionalText = "",
    ) -> Any:
        self._known(journal, 0)
        self._hold(reader)
        self._there(journal, start, start, incarnation)
        self._commit(reader.consumer, start if safe is None else min(safe, start))
        end = start

        def more() -> bool:
            self._leases.hold(reader)  # it may be taken over meanwhile
            return self._journal.end > start

        if self._polls.wait(more, min(timeout_s, MAX_WAIT_S), cancelled):
            end = self._journal.locate(start, max_rows=max_rows, max_bytes=max_bytes)
        size = self._journal.size(start, end) if max_bytes is not None else 0
        return {"end": end, "tip": self._journal.end, "incarnation": self._journal.incarnation_of(end), "size": size}

    def _on_extent(self, offset: Number, *, outbox: bool) -> Any:
        """Where a journal stands, and which opening of it wrote the row below ``offset`` [I14]."""
        return extent(self._outgoing() if outbox else self._journal, offset)._asdict()

    def _on_sign(self, journal: Text, ranges: Ranges, valid_s: Seconds) -> Any:
        self._known(journal, 0)  # whether the rows are there shows when a ticket is used
        sign = partial(self.tickets.sign, valid_s, kind="read", journal=journal)
        return {"tickets": [sign(start=start, end=end, incarnation=known) for start, end, known in ranges]}

    def _on_sign_writer(self, writer: Text, valid_s: Seconds) -> Any:
        self._outgoing()
        return {"ticket": self.tickets.sign(valid_s, kind="write", writer=writer)}

    def _on_filters(self, change: Text, filters: list[SubscribedFilter], settings: Text) -> Any:
        """Want other filters, or say how far that is; with them the settings have another digest, ``settings``."""
        try:
            told = self._pump.want(change, filters).result(_GLANCE_S)
        except (CancelledError, TimeoutError):
            return {"state": ChangeState.ASKED.value, "text": ""}  # it is connecting, or ends
        if told["state"] == ChangeState.GRANTED.value and settings != self.endpoint.settings:
            self._publish(replace(self.endpoint, settings=settings))
        return told

    def _on_place(self, batch: Batch) -> Any:
        return self._stored(self._outgoing().stored(batch))

    def _stored(self, stored: Appended) -> dict[str, object]:
        here = extent(self._outgoing())
        return {**stored._asdict(), "outbox": KnownOffset(here.journal, here.tip, here.incarnation)}

    def _on_over(self, job: Text) -> Any:
        self._outgoing().end_job(job)
        self._pump.wake()
        return {}

    def _on_sent(self, upto: Number, timeout_s: Seconds, cancelled: Callable[[], bool]) -> Any:
        """Wait until every message of the outbox below ``upto`` is with the broker, refused or expired."""
        outbox = self._outgoing()
        return {"done": self._polls.wait(lambda: outbox.reached(upto), min(timeout_s, MAX_WAIT_S), cancelled)}

    def _on_refused(self, do: Literal["page", "replay", "drop"], at: Number) -> Any:
        """Look at some of the refused messages, or move some: a method of `RefusedMessages` and its argument.

        What is answered with TL-G32 may have been done all the same: each message is moved once.
        """
        self._outgoing()
        try:
            return self._pump.refused(do, at).result(_ASK_S)
        except (CancelledError, TimeoutError) as error:
            what, hint = "the gateway is ending, or connecting", "Ask again in a moment."
            raise GatewayError("TL-G32", self._name, what, hint) from error

    def _outgoing(self) -> Outbox:
        if self._outbox is None:
            do = "Give the sink a stateDir of its own, or start the gateway with an outbox."
            raise GatewayError("TL-G20", self._name, "this gateway only receives, it has no outbox", do)
        return self._outbox

    # -- helpers -----------------------------------------------------------------------------------------------

    def _hold(self, reader: ConsumerReader) -> None:
        """Take or renew a lease; from now on nothing is removed that this reader has not seen."""
        if self._leases.hold(reader):
            self._polls.notify()  # a reader whose lease was taken over stops waiting
            if reader.consumer not in self._journal.consumers:
                self._commit(reader.consumer, self._journal.first)

    def _commit(self, consumer: str, upto: int) -> None:
        """Move a watermark forward, and tell the owner; it never goes back [I1]."""
        if self._journal.consumers.get(consumer, -1) < upto:
            self._journal.commit(consumer, upto)
            self._pump.committed(self._journal.committed)

    def _there(self, journal: str, start: int, end: int, incarnation: str) -> None:
        """See that a range is one of this journal, and means the rows that it meant when it was handed out [I14]."""
        self._known(journal, end, incarnation)
        first = self._journal.first
        if not start <= end:
            raise bad_request(self._name, f"{start}..{end} is not a range")
        if start < first:
            gone = f"{start}..{min(max(end, start + 1), first) - 1}"
            what = f"offsets {gone} are no longer in the journal, it begins at {first}"
            do = (
                "They were committed by every consumer. Start with a new checkpoint directory to go on from what is "
                "there, and set journalRetainBytes to keep committed rows for a replay."
            )
            raise GatewayError("TL-G05", self._name, what, do)

    def _known(self, journal: str, offset: int, incarnation: str = "") -> None:
        """See that an offset of the asked journal is one of this journal's."""
        check_offset(self._name, KnownOffset(journal, offset, incarnation), extent(self._journal, offset))


def take_batch(
    outbox: Outbox,
    where: str,
    batch: Batch,
    reader: Any,
    *,
    start: int,
    whole: bool,
    wake: Callable[[], None] = lambda: None,
) -> Appended:
    """Store what a stream brings of a batch, exactly once: one record batch, in as many frames as it needs.

    Of several a part could be missing: a stream whose client was killed ends for gRPC as one that is complete [I10].
    Errors name the gateway as `where`; each frame that is stored is a reason to `wake`.

    Raises:
        GatewayError: TL-G21, the rows have other columns. TL-G39, the stream broke off before they came. TL-G08, it has
            more than one record batch.
        TowlineError: What `Outbox.enter` says.
    """
    if not reader.schema.equals(MESSAGE_SCHEMA):
        what = "the rows have other columns than this gateway's outbox"
        raise GatewayError("TL-G21", where, what, "Use the same version of Towline on both sides.")
    batches = (chunk.data for chunk in reader)
    if (rows := next(batches, None)) is None:
        what, do = "the stream of a batch broke off", "Its client brings the rest again, if it is there yet."
        raise GatewayUnreachable("TL-G39", where, what, do)
    if next(batches, None) is not None:
        raise bad_request(where, "the stream of a batch has more than one record batch")
    frames = cut(rows, rows.num_rows, largest_frame(outbox.limits.max_bytes)) if rows.num_rows else [rows]
    for frame in frames:
        last = frame is frames[-1]
        stored = outbox.enter(arrived(frame, Stamp.now()), batch, start=start, whole=whole and last)
        start += frame.num_rows
        wake()
    return stored


# What a client asks for, and how errors go back ----------------------------------------------------------------------


def bad_request(where: str, what: str) -> GatewayError:
    """TL-G08: the client asks for what this version does not have."""
    return GatewayError("TL-G08", where, what, "Use the same version of Towline on both sides.")


def fields_of(where: str, body: bytes) -> dict[str, Any]:
    """The fields of a request, a JSON object, which may be empty; TL-G08 for something else."""
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(where, "the request is not a JSON object")
    return value


@contextlib.contextmanager
def errors_on_the_wire(where: str) -> Iterator[None]:
    """Carry any error across the wire as code, where, what and do; nothing else leaves the gateway [I12]."""
    try:
        yield
    except TowlineError as error:
        raise on_the_wire(error) from error
    except Exception as error:
        raise on_the_wire(unforeseen(where, error)) from error


def unforeseen(where: str, error: BaseException) -> GatewayError:
    """TL-G09: the cause in words, and the traceback in the log of this process."""
    structlog.get_logger("towline.gateway").error("unexpected", line=where, code="TL-G09", exc_info=error)
    log = own_log() or "the gateway's standard error"
    do = f"This is a fault in Towline; please report it with the traceback in {log}."
    what = f"the gateway failed in an unexpected way ({cause(error, _LONGEST_CAUSE)})"
    return GatewayError("TL-G09", where, what, do)


def on_the_wire(error: TowlineError, kind: type[Exception] = flight.FlightServerError) -> Exception:
    """An error as gRPC carries it, by default as a failure of the server."""
    return kind(error.code, extra_info=json.dumps(error_fields(error)).encode())  # type: ignore[call-arg]
