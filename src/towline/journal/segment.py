"""Segment files of a journal: appended at the end, mapped for reading, with a sparse index; and ranges of rows.

A range of offsets gives the same rows in the same order, until they are removed [I4].

The index holds one entry for each `INDEX_STRIDE` bytes, so that 10 M rows in a frame each (15 GB) cost 2 MB of memory;
from an entry to a row the reader follows the frame headers in the mapped file. Mappings are not cached: an unused one
is unmapped, and a removed file stays readable through an existing mapping. Written frames are durable after a sync;
after a failed sync the file is dead [I6].
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from array import array
from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from towline.errors import JournalError
from towline.journal import frames
from towline.journal.disk import NO_ROOM, SegmentName, journal_failed, journal_full, map_errors, write_all, write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from towline.journal.disk import Disk
    from towline.timing import Histogram

INDEX_STRIDE = 1 << 16


class SegmentView:
    """Memory mapping of the first `size` bytes of a segment file; valid as long as any slice of it."""

    def __init__(self, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._mapping = mapping
        self.memory = memoryview(mapping)
        self.buffer: Any = pa.py_buffer(mapping)

    def release_pages(self, start: int, size: int) -> None:
        """Release the memory pages of a byte range that was read, so that they no longer count for this process.

        A later access loads them again from the kernel's page cache [madvise(2), shared file mappings].
        """
        page_start = start - start % mmap.PAGESIZE
        with contextlib.suppress(AttributeError, OSError):  # not every system supports it
            self._mapping.madvise(mmap.MADV_DONTNEED, page_start, start + size - page_start)


class Segment:
    """Segment file of frames.

    Attributes:
        size: Bytes that readers may access: all of them durable.
        end: The offset after its last durable row; rows below it lie within `size`.
        provenance: Incarnations of the journal that wrote its rows and the row before them.
    """

    def __init__(
        self,
        directory: Path,
        name: SegmentName,
        *,
        size: int,
        end: int,
        provenance: frames.SegmentProvenance,
        index: array[int] | None = None,
    ) -> None:
        self.path = name.path(directory)
        self.name = name
        self.size = size
        self.end = end
        self.provenance = provenance
        #: Positions of some frames with rows, in order, at least `INDEX_STRIDE` bytes apart.
        self._index = index

    @property
    def first_offset(self) -> int:
        """Offset of the segment's first row."""
        return self.name.first_offset

    def view(self) -> SegmentView:
        """Map the durable bytes of the file.

        Raises:
            JournalError: TL-J07, the segment was removed after its rows were committed.
            JournalDamaged: TL-J05, the file is shorter than it was.
        """
        try:
            return SegmentView(self.path, self.size)
        except FileNotFoundError as error:
            raise JournalError(
                "TL-J07",
                str(self.path),
                f"rows {self.first_offset:,} to {self.end:,} were committed and removed",
                "Read from the journal's first row on.",
            ) from error
        except ValueError as error:
            problem = f"is shorter than its {self.size:,} durable bytes"
            raise frames.journal_damaged(self.path, problem) from error

    def index(self, view: SegmentView) -> array[int]:
        """Return the sparse index; that of a segment from an earlier opening is built at its first use."""
        if self._index is None:
            index = array("Q")
            for position, _ in self.row_frames(view, 0):
                _add_to_index(index, position)
            self._index = index
        return self._index

    def row_frames(self, view: SegmentView, position: int) -> Iterator[tuple[int, frames.FrameHeader]]:
        """Yield position and header of frames with rows, from the frame at `position` on; checksums are not verified.

        Raises:
            JournalDamaged: TL-J05, a header does not continue the previous one.
            JournalError: TL-J09, a frame has an unknown kind, of a newer Towline.
        """
        limit = len(view.memory)
        next_offset = None
        while position < limit:
            header = frames.header_at(view.memory, position, limit)
            if header is None or (next_offset is not None and header.first_offset != next_offset):
                raise frames.journal_damaged(self.path, f"the frame at byte {position:,} is not as it was written")
            if header.kind not in _FRAME_KINDS:
                problem = f"has a frame of kind {header.kind}, which this Towline doesn't know"
                raise frames.foreign_file(str(self.path), problem)
            if header.rows:
                yield position, header
            next_offset = header.end
            position += header.size

    def find_frame(self, view: SegmentView, offset: int) -> tuple[int, frames.FrameHeader]:
        """Return position and header of the frame that holds a row of this segment.

        Raises:
            JournalDamaged: TL-J05, no frame holds the row.
        """

        def first_row_at(position: int) -> int:  # a position beyond the view was indexed after its creation
            header = frames.header_at(view.memory, position, len(view.memory))
            return header.first_offset if header else offset + 1

        for position, header in self.row_frames(view, _indexed_position(self.index(view), offset, first_row_at)):
            if header.end > offset >= header.first_offset:
                return position, header
        raise frames.journal_damaged(self.path, f"row {offset:,} is missing in its frames")

    def find_frame_at_byte(self, view: SegmentView, byte: int) -> tuple[int, frames.FrameHeader] | None:
        """Return the last frame with rows that begins at or before this byte, or None."""
        frame = None
        for position, header in self.row_frames(view, _indexed_position(self.index(view), byte)):
            if position > byte:
                break
            frame = position, header
        return frame


def _add_to_index(index: array[int], position: int) -> None:
    if not index or position - index[-1] >= INDEX_STRIDE:
        index.append(position)


def _indexed_position(index: array[int], max_key: int, key: Callable[[int], int] = int) -> int:
    """Return the last indexed position whose key is at most `max_key`, else the first one."""
    return index[max(bisect_right(index, max_key, key=key) - 1, 0)] if index else 0


_FRAME_KINDS = frozenset(frames.FrameKind)
assert frames.HEADER_BYTES % 8 == 0  # Arrow buffers stay aligned in the file


def count_removable(sealed_segments: Sequence[Segment], committed: int, retain_bytes: int) -> int:
    """Return the number of oldest segments that are below the watermark and beyond the bytes to retain."""
    count = sum(1 for segment in sealed_segments if segment.end <= committed)
    retained_bytes = 0
    while count and retained_bytes + sealed_segments[count - 1].size <= retain_bytes:
        retained_bytes += sealed_segments[count - 1].size
        count -= 1
    return count


class ActiveSegment(Segment):
    """Newest segment, which accepts writes; creating the object creates its file, durable with its name.

    Raises:
        JournalFull: TL-J02, no free space; nothing changed.
        JournalFailed: TL-J04, a system call failed.

    Attributes:
        written_bytes: Bytes written, all of them whole frames.
        synced_bytes: Durable bytes; <= written_bytes. Between them are only watermarks, never rows.
    """

    def __init__(self, disk: Disk, directory: Path, snapshot: frames.Snapshot, syncs: Histogram) -> None:
        state, name = snapshot.state, SegmentName(snapshot.sequence, snapshot.state.end)
        payload = snapshot.encode()
        frame = frames.encode_frame(
            frames.FrameKind.SNAPSHOT, epoch=state.epoch, first_offset=state.end, durable_bytes=0, payload=payload
        )
        self._descriptor = write_file(disk, name.path(directory), frame.buffers)
        self._row_index = array("Q")
        index, origin = self._row_index, state.provenance
        super().__init__(directory, name, size=frame.size, end=state.end, provenance=origin, index=index)
        self._disk, self._syncs = disk, syncs
        self.written_bytes = self.synced_bytes = frame.size

    def write(self, frame: frames.EncodedFrame) -> None:
        """Append a frame, not yet durable.

        Raises:
            JournalFull: TL-J02, the disk is full; the file is unchanged.
            JournalFailed: TL-J04, another system call error.
        """
        try:
            write_all(self._disk, self._descriptor, frame.buffers)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise journal_failed(self.path, "writing a frame", error) from error
            with map_errors(self.path, "writing a frame"):
                self._disk.truncate(self._descriptor, self.written_bytes)
            problem = f"the disk is full ({error.strerror}); nothing was written"
            raise journal_full(self.path.parent, problem) from error
        self.written_bytes += frame.size

    def sync(self) -> None:
        """Sync the written frames.

        Raises:
            JournalFailed: TL-J04; this file must not be synced again [I6].
        """
        if self.synced_bytes < self.written_bytes:
            started_at = time.perf_counter()
            try:
                self._disk.sync_data(self._descriptor)
            except OSError as error:
                raise journal_failed(self.path, "fdatasync", error) from error
            self._syncs.observe(time.perf_counter() - started_at)
            self.synced_bytes = self.written_bytes

    def expose_frame(self, position: int, end: int) -> None:
        """Let readers see the frame with rows at `position`, durable now; `end` is the offset after its last row."""
        _add_to_index(self._row_index, position)
        self.size, self.end = self.synced_bytes, end

    def close(self) -> None:
        """Close the file descriptor; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


#: Most bytes of a batch that is read, unless it is one row: a reader holds a few of them at a time.
BATCH_BYTES: Final = 32 << 20
#: Frames from this size on have their pages released after the read.
_LARGE_FRAME_BYTES: Final = 1 << 20
#: Most bytes of a frame, unless it is one row; and so many fit into a journal's limit at least.
_MAX_FRAME_BYTES: Final = 16 << 20
_MIN_FRAMES_IN_LIMIT: Final = 16
#: Most bytes of a null: an offset and a bit.
_MAX_NULL_BYTES: Final = 9
_JOINED_BATCHES = (
    64  # small batches are concatenated in groups of this size: unjoined, a batch of 15 columns takes 8 KB
)


def max_frame_bytes(limit: int | None) -> int:
    """Return the most bytes per append to a journal with this size limit (None: unlimited), but at least one row."""
    return _MAX_FRAME_BYTES if limit is None else min(_MAX_FRAME_BYTES, limit // _MIN_FRAMES_IN_LIMIT)


def _segments_from(segments: Sequence[Segment], start: int) -> Iterator[Segment]:
    """Yield the segments with rows from `start` on."""
    index = max(bisect_right(segments, start, key=lambda segment: segment.first_offset) - 1, 0)
    return (segment for segment in islice(segments, index, None) if segment.end > max(start, segment.first_offset))


class RowSlice(NamedTuple):
    """Rows of one frame.

    Attributes:
        rows: A record batch.
        size: Its bytes, or slightly more: `nbytes` costs five times as much as reading a small frame does (measured).
    """

    rows: Any
    size: int


def row_slices(segments: Sequence[Segment], schema: Any, start: int, end: int) -> Iterator[RowSlice]:
    """Yield the rows from `start` to `end` as they were appended, cut at both ends, without a copy.

    Raises:
        JournalDamaged: TL-J05, a frame has a wrong checksum; none of its rows is returned.
        JournalError: TL-J07, the rows were removed meanwhile.
    """
    for segment in _segments_from(segments, start):
        if start >= end:
            return
        stop = min(end, segment.end)
        view = segment.view()
        for position, header in segment.row_frames(view, segment.find_frame(view, start)[0]):
            batch = _read_batch(segment, view, position, header, schema)
            rows = batch.slice(start - header.first_offset, min(stop, header.end) - start)
            yield RowSlice(rows, header.payload_bytes if rows.num_rows == header.rows else rows.nbytes)
            start = min(stop, header.end)
            if header.size >= _LARGE_FRAME_BYTES:
                del batch, rows
                view.release_pages(position, header.size)
            if start == stop:
                break
        if start < stop:
            raise frames.journal_damaged(segment.path, f"rows {start:,} to {stop:,} are missing at its end")


def _read_batch(segment: Segment, view: SegmentView, position: int, header: frames.FrameHeader, schema: Any) -> Any:
    if frames.intact_at(view.memory, position, len(view.memory)) is None:
        rows = f"rows {header.first_offset:,} to {header.end:,} (from byte {position:,})"
        raise frames.journal_damaged(segment.path, f"{rows} have a wrong checksum")
    return pa.ipc.read_record_batch(
        view.buffer.slice(frames.payload_at(position, header), header.payload_bytes), schema
    )


def combine_slices(slices: Iterable[RowSlice], batch_rows: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Any]:
    """Yield rows in batches within both bounds: large slices are split without a copy, small ones concatenated.

    A row larger than `batch_bytes` is a batch by itself. Concatenated batches stay far below the 2 GiB limit of the
    32-bit offsets in Arrow's binary columns.
    """
    joined_batches, small_batches, row_count, byte_count = list[Any](), list[Any](), 0, 0
    for rows, size in slices:
        count = rows.num_rows
        large = 2 * count > batch_rows or 2 * size > batch_bytes
        if row_count and (large or row_count + count > batch_rows or byte_count + size > batch_bytes):
            yield _join_batches(joined_batches + small_batches)
            joined_batches, small_batches, row_count, byte_count = [], [], 0, 0
        if large:
            yield from split_batch(rows, batch_rows, batch_bytes)
        else:
            small_batches.append(rows)
            row_count, byte_count = row_count + count, byte_count + size
            if len(small_batches) == _JOINED_BATCHES:
                joined_batches.append(_join_batches(small_batches))
                small_batches = []
        del rows  # the next one may be as large
    if row_count:
        yield _join_batches(joined_batches + small_batches)


def _join_batches(batches: list[Any]) -> Any:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def split_batch(rows: Any, batch_rows: int, batch_bytes: int) -> list[Any]:
    """Split the rows of one record batch into slices within both bounds, at least one row each, without a copy."""
    # `nbytes`, which asks each column, takes 25 us. Columns of nulls may share a buffer that is counted once.
    null_bytes = _MAX_NULL_BYTES * rows.num_columns * (rows.num_rows + 1)
    if rows.num_rows <= batch_rows and rows.get_total_buffer_size() + null_bytes <= batch_bytes:
        return [rows]
    slices, start = [], 0
    while start < rows.num_rows:
        slice_rows = min(batch_rows, rows.num_rows - start)
        if rows.slice(start, slice_rows).nbytes > batch_bytes:
            sizes = range(1, slice_rows)
            slice_rows = max(1, bisect_right(sizes, batch_bytes, key=lambda count: rows.slice(start, count).nbytes))
        slices.append(rows.slice(start, slice_rows))
        start += slice_rows
    return slices


def offset_after_bytes(segments: Sequence[Segment], start: int, end: int, max_bytes: int) -> int:
    """Return the offset that `max_bytes` on disk reach from row `start`; a frame's bytes count evenly for its rows."""
    remaining_bytes = max_bytes
    for segment in _segments_from(segments, start):
        view = segment.view()
        position, header = segment.find_frame(view, max(start, segment.first_offset))
        byte = _byte_at(position, header, max(start, segment.first_offset)) + remaining_bytes
        if byte < len(view.memory):
            position, header = segment.find_frame_at_byte(view, byte) or (position, header)
            return min(header.first_offset + (byte - position) * header.rows // header.size, header.end, end)
        remaining_bytes = byte - len(view.memory)
    return end


def bytes_between(segments: Sequence[Segment], start: int, end: int) -> int:
    """Return the bytes on disk of the rows from `start` to `end`, counted as in `offset_after_bytes`."""
    total = 0
    for segment in _segments_from(segments, start):
        if segment.first_offset >= end:
            break
        view, first_row = segment.view(), max(start, segment.first_offset)
        position, header = segment.find_frame(view, first_row)
        start_byte = _byte_at(position, header, first_row)
        end_position, header = segment.find_frame(view, min(end, segment.end) - 1)
        total += _byte_at(end_position, header, min(end, segment.end)) - start_byte
    return total


def _byte_at(position: int, header: frames.FrameHeader, row: int) -> int:
    return position + (row - header.first_offset) * header.size // header.rows


def incarnation_below(segments: Sequence[Segment], offset: int) -> str:
    """Return the incarnation that wrote the row before `offset`, which is at or above the first segment's."""
    index = bisect_right(segments, offset - 1, key=lambda segment: segment.first_offset) - 1
    return segments[0].provenance.previous_incarnation if index < 0 else segments[index].provenance.rows_incarnation
