"""What is asked of one line of a bridge: to pause, to resume, to restart.

Each is a file in the line's directory, ``state_dir/NAME``, that the bridge looks for at every tick:

    paused    {"at": SECONDS, "by": NAME}; while it is there the line's query does not run, whoever starts what
    restart   an id, under which the bridge says what became of it (``reload`` of ``bridge.json``)

A pause outlives every process, and may be asked for while no bridge runs, or before the line ever ran.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from towline import files
from towline.errors import GatewayError
from towline.gateway.endpoint import not_allowed
from towline.gateway.launch import usable
from towline.ownership import user_name

__all__ = ["Pause", "pause", "paused", "request_restart", "resume", "take_restart"]

PAUSED_FILE: Final = "paused"
RESTART_FILE: Final = "restart"


@dataclass(frozen=True, slots=True)
class Pause:
    """That a line is paused.

    Attributes:
        at: Since when, in seconds since 1970; 0 where the file does not say it.
        by: By whom; "" where the file does not say it.
    """

    at: float = 0.0
    by: str = ""


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
    new = paused(directory) is None
    if new:
        text = json.dumps(asdict(Pause(time.time(), by or user_name(os.geteuid()))))
        _put(directory / PAUSED_FILE, text)
    return new


def resume(directory: Path) -> bool:
    """End the pause of a line, durably; False if it was not paused. Raises as `pause`."""
    there = paused(directory) is not None
    if there:
        _put(directory / PAUSED_FILE, None)
    return there


def paused(directory: Path) -> Pause | None:
    """The pause of a line, None where it has none; a file that says nothing is one too. Raises as `pause`."""
    file = directory / PAUSED_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return Pause(float(values["at"]), str(values["by"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise not_allowed(file) from None
    except (OSError, ValueError, KeyError, TypeError):
        return Pause()


def request_restart(directory: Path) -> str:
    """Ask the bridge that runs to restart a line; the id of the request. Raises as `pause`."""
    request = _restart(directory) or uuid.uuid4().hex  # two that ask get one restart
    _put(directory / RESTART_FILE, request)
    return request


def take_restart(directory: Path) -> str:
    """Take the request to restart a line away, and return its id; "" where there is none."""
    if request := _restart(directory):
        (directory / RESTART_FILE).unlink(missing_ok=True)
    return request


def _restart(directory: Path) -> str:
    with suppress(OSError, ValueError):
        return (directory / RESTART_FILE).read_text(encoding="utf-8")
    return ""


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
