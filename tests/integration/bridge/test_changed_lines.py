"""A line whose clock or settings change, on a real Spark, a real Kafka and a real journal that the test fills."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import SparkSession

from tests.conftest import NewTopic
from tests.helpers import present, wait_until
from tests.integration.bridge.running import in_kafka
from tests.integration.spark.collecting import configured
from tests.unit.bridge.test_config import GOOD, read
from tests.unit.gateway.serving import served
from towline.bridge.config.model import CONSUMER
from towline.bridge.lines.account import LineNotes
from towline.bridge.lines.identity import Identity
from towline.bridge.uplink.query import UplinkQuery
from towline_prove.devstack import Kafka

LONG = 150

EXACTLY = 'guarantee = "exactly_once"\n'
DEDUPE = 'dedupe = { key = "CAST(offset % 100 AS STRING)" }\n'


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


def test_settings_changed_between_two_runs(spark: SparkSession, kafka: Kafka, topic: NewTopic, tmp_path: Path) -> None:
    """Begun anew behind the last batch where Spark or the markers need it; what repeats are recognised by is kept."""
    name = topic()
    sinks, repeats = [], []
    one = {"spark.sql.shuffle.partitions": "1"}  # as the driver sets it for a line that drops repeats
    with configured(spark, one), served(tmp_path / "state" / "telemetry", name="telemetry") as server:
        for own, routed, count, total in RUNS:
            said = {"from": '"telemetry/{device}/#"', "key": '"{device}"', "topic": f'"{name}"'}
            said |= dict(text.split(" = ", 1) for text in routed.splitlines())
            route = "".join(f"{key} = {value}\n" for key, value in said.items())
            head = GOOD.partition("[[uplink.route]]")[0].replace("k1:9092", kafka.bootstrap)
            bridge = read(f"{head}{own}[[uplink.route]]\n{route}", tmp_path)
            end = server.add(count)
            line = UplinkQuery(bridge, bridge.uplinks[0])
            query = line.start(spark)
            try:
                wait_until(
                    lambda: server.journal.consumers.get(CONSUMER) == end or not query.isActive,  # noqa: B023 - asked now
                    LONG,
                    f"the batch up to {end}",
                )
                assert query.isActive, query.exception()
                query.processAllAvailable()
                for progress in query.recentProgress:
                    line.count_spark(json.loads(progress.json))
            finally:
                query.stop()
            identity = present(Identity.read(tmp_path / "state" / "telemetry"))
            sinks.append(identity.sink.removeprefix("plant-7.telemetry"))
            repeats.append(LineNotes.read(bridge.uplinks[0].checkpoint).spark_counts.get("deduplicated", 0))
            assert len(in_kafka(kafka.bootstrap, name)) == total, own
    assert repeats == [0, 0, *[100] * 5], "all rows of the third run"
    assert sinks == ["", ".2", ".3", ".3", ".4", ".4", ".5"]
    keys = [key for key, _, _ in in_kafka(kafka.bootstrap, name)]
    assert keys[200:225] == [str(n).encode() for n in range(350, 375)]
    assert keys[225] == b"d25"
