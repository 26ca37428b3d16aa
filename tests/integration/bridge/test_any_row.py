"""What has been stored never stops a line [I15]: the extremes of every field and size, up and down, and kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest

from tests import extremes
from tests.conftest import NewMosquitto
from tests.helpers import produce_all, publish_all, wait_until
from tests.integration.bridge.round_trips import (
    Foreign,
    Header,
    Said,
    generated_headers,
    generated_messages,
    headers_of,
    message_of,
    properties_of,
)
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.gateway.test_outbox import Ear
from tests.integration.kafka.reading import records
from towline.bridge.runtime.status import collect_status
from towline.gateway.endpoint import GatewayEndpoint
from towline.kafka.deadletters import ChunkAssembler, DeadLetter
from towline_prove.devstack import Kafka, Mosquitto

# `make test` has the same extremes at the parts: publisher/test_any_row.py, bridge/test_sql.py and test_downsql.py,
# unit/kafka, and in test_one_bridge.py a bridge that sets aside what its gateway can't take in.
pytestmark = [pytest.mark.long, pytest.mark.spark]

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
dead_letter_topic = "up.dead"
[[uplink.route]]
from = "t/{{number}}/#"
topic = "up"
key = "{{number}}"
[[uplink.route]]
from = "r/#"
topic = "round"
retain_as_published = true
[[downlink]]
name = "down"
guarantee = "exactly_once"
from = "records"
topic = "d/{{key}}"
properties = "all"
dead_letter_topic = "down.dead"
[[downlink]]
name = "back"
guarantee = "exactly_once"
from = "round"
topic = "back/{{header.mqtt.topic}}"
dead_letter_topic = "back.dead"
"""
#: Of a round trip: messages of a device, and records of an application.
ROUND, RECORDS = 500, 100


@pytest.fixture
def ear(new_mosquitto: NewMosquitto) -> Iterator[tuple[Mosquitto, Ear]]:
    broker = new_mosquitto(max_queued_messages="0", max_packet_size="200000000")
    listening = Ear(broker, "d/#")
    yield broker, listening
    listening.close()


@pytest.fixture
def foreign(ear: tuple[Mosquitto, Ear]) -> Iterator[Foreign]:
    client = Foreign(ear[0], "back/r/")
    yield client
    client.close()


def test_every_row_goes_on_or_is_set_aside(
    bridge: Running, ear: tuple[Mosquitto, Ear], foreign: Foreign, own_kafka: Kafka
) -> None:
    """With 500 generated messages that go up, come down and are the same, and headers that only Kafka has seen."""
    broker, subscriber = ear
    round_trip, headers = generated_messages(ROUND, SEED), generated_headers(RECORDS, SEED)
    sent, put = list(extremes.messages(SEED)), list(extremes.records(SEED))
    own_kafka.create_topics({"records": 1, "round": 1})
    produce_all(own_kafka.bootstrap, "records", put)
    theirs = [(b"k", b"v", [("mqtt.topic", f"r/k/{n}".encode()), *one]) for n, one in enumerate(headers)]
    produce_all(own_kafka.bootstrap, "round", theirs)
    bridge.file.write_text(BOTH_WAYS.format(mqtt=broker.uri, kafka=own_kafka.bootstrap))
    bridge.start()
    wait_until(lambda: gateway(bridge, "line").get("state") == "online", PATIENCE, "the gateway")
    foreign.publish(round_trip, "r/")
    publish_all(broker.uri, sent)
    stored = len(sent) + ROUND
    wait_until(lambda: gateway(bridge, "line").get("journaled", 0) >= stored, PATIENCE, "all stored")
    for _ in range(2):  # once with the rows stored, and once after the restart
        kill_gateway(bridge, "line")
    wait_until(lambda: gateway(bridge, "down").get("outbox", {}).get("accepted"), PATIENCE, "rows in the outbox")
    for _ in range(2):
        kill_gateway(bridge, "down")
    bridge.kill("org.apache.spark.deploy.SparkSubmit")
    account = settled(bridge, {"line": stored, "down": len(put), "back": ROUND + RECORDS})

    went, dead = up(own_kafka)
    assert Counter(went.keys()) + Counter(dead) == Counter(range(len(sent))), f"seed {SEED}"
    assert all(went[n] == sent[n].payload for n in went)
    assert went.keys() >= {n for n, m in enumerate(sent) if len(m.payload) < 900_000 and len(m.user_properties) < 900}
    down = account["down"]
    assert down["dead_lettered"] == len(letters(own_kafka, "down.dead"))
    wait_until(lambda: len(subscriber.messages) >= down["delivered"], what="what was delivered")
    assert len(subscriber.messages) == down["delivered"], f"seed {SEED}"
    check_round_trip(own_kafka, foreign, round_trip)
    check_headers(own_kafka, foreign, headers, account["back"])
    assert bridge.interrupt() == 0
    assert bridge.out.count("adds up ✓") == 3
    assert "Traceback" not in bridge.out


def check_round_trip(kafka: Kafka, foreign: Foreign, sent: list[Said]) -> None:
    """Each message is in Kafka with its headers, and came back once, the same, in the order of Kafka."""
    wanted = {message.topic: message for message in sent}
    numbers = {message.topic: at for at, message in enumerate(sent)}
    order = []
    for record in records(kafka.bootstrap, "round"):
        headers = record.headers() or []
        topic = dict(headers)["mqtt.topic"].decode().removeprefix("r/")
        if topic.startswith("k/"):
            continue
        order.append(topic)
        message = wanted[topic]
        assert record.value() == message.payload, message
        mine = [pair for pair in headers if pair[0] not in ("mqtt.message-expiry", "mqtt.received-at")]
        assert sorted(mine, key=itemgetter(0)) == sorted(headers_of(message, "r/"), key=itemgetter(0)), message
        assert_expiry(dict(headers).get("mqtt.message-expiry"), message)
    assert sorted(order, key=numbers.__getitem__) == list(wanted), "lost or doubled on the way to Kafka"
    for qos in (0, 1, 2):  # between two of them MQTT keeps no order
        mine = [numbers[topic] for topic in order if wanted[topic].qos == qos]
        assert mine == sorted(mine)

    wait_until(lambda: len(came_back(foreign)) >= len(sent), PATIENCE, "what was carried back")
    came = came_back(foreign)
    assert [message.topic for message in came] == order, "lost, doubled or out of order on the way back"
    for message in came:
        before = wanted[message.topic]
        # Payload Format Indicator 0 is "equivalent to not sending" one (MQTT 5, 3.3.2.3.2).
        same = before._replace(expiry=None, qos=2, payload_format=before.payload_format or None)
        assert message._replace(expiry=None) == same
        assert_expiry(message.expiry, before)


def assert_expiry(left: bytes | int | None, message: Said) -> None:
    """Some of it may be gone."""
    assert (left is None) == (message.expiry is None), message
    if message.expiry is not None and left is not None:
        assert message.expiry - 3600 <= int(left) <= message.expiry


def came_back(foreign: Foreign) -> list[Said]:
    """What a device sent."""
    return [said for m in list(foreign.messages) if not (said := message_of(m, "back/r/")).topic.startswith("k/")]


def check_headers(kafka: Kafka, foreign: Foreign, sent: list[list[Header]], account: dict[str, Any]) -> None:
    """Headers of an application are user properties, in their order, or their record is a dead letter with them."""
    wanted = {f"k/{n}": properties_of(headers) for n, headers in enumerate(sent)}
    fine = {topic: pairs for topic, pairs in wanted.items() if pairs is not None}
    wait_until(lambda: len(foreign.messages) >= ROUND + len(fine), PATIENCE, "what has a place in MQTT")
    came = [message_of(message, "back/r/") for message in foreign.messages]
    assert {one.topic: one.user_properties for one in came if one.topic.startswith("k/")} == fine
    dead = [list(letter.headers) for letter in letters(kafka, "back.dead")]
    lost = [headers for n, headers in enumerate(sent) if wanted[f"k/{n}"] is None]
    assert [headers[1:] for headers in dead] == lost
    assert (account["delivered"], account["dead_lettered"]) == (ROUND + len(fine), len(lost))


def gateway(bridge: Running, line: str) -> dict[str, Any]:
    if not (bridge.directory / "state" / "bridge.json").exists():
        return {}
    status: dict[str, Any] = collect_status(bridge.directory / "state")["lines"][line]["gateway"]
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


def settled(bridge: Running, wanted: dict[str, int]) -> dict[str, Any]:
    """The accounts, once nothing waits and both add up; what was last seen where that does not come."""
    accounts: dict[str, Any] = {}

    def all_done() -> bool:
        accounts.update(
            {name: line["account"] or {} for name, line in collect_status(bridge.directory / "state")["lines"].items()}
        )
        came = {name: account.get("received", account.get("taken", 0)) for name, account in accounts.items()}
        return all(came[name] >= count for name, count in wanted.items()) and all(
            a["adds_up"] and not a["waiting"] for a in accounts.values()
        )

    try:
        wait_until(all_done, PATIENCE)
    except AssertionError as late:
        late.add_note(f"seed {SEED}, {wanted}: {accounts}\n{bridge.out[-3000:]}")
        raise
    return accounts


def letters(kafka: Kafka, topic: str) -> list[DeadLetter]:
    collector = ChunkAssembler()
    letters = [collector.add(m.key(), m.value(), m.headers()) for m in records(kafka.bootstrap, topic)]
    return [letter for letter in letters if letter is not None]


def up(kafka: Kafka) -> tuple[dict[int, bytes], list[int]]:
    """Payloads by number in the topic, which has each once, and the numbers among the dead letters."""
    came = records(kafka.bootstrap, "up")
    went = {int(message.key()): message.value() for message in came}
    assert len(came) == len(went), "doubled"
    topics = [dict(letter.headers)["mqtt.topic"] for letter in letters(kafka, "up.dead")]
    return went, [int((topic or b"").split(b"/")[1]) for topic in topics]
