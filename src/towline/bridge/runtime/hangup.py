"""SIGHUP has two meanings: the terminal is gone, and "read your configuration again". Which one is it?

A process whose terminal goes away is told so with SIGHUP, by the kernel or by its shell, and from then on it has no
controlling terminal any more: ``/dev/tty`` can't be opened. A bridge that was started on a terminal ends with it, as
any other program; with ``nohup``, which asks for that, it goes on. Any other SIGHUP is meant as a reload: a service has
no terminal, and one that lost its terminal a while ago is told nothing by the kernel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Terminal"]

#: A SIGHUP so many seconds after the terminal was last there is about its end; shells wait for nothing.
_JUST_GONE_S: Final = 3.0


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Terminal:
    """The controlling terminal of this process, if it has one.

    Args:
        there: Whether it has one now.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, there: Callable[[], bool] = _has_terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._there = there
        self._clock = clock
        #: When it was there last; None for a process that had none.
        self._seen: float | None = None
        self.look()

    def look(self) -> None:
        """Note whether it is there; call it every second or so."""
        if self._there():
            self._seen = self._clock()

    def just_gone(self) -> bool:
        """Whether it went away a moment ago, so that a SIGHUP tells that."""
        if self._seen is None or self._clock() - self._seen > _JUST_GONE_S:
            return False
        return not self._there()
