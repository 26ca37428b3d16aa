"""A publisher in an application with a registry of its own."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

import towline
from tests.conftest import NewMosquitto
from tests.engines.alert_rules import firing
from tests.helpers import wait_until


def test_an_application_exports_its_publisher(tmp_path: Path, new_mosquitto: NewMosquitto) -> None:
    broker, registry = new_mosquitto(), CollectorRegistry()

    def scrape() -> str:
        return generate_latest(registry).decode()

    def now() -> dict[str, float]:
        samples = (sample for family in registry.collect() for sample in family.samples)
        return {sample.name.removeprefix("towline_"): sample.value for sample in samples}

    state_dir = tmp_path / "outbox"
    with towline.Publisher(broker.uri, state_dir=state_dir, max_bytes=1 << 20) as publisher:
        registry.register(towline.publisher_metrics(publisher, "app"))
        for number in range(10):
            publisher.publish("t/1", b"%d" % number)
        assert publisher.flush(60) == 0
        known = now()
        assert known["publisher_messages_accepted_total"] == known["publisher_messages_delivered_total"] == 10
        assert known["publisher_connected"] == 1
        assert known["publisher_fdatasync_seconds_count"] >= 1
        sound = scrape()
        broker.stop()
        wait_until(lambda: not now()["publisher_connected"], what="the loss")
        for _ in range(15):
            publisher.publish("t/1", b"x" * 100_000, wait=False)
        held = wait_until(lambda: scrape() if now()["publisher_held_back"] else None, what="no room")
        assert now()["publisher_messages_waiting"] > 0
        broker.start()
        assert publisher.flush(60) == 0
        assert now()["publisher_messages_delivered_total"] == 25
    assert now() == {}, "one that is closed has nothing to say"
    assert firing(tmp_path, sound, {"well": sound, "held": held}) == {
        "well": set(),
        "held": {"TowlinePublisherHeldBack"},
    }
