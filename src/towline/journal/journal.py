"""What was received: rows in order, durable when `append` returns, removed when they are committed.

    one thread      append, set_session           wait for the disk
    any thread      commit, forget                may wait for one sync of the writer
    any thread      read, locate, count, status   never wait for the disk to sync

Frames are in `frames`, what they mean in `state`, the segments in `store`, the file that is written to in `writer`,
opening in `recovery`, ranges in `reading`.
"""

from __future__ import annotations

import contextlib
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from towline.errors import JournalError, JournalFailed, TowlineError
from towline.journal.directory import prepare
from towline.journal.disk import Disk
from towline.journal.frames import Kind
from towline.journal.lock import Lock
from towline.journal.reading import (
    BATCH_BYTES,
    bytes_between,
    combined,
    offset_after_bytes,
    origin_below,
    pieces,
)
from towline.journal.recovery import recover
from towline.journal.room import Limits, Room
from towline.journal.state import Changes, decode_json, encode_json
from towline.journal.store import SegmentStore
from towline.journal.writer import failing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from towline.journal.recovery import Recovery
    from towline.journal.segment import Segment

__all__ = ["Journal", "Limits"]


class Journal:
    """A durable list of rows with a watermark per consumer; `open` returns one.

    After `JournalFailed` the object is dead: every later call raises the same, and no file is synced again [I6].

    Attributes:
        journal_id: 12 hex digits made at creation; with an offset it names a row for ever.
        epoch: Grows by one with every opening [I8].
        incarnation: 8 hex digits of this opening's own: one that went on from a copy has others [I14].
        recovery: What opening found.
        where: The directory it lies in, for people.
    """

    def __init__(self, where: str, store: SegmentStore, lock: Lock, recovery: Recovery) -> None:
        self.journal_id = store.state.journal_id
        self.epoch, self.incarnation = store.state.epoch, store.state.incarnation
        self.recovery = recovery
        self.where, self._store, self._lock = where, store, lock
        self._empty = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in store.schema], schema=store.schema)
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
                recovered = recover(directory, schema, disk)
            recovered.state.begin()
            store = SegmentStore(directory, schema, room, disk, lock, recovered)
            journal = cls(str(directory), store, lock, recovered.recovery)
            room.reserve()
        except BaseException:
            lock.release()
            raise
        return journal

    # What is there -------------------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The oldest offset that can be read."""
        return self._store.segments[0].first

    @property
    def end(self) -> int:
        """The next offset; every row below it is durable."""
        return self._store.end

    def incarnation_of(self, offset: int) -> str:
        """The incarnation that wrote the row below `offset`; "" where there is none, or its row was removed."""
        end, segments = self._store.end, self._store.segments
        return origin_below(segments, offset) if max(segments[0].first, 1) <= offset <= end else ""

    @property
    def openings(self) -> list[tuple[int, str]]:
        """Of each segment its first offset and the incarnation that wrote its rows [I14], in order."""
        return [(segment.first, segment.origin.rows) for segment in self._store.segments]

    @property
    def committed(self) -> int:
        """The smallest watermark of all consumers; `first` when there is none."""
        return self._store.committed

    @property
    def consumers(self) -> Mapping[str, int]:
        """The watermark of each consumer."""
        return MappingProxyType(self._store.state.consumers)

    @property
    def session(self) -> Mapping[str, object]:
        """What `set_session` was given last; empty when never."""
        return MappingProxyType(self._store.state.session)

    @property
    def ledger(self) -> Mapping[str, int]:
        """The counters' totals, those not yet on disk included [I11]."""
        return MappingProxyType(self._store.state.ledger)

    @property
    def held(self) -> Mapping[int, tuple[int, int]]:
        """Packet id → number of its row, and a digest (inbox [I3]) or a phase (outbox [I10]); for the writer."""
        return MappingProxyType(self._store.state.held)

    @property
    def notes(self) -> Mapping[str, Any]:
        """What `append` and `note` were given last, by name; for the owner's own use."""
        return MappingProxyType(self._store.state.notes)

    @property
    def limits(self) -> Limits:
        """How much disk it may take."""
        return self._store.room.limits

    @property
    def no_rows(self) -> Any:
        """A batch of this journal's schema without rows: for frames that bring only packet ids or notes."""
        return self._empty

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments."""
        return self._store.bytes_on_disk

    def measured(self) -> dict[str, Any]:
        """What it took so far and what may still come, as plain values; never waits for the disk to sync.

        Returns:
            ``syncs`` (`towline.timing.Histogram.as_json`), ``bytes_written`` since this opening, ``bytes_on_disk``,
            ``bytes_waiting`` of rows that are not committed (about), and ``room_left`` until there is none (None for
            no limit, or one that can't be told).
        """
        store, left = self._store, None
        with contextlib.suppress(OSError):
            left = store.room.left(store.bytes_on_disk)
        return {
            "syncs": store.syncs.as_json(),
            "bytes_written": store.bytes_written,
            "bytes_on_disk": store.bytes_on_disk,
            "bytes_waiting": store.bytes_waiting,
            "room_left": left,
        }

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
        if not batch.schema.equals(self._store.schema):
            what = "a batch has another schema than this journal"
            raise JournalError("TL-J06", self.where, what, "This is a mistake in the program, not in the data.")
        changes = Changes(held or {}, released, notes or {})
        with self._changing():
            if batch.num_rows:
                self._store.append(batch, changes)
            elif held or released or notes:
                self._store.write(Kind.RELEASED, b"", changes, durable=durable)
        return self._store.end

    def sync(self) -> None:
        """Make durable what was written without a sync of its own.

        Raises:
            JournalFailed: TL-J04, the object is dead [I6].
        """
        with self._changing():
            self._store.sync()

    def set_session(self, session: Mapping[str, object]) -> None:
        """Make the MQTT session, any JSON object, durable. The size limits don't hold it up.

        Raises:
            JournalFull: TL-J02, the disk took no more; the older session stands.
            JournalFailed: TL-J04, the object is dead [I6].
        """
        payload = encode_json(session)
        with self._changing():
            self._store.write(Kind.SESSION, payload, durable=True)
            self._store.state.session = decode_json(self.where, payload)

    def count(self, **increments: int) -> None:
        """Add to counters of the ledger [I11]; their totals reach the disk with the next frame or `close`."""
        self._store.count(increments)

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
            consumers = self._store.state.consumers
            if upto > consumers.get(consumer, -1):
                self._store.set_consumers({**consumers, consumer: upto})

    def tidy(self) -> None:
        """Remove what every consumer has committed, as far as it is not to be kept; opening removes nothing."""
        with self._changing():
            self._store.remove_committed()

    def _check_commit(self, consumer: str, upto: int) -> None:
        if upto > self._store.end:
            raise JournalError(
                "TL-J08",
                self.where,
                f"{consumer} committed up to row {upto:,}, but there are only {self._store.end:,}",
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
            state = self._store.state
            upto = max(upto, self.first, state.consumers.get(consumer, 0))
            state.consumers = {**state.consumers, consumer: upto}
            written = self._store.write_watermarks(Changes(released=released, notes=notes))
            self._store.remove_committed()
        return written

    def forget(self, consumer: str) -> None:
        """Drop a consumer, so that rows no longer wait for it. One that is unknown is nothing to forget.

        Raises:
            JournalFailed: TL-J04, the object is dead [I6].
        """
        with self._changing():
            consumers = self._store.state.consumers
            if consumer in consumers:
                self._store.set_consumers({name: upto for name, upto in consumers.items() if name != consumer})

    def close(self) -> None:
        """Write what is only in memory, and release the lock. A second call does nothing.

        Raises:
            JournalFailed: TL-J04, the last write failed; the directory is unlocked all the same.
        """
        try:
            if self._dead is None:
                with self._changing():
                    self._store.finish()
        finally:
            self._dead = self._dead or JournalError("TL-J10", self.where, "the journal is closed")
            self._store.close()
            self._lock.release()

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
        return combined(pieces(self._holding(start, end), self._store.schema, start, end), batch_rows, batch_bytes)

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
        """Return how many bytes a range is, as `locate` counts them.

        Raises:
            JournalError: TL-J07, the range is not, or no longer, there. TL-J10, closed.
            JournalDamaged: TL-J05, the frames on the way no longer read as they were written.
        """
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
        end = self._store.end  # before the segments: they hold at least what it promises
        segments = self._store.segments
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
                self._dead = JournalFailed("TL-J04", self.where, f"a change stopped half way ({error!r})")
                raise
