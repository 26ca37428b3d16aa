"""A marker is read up to the end its leader names, and no nearer end is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from towline.errors import KafkaError
from towline.kafka import markerstore
from towline.kafka.markers import Marker
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings

OLDER, NEWEST = Marker(6, 1, writer="q"), Marker(7, 1, writer="q")


class Lagging:
    """A consumer that is sent to a follower: it ends before the leader does, until the follower has caught up.

    Args:
        leaders_end: What the leader answers to ListOffsets.
        polls: What `poll` gives: a marker at its offset, or an offset alone for "this is the end".
    """

    def __init__(self, leaders_end: int, *polls: tuple[int, Marker] | int) -> None:
        self.config: Mapping[str, Any] = {}
        self.leaders_end = leaders_end
        self.polls = [*polls]
        self.closed = False

    def get_watermark_offsets(self, _place: object, timeout: float) -> tuple[int, int]:
        assert timeout > 0
        return 0, self.leaders_end

    def assign(self, _places: object) -> None:
        pass

    def unassign(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def poll(self, _timeout: float) -> Any:
        if not self.polls:
            return None
        given = self.polls.pop(0)
        if isinstance(given, int):
            error = SimpleNamespace(name=lambda: "_PARTITION_EOF")
            return SimpleNamespace(error=lambda: error, offset=lambda: given)
        return SimpleNamespace(
            error=lambda: None, offset=lambda: given[0], key=lambda: b"sink/0", value=given[1].to_json
        )


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    markerstore._consumers.clear()
    markerstore._ends.clear()


def store(monkeypatch: pytest.MonkeyPatch, consumer: Lagging, **client: str) -> MarkerStore:
    def made(config: Mapping[str, Any], **_: object) -> Lagging:
        consumer.config = config
        return consumer

    markerstore._consumers.clear()
    monkeypatch.setattr(markerstore, "Consumer", made)
    options = {"kafka.bootstrap.servers": "k:9092", "deliveryTimeout": "1"}
    return MarkerStore(SinkSettings.parse({**options, **client}), "sink")


def test_the_readers_rack_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Lagging(2, (0, NEWEST), 2)
    given = {"kafka.client.rack": "west", "kafka.client.id": "mine"}
    assert store(monkeypatch, consumer, **given).read(0) == NEWEST
    assert (consumer.config["client.rack"], consumer.config["client.id"]) == ("", "mine")


def test_an_end_below_the_leaders_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Lagging(4, (0, OLDER), 2, (2, NEWEST), 4)
    assert store(monkeypatch, consumer).read(0) == NEWEST


def test_an_end_that_stays_below_the_leaders_is_an_error_and_no_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Lagging(4, (0, OLDER), 2)
    with pytest.raises(KafkaError, match=r"could be read up to 2, and its leader has 4\..*\[TL-K27\]"):
        store(monkeypatch, consumer).read(0)
    assert consumer.closed


def test_an_end_below_one_that_was_seen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store(monkeypatch, Lagging(4, (2, NEWEST), 4)).read(0) == NEWEST
    with pytest.raises(KafkaError, match=r"ends at 2, and ended at 4 before\..*\[TL-K27\]"):
        store(monkeypatch, Lagging(2, (0, OLDER), 2)).read(0)
