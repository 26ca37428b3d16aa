"""HTTP server of metrics, health and lines of a bridge, with limits against slow or hostile clients.

One thread accepts and moves bytes, and at most `_MAX_CLIENTS` threads build answers. Clients are accepted at a limited
rate, a slow one is disconnected, and one too many is rejected. So the cost is bounded, and an attack stalls this server
only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from h11 import IDLE
from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from towline import files
from towline.bridge.config.file import load
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import pause, request_restart, resume
from towline.bridge.runtime.status import collect_bridge_status
from towline.errors import ConfigError, GatewayError, TowlineError, did_you_mean
from towline.gateway.access import TokenFile
from towline.monitor.bridge import BridgeMonitor
from towline.monitor.gateway import GatewayMonitor
from towline.monitor.table import TableCollector, build_sample
from towline.options import parse_host_port
from towline.threads import guarded_thread

#: Concurrent answers.
_MAX_CLIENTS: Final = 4
#: Seconds between two accepted clients: ten times the rate that Prometheus and two probes need.
_ACCEPT_INTERVAL_S: Final = 0.1
#: Timeout of a request, and of the whole connection, in seconds.
_REQUEST_TIMEOUT_S: Final = 3.0
_CONNECTION_TIMEOUT_S: Final = 10.0
#: Seconds to wait for running answers at the end.
_CLOSE_TIMEOUT_S: Final = 1.0
#: Backlog of the listening socket, listen(2).
_BACKLOG: Final = 16
#: One request per connection: a kept connection would occupy a place.
_HEADERS: Final = [("Connection", "close"), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]
#: Host names of a loopback address for a client on this machine. Any other host comes from a browser whose page's name
#: was pointed at this address (DNS rebinding).
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1", "[::1]")


class _TimedConnection(H11Protocol):
    """HTTP connection with one request and a time limit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timers of the connection."""
        super().connection_made(transport)
        self.loop.call_later(_REQUEST_TIMEOUT_S, self._abort_without_request)
        self.loop.call_later(_CONNECTION_TIMEOUT_S, transport.abort)

    def _abort_without_request(self) -> None:
        if self.conn.their_state is IDLE:
            self.transport.abort()


async def _accept(listener: socket.socket, config: Config, closed: threading.Event) -> None:
    """Accept one client after the other at a limited rate, which uvicorn's own loop does not."""
    loop, state = asyncio.get_running_loop(), ServerState()
    state.default_headers = config.encoded_headers
    while not closed.is_set():
        with contextlib.suppress(OSError):  # the client went away, or this process has too many files open
            client, _ = await loop.sock_accept(listener)
            if max(len(state.connections), len(state.tasks)) < _MAX_CLIENTS:
                await loop.connect_accepted_socket(lambda: _TimedConnection(config, state, {}), client)
            else:
                client.close()
        await asyncio.sleep(_ACCEPT_INTERVAL_S)
    for connection in tuple(state.connections):
        connection.transport.abort()


def _listener(address: str) -> socket.socket:
    try:
        host, port = parse_host_port(address)
    except ValueError as error:
        problem = f'"{address}": {error}'
        raise ConfigError("TL-C145", "--metrics", problem, "A port alone is one of 127.0.0.1.") from None
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"metrics can't be served there ({files.os_error_text(error)})"
        remedy = "Free the port, or name another one: [monitor] listen, or --metrics HOST:PORT."
        raise ConfigError("TL-C146", address, problem, remedy) from error
    listener.setblocking(False)
    return listener


def json_response(values: Mapping[str, Any], status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(json.dumps(values) + "\n", status, media_type="application/json")


def _metrics(registry: CollectorRegistry, request: Request) -> Response:
    encoder, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(registry), media_type=content_type)


def _health(verdict: Callable[[], tuple[bool, dict[str, Any]]], _: Request) -> Response:
    is_healthy, answer = verdict()
    return json_response(answer, 200 if is_healthy else 503)


@contextlib.contextmanager
def serve(monitor: BridgeMonitor | GatewayMonitor, address: str, extra_routes: Sequence[Route] = ()) -> Iterator[int]:
    """Serve metrics and health of a process while the context is open; yields the port.

    Args:
        monitor: Called at every scrape and probe, each time on another thread.
        address: ``HOST:PORT``, or a port of 127.0.0.1; 0 for a free one.
        extra_routes: Further routes.

    Raises:
        ConfigError: TL-C145 the address is invalid, TL-C146 it can't be bound.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(TableCollector(lambda: (build_sample(), *monitor.samples())))
    routes = [
        Route("/metrics", partial(_metrics, registry)),
        Route("/healthz", partial(_health, monitor.alive)),
        Route("/readyz", partial(_health, monitor.ready)),
        *extra_routes,
    ]
    index = "".join(f"{route.path}\n" for route in routes)
    listener, closed = _listener(address), threading.Event()
    hosts = _LOOPBACK_HOSTS if listener.getsockname()[0] in _LOOPBACK_HOSTS else ("*",)
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts), Middleware(GZipMiddleware)]
    application = Starlette(routes=[Route("/", lambda _: PlainTextResponse(index)), *routes], middleware=middleware)
    log_level = logging.CRITICAL + 1  # any client could fill the disk with log lines
    config = Config(application, ws="none", log_config=None, log_level=log_level, headers=_HEADERS, workers=1)
    config.load()
    server_thread = guarded_thread(lambda: asyncio.run(_accept(listener, config, closed)), "metrics", retry_s=1.0)
    server_thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        closed.set()
        listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next client (accept(2): EINVAL)
        server_thread.join(_CLOSE_TIMEOUT_S)
        listener.close()


#: Last part of the path → operation on a line.
_REQUESTS: Final[dict[str, Callable[[Path], object]]] = {
    "pause": partial(pause, by="[monitor]"),
    "resume": resume,
    "restart": request_restart,
}
#: Code of an error → status of the answer; every other one is 503.
_HTTP_STATUS: Final = {"TL-B73": 403, "TL-B74": 401, "TL-C73": 404}
#: Interval of the log line with the number of refused requests, in seconds.
_LOG_INTERVAL_S: Final = 60.0
#: The bridge file as `towline status` reads it, loaded again after a change.
_load_bridge = lru_cache(maxsize=1)(lambda file, _version: load(file))


class BridgeLines:
    """HTTP routes ``/lines`` of a bridge: status, pause, resume and restart of lines.

    Raises:
        ConfigError: TL-C98, the token file can't be used.
    """

    def __init__(self, bridge: Bridge, monitor: BridgeMonitor) -> None:
        self._bridge, self._monitor = bridge, monitor
        self._token_file = None if bridge.monitor.token_file is None else TokenFile(bridge.monitor.token_file)
        self._refused_requests, self._next_log_at = 0, 0.0

    def routes(self) -> list[Route]:
        """Return the routes for `towline.monitor.server.serve`."""
        request_routes = [
            Route(f"/lines/{{line}}/{verb}", partial(_respond, partial(self._submit, call), 202), methods=["POST"])
            for verb, call in _REQUESTS.items()
        ]
        return [Route("/lines", partial(_respond, self._status, 200)), *request_routes]

    def _status(self, _: Request) -> dict[str, Any]:
        file = self._bridge.file
        return collect_bridge_status(_load_bridge(file, files.file_version(file)))

    def _submit(self, operation: Callable[[Path], object], request: Request) -> dict[str, Any]:
        """Submit a request as `towline pause` does; return the line's state."""
        self._authorize(request.headers.get("authorization", ""))
        line, state = str(request.path_params["line"]), self._monitor.state
        lines = {} if state is None else state.lines
        if line not in lines:
            hint = did_you_mean(line, lines, "GET /lines has their names.")
            raise ConfigError("TL-C73", "[monitor]", f'no line is named "{line}"', hint)
        operation(self._bridge.state_dir / line)
        return {"line": line, "state": lines[line].query}

    def _authorize(self, authorization: str) -> None:
        if self._token_file is None:
            remedy = "Name a file of tokens there and start the bridge again, or use towline pause, resume and restart."
            raise ConfigError("TL-B73", "[monitor]", "token_file is not set, and without it POST is refused", remedy)
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and self._token_file.accepts(token.strip()):
            return
        self._refused_requests += 1
        if (state := self._monitor.state) is not None and time.monotonic() >= self._next_log_at:
            self._next_log_at = time.monotonic() + _LOG_INTERVAL_S
            count = f"{self._refused_requests:,}"
            state.add_event(f"[monitor]: requests refused that had no token of token_file: {count}   [TL-B74]")
        remedy = (
            'Send the header "Authorization: Bearer TOKEN" with a line of the file that [monitor] token_file names.'
        )
        raise GatewayError("TL-B74", "[monitor]", "the request has no token, or another one", remedy)


def _respond(handler: Callable[[Request], dict[str, Any]], status: int, request: Request) -> Response:
    try:
        return json_response(handler(request), status)
    except TowlineError as error:
        raise HTTPException(_HTTP_STATUS.get(error.code, 503), f"{error}\n", {"WWW-Authenticate": "Bearer"}) from None
