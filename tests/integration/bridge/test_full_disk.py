"""A disk that is full for a moment: said in words, and waited for; nothing is started anew that need not be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from tests.conftest import NewTopic
from tests.helpers import lacking
from tests.integration.bridge.running import Running, in_kafka, publish
from tests.integration.bridge.test_bridge import write
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = pytest.mark.spark

#: A disk of its own for the bridge alone, then the bridge.
MOUNTED = 'mount -t tmpfs -o size=48m none "$0" && exec "$@"'


class OnSmallDisk(Running):
    """A bridge whose state directory is a small disk, which only it sees."""

    def start(self, *more: str) -> None:
        disk = self.directory / "state"
        disk.mkdir()
        command = ["unshare", "-rm", "sh", "-c", MOUNTED, str(disk)]
        command += [sys.executable, "-m", "towline", "run", str(self.file), *more]
        with (self.directory / "out").open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    @property
    def disk(self) -> Path:
        return Path(f"/proc/{self.process.pid}/root{self.directory}/state")

    def fill(self) -> Path:
        filler = self.disk / "fill"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 16, 512):
                while shutil.disk_usage(self.disk).free >= size:
                    file.write(b"x" * size)
        return filler


@pytest.mark.long
def test_spark_waits_for_the_disk(bridge: Running, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        lacking("no mounts of one's own here")
    bridge.__class__ = OnSmallDisk
    small, name = cast("OnSmallDisk", bridge), topic()
    write(small, mosquitto.port, kafka.bootstrap, name, "[uplink.journal]\nmin_free_bytes = 0\nsegment_bytes = 1048576")
    small.start()
    small.said("connected to")
    publish(mosquitto, 0, 100)
    small.said("in Kafka 100")
    full = small.fill()
    publish(mosquitto, 100, 50)
    small.said("[TL-B56]")
    full.unlink()
    small.said("in Kafka 150")
    os.kill(small.process.pid, 15)
    assert small.ended() == 0
    assert "restarting in" not in small.out, "Spark has waited"
    assert {value for _, value, _ in in_kafka(kafka.bootstrap, name)} == {f"m{n}".encode() for n in range(150)}
