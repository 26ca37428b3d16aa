"""The source starts its gateway itself: real Mosquitto, real gateway process, real Spark."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.helpers import present, wait_until
from tests.integration.bridge.running import publish as published
from tests.integration.spark.collecting import Collected, end_gateway
from tests.integration.spark.test_source import LONG, begun, failure, until
from towline.gateway.endpoint import GatewayEndpoint
from towline_prove.devstack import Mosquitto

publish = partial(published, topic="telemetry/d1", text="{}")


def load(spark: SparkSession, broker: Mosquitto, state_dir: Path, checkpoint: str = "") -> DataFrame:
    return (
        spark.readStream.format("mqtt")
        .option("broker", broker.uri)
        .option("clientId", "plant-7")
        .option("subscribe", "telemetry/#:1")
        .option("stateDir", str(state_dir))
        .option("checkpointLocation", checkpoint)
        .load()
    )


def run(frame: DataFrame, sink: Collected, tmp_path: Path) -> StreamingQuery:
    return begun(frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "ck")))


def payloads(sink: Collected) -> list[str]:
    return [payload.decode() for _, t in sorted(sink.tables.items()) for payload in t.column("payload").to_pylist()]


class Killing(Collected):
    """Kills the gateway while its first batch runs, and reads on when another is there."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__()
        self._state_dir = state_dir
        self.after: GatewayEndpoint | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        if self.after is None:
            before = present(GatewayEndpoint.read(self._state_dir))
            os.kill(before.pid, signal.SIGKILL)
            wait_until(before.process.has_ended, LONG)
            self.after = wait_until(partial(self._other, before), LONG, "another gateway")
        super().__call__(frame, batch)

    def _other(self, before: GatewayEndpoint) -> GatewayEndpoint | None:
        now = GatewayEndpoint.read(self._state_dir)
        return None if now == before else now


def absences(query: StreamingQuery) -> list[float]:
    """How long no gateway was there, as the query's progress says it."""
    told = [json.loads(one.json)["sources"][0]["latestOffset"] for one in query.recentProgress]
    return [one["absent_s"] for one in told if one and one["absent_s"] > 0]


def has(sink: Collected, *wanted: str) -> bool:
    return payloads(sink) == list(wanted)


def test_a_stream_brings_its_own_gateway_which_outlives_it_and_refuses_an_older_copy(
    spark: SparkSession, mosquitto: Mosquitto, place: Path
) -> None:
    """[I14]: what waits at the broker stays there until the newest state is back."""
    state_dir = place / "plant-7"
    frame = load(spark, mosquitto, state_dir, str(place / "ck"))
    first = Collected()
    query = run(frame, first, place)
    try:
        endpoint = wait_until(partial(GatewayEndpoint.read, state_dir), LONG)
        publish(mosquitto, 1, 2)
        until(query, partial(has, first, "1", "2"))
        shutil.copytree(state_dir / "inbox", place / "copy")
    finally:
        query.stop()
    assert endpoint.owner_pid is not None
    assert Path(f"/proc/{endpoint.owner_pid}/comm").read_text() == "java\n"
    assert not endpoint.process.has_ended()

    publish(mosquitto, 3, 1)
    second = Collected()
    query = run(frame, second, place)
    try:
        until(query, lambda: payloads(second)[-1:] == ["3"])
        publish(mosquitto, 4, 1)
        until(query, lambda: payloads(second)[-2:] == ["3", "4"])
    finally:
        query.stop()
    assert GatewayEndpoint.read(state_dir) == endpoint
    end_gateway(state_dir)
    publish(mosquitto, 5, 2)

    (state_dir / "inbox").rename(place / "newest")
    shutil.copytree(place / "copy", state_dir / "inbox")
    line = failure(run(frame, Collected(), place))
    assert "the checkpoint is at offset 4, the journal ends at 2: an older copy" in line
    assert "[TL-G06]" in line

    shutil.rmtree(state_dir / "inbox")
    (place / "newest").rename(state_dir / "inbox")
    again = Killing(state_dir)
    query = run(frame, again, place)
    try:
        until(query, lambda: payloads(again)[-2:] == ["5", "6"])
        publish(mosquitto, 7, 1)
        until(query, lambda: payloads(again)[-1:] == ["7"] and absences(query))
    finally:
        query.stop()
    assert again.after is not None
    assert again.after.owner_pid == endpoint.owner_pid
