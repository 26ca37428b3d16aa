"""What is put to the proof: a gateway or a whole bridge, started as a user starts it and hurt from outside."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from towline.errors import GatewayError, TowlineError
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import GatewayEndpoint
from towline.journal import Journal
from towline.schema import ROW_SCHEMA
from towline_prove import processes
from towline_prove.devstack.process import Process
from towline_prove.processes import Role
from towline_prove.referee import Arrival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from towline.gateway.settings import GatewaySettings

__all__ = ["BridgeRun", "GatewayRun", "NotReady", "arrivals_in", "journal_arrivals"]

READY_S = 60.0
#: Longest end of a killed process, in seconds: the kernel frees its memory first.
_GONE_S = 10.0


class NotReady(TowlineError):
    """What was started did not get as far as it should in time (TL-P01)."""


def _wait(condition: Callable[[], bool], timeout: float) -> bool:
    """Like `wait_for`, but asking costs a call: leave the CPU to the one who is asked."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _as_is(command: Sequence[str]) -> list[str]:
    return list(command)


@dataclass
class GatewayRun:
    """One gateway process, without Spark; a context manager that kills what is left.

    Attributes:
        settings: What it is told on its standard input.
        log: File for its output; default ``prove.log`` in the state directory, which is made for it.
    """

    settings: GatewaySettings
    log: Path | None = None
    child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _before: GatewayEndpoint | None = field(default=None, init=False)

    def start(self, wrap: Callable[[Sequence[str]], list[str]] = _as_is) -> Self:
        """Start the process; do not wait for it.

        Args:
            wrap: Changes the command line, such as `tests.engines.strace.wrapped`.
        """
        self._before = GatewayEndpoint.read(self.settings.state_dir)  # left by a killed one
        if self.log is None:
            self.settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.log or self.settings.state_dir / "prove.log").open("ab") as log:
            self.child = subprocess.Popen(
                wrap([sys.executable, "-m", "towline.gateway"]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.child.stdin as pipe:
            pipe.write(self.settings.model_dump_json().encode())
        return self

    @property
    def pid(self) -> int:
        """The gateway itself, also when it runs under strace."""
        assert self.child is not None
        return next(iter(processes.named(self.child.pid, Role.GATEWAY)[::-1]), self.child.pid)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.child is not None and self.child.poll() is None

    def ready(self, timeout: float = READY_S) -> Self:
        """Wait until it answers.

        Raises:
            NotReady: It ended, or did not answer in time.
        """
        _wait(lambda: not self.running or self.status() is not None, timeout)
        if self.status() is None:
            raise NotReady("TL-P01", self.settings.name, "the gateway does not answer", "See its log.")
        return self

    def online(self, timeout: float = READY_S) -> Self:
        """Wait until it is subscribed; only then does the broker keep messages for it.

        Raises:
            NotReady: It ended, or was not subscribed in time.
        """
        if not (_wait(lambda: not self.running or self._state() == "online", timeout) and self.running):
            raise NotReady("TL-P01", self.settings.name, "the gateway is not subscribed", "See its log.")
        return self

    def _state(self) -> str:
        return str((self.status() or {}).get("state"))

    def client(self) -> GatewayClient | None:
        """A connection to *this* process, when it listens."""
        endpoint = GatewayEndpoint.read(self.settings.state_dir)
        if endpoint is None or not self.running or endpoint == self._before:
            return None
        return GatewayClient(endpoint.location)

    def status(self) -> dict[str, Any] | None:
        """Its account; None while it does not answer."""
        client = self.client()
        if client is None:
            return None
        with client, contextlib.suppress(GatewayError):
            return client.status(timeout_s=5)
        return None

    def until(self, journaled: int, timeout: float = READY_S) -> bool:
        """Wait for that many durable messages; False when it ended or time is up."""
        return _wait(lambda: not self.running or self._journaled() >= journaled, timeout) and self.running

    def _journaled(self) -> int:
        status = self.status()
        return int(status["journaled"]) if status else -1

    def wait(self, timeout: float = READY_S) -> int | None:
        """Wait for its end; the exit code, or None when it still runs."""
        assert self.child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.wait(timeout)
        return None

    def kill(self) -> None:
        """SIGKILL, to the gateway first and to whatever wraps it."""
        if self.child is None:
            return
        for pid in processes.tree(self.child.pid)[::-1]:
            processes.process(pid).send(signal.SIGKILL)
        self.child.wait(30)

    def stop(self, timeout: float = 30.0) -> int | None:
        """SIGTERM and wait; the exit code."""
        processes.process(self.pid).send(signal.SIGTERM)
        return self.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass
class BridgeRun:
    """``towline run <config>`` and everything below it; a context manager that kills what is left.

    Attributes:
        config: The bridge's TOML file.
        state_dir: The ``state_dir`` of one line, where its ``endpoint.json`` is.
        log: File for its output.
    """

    config: Path
    state_dir: Path
    log: Path
    child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    starts: int = field(default=0, init=False)

    def start(self) -> Self:
        """Start the bridge; do not wait for it."""
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-c", "from towline.cli import main; main()", "run", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        return self

    @property
    def running(self) -> bool:
        """Whether the bridge process has not ended."""
        return self.child is not None and self.child.poll() is None

    def gateway(self) -> Process | None:
        """The gateway that serves the line now, wherever in the tree it is."""
        endpoint = GatewayEndpoint.read(self.state_dir)
        if endpoint is None or endpoint.process.gone():
            return None
        return processes.process(endpoint.pid)

    def find(self, role: Role) -> Process | None:
        """The process that plays a role now; None while there is none."""
        assert self.child is not None
        if role is Role.GATEWAY:
            return self.gateway()
        if role is Role.BRIDGE:
            return processes.process(self.child.pid) if self.running else None
        return next((processes.process(pid) for pid in processes.named(self.child.pid, role)), None)

    def hit(self, role: Role, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal to a role, and wait for the end of one that is killed; False when nobody plays it now."""
        process = self.find(role)
        if process is None or not process.send(number):
            return False
        return number is not signal.SIGKILL or process.wait_gone(_GONE_S)

    def restart_if_ended(self) -> bool:
        """Start the bridge again when it has ended, as a service manager would."""
        if self.running:
            return False
        self.start()
        return True

    def status(self) -> dict[str, Any] | None:
        """The account of the line's gateway; None while it does not answer."""
        endpoint = GatewayEndpoint.read(self.state_dir)
        if endpoint is None or endpoint.process.gone():
            return None
        with GatewayClient(endpoint.location) as client, contextlib.suppress(GatewayError):
            return client.status(timeout_s=5)
        return None

    def everyone(self) -> list[int]:
        """All pids: the bridge, what it started, and the gateway even when it has another parent."""
        pids = processes.tree(self.child.pid) if self.child is not None and self.running else []
        gateway = self.gateway()
        if gateway is not None and gateway.pid not in pids:
            pids += processes.tree(gateway.pid)
        return pids

    def stop(self, timeout: float = 60.0) -> int | None:
        """SIGTERM to the bridge and wait; the exit code, None when it had to be killed."""
        if self.child is None:
            return None
        everyone = [processes.process(pid) for pid in self.everyone()]
        self.child.terminate()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.child.wait(timeout)
        _kill(everyone)
        return code

    def kill(self) -> None:
        """SIGKILL to everyone."""
        if self.child is not None:
            _kill([processes.process(pid) for pid in self.everyone()])
            self.child.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _kill(everyone: list[Process]) -> None:
    for process in everyone[::-1]:
        process.send(signal.SIGKILL)
    for process in everyone:
        process.wait_gone(_GONE_S)


def arrivals_in(batch: Any) -> Iterator[Arrival]:
    """What the referee compares, of a batch of the inbox."""
    for row in batch.select(["offset", "payload"]).to_pylist():
        yield Arrival(0, row["offset"], None, row["payload"])


def journal_arrivals(settings: GatewaySettings) -> tuple[list[Arrival], str]:
    """Read the inbox of an ended gateway back; returns its rows and what opening it repaired."""
    journal = Journal.open(settings.inbox, schema=ROW_SCHEMA)
    try:
        batches = journal.read(journal.first, journal.end)
        return [arrival for batch in batches for arrival in arrivals_in(batch)], journal.recovery.note or ""
    finally:
        journal.close()
