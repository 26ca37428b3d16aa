"""What is put to the proof: a gateway or a whole bridge, started as a user starts it and hurt from outside."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from towline.bridge.runtime.status import collect
from towline.errors import GatewayError, TowlineError
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import GatewayEndpoint
from towline.journal import Journal
from towline.schema import ROW_SCHEMA
from towline_prove import processes
from towline_prove.devstack.process import Process, wait_for
from towline_prove.processes import Role
from towline_prove.referee import Arrival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from towline.gateway.settings import GatewaySettings

__all__ = [
    "LINE",
    "TOPIC",
    "BridgeRun",
    "GatewayRun",
    "NotReady",
    "Started",
    "arrivals_in",
    "bridge_file",
    "journal_arrivals",
    "last_line",
]

#: Name of the only line, and the Kafka topic that it fills.
LINE: Final = "telemetry"
TOPIC: Final = "telemetry"
READY_S = 60.0
#: Between two questions to a gateway, in seconds: each is a call.
_PAUSE_S = 0.05
#: Longest end of a killed process, in seconds: the kernel frees its memory first.
_GONE_S = 10.0


_CONFIG: Final = """\
# Written by towline {writer}; towline check and towline run take it as it is.
name = "{writer}"
state_dir = "{state_dir}"

[mqtt]
brokers = ["{mqtt}"]

[kafka]
bootstrap_servers = "{kafka}"
{more}

[[uplink]]
name = "{line}"
guarantee = "{guarantee}"

[[uplink.route]]
from = "telemetry/{{device}}/data"
topic = "{topic}"
key = "{{device}}"
"""


def bridge_file(state_dir: Path, mqtt: str, kafka: str, guarantee: str, *, writer: str, more: str) -> str:
    """A bridge file with one uplink.

    Args:
        state_dir: Of the bridge.
        mqtt: URI of the broker.
        kafka: Bootstrap servers.
        guarantee: Of the line.
        writer: Who writes it, and the name of the bridge.
        more: A further line about Kafka.
    """
    parts = {"state_dir": state_dir, "mqtt": mqtt, "kafka": kafka, "guarantee": guarantee}
    return _CONFIG.format(**parts, writer=writer, more=more, line=LINE, topic=TOPIC)


def last_line(log: Path) -> str:
    """The last words of a process, for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"


class NotReady(TowlineError):
    """What was started did not get as far as it should in time (TL-P01)."""


def _as_is(command: Sequence[str]) -> list[str]:
    return list(command)


class Started(Protocol):
    """What a run asks of the process that it has started; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """


class _Run(ABC):
    """A process that is started, killed and started again; a context manager that kills what is left."""

    child: Started | None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.child is not None and self.child.poll() is None

    @abstractmethod
    def endpoint(self) -> GatewayEndpoint | None:
        """Where its gateway listens; None while it does not."""

    def status(self) -> dict[str, Any] | None:
        """The account of its gateway; None while it does not answer."""
        endpoint = self.endpoint()
        if endpoint is None:
            return None
        with GatewayClient(endpoint.location) as client, contextlib.suppress(GatewayError):
            return client.status(timeout_s=5)
        return None

    @property
    def state(self) -> str:
        """The state of its gateway, such as ``online``; empty while it does not answer."""
        return str((self.status() or {}).get("state", ""))

    @abstractmethod
    def everyone(self) -> list[int]:
        """The pids of all its processes, parents before children."""

    def kill(self) -> None:
        """SIGKILL to everyone, children before parents."""
        if self.child is not None:
            _kill(list(map(Process.of, self.everyone())))
            self.child.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass
class GatewayRun(_Run):
    """One gateway process, without Spark.

    Attributes:
        settings: What it reads from its standard input.
        log: File for its output; default ``prove.log`` in the state directory, which is made for it.
    """

    settings: GatewaySettings
    log: Path | None = None
    child: Started | None = field(default=None, init=False)
    _before: GatewayEndpoint | None = field(default=None, init=False)

    def start(self, wrap: Callable[[Sequence[str]], list[str]] = _as_is) -> Self:
        """Start the process; do not wait for it.

        Args:
            wrap: Changes the command line, such as `tests.engines.strace.wrapped`.
        """
        self.begins()
        if self.log is None:
            self.settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.log or self.settings.state_dir / "prove.log").open("ab") as log:
            child = subprocess.Popen(
                wrap([sys.executable, "-m", "towline.gateway"]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.child = child
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            pipe.write(self.settings.model_dump_json().encode())
        return self

    def begins(self) -> None:
        """A process is about to be started: what is there already is of one before it."""
        self._before = GatewayEndpoint.read(self.settings.state_dir)  # left by a killed one

    @property
    def pid(self) -> int:
        """The gateway itself, also when it runs under strace."""
        assert self.child is not None
        return next(iter(processes.named(self.child.pid, Role.GATEWAY)[::-1]), self.child.pid)

    def ready(self, timeout: float = READY_S) -> Self:
        """Wait until it answers.

        Raises:
            NotReady: It ended, or did not answer in time.
        """
        wait_for(lambda: not self.running or self.status() is not None, timeout, _PAUSE_S)
        if self.status() is None:
            raise NotReady("TL-P01", self.settings.name, "the gateway does not answer", "See its log.")
        return self

    def online(self, timeout: float = READY_S) -> Self:
        """Wait until it is subscribed; only then does the broker keep messages for it.

        Raises:
            NotReady: It ended, or was not subscribed in time.
        """
        if not (wait_for(lambda: not self.running or self.state == "online", timeout, _PAUSE_S) and self.running):
            raise NotReady("TL-P01", self.settings.name, "the gateway is not subscribed", "See its log.")
        return self

    def endpoint(self) -> GatewayEndpoint | None:
        """Where *this* process listens, and not the one before it."""
        endpoint = GatewayEndpoint.read(self.settings.state_dir)
        return endpoint if self.running and endpoint != self._before else None

    def client(self) -> GatewayClient | None:
        """A connection to this process; None while it does not listen."""
        endpoint = self.endpoint()
        return GatewayClient(endpoint.location) if endpoint is not None else None

    def until(self, journaled: int, timeout: float = READY_S) -> bool:
        """Wait for that many durable messages; False when it ended or time is up."""
        return wait_for(lambda: not self.running or self._journaled() >= journaled, timeout, _PAUSE_S) and self.running

    def _journaled(self) -> int:
        status = self.status()
        return int(status["journaled"]) if status else -1

    def wait(self, timeout: float = READY_S) -> int | None:
        """Wait for its end; the exit code, or None when it still runs."""
        assert self.child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.wait(timeout)
        return None

    def everyone(self) -> list[int]:
        """The gateway and whatever wraps it."""
        return processes.tree(self.child.pid) if self.child is not None else []

    def stop(self, timeout: float = 30.0) -> int | None:
        """SIGTERM and wait; the exit code."""
        Process.of(self.pid).send(signal.SIGTERM)
        return self.wait(timeout)


@dataclass
class BridgeRun(_Run):
    """``towline run <config>`` and everything below it.

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

    def gateway(self) -> Process | None:
        """The gateway that serves the line now, wherever in the tree it is."""
        endpoint = self.endpoint()
        return Process.of(endpoint.pid) if endpoint is not None else None

    def account(self) -> Mapping[str, Any] | None:
        """The account of the line, as ``towline status --json`` has it; None where it is not known."""
        name = self.state_dir.name
        account: Mapping[str, Any] | None = collect(self.state_dir.parent, [name])["lines"][name]["account"]
        return account

    def find(self, role: Role) -> Process | None:
        """The process that plays a role now; None while there is none."""
        assert self.child is not None
        if role is Role.GATEWAY:
            return self.gateway()
        if role is Role.BRIDGE:
            return Process.of(self.child.pid) if self.running else None
        return next((Process.of(pid) for pid in processes.named(self.child.pid, role)), None)

    def hit(self, role: Role, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal to a role, and wait for the end of one that is killed; False when no process plays it now."""
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

    def endpoint(self) -> GatewayEndpoint | None:
        """Where the line's gateway listens now; one of a gateway that is gone does not count."""
        endpoint = GatewayEndpoint.read(self.state_dir)
        return None if endpoint is None or endpoint.process.gone() else endpoint

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
        everyone = [Process.of(pid) for pid in self.everyone()]
        self.child.terminate()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.child.wait(timeout)
        _kill(everyone)
        return code


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
        return [arrival for batch in batches for arrival in arrivals_in(batch)], journal.repair
    finally:
        journal.close()
