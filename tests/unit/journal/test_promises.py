"""Promises of a journal to its writers and readers, and the incarnations of its rows [I14]."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.journal.support import SMALL, fill, opened, rows, segments
from towline.errors import JournalError
from towline.journal import Limits


def test_ranges_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path, SMALL) as journal:
        fill(journal, 200, group=20)
        with pytest.raises(JournalError, match=r"spark committed up to row 201, but there are only 200.*\[TL-J08\]"):
            journal.commit("spark", 201)
        assert journal.consumers == {}
        journal.commit("spark", 150)
        for call in (
            lambda: journal.read(0, 200),
            lambda: journal.read(150, 201),
            lambda: journal.find_range_end(journal.first_offset - 1),
            lambda: journal.find_range_end(201),
        ):
            with pytest.raises(JournalError, match=r"the journal holds rows [\d,]+ to 200\..*TL-J07"):
                call()


def test_nothing_works_after_close(tmp_path: Path) -> None:
    journal = opened(tmp_path)
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


def test_opening_removes_nothing_until_the_next_commit(tmp_path: Path) -> None:
    """What is opened may be a copy that its readers know nothing of [I14]."""
    with opened(tmp_path, Limits(min_free_bytes=0, segment_bytes=4096, retain_bytes=1 << 20)) as journal:
        fill(journal, 200, group=5)
        journal.commit("spark", 200)
    with opened(tmp_path, SMALL) as journal:
        assert journal.first_offset == 0
        fill(journal, 1)
        journal.commit("spark", 201)
        assert journal.first_offset == 200


def test_the_row_below_the_first_is_still_known(memory_path: Path) -> None:
    """A checkpoint that is done with all rows names one that is gone."""
    writers = {}
    for _ in range(4):
        with opened(memory_path, SMALL) as journal:
            fill(journal, 60, group=5)
            writers[journal.end] = journal.incarnation
            journal.commit("spark", journal.end - 60)
    with opened(memory_path, SMALL) as journal:
        assert 0 < journal.first_offset <= 180
        expected = next(name for end, name in writers.items() if end >= journal.first_offset)
        assert journal.incarnation_of(journal.first_offset) == expected
        journal.commit("spark", 240)
        assert (journal.first_offset, journal.incarnation_of(240)) == (240, writers[240])


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


def test_what_is_stored_does_not_grow_with_the_number_of_openings(memory_path: Path) -> None:
    """Nobody commits for months, and the process starts again and again, with rows and without."""
    for number in range(40):
        with opened(memory_path) as journal:
            if number < 20:
                fill(journal, 1)
    sizes = [path.stat().st_size for path in segments(memory_path)]
    assert len(sizes) == 21
    assert max(sizes[10:20]) - min(sizes[10:20]) < 64
    with opened(memory_path) as journal:
        assert len({journal.incarnation_of(offset) for offset in range(journal.end + 1)}) == 21
