"""Dead letters are counted once, whatever is run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.checkpoint import Checkpoint
from towline.errors import JournalError
from towline.spark import tally
from towline.spark.tally import given, given_at, noted, sum_at, took, took_at


def test_a_batch_that_is_run_again_is_counted_once(tmp_path: Path) -> None:
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


def test_the_rows_of_a_batch_that_is_run_again_are_those_of_its_last_run(tmp_path: Path) -> None:
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
        took(place, batch, seconds)
    assert [took_at(place, batch) for batch in range(4)] == [[0.5], [], [0.125], []]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"times":[[1]]}', '{"times":7}', '{"times":[[1,["x"]]]}'])
def test_times_that_a_power_failure_took_are_not_known(tmp_path: Path, text: str) -> None:
    (tmp_path / tally._TIMES).write_text(text)
    place = Checkpoint(str(tmp_path))
    assert took_at(place, 1) == []
    took(place, 1, [2.0])
    assert took_at(place, 1) == [2.0]
