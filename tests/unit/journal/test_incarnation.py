"""Each opening of a journal has a name of its own, which its rows keep: two that went on from one copy differ [I14]."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.unit.journal.support import ROOMY, Unsynced, crash, fill, opened, segments
from towline.journal import Journal


def names(journal: Journal) -> list[str]:
    """Return the incarnation of every offset that can be read from."""
    return [journal.incarnation_of(offset) for offset in range(journal.first_offset, journal.end + 1)]


def test_two_that_went_on_from_one_copy_differ(tmp_path: Path) -> None:
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
