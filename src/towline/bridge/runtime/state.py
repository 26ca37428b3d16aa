"""What is known about a running bridge, gathered from its children and kept in ``bridge.json`` for `towline status`."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from towline import files
from towline.bridge.downlink.account import DownlinkCounts
from towline.bridge.lines.account import LineAccount, LineCounts
from towline.bridge.uplink.account import UplinkCounts
from towline.gateway.endpoint import text_of
from towline.processes import ProcessMark
from towline.timing import BATCHES, Histogram
from towline.version import revision, version

__all__ = [
    "BRIDGE_FILE",
    "PAUSED",
    "BridgeState",
    "LineView",
    "account_of",
    "counts_of",
    "digest_of",
    "is_there",
    "read_state",
]

BRIDGE_FILE = "bridge.json"
#: What the query of a paused line is.
PAUSED: Final = "paused"
#: Rates are taken over this many seconds.
WINDOW_S = 5.0
#: An answer of a gateway, or a word of the bridge, is as old as this at most, in seconds, to say how things are now.
SILENT_S = 10.0
#: Samples kept for the rates, one a second.
SAMPLES = 10

#: What is counted of a line, by its direction.
COUNTS: Final[Mapping[str, type[LineCounts]]] = {"up": UplinkCounts, "down": DownlinkCounts}


def counts_of(direction: str, values: Mapping[str, Any]) -> LineCounts:
    """What was counted of a line, from the JSON of ``bridge.json``."""
    return COUNTS[direction].from_json(values)


def account_of(status: Mapping[str, Any], counts: LineCounts, *, stopped: bool = False) -> LineAccount | None:
    """The account of a line, whichever way it goes; None where its gateway does not say what it is made of."""
    known = status.get(counts.witness) not in (None, {})
    return replace(counts.account(status), stopped=stopped) if known else None


@dataclass
class LineView:
    """One line as the bridge sees it.

    Attributes:
        name: Of the line.
        direction: ``up`` or ``down``.
        query: ``starting``, ``running``, ``waiting to retry``, ``stopped``, ``paused``, ``held for a reload``.
        status: Last answer of its gateway; empty before the first.
        heard: When that was, in seconds since 1970; None before the first.
        gateway_error: Why its gateway does not run, or None.
        query_error: Why its query failed last, or None since the last good batch.
        remarks: What weakens its promise since its query started, or has cost something; a line each.
        counts: Of committed batches.
        asked: The same when the gateway was asked last.
        counted: The same when that was answered: none of it can be newer than the answer.
        restarts: How often the query failed since the bridge began.
        gateway_restarts: How often the gateway was started again.
        restarted: What became of its last `towline restart` (`towline.bridge.runtime.reloading`).
        samples: (monotonic seconds, received, committed).
        before: The gateway's last answer to the bridge that ran before this one.
        gateways: State directories and locations of gateways elsewhere that the line reads; none for one of its own.
        access: The files that let the bridge in to those, as plain values.
        batches: How long the committed batches of this run took.
        transactions: How long their transactions were open; nothing is counted where the guarantee has none.
        batch_at: When the last of them was heard of, in seconds since 1970; None before the first.
        timed: Its query and number.
    """

    name: str
    direction: str = "up"
    query: str = "starting"
    status: Mapping[str, Any] = field(default_factory=dict)
    heard: float | None = None
    gateway_error: str | None = None
    query_error: str | None = None
    remarks: Sequence[str] = ()
    counts: LineCounts = field(default_factory=UplinkCounts)
    asked: LineCounts | None = None
    counted: LineCounts | None = None
    restarts: int = 0
    gateway_restarts: int = 0
    restarted: Mapping[str, Any] = field(default_factory=dict)
    batch_ms: int = 0
    samples: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    before: Mapping[str, Any] = field(default_factory=dict)
    gateways: Sequence[str] = ()
    access: Mapping[str, str] = field(default_factory=dict)
    batches: Histogram = field(default_factory=lambda: Histogram(BATCHES))
    transactions: Histogram = field(default_factory=lambda: Histogram(BATCHES))
    batch_at: float | None = None
    timed: tuple[str, int] = ("", -1)

    def took(self, report: Mapping[str, Any]) -> None:
        """Note how long a committed batch took, and its transactions; one that was noted before changes nothing.

        Args:
            report: As `LineCounts.add` takes it; ``millis`` as Spark's ``durationMs``, ``transactions`` in seconds.
        """
        query, batch = str(report.get("query", "")), int(report.get("batch", -1))
        if query == self.timed[0] and batch <= self.timed[1]:
            return
        self.timed, self.batch_at = (query, batch), float(report.get("at", time.time()))
        self.batches.observe(float(report.get("millis", {}).get("triggerExecution", 0)) / 1000)
        for open_s in report.get("transactions", ()):
            self.transactions.observe(float(open_s))

    def asks(self) -> None:
        """The gateway is about to be asked; what is counted from here on may be newer than its answer."""
        self.asked = self.counts

    def hear(self, status: Mapping[str, Any]) -> None:
        """Take an answer of the gateway."""
        self.status, self.heard = status, time.time()
        self.counted, self.asked = self.asked or self.counts, None

    @property
    def silent(self) -> bool:
        """Whether the gateway's last answer is too old to say how the line is now."""
        late = self.heard is not None and time.time() - self.heard >= SILENT_S
        return late or self.gateway_error is not None

    @property
    def account(self) -> LineAccount | None:
        """The account as it is now; None before the gateway's first word, and while none answers.

        A batch that was counted since its last answer may have messages that the answer knows nothing of: whether
        witnesses disagree is said of what was counted when it came.
        """
        if not self.status or self.silent:
            return None
        stopped = self.query == "stopped" and self.query_error is not None
        account = account_of(self.status, self.counts, stopped=stopped)
        if account is not None and account.disagreements and self.counted is not None:
            return account_of(self.status, self.counted, stopped=stopped)
        return account

    def sample(self, now: float) -> None:
        """Note where the line is, for the rates."""
        if account := self.account:
            self.samples.append((now, account.received, account.received - account.pending))

    def rates(self) -> tuple[float, float]:
        """Messages a second in and out over the last `WINDOW_S` seconds."""
        if len(self.samples) < 2:
            return 0.0, 0.0
        last = self.samples[-1]
        first = next(s for s in self.samples if last[0] - s[0] <= WINDOW_S or s is last)
        seconds = last[0] - first[0]
        return ((last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds) if seconds > 0 else (0.0, 0.0)

    def lag_s(self) -> float:
        """How many seconds ago the oldest waiting message came, as its gateway says; 0 when none waits."""
        account, oldest = self.account, self.status.get("oldest")
        if oldest is None or account is None or not account.pending:
            return 0.0
        return max(0.0, time.time() - float(oldest))

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``bridge.json``."""
        rate_in, rate_out = (None, None) if self.silent else (round(rate, 1) for rate in self.rates())
        return {
            "direction": self.direction,
            "query": self.query,
            "counts": self.counts.as_json(),
            "gateway": dict(self.status),
            "heard": self.heard,
            "gateway_error": self.gateway_error,
            "query_error": self.query_error,
            "remarks": list(self.remarks),
            "restarts": self.restarts,
            "gateway_restarts": self.gateway_restarts,
            "restarted": dict(self.restarted),
            "batch_ms": self.batch_ms,
            "rate_in": rate_in,
            "rate_out": rate_out,
            "lag_s": None if self.silent else round(self.lag_s(), 1),
            **({"gateways": list(self.gateways), "access": dict(self.access)} if self.gateways else {}),
        }


class BridgeState:
    """The views of all lines and of Spark and Kafka; written by the supervisors' threads, read by the screen.

    Args:
        name: Of the bridge.
        state_dir: Where ``bridge.json`` goes; counts of former runs are taken from there.
        lines: Names of the lines, and their directions.
        insecure: What the settings give up on the way to Kafka (`towline.kafka.clientconfig.insecurities`).
        file: What the bridge was read from; `towline status` says when it was changed since.
    """

    def __init__(
        self,
        name: str,
        state_dir: Path,
        lines: Mapping[str, str],
        insecure: Sequence[str] = (),
        file: Path | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.name = name
        self.spark = "starting"
        self.spark_restarts = 0
        self.kafka = "unknown"
        self.kafka_error: str | None = None
        self.kafka_insecure = list(insecure)
        self.lines: dict[str, LineView] = {}
        self._file = state_dir / BRIDGE_FILE
        self._read = {} if file is None else {"path": str(file), "sha256": digest_of(file)}
        self._started = time.time()
        #: What became of the last reload (`towline.bridge.runtime.reloading`).
        self.reload: Mapping[str, Any] = {"number": 0}
        #: When the supervisor looked around last, on `time.monotonic`; one that stands still shows.
        self.beat = time.monotonic()
        self._events: deque[str] = deque(maxlen=1000)
        self._former = (read_state(state_dir) or {}).get("lines", {})
        for line, direction in lines.items():
            self.add(line, direction)

    def add(self, name: str, direction: str) -> None:
        """Have a view of a line that comes; one that is there stays."""
        if name in self.lines:
            return
        saved = self._former.get(name, {})
        saved = saved if saved.get("direction") == direction else {}  # else another line's, of the same name
        counts = counts_of(direction, saved.get("counts", {}))
        view = LineView(name, direction, counts=counts, before=saved.get("gateway", {}))
        with self.lock:
            self.lines = {**self.lines, name: view}

    def file_read(self, digest: str | None) -> None:
        """What runs is what the bridge file says that has this digest."""
        with self.lock:
            self._read = {**self._read, "sha256": digest}

    def say(self, text: str) -> None:
        """An event for the person who watches: one line."""
        with self.lock:
            self._events.append(text)

    def heard(self) -> list[str]:
        """The events since the last call."""
        with self.lock:
            events = list(self._events)
            self._events.clear()
        return events

    def save(self, *, ended: bool = False) -> None:
        """Write ``bridge.json``, atomically, mode 0600."""
        with self.lock:
            values = {
                "bridge": self.name,
                "version": version(),
                "revision": revision(),
                "file": self._read,
                "reload": dict(self.reload),
                "pid": None if ended else os.getpid(),
                "ticks": ProcessMark.of(os.getpid()).started,
                "started": self._started,
                "updated": time.time(),
                "spark": "ended" if ended else self.spark,
                "spark_restarts": self.spark_restarts,
                "kafka": self.kafka,
                "kafka_error": self.kafka_error,
                "kafka_insecure": self.kafka_insecure,
                "lines": {name: view.as_json() for name, view in self.lines.items()},
            }
        files.replace(self._file, json.dumps(values, indent=1), synced=False)


def is_there(state: Mapping[str, Any]) -> bool:
    """Whether the process of the bridge that wrote this is there; a zombie has ended too."""
    pid = state.get("pid")
    ticks = ProcessMark.of(pid).started if isinstance(pid, int) else 0
    return ticks != 0 and state.get("ticks") == ticks


def digest_of(file: Path) -> str | None:
    """SHA-256 of a file as hex digits; None where it can't be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def read_state(state_dir: Path) -> dict[str, Any] | None:
    """The last ``bridge.json``; None when there is none, or it is not one of ours. Raises as `text_of`."""
    try:
        values = json.loads(text_of(state_dir / BRIDGE_FILE) or "")
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("lines"), dict) else None
