"""Threads under a guard: a fault that ends one is reported, and what then becomes of its work is said where it is made.

Every thread of Towline's is made here, but for the supervisors of a bridge, which are watched
(`towline.bridge.runtime.supervision`).
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from towline.errors import TowlineError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["guarded_thread", "later"]

T = TypeVar("T")

_LOG = logging.getLogger("towline.threads")


def guarded_thread(
    target: Callable[..., object],
    name: str,
    *arguments: object,
    again_s: float | None = None,
    ended: Callable[[BaseException], object] | None = None,
) -> threading.Thread:
    """A daemon thread, not started; a fault of its target is reported in one line without its text [I12, TL-B55].

    An error of ours is no fault where it is handed on: who gets it tells it.

    Args:
        target: What it runs; the thread ends where that returns.
        name: Of the thread.
        arguments: Of the target.
        again_s: Seconds after a fault until the target is called again; None ends the thread.
        ended: Told of a fault that ends the thread, so that whoever needs it ends too, or hears of it.
    """

    def run() -> object:
        told = ""
        while True:
            try:
                target(*arguments)
            except BaseException as error:  # noqa: BLE001 - whatever it is, somebody has to know
                at = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__}, {Path(at.filename).name} line {at.lineno}"
                if what != told and (ended is None or not isinstance(error, TowlineError)):
                    then = "it ends" if again_s is None else "it is started again"
                    _LOG.error('thread "%s": a fault in Towline (%s); %s   [TL-B55]', name, what, then)
                told = what
                if again_s is None:
                    return None if ended is None else ended(error)
                time.sleep(again_s)
            else:
                return None

    return threading.Thread(target=run, name=name, daemon=True)


def later(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call on a daemon thread; the future has its result, or whatever it raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised to who asks for the result
            future.set_exception(error)
        else:
            future.set_result(result)

    guarded_thread(run, name).start()
    return future
