"""What an outbox promises to whoever brings rows and sends them."""

from __future__ import annotations

import pytest

from tests.unit.journal.support import SMALL, Clock, Sending, Shelf, rows
from tests.unit.journal.test_outbox import numbers
from towline.errors import JournalError, JournalFull
from towline.journal import Batch, Limits


def test_a_batch_in_pieces_continues_where_it_was_left(shelf: Shelf) -> None:
    outbox = shelf.outbox()
    batch = Batch("q/0", 0)
    outbox.append_batch(rows(0, 4), batch, start=0, whole=False)
    shelf.crash(outbox)
    outbox = shelf.outbox()
    assert (outbox.batch_status(batch).rows, outbox.batch_status(batch).whole) == (4, False)
    outbox.append_batch(rows(0, 6), batch, start=0, whole=False)  # other pieces than the first time
    outbox.append_batch(rows(6, 2), batch, start=6, whole=True)
    assert numbers(outbox, 0, 8) == list(range(8))
    assert outbox.append_batch(rows(0, 8), batch).already
    with pytest.raises(JournalError, match=r"are missing.*TL-J16"):
        outbox.append_batch(rows(3, 1), Batch("q/0", 1), start=3)
    outbox.close()


def test_another_batch_with_the_same_number_is_refused(shelf: Shelf) -> None:
    outbox = shelf.outbox()
    outbox.append_batch(rows(0, 1), Batch("q/0", 7, "aaa"))
    assert outbox.append_batch(rows(0, 1), Batch("q/0", 7, "aaa")).already
    with pytest.raises(JournalError, match="TL-J22"):
        outbox.append_batch(rows(0, 1), Batch("q/0", 7, "bbb"))
    outbox.close()


def test_batch_notes_outlive_their_rows(shelf: Shelf) -> None:
    """Compaction removes segments whose messages are delivered; a repeat of such a batch still enters nothing."""
    outbox = shelf.outbox(SMALL)
    for number in range(30):
        outbox.append_batch(rows(outbox.end, 20), Batch("q/0", number))
        outbox.mark_done(range(outbox.end))
        outbox.flush()
    assert outbox.first_offset > 0
    shelf.crash(outbox)
    outbox = shelf.outbox(SMALL)
    assert all(outbox.append_batch(rows(0, 20), Batch("q/0", number)).already for number in range(30))
    assert outbox.end == 600
    outbox.close()


def test_a_full_outbox_refuses_and_takes_again_when_something_is_done(shelf: Shelf) -> None:
    limits = Limits(max_bytes=40_000, min_free_bytes=0, segment_bytes=5000)
    outbox = shelf.outbox(limits)
    number = 0
    with pytest.raises(JournalFull):  # noqa: PT012 - the n-th of them
        while True:
            outbox.append_batch(rows(outbox.end, 20), Batch("q/0", number))
            number += 1
    assert not outbox.batch_status(Batch("q/0", number)).already  # refused whole
    outbox.mark_done(range(outbox.end // 2))
    outbox.flush()
    assert outbox.append_batch(rows(outbox.end, 20), Batch("q/0", number)).rows == 20
    outbox.close()


def test_a_replay_in_another_order_is_sent_whole_and_nothing_of_the_first_run(shelf: Shelf) -> None:
    outbox = shelf.outbox()
    sending = Sending(outbox)
    outbox.append_batch(rows(100, 3), Batch("q/0", 7, attempt="one"), whole=False)
    outbox.append_batch(rows(500, 2), Batch("q/1", 7, attempt="other"))
    assert sending.turn() == [500, 501]  # of another partition, behind it
    assert outbox.is_done_below(5), "nobody waits for rows that must not leave"
    assert (outbox.waiting_rows, outbox.incomplete_rows) == (0, 3)
    shelf.crash(outbox)
    outbox = shelf.outbox()
    sending = Sending(outbox)
    assert sending.turn() == []
    again = Batch("q/0", 7, attempt="two")
    assert outbox.batch_status(again).rows == 0
    outbox.append_batch(rows(200, 4), again, whole=False)  # other rows, or the same in another order
    assert (outbox.dropped_rows, outbox.incomplete_rows) == (3, 4)
    with pytest.raises(JournalError, match="TL-J16"):  # the first run goes on: it has lost its rows
        outbox.append_batch(rows(103, 1), Batch("q/0", 7, attempt="one"), start=3)
    assert outbox.append_batch(rows(200, 4), again, whole=False).already  # its answer was lost
    outbox.append_batch(rows(600, 1), Batch("q/1", 8))
    assert sending.turn() == [600]
    outbox.append_batch(rows(204, 1), again, start=4)
    assert not outbox.is_done_below(outbox.end)
    assert sending.turn() == [200, 201, 202, 203, 204]
    assert (outbox.waiting_rows, outbox.incomplete_rows, outbox.done_rows.watermark) == (0, 0, outbox.end)
    assert outbox.append_batch(rows(100, 5), Batch("q/0", 7, attempt="three")).already
    outbox.close()


def test_a_last_piece_without_rows_makes_a_batch_whole(shelf: Shelf) -> None:
    outbox = shelf.outbox()
    sending = Sending(outbox)
    batch = Batch("q/0", 0, attempt="a")
    outbox.append_batch(rows(0, 3), batch, whole=False)
    assert outbox.append_batch(rows(10, 2)) == (2, 5, True, False, -1), "rows of no batch are whole at once"
    assert sending.turn() == [10, 11]
    appended = outbox.append_batch(rows(0, 0), batch, start=3)
    assert (appended.rows, appended.whole) == (3, True)
    assert not outbox.is_done_below(appended.end)
    assert sending.turn() == [0, 1, 2]
    assert outbox.is_done_below(appended.end)
    outbox.close()


def test_a_batch_that_can_never_fit_says_so_and_gives_its_space_back(shelf: Shelf) -> None:
    limits = Limits(max_bytes=40_000, min_free_bytes=0, segment_bytes=5000)
    outbox = shelf.outbox(limits)
    sending = Sending(outbox)
    outbox.append_batch(rows(9000, 10), Batch("q/1", 0))
    large, start = Batch("q/0", 0, attempt="a"), 0
    with pytest.raises(JournalFull):  # noqa: PT012 - the n-th of them
        while True:
            outbox.append_batch(rows(start, 20), large, start=start, whole=False)
            start += 20
    assert sending.turn() == list(range(9000, 9010))  # others wait for the broker: there will be room
    with pytest.raises(JournalError, match=r"can never be complete.*Raise outboxMaxBytes.*TL-J15"):  # noqa: PT012
        while True:
            outbox.append_batch(rows(start, 20), large, start=start, whole=False)
            start += 20
    assert outbox.incomplete_rows == 0
    assert sending.turn() == []
    outbox.append_batch(rows(9010, 20), Batch("q/1", 1))
    assert sending.turn() == list(range(9010, 9030))
    outbox.close()


def test_a_batch_whose_query_is_gone_frees_space(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(max_bytes=40_000, min_free_bytes=0, segment_bytes=5000)
    outbox = shelf.outbox(limits)
    sending = Sending(outbox)
    for start in range(0, 200, 20):
        outbox.append_batch(rows(start, 20), Batch("gone/0", 0, attempt="a"), start=start, whole=False)
    monkeypatch.setattr("towline.journal.outbox._IDLE_BATCH_FULL_S", 0.0)
    number, refused = 0, 0
    while number < 20:
        try:
            outbox.append_batch(rows(number * 20, 20), Batch("q/0", number))
            number += 1
        except JournalFull:
            refused += 1
            sending.turn()
    sending.turn()
    assert refused
    assert outbox.dropped_rows == 200
    assert sending.left == list(range(400))
    for _ in range(2):
        with pytest.raises(JournalError, match="TL-J16"):  # it was only slow, and must begin again
            outbox.append_batch(rows(200, 20), Batch("gone/0", 0, attempt="a"), start=200)
        shelf.crash(outbox)
        outbox = shelf.outbox(limits)
    outbox.close()


def test_the_batches_of_a_job_go_with_it(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    outbox = shelf.outbox(SMALL)
    job = "job-" + "0a" * 16
    for part in range(50):
        outbox.append_batch(rows(part, 1), Batch(f"{job}/{part}", 0, attempt="a"))
    outbox.append_batch(rows(900, 2), Batch(f"{job}/50", 0, attempt="a"), whole=False)
    outbox.append_batch(rows(50, 1), Batch("q/0", 0))
    assert len(outbox.last_batches) == 52
    outbox.end_job(job)
    assert list(outbox.last_batches) == ["q/0"]
    with pytest.raises(JournalError, match="TL-J17"):  # a task that Spark had given up comes late
        outbox.append_batch(rows(0, 1), Batch(f"{job}/0", 0, attempt="b"))
    assert Sending(outbox).turn() == list(range(51))
    shelf.crash(outbox)
    clock.now += 4000
    outbox = shelf.outbox(SMALL)
    outbox.append_batch(rows(0, 1), Batch("q/0", 1))
    assert set(outbox.notes) - {"done", "outcomes"} == {"batch:q/0", "dropped"}
    outbox.close()


def test_the_batches_of_a_job_that_nobody_ended_go_after_a_week(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    outbox = shelf.outbox()
    outbox.append_batch(rows(0, 1), Batch("job-" + "2c" * 16 + "/0", 0))
    assert len(outbox.last_batches) == 1
    for days, kept in ((6, 2), (2, 1)):
        clock.now += days * 86_400
        outbox.close()
        outbox = shelf.outbox()
        outbox.append_batch(rows(0, 1), Batch("q/0", days + int(clock.now)))
        assert len(outbox.last_batches) == kept
    outbox.close()
