"""The outbox: a batch enters once, what is done is done, packet ids and phases outlive a kill; against models."""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.journal.support import FAST, SMALL, FaultyDisk, Sending, crash, opened_outbox, rows
from towline.errors import JournalError, JournalFull
from towline.journal import Batch, InFlight, Limits
from towline.journal.outbox import PHASE_PUBLISHED, PHASE_QOS1, PHASE_RELEASED


@given(st.integers(0, 1 << 32))
def test_any_life_sends_one_attempt_of_each_batch(seed: int) -> None:
    """Writers that bring batches in pieces, fail, and begin again in another order; the process killed at any time."""
    dice = random.Random(seed)
    directory = Path(tempfile.mkdtemp(dir=FAST)) / "o"
    outbox = opened_outbox(directory, SMALL)
    sending, left = Sending(outbox), list[int]()
    at = dict.fromkeys(range(3), (0, 0))  # batch and rows brought of it
    attempts, partial = dict.fromkeys(at, 0), dict.fromkeys(at, 0)
    whole: list[tuple[int, int, int]] = []  # writer, batch, attempt

    def base(writer: int, batch: int, attempt: int) -> int:
        return ((writer * 100 + batch) * 100 + attempt) * 1000

    for _ in range(40):
        writer, what = dice.randrange(3), dice.random()
        number, brought = at[writer]
        if what < 0.6:
            more, last = dice.randrange(1, 12), dice.random() < 0.4
            batch = Batch(f"q/{writer}", number, attempt=str(attempts[writer]))
            start = max(0, brought - dice.randrange(3))
            end = max(brought, start + more)
            first = base(writer, number, attempts[writer])
            outbox.append_batch(rows(first + start, end - start), batch, start=start, whole=last)
            at[writer] = (number + 1, 0) if last else (number, end)
            partial[writer] = 0 if last else end
            if last:
                whole.append((writer, number, attempts[writer]))
                attempts[writer] = 0
                assert not outbox.is_done_below(outbox.end)
        elif what < 0.75:
            at[writer], attempts[writer] = (number, 0), attempts[writer] + 1
        elif what < 0.95:
            sending.turn()
            assert outbox.is_done_below(outbox.end), "nobody waits for rows that must not leave"
            assert (outbox.waiting_rows, outbox.incomplete_rows) == (0, sum(partial.values()))
        else:
            crash(outbox)
            left += sending.left
            outbox = opened_outbox(directory, SMALL)
            sending = Sending(outbox)
    sending.turn()
    left += sending.left
    first_time = list(dict.fromkeys(left))
    assert {n // 1000 for n in first_time} == {base(*named) // 1000 for named in whole}
    assert all(base(*named) in first_time for named in whole)
    for writer in at:
        own = [n for n in first_time if n // 10_000_000 == writer]
        assert own == sorted(own)
        ends = [n for n in own if n + 1 not in own]
        assert len(ends) == sum(1 for one in whole if one[0] == writer), "no gap within a batch"
    outbox.close()
    shutil.rmtree(directory.parent)


def test_a_full_disk_lets_no_packet_id_out(tmp_path: Path) -> None:
    """What could not be written must not be believed after a crash; the next try goes on [I10]."""
    disk = FaultyDisk()
    outbox = opened_outbox(tmp_path, disk=disk)
    outbox.append_batch(rows(0, 3), Batch("q/0", 0))
    outbox.write_in_flight({1: InFlight(0, PHASE_PUBLISHED)})
    disk.fail_next("write", errno.ENOSPC, times=1)
    with pytest.raises(JournalFull):
        outbox.write_in_flight({1: InFlight(0, PHASE_RELEASED), 2: InFlight(1, PHASE_PUBLISHED)})
    assert outbox.in_flight == {1: InFlight(0, PHASE_PUBLISHED)}
    synced = disk.calls.count("sync_data")
    outbox.write_in_flight({3: InFlight(2, PHASE_QOS1)}, durable=False)
    assert disk.calls.count("sync_data") == synced
    outbox.write_in_flight({1: InFlight(0, PHASE_RELEASED)})
    assert disk.calls.count("sync_data") > synced
    crash(outbox)
    outbox = opened_outbox(tmp_path)
    assert outbox.in_flight == {1: InFlight(0, PHASE_RELEASED), 3: InFlight(2, PHASE_QOS1)}
    outbox.close()


def test_how_rows_ended_is_known_together_with_that_they_did(tmp_path: Path) -> None:
    """In one frame: after a crash both are known or none, and the ledger has each of them once [I11]."""
    outbox = opened_outbox(tmp_path)
    outbox.count(received=3)
    outbox.append_batch(rows(0, 4), Batch("q/0", 0))
    outbox.write_in_flight({1: InFlight(0, PHASE_QOS1)}, durable=False)
    outbox.mark_done([0, 1], [1], outcomes={"delivered": 2})
    outbox.write_in_flight({1: InFlight(3, PHASE_QOS1)}, durable=False)  # says that the row it was given was done
    outbox.mark_done([2], outcomes={"refused": 1})
    assert outbox.ledger == {"received": 3, "delivered": 2, "refused": 1}
    for _ in range(2):
        crash(outbox)
        outbox = opened_outbox(tmp_path)
        assert (outbox.done_rows.watermark, outbox.ledger) == (2, {"received": 3, "delivered": 2})
        assert outbox.in_flight == {1: InFlight(3, PHASE_QOS1)}
        outbox.mark_done([2], outcomes={"delivered": 1})
    outbox.close()


def test_what_is_done_waits_for_the_disk_where_it_must_and_for_room(tmp_path: Path) -> None:
    disk = FaultyDisk()
    outbox = opened_outbox(tmp_path, disk=disk)
    outbox.append_batch(rows(0, 3), Batch("q/0", 0))
    outbox.mark_done([0])
    synced = disk.calls.count("sync_data")
    outbox.flush()
    assert disk.calls.count("sync_data") == synced
    outbox.flush(durable=True)
    assert disk.calls.count("sync_data") == synced + 1
    outbox.write_in_flight({2: InFlight(1, PHASE_PUBLISHED)})
    outbox.mark_done([1], [2])
    disk.fail_next("write", errno.ENOSPC)
    outbox.flush()  # it is said again with the next one
    with pytest.raises(JournalFull, match=r"no room to record sent messages.*TL-J02"):
        outbox.flush(durable=True)
    disk.call = ""
    outbox.flush()
    crash(outbox)
    outbox = opened_outbox(tmp_path)
    assert (outbox.done_rows.watermark, outbox.in_flight) == (2, {})
    outbox.close()


def test_a_batch_is_named_by_writer_number_and_origin(tmp_path: Path) -> None:
    outbox = opened_outbox(tmp_path)
    written = outbox.bytes_on_disk
    appended = outbox.append_batch(rows(0, 0), Batch("q/0", 9))
    assert (appended.rows, appended.whole, appended.already) == (0, True, False)
    assert (outbox.last_batches, outbox.bytes_on_disk) == ({}, written), "an empty batch leaves no word of it"
    outbox.append_batch(rows(0, 1), Batch("q/0", 7, "aaa"))
    assert outbox.append_batch(rows(0, 1), Batch("q/0", 7, "aaa")).already
    with pytest.raises(JournalError, match="TL-J22"):
        outbox.append_batch(rows(0, 1), Batch("q/0", 7, "bbb"))
    assert outbox.append_batch(rows(10, 2)) == (2, 3, True, False, -1), "rows of no batch are whole at once"
    outbox.close()


def test_a_replay_in_another_order_is_sent_whole_and_nothing_of_the_first_run(tmp_path: Path) -> None:
    outbox = opened_outbox(tmp_path)
    sending = Sending(outbox)
    outbox.append_batch(rows(100, 3), Batch("q/0", 7, attempt="one"), whole=False)
    outbox.append_batch(rows(500, 2), Batch("q/1", 7, attempt="other"))
    assert sending.turn() == [500, 501]  # of another partition, behind it
    again = Batch("q/0", 7, attempt="two")
    assert outbox.batch_status(again).rows == 0
    outbox.append_batch(rows(200, 4), again, whole=False)  # other rows, or the same in another order
    assert (outbox.dropped_rows, outbox.incomplete_rows) == (3, 4)
    with pytest.raises(
        JournalError, match=r"rows 0 to 3 of batch 7 of q/0 are missing.*TL-J16"
    ):  # it has lost its rows
        outbox.append_batch(rows(103, 1), Batch("q/0", 7, attempt="one"), start=3)
    assert outbox.append_batch(rows(200, 4), again, whole=False).already  # its answer was lost
    appended = outbox.append_batch(rows(0, 0), again, start=4)
    assert (appended.rows, appended.whole) == (4, True), "a last piece without rows makes it whole"
    assert not outbox.is_done_below(appended.end)
    assert sending.turn() == [200, 201, 202, 203]
    assert outbox.append_batch(rows(100, 5), Batch("q/0", 7, attempt="three")).already
    outbox.close()


FORTY_KB = Limits(max_bytes=40_000, min_free_bytes=0, segment_bytes=5000)


def test_a_batch_that_can_never_fit_says_so_and_gives_its_space_back(tmp_path: Path) -> None:
    outbox = opened_outbox(tmp_path, FORTY_KB)
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


def test_a_full_disk_is_not_a_batch_that_can_never_fit(tmp_path: Path) -> None:
    """There will be room again, whatever the limit is: nothing of the batch is given up."""
    disk = FaultyDisk()
    outbox = opened_outbox(tmp_path, disk=disk)
    batch = Batch("q/0", 0, attempt="a")
    outbox.append_batch(rows(0, 3), batch, whole=False)
    disk.fail_next("write", errno.ENOSPC)
    with pytest.raises(JournalFull):
        outbox.append_batch(rows(3, 3), batch, start=3)
    assert (outbox.incomplete_rows, outbox.dropped_rows) == (3, 0)
    disk.call = ""
    assert outbox.append_batch(rows(3, 3), batch, start=3).rows == 6
    assert outbox.next_rows(0) == (0, 6)
    outbox.close()


def test_a_batch_whose_query_is_gone_frees_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = opened_outbox(tmp_path, FORTY_KB)
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
    with pytest.raises(JournalError, match="TL-J16"):  # it was only slow, and must begin again
        outbox.append_batch(rows(200, 20), Batch("gone/0", 0, attempt="a"), start=200)
    outbox.close()


def test_the_batches_of_a_job_go_with_it_or_after_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    outbox = opened_outbox(tmp_path, SMALL)
    job, lost = "job-" + "0a" * 16, "job-" + "2c" * 16 + "/0"
    for part in range(50):
        outbox.append_batch(rows(part, 1), Batch(f"{job}/{part}", 0, attempt="a"))
    outbox.append_batch(rows(900, 2), Batch(f"{job}/50", 0, attempt="a"), whole=False)
    outbox.append_batch(rows(50, 1), Batch("q/0", 0))
    outbox.append_batch(rows(51, 1), Batch(lost, 0))
    outbox.end_job(job)
    assert list(outbox.last_batches) == ["q/0", lost]
    with pytest.raises(JournalError, match="TL-J17"):  # a task that Spark had given up comes late
        outbox.append_batch(rows(0, 1), Batch(f"{job}/0", 0, attempt="b"))
    assert Sending(outbox).turn() == list(range(52))
    lasting = {"batch:q/0", "dropped", "done", "outcomes"}
    for number, (passed_s, kept) in enumerate(
        ((3_500, {f"over:{job}", f"batch:{lost}"}), (200, {f"batch:{lost}"}), (7 * 86_400, set[str]())), 1
    ):
        outbox.close()
        now += passed_s
        outbox = opened_outbox(tmp_path, SMALL)
        outbox.append_batch(rows(0, 1), Batch("q/0", number))
        assert set(outbox.notes) == lasting | kept
    outbox.close()
