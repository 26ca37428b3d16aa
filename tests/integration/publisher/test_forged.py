"""What others, and copies, write under a publisher's name: nothing of the publisher's is lost by it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.helpers import wait_until
from tests.integration.gateway.conftest import Gateway, new_gateway
from tests.integration.publisher.test_receipts import (
    Committer,
    broker,
    commit,
    gateway,
    new_publisher,
    rows_of,
    spark,
    write_key,
)
from towline import Publisher
from towline.delivery.receipts.mark import ReceiptKeys
from towline.errors import ConfigError
from towline_prove.devstack import Mosquitto

__all__ = ["broker", "gateway", "new_gateway", "spark"]


@contextmanager
def device(broker: Mosquitto) -> Iterator[paho.Client]:
    """A client of the same broker that has no key."""
    made = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    made.connect("127.0.0.1", broker.port)
    made.loop_start()
    yield made
    made.disconnect()
    made.loop_stop()


def say(client: paho.Client, payload: str, *pairs: tuple[str, str]) -> None:
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.UserProperty = list(pairs)
    client.publish("t/1", payload, 1, properties=properties).wait_for_publish(60)


def payloads(gateway: Gateway) -> list[str]:
    return [row["payload"].decode() for row in rows_of(gateway)]


def publisher(broker: Mosquitto, tmp_path: Path, directory: str = "p") -> Publisher:
    return new_publisher(broker, tmp_path, directory, receipt_patience_s=1)


def test_a_forged_mark_makes_nothing_vanish(
    gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    with publisher(broker, tmp_path) as victim, device(broker) as forger:
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


def test_a_mark_that_was_heard_fits_no_other_message(
    gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    """An attacker hears a message before the gateway does, and puts its mark on another one."""
    with publisher(broker, tmp_path) as victim, device(broker) as forger:
        heard: list[paho.MQTTMessage] = []
        forger.on_message = lambda _client, _data, message: heard.append(message)
        forger.subscribe("t/1", 1)
        victim.publish("t/1", "0", user_properties=[("a", "b")])
        message = wait_until(lambda: heard[0] if heard else None, what="a message with a mark")
        pairs: list[tuple[str, str]] = message.properties.UserProperty  # type: ignore[union-attr]
        say(forger, "other", *pairs)
        say(forger, "0", *[pair for pair in pairs if pair[0] != "a"])
        say(forger, "0", *pairs)  # this is the message itself, once more
        gateway.until(journaled=3)
        assert victim.flush(60) == 0
        gateway.until(received=4, deduplicated=1)
    spark.end()
    assert sorted(payloads(gateway)) == ["0", "0", "other"]
    assert gateway.status()["receipts"]["forged"] == 2


def test_a_forged_receipt_lets_nothing_go(gateway: Gateway, broker: Mosquitto, tmp_path: Path) -> None:
    with publisher(broker, tmp_path) as victim, device(broker) as forger:
        receipt = victim.publish("t/1", "0")  # no gateway runs
        receipt.at_broker.result(60)
        topic = f"towline/receipts/{victim.journal_id}"
        for told in ({"watermark": 1}, {"watermark": 1, "codes": ["0" * 32]}, {"watermark": 0, "epoch": 2}):
            made = {"publisher": victim.journal_id, "epoch": 1, **told}
            payload = json.dumps(made, separators=(",", ":"))
            forger.publish(topic, payload, 1, retain=True).wait_for_publish(60)
        wait_until(lambda: victim.status()["receipts"]["not_believed"] == 3, what="three forged receipts")
        assert not receipt.end_to_end.done()
        assert victim.awaiting == 1
        gateway.start()
        gateway.until(journaled=1)
        commit(gateway)
        receipt.end_to_end.result(60)


def test_a_publisher_with_a_key_of_its_own(
    gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"TL-C84.*") as told:
        Publisher(broker.uri, state_dir=tmp_path / "q", receipts=True)
    name = told.value.location.split()[-1]
    own = tmp_path / "own.key"
    own.write_text("# made for it\n" + "\n".join(ReceiptKeys.read_file(write_key(tmp_path)).derive_key_lines(name)))
    own.chmod(0o600)
    with Publisher(broker.uri, state_dir=tmp_path / "q", receipts=True, receipt_key_file=own) as one:
        assert one.journal_id == name
        one.publish("t/1", "0").end_to_end.result(60)
        assert spark.on.is_set()
    with pytest.raises(ConfigError, match="TL-C86"):
        Publisher(broker.uri, state_dir=tmp_path / "r", receipts=True, receipt_key_file=own)


def test_an_older_copy_of_a_publisher_loses_nothing(
    gateway: Gateway, broker: Mosquitto, spark: Committer, tmp_path: Path
) -> None:
    """Numbers are given out anew, and grow past those that the gateway has, before a receipt is heard."""
    with publisher(broker, tmp_path) as first:
        for number in range(5):
            first.publish("t/1", str(number))
        assert first.flush(60) == 0
    shutil.copytree(tmp_path / "p", tmp_path / "copy")
    with publisher(broker, tmp_path) as first:
        for number in range(5, 10):
            first.publish("t/1", str(number))
        assert first.flush(60) == 0
    broker.stop()
    with publisher(broker, tmp_path, "copy") as second:
        receipts = [second.publish("t/1", f"new {number}") for number in range(8)]
        broker.start()
        assert second.flush(60) == 0
        assert all(receipt.end_to_end.done() for receipt in receipts)
        assert second.status()["receipts"]["epoch"] == 2
    spark.end()
    assert set(payloads(gateway)) == {*map(str, range(10)), *(f"new {number}" for number in range(8))}
