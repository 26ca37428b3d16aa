"""Which opening gave out a number: a map of what was received, bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.delivery.receipts.marks import KEYS, NOW, opened
from towline.delivery.receipts.ledger import Ledger, MarkVerdict
from towline.delivery.receipts.openings import Openings


def test_openings_are_forgotten_below_low_and_bounded_above() -> None:
    openings = Openings()
    assert all(openings.put(number, f"{number:x}", newest=True, low=number) for number in range(100))
    assert len(openings.steps()) == 8
    assert (openings.of(50), openings.of(99)) == (None, "63")
    ledger = Ledger({}, 0, keys=KEYS)
    verdicts = [ledger.take(opened(number, f"{number:x}"), NOW) for number in range(200)]
    assert verdicts.count(MarkVerdict.NEW) == 128
    assert verdicts.count(MarkVerdict.DEFERRED) == ledger.deferred == 72


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc"))))
def test_openings_are_a_map_of_what_was_received(puts: list[tuple[int, str]]) -> None:
    openings, model = Openings(), dict[int, str]()
    for number, name in puts:
        assert openings.put(number, name, newest=number >= max(model, default=-1), low=0)
        model[number] = name
        assert {n: openings.of(n) for n in model} == model
        assert Openings(openings.steps()).steps() == openings.steps()
