"""A gateway service, and readers of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.gateway.serving import Served, served
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import MqttStreamReader


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "state") as running:
        yield running


@pytest.fixture
def plan(server: Served) -> ReadPlan:
    return ReadPlan(GatewayAddress(str(server.state_dir)), "default", poll_s=0.05)


@pytest.fixture
def stream(plan: ReadPlan) -> Iterator[MqttStreamReader]:
    made = MqttStreamReader(plan)
    yield made
    made.stop()
