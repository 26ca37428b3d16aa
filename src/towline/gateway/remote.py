"""The gateway on a network: the same calls as on its unix socket, over TLS, for those with a token or a ticket.

It runs in a process of its own (`towline.gateway.front`), which says why.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
from pyarrow import flight

from towline.errors import ConfigError, GatewayError
from towline.files import why
from towline.gateway.access import REMOTE
from towline.gateway.admission import Gatekeeper, Refusals, TokenFile, check_read, check_write
from towline.gateway.listen import ServerCertificate
from towline.gateway.request import Request
from towline.gateway.wire import errors_on_the_wire, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline.gateway.listen import ListenSettings
    from towline.gateway.tickets import Ticket, TicketKey

__all__ = ["Calls", "RemoteService"]

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
        self._listener = self._listening(settings.location, files)
        self.location = f"{REMOTE}{settings.address.rpartition(':')[0]}:{self._listener.port}"
        self._closed = threading.Event()
        self._closing: list[threading.Thread] = []
        self._looking = threading.Thread(target=self._look, name="certificates", daemon=True)
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
        while True:
            try:
                return self._listening(self.location, files)
            except GatewayError as error:
                if self._closed.wait(0.1):
                    return self._listener
                self._log.warning("not listening", code=error.code, reason=str(error))

    def _listening(self, location: str, files: ServerCertificate) -> _Listener:
        try:
            return _Listener(location, self._calls, self._where, self._door, files)
        except Exception as error:
            raise GatewayError(
                "TL-G45",
                location,
                f"the gateway can't listen on this address ({_why_not(location)})",
                "Is the address one of this machine, and the port free?",
            ) from error

    def _end(self, listener: _Listener) -> None:
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        thread = threading.Thread(target=listener.shutdown, name="flight-shutdown", daemon=True)
        thread.start()
        self._closing.append(thread)


def _why_not(location: str) -> str:
    """What the system says about listening there: gRPC keeps it to itself."""
    host, _, port = location.removeprefix(REMOTE).rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return why(error)
    return "no reason is known"
