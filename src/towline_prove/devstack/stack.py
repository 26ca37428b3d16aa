"""One Mosquitto and one Kafka side by side in one directory, for the demo and the command line."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from towline.errors import ConfigError
from towline_prove.devstack.kafka import Kafka
from towline_prove.devstack.mosquitto import Mosquitto

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline_prove.devstack.server import Server

__all__ = ["ServerStatus", "Stack", "default_directory"]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One broker as `towline devstack status` shows it.

    Attributes:
        name: ``mosquitto`` or ``kafka``.
        state: ``running``, ``paused``, ``stopped`` (never started counts as stopped).
        address: How clients name it; None before its first start.
        pid: The running process.
        directory: Where its data, log and configuration are.
    """

    name: str
    state: str
    address: str | None
    pid: int | None
    directory: str


class Stack:
    """Mosquitto and Kafka in `directory`, started and stopped together; a context manager too.

    Args:
        directory: Each broker has a folder of its name in it; None is `default_directory`.
        mosquitto: Settings for mosquitto.conf.
        kafka: Settings for server.properties.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        mosquitto: Mapping[str, str] | None = None,
        kafka: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = (directory or default_directory()).absolute()
        self.mosquitto = Mosquitto(self.directory / "mosquitto", settings=mosquitto)
        self.kafka = Kafka(self.directory / "kafka", settings=kafka)

    @property
    def servers(self) -> tuple[Server, ...]:
        """Both brokers."""
        return self.mosquitto, self.kafka

    def server(self, name: str) -> Server:
        """The broker with this name.

        Raises:
            ConfigError: There is none (TL-C71).
        """
        for server in self.servers:
            if server.name == name:
                return server
        names = ", ".join(server.name for server in self.servers)
        raise ConfigError("TL-C71", name, "is no broker of the devstack", f"There are {names}.")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start both at the same time; when one fails, the other is stopped again if it was this call that started it.

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
        """Stop both; data and ports stay."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            stops = [pool.submit(server.stop) for server in self.servers]
        for stop in stops:
            stop.result()

    def status(self) -> list[ServerStatus]:
        """Each broker as it is now."""
        return [_status(server) for server in self.servers]


def _status(server: Server) -> ServerStatus:
    state = "paused" if server.paused else "running" if server.running else "stopped"
    address = server.address if server.known else None
    return ServerStatus(server.name, state, address, server.pid, str(server.directory))


def default_directory() -> Path:
    """``towline/devstack`` in the user's state directory (XDG)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "towline" / "devstack"
