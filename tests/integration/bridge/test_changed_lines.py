"""A line whose clock or settings change, on a real Spark, a real Kafka and a real journal that the test fills."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.bridge.running import in_kafka
from tests.unit.bridge.test_config import GOOD, changed, read
from tests.unit.gateway.serving import Served, served
from towline.bridge.config.model import CONSUMER
from towline.bridge.lines.account import LineNotes
from towline.bridge.lines.identity import Identity
from towline.bridge.uplink.query import UplinkQuery
from towline.checkpoint import Checkpoint
from towline.spark.sink_note import BatchResult, SinkNote
from towline_prove.devstack import Kafka

pytestmark = pytest.mark.spark

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LONG = 150

EXACTLY = 'guarantee = "exactly_once"\n'
DEDUPE = 'dedupe = { key = "CAST(offset % 100 AS STRING)" }\n'


@pytest.fixture
def one_partition(spark: SparkSession) -> Iterator[SparkSession]:
    """As the driver sets it for a line that drops repeats."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    spark.conf.set(name, "1")
    yield spark
    spark.conf.set(name, str(before))


class Carried:
    """A line's query into a list; `carry` is one run of it, a batch for each moment."""

    def __init__(self, spark: SparkSession, query: UplinkQuery, server: Served) -> None:
        self._spark, self._query, self._server = spark, query, server
        self.values: list[int] = []

    def _keep(self, frame: DataFrame, batch: int) -> None:
        rows = frame.collect()
        logs = Checkpoint(str(self._query.line.checkpoint))  # as the Kafka sink notes it
        SinkNote.read(logs).with_batch(batch, BatchResult(Counter(given=len(rows), dropped=25 - len(rows)))).write(logs)
        self.values += sorted(int(bytes(row.payload)) for row in rows)

    def carry(self, *moments: datetime) -> None:
        mine, server = self._query, self._server
        rows = mine.source(self._spark, {"telemetry": 0})
        frame = mine.writer_input(rows).writeStream
        query = frame.foreachBatch(self._keep).option("checkpointLocation", str(mine.line.checkpoint)).start()
        try:
            for at in moments:
                end = server.add(25, at=at)
                wait_until(
                    lambda: server.journal.consumers.get(CONSUMER) == end or not query.isActive,  # noqa: B023 - asked now
                    LONG,
                    f"the batch up to {end}",
                )
                assert query.isActive, query.exception()
            for progress in query.recentProgress:
                if "addBatch" in progress.durationMs:
                    mine.count_spark(json.loads(progress.json))
        finally:
            query.stop()


@pytest.mark.long
def test_a_clock_that_was_ahead_for_one_batch_costs_none_of_the_next(
    one_partition: SparkSession, tmp_path: Path
) -> None:
    text = changed('name = "telemetry"\n', f'name = "telemetry"\n{DEDUPE}')
    bridge = read(text, tmp_path)
    (line,) = bridge.uplinks
    with served(line.gateway.state_dir, name="telemetry") as server:
        carried = Carried(one_partition, UplinkQuery(bridge, line), server)
        carried.carry(NOW, NOW + timedelta(hours=1), NOW + timedelta(hours=1))
        assert carried.values == list(range(75))
        carried.carry(NOW + timedelta(seconds=1), NOW + timedelta(seconds=2), NOW + timedelta(hours=5), NOW)
    assert carried.values[:100] == list(range(100)), "what is new goes on"
    assert carried.values[100:] == list(range(100, 125)), "of what comes again only what the jump made forget"
    assert LineNotes.read(line.checkpoint).spark_counts == {"deduplicated": 50, "late": 0, "dropped": 50}


#: What the line says from one run to the next: its own settings, its route's; rows that come before it starts, records
#: that are in Kafka by the end.
RUNS = [
    (EXACTLY, "", 25, 25),
    (EXACTLY + DEDUPE, "", 100, 125),
    (EXACTLY + DEDUPE.replace(" }", ', within = "20 minutes" }') + "parallelism = 2\n", "", 100, 125),
    (EXACTLY + DEDUPE.replace("CAST", "'x' || CAST") + "parallelism = 2\n", "", 25, 150),
    (EXACTLY + "parallelism = 2\n", 'where = "offset >= 300"\n', 100, 200),
    ("", 'from = "telemetry/+"\nkey = "{mqtt.offset}"\n', 25, 225),
    (EXACTLY, "", 25, 250),
]


def test_settings_changed_between_two_runs(
    one_partition: SparkSession, kafka: Kafka, topic: NewTopic, tmp_path: Path
) -> None:
    """Begun anew behind the last batch where Spark or the markers need it; what repeats are recognised by is kept."""
    name = topic()
    sinks = []
    with served(tmp_path / "state" / "telemetry", name="telemetry") as server:
        for own, routed, count, total in RUNS:
            said = {"from": '"telemetry/{device}/#"', "key": '"{device}"', "topic": f'"{name}"'}
            said |= dict(text.split(" = ", 1) for text in routed.splitlines())
            route = "".join(f"{key} = {value}\n" for key, value in said.items())
            head = GOOD.partition("[[uplink.route]]")[0].replace("k1:9092", kafka.bootstrap)
            bridge = read(f"{head}{own}[[uplink.route]]\n{route}", tmp_path)
            end = server.add(count)
            query = UplinkQuery(bridge, bridge.uplinks[0]).start(one_partition)
            try:
                wait_until(
                    lambda: server.journal.consumers.get(CONSUMER) == end or not query.isActive,  # noqa: B023 - asked now
                    LONG,
                    f"the batch up to {end}",
                )
                assert query.isActive, query.exception()
            finally:
                query.stop()
            identity = Identity.read(tmp_path / "state" / "telemetry")
            assert identity is not None
            sinks.append(identity.sink.removeprefix("plant-7.telemetry"))
            assert len(in_kafka(kafka.bootstrap, name)) == total, own
    assert sinks == ["", ".2", ".3", ".3", ".4", ".4", ".5"]
    keys = [key for key, _, _ in in_kafka(kafka.bootstrap, name)]
    assert keys[200:225] == [str(n).encode() for n in range(350, 375)]
    assert keys[225] == b"d25"
