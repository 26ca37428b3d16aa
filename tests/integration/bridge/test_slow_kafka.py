"""A bridge whose Kafka takes 40 kB/s: 6 MB that wait are carried at that rate, and the account says where they are."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from towline_prove.devstack import Kafka, Mosquitto

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


#: Kafka's protocol: AlterClientQuotas, version 0; confluent-kafka has no call for it.
_ALTER_CLIENT_QUOTAS = 49


def limit_bytes(kafka: Kafka, client_id: str, bytes_per_second: float) -> None:
    """Set ``producer_byte_rate`` of a client id (KIP-546); what is sent in the first ten seconds passes."""
    entity = struct.pack(">i", 1) + _text("client-id") + _text(client_id)
    value = struct.pack(">i", 1) + _text("producer_byte_rate") + struct.pack(">d?", bytes_per_second, False)
    body = struct.pack(">i", 1) + entity + value + struct.pack(">?", False)
    frame = struct.pack(">hhi", _ALTER_CLIENT_QUOTAS, 0, 1) + _text("tests") + body
    with socket.create_connection(("127.0.0.1", kafka.port), 30) as connection:
        connection.sendall(struct.pack(">i", len(frame)) + frame)
        answer = connection.makefile("rb").read(4 + 4 + 4 + 4 + 2)
    assert struct.unpack_from(">h", answer, 16) == (0,), answer


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


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
