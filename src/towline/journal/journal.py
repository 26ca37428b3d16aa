"""What was received: rows in order, durable when `append` returns, removed when they are committed.

    one thread      append, set_session           wait for the disk
    any thread      commit, forget                may wait for one sync of the writer
    any thread      read, locate, count, status   never wait for the disk to sync

Frames go into the newest segment, full ones are sealed, committed ones are removed. Frames and what they mean are in
`frames`, files and ranges of rows in `segment`, opening in `recovery`.
"""

from __future__ import annotations

import contextlib
import threading
from functools import wraps
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from towline.errors import JournalError, JournalFailed, JournalFull, TowlineError
from towline.journal.disk import Disk, Limits, Lock, Room, failing, prepare
from towline.journal.frames import (
    Changes,
    Kind,
    Snapshot,
    apply_changes,
    decode_json,
    encode,
    encode_json,
    frame_bytes,
    section_of,
)
from towline.journal.recovery import recover
from towline.journal.segment import (
    BATCH_BYTES,
    Active,
    bytes_between,
    combined,
    offset_after_bytes,
    origin_below,
    pieces,
    removable,
)
from towline.timing import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from towline.journal.frames import Bytes
    from towline.journal.recovery import RecoveredJournal
    from towline.journal.segment import Segment

_NO_CHANGES: Final[Changes] = MappingProxyType({})
_SIZE: Final = attrgetter("size")
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def _changes(
    change: Callable[Concatenate[Journal, _Params], _Result],
) -> Callable[Concatenate[Journal, _Params], _Result]:
    """Let one thread change files; whatever goes wrong half way ends the journal [I6]."""

    @wraps(change)
    def changing(self: Journal, /, *args: _Params.args, **given: _Params.kwargs) -> _Result:
        with self._writing:
            if self._dead:
                raise self._dead
            try:
                self._lock.check()
                return change(self, *args, **given)
            except JournalFailed as error:
                self._dead = error
                raise
            except JournalError:
                raise  # raised before anything changed, or after it was undone
            except BaseException as error:
                self._dead = JournalFailed("TL-J04", self.where, f"a change stopped half way ({error!r})")
                raise

    return changing


class Journal:
    """A durable list of rows with a watermark per consumer; `open` returns one.

    Where a write or sync fails, whatever changes something raises `JournalFailed` (TL-J04), and the object is dead:
    every later call raises the same, and no file is synced again [I6].

    Attributes:
        journal_id: 12 hex digits made at creation; with an offset it names a row for ever.
        epoch: Grows by one with every opening [I8].
        incarnation: 8 hex digits of this opening's own: one that went on from a copy has others [I14].
        repair: One line for a person when opening cut an unfinished write; else "".
        where: The directory it lies in, for people.
        end: The next offset; every row below it is durable.
    """

    def __init__(
        self, directory: Path, schema: Any, room: Room, disk: Disk, lock: Lock, opened: RecoveredJournal
    ) -> None:
        #: what a snapshot would hold now; its dicts but `held` are replaced, never changed: readers need no lock
        self._state = opened.state
        state = self._state
        self.journal_id, self.epoch, self.incarnation = state.journal_id, state.epoch, state.incarnation
        self.repair, self.where = opened.note, str(directory)
        self._directory, self._schema, self._room, self._disk, self._lock = directory, schema, room, disk, lock
        self._syncs, self._bytes_written = Histogram(), 0
        #: guards the ledger alone; never held during a system call
        self._counting = threading.Lock()
        #: counters whose totals are not on the disk yet
        self._uncounted: set[str] = set()
        self._active = Active(disk, directory, self._snapshot(opened.sequence, opened.previous_bytes), self._syncs)
        #: all of them, oldest first; the last is written to. Replaced, never changed
        self._segments: tuple[Segment, ...] = (*opened.segments, self._active)
        #: set last, so that whoever sees it finds the rows
        self.end = self._state.end
        #: held by whoever changes a file
        self._writing = threading.Lock()
        #: why nothing works any more
        self._dead: TowlineError | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        schema: Any,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        disk: Disk | None = None,
    ) -> Self:
        """Open the journal in a directory, or make one there: lock, recover, epoch + 1.

        Args:
            directory: Its own directory; made with mode 0700 when it is not there.
            schema: The Arrow schema of every row.
            limits: How much disk it may take.
            disk: The file system, for tests that let it fail.

        Raises:
            JournalLocked: TL-J03, another process has it.
            JournalDamaged: TL-J05, durable rows are gone or unreadable.
            JournalFull: TL-J02, no room to recover or begin.
            JournalFailed: TL-J04, a write or sync failed.
            JournalError: TL-J01 directory unusable, TL-J06 another schema, TL-J09 foreign or newer files.
        """
        disk = disk or Disk()
        prepare(directory, disk)
        lock, room = Lock(directory), Room(directory, limits, disk)
        try:
            with failing(directory, "opening the journal"):
                room.prepare()
                opened = recover(directory, schema, disk)
            opened.state.begin()
            journal = cls(directory, schema, room, disk, lock, opened)
            room.reserve()
        except BaseException:
            lock.release()
            raise
        return journal

    # What is there -------------------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The oldest offset that can be read."""
        return self._segments[0].first

    def incarnation_of(self, offset: int) -> str:
        """The incarnation that wrote the row below `offset`; "" where there is none, or its row was removed."""
        end, segments = self.end, self._segments
        return origin_below(segments, offset) if max(segments[0].first, 1) <= offset <= end else ""

    @property
    def openings(self) -> list[tuple[int, str]]:
        """Of each segment its first offset and the incarnation that wrote its rows [I14], in order."""
        return [(segment.first, segment.origin.rows) for segment in self._segments]

    @property
    def committed(self) -> int:
        """The smallest watermark of all consumers; `first` when there is none."""
        return min(self._state.consumers.values(), default=self.first)

    @property
    def consumers(self) -> Mapping[str, int]:
        """The watermark of each consumer."""
        return MappingProxyType(self._state.consumers)

    @property
    def session(self) -> Mapping[str, object]:
        """What `set_session` was given last; empty when never."""
        return MappingProxyType(self._state.session)

    @property
    def ledger(self) -> Mapping[str, int]:
        """The counters' totals, those not yet on disk included [I11]."""
        return MappingProxyType(self._state.ledger)

    @property
    def held(self) -> Mapping[int, tuple[int, int]]:
        """Packet id → number of its row, and a digest (inbox [I3]) or a phase (outbox [I10]); for the writer."""
        return MappingProxyType(self._state.held)

    @property
    def notes(self) -> Mapping[str, Any]:
        """What `append` and `commit` were given last, by name; for the owner's own use."""
        return MappingProxyType(self._state.notes)

    @property
    def limits(self) -> Limits:
        """How much disk it may take."""
        return self._room.limits

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments."""
        sealed: int = sum(map(_SIZE, self._segments[:-1]))
        return sealed + self._active.written

    def measured(self) -> dict[str, Any]:
        """What it took so far and what may still come, as plain values; never waits for the disk to sync.

        Returns:
            ``syncs`` (`towline.timing.Histogram.as_json`), ``bytes_written`` since this opening, ``bytes_on_disk``,
            ``bytes_waiting`` of rows that are not committed (about), and ``room_left`` until there is none (None for
            no limit, or one that can't be told).
        """
        left, committed, waiting = None, self.committed, 0
        with contextlib.suppress(OSError):
            left = self._room.left(self.bytes_on_disk)
        for segment in self._segments:
            rows = segment.end - max(segment.first, committed)
            if rows > 0:  # of a segment that is committed in part as many bytes as of its rows
                waiting += segment.size * rows // (segment.end - segment.first)
        return {
            "syncs": self._syncs.as_json(),
            "bytes_written": self._bytes_written,
            "bytes_on_disk": self.bytes_on_disk,
            "bytes_waiting": waiting,
            "room_left": left,
        }

    # Writing -------------------------------------------------------------------------------------------------------

    @_changes
    def append(
        self,
        batch: Any = None,
        *,
        held: Mapping[int, tuple[int, int]] | None = None,
        released: Sequence[int] = (),
        notes: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> int:
        """Make the rows of a record batch durable, in one frame with one sync, and return the new end.

        Args:
            batch: Rows of the journal's schema; an offset column is the caller's business. None for packet ids or notes
                alone; without either nothing happens.
            held: QoS 2 packet ids that come with these rows: number and digest of each one's row [I3].
            released: QoS 2 packet ids that are free again, before those of `held`.
            notes: JSON values by name that become durable in the same frame; None removes one.
            durable: False, where there are no rows: without a sync, so it outlives the process and not the machine.

        Raises:
            JournalFull: TL-J02, no room; nothing was written, the same call may succeed later [I7].
            JournalFailed: TL-J04, nothing of this batch is promised; the object is dead [I6].
            JournalError: TL-J06 another schema, TL-J08 larger than 2 GiB, TL-J10 closed.
        """
        if batch is not None and not batch.schema.equals(self._schema):
            what = "a batch has another schema than this journal"
            raise JournalError("TL-J06", self.where, what, "This is a mistake in the program, not in the data.")
        given = {"released": released, "held": held, "notes": notes}
        changes = {name: value for name, value in given.items() if value}
        rows: int = batch.num_rows if batch is not None else 0
        if not rows:
            if changes:
                self._write(changes, durable=durable)
            return self.end
        payload = batch.serialize()
        self._make_room(frame_bytes(0, len(payload)))
        end = self._state.end + rows
        position = self._write(changes, payload, rows=rows, durable=True)
        self._state.end, self._state.newest = end, self._state.incarnation
        self._active.grow(position, end)
        self.end = end
        return end

    @_changes
    def sync(self) -> None:
        """Make durable what was written without a sync of its own."""
        self._active.sync()

    def set_session(self, session: Mapping[str, object]) -> None:
        """Make the MQTT session, any JSON object, durable. The size limits don't hold it up.

        Raises:
            JournalFull: TL-J02, the disk took no more; the older session stands.
        """
        self._write_session(decode_json(self.where, encode_json(session)))

    def count(self, **increments: int) -> None:
        """Add to counters of the ledger [I11]; their totals reach the disk with the next frame or `close`."""
        with self._counting:
            ledger = dict(self._state.ledger)
            for name, more in increments.items():
                ledger[name] = ledger.get(name, 0) + more
            self._state.ledger = ledger
            self._uncounted.update(increments)

    @_changes
    def commit(
        self, consumer: str, upto: int, *, released: Sequence[int] = (), notes: Mapping[str, Any] | None = None
    ) -> bool:
        """Note that a consumer is done with all rows below `upto`; a smaller one than before changes nothing [I1].

        The watermark is written without a sync of its own: after a power failure an older one may come back. Segments
        below every consumer's watermark are removed [I5].

        Args:
            consumer: Its name.
            upto: An offset.
            released: Packet ids that are free again, in the same frame.
            notes: As `append` takes them, in the same frame.

        Returns:
            Whether it is written; not on a disk without any room: a watermark goes with the next frame of one, packet
            ids and notes are to be given again.

        Raises:
            JournalError: TL-J08, `upto` is beyond the end.
        """
        if upto > self.end:
            raise JournalError(
                "TL-J08",
                self.where,
                f"{consumer} committed up to row {upto:,}, but there are only {self.end:,}",
                "Its checkpoint belongs to another journal: start it with a new checkpoint.",
            )
        upto, before = max(upto, self.first), self._state.consumers.get(consumer, -1)
        changes = {"released": released, "notes": notes or {}} if released or notes else {}
        if upto <= before and not changes:
            return True
        return self._set_consumers({**self._state.consumers, consumer: max(upto, before)}, changes)

    @_changes
    def forget(self, consumer: str) -> None:
        """Drop a consumer, so that rows no longer wait for it. One that is unknown is nothing to forget."""
        consumers = self._state.consumers
        if consumer in consumers:
            self._set_consumers({name: upto for name, upto in consumers.items() if name != consumer})

    def close(self) -> None:
        """Write what is only in memory, and release the lock. A second call does nothing.

        Raises:
            JournalFailed: TL-J04, the last write failed; the directory is unlocked all the same.
        """
        try:
            if self._dead is None:
                self._finish()
        finally:
            self._dead = self._dead or JournalError("TL-J10", self.where, "the journal is closed")
            self._active.close()
            self._lock.release()

    @_changes
    def _finish(self) -> None:
        if self._uncounted:
            self._write_watermarks(_NO_CHANGES)
        self._active.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading -------------------------------------------------------------------------------------------------------

    def read(self, start: int, end: int, *, batch_rows: int = 10_000, batch_bytes: int = BATCH_BYTES) -> Iterator[Any]:
        """Return the rows from `start` to `end` in batches within both bounds, checked each time [I4].

        A row above `batch_bytes` is a batch of its own. Large ones lie where the file is mapped, and outlive the file.

        Raises:
            JournalError: TL-J07, some of these rows are not, or no longer, there. TL-J10, closed.
            JournalDamaged: TL-J05 (while iterating), rows no longer read as they were written; none of them is served.
        """
        return combined(pieces(self._holding(start, end), self._schema, start, end), batch_rows, batch_bytes)

    def locate(self, start: int, *, max_rows: int | None = None, max_bytes: int | None = None) -> int:
        """Return the end of a range from `start` within both bounds; at least one row, if there is one.

        Args:
            start: The first offset of the range.
            max_rows: Most rows in it.
            max_bytes: Most bytes in it, as rows lie on disk, a frame's evenly for its rows; at most one frame more.

        Raises:
            JournalError: TL-J07, `start` is not, or no longer, there. TL-J10, closed.
            JournalDamaged: TL-J05, the frames on the way no longer read as they were written.
        """
        available, segments = self._readable(start)
        end = available if max_rows is None else min(available, start + max(max_rows, 1))
        if max_bytes is not None and start < end:
            end = min(max(offset_after_bytes(segments, start, end, max_bytes), start + 1), end)
        return end

    def size(self, start: int, end: int) -> int:
        """Return how many bytes a range is, as `locate` counts them; it raises what that raises."""
        return bytes_between(self._holding(start, end), start, end)

    def _holding(self, start: int, end: int) -> tuple[Segment, ...]:
        """The segments, among them those with these rows."""
        available, segments = self._readable(start)
        if end > available:
            raise self._out_of_range(start, end)
        return segments

    def _readable(self, start: int) -> tuple[int, tuple[Segment, ...]]:
        if self._dead:
            raise self._dead
        end = self.end  # before the segments: they hold at least what it promises
        segments = self._segments
        if not segments[0].first <= start <= end:
            raise self._out_of_range(start, start)
        return end, segments

    def _out_of_range(self, start: int, end: int) -> JournalError:
        return JournalError(
            "TL-J07",
            self.where,
            f"asked for rows {start:,} to {end:,}, but those from {self.first:,} to {self.end:,} are there",
            "What is below was committed and removed; what is above never came: is the checkpoint of this journal?",
        )

    # Frames and segments; one thread at a time, and whatever goes wrong half way ends this object [I6] ---------------

    @_changes
    def _write_session(self, session: Mapping[str, Any]) -> None:
        self._write({"session": session}, durable=True)

    def _write(self, changes: Changes, payload: Bytes = b"", *, rows: int = 0, durable: bool) -> int:
        """Write one frame, into a new segment if need be, and return its position; `JournalFull` writes nothing."""
        with self._counting:
            counted = {name: self._state.ledger[name] for name in self._uncounted} if self._uncounted else {}
        said = {**changes, "ledger": counted} if counted else changes
        section = section_of(said) if said else b""
        used, limit = self._active.written, self._room.limits.segment_bytes
        if used + frame_bytes(len(section), len(payload)) > self._room.segment_bytes and (
            self._has_rows() or used > limit
        ):
            self._roll()
        if durable and self._active.synced < self._active.written:
            self._active.sync()  # watermarks before it: rows are only written behind what is durable
        position = self._active.written
        self._active.write(
            encode(
                Kind.CHANGES,
                epoch=self.epoch,
                first=self._state.end,
                durable=self._active.synced,
                rows=rows,
                section=section,
                payload=payload,
            )
        )
        self._bytes_written += self._active.written - position
        if durable:
            self._active.sync()
            self._lock.check()  # no other owner has begun without what is durable now, or nothing of it is promised
        if counted:
            with self._counting:  # those that were counted on meanwhile stay
                self._uncounted -= {name for name, total in counted.items() if self._state.ledger[name] == total}
        apply_changes(self._state, changes)
        return position

    def _write_watermarks(self, changes: Changes) -> bool:
        """Write the watermarks, on a full disk into the room that was kept for it; return whether it worked."""
        said = {"consumers": self._state.consumers, "floor": self._state.floor, **changes}
        try:
            self._write(said, durable=False)
        except JournalFull:
            self._room.use_reserve()
            try:
                self._write(said, durable=False)
            except JournalFull:
                return False  # the watermark stays in memory; the next commit writes it
        return True

    def _set_consumers(self, consumers: dict[str, int], changes: Changes = _NO_CHANGES) -> bool:
        """Replace the watermarks, in a frame of their own or in the one that lets segments go; whether it worked."""
        self._state.consumers = consumers
        return self._remove_committed(changes) or self._write_watermarks(changes)

    def _remove_committed(self, changes: Changes = _NO_CHANGES, *, retain: int | None = None) -> bool:
        """Remove what no consumer waits for, oldest first; return whether there was anything."""
        retain = self._room.limits.retain_bytes if retain is None else retain
        count = removable(self._segments[:-1], self.committed, retain) if self._state.consumers else 0
        if not count:
            return False
        floor, self._state.floor = self._state.floor, self._segments[count].first
        if not self._write_watermarks(changes):
            self._state.floor = floor
            return False
        self._active.sync()  # nothing is removed before it is durable that it may be missing
        for segment in self._segments[:count]:
            try:
                self._disk.remove(segment.path)
            except OSError:
                break  # its bytes still count, and the next commit tries again
            self._segments = self._segments[1:]
        self._room.reserve()
        return True

    def _snapshot(self, sequence: int, previous_bytes: int) -> Snapshot:
        with self._counting:
            return Snapshot(self._state, self._schema, sequence, previous_bytes)

    def _has_rows(self) -> bool:
        return self._state.end > self._active.first

    def _roll(self) -> None:
        """Go on in a new segment. The old one is whole and durable before the new one has a name."""
        self._active.sync()
        self._active.size = self._active.synced
        snapshot = self._snapshot(self._active.name.sequence + 1, self._active.size)
        active = Active(self._disk, self._directory, snapshot, self._syncs)
        self._active.close()
        self._active = active
        self._segments = (*self._segments, active)

    def _make_room(self, more: int) -> None:
        """Refuse rows for which there is no room, before anything is written [I7]."""
        try:
            self._room.check(self.bytes_on_disk, more)
        except JournalFull:
            removed = self._remove_retained()
            # Where no row waits, nothing will ever make more room: a limit below one frame must not stop the line.
            alone = self._room.limits.max_bytes is not None and self._state.end == self.committed
            if not (removed or alone):
                raise
            self._room.check(self.bytes_on_disk, more, limited=not alone)

    def _remove_retained(self) -> bool:
        """Remove every committed row, also those that `retain_bytes` keeps; return whether that freed anything."""
        if self._has_rows() and self._state.consumers and self.committed == self._state.end:
            self._roll()  # only the file that is written to keeps them
        return self._remove_committed(retain=0)
