"""Gateway services, and readers of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.conftest import far  # noqa: F401 - a fixture of this room too
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import NewReader
from towline.spark import gateways
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import MqttStreamReader


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "_RETRY_S", 0.02)
    monkeypatch.setattr(gateways, "_REFUSED_RETRY_S", 0.05)
    monkeypatch.setattr(gateways, "SLOW_POLL_GRACE_S", 0.5)
    monkeypatch.setattr(gateways, "POLL_GRACE_S", 0.25)  # what answers at once may take longer beside other tests


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "state") as running:
        yield running


@pytest.fixture
def plan(server: Served) -> ReadPlan:
    return ReadPlan(GatewayAddress(str(server.state_dir)), "default", poll_ms=50)


@pytest.fixture
def stream(plan: ReadPlan) -> Iterator[MqttStreamReader]:
    made = MqttStreamReader(plan)
    yield made
    made.stop()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    with served(tmp_path / "g1", name="g1") as one, served(tmp_path / "g2", name="g2") as other:
        yield one, other


@pytest.fixture
def new_reader(tmp_path: Path) -> Iterator[NewReader]:
    made: list[MqttStreamReader] = []

    def make(*names: str, **more: Any) -> MqttStreamReader:
        at = tuple(str(tmp_path / name) for name in names or ("g1", "g2"))
        plan = ReadPlan(GatewayAddress(""), "default", poll_ms=50, gateways=at)
        made.append(MqttStreamReader(replace(plan, **more)))
        return made[-1]

    yield make
    for one in made:
        one.stop()
