"""SIGHUP of a terminal that goes away, and SIGHUP that asks for a reload."""

from __future__ import annotations

import os
import pty
import signal
import sys
from types import SimpleNamespace

from tests.helpers import wait_until
from towline.bridge.runtime.supervisor import Terminal

#: A process with a terminal of its own that tells what each SIGHUP means, and looks for it as a bridge does.
_PROGRAM = """
import os, signal, sys, time
from towline.bridge.runtime.supervisor import Terminal

terminal = Terminal()
told = int(sys.argv[1])
signal.signal(signal.SIGHUP, lambda *_: os.write(told, b"g" if terminal.has_just_closed() else b"r"))
os.write(told, b"s")
while True:
    time.sleep(0.1)
    terminal.check()
"""


def test_a_terminal_that_goes_away_is_no_wish_to_reload() -> None:
    """The kernel's own SIGHUP, on a real terminal; and one that somebody sends while it is there."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.set_inheritable(writes, True)
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", _PROGRAM, str(writes)])  # noqa: S606 - there is none
    told = b""

    def heard(text: bytes) -> bool:
        nonlocal told
        try:
            told += os.read(reads, 100)
        except BlockingIOError:
            return False
        return told == text

    try:
        wait_until(lambda: heard(b"s"), what="the start")
        os.kill(child, signal.SIGHUP)
        wait_until(lambda: heard(b"sr"), what="a reload")
        os.close(terminal)
        wait_until(lambda: heard(b"srg"), what="the end of the terminal")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def test_long_after_its_terminal_went_away_sighup_is_a_reload() -> None:
    now = SimpleNamespace(there=True, at=100.0)
    terminal = Terminal(lambda: now.there, lambda: now.at)
    now.there, now.at = False, 102.0
    assert terminal.has_just_closed()
    terminal.check()
    now.at = 104.0
    assert not terminal.has_just_closed()
    service = Terminal(lambda: False, lambda: now.at)
    assert not service.has_just_closed(), "a service never had one"
