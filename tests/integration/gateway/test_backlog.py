"""What a broker can throw at a gateway at once: long backlogs, large payloads, many topics, cut and stormy lines."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.conftest import NewGateway, publish
from towline import Client
from towline_prove.devstack import Mosquitto
from towline_prove.load import LoadPlan, run_load
from towline_prove.proxy import FaultProxy


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_backlog_of_100k_arrives_whole_and_in_order(
    broker: Mosquitto, new_gateway: NewGateway, tmp_path: Path, qos: int
) -> None:
    gateway = new_gateway(broker, qos=qos).connect()
    gateway.stop()
    plan = LoadPlan(port=broker.port, messages=100_000, devices=8, qos=qos, topic="t/{device}", size=150)
    assert run_load(plan, tmp_path / "history").acked == 100_000
    gateway.start()
    gateway.until(60, journaled=100_000)
    wait_until(lambda: not gateway.status()["unacknowledged"], what="the last acknowledgement")
    wait_until(lambda: not gateway.status()["qos2_held"], what="the last release")
    assert gateway.status()["received"] == 100_000


def test_10k_topics_and_repeated_property_keys(broker: Mosquitto, new_gateway: NewGateway) -> None:
    gateway = new_gateway(broker).connect()
    keys = [("k", "1"), ("k", "2"), ("", ""), ("k", "1"), ("ü", "日本")]
    with Client(broker.uri, client_id="device") as client:
        for number in range(10_000):
            last = client.publish(f"t/{number}/x", user_properties=keys)
        last.result(60)
    gateway.until(60, journaled=10_000)
    gateway.stop()
    rows = gateway.rows()
    assert [row["topic"] for row in rows] == [f"t/{number}/x" for number in range(10_000)]
    wanted = [{"key": key, "value": value} for key, value in keys]
    assert all(row["user_properties"] == wanted for row in rows)


def published_after_pubrel(broker: Mosquitto) -> Counter[int]:
    """How often Mosquitto published a message that it had released, against [MQTT-4.3.3-6]; it numbers them from 1.

    It remembers of a connection that ends before its PUBRELs have left again only that it has to begin anew.
    """
    released: set[int] = set()
    again: Counter[int] = Counter()
    for kind, packet_id in re.findall(r"Sending (PUBLISH|PUBREL) to plant-7 \(.*?m(\d+)", broker.log.read_text()):
        number = int(packet_id) - 1
        if kind == "PUBREL":
            released.add(number)
        elif number in released:
            released.remove(number)
            again[number] += 1
    return again


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_line_cut_at_every_packet_keeps_the_promise(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, qos: int
) -> None:
    """The connection ends after each number of bytes from the broker: at every packet, and inside every packet."""
    broker = new_mosquitto(max_queued_messages="0", log_type="all")
    with FaultProxy(broker.port) as line:
        gateway = new_gateway(f"mqtt://127.0.0.1:{line.port}", qos=qos).connect()
        for cut in range(60):
            gateway.until(state="online")
            line.cut_after(1 + cut)  # a PUBLISH has some 12 bytes here, a PUBREL 4, a CONNACK up to 20
            publish(broker, range(cut * 5, cut * 5 + 5), qos=qos)
        wait_until(lambda: len(set(gateway.seen())) == 300, 60, "all 300")
        gateway.until(30, qos2_held=0)
        seen = gateway.seen()
        assert list(dict.fromkeys(seen)) == list(range(300))
        assert qos == 1 or Counter(seen) <= Counter(range(300)) + published_after_pubrel(broker)
        assert gateway.status()["connects"] > 10
