"""Map from received numbers to the incarnation that assigned them, bounded."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.delivery.receipts.marks import KEYS, NOW, opened
from towline.delivery.receipts.ledger import MarkVerdict, ReceiptLedger
from towline.delivery.receipts.payload import IncarnationMap, are_same_messages


def test_incarnations_are_forgotten_below_low_and_bounded_above() -> None:
    incarnations = IncarnationMap()
    assert all(incarnations.record(number, f"{number:x}", is_newest=True, low=number) for number in range(100))
    assert len(incarnations.steps()) == 8
    assert (incarnations.incarnation_of(50), incarnations.incarnation_of(99)) == (None, "63")
    ledger = ReceiptLedger({}, 0, keys=KEYS)
    verdicts = [ledger.record_mark(opened(number, f"{number:x}"), NOW) for number in range(200)]
    assert verdicts.count(MarkVerdict.NEW) == 128
    assert verdicts.count(MarkVerdict.DEFERRED) == ledger.counts["deferred"] == 72


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc"))))
@example([(1, "a"), (9, "a"), (4, "b"), (5, "a"), (2, "b"), (3, "a")])
@example([(2, "a"), (9, "a"), (5, "b"), (4, "b"), (3, "c")])
def test_incarnations_are_a_map_of_what_was_received(puts: list[tuple[int, str]]) -> None:
    incarnations, model = IncarnationMap(), dict[int, str]()
    for number, name in puts:
        assert incarnations.record(number, name, is_newest=number >= max(model, default=-1), low=0)
        model[number] = name
        assert {n: incarnations.incarnation_of(n) for n in model} == model
        names = [name for _, name in incarnations.steps()]
        assert all(one != next_one for one, next_one in pairwise(names)), (
            "a step for each change, there is room for few"
        )
        assert IncarnationMap(incarnations.steps()).steps() == incarnations.steps()


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10)), max_size=3),
)
def test_a_gateway_has_the_messages_of_a_publisher_if_each_number_is_of_the_same_incarnation(
    own: list[str], steps: list[tuple[int, str]], ranges: list[tuple[int, int]]
) -> None:
    own = sorted(own)  # the numbers of an incarnation have no others between them
    steps = sorted(dict(steps).items())
    ranges = [(start, min(end, len(own))) for start, end in ranges]
    numbers = [number for start, end in ranges for number in range(start, end)]
    incarnations = IncarnationMap(steps)
    expected = all(incarnations.incarnation_of(number) == own[number] for number in numbers)
    assert are_same_messages(steps, ranges, own.__getitem__) is expected


@pytest.mark.parametrize(
    ("steps", "same"),
    [
        (((0, "a"), (5, "b")), True),
        (((0, "a"), (4, "b")), False),
        (((0, "a"), (6, "b")), False),
        (((0, "a"), (5, "b"), (9, "c")), True),  # nobody asks about 9
        (((1, "a"), (5, "b")), False),  # what is below is not known any more
    ],
)
def test_a_directory_restored_from_a_copy_differs_from_its_original(
    steps: tuple[tuple[int, str], ...], same: bool
) -> None:
    assert are_same_messages(steps, [(0, 3), (4, 9)], lambda number: "aaaaabbbb"[number]) is same
    assert are_same_messages(steps, [(3, 3)], lambda number: "aaaaabbbb"[number])
