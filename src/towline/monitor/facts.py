"""What is known when somebody asks, as plain values: of gateways, of lines, of a bridge. Pure.

Samples are made of it (`towline.monitor.samples`), and a verdict (`towline.monitor.health`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from towline.timing import Histogram

if TYPE_CHECKING:
    from towline.bridge.lines.account import LineAccount

__all__ = ["BridgeFacts", "GatewayFacts", "LineFacts", "Pace"]


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
    account: LineAccount | None
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


#: The present rate is that of so many seconds: long enough to see past one burst.
WINDOW_S: Final = 300.0
#: Two looks nearer than this are one.
_APART_S: Final = 1.0


class _Look(NamedTuple):
    at: float
    messages: int
    bytes: int


class Pace:
    """The rates of one gateway over the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()

    def note(self, facts: GatewayFacts, at: float) -> None:
        """Note where a gateway's counters are, if it answers."""
        measured = (facts.status.get("measured") or {}).get("inbox" if facts.direction == "up" else "outbox")
        if measured is not None:
            self.look(at, int(facts.status.get("received") or 0), int(measured["bytes_written"]))

    def look(self, at: float, messages: int, size: int) -> None:
        """Note where its counters are; after a restart they begin anew.

        Args:
            at: Seconds, of any clock that does not go back.
            messages: Counted so far.
            size: Bytes of them.
        """
        looks = self._looks
        if looks and (messages < looks[-1].messages or size < looks[-1].bytes):
            looks.clear()
        if looks and at - looks[-1].at < _APART_S:
            return
        looks.append(_Look(at, messages, size))
        while len(looks) > 2 and at - looks[1].at >= WINDOW_S:
            looks.popleft()

    @property
    def rates(self) -> tuple[float, float] | None:
        """Messages and bytes a second; None before the second look."""
        if len(self._looks) < 2:
            return None
        first, last = self._looks[0], self._looks[-1]
        seconds = last.at - first.at
        return (last.messages - first.messages) / seconds, (last.bytes - first.bytes) / seconds
