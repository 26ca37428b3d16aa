"""The store in Kafka (`towline.journal.port`): rows in a landing partition, frames in a state partition.

Every change is one transaction of the owner's, durable and visible together when the call returns. What an undecided
transaction came to is found out by the owner's next producer (`towline.landing.committer`). A call that can't wait for
that is told "no room", and comes again: if it is found that the first one was committed, the second does nothing. An
owner that may ask for something else the next time has to wait, and ends when that takes too long.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from towline.errors import JournalError, JournalFailed, JournalFull
from towline.journal.counting import Counters
from towline.journal.frames import Kind, encode
from towline.journal.port import NO_CHANGES
from towline.journal.state import Snapshot, encode_json, section_of
from towline.journal.writer import full
from towline.landing.committer import WAIT_S, Undecided
from towline.landing.places import Place
from towline.landing.reading import RowReader
from towline.landing.records import to_records
from towline.landing.statelog import Further, Label, RecoveredState, pieces_of, replayed
from towline.landing.trimming import Trimmer
from towline.timing import BATCHES, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from towline.journal.frames import Bytes
    from towline.journal.reading import RowSlice
    from towline.journal.room import Limits
    from towline.journal.state import Changes
    from towline.landing.committer import Committer, Mended, OutRecord
    from towline.landing.place import LandingPlace
    from towline.landing.records import LandingRecord

__all__ = ["KafkaStore"]

#: A snapshot is due after so many frames or bytes of frames: a take-over reads no more than that.
_FRAMES: Final = 2000
_FRAME_BYTES: Final = 4 << 20
#: Seconds that an owner waits who can't ask for the same again.
_LONGEST_S: Final = 20.0
#: Times that a transaction is tried which Kafka aborts.
_ATTEMPTS: Final = 2
_AGAIN: Final = "Intake goes on by itself when Kafka is back; meanwhile nothing is read from the broker."
#: Fewer rows than these are not worth a frame that lets them go.
_REMOVED: Final = 100
#: Of a row's record, beside key and value.
_AROUND_ROW: Final = 16


class _Asked(NamedTuple):
    """What a call wants stored."""

    kind: Kind
    payload: bytes
    changes: Changes
    batch: Any = None

    def same(self, other: _Asked) -> bool:
        """Whether another call wants the same: the same rows, or without rows the same changes."""
        if self.batch is not None and other.batch is not None:
            return bool(self.batch.equals(other.batch))
        ours, theirs = self._replace(batch=None), other._replace(batch=None)
        return self.batch is other.batch and ours == theirs


class KafkaStore:
    """An open journal in Kafka.

    Args:
        place: Where it lies.
        schema: Of the rows.
        limits: How much it may take; of them, those that name a disk or its files mean nothing here.
        committer: Started; its opening is the state's.
        recovered: What opening found, its state with the epoch of this opening.
        record_bytes: The largest record.
        repeats: Its owner repeats a call that found no room, before it asks for anything else with rows.

    Attributes:
        state: What a snapshot would hold now.
        end: The next offset.
        syncs: How long each transaction took.
        bytes_written: Bytes of all rows since this opening, and of their frames.
    """

    #: What `syncs` counts.
    sync_kind = "transaction"

    def __init__(
        self,
        place: LandingPlace,
        schema: Any,
        limits: Limits,
        committer: Committer,
        recovered: RecoveredState,
        *,
        record_bytes: int,
        repeats: bool,
    ) -> None:
        self.schema, self.state, self._limits = schema, recovered.state, limits
        self._place, self._committer, self._record_bytes, self._repeats = place, committer, record_bytes, repeats
        self.syncs, self.bytes_written = Histogram(BATCHES), 0
        self._counters = Counters(self.state)
        self._openings = recovered.openings
        #: of the next row
        self._next = recovered.end
        self._reader = RowReader(place, schema, recovered.places)
        self._trimmer = Trimmer(place)
        #: number of this opening's last frame that is known to be committed; -1 before its snapshot
        self._sequence = -1
        #: frames and their bytes since the last snapshot
        self._since = (0, 0)
        #: totals of counters in the frame that is being written
        self._totals: Mapping[str, int] = {}
        #: rows in it whose payload is left out
        self._aside = 0
        #: what a call wanted that nobody knows the end of, and what one wanted that was found stored after it was told
        #: that there is no room
        self._undecided: _Asked | None = None
        self._found: _Asked | None = None
        self.end = recovered.state.end

    # What is there -------------------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The oldest offset that can be read."""
        return self.state.floor

    @property
    def committed(self) -> int:
        """The smallest watermark of all consumers; the first offset when there is none."""
        return min(self.state.consumers.values(), default=self.first)

    @property
    def limits(self) -> Limits:
        """How much it may take."""
        return self._limits

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the rows from the first on, in each copy."""
        return self._next.below - self._reader.places.bytes_below(self.first, self._next)

    @property
    def bytes_waiting(self) -> int:
        """Bytes of rows that are not committed."""
        return self.bytes_between(self.committed, self.end)

    @property
    def room_left(self) -> int | None:
        """Bytes that may still come; None without a limit: what Kafka's disks hold is not known here."""
        limit = self._limits.max_bytes
        return None if limit is None else max(0, limit - self.bytes_on_disk)

    @property
    def trouble(self) -> str | None:
        """Why Kafka can't be used now, in words; None while it can."""
        error = self._committer.trouble
        return None if error is None else error.what

    def count(self, increments: Mapping[str, int]) -> None:
        """Add to counters of the ledger; any thread."""
        self._counters.add(increments)

    # Writing -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write the snapshot with which this opening begins: from now on nobody older is believed [I8].

        Raises:
            JournalFull: TL-J30, Kafka can't be used.
            JournalFailed: TL-J31, another one has begun.
        """
        self._transact(self._snapshot())

    def append(self, batch: Any, changes: Changes) -> None:
        """Make rows durable, in one transaction.

        Raises:
            JournalFull: TL-J02 no room, TL-J30 Kafka can't be used; the same call may succeed later [I7].
            JournalFailed: TL-J31 another owner has begun, TL-J34 it is not known what is stored.
            JournalError: TL-J36, a row is larger than the topic takes, and is none that was received.
        """
        self._make_room(batch.nbytes)
        self._transact(_Asked(Kind.RECORDS, b"", changes, batch))

    def write(self, kind: Kind, payload: Bytes, changes: Changes = NO_CHANGES, *, durable: bool) -> None:
        """Write one frame without rows; durable always. Errors are those of `append`."""
        del durable
        self._transact(_Asked(kind, bytes(payload), changes))

    def write_watermarks(self, changes: Changes = NO_CHANGES) -> bool:
        """Write the watermarks; whether that worked. What did not stays in memory, and the next one brings it."""
        content = {"consumers": self.state.consumers, "floor": self.state.floor}
        try:
            self._transact(_Asked(Kind.COMMITTED, encode_json(content), changes))
        except JournalFull:
            return False
        return True

    def sync(self) -> None:
        """Nothing is written that is not durable."""

    def finish(self) -> None:
        """Write the counters that only memory has."""
        if self._counters.waiting:
            self.write_watermarks()

    def close(self) -> None:
        """Let go of Kafka; what was begun and not committed the next owner aborts. A second call does nothing."""
        self._committer.drop()
        self._reader.close()
        self._trimmer.close()

    # Owner ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing to look at: a transaction of an owner that was fenced is refused by Kafka [I8]."""

    def release(self) -> None:
        """Nothing to give back: whoever comes next takes it."""

    # Transactions --------------------------------------------------------------------------------------------------

    def _transact(self, asked: _Asked) -> None:
        """Store what is asked for, or know that it is not stored."""
        if self._undecided is not None or not self._committer.ready:
            self._settle(patient=self._repeats or self._undecided is None)
        if self._was_found(asked):
            return
        for _ in range(_ATTEMPTS):
            if asked.kind != Kind.SNAPSHOT and self._snapshot_due():
                self._transact(self._snapshot())
            records = self._records(asked)
            begun = time.perf_counter()
            try:
                self._committer.commit(records)
            except Undecided as problem:
                self._undecided, why = asked, problem.told.what
                if self._settle(patient=self._repeats):
                    self._found = None
                    return
            else:
                self.syncs.observe(time.perf_counter() - begun)
                self.bytes_written += sum(len(record[1] or b"") for record in records)
                self._stored(asked, records)
                return
        raise JournalFull("TL-J30", self._place.where, f"Kafka does not take what is to be stored: {why}", _AGAIN)

    def _was_found(self, asked: _Asked) -> bool:
        """Whether what is asked for was found stored after it had been told that there is no room."""
        found = self._found
        if found is None or not (found.same(asked) or asked.batch is not None):
            return False
        self._found = None
        return found.same(asked)

    def _settle(self, *, patient: bool) -> bool:
        """Get a producer again, and learn what was committed; whether what was undecided is.

        Args:
            patient: Whether the caller may be told that there is no room, and come again.
        """
        deadline = time.monotonic() + (WAIT_S if patient else _LONGEST_S)
        while (mended := self._committer.mend(WAIT_S)) is None:
            if time.monotonic() < deadline:
                continue
            why = self.trouble or "it does not answer"
            if patient:
                raise JournalFull("TL-J30", self._place.where, f"the journal's Kafka can't be used: {why}", _AGAIN)
            what = f"it is not known whether the last change is stored, and Kafka can't be asked: {why}"
            raise JournalFailed("TL-J34", self._place.where, what, "Start again: opening finds out what is stored.")
        return self._take(mended)

    def _take(self, mended: Mended) -> bool:
        """Do what was committed; at most the one frame that was undecided."""
        undecided, self._undecided = self._undecided, None
        incarnation = self.state.incarnation
        fresh = [one for one in mended.frames if one.label.incarnation == incarnation]
        fresh = [one for one in fresh if one.label.sequence > self._sequence]
        self._committer.state_end = max(self._committer.state_end, mended.state_end)
        if fresh:
            self._replay(fresh)
            self._found = undecided
        self._next = self._next._replace(offset=max(self._next.offset, mended.rows_end))
        self.end = self.state.end
        return bool(fresh)

    def _replay(self, frames: Sequence[Any]) -> None:
        """As recovery does. What memory knows better stays: watermarks and counters that are not stored yet."""
        state = self.state
        kept = state.consumers, max(state.floor, 0), state.ledger
        places = self._reader.places
        before = RecoveredState(state, self.schema, self._openings, places, self._next, self._sequence, 0)
        if frames[0].header.kind == Kind.SNAPSHOT:  # of this state: it changes nothing
            self._sequence, frames = frames[0].label.sequence, frames[1:]
            before = before._replace(sequence=self._sequence)
        after = replayed(self._place.where, frames, before)
        assert after is not None
        state.consumers, state.floor, state.ledger = kept
        self._openings, self._next, self._sequence = after.openings, after.end, after.sequence

    def _records(self, asked: _Asked) -> list[OutRecord]:
        """All records of a transaction: rows, and the pieces of their frame."""
        rows = self._rows(asked)
        section = asked.payload if asked.kind == Kind.SNAPSHOT else section_of(self._counted(), asked.changes)
        payload = self._snapshot_payload() if asked.kind == Kind.SNAPSHOT else asked.payload
        frame = encode(
            asked.kind,
            epoch=self.state.epoch,
            first=self.state.end,
            durable=0,
            rows=len(rows),
            section=section,
            payload=payload,
        )
        below = self._next.below + _size(rows)
        label = Label(self.state.incarnation, self._sequence + 1, 0, 1, self._next.offset, below)
        topic, partition = self._place.topic, self._place.partition
        state, where = self._place.state_topic, self._place.state.partition
        body = b"".join(bytes(buffer) for buffer in frame.buffers)
        return [
            *((topic, row.value, row.key, partition) for row in rows),
            *((state, value, key, where) for key, value in pieces_of(body, label)),
        ]

    def _counted(self) -> dict[str, int]:
        self._totals = self._counters.unstored()
        return self._totals

    def _rows(self, asked: _Asked) -> list[LandingRecord]:
        if asked.batch is None:
            return []
        rows, self._aside = to_records(asked.batch, self.state.end, self._record_bytes)
        largest = max((row.size for row in rows), default=0)
        if largest > self._record_bytes:
            what = f"a row of {largest:,} bytes is larger than the topic takes, {self._record_bytes:,}"
            raise JournalError("TL-J36", self._place.where, what, "Raise the topic's max.message.bytes.")
        return rows

    def _stored(self, asked: _Asked, records: Sequence[OutRecord]) -> None:
        """It is committed: let memory follow."""
        state, committer = self.state, self._committer
        rows = 0 if asked.batch is None else asked.batch.num_rows
        pieces = len(records) - rows
        size = sum(len(record[1] or b"") for record in records[rows:])
        self._sequence += 1
        committer.state_end += pieces + 1
        if self._found is not None and self._found.kind == asked.kind:
            self._found = None  # what was asked for since stands behind it
        if asked.kind == Kind.SNAPSHOT:
            self._since = (0, 0)
            if self._sequence:
                self.trim_state(committer.state_end - pieces - 1)
            return
        self._since = (self._since[0] + 1, self._since[1] + size)
        self._counters.stored(self._totals)
        asked.changes.apply(state)
        if rows:
            if self._aside:
                self._counters.add({"packets_too_large": self._aside})
            if not self._openings or self._openings[-1][1] != state.incarnation:
                self._openings = (*self._openings, (state.end, state.incarnation))
            self._reader.places.note(self._next)
            sizes = sum(len(record[2]) + len(record[1] or b"") + _AROUND_ROW for record in records[:rows])
            self._next = Place(state.end + rows, self._next.offset + rows + 1, self._next.below + sizes)
            state.end, state.newest = self._next.row, state.incarnation
            self.end = state.end

    # Snapshots -----------------------------------------------------------------------------------------------------

    def _snapshot_due(self) -> bool:
        frames, size = self._since
        return frames >= _FRAMES or size >= _FRAME_BYTES

    def _snapshot(self) -> _Asked:
        """A snapshot of what is now; what lies before it goes when it is stored."""
        further = Further(self._openings, self._reader.places)
        return _Asked(Kind.SNAPSHOT, further.encode(), NO_CHANGES)

    def _snapshot_payload(self) -> bytes:
        with self._counters.lock:
            return Snapshot(self.state, self.schema, self._sequence + 2, 0).encode()

    # What is removed -----------------------------------------------------------------------------------------------

    def set_consumers(self, consumers: dict[str, int]) -> None:
        """Replace the watermarks, with the removal that follows from it."""
        self.state.consumers = consumers
        if not self.remove_committed():
            self.write_watermarks()

    def remove_committed(self, retain: int | None = None) -> bool:
        """Remove what no consumer waits for; whether there was anything."""
        asked, retain = retain is not None, self._limits.retain_bytes if retain is None else retain
        if not self.state.consumers:
            return False
        upto, places = self.committed, self._reader.places
        if retain:
            upto = min(upto, places.row_at(places.bytes_below(upto, self._next) - retain, self._next))
        if upto < self.state.floor + (1 if retain == 0 and asked else _REMOVED):
            return False
        floor, self.state.floor = self.state.floor, upto
        if not self.write_watermarks():  # nothing is removed before it is durable that it may be missing
            self.state.floor = floor
            return False
        self._trim()
        return True

    def _trim(self) -> None:
        floor, places = self.state.floor, self._reader.places
        offset = places.offset_of(floor) if floor < self.end else self._next.offset
        self._trimmer.below(self._place.rows, offset)
        places.forget(floor)
        older = sum(1 for first, _ in self._openings if first < floor)
        self._openings = self._openings[max(0, older - 1) :]

    def trim_state(self, offset: int) -> None:
        """Let the state partition's records below an offset go: a snapshot lies there."""
        self._trimmer.below(self._place.state, offset)

    def _make_room(self, more: int) -> None:
        """Refuse rows for which there is no room [I7]; where no row waits, a limit must not stop the line."""
        limit = self._limits.max_bytes
        if limit is None or self.bytes_on_disk + more <= limit or self.state.end == self.committed:
            return
        if self.remove_committed(retain=0) and self.bytes_on_disk + more <= limit:
            return
        what = f"{self.bytes_on_disk:,} of at most {limit:,} bytes are used, {more:,} more don't fit"
        raise full(self._place.where, what, "Intake goes on when rows are committed; or raise the limit.")

    # Reading -------------------------------------------------------------------------------------------------------

    def pieces(self, start: int, end: int) -> Iterator[RowSlice]:
        """Yield the rows from `start` to `end`; see `RowReader.pieces`."""
        return self._reader.pieces(start, end)

    def after_bytes(self, start: int, end: int, max_bytes: int) -> int:
        """How far so many bytes reach from row `start`; a transaction's bytes count evenly for its rows."""
        places = self._reader.places
        return min(end, places.row_at(places.bytes_below(start, self._next) + max_bytes, self._next))

    def bytes_between(self, start: int, end: int) -> int:
        """How many bytes the rows from `start` to `end` are; a transaction's bytes count evenly for its rows."""
        places = self._reader.places
        return places.bytes_below(end, self._next) - places.bytes_below(start, self._next)

    def origin_below(self, offset: int) -> str:
        """Which opening of the journal wrote the row below an offset."""
        below = [incarnation for first, incarnation in self._openings if first < offset]
        return below[-1] if below else ""

    def number_from(self, offset: int) -> int:
        """The number of the first row at or after an offset of the landing partition; `end` where there is none."""
        return self._reader.first_from(offset, self.end)


def _size(rows: Sequence[LandingRecord]) -> int:
    return sum(row.size + _AROUND_ROW for row in rows)
