from __future__ import annotations

import base64
from pathlib import Path

from towline_prove.devstack.kafka import Kafka, new_cluster_id


def properties(broker: Kafka) -> dict[str, str]:
    text = broker._properties(*broker._state().ports)
    return dict(line.split("=", 1) for line in text.splitlines())


def test_it_listens_on_loopback_only(tmp_path: Path) -> None:
    broker = Kafka(tmp_path, port=19092)
    controller = broker._state().ports[1]
    listeners = f"PLAINTEXT://127.0.0.1:19092,CONTROLLER://127.0.0.1:{controller}"
    assert properties(broker)["listeners"] == listeners
    assert properties(broker)["advertised.listeners"] == listeners
    assert broker.bootstrap == broker.address == "127.0.0.1:19092"


def test_a_typing_error_does_not_become_a_topic(tmp_path: Path) -> None:
    assert properties(Kafka(tmp_path))["auto.create.topics.enable"] == "false"


def test_only_a_killed_broker_has_a_short_session(tmp_path: Path) -> None:
    """A session of a killed one has to lapse before the next may serve; any other outlives a slow machine."""
    broker = Kafka(tmp_path)
    assert properties(broker)["broker.session.timeout.ms"] == "18000"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.properties").touch()
    assert properties(broker)["broker.session.timeout.ms"] == "2000"
    (tmp_path / "data" / ".kafka_cleanshutdown").touch()
    assert properties(broker)["broker.session.timeout.ms"] == "18000"


def test_settings_win(tmp_path: Path) -> None:
    broker = Kafka(tmp_path, settings={"broker.session.timeout.ms": "9000", "message.max.bytes": "2000"})
    assert properties(broker)["broker.session.timeout.ms"] == "9000"
    assert properties(broker)["message.max.bytes"] == "2000"


def test_new_cluster_ids_are_what_kafka_makes() -> None:
    for _ in range(200):
        identity = new_cluster_id()
        assert len(identity) == 22
        assert not identity.startswith("-")
        assert len(base64.urlsafe_b64decode(identity + "==")) == 16
