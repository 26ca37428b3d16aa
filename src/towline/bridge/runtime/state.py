"""State of a running bridge and requests to it, as files in its state directory.

The bridge writes its state to ``bridge.json``. Requests are files, which it checks at every tick:

    .restart, NAME/.restart   a reload, and the restart of a line; removed when it begins
    NAME/paused               {"at": SECONDS, "by": NAME}; while it exists the query of the line does not run

A pause survives restarts. It may be requested while no bridge runs, or before the first start of the line.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from towline.errors import ConfigError, GatewayError, JournalError
from towline.files import user_name
from towline.gateway.endpoint import not_allowed_error, read_state_file
from towline.gateway.launch import prepare_state_dir
from towline.guarantee import AckAfter
from towline.processes import ProcessIdentity
from towline.text import duration_text
from towline.timing import BATCH_BUCKETS, Histogram, RateMeter, poll_until
from towline.version import revision, version

BRIDGE_FILE: Final = "bridge.json"
PAUSED_FILE: Final = "paused"
#: Not a legal name of a line.
RESTART_FILE: Final = ".restart"
#: States of a query: its line is paused; stopped during a reload; failed permanently.
PAUSED, HELD, STOPPED = "paused", "held for a reload", "stopped"
#: Outcomes of a reload or restart.
APPLIED, REFUSED, UNCHANGED, UNDER_WAY = "applied", "refused", "unchanged", "under way"
#: Window of message rates, in seconds.
RATE_WINDOW_S = 5.0
#: Largest age of a gateway's status, or of ``bridge.json``, that still counts as current, in seconds.
MAX_STATUS_AGE_S = 10.0
#: Longest wait for a reload, in seconds: longer than its own waits for Spark and brokers.
_RELOAD_TIMEOUT_S: Final = 300.0

#: By direction: key of a gateway's status that the account needs, and function that creates the account.
_ACCOUNTS: Final[Mapping[str, tuple[str, Callable[[LineNotes, Mapping[str, Any]], LineAccount]]]] = {
    "up": ("received", uplink_account),
    "down": ("outbox", downlink_account),
}
#: Attributes of a bridge, and of a line's view, that are written to ``bridge.json`` unchanged.
_SAVED_BRIDGE_FIELDS: Final = ("outcomes", "spark_restarts", "kafka", "kafka_error", "kafka_insecure")
_SAVED_LINE_FIELDS: Final = (
    *("direction", "query", "heard", "gateway_error", "query_error", "remarks"),
    *("behind", "hidden", "gateways", "access"),
)


def read_notes(directory: Path) -> LineNotes | None:
    """Return the batch totals in the checkpoint of a line, by the line's directory; None if it can't be read."""
    try:
        return LineNotes.read(directory / CHECKPOINT)
    except JournalError:
        return None


@dataclass
class LineView:
    """State of one line: its gateway's status, its query and its account."""

    name: str
    direction: str = "up"
    #: ``starting``, ``running``, ``waiting to retry``, `STOPPED`, `PAUSED`, `HELD`.
    query: str = "starting"
    #: Last status of the gateway, empty before the first; and its time, in seconds since 1970.
    status: Mapping[str, Any] = field(default_factory=dict)
    heard: float | None = None
    gateway_error: str | None = None
    #: Last error of the query; None after a committed batch.
    query_error: str | None = None
    #: Remarks of the query about its guarantee or its cost, one line each.
    remarks: Sequence[str] = ()
    #: Directory of the line, with its checkpoint.
    directory: Path = Path()
    #: Batch totals of the checkpoint, read before the gateway's status: the status includes all their messages.
    notes: LineNotes | None = None
    #: Downlinks only: number of unread offsets up to Kafka's high watermarks, with control records of transactions;
    #: and how many of them are behind an open transaction, where no reader gets them yet (LSO).
    behind: int | None = None
    hidden: int | None = None
    #: Failures of the query and restarts of the gateway since the bridge started.
    restarts: int = 0
    gateway_restarts: int = 0
    #: Rates of received and of completed messages.
    rate_meter: RateMeter = field(default_factory=lambda: RateMeter(RATE_WINDOW_S))
    #: Status before the last one; at first the last status of a former bridge process.
    previous_status: Mapping[str, Any] = field(default_factory=dict)
    #: Locations of the line's remote gateways, and the files with token and certificates for them.
    gateways: Sequence[str] = ()
    access: Mapping[str, str] = field(default_factory=dict)
    #: Durations of the committed batches of this run; and time of the last one, in seconds since 1970.
    batches: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    batch_at: float | None = None
    #: Duration of the last committed batch of this run, in seconds.
    batch_s: float | None = None

    @classmethod
    def from_saved(cls, directory: Path, saved: Mapping[str, Any]) -> LineView:
        """Return the view of a line from its directory and ``bridge.json``, without batch totals and status."""
        saved_fields = {name: saved[name] for name in _SAVED_LINE_FIELDS if name in saved}
        return cls(directory.name, directory=directory, **saved_fields)

    def update_status(self, status: Mapping[str, Any], notes: LineNotes | None) -> None:
        """Store a new status of the gateway, and the batch totals that were read before it."""
        self.notes, self.status, self.heard = notes, status, time.time()
        if account := self.account:
            self.rate_meter.sample(time.monotonic(), account.received, account.received - account.pending)

    @property
    def is_silent(self) -> bool:
        """True if the last status is older than `MAX_STATUS_AGE_S`, or the gateway has failed."""
        is_late = self.heard is not None and time.time() - self.heard >= MAX_STATUS_AGE_S
        return is_late or self.gateway_error is not None

    @property
    def account(self) -> LineAccount | None:
        """Account at the time of the gateway's last status; None before the first status and while it is silent."""
        return None if not self.status or self.is_silent else self.account_from(self.status)

    def account_from(self, status: Mapping[str, Any]) -> LineAccount | None:
        """Return the account for a status of the gateway; None if a number of it is unknown."""
        status_key, make_account = _ACCOUNTS[self.direction]
        if self.notes is None or status.get(status_key) in (None, {}):
            return None
        account, is_stopped = make_account(self.notes, status), self.query == STOPPED and self.query_error is not None
        backlog = {"behind": self.behind, "hidden": self.hidden} if self.direction == "down" else {}
        return replace(account, stopped=is_stopped, more={**backlog, **account.more})

    def rates(self) -> tuple[float, float]:
        """Return messages a second in and out, over the last `RATE_WINDOW_S` seconds."""
        return self.rate_meter.rates or (0.0, 0.0)

    def lag_s(self) -> float:
        """Return the age in seconds of the oldest waiting message; 0 if none waits."""
        account, oldest_at = self.account, self.status.get("oldest")
        if oldest_at is None or account is None or not account.pending:
            return 0.0
        return max(0.0, time.time() - float(oldest_at))

    def as_json(self) -> dict[str, Any]:
        """Return the JSON values of the line in ``bridge.json``."""
        rate_in, rate_out = (None, None) if self.is_silent else (round(rate, 1) for rate in self.rates())
        account = self.account
        return {
            **{name: getattr(self, name) for name in _SAVED_LINE_FIELDS},
            "gateway": dict(self.status),
            "account": account and account.as_json(),
            "sentence": account and account.sentence(),
            "batch_s": self.batch_s,
            "rate_in": rate_in,
            "rate_out": rate_out,
            "lag_s": None if self.is_silent else round(self.lag_s(), 1),
        }


class BridgeState:
    """State of a running bridge: views of all lines, Spark, Kafka and events; written by the supervisors' threads.

    The last statuses of gateways are read from a former ``bridge.json``. `lines` has the direction of each line.
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
        self.name, self.spark, self.spark_restarts = name, "starting", 0
        self.kafka, self.kafka_insecure = "unknown", list(insecure)
        self.kafka_error: str | None = None
        self.lines: dict[str, LineView] = {}
        self._path = state_dir / BRIDGE_FILE
        #: The bridge file, and the SHA-256 of its running version.
        self.file, self.digest = file, file and file_digest(file)
        #: Outcome of the last reload, under "", and of the last restart of each line (`Reloader.reload`).
        self.outcomes: dict[str, Mapping[str, Any]] = {}
        #: Heartbeat of the supervisor's main loop, on `time.monotonic`.
        self.heartbeat = time.monotonic()
        self._events: deque[str] = deque(maxlen=1000)
        self._saved_lines = (read_state(state_dir) or {}).get("lines", {})
        for line, direction in lines.items():
            self.add_line(line, direction)

    def add_line(self, name: str, direction: str) -> None:
        """Add the view of a new line; an existing view is not changed."""
        if name in self.lines:
            return
        saved = self._saved_lines.get(name, {})
        saved = saved if saved.get("direction") == direction else {}  # else it is of another line with this name
        view = LineView(name, direction, previous_status=saved.get("gateway", {}), directory=self._path.parent / name)
        with self.lock:
            self.lines = {**self.lines, name: view}

    def set_outcome(self, line: str, **outcome: Any) -> None:
        """Set the outcome of a reload (`line` is "") or of a line's restart."""
        with self.lock:
            self.outcomes[line] = outcome

    def add_event(self, text: str) -> None:
        """Add an event for the output."""
        with self.lock:
            self._events.append(text)

    def take_events(self) -> list[str]:
        """Return the events since the last call."""
        with self.lock:
            events = list(self._events)
            self._events.clear()
        return events

    def save(self, *, has_ended: bool = False) -> None:
        """Write ``bridge.json`` atomically, mode 0600. Errors are ignored: a full disk does not end the bridge."""
        with self.lock:
            values = {
                **{name: getattr(self, name) for name in _SAVED_BRIDGE_FIELDS},
                "bridge": self.name,
                "version": version(),
                "revision": revision(),
                "file": {"path": str(self.file), "sha256": self.digest} if self.file else {},
                "pid": None if has_ended else os.getpid(),
                "ticks": ProcessIdentity.of(os.getpid()).started,
                "updated": time.time(),
                "spark": "ended" if has_ended else self.spark,
                "lines": {name: view.as_json() for name, view in self.lines.items()},
            }
        with suppress(OSError):
            files.replace(self._path, json.dumps(values, indent=1), sync=False)


def is_bridge_alive(state: Mapping[str, Any]) -> bool:
    """Return True if the process that wrote this state still runs; a zombie does not."""
    pid = state.get("pid")
    ticks = ProcessIdentity.of(pid).started if isinstance(pid, int) else 0
    return ticks != 0 and state.get("ticks") == ticks


def file_digest(file: Path) -> str | None:
    """Return the SHA-256 of a file in hex; None if it can't be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def read_state(state_dir: Path) -> dict[str, Any] | None:
    """Return the content of ``bridge.json``; None if it is missing or has another form. Raises as `read_state_file`."""
    try:
        values = json.loads(read_state_file(state_dir / BRIDGE_FILE) or "")
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("lines"), dict) else None


# -- requests --------------------------------------------------------------------------------------------------------


def pause(directory: Path, by: str = "") -> None:
    """Pause a line durably, by default as this process's user; a paused line is not changed.

    Raises:
        ConfigError: TL-C25, the directory can't be used; TL-J23, it belongs to another user.
        GatewayError: TL-B64, the file can't be written; TL-B59, this user may not read it.
    """
    if read_pause(directory) is None:
        _write_request(directory / PAUSED_FILE, json.dumps({"at": time.time(), "by": by or user_name(os.geteuid())}))


def resume(directory: Path) -> None:
    """End the pause of a line durably, if there is one. Raises as `pause`."""
    if read_pause(directory) is not None:
        _write_request(directory / PAUSED_FILE, None)


def read_pause(directory: Path) -> dict[str, Any] | None:
    """Return ``at`` and ``by`` of a line's pause, 0 and "" if unreadable; None without a pause. Raises as `pause`."""
    file = directory / PAUSED_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return {"at": float(values["at"]), "by": str(values["by"])}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise not_allowed_error(file) from None
    except (OSError, ValueError, KeyError, TypeError):
        return {"at": 0.0, "by": ""}


def request_restart(directory: Path) -> None:
    """Request the restart of a line, or with the bridge's state directory a reload. Raises as `pause`."""
    _write_request(directory / RESTART_FILE, "")


def consume_request(file: Path) -> bool:
    """Remove the file of a request for a reload or a restart; return False if there was none."""
    with suppress(OSError):
        file.unlink()
        return True
    return False


def apply_pause(bridge: Bridge, name: str, *, pausing: bool, timeout_s: float = 30.0) -> str:
    """Pause or resume a line, wait for the running bridge to do so, and return the new state as one line of text.

    Raises:
        ConfigError: TL-C73, there is no such line; and as `pause`.
        GatewayError: TL-B66, the batch did not end in time, the pause takes effect later; and as `pause`.
    """
    directory, state_text = bridge.state_dir / bridge.line(name).name, "paused" if pausing else "resumed"
    (pause if pausing else resume)(directory)
    deadline = time.monotonic() + timeout_s
    while is_bridge_alive(state := read_state(bridge.state_dir) or {}) and (view := state["lines"].get(name)):
        if (view["query"] == PAUSED) is pausing:
            return f'line "{name}": {state_text}{_pause_effect(view) if pausing else ""}'
        if time.monotonic() >= deadline:
            problem = f"it is not {state_text} after {timeout_s:.0f} s: its query is {view['query']}"
            remedy = "It takes effect when its batch ends; towline status shows it."
            raise GatewayError("TL-B66", f'line "{name}"', problem, remedy)
        time.sleep(0.1)
    return f'line "{name}": {state_text}; no bridge runs, and the next start keeps this'


def _pause_effect(view: Mapping[str, Any]) -> str:
    """Return what happens to messages while a line is paused, and for how long the disk has room."""
    if view["direction"] == "down":
        return ": the outbox is delivered, and new records stay in Kafka"
    gateway, rate = view["gateway"], view.get("rate_in") or 0.0
    if gateway.get("ack_after") == AckAfter.KAFKA:
        return ": new messages are not acknowledged, and stay in the broker's queue"
    inbox = (gateway.get("measured") or {}).get("inbox") or {}
    if (room_bytes := inbox.get("room_left")) is None:
        return ": receiving continues"
    bytes_per_s = rate * inbox["bytes_waiting"] / (gateway.get("waiting") or 1)
    lasts = f"; at {rate:,.0f} messages/s this lasts {duration_text(room_bytes / bytes_per_s)}" if bytes_per_s else ""
    return f": receiving continues, with disk space for {room_bytes / 1e9:,.1f} GB{lasts}"


def _write_request(file: Path, text: str | None) -> None:
    prepare_state_dir(file.parent)
    try:
        if text is not None:
            files.replace_durably(file, text)
        else:
            file.unlink(missing_ok=True)
            files.sync_path(file.parent)
    except OSError as error:
        remedy = "Free disk space there, and repeat the command."
        problem = f"the request can't be written ({files.os_error_text(error)})"
        raise GatewayError("TL-B64", str(file), problem, remedy) from error


def request_reload(bridge: Bridge, line: str = "", timeout_s: float = _RELOAD_TIMEOUT_S) -> dict[str, Any]:
    """Request a reload of the running bridge, or the restart of a line; return its ``outcome`` and ``texts``.

    Raises:
        GatewayError: TL-B65, no bridge runs in its state directory, or the bridge does not have the line.
        ConfigError: TL-C73, the file does not have the line; TL-C177, the bridge runs with another file; TL-C178, no
            answer in time.
    """
    state_dir, state = bridge.state_dir, _read_running_state(bridge)
    running_file = (state.get("file") or {}).get("path")
    if running_file != str(bridge.file):
        problem, remedy = f"the running bridge was started from {running_file}", "Name that file."
        raise ConfigError("TL-C177", str(bridge.file), problem, remedy)
    requested_at = time.monotonic()  # the same clock in all processes of this machine, never set
    if line and bridge.line(line).name not in state["lines"]:
        remedy = "Add it with towline reload."
        raise GatewayError("TL-B65", str(state_dir), f'the running bridge has no line "{line}" yet', remedy)
    request_restart(state_dir / line)

    def read_outcome() -> dict[str, Any] | None:
        outcome: dict[str, Any] = _read_running_state(bridge)["outcomes"].get(line, {})
        # A reload that started before the request may have read the unchanged file.
        return outcome if outcome.get("began", 0.0) >= requested_at and outcome["outcome"] != UNDER_WAY else None

    if (outcome := poll_until(read_outcome, timeout_s)) is not None:
        return outcome
    problem, remedy = f"no answer in {timeout_s:.0f} s", "See towline status, and the output of towline run."
    raise ConfigError("TL-C178", str(state_dir), problem, remedy)


def _read_running_state(bridge: Bridge) -> dict[str, Any]:
    """Return the last state of the running bridge, or raise TL-B65."""
    if is_bridge_alive(state := read_state(bridge.state_dir) or {}):
        return state
    raise GatewayError("TL-B65", str(bridge.state_dir), "no bridge runs here", "Start it with towline run.")
