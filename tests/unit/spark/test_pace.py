"""How large the next batch is: never larger than Kafka can take in time, and soon as large as it may be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.kafka.memory import columns, settings
from towline.kafka.producers import longer_timeouts
from towline.kafka.recordcheck import RecordCheck
from towline.spark.batching import (
    FIRST_BATCH_BYTES,
    LATENCY_S,
    MAX_GROWTH,
    MIN_LIMIT_BYTES,
    BatchByteLimit,
    WriteThroughput,
)

BUDGET_S = 15.0
FULL = 64 << 20
#: The longest transaction of a cluster as it is installed.
LONGEST_S = 900.0
sizes = st.integers(1, 1 << 30)
limits = st.integers(MIN_LIMIT_BYTES, 1 << 30)
times = st.floats(0.001, 10_000)


def behind(before: int, size: int, seconds: float, budget_s: float = BUDGET_S) -> int:
    """The limit behind a batch of that size, which might have had `before` bytes."""
    notes = iter([None, WriteThroughput(0, size, seconds, budget_s)])
    limit = BatchByteLimit(lambda: next(notes))
    limit.max_bytes = before
    limit.record_planned(size)
    return limit.next_limit() or 0


@given(limits, sizes, times, st.floats(1.0, 900.0))
def test_a_batch_grows_by_a_factor_at_most_and_has_no_more_than_its_budget_takes(
    before: int, size: int, seconds: float, budget_s: float
) -> None:
    after = behind(before, size, seconds, budget_s)
    assert MIN_LIMIT_BYTES <= after <= max(before, MAX_GROWTH * size)
    if seconds > LATENCY_S and after > MIN_LIMIT_BYTES:
        assert after * (seconds - LATENCY_S) / size <= budget_s * 1.001


def batches(rate: float, waiting: int, latency_s: float = 0.1) -> Iterator[tuple[int, float]]:
    """Size and time of each batch of a backlog, with a Kafka that takes so many bytes a second."""
    note: WriteThroughput | None = None
    limit = BatchByteLimit(lambda: note)
    for batch in range(1000):
        size = min(waiting, FULL, limit.next_limit() or FULL)
        if not size:
            return
        waiting, seconds = waiting - size, latency_s + size / rate
        yield size, seconds
        limit.record_planned(size)
        note = WriteThroughput(batch, size, seconds, BUDGET_S)


@given(st.floats(1_200, 1e9))
def test_no_batch_is_planned_that_kafka_can_not_take_in_time(rate: float) -> None:
    taken = list(batches(rate, 20 << 20))
    assert taken[0][0] <= FIRST_BATCH_BYTES
    assert all(seconds < LONGEST_S for _, seconds in taken)
    assert rate < 100e6 or [size for size, _ in taken[:2]] == [FIRST_BATCH_BYTES, MAX_GROWTH * FIRST_BATCH_BYTES]
    assert all(seconds <= MAX_GROWTH * (BUDGET_S + LATENCY_S) for _, seconds in taken[1:] if rate > 10_000)


def test_a_limit_goes_on_from_the_note_of_the_run_before() -> None:
    note = WriteThroughput(7, 400_000, 11.0, BUDGET_S)
    assert note.rate == 40_000
    assert BatchByteLimit(lambda: note).next_limit() == 40_000 * 15
    fast = note._replace(seconds=0.1)
    assert fast.rate is None
    assert BatchByteLimit(lambda: fast).next_limit() == FIRST_BATCH_BYTES
    failed = WriteThroughput(7, 0, BUDGET_S, BUDGET_S)
    assert failed.rate == 0
    assert BatchByteLimit(lambda: failed).next_limit() == FIRST_BATCH_BYTES


# -- how long a transaction may take --


def allowed_s(rate: float | None, size: int, longest_ms: int = 900_000) -> float | None:
    longer = longer_timeouts(settings(), size, rate, lambda: longest_ms)
    assert longer.get("message.timeout.ms") == longer.get("transaction.timeout.ms")
    return int(longer["message.timeout.ms"]) / 1000 if longer else None


@given(sizes, st.floats(100, 1e9))
def test_a_transaction_has_the_time_that_its_bytes_take(size: int, rate: float) -> None:
    allowed = allowed_s(rate, size) or 60.0
    assert 60 <= allowed <= LONGEST_S
    assert allowed == LONGEST_S or allowed > 1.4 * size / rate


def test_a_transaction_is_lengthened_only_where_it_must_be() -> None:
    assert allowed_s(None, 64 << 20) is None
    assert allowed_s(None, 1 << 30) == 444.0
    assert allowed_s(40_000, 6_000_000) == 285.0
    assert allowed_s(40_000, 6_000_000, 60_000) is None


@pytest.mark.parametrize(
    ("rate", "usual", "asked"),
    [
        (5e6, "1000000", {}),
        (40_000, "1000000", {"batch.size": "65536"}),
        (9_000, "10000", {}),
    ],
)
def test_a_slow_kafka_is_sent_smaller_requests(rate: float | None, usual: str, asked: dict[str, str]) -> None:
    of = settings(kafka__batch__size=usual)
    assert RecordCheck(of, columns(of), "s").batch_settings(rate) == asked
