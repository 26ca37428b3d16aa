"""What a bridge that runs and the commands beside it tell each other, by files in its state directory.

``bridge.json`` has what the bridge knows, gathered from its children. A reload is asked for by SIGHUP; the rest of what
is asked are files in a line's directory, ``state_dir/NAME``, that the bridge looks for at every tick:

    paused    {"at": SECONDS, "by": NAME}; while it is there the line's query does not run, whoever starts what
    restart   taken away when the restart begins

A pause outlives every process, and may be asked for while no bridge runs, or before the line ever ran.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from towline import files
from towline.bridge.config.model import CHECKPOINT, Bridge
from towline.bridge.lines.account import LineAccount, LineNotes, downlink_account, uplink_account
from towline.errors import ConfigError, GatewayError
from towline.files import user_name
from towline.gateway.endpoint import not_allowed, text_of
from towline.gateway.launch import usable
from towline.guarantee import AckAfter
from towline.processes import ProcessMark
from towline.text import span
from towline.timing import BATCHES, Histogram, Pace, until
from towline.version import revision, version

BRIDGE_FILE: Final = "bridge.json"
PAUSED_FILE: Final = "paused"
RESTART_FILE: Final = "restart"
#: What the query of a paused line is, that of one which a reload has stopped, and one that is not tried again.
PAUSED, HELD, STOPPED = "paused", "held for a reload", "stopped"
#: What becomes of a reload, or a restart.
APPLIED, REFUSED, UNCHANGED, UNDER_WAY = "applied", "refused", "unchanged", "under way"
#: Rates are taken over this many seconds.
WINDOW_S = 5.0
#: An answer of a gateway, or a word of the bridge, is as old as this at most, in seconds, to say how things are now.
SILENT_S = 10.0
#: Longest wait for a reload, in seconds: as long as it waits for Spark and for brokers, and some more.
_PATIENCE_S: Final = 300.0

#: By direction: the key of a gateway's status without which there is no account, and what makes it.
_ACCOUNTS: Final[Mapping[str, tuple[str, Callable[[LineNotes, Mapping[str, Any]], LineAccount]]]] = {
    "up": ("received", uplink_account),
    "down": ("outbox", downlink_account),
}
#: Attributes of a bridge, and of a view, that ``bridge.json`` has as they are.
_SAVED_OF_BRIDGE: Final = ("outcomes", "spark_restarts", "kafka", "kafka_error", "kafka_insecure")
_SAVED: Final = (
    *("direction", "query", "heard", "gateway_error", "query_error", "remarks", "batch_ms"),
    *("behind", "hidden", "gateways", "access"),
)


def notes_of(directory: Path) -> LineNotes | None:
    """What the checkpoint of a line says of its batches, by the line's directory; None where it can't be read."""
    try:
        return LineNotes.read(directory / CHECKPOINT)
    except OSError:
        return None


@dataclass
class LineView:
    """One line as the bridge sees it."""

    name: str
    direction: str = "up"
    #: ``starting``, ``running``, ``waiting to retry``, `STOPPED`, `PAUSED`, `HELD`.
    query: str = "starting"
    #: Last answer of its gateway, empty before the first; and when that was, in seconds since 1970.
    status: Mapping[str, Any] = field(default_factory=dict)
    heard: float | None = None
    gateway_error: str | None = None
    #: Why its query failed last, or None since the last good batch.
    query_error: str | None = None
    #: What weakens its promise since its query started, or has cost something; a line each.
    remarks: Sequence[str] = ()
    #: Its own, with its checkpoint.
    directory: Path = Path()
    #: Of the checkpoint, read before the gateway was asked: its answer knows of every message that they are about.
    notes: LineNotes | None = None
    #: Whether dead letters came since the bridge began.
    lettered: bool = False
    #: Of a downlink, offsets in Kafka, up to its high watermarks, that are not taken, with control records of
    #: transactions; and how many of them are behind an open transaction, where nobody gets them yet.
    behind: int | None = None
    hidden: int | None = None
    #: How often its query failed, and its gateway was started again, since the bridge began.
    restarts: int = 0
    gateway_restarts: int = 0
    #: Milliseconds of the last batch.
    batch_ms: int = 0
    #: Of what was received, and of what is done.
    pace: Pace = field(default_factory=lambda: Pace(WINDOW_S))
    #: The gateway's last answer, that to the bridge that ran before this one included.
    before: Mapping[str, Any] = field(default_factory=dict)
    #: State directories and locations of gateways elsewhere that the line reads, and the files that let the bridge in.
    gateways: Sequence[str] = ()
    access: Mapping[str, str] = field(default_factory=dict)
    #: How long the committed batches of this run took; and when the last one was, in seconds since 1970.
    batches: Histogram = field(default_factory=lambda: Histogram(BATCHES))
    batch_at: float | None = None

    @classmethod
    def read(cls, directory: Path, saved: Mapping[str, Any]) -> LineView:
        """The view of a line by its directory and what ``bridge.json`` has of it; without an answer of a gateway."""
        known = {name: saved[name] for name in _SAVED if name in saved}
        return cls(directory.name, directory=directory, notes=notes_of(directory), **known)

    def hear(self, status: Mapping[str, Any], notes: LineNotes | None) -> int:
        """Take an answer of the gateway; the number of the first dead letters that came since the bridge began."""
        before, self.notes = self.notes, notes
        self.status, self.heard = status, time.time()
        self.sample(time.monotonic())
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
        account, stopped = make(self.notes, status), self.query == STOPPED and self.query_error is not None
        backlog = {"behind": self.behind, "hidden": self.hidden} if self.direction == "down" else {}
        return replace(account, stopped=stopped, more={**backlog, **account.more})

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
            "gateway": dict(self.status),
            "rate_in": rate_in,
            "rate_out": rate_out,
            "lag_s": None if self.silent else round(self.lag_s(), 1),
        }


class BridgeState:
    """The views of all lines, by name and direction, and of Spark and Kafka, written by the supervisors' threads.

    What gateways said to former runs is taken from ``bridge.json``. `insecure` is as
    `towline.kafka.clientconfig.insecurities`; of the `file` `towline status` says when it was changed since.
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
        #: The bridge file, and the SHA-256 of what of it runs.
        self.file, self.digest = file, file and digest_of(file)
        #: What became of the last reload, under "", and of the last restart of each line (`Reloading.reload`).
        self.outcomes: dict[str, Mapping[str, Any]] = {}
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

    def note(self, line: str, **outcome: Any) -> None:
        """Note how a reload, or the restart of a line, stands."""
        with self.lock:
            self.outcomes[line] = outcome

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
        """Write ``bridge.json``, atomically, mode 0600; a full disk is the gateways' concern, and no reason to end."""
        with self.lock:
            values = {
                **{name: getattr(self, name) for name in _SAVED_OF_BRIDGE},
                "bridge": self.name,
                "version": version(),
                "revision": revision(),
                "file": {"path": str(self.file), "sha256": self.digest} if self.file else {},
                "pid": None if ended else os.getpid(),
                "ticks": ProcessMark.of(os.getpid()).started,
                "updated": time.time(),
                "spark": "ended" if ended else self.spark,
                "lines": {name: view.as_json() for name, view in self.lines.items()},
            }
        with suppress(OSError):
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


# -- what is asked of it ---------------------------------------------------------------------------------------------


def pause(directory: Path, by: str = "") -> bool:
    """Pause a line, by this process's user if by nobody else, durably; False if it was paused before, and stays so.

    Raises:
        ConfigError: TL-C25 the directory can't be used, TL-J23 it is another user's.
        GatewayError: TL-B64, the request can't be written; TL-B59, this user may not look there.
    """
    if new := paused(directory) is None:
        _put(directory / PAUSED_FILE, json.dumps({"at": time.time(), "by": by or user_name(os.geteuid())}))
    return new


def resume(directory: Path) -> bool:
    """End the pause of a line, durably; False if it was not paused. Raises as `pause`."""
    if there := paused(directory) is not None:
        _put(directory / PAUSED_FILE, None)
    return there


def paused(directory: Path) -> dict[str, Any] | None:
    """``at`` and ``by`` of a line's pause, which may be 0 and ""; None where it has none. Raises as `pause`."""
    file = directory / PAUSED_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return {"at": float(values["at"]), "by": str(values["by"])}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise not_allowed(file) from None
    except (OSError, ValueError, KeyError, TypeError):
        return {"at": 0.0, "by": ""}


def request_restart(directory: Path) -> None:
    """Ask the bridge that runs to restart a line. Raises as `pause`."""
    _put(directory / RESTART_FILE, "")


def take_restart(directory: Path) -> bool:
    """Take the request to restart a line away; False where there is none."""
    with suppress(OSError):
        (directory / RESTART_FILE).unlink()
        return True
    return False


def carried_out(bridge: Bridge, name: str, *, pausing: bool, patience_s: float = 30.0) -> str:
    """Pause a line, or end its pause, and wait until a bridge that runs has done so; what is so now, in one line.

    Raises:
        ConfigError: TL-C73, there is no such line; and as `pause`.
        GatewayError: TL-B66, the bridge has not done so in time, and will; and as `pause`.
    """
    directory, word = bridge.state_dir / bridge.line(name).name, "paused" if pausing else "resumed"
    (pause if pausing else resume)(directory)
    deadline = time.monotonic() + patience_s
    while is_there(state := read_state(bridge.state_dir) or {}) and (view := state["lines"].get(name)):
        if (view["query"] == PAUSED) is pausing:
            return f'line "{name}": {word}{_meanwhile(view) if pausing else ""}'
        if time.monotonic() >= deadline:
            what = f"it is not {word} after {patience_s:.0f} s: its query is {view['query']}, its batch has to end"
            raise GatewayError("TL-B66", f'line "{name}"', what, "It is as soon as that has; towline status shows it.")
        time.sleep(0.1)
    return f'line "{name}": {word}; no bridge runs it now, and the next start leaves it so'


def _meanwhile(view: Mapping[str, Any]) -> str:
    """What becomes of messages while a line is paused, and for how long that can go on."""
    if view["direction"] == "down":
        return ": what the outbox has is delivered, and what comes stays in Kafka"
    gateway, rate = view["gateway"], view.get("rate_in") or 0.0
    if gateway.get("ack_after") == AckAfter.KAFKA:
        return ": what comes is not acknowledged, and stays in the queue of the broker"
    inbox = (gateway.get("measured") or {}).get("inbox") or {}
    if (room := inbox.get("room_left")) is None:
        return ": intake goes on"
    pace = rate * inbox["bytes_waiting"] / (gateway.get("waiting") or 1)  # bytes a second
    lasts = f"; at {rate:,.0f} messages/s that lasts {span(room / pace)}" if pace else ""
    return f": intake goes on, with room on disk for {room / 1e9:,.1f} GB{lasts}"


def _put(file: Path, text: str | None) -> None:
    """Write a request, or take it away."""
    usable(file.parent)
    try:
        if text is not None:
            files.replace_durably(file, text)
        else:
            file.unlink(missing_ok=True)
            files.sync_directory(file.parent)
    except OSError as error:
        do = "Free some room there, and ask again."
        raise GatewayError("TL-B64", str(file), f"the request can't be written ({files.why(error)})", do) from error


def reload_from_outside(bridge: Bridge, line: str = "", patience_s: float = _PATIENCE_S) -> dict[str, Any]:
    """Have the bridge that runs take its file up, or restart a line, and wait for ``outcome`` and ``texts`` of that.

    Raises:
        GatewayError: TL-B65, no bridge runs in its state directory, or it does not have the line.
        ConfigError: TL-C73, nor has the file; TL-C177, the bridge was started from another file; TL-C178, it gives no
            answer.
    """
    state_dir, state = bridge.state_dir, _running(bridge)
    other = (state.get("file") or {}).get("path")
    if other != str(bridge.file):
        what, do = f"the bridge that runs was started from {other}", "Name that file."
        raise ConfigError("TL-C177", str(bridge.file), what, do)
    asked = time.monotonic()  # which is that of all processes of this machine, and never set
    if not line:
        with suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGHUP)
    elif bridge.line(line).name in state["lines"]:
        request_restart(state_dir / line)
    else:
        do = "It comes with towline reload."
        raise GatewayError("TL-B65", str(state_dir), f'the bridge that runs has no line "{line}" yet', do)

    def outcome() -> dict[str, Any] | None:
        told: dict[str, Any] = _running(bridge)["outcomes"].get(line, {})
        # One that was under way may have read the file before it was changed.
        return told if told.get("began", 0.0) >= asked and told["outcome"] != UNDER_WAY else None

    if (told := until(outcome, patience_s)) is not None:
        return told
    what, do = f"no answer in {patience_s:.0f} s", "Look at towline status, and at what towline run says."
    raise ConfigError("TL-C178", str(state_dir), what, do)


def _running(bridge: Bridge) -> dict[str, Any]:
    """The last word of the bridge that runs there."""
    if is_there(state := read_state(bridge.state_dir) or {}):
        return state
    raise GatewayError("TL-B65", str(bridge.state_dir), "no bridge runs here", "Start it with towline run.")
