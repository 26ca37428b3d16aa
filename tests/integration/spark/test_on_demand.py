"""The source starts its gateway itself: real Mosquitto, real gateway process, real Spark."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.helpers import wait_until
from tests.integration.spark.test_source import LONG, Collected, begun, until
from towline.devstack import Mosquitto
from towline.gateway.endpoint import Endpoint

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """A state directory; the gateway that was started for it ends with the test."""
    directory = tmp_path / "plant-7"
    yield directory
    endpoint = Endpoint.read(directory)
    if endpoint and not endpoint.process.gone():
        os.kill(endpoint.pid, signal.SIGTERM)
        wait_until(endpoint.process.gone, LONG)


def publish(broker: Mosquitto, *payloads: str) -> None:
    client = mqtt.Client(CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", int(broker.uri.rpartition(":")[2]))
    client.loop_start()
    for payload in payloads:
        client.publish("telemetry/d1", payload, qos=1).wait_for_publish(LONG)
    client.loop_stop()
    client.disconnect()


def load(spark: SparkSession, broker: Mosquitto, state_dir: Path) -> DataFrame:
    return (
        spark.readStream.format("mqtt")
        .option("broker", broker.uri)
        .option("clientId", "plant-7")
        .option("subscribe", "telemetry/#:1")
        .option("stateDir", str(state_dir))
        .load()
    )


def run(frame: DataFrame, sink: Collected, tmp_path: Path) -> StreamingQuery:
    return begun(frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "ck")))


def payloads(sink: Collected) -> list[str]:
    return [payload.decode() for _, t in sorted(sink.tables.items()) for payload in t.column("payload").to_pylist()]


def has(sink: Collected, *wanted: str) -> bool:
    return payloads(sink) == list(wanted)


def test_a_stream_brings_its_own_gateway_which_outlives_it(
    spark: SparkSession, mosquitto: Mosquitto, state_dir: Path, tmp_path: Path
) -> None:
    frame = load(spark, mosquitto, state_dir)
    first = Collected()
    query = run(frame, first, tmp_path)
    try:
        endpoint = wait_until(partial(Endpoint.read, state_dir), LONG)
        publish(mosquitto, "1", "2")
        until(query, partial(has, first, "1", "2"))
    finally:
        query.stop()
    assert endpoint.owner_pid is not None
    assert Path(f"/proc/{endpoint.owner_pid}/comm").read_text() == "java\n"
    assert not endpoint.process.gone()

    publish(mosquitto, "3")
    second = Collected()
    query = run(frame, second, tmp_path)
    try:
        until(query, lambda: payloads(second)[-1:] == ["3"])
        publish(mosquitto, "4")
        until(query, lambda: payloads(second)[-2:] == ["3", "4"])
    finally:
        query.stop()
    assert Endpoint.read(state_dir) == endpoint
