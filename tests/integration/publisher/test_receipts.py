"""End-to-end receipts: a real broker that forgets, a real gateway, a real publisher; Kafka's part is a commit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest

from tests.helpers import wait_until
from tests.integration.conftest import Gateway, NewGateway, towline_command
from tests.integration.devices import device, properties_of
from towline import AsyncPublisher, Publisher, files
from towline.delivery.receipts.mark import ReceiptKeys
from towline.errors import ConfigError, GatewayError, PublisherError
from towline_prove.devstack import Mosquitto

#: Publishes numbered messages with receipts, says of each that it is on disk, and waits to be killed.
LIFE = """
import sys, time
from towline import Publisher
broker, state, key, first, count, qos = *sys.argv[1:4], *map(int, sys.argv[4:])
publisher = Publisher(broker, state_dir=state, receipts=True, receipt_key_file=key)
for number in range(first, first + count):
    publisher.publish(f"t/{number % 3}", str(number), qos=qos)
    print(number, flush=True)
publisher.flush(30, end_to_end=False)
print("sent", flush=True)
time.sleep(60)
"""


def write_key(tmp_path: Path) -> Path:
    """The line's key, for gateway and publishers."""
    file = tmp_path / "line.key"
    if not file.exists():
        files.replace(file, secrets.token_hex(32))
    return file


def new_publisher(broker: Mosquitto, directory: Path, name: str = "p", **options: Any) -> Publisher:
    """A publisher with receipts and the line's key, that soon asks for what it misses."""
    given = {"receipt_key_file": write_key(directory), "receipt_patience_s": 1, **options}
    return Publisher(broker.uri, state_dir=directory / name, receipts=True, **given)


class Committer:
    """Stands for Spark: commits what the gateway has, as often as it may."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            with contextlib.suppress(GatewayError, AssertionError):  # the gateway is being killed
                self.gateway.commit()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)


@pytest.fixture
def gateway(broker: Mosquitto, new_gateway: NewGateway, tmp_path: Path) -> Gateway:
    return new_gateway(
        broker,
        receipts={"key_file": str(write_key(tmp_path))},
        subscriptions=[{"pattern": "t/#", "qos": 2}],
        journal={"segment_bytes": 65536, "retain_bytes": 64 << 20},
    )


@pytest.fixture
def spark(gateway: Gateway) -> Iterator[Committer]:
    gateway.start()
    committer = Committer(gateway)
    yield committer
    committer.end()


def rows_of(gateway: Gateway) -> list[dict[str, Any]]:
    """All rows of the running gateway, committed ones too: none was removed."""
    status = gateway.status()
    assert status["first"] == 0
    return [row for batch in gateway.client.read(status["journal"], 0, status["end"]) for row in batch.to_pylist()]


def kept_once(gateway: Gateway, wanted: range) -> None:
    """Every message in the journal exactly once, and the account adds up."""
    assert sorted(int(row["payload"]) for row in rows_of(gateway)) == list(wanted)
    status = gateway.status()
    assert status["received"] == status["journaled"] + status["deduplicated"]


def test_a_receipt_comes_after_the_commit_and_not_before(gateway: Gateway, broker: Mosquitto, tmp_path: Path) -> None:
    gateway.start()
    outcomes: list[tuple[int, str]] = []
    with new_publisher(broker, tmp_path, on_outcome=lambda n, o: outcomes.append((n, o))) as publisher:
        receipts = [publisher.publish("t/1", str(n), qos=n % 3, user_properties=[("a", "b")]) for n in range(6)]
        assert publisher.flush(10, end_to_end=False) == 0
        gateway.until(journaled=6)
        assert publisher.flush(1) == 6
        assert not any(receipt.end_to_end.done() for receipt in receipts)
        gateway.commit()
        receipts[5].end_to_end.result(60)
        assert publisher.flush(10) == 0
        assert publisher.status()["receipts"]["awaiting"] == 0
        called = threading.Event()
        receipts[0].end_to_end.add_done_callback(lambda _stage: called.set())
        assert called.is_set()
        expired = publisher.publish("t/1", "6", expiry_s=0)
        for stage, code in ((expired.at_broker, "TL-O05"), (expired.end_to_end, "TL-O06")):
            with pytest.raises(PublisherError, match=code):
                stage.result(60)
    assert [n for n, outcome in outcomes if outcome == "arrived"] == list(range(6))
    assert [row["user_properties"] for row in rows_of(gateway)] == [[{"key": "a", "value": "b"}]] * 6


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_kill_9_of_everybody(
    gateway: Gateway, broker: Mosquitto, new_gateway: NewGateway, tmp_path: Path, qos: int
) -> None:
    """Publisher, gateway and broker with its store, in turns; nothing is committed until the end, so all is seen."""
    gateway.start()
    state = tmp_path / "p"
    for life in range(3):
        arguments = map(str, (state, write_key(tmp_path), life * 200, 200, qos))
        command = [sys.executable, "-c", LIFE, broker.uri, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if life == 1 and line.strip() == "300":
                    gateway.stop(signal.SIGKILL)
                    broker.kill()
                    broker.start()
                    gateway.start()
                if line.strip() == ("sent" if life == 2 else str(life * 200 + 199)):
                    os.kill(child.pid, signal.SIGKILL)
                    break
    gateway.stop(signal.SIGKILL)
    gateway.start()
    spark = Committer(gateway)
    with new_publisher(broker, tmp_path) as publisher:
        assert publisher.flush(60) == 0
        assert publisher.status()["receipts"]["watermark"] == 600
    spark.end()
    kept_once(gateway, range(600))
    assert gateway.status()["receipts"]["publishers"] == 1


@pytest.mark.usefixtures("spark")
def test_asyncio(gateway: Gateway, broker: Mosquitto, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncPublisher(
            broker.uri, state_dir=tmp_path / "p", receipts=True, receipt_key_file=write_key(tmp_path)
        ) as publisher:
            receipts = await asyncio.gather(*(publisher.publish(f"t/{n}", str(n), qos=2) for n in range(20)))
            await asyncio.gather(*(receipt.at_broker for receipt in receipts))
            await asyncio.gather(*(receipt.end_to_end for receipt in receipts))
            assert await publisher.flush(5, end_to_end=True) == 0

    asyncio.run(main())
    kept_once(gateway, range(20))


def test_the_command_waits_for_kafka(gateway: Gateway, broker: Mosquitto, tmp_path: Path) -> None:
    def pub(*more: str) -> subprocess.CompletedProcess[str]:
        key = ("--receipt-key-file", write_key(tmp_path))
        return towline_command("pub", broker.uri, "t/{n}", "--durable", tmp_path / "p", "--receipts", *key, *more)

    gateway.start()
    first = pub("--count", "5", "--timeout", "1")
    assert first.returncode == 1
    assert "5 messages without a receipt: kept in" in first.stderr
    assert "No receipt has ever arrived: the line that receives these messages needs `receipts`" in first.stderr
    gateway.commit()
    spark = Committer(gateway)
    second = pub("--count", "2")
    spark.end()
    assert second.returncode == 0, second.stderr
    assert "7 messages in Kafka" in second.stdout


# what others, and copies, write under a publisher's name: nothing of the publisher's is lost by it


def say(client: paho.Client, payload: str, *pairs: tuple[str, str]) -> None:
    client.publish("t/1", payload, 1, properties=properties_of({"UserProperty": [*pairs]})).wait_for_publish(60)


def payloads(gateway: Gateway) -> list[str]:
    return [row["payload"].decode() for row in rows_of(gateway)]


def test_a_forged_mark_makes_nothing_vanish(
    gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    with new_publisher(broker, tmp_path) as victim, device(broker.port) as forger:
        name = victim.journal_id
        say(forger, "low", ("towline-id", name), ("towline-n", "1.3.3"), ("towline-auth", f"aa.{'0' * 32}"))
        say(forger, "epoch", ("towline-id", name), ("towline-n", "9999999999.0.0"), ("towline-auth", f".{'0' * 32}"))
        say(forger, "question", ("towline-id", name), ("towline-n", "1.0.0?aa"), ("towline-auth", f"aa.{'0' * 32}"))
        say(forger, "without a code", ("towline-id", name), ("towline-n", "1.3.3"))
        say(forger, "twice", ("towline-id", "q"), ("towline-id", name), ("towline-n", "1.3.3"))
        gateway.until(journaled=5)
        for number in range(5):
            victim.publish("t/1", str(number))
        assert victim.flush(60) == 0
        assert victim.status()["receipts"]["epoch"] == 1
    spark.end()
    assert sorted(payloads(gateway)) == sorted([*"01234", "low", "epoch", "question", "without a code", "twice"])
    assert not any(row["user_properties"] for row in rows_of(gateway))
    told = gateway.status()["receipts"]
    assert (told["forged"], told["publishers"], told["unknown"]) == (4, 1, 0)
    assert gateway.log.read_text().count("TL-M35") == 1


def test_a_forged_receipt_lets_nothing_go(gateway: Gateway, broker: Mosquitto, tmp_path: Path) -> None:
    with new_publisher(broker, tmp_path) as victim, device(broker.port) as forger:
        receipt = victim.publish("t/1", "0")  # no gateway runs
        receipt.at_broker.result(60)
        topic = f"towline/receipts/{victim.journal_id}"
        for told in ({"watermark": 1}, {"watermark": 1, "codes": ["0" * 32]}, {"watermark": 0, "epoch": 2}):
            made = {"publisher": victim.journal_id, "epoch": 1, **told}
            payload = json.dumps(made, separators=(",", ":"))
            forger.publish(topic, payload, 1, retain=True).wait_for_publish(60)
        wait_until(lambda: victim.status()["receipts"]["not_believed"] == 3, what="three forged receipts")
        assert not receipt.end_to_end.done()
        assert victim.flush(0) == 1
        gateway.start()
        gateway.until(journaled=1)
        gateway.commit()
        receipt.end_to_end.result(60)


@pytest.mark.usefixtures("spark")
def test_a_publisher_with_a_key_of_its_own(broker: Mosquitto, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TL-C84.*") as told:
        Publisher(broker.uri, state_dir=tmp_path / "q", receipts=True)
    name = told.value.location.split()[-1]
    own = tmp_path / "own.key"
    own.write_text("# made for it\n" + "\n".join(ReceiptKeys.read_file(write_key(tmp_path)).derive_key_lines(name)))
    own.chmod(0o600)
    with Publisher(broker.uri, state_dir=tmp_path / "q", receipts=True, receipt_key_file=own) as one:
        assert one.journal_id == name
        one.publish("t/1", "0").end_to_end.result(60)
    with pytest.raises(ConfigError, match="TL-C86"):
        Publisher(broker.uri, state_dir=tmp_path / "r", receipts=True, receipt_key_file=own)


def test_an_older_copy_of_a_publisher_loses_nothing(
    gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    """Numbers are given out anew, and grow past those that the gateway has, before a receipt is heard."""
    with new_publisher(broker, tmp_path) as first:
        for number in range(5):
            first.publish("t/1", str(number))
        assert first.flush(60) == 0
    shutil.copytree(tmp_path / "p", tmp_path / "copy")
    with new_publisher(broker, tmp_path) as first:
        for number in range(5, 10):
            first.publish("t/1", str(number))
        assert first.flush(60) == 0
    broker.stop()
    with new_publisher(broker, tmp_path, "copy") as second:
        receipts = [second.publish("t/1", f"new {number}") for number in range(8)]
        broker.start()
        assert second.flush(60) == 0
        assert all(receipt.end_to_end.done() for receipt in receipts)
        assert second.status()["receipts"]["epoch"] == 2
    spark.end()
    assert set(payloads(gateway)) == {*map(str, range(10)), *(f"new {number}" for number in range(8))}
