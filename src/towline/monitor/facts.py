"""What is known when somebody asks, as plain values: of gateways, of lines, of a bridge. Pure.

Samples are made of it (`towline.monitor.samples`), and a verdict (`towline.monitor.health`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.timing import Histogram

__all__ = ["AccountFacts", "BridgeFacts", "GatewayFacts", "LineFacts"]


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """A gateway.

    Attributes:
        bridge: Whose.
        line: Whose.
        name: Of the gateway.
        direction: ``up`` or ``down``.
        status: Its answer to the action ``status``; empty while it does not answer.
        rates: Messages and bytes a second that came lately; None before that is known.
    """

    bridge: str
    line: str
    name: str
    direction: str
    status: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, float] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Values of `towline.monitor.table.GATEWAY`."""
        return (self.bridge, self.line, self.name, self.direction)

    @property
    def up(self) -> bool:
        """It answers."""
        return bool(self.status)

    @property
    def online(self) -> bool:
        """Its session with the broker is."""
        return self.status.get("state") == "online"


@dataclass(frozen=True, slots=True)
class AccountFacts:
    """The account of a line.

    Attributes:
        adds_up: The verdict.
        broken: The guarantee was not kept.
        parts: Messages of each part.
        behind: Offsets in Kafka that were not taken; None for not known.
    """

    adds_up: bool
    broken: bool
    parts: Mapping[str, int]
    behind: int | None = None


@dataclass(frozen=True, slots=True)
class LineFacts:
    """A line.

    Attributes:
        bridge: Whose.
        name: Of the line.
        direction: ``up`` or ``down``.
        query: ``running``, or what else (`towline.bridge.runtime.state.LineView`).
        gateways: Its gateways.
        account: None while it is not known.
        codes: Of what is wrong now, such as ``TL-M01``.
        query_restarts: How often it failed.
        gateway_restarts: How often its gateway was started again.
        batches: How long they took.
        transactions: How long they were open.
        batch_at: When the last one was committed; None before the first.
        lag_s: Age of the oldest waiting message.
    """

    bridge: str
    name: str
    direction: str
    query: str
    gateways: Sequence[GatewayFacts]
    account: AccountFacts | None
    codes: Sequence[str] = ()
    query_restarts: int = 0
    gateway_restarts: int = 0
    batches: Histogram | None = None
    transactions: Histogram | None = None
    batch_at: float | None = None
    lag_s: float = 0.0

    @property
    def labels(self) -> tuple[str, ...]:
        """Values of `towline.monitor.table.LINE`."""
        return (self.bridge, self.name, self.direction)


@dataclass(frozen=True, slots=True)
class BridgeFacts:
    """A bridge.

    Attributes:
        name: Of the bridge.
        spark: ``running``, or what else.
        kafka: ``reachable``, ``unreachable`` or ``unknown``.
        beat_s: Seconds since its loop looked around.
        lines: Its lines.
        spark_restarts: How often the driver was started again.
        reloaded: Whether the last reload of the file was taken up; None before the first, and while one is under way.
    """

    name: str
    spark: str
    kafka: str
    beat_s: float
    lines: Sequence[LineFacts]
    spark_restarts: int = 0
    reloaded: bool | None = None
