"""HTTP server of metrics, health, lines and page of a bridge, with limits against slow or hostile clients.

One thread accepts and moves bytes, and at most `_MAX_CLIENTS` threads build answers. Clients are accepted at a limited
rate, a slow one is disconnected, and one too many is rejected. So the cost is bounded, and an attack stalls this server
only. What is below ``/page/`` may take longer, once its whole request is there, within places of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from h11 import DONE, IDLE, MUST_CLOSE
from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry
from starlette.applications import Starlette
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
from towline.errors import ConfigError
from towline.gateway.access import ServerCertificate
from towline.monitor.bridge import BridgeMonitor
from towline.monitor.gateway import GatewayMonitor
from towline.monitor.table import TableCollector, build_sample
from towline.options import LOOPBACK_HOSTS, parse_host_port
from towline.threads import guarded_thread

#: Concurrent answers; a browser opens several connections for one document.
_MAX_CLIENTS: Final = 8
#: Concurrent streams and commands of pages.
_MAX_PAGE_CLIENTS: Final = 48
#: Seconds between two accepted clients: ten times the rate that Prometheus and two probes need.
_ACCEPT_INTERVAL_S: Final = 0.1
#: Timeout of a request, of the whole connection, and of one of a page, which opens another; in seconds.
_REQUEST_TIMEOUT_S: Final = 3.0
_CONNECTION_TIMEOUT_S: Final = 10.0
_PAGE_TIMEOUT_S: Final = 300.0
PAGE_PREFIX: Final = "/page/"
#: Seconds to wait for running answers at the end.
_CLOSE_TIMEOUT_S: Final = 1.0
#: Backlog of the listening socket, listen(2).
_BACKLOG: Final = 16
#: One request per connection: a kept connection would occupy a place.
_HEADERS: Final = [("Connection", "close"), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]
#: Host names of a loopback address for a client on this machine. Any other host comes from a browser whose page's name
#: was pointed at this address (DNS rebinding).
_LOCAL_NAMES: Final = (*LOOPBACK_HOSTS, "[::1]")


class _TimedConnection(H11Protocol):
    """HTTP connection with one request and a time limit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timers of the connection."""
        super().connection_made(transport)
        self.loop.call_later(_REQUEST_TIMEOUT_S, self._abort_without_request)
        self.loop.call_later(_CONNECTION_TIMEOUT_S, self._abort_unless_page)
        self.loop.call_later(_PAGE_TIMEOUT_S, transport.abort)

    @property
    def is_page(self) -> bool:
        """True if it answers a whole request of a page."""
        is_whole = self.conn.their_state in (DONE, MUST_CLOSE)
        return is_whole and bool(self.scope["path"].startswith(PAGE_PREFIX))

    def _abort_without_request(self) -> None:
        if self.conn.their_state is IDLE:
            self.transport.abort()

    def _abort_unless_page(self) -> None:
        if not self.is_page:
            self.transport.abort()


class _Acceptor:
    """Accepts one client after the other at a limited rate, which uvicorn's own loop does not."""

    def __init__(self, listener: socket.socket, config: Config, tls: TlsContext | None) -> None:
        self._listener, self._config, self._tls = listener, config, tls
        self._state = ServerState()
        self._state.default_headers = config.encoded_headers
        #: Connections that are being made: a TLS handshake takes time.
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self, closed: threading.Event) -> None:
        """Accept clients until `closed` is set."""
        loop = asyncio.get_running_loop()
        while not closed.is_set():
            with contextlib.suppress(OSError):  # the client went away, or this process has too many files open
                client, _ = await loop.sock_accept(self._listener)
                if not self._has_place():
                    client.close()
                elif self._tls is None:
                    await loop.connect_accepted_socket(self._connection, client)
                else:
                    task = loop.create_task(self._shake_hands(client, self._tls.get()))
                    self._handshakes.add(task)
                    task.add_done_callback(self._handshakes.discard)
            await asyncio.sleep(_ACCEPT_INTERVAL_S)
        for connection in tuple(self._state.connections):
            connection.transport.abort()

    def _has_place(self) -> bool:
        connections = self._state.connections
        pages = sum(isinstance(connection, _TimedConnection) and connection.is_page for connection in connections)
        answers = max(len(connections), len(self._state.tasks)) - pages + len(self._handshakes)
        return answers < _MAX_CLIENTS and pages < _MAX_PAGE_CLIENTS

    def _connection(self) -> _TimedConnection:
        return _TimedConnection(self._config, self._state, {})

    async def _shake_hands(self, client: socket.socket, context: ssl.SSLContext) -> None:
        with contextlib.suppress(OSError):  # the client went away, or speaks no TLS
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection, client, ssl=context, ssl_handshake_timeout=_REQUEST_TIMEOUT_S
            )


class TlsContext:
    """TLS context of a server, with its certificate read again after a change.

    Raises:
        ConfigError: TL-C97, the files can't be used; later the last good certificate stays.
    """

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self._files = cert_file, key_file
        self._versions: tuple[tuple[int, ...], ...] = ()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load()

    def get(self) -> ssl.SSLContext:
        """Return the context of the next connection."""
        with contextlib.suppress(ConfigError, OSError):
            self._load()
        return self._context

    def _load(self) -> None:
        versions = tuple(map(files.file_version, self._files))
        if versions != self._versions:
            ServerCertificate.read(*self._files)
            self._context.load_cert_chain(*self._files)
            self._versions = versions


def _listener(address: str) -> socket.socket:
    host, port = parse_host_port(address)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"metrics and page can't be served there ({files.os_error_text(error)})"
        remedy = "Free the port, or name another one: [monitor] listen, --metrics or --listen HOST:PORT."
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


def monitor_routes(monitor: BridgeMonitor | GatewayMonitor) -> list[Route]:
    """Return the routes of metrics and health; `monitor` is called at every scrape and probe, on any thread."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(TableCollector(lambda: (build_sample(), *monitor.samples())))
    return [
        Route("/metrics", partial(_metrics, registry)),
        Route("/healthz", partial(_health, monitor.alive)),
        Route("/readyz", partial(_health, monitor.ready)),
    ]


@contextlib.contextmanager
def serve(routes: Sequence[Route], address: str, tls: TlsContext | None = None) -> Iterator[int]:
    """Serve routes while the context is open; yields the port.

    Args:
        routes: Routes with their handlers; ``/`` lists them, if it is none of them.
        address: ``HOST:PORT``, or a port of 127.0.0.1; 0 for a free one.
        tls: TLS of all connections; None for plain HTTP.

    Raises:
        ValueError: The address is invalid.
        ConfigError: TL-C146, it can't be bound.
    """
    index = "".join(f"{route.path}\n" for route in routes)
    listener, closed = _listener(address), threading.Event()
    hosts = _LOCAL_NAMES if listener.getsockname()[0] in LOOPBACK_HOSTS else ("*",)
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts), Middleware(GZipMiddleware)]
    application = Starlette(routes=[*routes, Route("/", lambda _: PlainTextResponse(index))], middleware=middleware)
    log_level = logging.CRITICAL + 1  # any client could fill the disk with log lines
    config = Config(application, ws="none", log_config=None, log_level=log_level, headers=_HEADERS, workers=1)
    config.load()
    acceptor = partial(_Acceptor, listener, config, tls)
    server_thread = guarded_thread(lambda: asyncio.run(acceptor().run(closed)), "metrics", retry_s=1.0)
    server_thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        closed.set()
        listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next client (accept(2): EINVAL)
        server_thread.join(_CLOSE_TIMEOUT_S)
        listener.close()
