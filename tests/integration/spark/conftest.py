"""A gateway service; Spark finds ``format("mqtt")`` by itself, nobody registers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.spark.collecting import end_gateway
from tests.unit.gateway.serving import Served, served
from towline.gateway.endpoint import ENDPOINT_FILE


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for state; gateways that sources and sinks have started there end with the test."""
    yield tmp_path
    for file in tmp_path.rglob(ENDPOINT_FILE):
        end_gateway(file.parent)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "gateway") as running:
        yield running
