"""A publisher in an application with a registry of its own."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

import towline
from tests.conftest import NewMosquitto
from tests.helpers import wait_until


def test_an_application_exports_its_publisher(tmp_path: Path, new_mosquitto: NewMosquitto) -> None:
    broker, registry = new_mosquitto(), CollectorRegistry()

    def now() -> dict[str, float]:
        samples = (sample for family in registry.collect() for sample in family.samples)
        return {sample.name.removeprefix("towline_publisher_"): sample.value for sample in samples}

    with towline.Publisher(broker.uri, state_dir=tmp_path / "outbox") as publisher:
        registry.register(towline.publisher_metrics(publisher, "app"))
        for number in range(10):
            publisher.publish("t/1", b"%d" % number)
        assert publisher.flush(60) == 0
        known = now()
        assert known["messages_accepted_total"] == known["messages_delivered_total"] == 10
        assert (known["connected"], known["fdatasync_seconds_count"] >= 1) == (1, True)
        broker.stop()
        wait_until(lambda: not now()["connected"], what="the loss")
    assert now() == {}, "one that is closed has nothing to say"
