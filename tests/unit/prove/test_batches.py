"""When a run of many batches counts as grown."""

from __future__ import annotations

import pytest

from towline_prove.account import RunAccount
from towline_prove.batches import BatchesPlan, BatchesRun, Look
from towline_prove.referee import Verdict


def run_of(driver: float = 121.0, *, heap: float = 91.0, files: int = 420, batches: int = 100) -> BatchesRun:
    looks = [Look(1, {"driver": 60.0, "jvm": 300.0}, 50.0, 19, 300)]
    looks += [Look(batch, {"driver": 120.0, "jvm": 800.0}, 90.0, 420, 3000) for batch in range(5, 100, 5)]
    last = Look(batches, {"driver": driver, "jvm": 1300.0}, heap, files, 3000)
    run = BatchesRun(BatchesPlan(batches=100), [*looks, last])
    run.account = RunAccount(Verdict(), "exactly_once")
    return run


def test_what_grows_before_the_first_tenth_is_a_start() -> None:
    assert run_of().problems() == []


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (run_of(150.0), "driver grew"),
        (run_of(heap=130.0), "heap grew"),
        (run_of(files=20_000), "20,000 files"),
        (run_of(batches=99), "not 100 batches"),
        (BatchesRun(BatchesPlan()), "not 20,000 batches"),
    ],
)
def test_growth_is_a_problem(run: BatchesRun, said: str) -> None:
    assert any(said in problem for problem in run.problems())
    assert not run.ok
