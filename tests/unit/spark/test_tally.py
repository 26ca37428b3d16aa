"""Dead letters are counted once, whatever is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from towline.checkpoint import Checkpoint
from towline.errors import JournalError
from towline.kafka.markers import MarkerStep, MarkerTotals
from towline.spark import tally
from towline.spark.sink_note import SinkBatch, SinkSums
from towline.spark.tally import (
    given,
    given_at,
    note_empty,
    noted,
    noted_last,
    said_at,
    served_empty,
    sum_at,
    took_at,
)


def test_a_batch_that_is_served_empty_is_counted_once(tmp_path: Path) -> None:
    place = Checkpoint(str(tmp_path))
    for batch, letters in ((0, 2), (1, 0), (2, 5), (2, 5), (3, 1), (3, 0)):  # the last: its topic was made meanwhile
        noted(place, batch, letters)
    assert [sum_at(place, batch) for batch in range(5)] == [2, 2, 7, 7, 7]


def test_only_the_newest_batches_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "_KEPT", 4)
    place = Checkpoint(str(tmp_path))
    for batch in range(tally._KEPT + 5):
        noted(place, batch, 2)
    assert sum_at(place, batch) == 2 * (tally._KEPT + 5)
    assert len(tally._read(place)) == tally._KEPT


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sums":[[1]]}', '{"sums":7}'])
def test_a_note_of_somebody_else_counts_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / tally._NAME).write_text(text)
    place = Checkpoint(str(tmp_path))
    assert sum_at(place, 9) == 0
    noted(place, 4, 2)
    assert sum_at(place, 9) == 2


def test_a_note_that_can_not_be_read_begins_no_new_sum(tmp_path: Path) -> None:
    (tmp_path / tally._NAME).mkdir()
    with pytest.raises(JournalError, match=r"towline.letters: the sum of dead letters can't be read .*TL-J20"):
        noted(Checkpoint(str(tmp_path)), 4, 2)


def test_where_the_checkpoint_is_elsewhere_nothing_is_noted() -> None:
    place = Checkpoint("hdfs://nowhere/ck")
    noted(place, 1, 1)
    assert sum_at(place, 1) == 0


def test_the_rows_of_a_batch_that_is_served_empty_are_those_of_its_last_run(tmp_path: Path) -> None:
    place = Checkpoint(str(tmp_path))
    for batch, rows in ((0, 5), (1, 0), (2, 7), (2, 3), (3, 4)):
        given(place, batch, rows)
    assert [given_at(place, batch) for batch in range(5)] == [5, 0, 3, 4, None]
    given(place, 3, None)  # Kafka had it, so the sink did not look at all of them
    assert given_at(place, 3) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows":[[1]]}', '{"rows":7}'])
def test_rows_that_a_power_failure_took_are_not_known(tmp_path: Path, text: str) -> None:
    (tmp_path / tally._ROWS).write_text(text)
    place = Checkpoint(str(tmp_path))
    assert given_at(place, 1) is None
    given(place, 1, 2)
    assert given_at(place, 1) == 2


def test_what_the_transactions_of_a_batch_took_is_that_of_its_last_run(tmp_path: Path) -> None:
    place = Checkpoint(str(tmp_path))
    for batch, seconds in ((0, [0.5]), (1, []), (2, [0.25, 2.0]), (2, [0.125])):
        given(place, batch, None, seconds=seconds)
    assert [took_at(place, batch) for batch in range(4)] == [[0.5], [], [0.125], []]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"times":[[1]]}', '{"times":7}', '{"times":[[1,["x"]]]}'])
def test_times_that_a_power_failure_took_are_not_known(tmp_path: Path, text: str) -> None:
    (tmp_path / tally._ROWS).write_text(text)
    place = Checkpoint(str(tmp_path))
    assert took_at(place, 1) == []
    given(place, 1, None, seconds=[2.0])
    assert took_at(place, 1) == [2.0]


def said(given: int, acknowledged: int | None = None, **more: Any) -> SinkBatch:
    return SinkBatch(given, given if acknowledged is None else acknowledged, **more)


def test_what_became_of_the_rows_is_summed_and_a_batch_that_runs_again_counts_once(tmp_path: Path) -> None:
    place = Checkpoint(str(tmp_path))
    for batch, one in (
        (0, said(5)),
        (1, said(4, 3, dead_lettered=1)),
        (1, said(4, 3, dead_lettered=1)),
        (2, said(2, 0, lost=2)),
    ):
        given(place, batch, one.given, one)
    sums, own = said_at(place, 2) or pytest.fail("nothing")
    assert sums == SinkSums(0, given=11, acknowledged=8, dead_lettered=1, lost=2, again=3)
    assert (own.given, own.lost, own.again) == (2, 2, 0)
    assert said_at(place, 3) is None
    last = noted_last(place)
    assert last is not None
    assert (last.batch, last.sums) == (2, sums)


def test_sums_begin_anew_behind_a_batch_that_was_not_noted(tmp_path: Path) -> None:
    """A note of before a power failure, or of a version that noted none."""
    place = Checkpoint(str(tmp_path))
    given(place, 0, 5, said(5))
    given(place, 1, 6)
    given(place, 2, 7, said(7))
    assert said_at(place, 2) == (SinkSums(2, 7, 7), SinkSums(2, 7, 7))
    assert given_at(place, 1) == 6


def test_only_the_newest_sums_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "_SUMS_KEPT", 3)
    place = Checkpoint(str(tmp_path))
    for batch in range(9):
        given(place, batch, 2, said(2))
    sums, own = said_at(place, 8) or pytest.fail("nothing")
    assert (sums.since, sums.given, own.given) == (0, 18, 2)
    assert [said_at(place, batch) is not None for batch in (5, 6, 7)] == [False, False, True]


def test_markers_are_held_against_where_the_batch_before_left_them(tmp_path: Path) -> None:
    place = Checkpoint(str(tmp_path))
    first = MarkerStep(None, MarkerTotals(5, 0))
    given(place, 0, 5, said(5, marks=first, sink="s/1"))
    given(place, 1, 5, said(5, marks=MarkerStep(MarkerTotals(12, 1), MarkerTotals(17, 1)), sink="s/1"))
    sums, _ = said_at(place, 1) or pytest.fail("nothing")
    assert (sums.drift, sums.drift_dead) == (7, 1)
    other, anew = MarkerStep(MarkerTotals(0, 0), MarkerTotals(5, 0)), MarkerStep(None, MarkerTotals(9, 9))
    for batch, marks in ((2, other), (3, anew)):  # of another sink, and where there was no marker
        given(place, batch, 5, said(5, marks=marks, sink="s.2/1"))
        sums, _ = said_at(place, batch) or pytest.fail("nothing")
        assert (sums.drift, sums.drift_dead) == (7, 1)


def test_a_batch_that_the_marker_skipped_was_not_written_again(tmp_path: Path) -> None:
    place = Checkpoint(str(tmp_path))
    step = MarkerStep(None, MarkerTotals(5, 0))
    for _ in range(2):
        given(place, 0, 5, said(5, marks=step, sink="s/1"))
    sums, _ = said_at(place, 0) or pytest.fail("nothing")
    assert sums.again == 0


@pytest.mark.parametrize("text", ["", "[]", '{"sums":[[1]]}', '{"sums":7}', '{"sums":[[1,["x"],null,""]]}'])
def test_sums_that_a_power_failure_took_are_not_known(tmp_path: Path, text: str) -> None:
    (tmp_path / tally._ROWS).write_text(text)
    place = Checkpoint(str(tmp_path))
    assert said_at(place, 1) is None
    assert noted_last(place) is None


def test_a_batch_is_served_empty_until_it_is_served_again(tmp_path: Path) -> None:
    place = Checkpoint(str(tmp_path))
    for batch, empty in ((3, True), (5, True), (7, False)):
        note_empty(place, batch, empty=empty)
    assert served_empty(place) == [3, 5]
    note_empty(place, 5, empty=False)
    assert served_empty(place) == [3]
    (tmp_path / tally._EMPTY).write_text("{")
    assert served_empty(place) == []
