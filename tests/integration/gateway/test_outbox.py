"""A real gateway delivers its outbox to a real Mosquitto, whatever is killed on the way."""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.gateway.conftest import Ear, Gateway, Message, NewGateway, outbox
from towline.delivery.outrows import rows_from_messages
from towline.delivery.refused import RefusedMessages
from towline.errors import GatewayError, JournalError, JournalFull
from towline.gateway.settings import OutboxSettings
from towline_prove.devstack import Mosquitto

__all__ = ["KEEPING", "Ear", "in_order", "repeats", "rests", "save"]  # for the tests of bridges

KEEPING = {"max_queued_messages": "0", "persistence": "true", "autosave_interval": "1", "autosave_on_changes": "true"}


def save(broker: Mosquitto) -> None:
    """Have a Mosquitto that nobody sends anything save what it holds (SIGUSR1).

    By itself it does not: a QoS 2 message that waits for its PUBREL is no change to it (`test_forgetful_broker`).
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
    under its own is the broker's doing: Mosquitto, killed and started again (`test_forgetful_broker`).
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


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_kill_9_of_the_gateway_loses_nothing(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear], qos: int
) -> None:
    broker = new_mosquitto(**KEEPING)
    ears.append(ear := Ear(broker))
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    total = 0
    gateway.start()
    for batch in range(3):
        client = gateway.client
        client.send("q/0", batch, rows(range(total, total + 400), qos))
        total += 400
        wait_until(lambda seen=total - 350: ear.hear() > seen, what="some of the batch")  # type: ignore[misc]
        gateway.stop(signal.SIGKILL)
        client = gateway.start()
        assert client.send("q/0", batch, rows(range(total - 400, total), qos)).already
    account = drained(gateway)
    ear.until(total)
    counts = Counter(ear.numbers())
    assert set(counts) == set(range(total))
    assert account["accepted"] == total
    if qos == 2:
        assert counts.total() == total
    assert in_order(ear.messages)


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_broker_that_is_stopped_and_started_loses_nothing(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear], qos: int
) -> None:
    broker = new_mosquitto(**KEEPING)
    ears.append(ear := Ear(broker))
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    client.send("q/0", 0, rows(range(1500), qos))
    for seen in (200, 700):
        wait_until(lambda seen=seen: ear.hear() > seen, what="some messages")  # type: ignore[misc]
        broker.stop()
        broker.start()
    ear.until(1500)
    assert drained(gateway)["delivered"] == 1500
    counts = Counter(ear.numbers())
    assert set(counts) == set(range(1500))
    if qos == 2:
        assert counts.total() == 1500
    assert in_order(ear.messages)


def test_what_came_while_the_broker_was_away_is_delivered_and_what_expired_is_not(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear]
) -> None:
    broker = new_mosquitto(**KEEPING)
    ears.append(ear := Ear(broker))
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    broker.stop()
    client.send("q/0", 0, rows(range(5), 1, message_expiry_seconds=0))
    client.send("q/0", 1, rows(range(5, 10), 2, message_expiry_seconds=1000, retain=True))
    assert not client.wait_delivered(10, timeout_s=0.2)
    broker.start()
    account = drained(gateway)
    assert (account["expired"], account["delivered"]) == (5, 5)
    assert client.wait_delivered(10, timeout_s=60)
    ear.until(5)
    assert ear.numbers() == list(range(5, 10))
    assert all(990 <= (m.expiry_s or 0) <= 1000 for m in ear.messages)


def test_a_lost_session_sends_again_what_the_broker_had_not_released(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear]
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


def test_a_refused_message_is_set_aside_and_stops_nothing(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear], tmp_path: Any
) -> None:
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite d/#\n")
    broker = new_mosquitto(**KEEPING, acl_file=str(acl))
    ears.append(ear := Ear(broker, "d/#"))
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


def test_a_full_outbox_refuses_and_takes_again(new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    broker = new_mosquitto(**KEEPING)
    gateway = new_gateway(broker, subscriptions=[], outbox={"max_bytes": 1 << 20})
    client = gateway.start()
    broker.stop()
    big = rows(range(4), 1, correlation_data=bytes(50_000))
    batch = 0
    with pytest.raises(JournalFull):  # noqa: PT012 - the n-th of them
        while True:
            client.send("q/0", batch, big)
            batch += 1
    assert outbox(gateway)["queued"] == 4 * batch
    broker.start()
    drained(gateway)

    def taken() -> bool:
        try:
            return client.send("q/0", batch, big).rows == 4
        except JournalFull:
            return False

    wait_until(taken, what="room")


def test_a_large_batch_that_comes_again_in_another_order_is_sent_once_and_whole(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear]
) -> None:
    """A task brings a partition in pieces and dies after the first; after a shuffle its repeat has another order."""
    broker = new_mosquitto(**KEEPING)
    ears.append(ear := Ear(broker))
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    client.send("q/0", 0, rows(range(3), 2), is_last=False, attempt="first")
    client.send("q/1", 0, rows(range(100, 110), 2), attempt="other")
    ear.until(10)  # what is behind it leaves
    assert client.wait_delivered(client.stored_batch("q/1", 0).end, timeout_s=30)
    gateway.stop(signal.SIGKILL)
    client = gateway.start()
    assert not client.stored_batch("q/0", 0, attempt="second").whole
    order = [rows(range(n, n + 1), 2) for n in (3, 0, 1, 2)]
    client.send("q/0", 0, pa.concat_batches(order), is_last=False, attempt="second")
    with pytest.raises(JournalError, match="TL-J16"):
        client.send("q/0", 0, rows(range(3, 4), 2), start=3, attempt="first")
    stored = client.send("q/0", 0, rows(range(4, 5), 2), start=4, attempt="second")
    assert client.wait_delivered(stored.end, timeout_s=30)
    ear.until(15)
    account = drained(gateway)
    assert (account["accepted"], account["delivered"], account["dropped"], account["incomplete"]) == (15, 15, 3, 0)
    assert [n for n in ear.numbers() if n < 100] == [3, 0, 1, 2, 4]


def test_an_older_copy_of_the_outbox_sends_nothing(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear], tmp_path: Path
) -> None:
    """A state directory is restored under a newer checkpoint: it lacks a batch, and would send another one again."""
    broker = new_mosquitto(**KEEPING)
    ears.append(ear := Ear(broker))
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
    journal, tip, incarnation = stored.outbox
    stored.outbox.write_outbox_note(str(checkpoint))
    assert client.extent(tip, outbox=True) == (journal, 0, 10, incarnation)
    ear.until(10)
    drained(gateway)
    gateway.stop()
    shutil.rmtree(place)
    copy.rename(place)
    assert "TL-G35" in gateway.fail()
    gateway.settings = gateway.settings.model_copy(update={"outbox": OutboxSettings()})
    gateway.start()  # told nothing of the checkpoint it sends what it has: that is how one sees that it would
    wait_until(lambda: len(ear.messages) == 15, 30, "the doubles")


def test_qos_0_is_sent_once(new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear]) -> None:
    broker = new_mosquitto(**KEEPING)
    ears.append(ear := Ear(broker))
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    client.send("q/0", 0, rows(range(500), 0))
    ear.until(500)
    gateway.stop(signal.SIGKILL)
    gateway.start()
    assert drained(gateway)["delivered"] == 500
    gateway.client.send("q/0", 1, rows(range(500, 501), 1))
    ear.until(501)
    assert len(ear.messages) == 501
    assert in_order(ear.messages)


def test_a_gateway_that_only_receives_says_so(new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    client = new_gateway(new_mosquitto()).start()
    with pytest.raises(GatewayError, match="TL-G20"):
        client.stored_batch("q/0", 0)
