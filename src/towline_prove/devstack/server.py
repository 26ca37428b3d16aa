"""What all servers have in common: a directory, a port that stays, a process that can be hurt and healed."""

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
from towline_prove.devstack.ports import free_port
from towline_prove.devstack.process import Child, Process, is_stopped, spawn, wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PORT_ATTEMPTS = 5
LOG_TAIL_LINES = 8
#: What a server says of a port that another has; the second on Erlang.
PORT_TAKEN = ("address already in use", "eaddrinuse")


@dataclass(frozen=True, slots=True)
class ServerState:
    """What is kept in the server's directory: its ports for ever, its process while one runs.

    Attributes:
        ports: The port for clients first, then those the server needs for itself.
        process: The process last started, perhaps gone meanwhile; None after a stop.
        settled: Whether the server has answered on these ports once; from then on they stay.
    """

    ports: tuple[int, ...]
    process: Process | None = None
    settled: bool = False


class Server(ABC):
    """A real broker on loopback, in its own directory, started and stopped by us.

    A plain object and a context manager (`with` starts and stops). Port and data are kept over `stop`, `kill`,
    `restart` and new objects for the same directory; a new object also finds the running process again. A process
    is never signalled by its pid alone: its start time must match.

    Args:
        directory: Configuration, data, log and state live here; made with mode 0700.
        port: The port on 127.0.0.1; None keeps the directory's port, or picks a free one.
        settings: Lines for the broker's own configuration file, over our defaults.

    Attributes:
        label: What it is called among several.
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
        self._wanted_port = port
        self._child: Child | None = None
        self._log_start = 0
        self._fresh = self._pick_ports()

    @property
    def port(self) -> int:
        """The port on 127.0.0.1; settled once the server has started for the first time."""
        return self._state().ports[0]

    @property
    def ports(self) -> tuple[int, ...]:
        """All its ports, the one for clients first; settled as `port`."""
        return self._state().ports

    @property
    def pid(self) -> int | None:
        """The running process, or None."""
        process = self._process()
        return process.pid if process else None

    def status(self) -> dict[str, str | int | None]:
        """Its name, state (``running``, ``paused`` or ``stopped``), address once it has run, pid and directory."""
        state = "paused" if self.paused else "running" if self.running else "stopped"
        address = self.address if self._state_file.exists() else None
        where = {"address": address, "pid": self.pid, "directory": str(self.directory)}
        return {"name": self.label, "state": state, **where}

    @property
    def running(self) -> bool:
        """Whether the process exists; a paused one does."""
        return self._process() is not None

    @property
    def paused(self) -> bool:
        """Whether the process exists and is stopped by SIGSTOP."""
        process = self._process()
        return process is not None and is_stopped(process.pid)

    @property
    @abstractmethod
    def address(self) -> str:
        """How clients name it."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The broker's version, such as ``2.0.21``."""

    @property
    def log(self) -> Path:
        """The file with the broker's own words."""
        return self.directory / f"{self.name}.log"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start and wait until it answers clients; one that runs already goes on, and a paused one is resumed.

        Raises:
            SetupError: A program is missing (TL-S10, TL-S14, TL-S15), the port is taken (TL-S13), or the broker
                ended or did not answer (TL-S12); the message holds its last words.
        """
        self._make_directory()
        with files.alone(self.directory / "lock"):
            if self.paused:
                self.resume()
            elif not self.running:
                self._start_somewhere()
        return self

    def stop(self) -> None:
        """End it gently (SIGTERM), by force after `stop_seconds`; data and port stay."""
        self._end(signal.SIGTERM, self.stop_seconds)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone; data and port stay.

        Raises:
            SetupError: It does not run (TL-S17).
        """
        self._require_process()
        self._end(signal.SIGKILL, self.stop_seconds)

    def pause(self) -> None:
        """SIGSTOP: it answers no client, and its connections stay open.

        Raises:
            SetupError: It does not run (TL-S17).
        """
        process = self._require_process()
        process.send(signal.SIGSTOP)
        wait_for(lambda: self.paused or not process.alive, self.stop_seconds)

    def resume(self) -> None:
        """SIGCONT after `pause`.

        Raises:
            SetupError: It does not run (TL-S17).
        """
        self._require_process().send(signal.SIGCONT)

    def restart(self) -> Self:
        """Stop gently where it runs, start, and wait until it answers. After `kill`, `start` does the same."""
        self.stop()
        return self.start()

    @abstractmethod
    def _command(self, ports: tuple[int, ...]) -> Sequence[str | Path]:
        """Write the configuration for `ports` and give the command line."""

    def _environment(self) -> Mapping[str, str] | None:
        """All that it inherits; None for what this process has."""
        return None

    @abstractmethod
    def _answers(self, port: int) -> bool:
        """Whether a client gets a real answer in its own protocol."""

    @abstractmethod
    def _forget_data(self) -> None:
        """Remove what a first start on ports that were taken has left."""

    def _check_settings(self) -> None:
        for key, value in self.settings.items():
            if not key.strip() or any(sign in key + value for sign in "\r\n\0"):
                raise ConfigError("TL-C70", f"{self.name} setting {key!r}", "is empty or holds a line break")

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise SetupError("TL-S18", str(self.directory), reason, "Name a directory you can write.") from error

    def _start_somewhere(self) -> None:
        """Start; where the port was our own choice and the server has never run, another one may be taken."""
        for _ in range(PORT_ATTEMPTS):
            if self._launch():
                return
            if self._wanted_port is not None or self._state().settled:
                break
            self._forget_data()
            self._fresh = self._pick_ports()
            self._save(ServerState(self._fresh))
        advice = "End the program that listens there, or choose another port."
        raise SetupError("TL-S13", f"127.0.0.1:{self.port}", f"the port for {self.name} is taken", advice)

    def _launch(self) -> bool:
        """Start the process and wait for its first answer; False when it found its port taken."""
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
                if any(words in self._last_words().lower() for words in PORT_TAKEN):
                    return False
        except BaseException:
            self._end(signal.SIGKILL, self.stop_seconds)
            raise
        ended = not process.alive
        self._end(signal.SIGKILL, self.stop_seconds)
        self._raise_not_started(ended=ended)
        return False

    def _raise_not_started(self, *, ended: bool) -> None:
        what = "ended at once" if ended else f"gave no answer within {self.start_seconds:.0f} s"
        lines = self._last_words().strip().splitlines()[-LOG_TAIL_LINES:]
        words = " | ".join(lines) or "it said nothing"
        raise SetupError("TL-S12", self.name, f"{what}: {words}", f"Its log is {self.log}.")

    def _last_words(self) -> str:
        """What this start has written into the log."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _end(self, number: signal.Signals, seconds: float) -> None:
        process = self._process()
        if process:
            process.send(number)
            process.send(signal.SIGCONT)  # a paused process takes no signal but SIGKILL
            if not process.wait_gone(seconds):
                process.send(signal.SIGKILL)
                process.wait_gone(seconds)
        self._reap(seconds)
        state = self._state()
        if state.process:
            self._save(replace(state, process=None))

    def _reap(self, seconds: float) -> None:
        """Leave no zombie behind; only the process that started the server can."""
        if self._child and not Process.of(self._child.pid).alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(seconds)

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
        first = self._wanted_port or free_port()
        return (first, *(free_port() for _ in range(self.port_count - 1)))

    @property
    def _state_file(self) -> Path:
        return self.directory / f"{self.name}.state.json"

    def _state(self) -> ServerState:
        """The directory's state: read each time, since another process may stop or start the server meanwhile."""
        try:
            fields = json.loads(self._state_file.read_text(encoding="utf-8"))
            process = Process(**fields["process"]) if fields["process"] else None
            state = ServerState(tuple(fields["ports"]), process, fields["settled"])
        except FileNotFoundError:
            return ServerState(self._fresh)
        except (ValueError, KeyError, TypeError) as error:
            advice = "Stop the broker yourself if it runs, and remove the file."
            raise SetupError("TL-S18", str(self._state_file), "is not a state file of ours", advice) from error
        if self._wanted_port is not None and process is None:
            return replace(state, ports=(self._wanted_port, *state.ports[1:]))
        return state

    def _save(self, state: ServerState) -> None:
        if self.directory.exists():
            files.replace(self._state_file, json.dumps(asdict(state)), synced=False)


class Together(ABC):
    """Servers of one purpose; a context manager too."""

    @property
    @abstractmethod
    def servers(self) -> Sequence[Server]:
        """All of them."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start all at the same time; when one fails, what this call has started is stopped again.

        Raises:
            SetupError: As `Server.start`.
        """
        before = [server.running for server in self.servers]
        with ThreadPoolExecutor(len(self.servers)) as pool:
            starts = [pool.submit(server.start) for server in self.servers]
        failed = [start.exception() for start in starts]
        for server, ran, error in zip(self.servers, before, failed, strict=True):
            if any(failed) and not ran and not error:
                server.stop()
        for error in failed:
            if error:
                raise error
        return self

    def stop(self) -> None:
        """Stop all; data and ports stay."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            stops = [pool.submit(server.stop) for server in self.servers]
        for stop in stops:
            stop.result()
