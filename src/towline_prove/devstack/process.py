"""Processes that can be hurt, waited for and started; none is signalled by its pid alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from towline import processes
from towline.processes import ProcessMark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

POLL_SECONDS = 0.01
"""Pause between two looks at /proc or at a port: far below anything a person or a test notices."""


class Process(ProcessMark):
    """A process that existed once; every method is safe when it is gone or its pid belongs to another."""

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs (a zombie does not)."""
        return processes.started(self.pid) == self.started

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False when the process is gone."""
        if not self.alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def wait_gone(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for its end; whether it has ended."""
        return wait_for(lambda: not self.alive, timeout)


class Child(subprocess.Popen[bytes]):
    """A child that may outlive the object and the program: no warning, no reaping, when it is collected."""

    def __del__(self) -> None:
        """Leave the process alone."""


def spawn(
    command: Sequence[str | Path], output: Path, environment: Mapping[str, str] | None = None
) -> tuple[Child, Process]:
    """Start `command` in a session of its own, its output appended to the file `output`.

    A session of its own keeps a Ctrl-C in the terminal from the broker: whoever started it decides about it.

    Args:
        command: What is run.
        output: Made where it is missing.
        environment: All that it inherits; None for what this process has.
    """
    with output.open("ab") as log:
        child = Child(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    return child, Process.of(child.pid)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by SIGSTOP."""
    fields = processes.fields(pid)
    return fields is not None and fields[0] == "T"


def wait_for(condition: Callable[[], bool], timeout: float, pause: float = POLL_SECONDS) -> bool:
    """Ask `condition` every `pause` seconds for up to `timeout` seconds; its last answer.

    A longer pause is for a question that costs something: it leaves the CPU to the process that is asked.
    """
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
