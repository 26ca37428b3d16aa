"""A bridge as a user runs it, and devices and readers around it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
from confluent_kafka import Consumer, TopicPartition
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.helpers import wait_until
from towline.bridge.runtime.status import collect_status
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin
from towline_prove.devstack import Mosquitto

__all__ = ["PATIENCE", "Running", "in_kafka", "publish"]

#: A Spark start takes 10 s alone and a minute on a machine that is busy.
PATIENCE = 240.0


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
        command = [sys.executable, "-m", "towline", name, str(self.file), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout

    def status_command(self) -> dict[str, Any]:
        """What `towline status` says."""
        command = [sys.executable, "-m", "towline", "status", "--json", str(self.file)]
        status: dict[str, Any] = json.loads(subprocess.run(command, stdout=PIPE, check=False, timeout=60).stdout)
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
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if part in " ".join(process.cmdline()):
                    return process
        return None

    def kill(self, part: str) -> None:
        process = wait_until(lambda: self.child(part), PATIENCE, part)
        os.kill(process.pid, signal.SIGKILL)


def publish(
    broker: Mosquitto, first: int, count: int, *, topic: str = "t/d/x", text: str = "m{}", qos: int = 1, user: str = ""
) -> None:
    """Publish numbered messages and wait until the broker has them; ``user`` names a user property for the text."""
    device = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    device.connect("127.0.0.1", broker.port)
    device.loop_start()
    sent = []
    for value in map(text.format, range(first, first + count)):
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        if user:
            properties.UserProperty = (user, value)
        sent.append(device.publish(topic, value, qos=qos, properties=properties))
    for each in sent:
        each.wait_for_publish(PATIENCE)
    device.disconnect()
    device.loop_stop()


def in_kafka(bootstrap: str, topic: str) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Key, value and headers of every committed record of partition 0."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(KafkaError):  # a busy machine may leave it without a word for 10 s
            KafkaAdmin(bootstrap).wait_for_open_transactions(topic)
            if (records := _read(bootstrap, topic)) is not None:
                return records
    raise AssertionError(f"no reader comes to the end of {topic}")


def _read(bootstrap: str, topic: str) -> list[tuple[Any, Any, dict[str, Any]]] | None:
    """What one reader has up to the end; None where nothing comes for 20 s, as on a machine that stood still."""
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": str(uuid.uuid4()),
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
    }
    consumer = Consumer(settings)
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        records: list[tuple[Any, Any, dict[str, Any]]] = []
        while True:  # markers of transactions take offsets too, so only the reader knows where the end is
            if (record := consumer.poll(20)) is None:
                return None
            error = record.error()
            if error is None:
                records.append((record.key(), record.value(), dict(record.headers() or [])))
            elif error.name() == "_PARTITION_EOF":
                return records
            else:
                assert error.retriable(), error
    finally:
        consumer.close()
