"""How a batch is shared among gateways: fair, within its limits, and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.spark.planning import Offer, admit, fitting, shares

WAITING = st.lists(st.integers(0, 10_000), min_size=1, max_size=12)
OFFERS = st.lists(
    st.integers(0, 1_000).flatmap(lambda rows: st.builds(Offer, st.just(rows), st.integers(rows, rows * 500))),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize(
    ("waiting", "limit", "wanted"),
    [
        ([5, 100, 100], 105, [5, 50, 50]),
        ([5, 100, 100], 30, [5, 13, 12]),
        ([0, 3, 0], 10, [0, 3, 0]),
        ([100, 1], 1, [1, 0]),
        ([7, 8], None, [7, 8]),
        ([7, 8], 0, [0, 0]),
    ],
)
def test_little_is_taken_whole_and_the_rest_is_even(waiting: list[int], limit: int | None, wanted: list[int]) -> None:
    assert shares(waiting, limit) == wanted


@given(WAITING, st.integers(0, 50_000), st.integers(0, 100))
def test_shares_are_max_min(waiting: list[int], limit: int, turn: int) -> None:
    given_ = shares(waiting, limit, turn)
    assert sum(given_) == min(limit, sum(waiting)), "the limit is used up, or everything is"
    assert all(got <= wants for got, wants in zip(given_, waiting, strict=True))
    short = [got for got, wants in zip(given_, waiting, strict=True) if got < wants]
    if short:  # whoever got less than it wants got as much as anybody, but for what can't be divided
        assert max(given_) - min(short) <= 1


@given(WAITING, st.integers(1, 50))
def test_nobody_starves(waiting: list[int], limit: int) -> None:
    """Whoever waits gets something within as many batches as there are gateways, however small the limit is."""
    rounds = [shares(waiting, limit, turn) for turn in range(len(waiting))]
    for one, wants in enumerate(waiting):
        assert not wants or any(given_[one] for given_ in rounds)


@given(OFFERS, st.integers(1, 3_000), st.integers(1, 200_000), st.integers(0, 20))
def test_both_limits_hold_and_one_is_used_up(offers: list[Offer], max_rows: int, max_bytes: int, turn: int) -> None:
    grants = admit(offers, max_rows, max_bytes, turn)
    got = [Offer(o.rows, None) if grant is None else grant for grant, o in zip(grants, offers, strict=True)]
    assert all(a.rows <= o.rows for a, o in zip(got, offers, strict=True))
    assert sum(a.rows for a in got) <= max_rows
    sizes = [
        -(-(o.size or 0) * a.rows // o.rows) if o.rows and a.size is None else a.size or 0
        for a, o in zip(got, offers, strict=True)
    ]
    assert sum(sizes) <= max_bytes
    everything = sum(o.rows for o in offers)
    assert sum(a.rows for a in got) == min(max_rows, everything), "rows are shared first"
    assert all(a.size is None for a in got) or sum(sizes) == max_bytes, "or bytes are used up"


def test_without_limits_all_is_taken() -> None:
    assert admit([Offer(5, 500), Offer(0, 0)], None, None) == [None, None]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(1, 200), st.integers(0, 20))
def test_what_fits_is_taken_and_the_first_whatever_its_size(sizes: list[int], limit: int, turn: int) -> None:
    taken = fitting(sizes, limit, turn)
    total = sum(size for size, fits in zip(sizes, taken, strict=True) if fits)
    assert not any(fits and not size for size, fits in zip(sizes, taken, strict=True))
    assert total <= limit or sum(taken) == 1
    assert any(taken) or not any(sizes)


def test_a_huge_message_has_its_turn() -> None:
    sizes = [10, 1_000, 10]
    assert [fitting(sizes, 100, turn)[1] for turn in range(3)] == [False, True, False]
