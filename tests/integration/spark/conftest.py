"""A gateway service; Spark finds ``format("mqtt")`` by itself, nobody registers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.gateway.serving import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "gateway") as running:
        yield running
