"""Messages that the gateway can't take in whole, through a real bridge: each a dead letter, and the account adds up."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import NewMosquitto, NewTopic
from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka
from towline import Client
from towline_prove.devstack import Kafka

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


def dead_letters(bridge: Running, command: str) -> dict[str, object]:
    run = subprocess.run(
        [sys.executable, "-m", "towline.cli", "dlq", command, str(bridge.file), "--json"],
        capture_output=True,
        check=False,
        timeout=120,
    )
    answer: dict[str, object] = json.loads(run.stdout)
    return answer


def test_each_is_a_dead_letter_between_its_neighbours(
    bridge: Running, new_mosquitto: NewMosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    name, dead = topic(), topic()
    bridge.file.write_text(f"""
name = "stubs"
state_dir = "state"
mqtt = {{ brokers = "mqtt://127.0.0.1:{broker.port}", max_packet_bytes = 1500000 }}
kafka = {{ bootstrap_servers = "{kafka.bootstrap}" }}
spark = {{ master = "local[2]" }}
[[uplink]]
name = "line"
guarantee = "exactly_once"
dead_letter_topic = "{dead}"
[[uplink.route]]
from = "t/{{device}}/#"
topic = "{name}"
key = "{{device}}"
where = "length(payload) > 1"
""")
    bridge.start()
    wait_until(lambda: bridge.status()["lines"]["line"]["gateway_running"], PATIENCE, "the gateway")
    crowd = [("k", "v")] * 1_001
    with Client(broker.uri, client_id="device") as client:
        for payload, pairs in (
            (b"m1", []),
            (bytes(2_000_000), []),
            (b"m2", []),
            (bytes(1_200_000), crowd),
            (b"m3", []),
        ):
            client.publish("t/d/x", payload, qos=2, user_properties=pairs).wait(60)
    wait_until(lambda: bridge.account()["received"] == 5, PATIENCE, "all of them")
    wait_until(lambda: not bridge.account()["waiting"], PATIENCE, "the batches")
    account = wait_until(
        lambda: (a := bridge.account())["waiting"] == 0 and a["dead_lettered"] == 2 and a, PATIENCE, "the counts"
    )
    assert (account["in_kafka"], account["filtered"], account["adds_up"]) == (3, 0, True)

    assert [value for _, value, _ in in_kafka(kafka.bootstrap, name)] == [b"m1", b"m2", b"m3"]
    assert all(value is not None for _, value, _ in in_kafka(kafka.bootstrap, dead)), "no tombstone"
    waiting = dead_letters(bridge, "show")
    reasons = {letter["reason"]: letter for letter in waiting["first"]}  # type: ignore[attr-defined]
    assert set(reasons) == {"packet_too_large", "too_many_properties"}
    assert reasons["packet_too_large"]["bytes"] == 0
    assert reasons["too_many_properties"]["bytes"] > 1_200_000, "every byte of the packet, in chunks"
    assert reasons["too_many_properties"]["mqtt_topic"] == "t/d/x"
    stay = dead_letters(bridge, "replay")
    assert (stay["mended"], sum(stay["dead"].values())) == ({}, 2)  # type: ignore[attr-defined]
    assert bridge.interrupt() == 0
