"""A bound of a row's offset is never above it, and the bytes below a row only grow."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from towline.landing.places import Place, RowPlaces

_transactions = st.lists(
    st.tuples(st.integers(1, 700), st.integers(0, 5), st.integers(1, 5000)), min_size=1, max_size=60
)


@given(_transactions, st.data())
def test_bounds_hold_for_any_history(history: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Transactions of so many rows, with so many offsets of aborted ones before them, and so many bytes."""
    places, at, below = RowPlaces(), 0, 0
    true: list[int] = []
    end = Place(0, 0, 0)
    for count, aborted, size in history:
        places.note(end)
        at += aborted
        true += range(at, at + count)
        at += count + 1
        below += size
        end = Place(end.row + count, end.offset + count + 1, below)
    rows = len(true)
    for _ in range(3):
        row = data.draw(st.integers(0, rows - 1))
        places.learn(row, true[row])
        floor = data.draw(st.integers(0, row))
        kept = RowPlaces(json.loads(json.dumps(places.as_json())))
        kept.forget(floor)
        assert all(kept.offset_of(n) <= true[n] for n in range(floor, rows, 7))
        sizes = [kept.bytes_below(n, end) for n in range(floor, rows + 1, 7)]
        assert sizes == sorted(sizes)
        assert kept.bytes_below(rows, end) == below
        reached = kept.row_at(kept.bytes_below(row, end), end)
        assert floor <= row
        assert reached <= rows


def test_a_long_history_takes_little() -> None:
    places = RowPlaces()
    for row in range(0, 10_000_000, 300):
        places.note(Place(row, row + row // 300, row * 100))
    assert len(places.as_json()) <= 512
    assert places.offset_of(9_999_000) <= 9_999_000 + 9_999_000 // 300
    assert places.offset_of(9_999_000) > 9_500_000
