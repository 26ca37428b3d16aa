"""Segment files: written to at the end, mapped for the time of a read, found by a sparse index; and ranges of rows.

A range is the same rows in the same order, for ever, until they are removed [I4].

The index holds one entry for each `STRIDE` bytes, so that 10 M rows in frames of their own (15 GB) cost 2 MB of
memory; the way from an entry to a row goes over the headers in the mapped file. Maps are not kept: what a reader no
longer holds is unmapped, and a removed file stays readable for the one that still holds its map. What is written is
durable when the file says so, and the file dead after a failed sync [I6].
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
from towline.journal.disk import NO_ROOM, Name, failed, failing, full, new_file, write_all
from towline.journal.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    Provenance,
    damaged,
    encode,
    foreign,
    header_at,
    intact_at,
    payload_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from towline.journal.disk import Disk
    from towline.journal.frames import Encoded, Snapshot
    from towline.timing import Histogram

STRIDE = 1 << 16


class View:
    """The first `size` bytes of a file, mapped; alive as long as anything cut from it."""

    def __init__(self, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._mapped = mapped
        self.memory = memoryview(mapped)
        self.buffer: Any = pa.py_buffer(mapped)

    def passed(self, start: int, size: int) -> None:
        """Bytes were looked at and handed on: their pages need not count as this process's memory any longer.

        Whoever still looks at them gets them back from the kernel's cache [madvise(2), shared file mappings].
        """
        first = start - start % mmap.PAGESIZE
        with contextlib.suppress(AttributeError, OSError):  # not every system has it
            self._mapped.madvise(mmap.MADV_DONTNEED, first, start + size - first)


class Segment:
    """A file of frames.

    Attributes:
        size: Bytes that readers may look at: all of them durable.
        end: The offset after its last durable row; what lies below it lies below `size`, too.
        origin: Which openings of the journal wrote its rows and the row below them.
    """

    def __init__(
        self, directory: Path, name: Name, *, size: int, end: int, origin: Provenance, index: array[int] | None = None
    ) -> None:
        self.path = name.path(directory)
        self.name = name
        self.size = size
        self.end = end
        self.origin = origin
        #: Where some of the frames with rows begin, in order, at least `STRIDE` bytes apart.
        self._index = index

    @property
    def first(self) -> int:
        """The offset of its first row."""
        return self.name.first

    def view(self) -> View:
        """Map what is durable now.

        Raises:
            JournalError: TL-J07, the segment was removed after its rows were committed.
            JournalDamaged: TL-J05, the file is shorter than it was.
        """
        try:
            return View(self.path, self.size)
        except FileNotFoundError as error:
            raise JournalError(
                "TL-J07",
                str(self.path),
                f"rows {self.first:,} to {self.end:,} were committed and removed",
                "Read from the journal's first row on.",
            ) from error
        except ValueError as error:
            raise damaged(self.path, f"is shorter than the {self.size:,} bytes that were durable") from error

    def index(self, view: View) -> array[int]:
        """Return the index; that of a segment from an earlier run is built at its first use."""
        if self._index is None:
            index = array("Q")
            for position, _ in self.records(view, 0):
                _note(index, position)
            self._index = index
        return self._index

    def records(self, view: View, position: int) -> Iterator[tuple[int, Header]]:
        """Yield position and header of the frames with rows from the frame at `position` on; checksums are not checked.

        Raises:
            JournalDamaged: TL-J05, a header does not continue the one before it.
            JournalError: TL-J09, a frame of a kind that only a newer Towline knows.
        """
        limit = len(view.memory)
        reached = None
        while position < limit:
            header = header_at(view.memory, position, limit)
            if header is None or (reached is not None and header.first != reached):
                raise damaged(self.path, f"the frame at byte {position:,} no longer reads as it was written")
            if header.kind not in _KINDS:
                raise foreign(str(self.path), f"has a frame of kind {header.kind}, which this Towline doesn't know")
            if header.rows:
                yield position, header
            reached = header.end
            position += header.size

    def find(self, view: View, offset: int) -> tuple[int, Header]:
        """Return position and header of the frame that holds a row of this segment.

        Raises:
            JournalDamaged: TL-J05, the frames do not hold it.
        """

        def first_row(position: int) -> int:  # one beyond the view was noted after it was made
            header = header_at(view.memory, position, len(view.memory))
            return header.first if header else offset + 1

        for position, header in self.records(view, _last(self.index(view), offset, first_row)):
            if header.end > offset >= header.first:
                return position, header
        raise damaged(self.path, f"row {offset:,} is not where it should be")

    def find_byte(self, view: View, byte: int) -> tuple[int, Header] | None:
        """Return the last frame with rows that begins at or before this byte, or none."""
        frame = None
        for position, header in self.records(view, _last(self.index(view), byte)):
            if position > byte:
                break
            frame = position, header
        return frame


def _note(index: array[int], position: int) -> None:
    if not index or position - index[-1] >= STRIDE:
        index.append(position)


def _last(index: array[int], most: int, key: Callable[[int], int] = int) -> int:
    """The last noted position with a key of at most this, else the first."""
    return index[max(bisect_right(index, most, key=key) - 1, 0)] if index else 0


_KINDS = frozenset(Kind)
assert HEADER_BYTES % 8 == 0  # Arrow buffers are aligned where they lie


def removable(sealed: Sequence[Segment], committed: int, retain: int) -> int:
    """How many segments, from the oldest on, lie below the watermark and beyond the bytes that are to be kept."""
    below = sum(1 for segment in sealed if segment.end <= committed)
    kept = 0
    while below and kept + sealed[below - 1].size <= retain:
        kept += sealed[below - 1].size
        below -= 1
    return below


class Active(Segment):
    """The newest segment, which is written to; its file is made, durable with its name, with this object.

    Raises:
        JournalFull: TL-J02, no room; nothing changed.
        JournalFailed: TL-J04, a system call failed.

    Attributes:
        written: Bytes written, all of them whole frames.
        synced: Bytes known to be durable; <= written. Between them lie only watermarks, never rows.
    """

    def __init__(self, disk: Disk, directory: Path, snapshot: Snapshot, syncs: Histogram) -> None:
        state, name = snapshot.state, Name(snapshot.sequence, snapshot.state.end)
        frame = encode(Kind.SNAPSHOT, epoch=state.epoch, first=state.end, durable=0, payload=snapshot.encode())
        self._descriptor = new_file(disk, name.path(directory), frame.buffers)
        self._rows = array("Q")
        super().__init__(directory, name, size=frame.size, end=state.end, origin=state.origin, index=self._rows)
        self._disk, self._syncs = disk, syncs
        self.written = self.synced = frame.size

    def write(self, frame: Encoded) -> None:
        """Put a frame behind the last one, not yet durable.

        Raises:
            JournalFull: TL-J02, no room on the disk; the file is as it was.
            JournalFailed: TL-J04, anything else.
        """
        try:
            write_all(self._disk, self._descriptor, frame.buffers)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise failed(self.path, "writing a frame", error) from error
            with failing(self.path, "writing a frame"):
                self._disk.truncate(self._descriptor, self.written)
            raise full(self.path.parent, f"the disk took no more ({error.strerror}); nothing was written") from error
        self.written += frame.size

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            JournalFailed: TL-J04; this file must not be synced again [I6].
        """
        if self.synced < self.written:
            begun = time.perf_counter()
            try:
                self._disk.sync_data(self._descriptor)
            except OSError as error:
                raise failed(self.path, "fdatasync", error) from error
            self._syncs.observe(time.perf_counter() - begun)
            self.synced = self.written

    def grow(self, position: int, end: int) -> None:
        """Let readers see the frame with rows at `position`, durable now; `end` is the offset after its last row."""
        _note(self._rows, position)
        self.size, self.end = self.synced, end

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


#: Most bytes of a batch that is read, unless it is one row: whoever reads holds a few of them at a time.
BATCH_BYTES: Final = 32 << 20
#: Bytes of a frame whose pages are given back once its rows were handed on.
_LARGE: Final = 1 << 20
#: Most bytes of a frame, unless it is one row; and so many frames fit below a limit of the journal at least, or one
#: might never find room.
_LARGEST_FRAME: Final = 16 << 20
_FRAMES_BELOW_LIMIT: Final = 16
#: Bytes that a null takes at most, an offset and a bit.
_MOST_A_NULL: Final = 9
_CHUNK = 64  # so many small batches are joined at a time: a batch of 15 columns takes 8 KB until it is


def largest_frame(limit: int | None) -> int:
    """Bytes of rows that are appended at a time, unless it is one row, to a journal with this limit (None for none)."""
    return _LARGEST_FRAME if limit is None else min(_LARGEST_FRAME, limit // _FRAMES_BELOW_LIMIT)


def _overlapping(segments: Sequence[Segment], start: int) -> Iterator[Segment]:
    """Yield the segments with rows from `start` on."""
    at = max(bisect_right(segments, start, key=lambda segment: segment.first) - 1, 0)
    return (segment for segment in islice(segments, at, None) if segment.end > max(start, segment.first))


class RowSlice(NamedTuple):
    """Rows as they lie in one frame.

    Attributes:
        rows: A record batch.
        size: Its bytes, or somewhat more: `nbytes` costs five times as much as reading a small frame does (measured).
    """

    rows: Any
    size: int


def pieces(segments: Sequence[Segment], schema: Any, start: int, end: int) -> Iterator[RowSlice]:
    """Yield the rows from `start` to `end` as they were appended, cut at the ends, without a copy.

    Raises:
        JournalDamaged: TL-J05, a frame is not as it was written; nothing of it is handed out.
        JournalError: TL-J07, the rows were removed meanwhile.
    """
    for segment in _overlapping(segments, start):
        if start >= end:
            return
        stop = min(end, segment.end)
        view = segment.view()
        for position, header in segment.records(view, segment.find(view, start)[0]):
            batch = _batch(segment, view, position, header, schema)
            rows = batch.slice(start - header.first, min(stop, header.end) - start)
            yield RowSlice(rows, header.payload if rows.num_rows == header.rows else rows.nbytes)
            start = min(stop, header.end)
            if header.size >= _LARGE:
                del batch, rows
                view.passed(position, header.size)
            if start == stop:
                break
        if start < stop:
            raise damaged(segment.path, f"rows {start:,} to {stop:,} are missing at its end")


def _batch(segment: Segment, view: View, position: int, header: Header, schema: Any) -> Any:
    if intact_at(view.memory, position, len(view.memory)) is None:
        what = f"rows {header.first:,} to {header.end:,} (from byte {position:,}) no longer read as they were written"
        raise damaged(segment.path, what)
    return pa.ipc.read_record_batch(view.buffer.slice(payload_at(position, header), header.payload), schema)


def combined(pieces: Iterable[RowSlice], batch_rows: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Any]:
    """Yield the same rows in batches within both bounds: large ones sliced without a copy, small ones joined.

    A row larger than `batch_bytes` is a batch of its own. What is joined stays far below the 2 GiB that Arrow's 32-bit
    offsets of a binary column can tell.
    """
    chunks, small, held, held_bytes = list[Any](), list[Any](), 0, 0
    for rows, size in pieces:
        count = rows.num_rows
        large = 2 * count > batch_rows or 2 * size > batch_bytes
        if held and (large or held + count > batch_rows or held_bytes + size > batch_bytes):
            yield _joined(chunks + small)
            chunks, small, held, held_bytes = [], [], 0, 0
        if large:
            yield from cut(rows, batch_rows, batch_bytes)
        else:
            small.append(rows)
            held, held_bytes = held + count, held_bytes + size
            if len(small) == _CHUNK:
                chunks.append(_joined(small))
                small = []
        del rows  # the next one may be as large
    if held:
        yield _joined(chunks + small)


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def cut(rows: Any, batch_rows: int, batch_bytes: int) -> list[Any]:
    """Return the rows of one record batch in slices within both bounds, at least one row each, without a copy."""
    # To ask each column for its share, as `nbytes` does, takes 25 us. Columns of nulls may share what is counted once.
    shared = _MOST_A_NULL * rows.num_columns * (rows.num_rows + 1)
    if rows.num_rows <= batch_rows and rows.get_total_buffer_size() + shared <= batch_bytes:
        return [rows]
    parts, at = [], 0
    while at < rows.num_rows:
        most = min(batch_rows, rows.num_rows - at)
        if rows.slice(at, most).nbytes > batch_bytes:
            sizes = range(1, most)
            most = max(1, bisect_right(sizes, batch_bytes, key=lambda count: rows.slice(at, count).nbytes))
        parts.append(rows.slice(at, most))
        at += most
    return parts


def offset_after_bytes(segments: Sequence[Segment], start: int, end: int, max_bytes: int) -> int:
    """Return how far `max_bytes` on disk reach from row `start`; a frame's bytes count evenly for its rows."""
    budget = max_bytes
    for segment in _overlapping(segments, start):
        view = segment.view()
        position, header = segment.find(view, max(start, segment.first))
        byte = _byte_at(position, header, max(start, segment.first)) + budget
        if byte < len(view.memory):
            position, header = segment.find_byte(view, byte) or (position, header)
            return min(header.first + (byte - position) * header.rows // header.size, header.end, end)
        budget = byte - len(view.memory)
    return end


def bytes_between(segments: Sequence[Segment], start: int, end: int) -> int:
    """Return how many bytes on disk the rows from `start` to `end` are, counted as `offset_after_bytes` counts them."""
    total = 0
    for segment in _overlapping(segments, start):
        if segment.first >= end:
            break
        view, first = segment.view(), max(start, segment.first)
        position, header = segment.find(view, first)
        begin = _byte_at(position, header, first)
        last, header = segment.find(view, min(end, segment.end) - 1)
        total += _byte_at(last, header, min(end, segment.end)) - begin
    return total


def _byte_at(position: int, header: Header, row: int) -> int:
    return position + (row - header.first) * header.size // header.rows


def origin_below(segments: Sequence[Segment], offset: int) -> str:
    """Return which opening of the journal wrote the row below `offset`, which is the first one's or lies above it."""
    at = bisect_right(segments, offset - 1, key=lambda segment: segment.first) - 1
    return segments[0].origin.below if at < 0 else segments[at].origin.rows
