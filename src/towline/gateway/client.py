"""The thin client of a gateway: reads its rows, moves its watermarks, brings messages to its outbox.

Safe in Spark's forked workers: ``pyarrow.flight`` is imported inside the methods and no connection is made before the
first call.
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

from towline.errors import Fenced, GatewayError, GatewayUnreachable
from towline.gateway.access import DEFAULT_VALID_S, Access, is_remote
from towline.gateway.endpoint import error_from
from towline.gateway.identity import Extent, StoredBatch
from towline.processes import ProcessMark
from towline.threads import guarded_thread, later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

_T = TypeVar("_T")


def interruptible(call: Callable[[], _T], timeout_s: float | None = None) -> _T:
    """Run a call on a thread of its own, so that signal handlers run here while it takes its time.

    They run on the main thread only: another one makes a call without a time limit itself.

    Raises:
        TimeoutError: So many seconds are over; the call goes on, and nobody hears of it.
    """
    if timeout_s is None and threading.current_thread() is not threading.main_thread():
        return call()
    return later(call, "gateway-call").result(timeout_s)


def _flight() -> Any:
    from pyarrow import flight  # noqa: PLC0415 - no gRPC before a fork

    return flight


#: Longest wait for the next rows over a network, in seconds: 32 MB of them at 3 Mbit/s.
SILENCE_S: Final = 90.0
#: Longest time for a piece of a batch on its way to an outbox over a network, in seconds.
BRING_S: Final = 300.0

#: gRPC would wait up to a second, then longer, before it tries again. Its shortest backoff is also how long one attempt
#: may take: a busy machine needs more than a moment.
_CHANNEL: Final = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]
#: What gRPC says of a certificate that it does not accept, in its own words and in OpenSSL's.
_NOT_TRUSTED: Final = re.compile(r"certificate verify failed: ([a-z ]+)|(Peer name \S+ is not in peer certificate)")
_NEAR: Final = "Is it running? `towline status` shows it; with the option stateDir the source starts one by itself."
_FAR: Final = "Does it run and listen there? `towline status` on its machine shows it."


#: Longest time for an answer that needs no waiting, in seconds; a busy disk can hold a commit that long.
CALL_S = 20.0
#: Seconds between two signs. A batch may take longer than any lease, and Spark asks for nothing meanwhile.
BEAT_S: Final = 10
#: A reader on another host, or in another container, whose pid can't be seen, is taken for dead after so many seconds
#: without a call: three of its signs of life.
FOREIGN_LEASE_S = 3 * BEAT_S
#: How long a reader on a network waits for the one before it, in seconds: one that died has its lease for so long.
TAKEOVER_S = FOREIGN_LEASE_S + 5.0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to move a consumer's watermark [I8].

    Its reader draws it, and a gateway gives it to the first that asks with one: `GatewayClient.hold`.
    """

    consumer: str
    token: str = field(default_factory=partial(secrets.token_hex, 8), repr=False)


@dataclass(frozen=True, slots=True)
class Window:
    """What can be read: rows from the asked ``start`` up to ``end``, of a journal that reaches to ``tip``.

    ``incarnation`` names the opening of the journal that wrote the row below ``end``, and goes with that offset [I14].
    ``size`` is how many bytes those rows are in the journal; 0 where ``max_bytes`` was not given.
    """

    end: int
    tip: int
    incarnation: str
    size: int


class GatewayClient:
    """A connection to one gateway; opened at the first call.

    Args:
        location: ``grpc+unix:///var/lib/towline/plant/gateway.sock`` or ``grpc+tls://HOST:PORT``.
        access: The files of a gateway on a network.
        ticket: Comes in with this in place of the token, to do what it opens (`sign`, `sign_writer`).
        authority: The authorities of the gateway's certificate as PEM text, where no file of `access` has them.

    Raises:
        GatewayUnreachable: TL-G01, from every call: no gateway answers, or it is gone in the midst of one.
        GatewayError: From every call, TL-G40 to TL-G47: token, ticket or certificate are not accepted, or a file can't
            be read. TL-G20 from those about an outbox: the gateway has none.
    """

    def __init__(self, location: str, access: Access | None = None, *, ticket: str = "", authority: str = "") -> None:
        self.location = location
        self._access = access or Access()
        self._ticket = ticket
        self._authority = authority
        self._remote = is_remote(location)
        self._connection: Any = None
        #: Set where the reader needs no more signs of life.
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, lease: Lease, *, patience_s: float = 0.0) -> dict[str, Any]:
        """Take a lease or renew it, as `wait` does, and say what `status` says.

        A gateway on a network or in another container can't see whether this process is there: it gets signs of life
        until the lease is released or this is closed.

        Args:
            lease: Of this reader.
            patience_s: Seconds to wait for another reader to end; a stopped query's process needs a moment. At least
                `TAKEOVER_S` where the gateway can't see readers: it takes so long to learn that one has died.

        Raises:
            Fenced: TL-G03, another living process reads as this consumer. TL-G07, a newer reader took over.
        """
        if far := self._remote or self.status()["host"] != ProcessMark.of(os.getpid()).host:
            patience_s = max(patience_s, TAKEOVER_S)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                status = self._action("hold", reader=self._reader(lease))
                break
            except Fenced as error:
                if error.code != "TL-G03" or time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)
        if far:
            self._over.set()
            self._over = threading.Event()
            guarded_thread(self._beat, "heartbeat", lease, self._over, again_s=BEAT_S).start()
        return status

    def _reader(self, lease: Lease) -> dict[str, object]:
        me = ProcessMark.of(os.getpid())
        # Names of machines and containers repeat, and so do pids: over a network none of them is the gateway's own.
        mark = replace(me, host=f"{me.host} (network)") if self._remote else me
        return {"consumer": lease.consumer, "lease": lease.token, **asdict(mark)}

    def _beat(self, lease: Lease, over: threading.Event) -> None:
        """Send signs of life until it is over, or the lease is somebody else's."""
        while not over.wait(BEAT_S):
            try:
                self._action("hold", reader=self._reader(lease))
            except Fenced:
                return  # the next call of the reader says so
            except GatewayError:
                continue  # it is asked again with the next

    def wait(
        self,
        lease: Lease,
        start: int,
        *,
        journal: str,
        timeout_s: float,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        safe: int | None = None,
        incarnation: str = "",
    ) -> Window:
        """Commit everything before ``safe``, then wait for rows beyond ``start``; signals are handled meanwhile.

        Args:
            lease: Of this reader; it is taken, or renewed.
            start: End of the last batch in Spark's commit log [I5].
            journal: Whose offset that is.
            timeout_s: Seconds to wait for a row, 60 at most; 0 answers at once.
            max_rows: Most rows up to the answered ``end``, which is ``start`` when there is nothing new.
            max_bytes: Most bytes of them; one row is always allowed.
            safe: Offset up to which a power failure can't undo the commit log, ``start`` at most; None for ``start``.
            incarnation: What ``start`` came with, "" for unknown.

        Raises:
            Fenced: TL-G04 for another journal, TL-G26 for a copy that has gone on; as `hold`.
            GatewayError: TL-G05 and TL-G06 for offsets the journal does not have.
        """
        limits = {"timeout_s": timeout_s, "max_rows": max_rows, "max_bytes": max_bytes}
        offset = {"journal": journal, "start": start, "safe": safe, "incarnation": incarnation}
        fields = {"reader": self._reader(lease), **offset, **limits}
        return Window(**interruptible(lambda: self._action("wait", timeout_s + CALL_S, **fields)))

    def read(self, journal: str, start: int, end: int, *, incarnation: str = "") -> Iterator[pa.RecordBatch]:
        """Stream the rows ``start`` to ``end`` - 1 of a journal; nothing is consumed, no lease is needed [I4].

        Args:
            journal: Its id.
            start: Offset of the first row.
            end: Offset after the last one.
            incarnation: What came with ``end``, "" for unknown.

        Raises:
            Fenced: TL-G04 for another journal, TL-G26 for an older copy that has gone on.
            GatewayError: TL-G05 and TL-G06 for offsets the journal does not have, TL-G11 for a short answer.
        """
        rows = {"journal": journal, "start": start, "end": end, "incarnation": incarnation}
        with self._translated():
            ticket = _flight().Ticket(json.dumps(rows).encode())
            stream = self._within(lambda: self._connected().do_get(ticket, self._options()))
        count = 0
        try:
            while True:
                with self._translated():
                    chunk = self._within(lambda: next(stream, None))
                if chunk is None:
                    break
                count += chunk.data.num_rows
                yield chunk.data
        finally:
            with contextlib.suppress(Exception):
                stream.cancel()
        if count != end - start:
            what = f"{count} rows came for the offsets {start}..{end - 1}"
            do = "This is a fault in Towline: keep the state directory and report it."
            raise GatewayError("TL-G11", self.location, what, do)

    def sign(
        self, journal: str, ranges: Sequence[tuple[int, int, str]], *, valid_s: float = DEFAULT_VALID_S
    ) -> list[str]:
        """Ask for a ticket for each range of a journal's offsets, with which those who have no token may read it.

        Args:
            journal: Its id.
            ranges: Arguments of `read` each: ``start``, ``end`` and ``incarnation``.
            valid_s: Seconds until they are worth nothing, by the gateway's clock; a week at most.

        Raises:
            Fenced: TL-G04 for another journal.
        """
        return list(self._action("sign", journal=journal, ranges=[*ranges], valid_s=valid_s)["tickets"])

    def sign_writer(self, writer: str, *, valid_s: float = DEFAULT_VALID_S) -> str:
        """Ask for a ticket, as `sign` does, to bring batches as the writers ``<writer>/<part>`` of a query or job."""
        return str(self._action("sign_writer", writer=writer, valid_s=valid_s)["ticket"])

    def status(self, *, timeout_s: float = CALL_S) -> dict[str, Any]:
        """Ask for the account of the gateway: watermarks, consumers, readers, and the state of its pump."""
        return self._action("status", timeout_s)

    def extent(self, offset: int, *, outbox: bool = False) -> Extent:
        """Where the inbox or the outbox stands, and which opening of it wrote the row below ``offset`` [I14]."""
        return Extent(**self._action("extent", offset=offset, outbox=outbox))

    def release(self, lease: Lease) -> None:
        """Give a lease back for ever, so that the next reader need not wait for the end of this process."""
        self._over.set()
        self._action("release", 2.0, consumer=lease.consumer, lease=lease.token)

    def place(self, writer: str, batch: int, origin: str = "", attempt: str = "") -> StoredBatch:
        """Ask how much of a batch the outbox holds; arguments are those of `send`.

        Raises:
            JournalError: TL-J17, the job is over. TL-J22, another batch with this number is there.
        """
        named = {"writer": writer, "number": batch, "origin": origin, "attempt": attempt}
        return StoredBatch.of(self._action("place", batch=named))

    def send(
        self,
        writer: str,
        batch: int,
        rows: pa.RecordBatch,
        *,
        start: int = 0,
        whole: bool = True,
        origin: str = "",
        attempt: str = "",
    ) -> StoredBatch:
        """Bring rows of a batch to the outbox; on return they are durable there, and they are there once [I10].

        Args:
            writer: Who writes one batch after the other.
            batch: Number of the batch; grows.
            rows: Of `towline.schema.MESSAGE_SCHEMA`, in order.
            start: Number of the first of them within the batch; what the outbox holds already is left out.
            whole: The batch ends with these rows.
            origin: What the batch was made from, such as a hash of its offsets; empty for unknown.
            attempt: Names one run through the rows of the batch: its pieces leave when the batch is whole, and not at
                all if another attempt begins before. Empty for a batch that comes whole.

        Raises:
            JournalFull: TL-J02, the outbox is full; try again later.
            JournalError: TL-J15 it can never take the whole batch, TL-J16 another attempt has begun, TL-J17 the job is
                over, TL-J22 another batch with this number is there.
            GatewayError: The gateway does not take them.
            GatewayUnreachable: The gateway is gone, perhaps after it had taken some: ask `place`.
        """
        named = {"writer": writer, "number": batch, "origin": origin, "attempt": attempt}
        command = json.dumps({"batch": named, "start": start, "whole": whole}).encode()
        with self._translated():
            descriptor, timeout_s = _flight().FlightDescriptor.for_command(command), BRING_S if self._remote else None
            stream, answers = self._connected().do_put(descriptor, rows.schema, self._options(timeout_s))
        try:
            with self._translated():
                stream.write_batch(rows)
                stream.done_writing()
                answer = answers.read()
        except BaseException:
            with contextlib.suppress(Exception):
                stream.close()
            raise
        with self._translated():
            stream.close()
            return StoredBatch.of(json.loads(answer.to_pybytes()))

    def end_job(self, job: str) -> None:
        """Let the outbox forget the batches of the writers ``<job>/<part>``; later ones are refused (TL-J17)."""
        self._action("over", job=job)

    def sent(self, upto: int, *, timeout_s: float) -> bool:
        """Wait until each message of the outbox below `upto` is with the broker, refused for good, or expired.

        False is answered after so many seconds, 60 at most.
        """
        return bool(self._action("sent", timeout_s + CALL_S, upto=upto, timeout_s=timeout_s)["done"])

    def refused(self, do: str, at: int) -> dict[str, Any]:
        """Look at the messages that the broker refused, or move them; a part at a time, and where to go on.

        What to `do` is ``page``, ``replay`` or ``drop``, as `towline.delivery.refused.RefusedMessages` has them.

        Raises:
            JournalFull: TL-J02, the outbox has no room for a replay now.
            GatewayError: TL-G32, no time.
        """
        return self._action("refused", do=do, at=at)

    def want(self, change: str, filters: Sequence[Mapping[str, object]], settings: str) -> tuple[str, str]:
        """Have the gateway want other filters, or ask how far that change is: the same call does both.

        Args:
            change: Its name.
            filters: All of them, as ``subscriptions`` of its settings are in JSON.
            settings: `GatewaySettings.digest` of its settings with these filters.

        Returns:
            A `ChangeState` as text, and why the broker refused.

        Raises:
            ConfigError: TL-C172, it is being drained.
        """
        told = self._action("filters", change=change, filters=list(filters), settings=settings)
        return told["state"], told["text"]

    def close(self) -> None:
        """Close the connection; the gateway goes on."""
        self._over.set()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def _action(self, kind: str, answer_s: float = CALL_S, /, **fields: object) -> dict[str, Any]:
        """Ask for what `towline.gateway.service` has a method for, ``_on_<kind>`` with these arguments."""
        with self._translated():
            action = _flight().Action(kind, json.dumps(fields).encode())
            result = next(iter(self._connected().do_action(action, self._options(answer_s))))
        answer: dict[str, Any] = json.loads(result.body.to_pybytes())
        return answer

    def _connected(self) -> Any:
        """The client of Arrow Flight; TL-G46 where a file can't be read on this machine."""
        if self._connection is None:
            given = self._access.connection(self._authority) if self._remote else {}
            self._connection = _flight().connect(self.location, generic_options=_CHANNEL, **given)
        return self._connection

    def _options(self, timeout_s: float | None = None) -> Any:
        """How long a call may take, and what lets it in over a network: on a unix socket the file's rights do."""
        headers = []
        if self._remote:
            told = f"Ticket {self._ticket}" if self._ticket else f"Bearer {self._access.token()}"
            headers = [(b"authorization", told.encode())]
        return _flight().FlightCallOptions(timeout=timeout_s, headers=headers)

    def _within(self, call: Callable[[], _T]) -> _T:
        """Wait for rows, over a network for `SILENCE_S` at most: a machine that is gone ends no connection.

        gRPC's own keep-alive is no help: a server takes one ping in five minutes, and pyarrow has no setting for it.
        """
        return interruptible(call, SILENCE_S) if self._remote else call()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Make every error of Flight one of ours: the gateway's own words, or that it does not answer."""
        import pyarrow as pa  # noqa: PLC0415 - see above

        try:
            yield
        except (pa.ArrowException, StopIteration, OSError) as error:
            if fields := getattr(error, "extra_info", None):
                raise error_from(json.loads(fields)) from error
            if found := _NOT_TRUSTED.search(str(error)):
                what = f"the gateway's certificate is not accepted ({found[1] or found[2]})"
                do = "gatewayCaFile names the authority that signed it, gatewayServerName the name it is for."
                raise GatewayError("TL-G44", self.location, what, do) from error
            hint = _FAR if self._remote else _NEAR
            kind = type(error).__name__.removeprefix("Flight").removesuffix("Error")  # without gRPC's page of context
            why = f"no gateway answers ({kind or 'no answer'})"
            raise GatewayUnreachable("TL-G01", self.location, why, hint) from error
