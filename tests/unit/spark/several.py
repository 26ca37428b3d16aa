"""Readers over several gateways, as tests make and drive them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL
from towline.spark import gateways
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import MqttStreamReader

__all__ = ["NewReader", "Place", "ends", "new_reader", "quick", "seen", "two", "until"]

Place = dict[str, Any]
NewReader = Callable[..., MqttStreamReader]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "_RETRY_S", 0.02)
    monkeypatch.setattr(gateways, "_REFUSED_RETRY_S", 0.05)
    monkeypatch.setattr(gateways, "FIRST_POLL_S", 0.5)
    monkeypatch.setattr(gateways, "POLL_GRACE_S", 0.25)  # what answers at once may take longer beside other tests


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    with served(tmp_path / "g1", name="g1") as one, served(tmp_path / "g2", name="g2") as other:
        yield one, other


@pytest.fixture
def new_reader(tmp_path: Path) -> Iterator[NewReader]:
    made: list[MqttStreamReader] = []

    def make(*names: str, **more: Any) -> MqttStreamReader:
        at = tuple(str(tmp_path / name) for name in names or ("g1", "g2"))
        plan = ReadPlan(GatewayAddress(""), "default", poll_s=0.05, gateways=at)
        made.append(MqttStreamReader(replace(plan, **more)))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def ends(at: Place) -> dict[str, int]:
    return {name: place["offset"] for name, place in at["gateways"].items()}


def seen(stream: MqttStreamReader, start: Place, end: Place) -> list[tuple[str, int]]:
    """Gateway and offset of each row of a batch, in the order of its partitions."""
    batches = [batch for part in stream.partitions(start, end) for batch in stream.read(part)]
    return [pair for b in batches for pair in zip(b["gateway"].to_pylist(), b["offset"].to_pylist(), strict=True)]


def until(stream: MqttStreamReader, at: Place, wanted: Callable[[Place], bool], limit: Any = ALL) -> Place:
    """Go on, batch by batch, until a position is wanted."""
    places = [at]

    def there() -> bool:
        places.append(stream.latestOffset(places[-1], limit))
        return wanted(places[-1])

    wait_until(there)
    return places[-1]
