"""Executors that lack what Towline needs: one line before anything is read, and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from towline.spark.java import find_java

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

_BRIDGE = """
name = "bare"
state_dir = "state"
mqtt = { brokers = "mqtt://127.0.0.1:9" }
kafka = { bootstrap_servers = "127.0.0.1:9" }
spark = { master = "local-cluster[1,1,512]", conf = { "spark.executor.memory" = "512m" } }
[[uplink]]
name = "line"
guarantee = "exactly_once"
route = [{ from = "#", topic = "t" }]
"""


def test_a_python_without_packages_is_told_and_ends_the_bridge(tmp_path: Path) -> None:
    find_java()
    file = tmp_path / "bridge.toml"
    file.write_text(_BRIDGE)
    python = Path(sys.base_prefix) / "bin" / Path(sys.executable).name
    done = subprocess.run(
        [sys.executable, "-m", "towline.cli", "run", str(file)],
        env={
            **{name: value for name, value in os.environ.items() if name != "SPARK_HOME"},
            "PYSPARK_PYTHON": str(python),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    (line,) = [one for one in said.splitlines() if "[TL-S31]" in one]
    assert line.startswith("executor 0 on ")
    assert "towline is missing, pyarrow is missing, confluent-kafka is missing, crc32c is missing" in line
    assert "Traceback" not in said
