from __future__ import annotations

from pathlib import Path

from towline_prove.devstack.kafka import Kafka


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


def test_only_a_killed_broker_has_a_short_session(tmp_path: Path) -> None:
    """A session of a killed one has to lapse before the next may serve; any other outlives a slow machine."""
    broker = Kafka(tmp_path)
    assert properties(broker)["broker.session.timeout.ms"] == "18000"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.properties").touch()
    assert properties(broker)["broker.session.timeout.ms"] == "2000"
    (tmp_path / "data" / ".kafka_cleanshutdown").touch()
    assert properties(broker)["broker.session.timeout.ms"] == "18000"
