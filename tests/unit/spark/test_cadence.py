"""When a batch begins: a stream's batches, played by a clock that the test turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from towline.spark.batching import BUSY_ROWS, IDLE_BATCH_S, MAX_POLL_S, MIN_POLL_S, UNSYNCED_POLL_S, TriggerTiming


class Batch(NamedTuple):
    begin: float
    end: float
    rows: int
    #: How long the oldest of them waited for the begin.
    age: float


def played(arrivals: Sequence[float], took: float, most: float) -> list[Batch]:
    """The batches that carry rows which come at these times."""
    cadence, batches, now, done = TriggerTiming(most), [], 0.0, 0
    while done < len(arrivals):
        cadence.end_batch(now)
        now = max(now, arrivals[done])  # the long poll ends with the first row
        while wait := cadence.delay_s(rows := bisect_right(arrivals, now) - done, now):
            assert MIN_POLL_S <= wait <= MAX_POLL_S
            now += wait
        cadence.start_batch(now)
        batches.append(Batch(now, now + took, rows, now - arrivals[done]))
        done += rows
        now += took
    return batches


def steady(rate: float, seconds: float) -> list[float]:
    return [number / rate for number in range(int(rate * seconds))]


def share(batches: Sequence[Batch]) -> float:
    """Of the time that batches take, after the first ones."""
    ran = batches[3:]
    return sum(one.end - one.begin for one in ran[:-1]) / (ran[-1].begin - ran[0].begin)


TOOK = st.floats(0.02, 0.5)
MOST = st.sampled_from([0.0, 0.2, 1.0, 5.0])


@given(st.lists(st.floats(0, 20), min_size=1, max_size=60).map(sorted), TOOK, MOST)
def test_no_row_waits_longer_than_a_batch_and_the_longest_rest(arrivals: list[float], took: float, most: float) -> None:
    batches = played(arrivals, took, most)
    assert sum(one.rows for one in batches) == len(arrivals)
    assert max(one.age for one in batches) <= took + most + MIN_POLL_S + 1e-9


@given(st.floats(2, 30), TOOK, MOST)
def test_what_comes_after_a_silence_begins_a_batch_at_once(silence: float, took: float, most: float) -> None:
    first, second = played([3.0, 3.0 + took + most + silence], took, most)
    assert (first.age, second.age) == (0, 0)


@given(st.floats(1, 200), st.floats(0.05, 0.2))
def test_a_trickle_takes_the_share_of_time_that_its_batches_are_worth(rate: float, took: float) -> None:
    batches = played(steady(rate, 30), took, most=1.0)
    rows = sum(one.rows for one in batches[3:]) / len(batches[3:])
    # A rest ends after the longest, whatever waits, and a batch is one look late or one row early at most.
    assert share(batches) <= max(took / (took + 1.0), (rows + 1) / BUSY_ROWS) + 0.02


@given(st.floats(0.05, 0.2))
def test_a_fast_steady_stream_and_a_backlog_never_rest(took: float) -> None:
    stream = played(steady(5_000, 2), took, most=1.0)
    backlog = played([0.0] + [took / 2] * 5_000, took, most=1.0)
    for batches in (stream[1:-1], backlog):  # the last rows of a stream are few
        assert all(after.begin == before.end for before, after in pairwise(batches))


def test_an_idle_stream_ticks_at_once_and_then_each_while() -> None:
    cadence = TriggerTiming(0.0)
    assert cadence.poll_timeout_s(5.0, 100.0, all_durable=True) == 0, "nothing is waited for before the first tick"
    assert [cadence.start_idle_batch(now) for now in (100.0, 100.1, 99.9 + IDLE_BATCH_S, 100.0 + IDLE_BATCH_S)] == [
        True,
        False,
        False,
        True,
    ]
    cadence.start_batch(200.0)
    assert [cadence.start_idle_batch(now) for now in (199.9 + IDLE_BATCH_S, 200.0 + IDLE_BATCH_S)] == [False, True]


def test_rows_are_waited_for_until_the_tick_and_not_long_while_something_is_to_be_cut() -> None:
    cadence = TriggerTiming(0.0)
    cadence.start_batch(100.0)
    assert cadence.poll_timeout_s(5.0, 101.0, all_durable=True) == 5.0
    assert cadence.poll_timeout_s(5.0, 101.0, all_durable=False) == UNSYNCED_POLL_S
    assert cadence.poll_timeout_s(5.0, 99.0 + IDLE_BATCH_S, all_durable=True) == 1.0
    assert cadence.poll_timeout_s(5.0, 101.0 + IDLE_BATCH_S, all_durable=True) == 0
