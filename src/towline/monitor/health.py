"""Alive and ready: two verdicts, with what is wrong. Pure.

Alive says no only where a restart helps: a loop stands still. Ready says no while something that was promised is not
done; a restart mends none of that. A text of a broker or device is in neither, only codes that docs/errors.md explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from towline.bridge.runtime.state import PAUSED, BridgeState, LineView
from towline.errors import codes_in

if TYPE_CHECKING:
    from towline.monitor.gateway import GatewayFacts

__all__ = ["LOOP_S", "Problem", "bridge_alive", "bridge_ready", "gateway_alive", "gateway_ready", "verdict"]

#: A gateway's loop looks around once a minute, and may wait for a connection or a sync in between.
LOOP_S: Final = 120.0
#: That of a bridge does so four times a second.
_BEAT_S: Final = 60.0
#: A message that waits longer while its query runs is not carried.
_STALLED_S: Final = 120.0


class Problem(NamedTuple):
    """What is wrong.

    Attributes:
        what: In words of ours.
        line: Where, if it is one line.
        gateway: Where, if it is one gateway.
        codes: Of the errors behind it.
    """

    what: str
    line: str = ""
    gateway: str = ""
    codes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is empty is left out."""
        return {key: value for key, value in self._asdict().items() if value}


def verdict(key: str, problems: Iterable[Problem]) -> tuple[bool, dict[str, Any]]:
    """Whether there is nothing wrong, and the answer as JSON."""
    found = [problem.as_json() for problem in problems]
    return not found, {key: not found, "problems": found}


def bridge_alive(beat_s: float) -> Iterator[Problem]:
    """What a restart of the bridge may mend. A gateway is started again by the bridge itself.

    Args:
        beat_s: Seconds since its loop looked around.
    """
    if beat_s > _BEAT_S:
        yield Problem("the bridge's loop stands still")


def bridge_ready(state: BridgeState, gateways: Callable[[LineView], Iterable[GatewayFacts]]) -> Iterator[Problem]:
    """What of a bridge does not do what it was started for."""
    if state.spark != "running":
        yield Problem(f"spark is {state.spark}")
    if state.kafka != "reachable":
        yield Problem(f"kafka is {state.kafka}")
    for view in state.lines.values():
        codes = tuple(dict.fromkeys(codes_in(f"{view.gateway_error or ''}{view.query_error or ''}")))
        for gateway in gateways(view):
            yield from gateway_ready(gateway, codes)
        yield from _line(view, codes)


def _line(view: LineView, codes: tuple[str, ...]) -> Iterator[Problem]:
    if view.query not in ("running", PAUSED):  # that somebody paused it is as it was promised
        yield Problem(f"the query is {view.query}", view.name, codes=codes)
    elif view.lag_s() > _STALLED_S and view.query != PAUSED:
        yield Problem("the query carries nothing: the oldest message waits too long", view.name)
    account = view.account
    if account is not None and account.disagreements:
        yield Problem("the account does not add up", view.name)
    if account is not None and account.broken:
        yield Problem("the guarantee was not kept", view.name)


def gateway_alive(facts: GatewayFacts, *, silent_s: float) -> Iterator[Problem]:
    """What a restart of a gateway may mend.

    Args:
        facts: Of the gateway.
        silent_s: Seconds since it answered last; 0 before the first answer: it may be recovering, or stand by.
    """
    age = float(facts.status.get("turned_s") or 0)
    if age > LOOP_S:
        yield Problem("the gateway's loop stands still", facts.line, facts.name)
    elif not facts.up and silent_s > LOOP_S:
        yield Problem("the gateway does not answer", facts.line, facts.name)


def gateway_ready(facts: GatewayFacts, codes: tuple[str, ...] = ()) -> Iterator[Problem]:
    """What keeps a gateway from receiving, or sending."""
    code = (facts.status.get("last_error") or {}).get("code")
    codes = tuple(dict.fromkeys((*codes, *((code,) if code else ()))))
    if not facts.up:
        yield Problem("the gateway does not answer", facts.line, facts.name, codes)
    elif not facts.online:
        yield Problem("no session with the broker", facts.line, facts.name, codes)
    elif (held := facts.status.get("held_back")) and held != "window full":
        yield Problem(f"nothing is read from the broker: {held}", facts.line, facts.name, codes)
    elif (facts.status.get("outbox") or {}).get("held_back"):
        yield Problem("nothing is sent: there is no room, or the promise can't hold", facts.line, facts.name, codes)
