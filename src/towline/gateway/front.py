"""``python -m towline.gateway.front``: network process of a gateway, with TLS and authentication.

It serves the same calls as the gateway's unix socket, for clients with a token or a ticket. It is a separate process
because gRPC, as pyarrow builds it, accepts messages of any size and any number of connections before it authenticates
the client. The memory, threads and descriptors that a stranger uses up are never those of the intake [I7]. It stores
nothing: it may end at any time, and the gateway restarts it.

Settings come as a line of JSON on standard input; the process ends when standard input ends. It reports on standard
output, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
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
from towline.gateway.access import ServerCertificate, Ticket, TicketKey, TokenFile
from towline.gateway.endpoint import error_fields
from towline.gateway.process import FRONT_STOP_TIMEOUT_S, configure_logging, return_free_memory
from towline.gateway.service import flight_error, flight_errors, parse_request, unexpected_error
from towline.gateway.settings import ListenSettings
from towline.logfile import LogStream
from towline.threads import guarded_thread

#: A header longer than any token or ticket is ignored.
_MAX_HEADER_CHARS: Final = 8192
#: Interval of checks for a renewed certificate, in seconds.
_CERTIFICATE_CHECK_S: Final = 5.0
_AUTHENTICATION: Final = "admitted"
#: Minimum of the memory limit, which is a quarter of the machine's memory. A row of 256 MB needs three copies, and each
#: stream of rows has two batches of up to 32 MB; the limit includes what strangers use.
_MIN_MEMORY_LIMIT_BYTES: Final = 2 << 30
#: Longer than the longest long poll.
_CALL_TIMEOUT_S: Final = 90.0
#: Timeout for the previous server to release the port, in seconds.
_PORT_TIMEOUT_S: Final = 3.0
#: Interval of the memory check, in seconds: a fast network transfers 100 MB meanwhile.
_MEMORY_CHECK_S: Final = 0.1
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class _AuthenticatedCall(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    """Authentication result of one call: its ticket, or None for a call with the token."""

    def __init__(self, ticket: Ticket | None) -> None:
        self.ticket = ticket


class CallAuthenticator(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # see above
    """Flight middleware that authenticates each call to a gateway; `refused_calls` counts the failures."""

    def __init__(self, gateway_name: str, token_file: TokenFile, ticket_key: TicketKey) -> None:
        self.gateway_name = gateway_name
        self._token_file = token_file
        self._ticket_key = ticket_key
        self._lock = threading.Lock()
        self.refused_calls = 0

    def start_call(self, _info: Any, headers: Mapping[str, Any]) -> _AuthenticatedCall:
        """Authenticate a call; raises gRPC's UNAUTHENTICATED if it is refused."""
        try:
            return _AuthenticatedCall(self.authenticate(headers))
        except GatewayError as error:
            with self._lock:
                self.refused_calls += 1
            raise flight_error(error, flight.FlightUnauthenticatedError) from None

    def authenticate(self, headers: Mapping[str, Sequence[str | bytes]]) -> Ticket | None:
        """Authenticate a call by its headers: None for one with a token, which permits everything, else its ticket.

        Raises:
            GatewayError: TL-G40 without a valid token, TL-G41 and TL-G42 for an invalid ticket.
        """
        authorization = headers.get("authorization", [])
        text = authorization[0] if len(authorization) == 1 else b""
        is_text = isinstance(text, str) and len(text) <= _MAX_HEADER_CHARS
        scheme, _, credential = str(text).partition(" ") if is_text else ("", "", "")
        if scheme == "Ticket":
            return self._ticket_key.verify(credential)
        if scheme != "Bearer" or not self._token_file.accepts(credential):
            remedy = "gatewayTokenFile has to hold a line of the file that the gateway's token_file names."
            raise GatewayError("TL-G40", self.gateway_name, "the token is missing or unknown to this gateway", remedy)
        return None


def check_ticket_scope(gateway: str, ticket: Ticket, call: str, body: bytes) -> None:
    """Check that a ticket permits a call: the rows that are read, or the writer of the batch.

    A read may begin later than the ticket's range, as after a broken connection. It has to end at the range's end: only
    that offset identifies the rows [I14].

    Raises:
        GatewayError: TL-G43, the ticket is for something else. TL-G08, the request can't be read.
    """
    request = parse_request(gateway, body)
    needed_kind, is_covered, target = "", False, f'the action "{call}"'
    if call == "get":
        rows, start = tuple(map(request.get, ("journal", "end", "incarnation"), (None, None, ""))), request.get("start")
        is_covered = rows == (ticket.journal, ticket.end, ticket.incarnation)
        is_covered = is_covered and isinstance(start, int) and start >= ticket.start
        needed_kind, target = "read", "these rows"
    elif call in {"put", "batch_status", "wait_delivered"}:
        batch = request.get("batch")
        writer = batch.get("writer") if isinstance(batch, dict) else None
        is_covered = call == "wait_delivered" or str(writer).startswith(f"{ticket.writer}/")
        needed_kind, target = "write", "this writer"
    if ticket.kind != needed_kind or not is_covered:
        remedy = "The driver requests a ticket for each slice and each query. Everything else needs the token."
        raise GatewayError("TL-G43", gateway, f"the ticket is for something else than {target}", remedy)


class RemoteService(flight.FlightServerBase):  # type: ignore[misc]  # see above
    """Arrow Flight server on a network, which forwards authenticated calls to a gateway's unix socket.

    Listens once it is constructed; raises TL-G45 if it can't.
    """

    def __init__(self, location: str, certificate: ServerCertificate, gateway: str, calls: CallAuthenticator) -> None:
        # Calls may come in as soon as the base class is constructed: every field they use is set before.
        self._authenticator, self.certificate = calls, certificate
        self._gateway = flight.connect(gateway)
        pair = (certificate.chain, certificate.key)
        try:
            super().__init__(location, tls_certificates=[pair], middleware={_AUTHENTICATION: calls})
        except Exception as error:
            remedy = "Is the address one of this machine, and the port free?"
            raise GatewayError("TL-G45", location, "the gateway can't listen on this address", remedy) from error
        self.location = f"{location.rpartition(':')[0]}:{self.port}"

    def status(self) -> dict[str, object]:
        """Return location, certificate expiry and number of refused calls."""
        expiry, count = self.certificate.valid_until.isoformat(timespec="seconds"), self._authenticator.refused_calls
        return {"location": self.location, "certificate_until": expiry, "refused": count}

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Forward an action."""
        with self._authorize(context, action.type, action.body):
            options = flight.FlightCallOptions(timeout=_CALL_TIMEOUT_S)
            return [result.body.to_pybytes() for result in self._gateway.do_action(action, options)]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Forward a stream of rows."""
        with self._authorize(context, "get", ticket.ticket):
            stream = self._gateway.do_get(ticket)
            return flight.GeneratorStream(stream.schema, _stream_rows(stream))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Forward a batch for the outbox."""
        with self._authorize(context, "put", descriptor.command):
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
    def _authorize(self, context: Any, call: str, body: Any) -> Iterator[None]:
        caller: _AuthenticatedCall = context.get_middleware(_AUTHENTICATION)
        if caller.ticket is not None:
            with flight_errors(self._authenticator.gateway_name):
                check_ticket_scope(self._authenticator.gateway_name, caller.ticket, call, bytes(body or b""))
        with _forward_errors():
            yield


def _stream_rows(stream: Any) -> Iterator[pa.RecordBatch]:
    try:
        while True:
            with _forward_errors():
                chunk = next(stream, None)
            if chunk is None:
                return
            yield chunk.data
    finally:
        with contextlib.suppress(Exception):
            stream.cancel()


@contextlib.contextmanager
def _forward_errors() -> Iterator[None]:
    """Forward the gateway's errors unchanged; an unreachable gateway is a Flight ``unavailable`` error."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if extra_info := getattr(error, "extra_info", None):
            raise flight.FlightServerError("TL-G", extra_info=bytes(extra_info)) from None
        raise flight.FlightUnavailableError("the gateway does not answer") from None


def main() -> int:
    """Serve until standard input ends; return the exit code."""
    configure_logging(LogStream(sys.stderr))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the gateway stops this process, after it has ended waiting calls
    front_settings = json.loads(sys.stdin.readline())
    return_free_memory()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain keys
    with contextlib.suppress(OSError):  # out of memory the kernel kills this process, not the intake
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _serve(front_settings)
    except Exception as error:  # noqa: BLE001 - any error is reported to the gateway
        failure = error if isinstance(error, TowlineError) else unexpected_error(str(front_settings.get("name")), error)
        _report({"error": error_fields(failure)})
        return 1
    return 0


def _serve(config: Mapping[str, Any]) -> None:
    settings, name = ListenSettings.model_validate(config["listen"]), str(config["name"])
    gateway = str(config["gateway"])
    log = structlog.get_logger("towline.gateway").bind(line=name)
    key = TicketKey.load(name, Path(config["state_dir"]))
    authenticator = CallAuthenticator(name, TokenFile(settings.token_file), key)
    certificate = ServerCertificate.read(settings.cert_file, settings.key_file)
    service = _listen(settings.location, certificate, gateway, authenticator)
    reported_status, certificate_problem, next_check_at = dict[str, object](), "", 0.0
    max_bytes = config.get("most_bytes") or max(_MIN_MEMORY_LIMIT_BYTES, _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES") // 4)
    while not select.select([sys.stdin], [], [], _MEMORY_CHECK_S if reported_status else 0)[0]:
        if int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES > max_bytes:  # resident, proc(5)
            problem = f"the network's calls took more than {max_bytes >> 20:,} MB"
            _report({"error": error_fields(GatewayError("TL-G49", name, problem, "It is restarted."))})
            os._exit(1)  # there is no state to save, and a clean exit takes time
        if (status := service.status()) != reported_status:
            _report(reported_status := status)
        if time.monotonic() < next_check_at:
            continue
        next_check_at = time.monotonic() + _CERTIFICATE_CHECK_S
        try:
            certificate, certificate_problem = ServerCertificate.read(settings.cert_file, settings.key_file), ""
        except ConfigError as error:
            if str(error) != certificate_problem:
                log.warning("certificates not renewed", code=error.code, reason=(certificate_problem := str(error)))
            continue
        if certificate != service.certificate:  # a Flight server can't change its certificate
            _shut_down(service)
            service = _listen(service.location, certificate, gateway, authenticator)
            log.info("certificates renewed")
    _shut_down(service).join(FRONT_STOP_TIMEOUT_S)


def _shut_down(service: RemoteService) -> threading.Thread:
    """Release the port at once; the returned thread ends with the last running call."""
    shutdown_thread = guarded_thread(service.shutdown, "flight-shutdown")
    shutdown_thread.start()
    return shutdown_thread


def _listen(location: str, certificate: ServerCertificate, gateway: str, calls: CallAuthenticator) -> RemoteService:
    """Start listening; retries while the previous server releases the port."""
    deadline = time.monotonic() + _PORT_TIMEOUT_S
    while True:
        try:
            return RemoteService(location, certificate, gateway, calls)
        except GatewayError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def _report(report: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
