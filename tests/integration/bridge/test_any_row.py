"""What has been stored never stops a line [I15]: the extremes of every field and size, up and down, and kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

from tests import extremes
from tests.conftest import NewMosquitto
from tests.helpers import publish_all, wait_until
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.gateway.test_outbox import KEEPING, Ear
from tests.integration.kafka.reading import records
from towline.bridge.runtime.status import collect
from towline.gateway.endpoint import GatewayEndpoint
from towline.kafka.deadletters import Collector, DeadLetter
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SEED = int(os.environ.get("TOWLINE_SEED", "20261122"))
BOTH_WAYS = """
name = "tests"
state_dir = "state"
mqtt = {{ brokers = "{mqtt}" }}
kafka = {{ bootstrap_servers = "{kafka}", create_topics = {{ partitions = 1 }} }}
spark = {{ master = "local[2]" }}
[[uplink]]
name = "line"
guarantee = "exactly_once"
route = [{{ from = "t/{{number}}/#", topic = "up", key = "{{number}}" }}]
dead_letter_topic = "up.dead"
[[downlink]]
name = "down"
guarantee = "exactly_once"
from = "records"
topic = "d/{{key}}"
properties = "all"
dead_letter_topic = "down.dead"
"""


@pytest.fixture
def ear(new_mosquitto: NewMosquitto) -> Iterator[tuple[Mosquitto, Ear]]:
    broker = new_mosquitto(**KEEPING, max_packet_size="200000000")
    listening = Ear(broker, "d/#")
    yield broker, listening
    listening.close()


def test_every_row_goes_on_or_is_set_aside(bridge: Running, ear: tuple[Mosquitto, Ear], own_kafka: Kafka) -> None:
    broker, subscriber = ear
    sent, put = list(extremes.messages(SEED)), list(extremes.records(SEED))
    own_kafka.create_topics({"records": 1})
    produce(own_kafka, put)
    bridge.file.write_text(BOTH_WAYS.format(mqtt=broker.uri, kafka=own_kafka.bootstrap))
    bridge.start()
    wait_until(lambda: gateway(bridge, "line").get("state") == "online", PATIENCE, "the gateway")
    publish_all(broker.uri, sent)
    wait_until(lambda: gateway(bridge, "line").get("journaled", 0) >= len(sent), PATIENCE, "all stored")
    for _ in range(2):  # once with the rows stored, and once after the restart
        kill_gateway(bridge, "line")
    wait_until(lambda: gateway(bridge, "down").get("outbox", {}).get("accepted"), PATIENCE, "rows in the outbox")
    for _ in range(2):
        kill_gateway(bridge, "down")
    bridge.kill("org.apache.spark.deploy.SparkSubmit")
    account = settled(bridge, len(sent), len(put))

    went, dead = up(own_kafka)
    assert Counter(went.keys()) + Counter(dead) == Counter(range(len(sent))), f"seed {SEED}"
    assert all(went[n] == sent[n].payload for n in went)
    assert went.keys() >= {n for n, m in enumerate(sent) if len(m.payload) < 900_000 and len(m.user_properties) < 900}
    down = account["down"]
    assert down["dead_lettered"] == len(letters(own_kafka, "down.dead"))
    wait_until(lambda: len(subscriber.messages) >= down["delivered"], what="what was delivered")
    assert len(subscriber.messages) == down["delivered"], f"seed {SEED}"
    assert bridge.interrupt() == 0
    assert bridge.out.count("adds up ✓") == 2
    assert "Traceback" not in bridge.out


def produce(kafka: Kafka, put: list[tuple[bytes | None, bytes | None, Any]]) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for key, value, headers in put:
        producer.produce("records", value, key, headers=headers)
    assert producer.flush(60) == 0


def gateway(bridge: Running, line: str) -> dict[str, Any]:
    if not (bridge.directory / "state" / "bridge.json").exists():
        return {}
    status: dict[str, Any] = collect(bridge.directory / "state")["lines"][line]["gateway"]
    return status or {}


def kill_gateway(bridge: Running, line: str) -> None:
    """Kill it, and wait until another one has come online."""
    endpoint = wait_until(lambda: GatewayEndpoint.read(bridge.directory / "state" / line), PATIENCE, "the endpoint")
    with contextlib.suppress(ProcessLookupError):
        os.kill(endpoint.pid, signal.SIGKILL)

    def again() -> bool:
        now = GatewayEndpoint.read(bridge.directory / "state" / line)
        return now is not None and now.pid != endpoint.pid and gateway(bridge, line).get("state") == "online"

    wait_until(again, PATIENCE, f"the next gateway of {line}: {bridge.out[-300:]}")


def settled(bridge: Running, sent: int, put: int) -> dict[str, Any]:
    """The accounts, once nothing waits and both add up; what was last seen where that does not come."""
    accounts: dict[str, Any] = {}

    def all_done() -> bool:
        accounts.update(
            {name: line["account"] or {} for name, line in collect(bridge.directory / "state")["lines"].items()}
        )
        came = accounts["line"].get("received", 0) >= sent and accounts["down"].get("taken", 0) >= put
        return came and all(a["adds_up"] and not a["waiting"] for a in accounts.values())

    try:
        wait_until(all_done, PATIENCE)
    except AssertionError as late:
        late.add_note(f"seed {SEED}, {sent} up, {put} down: {accounts}\n{bridge.out[-3000:]}")
        raise
    return accounts


def letters(kafka: Kafka, topic: str) -> list[DeadLetter]:
    collector = Collector()
    letters = [collector.add(m.key(), m.value(), m.headers()) for m in records(kafka.bootstrap, topic)]
    return [letter for letter in letters if letter is not None]


def up(kafka: Kafka) -> tuple[dict[int, bytes], list[int]]:
    """Payloads by number in the topic, which has each once, and the numbers among the dead letters."""
    came = records(kafka.bootstrap, "up")
    went = {int(message.key()): message.value() for message in came}
    assert len(came) == len(went), "doubled"
    topics = [dict(letter.headers)["mqtt.topic"] for letter in letters(kafka, "up.dead")]
    return went, [int((topic or b"").split(b"/")[1]) for topic in topics]
