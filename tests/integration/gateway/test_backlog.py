"""What a broker can throw at a gateway at once: long backlogs, large payloads, many topics, cut and stormy lines."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.gateway.conftest import Gateway, NewGateway, publish
from towline import Client
from towline_prove.devstack import Mosquitto
from towline_prove.load import LoadPlan, run_load
from towline_prove.proxy import FaultProxy


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_backlog_of_100k_arrives_whole_and_in_order(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, tmp_path: Path, qos: int
) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    guarantee = "exactly_once" if qos == 2 else "at_least_once"
    gateway = new_gateway(broker, guarantee=guarantee, subscriptions=[{"pattern": "t/#", "qos": qos}])
    gateway.connect()
    gateway.stop()
    plan = LoadPlan(port=broker.port, messages=100_000, devices=8, qos=qos, topic="t/{device}", size=150)
    assert run_load(plan, tmp_path / "history").acked == 100_000
    gateway.start()
    gateway.until(60, journaled=100_000)
    wait_until(lambda: not gateway.status()["unacknowledged"], what="the last acknowledgement")
    wait_until(lambda: not gateway.status()["qos2_held"], what="the last release")
    assert gateway.status()["received"] == 100_000


def test_payloads_of_every_size_come_byte_for_byte(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    gateway = new_gateway(mosquitto)
    gateway.connect()
    sizes = [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 20_000_000]
    digests = []
    with Client(mosquitto.uri, client_id="device") as client:
        for size in sizes:
            payload = hashlib.shake_128(b"%d" % size).digest(size)
            digests.append(hashlib.sha256(payload).digest())
            client.publish("t/1", payload).wait(60)
    gateway.until(60, journaled=len(sizes))
    gateway.stop()
    assert [hashlib.sha256(row["payload"]).digest() for row in gateway.rows()] == digests


def test_10k_topics_and_repeated_property_keys(new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    mosquitto = new_mosquitto(max_queued_messages="0")
    gateway = new_gateway(mosquitto)
    gateway.connect()
    keys = [("k", "1"), ("k", "2"), ("", ""), ("k", "1"), ("ü", "日本")]
    with Client(mosquitto.uri, client_id="device") as client:
        for number in range(10_000):
            last = client.publish(f"t/{number}/x", user_properties=keys)
        last.wait(60)
    gateway.until(60, journaled=10_000)
    gateway.stop()
    rows = gateway.rows()
    assert [row["topic"] for row in rows] == [f"t/{number}/x" for number in range(10_000)]
    wanted = [{"key": key, "value": value} for key, value in keys]
    assert all(row["user_properties"] == wanted for row in rows)


def published_after_pubrel(broker: Mosquitto) -> Counter[int]:
    """How often Mosquitto published what it had released, against [MQTT-4.3.3-6] (test_forgetful_broker).

    Returns:
        Times by the number of the message: Mosquitto counts packet ids up from 1, and 300 don't come round.
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
    guarantee = "exactly_once" if qos == 2 else "at_least_once"
    with FaultProxy(broker.port) as line:
        gateway = new_gateway(
            f"mqtt://127.0.0.1:{line.port}", guarantee=guarantee, subscriptions=[{"pattern": "t/#", "qos": qos}]
        )
        gateway.connect()
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


#: Mosquitto's default of `max_inflight_messages`: as many may be in another phase than its store says.
_IN_FLIGHT = 20
_KILLS = 5


def test_qos_2_through_a_broker_killed_with_its_store(new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    """Mosquitto publishes again what we had received; handshakes are cut wherever they are.

    What we hold comes once. What was released already it may publish again too, see `test_forgetful_broker`: that is
    a new message to any receiver, and no more than were in flight. What it forgot, it does not release; so a message
    that comes last, and not the last release, shows that all repeats are there.
    """
    broker = new_mosquitto(
        persistence="true", autosave_interval="1", autosave_on_changes="true", max_queued_messages="0"
    )
    subscriptions = [{"pattern": "t/#", "qos": 2}]
    gateway = new_gateway(broker, guarantee="exactly_once", subscriptions=subscriptions, receive_maximum=_IN_FLIGHT)
    gateway.connect()
    total = _KILLS * 20
    for upto in range(20, total + 1, 20):
        # A publisher of its own: of one it knows, Mosquitto restores packet ids too, and drops what comes with them.
        publish_as(f"device-{upto}", broker, range(upto - 20, upto))
        # What Mosquitto has not saved yet when it is killed is lost in Mosquitto: only what arrived can be judged.
        wait_until(partial(_has, gateway, upto))
        broker.kill()
        broker.start()
    gateway.until(state="online")
    publish_as("the last", broker, range(total, total + 1))
    wait_until(partial(_has, gateway, total + 1), 60, "all of them")
    status = gateway.status()
    assert status["sessions_lost"] == 0
    assert status["qos2_held"] <= _IN_FLIGHT
    seen = gateway.seen()
    assert list(dict.fromkeys(seen)) == list(range(total + 1))
    assert seen[-1] == total
    lasts = list(map(seen.index, range(19, total, 20)))  # of what was published before each kill
    repeats = [end - begin - 20 for begin, end in pairwise(lasts)] + [len(seen) - 2 - lasts[-1]]
    assert seen[:20] == list(range(20))
    assert len(repeats) == _KILLS
    assert max(repeats) <= _IN_FLIGHT, repeats


def publish_as(client_id: str, broker: Mosquitto, numbers: range) -> None:
    with Client(broker.uri, client_id=client_id) as client:
        for result in [client.publish("t/1", b"%d" % number, qos=2) for number in numbers]:
            result.wait(60)


def _has(gateway: Gateway, count: int) -> bool:
    return len(set(gateway.seen())) == count
