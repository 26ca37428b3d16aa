"""Waiting with an end: one deadline for all the steps of a connection, and a way to give up before it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Final, TypeVar

from towline.threads import later

#: How often a wait asks whether it should be given up, in seconds.
_STEP: Final = 0.1

T = TypeVar("T")


class Patience:
    """The time left for a connection.

    Args:
        timeout_s: Seconds from now.
        cancelled: Asked while waiting, at least every 0.1 s; True ends the wait.
    """

    def __init__(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._cancelled = cancelled

    def left(self) -> float:
        """Seconds left, more than 0.

        Raises:
            TimeoutError: None are left, or the wait was given up.
        """
        if self._cancelled():
            raise TimeoutError("given up")
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        return left

    def step(self, longest: float = _STEP) -> float:
        """Seconds to wait before looking around again, at most `longest`.

        Raises:
            TimeoutError: As `left`.
        """
        return min(self.left(), longest, _STEP)

    def wait(self, descriptor: int, *, write: bool = False) -> None:
        """Return when a descriptor can be read, or written.

        Raises:
            TimeoutError: As `left`.
        """
        poller = select.poll()
        poller.register(descriptor, select.POLLOUT if write else select.POLLIN)
        while not poller.poll(self.step() * 1000):
            pass

    def call(self, call: Callable[[], T], discard: Callable[[T], None] = lambda _result: None) -> T:
        """Run a call that may block for long, such as a look-up in the DNS, and wait for it no longer than we may.

        Args:
            call: Runs in a thread of its own, which is left behind when the time is over.
            discard: Gets the result that came too late.

        Raises:
            TimeoutError: As `left`.
            BaseException: Whatever `call` raises.
        """
        running = later(call, "towline-connect")
        try:
            while not wait([running], self.step()).done:
                pass
        except TimeoutError:
            running.add_done_callback(lambda late: None if late.exception() else discard(late.result()))
            raise
        return running.result()


def plain(error: BaseException) -> str:
    """The system's words for an error, without its number and our paths."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).strip().rstrip(".").lower().replace("_", " ")
