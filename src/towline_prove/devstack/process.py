"""Processes that can be started, signalled and waited for (none is signalled by its pid alone), and free ports.

Ports are on loopback, outside the range from which the kernel takes the ports of outgoing connections: a broker that is
killed and restarted must find its port free. In the outgoing range a reconnecting client may be given that very number
meanwhile, and may then even connect to itself (TCP's simultaneous open).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from towline import processes
from towline.processes import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


LOOPBACK = "127.0.0.1"
LOWEST_PORT, HIGHEST_PORT = 15_000, 65_535
#: A range smaller than this is too crowded to pick from at random.
MIN_RANGE_SIZE = 1_000

_random = random.SystemRandom()


def free_port() -> int:
    """Return a port on loopback that is free now; another process may take it first, so be ready to ask again."""
    candidates = _candidates()
    for _ in range(100):
        port = _random.choice(candidates)
        if is_free(port):
            return port
    with socket.socket() as probe:  # the kernel's choice
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether a server could bind `port` on loopback now."""
    with socket.socket() as probe:
        # As brokers do: a port whose old connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                return False
            raise
    return True


def _candidates() -> range:
    low, high = _outgoing_range()
    lower_range, upper_range = range(LOWEST_PORT, low), range(high + 1, HIGHEST_PORT + 1)
    largest_range = max(lower_range, upper_range, key=len)
    return largest_range if len(largest_range) >= MIN_RANGE_SIZE else range(LOWEST_PORT, HIGHEST_PORT + 1)


def _outgoing_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    except OSError:
        return 32_768, 60_999  # Linux's default
    return int(low), int(high)
