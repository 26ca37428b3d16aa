"""Metrics and health of a gateway, and the endpoint of a gateway that runs alone.

``/healthz`` fails only where a restart helps: a stalled loop. ``/readyz`` fails while a promise is not met, which a
restart does not fix. Neither shows a text of a broker or device, only codes that docs/errors.md explains.

The endpoint asks the gateway over its socket, as `towline status` does: a gateway that does not answer is not up.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from towline.bridge.lines.statuses import gateway_status
from towline.guarantee import AckAfter
from towline.monitor.table import GATEWAY, Sample, status_samples
from towline.timing import Histogram, RateMeter

#: Seconds of the present rate: long enough to level one burst.
RATE_WINDOW_S: Final = 300.0
#: Label ``reason`` of throttled intake → ``held_back`` in a gateway's status.
_THROTTLE_REASONS: Final = {"journal": "journal full", "window": "window full"}
#: A gateway's loop turns once a minute, and may wait for a connection or a sync in between.
LOOP_TIMEOUT_S: Final = 120.0
#: Problem as JSON values: ``what``, a fixed text; ``line`` and ``gateway``, if it belongs to one; ``codes`` of the
#: errors.
Problem: TypeAlias = dict[str, Any]


def problem(text: str, line: str = "", gateway: str = "", codes: tuple[str, ...] = ()) -> Problem:
    """Return a health problem as JSON values; empty ones are omitted."""
    values = {"what": text, "line": line, "gateway": gateway, "codes": codes}
    return {key: value for key, value in values.items() if value}


def verdict(key: str, problems: Iterable[Problem]) -> tuple[bool, dict[str, Any]]:
    """Return the health verdict, True without problems, and its JSON answer."""
    problem_list = [*problems]
    return not problem_list, {key: not problem_list, "problems": problem_list}


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """Labels and last status of a gateway.

    Attributes:
        direction: ``up`` or ``down``.
        status: Answer to the action ``status``; empty if the gateway does not answer.
        rates: Messages and bytes received per second lately; None while unknown.
    """

    bridge: str
    line: str
    name: str
    direction: str
    status: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, float] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Values of the labels `towline.monitor.table.GATEWAY`."""
        return (self.bridge, self.line, self.name, self.direction)

    @property
    def up(self) -> bool:
        """True if the gateway answers."""
        return bool(self.status)

    @property
    def online(self) -> bool:
        """True if its session with the broker is online."""
        return self.status.get("state") == "online"

    @property
    def disk_status(self) -> Mapping[str, Any]:
        """Disk status of the inbox (up) or outbox (down), as the journal reports it; empty if unknown."""
        return (self.status.get("measured") or {}).get("inbox" if self.direction == "up" else "outbox") or {}

    def with_rates(self, rate_meter: RateMeter, now: float) -> Self:
        """Add the counters at `now` (`time.monotonic`) to the meter; return the facts with its rates."""
        if self.disk_status:
            rate_meter.sample(now, int(self.status.get("received") or 0), int(self.disk_status["bytes_written"]))
        return replace(self, rates=rate_meter.rates)


class GatewayMonitor:
    """Metrics and health of one gateway."""

    def __init__(self, facts: GatewayFacts, state_dir: Path, broker_queue: int | None = None) -> None:
        self._facts, self._state_dir, self._broker_queue = facts, state_dir, broker_queue
        self._lock = threading.Lock()
        #: Time of the last answer; None before the first.
        self._answered_at: float | None = None
        self._rate_meter = RateMeter(RATE_WINDOW_S)

    def facts(self) -> GatewayFacts:
        """Ask the gateway for its present status."""
        with self._lock:
            status, now = gateway_status(self._state_dir), time.monotonic()
            if status is not None:
                self._answered_at = now
            return replace(self._facts, status=status or {}).with_rates(self._rate_meter, now)

    def samples(self) -> Iterator[Sample]:
        """Return the gateway's metric samples."""
        return gateway_samples(self.facts(), time.time(), self._broker_queue)

    def alive(self) -> tuple[bool, dict[str, Any]]:
        """Return the answer of ``/healthz``."""
        facts = self.facts()
        silent_s = 0.0 if self._answered_at is None else time.monotonic() - self._answered_at
        return verdict("alive", liveness_problems(facts, silent_s=silent_s))

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Return the answer of ``/readyz``."""
        return verdict("ready", readiness_problems(self.facts()))


def gateway_samples(facts: GatewayFacts, now: float, broker_queue: int | None = None) -> Iterator[Sample]:
    """Yield the samples of a gateway; `now` is in seconds since 1970.

    `broker_queue` is how many messages the broker queues for this client while it is offline; None if unknown.
    """
    labels, status, is_downlink = facts.labels, facts.status, facts.direction == "down"
    if not facts.up:
        yield Sample("towline_gateway_up", labels, 0)
        return
    for journal_name, disk_status in (status.get("measured") or {}).items():
        yield Sample("towline_journal_written_bytes_total", (*labels, journal_name), int(disk_status["bytes_written"]))
        yield Sample("towline_journal_size_bytes", (*labels, journal_name), int(disk_status["bytes_on_disk"]))
        yield Sample("towline_fdatasync_seconds", (*labels, journal_name), Histogram.from_json(disk_status["syncs"]))
    for reason, text in () if is_downlink else _THROTTLE_REASONS.items():
        yield Sample("towline_intake_held_back", (*labels, reason), int(status.get("held_back") == text))
    values = {**status, **((is_downlink and status.get("outbox")) or {})}
    has_waiting = any(map(values.get, ("queued", "in_flight") if is_downlink else ("waiting",)))
    oldest = status.get("oldest") if has_waiting else None
    derived_values: dict[str, Any] = {
        "gateway_up": 1,
        "broker_connected": int(facts.online),
        "reconnects": max(0, int(status.get("connects") or 0) - 1),
        "waiting_bytes": facts.disk_status.get("bytes_waiting"),
        "oldest_waiting_seconds": 0.0 if oldest is None else max(0.0, now - float(oldest)),
    }
    if facts.rates is not None:
        messages_s, bytes_s = facts.rates
        room_bytes = facts.disk_status.get("room_left")
        if room_bytes is not None and status.get("ack_after") != AckAfter.KAFKA:  # else the window limits intake
            derived_values["outage_budget_intake_seconds"] = outage_budget_s(room_bytes, bytes_s)
        if broker_queue is not None and not is_downlink:
            derived_values["outage_budget_broker_seconds"] = outage_budget_s(broker_queue, messages_s)
    values |= derived_values
    yield from status_samples(GATEWAY, labels, values, str(status.get("journal")), down=is_downlink)


def outage_budget_s(room: float, rate: float) -> float:
    """Return the seconds until `room` is used up at `rate`; 0 without room, infinite at rate 0."""
    if room <= 0:
        return 0.0
    return room / rate if rate > 0 else math.inf


def liveness_problems(facts: GatewayFacts, *, silent_s: float) -> Iterator[Problem]:
    """Yield the problems of a gateway that a restart may fix; its last answer is `silent_s` seconds old.

    `silent_s` is 0 before the first answer: the gateway may be recovering, or in standby.
    """
    loop_age_s = float(facts.status.get("turned_s") or 0)
    if loop_age_s > LOOP_TIMEOUT_S:
        yield problem("the gateway's loop is stalled", facts.line, facts.name)
    elif not facts.up and silent_s > LOOP_TIMEOUT_S:
        yield problem("the gateway does not answer", facts.line, facts.name)


def readiness_problems(facts: GatewayFacts, codes: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Yield the problems that keep a gateway from receiving or sending."""
    code = (facts.status.get("last_error") or {}).get("code")
    codes = tuple(dict.fromkeys((*codes, *((code,) if code else ()))))
    if not facts.up:
        yield problem("the gateway does not answer", facts.line, facts.name, codes)
    elif not facts.online:
        yield problem("no session with the broker", facts.line, facts.name, codes)
    elif (throttle_reason := facts.status.get("held_back")) and throttle_reason != "window full":
        yield problem(f"nothing is read from the broker: {throttle_reason}", facts.line, facts.name, codes)
    elif (facts.status.get("outbox") or {}).get("held_back"):
        yield problem(
            "nothing is sent: the disk is full, or the guarantee can't be kept", facts.line, facts.name, codes
        )
