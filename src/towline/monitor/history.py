"""History of a bridge for its page: rates, backlog and faults, in a ring of two files beside ``bridge.json``.

A line of ``history.jsonl`` is a JSON object with its time in seconds since 1970 under ``t``, and one of

    lines    line → [messages/s in, messages/s out, waiting, age of the oldest in s, duration of the last batch in s]
    fault    {"line", "part", "text"}: begins, at "since" if that was earlier; without "text" it has ended
    action   {"line", "action", "by"}: a person did this on the page
    start    the bridge has started, and every fault before has ended

The numbers are those that status shows, unknown ones are null. The file is bounded, not synced, and never needed to
deliver a message: a full disk only makes a gap.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from towline import files
from towline.bridge.runtime.state import PAUSED, STOPPED, BridgeState, LineView
from towline.text import printable
from towline.threads import guarded_thread

HISTORY_FILE: Final = "history.jsonl"
_FORMER_FILE: Final = "history.1.jsonl"
#: Bytes of one of the two files: hours of a bridge with two hundred lines, days of one with ten.
_MAX_BYTES: Final = 8 << 20
#: Seconds between two samples, and between two comparisons of faults.
SAMPLE_INTERVAL_S: Final = 5.0
_COMPARE_INTERVAL_S: Final = 0.25
#: Columns of a line's samples.
COLUMNS: Final = ("t", "in", "out", "waiting", "oldest", "batch")
#: Most points of one answer.
MAX_POINTS: Final = 1500
_MAX_TEXT_CHARS: Final = 300
#: A gap between two samples that is longer is one in which no bridge ran.
_GAP_S: Final = 4 * SAMPLE_INTERVAL_S


class History:
    """The two files of a bridge's history; any process of the owner may append."""

    def __init__(self, state_dir: Path) -> None:
        self._path, self._former_path = state_dir / HISTORY_FILE, state_dir / _FORMER_FILE

    def append(self, **record: Any) -> None:
        """Append a record with the present time; errors are ignored."""
        text = json.dumps({"t": round(time.time(), 2), **record}, separators=(",", ":"))
        with suppress(OSError):
            if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
                self._path.replace(self._former_path)
            with open(self._path, "a", encoding="ascii", opener=_open_private) as file:
                file.write(text + "\n")

    def records(self, since: float, spacing_s: float = 0.0) -> Iterator[Mapping[str, Any]]:
        """Yield all records, the oldest first, without samples before a time or nearer than `spacing_s` to another."""
        sampled_at = float("-inf")
        for path in (self._former_path, self._path):
            with suppress(OSError), path.open(encoding="ascii") as file:
                for text in file:
                    if text[:40].find('"lines"') > 0:
                        at = _time_of(text)
                        if at < since or 0 <= at - sampled_at < spacing_s:  # below 0 the clock was set back
                            continue
                        sampled_at = at
                    if record := _parse(text):
                        yield record


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, files.PRIVATE_MODE)


def _time_of(text: str) -> float:
    """Return the time of a record without parsing it; infinite if it has none in front."""
    with suppress(ValueError):
        return float(text.removeprefix('{"t":').partition(",")[0])
    return float("inf")


def _parse(text: str) -> Mapping[str, Any] | None:
    """Return a record; None for a line that a crash has cut."""
    with suppress(ValueError):
        record = json.loads(text)
        if isinstance(record, dict) and isinstance(record.get("t"), int | float):
            return record
    return None


# -- recording, in the bridge ------------------------------------------------------------------------------------------


class HistoryRecorder:
    """Thread of a bridge that records samples and faults; it reads the bridge's state and changes nothing."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, state: BridgeState, state_dir: Path) -> None:
        """Start to record a bridge."""
        record = FaultRecord(History(state_dir))
        self._thread = guarded_thread(lambda: self._run(state, record), "history", retry_s=SAMPLE_INTERVAL_S)
        self._thread.start()

    def stop(self) -> None:
        """Stop to record."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self, state: BridgeState, record: FaultRecord) -> None:
        sample_at = 0.0
        while not self._stopping.wait(_COMPARE_INTERVAL_S):
            with state.lock:
                faults = faults_of(state)
                restarts = {view.name: (view.gateway_restarts, view.heard) for view in state.lines.values()}
                is_due = time.monotonic() >= sample_at
                samples = {view.name: _sample(view) for view in state.lines.values()} if is_due else {}
            record.compare(faults, restarts)
            if samples:
                sample_at = time.monotonic() + SAMPLE_INTERVAL_S
                record.history.append(lines=samples)


class FaultRecord:
    """Faults of a bridge that are open in its history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._open_faults: dict[tuple[str, str], str] = {}
        #: Restarts of each line's gateway so far, and its last answer, in seconds since 1970.
        self._restarts: dict[str, tuple[int, float | None]] = {}
        history.append(start=True)

    def compare(self, faults: Mapping[tuple[str, str], str], restarts: Mapping[str, tuple[int, float | None]]) -> None:
        """Record faults that have begun or ended; a gateway may have been restarted between two comparisons."""
        for line, (count, _) in restarts.items():
            former_count, answered_at = self._restarts.get(line, (count, None))
            if count > former_count and (line, GATEWAY) not in self._open_faults:
                since = {} if answered_at is None else {"since": round(answered_at, 2)}
                self.history.append(fault={"line": line, "part": GATEWAY, "text": "the gateway had ended", **since})
                self._open_faults[line, GATEWAY] = "the gateway had ended"
        self._restarts = dict(restarts)
        for (line, part), text in faults.items():
            if (line, part) not in self._open_faults:
                self.history.append(fault={"line": line, "part": part, "text": printable(text, _MAX_TEXT_CHARS)})
        for line, part in self._open_faults.keys() - faults.keys():
            self.history.append(fault={"line": line, "part": part})
        self._open_faults = dict(faults)


#: Parts that a fault is of.
GATEWAY, BROKER, QUERY, SPARK, KAFKA, ACCOUNT = "gateway", "broker", "query", "spark", "kafka", "account"


def faults_of(state: BridgeState) -> dict[tuple[str, str], str]:
    """Return the present faults of a bridge by line ("" for all lines) and part. Needs the state's lock."""
    faults: dict[tuple[str, str], str] = {}
    is_restarting = state.spark_restarts > 0 and state.spark != "running"
    if is_restarting:
        faults["", SPARK] = f"Spark is {state.spark}"
    if state.kafka not in ("unknown", "reachable"):
        faults["", KAFKA] = state.kafka_error or f"Kafka is {state.kafka}"
    for view in state.lines.values():
        account = view.account
        if view.is_silent:
            faults[view.name, GATEWAY] = view.gateway_error or "the gateway does not answer"
        elif view.status and view.status.get("state") != "online":
            error = (view.status.get("last_error") or {}).get("text")
            faults[view.name, BROKER] = error or f"the session with the broker is {view.status.get('state')}"
        if view.query == STOPPED or (view.query != PAUSED and view.query_error is not None):
            faults[view.name, QUERY] = view.query_error or "the query has stopped"
        elif view.query == "starting" and state.spark_restarts and not is_restarting:
            faults[view.name, QUERY] = "the query is starting again"
        if account is not None and (account.disagreements or account.broken):
            faults[view.name, ACCOUNT] = "; ".join(account.disagreements) or account.broken
    return faults


def _sample(view: LineView) -> list[float | None]:
    account, is_known = view.account, not view.is_silent
    rates = [round(rate, 1) for rate in view.rates()] if is_known else [None, None]
    return [
        *rates,
        None if account is None else account.pending,
        round(view.lag_s(), 2) if is_known else None,
        None if view.batch_s is None else round(view.batch_s, 3),
    ]


# -- reading, for the page ---------------------------------------------------------------------------------------------


class Band(NamedTuple):
    """Time in which a fault was open, in seconds since 1970; `end` is None while it is.

    Attributes:
        line: Its line, "" for all lines.
    """

    start: float
    end: float | None
    line: str
    part: str
    text: str


def line_history(history: History, line: str, since: float, spacing_s: float = 0.0) -> dict[str, Any]:
    """Return the samples of a line from a time on as columns, with bands of faults and the actions of people.

    `since` and `spacing_s` are those of `History.records`.

    A bridge that was killed has recorded no end: its last sample is the start of a band, its next start the end.
    """
    rows: list[tuple[float | None, ...]] = []
    bands: list[Band] = []
    open_bands: dict[tuple[str, str], Band] = {}
    actions: list[dict[str, Any]] = []
    last_sample_at: float | None = None
    for record in history.records(since, spacing_s):
        at = float(record["t"])
        if (samples := record.get("lines")) is not None:
            last_sample_at = at
            if isinstance(sample := samples.get(line), list) and len(sample) == len(COLUMNS) - 1:
                rows.append((at, *sample))
        elif fault := record.get("fault"):
            key = str(fault.get("line")), str(fault.get("part"))
            if (band := open_bands.pop(key, None)) is not None:
                bands.append(band._replace(end=at))
            if "text" in fault and key[0] in ("", line):
                open_bands[key] = Band(float(fault.get("since", at)), None, *key, str(fault["text"]))
        elif "start" in record:
            bands += [band._replace(end=last_sample_at or band.start) for band in open_bands.values()]
            open_bands.clear()
            if last_sample_at is not None and at - last_sample_at > _GAP_S:
                bands.append(Band(last_sample_at, at, "", "bridge", "the bridge did not run"))
        elif (action := record.get("action")) and action.get("line") in ("", line):
            actions.append({"t": at, **action})
    rows.sort(key=lambda row: row[0] or 0.0)  # the clock may have been set
    columns = [list(column) for column in zip(*rows, strict=True)]
    faults = [band._asdict() for band in (*bands, *open_bands.values()) if band.end is None or band.end >= since]
    return {
        "columns": dict(zip(COLUMNS, columns or ([] for _ in COLUMNS), strict=True)),
        "faults": sorted(faults, key=lambda fault: fault["start"]),
        "actions": [action for action in actions if action["t"] >= since],
    }
