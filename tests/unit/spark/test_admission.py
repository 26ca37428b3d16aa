"""How a batch is shared among gateways: fair, within its limits, and nobody starves."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.spark.gateways import Offer, admit, fitting

OFFERS = st.lists(
    st.integers(0, 1_000).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(rows, rows * 500))),
    min_size=1,
    max_size=12,
)


def taken(offers: list[Offer], max_rows: int | None, max_bytes: int | None) -> list[Offer]:
    """What the batch takes, as far as rows of one size could be cut."""
    made = []
    for (rows, size), cap in zip(offers, admit(offers, max_rows, max_bytes), strict=True):
        most_rows, most_bytes = cap or (None, None)
        got = min(rows, rows if most_rows is None else most_rows)
        made.append((got, min(size * got // max(rows, 1), size if most_bytes is None else most_bytes)))
    return made


@pytest.mark.parametrize(
    ("waiting", "limit", "wanted"),
    [
        ([5, 100, 100], 105, [5, 50, 50]),
        ([5, 100, 100], 31, [5, 13, 13]),
        ([0, 3, 0], 10, [0, 3, 0]),
        ([7, 8], None, [7, 8]),
    ],
)
def test_little_is_taken_whole_and_the_rest_is_even(waiting: list[int], limit: int | None, wanted: list[int]) -> None:
    offers = [(rows, 10 * rows) for rows in waiting]
    assert [rows for rows, _ in taken(offers, limit, None)] == wanted
    assert [size for _, size in taken(offers, None, limit and 10 * limit)] == [10 * rows for rows in wanted]


@given(OFFERS, st.integers(20, 3_000), st.integers(20, 200_000))
def test_shares_are_max_min(offers: list[Offer], max_rows: int, max_bytes: int) -> None:
    got = taken(offers, max_rows, max_bytes)
    assert sum(rows for rows, _ in got) <= max_rows
    assert sum(size for _, size in got) <= max_bytes
    caps = {cap for cap in admit(offers, max_rows, max_bytes) if cap is not None}
    assert len(caps) <= 1, "all that are cut may have the same"
    parts = [max(Fraction(rows, max_rows), Fraction(size, max_bytes)) for rows, size in offers]
    cut = [part for part, cap in zip(parts, admit(offers, max_rows, max_bytes), strict=True) if cap is not None]
    whole = [part for part, cap in zip(parts, admit(offers, max_rows, max_bytes), strict=True) if cap is None]
    if cut:
        level = (1 - sum(whole)) / len(cut)
        assert max(whole, default=0) <= level < min(cut), "who is taken whole has no more than the others"
        assert caps == {(max(1, int(max_rows * level)), max(1, int(max_bytes * level)))}, "and they all that is left"
    else:
        assert sum(parts) <= 1


def test_the_least_that_is_asked_for_is_one_row() -> None:
    """A gateway gives one at least; what fits is decided then."""
    assert admit([(100, 1_000), (1, 10)], 1, None) == [(1, None), (1, None)]


def test_without_limits_all_is_taken() -> None:
    assert admit([(5, 500), (0, 0)], None, None) == [None, None]


@given(OFFERS, st.integers(1, 300), st.integers(1, 20_000), st.integers(0, 20))
def test_what_fits_is_taken_and_the_first_whatever_its_size(
    offers: list[Offer], max_rows: int, max_bytes: int, turn: int
) -> None:
    fits = [offer for offer, fit in zip(offers, fitting(offers, turn, max_rows, max_bytes), strict=True) if fit]
    within = sum(rows for rows, _ in fits) <= max_rows and sum(size for _, size in fits) <= max_bytes
    assert within or len([rows for rows, _ in fits if rows]) == 1
    assert fits


@given(st.integers(1, 12), st.integers(1, 50))
def test_nobody_starves(gateways: int, limit: int) -> None:
    """Whoever waits gets something within as many batches as there are gateways, however small the limit is."""
    rounds = [fitting([(1, 1)] * gateways, turn, limit, None) for turn in range(gateways)]
    assert all(any(fits[one] for fits in rounds) for one in range(gateways))
    assert all(sum(fits) == min(limit, gateways) for fits in rounds), "the limit is used up, or everything is"


def test_a_huge_message_has_its_turn() -> None:
    offers = [(1, 10), (1, 1_000), (1, 10)]
    assert [fitting(offers, turn, None, 100)[1] for turn in range(3)] == [False, True, False]
