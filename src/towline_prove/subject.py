"""Processes under test: a gateway or a whole bridge, started as a user starts it and killed from outside."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from towline.bridge.runtime.status import collect_status
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
READY_TIMEOUT_S = 60.0
#: Between two questions to a gateway, in seconds: each is a call.
_POLL_INTERVAL_S = 0.05
#: Longest end of a killed process, in seconds: the kernel frees its memory first.
_KILL_TIMEOUT_S = 10.0


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
    state_dir: Path, mqtt: str, kafka: str, guarantee: str, *, writer: str, kafka_line: str, uplink_line: str = ""
) -> str:
    """Return the text of a bridge file with one uplink, and further lines for its tables; `writer` is its name."""
    parts = {"state_dir": state_dir, "mqtt": mqtt, "kafka": kafka, "guarantee": guarantee}
    return _CONFIG.format(**parts, writer=writer, more=kafka_line, name=LINE, line=uplink_line, topic=TOPIC)


class NotReady(TowlineError):
    """A process was not ready in time (TL-P01)."""


class ProcessHandle(Protocol):
    """Handle of a started process, such as `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code, or raise subprocess.TimeoutExpired."""


class _ProcessUnderTest(ABC):
    """Process that can be started, killed and restarted; a context manager that kills it at the end."""

    child: ProcessHandle | None
    state_dir: Path

    @property
    def running(self) -> bool:
        """True while the process runs."""
        return self.child is not None and self.child.poll() is None

    def endpoint(self) -> GatewayEndpoint | None:
        """Return the endpoint of its running gateway; None if there is none."""
        endpoint = GatewayEndpoint.read(self.state_dir)
        return None if endpoint is None or endpoint.process.has_ended() else endpoint

    def client(self) -> GatewayClient | None:
        """Return a client of its gateway; None while it does not listen."""
        endpoint = self.endpoint()
        return None if endpoint is None else GatewayClient(endpoint.location)

    def status(self) -> dict[str, Any] | None:
        """Return the status of its gateway; None while it does not answer."""
        client = self.client()
        if client is not None:
            with client, contextlib.suppress(GatewayError):
                return client.status(timeout_s=5)
        return None

    @property
    def state(self) -> str:
        """State of its gateway, such as ``online``; empty while it does not answer."""
        return str((self.status() or {}).get("state", ""))

    @abstractmethod
    def all_pids(self) -> list[int]:
        """Return the pids of all its processes, parents before children."""

    def kill(self) -> None:
        """Kill all its processes with SIGKILL, children before parents."""
        if self.child is not None:
            _kill(list(map(Process.of, self.all_pids())))
            self.child.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass
class GatewayRun(_ProcessUnderTest):
    """Gateway process without Spark; its log is ``prove.log`` in the state directory by default."""

    settings: GatewaySettings
    log: Path | None = None
    child: ProcessHandle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.state_dir = self.settings.state_dir

    def start(self, wrap_command: Callable[[Sequence[str]], list[str]] = list) -> Self:
        """Start the process without waiting; `wrap_command` changes the command line, as for strace."""
        if self.log is None:
            self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.log or self.state_dir / "prove.log").open("ab") as log:
            child = subprocess.Popen(
                wrap_command([sys.executable, "-m", "towline.gateway"]),
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
        """Pid of the gateway itself, also when it runs under strace."""
        assert self.child is not None
        return next(iter(processes.pids_with_role(self.child.pid, Role.GATEWAY)[::-1]), self.child.pid)

    def wait_online(self, timeout: float = READY_TIMEOUT_S) -> Self:
        """Wait until it is subscribed, so that the broker keeps messages for it; NotReady if that takes too long."""
        wait_for(lambda: not self.running or self.state == "online", timeout, _POLL_INTERVAL_S)
        if not self.running or self.state != "online":
            raise NotReady("TL-P01", self.settings.name, "the gateway is not subscribed", "See its log.")
        return self

    def wait_journaled(self, message_count: int, timeout: float = READY_TIMEOUT_S) -> bool:
        """Wait for that many durable messages; False if it ended or time is up."""

        def is_reached() -> bool:
            return not self.running or (self.status() or {"journaled": -1})["journaled"] >= message_count

        return wait_for(is_reached, timeout, _POLL_INTERVAL_S) and self.running

    def wait(self, timeout: float = READY_TIMEOUT_S) -> int | None:
        """Wait for its end and return the exit code; None if it still runs."""
        assert self.child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.wait(timeout)
        return None

    def all_pids(self) -> list[int]:
        """Return the pids of the gateway and of its wrapper."""
        return processes.process_tree(self.child.pid) if self.child is not None else []

    def stop(self, timeout: float = 30.0) -> int | None:
        """Stop it with SIGTERM, wait, and return the exit code."""
        Process.of(self.pid).send(signal.SIGTERM)
        return self.wait(timeout)


@dataclass
class BridgeRun(_ProcessUnderTest):
    """Process of ``towline run <config>`` and everything below it; `state_dir` is that of one line."""

    config: Path
    state_dir: Path
    log: Path
    child: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> Self:
        """Start the bridge without waiting for it."""
        command = [sys.executable, "-c", "from towline.cli import main; main()", "run", str(self.config)]
        self.child, _ = spawn(command, self.log)
        return self

    def gateway_process(self) -> Process | None:
        """Return the process of the line's gateway, whatever its parent is; None if there is none."""
        endpoint = self.endpoint()
        return Process.of(endpoint.pid) if endpoint is not None else None

    def account(self) -> Mapping[str, Any] | None:
        """Return the account of the line, as in ``towline status --json``; None if it is unknown."""
        name = self.state_dir.name
        account: Mapping[str, Any] | None = collect_status(self.state_dir.parent, [name])["lines"][name]["account"]
        return account

    def find_process(self, role: Role) -> Process | None:
        """Return the process with a role; None if there is none."""
        assert self.child is not None
        if role is Role.GATEWAY:
            return self.gateway_process()
        if role is Role.BRIDGE:
            return Process.of(self.child.pid) if self.running else None
        return next((Process.of(pid) for pid in processes.pids_with_role(self.child.pid, role)), None)

    def kill_role(self, role: Role) -> bool:
        """Kill the process with a role by SIGKILL and wait for its end; False if there is none."""
        process = self.find_process(role)
        return process is not None and process.send(signal.SIGKILL) and process.wait_gone(_KILL_TIMEOUT_S)

    def revive_role(self, role: Role) -> bool:
        """Restart an ended bridge as a service manager would; return whether a process has the role now.

        A gateway counts when it is subscribed.
        """
        if not self.running:
            self.start()
        process = self.find_process(role)
        return process is not None and process.alive and (role is not Role.GATEWAY or self.state == "online")

    def all_pids(self) -> list[int]:
        """Return all pids: the bridge, its descendants, and the gateway even when it has another parent."""
        pids = processes.process_tree(self.child.pid) if self.child is not None and self.running else []
        gateway = self.gateway_process()
        if gateway is not None and gateway.pid not in pids:
            pids += processes.process_tree(gateway.pid)
        return pids

    def stop(self, timeout: float = 60.0) -> int | None:
        """Stop the bridge with SIGTERM, wait, and return the exit code; None if it had to be killed."""
        if self.child is None:
            return None
        all_processes = [Process.of(pid) for pid in self.all_pids()]
        self.child.terminate()
        exit_code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = self.child.wait(timeout)
        _kill(all_processes)
        return exit_code


def _kill(all_processes: list[Process]) -> None:
    for process in all_processes[::-1]:
        process.send(signal.SIGKILL)
    for process in all_processes:
        process.wait_gone(_KILL_TIMEOUT_S)
