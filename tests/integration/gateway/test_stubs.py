"""Messages that a gateway can't take in whole, from a real broker: the line goes on, and each has its row."""

from __future__ import annotations

import re
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import PublishPacket, QoS

from tests.helpers import present, publish_all
from tests.integration.conftest import Gateway, NewGateway
from towline import Client, ClientSettings
from towline_prove.devstack import Mosquitto

LIMIT = 10_000
#: An empty user property, as it is on the wire.
EMPTY = ("", "")


def send(broker: Mosquitto, *packets: PublishPacket) -> None:
    publish_all(broker.uri, packets)


def publish(payload: bytes, qos: int = 1, topic: str = "t/1", **more: Any) -> PublishPacket:
    return PublishPacket(topic, payload, qos=QoS(qos), packet_id=1 if qos else None, **more)


def facts(row: dict[str, Any]) -> dict[str, str]:
    assert row["payload"] is None
    return {pair["key"]: pair["value"] for pair in row["user_properties"]}


@pytest.mark.parametrize(("qos", "protocol"), [(1, "5"), (2, "5"), (2, "3.1.1"), (1, "3.1")])
def test_a_message_above_the_limit_leaves_a_row_in_its_place(
    broker: Mosquitto, new_gateway: NewGateway, qos: int, protocol: str
) -> None:
    gateway = new_gateway(broker, qos=qos, max_packet_bytes=LIMIT, protocol=protocol).connect()
    large = bytes(range(256)) * 80
    send(broker, publish(b"1", qos), publish(large, qos), publish(b"2", qos))
    send(broker, publish(large, 0))  # by itself: the broker lets it overtake
    send(broker, publish(b"3", qos))
    status = gateway.until(journaled=5, packets_too_large=2, qos2_held=0)
    assert (status["connects"], status["received"], status["last_error"]) == (1, 5, None)
    gateway.stop()
    rows = gateway.rows()
    assert [row["payload"] for row in rows] == [b"1", None, b"2", None, b"3"]
    assert [row["topic"] for row in rows] == ["t/1"] * 5
    assert [row["qos"] for row in rows] == [qos, qos, qos, 0, qos]
    told = facts(rows[1])
    assert told["towline-reason"] == "packet_too_large"
    assert told["towline-sha256"] == sha256(large).hexdigest()


def peak_mb(gateway: Gateway) -> float:
    """The most memory that the gateway ever had."""
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def test_a_bomb_of_properties_costs_the_gateway_its_bytes_alone(broker: Mosquitto, new_gateway: NewGateway) -> None:
    gateway = new_gateway(broker, qos=2).connect()
    before = peak_mb(gateway)
    bomb = publish(b"boom", 2, user_properties=[EMPTY] * 400_000)
    send(broker, publish(b"1", 2), bomb, publish(b"2", 2), publish(b"3", 2, user_properties=[EMPTY] * 1_000))
    gateway.until(journaled=4, too_many_properties=1, qos2_held=0)
    assert peak_mb(gateway) - before < 40, "200 MB and more as objects"
    gateway.stop(signal.SIGKILL)
    gateway.connect(too_many_properties=1, end=4)
    gateway.stop()
    rows = gateway.rows()
    assert [row["payload"] for row in rows] == [b"1", None, b"2", b"3"]
    assert len(rows[3]["user_properties"]) == 1_000
    assert facts(rows[1])["towline-properties"] == "400000"
    assert facts(rows[1])["towline-sha256"] == sha256(b"boom").hexdigest()
    packet = rows[1]["correlation_data"]
    assert packet.endswith(b"\0" * 4 + b"boom")
    assert len(packet) == int(facts(rows[1])["towline-size"])


def test_a_client_gets_a_message_without_payload_and_acknowledges_it(mosquitto: Mosquitto) -> None:
    with Client(
        mosquitto.uri, client_id="app", subscribe=["t/#"], settings=ClientSettings(max_packet_bytes=1024)
    ) as client:
        send(mosquitto, publish(bytes(2_000)), publish(b"next"))
        first, second = present(client.receive(20)), present(client.receive(20))
        assert (first.payload, first.topic, first.correlation_data) == (None, "t/1", None)
        assert dict(first.user_properties)["towline-reason"] == "packet_too_large"
        assert second.payload == b"next"
        first.ack()
        second.ack()
        assert client.last_error is None
