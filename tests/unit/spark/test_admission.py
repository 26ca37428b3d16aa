"""How a batch is shared among gateways: fair, within its limits, and nobody starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.gateway.identity import JournalPosition
from towline.spark.gateways import PollResult, share_limits

#: Rows that wait at each gateway, and the bytes of one.
Waiting = Sequence[tuple[int, int]]
WAITING = st.lists(st.tuples(st.integers(1, 1_000), st.integers(1, 500)), min_size=1, max_size=12)
PLACE = JournalPosition("g", "j", 0)


def shared(
    waiting: Waiting, max_rows: int | None, max_bytes: int | None, left_out: Mapping[int, int] | None = None
) -> dict[int, PollResult]:
    """What the batch takes of each gateway; each was asked for as much as the whole batch could take."""

    def ask(one: int, rows: int | None, size: int | None) -> PollResult:
        count, each = waiting[one]
        most = [count, *(limit for limit in (rows, size and size // each) if limit is not None)]
        got = max(1, min(most))
        return PollResult(got, got * each, PLACE, count)

    offers = {one: ask(one, max_rows, max_bytes) for one in range(len(waiting))}
    return share_limits(offers, left_out or {}, (max_rows, max_bytes), ask)


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=12), st.integers(12, 3_000))
def test_shares_are_max_min(waiting: list[int], limit: int) -> None:
    taken = shared([(count, 1) for count in waiting], limit, None)
    rows = [taken[one].rows for one in range(len(waiting))]
    assert sum(rows) == min(sum(waiting), limit), "what is allowed is used"
    cut = [got for got, count in zip(rows, waiting, strict=True) if got < count]
    whole = [got for got, count in zip(rows, waiting, strict=True) if got == count]
    if cut:
        assert max(cut) - min(cut) <= 1, "all that are cut have the same, but for what can't be divided"
        assert max(whole, default=0) <= min(cut) + 1, "who is taken whole has no more than the others"


@given(WAITING, st.integers(1, 3_000), st.integers(1, 200_000))
def test_both_limits_hold_and_the_first_is_taken_whatever_its_size(
    waiting: list[tuple[int, int]], max_rows: int, max_bytes: int
) -> None:
    taken = shared(waiting, max_rows, max_bytes)
    within = (
        sum(one.rows for one in taken.values()) <= max_rows and sum(one.size for one in taken.values()) <= max_bytes
    )
    assert within or [one.rows for one in taken.values()] == [1]
    assert taken


@given(WAITING, st.integers(1, 50), st.integers(1, 2_000))
def test_nobody_starves(waiting: list[tuple[int, int]], max_rows: int, max_bytes: int) -> None:
    """Whoever waits gets something within as many batches as there are gateways, however small the limits are."""
    left_out: Counter[int] = Counter()
    for _ in range(30):
        taken = shared(waiting, max_rows, max_bytes, left_out)
        left_out = Counter({one: left_out[one] + 1 for one in range(len(waiting)) if one not in taken})
        assert max(left_out.values(), default=0) < len(waiting)


def test_a_huge_message_has_its_turn() -> None:
    waiting = [(1, 10), (1, 1_000), (1, 10)]
    assert set(shared(waiting, None, 100)) == {0, 2}
    assert set(shared(waiting, None, 100, {1: 1})) == {1}


def test_one_that_has_gone_meanwhile_has_no_part() -> None:
    offers = {one: PollResult(100, 1_000, PLACE, 100) for one in "ab"}
    taken = share_limits(
        offers, {}, (100, None), lambda one, rows, _: None if one == "a" else PollResult(rows or 0, 0, PLACE, 100)
    )
    assert {one: offer.rows for one, offer in taken.items()} == {"b": 100}


def test_one_alone_is_not_asked_again() -> None:
    """It was asked for what the whole batch may have, and a frame more than the limit is what there is."""
    offer = PollResult(7, 1_005, PLACE, 100)
    assert share_limits({"a": offer}, {}, (10, 1_000), lambda *_: pytest.fail("it is asked")) == {"a": offer}
