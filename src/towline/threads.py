"""Guarded daemon threads, whose faults are reported, and interruptible condition variables.

All threads of Towline start here, except the supervisors of a bridge (`towline.bridge.runtime.child_supervisors`),
which are monitored there.
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
    """Condition variable whose lock is never left acquired by a KeyboardInterrupt.

    `threading.Condition` acquires its lock in a method written in Python; one that is interrupted right behind that
    leaves it acquired for ever, and every other thread waits. ``with`` enters the lock's own method, which is C, in one
    step (bpo-29988).
    """

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as `threading.Condition.wait`; an interrupted wait acquires the lock again, too."""
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
    retry_s: float | None = None,
    on_fault: Callable[[BaseException], object] | None = None,
) -> threading.Thread:
    """Create a daemon thread, not started, whose faults are passed to `on_fault` or logged without their text [I12].

    Args:
        target: Function to run; the thread ends when it returns.
        name: Thread name.
        arguments: Arguments of the target.
        retry_s: Seconds until the target is called again after a logged fault (TL-B55); None ends the thread.
        on_fault: Receives the exception that ends the thread, and must report it.
    """

    def run() -> object:
        reported = ""
        while True:
            try:
                target(*arguments)
            except BaseException as error:  # noqa: BLE001 - whatever it is, somebody has to know
                if on_fault is not None:
                    return on_fault(error)
                frame = traceback.extract_tb(error.__traceback__)[-1]
                fault = f"{type(error).__name__}, {Path(frame.filename).name} line {frame.lineno}"
                outcome = "it ends" if retry_s is None else "it is started again"
                if fault != reported:
                    _LOG.error('thread "%s": a fault in Towline (%s); %s   [TL-B55]', name, fault, outcome)
                reported = fault
                if retry_s is None:
                    return None
                time.sleep(retry_s)
            else:
                return None

    return threading.Thread(target=run, name=name, daemon=True)


def call_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a daemon thread; return a future of its result or exception."""
    future: Future[T] = Future()
    guarded_thread(lambda: future.set_result(call()), name, on_fault=future.set_exception).start()
    return future
