"""docs/spark.md as it stands, with real messages and real deaths: MQTT, a gateway, two workers of Spark, Kafka."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import present, wait_until
from tests.integration.cluster.hurting import (
    ENVIRONMENTS,
    alive,
    executors_of,
    kill,
    process_below,
    seen_by,
    shown_by,
    tree_of,
)
from tests.integration.cluster.page import PATIENCE, Page, commands_of
from towline.bridge.lines.statuses import gateway_status
from towline.bridge.runtime.status import collect_status
from towline_prove.devstack.spark import SparkCluster
from towline_prove.devstack.stack import Stack
from towline_prove.history import read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.reader import read_topic
from towline_prove.referee import RunVerdict, judge_arrivals

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.kafka, pytest.mark.broker, pytest.mark.timeout(1800)]

PAGE = Path(__file__).parents[3] / "docs" / "spark.md"
_CONF = '"spark.executor.memory" = "512m"'
#: An executor that is not heard of for 12 s counts as lost; Spark's own values are 120 s, and 60 s between two looks.
_MORE_CONF = (
    f'{_CONF}, "spark.decommission.enabled" = true, "spark.network.timeout" = "12s", '
    '"spark.network.timeoutInterval" = "1s", "spark.executor.heartbeatInterval" = "2s"'
)
HALLS = ("hall-1", "hall-2")
#: Messages a second of each hall, until everybody has died.
RATE = 75.0


class Lives:
    """What the line has carried, and who dies when."""

    def __init__(self, place: Path, cluster: SparkCluster) -> None:
        self.place = place
        self.cluster = cluster

    def line(self) -> dict[str, Any]:
        line: dict[str, Any] = collect_status(self.place / "state", ["telemetry"])["lines"]["telemetry"]
        return line

    def online(self, hall: str) -> bool:
        """Whether a gateway has its subscription: what is published from now on is taken in."""
        status = gateway_status(self.place / hall / hall)
        return bool(status and status.get("state") == "online")

    def comes_online(self, hall: str) -> None:
        """Wait until it is."""
        wait_until(lambda: self.online(hall), PATIENCE, f"the gateway of {hall}")

    def in_kafka(self) -> int:
        """How many messages are in Kafka, as the account says."""
        account = self.line()["account"] or {"received": 0, "waiting": 0}
        return int(account["received"]) - int(account["waiting"])

    def goes_on(self, after: str, more: int = 50) -> None:
        """Wait until further messages are in Kafka."""
        least = self.in_kafka() + more
        wait_until(lambda: self.in_kafka() >= least, PATIENCE, f"messages after {after}")

    def all_is_there(self) -> bool:
        account = self.line()["account"] or {"waiting": -1}
        return bool(account["waiting"] == 0)

    def driver(self) -> psutil.Process:
        return wait_until(
            lambda: next((p for p in psutil.process_iter() if self._is_driver(p)), None), PATIENCE, "a driver"
        )

    def _is_driver(self, process: psutil.Process) -> bool:
        try:
            inside = process.cwd().startswith(str(self.place / "state"))
            return inside and "towline.bridge.runtime.driver" in " ".join(process.cmdline())
        except psutil.Error:
            return False


def test_the_page_carries_every_message_once_whoever_dies(tmp_path: Path) -> None:
    """With a Kafka of three brokers, executors that may be sent away, and a shuffle: tasks of both stages die."""
    up, env, gateway, plant, gateways, run, pub, kill_worker, status, _ = commands_of(
        PAGE, "From one machine to a cluster, in ten commands"
    )
    plant = plant.replace(_CONF, _MORE_CONF).replace('key = "{device}"', 'key = "{device}", where = "qos >= 0"')
    first_gateway, second_gateway = gateways.strip().splitlines()
    with Page(tmp_path) as page:
        try:
            for command in (f"{up.strip()} --kafka-brokers 3", env, gateway, plant, first_gateway, second_gateway, run):
                page.run(command)
            lives = Lives(tmp_path, _cluster(tmp_path))
            for hall in HALLS:
                lives.comes_online(hall)
            page.run(pub)
            loads = [Load(tmp_path, Stack(tmp_path / "stack"), hall) for hall in HALLS]
            lives.goes_on("the start")
            _nobody_sees_the_others(lives)
            first, second = lives.cluster.workers

            kill(wait_until(lambda: next(iter(executors_of(second)), None), PATIENCE, "an executor"))
            lives.goes_on("the executor")
            asleep = wait_until(lambda: next(iter(executors_of(second)), None), PATIENCE, "an executor")
            processes = tree_of(asleep)
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            lives.goes_on("an executor that stands still, whose tasks run elsewhere", 1_500)
            for process in filter(alive, processes):
                process.send_signal(signal.SIGCONT)  # its transactions are fenced
            page.run(kill_worker)
            lives.goes_on("the worker")
            page.run("towline devstack restart spark-worker-1 --dir stack")
            wait_until(lambda: executors_of(first), PATIENCE, "an executor of the new worker")
            os.kill(second.pid or 0, signal.SIGPWR)  # spark.worker.decommission.signal
            wait_until(lambda: not executors_of(second), PATIENCE, "no executor of a decommissioned worker")
            lives.goes_on("a decommissioned worker")
            for server in ("kafka-2", "spark-master"):
                page.run(f"towline devstack kill {server} --dir stack")
                lives.goes_on(f"{server}, which is gone")
                page.run(f"towline devstack restart {server} --dir stack")
                lives.goes_on(f"{server}, which is back")
            driver = lives.driver()
            jvm = wait_until(lambda: process_below(driver.pid, "SparkSubmit"), PATIENCE, "the driver's JVM")
            kill(driver)
            kill(jvm)
            lives.goes_on("the driver")
            page.run("kill -9 $(jobs -p %1)")
            page.run(first_gateway)
            lives.comes_online("hall-1")
            lives.goes_on("a gateway, for which a batch may wait that was begun with its messages")

            for load in loads:
                load.end()
            wait_until(lives.all_is_there, PATIENCE, "all of them in Kafka")
            assert "adds up ✓" in page.run(status)
            for load in loads:
                verdict = load.judged()
                assert verdict.acked > 0
                assert (verdict.lost, verdict.doubled, verdict.late) == (0, 0, 0), verdict.summary_line()
            _no_secret_shows(lives)
        finally:
            page.run("kill %3; wait %3; kill $(jobs -p); wait; towline devstack down --dir stack")


class Load:
    """Numbered messages from devices of one hall, until it is ended.

    Args:
        place: Where the history is written.
        stack: MQTT and Kafka.
        hall: Names it, and is the first level of its topics.
    """

    def __init__(self, place: Path, stack: Stack, hall: str) -> None:
        self.hall = hall
        self._claims, self._stop = place / f"{hall}.claims", threading.Event()
        self._kafka = stack.kafka.bootstrap
        plan = LoadPlan(
            port=stack.mosquitto.port,
            run=hall,
            messages=1_000_000,
            rate=RATE,
            qos=2,
            devices=10,
            publishers=2,
            topic=f"{hall}/{{device}}/data",
        )
        self._thread = threading.Thread(
            target=run_load, args=(plan, self._claims), kwargs={"stop": self._stop}, daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    def judged(self) -> RunVerdict:
        return judge_arrivals(read_history(self._claims), read_topic(self._kafka, "readings"))


def _cluster(place: Path) -> SparkCluster:
    return present(Stack(place / "stack").spark)


def _nobody_sees_the_others(lives: Lives) -> None:
    """Executors see neither the bridge's files nor the stack's, nor those of the other worker."""
    first, second = lives.cluster.workers
    for worker, other in ((first, second), (second, first)):
        (executor,) = wait_until(lambda: executors_of(worker), PATIENCE, worker.label)  # noqa: B023 - asked at once
        assert seen_by(executor.pid, worker.directory)
        for hidden in (
            lives.place / "state",
            lives.place / "hall-1",
            lives.cluster.secret_file,
            other.directory,
            lives.cluster.master.directory,
        ):
            assert hidden.exists()
            assert not seen_by(executor.pid, hidden)


def _no_secret_shows(lives: Lives) -> None:
    shown = shown_by(lives.cluster)
    assert "CoarseGrainedExecutorBackend" in shown["command lines"]
    assert any("stderr" in page and "logPage" in page for page in shown)
    for file in (lives.cluster.secret_file, lives.place / "stack" / "gateway" / "token"):
        secret = file.read_text().strip()
        found = {place for place, text in shown.items() if secret in text}
        assert found == ({ENVIRONMENTS} if file == lives.cluster.secret_file else set())
