"""The page for notebooks, typed as it stands: its Python in its order, with brokers of this machine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.spark.test_source import LONG
from towline import Client
from towline.gateway.launch import find_running
from towline_prove.devstack import Kafka, Mosquitto

PAGE = Path(__file__).parents[3] / "docs" / "spark.md"


def test_the_page_does_what_it_says(
    spark: SparkSession, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic, place: Path
) -> None:
    target = topic("notebook")
    given = {
        "mqtts://broker.example:8883": mosquitto.uri,
        "/var/lib/towline": str(place),
        "k1:9092": kafka.bootstrap,
        '"telemetry")': f'"{target}")',
    }
    names: dict[str, Any] = {}
    session, source, sink, audit, tables, _connect = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in (session, source):
        exec(replaced(block, given), names)  # noqa: S102 - our own page
    # The first batch of a query makes the session at the broker.
    names["messages"].writeStream.format("noop").option("checkpointLocation", str(place / "ck")).trigger(
        availableNow=True
    ).start().awaitTermination(LONG)
    shutil.rmtree(place / "ck")
    publish(mosquitto, place, 0, 20)
    for block in (sink, audit):
        exec(replaced(block, given), names)  # noqa: S102
    assert names["written"].count() == 20
    assert {"state", "tip", "queued"} <= set(json.loads(names["waiting"]))
    publish(mosquitto, place, 20, 25)
    try:
        exec(replaced(tables, given), names)  # noqa: S102
        assert names["rows"].where("offset >= 20").count() == 5
        assert names["stream"].isStreaming
    finally:
        spark.sql("DROP TABLE IF EXISTS messages")


def publish(broker: Mosquitto, place: Path, begin: int, end: int) -> None:
    with Client(broker.uri, client_id="device") as client, find_running(place / "plant-7") as gateway:  # type: ignore[union-attr]
        for number in range(begin, end):
            client.publish(f"telemetry/d{number % 4}/t", b"%d" % number, qos=2).result(60)
        wait_until(lambda: gateway.status()["end"] == end, LONG)


def replaced(block: str, given: dict[str, str]) -> str:
    for there, here in given.items():
        block = block.replace(there, here)
    return block
