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
from towline_prove import processes
from towline_prove.devstack.process import Process, spawn, wait_for
from towline_prove.processes import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from towline.gateway.settings import GatewaySettings

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
name = "{name}"
guarantee = "{guarantee}"
{line}

[[uplink.route]]
from = "telemetry/{{device}}/data"
topic = "{topic}"
key = "{{device}}"
"""


def bridge_file(
    state_dir: Path, mqtt: str, kafka: str, guarantee: str, *, writer: str, more: str, line: str = ""
) -> str:
    """A bridge file with one uplink.

    Args:
        state_dir: Of the bridge.
        mqtt: URI of the broker.
        kafka: Bootstrap servers.
        guarantee: Of the line.
        writer: Who writes it, and the name of the bridge.
        more: A further line about Kafka.
        line: A further line of the uplink.
    """
    parts = {"state_dir": state_dir, "mqtt": mqtt, "kafka": kafka, "guarantee": guarantee}
    return _CONFIG.format(**parts, writer=writer, more=more, name=LINE, line=line, topic=TOPIC)


class NotReady(TowlineError):
    """What was started did not get as far as it should in time (TL-P01)."""


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


class _Subject(ABC):
    """A process that is started, killed and started again; a context manager that kills what is left."""

    child: Started | None
    state_dir: Path

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.child is not None and self.child.poll() is None

    def endpoint(self) -> GatewayEndpoint | None:
        """Where its gateway listens now; one of a gateway that is gone does not count."""
        endpoint = GatewayEndpoint.read(self.state_dir)
        return None if endpoint is None or endpoint.process.gone() else endpoint

    def client(self) -> GatewayClient | None:
        """A connection to its gateway; None while it does not listen."""
        endpoint = self.endpoint()
        return None if endpoint is None else GatewayClient(endpoint.location)

    def status(self) -> dict[str, Any] | None:
        """The account of its gateway; None while it does not answer."""
        client = self.client()
        if client is not None:
            with client, contextlib.suppress(GatewayError):
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
class GatewayRun(_Subject):
    """One gateway process, without Spark.

    Attributes:
        settings: What it reads from its standard input.
        log: File for its output; default ``prove.log`` in the state directory, which is made for it.
    """

    settings: GatewaySettings
    log: Path | None = None
    child: Started | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.state_dir = self.settings.state_dir

    def start(self, wrap: Callable[[Sequence[str]], list[str]] = list) -> Self:
        """Start the process; do not wait for it.

        Args:
            wrap: Changes the command line, such as `tests.engines.strace.wrapped`.
        """
        if self.log is None:
            self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.log or self.state_dir / "prove.log").open("ab") as log:
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

    @property
    def pid(self) -> int:
        """The gateway itself, also when it runs under strace."""
        assert self.child is not None
        return next(iter(processes.named(self.child.pid, Role.GATEWAY)[::-1]), self.child.pid)

    def online(self, timeout: float = READY_S) -> Self:
        """Wait until it is subscribed; only then does the broker keep messages for it.

        Raises:
            NotReady: It ended, or was not subscribed in time.
        """
        if not (wait_for(lambda: not self.running or self.state == "online", timeout, _PAUSE_S) and self.running):
            raise NotReady("TL-P01", self.settings.name, "the gateway is not subscribed", "See its log.")
        return self

    def until(self, journaled: int, timeout: float = READY_S) -> bool:
        """Wait for that many durable messages; False when it ended or time is up."""

        def there() -> bool:
            return not self.running or (self.status() or {"journaled": -1})["journaled"] >= journaled

        return wait_for(there, timeout, _PAUSE_S) and self.running

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
class BridgeRun(_Subject):
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

    def start(self) -> Self:
        """Start the bridge; do not wait for it."""
        command = [sys.executable, "-c", "from towline.cli import main; main()", "run", str(self.config)]
        self.child, _ = spawn(command, self.log)
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

    def hit(self, role: Role) -> bool:
        """SIGKILL to a role, and wait for its end; False when no process plays it now."""
        process = self.find(role)
        return process is not None and process.send(signal.SIGKILL) and process.wait_gone(_GONE_S)

    def revive(self, role: Role) -> bool:
        """Start it again where it has ended, as a service manager would; whether a process plays the role now.

        A gateway plays its role when it is subscribed.
        """
        if not self.running:
            self.start()
        process = self.find(role)
        return process is not None and process.alive and (role is not Role.GATEWAY or self.state == "online")

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
