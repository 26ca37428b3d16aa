"""What is known about a running bridge, gathered from its children and kept in ``bridge.json`` for `towline status`."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from towline import files
from towline.bridge.config.model import CHECKPOINT
from towline.bridge.lines.account import LineAccount, LineNotes, downlink_account, uplink_account
from towline.gateway.endpoint import text_of
from towline.processes import ProcessMark
from towline.timing import BATCHES, Histogram, Pace
from towline.version import revision, version

BRIDGE_FILE = "bridge.json"
#: What the query of a paused line is.
PAUSED: Final = "paused"
#: Rates are taken over this many seconds.
WINDOW_S = 5.0
#: An answer of a gateway, or a word of the bridge, is as old as this at most, in seconds, to say how things are now.
SILENT_S = 10.0

#: By direction: the key of a gateway's status without which there is no account, and what makes it.
_ACCOUNTS: Final[Mapping[str, tuple[str, Callable[[LineNotes, Mapping[str, Any]], LineAccount]]]] = {
    "up": ("received", uplink_account),
    "down": ("outbox", downlink_account),
}


#: Attributes of a view that ``bridge.json`` has as they are.
_SAVED: Final = (
    *("direction", "query", "heard", "gateway_error", "query_error"),
    *("restarts", "gateway_restarts", "batch_ms"),
)


def notes_of(directory: Path) -> LineNotes | None:
    """What the checkpoint of a line says of its batches, by the line's directory; None where it can't be read."""
    try:
        return LineNotes.read(directory / CHECKPOINT)
    except OSError:
        return None


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
        directory: Its own, with its checkpoint.
        notes: What the checkpoint said of its batches when the gateway was asked last, so that the answer knows of
            every message that they are about; None before that, and where it can't be read.
        lettered: Whether dead letters came since the bridge began.
        behind: Of a downlink, offsets in Kafka, up to its high watermarks, that are not taken; control records of
            transactions are among them. None for not known.
        hidden: Of those, how many are behind an open transaction, where nobody gets them yet. None for not known.
        restarts: How often the query failed since the bridge began.
        gateway_restarts: How often the gateway was started again.
        restarted: What became of its last `towline restart` (`towline.bridge.runtime.reloading`).
        pace: Of what was received, and of what is done.
        before: The gateway's last answer to the bridge that ran before this one.
        gateways: State directories and locations of gateways elsewhere that the line reads; none for one of its own.
        access: The files that let the bridge in to those, as plain values.
        batches: How long the committed batches of this run took.
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
    directory: Path = Path()
    notes: LineNotes | None = None
    lettered: bool = False
    behind: int | None = None
    hidden: int | None = None
    restarts: int = 0
    gateway_restarts: int = 0
    restarted: Mapping[str, Any] = field(default_factory=dict)
    batch_ms: int = 0
    pace: Pace = field(default_factory=lambda: Pace(WINDOW_S))
    before: Mapping[str, Any] = field(default_factory=dict)
    gateways: Sequence[str] = ()
    access: Mapping[str, str] = field(default_factory=dict)
    batches: Histogram = field(default_factory=lambda: Histogram(BATCHES))
    batch_at: float | None = None
    timed: tuple[str, int] = ("", -1)

    def took(self, report: Mapping[str, Any]) -> None:
        """Note how long a committed batch took; one that was noted before changes nothing.

        Args:
            report: ``query``, ``batch``, and ``millis`` as Spark's ``durationMs``.
        """
        query, batch = str(report.get("query", "")), int(report.get("batch", -1))
        if query == self.timed[0] and batch <= self.timed[1]:
            return
        self.timed, self.batch_at = (query, batch), float(report.get("at", time.time()))
        self.batches.observe(float(report.get("millis", {}).get("triggerExecution", 0)) / 1000)

    def hear(self, status: Mapping[str, Any], notes: LineNotes | None) -> int:
        """Take an answer of the gateway; the number of the first dead letters that came since the bridge began.

        Args:
            status: The answer.
            notes: Of the checkpoint, read before the gateway was asked: what is committed later it may not know of.
        """
        before, self.notes = self.notes, notes
        self.status, self.heard = status, time.time()
        if self.lettered or before is None or notes is None:
            return 0
        letters = notes.counts["dead_lettered"] - before.counts["dead_lettered"]
        self.lettered = letters > 0
        return letters

    @property
    def silent(self) -> bool:
        """Whether the gateway's last answer is too old to say how the line is now."""
        late = self.heard is not None and time.time() - self.heard >= SILENT_S
        return late or self.gateway_error is not None

    @property
    def account(self) -> LineAccount | None:
        """The account as it was when the gateway answered; None before its first word, and while it does not."""
        return None if not self.status or self.silent else self.account_by(self.status)

    def account_by(self, status: Mapping[str, Any]) -> LineAccount | None:
        """The account by an answer of the gateway; None where it is not known what it is made of."""
        source, make = _ACCOUNTS[self.direction]
        if self.notes is None or status.get(source) in (None, {}):
            return None
        account, stopped = make(self.notes, status), self.query == "stopped" and self.query_error is not None
        return replace(account, stopped=stopped, more={**self._backlog, **account.more})

    @property
    def _backlog(self) -> dict[str, int | None]:
        """How far a downlink is behind."""
        return {"behind": self.behind, "hidden": self.hidden} if self.direction == "down" else {}

    def sample(self, now: float) -> None:
        """Note where the line is, for the rates."""
        if account := self.account:
            self.pace.look(now, account.received, account.received - account.pending)

    def rates(self) -> tuple[float, float]:
        """Messages a second in and out over the last `WINDOW_S` seconds."""
        return self.pace.rates or (0.0, 0.0)

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
            **{name: getattr(self, name) for name in _SAVED},
            **self._backlog,
            "gateway": dict(self.status),
            "remarks": list(self.remarks),
            "restarted": dict(self.restarted),
            "rate_in": rate_in,
            "rate_out": rate_out,
            "lag_s": None if self.silent else round(self.lag_s(), 1),
            **({"gateways": list(self.gateways), "access": dict(self.access)} if self.gateways else {}),
        }


class BridgeState:
    """The views of all lines and of Spark and Kafka; written by the supervisors' threads, read by the screen.

    Args:
        name: Of the bridge.
        state_dir: Where ``bridge.json`` goes; what gateways said to former runs is taken from there.
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
        view = LineView(name, direction, before=saved.get("gateway", {}), directory=self._file.parent / name)
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
