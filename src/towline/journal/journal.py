"""Journal of rows in order: durable when `append` returns, removed when every consumer has committed them.

    one thread      append, set_session                   wait for the disk
    any thread      commit, forget                        may wait for one sync of the writer
    any thread      read, find_range_end, count, status   never wait for a sync

Frames are appended to the newest segment; full segments are sealed, committed ones removed. The frame format is in
`frames`, files and row ranges in `segment`, opening in `recovery`.
"""

from __future__ import annotations

import contextlib
import threading
from functools import wraps
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from towline.errors import JournalError, JournalFailed, JournalFull, TowlineError
from towline.journal import frames
from towline.journal.disk import Disk, DiskSpace, Limits, Lock, map_errors, prepare_directory
from towline.journal.recovery import recover
from towline.journal.segment import (
    BATCH_BYTES,
    ActiveSegment,
    bytes_between,
    combine_slices,
    count_removable,
    incarnation_below,
    offset_after_bytes,
    row_slices,
)
from towline.timing import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from towline.journal.recovery import RecoveredJournal
    from towline.journal.segment import Segment

_NO_CHANGES: Final[frames.Changes] = MappingProxyType({})
_SIZE: Final = attrgetter("size")
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def _exclusive_change(
    change: Callable[Concatenate[Journal, _Params], _Result],
) -> Callable[Concatenate[Journal, _Params], _Result]:
    """Run a method that writes files under the write lock; an unexpected error ends the journal object [I6]."""

    @wraps(change)
    def locked_change(self: Journal, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        with self._write_lock:
            if self._failure:
                raise self._failure
            try:
                self._lock.check()
                return change(self, *args, **kwargs)
            except JournalFailed as error:
                self._failure = error
                raise
            except JournalError:
                raise  # raised before any change, or after it was undone
            except BaseException as error:
                self._failure = JournalFailed("TL-J04", self.location, f"a write was interrupted ({error!r})")
                raise

    return locked_change


class Journal:
    """Durable list of rows with a watermark per consumer; `open` returns one.

    After a failed write or sync the object is dead: this call and every later one raise `JournalFailed` (TL-J04), and
    no file is synced again [I6].

    Attributes:
        journal_id: 12 hex digits created with the journal; with an offset it identifies a row for ever.
        epoch: Grows by one with every opening [I8].
        incarnation: 8 hex digits of this opening; the opening of a copied directory has others [I14].
        repair_note: One line for the operator when opening cut an unfinished write; else "".
        location: The directory, as text for errors and logs.
        end: The next offset; every row below it is durable.
    """

    def __init__(
        self, directory: Path, schema: Any, space: DiskSpace, disk: Disk, lock: Lock, recovered: RecoveredJournal
    ) -> None:
        #: state that a snapshot would hold now; its dicts but `held` are replaced, never changed: readers need no lock
        self._state = recovered.state
        state = self._state
        self.journal_id, self.epoch, self.incarnation = state.journal_id, state.epoch, state.incarnation
        self.repair_note, self.location = recovered.repair_note, str(directory)
        self._directory, self._schema, self._space, self._disk, self._lock = directory, schema, space, disk, lock
        self._syncs, self._bytes_written = Histogram(), 0
        #: guards the ledger only; never held during a system call
        self._ledger_lock = threading.Lock()
        #: counters whose totals are not on disk yet
        self._pending_counters: set[str] = set()
        snapshot = self._snapshot(recovered.sequence, recovered.previous_bytes)
        self._active = ActiveSegment(disk, directory, snapshot, self._syncs)
        #: oldest first; the last one is written to. Replaced, never changed
        self._segments: tuple[Segment, ...] = (*recovered.segments, self._active)
        #: set last: a reader that sees it finds the rows
        self.end = self._state.end
        #: held while files change
        self._write_lock = threading.Lock()
        #: the error that ended this object
        self._failure: TowlineError | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        schema: Any,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        disk: Disk | None = None,
    ) -> Self:
        """Open the journal in a directory, or create one there: lock, recover, epoch + 1.

        Args:
            directory: The journal's directory; created with mode 0700 if it is missing.
            schema: The Arrow schema of every row.
            limits: Disk space limits.
            disk: The file system; tests replace it to inject faults.

        Raises:
            JournalLocked: TL-J03, another process holds the lock.
            JournalDamaged: TL-J05, durable rows are missing or unreadable.
            JournalFull: TL-J02, no free space for recovery or a new segment.
            JournalFailed: TL-J04, a write or sync failed.
            JournalError: TL-J01 directory unusable, TL-J06 another schema, TL-J09 foreign or newer files.
        """
        disk = disk or Disk()
        prepare_directory(directory, disk)
        lock, space = Lock(directory), DiskSpace(directory, limits, disk)
        try:
            with map_errors(directory, "opening the journal"):
                space.release_reserve_if_low()
                recovered = recover(directory, schema, disk)
            recovered.state.start_incarnation()
            journal = cls(directory, schema, space, disk, lock, recovered)
            space.create_reserve()
        except BaseException:
            lock.release()
            raise
        return journal

    # State ---------------------------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """Oldest offset that can be read."""
        return self._segments[0].first_offset

    def incarnation_of(self, offset: int) -> str:
        """Return the incarnation that wrote the row before `offset`; "" if there is no such row, or it was removed."""
        end, segments = self.end, self._segments
        return incarnation_below(segments, offset) if max(segments[0].first_offset, 1) <= offset <= end else ""

    @property
    def committed(self) -> int:
        """Smallest watermark of all consumers; `first_offset` without consumers."""
        return min(self._state.consumers.values(), default=self.first_offset)

    @property
    def consumers(self) -> Mapping[str, int]:
        """Watermark of each consumer."""
        return MappingProxyType(self._state.consumers)

    @property
    def session(self) -> Mapping[str, object]:
        """Last argument of `set_session`; empty if there was none."""
        return MappingProxyType(self._state.session)

    @property
    def ledger(self) -> Mapping[str, int]:
        """Totals of the ledger's counters, including increments that are not on disk yet [I11]."""
        return MappingProxyType(self._state.ledger)

    @property
    def held_ids(self) -> Mapping[int, tuple[int, int]]:
        """Packet id → row number, and a digest (inbox [I3]) or a phase (outbox [I10]); for the writing thread."""
        return MappingProxyType(self._state.held)

    @property
    def notes(self) -> Mapping[str, Any]:
        """Newest notes of `append` and `commit` by name, for the owner's use."""
        return MappingProxyType(self._state.notes)

    @property
    def limits(self) -> Limits:
        """Disk space limits."""
        return self._space.limits

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments."""
        sealed: int = sum(map(_SIZE, self._segments[:-1]))
        return sealed + self._active.written_bytes

    def disk_status(self) -> dict[str, Any]:
        """Return disk usage and sync times as plain values; never waits for a sync.

        Returns:
            ``syncs`` (`towline.timing.Histogram.as_json`), ``bytes_written`` since this opening, ``bytes_on_disk``,
            ``bytes_waiting`` of uncommitted rows (about), and ``room_left`` for more bytes (None if unknown).
        """
        available_bytes, committed, waiting_bytes = None, self.committed, 0
        with contextlib.suppress(OSError):
            available_bytes = self._space.available_bytes(self.bytes_on_disk)
        for segment in self._segments:
            rows = segment.end - max(segment.first_offset, committed)
            if rows > 0:  # a partly committed segment counts in proportion to its rows
                waiting_bytes += segment.size * rows // (segment.end - segment.first_offset)
        return {
            "syncs": self._syncs.as_json(),
            "bytes_written": self._bytes_written,
            "bytes_on_disk": self.bytes_on_disk,
            "bytes_waiting": waiting_bytes,
            "room_left": available_bytes,
        }

    # Writing -------------------------------------------------------------------------------------------------------

    @_exclusive_change
    def append(
        self,
        batch: Any = None,
        *,
        held_ids: Mapping[int, tuple[int, int]] | None = None,
        released_ids: Sequence[int] = (),
        notes: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> int:
        """Append the rows of a record batch, durable in one frame with one sync, and return the new end.

        Args:
            batch: Rows of the journal's schema; an offset column is the caller's business. None for packet ids or notes
                alone; without either the call does nothing.
            held_ids: QoS 2 packet ids of these rows → row number and digest [I3].
            released_ids: QoS 2 packet ids that the broker has released; applied before `held_ids`.
            notes: JSON values by name that become durable in the same frame; None removes a note.
            durable: False, without rows only: no sync, so a power failure may lose the frame.

        Raises:
            JournalFull: TL-J02, no free space; nothing was written, the same call may succeed later [I7].
            JournalFailed: TL-J04, this batch may be lost; the object is dead [I6].
            JournalError: TL-J06 another schema, TL-J08 larger than 2 GiB, TL-J10 closed.
        """
        if batch is not None and not batch.schema.equals(self._schema):
            problem = "a batch has another schema than this journal"
            raise JournalError("TL-J06", self.location, problem, "This is an error in the program, not in the data.")
        arguments = {"released": released_ids, "held": held_ids, "notes": notes}
        changes = {name: value for name, value in arguments.items() if value}
        rows: int = batch.num_rows if batch is not None else 0
        if not rows:
            if changes:
                self._write(changes, durable=durable)
            return self.end
        payload = batch.serialize()
        self._check_space(frames.frame_bytes(0, len(payload)))
        end = self._state.end + rows
        position = self._write(changes, payload, rows=rows, durable=True)
        self._state.end, self._state.last_row_incarnation = end, self._state.incarnation
        self._active.expose_frame(position, end)
        self.end = end
        return end

    @_exclusive_change
    def sync(self) -> None:
        """Sync frames that were written without a sync."""
        self._active.sync()

    def set_session(self, session: Mapping[str, object]) -> None:
        """Store the MQTT session, any JSON object, durably. The size limits do not apply.

        Raises:
            JournalFull: TL-J02, the disk is full; the previous session stays.
        """
        self._write_session(frames.decode_json(self.location, frames.encode_json(session)))

    def count(self, **increments: int) -> None:
        """Add to counters of the ledger [I11]; their totals are written with the next frame or by `close`."""
        with self._ledger_lock:
            ledger = dict(self._state.ledger)
            for name, increment in increments.items():
                ledger[name] = ledger.get(name, 0) + increment
            self._state.ledger = ledger
            self._pending_counters.update(increments)

    @_exclusive_change
    def commit(
        self, consumer: str, offset: int, *, released_ids: Sequence[int] = (), notes: Mapping[str, Any] | None = None
    ) -> bool:
        """Commit all rows below `offset` for a consumer; a lower offset than before changes nothing [I1].

        The watermark is written without a sync: after a power failure an older one may come back. Segments below every
        consumer's watermark are removed [I5].

        Args:
            consumer: Name of the consumer.
            offset: Offset of the first row that is not committed.
            released_ids: Packet ids to release in the same frame.
            notes: Notes to write in the same frame, as for `append`.

        Returns:
            Whether the commit is written. On a full disk it is not: the next frame writes the watermark, and the caller
            repeats packet ids and notes.

        Raises:
            JournalError: TL-J08, `offset` is beyond the end.
        """
        if offset > self.end:
            raise JournalError(
                "TL-J08",
                self.location,
                f"{consumer} committed up to row {offset:,}, but there are only {self.end:,}",
                "Its checkpoint belongs to another journal: start it with a new checkpoint.",
            )
        offset, previous_offset = max(offset, self.first_offset), self._state.consumers.get(consumer, -1)
        changes = {"released": released_ids, "notes": notes or {}} if released_ids or notes else {}
        if offset <= previous_offset and not changes:
            return True
        return self._set_consumers({**self._state.consumers, consumer: max(offset, previous_offset)}, changes)

    @_exclusive_change
    def forget(self, consumer: str) -> None:
        """Remove a consumer, so that rows no longer wait for it. An unknown name is ignored."""
        consumers = self._state.consumers
        if consumer in consumers:
            self._set_consumers({name: offset for name, offset in consumers.items() if name != consumer})

    def close(self) -> None:
        """Write pending counters, sync, and release the lock. A second call does nothing.

        Raises:
            JournalFailed: TL-J04, the last write failed; the directory is unlocked all the same.
        """
        try:
            if self._failure is None:
                self._write_pending()
        finally:
            self._failure = self._failure or JournalError("TL-J10", self.location, "the journal is closed")
            self._active.close()
            self._lock.release()

    @_exclusive_change
    def _write_pending(self) -> None:
        if self._pending_counters:
            self._write_watermarks(_NO_CHANGES)
        self._active.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading -------------------------------------------------------------------------------------------------------

    def read(self, start: int, end: int, *, batch_rows: int = 10_000, batch_bytes: int = BATCH_BYTES) -> Iterator[Any]:
        """Return the rows from `start` to `end` in batches within both bounds, with their checksums verified [I4].

        A row above `batch_bytes` is a batch by itself. Large batches refer to the mapped file, also after its removal.

        Raises:
            JournalError: TL-J07, some of these rows are not, or no longer, in the journal. TL-J10, closed.
            JournalDamaged: TL-J05 (while iterating), a frame has a wrong checksum; none of its rows is returned.
        """
        slices = row_slices(self._segments_for(start, end), self._schema, start, end)
        return combine_slices(slices, batch_rows, batch_bytes)

    def find_range_end(self, start: int, *, max_rows: int | None = None, max_bytes: int | None = None) -> int:
        """Return the end of a range from `start` within both bounds; at least one row, if there is one.

        Args:
            start: The first offset of the range.
            max_rows: Most rows in it.
            max_bytes: Most bytes in it on disk; a frame's bytes count evenly for its rows, so at most one frame more.

        Raises:
            JournalError: TL-J07, `start` is not, or no longer, in the journal. TL-J10, closed.
            JournalDamaged: TL-J05, the headers of the frames are damaged.
        """
        available, segments = self._readable_segments(start)
        end = available if max_rows is None else min(available, start + max(max_rows, 1))
        if max_bytes is not None and start < end:
            end = min(max(offset_after_bytes(segments, start, end, max_bytes), start + 1), end)
        return end

    def range_bytes(self, start: int, end: int) -> int:
        """Return the bytes of a range, as `find_range_end` counts them; raises the same errors."""
        return bytes_between(self._segments_for(start, end), start, end)

    def _segments_for(self, start: int, end: int) -> tuple[Segment, ...]:
        """Return the segments, after checking that they hold these rows."""
        available, segments = self._readable_segments(start)
        if end > available:
            raise self._out_of_range(start, end)
        return segments

    def _readable_segments(self, start: int) -> tuple[int, tuple[Segment, ...]]:
        if self._failure:
            raise self._failure
        end = self.end  # read before the segments, which hold at least these rows
        segments = self._segments
        if not segments[0].first_offset <= start <= end:
            raise self._out_of_range(start, start)
        return end, segments

    def _out_of_range(self, start: int, end: int) -> JournalError:
        return JournalError(
            "TL-J07",
            self.location,
            f"rows {start:,} to {end:,} were requested, the journal holds rows {self.first_offset:,} to {self.end:,}",
            "Lower rows were committed and removed, higher ones never written: is the checkpoint of this journal?",
        )

    # Frames and segments; one thread at a time, an error ends this object [I6] --------------------------------------

    @_exclusive_change
    def _write_session(self, session: Mapping[str, Any]) -> None:
        self._write({"session": session}, durable=True)

    def _write(self, changes: frames.Changes, payload: frames.Bytes = b"", *, rows: int = 0, durable: bool) -> int:
        """Write one frame, into a new segment if necessary, and return its position; `JournalFull` writes nothing."""
        with self._ledger_lock:
            pending = self._pending_counters  # none for most frames
            totals = {name: self._state.ledger[name] for name in pending} if pending else {}
        written_changes = {**changes, "ledger": totals} if totals else changes
        section = frames.encode_section(written_changes) if written_changes else b""
        used, limit = self._active.written_bytes, self._space.limits.segment_bytes
        segment_bytes = used + frames.frame_bytes(len(section), len(payload))
        if segment_bytes > self._space.segment_bytes and (self._active_has_rows() or used > limit):
            self._roll_segment()
        if durable and self._active.synced_bytes < self._active.written_bytes:
            self._active.sync()  # sync the watermarks first: rows follow durable bytes only
        position = self._active.written_bytes
        self._active.write(
            frames.encode_frame(
                frames.FrameKind.CHANGES,
                epoch=self.epoch,
                first_offset=self._state.end,
                durable_bytes=self._active.synced_bytes,
                rows=rows,
                section=section,
                payload=payload,
            )
        )
        self._bytes_written += self._active.written_bytes - position
        if durable:
            self._active.sync()
            self._lock.check()  # checked after the sync: a new owner has seen these rows, or they are not acknowledged
        if totals:
            with self._ledger_lock:  # counters that grew meanwhile stay pending
                self._pending_counters -= {name for name, total in totals.items() if self._state.ledger[name] == total}
        frames.apply_changes(self._state, changes)
        return position

    def _write_watermarks(self, changes: frames.Changes) -> bool:
        """Write the watermarks, on a full disk into the space of the reserve file; return whether that succeeded."""
        all_changes = {"consumers": self._state.consumers, "floor": self._state.floor, **changes}
        try:
            self._write(all_changes, durable=False)
        except JournalFull:
            self._space.release_reserve()
            try:
                self._write(all_changes, durable=False)
            except JournalFull:
                return False  # the watermark stays in memory; the next commit writes it
        return True

    def _set_consumers(self, consumers: dict[str, int], changes: frames.Changes = _NO_CHANGES) -> bool:
        """Replace the watermarks and remove committed segments, in one frame; return whether the frame was written."""
        self._state.consumers = consumers
        return self._remove_committed_segments(changes) or self._write_watermarks(changes)

    def _remove_committed_segments(
        self, changes: frames.Changes = _NO_CHANGES, *, retain_bytes: int | None = None
    ) -> bool:
        """Remove segments that every consumer has committed, oldest first; return whether there were any."""
        retain_bytes = self._space.limits.retain_bytes if retain_bytes is None else retain_bytes
        count = count_removable(self._segments[:-1], self.committed, retain_bytes) if self._state.consumers else 0
        if not count:
            return False
        previous_floor, self._state.floor = self._state.floor, self._segments[count].first_offset
        if not self._write_watermarks(changes):
            self._state.floor = previous_floor
            return False
        self._active.sync()  # the removal is durable in the watermarks before any file is removed
        for segment in self._segments[:count]:
            try:
                self._disk.remove(segment.path)
            except OSError:
                break  # its bytes still count; the next commit tries again
            self._segments = self._segments[1:]
        self._space.create_reserve()
        return True

    def _snapshot(self, sequence: int, previous_bytes: int) -> frames.Snapshot:
        with self._ledger_lock:
            return frames.Snapshot(self._state, self._schema, sequence, previous_bytes)

    def _active_has_rows(self) -> bool:
        return self._state.end > self._active.first_offset

    def _roll_segment(self) -> None:
        """Seal the active segment and start a new one. The old one is durable before the new one has a name."""
        self._active.sync()
        self._active.size = self._active.synced_bytes
        snapshot = self._snapshot(self._active.name.sequence + 1, self._active.size)
        active = ActiveSegment(self._disk, self._directory, snapshot, self._syncs)
        self._active.close()
        self._active = active
        self._segments = (*self._segments, active)

    def _check_space(self, new_bytes: int) -> None:
        """Refuse rows without free space, before anything is written [I7]."""
        try:
            self._space.check(self.bytes_on_disk, new_bytes)
        except JournalFull:
            freed_space = self._remove_retained_segments()
            # If no row waits, no space will ever become free: a limit below one frame must not stop the line.
            ignore_limit = self._space.limits.max_bytes is not None and self._state.end == self.committed
            if not (freed_space or ignore_limit):
                raise
            self._space.check(self.bytes_on_disk, new_bytes, apply_limit=not ignore_limit)

    def _remove_retained_segments(self) -> bool:
        """Remove all committed rows, including those that `retain_bytes` keeps; return whether any were removed."""
        if self._active_has_rows() and self._state.consumers and self.committed == self._state.end:
            self._roll_segment()  # the active file can't be removed while it is written to
        return self._remove_committed_segments(retain_bytes=0)
