"""The guard of threads, whose faults are told without their text; the lock of a condition variable under Ctrl-C."""

from __future__ import annotations

import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from towline.threads import Condition, call_in_thread, guarded_thread


def raising(secret: str) -> None:
    raise ValueError(secret)


def test_a_fault_is_told_without_its_text_or_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[BaseException] = []
    for thread in (
        guarded_thread(raising, "t", "hunter2"),
        guarded_thread(raising, "u", "hunter2", on_fault=seen.append),
    ):
        thread.start()
        thread.join(10)
    assert [str(one) for one in seen] == ["hunter2"]
    (record,) = caplog.record_tuples
    line = raising.__code__.co_firstlineno + 1
    told = f'thread "t": a fault in Towline (ValueError, {HERE} line {line}); it ends   [TL-B55]'
    assert record == ("towline.threads", logging.ERROR, told)


def test_what_is_started_again_goes_on_and_tells_a_fault_that_stays_once(caplog: pytest.LogCaptureFixture) -> None:
    calls, goes = [], threading.Event()

    def target() -> None:
        calls.append(1)
        if len(calls) < 4:
            raise OSError("no room")
        goes.set()

    guarded_thread(target, "t", retry_s=0.001).start()
    assert goes.wait(10)
    assert [record.getMessage().count("started again") for record in caplog.records] == [1]


@pytest.fixture
def ctrl_c_at_any_moment() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Repeats a call until a KeyboardInterrupt ends it, at a random moment within half a millisecond."""

    def interrupted(step: Callable[[], object]) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 5e-4))
            while True:
                step()
        except KeyboardInterrupt:
            return

    former = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield interrupted
    signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("wait_s", [None, 1e-5])
def test_a_condition_lock_is_free_after_a_ctrl_c_at_any_moment(
    ctrl_c_at_any_moment: Callable[[Callable[[], object]], None], wait_s: float | None
) -> None:
    """That of `threading.Condition` is not: the threads of `Client` and `Publisher` waited for it for ever."""
    condition = Condition()

    def step() -> None:
        with condition:
            if wait_s is not None:
                condition.wait(wait_s)

    def free() -> bool:
        if taken := condition.acquire(blocking=False):
            condition.release()
        return taken

    for number in range(300):
        ctrl_c_at_any_moment(step)
        assert call_in_thread(free, "t").result(10), f"held after Ctrl-C number {number}"


HERE = __file__.rpartition("/")[2]
