"""The example that carries Kafka to Kafka: killed with -9 in the midst of it, every alarm is there once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NewTopic
from tests.helpers import produce_all, wait_until
from tests.integration.bridge.running import PATIENCE, in_kafka, kill_all
from towline.checkpoint import Checkpoint
from towline_prove.devstack import Kafka

# `make test` has the sink's side in kafka/test_exactly_once_spark.py.
pytestmark = [pytest.mark.long, pytest.mark.spark]

EXAMPLE = Path(__file__).parents[3] / "examples" / "kafka_to_kafka.py"


def put(bootstrap: str, topic: str, count: int) -> None:
    values = (json.dumps({"number": number, "celsius": 80 + number % 2}) for number in range(count))
    produce_all(bootstrap, topic, ((b"d%d" % (number % 10), value.encode(), []) for number, value in enumerate(values)))


def test_every_alarm_once_across_kill_9(kafka: Kafka, topic: NewTopic, tmp_path: Path) -> None:
    source, target = topic("readings", 2), topic("alarms")
    put(kafka.bootstrap, source, 20_000)
    command = [sys.executable, str(EXAMPLE), kafka.bootstrap, source, target, str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            checkpoint = Checkpoint(f"file:{tmp_path / 'checkpoint'}")
            wait_until(
                lambda: (planned := checkpoint.last_planned_batch()) and planned != checkpoint.last_committed_batch(),
                PATIENCE,
                "a batch in work",
            )
        finally:
            kill_all(first)
        ended = subprocess.run([*command, "--once"], stdout=log, stderr=log, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    numbers = [json.loads(value)["number"] for _, value, _ in in_kafka(kafka.bootstrap, target)]
    assert sorted(numbers) == list(range(1, 20_000, 2))
