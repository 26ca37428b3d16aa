"""A bridge of which everything is known, for the tests that look at what is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from towline.bridge.lines.account import AccountPart, LineAccount
from towline.bridge.runtime.state import APPLIED, LineView
from towline.monitor.bridge import bridge_problems, bridge_samples
from towline.monitor.gateway import GatewayFacts, Problem
from towline.monitor.table import Sample
from towline.timing import BATCH_BUCKETS, Histogram


def _measured() -> dict[str, Any]:
    return {
        "syncs": Histogram().as_json(),
        "bytes_written": 5000,
        "bytes_on_disk": 4000,
        "bytes_waiting": 300,
        "room_left": 10_000,
    }


#: What a gateway says that receives.
UP_STATUS: dict[str, Any] = {
    "name": "gw",
    "journal": "j",
    "state": "online",
    "connects": 3,
    "last_error": None,
    "held_back": None,
    "received": 100,
    "journaled": 98,
    "committed": 90,
    "waiting": 8,
    "oldest": 1_700_000_000.0,
    "acknowledged": 97,
    "redelivered": 2,
    "unacknowledged": 3,
    "receive_maximum": 10,
    "turned_s": 0.5,
    "deduplicated": 1,
    "packets_too_large": 1,
    "too_many_properties": 1,
    "lower_qos": 4,
    "sessions_lost": 1,
    "window_overruns": 0,
    "outbox": None,
    "measured": {"inbox": _measured(), "outbox": _measured()},
}
DOWN_STATUS: dict[str, Any] = {
    **UP_STATUS,
    "outbox": {
        "accepted": 15,
        "queued": 3,
        "in_flight": 2,
        "delivered": 7,
        "expired": 2,
        "refused": 1,
        "replayed": 1,
        "degraded": 1,
        "resent_after_lost_session": 1,
        "held_back": None,
        "window": 20,
        "window_open": 2,
    },
}
_PARTS = {"filtered": 1, "undecided": 1, "unrouted": 2, "skipped": 3, "lost": 2, "dead_lettered": 4, "deduplicated": 5}
_MORE = {"behind": 7, "hidden": 3}
_COUNTS = {"received": 100, "in_kafka": 80, **_PARTS, "waiting": 8}
SOUND = LineAccount({name: AccountPart("", count) for name, count in _COUNTS.items()}, more=_MORE)


@dataclass(frozen=True)
class Known:
    """A bridge, and what its gateways say."""

    state: Any
    gateways: Mapping[str, Sequence[GatewayFacts]]

    def samples(self, now: float, queue: int | None = None) -> Iterator[Sample]:
        return bridge_samples(self.state, lambda view: self.gateways[view.name], now, queue)

    def problems(self) -> Iterator[Problem]:
        return bridge_problems(self.state, lambda view: self.gateways[view.name])


def a_gateway(
    direction: str = "up", status: Mapping[str, Any] = UP_STATUS, rates: tuple[float, float] | None = (10.0, 100.0)
) -> GatewayFacts:
    return GatewayFacts("b", "line", "gw", direction, status, rates)


def a_line(name: str, direction: str, account: LineAccount | None, **more: Any) -> Any:
    """As a `LineView` shows itself; its account is what it is said to be."""
    batches = LineView(name, direction, batch_at=1_700_000_050.0)
    told = {"query": "running", "lag_s": lambda: 0.0, "notes": None, **more}
    names = ("batches", "batch_at", "restarts", "gateway_restarts", "gateway_error", "query_error")
    known = {one: getattr(batches, one) for one in names}
    return SimpleNamespace(name=name, direction=direction, account=account, **known | told)


def a_bridge(
    *gateways: GatewayFacts,
    up: bool = True,
    status: Mapping[str, Any] = UP_STATUS,
    rates: tuple[float, float] | None = (10.0, 100.0),
    account: LineAccount | None = SOUND,
    query: str = "running",
    kafka: str = "reachable",
    spark: str = "running",
    lag_s: float = 0.0,
    error: str | None = None,
    direction: str = "up",
    spark_restarts: int = 0,
) -> Known:
    """One line; with another direction the second line of a bridge that has both."""
    known = {"line": gateways or (a_gateway(status=status if up else {}, rates=rates),)}
    notes = SimpleNamespace(totals=SimpleNamespace(histogram=Histogram(BATCH_BUCKETS)))
    more = {"query": query, "lag_s": lambda: lag_s, "query_error": error, "notes": notes}
    lines = {"line": a_line("line", direction, account, **more)}
    if not gateways and up and status is UP_STATUS:
        lines["back"] = a_line("back", "down", SOUND)
        known["back"] = (GatewayFacts("b", "back", "back", "down", DOWN_STATUS, (10.0, 100.0)),)
    told = {"spark": spark, "kafka": kafka, "spark_restarts": spark_restarts, "outcomes": {"": {"outcome": APPLIED}}}
    return Known(SimpleNamespace(name="b", lines=lines, **told), known)
