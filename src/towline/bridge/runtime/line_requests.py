"""What is asked of a bridge that runs, or of one of its lines: to reload its file; to pause, to resume, to restart.

A reload is SIGHUP; the others are files in the line's directory, ``state_dir/NAME``, that the bridge looks for at every
tick:

    paused    {"at": SECONDS, "by": NAME}; while it is there the line's query does not run, whoever starts what
    restart   taken away when the restart begins; what becomes of it is ``restarted`` of the line in ``bridge.json``

A pause outlives every process, and may be asked for while no bridge runs, or before the line ever ran.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from towline import files
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import PAUSED, is_there, read_state
from towline.errors import ConfigError, GatewayError
from towline.files import user_name
from towline.gateway.endpoint import not_allowed
from towline.gateway.launch import usable
from towline.guarantee import AckAfter
from towline.text import span
from towline.timing import until

PAUSED_FILE: Final = "paused"
RESTART_FILE: Final = "restart"
#: What becomes of a reload.
APPLIED, REFUSED, UNCHANGED, UNDER_WAY = "applied", "refused", "unchanged", "under way"
#: Longest wait for a reload, in seconds: as long as it waits for Spark and for brokers, and some more.
_PATIENCE_S: Final = 300.0


def pause(directory: Path, by: str = "") -> bool:
    """Pause a line, durably; its gateway goes on receiving, or delivering.

    Args:
        directory: Of the line.
        by: Who asks, for `towline status`; this process's user by default.

    Returns:
        False if it was paused before, which stays as it is.

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
    """Pause a line, or end its pause, and wait until the bridge that runs, if one does, has done so.

    Args:
        bridge: What its file says.
        name: Of the line.
        pausing: Or to resume.
        patience_s: Seconds to wait.

    Returns:
        What is so now, in one line.

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
    """Have the bridge that runs take its file up, or restart a line, and wait for what becomes of it.

    Args:
        bridge: What its file says.
        line: That is to be restarted; "" for the whole file, which SIGHUP asks for.
        patience_s: Seconds to wait for the answer.

    Returns:
        ``outcome`` and ``texts`` of the reload.

    Raises:
        GatewayError: TL-B65, no bridge runs in its state directory, or it does not have the line.
        ConfigError: TL-C73, nor has the file; TL-C177, the bridge was started from another file; TL-C178, it gives no
            answer.
    """
    state_dir = bridge.state_dir
    state = _running(state_dir)
    other = (state.get("file") or {}).get("path")
    if other != str(bridge.file):
        what, do = f"the bridge that runs was started from {other}", "Name that file."
        raise ConfigError("TL-C177", str(bridge.file), what, do)
    asked = time.monotonic()  # which is that of all processes of this machine, and never set
    if line and bridge.line(line).name not in state["lines"]:
        do = "It comes with towline reload."
        raise GatewayError("TL-B65", str(state_dir), f'the bridge that runs has no line "{line}" yet', do)
    if line:
        request_restart(state_dir / line)
    else:
        with suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGHUP)

    def outcome() -> dict[str, Any] | None:
        state = _running(state_dir)
        told: dict[str, Any] = state["lines"].get(line, {}).get("restarted") or {} if line else state.get("reload", {})
        # One that was under way may have read the file before it was changed.
        return told if told.get("began", 0.0) >= asked and told.get("outcome") != UNDER_WAY else None

    if (told := until(outcome, patience_s)) is not None:
        return told
    what, do = f"no answer in {patience_s:.0f} s", "Look at towline status, and at what towline run says."
    raise ConfigError("TL-C178", str(state_dir), what, do)


def _running(state_dir: Path) -> dict[str, Any]:
    """The last word of the bridge that runs there."""
    state = read_state(state_dir) or {}
    if not is_there(state):
        raise GatewayError("TL-B65", str(state_dir), "no bridge runs here", "Start it with towline run.")
    return state
