"""Keeps the gateway of a line running, and asks it, or those of the line that run elsewhere, how they are."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from towline.bridge.config.model import AnyLine, Bridge, Line
from towline.bridge.lines.evidence import (
    AWAY,
    away_text,
    away_trouble,
    combined,
    each,
    is_refused,
    places_of,
    status_of,
)
from towline.bridge.lines.notes import LineNotes
from towline.bridge.lines.recovery import refused
from towline.bridge.runtime.members import is_drained, wanted_clients
from towline.bridge.runtime.state import BridgeState, LineView, notes_of
from towline.bridge.runtime.supervision import ChildSupervisor
from towline.errors import (
    ConfigError,
    GatewayError,
    JournalDamaged,
    JournalLocked,
    KafkaError,
    Refused,
    SessionUnknown,
    TowlineError,
    stays,
)
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.launch import ensure
from towline.guarantee import AckAfter
from towline.mqtt.reasons import KEEP_SESSIONS
from towline.text import counted

#: Seconds between two questions to a gateway.
ASK_S: Final = 0.5
#: A gateway that leaves questions unanswered this often is looked for again.
_SILENCES: Final = 3
#: What a person has to mend before another try makes sense.
_FATAL: Final = (ConfigError, Refused, SessionUnknown, JournalLocked, JournalDamaged)
#: A gateway that lets nobody in is told of again after so many seconds: only a person ends that.
_REMIND_S: Final = 60.0


class LineSupervisor(ChildSupervisor):
    """Knows the account of a line, by what its gateway or its gateways say.

    Args:
        line: Whose.
        bridge: The file, for messages, and for what a gateway needs of it.
        state: Where their status goes.
        stopping: Set when the bridge ends.
    """

    def __init__(self, line: AnyLine, bridge: Bridge, state: BridgeState, stopping: threading.Event) -> None:
        super().__init__(f"gateway {line.name}", state, stopping, 15.0)
        self.line, self._bridge = line, bridge
        self.where = f'line "{line.name}"'
        #: Set once the gateway has answered.
        self.up = threading.Event()
        #: Another supervisor looks after the line's gateways from now on.
        self.replaced = False

    @property
    def wanted(self) -> bool:
        """Until another takes its place, too."""
        return super().wanted and not self.replaced

    def end(self, deadline: float) -> None:
        """Nothing: gateways elsewhere are not ours to end."""

    @property
    def _view(self) -> LineView:
        return self._state.lines[self.line.name]

    def _hear(self, status: Mapping[str, Any], notes: LineNotes | None) -> None:
        """Take an answer; the first dead letters of a run are mentioned, the others are in the account."""
        with self._state.lock:
            letters = self._view.hear(status, notes)
        if letters:
            self._say(f"{counted(letters)} went to the dead-letter topic; towline dlq show tells why")

    def _say(self, text: str) -> None:
        """Tell an event, and whose it is; a gateway begins its errors with the name of its line."""
        text = text.removeprefix(f"{self.line.name} at ").removeprefix(f"{self.line.name}: ")
        self._state.say(text if self.where in text else f"{self.where}: {text}")

    def _failed(self, error: TowlineError) -> None:
        if self._stopping.is_set() or self.replaced:
            return
        with self._state.lock:
            fresh = self._view.gateway_error != str(error)
            self._view.gateway_error = str(error)
        if fresh:
            self._say(str(error))
        if self.fatal is None:
            self._stopping.wait(self._pauses.next())


class GatewaySupervisor(LineSupervisor):
    """Keeps one line's gateway running and knows its account; as `LineSupervisor`."""

    what = "the gateway"
    #: What the gateway said last was wrong with it; None before its first answer.
    _trouble: str | None = None

    def _round(self) -> None:
        if not self.up.is_set():
            self._see_that_its_sink_is_free()
        log = self._bridge.logs / f"gateway-{self.line.name}.log"
        with ensure(self.line.gateway, owner_pid=os.getpid(), log=log) as client:
            self._online()
            self._ask(client)

    def _see_that_its_sink_is_free(self) -> None:
        """Of a line that begins, while nothing was taken in; Kafka may be away [I7]."""
        from towline.bridge.runtime.reconciling import foreign_marker  # noqa: PLC0415 - loads librdkafka

        with contextlib.suppress(KafkaError):
            if (error := foreign_marker(self._bridge, self.line)) is not None:
                raise error

    def end(self, deadline: float) -> None:
        """End a gateway that is ours: it acknowledges what is safe and leaves its session alive.

        One that has not ended by `deadline` (`time.monotonic`) is killed: what it has acknowledged is on disk [I2].
        """
        endpoint = GatewayEndpoint.read(self.line.gateway.state_dir)
        if endpoint is None or endpoint.owner_pid != os.getpid() or not endpoint.process.runs_here():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(endpoint.pid, signal.SIGTERM)
            while not endpoint.process.gone() and time.monotonic() < deadline:
                time.sleep(0.02)
            if not endpoint.process.gone():
                os.kill(endpoint.pid, signal.SIGKILL)

    def _online(self) -> None:
        again = self.up.is_set()
        self.up.set()
        with self._state.lock:
            self._view.gateway_error = None
            self._view.gateway_restarts += again
        if again:
            place = "in Kafka" if self.line.gateway.acks is AckAfter.KAFKA else "on disk"
            self._say(f"the gateway is back; what it had acknowledged is {place}")

    def _ask(self, client: GatewayClient) -> None:
        silent = 0
        while not self._stopping.wait(ASK_S):
            try:
                notes = notes_of(self._view.directory)
                status = client.status(timeout_s=5.0)
            except GatewayError:
                silent += 1
                gone = self._gone()
                if gone:
                    self._see_whether_drained()
                if silent >= _SILENCES or gone:
                    if self.wanted:
                        self._say("the gateway has ended; starting it again")
                    return
                continue
            silent = 0
            self._pauses.reset()
            self._take(status, notes)

    def _see_whether_drained(self) -> None:
        """A gateway that has left its line is not started again, for it would take part: TL-G55."""
        if self._view.status.get("drain") and is_drained(self.line.gateway.state_dir, wanted_clients(self.line)):
            what = "its gateway was drained while it ran, and is not started again"
            raise GatewayError("TL-G55", self.where, what, "Start towline run again, and it takes part.")

    def _gone(self) -> bool:
        endpoint = GatewayEndpoint.read(self.line.gateway.state_dir)
        return endpoint is None or endpoint.process.gone()

    def _take(self, status: dict[str, Any], notes: LineNotes | None) -> None:
        self._hear(status, notes)
        trouble = (status.get("last_error") or {}).get("text", "")
        if trouble != self._trouble and (trouble or status.get("state") == "online"):
            full = "[TL-J" in (self._trouble or "")
            self._trouble = trouble
            again = "there is room again, and messages are received"
            self._say(trouble or (again if full else f"connected to {status.get('broker')}"))
        for event in _grown(self._view.before, status):
            self._say(event)
        self._view.before = status

    def _failed(self, error: TowlineError) -> None:
        if not self.wanted:
            return
        error = refused(self.line, self._bridge.file, error) or error
        fatal = isinstance(error, _FATAL) and not self.up.is_set()
        if stays(error.code) or fatal:
            self.fatal = error
        if error.code == "TL-G55" and self.line.gateway.drain_s is not None:
            return  # as it was asked to
        super()._failed(error)


class GatewaysSupervisor(LineSupervisor):
    """Asks the gateways of a line that run elsewhere how they are; it starts and ends none; as `LineSupervisor`."""

    what = "the gateways"

    def __init__(self, line: Line, bridge: Bridge, state: BridgeState, stopping: threading.Event) -> None:
        super().__init__(line, bridge, state, stopping)
        access = bridge.gateway.access()
        self._places = places_of(line.gateways, access)
        #: What was wrong at each gateway when it was said last, and when that was.
        self._trouble: dict[str, tuple[str, float]] = {}
        self._view.gateways, self._view.access = line.gateways, asdict(access)

    def look(self) -> None:
        """Ask each once."""
        notes = notes_of(self._view.directory)
        answers = each(self._places, status_of)
        silent = [answer for answer in answers.values() if isinstance(answer, GatewayError)]
        status = combined(answers, self._view.status or self._view.before)
        with self._state.lock:
            self._view.gateway_error = str(silent[0]) if status["state"] == "away" else None
        if self._view.gateway_error is None:
            self._hear(status, notes)
        self._tell(status)

    def _round(self) -> None:
        self.look()
        self.up.set()
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
            for event in _grown(before.get(name, {}), part) if AWAY not in part else ():
                self._say(f"gateway {name}: {event}")
        self._view.before = status


def _kind(name: str, part: Mapping[str, Any]) -> str:
    """What there is to say of a gateway; "" where all is well."""
    if AWAY in part:
        return away_text(name, part)
    return str((part.get("last_error") or {}).get("text", ""))


def _grown(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What a gateway counts only when a promise is at stake, said when it happens: once for what may come in crowds."""
    if now.get("sessions_lost", 0) > before.get("sessions_lost", 0):
        what = "the broker lost this client's session, and every message that only the session held"
        yield f"{what}. {(now.get('session_lost') or {}).get('do', KEEP_SESSIONS)}   [TL-M22]"
    first, degraded = ((status.get("outbox") or {}).get("degraded", 0) for status in (before, now))
    if degraded and not first:
        what = "the broker answers QoS 2 as if it were QoS 1: from now on a message may be doubled"
        yield f'{what}. Take a broker with QoS 2, or guarantee = "at_least_once".   [TL-B58]'
