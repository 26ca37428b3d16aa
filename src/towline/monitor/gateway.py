"""What a gateway says of itself: its samples, its verdicts, and the endpoint of one that runs alone.

Alive says no only where a restart helps: a loop stands still. Ready says no while something that was promised is not
done; a restart mends none of that. A text of a broker or device is in neither, only codes that docs/errors.md explains.

The endpoint asks the gateway beside it, as `towline status` does: through its socket it sees more than by looking into
it, since a gateway that answers nobody is not up.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from towline.bridge.lines.evidence import gateway_status
from towline.guarantee import AckAfter
from towline.monitor.table import GATEWAY, Sample, read
from towline.timing import Histogram, Pace

#: The present rate is that of so many seconds: long enough to see past one burst.
WINDOW_S: Final = 300.0
#: Reason of holding back → what a gateway says.
_HELD: Final = {"journal": "journal full", "window": "window full"}
#: A gateway's loop looks around once a minute, and may wait for a connection or a sync in between.
LOOP_S: Final = 120.0
#: What is wrong, as JSON values: ``what``, in words of ours; ``line`` and ``gateway``, where it is one; ``codes`` of
#: the errors.
Problem: TypeAlias = dict[str, Any]


def problem(what: str, line: str = "", gateway: str = "", codes: tuple[str, ...] = ()) -> Problem:
    """A problem, without what is empty."""
    values = {"what": what, "line": line, "gateway": gateway, "codes": codes}
    return {key: value for key, value in values.items() if value}


def verdict(key: str, problems: Iterable[Problem]) -> tuple[bool, dict[str, Any]]:
    """Whether there is nothing wrong, and the answer as JSON."""
    found = [*problems]
    return not found, {key: not found, "problems": found}


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """A gateway.

    Attributes:
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

    @property
    def measured(self) -> Mapping[str, Any]:
        """What it says of the journal whose rows wait, `towline.journal.Journal.measured`; empty where it does not."""
        return (self.status.get("measured") or {}).get("inbox" if self.direction == "up" else "outbox") or {}

    def at_pace(self, pace: Pace, at: float) -> Self:
        """The same with its present rates, once its counters are noted at a time of `time.monotonic`, if it answers."""
        if self.measured:
            pace.look(at, int(self.status.get("received") or 0), int(self.measured["bytes_written"]))
        return replace(self, rates=pace.rates)


class GatewayMonitor:
    """What a gateway shows."""

    def __init__(self, facts: GatewayFacts, state_dir: Path, queue: int | None = None) -> None:
        self._facts, self._state_dir, self._queue = facts, state_dir, queue
        self._lock = threading.Lock()
        #: When it answered last; None before the first answer.
        self._heard_at: float | None = None
        self._pace = Pace(WINDOW_S)

    def facts(self) -> GatewayFacts:
        """What is known now."""
        with self._lock:
            status, now = gateway_status(self._state_dir), time.monotonic()
            if status is not None:
                self._heard_at = now
            return replace(self._facts, status=status or {}).at_pace(self._pace, now)

    def samples(self) -> Iterator[Sample]:
        """All of it."""
        return of_gateway(self.facts(), time.time(), self._queue)

    def alive(self) -> tuple[bool, dict[str, Any]]:
        """What ``/healthz`` says."""
        facts = self.facts()
        silent = 0.0 if self._heard_at is None else time.monotonic() - self._heard_at
        return verdict("alive", gateway_alive(facts, silent_s=silent))

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """What ``/readyz`` says."""
        return verdict("ready", gateway_ready(self.facts()))


def of_gateway(facts: GatewayFacts, now: float, queue: int | None = None) -> Iterator[Sample]:
    """What a gateway says of itself, at a time since 1970.

    `queue` is how many messages the broker keeps for this client while it is away; None where that is not known.
    """
    labels, status, down = facts.labels, facts.status, facts.direction == "down"
    if not facts.up:
        yield Sample("towline_gateway_up", labels, 0)
        return
    for name, told in (status.get("measured") or {}).items():
        yield Sample("towline_journal_written_bytes_total", (*labels, name), int(told["bytes_written"]))
        yield Sample("towline_journal_size_bytes", (*labels, name), int(told["bytes_on_disk"]))
        yield Sample("towline_fdatasync_seconds", (*labels, name), Histogram.from_json(told["syncs"]))
    for reason, text in () if down else _HELD.items():
        yield Sample("towline_intake_held_back", (*labels, reason), int(status.get("held_back") == text))
    known = {**status, **((down and status.get("outbox")) or {})}
    used, limit = map(known.get, ("window_open", "window") if down else ("unacknowledged", "receive_maximum"))
    waits = any(map(known.get, ("queued", "in_flight") if down else ("waiting",)))
    oldest = status.get("oldest") if waits else None
    worked_out: dict[str, Any] = {
        "gateway_up": 1,
        "broker_connected": int(facts.online),
        "reconnects": max(0, int(status.get("connects") or 0) - 1),
        "waiting_bytes": facts.measured.get("bytes_waiting"),
        "window_use_ratio": used / limit if used is not None and limit else None,
        "oldest_waiting_seconds": 0.0 if oldest is None else max(0.0, now - float(oldest)),
    }
    if facts.rates is not None:
        messages, size = facts.rates
        room = facts.measured.get("room_left")
        if room is not None and status.get("ack_after") != AckAfter.KAFKA:  # else the window ends it
            worked_out["outage_budget_intake_seconds"] = budget(room, size)
        if queue is not None and not down:
            worked_out["outage_budget_broker_seconds"] = budget(queue, messages)
    yield from read(GATEWAY, labels, {**known, **worked_out}, str(status.get("journal")), down=down)


def budget(room: float, rate: float) -> float:
    """Seconds until `room` is used up at `rate`; 0 without room, infinite while nothing comes."""
    if room <= 0:
        return 0.0
    return room / rate if rate > 0 else math.inf


def gateway_alive(facts: GatewayFacts, *, silent_s: float) -> Iterator[Problem]:
    """What a restart of a gateway may mend, which answered last so many seconds ago.

    0 before the first answer: it may be recovering, or stand by.
    """
    age = float(facts.status.get("turned_s") or 0)
    if age > LOOP_S:
        yield problem("the gateway's loop stands still", facts.line, facts.name)
    elif not facts.up and silent_s > LOOP_S:
        yield problem("the gateway does not answer", facts.line, facts.name)


def gateway_ready(facts: GatewayFacts, codes: tuple[str, ...] = ()) -> Iterator[Problem]:
    """What keeps a gateway from receiving, or sending."""
    code = (facts.status.get("last_error") or {}).get("code")
    codes = tuple(dict.fromkeys((*codes, *((code,) if code else ()))))
    if not facts.up:
        yield problem("the gateway does not answer", facts.line, facts.name, codes)
    elif not facts.online:
        yield problem("no session with the broker", facts.line, facts.name, codes)
    elif (held := facts.status.get("held_back")) and held != "window full":
        yield problem(f"nothing is read from the broker: {held}", facts.line, facts.name, codes)
    elif (facts.status.get("outbox") or {}).get("held_back"):
        yield problem("nothing is sent: there is no room, or the promise can't hold", facts.line, facts.name, codes)
