"""A gateway's service, a client of it, and a process that may read too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.gateway.brokered import Broker
from tests.unit.gateway.remote import Remote, remote
from tests.unit.gateway.serving import Served, served
from towline.gateway.client import GatewayClient


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "state") as running:
        yield running


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Remote]:
    """One with an outbox, on the network."""
    with remote(tmp_path, outbox=True) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[GatewayClient]:
    with GatewayClient(server.location) as connected:
        yield connected


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.line.close()
    broker.listener.close()
