"""A line over two real gateways: one is killed, the account names it, and Kafka has each message once."""

from __future__ import annotations

import signal

import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka
from tests.integration.conftest import NewGateway, publish
from towline.bridge.runtime.status import EXIT_UNKNOWN, exit_code, render
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = pytest.mark.spark


LINE = """
name = "several"
state_dir = "state"
kafka = {{ bootstrap_servers = "{kafka}" }}
spark = {{ master = "local[2]" }}
[[uplink]]
name = "line"
guarantee = "exactly_once"
gateways = {gateways}
route = [{{ from = "{{kind}}/{{device}}", topic = "of-two", key = "{{kind}}{{device}}" }}]
"""


def test_a_line_over_two_gateways(broker: Mosquitto, kafka: Kafka, new_gateway: NewGateway, bridge: Running) -> None:
    gateways = [
        new_gateway(broker, name, qos=2, subscriptions=[{"pattern": f"{device}/#", "qos": 2}]).connect()
        for name, device in (("g1", "a"), ("g2", "b"))
    ]
    kafka.create_topics({"of-two": 1})
    places = [str(one.settings.state_dir) for one in gateways]
    bridge.file.write_text(LINE.format(kafka=kafka.bootstrap, gateways=places))
    for topic in ("a/1", "b/1"):
        publish(broker, range(200), topic, qos=2)
    bridge.start()

    def carried(count: int) -> bool:
        account = bridge.account()
        return account["received"] == count and account["waiting"] == 0 and account.get("in_kafka") == count

    wait_until(lambda: carried(400), PATIENCE, "the first messages")
    gateways[1].stop(signal.SIGKILL)
    publish(broker, range(200, 300), "a/1", qos=2)
    publish(broker, range(200, 300), "b/1", qos=2)
    wait_until(lambda: bridge.account().get("away") and carried(500), PATIENCE, "the others' messages")
    status = bridge.status()
    assert exit_code(status) == EXIT_UNKNOWN
    text = render(status)
    assert "gateway g2 unavailable since" in text
    assert "its messages wait there" in text
    assert "in Kafka 500" in text
    assert "adds up ✓" in text
    bridge.said("gateway g2 unavailable since")

    gateways[1].start()
    wait_until(lambda: carried(600), PATIENCE, "all messages")
    status = bridge.status()
    assert exit_code(status) == 0
    assert "away" not in render(status)
    found = [(key.decode(), int(value)) for key, value, _ in in_kafka(kafka.bootstrap, "of-two")]
    assert sorted(found) == sorted((device, n) for device in ("a1", "b1") for n in range(300)), "each once"
    assert [n for device, n in found if device == "b1"] == list(range(300)), "in order"

    assert bridge.interrupt() == 0
    assert "adds up ✓" in bridge.out
    for one in gateways:
        assert one.status()["state"] == "online"
