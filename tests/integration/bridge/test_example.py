"""The shipped example, as shipped, and what becomes of messages that Kafka does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from tests.integration.bridge.test_dlq import told
from towline.bridge.runtime.status import collect
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = pytest.mark.spark

EXAMPLE = Path(__file__).parents[3] / "examples" / "bridge.toml"
PLACES = {'"mqtt://localhost:1883"': "mqtt", '"localhost:9092"': "kafka", '"~/.local/state/towline/plant-7"': "state"}


def test_every_message_is_where_the_example_says(bridge: Running, mosquitto: Mosquitto, kafka: Kafka) -> None:
    text = EXAMPLE.read_text().replace("partitions = 6", "partitions = 1")
    here = {"mqtt": f"mqtt://127.0.0.1:{mosquitto.port}", "kafka": kafka.bootstrap, "state": "state"}
    for shipped, place in PLACES.items():
        assert shipped in text
        text = text.replace(shipped, f'"{here[place]}"')
    bridge.file.write_text(text)
    bridge.start()

    def line() -> dict[str, Any]:
        line: dict[str, Any] = collect(bridge.directory / "state", ["telemetry"])["lines"]["telemetry"]
        return line

    wait_until(lambda: (line()["gateway"] or {}).get("state") == "online", PATIENCE, "the gateway")
    publish(mosquitto, 0, 1, topic="event/t1/x0")
    publish(mosquitto, 1, 1, topic="event/t9/x0")
    publish(mosquitto, 2, 1, topic="telemetry/t1/d1/x")
    publish(mosquitto, 0, 1, topic="telemetry/t1/d1/large", text="x" * 1_100_000)

    def sentence() -> str:
        return str(line().get("sentence"))

    adds_up = "received 4 = in Kafka 3 + dead-lettered 1 + waiting 0   adds up ✓"
    wait_until(lambda: sentence() == adds_up, PATIENCE, adds_up)
    for topic, value in (("event.t1", b"m0"), ("event.other", b"m1"), ("telemetry", b"m2")):
        assert [record[1] for record in in_kafka(kafka.bootstrap, topic)] == [value]

    _, out, _ = told("show", str(bridge.file))
    assert "1  too_large          line telemetry   in plant-7.dead-letters" in out
    assert "telemetry/t1/d1/large → telemetry  1,100,000 B" in out

    assert bridge.interrupt() == 0
