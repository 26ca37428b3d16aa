"""The endpoint of a gateway that runs alone: it asks the gateway beside it, as `towline status` does.

Asking through its socket shows more than looking into it: a gateway that answers nobody is not up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.errors import GatewayError
from towline.gateway.launch import discover
from towline.monitor import health
from towline.monitor.facts import GatewayFacts, Pace
from towline.monitor.samples import of_gateway

if TYPE_CHECKING:
    from towline.gateway.client import GatewayClient
    from towline.monitor.samples import Sample

__all__ = ["GatewayMonitor"]

#: Patience with a status, in seconds; less than Prometheus has with us.
_ASK_S: Final = 3.0
#: An answer is good for so long, in seconds: whoever asks more often learns nothing.
_FRESH_S: Final = 0.5


class GatewayMonitor:
    """What a gateway shows.

    Args:
        facts: Whose it is, without a status.
        state_dir: Where it is found.
        queue: As in `towline.monitor.samples.of_gateway`.
    """

    def __init__(self, facts: GatewayFacts, state_dir: Path, queue: int | None = None) -> None:
        self._facts, self._state_dir, self._queue = facts, state_dir, queue
        self._client: GatewayClient | None = None
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._asked_at = float("-inf")
        #: When it answered last; None before the first answer.
        self._heard_at: float | None = None
        self._pace = Pace()

    def facts(self) -> GatewayFacts:
        """What is known now."""
        with self._lock:
            if time.monotonic() - self._asked_at >= _FRESH_S:
                self._status = self._ask()
                self._asked_at = time.monotonic()
                if self._status:
                    self._heard_at = self._asked_at
                self._pace.note(replace(self._facts, status=self._status), self._asked_at)
            return replace(self._facts, status=self._status, rates=self._pace.rates)

    def _ask(self) -> dict[str, Any]:
        if self._client is None:
            with contextlib.suppress(GatewayError):
                self._client = discover(self._state_dir)
        if self._client is None:
            return {}
        try:
            return self._client.status(timeout_s=_ASK_S)
        except GatewayError:
            self._client.close()
            self._client = None
            return {}

    def samples(self) -> Iterator[Sample]:
        """All of it."""
        return of_gateway(self.facts(), time.time(), self._queue)

    def alive(self) -> tuple[bool, dict[str, Any]]:
        """What ``/healthz`` says."""
        facts = self.facts()
        silent = 0.0 if self._heard_at is None else time.monotonic() - self._heard_at
        return health.verdict("alive", health.gateway_alive(facts, silent_s=silent))

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """What ``/readyz`` says."""
        return health.verdict("ready", health.gateway_ready(self.facts()))
