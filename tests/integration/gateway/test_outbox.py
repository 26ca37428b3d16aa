"""A real gateway delivers its outbox to a real Mosquitto, whatever is killed on the way."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.conftest import KEEPING, Ear, Gateway, Message, NewGateway, outbox
from towline.delivery.outrows import rows_from_messages
from towline.delivery.refused import RefusedMessages
from towline.mqtt.reasons import CONNECTION_CUT
from towline_prove.devstack import Mosquitto


@pytest.fixture
def broker(new_mosquitto: NewMosquitto) -> Mosquitto:
    return new_mosquitto(**KEEPING)


def save(broker: Mosquitto) -> None:
    """Have a Mosquitto that nobody sends anything save what it holds (SIGUSR1).

    By itself it does not: a QoS 2 message that waits for its PUBREL is no change to it.
    """
    assert broker.pid is not None
    store, process = Path(broker.directory) / "mosquitto.db", psutil.Process(broker.pid)
    wait_until(lambda: rests(process), what="a Mosquitto at rest")
    before = store.stat() if store.exists() else None
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: store.exists() and store.stat() != before, what="Mosquitto's store")


def rests(process: psutil.Process) -> bool:
    """Whether a process has read and written nothing for a moment."""
    before = process.io_counters()
    time.sleep(0.3)
    return bool(before == process.io_counters())


def rows(numbers: range, qos: int, topics: int = 3, **more: object) -> Any:
    return rows_from_messages([{"topic": f"d/{n % topics}", "payload": b"%d" % n, "qos": qos, **more} for n in numbers])


def drained(gateway: Gateway, timeout: float = 60) -> dict[str, Any]:
    return wait_until(
        lambda: (account := outbox(gateway))["queued"] == 0 == account["in_flight"] and account,
        timeout,
        "an empty outbox",
    )


def repeats(messages: list[Message]) -> tuple[int, int]:
    """How many came again under another packet id, and how many under their own.

    A publisher that sends a message again makes the broker publish it anew, under a new packet id. What comes again
    under its own is the broker's doing: Mosquitto, killed and started again, saves no phases of QoS 2.
    """
    first: dict[tuple[str, bytes], int] = {}
    again: Counter[bool] = Counter()
    for message in messages:
        key = (message.topic, message.payload)
        if key in first:
            again[message.packet_id == first[key]] += 1
        first.setdefault(key, message.packet_id)
    return again[False], again[True]


def in_order(messages: list[Message]) -> bool:
    """Per topic the first arrivals come in order; what comes again at QoS 1 does not count."""
    last: dict[str, int] = {}
    seen: set[int] = set()
    for message in messages:
        number = int(message.payload)
        if number not in seen and number < last.get(message.topic, -1):
            return False
        seen.add(number)
        last[message.topic] = max(number, last.get(message.topic, -1))
    return True


def has_all(ear: Ear, gateway: Gateway, total: int, qos: int) -> None:
    """All messages came in order, with QoS 2 each once, and the account says so."""
    account = drained(gateway)
    ear.until(total)
    counts = Counter(ear.numbers())
    assert set(counts) == set(range(total))
    assert account["accepted"] == account["delivered"] == total
    if qos == 2:
        assert counts.total() == total
    assert in_order(ear.messages)


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_kill_9_of_the_gateway_loses_nothing(broker: Mosquitto, new_gateway: NewGateway, ear: Ear, qos: int) -> None:
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    total = 0
    gateway.start()
    for batch in range(3):
        client = gateway.client
        client.send("q/0", batch, rows(range(total, total + 400), qos))
        total += 400
        wait_until(lambda seen=total - 350: len(ear.messages) > seen, what="some of the batch")  # type: ignore[misc]
        gateway.stop(signal.SIGKILL)
        client = gateway.start()
        assert client.send("q/0", batch, rows(range(total - 400, total), qos)).already
    has_all(ear, gateway, total, qos)


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_broker_that_is_stopped_and_started_loses_nothing(
    broker: Mosquitto, new_gateway: NewGateway, ear: Ear, qos: int
) -> None:
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    client.send("q/0", 0, rows(range(1500), qos))
    for seen in (200, 700):
        wait_until(lambda seen=seen: len(ear.messages) > seen, what="some messages")  # type: ignore[misc]
        broker.stop()
        broker.start()
    has_all(ear, gateway, 1500, qos)


def test_a_lost_session_sends_again_what_the_broker_had_not_released(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway
) -> None:
    """Without its store a broker knows neither ids nor messages: QoS 2 may double or lose there, and it is counted."""
    broker = new_mosquitto(max_queued_messages="0")
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    client.send("q/0", 0, rows(range(3000), 2))
    wait_until(lambda: outbox(gateway)["delivered"] > 100, what="some messages at the broker")
    broker.kill()
    broker.start()
    account = drained(gateway)
    assert account["accepted"] == account["delivered"] == 3000
    assert gateway.status()["sessions_lost"] == 1
    assert account["resent_after_lost_session"] + account["unsure_after_lost_session"] <= 20  # Mosquitto's window


@pytest.fixture
def guarded(new_mosquitto: NewMosquitto, tmp_path: Path) -> Mosquitto:
    """A broker that forbids all topics but d/#."""
    (tmp_path / "acl").write_text("topic readwrite d/#\n")
    return new_mosquitto(**KEEPING, acl_file=str(tmp_path / "acl"))


def test_a_refused_message_is_set_aside_and_stops_nothing(guarded: Mosquitto, new_gateway: NewGateway) -> None:
    broker, ear = guarded, Ear(guarded, "d/#")
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    messages = [{"topic": "d/1", "payload": b"%d" % n, "qos": 1 + n % 2} for n in range(20)]
    messages[5]["topic"] = "forbidden"
    messages[6]["topic"] = "forbidden"
    messages[9]["topic"] = "wild/#"  # MQTT has no way to say it
    stored = client.send("q/0", 0, rows_from_messages(messages))
    assert client.wait_delivered(stored.end, timeout_s=60)
    account = outbox(gateway)
    assert (account["delivered"], account["refused"]) == (17, 3)
    ear.until(17)
    ear.close()
    assert gateway.stop() == 0
    refused = RefusedMessages(gateway.settings.refused_dir)
    kept = refused.page(0)["rows"]
    refused.close()
    assert sorted((row["number"], row["reason"]) for row in kept) == [(5, 0x87), (6, 0x87), (9, 0x90)]
    older = new_gateway(broker, name="older", subscriptions=[], outbox={}, protocol="3.1.1")
    client = older.start()
    assert client.wait_delivered(client.send("q/0", 0, rows_from_messages(messages[5:7])).end, timeout_s=60)
    account = outbox(older)
    assert (account["delivered"], account["refused"]) == (2, 0), "3.1.1 has no word for it: docs/guarantees.md"


def test_an_older_copy_of_the_outbox_sends_nothing(
    broker: Mosquitto, new_gateway: NewGateway, ear: Ear, tmp_path: Path
) -> None:
    """A state directory is restored under a newer checkpoint: it lacks a batch, and would send another one again."""
    (checkpoint := tmp_path / "ck").mkdir()
    gateway = new_gateway(broker, subscriptions=[], outbox={"checkpoint": str(checkpoint)})
    client = gateway.start()
    broker.stop()
    client.send("q/0", 0, rows(range(5), 2))
    gateway.stop(signal.SIGKILL)
    place, copy = gateway.settings.outbox_dir, tmp_path / "copy"
    shutil.copytree(place, copy)
    broker.start()
    client = gateway.start()
    stored = client.send("q/0", 1, rows(range(5, 10), 2))
    assert stored.outbox is not None
    stored.outbox.write_outbox_note(str(checkpoint))
    end = stored.outbox
    assert client.extent(end.offset, outbox=True) == (end.journal, 0, 10, end.incarnation)
    ear.until(10)
    drained(gateway)
    gateway.stop()
    shutil.rmtree(place)
    copy.rename(place)
    assert "TL-G35" in gateway.fail()
    assert len(ear.messages) == 10


def refused(gateway: Gateway) -> list[tuple[int, int]]:
    return [(row["number"], row["reason"]) for row in gateway.client.refused_messages("page", 0)["rows"]]


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_message_at_which_the_broker_cuts_is_set_aside_and_the_others_arrive(
    broker: Mosquitto, new_gateway: NewGateway, ear: Ear, qos: int
) -> None:
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    messages: list[dict[str, Any]] = [{"topic": f"d/{n % 3}", "payload": b"%d" % n, "qos": qos} for n in range(60)]
    messages[20]["topic"] = "tab\there"
    messages[41]["user_properties"] = [{"key": "k", "value": "line\nfeed"}]
    stored = client.send("q/0", 0, rows_from_messages(messages))
    assert client.wait_delivered(stored.end, timeout_s=60)
    assert refused(gateway) == [(20, CONNECTION_CUT), (41, CONNECTION_CUT)]
    (row,) = gateway.client.refused_messages("message", 1)["rows"]
    assert (row["topic"], row["payload"], row["properties"]) == ("d/2", "NDE=", [["k", "bGluZQpmZWVk"]])
    account = outbox(gateway)
    assert (account["delivered"], account["refused"]) == (58, 2)
    ear.until(58)
    assert len(set(ear.numbers())) == 58
    if qos == 2:
        assert len(ear.messages) == 58
    codes = [json.loads(line).get("code") for line in gateway.log.read_text().splitlines()]
    assert codes.count("TL-M47") == 2
    assert codes.count("TL-M05") <= 12
