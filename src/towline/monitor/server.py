"""The HTTP server: ``/metrics``, ``/healthz``, ``/readyz``, and nothing that a slow or hostile client could stop.

One thread accepts, a few answer. A client that comes too often waits, one that is slow is cut off, and one too many is
sent away: what it costs is bounded whoever asks, and what it could hold up is this server alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.registry import CollectorRegistry

from towline import files
from towline.errors import ConfigError
from towline.monitor.samples import TableCollector, build
from towline.threads import guarded_thread

if TYPE_CHECKING:
    from towline.monitor.samples import Sample

__all__ = ["ListenAddress", "MetricsServer", "Monitor", "serve"]

#: Whether all is well, and the answer as JSON.
Verdict = Callable[[], tuple[bool, dict[str, Any]]]

#: Seconds between two looks at the counters, for the rates of the outage budgets.
_LOOK_S: Final = 5.0
#: Answers at once.
_MOST_CLIENTS: Final = 4
#: Seconds between two clients: ten times as many as Prometheus and two probes need.
_PACE_S: Final = 0.1
#: Seconds that a client may take for one step, and for all of them.
_STEP_S: Final = 3.0
_WHOLE_S: Final = 10.0
#: Connections that the system keeps for us.
_BACKLOG: Final = 16

_INDEX: Final = b"/metrics  for Prometheus\n/healthz  alive?\n/readyz   does it do what it was started for?\n"


class ListenAddress(tuple[str, int]):
    """Where to listen."""

    __slots__ = ()

    def __str__(self) -> str:
        host, port = self
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Handler(WSGIRequestHandler):
    """One request of one connection."""

    timeout = _STEP_S

    def get_stderr(self) -> IO[str]:
        """Nowhere: a client that went away is worth no traceback."""
        return io.StringIO()

    def log_message(self, *_: object) -> None:
        """Nothing: whoever may ask could fill a disk with it."""


class _Server(WSGIServer):
    """As wsgiref has it, with bounds."""

    allow_reuse_address = True
    request_queue_size = _BACKLOG

    def __init__(self, address: ListenAddress) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.Semaphore(_MOST_CLIENTS)
        self._next_at = 0.0
        #: Connections and when each has to be done.
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without asking the resolver for a name of ours, as `http.server` does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on another thread; send away who is one too many."""
        time.sleep(min(_PACE_S, max(0.0, self._next_at - time.monotonic())))
        self._next_at = time.monotonic() + _PACE_S
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = time.monotonic() + _WHOLE_S
        try:
            guarded_thread(self._answer, "metrics-answer", request, client_address).start()
        except RuntimeError:  # no more threads: a scrape is no reason to end
            self._done(request)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001, S110 - a client that went away, or a fault of one answer; the next one is served
            pass
        finally:
            self._done(request)

    def _done(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        self.shutdown_request(request)
        self._places.release()

    def service_actions(self) -> None:
        """Cut off who takes too long; called twice a second."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._open.items() if now > until]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing to tell."""


class MetricsServer:
    """Serves until `close`; a context manager.

    Args:
        address: Where to listen.
        registry: What ``/metrics`` shows.
        alive: What ``/healthz`` says.
        ready: What ``/readyz`` says.

    Raises:
        ConfigError: TL-C146, the address can't be had.
    """

    def __init__(
        self,
        address: ListenAddress,
        registry: CollectorRegistry,
        alive: Verdict,
        ready: Verdict,
    ) -> None:
        self._metrics = make_wsgi_app(registry)
        self._verdicts = {"/healthz": alive, "/readyz": ready}
        try:
            self._server = _Server(address)
        except OSError as error:
            what = f"metrics can't be served there ({files.why(error)})"
            do = "Free the port, or name another one: [monitor] listen, or --metrics HOST:PORT."
            raise ConfigError("TL-C146", str(address), what, do) from error
        self._server.set_app(self._app)
        self._thread = guarded_thread(self._server.serve_forever, "metrics", again_s=1.0)
        self._thread.start()

    @property
    def address(self) -> ListenAddress:
        """Where it listens, a port of 0 replaced by the one that was free."""
        host, port, *_ = self._server.server_address
        return ListenAddress((str(host), int(port)))

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _app(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _text(start_response, HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n", Allow="GET, HEAD")
        if path == "/metrics":
            body: Iterable[bytes] = self._metrics(environ, start_response)
            return body
        if (asked := self._verdicts.get(path)) is not None:
            well, answer = asked()
            status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
            return _text(start_response, status, json.dumps(answer).encode() + b"\n", "application/json")
        if path == "/":
            return _text(start_response, HTTPStatus.OK, _INDEX)
        return _text(start_response, HTTPStatus.NOT_FOUND, _INDEX)


class Monitor(Protocol):
    """What is served."""

    def samples(self) -> Iterable[Sample]:
        """Asked at every scrape."""

    def alive(self) -> tuple[bool, dict[str, Any]]:
        """What ``/healthz`` says."""

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """What ``/readyz`` says."""

    def look(self) -> None:
        """Note the rates of the outage budgets."""


@contextlib.contextmanager
def serve(monitor: Monitor, address: ListenAddress) -> Iterator[MetricsServer]:
    """Serve a process's metrics meanwhile, and look at the rates every few seconds.

    Raises:
        ConfigError: TL-C146, the address can't be had.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(TableCollector(lambda: (build(), *monitor.samples())))
    closed = threading.Event()

    def watch() -> None:
        while not closed.is_set():
            monitor.look()
            closed.wait(_LOOK_S)

    with MetricsServer(address, registry, monitor.alive, monitor.ready) as server:
        guarded_thread(watch, "metrics-rates", again_s=_LOOK_S).start()
        try:
            yield server
        finally:
            closed.set()


def _text(
    start_response: StartResponse, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", **more: str
) -> Iterable[bytes]:
    headers = [("Content-Type", kind), ("Cache-Control", "no-store"), *more.items()]
    start_response(f"{status.value} {status.phrase}", headers)
    return [body]
