"""Every mismatch is one line that says what happened and names a way out that can be typed."""

from __future__ import annotations

import pytest

from towline.kafka.markers import STEPS, Action, Claim, Marker, Situation, TaskRefusal
from towline.kafka.mismatches import MarkerPlace, changed, mismatch

PLACE = MarkerPlace("k:9092", "s", "towline.s.markers", "--kafka k:9092 --sink s")
CLAIM = Claim(batch=7, partition=2, parallelism=4, writer="me")
MARKER = Marker(6, 3, rows=1000, writer="you", refused=TaskRefusal(7, "r", 5))
FAILING = [found for found, step in STEPS.items() if step.action is Action.FAIL]


@pytest.mark.parametrize("found", FAILING)
def test_a_line_with_a_way_out(found: Situation) -> None:
    error = mismatch(found, None if found is Situation.MISSING else MARKER, CLAIM, PLACE)
    assert error.code == STEPS[found].code
    assert str(error).startswith("sink s on k:9092: ")
    assert "\n" not in str(error)
    assert "{" not in str(error)
    assert any(word in error.do for word in ("`towline kafka marker reset --kafka k:9092 --sink s", ".coalesce(1)"))
    assert any(word in error.do for word in ("; or", "; else ", "; if it is"))
    assert ("sinkId" in str(error)) == ("towline run FILE --begin-again LINE" in str(error))  # it has no sinkId


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (Situation.FOREIGN, "query you, this is query me"),
        (Situation.RESCALED, "parallelism 3, now it is 4"),
        (Situation.TORN, "1,000 rows"),
        (Situation.AHEAD, "says batch 6, Spark runs batch 7"),
        (Situation.MISSING, "towline.s.markers"),
    ],
)
def test_it_names_what_differs(found: Situation, word: str) -> None:
    assert word in mismatch(found, MARKER, CLAIM, PLACE).what


def test_other_rows_are_counted() -> None:
    assert "900 rows, 1,000 were written" in changed(MARKER, 900, CLAIM, PLACE).what
    assert "1,000 rows, but not the same" in changed(MARKER, 1000, CLAIM, PLACE).what
    assert changed(MARKER, 900, CLAIM, PLACE).code == "TL-K16"
