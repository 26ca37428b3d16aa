"""A bridge as a user runs it, and devices and readers around it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from tests.helpers import wait_for_end, wait_until
from tests.integration.conftest import towline_command
from tests.integration.devices import device
from tests.integration.kafka.reading import PATIENCE, records
from towline.bridge.runtime.status import collect_status
from towline_prove.devstack import Mosquitto

__all__ = ["PATIENCE", "Flow", "Running", "below", "in_kafka", "kill_all", "publish"]


@dataclass
class Running:
    """A bridge as a user runs it."""

    directory: Path
    file: Path
    process: subprocess.Popen[bytes] = field(init=False)
    #: The module that is ``towline``; name of its ``state_dir``; command that it runs in, and its variables.
    program: tuple[str, ...] = ("towline",)
    state: str = "state"
    within: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    def write(
        self,
        mqtt: str,
        kafka: str,
        lines: str,
        *,
        name: str = "tests",
        create_topics: bool = False,
        mqtt_settings: str = "",
        kafka_settings: str = "",
        spark_settings: str = "",
    ) -> None:
        """The bridge file: two cores of Spark between these servers, and lines; settings begin with a comma."""
        create = ", create_topics = { partitions = 1 }" if create_topics else ""
        head = f'name = "{name}"\nstate_dir = "{self.state}"\nmqtt = {{ brokers = "{mqtt}"{mqtt_settings} }}\n'
        servers = f'kafka = {{ bootstrap_servers = "{kafka}"{create}{kafka_settings} }}\n'
        self.file.write_text(f'{head}{servers}spark = {{ master = "local[2]"{spark_settings} }}\n{lines}')

    def start(self, *more: str) -> None:
        with (self.directory / "out").open("ab") as out:
            command = [*self.within, sys.executable, "-m", *self.program, "run", str(self.file), *more]
            environ = {**os.environ, "LC_ALL": "C", **self.environ}
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environ, start_new_session=True
            )

    @property
    def state_dir(self) -> Path:
        return self.directory / self.state / "line"

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text()

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def said(self, text: str) -> None:
        wait_until(lambda: text in self.out, PATIENCE, f"{text!r} in {self.out[-500:]!r}")

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.ended()

    def status(self, line: str = "line") -> dict[str, Any]:
        """What `towline status` says, without a process of its own: tests ask often."""
        time.sleep(0.1)  # every question costs the gateway a moment too
        return collect_status(self.directory / self.state, [line])

    def command(self, name: str, *arguments: str) -> str:
        """What another command says of this file, which comes first."""
        told = towline_command(name, self.file, *arguments, check=True)
        assert told.stderr == ""
        return told.stdout

    def status_command(self) -> dict[str, Any]:
        """What `towline status` says."""
        status: dict[str, Any] = json.loads(towline_command("status", "--json", self.file).stdout)
        return status

    def line(self, name: str = "line") -> dict[str, Any]:
        status: dict[str, Any] = self.status(name)["lines"][name]
        return status

    def account(self, line: str = "line") -> dict[str, Any]:
        return self.line(line)["account"] or {"received": 0, "waiting": -1}

    def online(self, line: str = "line") -> bool:
        """Whether its gateway has its subscription: what is published from now on is taken in."""
        return (self.line(line)["gateway"] or {}).get("state") == "online"

    def child(self, part: str) -> psutil.Process | None:
        return next(iter(below(self.process.pid, part)), None)

    def kill(self, part: str) -> None:
        process = wait_until(lambda: self.child(part), PATIENCE, part)
        os.kill(process.pid, signal.SIGKILL)


def publish(
    broker: Mosquitto, first: int, count: int, *, topic: str = "t/d/x", text: str = "m{}", qos: int = 1
) -> None:
    """Publish numbered messages and wait until the broker has them."""
    with device(broker.port) as client:
        for each in [client.publish(topic, text.format(n), qos=qos) for n in range(first, first + count)]:
            each.wait_for_publish(PATIENCE)


def in_kafka(bootstrap: str, topic: str) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Key, value and headers of every committed record."""
    return [(one.key(), one.value(), dict(one.headers() or [])) for one in records(bootstrap, topic)]


def below(pid: int, part: str) -> list[psutil.Process]:
    """The processes below one that have a text in their command line."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [process] if part in " ".join(process.cmdline()) else []
    return found


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it, with -9, and wait until they are gone."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(PATIENCE)
    wait_for_end(family, PATIENCE)


class Flow:
    """Numbered messages at a steady pace, published beside the test until it is ended; `sent` are at the broker."""

    def __init__(
        self,
        broker: Mosquitto,
        send: Callable[[Mosquitto, int, int], None] = publish,
        count: int = 50,
        pause_s: float = 0.1,
    ) -> None:
        self._step = partial(send, broker)
        self._count, self._pause_s = count, pause_s
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent = 0
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> int:
        """Publish no more; how many there were."""
        self._enough.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.sent

    def _run(self) -> None:
        while not self._enough.is_set():
            self._step(self.sent, self._count)
            self.sent += self._count
            self._enough.wait(self._pause_s)  # as much as there can be would cost CPU and show nothing more
