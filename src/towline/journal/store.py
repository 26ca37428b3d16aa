"""The segments of one journal: frames go into the newest, full ones are sealed, committed ones are removed.

`Journal` calls what changes a file from one thread at a time; whatever goes wrong half way, it ends the object [I6].
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from towline.errors import JournalFull
from towline.journal.frames import Kind, encode, frame_bytes
from towline.journal.segment import removable as removable_of
from towline.journal.state import Changes, Snapshot, encode_json, section_of
from towline.journal.writer import new_segment
from towline.timing import Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from towline.journal.disk import Disk
    from towline.journal.frames import Bytes
    from towline.journal.lock import Lock
    from towline.journal.recovery import RecoveredJournal
    from towline.journal.room import Room
    from towline.journal.segment import Segment

__all__ = ["SegmentStore"]

_NO_CHANGES: Final = Changes()


class SegmentStore:
    """The files of an open journal and the state that they hold.

    Args:
        directory: Of the journal, locked.
        schema: Of the rows.
        room: How much disk they may take.
        disk: The file system.
        lock: That on the directory; looked at again whenever something became durable.
        recovered: What opening found, its state with the epoch of this opening.

    Attributes:
        state: What a snapshot would hold now. Its dicts but `held` are replaced, never changed, so that readers need
            no lock.
        segments: All of them, oldest first; the last is written to. Replaced, never changed.
        end: The next offset, every row below it durable; set last, so that whoever sees it finds the rows.
        syncs: How long each fdatasync took.
        bytes_written: Bytes of all frames since this opening.
    """

    def __init__(
        self, directory: Path, schema: Any, room: Room, disk: Disk, lock: Lock, recovered: RecoveredJournal
    ) -> None:
        self.schema, self.room, self.state = schema, room, recovered.state
        self._directory, self._disk, self._lock = directory, disk, lock
        self.syncs, self.bytes_written = Histogram(), 0
        #: guards the ledger alone; never held during a system call
        self._counting = threading.Lock()
        #: counters whose totals are not on the disk yet
        self._uncounted: set[str] = set()
        self._sequence = recovered.sequence
        self._active = new_segment(disk, directory, self._snapshot(recovered.previous_bytes), self.syncs)
        self.segments: tuple[Segment, ...] = (*recovered.segments, self._active.segment)
        self.end = recovered.state.end

    @property
    def committed(self) -> int:
        """The smallest watermark of all consumers; the first offset when there is none."""
        return min(self.state.consumers.values(), default=self.segments[0].first)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments[:-1]) + self._active.size

    @property
    def bytes_waiting(self) -> int:
        """Bytes of rows that are not committed; of a segment that is so in part, as its rows are."""
        committed, waiting = self.committed, 0
        for segment in self.segments:
            rows = segment.end - max(segment.first, committed)
            if rows > 0:
                waiting += segment.size * rows // (segment.end - segment.first)
        return waiting

    def count(self, increments: Mapping[str, int]) -> None:
        """Add to counters of the ledger [I11]; any thread. Their totals reach the disk with the next frame."""
        with self._counting:
            ledger = dict(self.state.ledger)
            for name, more in increments.items():
                ledger[name] = ledger.get(name, 0) + more
            self.state.ledger = ledger
            self._uncounted.update(increments)

    def _counted(self, totals: Mapping[str, int]) -> None:
        """Forget which totals were written, unless they were counted on meanwhile."""
        with self._counting:
            self._uncounted -= {name for name, total in totals.items() if self.state.ledger[name] == total}

    # Writing frames ------------------------------------------------------------------------------------------------

    def append(self, batch: Any, changes: Changes) -> None:
        """Make rows durable, in one frame with one sync.

        Raises:
            JournalFull: TL-J02, no room; nothing was written [I7].
            JournalFailed: TL-J04, a write or sync failed.
        """
        payload, rows = batch.serialize(), batch.num_rows
        self._make_room(frame_bytes(0, len(payload)))
        start, end = self.state.end, self.state.end + rows
        position = self.write(Kind.RECORDS, payload, changes, rows=rows, durable=True)
        self.state.end, self.state.newest = end, self.state.incarnation
        self._active.segment.add(start, position)
        self._active.publish(end)
        self.end = end

    def write(self, kind: Kind, payload: Bytes, changes: Changes = _NO_CHANGES, *, rows: int = 0, durable: bool) -> int:
        """Write one frame, into a new segment if need be, and return its position.

        Raises:
            JournalFull: TL-J02, no room on the disk; nothing was written.
            JournalFailed: TL-J04, a write or sync failed.
        """
        with self._counting:
            counted = {name: self.state.ledger[name] for name in self._uncounted}
        section = section_of(counted, changes)
        self._roll_if_full(frame_bytes(len(section), len(payload)))
        if durable:
            self._active.sync()  # watermarks before it: rows are only written behind what is durable
        position = self._active.size
        self._active.write(
            encode(
                kind,
                epoch=self.state.epoch,
                first=self.state.end,
                durable=self._active.synced,
                rows=rows,
                section=section,
                payload=payload,
            )
        )
        self.bytes_written += self._active.size - position
        if durable:
            self._active.sync()
            self._lock.check()  # no other owner has begun without what is durable now, or nothing of it is promised
        self._counted(counted)
        changes.apply(self.state)
        return position

    def write_watermarks(self, changes: Changes = _NO_CHANGES) -> bool:
        """Write the watermarks, on a full disk into the room that was kept for it; return whether it worked."""
        for last_try in (False, True):
            try:
                content = {"consumers": self.state.consumers, "floor": self.state.floor}
                self.write(Kind.COMMITTED, encode_json(content), changes, durable=False)
            except JournalFull:
                if last_try:
                    return False  # the watermark stays in memory; the next commit writes it
                self.room.use_reserve()
            else:
                return True
        return False

    def sync(self) -> None:
        """Make durable what was written without a sync of its own."""
        self._active.sync()

    def finish(self) -> None:
        """Write the counters that only memory has, and make everything durable."""
        if self._uncounted:
            self.write_watermarks()
        self._active.sync()

    def close(self) -> None:
        """Give the descriptor back; nothing is written. A second call does nothing."""
        self._active.close()

    # Segments come and go ------------------------------------------------------------------------------------------

    def set_consumers(self, consumers: dict[str, int]) -> None:
        """Replace the watermarks, in a frame of their own or in the one that lets segments go."""
        self.state.consumers = consumers
        if not self.remove_committed():
            self.write_watermarks()

    def remove_committed(self, retain: int | None = None) -> bool:
        """Remove what no consumer waits for, oldest first; return whether there was anything."""
        retain = self.room.limits.retain_bytes if retain is None else retain
        removable = removable_of(self.segments[:-1], self.committed, retain) if self.state.consumers else 0
        if not removable:
            return False
        floor, self.state.floor = self.state.floor, self.segments[removable].first
        if not self.write_watermarks():
            self.state.floor = floor
            return False
        self._active.sync()  # nothing is removed before it is durable that it may be missing
        for segment in self.segments[:removable]:
            try:
                self._disk.remove(segment.path)
            except OSError:
                break  # its bytes still count, and the next commit tries again
            self.segments = self.segments[1:]
        self.room.reserve()
        return True

    def _snapshot(self, previous_bytes: int) -> Snapshot:
        with self._counting:
            return Snapshot(self.state, self.schema, self._sequence, previous_bytes)

    def _roll_if_full(self, more: int) -> None:
        used = self._active.size
        if used + more > self.room.segment_bytes and (self._has_rows() or used > self.room.limits.segment_bytes):
            self._roll()

    def _has_rows(self) -> bool:
        return self.state.end > self._active.segment.first

    def _roll(self) -> None:
        """Go on in a new segment. The old one is whole and durable before the new one has a name."""
        self._active.sync()
        self._active.publish(self.state.end)
        self._sequence += 1
        try:
            active = new_segment(self._disk, self._directory, self._snapshot(self._active.size), self.syncs)
        except JournalFull:
            self._sequence -= 1
            raise
        self._active.close()
        self._active = active
        self.segments = (*self.segments, active.segment)

    def _make_room(self, more: int) -> None:
        """Refuse rows for which there is no room, before anything is written [I7]."""
        try:
            self.room.check(self.bytes_on_disk, more)
        except JournalFull:
            removed = self._remove_retained()
            # Where no row waits, nothing will ever make more room: a limit below one frame must not stop the line.
            alone = self.room.limits.max_bytes is not None and self.state.end == self.committed
            if not (removed or alone):
                raise
            self.room.check(self.bytes_on_disk, more, limited=not alone)

    def _remove_retained(self) -> bool:
        """Remove every committed row, also those that `retain_bytes` keeps; return whether that freed anything."""
        if self._has_rows() and self.state.consumers and self.committed == self.state.end:
            self._roll()  # only the file that is written to keeps them
        return self.remove_committed(retain=0)
