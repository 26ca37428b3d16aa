"""The account of a bridge on a real Kafka and a real Spark: every witness speaks, and one that lies is found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.helpers import wait_until
from tests.integration.bridge.conftest import a_bridge
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from tests.integration.bridge.test_delivery_semantics import nothing_waits, online
from tests.integration.bridge.test_downlink import put
from towline.bridge.config.file import load
from towline.kafka.markers import Marker
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline_prove.devstack import Kafka, Mosquitto

# `make test` has the sums in unit/bridge/test_account*.py, one that adds up in each bridge that it starts, and
# markers of another query in unit/kafka/test_markers.py.
pytestmark = [pytest.mark.long, pytest.mark.spark]

BRIDGE = """
name = "account"
state_dir = "state"
mqtt = {{ brokers = "{broker}" }}
kafka = {{ bootstrap_servers = "{kafka}" }}
spark = {{ master = "local[2]" }}
[[uplink]]
name = "up"
guarantee = "exactly_once"
dead_letter_topic = "account.dead"
[[uplink.route]]
from = "t/#"
topic = "account.up"
key = "{{mqtt.user.id}}"
key_required = true
where = "topic <> 't/none'"
[[downlink]]
name = "down"
from = "account.commands"
topic = "commands/{{key}}"
"""


@dataclass(frozen=True)
class Account:
    """What a bridge said of itself, before and after a marker was written by somebody else.

    Attributes:
        accounts: Of both lines, when nothing waited.
        records: How many the topic had then.
        reconciled: Exit code of ``towline status --reconcile --json``, and the markers of each line that it printed;
            while the bridge ran.
        planted: The same with the marker, while it did not.
        after: The account of the uplink, a batch later.
        advice: What ``towline status`` said then.
    """

    accounts: dict[str, Any]
    records: int
    reconciled: tuple[int, dict[str, Any]]
    planted: tuple[int, dict[str, Any]]
    after: dict[str, Any]
    advice: str


@pytest.fixture(scope="module")
def account(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Account:
    place = tmp_path_factory.mktemp("account")
    with a_bridge(place) as bridge, Mosquitto(place / "mosquitto") as broker:
        return ran(bridge, broker, kafka)


def ran(bridge: Running, broker: Mosquitto, kafka: Kafka) -> Account:
    kafka.create_topics({"account.up": 1, "account.dead": 1, "account.commands": 2})
    bridge.file.write_text(BRIDGE.format(broker=broker.uri, kafka=kafka.bootstrap))
    bridge.start()
    for line in ("up", "down"):
        online(bridge, line)
    publish(broker, 0, 60, qos=2, user="id")
    publish(broker, 100, 5, qos=2, topic="t/none", user="id")
    publish(broker, 200, 3, qos=2)
    wait_until(lambda: bridge.line("down")["query"] == "running", PATIENCE, "the query of the downlink")
    put(kafka, "account.commands", range(20))
    nothing_waits(bridge, 68, "up")
    wait_until(lambda: bridge.account("down").get("delivered") == 20, PATIENCE, "what was to be delivered")
    accounts = {line: bridge.account(line) for line in ("up", "down")}
    records = len(in_kafka(kafka.bootstrap, "account.up"))
    reconciled = asked(bridge)
    assert bridge.interrupt() == 0
    plant(bridge, kafka)
    planted = asked(bridge)
    bridge.start()
    online(bridge, "up")
    publish(broker, 300, 10, qos=2, user="id")
    nothing_waits(bridge, 78, "up")
    after, advice = bridge.account("up"), status(bridge)[1]
    assert bridge.interrupt() == 0
    return Account(accounts, records, reconciled, planted, after, advice)


def status(bridge: Running, *more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "towline", "status", str(bridge.file), *more]
    run = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE, text=True)
    return run.returncode, run.stdout


def asked(bridge: Running) -> tuple[int, dict[str, Any]]:
    code, text = status(bridge, "--reconcile", "--json")
    return code, {name: line["markers"] for name, line in json.loads(text)["lines"].items()}


def plant(bridge: Running, kafka: Kafka) -> None:
    """Somebody else writes a marker that is like ours, and has seven rows more."""
    loaded = load(Path(bridge.file))
    options = loaded.sink_options(loaded.line("up"), "account.up")
    store = MarkerStore(SinkSettings.parse(options), "account.up")
    marker = store.read_marker(0)
    assert isinstance(marker, Marker)
    other = replace(marker, total_rows=marker.total_rows + 7)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(store.topic, other.to_json(), store.key(0), partition=0)
    assert producer.flush(PATIENCE) == 0


def test_every_witness_says_the_same(account: Account) -> None:
    up, down = account.accounts["up"], account.accounts["down"]
    assert (up["received"], up["in_kafka"], up["filtered"], up["dead_lettered"]) == (68, 60, 5, 3)
    assert (up["adds_up"], up["not_witnessed"], up["again"]) == (True, 0, 0)
    assert account.records == 60
    assert (down["taken"], down["delivered"], down["adds_up"]) == (20, 20, True)


def test_kafka_says_the_same(account: Account) -> None:
    code, found = account.reconciled
    up = {"rows": 63, "noted_rows": 63, "dead_lettered": 3, "noted_dead_lettered": 3, "agrees": True, "why": ""}
    assert found == {"up": up, "down": {"agrees": None, "why": "the line has none"}}
    assert code == 0


def test_a_marker_of_somebody_else_is_found_in_kafka(account: Account) -> None:
    code, found = account.planted
    said = "the markers say 70 rows, the sink has 63   [TL-K62]"
    assert (found["up"]["agrees"], found["up"]["why"]) == (False, said)
    assert code == 1


def test_and_by_the_sink_with_its_next_batch(account: Account) -> None:
    said = (
        "Kafka's markers say 80 rows, 3 of them dead letters · the sink says 70 acknowledged by Kafka + 3 dead letters"
    )
    assert (account.after["received"], account.after["in_kafka"], account.after["adds_up"]) == (78, 70, False)
    assert account.after["disagreements"] == [said]
    assert f"does not add up ✗ ({said})" in account.advice
    assert f"! sources disagree: {said}   [TL-K61]" in account.advice
