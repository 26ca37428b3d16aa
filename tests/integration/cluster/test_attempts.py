"""Long: an executor dies or sleeps in the midst of tasks, behind a shuffle or not: they are run again, or never."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import Running
from tests.integration.cluster.hurting import alive, executors_of, kill, tree_of
from tests.integration.cluster.page import KEYS, PATIENCE
from tests.integration.cluster.test_cluster import Load
from tests.integration.spark.searching import read
from towline_prove.devstack.kafka import Kafka
from towline_prove.devstack.process import free_port
from towline_prove.devstack.stack import Stack, StackForm

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.kafka, pytest.mark.broker, pytest.mark.timeout(1800)]

BRIDGE = (
    """
name = "plant"
state_dir = "state"
mqtt = {{ brokers = ["{mqtt}"] }}
kafka = {{ bootstrap_servers = "{kafka}", create_topics = {{ partitions = 1 }} }}
[spark]
master = "{master}"
secret_file = "{stack}/spark/secret"
ui = true
[spark.conf]
"spark.executor.memory" = "512m"
"spark.ui.port" = {ui}
# Batches take two stages or three, many a second: each is still there when it is counted how often it was run.
"spark.ui.retainedStages" = 1000000
# One that is not heard of for 12 s counts as lost; Spark's own values are 120 s, and 60 s between two looks.
"spark.network.timeout" = "12s"
"spark.network.timeoutInterval" = "1s"
"spark.executor.heartbeatInterval" = "2s"
[gateway]
"""
    + KEYS
)
LINE = """
[[uplink]]
name = "{name}"
guarantee = "{guarantee}"
listen = "{listen}"
parallelism = 2
# Its rows pass Spark, and a shuffle; those of a line without SQL are read by the tasks that write.
route = [{{ from = "{name}/{{device}}/#", topic = "{name}", key = "{{device}}", where = "qos >= 0" }}]
"""
#: QoS of each line's load.
LOADS = {"exactly_once": 2, "at_most_once": 0}
#: Seconds for which a task that needs Kafka stands still, while one that does not is done.
STILL_S = 2.0
#: Executors that die at most until a stage is run again.
MOST_DEATHS = 12


class Attempts:
    """A bridge whose lines split their batches by key, on two executors."""

    def __init__(self, place: Path, stack: Stack) -> None:
        assert stack.spark is not None
        assert isinstance(stack.kafka, Kafka)
        self.kafka = stack.kafka
        self.stack, self.cluster = stack, stack.spark
        self.bridge = Running(place, place / "bridge.toml")
        self._places = {name: f"127.0.0.1:{free_port()}" for name in LOADS}
        self._ui = free_port()

    def start(self, *lines: str) -> None:
        """Start the bridge with some of its lines, and wait until they take messages in."""
        text = BRIDGE.format(
            mqtt=self.stack.mosquitto.uri,
            kafka=self.kafka.bootstrap,
            master=self.cluster.master.address,
            stack=self.stack.directory,
            tls=self.stack.directory / "gateway",
            ui=self._ui,
        )
        text += "".join(LINE.format(name=name, guarantee=name, listen=self._places[name]) for name in lines)
        self.bridge.file.write_text(text)
        self.bridge.start()
        for name in lines:
            wait_until(lambda: self.bridge.online(name), PATIENCE, f"the gateway of {name}")  # noqa: B023 - asked at once

    def in_kafka(self, line: str) -> int:
        account = self.bridge.account(line)
        return int(account["received"]) - int(account["waiting"])

    def goes_on(self, line: str, more: int = 50) -> None:
        """Wait until further messages are in Kafka."""
        least = self.in_kafka(line) + more
        wait_until(lambda: self.in_kafka(line) >= least, PATIENCE, f"messages of {line}")

    def dies_within_a_task(self, line: str) -> None:
        """Kill an executor that has a task of a line behind the shuffle."""
        kill(self._caught_within_a_task(line))
        self.kafka.resume()
        self.goes_on(line)
        wait_until(lambda: executors_of(self.cluster.workers[0]), PATIENCE, "another executor")

    def sleeps_within_a_task(self, line: str) -> int:
        """Let it stand still with its Python until Spark gives its tasks to another, and wake it then.

        Spark's worker kills it 10 s after that, whether the line has gone on by then or not.

        Returns:
            How many of its processes were there to be woken.
        """
        asleep = tree_of(self._caught_within_a_task(line))
        for process in asleep:
            process.send_signal(signal.SIGSTOP)
        self.kafka.resume()
        wait_until(lambda: line not in self._tasks_here(), PATIENCE, "the end of its tasks here, as Spark sees it")
        woken = [process for process in asleep if alive(process)]
        for process in woken:
            process.send_signal(signal.SIGCONT)
        wait_until(lambda: not any(map(alive, asleep)), PATIENCE, "the end of what was woken")
        self.goes_on(line)
        wait_until(lambda: executors_of(self.cluster.workers[0]), PATIENCE, "another executor")
        return len(woken)

    def _caught_within_a_task(self, line: str) -> psutil.Process:
        """The first worker's executor, with a task of a line behind the shuffle that waits for Kafka, now paused."""

        def caught() -> bool:
            self.kafka.pause()
            if self._stands_here(line):
                return True
            self.kafka.resume()
            self.goes_on(line, 1)
            return False

        wait_until(caught, PATIENCE, "an executor with tasks that write")
        (executor,) = executors_of(self.cluster.workers[0])
        return executor

    def _stands_here(self, line: str) -> bool:
        """Whether a task of a line runs on the first worker, once what needs no Kafka has ended."""
        seen, since = line in self._tasks_here(), time.monotonic()

        def settled() -> bool:
            nonlocal seen, since
            if (now := line in self._tasks_here()) is not seen:
                seen, since = now, time.monotonic()
            return time.monotonic() - since >= STILL_S

        wait_until(settled, PATIENCE, f"no task of {line} that begins or ends")
        return seen

    def _tasks_here(self) -> set[str]:
        """The lines of which a task runs on the first worker."""
        host, stages = self.cluster.workers[0].host, self._stages("status=active&details=true")
        return {
            stage["description"].partition("\n")[0]  # begins with the name of the query
            for stage in stages
            for task in (stage.get("tasks") or {}).values()
            if task["status"] == "RUNNING" and task["host"] == host
        }

    def runs_of_a_stage(self) -> int:
        """How often Spark has run that stage of this session which it ran most often."""
        return 1 + max(int(stage["attemptId"]) for stage in self._stages("details=false"))

    def _stages(self, query: str) -> list[dict[str, Any]]:
        base = f"http://127.0.0.1:{self._ui}/api/v1/applications"
        (application,) = json.loads(read(base))
        stages: list[dict[str, Any]] = json.loads(read(f"{base}/{application['id']}/stages?{query}"))
        return stages


def test_a_stage_is_run_again_or_never_and_each_line_keeps_its_promise(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with Stack(tmp_path / "stack", form=StackForm(spark_workers=2)) as stack:
        one = Attempts(tmp_path, stack)
        try:
            one.start("exactly_once")  # Spark's own four attempts of a stage
            loads = {"exactly_once": Load(tmp_path, stack, "exactly_once", "exactly_once")}
            one.goes_on("exactly_once")
            one.dies_within_a_task("exactly_once")
            woken = one.sleeps_within_a_task("exactly_once")
            record_property("woken", woken)
            assert woken, "all that slept was killed before it could be woken"
            deaths = 1  # a stage is run again only where what is gone had the rows that the shuffle wants
            while one.runs_of_a_stage() == 1 and deaths < MOST_DEATHS:
                one.dies_within_a_task("exactly_once")
                deaths += 1
            record_property("deaths", deaths)
            assert one.runs_of_a_stage() > 1
            assert "[TL-" not in one.bridge.out, "the line has not noticed"
            assert one.bridge.interrupt() == 0

            one.start(*LOADS)  # for at_most_once a stage is run once, in the whole session
            loads["at_most_once"] = Load(tmp_path, stack, "at_most_once", "at_most_once", 0)
            for name in LOADS:
                one.goes_on(name)
            lost = "an executor was lost during a batch"
            while lost not in one.bridge.out and deaths < MOST_DEATHS:  # as above
                one.dies_within_a_task("exactly_once")
                deaths += 1
            one.goes_on("at_most_once")
            assert one.runs_of_a_stage() == 1
            assert lost in one.bridge.out
            record_property("said", [line for line in one.bridge.out.splitlines() if "[TL-" in line])
            for load in loads.values():
                load.end()
            for name in LOADS:
                wait_until(lambda: one.bridge.account(name)["waiting"] == 0, PATIENCE, name)  # noqa: B023 - asked at once
                assert one.bridge.account(name)["adds_up"]
        finally:
            one.kafka.resume()
            one.bridge.interrupt()
        verdicts = {name: load.judged() for name, load in loads.items()}
        for name, verdict in verdicts.items():
            record_property(name, verdict.summary_line())
        strict = verdicts["exactly_once"]
        assert (strict.lost, strict.doubled, strict.late) == (0, 0, 0), strict.summary_line()
        assert verdicts["at_most_once"].doubled == 0, verdicts["at_most_once"].summary_line()
