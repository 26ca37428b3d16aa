"""Threads under a guard: a fault that ends one is reported, and what then becomes of its work is said where it is made.

Every thread of Towline's is made here, but for the supervisors of a bridge, which are watched
(`towline.bridge.runtime.supervisors`); and every condition variable is one of these.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_LOG = logging.getLogger("towline.threads")


class Condition(threading.Condition):
    """A condition variable whose lock is never left acquired by a KeyboardInterrupt.

    `threading.Condition` acquires its lock in a method written in Python; one that is interrupted right behind that
    leaves it acquired for ever, and every other thread waits. ``with`` enters the lock's own method, which is C, in one
    step (bpo-29988).
    """

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Condition.wait`; the lock is acquired again when the wait is interrupted, too."""
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]
                self.acquire()
            raise


def guarded_thread(
    target: Callable[..., object],
    name: str,
    *arguments: object,
    again_s: float | None = None,
    ended: Callable[[BaseException], object] | None = None,
) -> threading.Thread:
    """A daemon thread, not started; a fault of its target is handed on, or told in a line without its text [I12].

    Args:
        target: What it runs; the thread ends where that returns.
        name: Of the thread.
        arguments: Of the target.
        again_s: Seconds after a fault, which is told (TL-B55), until the target is called again; None ends the thread.
        ended: Takes the error that ends the thread, and tells it: whoever needs the thread ends too, or hears of it.
    """

    def run() -> object:
        told = ""
        while True:
            try:
                target(*arguments)
            except BaseException as error:  # noqa: BLE001 - whatever it is, somebody has to know
                if ended is not None:
                    return ended(error)
                at = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__}, {Path(at.filename).name} line {at.lineno}"
                then = "it ends" if again_s is None else "it is started again"
                if what != told:
                    _LOG.error('thread "%s": a fault in Towline (%s); %s   [TL-B55]', name, what, then)
                told = what
                if again_s is None:
                    return None
                time.sleep(again_s)
            else:
                return None

    return threading.Thread(target=run, name=name, daemon=True)


def later(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call on a daemon thread; the future has its result, or whatever it raises."""
    future: Future[T] = Future()
    guarded_thread(lambda: future.set_result(call()), name, ended=future.set_exception).start()
    return future
