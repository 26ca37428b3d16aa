"""Outbox: a journal of rows to send. Each batch is appended once, sent in order, and done when the receiver has it.

The outbox is a journal like the inbox, with the same frames, recovery and limits (ADR 12). The notes and packet ids of
its frames hold the state of sending, so that each becomes durable together with its rows:

    batch     ``batch:<writer>`` → the newest batch of a writer and its rows here: a repeat appends nothing [I10]
    dropped   rows of a partial batch that another attempt replaced: they are never sent (ADR 14)
    held      packet id → row number and phase, durable before the packet that depends on it is sent [I10]; for QoS 1
              written without a sync: a power failure may cause a repeat, as QoS 1 allows
    done      ranges of rows that need no more sending, without a sync: a crash may send a few rows again. A packet id
              is released in the frame that marks its row as done, or a crash would send the row again
    outcomes  number of done rows by outcome, in the same frame as ``done``: a crash keeps both or neither [I11]

Any thread may append; only the sending thread marks rows as done.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

from annotated_types import Ge, Len

from towline.errors import JournalError, JournalFull
from towline.journal.disk import journal_full
from towline.journal.journal import Journal
from towline.journal.ranges import Range, Ranges
from towline.journal.recovery import read_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

#: Phases of a row in flight: PUBLISH or PUBREL of QoS 2 may have been received; PUBLISH of QoS 1.
PHASE_PUBLISHED, PHASE_RELEASED, PHASE_QOS1 = 0, 1, 2

_SENDER_CONSUMER = "sender"
_DONE_NOTE = "done"
_OUTCOMES_NOTE = "outcomes"
_BATCH_NOTE = "batch:"
_DROPPED_NOTE = "dropped"
_ENDED_JOB_NOTE = "over:"

#: A partial batch without new rows for this many seconds is dropped; earlier if the outbox is full. A task that is
#: still running is refused and restarts its batch.
_IDLE_BATCH_S: Final = 86_400.0
_IDLE_BATCH_FULL_S: Final = 600.0
#: An ended job is remembered for this many seconds, in which a late task of it is refused.
_ENDED_JOB_S: Final = 3_600
#: Batches of a job that was never ended (the driver was killed) are remembered for this many seconds.
_JOB_BATCH_S: Final = 7 * 86_400
#: Most bytes of a frame beside its rows.
_FRAME_OVERHEAD_BYTES: Final = 1 << 16
_CLEAN_UP_INTERVAL_S: Final = 600.0


class InFlight(NamedTuple):
    """Row in flight under a packet id.

    Attributes:
        row_number: Number of the row in the outbox.
        phase: `PHASE_PUBLISHED`, `PHASE_RELEASED` or `PHASE_QOS1`.
        reason: Reason code of PUBREC, below 0x80; 0 before PUBREC.
    """

    row_number: int
    phase: int
    reason: int = 0


class Outbox(Journal):
    """Durable send queue; `open` returns one. Offsets, limits, ledger and session are the journal's.

    Attributes:
        done_rows: Rows that need no more sending; only the sending thread changes the set.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        watermark = self.consumers.get(_SENDER_CONSUMER, self.first_offset)
        self.done_rows = _done_rows_of(watermark, self.notes)
        #: number of done rows by outcome
        self._outcome_counts: Mapping[str, int] = dict(self.notes.get(_OUTCOMES_NOTE, {}))
        #: released packet ids that are not written yet
        self._freed_ids: set[int] = set()
        #: makes reading and replacing the newest batch of a writer atomic
        self._append_lock = threading.Lock()
        #: guards all below; held for moments, never during a system call
        self._rows_lock = threading.Lock()
        #: rows below may be sent, but for withheld ones: of a partial batch, or dropped and not done; never mutated
        self._visible_end, self._withheld_rows = 0, Ranges()
        #: first row of a batch that became whole: the sending thread has to go back to it
        self._rewind_offset: int | None = None
        #: by writer, time of the newest rows of its batch
        self._last_append_at: dict[str, float] = {}
        self._opened_at = time.monotonic()
        self._update_visible_rows()
        self._next_clean_up_at = 0.0
        if _SENDER_CONSUMER not in self.consumers:
            self.commit(_SENDER_CONSUMER, watermark)

    # -- appending; any thread --

    def batch_status(self, batch: Batch) -> BatchStatus:
        """Return the status of a batch; an older one than the writer's newest is whole.

        Raises:
            JournalError: TL-J17, the job of its writer has ended. TL-J22, another batch has this number.
        """
        if job_of(batch.writer) and _ENDED_JOB_NOTE + job_of(batch.writer) in self.notes:
            problem = f"the job of {batch.writer} has ended, this task is too late"
            raise JournalError("TL-J17", self.location, problem, "Nothing: the job has its result.")
        note = self._last_batch(batch.writer)
        if note is None or note.number < batch.number:
            return BatchStatus(0, self.end, whole=False, already=False, newest=note.number if note else -1)
        if note.number == batch.number and note.origin and batch.origin and note.origin != batch.origin:
            problem = f"batch {batch.number} of {batch.writer} is in the outbox already, with another origin"
            remedy = "restore the newest one, or start the query with a new checkpoint directory."
            remedy = f"The query's checkpoint was restored from an older copy: {remedy}"
            raise JournalError("TL-J22", self.location, problem, remedy)
        whole = note.whole or note.number > batch.number
        if not whole and note.attempt != batch.attempt:
            return BatchStatus(0, self.end, whole=False, already=False, newest=note.number)
        return BatchStatus(note.rows, note.end, whole, already=True, newest=note.number)

    def _last_batch(self, writer: str) -> LastBatch | None:
        values = self.notes.get(_BATCH_NOTE + writer)
        return None if values is None else LastBatch(*values)

    def append_batch(self, rows: Any, batch: Batch | None = None, *, start: int = 0, whole: bool = True) -> BatchStatus:
        """Append rows durably, exactly once if they belong to a batch [I10].

        A large batch may come in several calls, in order; rows that are already here are deduplicated. Rows and note
        are in one frame, so a crash never separates them. The rows of an attempt are sent when its batch is whole;
        those of an attempt that another one replaces are never sent (ADR 14).

        Args:
            rows: A record batch of the outbox's schema.
            batch: Batch of these rows; None for rows that are never repeated.
            start: Number of the first of these rows within the batch.
            whole: The batch ends with these rows.

        Raises:
            JournalFull: TL-J02, no free space: nothing was stored, the same call may succeed later [I7].
            JournalFailed: TL-J04, these rows may be lost; the outbox is dead [I6].
            JournalError: TL-J06 another schema, TL-J08 too large for one frame, TL-J10 closed, TL-J15 the batch can
                never be complete, TL-J16 rows before `start` are missing, TL-J17 job has ended, TL-J22 another origin.
        """
        with self._append_lock:
            if batch is None:
                end = self.append(rows)
                self._update_visible_rows()
                return BatchStatus(rows.num_rows, end, whole=True, already=False)
            self._clean_up()
            status = self.batch_status(batch)
            if status.whole or (status.already and start + rows.num_rows <= status.rows and not whole):
                return status
            if start > status.rows:
                problem = f"rows {status.rows:,} to {start:,} of batch {batch.number} of {batch.writer} are missing"
                problem = f"{problem}: another attempt of the task has started, or this one paused too long"
                remedy = "Run the task again: it writes the batch from its first row."
                raise JournalError("TL-J16", self.location, problem, remedy)
            if not status.rows:
                self._drop_partial_batches([batch.writer])  # of a previous attempt
            new_rows = rows.slice(status.rows - start)
            row_count = start + rows.num_rows
            if not row_count:
                return BatchStatus(0, self.end, whole=True, already=False)  # an empty batch needs no note
            return self._append_new_rows(new_rows, batch, row_count, whole=whole)

    def _append_new_rows(self, new_rows: Any, batch: Batch, row_count: int, *, whole: bool) -> BatchStatus:
        """Append new rows together with the note of the writer's newest batch."""
        writer, last_batch = batch.writer, self._last_batch(batch.writer)
        end, previous_ranges = self.end + new_rows.num_rows, last_batch.ranges if last_batch else ()
        ranges = Ranges(0, [*previous_ranges, (self.end, end)]).ranges if previous_ranges or not whole else ()
        updated_at = int(time.time()) if job_of(writer) else 0
        attempt, partial_ranges = ("", ()) if whole else (batch.attempt, ranges)
        try:
            note = LastBatch(batch.number, row_count, whole, end, batch.origin, attempt, partial_ranges, updated_at)
            self._append_with_note(new_rows, batch, note)
        except JournalError as error:
            if error.code == "TL-J15":
                self._drop_partial_batches([writer])
            raise
        self._last_append_at[writer] = time.monotonic()
        # The rows of a whole batch are sent, the oldest first.
        self._update_visible_rows(rewind_offset=ranges[0][0] if whole and ranges else None)
        return BatchStatus(row_count, end, whole, already=False, newest=batch.number)

    def _append_with_note(self, new_rows: Any, batch: Batch, last_batch: LastBatch) -> None:
        for last_try in (False, True):
            try:
                self.append(new_rows, notes={_BATCH_NOTE + batch.writer: last_batch})
            except JournalFull as error:
                if not last_try:
                    idle_writers = self._idle_writers(_IDLE_BATCH_FULL_S)
                    self._drop_partial_batches(writer for writer in idle_writers if writer != batch.writer)
                if not self._is_blocked(new_rows):
                    raise
                if last_try:  # the space may have been freed before
                    problem = f"batch {batch.number} of {batch.writer} can never be complete: {error.problem}"
                    raise JournalError(
                        "TL-J15",
                        self.location,
                        f"{problem}, and no row in the outbox can be sent",
                        "Raise outboxMaxBytes (outbox.max_bytes of a bridge line), or write less at a time: smaller "
                        "batches or more partitions. Nothing of this batch was sent; it is written again.",
                    ) from error
            else:
                return

    def _is_blocked(self, new_rows: Any) -> bool:
        """Return whether these rows can never fit the size limit, because no row in the outbox can be sent."""
        limit = self.limits.max_bytes
        if limit is None or self.bytes_on_disk + new_rows.nbytes + _FRAME_OVERHEAD_BYTES <= limit:
            return False
        with self._rows_lock:
            is_written = self.consumers.get(_SENDER_CONSUMER) == self.done_rows.watermark
            is_written = is_written and not self._dropped_not_done()
        return is_written and self.is_done_below(self.end)

    def _drop_partial_batches(self, writers: Iterable[str]) -> None:
        """Drop the rows of these writers' partial batches, so that they are never sent; in one frame."""
        partial_batches = {writer: note for writer in writers if (note := self._last_batch(writer)) and note.ranges}
        dropped_ranges = [rows for note in partial_batches.values() for rows in note.ranges]
        if not dropped_ranges:
            return
        dropped_count, previous_ranges = self._dropped_note
        all_ranges = Ranges(0, [*((s, e) for s, e in previous_ranges if e > self.first_offset), *dropped_ranges]).ranges
        dropped_count += sum(end - start for start, end in dropped_ranges)
        notes: dict[str, Any] = {_DROPPED_NOTE: [dropped_count, all_ranges]}
        for writer, note in partial_batches.items():
            empty = LastBatch(note.number, 0, False, note.end, note.origin, updated_at=note.updated_at)
            notes[_BATCH_NOTE + writer] = empty
        self.append(notes=notes)
        self._update_visible_rows()

    def _update_visible_rows(self, *, rewind_offset: int | None = None) -> None:
        """Update the rows that the sending thread may send, after an append or drop."""
        with self._rows_lock:
            end = self.end  # read before the notes, which cover all rows below it
            partial = (rows for note in self.last_batches.values() for rows in note.ranges)
            self._visible_end, self._withheld_rows = end, Ranges(0, (*partial, *self._dropped_not_done()))
            offsets = (offset for offset in (self._rewind_offset, rewind_offset) if offset is not None)
            self._rewind_offset = min(offsets, default=None)

    def _dropped_not_done(self) -> list[Range]:
        """Return the ranges of dropped rows that are not marked as done; the caller holds the lock."""
        return [rows for start, end in self._dropped_note[1] for rows in self.done_rows.missing(start, end)]

    def _idle_writers(self, seconds: float) -> list[str]:
        """Return the writers whose partial batch has got no rows for this many seconds."""
        idle_since, appended_at = time.monotonic() - seconds, self._last_append_at
        partial_writers = [writer for writer, note in self.last_batches.items() if note.ranges]
        return [writer for writer in partial_writers if appended_at.get(writer, self._opened_at) <= idle_since]

    def end_job(self, job: str) -> None:
        """End a job: drop its partial batches, forget its whole ones, and refuse more rows of it.

        Raises:
            JournalFull: TL-J02, the disk is full: the notes of its batches expire later.
        """
        with self._append_lock:
            writers = [writer for writer in self.last_batches if job_of(writer) == job]
            self._drop_partial_batches(writers)
            notes: dict[str, Any] = {_BATCH_NOTE + writer: None for writer in writers}
            self.append(notes={**notes, _ENDED_JOB_NOTE + job: int(time.time())})

    def _clean_up(self) -> None:
        """Drop idle partial batches and remove notes of old jobs; at most once in `_CLEAN_UP_INTERVAL_S`."""
        if time.monotonic() < self._next_clean_up_at:
            return
        self._next_clean_up_at = time.monotonic() + _CLEAN_UP_INTERVAL_S
        self._drop_partial_batches(self._idle_writers(_IDLE_BATCH_S))
        now, notes = int(time.time()), dict[str, Any]()
        for name, value in dict(self.notes).items():
            if name.startswith(_ENDED_JOB_NOTE):
                if value < now - _ENDED_JOB_S:
                    notes[name] = None
            elif name.startswith(_BATCH_NOTE) and job_of(name.removeprefix(_BATCH_NOTE)):
                last_batch = LastBatch(*value)
                if last_batch.updated_at < now - _JOB_BATCH_S and not last_batch.ranges:
                    notes[name] = None
        if notes:
            self.append(notes=notes)

    # -- sending; the sending thread --

    @property
    def waiting_rows(self) -> int:
        """Number of rows of whole batches that are not done."""
        return self._visible_end - self.done_rows.count() - self._withheld_rows.count()

    @property
    def incomplete_rows(self) -> int:
        """Number of rows that may not be sent yet, because their batch is partial."""
        return sum(end - start for note in self.last_batches.values() for start, end in note.ranges)

    @property
    def dropped_rows(self) -> int:
        """Number of rows that are never sent, because their partial batch was dropped."""
        return int(self._dropped_note[0])

    @property
    def _dropped_note(self) -> tuple[int, Sequence[Range]]:
        row_count, ranges = self.notes.get(_DROPPED_NOTE, (0, ()))
        return row_count, ranges

    def next_rows(self, cursor: int) -> Range | None:
        """Return the next range of rows to send, from `cursor` on; from an older row after a batch became whole."""
        with self._rows_lock:
            rewound = cursor if self._rewind_offset is None else min(cursor, self._rewind_offset)
            start = max(rewound, self.done_rows.watermark)
            self._rewind_offset = None
            return next(iter(self._withheld_rows.missing(start, self._visible_end)), None)

    def finish_dropped(self) -> bool:
        """Mark newly dropped rows as done; return whether there were any."""
        if not self._dropped_note[1]:
            return False
        with self._rows_lock:
            dropped_ranges = self._dropped_not_done()
            for start, end in dropped_ranges:
                self.done_rows.add(start, end)
        if dropped_ranges:
            self._update_visible_rows()
        return bool(dropped_ranges)

    def is_done_below(self, offset: int) -> bool:
        """Return whether every row below `offset` that may be sent is done; from any thread."""
        if self.done_rows.watermark >= offset:
            return True
        with self._rows_lock:
            done_rows = self.done_rows.copy()
            done_rows.unite(self._withheld_rows)
        return done_rows.watermark >= offset

    @property
    def in_flight(self) -> dict[int, InFlight]:
        """Rows in flight by packet id, as they are on disk, in the order of their rows."""
        entries = sorted((number, i, state) for i, (number, state) in self.held_ids.items() if i not in self._freed_ids)
        return {i: InFlight(number, state & 255, state >> 8) for number, i, state in entries}

    def write_in_flight(self, in_flight: Mapping[int, InFlight], *, durable: bool = True) -> None:
        """Write packet ids with their rows and phases, durable before their packets are sent.

        Without `durable`, for QoS 1 only, the frame is not synced, so a power failure may lose it.

        Raises:
            JournalFull: TL-J02, the disk is full: no packet but those of QoS 1 may be sent.
        """
        held_ids = {i: (row.row_number, row.phase | row.reason << 8) for i, row in in_flight.items()}
        if not durable and self._freed_ids.isdisjoint(held_ids):
            self.append(held_ids=held_ids, durable=False)
            return
        notes = self._done_notes() if self._freed_ids else {}
        self.append(held_ids=held_ids, released_ids=tuple(self._freed_ids), notes=notes, durable=durable)
        self._freed_ids = set()

    def mark_done(
        self, numbers: Iterable[int], freed_ids: Sequence[int] = (), *, outcomes: Mapping[str, int] | None = None
    ) -> None:
        """Mark rows as done in memory, and their packet ids as released; `flush` writes both to disk.

        `outcomes` are increments of the ledger's counters, in the frame that marks the rows as done [I11].
        """
        with self._rows_lock:  # `is_done_below` reads from other threads
            for number in numbers:
                self.done_rows.add(number)
            for outcome, count in (outcomes or {}).items():
                self._outcome_counts = {**self._outcome_counts, outcome: self._outcome_counts.get(outcome, 0) + count}
        self._freed_ids.update(freed_ids)

    def flush(self, *, durable: bool = False) -> None:
        """Write the done rows to disk; segments whose rows are all done are removed.

        With `durable`, wait for a sync: before rows are sent that must not be sent twice (QoS 0).

        Raises:
            JournalFull: TL-J02, with `durable` on a full disk.
        """
        freed_ids = tuple(self._freed_ids)
        notes = self._done_notes()
        is_written = self.commit(_SENDER_CONSUMER, self.done_rows.watermark, released_ids=freed_ids, notes=notes)
        if is_written:
            self._freed_ids = set()
        if durable:
            if not is_written:
                raise journal_full(self.location, "no room to record sent messages")
            self.sync()

    def _done_notes(self) -> dict[str, Any]:
        return {_DONE_NOTE: self.done_rows.ranges, _OUTCOMES_NOTE: self._outcome_counts}

    @property
    def ledger(self) -> Mapping[str, int]:
        """Totals of the ledger's counters, including outcomes that are not on disk yet."""
        ledger = dict(super().ledger)
        for outcome, count in self._outcome_counts.items():
            ledger[outcome] = ledger.get(outcome, 0) + count
        return ledger

    @property
    def last_batches(self) -> Mapping[str, LastBatch]:
        """Newest batch of each writer."""
        return _last_batches(self.notes)


def count_waiting_rows(directory: Path) -> int:
    """Return the number of rows in a journal or outbox directory that are not committed or not sent. Needs no lock.

    Raises:
        JournalError, OSError: As `towline.journal.recovery.read_state`.
    """
    state = read_state(directory)
    if state is None:
        return 0
    done_rows = _done_rows_of(min(state.consumers.values(), default=state.floor), state.notes)
    for note in _last_batches(state.notes).values():  # rows of a partial batch are still with their writer
        done_rows.unite(Ranges(0, note.ranges))
    return sum(end - start for start, end in done_rows.missing(0, state.end))


def _done_rows_of(watermark: int, notes: Mapping[str, Any]) -> Ranges:
    """Return the rows below a watermark, and those that the notes mark as done or dropped."""
    return Ranges(watermark, (*notes.get(_DONE_NOTE, ()), *notes.get(_DROPPED_NOTE, (0, ()))[1]))


def _last_batches(notes: Mapping[str, Any]) -> dict[str, LastBatch]:
    batch_notes = [(name, note) for name, note in dict(notes).items() if name.startswith(_BATCH_NOTE)]
    return {name.removeprefix(_BATCH_NOTE): LastBatch(*note) for name, note in batch_notes}


#: Writers of a job, which ends: ``job-<id>/<part>``. A query's id is a UUID and never starts so.
_JOB_WRITER: Final = re.compile(r"(job-[0-9a-f]{32})/[0-9]+")


@dataclass(frozen=True, slots=True)
class Batch:
    """Identity of a batch of rows, so that repeats are appended once; bounds are for requests.

    Attributes:
        writer: Source of one batch after another, such as a query and one of its partitions.
        number: Grows with each batch of the writer.
        origin: Hash of the batch's source; distinguishes another batch with the same number. Empty for unknown.
        attempt: Name of one run through the rows from the first on: another run may have them in another order. Empty
            for a batch in one call.
    """

    #: For requests that name a batch.
    __pydantic_config__: ClassVar[Mapping[str, object]] = {"extra": "forbid"}

    writer: Annotated[str, Len(1, 256)]
    number: Annotated[int, Ge(0)]
    origin: Annotated[str, Len(0, 256)] = ""
    attempt: Annotated[str, Len(0, 256)] = ""


class BatchStatus(NamedTuple):
    """Status of a batch in the outbox.

    Attributes:
        rows: Number of durable rows of this batch; of this attempt, while the batch is partial.
        end: The offset after the last of them.
        whole: The batch is complete: further rows of it are repeats.
        already: All rows of this call were here before.
        newest: Number of the writer's newest batch; -1 without one.
    """

    rows: int
    end: int
    whole: bool
    already: bool
    newest: int = -1


class LastBatch(NamedTuple):
    """Newest batch of a writer, as the note ``batch:<writer>`` holds it.

    Attributes:
        rows: Number of its rows here.
        whole: No more rows are expected.
        end: The offset after the last of them.
        origin: As in `Batch`.
        attempt: Attempt that brought the rows, while the batch is partial.
        ranges: Offsets of the rows, while the batch is partial.
        updated_at: Seconds since 1970 of the newest rows; only for a writer of a job.
    """

    number: int
    rows: int
    whole: bool
    end: int
    origin: str = ""
    attempt: str = ""
    ranges: Sequence[Range] = ()
    updated_at: int = 0


def job_of(writer: str) -> str:
    """Return the job of a writer; "" for a writer without a job."""
    match = _JOB_WRITER.fullmatch(writer)
    return match[1] if match else ""
