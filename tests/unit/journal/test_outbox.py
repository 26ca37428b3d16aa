"""The outbox: a batch enters once, what is done is done, packet ids and phases outlive a kill; against a model."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.journal.support import FAST, SMALL, FaultyDisk, crash, opened_outbox, rows, segments
from towline.errors import JournalFull
from towline.journal import Batch, InFlight, Limits, Outbox
from towline.journal.outbox import PHASE_PUBLISHED, PHASE_QOS1, PHASE_RELEASED


def numbers(outbox: Outbox, start: int, end: int) -> list[int]:
    return [n for batch in outbox.read(start, end) for n in batch.column("offset").to_pylist()]


class Life(RuleBasedStateMachine):
    """Random lives: batches and their repeats, flights, answers, flushes, clean ends and kills."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=FAST))
        self.limits = SMALL
        self.outbox: Outbox
        #: (writer, number) → rows, in the order of their entry
        self.batches: dict[tuple[str, int], int] = {}
        self.newest: dict[str, int] = {}
        self.end = 0
        self.done: set[int] = set()
        #: what a kill can't take: done when the disk was last told, and synced since
        self.sure: set[int] = set()
        self.flights: dict[int, InFlight] = {}
        #: rows that were ever in flight
        self.flown: set[int] = set()

    @initialize(segment=st.sampled_from([3000, 20_000]))
    def begin(self, segment: int) -> None:
        self.limits = Limits(min_free_bytes=0, segment_bytes=segment)
        self._open()

    def _open(self) -> None:
        self.outbox = opened_outbox(self.directory, self.limits)

    @rule(writer=st.sampled_from(["q/0", "q/1"]), count=st.integers(1, 30))
    def new_batch(self, writer: str, count: int) -> None:
        number = self.newest.get(writer, -1) + 1
        stored = self.outbox.append_batch(rows(self.end, count), Batch(writer, number))
        assert (stored.rows, stored.already) == (count, False)
        self.newest[writer] = number
        self.batches[writer, number] = count
        self.end += count

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def repeated_batch(self, data: st.DataObject) -> None:
        writer, number = data.draw(st.sampled_from(list(self.batches)))
        assert self.outbox.append_batch(rows(0, self.batches[writer, number]), Batch(writer, number)).already

    @rule(data=st.data(), count=st.integers(1, 5))
    def fly(self, data: st.DataObject, count: int) -> None:
        in_flight = {flight.row_number for flight in self.flights.values()}
        free = [n for n in range(self.end) if n not in self.done and n not in in_flight]
        ids = [i for i in range(1, 40) if i not in self.flights]
        flights = {i: InFlight(n, PHASE_PUBLISHED) for i, n in zip(ids, free[:count], strict=False)}
        chosen = [i for i in self.flights if data.draw(st.booleans())]
        released = {i: InFlight(self.flights[i].row_number, PHASE_RELEASED) for i in chosen}
        if flights or released:
            self.outbox.write_in_flight(flights | released)
            self.flights |= flights | released
            self.flown |= {flight.row_number for flight in flights.values()}

    @rule(data=st.data(), out_of_turn=st.integers(0, 10))
    def finish(self, data: st.DataObject, out_of_turn: int) -> None:
        open_ = [n for n in range(self.end) if n not in self.done]
        chosen = [n for n in open_[: out_of_turn + 1] if data.draw(st.booleans())]
        freed = [i for i, f in self.flights.items() if f.row_number in chosen]
        self.outbox.mark_done(chosen, freed)
        self.done |= set(chosen)
        for packet_id in freed:
            del self.flights[packet_id]

    @rule(durable=st.booleans())
    def flush(self, durable: bool) -> None:
        self.outbox.flush(durable=durable)
        self.sure = set(self.done)

    @rule()
    def reopen(self) -> None:
        self.outbox.flush()
        self.outbox.close()
        self._open()
        self.sure = set(self.done)

    @rule()
    def kill(self) -> None:
        crash(self.outbox)
        before = dict(self.flights)
        self._open()
        done = {n for n in range(self.end) if n in self.outbox.done_rows}
        assert self.sure <= done <= self.done | self.sure
        # Whoever had a packet id and is not surely done still has it, under the same number and in the same phase.
        assert {i: f for i, f in self.outbox.in_flight.items() if f.row_number not in self.done} == before
        # What was in flight is still, under its id, or is done: else it would leave under a new id, doubled [I10].
        assert self.flown <= done | {f.row_number for f in self.outbox.in_flight.values()}
        self.done = done
        self.flights = dict(self.outbox.in_flight)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "outbox"):
            return
        outbox = self.outbox
        assert outbox.end == self.end
        assert {n for n in range(self.end) if n in outbox.done_rows} == self.done
        assert outbox.waiting_rows == self.end - len(self.done)
        assert outbox.in_flight == self.flights
        assert {writer: last[0] for writer, last in outbox.last_batches.items()} == self.newest
        waiting = [n for n in range(self.end) if n not in self.done]
        if waiting:
            assert outbox.first_offset <= waiting[0]
            assert numbers(outbox, waiting[0], self.end) == list(range(waiting[0], self.end))

    def teardown(self) -> None:
        try:
            if hasattr(self, "outbox"):
                self.outbox.close()
                assert segments(self.directory)
        finally:
            shutil.rmtree(self.directory)


def test_a_full_disk_lets_no_packet_id_out(tmp_path: Path) -> None:
    """What `fly` could not write must not be believed after a crash; the next try goes on [I10]."""
    disk = FaultyDisk()
    outbox = opened_outbox(tmp_path / "o", disk=disk)
    outbox.append_batch(rows(0, 3), Batch("q/0", 0))
    outbox.write_in_flight({1: InFlight(0, PHASE_PUBLISHED)})
    disk.call, disk.at, disk.number, disk.times = "write", disk.calls.count("write") + 1, errno.ENOSPC, 1
    with pytest.raises(JournalFull):
        outbox.write_in_flight({1: InFlight(0, PHASE_RELEASED), 2: InFlight(1, PHASE_PUBLISHED)})
    assert outbox.in_flight == {1: InFlight(0, PHASE_PUBLISHED)}
    outbox.write_in_flight({1: InFlight(0, PHASE_RELEASED)})
    crash(outbox)
    outbox = opened_outbox(tmp_path / "o")
    assert outbox.in_flight == {1: InFlight(0, PHASE_RELEASED)}
    outbox.close()


def test_a_packet_id_that_is_used_again_says_in_its_frame_that_its_row_was_done(tmp_path: Path) -> None:
    """Else a crash would leave that row with no id and not done: it would be sent anew [I10]."""
    outbox = opened_outbox(tmp_path / "o")
    outbox.append_batch(rows(0, 3), Batch("q/0", 0))
    outbox.write_in_flight({1: InFlight(0, PHASE_QOS1), 2: InFlight(1, PHASE_QOS1)}, durable=False)
    outbox.mark_done([0], [1], outcomes=["delivered"])
    assert outbox.in_flight == {2: InFlight(1, PHASE_QOS1)}
    outbox.write_in_flight({1: InFlight(2, PHASE_QOS1)}, durable=False)
    crash(outbox)
    outbox = opened_outbox(tmp_path / "o")
    assert outbox.in_flight == {2: InFlight(1, PHASE_QOS1), 1: InFlight(2, PHASE_QOS1)}
    assert outbox.done_rows.watermark == 1
    assert outbox.ledger == {"delivered": 1}
    outbox.close()


def test_what_flies_with_qos_1_is_written_and_not_synced(tmp_path: Path) -> None:
    disk = FaultyDisk()
    outbox = opened_outbox(tmp_path / "o", disk=disk)
    outbox.append_batch(rows(0, 3), Batch("q/0", 0))
    synced = disk.calls.count("sync_data")
    outbox.write_in_flight({1: InFlight(0, PHASE_QOS1)}, durable=False)
    assert disk.calls.count("sync_data") == synced
    outbox.write_in_flight({2: InFlight(1, PHASE_PUBLISHED)})
    assert disk.calls.count("sync_data") > synced
    crash(outbox)
    outbox = opened_outbox(tmp_path / "o")
    assert outbox.in_flight == {1: InFlight(0, PHASE_QOS1), 2: InFlight(1, PHASE_PUBLISHED)}
    outbox.close()


def test_how_rows_ended_is_known_together_with_that_they_did(tmp_path: Path) -> None:
    """In one frame: after a crash both are known or none, and the ledger has each of them once [I11]."""
    outbox = opened_outbox(tmp_path / "o")
    outbox.count(received=3)
    outbox.append_batch(rows(0, 3), Batch("q/0", 0))
    outbox.mark_done([0, 1], outcomes=["delivered", "delivered"])
    outbox.flush()
    outbox.mark_done([2], outcomes=["refused"])
    assert outbox.ledger == {"received": 3, "delivered": 2, "refused": 1}
    crash(outbox)
    outbox = opened_outbox(tmp_path / "o")
    assert (outbox.done_rows.watermark, outbox.ledger) == (2, {"received": 3, "delivered": 2})
    outbox.mark_done([2], outcomes=["delivered"])
    outbox.close()  # without a word of it
    outbox = opened_outbox(tmp_path / "o")
    assert (outbox.done_rows.watermark, outbox.ledger) == (2, {"received": 3, "delivered": 2})
    outbox.close()


def test_what_is_done_waits_for_the_disk_where_it_must_and_for_room(tmp_path: Path) -> None:
    disk = FaultyDisk()
    outbox = opened_outbox(tmp_path / "o", disk=disk)
    outbox.append_batch(rows(0, 3), Batch("q/0", 0))
    outbox.write_in_flight({1: InFlight(0, PHASE_PUBLISHED)})
    outbox.mark_done([0], [1])
    synced = disk.calls.count("sync_data")
    outbox.flush()
    assert disk.calls.count("sync_data") == synced
    outbox.flush(durable=True)
    assert disk.calls.count("sync_data") == synced + 1
    outbox.write_in_flight({2: InFlight(1, PHASE_PUBLISHED)})
    outbox.mark_done([1], [2])
    disk.call, disk.at, disk.number = "write", disk.calls.count("write") + 1, errno.ENOSPC
    outbox.flush()  # it is said again with the next one
    with pytest.raises(JournalFull, match=r"no room to record sent messages.*TL-J02"):
        outbox.flush(durable=True)
    disk.call = ""
    outbox.flush()
    crash(outbox)
    outbox = opened_outbox(tmp_path / "o")
    assert (outbox.done_rows.watermark, outbox.in_flight) == (2, {})
    outbox.close()


def test_an_empty_batch_leaves_no_word_of_it(tmp_path: Path) -> None:
    outbox = opened_outbox(tmp_path / "o")
    written = outbox.bytes_on_disk
    appended = outbox.append_batch(rows(0, 0), Batch("q/0", 4))
    assert (appended.rows, appended.whole, appended.already) == (0, True, False)
    assert (outbox.last_batches, outbox.bytes_on_disk) == ({}, written)
    outbox.append_batch(rows(0, 2), Batch("q/0", 3))  # a smaller number is no repeat of it
    assert outbox.end == 2
    outbox.close()


def test_a_full_disk_is_not_a_batch_that_can_never_fit(tmp_path: Path) -> None:
    """There will be room again, whatever the limit is: nothing of the batch is given up."""
    disk = FaultyDisk()
    outbox = opened_outbox(tmp_path / "o", disk=disk)
    batch = Batch("q/0", 0, attempt="a")
    outbox.append_batch(rows(0, 3), batch, whole=False)
    disk.call, disk.at, disk.number = "write", disk.calls.count("write") + 1, errno.ENOSPC
    with pytest.raises(JournalFull):
        outbox.append_batch(rows(3, 3), batch, start=3)
    assert (outbox.incomplete_rows, outbox.dropped_rows) == (3, 0)
    disk.call = ""
    assert outbox.append_batch(rows(3, 3), batch, start=3).rows == 6
    assert outbox.next_rows(0) == (0, 6)
    outbox.close()


Life.TestCase.settings = settings(stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestLife = Life.TestCase
