"""The decision, as a table and in random lives: whatever crashes, every batch is in Kafka once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.kafka.memory import settings
from towline.kafka.markers import (
    ANY_QUERY,
    NO_BATCH,
    Marker,
    MarkerStep,
    MarkerTotals,
    MarkerVerdict,
    Mismatch,
    TaskRefusal,
    compare_marker,
)
from towline.kafka.markerstore import MarkerStore
from towline.sinks import Task

#: Where the query stops.
STOPS = [found for found in MarkerVerdict if isinstance(found.value, Mismatch)]
HASHES = {7: "h7", 6: "h6"}
BEFORE = Marker(6, 1, rows=10, crc=5, writer="q", offsets="h6")
SAME = replace(BEFORE, batch=7, offsets="h7")
NONE_YET = Marker(NO_BATCH, 1, writer="q")
BY_OTHERS = TaskRefusal(7, "r", 3)
OF_AN_OLD_RUN = TaskRefusal(7, "older", 3)


def found_for(
    marker: Marker | None,
    batch: int = 7,
    parallelism: int = 1,
    run: str | None = "r",
    hashes: Mapping[int, str] = HASHES,
) -> MarkerVerdict:
    """For a task of query q."""
    return compare_marker(marker, Task(0, batch=batch, query="q", run=run), parallelism, hashes)


@pytest.mark.parametrize(
    ("marker", "task", "expected"),
    [
        (None, {"batch": 0}, MarkerVerdict.WRITE),
        (None, {}, MarkerVerdict.NO_MARKER),
        (BEFORE, {}, MarkerVerdict.WRITE),
        (SAME, {}, MarkerVerdict.ALREADY_WRITTEN),
        (replace(BEFORE, batch=5), {}, MarkerVerdict.MARKER_BEHIND),
        (replace(BEFORE, batch=8), {}, MarkerVerdict.MARKER_AHEAD),
        (replace(BEFORE, writer="p"), {}, MarkerVerdict.OTHER_QUERY),
        (Marker(9, 2, writer="p"), {"batch": 0}, MarkerVerdict.WRITE),  # a run that carried nothing
        (Marker(9, 2, writer="p", total_rows=1), {"batch": 0}, MarkerVerdict.OTHER_QUERY),
        (Marker(5, 4, writer="p"), {}, MarkerVerdict.OTHER_QUERY),  # the batch before should be this query's own
        (replace(SAME, writer="p"), {}, MarkerVerdict.OTHER_QUERY),
        (replace(BEFORE, batch=8, writer="p"), {}, MarkerVerdict.OTHER_QUERY),
        (replace(BEFORE, writer=ANY_QUERY), {}, MarkerVerdict.WRITE),
        (BEFORE, {"parallelism": 2}, MarkerVerdict.OTHER_PARALLELISM),
        (SAME, {"parallelism": 2}, MarkerVerdict.OTHER_PARALLELISM),
        (NONE_YET, {"batch": 0, "parallelism": 2}, MarkerVerdict.WRITE),
        (NONE_YET, {"batch": 1}, MarkerVerdict.MARKER_BEHIND),
        (replace(SAME, offsets="other"), {}, MarkerVerdict.OTHER_OFFSETS),
        (replace(BEFORE, offsets="other"), {}, MarkerVerdict.OTHER_OFFSETS),
        (replace(BEFORE, offsets=None), {}, MarkerVerdict.WRITE),
        (replace(BEFORE, offsets="other"), {"hashes": {}}, MarkerVerdict.WRITE),
        (replace(SAME, refused=BY_OTHERS), {}, MarkerVerdict.HALF_WRITTEN),
        (replace(SAME, refused=OF_AN_OLD_RUN), {}, MarkerVerdict.HALF_WRITTEN),
        (replace(BEFORE, refused=BY_OTHERS), {}, MarkerVerdict.TASK_REFUSED),
        (replace(BEFORE, refused=OF_AN_OLD_RUN), {}, MarkerVerdict.WRITE),
        (replace(BEFORE, refused=TaskRefusal(7, None, 3)), {"run": None}, MarkerVerdict.WRITE),
        (replace(BEFORE, refused=TaskRefusal(6, "r", 3)), {}, MarkerVerdict.WRITE),
    ],
)
def test_the_verdict_of_a_marker(marker: Marker | None, task: dict[str, Any], expected: MarkerVerdict) -> None:
    assert found_for(marker, **task) is expected


_OPTIONAL = ("rows", "crc", "writer", "offsets", "dead_lettered", "total_rows", "total_dead_lettered", "refused")
markers = st.builds(Marker, **dict.fromkeys(_OPTIONAL, ...))


@given(markers)
def test_a_marker_comes_back_as_it_was(marker: Marker) -> None:
    assert Marker.from_json(marker.to_json()) == marker


@pytest.mark.parametrize(
    "value",
    [b"", b"x", b"[]", b"{}", b'{"v":2}', b'{"v":1,"batch":1}', SAME.to_json().replace(b'"rows":10', b'"rows":null')],
)
def test_other_json_is_no_marker(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Marker.from_json(value)


def step(before: tuple[int, int] | None, after: tuple[int, int]) -> MarkerStep:
    return MarkerStep(None if before is None else MarkerTotals(*before), MarkerTotals(*after))


@pytest.mark.parametrize(
    ("steps", "over"),
    [
        ([], None),
        ([None], None),
        ([step((1, 0), (5, 2))], step((1, 0), (5, 2))),
        ([step((1, 0), (5, 2)), step((10, 3), (20, 4))], step((11, 3), (25, 6))),
        ([step((1, 0), (5, 2)), None], None),  # it would tell of a part only
        ([step((1, 0), (5, 2)), step(None, (20, 4))], step(None, (25, 6))),
        ([step(None, (5, 2)), step(None, (20, 4))], step(None, (25, 6))),
    ],
)
def test_the_witness_of_a_batch_is_that_of_all_its_partitions_or_none(
    steps: list[MarkerStep | None], over: MarkerStep | None
) -> None:
    assert MarkerStep.sum_partitions(steps) == over


# -- every mismatch is one line that says what happened and names a way out that can be typed --

STORE = MarkerStore(settings(parallelism="4"), "s")
STOPPED = Task(2, batch=7, query="me")
FOUND = Marker(6, 3, rows=1000, writer="you", refused=TaskRefusal(7, "r", 5))


@pytest.mark.parametrize("found", STOPS)
def test_a_line_with_a_way_out(found: MarkerVerdict) -> None:
    error = STORE.mismatch_error(found, None if found is MarkerVerdict.NO_MARKER else FOUND, STOPPED)
    assert error.code == found.value.code
    assert str(error).startswith("sink s on k:9092: ")
    assert "\n" not in str(error)
    assert "{" not in str(error)
    assert any(word in error.remedy for word in ("`towline kafka marker reset --kafka k:9092 --sink s", ".coalesce(1)"))
    assert any(word in error.remedy for word in ("; or", "; else ", "; if it is"))
    assert ("sinkId" in str(error)) == ("towline reset FILE LINE" in str(error))  # it has no sinkId
