"""When a run of many batches counts as grown."""

from __future__ import annotations

import pytest

from towline_prove.account import RunAccount
from towline_prove.batches import BatchesPlan, BatchesRun, Look
from towline_prove.referee import Verdict


def run_of(last: dict[str, float], *, files: int = 420, batches: int = 100) -> BatchesRun:
    looks = [Look(1, {"driver": 60.0, "jvm": 300.0}, 19, 300)]
    looks += [Look(batch, {"driver": 120.0, "jvm": 800.0}, 420, 3000) for batch in range(5, 100, 5)]
    run = BatchesRun(BatchesPlan(batches=100), [*looks, Look(batches, last, files, 3000)])
    run.account = RunAccount(Verdict(), "exactly_once")
    return run


def test_what_grows_before_the_first_tenth_is_a_start() -> None:
    assert run_of({"driver": 121.0, "jvm": 900.0}).problems() == []


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (run_of({"driver": 150.0, "jvm": 800.0}), "driver grew"),
        (run_of({"driver": 120.0, "jvm": 1200.0}), "jvm grew"),
        (run_of({"driver": 120.0, "jvm": 800.0}, files=20_000), "20,000 files"),
        (run_of({"driver": 120.0, "jvm": 800.0}, batches=99), "not 100 batches"),
        (BatchesRun(BatchesPlan()), "not 20,000 batches"),
    ],
)
def test_growth_is_a_problem(run: BatchesRun, said: str) -> None:
    assert any(said in problem for problem in run.problems())
    assert not run.ok
