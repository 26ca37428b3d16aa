"""The promises of a journal and an outbox, kept in Kafka: the same tests as on disk."""

from __future__ import annotations

import itertools

import pytest

from tests.engines.journal_port import *  # noqa: F403 - the tests
from tests.engines.journals import KafkaShelf
from tests.engines.outbox_port import *  # noqa: F403
from towline_prove.devstack import Kafka

_numbers = itertools.count(1)


@pytest.fixture
def shelf(kafka: Kafka) -> KafkaShelf:
    return KafkaShelf(kafka.bootstrap, f"port-{next(_numbers)}")
