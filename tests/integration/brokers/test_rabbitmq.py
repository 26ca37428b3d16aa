"""RabbitMQ 3.10 with its MQTT plugin: it speaks MQTT 3.1.1 only, and takes QoS 2 as QoS 1."""

from __future__ import annotations

from tests.helpers import wait_until
from tests.integration.gateway.conftest import NewGateway, new_gateway
from towline.devstack import RabbitMQ
from towline.gateway.outrows import MESSAGE_SCHEMA, rows_of

__all__ = ["new_gateway"]


def test_exactly_once_downlink_stands_still_at_the_first_message(rabbitmq: RabbitMQ, new_gateway: NewGateway) -> None:
    """It answers QoS 2 with PUBACK."""
    name = "down-2"
    gateway = new_gateway(rabbitmq.uri, name, subscriptions=[], outbox={}, guarantee="exactly_once", protocol="3.1.1")
    client = gateway.start()
    client.send(
        "q/0", 0, [rows_of([{"topic": "d/2", "payload": b"%d" % n, "qos": 2} for n in range(50)])], MESSAGE_SCHEMA
    )
    status = wait_until(lambda: (s := gateway.status())["last_error"] and s, what="the refusal")
    assert status["last_error"]["code"] == "TL-M44"
    outbox = status["outbox"]
    assert (outbox["delivered"], outbox["degraded"]) == (1, 1)
    assert outbox["queued"] + outbox["in_flight"] == 49
    assert "exactly once" in outbox["held_back"]
