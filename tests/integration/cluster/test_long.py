"""Long: everybody else dies too, executors stand still, are sent away or left out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import in_kafka
from tests.integration.cluster.hurting import executors_of, kill
from tests.integration.cluster.page import PATIENCE, Page, commands_of
from tests.integration.cluster.test_cluster import HALLS, PAGE, Lives, Load
from towline_prove.devstack.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.kafka, pytest.mark.broker, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
_CONF = '"spark.executor.memory" = "512m"'
#: How long a paused executor stands still, in seconds: its tasks are waited for, as spark.network.timeout is longer.
PAUSE_S = 40


def test_nothing_is_lost_or_doubled_whoever_else_dies(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    up, env, gateway, plant, gateways, run, _, _, status, _ = commands_of(
        PAGE, "From one machine to a cluster, in ten commands"
    )
    plant = plant.replace(_CONF, f'{_CONF}, "spark.decommission.enabled" = true')
    first, second = gateways.strip().splitlines()
    with Page(tmp_path) as page:
        try:
            for command in (f"{up.strip()} --kafka-brokers 3", env, gateway, plant, first, second, run):
                page.run(command)
            stack = Stack(tmp_path / "stack")
            assert stack.spark is not None
            lives = Lives(tmp_path, stack.spark)
            for hall in HALLS:
                lives.comes_online(hall)
            loads = [Load(tmp_path, stack, hall) for hall in HALLS]
            lives.goes_on("the start")
            first_worker, second_worker = stack.spark.workers

            (asleep,) = wait_until(lambda: executors_of(second_worker), PATIENCE, "an executor")
            asleep.send_signal(signal.SIGSTOP)
            page.run(f"sleep {PAUSE_S}")
            asleep.send_signal(signal.SIGCONT)
            lives.goes_on("an executor that stood still")

            os.kill(first_worker.pid or 0, signal.SIGPWR)  # spark.worker.decommission.signal
            wait_until(lambda: not executors_of(first_worker), PATIENCE, "no executor of a decommissioned worker")
            lives.goes_on("a decommissioned worker")
            page.run("towline devstack restart spark-worker-1 --dir stack")
            wait_until(lambda: executors_of(first_worker), PATIENCE, "an executor of the new worker")
            kill(executors_of(second_worker)[0])
            lives.goes_on("the other worker's executor")

            page.run("kill -9 $(jobs -p %1)")
            page.run(f"{first}\nGATEWAY=$!")
            lives.comes_online("hall-1")
            lives.goes_on("a gateway, for which a batch may wait that was begun with its messages")

            page.run("towline devstack kill kafka-2 --dir stack")
            lives.goes_on("a broker of Kafka")
            page.run("towline devstack restart kafka-2 --dir stack")

            page.run("towline devstack kill spark-master --dir stack")
            lives.goes_on("the master, which is gone")
            page.run("towline devstack restart spark-master --dir stack")
            lives.goes_on("the master, which is back")

            loads[0].end()
            wait_until(lambda: lives.waiting("hall-1") == 0, PATIENCE, "no batch that needs a gateway")
            page.run("kill -9 $GATEWAY")
            lives.goes_on("a gateway, which is gone")
            page.run(first)
            lives.comes_online("hall-1")

            for load in loads:
                load.end()
            wait_until(lives.all_is_there, PATIENCE, "all of them in Kafka")
            assert "adds up ✓" in page.run(status)
            for load in loads:
                verdict = load.judged()
                record_property(load.hall, verdict.summary_line())
                assert verdict.acked > 0
                assert (verdict.lost, verdict.doubled, verdict.late) == (0, 0, 0), verdict.summary_line()
        finally:
            page.run("kill %3; wait %3; kill $(jobs -p); wait; towline devstack down --dir stack")


def test_a_host_on_which_tasks_fail_is_left_out_and_speculation_refused(tmp_path: Path) -> None:
    with Page(tmp_path) as page:
        try:
            page.run("towline devstack up --spark --dir stack")
            page.run('eval "$(towline devstack env --dir stack)"')
            page.run("towline devstack topics numbers --dir stack")
            submit = (
                "SPARK_LOCAL_IP=127.0.0.1 spark-submit --properties-file stack/spark/client.properties"
                f" {Path(__file__).with_name('excluding.py')} $STACK_KAFKA numbers {tmp_path}/checkpoint 127.0.0.2"
            )
            page.run(f"{submit} 4 > submit.log 2>&1")
            assert "not on 127.0.0.2" in (tmp_path / "submit.log").read_text()
            values = [int(value) for _, value, _ in in_kafka(page.variable("STACK_KAFKA"), "numbers")]
            assert len(values) >= 500
            assert sorted(values) == list(range(len(values)))

            said = page.run(f"{submit} 9 spark.speculation=true 2>&1 || echo ended with $?")
            assert "Set spark.speculation=false for this application.   [TL-K25]" in said
            assert said.endswith("ended with 1\n")
            assert len(in_kafka(page.variable("STACK_KAFKA"), "numbers")) == len(values)
        finally:
            page.run("towline devstack down --dir stack")
