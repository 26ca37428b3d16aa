"""docs/spark.md as it stands, with real messages and real deaths: MQTT, a gateway, two workers of Spark, Kafka."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.helpers import present, wait_until
from tests.integration.bridge.running import PATIENCE, Running, below
from tests.integration.spark.searching import contents, crawled, running
from towline.bridge.lines.statuses import gateway_status
from towline_prove.devstack.spark import SparkCluster, SparkWorker
from towline_prove.devstack.stack import Stack
from towline_prove.history import read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.reader import read_topic
from towline_prove.referee import judge_arrivals

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.kafka, pytest.mark.broker, pytest.mark.timeout(1800)]

PAGE = Path(__file__).parents[3] / "docs" / "spark.md"
_CONF = '"spark.executor.memory" = "512m"'
#: An executor that is not heard of for 12 s counts as lost; Spark's own values are 120 s, and 60 s between two looks.
_MORE_CONF = (
    f'{_CONF}, "spark.decommission.enabled" = true, "spark.network.timeout" = "12s", '
    '"spark.network.timeoutInterval" = "1s", "spark.executor.heartbeatInterval" = "2s"'
)
_BLOCK = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_DONE = "--- done"
HALLS = ("hall-1", "hall-2")
#: Messages a second of each hall, until everybody has died.
RATE = 75.0


def commands_of(page: Path, heading: str) -> list[str]:
    """The blocks of shell below a heading of a page."""
    text = page.read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [textwrap.dedent(block) for _, block in _BLOCK.findall(section)]


@contextlib.contextmanager
def shell(place: Path) -> Iterator[Callable[[str], str]]:
    """Runs commands in a directory, one after the other in one shell; none may fail, and each says what it said."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(["bash"], stdin=pipe, stdout=pipe, stderr=out, text=True, cwd=place, env=environ) as bash:
        stdin, stdout = present(bash.stdin), present(bash.stdout)

        def run(command: str) -> str:
            stdin.write(f'{command}\necho "{_DONE} $?"\n')
            stdin.flush()
            said: list[str] = []
            for line in stdout:
                if line.startswith(_DONE):
                    assert line.split()[-1] == "0", f"{command}\n{''.join(said)}"
                    return "".join(said)
                said.append(line)
            raise AssertionError(f"the shell ended at {command}\n{''.join(said)}")

        yield run


def executors_of(worker: SparkWorker) -> list[psutil.Process]:
    """The executors that a worker has started."""
    return [] if (pid := worker.pid) is None else below(pid, "CoarseGrainedExecutorBackend")


def kill(process: psutil.Process) -> None:
    """SIGKILL, and wait until it is gone."""
    os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(30)


#: Of `shown_by`: here executors have Spark's own secret from their worker, and nothing else.
ENVIRONMENTS = "environments"


def shown_by(cluster: SparkCluster, *pages: str, leaving_out: Iterable[Path] = ()) -> dict[str, str]:
    """What somebody sees who has none of the files of secrets, by where it is: pages, processes, files.

    Args:
        cluster: Its servers that run.
        pages: That of a driver, from which links lead on.
        leaving_out: Files of secrets that the machines have.
    """
    servers = [one for one in cluster.servers if one.running]
    own = [cluster.secret_file, cluster.properties_file, *leaving_out]
    own += [one.directory / "spark.properties" for one in cluster.servers]
    roots = [Path(f"/proc/{one.pid}/root") for one in servers]
    machines = [contents(root / "tmp", *(Path(f"{root}{file}") for file in own)) for root in roots]
    return {
        **crawled(*pages, *(f"http://{one.host}:{one.ports[1]}" for one in servers)),
        "command lines": running(psutil.process_iter(), "cmdline"),
        ENVIRONMENTS: running(psutil.process_iter(), "environ"),
        "temporary files of the other machines": "".join(machines),
        "Spark's files": contents(cluster.directory, *own),
    }


def comes_online(place: Path, hall: str) -> None:
    """Wait until a gateway has its subscription: what is published from now on is taken in."""
    status = partial(gateway_status, place / hall / hall)
    wait_until(lambda: (status() or {}).get("state") == "online", PATIENCE, f"the gateway of {hall}")


def goes_on(bridge: Running, after: str, more: int = 50) -> None:
    """Wait until further messages are in Kafka, as the account says."""

    def in_kafka() -> int:
        account = bridge.account("telemetry")
        return int(account["received"] - account["waiting"])

    least = in_kafka() + more
    wait_until(lambda: in_kafka() >= least, PATIENCE, f"messages after {after}")


def test_the_page_carries_every_message_once_whoever_dies(tmp_path: Path) -> None:
    """With a Kafka of three brokers, executors that may be sent away, and a shuffle: tasks of both stages die."""
    up, env, gateway, plant, gateways, run, pub, kill_worker, status, _ = commands_of(
        PAGE, "From one machine to a cluster, in ten commands"
    )
    plant = plant.replace(_CONF, _MORE_CONF).replace('key = "{device}"', 'key = "{device}", where = "qos >= 0"')
    first_gateway, second_gateway = gateways.strip().splitlines()
    bridge, enough = Running(tmp_path, tmp_path / "plant-7.toml"), threading.Event()
    with ThreadPoolExecutor(len(HALLS)) as pool, shell(tmp_path) as run_command:
        try:
            for command in (f"{up.strip()} --kafka-brokers 3", env, gateway, plant, first_gateway, second_gateway, run):
                run_command(command)
            stack = Stack(tmp_path / "stack")
            cluster = present(stack.spark)
            for hall in HALLS:
                comes_online(tmp_path, hall)
            run_command(pub)
            sends = partial(LoadPlan, port=stack.mosquitto.port, messages=1_000_000, rate=RATE, qos=2, devices=10)
            plans = {tmp_path / hall: sends(run=hall, publishers=2, topic=f"{hall}/{{device}}/data") for hall in HALLS}
            loads = [pool.submit(run_load, plan, place / "claims", stop=enough) for place, plan in plans.items()]
            goes_on(bridge, "the start")
            _nobody_sees_the_others(cluster, tmp_path)
            first, second = cluster.workers

            kill(wait_until(lambda: next(iter(executors_of(second)), None), PATIENCE, "an executor"))
            goes_on(bridge, "the executor")
            asleep = wait_until(lambda: next(iter(executors_of(second)), None), PATIENCE, "an executor")
            processes = [asleep, *asleep.children(recursive=True)]
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            goes_on(bridge, "an executor that stands still, whose tasks run elsewhere", 1_500)
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)  # its transactions are fenced
            run_command(kill_worker)
            goes_on(bridge, "the worker")
            run_command("towline devstack restart spark-worker-1 --dir stack")
            wait_until(lambda: executors_of(first), PATIENCE, "an executor of the new worker")
            os.kill(second.pid or 0, signal.SIGPWR)  # spark.worker.decommission.signal
            wait_until(lambda: not executors_of(second), PATIENCE, "no executor of a decommissioned worker")
            goes_on(bridge, "a decommissioned worker")
            for server in ("kafka-2", "spark-master"):
                run_command(f"towline devstack kill {server} --dir stack")
                goes_on(bridge, f"{server}, which is gone")
                run_command(f"towline devstack restart {server} --dir stack")
                goes_on(bridge, f"{server}, which is back")
            (driver,) = wait_until(lambda: below(os.getpid(), "towline.bridge.runtime.driver"), PATIENCE, "a driver")
            (jvm,) = wait_until(lambda: below(driver.pid, "SparkSubmit"), PATIENCE, "the driver's JVM")
            kill(driver)
            kill(jvm)
            goes_on(bridge, "the driver")
            run_command("kill -9 $(jobs -p %1)")
            run_command(first_gateway)
            comes_online(tmp_path, "hall-1")
            goes_on(bridge, "a gateway, for which a batch may wait that was begun with its messages")

            enough.set()
            assert all(load.result(PATIENCE).acked for load in loads)
            wait_until(lambda: bridge.account("telemetry")["waiting"] == 0, PATIENCE, "all of them in Kafka")
            assert "adds up ✓" in run_command(status)
            for place in plans:
                verdict = judge_arrivals(read_history(place / "claims"), read_topic(stack.kafka.bootstrap, "readings"))
                assert verdict.acked > 0
                assert (verdict.lost, verdict.doubled, verdict.late) == (0, 0, 0), verdict.summary_line()
            _no_secret_shows(cluster, tmp_path)
        finally:
            enough.set()
            run_command("kill %3; wait %3; kill $(jobs -p); wait; towline devstack down --dir stack")


def _nobody_sees_the_others(cluster: SparkCluster, place: Path) -> None:
    """Executors see neither the bridge's files nor the stack's, nor those of the other worker."""
    first, second = cluster.workers
    for worker, other in ((first, second), (second, first)):
        (executor,) = wait_until(lambda: executors_of(worker), PATIENCE, worker.label)  # noqa: B023 - asked at once
        root = f"/proc/{executor.pid}/root"  # its own view of our paths
        assert Path(f"{root}{worker.directory}").exists()
        servers = (cluster.secret_file, other.directory, cluster.master.directory)
        for hidden in (place / "state", place / "hall-1", *servers):
            assert hidden.exists()
            assert not Path(f"{root}{hidden}").exists()


def _no_secret_shows(cluster: SparkCluster, place: Path) -> None:
    shown = shown_by(cluster)
    assert "CoarseGrainedExecutorBackend" in shown["command lines"]
    assert any("stderr" in page and "logPage" in page for page in shown)
    for file in (cluster.secret_file, place / "stack" / "gateway" / "token"):
        secret = file.read_text().strip()
        found = {where for where, text in shown.items() if secret in text}
        assert found == ({ENVIRONMENTS} if file == cluster.secret_file else set())
