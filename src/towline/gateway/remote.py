"""The gateway on a network: the same calls as on its unix socket, over TLS, for those with a token or a ticket.

It runs in a process of its own (`towline.gateway.front`), which says why.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
from pyarrow import flight

from towline.backoff import Backoff
from towline.errors import ConfigError, GatewayError
from towline.files import why
from towline.gateway.access import REMOTE
from towline.gateway.listen import ServerCertificate, TokenFile
from towline.gateway.request import Request, errors_on_the_wire, refusal
from towline.gateway.tickets import Ticket, TicketKey
from towline.threads import guarded_thread

if TYPE_CHECKING:
    from towline.gateway.listen import ListenSettings

__all__ = ["Calls", "Gatekeeper", "Refusals", "RemoteService", "check_read", "check_write"]

#: A header longer than any token or ticket is not looked at.
_LONGEST: Final = 8192
#: Refused calls are told once in so many seconds, with their number.
_QUIET_S: Final = 60.0


class Refusals:
    """Counts the calls that were not let in, and tells it once a minute.

    Args:
        where: The gateway.
        clock: Seconds.

    Attributes:
        count: So many since the start.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._log = structlog.get_logger("towline.gateway").bind(line=where)
        self._clock = clock
        self._lock = threading.Lock()
        self._told = 0
        self._at = float("-inf")

    def refused(self) -> None:
        """One more; the first is told at once, further ones by `tell`."""
        with self._lock:
            self.count += 1
        self.tell()

    def tell(self) -> None:
        """Say how many there were since it was said last, once a minute at most."""
        with self._lock:
            now, new = self._clock(), self.count - self._told
            if not new or now - self._at < _QUIET_S:
                return
            self._at, self._told = now, self.count
        self._log.warning("calls refused", code="TL-G47", count=new, total=self.count)


class Gatekeeper:
    """Judges the headers of a call.

    Args:
        where: The gateway, as errors name it.
        allowed: The tokens.
        key: Of the tickets.
        refusals: Is told of each call that does not come in.
    """

    def __init__(self, where: str, allowed: TokenFile, key: TicketKey, refusals: Refusals) -> None:
        self._where = where
        self._allowed = allowed
        self._key = key
        self._refusals = refusals

    def judge(self, headers: Mapping[str, Sequence[str | bytes]]) -> Ticket | None:
        """Let a call in: None for one with a token, which may do everything, else its ticket.

        Raises:
            GatewayError: TL-G40 without a token that is known, TL-G41 and TL-G42 for a ticket that is worth nothing.
        """
        try:
            return self._judged(headers)
        except GatewayError:
            self._refusals.refused()
            raise

    def _judged(self, headers: Mapping[str, Sequence[str | bytes]]) -> Ticket | None:
        said = headers.get("authorization", [])
        text = said[0] if len(said) == 1 and isinstance(said[0], str) and len(said[0]) <= _LONGEST else ""
        kind, _, shown = text.partition(" ")
        if kind == "Ticket":
            return self._key.opened(shown)
        if kind != "Bearer" or not self._allowed.allows(shown):
            raise GatewayError(
                "TL-G40",
                self._where,
                "the token is missing or is none of this gateway's",
                "gatewayTokenFile has to hold a line of the file that the gateway's token_file names.",
            )
        return None


def check_read(where: str, ticket: Ticket, request: Request) -> None:
    """See that a ticket is for the rows that are asked for.

    Reading may begin later than the ticket says, as after a broken connection, and has to end where it says: only
    there it is known which rows are meant [I14].

    Raises:
        GatewayError: TL-G43, it is not.
    """
    asked = (request.text("journal"), request.number("end"), request.incarnation())
    fits = asked == (ticket.journal, ticket.end, ticket.incarnation) and request.number("start") >= ticket.start
    if ticket.kind != "read" or not fits:
        raise _other(where, "these rows")


def check_write(where: str, ticket: Ticket, writer: str | None) -> None:
    """See that a ticket is for the writer whose batch it is; None for what is no writer's own.

    Raises:
        GatewayError: TL-G43, it is not.
    """
    if ticket.kind != "write" or not (writer is None or writer.startswith(f"{ticket.writer}/")):
        raise _other(where, "this writer")


def _other(where: str, what: str) -> GatewayError:
    do = "A driver asks for a ticket for each slice and each query. Everything else needs the token."
    return GatewayError("TL-G43", where, f"the ticket is for something else than {what}", do)


#: How often it is looked whether certificates were renewed, in seconds.
_LOOK_S: Final = 5.0
_ADMITTED: Final = "admitted"
#: Actions of a writer's ticket, and whether they name a writer.
_WRITING: Final = {"place": True, "sent": False}


class Calls(Protocol):
    """What answers the calls that are let in: the gateway's service, or what hands them on to it."""

    tickets: TicketKey

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Answer an action."""

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Stream rows."""

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Take rows."""


class _Admitted(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    """Goes with a call that was let in.

    Attributes:
        ticket: What it came in with; None for a token.
    """

    def __init__(self, ticket: Ticket | None) -> None:
        self.ticket = ticket


class _Door(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # see above
    def __init__(self, gatekeeper: Gatekeeper) -> None:
        self._gatekeeper = gatekeeper

    def start_call(self, info: Any, headers: Mapping[str, Any]) -> _Admitted:
        del info
        try:
            return _Admitted(self._gatekeeper.judge(headers))
        except GatewayError as error:
            raise refusal(error) from None


class _Listener(flight.FlightServerBase):  # type: ignore[misc]  # see above
    """One server, with the certificates it was given."""

    def __init__(self, location: str, calls: Calls, where: str, door: _Door, files: ServerCertificate) -> None:
        self._calls = calls
        self._where = where
        super().__init__(
            location,
            tls_certificates=[(files.chain, files.key)],
            middleware={_ADMITTED: door},
        )

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        ticket = self._ticket(context)
        if ticket is not None:
            with errors_on_the_wire(self._where):
                named = _WRITING.get(action.type)
                request = Request(self._where, action.body.to_pybytes()) if named else None
                self._check_action(ticket, action.type, request)
        return self._calls.do_action(context, action)

    def do_get(self, context: Any, ticket: Any) -> Any:
        admitted = self._ticket(context)
        if admitted is not None:
            with errors_on_the_wire(self._where):
                check_read(self._where, admitted, Request(self._where, ticket.ticket))
        return self._calls.do_get(context, ticket)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        ticket = self._ticket(context)
        if ticket is not None:
            with errors_on_the_wire(self._where):
                check_write(self._where, ticket, Request(self._where, descriptor.command or b"").text("writer"))
        self._calls.do_put(context, descriptor, reader, writer)

    def _check_action(self, ticket: Ticket, kind: str, request: Request | None) -> None:
        if kind not in _WRITING:
            raise GatewayError(
                "TL-G43",
                self._where,
                f'a ticket does not open the action "{kind}"',
                "Only the driver asks for that, with the token.",
            )
        check_write(self._where, ticket, request.text("writer") if request else None)

    @staticmethod
    def _ticket(context: Any) -> Ticket | None:
        admitted: _Admitted = context.get_middleware(_ADMITTED)
        return admitted.ticket


class RemoteService:
    """Listens on a network as soon as it is constructed.

    Args:
        settings: Where, and with which files.
        calls: Answer what is let in.
        where: The gateway, as errors name it.
        allowed: The tokens, as they were read at the start.
        files: The certificates, as they were read at the start.

    Raises:
        GatewayError: TL-G45, the address can't be listened on.
    """

    def __init__(
        self, settings: ListenSettings, calls: Calls, where: str, allowed: TokenFile, files: ServerCertificate
    ) -> None:
        self._settings = settings
        self._calls = calls
        self._where = where
        self._log = structlog.get_logger("towline.gateway").bind(line=where)
        self._refusals = Refusals(where)
        self._door = _Door(Gatekeeper(where, allowed, calls.tickets, self._refusals))
        self._files = files
        #: Bound and not listening: between two listeners nobody else is given the port.
        self._port = _bound(settings.location)
        self.location = f"{REMOTE}{settings.address.rpartition(':')[0]}:{self._port.getsockname()[1]}"
        self._listener = self._listening(files)
        self._closed = threading.Event()
        self._closing: list[threading.Thread] = []
        self._looking = guarded_thread(self._look, "certificates", again_s=_LOOK_S)
        self._looking.start()

    def status(self) -> dict[str, object]:
        """Where it listens, with what, and how many calls were refused."""
        return {
            "location": self.location,
            "certificate_until": self._files.until.isoformat(timespec="seconds"),
            "refused": self._refusals.count,
        }

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop serving; a call that hangs is not waited for."""
        self._closed.set()
        self._looking.join()
        self._end(self._listener)
        for thread in self._closing:
            thread.join(timeout_s)
        self._port.close()

    def _look(self) -> None:
        """Tell refusals, and take certificates that were renewed on disk."""
        told = ""
        while not self._closed.wait(_LOOK_S):
            self._refusals.tell()
            try:
                self._renew()
                told = ""
            except (ConfigError, GatewayError) as error:
                if str(error) != told:
                    self._log.warning("certificates not renewed", code=error.code, reason=str(error))
                told = str(error)

    def _renew(self) -> None:
        if self._files.unchanged(self._settings):
            return
        files = ServerCertificate.read(self._settings)
        # A server keeps what it was given: another takes its place, and calls that run end on the one before.
        self._end(self._listener)
        self._files = files
        self._listener = self._again(files)
        self._log.info("certificates renewed", until=files.until.isoformat(timespec="seconds"))

    def _again(self, files: ServerCertificate) -> _Listener:
        """Listen on the same port; the one before lets go of it within milliseconds."""
        pauses, told = Backoff(first=0.05, most=5.0), ""
        while True:
            try:
                return self._listening(files)
            except GatewayError as error:
                if self._closed.wait(pauses.next()):
                    return self._listener
                if pauses.failures > 1 and str(error) != told:
                    self._log.warning("not listening", code=error.code, reason=(told := str(error)))

    def _listening(self, files: ServerCertificate) -> _Listener:
        try:
            return _Listener(self.location, self._calls, self._where, self._door, files)
        except Exception as error:
            _bound(self.location).close()  # gRPC keeps to itself what the system says
            raise _no_listener(self.location, "no reason is known") from error

    def _end(self, listener: _Listener) -> None:
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        thread = guarded_thread(listener.shutdown, "flight-shutdown")
        thread.start()
        self._closing.append(thread)


def _no_listener(location: str, reason: str) -> GatewayError:
    what = f"the gateway can't listen on this address ({reason})"
    return GatewayError("TL-G45", location, what, "Is the address one of this machine, and the port free?")


def _bound(location: str) -> socket.socket:
    """A socket on an address of a location, IPv4 if it has one; with SO_REUSEADDR another may listen there."""
    host, _, port = location.removeprefix(REMOTE).rpartition(":")
    try:
        family, kind, _, _, address = min(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM))
        with contextlib.ExitStack() as failed:
            bound = failed.enter_context(socket.socket(family, kind))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            failed.pop_all()
    except OSError as error:
        raise _no_listener(location, why(error)) from error
    return bound
