"""Random lives of a journal in Kafka: the machine of the disk, with kills and reopenings, on real topics."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engines.journal_life import JournalLife
from tests.engines.journals import KafkaShelf
from towline_prove.devstack import Kafka

_numbers = itertools.count(1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_any_life_agrees_with_a_list(kafka: Kafka) -> None:
    class KafkaLife(JournalLife):
        new_shelf = staticmethod(lambda: KafkaShelf(kafka.bootstrap, f"life-{next(_numbers)}"))

    given = settings(
        max_examples=60,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    run_state_machine_as_test(KafkaLife, settings=given)
