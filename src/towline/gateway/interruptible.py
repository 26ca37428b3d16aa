"""A long call that a signal handler of Python can run beside."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["interruptible"]

_T = TypeVar("_T")


def interruptible(call: Callable[[], _T]) -> _T:
    """Run a call on a thread of its own, so that signal handlers run here while it takes its time.

    They run on the main thread only: another one makes the call itself.
    """
    if threading.current_thread() is not threading.main_thread():
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
    done.wait()
    value, error = outcome[0]
    if error is not None:
        raise error
    return cast("_T", value)
