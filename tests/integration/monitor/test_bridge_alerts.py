"""A bridge with Spark, as a user runs it, and what its endpoint shows when it is hurt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NewMosquitto
from tests.engines.alert_rules import firing
from tests.helpers import wait_until
from tests.integration.bridge.conftest import a_bridge
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from tests.integration.monitor.looking import Scraped, Values
from towline_prove.devstack import Kafka
from towline_prove.devstack.process import free_port

# `make test` has the endpoint of a bridge in unit/monitor, its rules in unit/monitor/test_alert_rules.py.
pytestmark = [pytest.mark.long, pytest.mark.spark]


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Running]:
    with a_bridge(tmp_path) as running:
        yield running


def test_a_bridge_from_its_start_to_a_kafka_that_is_away(
    tmp_path: Path, bridge: Running, new_mosquitto: NewMosquitto, own_kafka: Kafka
) -> None:
    broker, port = new_mosquitto(), free_port()
    own_kafka.create_topics({"taken": 1, "set-aside": 1})
    bridge.file.write_text(f"""
name = "plant"
state_dir = "state"
mqtt = {{ brokers = "{broker.uri}" }}
kafka = {{ bootstrap_servers = "{own_kafka.bootstrap}" }}
spark = {{ master = "local[2]" }}
monitor = {{ listen = "127.0.0.1:{port}" }}
[[uplink]]
name = "line"
guarantee = "exactly_once"
dead_letter_topic = "set-aside"
[[uplink.route]]
from = "t/#"
topic = "taken"
key = "{{mqtt.user.id}}"
key_required = true
""")
    bridge.start()
    endpoint = Scraped(f"127.0.0.1:{port}")
    wait_until(lambda: _verdict(endpoint, "healthz") == (200, []), PATIENCE, "an endpoint")
    wait_until(lambda: _verdict(endpoint, "readyz") == (200, []), PATIENCE, "all of it ready")
    publish(broker, 0, 10, qos=2, user="id")
    sound = endpoint.until(_carried(10), PATIENCE)
    assert len(in_kafka(own_kafka.bootstrap, "taken")) == 10

    publish(broker, 10, 1, qos=2)
    letter = endpoint.until(lambda now: _carried(11)(now) and now["messages_dead_lettered_total"] == 1, PATIENCE)

    bridge.kill("towline.gateway")
    endpoint.until(lambda now: now["gateway_restarts_total"] == 1 and now.get("broker_connected") == 1, PATIENCE)

    own_kafka.kill()
    publish(broker, 11, 5, qos=2, user="id")
    waiting = endpoint.until(lambda now: now.get("messages_waiting") == 5 and now["kafka_reachable"] == 0, PATIENCE)
    status, problems = endpoint.verdict("readyz")
    assert status == 503
    assert "kafka is unreachable" in [one["what"] for one in problems]
    own_kafka.start()
    endpoint.until(lambda now: _carried(16)(now) and now["messages_dead_lettered_total"] == 1, PATIENCE)
    fired = firing(tmp_path, sound, {"well": sound, "letter": letter, "waiting": waiting})
    assert fired["well"] == set()
    assert fired["letter"] == {"TowlineDeadLetters"}
    # Whether the query has ended already, or still waits for Kafka, is Kafka's client's to tell.
    expected = {"TowlineNothingCarried", "TowlineDeadLetters", "TowlineKafkaAway"}
    assert fired["waiting"] - {"TowlineQueryDown"} == expected


def _carried(count: int) -> Any:
    """All of it is in Kafka, the account knows it, and its batches were timed."""

    def shown(now: Values) -> bool:
        return (
            now.get("messages_received_total") == count
            and now["messages_waiting"] == 0
            and now.get("account_adds_up") == 1
            and now["account_messages"] == 2 * count  # received, and where each is
            and now["batch_seconds_count"] >= 1
            and now["kafka_transaction_seconds_count"] >= 1
            and now["kafka_reachable"] == now["spark_running"] == now["query_running"] == 1
        )

    return shown


def _verdict(endpoint: Scraped, path: str) -> tuple[int, list[dict[str, Any]]] | None:
    try:
        return endpoint.verdict(path)
    except OSError:
        return None
