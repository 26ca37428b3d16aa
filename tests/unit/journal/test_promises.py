"""Promises of a journal to its writers and readers, and the incarnations of its rows [I14]."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.journal.support import ROOMY, SMALL, Shelf, Unsynced, crash, fill, opened, rows, segments, served
from towline.errors import JournalError
from towline.journal import Journal, Limits


def test_everything_is_there_after_a_reopening(shelf: Shelf) -> None:
    journal = shelf.open()
    journal.count(received=7)
    fill(journal, 100, group=10)
    journal.set_session({"client": "plant-7", "expiry": 60, "subscriptions": [{"filter": "a/+"}]})
    journal.commit("spark", 40)
    journal.count(received=1, dropped=2)
    identity = journal.journal_id
    assert re.fullmatch("[0-9a-f]{12}", identity)
    journal.close()
    with shelf.open() as journal:
        assert (journal.journal_id, journal.epoch, journal.end) == (identity, 2, 100)
        assert journal.consumers == {"spark": 40}
        assert journal.ledger == {"received": 8, "dropped": 2}
        assert journal.session == {"client": "plant-7", "expiry": 60, "subscriptions": [{"filter": "a/+"}]}
        assert journal.end - journal.first_offset == 100
        assert len(served(journal)) == 100


def test_a_slice_is_appended_without_the_rest(shelf: Shelf) -> None:
    with shelf.open() as journal:
        journal.append(rows(0, 10).slice(0, 4))
        journal.append(rows(0, 10).slice(4, 2))
        assert served(journal) == [0, 1, 2, 3, 4, 5]


def test_ranges_that_are_not_there_are_refused(shelf: Shelf) -> None:
    with shelf.open(SMALL) as journal:
        fill(journal, 200, group=20)
        journal.commit("spark", 150)
        for call in (
            lambda: journal.read(0, 200),
            lambda: journal.read(150, 201),
            lambda: journal.find_range_end(journal.first_offset - 1),
            lambda: journal.find_range_end(201),
        ):
            with pytest.raises(JournalError, match=r"the journal holds rows [\d,]+ to 200\..*TL-J07") as caught:
                call()
            assert caught.value.code == "TL-J07"


def test_a_watermark_beyond_the_end_is_of_another_journal(shelf: Shelf) -> None:
    with shelf.open() as journal:
        fill(journal, 10)
        with pytest.raises(JournalError, match=r"spark committed up to row 11, but there are only 10.*\[TL-J08\]"):
            journal.commit("spark", 11)
        assert journal.consumers == {}


def test_nothing_works_after_close(shelf: Shelf) -> None:
    journal = shelf.open()
    fill(journal, 1)
    journal.close()
    journal.close()
    for call in (
        lambda: journal.append(rows(1, 1)),
        lambda: journal.read(0, 1),
        lambda: journal.find_range_end(0),
        lambda: journal.commit("spark", 1),
        lambda: journal.set_session({}),
    ):
        with pytest.raises(JournalError, match="TL-J10"):
            call()
    assert journal.end == 1


def test_a_session_that_is_no_json_harms_nothing(shelf: Shelf) -> None:
    with shelf.open() as journal:
        with pytest.raises(TypeError):
            journal.set_session({"bad": object()})
        fill(journal, 1)


def test_readers_and_committers_beside_a_writer(shelf: Shelf) -> None:
    journal = shelf.open(SMALL)
    total, problems = 3_000, list[BaseException]()

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 shown by the test
                problems.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write() -> None:
        for group in (1, 7, 2, 40) * (total // 50):
            journal.count(received=group)
            fill(journal, group, group=group)

    def consume(name: str) -> None:
        at = 0
        journal.commit(name, 0)
        started.wait(60)
        while at < total and not problems:
            end = journal.find_range_end(at, max_rows=100)
            served(journal, at, end, batch_rows=16)
            journal.commit(name, end)
            at = end

    started = threading.Barrier(4)

    def write_later() -> None:
        started.wait(60)
        write()

    threads = [guarded(lambda name=name: consume(name)) for name in ("a", "b", "c")]
    threads.append(guarded(write_later))
    for thread in threads:
        thread.join(60)
    assert not problems
    assert journal.consumers == {"a": total, "b": total, "c": total}
    assert journal.ledger == {"received": total}
    journal.close()
    with shelf.open(ROOMY) as journal:
        assert journal.ledger == {"received": total}
        assert journal.committed == total


def test_opening_removes_nothing_until_the_next_commit(shelf: Shelf) -> None:
    """What is opened may be a copy that its readers know nothing of [I14]."""
    with shelf.open(Limits(min_free_bytes=0, segment_bytes=4096, retain_bytes=1 << 20)) as journal:
        fill(journal, 200)
        journal.commit("spark", 200)
    with shelf.open(SMALL) as journal:
        assert journal.first_offset == 0
        fill(journal, 1)
        journal.commit("spark", 201)
        assert journal.first_offset == 200


def test_what_is_not_there_has_no_name(shelf: Shelf) -> None:
    with shelf.open() as journal:
        assert journal.incarnation_of(0) == journal.incarnation_of(1) == ""
        fill(journal, 2)
        assert journal.incarnation_of(3) == journal.incarnation_of(0) == journal.incarnation_of(-1) == ""


def test_the_row_below_the_first_is_still_known(shelf: Shelf) -> None:
    """A checkpoint that is done with all rows names one that is gone."""
    writers = {}
    for _ in range(4):
        with shelf.open(SMALL) as journal:
            fill(journal, 60)
            writers[journal.end] = journal.incarnation
    with shelf.open(SMALL) as journal:
        for end, writer in writers.items():
            journal.commit("spark", end)
            assert journal.incarnation_of(max(journal.first_offset, end)) == writer
            if journal.first_offset:
                expected = next(name for upto, name in writers.items() if upto >= journal.first_offset)
                assert journal.incarnation_of(journal.first_offset) == expected
                assert journal.incarnation_of(journal.first_offset - 1) == ""
        assert journal.first_offset == 240
    with shelf.open(SMALL) as journal:
        assert (journal.first_offset, journal.incarnation_of(240)) == (240, writers[240])


def names(journal: Journal) -> list[str]:
    """Return the incarnation of every offset that can be read from."""
    return [journal.incarnation_of(offset) for offset in range(journal.first_offset, journal.end + 1)]


def test_two_that_continued_from_one_copy_differ(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as journal:
        fill(journal, 5)
        writer = journal.incarnation
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        fill(journal, 5)
        assert journal.incarnation_of(6) == writer
    after = {writer}
    for name in ("b", "c"):
        shutil.copytree(tmp_path / "copy", tmp_path / name)
        with opened(tmp_path / name) as journal:
            assert journal.incarnation_of(5) == writer
            fill(journal, 5)
            assert journal.incarnation_of(6) == journal.incarnation_of(10) == journal.incarnation
            after.add(journal.incarnation)
    assert len(after) == 3


def test_openings_without_rows_leave_nothing_behind(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 1)
        writer = journal.incarnation
    opened(tmp_path).close()
    size = sum(path.stat().st_size for path in segments(tmp_path))
    for _ in range(50):
        opened(tmp_path, disk=Unsynced()).close()
    assert sum(path.stat().st_size for path in segments(tmp_path)) == size
    with opened(tmp_path) as journal:
        assert journal.incarnation_of(1) == writer


def test_what_is_stored_does_not_grow_with_the_number_of_openings(memory_path: Path) -> None:
    """Nobody commits for months, and the process starts again and again."""
    for _ in range(60):
        with opened(memory_path, disk=Unsynced()) as journal:
            fill(journal, 1)
    with opened(memory_path) as journal:
        assert len(set(names(journal))) == 61
    sizes = [path.stat().st_size for path in segments(memory_path)[20:60]]
    assert max(sizes) - min(sizes) < 64


def test_a_row_that_was_never_finished_leaves_no_name(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 2)
        first = journal.incarnation
    journal = opened(tmp_path)
    fill(journal, 1)
    crash(journal)
    last = segments(tmp_path)[-1]
    last.write_bytes(last.read_bytes()[:-8])
    with opened(tmp_path, ROOMY) as journal:
        assert (journal.end, journal.incarnation_of(2)) == (2, first)
        fill(journal, 1)
        assert names(journal) == ["", first, first, journal.incarnation]
