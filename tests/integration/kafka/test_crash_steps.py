"""The sink's algorithm, killed by SIGKILL at each of its steps: nothing lost, nothing doubled."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.conftest import NewTopic
from tests.integration.kafka.dying import ROOT, STEPS, dying
from tests.integration.kafka.reading import numbers
from tests.integration.kafka.writing import account
from towline_prove.devstack import Kafka

ROWS = 500
#: What a restart finds after a death at these steps; after every other one it finds nothing, and writes.
COMMITTED = {"after the commit, before Spark knows"}
EITHER = {"while the commit request is on its way"}


def run(kafka: Kafka, topic: str, first: int, last: int, step: str = "") -> tuple[int, list[str]]:
    """Exit code and lines of a process that writes these batches and dies in the last."""
    command = dying(kafka, topic, range(first, last + 1), ROWS, step)
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=not step)
    return answer.returncode, answer.stdout.splitlines()


#: Killed in `make test` too, where unit/kafka/test_exactly_once.py has a death at each call.
REAL = ("all flushed, before the commit request", "after the commit, before Spark knows")
CASES = [pytest.param(step, marks=[] if step in REAL else [pytest.mark.long]) for step in STEPS]


@pytest.mark.faults
@pytest.mark.parametrize("step", CASES)
def test_a_kill_at_this_step_loses_and_doubles_nothing(kafka: Kafka, topic: NewTopic, step: str) -> None:
    name = topic(partitions=1)
    code, lines = run(kafka, name, 0, 1, step)
    assert code == -signal.SIGKILL, lines
    assert lines == [f"0 written {ROWS}"]
    # Spark runs the batch again, with the same number and rows, and then the next one.
    _, lines = run(kafka, name, 1, 2)
    outcome = lines[0].split()[1]
    assert (
        outcome in {"skipped", "written"}
        if step in EITHER
        else outcome == ("skipped" if step in COMMITTED else "written")
    )
    assert lines[1] == f"2 written {ROWS}"
    found = numbers(kafka.bootstrap, name)
    assert account(found, 3 * ROWS) == (0, 0)
    assert found == sorted(found)
