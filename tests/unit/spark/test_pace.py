from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from towline.spark.pace import BatchPace

TARGET_S = 1.0


def run(pace: BatchPace, batches: int, fixed_s: float, row_s: float, waiting: int = 10**9) -> list[float]:
    """The time of each batch when so many rows always wait."""
    now, times = 0.0, []
    for _ in range(batches):
        rows = min(pace.rows, waiting)
        pace.planned(rows, now)
        times.append(fixed_s + row_s * rows)
        now += times[-1]
        pace.ended(now)
    return times


@given(st.floats(0.001, 0.5), st.floats(1e-7, 4e-4))
def test_a_steady_load_never_passes_the_target_and_uses_it(fixed_s: float, row_s: float) -> None:
    times = run(BatchPace(TARGET_S), 60, fixed_s, row_s)
    first = fixed_s + 2000 * row_s
    assert max(times) <= max(TARGET_S, first)
    assert times[-1] >= 0.6 * TARGET_S


def test_rows_that_became_dearer_are_fewer_in_the_next_batch() -> None:
    pace = BatchPace(TARGET_S)
    run(pace, 40, 0.05, 1e-5)
    dear = run(pace, 3, 0.05, 1e-4)
    assert dear[0] > TARGET_S
    assert max(dear[1:]) <= TARGET_S


def test_one_slow_batch_is_forgotten() -> None:
    pace = BatchPace(TARGET_S)
    run(pace, 40, 0.05, 1e-5)
    before = pace.rows
    pace.planned(before, 0.0)
    pace.ended(60.0)
    assert pace.rows < before / 10
    run(pace, 20, 0.05, 1e-5)
    assert pace.rows > before * 0.9


def test_small_batches_of_a_quiet_time_say_nothing_of_large_ones() -> None:
    pace = BatchPace(TARGET_S)
    run(pace, 40, 0.05, 1e-5)
    before = pace.rows
    run(pace, 1000, 0.05, 1e-5, waiting=3)
    assert pace.rows == before


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e4)), max_size=50))
def test_there_is_always_a_row(batches: list[tuple[int, float]]) -> None:
    pace, now = BatchPace(TARGET_S), 0.0
    for rows, took in batches:
        pace.planned(min(rows, pace.rows), now)
        now += took
        pace.ended(now)
        assert pace.rows >= 1


def test_a_call_without_a_batch_says_nothing() -> None:
    pace = BatchPace(TARGET_S)
    before = pace.rows
    pace.ended(5.0)
    pace.planned(0, 5.0)
    pace.ended(9.0)
    assert pace.rows == before
