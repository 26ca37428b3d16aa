"""The logs of Towline's processes: files that a process and those it starts append to, and that stay small.

Spark's JVM and its Python workers inherit the file, so it can't be renamed under them: its content is copied to another
file, and then it is cut to nothing. A line written in between is lost, as with any rotation of this kind.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

from towline.errors import ConfigError

#: A larger log is copied to ``NAME.1`` and cut. With two older ones it takes 30 MB at most.
MOST_BYTES: Final = 10 << 20
#: Older logs beside it: ``NAME.1`` is the newest.
KEPT: Final = 2


_LEVELS: Final = {name: logging.getLevelNamesMapping()[name.upper()] for name in ("debug", "info", "warning", "error")}
_FORMATS: Final = ("auto", "json", "text")


def log_settings(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Read ``TOWLINE_LOG_LEVEL`` and ``TOWLINE_LOG_FORMAT``, which a process hands on to those that it starts.

    Returns:
        The least that is logged, as `logging` counts; and ``json`` or ``text``, or ``auto`` for text on a terminal, and
        elsewhere what the process is used to.

    Raises:
        ConfigError: TL-C147, one has no value of its own.
    """
    level, form = environ.get("TOWLINE_LOG_LEVEL", "info").lower(), environ.get("TOWLINE_LOG_FORMAT", "auto").lower()
    for name, value, known in (("LEVEL", level, [*_LEVELS]), ("FORMAT", form, [*_FORMATS])):
        if value not in known:
            what = f'"{value}" is none of {", ".join(known)}'
            raise ConfigError("TL-C147", f"TOWLINE_LOG_{name}", what, "Set one of them, or leave the variable out.")
    return _LEVELS[level], form


def trim(log: Path, most: int = MOST_BYTES, kept: int = KEPT) -> None:
    """Copy a log that has grown beyond `most` bytes and cut it; so many older ones are kept.

    Whoever writes it appends to it. One that can't be copied, for want of room, stays as it is.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size <= most:
            return
        kept_logs = [log.with_name(f"{log.name}.{number}") for number in range(1, kept + 1)]
        for newer, older in zip(kept_logs[-2::-1], kept_logs[:0:-1], strict=True):
            if newer.exists():
                newer.replace(older)
        try:
            shutil.copyfile(log, kept_logs[0])
            kept_logs[0].chmod(0o600)
        except OSError:
            kept_logs[0].unlink(missing_ok=True)
            raise
        os.truncate(log, 0)


def own_log() -> Path | None:
    """The file that this process's standard error goes to; None for a terminal or a pipe."""
    try:
        return Path("/proc/self/fd/2").readlink() if stat.S_ISREG(os.fstat(2).st_mode) else None
    except OSError:
        return None


class LogStream:
    """Standard error as a log that never ends the process: a full disk costs lines, not messages.

    Args:
        most: Bytes the file may have, if it is one that is appended to; None leaves that to others.
    """

    def __init__(self, stream: TextIO, most: int | None = None) -> None:
        self._stream = stream
        self._most = most

    def write(self, text: str) -> int:
        """Write and flush."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
            # Only one that is opened for appending has no gap when it was cut.
            if self._most and (log := own_log()) and fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND:
                trim(log, self._most)
        return len(text)

    def flush(self) -> None:
        """Every write does it."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
