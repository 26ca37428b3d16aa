"""A bridge whose Kafka takes 40 kB/s: 6 MB that wait are carried at that rate, and the account says where they are."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from towline.spark.java import find_java
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.devstack.kafka import kafka_jars

# `make test` has the sink in unit/kafka/test_exactly_once.py, and how large a batch is in unit/spark/test_pace.py.
pytestmark = [pytest.mark.long, pytest.mark.spark]

LINE = """
[[uplink]]
name = "line"
guarantee = "{guarantee}"
route = [{{ from = "t/#", topic = "{topic}" }}]
"""
RATE = 40_000
COUNT = 2_000
SIZE = 3_000


def limit_bytes(kafka: Kafka, client_id: str, bytes_per_second: int) -> None:
    """Set ``producer_byte_rate`` of a client id (KIP-546); what is sent in the first ten seconds passes."""
    command = [str(find_java()), "-cp", f"{kafka_jars()}/*", "kafka.admin.ConfigCommand", "--bootstrap-server"]
    change = ["--alter", "--entity-type", "clients", "--entity-name", client_id, "--add-config"]
    subprocess.run([*command, kafka.bootstrap, *change, f"producer_byte_rate={bytes_per_second}"], check=True)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_all_arrives_at_the_rate_that_kafka_takes(
    bridge: Running, mosquitto: Mosquitto, kafka: Kafka, guarantee: str
) -> None:
    topic = f"slow-{guarantee}"
    kafka.create_topics({topic: 1})
    limit_bytes(kafka, topic, RATE)
    named = f', settings = {{ "client.id" = "{topic}" }}'
    line = LINE.format(guarantee=guarantee, topic=topic)
    bridge.write(mosquitto.uri, kafka.bootstrap, line, name="slow", kafka_settings=named)
    bridge.start()
    wait_until(bridge.online, PATIENCE, "the subscription")
    began = time.monotonic()
    publish(mosquitto, 0, COUNT, text="m{} " + "x" * SIZE, qos=2)
    takes_s = COUNT * SIZE / RATE
    wait_until(lambda: bridge.account()["waiting"] == 0, 2 * takes_s + PATIENCE, "all in Kafka")
    assert time.monotonic() - began > takes_s / 2, "it was slow"
    assert bridge.account()["in_kafka"] == COUNT
    numbers = [int(value.partition(b" ")[0][1:]) for _, value, _ in in_kafka(kafka.bootstrap, topic)]
    assert numbers == list(range(COUNT)), "in order, and none twice"
    assert "TL-K" not in bridge.out
