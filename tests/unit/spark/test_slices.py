"""The partitions of a batch: each gateway's range in proportion to its rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.spark.offsets import JournalPosition, SourceOffset
from towline.spark.reader import partition_sizes, ranges_between


@pytest.mark.parametrize(
    ("rows", "wanted", "most", "parts"),
    [
        ([10], None, None, [[10]]),
        ([10], 3, None, [[3, 3, 4]]),  # the last one takes what can't be divided
        ([10, 10], 2, None, [[10], [10]]),
        ([10, 10], 1, None, [[10], [10]]),
        ([100, 1], 4, None, [[33, 33, 34], [1]]),  # a small one stays whole
        ([1, 1, 98], 5, None, [[1], [1], [32, 33, 33]]),
        ([2], 10, None, [[1, 1]]),
        ([10], None, 4, [[3, 3, 4]]),
        ([10, 3], None, 4, [[3, 3, 4], [3]]),
        ([10, 10], 3, 10, [[5, 5], [5, 5]]),
        ([10], 2, 3, [[2, 2, 3, 3]]),
    ],
)
def test_ranges_are_cut(rows: list[int], wanted: int | None, most: int | None, parts: list[list[int]]) -> None:
    assert partition_sizes(rows, wanted, most) == parts


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=6),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1_000, 50_000),
)
def test_every_row_is_in_one_part(rows: list[int], wanted: int | None, most: int | None) -> None:
    parts = partition_sizes(rows, wanted, most)
    assert [sum(part) for part in parts] == rows
    assert all(size >= 1 for part in parts for size in part)
    assert most is None or all(size <= most for part in parts for size in part)
    assert partition_sizes(rows, wanted, most) == parts, "the same for a replay"
    if wanted is not None and sum(rows) >= 100 * wanted:
        assert sum(map(len, parts)) >= min(wanted, len(rows)), "a hint, but no less than one each"


def place(name: str, offset: int) -> JournalPosition:
    return JournalPosition(name, f"journal of {name}", offset)


def test_who_comes_or_goes_has_no_rows_in_that_batch() -> None:
    start = SourceOffset((place("a", 5), place("gone", 7), place("idle", 3)))
    end = SourceOffset((place("new", 100), place("a", 9), place("idle", 3)))
    assert ranges_between(start, end) == [(5, place("a", 9))]
