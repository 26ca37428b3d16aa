"""Log files of Towline's processes: settings, rotation, and standard error as a log.

Spark's JVM and its Python workers inherit the open file, so rotation can't rename it: the content is copied to another
file and the log is truncated. A line written in between is lost, as with logrotate's ``copytruncate``.
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
MAX_LOG_BYTES: Final = 10 << 20
#: Older logs beside it: ``NAME.1`` is the newest.
OLD_LOGS: Final = 2


_LEVELS: Final = {name: logging.getLevelNamesMapping()[name.upper()] for name in ("debug", "info", "warning", "error")}
_FORMATS: Final = ("auto", "json", "text")
_DEFAULTS: Final = (("LEVEL", "info"), ("FORMAT", "auto"))


def log_settings(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Read the environment variables ``TOWLINE_LOG_LEVEL`` and ``TOWLINE_LOG_FORMAT``; child processes inherit them.

    Returns:
        The log level as a number of `logging`; and ``json``, ``text``, or ``auto`` for text on a terminal and the
        process's default format elsewhere.

    Raises:
        ConfigError: TL-C147, a variable has an unknown value.
    """
    level, form = (environ.get(f"TOWLINE_LOG_{name}", value).lower() for name, value in _DEFAULTS)
    for name, value, choices in (("LEVEL", level, [*_LEVELS]), ("FORMAT", form, [*_FORMATS])):
        if value not in choices:
            problem = f'"{value}" is none of {", ".join(choices)}'
            raise ConfigError("TL-C147", f"TOWLINE_LOG_{name}", problem, "Set one of them, or leave the variable out.")
    return _LEVELS[level], form


def rotate_log(log: Path, max_bytes: int = MAX_LOG_BYTES, old_logs: int = OLD_LOGS) -> None:
    """Rotate a log larger than `max_bytes`: copy it to ``NAME.1``, truncate it, keep `old_logs` older files.

    Writers must append. A log that can't be copied, for lack of space, stays as it is.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size <= max_bytes:
            return
        old_files = [log.with_name(f"{log.name}.{number}") for number in range(1, old_logs + 1)]
        for newer, older in zip(old_files[-2::-1], old_files[:0:-1], strict=True):
            if newer.exists():
                newer.replace(older)
        try:
            shutil.copyfile(log, old_files[0])
            old_files[0].chmod(0o600)
        except OSError:
            old_files[0].unlink(missing_ok=True)
            raise
        os.truncate(log, 0)


def stderr_log() -> Path | None:
    """Return the file that standard error writes to; None for a terminal or a pipe."""
    try:
        return Path("/proc/self/fd/2").readlink() if stat.S_ISREG(os.fstat(2).st_mode) else None
    except OSError:
        return None


class LogStream:
    """Standard error as a log: a full disk loses log lines, but never ends the process.

    Args:
        stream: Stream to write to.
        max_bytes: Rotate the file beyond this size, if it is open for appending; None for no rotation here.
    """

    def __init__(self, stream: TextIO, max_bytes: int | None = None) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    def write(self, text: str) -> int:
        """Write a text and flush; errors of the stream are ignored."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
            # Only one that is opened for appending has no gap when it was cut.
            if self._max_bytes and (log := stderr_log()) and fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND:
                rotate_log(log, self._max_bytes)
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write flushes."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
