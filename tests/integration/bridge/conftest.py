"""A Spark session with the bridge's own settings, and a bridge as a user runs it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from tests.integration.bridge.running import Running
from tests.integration.spark.collecting import configured
from towline.bridge.config.file import parse
from towline.bridge.runtime.session import session_settings
from towline.bridge.uplink.sink import FORMATS
from towline.spark.session import register

_BRIDGE = """
name = "tests"
state_dir = "state"
mqtt = { brokers = "mqtt://127.0.0.1" }
kafka = { bootstrap_servers = "127.0.0.1:9092" }
spark = { master = "local[2]" }
[[uplink]]
name = "line"
route = [{ from = "#", topic = "t" }]
"""


@pytest.fixture(scope="module")
def spark(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """With the settings and formats that the driver gives its own, as far as a session that runs takes them."""
    given = session_settings(parse(_BRIDGE, tmp_path_factory.mktemp("spark") / "bridge.toml", os.environ))
    given = {name: value for name, value in given.items() if spark.conf.isModifiable(name)}
    with configured(spark, given):
        register(spark)
        for source in FORMATS:
            spark.dataSource.register(source)
        yield spark


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Running]:
    with a_bridge(tmp_path) as running:
        yield running


@contextlib.contextmanager
def a_bridge(place: Path) -> Iterator[Running]:
    """A bridge to be started, which is ended."""
    directory = place / "brücke"  # what a JVM in the locale C can't name; `Running` runs it in that
    directory.mkdir()
    with ended(Running(directory, directory / "bridge.toml")) as running:
        yield running


@contextlib.contextmanager
def ended(running: Running) -> Iterator[Running]:
    """A bridge that is ended with all it has started, and what it said is told."""
    try:
        yield running
    finally:
        if hasattr(running, "process") and running.process.poll() is None:
            family = psutil.Process(running.process.pid).children(recursive=True)
            for _ in range(2):
                running.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(60)
            running.process.kill()
            running.process.wait()
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        for file in (running.directory / "out", *sorted((running.directory / running.state).glob("logs/*.log"))):
            if file.exists():  # what a failed test has to show for itself
                sys.stdout.write(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}\n")
