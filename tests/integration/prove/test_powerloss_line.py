"""Power lost at any step of a batch, gateway and Spark on one machine, both brokers on others and as they then were."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto, NewTopic
from tests.engines.powerloss import NOTHING, DiskModel, Survives, random_changes
from tests.engines.strace import record_command
from tests.helpers import wait_until
from tests.integration.prove.stopping import STEPS
from tests.integration.prove.test_powerloss import MESSAGES, gateway_at, publish
from towline.checkpoint import Checkpoint
from towline.journal import Journal
from towline.schema import ROW_SCHEMA
from towline.spark.offsets import SourceOffset
from towline_prove import processes
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.history import read_history
from towline_prove.reader import read_topic
from towline_prove.referee import RunVerdict, judge_arrivals
from towline_prove.subject import GatewayRun

ROOT = Path(__file__).parents[3]

pytestmark = [
    *(pytest.mark.spark, pytest.mark.faults, pytest.mark.long),
    pytest.mark.timeout(2400),
    pytest.mark.usefixtures("ptrace"),
]

#: A Spark starts in 10 s alone, and in minutes under strace on a machine that is busy.
LONG = 300


class Machine:
    """A gateway and a query on one disk: lives, loses power, lives again."""

    def __init__(self, directory: Path, mosquitto: Mosquitto, kafka: Kafka, topic: str) -> None:
        self.directory, self.mosquitto, self.kafka, self.topic = directory, mosquitto, kafka, topic
        self.control = directory / "control"
        self.claims: list[Path] = []
        self._lives = itertools.count(1)
        for name in ("gateway", "spark", "control"):
            (directory / name).mkdir()
        self.settings = gateway_at(mosquitto, directory / "gateway" / "gw", 2)
        self.gateway = GatewayRun(self.settings, log=directory / "gateway.log")

    @contextlib.contextmanager
    def on(self, survives: Survives = NOTHING, *, unsynced: bool = False) -> Iterator[None]:
        """Run both; the power goes at the end of the block."""
        life = next(self._lives)
        disks = [DiskModel.of(self.directory / name) for name in ("gateway", "spark")]
        logs = [self.directory / f"life-{life}-{disk.root.name}" for disk in disks]
        for name in ("stop-at", "reached"):
            (self.control / name).unlink(missing_ok=True)
        with self.gateway as gateway:
            gateway.start(lambda command: record_command(command, logs[0]))
            with self._query(logs[1], unsynced=unsynced):
                gateway.wait_online()
                yield
        for disk, log in zip(disks, logs, strict=True):
            disk.replay(log)
        assert disks[1].differences() == [], "the record does not tell all of it"
        self.before = [disk.lose_power(survives) for disk in disks]

    @contextlib.contextmanager
    def _query(self, log: Path, *, unsynced: bool) -> Iterator[None]:
        places = [self.settings.state_dir, self.directory / "spark" / "ck", self.kafka.bootstrap, self.topic]
        command = [sys.executable, "-m", "tests.integration.prove.stopping", *map(str, places)]
        environment = {**os.environ, "TOWLINE_TEST_CONTROL": str(self.control), "PYTHONPATH": str(ROOT)}
        wait_until(lambda: self.gateway.status() is not None, 60)
        with (self.directory / "spark.log").open("ab") as out:
            traced = record_command(command, log, fake_syncs=unsynced, with_seeks=False)
            self.child = subprocess.Popen(traced, cwd=ROOT, env=environment, stdout=out, stderr=out)
        try:
            yield
        finally:
            for pid in processes.process_tree(self.child.pid)[::-1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self.child.wait(60)

    def cut_at(self) -> int:
        """Up to where the inbox was cut when the power went, whatever of that is on the disk."""
        inbox = self.before[0] / self.settings.inbox_dir.relative_to(self.directory / "gateway")
        with Journal.open(inbox, schema=ROW_SCHEMA) as journal:
            return journal.consumers.get("default", 0)

    def done_at(self) -> int:
        """Up to where batches are in the commit log that is on the disk."""
        checkpoint = self.directory / "spark" / "ck"
        batch = Checkpoint(f"file:{checkpoint}").last_committed_batch()
        if batch is None:
            return 0
        offset = (checkpoint / "offsets" / str(batch)).read_text().split("\n")[2]
        return sum(place.offset for place in SourceOffset.parse(json.loads(offset)).positions)

    @property
    def acknowledged(self) -> int:
        return MESSAGES * len(self.claims)

    def publish(self) -> None:
        self.claims.append(self.directory / f"part-{len(self.claims)}")
        publish(self.mosquitto, self.claims[-1], 2)

    def carried(self) -> bool:
        """Whether nothing waits any more."""
        status = self.gateway.status()
        return status is not None and status["consumers"].get("default") == status["end"] >= self.acknowledged

    def wait(self, step: str = "") -> None:
        """Wait until the query has reached a step, or until nothing waits; the query has to live."""

        def there() -> bool:
            assert self.child.poll() is None, (self.directory / "spark.log").read_text()[-3000:]
            return (self.control / step).exists() if step else self.carried()

        wait_until(there, LONG, step or "all carried")

    def stop_at(self, step: str) -> None:
        """Let a batch go through, then stop the next one at this step."""
        self.publish()
        self.wait()
        (self.control / "stop-at").write_text(step)
        self.publish()
        self.wait("reached")

    def verdict(self) -> RunVerdict:
        claims = [read_history(claims) for claims in self.claims]
        return judge_arrivals(claims, read_topic(self.kafka.bootstrap, self.topic))


@pytest.fixture
def machine(new_mosquitto: NewMosquitto, kafka: Kafka, topic: NewTopic, tmp_path: Path) -> Machine:
    return Machine(tmp_path, new_mosquitto(max_queued_messages="0"), kafka, topic())


def test_without_syncs_a_power_failure_doubles(machine: Machine) -> None:
    """The checkpoint is gone, and with it the id of the query: what is in Kafka is written again."""
    with machine.on(unsynced=True):
        machine.stop_at("written")
    with machine.on():
        machine.wait()
    assert machine.verdict().doubled > 0


@pytest.mark.parametrize("survives", [NOTHING, random_changes(1), random_changes(3, 0.8)], ids=["nothing", "1", "3"])
def test_power_lost_at_every_step_of_a_batch(machine: Machine, survives: Survives) -> None:
    """A batch in Kafka that the commit log lost is in the synced offset log, so it runs again and is skipped."""
    for step in STEPS:
        with machine.on(survives):
            machine.stop_at(step)
        assert machine.cut_at() <= machine.done_at(), step
    with machine.on():
        machine.wait()
    assert machine.cut_at() == machine.done_at() == machine.acknowledged  # and now the inbox was cut
    verdict = machine.verdict()
    assert verdict.ok("exactly_once"), verdict.summary_line()
    assert verdict.delivered == machine.acknowledged
