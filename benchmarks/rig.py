"""What every benchmark shares: a broker without limits, a backlog, CPU meters, a table.

How a drain is measured: the subject is started and warm, then stopped by SIGSTOP; the backlog is published; CPU clocks
are read; SIGCONT. So no start-up is in any figure, and every subject meets the same waiting messages.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from towline_prove import processes
from towline_prove.devstack.mosquitto import Mosquitto
from towline_prove.load import LoadPlan, LoadResult, run_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: Nothing is dropped while a subject is stopped, and publishers are not held to 20 in flight.
UNLIMITED = {"max_queued_messages": "0", "max_inflight_messages": "65535"}
PATIENCE_S = 180.0


def machine() -> str:
    """The machine in one line."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python {platform.python_version()}"


def header(title: str, broker: Mosquitto) -> None:
    """Say what is measured where."""
    print(f"{title}\n  {machine()}\n  Mosquitto {broker.version}, QoS 1, 150 B payloads, everything on this machine\n")


def publish(
    broker: Mosquitto,
    directory: Path,
    count: int,
    *,
    rate: float = 0.0,
    run: str = "bench",
    qos: int = 1,
    devices: int = 50,
    publishers: int = 8,
    topic: str = "telemetry/{device}/data",
) -> LoadResult:
    """Publish numbered messages from some connections, or one a device; the history lands in the directory."""
    claims = directory / f"claims-{run}-{time.time_ns()}"
    plan = LoadPlan(
        port=broker.port,
        publishers=min(publishers, devices),
        devices=devices,
        messages=count,
        rate=rate,
        run=run,
        window=5000,
        qos=qos,
        topic=topic,
    )
    return run_load(plan, claims)


@dataclass
class Meter:
    """CPU seconds per name between `start` and `stop`.

    Args:
        groups: For each name a function that gives its processes now.
    """

    groups: Mapping[str, Callable[[], Sequence[int]]]
    used: dict[str, float] = field(default_factory=dict)
    _before: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        """Read the clocks."""
        self._before = self._read()

    def stop(self) -> None:
        """Read them again."""
        now = self._read()
        self.used = {name: now[name] - before for name, before in self._before.items()}

    def _read(self) -> dict[str, float]:
        return {name: processes.cpu_time_of(pids()).total_s for name, pids in self.groups.items()}


@contextmanager
def held(pid: int) -> Iterator[None]:
    """SIGSTOP a process for the body, SIGCONT after it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def running(command: Sequence[str | Path], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that says what it has to say in a file, and is killed afterwards."""
    with out.open("wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@dataclass(frozen=True)
class Outcome:
    """One subject's drain.

    Attributes:
        name: The subject.
        count: Messages.
        seconds: From the first moment to the last message.
        cpu: CPU seconds per process name.
        own: Names in `cpu` that make up the subject itself.
    """

    name: str
    count: int
    seconds: float
    cpu: Mapping[str, float]
    own: Sequence[str]

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.count / self.seconds

    def micros(self, name: str) -> float:
        """CPU microseconds a message of one process."""
        return self.cpu[name] / self.count * 1e6

    def line(self) -> str:
        """One line for people."""
        parts = "   ".join(f"{name} {self.micros(name):.2f}" for name in self.cpu)
        return f"  {self.name:<28} {self.rate:>10,.0f} msg/s   {self.seconds:6.2f} s   CPU us/msg: {parts}"


def wait(condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE_S, pause: float = 0.01) -> None:
    """Wait for a condition, or give up with its name."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"gave up after {seconds:.0f} s waiting for {what}")
        time.sleep(pause)
