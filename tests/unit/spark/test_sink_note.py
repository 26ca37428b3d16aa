"""What the sink notes of a stream's batches: each counts once, whatever is run again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.checkpoint import SINK_TOTALS, Checkpoint
from towline.errors import JournalError
from towline.gateway.identity import JournalPosition
from towline.kafka.markers import MarkerStep, MarkerTotals
from towline.spark import sink_note
from towline.spark.batching import WriteThroughput
from towline.spark.sink_note import BatchMessages, BatchResult, BatchTotals, SinkNote, Span, read_throughput


def result(given: int, acknowledged: int | None = None, marks: MarkerStep | None = None, **more: int) -> BatchResult:
    counts = Counter(given=given, acknowledged=given if acknowledged is None else acknowledged, **more)
    return BatchResult(counts, marks, "s/1")


def counts(note: SinkNote, batch: int) -> dict[str, int]:
    totals = note.totals_of(batch)
    assert totals is not None
    return dict(totals.counts)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=6))
def test_a_batch_that_runs_again_counts_once(batches: list[tuple[int, int, int]]) -> None:
    """Rows given and lost of each batch, and how often it runs before Spark commits it."""
    note = SinkNote()
    for batch, (rows, lost, runs) in enumerate(batches):
        for _ in range(runs):
            note = note.with_batch(batch, result(rows + lost, rows, lost=lost))
    rows, lost = sum(one[0] for one in batches), sum(one[1] for one in batches)
    assert counts(note, len(batches) - 1) == +Counter(given=rows + lost, acknowledged=rows, lost=lost)


def test_a_batch_that_is_served_empty_or_was_not_noted() -> None:
    note = SinkNote().with_batch(0, result(5)).with_batch(2, result(7))
    assert counts(note, 2) == {"given": 12, "acknowledged": 12}
    assert note.totals_of(1) is None
    before = note.totals_before(2)
    assert before is not None
    assert Counter(note.totals[-1].counts) - Counter(before.counts) == {"given": 7, "acknowledged": 7}
    assert counts(note.with_batch(2, result(0)), 2) == {"given": 5, "acknowledged": 5}


def test_the_newest_batches_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_note, "_KEPT_BATCHES", 3)
    place, note = Checkpoint(str(tmp_path)), SinkNote()
    for batch in range(9):
        note = note.with_batch(batch, result(2))
    note.write(place)
    again = SinkNote.read(place)
    assert [one.batch for one in again.totals] == [6, 7, 8]
    assert counts(again, 8) == {"given": 18, "acknowledged": 18}


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    place, step = Checkpoint(str(tmp_path)), MarkerStep(None, MarkerTotals(5, 1))
    timed = BatchResult(Counter(given=5), step, "s/1", [0.2, 7.0], {"j": Span(0, 5)})
    note = SinkNote().with_batch(0, timed, WriteThroughput(0, 5, 0.2, 15.0))
    note.write(place)
    assert SinkNote.read(place) == note
    (totals,) = note.totals
    assert (totals.histogram.count, totals.histogram.seconds) == (2, 7.2)
    assert read_throughput(place) == WriteThroughput(0, 5, 0.2, 15.0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"totals":[[1]]}', '{"totals":7}', '{"throughput":[1]}'])
def test_a_note_of_somebody_else_counts_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / SINK_TOTALS).write_text(text)
    assert SinkNote.read(Checkpoint(str(tmp_path))) == SinkNote()


def test_a_note_of_a_later_version_begins_no_new_totals(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.write_note(SINK_TOTALS, '{"v": 2, "totals": []}', sync=False)
    with pytest.raises(JournalError, match=r"have format 2. Use the version that wrote them.*TL-J20"):
        SinkNote.read(checkpoint)


def test_a_note_that_can_not_be_read_begins_no_new_totals(tmp_path: Path) -> None:
    (tmp_path / SINK_TOTALS).mkdir()
    place = Checkpoint(str(tmp_path))
    with pytest.raises(JournalError, match=r"towline.totals: the totals of the batches can't be read .*TL-J20"):
        SinkNote.read(place)
    assert read_throughput(place) is None


def test_markers_are_held_against_where_the_batch_before_left_them() -> None:
    note = SinkNote().with_batch(0, result(5, marks=MarkerStep(None, MarkerTotals(5, 0))))
    note = note.with_batch(1, result(5, marks=MarkerStep(MarkerTotals(12, 1), MarkerTotals(17, 1))))
    assert (counts(note, 1)["drift"], counts(note, 1)["drift_dead"]) == (7, 1)
    steps = {2: MarkerStep(None, MarkerTotals(9, 9)), 4: MarkerStep(MarkerTotals(0, 0), MarkerTotals(5, 0))}
    for batch, marks in steps.items():
        note = note.with_batch(batch, result(5, marks=marks))  # there was no marker; nobody noted the batch before
        assert (counts(note, batch)["drift"], counts(note, batch)["drift_dead"]) == (7, 1)
    other = BatchResult(Counter(given=5), MarkerStep(MarkerTotals(0, 0), MarkerTotals(5, 0)), "s.2/1")
    assert counts(note.with_batch(5, other), 5)["drift"] == 7


def test_messages_of_a_line_that_begins_again_below_what_was_counted_are_those_of_its_journal() -> None:
    """What it carries a second time is no further message."""
    before = BatchTotals(7, spans={"j": Span(0, 700)})
    first = BatchMessages.from_positions(before, (), [JournalPosition("g", "j", 680)])
    assert (first.row_count, first.uncounted_rows, first.spans["j"].end) == (-20, 0, 680)
    second = BatchMessages.from_positions(
        BatchTotals(8, spans=first.spans), [JournalPosition("g", "j", 680)], [JournalPosition("g", "j", 720)]
    )
    assert (second.row_count, second.uncounted_rows, second.spans["j"].end) == (40, 0, 720)
    idle = BatchMessages.from_positions(before, [JournalPosition("g", "j", 680)], [JournalPosition("g", "j", 680)])
    assert (idle.row_count, idle.uncounted_rows, idle.spans["j"].end) == (0, 0, 700), "nothing was carried yet"
