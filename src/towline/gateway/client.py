"""Thin client of a gateway's Arrow Flight service: reads rows, moves watermarks, writes to the outbox.

Safe in Spark's forked workers: ``pyarrow.flight`` is imported inside the methods, and the first call connects.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from towline.errors import GatewayError, GatewayUnreachable, ReaderFenced
from towline.gateway.access import DEFAULT_TICKET_S, ClientAccess, is_remote
from towline.gateway.endpoint import error_from
from towline.gateway.identity import Extent, StoredBatch
from towline.processes import ProcessIdentity
from towline.threads import call_in_thread, guarded_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

_T = TypeVar("_T")


def call_interruptibly(call: Callable[[], _T], timeout_s: float | None = None) -> _T:
    """Run a call on a new thread, so that this thread can run signal handlers meanwhile.

    Signal handlers run on the main thread only: without a timeout any other thread runs the call itself.

    Raises:
        TimeoutError: `timeout_s` seconds have passed; the call continues and its result is dropped.
    """
    if timeout_s is None and threading.current_thread() is not threading.main_thread():
        return call()
    return call_in_thread(call, "gateway-call").result(timeout_s)


def _import_flight() -> Any:
    from pyarrow import flight  # noqa: PLC0415 - no gRPC before a fork

    return flight


#: Longest wait for the next rows over a network, in seconds: 32 MB of them at 3 Mbit/s. gRPC's keep-alive does not
#: replace it: a server accepts one ping in five minutes, and pyarrow has no setting for it.
READ_TIMEOUT_S: Final = 90.0
#: Longest time for a piece of a batch on its way to an outbox over a network, in seconds.
WRITE_TIMEOUT_S: Final = 300.0

#: gRPC's default backoff is a second and more. The minimum backoff is also the timeout of one attempt: a busy machine
#: needs time.
_CHANNEL_OPTIONS: Final = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]
#: gRPC's messages about a certificate that it rejects, in its own words and in OpenSSL's.
_CERTIFICATE_ERROR: Final = re.compile(r"certificate verify failed: ([a-z ]+)|(Peer name \S+ is not in peer cert)")
_LOCAL_REMEDY: Final = "Is it running? `towline status` shows it; with the option stateDir a source starts one itself."
_REMOTE_REMEDY: Final = "Does it run and listen there? `towline status` on its machine shows it."


#: Longest time for an answer that needs no waiting, in seconds; a busy disk can hold a commit that long.
CALL_TIMEOUT_S = 20.0
#: Seconds between two heartbeats. A batch may take longer than any lease, and Spark makes no calls meanwhile.
HEARTBEAT_S: Final = 10
#: A reader on another host or in another container, whose pid can't be seen, counts as dead after so many seconds
#: without a call: three heartbeats.
HEARTBEAT_TIMEOUT_S = 3 * HEARTBEAT_S
#: Seconds that a reader on a network waits for the previous reader: the lease of a dead one lasts so long.
TAKEOVER_S = HEARTBEAT_TIMEOUT_S + 5.0


@dataclass(frozen=True, slots=True)
class Lease:
    """Right of one reader to move a consumer's watermark [I8].

    The reader draws the token. The gateway grants the consumer to the first reader that asks: `GatewayClient.acquire`.
    """

    consumer: str
    token: str = field(default_factory=partial(secrets.token_hex, 8), repr=False)


@dataclass(frozen=True, slots=True)
class ReadableRange:
    """Rows that a reader may read: from the requested ``start`` up to ``end``; ``journal_end`` is the journal's end.

    ``incarnation`` names the journal opening that wrote the row below ``end``, and belongs to that offset [I14].
    ``size`` is the bytes of these rows in the journal; 0 if ``max_bytes`` was not given.
    """

    end: int
    journal_end: int
    incarnation: str
    size: int


class GatewayClient:
    """Client of one gateway; the first call connects.

    Args:
        location: ``grpc+unix:///var/lib/towline/plant/gateway.sock`` or ``grpc+tls://HOST:PORT``.
        access: Token and certificate files for a gateway on a network.
        ticket: Ticket to send instead of the token (`request_read_tickets`, `request_write_ticket`).
        ca_pem: CA certificates for the gateway's certificate as PEM text, if no file of `access` has them.

    Raises:
        GatewayUnreachable: TL-G01, from every call: no gateway answers, or the connection broke during the call.
        GatewayError: From every call, TL-G40 to TL-G46: token, ticket or certificate are not accepted, or a file can't
            be read. TL-G20 from those about an outbox: the gateway has none.
    """

    def __init__(
        self, location: str, access: ClientAccess | None = None, *, ticket: str = "", ca_pem: str = ""
    ) -> None:
        self.location = location
        self._access = access or ClientAccess()
        self._ticket = ticket
        self._ca_pem = ca_pem
        self._remote = is_remote(location)
        self._connection: Any = None
        #: Set when the reader needs no more heartbeats.
        self._lease_ended = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def acquire(self, lease: Lease, *, wait_s: float = 0.0) -> dict[str, Any]:
        """Acquire or renew a lease, and return the same as `status`.

        A gateway on a network or in another container can't see this process: a thread sends it heartbeats until the
        lease is released or the client is closed.

        Args:
            lease: Lease of this reader.
            wait_s: Seconds to wait for another reader to end; a stopped query's process needs a moment. At least
                `TAKEOVER_S` if the gateway can't see readers: it needs that long to notice that one has died.

        Raises:
            ReaderFenced: TL-G03, another living process reads as this consumer. TL-G07, a newer reader took over.
        """
        if needs_heartbeat := self._remote or self.status()["host"] != ProcessIdentity.of(os.getpid()).host:
            wait_s = max(wait_s, TAKEOVER_S)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                status = self._call_action("acquire", reader=self._reader_fields(lease))
                break
            except ReaderFenced as error:
                if error.code != "TL-G03" or time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)
        if needs_heartbeat:
            self._lease_ended.set()
            lease_ended = self._lease_ended = threading.Event()
            guarded_thread(self._send_heartbeats, "heartbeat", lease, lease_ended, retry_s=HEARTBEAT_S).start()
        return status

    def _reader_fields(self, lease: Lease) -> dict[str, object]:
        own_process = ProcessIdentity.of(os.getpid())
        # Names of machines and containers repeat, and so do pids: over a network none of them is the gateway's own.
        process = replace(own_process, host=f"{own_process.host} (network)") if self._remote else own_process
        return {"consumer": lease.consumer, "lease": lease.token, **asdict(process)}

    def _send_heartbeats(self, lease: Lease, stopped: threading.Event) -> None:
        """Send heartbeats until stopped, or until another reader has the lease."""
        while not stopped.wait(HEARTBEAT_S):
            try:
                self._call_action("acquire", reader=self._reader_fields(lease))
            except ReaderFenced:
                return  # the next call of the reader raises it
            except GatewayError:
                continue  # the next heartbeat retries

    def wait(
        self,
        lease: Lease,
        start: int,
        *,
        journal: str,
        timeout_s: float,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        durable_offset: int | None = None,
        incarnation: str = "",
    ) -> ReadableRange:
        """Commit everything before ``durable_offset``, then wait for rows beyond ``start``; signal handlers still run.

        Args:
            lease: Lease of this reader; it is acquired or renewed.
            start: End of the last batch in Spark's commit log [I5].
            journal: Id of the journal of that offset.
            timeout_s: Seconds to wait for a row, 60 at most; 0 returns at once.
            max_rows: Maximum rows up to the returned ``end``, which is ``start`` if there is nothing new.
            max_bytes: Maximum bytes of them; one row is always allowed.
            durable_offset: Offset up to which the commit log survives a power failure; None for ``start``, its maximum.
            incarnation: Incarnation that belongs to ``start``, "" if unknown.

        Raises:
            ReaderFenced: TL-G04 for another journal, TL-G26 for a copy that was written to since; as `acquire`.
            GatewayError: TL-G05 and TL-G06 for offsets the journal does not have.
        """
        limits = {"timeout_s": timeout_s, "max_rows": max_rows, "max_bytes": max_bytes}
        offset = {"journal": journal, "start": start, "durable_offset": durable_offset, "incarnation": incarnation}
        fields = {"reader": self._reader_fields(lease), **offset, **limits}
        answer_s = timeout_s + CALL_TIMEOUT_S
        return ReadableRange(**call_interruptibly(lambda: self._call_action("wait", answer_s, **fields)))

    def read(self, journal: str, start: int, end: int, *, incarnation: str = "") -> Iterator[pa.RecordBatch]:
        """Stream the rows ``start`` to ``end`` - 1 of a journal; nothing is consumed, no lease is needed [I4].

        Args:
            journal: Id of the journal.
            start: Offset of the first row.
            end: Offset after the last row.
            incarnation: Incarnation that belongs to ``end``, "" if unknown.

        Raises:
            ReaderFenced: TL-G04 for another journal, TL-G26 for an older copy that was written to since.
            GatewayError: TL-G05 and TL-G06 for offsets the journal does not have, TL-G11 for a short answer.
        """
        request = {"journal": journal, "start": start, "end": end, "incarnation": incarnation}
        with self._translate_errors():
            ticket = _import_flight().Ticket(json.dumps(request).encode())
            stream = self._with_read_timeout(lambda: self._flight_client().do_get(ticket, self._call_options()))
        count = 0
        try:
            while True:
                with self._translate_errors():
                    batch = self._with_read_timeout(lambda: next(stream, None))
                if batch is None:
                    break
                count += batch.data.num_rows
                yield batch.data
        finally:
            with contextlib.suppress(Exception):
                stream.cancel()
        if count != end - start:
            problem = f"{count} rows came for the offsets {start}..{end - 1}"
            remedy = "This is a fault in Towline: keep the state directory and report it."
            raise GatewayError("TL-G11", self.location, problem, remedy)

    def request_read_tickets(
        self, journal: str, ranges: Sequence[tuple[int, int, str]], *, valid_s: float = DEFAULT_TICKET_S
    ) -> list[str]:
        """Request a ticket for each range of a journal's offsets; a task without the token reads the range with it.

        Args:
            journal: Id of the journal.
            ranges: Arguments of `read` each: ``start``, ``end`` and ``incarnation``.
            valid_s: Seconds until the tickets expire, by the gateway's clock; a week at most.

        Raises:
            ReaderFenced: TL-G04 for another journal.
        """
        return list(self._call_action("sign_read", journal=journal, ranges=[*ranges], valid_s=valid_s)["tickets"])

    def request_write_ticket(self, writer: str, *, valid_s: float = DEFAULT_TICKET_S) -> str:
        """Request a ticket to write batches as the writers ``<writer>/<part>`` of a query or job."""
        return str(self._call_action("sign_write", writer=writer, valid_s=valid_s)["ticket"])

    def status(self, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Return the gateway's status: watermarks, consumers, readers, and the state of its pump."""
        return self._call_action("status", timeout_s)

    def extent(self, offset: int, *, outbox: bool = False) -> Extent:
        """Return the offset range of inbox or outbox, and the incarnation that wrote the row below ``offset`` [I14]."""
        return Extent(**self._call_action("extent", offset=offset, outbox=outbox))

    def release(self, lease: Lease) -> None:
        """Release a lease for good, so that the next reader need not wait for the end of this process."""
        self._lease_ended.set()
        self._call_action("release", 2.0, consumer=lease.consumer, lease=lease.token)

    def stored_batch(self, writer: str, batch: int, origin: str = "", attempt: str = "") -> StoredBatch:
        """Return how much of a batch the outbox holds; arguments as in `send`.

        Raises:
            JournalError: TL-J17, the job has ended. TL-J22, another batch with this number is there.
        """
        batch_fields = {"writer": writer, "number": batch, "origin": origin, "attempt": attempt}
        return StoredBatch.from_answer(self._call_action("batch_status", batch=batch_fields))

    def send(
        self,
        writer: str,
        batch: int,
        rows: pa.RecordBatch,
        *,
        start: int = 0,
        is_last: bool = True,
        origin: str = "",
        attempt: str = "",
    ) -> StoredBatch:
        """Write rows of a batch to the outbox; on return they are durable there, each exactly once [I10].

        Args:
            writer: Name of the writer, which writes one batch after the other.
            batch: Number of the batch; increases.
            rows: Rows of `towline.schema.MESSAGE_SCHEMA`, in order.
            start: Number of the first row within the batch; rows that the outbox already holds are skipped.
            is_last: The batch ends with these rows.
            origin: Identifies the input of the batch, such as a hash of its offsets; "" if unknown.
            attempt: Identifies one attempt at the batch: its pieces are sent once the batch is complete, and not at all
                if another attempt begins before. "" for a batch that comes in one piece.

        Raises:
            JournalFull: TL-J02, the outbox is full; try again later.
            JournalError: TL-J15 the batch is too large for the outbox, TL-J16 another attempt has begun, TL-J17 the job
                has ended, TL-J22 another batch with this number is there.
            GatewayError: The gateway refuses the rows.
            GatewayUnreachable: The connection broke, perhaps after some rows were stored: call `stored_batch`.
        """
        batch_fields = {"writer": writer, "number": batch, "origin": origin, "attempt": attempt}
        command = json.dumps({"batch": batch_fields, "start": start, "is_last": is_last}).encode()
        with self._translate_errors():
            descriptor = _import_flight().FlightDescriptor.for_command(command)
            options = self._call_options(WRITE_TIMEOUT_S if self._remote else None)
            stream, answers = self._flight_client().do_put(descriptor, rows.schema, options)
        try:
            with self._translate_errors():
                stream.write_batch(rows)
                stream.done_writing()
                answer = answers.read()
        except BaseException:
            with contextlib.suppress(Exception):
                stream.close()
            raise
        with self._translate_errors():
            stream.close()
            return StoredBatch.from_answer(json.loads(answer.to_pybytes()))

    def end_job(self, job: str) -> None:
        """Remove the batch records of the writers ``<job>/<part>`` from the outbox; refuse later batches (TL-J17)."""
        self._call_action("end_job", job=job)

    def wait_delivered(self, end_offset: int, *, timeout_s: float) -> bool:
        """Wait until each message of the outbox below `end_offset` is delivered, refused for good, or expired.

        Returns False after `timeout_s` seconds, 60 at most.
        """
        fields = {"end_offset": end_offset, "timeout_s": timeout_s}
        return bool(self._call_action("wait_delivered", timeout_s + CALL_TIMEOUT_S, **fields)["done"])

    def refused_messages(self, operation: str, offset: int) -> dict[str, Any]:
        """List, read, replay or drop messages that the broker refused; the answer has the next offset.

        `operation` is ``page``, ``message``, ``replay`` or ``drop`` of `towline.delivery.refused.RefusedMessages`.

        Raises:
            JournalFull: TL-J02, the outbox has no room for a replay now.
            GatewayError: TL-G32, the gateway is busy.
        """
        return self._call_action("refused", operation=operation, offset=offset)

    def close(self) -> None:
        """Close the connection after the calls of other threads; the gateway keeps running."""
        self._lease_ended.set()
        # The last reference closes it: FlightClient.close() frees what a call on another thread is using (SIGSEGV).
        self._connection = None

    def _call_action(self, kind: str, timeout_s: float = CALL_TIMEOUT_S, /, **fields: object) -> dict[str, Any]:
        """Call the method ``_on_<kind>`` of `towline.gateway.service` with these arguments."""
        with self._translate_errors():
            action = _import_flight().Action(kind, json.dumps(fields).encode())
            result = next(iter(self._flight_client().do_action(action, self._call_options(timeout_s))))
        answer: dict[str, Any] = json.loads(result.body.to_pybytes())
        return answer

    def _flight_client(self) -> Any:
        """Return the Arrow Flight client; raises TL-G46 if a file can't be read on this machine."""
        if self._connection is None:
            tls_options = self._access.tls_options(self._ca_pem) if self._remote else {}
            self._connection = _import_flight().connect(self.location, generic_options=_CHANNEL_OPTIONS, **tls_options)
        return self._connection

    def _call_options(self, timeout_s: float | None = None) -> Any:
        """Return timeout and authorization header of a call; a unix socket is protected by its file mode instead."""
        headers = []
        if self._remote:
            authorization = f"Ticket {self._ticket}" if self._ticket else f"Bearer {self._access.token()}"
            headers = [(b"authorization", authorization.encode())]
        return _import_flight().FlightCallOptions(timeout=timeout_s, headers=headers)

    def _with_read_timeout(self, call: Callable[[], _T]) -> _T:
        """Wait for rows, over a network for `READ_TIMEOUT_S` at most: a dead machine closes no connection."""
        return call_interruptibly(call, READ_TIMEOUT_S) if self._remote else call()

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Map every Flight error to a `TowlineError`: the gateway's own error, or TL-G01 if it does not answer."""
        import pyarrow as pa  # noqa: PLC0415 - see above

        try:
            yield
        except (pa.ArrowException, StopIteration, OSError) as error:
            if error_fields := getattr(error, "extra_info", None):
                raise error_from(json.loads(error_fields)) from error
            if certificate_error := _CERTIFICATE_ERROR.search(str(error)):
                problem = f"the gateway's certificate is not accepted ({certificate_error[1] or certificate_error[2]})"
                remedy = "gatewayCaFile names the authority that signed it, gatewayServerName the name it is for."
                raise GatewayError("TL-G44", self.location, problem, remedy) from error
            remedy = _REMOTE_REMEDY if self._remote else _LOCAL_REMEDY
            kind = type(error).__name__.removeprefix("Flight").removesuffix("Error")  # without gRPC's page of context
            problem = f"no gateway answers ({kind or 'no answer'})"
            raise GatewayUnreachable("TL-G01", self.location, problem, remedy) from error
