"""The process on the driver in which Spark keeps a Python source for the whole of a query."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["end_in_order", "is_runner"]

_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"


def is_runner() -> bool:
    """Whether this process is Spark's source runner on the driver."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", "") == _RUNNER


def end_in_order() -> None:
    """Let SIGTERM end Spark's source runner through ``finally: reader.stop()``.

    Spark sends SIGTERM twice, two milliseconds apart, and Python would die at the first: the handler ignores the
    second one, so that the lease is given back. Only in the runner: elsewhere the signal is not ours.
    """
    if not is_runner() or threading.current_thread() is not threading.main_thread():
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
