"""A bridge of which everything is known, for the tests that look at what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.bridge.lines.account import AccountWords, LineAccount
from towline.monitor.facts import BridgeFacts, GatewayFacts, LineFacts
from towline.timing import BATCHES, Histogram


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
_PARTS = {
    "filtered": 1,
    "undecided": 1,
    "unrouted": 2,
    "skipped": 3,
    "lost": 2,
    "dead_lettered": 4,
    "deduplicated": 5,
}
_MORE = {"behind": 7, "hidden": 3}
SOUND = LineAccount(AccountWords("received", "in_kafka", "in Kafka", {}), 100, 80, 8, _PARTS, more=_MORE)


def a_gateway(
    direction: str = "up", status: Mapping[str, Any] = UP_STATUS, rates: tuple[float, float] | None = (10.0, 100.0)
) -> GatewayFacts:
    return GatewayFacts("b", "line", "gw", direction, status, rates)


def a_bridge(
    *gateways: GatewayFacts,
    up: bool = True,
    status: Mapping[str, Any] = UP_STATUS,
    rates: tuple[float, float] | None = (10.0, 100.0),
    account: LineAccount | None = SOUND,
    query: str = "running",
    kafka: str = "reachable",
    spark: str = "running",
    beat_s: float = 0.1,
    lag_s: float = 0.0,
    codes: tuple[str, ...] = (),
    direction: str = "up",
) -> BridgeFacts:
    """One line; with another direction the second line of a bridge that has both."""
    known = gateways or (a_gateway(status=status if up else {}, rates=rates),)
    line = LineFacts(
        "b",
        "line",
        direction,
        query,
        known,
        account,
        codes=codes,
        batches=Histogram(BATCHES),
        transactions=Histogram(BATCHES),
        batch_at=1_700_000_050.0,
        lag_s=lag_s,
    )
    lines = [line]
    if not gateways and up and status is UP_STATUS:
        lines.append(LineFacts("b", "back", "down", "running", [_back()], SOUND))
    return BridgeFacts("b", spark, kafka, beat_s, lines, reloaded=True)


def _back() -> GatewayFacts:
    return GatewayFacts("b", "back", "back", "down", DOWN_STATUS, (10.0, 100.0))
