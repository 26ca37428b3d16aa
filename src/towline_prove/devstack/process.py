"""Processes that can be started, signalled and waited for; none is signalled by its pid alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from towline import processes
from towline.processes import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

POLL_SECONDS = 0.01
"""Pause between two looks at /proc or at a port: far below anything a person or a test notices."""


class Process(ProcessIdentity):
    """Process identified by pid and start time; every method is safe when it is gone or its pid belongs to another."""

    @property
    def alive(self) -> bool:
        """True while exactly this process runs (a zombie does not)."""
        return processes.start_time(self.pid) == self.started

    def send(self, signal_number: signal.Signals) -> bool:
        """Send a signal; False when the process is gone."""
        if not self.alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal_number)
            return True
        return False

    def wait_gone(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for its end; return whether it has ended."""
        return wait_for(lambda: not self.alive, timeout)


class Child(subprocess.Popen[bytes]):
    """Child that may outlive the object and the program: no warning and no reaping when it is collected."""

    def __del__(self) -> None:
        """Leave the process running."""


def spawn(
    command: Sequence[str | Path], output: Path, environment: Mapping[str, str] | None = None
) -> tuple[Child, Process]:
    """Start `command` in a session of its own; its output is appended to the file `output`.

    A session of its own keeps a Ctrl-C in the terminal from the broker: the starting program decides about it.

    Args:
        command: Command line.
        output: Log file, created if missing.
        environment: Complete environment; None for the current one.
    """
    with output.open("ab") as log:
        child = Child(
            [str(argument) for argument in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    return child, Process.of(child.pid)


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by SIGSTOP."""
    fields = processes.stat_fields(pid)
    return fields is not None and fields[0] == "T"


def wait_for(condition: Callable[[], bool], timeout: float, pause: float = POLL_SECONDS) -> bool:
    """Poll `condition` every `pause` seconds for up to `timeout` seconds; return its last result.

    Use a longer pause for a condition that costs something: it leaves the CPU to the process under test.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
