"""``python -m towline.gateway.front``: the process of a gateway that faces the network.

The same calls as on the gateway's unix socket, over TLS, for those with a token or a ticket. A process of its own,
because gRPC as pyarrow builds it takes messages of any size and any number of connections before it asks who sends
them: what a stranger uses up, memory, threads, descriptors or the interpreter, is this process's and never the
intake's [I7]. It keeps nothing: it may end at any time, and the gateway starts it again.

Settings come as a line of JSON on standard input, whose end ends it; what it has to say goes to standard output, a line
of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import structlog
from pyarrow import flight

from towline.errors import ConfigError, GatewayError, TowlineError
from towline.files import why
from towline.gateway.access import REMOTE, ServerCertificate, Ticket, TicketKey, TokenFile
from towline.gateway.endpoint import error_fields
from towline.gateway.process import END_S, configure_logging, give_memory_back
from towline.gateway.service import errors_on_the_wire, fields_of, on_the_wire, unforeseen
from towline.gateway.settings import ListenSettings
from towline.logfile import LogStream
from towline.threads import guarded_thread

#: A header longer than any token or ticket is not looked at.
_LONGEST: Final = 8192
#: Refused calls are told once in so many seconds, with their number.
_QUIET_S: Final = 60.0
#: How often it is looked whether the certificate was renewed, in seconds.
_LOOK_S: Final = 5.0
_ADMITTED: Final = "admitted"
#: Most bytes in memory: a quarter of the machine's, and so many at least. A row of 256 MB is there three times on its
#: way, and each stream of rows has two batches of up to 32 MB; strangers get no more either.
_LEAST_BYTES: Final = 2 << 30
#: Longer than the longest wait that a client may ask for.
_CALL_S: Final = 90.0
#: How long a port may still be that of the server before, in seconds.
_PORT_S: Final = 3.0
#: How often it is looked how much memory there is, in seconds: a fast network brings 100 MB meanwhile.
_GLANCE_S: Final = 0.1
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class _Admitted(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    """Goes with a call that was let in by a ticket, or by the token: None."""

    def __init__(self, ticket: Ticket | None) -> None:
        self.ticket = ticket


class Gatekeeper(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # see above
    """Judges the headers of each call to a gateway; `refused` calls did not come in."""

    def __init__(self, where: str, allowed: TokenFile, key: TicketKey) -> None:
        self.where = where
        self._allowed = allowed
        self._key = key
        self._lock = threading.Lock()
        self.refused = 0
        #: How many were told last, and when.
        self._told, self._told_at = 0, float("-inf")

    def tell_refused(self, now: float) -> None:
        """Log how many calls were refused since that was told last, once a minute at most."""
        count = self.refused
        if count > self._told and now - self._told_at >= _QUIET_S:
            log = structlog.get_logger("towline.gateway").bind(line=self.where)
            log.warning("calls refused", code="TL-G47", count=count - self._told, total=count)
            self._told, self._told_at = count, now

    def start_call(self, _info: Any, headers: Mapping[str, Any]) -> _Admitted:
        """Let a call in, or refuse it in gRPC's own word."""
        try:
            return _Admitted(self.judge(headers))
        except GatewayError as error:
            with self._lock:
                self.refused += 1
            raise on_the_wire(error, flight.FlightUnauthenticatedError) from None

    def judge(self, headers: Mapping[str, Sequence[str | bytes]]) -> Ticket | None:
        """Let a call in: None for one with a token, which may do everything, else its ticket.

        Raises:
            GatewayError: TL-G40 without a token that is known, TL-G41 and TL-G42 for a ticket that is worth nothing.
        """
        said = headers.get("authorization", [])
        text = said[0] if len(said) == 1 and isinstance(said[0], str) and len(said[0]) <= _LONGEST else ""
        kind, _, shown = text.partition(" ")
        if kind == "Ticket":
            return self._key.opened(shown)
        if kind != "Bearer" or not self._allowed.allows(shown):
            do = "gatewayTokenFile has to hold a line of the file that the gateway's token_file names."
            raise GatewayError("TL-G40", self.where, "the token is missing or is none of this gateway's", do)
        return None


def check_call(where: str, ticket: Ticket, call: str, body: bytes) -> None:
    """See that a ticket is for a call: for the rows that are read, or for the writer whose batch it is.

    Reading may begin later than the ticket says, as after a broken connection, and has to end where it says: only
    there it is known which rows are meant [I14].

    Raises:
        GatewayError: TL-G43, the ticket is for something else. TL-G08, the request can't be read.
    """
    asked = fields_of(where, body)
    kind, fits, what = "", False, f'the action "{call}"'
    if call == "get":
        rows, start = (asked.get("journal"), asked.get("end"), asked.get("incarnation", "")), asked.get("start")
        fits = rows == (ticket.journal, ticket.end, ticket.incarnation)
        fits = fits and isinstance(start, int) and start >= ticket.start
        kind, what = "read", "these rows"
    elif call in {"put", "place", "sent"}:
        batch = asked.get("batch")
        writer = batch.get("writer") if isinstance(batch, dict) else None
        fits = call == "sent" or str(writer).startswith(f"{ticket.writer}/")
        kind, what = "write", "this writer"
    if ticket.kind != kind or not fits:
        do = "A driver asks for a ticket for each slice and each query. Everything else needs the token."
        raise GatewayError("TL-G43", where, f"the ticket is for something else than {what}", do)


class RemoteService(flight.FlightServerBase):  # type: ignore[misc]  # see above
    """Listens on a network once it is constructed (or TL-G45), and hands what is let in to a gateway's unix socket."""

    def __init__(self, location: str, certificate: ServerCertificate, gateway: str, door: Gatekeeper) -> None:
        # Calls may come in as soon as the base class is constructed: every field they use is set before.
        self._door, self.certificate = door, certificate
        self._gateway = flight.connect(gateway)
        files = (certificate.chain, certificate.key)
        try:
            super().__init__(location, tls_certificates=[files], middleware={_ADMITTED: door})
        except Exception as error:
            what = f"the gateway can't listen on this address ({_reason(location)})"
            do = "Is the address one of this machine, and the port free?"
            raise GatewayError("TL-G45", location, what, do) from error
        self.location = f"{location.rpartition(':')[0]}:{self.port}"

    def status(self) -> dict[str, object]:
        """Where it listens, with what, and how many calls were refused."""
        until = self.certificate.until.isoformat(timespec="seconds")
        return {"location": self.location, "certificate_until": until, "refused": self._door.refused}

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Answer as the gateway does."""
        with self._admitted(context, action.type, action.body):
            options = flight.FlightCallOptions(timeout=_CALL_S)
            return [result.body.to_pybytes() for result in self._gateway.do_action(action, options)]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Stream what the gateway streams."""
        with self._admitted(context, "get", ticket.ticket):
            stream = self._gateway.do_get(ticket)
            return flight.GeneratorStream(stream.schema, _rows(stream))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Bring the gateway what comes."""
        with self._admitted(context, "put", descriptor.command):
            stream, answers = self._gateway.do_put(descriptor, reader.schema)
            try:
                for chunk in reader:
                    stream.write_batch(chunk.data)
                stream.done_writing()
                answer = answers.read()
            finally:
                stream.close()
            if answer is not None:
                writer.write(answer)

    @contextlib.contextmanager
    def _admitted(self, context: Any, call: str, body: Any) -> Iterator[None]:
        admitted: _Admitted = context.get_middleware(_ADMITTED)
        if admitted.ticket is not None:
            with errors_on_the_wire(self._door.where):
                check_call(self._door.where, admitted.ticket, call, bytes(body or b""))
        with _passed_on():
            yield


def _reason(location: str) -> str:
    """Why nobody can listen there: gRPC keeps to itself what the system says."""
    host, _, port = location.removeprefix(REMOTE).rpartition(":")
    try:
        family, kind, _, _, address = min(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM))
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return why(error)
    return "no reason is known"


def _rows(stream: Any) -> Iterator[pa.RecordBatch]:
    try:
        while True:
            with _passed_on():
                chunk = next(stream, None)
            if chunk is None:
                return
            yield chunk.data
    finally:
        with contextlib.suppress(Exception):
            stream.cancel()


@contextlib.contextmanager
def _passed_on() -> Iterator[None]:
    """The gateway's errors, as it said them; a gateway that is gone is not reached here either."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if told := getattr(error, "extra_info", None):
            raise flight.FlightServerError("TL-G", extra_info=bytes(told)) from None
        raise flight.FlightUnavailableError("the gateway does not answer") from None


def main() -> int:
    """Serve until standard input ends."""
    configure_logging(LogStream(sys.stderr))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the gateway ends it, when it has ended what waits
    told = json.loads(sys.stdin.readline())
    give_memory_back()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # keys would be in it
    with contextlib.suppress(OSError):  # where memory is short, this process goes, and not the intake
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _serve(told)
    except Exception as error:  # noqa: BLE001 - the gateway learns why, whatever it was
        failure = error if isinstance(error, TowlineError) else unforeseen(str(told.get("name")), error)
        _say({"error": error_fields(failure)})
        return 1
    return 0


def _serve(told: Mapping[str, Any]) -> None:
    settings, name, gateway = ListenSettings.model_validate(told["listen"]), str(told["name"]), str(told["gateway"])
    log = structlog.get_logger("towline.gateway").bind(line=name)
    door = Gatekeeper(name, TokenFile(settings.token_file), TicketKey.of(name, Path(told["state_dir"])))
    service = _listening(settings.location, ServerCertificate.read(settings), gateway, door)
    said, problem, look_at = dict[str, object](), "", 0.0
    most = told.get("most_bytes") or max(_LEAST_BYTES, _PAGE * os.sysconf("SC_PHYS_PAGES") // 4)
    while not select.select([sys.stdin], [], [], _GLANCE_S if said else 0)[0]:
        if int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE > most:  # resident, proc(5)
            what = f"the network's calls took more than {most >> 20:,} MB"
            _say({"error": error_fields(GatewayError("TL-G49", name, what, "It begins again."))})
            os._exit(1)  # nothing is kept here, and whatever ends in order takes time
        if (status := service.status()) != said:
            _say(said := status)
        door.tell_refused(time.monotonic())
        if time.monotonic() < look_at:
            continue
        look_at = time.monotonic() + _LOOK_S
        try:
            certificate, problem = ServerCertificate.read(settings), ""
        except ConfigError as error:
            if str(error) != problem:
                log.warning("certificates not renewed", code=error.code, reason=(problem := str(error)))
            continue
        if certificate != service.certificate:  # a server keeps the one that it was given
            _shut_down(service)
            service = _listening(service.location, certificate, gateway, door)
            log.info("certificates renewed")
    _shut_down(service).join(END_S)


def _shut_down(service: RemoteService) -> threading.Thread:
    """Let go of the port at once; the thread ends with the last call that runs."""
    ending = guarded_thread(service.shutdown, "flight-shutdown")
    ending.start()
    return ending


def _listening(location: str, certificate: ServerCertificate, gateway: str, door: Gatekeeper) -> RemoteService:
    """Listen; the server before may need a moment to let go of the port."""
    deadline = time.monotonic() + _PORT_S
    while True:
        try:
            return RemoteService(location, certificate, gateway, door)
        except GatewayError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def _say(words: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
