"""A bridge's endpoint: what its supervisor knows, as samples and verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from towline.bridge.lines.evidence import AWAY
from towline.bridge.runtime.state import APPLIED, PAUSED, REFUSED, UNCHANGED, BridgeState, LineView
from towline.errors import codes_in
from towline.monitor.gateway import WINDOW_S, GatewayFacts, Problem, gateway_ready, of_gateway, problem, verdict
from towline.monitor.table import BRIDGE, LINE, Sample, read
from towline.timing import Pace

#: Whether the file is what runs, by what became of its last reload.
_RELOADED: Final = {APPLIED: 1, UNCHANGED: 1, REFUSED: 0}
#: A bridge's loop looks around four times a second.
_BEAT_S: Final = 60.0
#: A message that waits longer while its query runs is not carried.
_STALLED_S: Final = 120.0
_STARTING: Final = problem("the bridge is starting")
_STANDS_STILL: Final = problem("the bridge's loop stands still")


class BridgeMonitor:
    """What a bridge shows; before it has a state it is alive and not ready.

    Args:
        names: Names of the gateways of lines that have one of their own, by line.
        queue: As in `towline.monitor.gateway.of_gateway`.
    """

    def __init__(self, name: str, names: Mapping[str, str], queue: int | None = None) -> None:
        self._name, self._names, self._queue = name, names, queue
        #: None before it has begun.
        self.state: BridgeState | None = None
        self._paces: dict[tuple[str, str], Pace] = {}

    def show(self, state: BridgeState) -> None:
        """Show a bridge that has begun."""
        self.state = state

    def samples(self) -> Iterator[Sample]:
        """All of it, as it is at one moment."""
        if (state := self.state) is None:
            return iter(())
        with state.lock:
            return iter([*of_bridge(state, self._gateways, time.time(), self._queue)])

    def alive(self) -> tuple[bool, dict[str, Any]]:
        """What ``/healthz`` says; a gateway is started again by the bridge itself."""
        stands = self.state is not None and time.monotonic() - self.state.beat > _BEAT_S
        return verdict("alive", [_STANDS_STILL] if stands else [])

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """What ``/readyz`` says."""
        if (state := self.state) is None:
            return verdict("ready", [_STARTING])
        with state.lock:
            return verdict("ready", bridge_ready(state, self._gateways))

    def _gateways(self, view: LineView) -> Iterator[GatewayFacts]:
        """What each gateway of a line says; nothing of one that does not answer. Called under the state's lock."""
        statuses = view.status.get("gateways") if view.gateways else None
        if statuses is None:
            statuses = {self._names.get(view.name, view.name): view.status}
        for name, status in statuses.items():
            known = {} if AWAY in status or view.silent else status
            facts = GatewayFacts(self._name, view.name, name, view.direction, known)
            pace = self._paces.setdefault((view.name, name), Pace(WINDOW_S))
            yield facts.at_pace(pace, time.monotonic())


def of_bridge(
    state: BridgeState, gateways: Callable[[LineView], Iterable[GatewayFacts]], now: float, queue: int | None = None
) -> Iterator[Sample]:
    """What is known of a bridge and its lines, at a time since 1970; the gateways of a line are asked once."""
    worked_out = {
        "spark_running": int(state.spark == "running"),
        "spark_restarts": state.spark_restarts,
        "config_last_reload_successful": _RELOADED.get(state.outcomes.get("", {}).get("outcome", "")),
        "kafka_reachable": None if state.kafka == "unknown" else int(state.kafka == "reachable"),
    }
    yield from read(BRIDGE, (state.name,), worked_out)
    for view in state.lines.values():
        for gateway in gateways(view):
            yield from of_gateway(gateway, now, queue)
        yield from _of_line((state.name, view.name, view.direction), view)


def _of_line(labels: tuple[str, ...], view: LineView) -> Iterator[Sample]:
    worked_out: dict[str, Any] = {
        "query_running": int(view.query == "running"),
        "line_paused": int(view.query == PAUSED),
        "query_restarts": view.restarts,
        "gateway_restarts": view.gateway_restarts,
        "batch_seconds": view.batches,
        "kafka_transaction_seconds": view.notes.totals.histogram if view.notes and view.notes.totals else None,
        "last_batch_timestamp_seconds": view.batch_at,
    }
    account, counts = view.account, dict[str, Any]()
    if account is not None:
        counts = {**account.counts, **account.more}
        worked_out["account_adds_up"] = None if account.adds_up is None else int(account.adds_up)
        worked_out["guarantee_kept"] = int(not account.broken)
        for part, count in account.counts.items():
            yield Sample("towline_account_messages", (*labels, part), count)
    yield from read(LINE, labels, {**counts, **worked_out})


def bridge_ready(state: BridgeState, gateways: Callable[[LineView], Iterable[GatewayFacts]]) -> Iterator[Problem]:
    """What of a bridge does not do what it was started for."""
    if state.spark != "running":
        yield problem(f"spark is {state.spark}")
    if state.kafka != "reachable":
        yield problem(f"kafka is {state.kafka}")
    for view in state.lines.values():
        codes = tuple(dict.fromkeys(codes_in(f"{view.gateway_error or ''}{view.query_error or ''}")))
        for gateway in gateways(view):
            yield from gateway_ready(gateway, codes)
        yield from _line(view, codes)


def _line(view: LineView, codes: tuple[str, ...]) -> Iterator[Problem]:
    if view.query not in ("running", PAUSED):  # that somebody paused it is as it was promised
        yield problem(f"the query is {view.query}", view.name, codes=codes)
    elif view.lag_s() > _STALLED_S and view.query != PAUSED:
        yield problem("the query carries nothing: the oldest message waits too long", view.name)
    account = view.account
    if account is not None and account.disagreements:
        yield problem("the account does not add up", view.name)
    if account is not None and account.broken:
        yield problem("the guarantee was not kept", view.name)
