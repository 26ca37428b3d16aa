"""Kafka topics of a downlink that are deleted, recreated or truncated by retention: real Spark, Kafka and gateway.

The line's runner is the driver's own; the session of Spark is the tests'.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from tests.conftest import NewTopic
from tests.helpers import produce_all, wait_until
from tests.integration.conftest import Ear
from tests.integration.kafka.test_topic_ids import delete, make_anew
from towline.bridge.config.file import parse
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.lines.recovery import reset_line
from towline.bridge.runtime.driver import LineRunner
from towline.checkpoint import Checkpoint, kafka_offsets_in
from towline.gateway.launch import ensure_running
from towline_prove.devstack import Kafka, Mosquitto

PATIENCE = 120.0


class Host:
    """The driver, as far as a runner goes."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.reports: list[dict[str, Any]] = []

    def report(self, kind: str, **values: Any) -> None:
        self.reports.append({"kind": kind, **values})

    def is_ending(self) -> bool:
        return False


class Downlink:
    """A line that runs in the session of the tests, and a subscriber of its messages."""

    def __init__(self, spark: SparkSession, broker: Mosquitto, kafka: Kafka, directory: Path) -> None:
        self.host, self.ear = Host(spark), Ear(broker)
        self._broker, self.kafka, self._directory = broker, kafka, directory
        self._admin = AdminClient({"bootstrap.servers": kafka.bootstrap})

    def run(self, *settings: str) -> None:
        """Start the line with these settings."""
        text = (
            f'name = "{self._directory.name}"\nstate_dir = "state"\nmqtt = {{ brokers = "{self._broker.uri}" }}\n'
            f'kafka = {{ bootstrap_servers = "{self.kafka.bootstrap}" }}\n[[downlink]]\nname = "line"\n'
            'topic = "down/{key}"\n' + "\n".join(settings)
        )
        bridge = parse(text, self._directory / "bridge.toml", {})
        (self.line,) = bridge.downlinks
        with ensure_running(self.line.gateway, owner_pid=os.getpid()):
            pass
        self.host.reports.clear()
        host: Any = self.host
        self.runner = LineRunner(host, DownlinkQuery(bridge, self.line))

    def stop(self) -> None:
        self.runner.stop(time.monotonic() + 30)

    def put(self, topic: str, numbers: range) -> None:
        produce_all(self.kafka.bootstrap, topic, ((b"k", b"%d" % number, []) for number in numbers))

    def cut(self, topic: str, offset: int) -> None:
        """What retention does."""
        (future,) = self._admin.delete_records([TopicPartition(topic, 0, offset)]).values()
        future.result(30)

    def until(self, condition: Callable[[], bool]) -> None:
        def stepped() -> bool:
            self.runner.step()
            return condition()

        wait_until(stepped, PATIENCE, "the line")

    def hears(self, numbers: list[int]) -> None:
        self.until(lambda: self.ear.numbers() == numbers)

    def stops(self) -> str:
        """Why the line stops for good."""
        self.until(lambda: self.runner.start_at == math.inf)
        return str(self.host.reports[-1]["text"])

    def committed_offsets(self) -> dict[str, int]:
        """End offsets of the last committed batch, in the one topic."""
        logs = Checkpoint(str(self.line.checkpoint))
        return next(iter(kafka_offsets_in(logs.offsets(logs.last_committed_batch())).values()), {})

    def close(self) -> None:
        self.stop()
        self.ear.close()


@pytest.fixture
def downlink(spark: SparkSession, mosquitto: Mosquitto, kafka: Kafka, tmp_path: Path) -> Iterator[Downlink]:
    with contextlib.closing(Downlink(spark, mosquitto, kafka, tmp_path)) as line:
        yield line


def test_deleted_records_and_a_recreated_topic(downlink: Downlink, topic: NewTopic) -> None:
    """Retention overtakes a stopped line, a batch is planned; then its topic is recreated, and is longer."""
    name = topic()
    source = f'from = "{name}"'
    downlink.put(name, range(3))
    downlink.run(source)
    downlink.hears([0, 1, 2])
    downlink.stop()

    downlink.put(name, range(3, 10))
    downlink.cut(name, 8)
    downlink.run(source)
    assert f"in offset [3, 10) for topic partition {name}-0" in downlink.stops()
    assert '"go_on"' in downlink.stops()
    assert "[TL-B06]" in downlink.stops()
    downlink.stop()
    downlink.run(source, 'on_data_loss = "go_on"', 'where = "false"')
    downlink.hears([0, 1, 2, 8, 9])  # with the settings the batch was planned with
    downlink.put(name, range(10, 12))
    downlink.until(lambda: downlink.committed_offsets() == {"0": 12})  # and then by the file's
    downlink.stop()

    make_anew(downlink.kafka, name)
    downlink.put(name, range(100, 120))
    downlink.run(source, 'on_data_loss = "go_on"')
    error = downlink.stops()
    assert f'"{name}" (its id was ' in error
    assert "offset 12 of partition 0; nothing is read from the new one" in error
    assert re.search(r"towline reset \S+ line\b", error)
    assert "; from its end, set starting_offsets" in error
    assert downlink.ear.numbers() == [0, 1, 2, 8, 9], "no record of the new one"
    downlink.stop()
    reset_line(downlink.line)
    downlink.run(source)
    downlink.hears([0, 1, 2, 8, 9, *range(100, 120)])
    make_anew(downlink.kafka, name)  # while it runs
    downlink.put(name, range(200, 230))
    assert "its id was" in downlink.stops()
    assert downlink.ear.numbers() == [0, 1, 2, 8, 9, *range(100, 120)]


def test_a_deleted_topic_of_a_pattern_stops_no_line(downlink: Downlink, topic: NewTopic) -> None:
    """All of it was delivered: a warning, and the others go on, while the line runs and after a stop."""
    one, two, three = topic("one"), topic("two"), topic("three")
    source = f"from = {{ pattern = '^({one}|{two}|{three})$' }}"
    downlink.put(two, range(2))
    downlink.run(source)
    downlink.hears([0, 1])
    delete(downlink.kafka, two)
    downlink.put(one, range(2, 4))
    downlink.hears([0, 1, 2, 3])
    remarks = [text for report in downlink.host.reports for text in report.get("remarks", ())]
    lost = "was deleted from Kafka; all of its known records were delivered"
    assert remarks == [f'topic "{two}", read up to offset 2, {lost}']
    downlink.stop()
    delete(downlink.kafka, three)
    downlink.run(source)
    downlink.put(one, range(4, 5))
    downlink.hears([0, 1, 2, 3, 4])
    (stopped,) = [report for report in downlink.host.reports if report["kind"] == "failed"]
    assert "Partitions Set(" in stopped["text"], "Spark is asked to stop at any other loss"
