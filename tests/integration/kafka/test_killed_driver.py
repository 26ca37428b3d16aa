"""kill -9 of a whole Spark application, driver, JVM and workers, at whatever moment: nothing lost, nothing doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.kafka.writing import account, committed
from towline_prove.devstack import Kafka
from towline_prove.reader import TopicTail
from towline_prove.referee import Arrival

pytestmark = [pytest.mark.long, pytest.mark.faults, pytest.mark.spark]

KILLS = 5
SEED = 5


def enough(tail: TopicTail, arrived: list[Arrival]) -> bool:
    arrived += tail.read_all(1)
    return len(arrived) > 400


def test_killed_at_random_moments(
    kafka: Kafka, topic: NewTopic, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    name = topic()
    dice = random.Random(SEED)
    record_property("seed", SEED)
    record_property("kills", KILLS)
    command = [sys.executable, "-m", "tests.integration.kafka.streaming", kafka.bootstrap, name, str(tmp_path / "ck")]
    for _ in range(KILLS):
        with (tmp_path / "log").open("wb") as log:
            application = subprocess.Popen(
                command, cwd=Path(__file__).parents[3], stdout=log, stderr=log, start_new_session=True
            )
        try:
            with closing(TopicTail(kafka.bootstrap, name, skip_existing=True)) as tail:
                wait_until(partial(enough, tail, []), 300, "enough batches of this life")
            time.sleep(dice.uniform(0, 1))  # the kill falls anywhere within a batch
        finally:
            os.killpg(application.pid, signal.SIGKILL)
            application.wait(60)
        found = committed(kafka, name)
        assert account(found, max(found) + 1) == (0, 0)
