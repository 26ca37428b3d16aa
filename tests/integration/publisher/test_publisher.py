"""`towline.Publisher` and a real Mosquitto: what `publish` has returned is never lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.conftest import NewMosquitto
from tests.engines.strace import Injection, inject_command, was_injected
from tests.helpers import present, wait_until
from tests.integration.conftest import KEEPING, Ear, towline_command
from tests.integration.gateway.test_outbox import in_order
from towline import ClientSettings, Publisher, publisher_metrics
from towline.errors import ConfigError, JournalLocked, PublisherError
from towline.net.client import Client
from towline_prove.devstack import Mosquitto

#: Publishes numbered messages, and says of each that it is on disk; goes on with what an earlier life left.
LIFE = """
import sys
from towline import Publisher
broker, state, first, count, qos = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
publisher = Publisher(broker, state_dir=state)
for number in range(first, first + count):
    publisher.publish(f"d/{number % 3}", str(number), qos=qos)
    print(number, flush=True)
sys.exit(3 if publisher.close(30) else 0)
"""


@pytest.fixture
def broker(new_mosquitto: NewMosquitto) -> Mosquitto:
    return new_mosquitto(**KEEPING)


def test_a_receipt_tells_disk_and_broker(broker: Mosquitto, ear: Ear, tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    reasons: list[int] = []
    called = threading.Event()
    with Publisher(broker.uri, state_dir=tmp_path / "p", on_outcome=lambda n, o: told.append((n, o))) as publisher:
        receipt = publisher.publish("d/1", "1", qos=2, user_properties=[("a", "1")])
        assert receipt.on_disk.done()
        assert receipt.number == 0
        receipt.at_broker.add_done_callback(lambda _stage: called.set())
        receipt.at_broker.result(60)
        publisher.publish("d/1", "2", qos=0).at_broker.add_done_callback(lambda stage: reasons.append(stage.result()))
        assert publisher.flush(10) == 0
        assert called.wait(60)
        status = publisher.status()
        assert (status["accepted"], status["delivered"]) == (2, 2)
    # Order holds within one QoS (section 4.6): QoS 2 is whole a round trip after the QoS 0 that was sent behind it.
    wait_until(lambda: sorted(ear.numbers()) == [1, 2], what="both")
    assert (told, reasons) == ([(0, "delivered"), (1, "delivered")], [0])
    with pytest.raises(PublisherError, match="TL-O02"):
        publisher.publish("d/1", "3")


def test_that_nobody_is_subscribed_is_told(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Mosquitto's PUBACK says 0x10; to QoS 2 it says 0, as it looks for subscribers after PUBREC only."""
    with Publisher(mosquitto.uri, client_id="p", state_dir=tmp_path / "p") as publisher:
        receipts = [publisher.publish("nobody", b"", qos=qos) for qos in (1, 2)]
        assert [receipt.at_broker.result(60) for receipt in receipts] == [0x10, 0]
        assert publisher.status()["unmatched"] == 1


def test_what_a_broker_that_is_away_did_not_get_goes_out_at_the_next_start(
    broker: Mosquitto, ear: Ear, tmp_path: Path
) -> None:
    broker.stop()
    publisher = Publisher(broker.uri, state_dir=tmp_path / "p")
    for n in range(50):
        publisher.publish(f"d/{n % 3}", str(n), qos=1 + n % 3 % 2)  # order is kept per QoS
    with pytest.raises(JournalLocked):
        Publisher(broker.uri, state_dir=tmp_path / "p")
    assert publisher.close(0.1) == 50  # never without saying so
    broker.start()
    with Publisher(broker.uri, state_dir=tmp_path / "p") as publisher:
        assert publisher.flush(30) == 0
    ear.until(50)
    assert in_order(ear.messages)


def test_what_came_before_the_clock_was_set_is_delivered(
    broker: Mosquitto, ear: Ear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device without a clock of its own: it stores by 1970, then NTP sets the clock; or one that was ahead."""
    broker.stop()
    for number, came_s in enumerate((0.0, time.time() + 365 * 86_400)):
        with monkeypatch.context() as clock, Publisher(broker.uri, state_dir=tmp_path / str(number)) as publisher:
            clock.setattr(time, "time_ns", lambda came_s=came_s: int(came_s * 1e9))
            publisher.publish("d/1", str(number), expiry_s=300)
            publisher.close(0)
    broker.start()
    with Client(broker.uri, client_id="watch", subscribe="d/1") as watch:
        for number in range(2):
            with Publisher(broker.uri, state_dir=tmp_path / str(number)) as publisher:
                assert publisher.flush(60) == 0
                assert publisher.status()["expired"] == 0
            message = present(watch.receive(60))
            assert 200 < (message.expiry_s or 0) <= 300
    wait_until(lambda: ear.numbers() == [0, 1], what="both")


def test_the_command_keeps_what_it_could_not_send(broker: Mosquitto, ear: Ear, tmp_path: Path) -> None:
    def pub(*more: str) -> subprocess.CompletedProcess[str]:
        return towline_command("pub", broker.uri, "d/{n}", "--durable", tmp_path / "p", *more)

    broker.stop()
    first = pub("--count", "5", "--timeout", "0")
    assert first.returncode == 1
    assert "5 messages not at the broker: kept in" in first.stderr
    broker.start()
    second = pub("--count", "2", "--qos", "2")
    assert second.returncode == 0, second.stderr
    assert "7 messages acknowledged by" in second.stdout
    wait_until(lambda: len(ear.messages) == 7, what="all")


def _life(broker: Mosquitto, state: Path, first: int, count: int, qos: int) -> list[str]:
    return [sys.executable, "-c", LIFE, broker.uri, str(state), str(first), str(count), str(qos)]


@pytest.mark.faults
@pytest.mark.usefixtures("ptrace")
@pytest.mark.parametrize(("call", "points"), [("fdatasync", (1, 3, 6, 11)), ("writev", (2, 5, 9))])
def test_kill_at_a_durable_write(
    broker: Mosquitto, ear: Ear, tmp_path: Path, call: str, points: tuple[int, ...]
) -> None:
    """QoS 2, a kill at the n-th write or sync of a thread: nothing that was promised is lost, nothing is doubled."""
    for when in points:
        state, log, first = tmp_path / f"p{when}", tmp_path / f"strace{when}", when * 1000
        command = inject_command(_life(broker, state, first, 15, 2), Injection(call, str(when), "KILL"), log)
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.split()
        with Publisher(broker.uri, state_dir=state) as publisher:
            assert publisher.flush(30) == 0
            accepted = publisher.status()["accepted"]
        assert len(told) <= accepted
        mine = range(first, first + 1000)
        wait_until(lambda m=mine, n=accepted: sum(x in m for x in ear.numbers()) >= n, what=f"all of point {when}")  # type: ignore[misc]
        assert Counter(n for n in ear.numbers() if n in mine) == Counter(range(first, first + accepted)), (call, when)
        if not was_injected(log):
            return


def test_qos_2_to_several_brokers_needs_a_word(tmp_path: Path) -> None:
    """Refused before it is stored: a broker that takes over may drop it as a repeat of another."""
    nowhere = ["mqtt://127.0.0.1:1", "mqtt://127.0.0.1:2"]
    publisher = Publisher(nowhere, state_dir=tmp_path / "a")
    publisher.publish("t", b"1", qos=1)
    with pytest.raises(ConfigError, match=r"brokers_share_sessions=True.*TL-C51"):
        publisher.publish("t", b"2", qos=2)
    assert publisher.close(0) == 1
    with Publisher(nowhere, state_dir=tmp_path / "b", settings=ClientSettings(brokers_share_sessions=True)) as shared:
        shared.publish("t", b"2", qos=2)
        assert shared.close(0) == 1


def test_a_small_outbox_takes_many_messages_in_turn(broker: Mosquitto, tmp_path: Path) -> None:
    """What is queued together does not have to fit together; what is above the limit waits for all before it."""
    with Publisher(broker.uri, state_dir=tmp_path / "p", max_bytes=1 << 20) as publisher:
        waiting = [publisher.publish("t", bytes(1000), wait=False) for _ in range(3000)]
        waiting.append(publisher.publish("t", bytes(2 << 20), wait=False))
        waiting.append(publisher.publish("t", b"last", wait=False))
        waiting[-1].at_broker.result(60)
        assert publisher.flush(60) == 0
        assert publisher.status()["delivered"] == len(waiting)


def test_an_application_exports_its_publisher(broker: Mosquitto, tmp_path: Path) -> None:
    registry = CollectorRegistry()

    def now() -> dict[str, float]:
        samples = (sample for family in registry.collect() for sample in family.samples)
        return {sample.name.removeprefix("towline_publisher_"): sample.value for sample in samples}

    with Publisher(broker.uri, state_dir=tmp_path / "outbox") as publisher:
        registry.register(publisher_metrics(publisher, "app"))
        for number in range(10):
            publisher.publish("t/1", b"%d" % number)
        assert publisher.flush(60) == 0
        known = now()
        assert known["messages_accepted_total"] == known["messages_delivered_total"] == 10
        assert (known["connected"], known["fdatasync_seconds_count"] >= 1) == (1, True)
        broker.stop()
        wait_until(lambda: not now()["connected"], what="the loss")
    assert now() == {}, "one that is closed has nothing to say"
