"""Calls that wait until something has happened, each on a thread of the service's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from towline.threads import Condition

__all__ = ["LongPoll"]

#: How often a waiting call looks whether its caller is still there, in seconds.
_GLANCE_S: Final = 1.0


class LongPoll:
    """A condition that any number of calls wait for.

    Attributes:
        changed: Guards what the calls look at; notified with each change.
        waiting: So many calls wait.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self.waiting = 0
        self._closing = False

    def notify(self) -> None:
        """Something has happened: whoever waits looks again; cheap when nobody does."""
        # A call counts itself before it looks: one that is not counted yet will see what has happened.
        if self.waiting:
            with self.changed:
                self.changed.notify_all()

    def close(self) -> None:
        """Let all who wait go."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()

    def wait(
        self,
        happened: Callable[[], bool],
        timeout_s: float,
        cancelled: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Wait until something has happened; False when the time is over, the caller has gone, or this is closed.

        Args:
            happened: Asked first, and after each change.
            timeout_s: Longest wait, in seconds.
            cancelled: Whether the caller has gone.
            check: Called after each change; what it raises ends the wait.
        """
        deadline = time.monotonic() + timeout_s
        with self.changed:
            self.waiting += 1
            try:
                while not happened():
                    left = deadline - time.monotonic()
                    if left <= 0 or self._closing or cancelled():
                        return False
                    self.changed.wait(min(left, _GLANCE_S))
                    check()
            finally:
                self.waiting -= 1
        return True
