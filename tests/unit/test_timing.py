"""Durations in buckets: each in the first whose bound it does not pass, and the sum of all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.timing import BATCH_BUCKETS, Histogram, poll_until

DURATIONS = st.lists(st.floats(0, 1e4))


@given(DURATIONS)
def test_each_duration_is_in_one_bucket(durations: list[float]) -> None:
    histogram = Histogram(BATCH_BUCKETS)
    for seconds in durations:
        histogram.observe(seconds)
    assert histogram.count == len(durations)
    assert histogram.seconds == pytest.approx(sum(durations))
    for at, bound in enumerate(BATCH_BUCKETS):  # as Prometheus counts: all that take no longer than the bound
        assert sum(histogram.counts[: at + 1]) == sum(seconds <= bound for seconds in durations)


def test_a_look_up_is_waited_for_until_it_is_true_or_over() -> None:
    answers, pauses = [0, 0, 7], list[float]()
    assert poll_until(lambda: answers.pop(0), 60, pauses.append) == 7
    assert len(pauses) == 2
    assert poll_until(lambda: 0, 60, lambda _: True) == 0, "whoever waits may say that it is over"
    assert poll_until(lambda: 0, 0.0, lambda _: pytest.fail("the time is over")) == 0
