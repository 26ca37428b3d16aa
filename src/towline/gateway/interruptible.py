"""A long call that a signal handler of Python can run beside."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["interruptible"]

_T = TypeVar("_T")


def interruptible(call: Callable[[], _T], timeout_s: float | None = None) -> _T:
    """Run a call on a thread of its own, so that signal handlers run here while it takes its time.

    They run on the main thread only: another one makes a call without a time limit itself.

    Args:
        call: It goes on, and nobody hears of it, when the time is over.
        timeout_s: Longest time for it, in seconds; None for no end.

    Raises:
        TimeoutError: The time is over.
    """
    if timeout_s is None and threading.current_thread() is not threading.main_thread():
        return call()
    outcome: list[tuple[_T | None, BaseException | None]] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again below, on the caller's thread
            outcome.append((None, error))
        done.set()

    threading.Thread(target=run, name="gateway-call", daemon=True).start()
    if not done.wait(timeout_s):
        raise TimeoutError
    value, error = outcome[0]
    if error is not None:
        raise error
    return cast("_T", value)
