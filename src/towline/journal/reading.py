"""Ranges of rows out of segments: the same rows in the same order, for ever, until they are removed [I4]."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from towline.journal.frames import intact_at, payload_at
from towline.journal.segment import Segment, View, damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from towline.journal.frames import Header

__all__ = ["combined", "offset_after_bytes", "pieces"]

_CHUNK = 64  # so many small batches are joined at a time: a batch of 15 columns takes 8 KB until it is


def _overlapping(segments: Sequence[Segment], start: int) -> Iterator[Segment]:
    """Yield the segments with rows from `start` on."""
    at = max(bisect_right(segments, start, key=lambda segment: segment.first) - 1, 0)
    return (segment for segment in islice(segments, at, None) if segment.end > max(start, segment.first))


def pieces(segments: Sequence[Segment], schema: Any, start: int, end: int) -> Iterator[Any]:
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
            yield batch.slice(start - header.first, min(stop, header.end) - start)
            start = min(stop, header.end)
            if start == stop:
                break
        if start < stop:
            raise damaged(segment.path, f"rows {start:,} to {stop:,} are missing at its end")


def _batch(segment: Segment, view: View, position: int, header: Header, schema: Any) -> Any:
    if intact_at(view.memory, position, len(view.memory)) is None:
        what = f"rows {header.first:,} to {header.end:,} (from byte {position:,}) no longer read as they were written"
        raise damaged(segment.path, what)
    return pa.ipc.read_record_batch(view.buffer.slice(payload_at(position, header), header.payload), schema)


def combined(batches: Iterable[Any], batch_rows: int) -> Iterator[Any]:
    """Yield the same rows in batches of at most `batch_rows`: large ones sliced without a copy, small ones joined."""
    waiting = _Small()
    for batch in batches:
        rows = batch.num_rows
        if waiting.rows and (waiting.rows + rows > batch_rows or 2 * rows > batch_rows):
            yield waiting.joined()
        if 2 * rows > batch_rows:
            yield from (batch.slice(at, batch_rows) for at in range(0, rows, batch_rows))
        else:
            waiting.add(batch)
    if waiting.rows:
        yield waiting.joined()


class _Small:
    """Small batches on their way into a larger one."""

    def __init__(self) -> None:
        self.rows = 0
        self._fresh: list[Any] = []
        self._joined: list[Any] = []

    def add(self, batch: Any) -> None:
        self.rows += batch.num_rows
        self._fresh.append(batch)
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
            found = segment.find_byte(view, byte) or (position, header)
            return min(_row_at(*found, byte), end)
        budget = byte - len(view.memory)
    return end


def _row_at(position: int, header: Header, byte: int) -> int:
    return min(header.first + (byte - position) * header.rows // header.size, header.end)
