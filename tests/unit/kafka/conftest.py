"""A Kafka in memory for the tests that speak to one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.kafka.memory import MemoryKafka, kafka_in_memory


@pytest.fixture
def memory() -> Iterator[MemoryKafka]:
    """With the topic t of one partition."""
    with kafka_in_memory() as made:
        made.topics["t"] = 1
        yield made
