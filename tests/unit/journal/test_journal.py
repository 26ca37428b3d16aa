"""A journal without faults: promises to writers and readers, limits, files, incarnations [I14], disk status."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.journal.support import SCHEMA, SMALL, FaultyDisk, fill, opened, rows, segments, served
from towline.errors import JournalError, JournalFull
from towline.journal import Disk, Journal, Limits
from towline.timing import Histogram
from towline.version import version


def test_rows_that_are_held_outlive_their_file_and_others_come_too_late(tmp_path: Path) -> None:
    with opened(tmp_path, SMALL) as journal:
        fill(journal, 200, group=20)
        held, late = next(journal.read(0, 20, batch_rows=20)), journal.read(0, 200)
        journal.commit("slow", 95)
        journal.commit("fast", 200)
        assert 20 < journal.first_offset <= 95, "whole segments below every watermark"
        assert held.column("offset").to_pylist() == list(range(20))
        with pytest.raises(JournalError, match=r"were committed and removed.*TL-J07"):
            next(late)
        journal.commit("slow", 200)
        assert 150 < journal.first_offset <= 200
        assert journal.bytes_on_disk == sum(path.stat().st_size for path in segments(tmp_path))


def test_retention_keeps_committed_rows(tmp_path: Path) -> None:
    with opened(tmp_path, Limits(min_free_bytes=0, segment_bytes=4096, retain_bytes=20_000)) as journal:
        for _ in range(100):
            fill(journal, 10, group=10)
            journal.commit("spark", journal.end)
        assert 15_000 < journal.bytes_on_disk < 30_000
        served(journal)


def test_a_size_limit_holds_back_and_lets_go(tmp_path: Path) -> None:
    limits = Limits(min_free_bytes=0, max_bytes=32_000)
    with opened(tmp_path, limits) as journal:
        with pytest.raises(JournalFull, match=r"of at most 32,000 bytes are used.*\[TL-J02\]"):
            fill(journal, 10_000, group=5)
        assert 20_000 < journal.bytes_on_disk <= 32_000
        served(journal)
        full_at = journal.end
        journal.set_session({"still": "works"})
        journal.commit("spark", full_at // 2)
        fill(journal, 5, group=5)
        journal.commit("spark", journal.end)
        for _ in range(100):  # all committed: the limit never stands in the way
            fill(journal, 5, group=5)
            journal.commit("spark", journal.end)
        served(journal)


def test_rows_that_are_kept_for_another_look_make_space_for_new_ones(tmp_path: Path) -> None:
    """Though others wait: what is committed is worth less than what comes."""
    limits = Limits(min_free_bytes=0, max_bytes=32_000, retain_bytes=32_000)
    with opened(tmp_path, limits) as journal:
        journal.commit("spark", 0)
        while journal.bytes_on_disk < 28_000:
            fill(journal, 5, group=5)
        journal.commit("spark", journal.end - 1)
        assert journal.first_offset == 0
        fill(journal, 1, size=8_000)
        assert journal.first_offset > 0
        served(journal)


def test_a_row_above_the_limit_is_accepted_where_no_row_waits(tmp_path: Path) -> None:
    with opened(tmp_path, Limits(min_free_bytes=0, max_bytes=20_000)) as journal:
        journal.commit("spark", 0)
        fill(journal, 5)
        with pytest.raises(JournalFull):
            fill(journal, 1, size=50_000)
        journal.commit("spark", 5)
        fill(journal, 1, size=50_000)
        with pytest.raises(JournalFull):
            fill(journal, 1)
        journal.commit("spark", 6)
        fill(journal, 1)
        assert served(journal, 6) == [6]


class Shrinking(FaultyDisk):
    left = 10_400_000

    def free(self, directory: Path) -> int:
        super().free(directory)
        return self.left


def test_the_free_space_guard(tmp_path: Path) -> None:
    disk = Shrinking()
    with opened(tmp_path, Limits(min_free_bytes=20_000_000), disk) as journal:
        before = disk.calls.count("free")
        for _ in range(2):
            with pytest.raises(JournalFull, match="10 MB are free on this disk, 20 MB must stay free"):
                fill(journal, 1)
        disk.left = 1 << 30
        fill(journal, 100)
        assert disk.calls.count("free") == before + 3
        assert journal.end == 100


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Limits(min_free_bytes=400_000), 10_000_000),
        (Limits(min_free_bytes=0, max_bytes=2 << 20), 2 << 20),
        (Limits(min_free_bytes=20_000_000), 0),
    ],
)
def test_the_room_that_is_left_is_that_of_the_nearest_limit(tmp_path: Path, limits: Limits, left: int) -> None:
    with opened(tmp_path, limits, Shrinking()) as journal:
        used = journal.bytes_on_disk if limits.max_bytes else 0
        assert journal.disk_status()["room_left"] == left - used


def test_a_reserve_that_found_no_space_leaves_no_file(tmp_path: Path) -> None:
    """One without its bytes would be taken for the reserve ever after."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
    try:
        with opened(tmp_path):
            assert not any("reserve" in path.name for path in tmp_path.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with opened(tmp_path):
        assert (tmp_path / "reserve").stat().st_size == 1 << 16


def test_files_are_for_the_owner_only(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with opened(tmp_path / "state" / "inbox", SMALL, Disk()) as journal:
            fill(journal, 100, group=20)
            for path in (tmp_path / "state").rglob("*"):
                assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(previous)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    other = pa.schema([("offset", pa.int64()), ("payload", pa.string()), ("tags", pa.list_(pa.string()))])
    both = rf"its rows, of Towline {version()}, have another schema than this one, {version()}, writes"
    with pytest.raises(JournalError, match=rf"{both}\..*\[TL-J06\]"):
        Journal.open(tmp_path, schema=other)
    wider = SCHEMA.append(pa.field("qos", pa.int8()))
    with pytest.raises(JournalError, match=r"another schema.*\[TL-J06\]"):
        Journal.open(tmp_path, schema=wider)
    with opened(tmp_path) as journal, pytest.raises(JournalError, match="TL-J06"):
        journal.append(pa.record_batch([[1]], schema=pa.schema([("offset", pa.int64())])))


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/towline")):
        with pytest.raises(JournalError, match=r"the journal directory can't be used \(.+\)\. Give.*\[TL-J01\]"):
            opened(place)


def test_readers_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    slow, entered = threading.Event(), threading.Event()

    class Slow(FaultyDisk):
        def sync_data(self, descriptor: int) -> None:
            if armed:
                entered.set()
                assert slow.wait(60)
            super().sync_data(descriptor)

    armed: list[bool] = []
    journal = opened(tmp_path, disk=Slow())
    fill(journal, 10)
    armed.append(True)
    writer = threading.Thread(target=fill, args=(journal, 1))
    writer.start()
    assert entered.wait(60)
    assert len(served(journal)) == 10
    assert journal.find_range_end(0, max_bytes=50) >= 1
    journal.count(received=1)
    assert journal.end == 10  # not durable yet, so it is not there yet
    slow.set()
    writer.join(60)
    assert journal.end == 11
    journal.close()


def test_bytes_are_counted_over_segments_and_those_that_wait_alone(tmp_path: Path) -> None:
    with opened(tmp_path, SMALL) as journal:
        fill(journal, 400, group=4, size=100)
        all_of_it = journal.disk_status()
        assert all_of_it["bytes_written"] > 400 * 100
        assert all_of_it["syncs"]["seconds"] > 0
        assert 100 <= Histogram.from_json(all_of_it["syncs"]).count < 130, (
            "a sync for each append, and some for segments"
        )
        assert all_of_it["bytes_waiting"] <= all_of_it["bytes_on_disk"]
        journal.commit("spark", 200)
        half = journal.disk_status()
        assert 0.4 < half["bytes_waiting"] / all_of_it["bytes_waiting"] < 0.6
        assert half["bytes_written"] >= all_of_it["bytes_written"]  # what was removed since is counted too
        journal.commit("spark", 400)
        assert journal.disk_status()["bytes_waiting"] == 0


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


def test_readers_and_committers_beside_a_writer(tmp_path: Path) -> None:
    total, errors = 3_000, list[BaseException]()
    started = threading.Barrier(4)

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 shown by the test
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write() -> None:
        started.wait(60)
        for group in (1, 7, 2, 40) * (total // 50):
            journal.count(received=group)
            fill(journal, group, group=group)

    def consume(name: str) -> None:
        position = 0
        journal.commit(name, 0)
        started.wait(60)
        while position < total and not errors:
            end = journal.find_range_end(position, max_rows=100)
            served(journal, position, end, batch_rows=16)
            journal.commit(name, end)
            position = end

    journal = opened(tmp_path, SMALL)
    threads = [guarded(partial(consume, name)) for name in ("a", "b", "c")]
    threads.append(guarded(write))
    for thread in threads:
        thread.join(60)
    assert not errors
    assert journal.consumers == {"a": total, "b": total, "c": total}
    assert journal.ledger == {"received": total}
    journal.close()
    with opened(tmp_path) as journal:
        assert journal.ledger == {"received": total}
        assert journal.committed == total


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


def test_the_row_below_the_first_is_still_known(tmp_path: Path) -> None:
    """A checkpoint that is done with all rows names one that is gone."""
    for _ in range(3):
        with opened(tmp_path, SMALL) as journal:
            start, writer = journal.end, journal.incarnation
            fill(journal, 60, group=2)
            journal.commit("spark", journal.end - 10)
            assert start < journal.first_offset < journal.end
            assert journal.incarnation_of(journal.first_offset) == writer
    with opened(tmp_path, SMALL) as journal:
        journal.commit("spark", 180)
        assert (journal.first_offset, journal.incarnation_of(180)) == (180, writer)


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
