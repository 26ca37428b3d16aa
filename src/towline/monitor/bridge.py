"""Metrics and health of a bridge, from the state of its supervisor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from towline.bridge.lines.statuses import AWAY_SINCE
from towline.bridge.runtime.state import APPLIED, PAUSED, REFUSED, UNCHANGED, BridgeState, LineView
from towline.errors import codes_in
from towline.monitor.gateway import (
    RATE_WINDOW_S,
    GatewayFacts,
    Problem,
    gateway_samples,
    problem,
    readiness_problems,
    verdict,
)
from towline.monitor.table import BRIDGE, LINE, Sample, status_samples
from towline.timing import RateMeter

#: Outcome of the last reload → 1 if the file is applied.
_RELOAD_SUCCESS: Final = {APPLIED: 1, UNCHANGED: 1, REFUSED: 0}
#: The bridge's loop turns four times a second; it counts as stalled after so many seconds.
_LOOP_TIMEOUT_S: Final = 60.0
#: Seconds that the oldest message may wait while its query runs.
_LAG_LIMIT_S: Final = 120.0
#: Facts of each gateway of a line.
GatewaysOf: TypeAlias = Callable[[LineView], Iterable[GatewayFacts]]


class BridgeMonitor:
    """Metrics and health of a bridge; before it has a state it is alive and not ready.

    Args:
        gateway_names: Gateway name of each line that has one gateway of its own, by line.
        broker_queue: As in `towline.monitor.gateway.gateway_samples`.
    """

    def __init__(self, name: str, gateway_names: Mapping[str, str], broker_queue: int | None = None) -> None:
        self._name, self._gateway_names, self._broker_queue = name, gateway_names, broker_queue
        #: None before the bridge has started.
        self.state: BridgeState | None = None
        self._rate_meters: dict[tuple[str, str], RateMeter] = {}

    def set_state(self, state: BridgeState) -> None:
        """Set the state of a started bridge."""
        self.state = state

    def samples(self) -> Iterator[Sample]:
        """Return the bridge's metric samples of one moment."""
        if (state := self.state) is None:
            return iter(())
        with state.lock:
            return iter([*bridge_samples(state, self._gateways, time.time(), self._broker_queue)])

    def alive(self) -> tuple[bool, dict[str, Any]]:
        """Return the answer of ``/healthz``; gateways do not count, because the bridge restarts them itself."""
        is_stalled = self.state is not None and time.monotonic() - self.state.heartbeat > _LOOP_TIMEOUT_S
        return verdict("alive", [problem("the bridge's loop is stalled")] if is_stalled else [])

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Return the answer of ``/readyz``."""
        if (state := self.state) is None:
            return verdict("ready", [problem("the bridge is starting")])
        with state.lock:
            return verdict("ready", bridge_problems(state, self._gateways))

    def _gateways(self, view: LineView) -> Iterator[GatewayFacts]:
        """Yield the facts of each gateway of a line, without status if it does not answer. Needs the state's lock."""
        statuses = view.status.get("gateways") if view.gateways else None
        if statuses is None:
            statuses = {self._gateway_names.get(view.name, view.name): view.status}
        for name, status in statuses.items():
            reported_status = {} if AWAY_SINCE in status or view.is_silent else status
            facts = GatewayFacts(self._name, view.name, name, view.direction, reported_status)
            rate_meter = self._rate_meters.setdefault((view.name, name), RateMeter(RATE_WINDOW_S))
            yield facts.with_rates(rate_meter, time.monotonic())


def bridge_samples(
    state: BridgeState, gateways: GatewaysOf, now: float, broker_queue: int | None = None
) -> Iterator[Sample]:
    """Yield the samples of a bridge and its lines; `now` is in seconds since 1970. Calls `gateways` once a line."""
    derived_values = {
        "spark_running": int(state.spark == "running"),
        "spark_restarts": state.spark_restarts,
        "config_last_reload_successful": _RELOAD_SUCCESS.get(state.outcomes.get("", {}).get("outcome", "")),
        "kafka_reachable": None if state.kafka == "unknown" else int(state.kafka == "reachable"),
    }
    yield from status_samples(BRIDGE, (state.name,), derived_values)
    for view in state.lines.values():
        for gateway in gateways(view):
            yield from gateway_samples(gateway, now, broker_queue)
        yield from _line_samples((state.name, view.name, view.direction), view)


def _line_samples(labels: tuple[str, ...], view: LineView) -> Iterator[Sample]:
    derived_values: dict[str, Any] = {
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
        derived_values["account_adds_up"] = None if account.adds_up is None else int(account.adds_up)
        derived_values["guarantee_kept"] = int(not account.broken)
        for part, count in account.counts.items():
            yield Sample("towline_account_messages", (*labels, part), count)
    yield from status_samples(LINE, labels, {**counts, **derived_values})


def bridge_problems(state: BridgeState, gateways: GatewaysOf) -> Iterator[Problem]:
    """Yield the problems that make a bridge not ready."""
    if state.spark != "running":
        yield problem(f"spark is {state.spark}")
    if state.kafka != "reachable":
        yield problem(f"kafka is {state.kafka}")
    for view in state.lines.values():
        codes = tuple(dict.fromkeys(codes_in(f"{view.gateway_error or ''}{view.query_error or ''}")))
        for gateway in gateways(view):
            yield from readiness_problems(gateway, codes)
        yield from _line_problems(view, codes)


def _line_problems(view: LineView, codes: tuple[str, ...]) -> Iterator[Problem]:
    if view.query not in ("running", PAUSED):  # a paused line is as the user wants it
        yield problem(f"the query is {view.query}", view.name, codes=codes)
    elif view.lag_s() > _LAG_LIMIT_S and view.query != PAUSED:
        yield problem("the query delivers nothing: the oldest message waits too long", view.name)
    account = view.account
    if account is not None and account.disagreements:
        yield problem("the account does not add up", view.name)
    if account is not None and account.broken:
        yield problem("the guarantee was not kept", view.name)
