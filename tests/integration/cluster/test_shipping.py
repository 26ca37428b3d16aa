"""Long: executors with nothing but a Python get Towline and its packages from a bridge and from an application."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import publish
from tests.integration.cluster.page import KEYS, PATIENCE, Page
from towline.bridge.lines.statuses import gateway_status
from towline.kafka.admin import KafkaAdmin
from towline.spark.executors import REQUIRED_VERSIONS
from towline_prove.devstack.mosquitto import Mosquitto
from towline_prove.devstack.stack import Stack, StackForm
from towline_prove.reader import read_topic

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.kafka, pytest.mark.broker, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
#: One worker will do: what it lacks, any lacks.
FORM = StackForm(spark_workers=1, bare=True)
BRIDGE = (
    """
name = "ship"
state_dir = "state"
mqtt = {{ brokers = ["{mqtt}"] }}
kafka = {{ bootstrap_servers = "{kafka}", create_topics = {{ partitions = 1 }} }}
[spark]
master = "{master}"
secret_file = "{secret}"
conf = {{ "spark.executor.memory" = "512m", "spark.pyspark.python" = "{python}"{more} }}
[gateway]
listen = "{listen}"
"""
    + KEYS
    + """[[uplink]]
name = "line"
guarantee = "exactly_once"
route = [{{ from = "telemetry/{{device}}/#", topic = "readings", key = "{{device}}" }}]
"""
)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``towline.zip`` and ``site-packages.tar.gz``, as docs/spark.md makes them."""
    place = tmp_path_factory.mktemp("ship")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(place), str(ROOT)]
    subprocess.run(wheel, check=True, timeout=300)
    (made,) = place.glob("towline-*.whl")
    shutil.copy(made, place / "towline.zip")
    with tarfile.open(place / "site-packages.tar.gz", "w:gz", compresslevel=1) as archive:
        for name in REQUIRED_VERSIONS:
            found = distribution(name)
            for file in found.files or ():
                if ".." not in file.parts:  # its programs
                    archive.add(str(found.locate_file(file)), arcname=str(file))
    return place


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "stack", form=FORM) as running:
        yield running


def write(place: Path, stack: Stack, shipped: Path | None) -> None:
    variables = stack.variables()
    more = ""
    if shipped is not None:
        more = (
            f', "spark.submit.pyFiles" = "{shipped}/towline.zip"'
            f', "spark.archives" = "{shipped}/site-packages.tar.gz#site-packages"'
            ', "spark.executorEnv.PYTHONPATH" = "site-packages"'
        )
    text = BRIDGE.format(
        mqtt=variables["STACK_MQTT"],
        kafka=variables["STACK_KAFKA"],
        master=variables["STACK_SPARK"],
        secret=stack.directory / "spark" / "secret",
        listen=variables["STACK_GATEWAY_1"],
        tls=stack.directory / "gateway",
        python=PYTHON,
        more=more,
    )
    (place / "bridge.toml").write_text(text)


def in_readings(stack: Stack) -> int:
    if "readings" not in KafkaAdmin(stack.kafka.bootstrap).info().topics:
        return 0  # a line makes its topic when its query starts
    return sum(1 for _ in read_topic(stack.kafka.bootstrap, "readings"))


def online(place: Path) -> bool:
    return (gateway_status(place / "state" / "line") or {}).get("state") == "online"


def test_what_executors_lack_is_told_and_what_is_shipped_runs(tmp_path: Path, stack: Stack, shipped: Path) -> None:
    broker = Mosquitto(stack.directory / "mosquitto")
    write(tmp_path, stack, None)
    with Page(tmp_path) as page:
        said = page.run("towline run bridge.toml; echo ended with $?")
        assert "ended with 2" in said
        assert "towline is missing, pyarrow is missing, confluent-kafka is missing, crc32c is missing" in said

        write(tmp_path, stack, shipped)
        page.run("towline run bridge.toml > run.log 2>&1 &")
        wait_until(lambda: online(tmp_path), PATIENCE, "the gateway")
        publish(broker, 0, 300, topic="telemetry/d/x", qos=2)
        wait_until(lambda: in_readings(stack) == 300, PATIENCE, "the bridge's records")
        page.run("kill $! && wait $!")

        page.run("towline gateway bridge.toml > gateway.log 2>&1 &")
        wait_until(lambda: online(tmp_path), PATIENCE, "the gateway alone")
        publish(broker, 300, 200, topic="telemetry/d/x", qos=2)
        page.run(
            f"SPARK_LOCAL_IP=127.0.0.1 PYSPARK_PYTHON={PYTHON} spark-submit"
            " --properties-file stack/spark/client.properties"
            f" --py-files {shipped}/towline.zip --archives {shipped}/site-packages.tar.gz#site-packages"
            f" --conf spark.executorEnv.PYTHONPATH=site-packages {ROOT}/examples/cluster.py"
            f" --gateway grpc+tls://{stack.variables()['STACK_GATEWAY_1']} --token-file stack/gateway/token"
            f" --ca-file stack/gateway/authority.pem --kafka {stack.kafka.bootstrap} --topic readings"
            f" --checkpoint {tmp_path}/checkpoint > submit.log 2>&1 &"
        )
        # It reads as a consumer of its own name, from the oldest row that is kept.
        wait_until(lambda: in_readings(stack) >= 500, PATIENCE, "the application's records")
        page.run("kill $!; wait $!; kill %1 2>/dev/null; kill $(jobs -p); wait")
