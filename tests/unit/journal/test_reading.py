"""Reads of a journal: batches within rows and bytes, whatever the sizes of the rows; and the bytes of ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.journal.support import SCHEMA, SMALL, fill, opened, segments_of
from towline.errors import JournalError
from towline.journal.segment import BATCH_BYTES, INDEX_STRIDE, RowSlice, combine_slices, max_frame_bytes, split_batch

#: Mostly small, some larger than any bound below.
SIZES = st.one_of(st.integers(0, 30), st.integers(0, 3000))
FRAMES = st.lists(st.lists(SIZES, min_size=1, max_size=30), max_size=12)


def written(first: int, sizes: list[int]) -> Any:
    payloads = [first.to_bytes(2, "big") + bytes(size) for size in sizes]
    tags = [["tag"] * (size % 3) or None for size in sizes]
    return pa.record_batch([range(first, first + len(sizes)), payloads, tags], schema=SCHEMA)


def frames_of(sizes: list[list[int]]) -> list[Any]:
    frames, first = [], 0
    for frame in sizes:
        frames.append(written(first, frame))
        first += len(frame)
    return frames


def check(batches: list[Any], frames: list[Any], batch_rows: int, batch_bytes: int) -> None:
    for batch in batches:
        batch.validate(full=True)
        assert 0 < batch.num_rows <= batch_rows
        assert batch.num_rows == 1 or batch.nbytes <= batch_bytes
    assert pa.Table.from_batches(batches, SCHEMA).equals(pa.Table.from_batches(frames, SCHEMA))


@given(FRAMES, st.integers(1, 40), st.integers(100, 5000))
def test_batches_stay_within_both_bounds(sizes: list[list[int]], batch_rows: int, batch_bytes: int) -> None:
    frames = frames_of(sizes)
    pieces = (RowSlice(frame, frame.nbytes) for frame in frames)
    check(list(combine_slices(pieces, batch_rows, batch_bytes)), frames, batch_rows, batch_bytes)


@given(st.lists(SIZES, min_size=1, max_size=40), st.integers(1, 40), st.integers(100, 5000))
def test_a_cut_takes_as_many_rows_as_fit(sizes: list[int], batch_rows: int, batch_bytes: int) -> None:
    frame = written(0, sizes)
    slices = list(split_batch(frame, batch_rows, batch_bytes))
    check(slices, [frame], batch_rows, batch_bytes)
    at = 0
    for rows in slices[:-1]:
        at += rows.num_rows
        more = frame.slice(at - rows.num_rows, rows.num_rows + 1)
        assert rows.num_rows == batch_rows or more.nbytes > batch_bytes


@settings(deadline=None)  # files
@given(FRAMES, st.integers(1, 40), st.integers(100, 5000), st.floats(0, 1))
def test_a_journal_reads_within_both_bounds(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    batch_rows: int,
    batch_bytes: int,
    begin: float,
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    with opened(directory, SMALL) as journal:
        for frame in frames_of(sizes):
            journal.append(frame)
        start = int(begin * journal.end)
        batches = list(journal.read(start, journal.end, batch_rows=batch_rows, batch_bytes=batch_bytes))
    whole = pa.Table.from_batches(frames_of(sizes), SCHEMA)
    check(batches, whole.slice(start).to_batches(), batch_rows, batch_bytes)


@given(st.one_of(st.none(), st.integers(1 << 20, 1 << 40)))
def test_a_frame_finds_room_below_any_limit(limit: int | None) -> None:
    """What is appended at a time is a part of the limit, and no more than readers hold."""
    most = max_frame_bytes(limit)
    assert (1 << 16) <= most <= BATCH_BYTES
    assert limit is None or 16 * most <= limit


def test_small_frames_are_joined_up_to_the_bounds() -> None:
    """A gateway appends what came in a moment, a row or two; Spark is to get its rows in large batches."""
    pieces = [RowSlice(frame, frame.nbytes) for frame in frames_of([[10]] * 250)]
    assert [batch.num_rows for batch in combine_slices(pieces, 100)] == [100, 100, 50]
    of_a_row = pieces[0].size
    assert [batch.num_rows for batch in combine_slices(pieces, 1000, 80 * of_a_row)] == [80, 80, 80, 10]


def test_a_range_far_into_a_segment_of_an_earlier_run_is_found_from_near(tmp_path: Path) -> None:
    """Not by walking over all frames below it; and the index of many single rows needs little memory."""
    with opened(tmp_path) as journal:
        fill(journal, 900, size=1_000)
        a_row = journal.bytes_on_disk / 900
        for start in (0, 700):
            assert journal.find_range_end(start, max_bytes=100_000) - start == pytest.approx(100_000 / a_row, abs=3)
    with opened(tmp_path) as journal:
        (segment, _) = segments_of(journal)
        index, view = segment.index(segment.view()), segment.view()
        assert 10 < len(index) <= segment.size / INDEX_STRIDE + 1
        for offset in range(0, 900, 50):
            position, header = segment.find_frame(view, offset)
            assert header.first_offset <= offset < header.end
            assert position - max(noted for noted in index if noted <= position) < INDEX_STRIDE + header.size


def test_range_bytes_agree_with_find_range_end(tmp_path: Path) -> None:
    """Parts of a range are together its size, and what `locate` gives for a number of bytes is not larger."""
    with opened(tmp_path, SMALL) as journal:
        for group in (1, 1, 30, 2, 9, 1, 64, 5):
            fill(journal, group, group=group)
        for start in range(113):
            assert journal.range_bytes(start, start) == 0
            assert journal.find_range_end(start, max_rows=3) == min(start + 3, 113)
            for most in (100, 1000, 5000, 1 << 30):
                end = journal.find_range_end(start, max_bytes=most)
                assert journal.range_bytes(start, end) <= most or end == start + 1
                middle = (start + end) // 2
                parts = journal.range_bytes(start, middle) + journal.range_bytes(middle, end)
                assert parts == pytest.approx(journal.range_bytes(start, end), abs=1)
        assert 0 < journal.range_bytes(0, 113) <= journal.bytes_on_disk
        with pytest.raises(JournalError, match="TL-J07"):
            journal.range_bytes(0, 114)
