"""What has been stored never stops a line [I15]: the extremes of every field and size, up and down, and kill -9."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import Any

import pytest

from tests import extremes
from tests.conftest import NewMosquitto
from tests.helpers import produce_all, publish_all, wait_until
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.bridge.test_delivery_semantics import kill_gateway, online
from tests.integration.conftest import Ear
from tests.integration.kafka.reading import dead_letters, records
from towline.kafka.deadletters import Reason
from towline_prove.devstack import Kafka

# `make test` has the same extremes at the parts: publisher/test_any_row.py, bridge/test_sql.py and test_downsql.py,
# unit/kafka, and in gateway/test_stubs.py what a gateway can't take in.
pytestmark = [pytest.mark.long, pytest.mark.spark]

SEED = int(os.environ.get("TOWLINE_SEED", "20261122"))
BOTH_WAYS = """
[[uplink]]
name = "line"
guarantee = "exactly_once"
dead_letter_topic = "up.dead"
route = [{ from = "t/{number}/#", topic = "up", key = "{number}" }]
[[downlink]]
name = "down"
guarantee = "exactly_once"
from = "records"
topic = "d/{key}"
properties = "all"
dead_letter_topic = "down.dead"
"""


def test_every_row_goes_on_or_is_set_aside(bridge: Running, new_mosquitto: NewMosquitto, own_kafka: Kafka) -> None:
    broker = new_mosquitto(max_queued_messages="0", max_packet_size="200000000")
    sent, put = list(extremes.messages(SEED)), list(extremes.records(SEED))
    own_kafka.create_topics({"records": 1})
    produce_all(own_kafka.bootstrap, "records", put)
    large = ", max_packet_bytes = 2500000"
    bridge.write(broker.uri, own_kafka.bootstrap, BOTH_WAYS, create_topics=True, mqtt_settings=large)
    with contextlib.closing(Ear(broker, "d/#")) as ear:
        bridge.start()
        wait_until(bridge.online, PATIENCE, "the gateway")
        publish_all(broker.uri, sent)
        wait_until(lambda: gateway(bridge, "line").get("journaled", 0) >= len(sent), PATIENCE, "all stored")
        for _ in range(2):  # once with the rows stored, and once after the restart
            kill_gateway(bridge, "line")
            online(bridge)
        wait_until(lambda: gateway(bridge, "down").get("outbox", {}).get("accepted"), PATIENCE, "rows in the outbox")
        for _ in range(2):
            kill_gateway(bridge, "down")
            online(bridge, "down")
        bridge.kill("org.apache.spark.deploy.SparkSubmit")
        wait_until(lambda: is_settled(bridge, len(sent), len(put)), PATIENCE, f"both accounts, seed {SEED}")

        went, dead = up(own_kafka)
        assert Counter(went.keys()) + Counter(dead) == Counter(range(len(sent))), f"seed {SEED}"
        assert all(went[n] == sent[n].payload for n in went)
        assert any(letter.reason is Reason.PACKET_TOO_LARGE for letter in dead_letters(own_kafka.bootstrap, "up.dead"))
        fine = {n for n, m in enumerate(sent) if len(m.payload) < 900_000 and len(m.user_properties) < 900}
        assert went.keys() >= fine
        account = bridge.account("down")
        assert account["dead_lettered"] == len(dead_letters(own_kafka.bootstrap, "down.dead"))
        wait_until(lambda: len(ear.messages) >= account["delivered"], what="what was delivered")
        assert len(ear.messages) == account["delivered"], f"seed {SEED}"
    assert bridge.interrupt() == 0
    assert bridge.out.count("adds up ✓") == 2
    assert "Traceback" not in bridge.out


def gateway(bridge: Running, line: str) -> dict[str, Any]:
    return bridge.line(line)["gateway"] or {}


def is_settled(bridge: Running, received: int, taken: int) -> bool:
    up, down = bridge.account("line"), bridge.account("down")
    came = up["received"] >= received and down.get("taken", 0) >= taken
    return came and all(account["adds_up"] and not account["waiting"] for account in (up, down))


def up(kafka: Kafka) -> tuple[dict[int, bytes], list[int]]:
    """Payloads by number in the topic, which has each once, and the numbers among the dead letters."""
    came = records(kafka.bootstrap, "up")
    went = {int(message.key()): message.value() for message in came}
    assert len(came) == len(went), "doubled"
    topics = [dict(letter.headers)["mqtt.topic"] for letter in dead_letters(kafka.bootstrap, "up.dead")]
    return went, [int((topic or b"").split(b"/")[1]) for topic in topics]
