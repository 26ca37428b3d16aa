"""Common base of all servers: a directory, a port that stays, and a process that can be killed and restarted."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from towline import files
from towline.errors import ConfigError, SetupError
from towline_prove.devstack.process import Child, Process, free_port, is_stopped, spawn, wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PORT_ATTEMPTS = 5
LOG_TAIL_LINES = 8
#: Log messages for a port in use; the second is Erlang's.
PORT_TAKEN_MESSAGES = ("address already in use", "eaddrinuse")


@dataclass(frozen=True, slots=True)
class ServerState:
    """State saved in the server's directory: its ports for ever, its process while one runs.

    Attributes:
        ports: The port for clients first, then those the server needs for itself.
        process: The process last started, perhaps gone meanwhile; None after a stop.
        settled: True if the server has answered on these ports once; from then on they stay.
    """

    ports: tuple[int, ...]
    process: Process | None = None
    settled: bool = False


class Server(ABC):
    """Real broker on loopback, in its own directory.

    A plain object and a context manager (`with` starts and stops). Port and data are kept over `stop`, `kill`,
    `restart` and new objects for the same directory; a new object also finds the running process again. A process
    is never signalled by its pid alone: its start time must match. Without a port a free one is picked once.
    """

    name: ClassVar[str]
    port_count: ClassVar[int] = 1
    start_seconds: ClassVar[float]
    stop_seconds: ClassVar[float] = 15.0

    def __init__(self, directory: Path, *, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.label = self.name
        self.settings = dict(settings or {})
        self._check_settings()
        self._requested_port = port
        self._child: Child | None = None
        self._log_start = 0
        self._new_ports = self._pick_ports()

    @property
    def port(self) -> int:
        """Port on 127.0.0.1; fixed once the server has started for the first time."""
        return self._state().ports[0]

    @property
    def ports(self) -> tuple[int, ...]:
        """All ports, the one for clients first; fixed as `port`."""
        return self._state().ports

    @property
    def pid(self) -> int | None:
        """Pid of the running process, or None."""
        process = self._process()
        return process.pid if process else None

    def status(self) -> dict[str, str | int | None]:
        """Return name, state (``running``, ``paused`` or ``stopped``), address once it has run, pid and directory."""
        state = "paused" if self.paused else "running" if self.running else "stopped"
        address = self.address if self._state_file.exists() else None
        details = {"address": address, "pid": self.pid, "directory": str(self.directory)}
        return {"name": self.label, "state": state, **details}

    @property
    def running(self) -> bool:
        """True if the process exists, paused or not."""
        return self._process() is not None

    @property
    def paused(self) -> bool:
        """True if the process exists and is stopped by SIGSTOP."""
        process = self._process()
        return process is not None and is_stopped(process.pid)

    @property
    @abstractmethod
    def address(self) -> str:
        """Address for clients."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Version of the broker, such as ``2.0.21``."""

    @property
    def log(self) -> Path:
        """Log file of the broker."""
        return self.directory / f"{self.name}.log"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start and wait until it answers clients; a running one stays, and a paused one is resumed.

        Raises:
            SetupError: A program is missing (TL-S10, TL-S21, TL-S15), the port is taken (TL-S13), or the broker
                ended or did not answer (TL-S12); the message has the end of its log.
        """
        self._make_directory()
        with files.exclusive_lock(self.directory / "lock"):
            if self.paused:
                self.resume()
            elif not self.running:
                self._start_on_free_port()
        return self

    def stop(self) -> None:
        """Stop it with SIGTERM, by SIGKILL after `stop_seconds`; data and port stay."""
        self._end_process(signal.SIGTERM, self.stop_seconds)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it is gone; data and port stay. Raises SetupError TL-S17 if stopped."""
        self._require_process()
        self._end_process(signal.SIGKILL, self.stop_seconds)

    def pause(self) -> None:
        """Pause it with SIGSTOP: it answers no client, its connections stay open. Raises SetupError as `kill`."""
        process = self._require_process()
        process.send(signal.SIGSTOP)
        wait_for(lambda: self.paused or not process.alive, self.stop_seconds)

    def resume(self) -> None:
        """Resume it with SIGCONT after `pause`. Raises SetupError as `kill`."""
        self._require_process().send(signal.SIGCONT)

    def restart(self) -> Self:
        """Stop it with SIGTERM if it runs, start it, and wait until it answers. After `kill`, `start` does the same."""
        self.stop()
        return self.start()

    @abstractmethod
    def _command(self, ports: tuple[int, ...]) -> Sequence[str | Path]:
        """Write the configuration for `ports` and return the command line."""

    def _environment(self) -> Mapping[str, str] | None:
        """Return the complete environment of the process; None for the current one."""
        return None

    @abstractmethod
    def _answers(self, port: int) -> bool:
        """Return whether a client gets an answer in the broker's protocol."""

    @abstractmethod
    def _forget_data(self) -> None:
        """Remove data of a first start whose ports were taken."""

    def _check_settings(self) -> None:
        for key, value in self.settings.items():
            if not key.strip() or any(character in key + value for character in "\r\n\0"):
                raise ConfigError("TL-C70", f"{self.name} setting {key!r}", "is empty or holds a line break")

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise SetupError("TL-S18", str(self.directory), reason, "Name a directory you can write.") from error

    def _start_on_free_port(self) -> None:
        """Start the server; a port of our own choice is replaced if it is taken and the server has never run."""
        for _ in range(PORT_ATTEMPTS):
            if self._start_process():
                return
            if self._requested_port is not None or self._state().settled:
                break
            self._forget_data()
            self._new_ports = self._pick_ports()
            self._save(ServerState(self._new_ports))
        advice = "End the program that listens there, or choose another port."
        raise SetupError("TL-S13", f"127.0.0.1:{self.port}", f"the port for {self.name} is taken", advice)

    def _start_process(self) -> bool:
        """Start the process and wait for its first answer; False if its port was taken."""
        state = replace(self._state(), process=None)
        command = self._command(state.ports)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._child, process = spawn(command, self.log, self._environment())
        self._save(replace(state, process=process))
        try:
            if wait_for(lambda: not process.alive or self._answers(state.ports[0]), self.start_seconds):
                if process.alive:
                    self._save(replace(state, process=process, settled=True))
                    return True
                if any(message in self._log_since_start().lower() for message in PORT_TAKEN_MESSAGES):
                    return False
        except BaseException:
            self._end_process(signal.SIGKILL, self.stop_seconds)
            raise
        has_ended = not process.alive
        self._end_process(signal.SIGKILL, self.stop_seconds)
        self._raise_not_started(has_ended=has_ended)
        return False

    def _raise_not_started(self, *, has_ended: bool) -> None:
        problem = "ended at once" if has_ended else f"gave no answer within {self.start_seconds:.0f} s"
        lines = self._log_since_start().strip().splitlines()[-LOG_TAIL_LINES:]
        log_text = " | ".join(lines) or "no output"
        raise SetupError("TL-S12", self.name, f"{problem}: {log_text}", f"Its log is {self.log}.")

    def _log_since_start(self) -> str:
        """Return the log since this start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _end_process(self, signal_number: signal.Signals, timeout_s: float) -> None:
        process = self._process()
        if process:
            process.send(signal_number)
            process.send(signal.SIGCONT)  # a paused process takes no signal but SIGKILL
            if not process.wait_gone(timeout_s):
                process.send(signal.SIGKILL)
                process.wait_gone(timeout_s)
        self._reap(timeout_s)
        state = self._state()
        if state.process:
            self._save(replace(state, process=None))

    def _reap(self, timeout_s: float) -> None:
        """Reap the child process; only the process that started the server can."""
        if self._child and not Process.of(self._child.pid).alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)

    def _process(self) -> Process | None:
        if self._child:
            self._child.poll()
        process = self._state().process
        return process if process and process.alive else None

    def _require_process(self) -> Process:
        process = self._process()
        if process is None:
            raise SetupError("TL-S17", f"{self.name} in {self.directory}", "does not run", "Start it first.")
        return process

    def _pick_ports(self) -> tuple[int, ...]:
        client_port = self._requested_port or free_port()
        return (client_port, *(free_port() for _ in range(self.port_count - 1)))

    @property
    def _state_file(self) -> Path:
        return self.directory / f"{self.name}.state.json"

    def _state(self) -> ServerState:
        """Read the directory's state each time, since another process may stop or start the server meanwhile."""
        try:
            fields = json.loads(self._state_file.read_text(encoding="utf-8"))
            process = Process(**fields["process"]) if fields["process"] else None
            state = ServerState(tuple(fields["ports"]), process, fields["settled"])
        except FileNotFoundError:
            return ServerState(self._new_ports)
        except (ValueError, KeyError, TypeError) as error:
            advice = "Stop the broker yourself if it runs, and remove the file."
            raise SetupError("TL-S18", str(self._state_file), "is not a state file of ours", advice) from error
        if self._requested_port is not None and process is None:
            return replace(state, ports=(self._requested_port, *state.ports[1:]))
        return state

    def _save(self, state: ServerState) -> None:
        if self.directory.exists():
            files.replace(self._state_file, json.dumps(asdict(state)), sync=False)


class ServerGroup(ABC):
    """Group of servers that start and stop together; a context manager too."""

    @property
    @abstractmethod
    def servers(self) -> Sequence[Server]:
        """All servers of the group."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start all at the same time; after a SetupError those started by this call are stopped again."""
        were_running = [server.running for server in self.servers]
        with ThreadPoolExecutor(len(self.servers)) as pool:
            starts = [pool.submit(server.start) for server in self.servers]
        errors = [start.exception() for start in starts]
        for server, was_running, error in zip(self.servers, were_running, errors, strict=True):
            if any(errors) and not was_running and not error:
                server.stop()
        for error in errors:
            if error:
                raise error
        return self

    def stop(self) -> None:
        """Stop all servers; data and ports stay."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            stops = [pool.submit(server.stop) for server in self.servers]
        for stop in stops:
            stop.result()
