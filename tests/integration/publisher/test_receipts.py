"""End-to-end receipts: a real broker that forgets, a real gateway, a real publisher; Kafka's part is a commit."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NewMosquitto
from tests.engines.strace import Injection, inject_command, was_injected
from tests.helpers import wait_until
from tests.integration.gateway.conftest import Gateway, NewGateway, new_gateway
from towline import AsyncPublisher, Client, ClientSettings, Publisher, files
from towline.errors import ConfigError, GatewayError, PublisherError
from towline.gateway.client import Lease
from towline.gateway.settings import GatewaySettings
from towline_prove.devstack import Mosquitto
from towline_prove.subject import GatewayRun

__all__ = ["new_gateway"]

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
    """A publisher with receipts and the line's key."""
    key = write_key(directory)
    return Publisher(broker.uri, state_dir=directory / name, receipts=True, receipt_key_file=key, **options)


class Committer:
    """Stands for Spark: commits what the gateway has, as often as it may."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.on = threading.Event()
        self.on.set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            if self.on.is_set():
                try:
                    commit(self.gateway)
                except (GatewayError, AssertionError):
                    continue  # the gateway is being killed

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)


def commit(gateway: Gateway) -> None:
    status = gateway.status()
    gateway.client.wait(Lease("spark"), status["end"], journal=status["journal"], timeout_s=0)


@pytest.fixture
def broker(new_mosquitto: NewMosquitto) -> Mosquitto:
    return new_mosquitto(max_queued_messages="0")  # persistence is off, as by default


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
        commit(gateway)
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


def test_a_publisher_without_receipts_says_so(broker: Mosquitto, tmp_path: Path) -> None:
    with Publisher(broker.uri, state_dir=tmp_path / "p") as publisher:
        failure = publisher.publish("t/1", "1").end_to_end.exception(0)
    assert isinstance(failure, ConfigError)
    assert "receipts=True" in str(failure)
    with pytest.raises(ConfigError, match="need protocol"):
        Publisher(broker.uri, state_dir=tmp_path / "p", receipts=True, settings=ClientSettings(protocol="3.1.1"))


def test_a_broker_that_loses_its_whole_store(
    gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    """The messages wait in a broker for a gateway that is down; the broker forgets both; all arrive, once."""
    with new_publisher(broker, tmp_path, receipt_patience_s=1) as publisher:
        for n in range(300):
            publisher.publish(f"t/{n % 3}", str(n), qos=1 + n % 2, wait=False)
        assert publisher.flush(30) == 0
        spark.on.clear()
        gateway.stop(signal.SIGKILL)
        for n in range(300, 1000):
            publisher.publish(f"t/{n % 3}", str(n), qos=1 + n % 2, wait=False)
        assert publisher.flush(30, end_to_end=False) == 0
        broker.kill()
        broker.start()
        gateway.start()
        spark.on.set()
        assert publisher.flush(60) == 0
        assert publisher.status()["receipts"]["sent_again"] >= 690
    spark.end()
    assert gateway.until(state="online")["sessions_lost"] == 1
    kept_once(gateway, range(1000))


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
    with new_publisher(broker, tmp_path, receipt_patience_s=1) as publisher:
        assert publisher.flush(60) == 0
        assert publisher.status()["receipts"]["watermark"] == 600
    spark.end()
    kept_once(gateway, range(600))
    assert gateway.status()["receipts"]["publishers"] == 1


def test_nothing_is_sent_again_while_only_kafka_is_away(gateway: Gateway, broker: Mosquitto, tmp_path: Path) -> None:
    gateway.start()
    with new_publisher(broker, tmp_path, receipt_patience_s=1) as publisher:
        for n in range(50):
            publisher.publish("t/1", str(n), wait=False)
        wait_until(lambda: publisher.status()["receipts"]["asked"] >= 2, what="two questions")
        assert publisher.status()["receipts"]["sent_again"] == 0
        assert gateway.status()["deduplicated"] <= publisher.status()["receipts"]["asked"]
        commit(gateway)
        assert publisher.flush(20) == 0
    kept_once(gateway, range(50))


def test_a_stub_has_its_receipt_and_none_is_no_receipt(
    gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    crowd = [("k", "v")] * 1_001
    with new_publisher(broker, tmp_path) as publisher:
        with Client(broker.uri, client_id="device") as client:
            ours = publisher.status()["client_id"].replace("towline-", "towline/receipts/")
            client.publish(ours, b"{}", user_properties=crowd).wait(60)
        large = publisher.publish("t/1", "large", user_properties=crowd)
        publisher.publish("t/1", "small").end_to_end.result(60)
        large.end_to_end.result(60)
        assert publisher.flush(10) == 0
        assert publisher.status()["receipts"]["sent_again"] == 0
    assert spark.on.is_set()
    first, second = rows_of(gateway)
    assert (first["payload"], second["payload"]) == (None, b"small")
    assert [pair["key"] for pair in first["user_properties"]] == [
        "towline-reason",
        "towline-size",
        "towline-sha256",
        "towline-properties",
    ]


def test_asyncio(gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path) -> None:
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
    assert spark.on.is_set()


def test_the_command_waits_for_kafka(gateway: Gateway, broker: Mosquitto, tmp_path: Path) -> None:
    def pub(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "towline", "pub", broker.uri, "t/{n}", "--durable", str(tmp_path / "p")]
        key = ["--receipt-key-file", str(write_key(tmp_path))]
        return subprocess.run(
            [*command, "--receipts", *key, *more], capture_output=True, text=True, check=False, timeout=60
        )

    gateway.start()
    first = pub("--count", "5", "--timeout", "1")
    assert first.returncode == 1
    assert "5 messages without a receipt: kept in" in first.stderr
    assert "No receipt has ever arrived: the line that receives these messages needs `receipts`" in first.stderr
    commit(gateway)
    spark = Committer(gateway)
    second = pub("--count", "2")
    spark.end()
    assert second.returncode == 0, second.stderr
    assert "7 messages in Kafka" in second.stdout


@pytest.mark.faults
@pytest.mark.usefixtures("ptrace")
@pytest.mark.parametrize(
    ("call", "points"), [("fdatasync", (2, 7)), pytest.param("writev", (4, 11), marks=pytest.mark.long)]
)
def test_a_gateway_killed_at_a_durable_write(
    broker: Mosquitto, tmp_path: Path, call: str, points: tuple[int, ...]
) -> None:
    _killed_at(broker, tmp_path, call, points)


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("ptrace")
@pytest.mark.parametrize("call", ["fdatasync", "writev", "fsync"])
def test_a_gateway_killed_at_every_durable_write(broker: Mosquitto, tmp_path: Path, call: str) -> None:
    _killed_at(broker, tmp_path, call, range(1, 100))


def _killed_at(broker: Mosquitto, tmp_path: Path, call: str, points: range | tuple[int, ...]) -> None:
    """The gateway dies at its n-th write or sync, the next goes on: each message once, and each gets its receipt."""
    for when in points:
        name, log = f"g{when}", tmp_path / f"strace{when}"
        settings = GatewaySettings.model_validate(
            {
                "name": name,
                "state_dir": tmp_path / name,
                "brokers": broker.uri,
                "subscriptions": [{"pattern": f"{name}/#", "qos": 1}],
                "receipts": {"key_file": str(write_key(tmp_path))},
                "journal": {"retain_bytes": 1 << 20},
            }
        )
        injection = Injection(call, str(when), "KILL")
        with GatewayRun(settings).start(lambda command, i=injection, f=log: inject_command(command, i, f)) as run:  # type: ignore[misc]
            with new_publisher(broker, tmp_path, f"p{when}", receipt_patience_s=1) as publisher:
                for number in range(12):
                    publisher.publish(f"{name}/{number % 2}", str(number), qos=1 + number % 2)
                    _commit(run)
                wait_until(lambda p=publisher, r=run: _goes_on(r) and not p.awaiting, 60, "all receipts")  # type: ignore[misc]
            client, status = run.client(), run.status()
            assert client is not None
            assert status is not None
            with client:
                rows = [row for batch in client.read(status["journal"], 0, status["end"]) for row in batch.to_pylist()]
            assert sorted(int(row["payload"]) for row in rows) == list(range(12)), (call, when)
            run.kill()
        if not was_injected(log):
            return


def _goes_on(run: GatewayRun) -> bool:
    """Commit; start a gateway that has died, and this time let it live."""
    if not run.running:
        run.start()
    return _commit(run)


def _commit(run: GatewayRun) -> bool:
    """Commit what a gateway has; False while it does not answer."""
    status, client = run.status(), run.client()
    if status is None or client is None:
        return False
    try:
        with client:
            client.wait(Lease("spark"), status["end"], journal=status["journal"], timeout_s=0)
    except GatewayError:
        return False
    return True
