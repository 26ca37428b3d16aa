"""Ranges of rows out of segments: the same rows in the same order, for ever, until they are removed [I4]."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from towline.journal.frames import intact_at, payload_at
from towline.journal.segment import Segment, View, damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from towline.journal.frames import Header

__all__ = [
    "BATCH_BYTES",
    "RowSlice",
    "bytes_between",
    "combined",
    "cut",
    "largest_frame",
    "offset_after_bytes",
    "origin_below",
    "pieces",
]

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
    waiting = _Small()
    for rows, size in pieces:
        count = rows.num_rows
        large = 2 * count > batch_rows or 2 * size > batch_bytes
        if waiting.rows and (large or waiting.rows + count > batch_rows or waiting.size + size > batch_bytes):
            yield waiting.joined()
        if large:
            yield from cut(rows, batch_rows, batch_bytes)
        else:
            waiting.add(rows, size)
        del rows  # the next one may be as large
    if waiting.rows:
        yield waiting.joined()


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


class _Small:
    """Small batches on their way into a larger one."""

    def __init__(self) -> None:
        self.rows = 0
        self.size = 0
        self._fresh: list[Any] = []
        self._joined: list[Any] = []

    def add(self, rows: Any, size: int) -> None:
        self.rows += rows.num_rows
        self.size += size
        self._fresh.append(rows)
        if len(self._fresh) == _CHUNK:
            self._joined.append(pa.concat_batches(self._fresh))
            self._fresh = []

    def joined(self) -> Any:
        parts = self._joined + self._fresh
        self.__init__()  # type: ignore[misc]
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def offset_after_bytes(segments: Sequence[Segment], start: int, end: int, max_bytes: int) -> int:
    """Return how far `max_bytes` on disk reach from row `start`; a frame's bytes count evenly for its rows."""
    budget = max_bytes
    for segment in _overlapping(segments, start):
        view = segment.view()
        position, header = segment.find(view, max(start, segment.first))
        byte = position + (max(start, segment.first) - header.first) * header.size // header.rows + budget
        if byte < len(view.memory):
            frame = segment.find_byte(view, byte) or (position, header)
            return min(_row_at(*frame, byte), end)
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


def _row_at(position: int, header: Header, byte: int) -> int:
    return min(header.first + (byte - position) * header.rows // header.size, header.end)


def origin_below(segments: Sequence[Segment], offset: int) -> str:
    """Return which opening of the journal wrote the row below `offset`, which is the first one's or lies above it."""
    at = bisect_right(segments, offset - 1, key=lambda segment: segment.first) - 1
    return segments[0].origin.below if at < 0 else segments[at].origin.rows
