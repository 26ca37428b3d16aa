"""A batch in pieces: what leaves is one attempt of it, whole and in order, whatever is killed and comes again."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.journal.support import ROOMY, SCHEMA, SMALL, Unsynced, crash, rows
from towline.errors import JournalError, JournalFull
from towline.journal import Batch, Limits, Outbox
from towline.journal.batches import LastBatch, joined
from towline.journal.partial import Partial
from towline.journal.ranges import Ranges

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 only its speed is wanted


def opened(directory: Path, limits: Limits = ROOMY, clock: Callable[[], float] | None = None) -> Outbox:
    outbox = Outbox.open(directory, schema=SCHEMA, limits=limits, disk=Unsynced())
    return outbox if clock is None else Outbox(outbox.journal, clock)


class Sending:
    """Reads an outbox as the gateway's sending thread does."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.cursor = outbox.done.watermark
        self.left: list[int] = []

    def turn(self) -> list[int]:
        """Send what may leave; return it."""
        sent: list[int] = []
        self.outbox.settle()
        while following := self.outbox.following(self.cursor):
            start, self.cursor = following
            for batch in self.outbox.read(start, self.cursor):
                for number in batch.column("offset").to_pylist():
                    if start not in self.outbox.done:
                        sent.append(number)
                        self.outbox.finish([start])
                    start += 1
        self.outbox.flush()
        self.left += sent
        return sent


def test_a_replay_in_another_order_is_sent_whole_and_nothing_of_the_first_run(tmp_path: Path) -> None:
    outbox = opened(tmp_path / "o")
    sending = Sending(outbox)
    outbox.append(rows(100, 3), Batch("q/0", 7, attempt="one"), whole=False)
    outbox.append(rows(500, 2), Batch("q/1", 7, attempt="other"))
    assert sending.turn() == [500, 501]  # of another partition, behind it
    assert outbox.reached(5), "nobody waits for rows that must not leave"
    assert (outbox.waiting, outbox.incomplete) == (0, 3)
    crash(outbox.journal)
    outbox = opened(tmp_path / "o")
    sending = Sending(outbox)
    assert sending.turn() == []
    again = Batch("q/0", 7, attempt="two")
    assert outbox.stored(again).rows == 0
    outbox.append(rows(200, 4), again, whole=False)  # other rows, or the same in another order
    assert (outbox.dropped, outbox.incomplete) == (3, 4)
    with pytest.raises(JournalError, match="TL-J16"):  # the first run goes on: it has lost its rows
        outbox.append(rows(103, 1), Batch("q/0", 7, attempt="one"), start=3)
    assert outbox.append(rows(200, 4), again, whole=False).already  # its answer was lost
    outbox.append(rows(600, 1), Batch("q/1", 8))
    assert sending.turn() == [600]
    outbox.append(rows(204, 1), again, start=4)
    assert not outbox.reached(outbox.end)
    assert sending.turn() == [200, 201, 202, 203, 204]
    assert (outbox.waiting, outbox.incomplete, outbox.done.watermark) == (0, 0, outbox.end)
    assert outbox.append(rows(100, 5), Batch("q/0", 7, attempt="three")).already
    outbox.close()


def test_a_last_piece_without_rows_makes_a_batch_whole(tmp_path: Path) -> None:
    outbox = opened(tmp_path / "o")
    sending = Sending(outbox)
    batch = Batch("q/0", 0, attempt="a")
    outbox.append(rows(0, 3), batch, whole=False)
    outbox.append(rows(10, 2))
    assert sending.turn() == [10, 11]
    appended = outbox.append(rows(0, 0), batch, start=3)
    assert (appended.rows, appended.whole) == (3, True)
    assert not outbox.reached(appended.end)
    assert sending.turn() == [0, 1, 2]
    assert outbox.reached(appended.end)
    outbox.close()


def test_pieces_that_an_older_towline_began_go_on_by_count(tmp_path: Path) -> None:
    """It has sent them already: the rest is brought, as it was promised then."""
    outbox = opened(tmp_path / "o")
    outbox.journal.append(rows(0, 3), notes={"batch:q/0": [7, 3, 0, 3, "hash"]})
    outbox.close()
    outbox = opened(tmp_path / "o")
    sending = Sending(outbox)
    assert sending.turn() == [0, 1, 2]
    assert outbox.stored(Batch("q/0", 7, "hash", "new")).rows == 3
    outbox.append(rows(0, 4), Batch("q/0", 7, "hash", "new"), whole=False)
    assert sending.turn() == [3]
    outbox.append(rows(4, 1), Batch("q/0", 7, "hash", "new"), start=4)
    assert sending.turn() == [4]
    outbox.close()


def test_a_batch_that_can_never_fit_says_so_and_gives_its_room_back(tmp_path: Path) -> None:
    limits = Limits(max_bytes=40_000, min_free_bytes=0, segment_bytes=5000)
    outbox = opened(tmp_path / "o", limits)
    sending = Sending(outbox)
    outbox.append(rows(9000, 10), Batch("q/1", 0))
    large, start = Batch("q/0", 0, attempt="a"), 0
    with pytest.raises(JournalFull):  # noqa: PT012 - the n-th of them
        while True:
            outbox.append(rows(start, 20), large, start=start, whole=False)
            start += 20
    assert sending.turn() == list(range(9000, 9010))  # others wait for the broker: there will be room
    with pytest.raises(JournalError, match=r"can't become whole.*Raise outboxMaxBytes.*TL-J15"):  # noqa: PT012
        while True:
            outbox.append(rows(start, 20), large, start=start, whole=False)
            start += 20
    assert outbox.incomplete == 0
    assert sending.turn() == []
    outbox.append(rows(9010, 20), Batch("q/1", 1))
    assert sending.turn() == list(range(9010, 9030))
    outbox.close()


def test_a_batch_whose_query_is_gone_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(max_bytes=40_000, min_free_bytes=0, segment_bytes=5000)
    outbox = opened(tmp_path / "o", limits)
    sending = Sending(outbox)
    for start in range(0, 200, 20):
        outbox.append(rows(start, 20), Batch("gone/0", 0, attempt="a"), start=start, whole=False)
    monkeypatch.setattr("towline.journal.outbox._IDLE_FULL_S", 0.0)
    number, refused = 0, 0
    while number < 20:
        try:
            outbox.append(rows(number * 20, 20), Batch("q/0", number))
            number += 1
        except JournalFull:
            refused += 1
            sending.turn()
    sending.turn()
    assert refused
    assert outbox.dropped == 200
    assert sending.left == list(range(400))
    outbox.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_the_markers_of_a_job_go_with_it(tmp_path: Path) -> None:
    clock = Clock()
    outbox = opened(tmp_path / "o", SMALL, clock)
    job = "job-" + "0a" * 16
    for part in range(50):
        outbox.append(rows(part, 1), Batch(f"{job}/{part}", 0, attempt="a"))
    outbox.append(rows(900, 2), Batch(f"{job}/50", 0, attempt="a"), whole=False)
    outbox.append(rows(50, 1), Batch("q/0", 0))
    assert len(outbox.last_batches) == 52
    outbox.end_job(job)
    assert list(outbox.last_batches) == ["q/0"]
    with pytest.raises(JournalError, match="TL-J17"):  # a task that Spark had given up comes late
        outbox.append(rows(0, 1), Batch(f"{job}/0", 0, attempt="b"))
    assert Sending(outbox).turn() == list(range(51))
    crash(outbox.journal)
    clock.now += 4000
    outbox = opened(tmp_path / "o", SMALL, clock)
    outbox.append(rows(0, 1), Batch("q/0", 1))
    assert set(outbox.journal.notes) - {"done", "outcomes"} == {"batch:q/0", "dropped"}
    outbox.close()


def test_the_markers_of_a_job_that_nobody_ended_go_after_a_week(tmp_path: Path) -> None:
    clock = Clock()
    outbox = opened(tmp_path / "o", ROOMY, clock)
    older = "job-" + "1b" * 16
    outbox.journal.append(rows(0, 1), notes={f"batch:{older}/0": [0, 1, 1, 1, ""]})  # it did not say when
    outbox.append(rows(1, 1), Batch("job-" + "2c" * 16 + "/0", 0))
    assert len(outbox.last_batches) == 2
    for days, kept in ((6, 3), (2, 1)):
        clock.now += days * 86_400
        outbox = Outbox(outbox.journal, clock)
        outbox.append(rows(0, 1), Batch("q/0", days + int(clock.now)))
        assert len(outbox.last_batches) == kept
    outbox.close()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=20))
def test_ranges_are_joined(parts: list[tuple[int, int]]) -> None:
    ranges = [(start, start + length) for start, length in parts]
    result = joined(ranges)
    assert {n for s, e in result for n in range(s, e)} == {n for s, e in ranges for n in range(s, e)}
    assert all(a[1] < b[0] for a, b in pairwise(result))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=9), st.sets(st.integers(0, 50)))
def test_what_is_left_may_be_held_back(parts: list[tuple[int, int]], done: set[int]) -> None:
    partial, noted = Partial(), Ranges()
    held = [(start, start + length) for start, length in parts]
    partial.hold("w", joined(held))
    for number in done:
        noted.add(number)
    left = set(range(50)) - done - {n for start, end in held for n in range(start, end)}
    with partial.lock:
        assert partial.covers(noted.missing(0, 50)) == (not left)


def test_the_newest_batch_reads_back() -> None:
    for newest in (LastBatch(1, 2, True, 3, "o"), LastBatch(4, 5, False, 6, "", "a", ((1, 2), (3, 6)), 7)):
        assert LastBatch.from_json(newest.as_json()) == newest


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_life_sends_one_attempt_of_each_batch(seed: int) -> None:
    """Writers that bring batches in pieces, fail, and begin again in another order; the process killed at any time."""
    dice = random.Random(seed)
    directory = Path(tempfile.mkdtemp(dir=FAST)) / "o"
    outbox = opened(directory, SMALL)
    sending = Sending(outbox)
    left: list[int] = []
    at = dict.fromkeys(range(3), (0, 0))  # batch and rows brought of it
    attempts = dict.fromkeys(at, 0)
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
            first = base(writer, number, attempts[writer])
            end = max(brought, start + more)
            outbox.append(rows(first + start, end - start), batch, start=start, whole=last)
            at[writer] = (number + 1, 0) if last else (number, end)
            if last:
                whole.append((writer, number, attempts[writer]))
                attempts[writer] = 0
        elif what < 0.75:
            at[writer], attempts[writer] = (number, 0), attempts[writer] + 1
        elif what < 0.95:
            sending.turn()
        else:
            crash(outbox.journal)
            left += sending.left
            outbox = opened(directory, SMALL)
            sending = Sending(outbox)
    sending.turn()
    left += sending.left
    first_time = list(dict.fromkeys(left))
    assert {n // 1000 for n in first_time} == {base(*named) // 1000 for named in whole}
    assert all(n in first_time for named in whole for n in [base(*named)])
    for writer in at:
        own = [n for n in first_time if n // 10_000_000 == writer]
        assert own == sorted(own)
        counts = [n for n in own if n + 1 not in own]
        assert len(counts) == sum(1 for one in whole if one[0] == writer), "no gap within a batch"
    outbox.close()
    shutil.rmtree(directory.parent)
