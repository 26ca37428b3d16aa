"""One endpoint: samples and verdicts behind an HTTP server, and a look at the rates every few seconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Self

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.registry import CollectorRegistry

from towline.monitor.families import Sample, TableCollector
from towline.monitor.samples import build
from towline.monitor.server import MetricsServer, Verdict

if TYPE_CHECKING:
    from towline.monitor.server import ListenAddress

__all__ = ["MonitorEndpoint"]

#: Seconds between two looks at the counters, for the rates of the outage budgets.
_LOOK_S: Final = 5.0


class MonitorEndpoint:
    """Serves a process's metrics until `close`; a context manager.

    Args:
        address: Where to listen.
        samples: Asked at every scrape.
        alive: What ``/healthz`` says.
        ready: What ``/readyz`` says.
        look: Called every few seconds, on a thread of its own.

    Raises:
        ConfigError: TL-C146, the address can't be had.
    """

    def __init__(
        self,
        address: ListenAddress,
        samples: Callable[[], Iterable[Sample]],
        alive: Verdict,
        ready: Verdict,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        registry.register(TableCollector(lambda: (build(), *samples())))
        self._look = look
        self._closed = threading.Event()
        self._server = MetricsServer(address, registry, alive, ready)
        self._thread = threading.Thread(target=self._watch, name="metrics-rates", daemon=True)
        self._thread.start()

    @property
    def address(self) -> ListenAddress:
        """Where it listens."""
        return self._server.address

    def _watch(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # the next look may go well, and rates alone are missing until then
                self._look()
            if self._closed.wait(_LOOK_S):
                return

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
