"""Sets of numbers that fill up from below, against plain sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from towline.journal.ranges import Ranges

TOP = 30
NUMBERS = st.sets(st.integers(0, TOP - 1))


def ranges_of(watermark: int, numbers: set[int]) -> tuple[Ranges, set[int]]:
    ranges = Ranges(watermark)
    for number in numbers:
        ranges.add(number)
    return ranges, numbers | set(range(watermark))


@given(st.integers(0, TOP), NUMBERS, st.integers(0, TOP), st.integers(0, TOP))
def test_what_is_missing_is_what_is_not_there(watermark: int, numbers: set[int], start: int, end: int) -> None:
    ranges, model = ranges_of(watermark, numbers)
    missing = ranges.missing(start, end)
    assert [n for s, e in missing for n in range(s, e)] == [n for n in range(start, end) if n not in model]
    assert all(s < e for s, e in missing)
    assert ranges.end == max(model, default=-1) + 1


@given(st.integers(0, TOP), NUMBERS, st.integers(0, TOP))
def test_a_number_touches_where_it_makes_no_further_range(watermark: int, numbers: set[int], number: int) -> None:
    ranges, _ = ranges_of(watermark, numbers)
    before = ranges.range_count
    touches = ranges.is_adjacent(number)
    ranges.add(number)
    assert touches == (ranges.range_count <= before)


@given(st.integers(0, TOP), NUMBERS, st.integers(0, TOP), NUMBERS)
def test_two_sets_become_one_and_a_copy_stays_as_it_was(
    watermark: int, numbers: set[int], others_watermark: int, others: set[int]
) -> None:
    ranges, model = ranges_of(watermark, numbers)
    more, more_model = ranges_of(others_watermark, others)
    copy = ranges.copy()
    ranges.unite(more)
    assert {n for n in range(TOP) if n in ranges} == {n for n in model | more_model if n < TOP}
    assert {n for n in range(TOP) if n in copy} == {n for n in model if n < TOP}
    assert {n for n in range(TOP) if n in more} == {n for n in more_model if n < TOP}


@given(st.lists(st.tuples(st.integers(0, TOP), st.integers(0, 8)), max_size=40), st.integers(0, TOP))
def test_ranges_are_a_set(added: list[tuple[int, int]], watermark: int) -> None:
    ranges, model = Ranges(watermark), set(range(watermark))
    for start, length in [*added, *added[::3]]:  # a second time changes nothing
        ranges.add(start, start + length)
        model |= set(range(start, start + length))
    assert {n for start, end in ranges.ranges for n in range(start, end)} == model
    assert all(lower[1] < upper[0] for lower, upper in pairwise(ranges.ranges))
    assert ranges.watermark not in model
    assert ranges.count() == len(model)
    assert Ranges(ranges.watermark, ranges.ranges_above()).ranges == ranges.ranges
