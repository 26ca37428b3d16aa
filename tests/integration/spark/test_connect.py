"""``towline.register`` with Spark Connect, its own server and client; what they need is brought for this test alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.integration.devices import listening
from towline_prove.devstack import Mosquitto

pytestmark = [pytest.mark.spark, pytest.mark.long]

PROGRAM = Path(__file__).with_name("connecting.py")
#: What ``pyspark[connect]`` asks for; pandas would make every Python worker of the other tests slower to start.
NEEDED = ["grpcio", "grpcio-status", "googleapis-common-protos", "pandas", "zstandard"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("libraries")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(place), *NEEDED], check=True)
    return place


def program(libraries: Path, broker: str, place: Path) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(libraries), "SPARK_LOCAL_IP": "127.0.0.1"}
    environ["PYSPARK_PYTHON"] = sys.executable
    environ.pop("SPARK_HOME", None)
    with (place / "err").open("w") as err:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), broker, str(place)],
            text=True,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            cwd=place,
        )


def test_a_stream_runs_with_spark_connect(
    mosquitto: Mosquitto, libraries: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    running = program(libraries, mosquitto.uri, tmp_path)
    try:
        with listening(mosquitto.port, ("out/#", 1)) as (device, heard):
            assert running.stdout
            assert running.stdout.readline() == "running\n", (tmp_path / "err").read_text()[-2000:]

            def came() -> bool:
                device.publish("in/a", b"1", qos=1).wait_for_publish(30)
                return ("out/a", b"1") in [(message.topic, message.payload) for message in heard]

            wait_until(came, 120, "a message through the stream")
    finally:
        running.communicate("stop\n", timeout=60)
    assert running.returncode == 0
    record_property("heard", len(heard))
