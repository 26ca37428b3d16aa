"""The HTTP server: metrics, health and the lines of a bridge, and nothing that a slow or hostile client could stop.

One thread accepts and moves bytes, as many as `_MOST_CLIENTS` make answers. A client that comes too often waits, one
that is slow is cut off, and one too many is sent away: what it costs is bounded whoever asks, and what it could hold up
is this server alone.
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
from towline.bridge.runtime.status import collect_bridge
from towline.errors import ConfigError, GatewayError, TowlineError, did_you_mean
from towline.gateway.access import TokenFile
from towline.monitor.bridge import BridgeMonitor
from towline.monitor.gateway import GatewayMonitor
from towline.monitor.table import TableCollector, build
from towline.options import host_port
from towline.threads import guarded_thread

#: Answers at once.
_MOST_CLIENTS: Final = 4
#: Seconds between two clients: ten times as many as Prometheus and two probes need.
_PACE_S: Final = 0.1
#: Seconds that a client may take for its request, and for all of it.
_REQUEST_S: Final = 3.0
_WHOLE_S: Final = 10.0
#: Seconds that the end waits for an answer that is being made.
_CLOSE_S: Final = 1.0
#: Connections that the system keeps for us.
_BACKLOG: Final = 16
#: A connection is one request: one that is kept would keep a place.
_HEADERS: Final = [("Connection", "close"), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]
#: Names by which a client on this machine reaches a loopback address; another one was put into a browser by a page
#: whose name began to mean this address (DNS rebinding).
_HERE: Final = ("localhost", "127.0.0.1", "::1", "[::1]")


class _Connection(H11Protocol):
    """One request of one connection, and the time that it may take."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, with an end."""
        super().connection_made(transport)
        self.loop.call_later(_REQUEST_S, self._cut_off_without_request)
        self.loop.call_later(_WHOLE_S, transport.abort)

    def _cut_off_without_request(self) -> None:
        if self.conn.their_state is IDLE:
            self.transport.abort()


async def _accept(listener: socket.socket, config: Config, closed: threading.Event) -> None:
    """Take in one client after the other, at a pace, as uvicorn's own loop does not."""
    loop, state = asyncio.get_running_loop(), ServerState()
    state.default_headers = config.encoded_headers
    while not closed.is_set():
        with contextlib.suppress(OSError):  # the client went away, or this process has too many files open
            client, _ = await loop.sock_accept(listener)
            if max(len(state.connections), len(state.tasks)) < _MOST_CLIENTS:
                await loop.connect_accepted_socket(lambda: _Connection(config, state, {}), client)
            else:
                client.close()
        await asyncio.sleep(_PACE_S)
    for connection in tuple(state.connections):
        connection.transport.abort()


def _listener(address: str) -> socket.socket:
    try:
        host, port = host_port(address)
    except ValueError as error:
        raise ConfigError(
            "TL-C145", "--metrics", f'"{address}": {error}', "A port alone is one of 127.0.0.1."
        ) from None
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        what = f"metrics can't be served there ({files.why(error)})"
        do = "Free the port, or name another one: [monitor] listen, or --metrics HOST:PORT."
        raise ConfigError("TL-C146", address, what, do) from error
    listener.setblocking(False)
    return listener


def as_json(values: Mapping[str, Any], status: int = 200) -> Response:
    """Values as an answer."""
    return Response(json.dumps(values) + "\n", status, media_type="application/json")


def _metrics(registry: CollectorRegistry, request: Request) -> Response:
    encoder, kind = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(registry), media_type=kind)


def _health(verdict: Callable[[], tuple[bool, dict[str, Any]]], _: Request) -> Response:
    well, answer = verdict()
    return as_json(answer, 200 if well else 503)


@contextlib.contextmanager
def serve(monitor: BridgeMonitor | GatewayMonitor, address: str, more: Sequence[Route] = ()) -> Iterator[int]:
    """Serve a process's metrics and health meanwhile; what is yielded is the port.

    Args:
        monitor: Asked at every scrape and probe, each time on a thread of its own.
        address: ``HOST:PORT``, or a port of 127.0.0.1; 0 for one that is free.
        more: What else is answered.

    Raises:
        ConfigError: TL-C145 it is no address, TL-C146 it can't be had.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(TableCollector(lambda: (build(), *monitor.samples())))
    routes = [
        Route("/metrics", partial(_metrics, registry)),
        Route("/healthz", partial(_health, monitor.alive)),
        Route("/readyz", partial(_health, monitor.ready)),
        *more,
    ]
    index = "".join(f"{route.path}\n" for route in routes)
    listener, closed = _listener(address), threading.Event()
    hosts = _HERE if listener.getsockname()[0] in _HERE else ("*",)
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts), Middleware(GZipMiddleware)]
    application = Starlette(routes=[Route("/", lambda _: PlainTextResponse(index)), *routes], middleware=middleware)
    silent = logging.CRITICAL + 1  # whoever may ask could fill a disk with a log
    config = Config(application, ws="none", log_config=None, log_level=silent, headers=_HEADERS, workers=1)
    config.load()
    answering = guarded_thread(lambda: asyncio.run(_accept(listener, config, closed)), "metrics", again_s=1.0)
    answering.start()
    try:
        yield listener.getsockname()[1]
    finally:
        closed.set()
        listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next client (accept(2): EINVAL)
        answering.join(_CLOSE_S)
        listener.close()


#: What may be asked for of a line, by the last part of the path.
_REQUESTS: Final[dict[str, Callable[[Path], object]]] = {
    "pause": partial(pause, by="[monitor]"),
    "resume": resume,
    "restart": request_restart,
}
#: Code of an error → status of the answer; every other one is 503.
_STATUS: Final = {"TL-B73": 403, "TL-B74": 401, "TL-C73": 404}
#: Refused requests are logged once in so many seconds, with their number.
_QUIET_S: Final = 60.0
#: The file as `towline status` reads it, again when it has changed.
_bridge = lru_cache(maxsize=1)(lambda file, _version: load(file))


class BridgeLines:
    """The endpoints ``/lines`` of a bridge.

    Raises:
        ConfigError: TL-C98, the file of tokens can't be used.
    """

    def __init__(self, bridge: Bridge, monitor: BridgeMonitor) -> None:
        self._bridge, self._monitor = bridge, monitor
        self._tokens = None if bridge.monitor.token_file is None else TokenFile(bridge.monitor.token_file)
        self._refused, self._quiet_until = 0, 0.0

    def routes(self) -> list[Route]:
        """What `towline.monitor.server.serve` answers besides."""
        asks = [
            Route(f"/lines/{{line}}/{verb}", partial(_answer, partial(self._ask, call), 202), methods=["POST"])
            for verb, call in _REQUESTS.items()
        ]
        return [Route("/lines", partial(_answer, self._status, 200)), *asks]

    def _status(self, _: Request) -> dict[str, Any]:
        file = self._bridge.file
        return collect_bridge(_bridge(file, files.version(file)))

    def _ask(self, call: Callable[[Path], object], request: Request) -> dict[str, Any]:
        """Write a request as `towline pause` does; how the line is now."""
        self._let_in(request.headers.get("authorization", ""))
        line, state = str(request.path_params["line"]), self._monitor.state
        lines = {} if state is None else state.lines
        if line not in lines:
            hint = did_you_mean(line, lines, "GET /lines has their names.")
            raise ConfigError("TL-C73", "[monitor]", f'no line is named "{line}"', hint)
        call(self._bridge.state_dir / line)
        return {"line": line, "state": lines[line].query}

    def _let_in(self, authorization: str) -> None:
        if self._tokens is None:
            do = "Name a file of tokens there and start the bridge again, or use towline pause, resume and restart."
            raise ConfigError("TL-B73", "[monitor]", "token_file is not set, and without it POST is refused", do)
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and self._tokens.allows(token.strip()):
            return
        self._refused += 1
        if (state := self._monitor.state) is not None and time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_S
            state.say(f"[monitor]: requests refused that had no token of token_file: {self._refused:,}   [TL-B74]")
        do = 'Send the header "Authorization: Bearer TOKEN" with a line of the file that [monitor] token_file names.'
        raise GatewayError("TL-B74", "[monitor]", "the request has no token, or another one", do)


def _answer(make: Callable[[Request], dict[str, Any]], status: int, request: Request) -> Response:
    try:
        return as_json(make(request), status)
    except TowlineError as error:
        raise HTTPException(_STATUS.get(error.code, 503), f"{error}\n", {"WWW-Authenticate": "Bearer"}) from None
