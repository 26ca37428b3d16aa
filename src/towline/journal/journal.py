"""What was received, on disk: rows in order, durable when `append` returns, removed when they are committed.

    one thread      append, set_session           wait for the disk
    any thread      commit, forget                may wait for one sync of the writer
    any thread      read, locate, count, status   never wait for the disk to sync

Frames are in `frames`, what they mean in `state`, the file in `writer`, opening in `recovery`, ranges in `reading`.
"""

from __future__ import annotations

import contextlib
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from towline.errors import JournalError, JournalFailed, JournalFull, TowlineError
from towline.journal.directory import prepare
from towline.journal.disk import Disk
from towline.journal.frames import Kind, encode, frame_bytes
from towline.journal.lock import Lock
from towline.journal.reading import BATCH_BYTES, combined, offset_after_bytes, origin_below, pieces
from towline.journal.recovery import recover
from towline.journal.room import Limits, Room
from towline.journal.segment import removable as removable_of
from towline.journal.state import Snapshot, decode_json, encode_json, section_of, take_notes
from towline.journal.writer import failing, new_segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from towline.journal.frames import Bytes
    from towline.journal.recovery import Found
    from towline.journal.segment import Segment

__all__ = ["Journal", "Limits"]


class Journal:
    """A durable list of rows with a watermark per consumer; `open` makes one.

    After `JournalFailed` the object is dead: every later call raises the same, and no file is synced again [I6].

    Attributes:
        journal_id: 12 hex digits made at creation; with an offset it names a row for ever.
        epoch: Grows by one with every opening [I8].
        incarnation: 8 hex digits of this opening's own: one that went on from a copy has others [I14].
        recovery: What opening found.
    """

    def __init__(self, directory: Path, schema: Any, room: Room, disk: Disk, lock: Lock, found: Found) -> None:
        self.journal_id = found.state.journal_id
        self.epoch, self.incarnation = found.state.epoch, found.state.incarnation
        self.recovery = found.recovery
        self._directory, self._schema, self._disk, self._lock = directory, schema, disk, lock
        self._room = room
        self._empty = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)
        #: held by whoever changes a file
        self._writing = threading.Lock()
        #: guards the ledger alone; never held during a system call
        self._counting = threading.Lock()
        #: changed under `_writing`; its dicts but `held` are replaced, never changed, so that readers need no lock
        self._state = found.state
        #: counters whose totals the file does not have yet
        self._uncounted: set[str] = set()
        #: why nothing works any more
        self._dead: TowlineError | None = None
        self._sequence = found.sequence
        self._active = new_segment(disk, directory, self._snapshot(found.previous_bytes))
        #: all segments, oldest first, the last is written to; replaced, never changed
        self._segments: tuple[Segment, ...] = (*found.segments, self._active.segment)
        #: durable; set last, so that whoever sees it finds the rows
        self._end = found.state.end

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
                found = recover(directory, schema, disk)
            found.state.begin()
            journal = cls(directory, schema, room, disk, lock, found)
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

    @property
    def end(self) -> int:
        """The next offset; every row below it is durable."""
        return self._end

    def incarnation_of(self, offset: int) -> str:
        """The incarnation that wrote the row below `offset`; "" where none did, or it is not known any more."""
        end, segments = self._end, self._segments
        return origin_below(segments, offset) if max(segments[0].first, 1) <= offset <= end else ""

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
        """What `append` and `note` were given last, by name; for the owner's own use."""
        return MappingProxyType(self._state.notes)

    @property
    def limits(self) -> Limits:
        """How much disk it may take."""
        return self._room.limits

    @property
    def directory(self) -> Path:
        """Where it lies."""
        return self._directory

    @property
    def no_rows(self) -> Any:
        """A batch of this journal's schema without rows: for frames that bring only packet ids or notes."""
        return self._empty

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments[:-1]) + self._active.size

    # Writing -------------------------------------------------------------------------------------------------------

    def append(
        self,
        batch: Any,
        *,
        held: Mapping[int, tuple[int, int]] | None = None,
        released: Sequence[int] = (),
        notes: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> int:
        """Make the rows of a record batch durable, in one frame with one sync, and return the new end.

        Args:
            batch: Rows of the journal's schema; an offset column is the caller's business. No rows and no packet ids:
                nothing happens.
            held: QoS 2 packet ids that come with these rows: number and digest of each one's row [I3].
            released: QoS 2 packet ids that are free again, before those of `held`.
            notes: JSON values by name that become durable in the same frame; None removes one.
            durable: False, where there are no rows: without a sync, so it outlives the process and not the machine.

        Raises:
            JournalFull: TL-J02, no room; nothing was written, the same call may succeed later [I7].
            JournalFailed: TL-J04, nothing of this batch is promised; the object is dead [I6].
            JournalError: TL-J06 another schema, TL-J08 larger than 2 GiB, TL-J10 closed.
        """
        if not batch.schema.equals(self._schema):
            what = "a batch has another schema than this journal"
            raise JournalError(
                "TL-J06", str(self._directory), what, "This is a mistake in the program, not in the data."
            )
        payload = batch.serialize() if batch.num_rows else b""
        with self._changing():
            if batch.num_rows:
                self._make_room(frame_bytes(0, len(payload)))
                self._append(payload, batch.num_rows, held or {}, released, notes or {})
            elif held or released or notes:
                self._write(Kind.RELEASED, b"", held=held or {}, released=released, notes=notes or {}, durable=durable)
        return self._end

    def _append(
        self,
        payload: Bytes,
        rows: int,
        held: Mapping[int, tuple[int, int]],
        released: Sequence[int],
        notes: Mapping[str, Any],
    ) -> None:
        start, end = self._state.end, self._state.end + rows
        position = self._write(
            Kind.RECORDS, payload, rows=rows, held=held, released=released, notes=notes, durable=True
        )
        self._state.end, self._state.newest = end, self.incarnation
        self._active.segment.add(start, position)
        self._active.publish(end)
        self._end = end

    def sync(self) -> None:
        """Make durable what was written without a sync of its own.

        Raises:
            JournalFailed: TL-J04, the object is dead [I6].
        """
        with self._changing():
            self._active.sync()

    def set_session(self, session: Mapping[str, object]) -> None:
        """Make the MQTT session, any JSON object, durable. The size limits don't hold it up.

        Raises:
            JournalFull: TL-J02, the disk took no more; the older session stands.
            JournalFailed: TL-J04, the object is dead [I6].
        """
        payload = encode_json(session)
        with self._changing():
            self._write(Kind.SESSION, payload, durable=True)
            self._state.session = decode_json(str(self._directory), payload)

    def count(self, **increments: int) -> None:
        """Add to counters of the ledger [I11]; their totals reach the disk with the next frame or `close`."""
        with self._counting:
            ledger = dict(self._state.ledger)
            for name, more in increments.items():
                ledger[name] = ledger.get(name, 0) + more
            self._state.ledger = ledger
            self._uncounted.update(increments)

    def commit(self, consumer: str, upto: int) -> None:
        """Note that a consumer is done with all rows below `upto`; a smaller one than before changes nothing [I1].

        The watermark is written without a sync of its own: after a power failure an older one may come back. Segments
        below every consumer's watermark are removed [I5].

        Raises:
            JournalFailed: TL-J04, the object is dead [I6].
            JournalError: TL-J08, `upto` is beyond the end.
        """
        with self._changing():
            self._check_commit(consumer, upto)
            upto = max(upto, self.first)
            if upto > self._state.consumers.get(consumer, -1):
                self._set_consumers({**self._state.consumers, consumer: upto})

    def tidy(self) -> None:
        """Remove what every consumer has committed, as far as it is not to be kept; opening removes nothing."""
        with self._changing():
            self._remove_committed()

    def _check_commit(self, consumer: str, upto: int) -> None:
        if upto > self._end:
            raise JournalError(
                "TL-J08",
                str(self._directory),
                f"{consumer} committed up to row {upto:,}, but there are only {self._end:,}",
                "Its checkpoint belongs to another journal: start it with a new checkpoint.",
            )

    def note(self, consumer: str, upto: int, *, released: Sequence[int] = (), notes: Mapping[str, Any]) -> bool:
        """Commit as `commit` does, with packet ids and notes in the same frame; not synced by itself either.

        Returns:
            Whether it is written; not on a disk without any room: say it again with the next one.

        Raises:
            JournalFailed: TL-J04, the object is dead [I6].
            JournalError: TL-J08, `upto` is beyond the end.
        """
        with self._changing():
            self._check_commit(consumer, upto)
            upto = max(upto, self.first, self._state.consumers.get(consumer, 0))
            self._state.consumers = {**self._state.consumers, consumer: upto}
            written = self._write_watermarks(released, notes)
            self._remove_committed()
        return written

    def forget(self, consumer: str) -> None:
        """Drop a consumer, so that rows no longer wait for it. One that is unknown is nothing to forget.

        Raises:
            JournalFailed: TL-J04, the object is dead [I6].
        """
        with self._changing():
            if consumer in self._state.consumers:
                self._set_consumers({name: upto for name, upto in self._state.consumers.items() if name != consumer})

    def close(self) -> None:
        """Write what only memory knows, and let the next one in. A second call does nothing.

        Raises:
            JournalFailed: TL-J04, the last write failed; the directory is unlocked all the same.
        """
        try:
            if self._dead is None:
                with self._changing():
                    self._finish()
        finally:
            self._dead = self._dead or JournalError("TL-J10", str(self._directory), "the journal is closed")
            self._active.close()
            self._lock.release()

    def _finish(self) -> None:
        if self._uncounted:
            self._write_watermarks()
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
        available, segments = self._readable(start)
        if end > available:
            raise self._out_of_range(start, end)
        return combined(pieces(segments, self._schema, start, end), batch_rows, batch_bytes)

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

    def _readable(self, start: int) -> tuple[int, tuple[Segment, ...]]:
        if self._dead:
            raise self._dead
        end, segments = self._end, self._segments  # in this order: the segments hold at least what `end` promises
        if not segments[0].first <= start <= end:
            raise self._out_of_range(start, start)
        return end, segments

    def _out_of_range(self, start: int, end: int) -> JournalError:
        return JournalError(
            "TL-J07",
            str(self._directory),
            f"asked for rows {start:,} to {end:,}, but those from {self.first:,} to {self._end:,} are there",
            "What is below was committed and removed; what is above never came: is the checkpoint of this journal?",
        )

    # Underneath; all of it with `_writing` held --------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Let one thread change files; whatever goes wrong half way ends this object [I6]."""
        with self._writing:
            if self._dead:
                raise self._dead
            try:
                self._lock.check()
                yield
            except JournalFailed as error:
                self._dead = error
                raise
            except JournalError:
                raise  # raised before anything changed, or after it was undone
            except BaseException as error:
                self._dead = JournalFailed("TL-J04", str(self._directory), f"a change stopped half way ({error!r})")
                raise

    def _write(
        self,
        kind: Kind,
        payload: Bytes,
        *,
        rows: int = 0,
        held: Mapping[int, tuple[int, int]] = MappingProxyType({}),
        released: Sequence[int] = (),
        notes: Mapping[str, Any] = MappingProxyType({}),
        durable: bool,
    ) -> int:
        """Write one frame, into a new segment if need be, and return its position."""
        with self._counting:
            counted = {name: self._state.ledger[name] for name in self._uncounted}
        section = section_of(counted, held, released, notes)
        self._roll_if_full(frame_bytes(len(section), len(payload)))
        if durable:
            self._active.sync()  # watermarks before it: rows are only written behind what is durable
        position = self._active.size
        state = self._state
        self._active.write(
            encode(
                kind,
                epoch=state.epoch,
                first=state.end,
                durable=self._active.synced,
                rows=rows,
                section=section,
                payload=payload,
            )
        )
        if durable:
            self._active.sync()
            self._lock.check()  # no other owner has begun without what is durable now, or nothing of it is promised
        self._note_counted(counted)
        for packet_id in released:
            state.held.pop(packet_id, None)
        state.held.update(held)
        take_notes(state.notes, notes)
        return position

    def _note_counted(self, counted: Mapping[str, int]) -> None:
        """Forget what the file has now, unless it was counted on meanwhile."""
        with self._counting:
            ledger = self._state.ledger
            self._uncounted -= {name for name, total in counted.items() if ledger[name] == total}

    def _snapshot(self, previous_bytes: int) -> Snapshot:
        with self._counting:
            return Snapshot(self._state, self._schema, self._sequence, previous_bytes)

    def _roll_if_full(self, more: int) -> None:
        used = self._active.size
        if used + more > self._room.segment_bytes and (self._has_rows() or used > self._room.limits.segment_bytes):
            self._roll()

    def _has_rows(self) -> bool:
        return self._state.end > self._active.segment.first

    def _roll(self) -> None:
        """Go on in a new segment. The old one is whole and durable before the new one has a name."""
        self._active.sync()
        self._active.publish(self._state.end)
        self._sequence += 1
        try:
            active = new_segment(self._disk, self._directory, self._snapshot(self._active.size))
        except JournalFull:
            self._sequence -= 1
            raise
        self._active.close()
        self._active = active
        self._segments = (*self._segments, active.segment)

    def _make_room(self, more: int) -> None:
        """Refuse rows for which there is no room, before anything is written [I7]."""
        try:
            self._room.check(self.bytes_on_disk, more)
        except JournalFull:
            given_up = self._give_up_committed()
            # Where no row waits, nothing will ever make more room: a limit below one frame must not stop the line.
            alone = self._room.limits.max_bytes is not None and self._state.end == self.committed
            if not (given_up or alone):
                raise
            self._room.check(self.bytes_on_disk, more, limited=not alone)

    def _give_up_committed(self) -> bool:
        """Remove every committed row, also those kept for another look; tell whether that freed anything."""
        if self._has_rows() and self._state.consumers and self.committed == self._state.end:
            self._roll()  # only the file that is written to keeps them
        return self._remove_committed(retain=0)

    def _set_consumers(self, consumers: dict[str, int]) -> None:
        self._state.consumers = consumers
        if not self._remove_committed():
            self._write_watermarks()

    def _remove_committed(self, retain: int | None = None) -> bool:
        """Remove what no consumer waits for, oldest first; tell whether there was anything."""
        retain = self._room.limits.retain_bytes if retain is None else retain
        removable = removable_of(self._segments[:-1], self.committed, retain) if self._state.consumers else 0
        if not removable:
            return False
        floor, self._state.floor = self._state.floor, self._segments[removable].first
        if not self._write_watermarks():
            self._state.floor = floor
            return False
        self._active.sync()  # nothing is removed before it is durable that it may be missing
        for segment in self._segments[:removable]:
            try:
                self._disk.remove(segment.path)
            except OSError:
                break  # stays on the account of bytes, and is tried again with the next commit
            self._segments = self._segments[1:]
        self._room.reserve()
        return True

    def _write_watermarks(self, released: Sequence[int] = (), notes: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Write the watermarks, on a full disk into the room that was kept for it; tell whether it worked."""
        for last_try in (False, True):
            try:
                content = {"consumers": self._state.consumers, "floor": self._state.floor}
                self._write(Kind.COMMITTED, encode_json(content), released=released, notes=notes, durable=False)
            except JournalFull:
                if last_try:
                    return False  # the watermark is known in memory; the next commit writes it
                self._room.use_reserve()
            else:
                return True
        return False
