"""A bridge's endpoint: what its supervisor knows, as facts, samples and verdicts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.lines.elsewhere import AWAY
from towline.bridge.runtime.reloading import APPLIED, REFUSED, UNCHANGED
from towline.errors import codes_in
from towline.monitor import health
from towline.monitor.facts import BridgeFacts, GatewayFacts, LineFacts, Pace
from towline.monitor.samples import of_bridge

if TYPE_CHECKING:
    from towline.bridge.runtime.state import BridgeState, LineView
    from towline.monitor.samples import Sample

__all__ = ["BridgeMonitor"]

#: Whether the file is what runs, by what became of its last reload.
_RELOADED: Final = {APPLIED: True, UNCHANGED: True, REFUSED: False}
_STARTING: Final = health.Problem("the bridge is starting")


class BridgeMonitor:
    """What a bridge shows; before it has a state it is alive and not ready.

    Args:
        name: Of the bridge.
        names: Names of the gateways of lines that have one of their own, by line.
        queue: As in `towline.monitor.samples.of_gateway`.
    """

    def __init__(self, name: str, names: Mapping[str, str], queue: int | None = None) -> None:
        self._name, self._names, self._queue = name, names, queue
        #: None before it has begun.
        self.state: BridgeState | None = None
        self._paces: dict[tuple[str, str], Pace] = {}

    def show(self, state: BridgeState) -> None:
        """Show a bridge that has begun."""
        self.state = state

    def facts(self) -> BridgeFacts | None:
        """What is known now; None before it has begun."""
        state = self.state
        if state is None:
            return None
        now = time.monotonic()
        with state.lock:
            lines = [self._line(view) for view in state.lines.values()]
            return BridgeFacts(
                state.name,
                state.spark,
                state.kafka,
                now - state.beat,
                lines,
                spark_restarts=state.spark_restarts,
                reloaded=_RELOADED.get(state.reload.get("outcome", "")),
            )

    def samples(self) -> Iterator[Sample]:
        """All of it."""
        facts = self.facts()
        return iter(()) if facts is None else of_bridge(facts, time.time(), self._queue)

    def alive(self) -> tuple[bool, dict[str, Any]]:
        """What ``/healthz`` says."""
        facts = self.facts()
        return health.verdict("alive", iter(()) if facts is None else health.bridge_alive(facts))

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """What ``/readyz`` says."""
        facts = self.facts()
        return health.verdict("ready", iter([_STARTING]) if facts is None else health.bridge_ready(facts))

    def _line(self, view: LineView) -> LineFacts:
        errors = f"{view.gateway_error or ''}{view.query_error or ''}"
        return LineFacts(
            self._name,
            view.name,
            view.direction,
            view.query,
            [self._gateway(view, name, status) for name, status in _statuses(view, self._names).items()],
            view.account,
            codes=tuple(dict.fromkeys(codes_in(errors))),
            query_restarts=view.restarts,
            gateway_restarts=view.gateway_restarts,
            batches=view.batches,
            transactions=view.notes.totals.histogram if view.notes and view.notes.totals else None,
            batch_at=view.batch_at,
            lag_s=view.lag_s(),
        )

    def _gateway(self, view: LineView, name: str, status: Mapping[str, Any]) -> GatewayFacts:
        facts = GatewayFacts(self._name, view.name, name, view.direction, status)
        pace = self._paces.setdefault((view.name, name), Pace())  # under the state's lock, as the view is
        pace.note(facts, time.monotonic())
        return replace(facts, rates=pace.rates)


def _statuses(view: LineView, names: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """What each gateway of a line says; nothing of one that does not answer."""
    parts = view.status.get("gateways")
    if view.gateways and parts is not None:
        return {name: {} if AWAY in part or view.silent else part for name, part in parts.items()}
    silent = not view.status or view.silent
    return {names.get(view.name, view.name): {} if silent else view.status}
