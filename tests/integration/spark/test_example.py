"""The example without the bridge, as a user starts it: a real broker, two sinks, stopped and started again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from tests.helpers import wait_until
from tests.integration.spark.collecting import online
from towline import Client
from towline_prove.devstack import Mosquitto

EXAMPLE = Path(__file__).parents[3] / "examples" / "plain_pyspark.py"


@pytest.mark.spark
def test_two_sinks_from_one_gateway(mosquitto: Mosquitto, tmp_path: Path) -> None:
    directory = tmp_path / "plain"
    command = [sys.executable, str(EXAMPLE), mosquitto.uri, "telemetry/#:1", str(directory), "--messages", "100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: online(directory / "gateway"), 120, "the example's gateway")
    with Client(mosquitto.uri, client_id="devices") as client:
        for number in range(100):
            client.publish(f"telemetry/d{number % 5}/temp", b"%d" % number).result(60)
    shown, _ = process.communicate(timeout=150)
    assert process.returncode == 0, shown
    table = ds.dataset(directory / "parquet").to_table().sort_by("offset")
    assert [int(payload) for payload in table["payload"].to_pylist()] == list(range(100))
    assert set(table["device"].to_pylist()) == {f"d{n}" for n in range(5)}
    assert "plain-pyspark" not in shown.split("Batch: 0")[0]
    assert "Batch: 0" in shown
    assert "replaced a statically registered data source" not in shown
    # A query that is stopped makes Spark's own worker daemon complain of a broken pipe now and then; our code may not.
    frames = re.findall(r'File ".*(?:/src/towline/|plain_pyspark).*', shown)
    assert not frames, shown
