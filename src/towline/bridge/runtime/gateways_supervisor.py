"""Asks the gateways of a line that run elsewhere how they are; it starts and ends none."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from towline.backoff import Backoff
from towline.bridge.lines.elsewhere import (
    AWAY,
    away_text,
    away_trouble,
    combined,
    each,
    is_refused,
    places_of,
)
from towline.bridge.runtime.gateway_supervisor import ASK_S, grown
from towline.bridge.runtime.supervision import ChildSupervisor
from towline.errors import GatewayError

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge, Line
    from towline.bridge.runtime.state import BridgeState, LineView
    from towline.errors import TowlineError

__all__ = ["GatewaysSupervisor"]

#: A gateway that lets nobody in is told of again after so many seconds: only a person ends that.
_REMIND_S: Final = 60.0


class GatewaysSupervisor(ChildSupervisor):
    """Knows the account of a line over several gateways.

    Args:
        line: Whose gateways.
        bridge: The file, for what lets the bridge in.
        state: Where their status goes.
        stopping: Set when the bridge ends.
    """

    what = "the gateways"

    def __init__(self, line: Line, bridge: Bridge, state: BridgeState, stopping: threading.Event) -> None:
        super().__init__(name=f"gateways {line.name}", daemon=True)
        self.line = line
        self.where = f'line "{line.name}"'
        #: Only a person could mend a gateway elsewhere, and it is waited for: nothing here ends the line.
        self.fatal: TowlineError | None = None
        self._state = state
        self._stopping = stopping
        access = bridge.gateway.access()
        self._places = places_of(line.gateways, access)
        self._pauses = Backoff(first=0.5, most=15.0)
        #: What was wrong at each gateway when it was said last, and when that was.
        self._trouble: dict[str, tuple[str, float]] = {}
        self._view.gateways, self._view.access = line.gateways, asdict(access)

    @property
    def wanted(self) -> bool:
        """Until the bridge ends."""
        return not self._stopping.is_set()

    def end(self, *, at_once: bool = False) -> None:
        """Nothing: they are not ours."""

    def look(self) -> None:
        """Ask each once."""
        self._view.asks()
        answers = each(self._places, lambda client: client.status(timeout_s=5.0))
        silent = [answer for answer in answers.values() if isinstance(answer, GatewayError)]
        status = combined(answers, self._view.status or self._view.before)
        with self._state.lock:
            self._view.gateway_error = str(silent[0]) if status["state"] == "away" else None
            if self._view.gateway_error is None:
                self._view.hear(status)
        self._tell(status)

    @property
    def _view(self) -> LineView:
        return self._state.lines[self.line.name]

    def _round(self) -> None:
        self.look()
        self._pauses.reset()
        self._stopping.wait(ASK_S)

    def _tell(self, status: Mapping[str, Any]) -> None:
        """Say what has changed at each gateway since it was said last."""
        before = self._view.before.get("gateways") or {}
        for name, part in status["gateways"].items():
            kind = _kind(name, part)
            said, at = self._trouble.get(name, (None, 0.0))
            if kind != said or (is_refused(part) and time.monotonic() - at > _REMIND_S):
                well = f"gateway {name} is there, and {part.get('state')}"
                self._say(away_trouble(name, part) if AWAY in part else kind or well)
                self._trouble[name] = kind, time.monotonic()
            for event in grown(before.get(name, {}), part) if AWAY not in part else ():
                self._say(f"gateway {name}: {event}")
        self._view.before = status

    def _say(self, text: str) -> None:
        self._state.say(text if self.where in text else f"{self.where}: {text}")

    def _failed(self, error: TowlineError) -> None:
        if self._stopping.is_set():
            return
        with self._state.lock:
            fresh = self._view.gateway_error != str(error)
            self._view.gateway_error = str(error)
        if fresh:
            self._say(str(error))
        self._stopping.wait(self._pauses.next())


def _kind(name: str, part: Mapping[str, Any]) -> str:
    """What there is to say of a gateway; "" where all is well."""
    if AWAY in part:
        return away_text(name, part)
    return str((part.get("last_error") or {}).get("text", ""))
