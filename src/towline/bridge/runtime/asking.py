"""Asks the bridge that runs in a state directory for a reload, from another process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.runtime.reloading import UNDER_WAY
from towline.bridge.runtime.state import is_there, read_state
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

__all__ = ["reload_from_outside"]

#: Longest wait for the answer, in seconds: as long as a reload waits for Spark and for brokers, and some more.
_PATIENCE_S: Final = 300.0
_LOOK_S: Final = 0.1


def reload_from_outside(bridge: Bridge, patience_s: float = _PATIENCE_S) -> dict[str, Any]:
    """Send SIGHUP to the bridge, and wait for what becomes of it.

    Args:
        bridge: What its file says.
        patience_s: Seconds to wait for the answer.

    Returns:
        ``outcome`` and ``texts`` of the reload (`towline.bridge.runtime.reloading`).

    Raises:
        ConfigError: TL-C177, no bridge runs in its state directory, or one that was started from another file, or by a
            version that ends at SIGHUP; TL-C178, it gives no answer.
    """
    state_dir = bridge.state_dir
    state = _running(state_dir)
    other = (state.get("file") or {}).get("path")
    if "reload" not in state:
        what = f"the bridge with pid {state['pid']} was started by a version that ends at SIGHUP"
        raise ConfigError("TL-C177", str(state_dir), what, "Stop it and start it again.")
    if other != str(bridge.file):
        what, do = f"the bridge that runs was started from {other}", "Name that file."
        raise ConfigError("TL-C177", str(bridge.file), what, do)
    asked = time.time()
    with contextlib.suppress(ProcessLookupError):
        os.kill(state["pid"], signal.SIGHUP)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        told: dict[str, Any] = _running(state_dir).get("reload", {})
        # One that was under way may have read the file before it was changed.
        if told.get("began", 0.0) >= asked and told.get("outcome") != UNDER_WAY:
            return told
        time.sleep(_LOOK_S)
    what, do = f"no answer in {patience_s:.0f} s", "Look at towline status, and at what towline run says."
    raise ConfigError("TL-C178", str(state_dir), what, do)


def _running(state_dir: Path) -> dict[str, Any]:
    """The last word of the bridge that runs there."""
    state = read_state(state_dir) or {}
    if not is_there(state):
        raise ConfigError("TL-C177", str(state_dir), "no bridge runs here", "Start it with towline run.")
    return state
