"""What is to be sent, on disk: rows that come in once, go out in order, and are done when the receiver has them.

A journal like the inbox, with the same frames, recovery and limits (ADR 12). What is its own lies in the notes and the
packet ids of that journal's frames, so that each becomes durable together with the rows it is about:

    batch     ``batch:<writer>`` → the newest batch of a writer and how much is here: a repeat enters nothing [I10]
    dropped   rows of a batch that never became whole and was brought anew: they are never sent (ADR 14)
    flight    packet id → number of the row and its phase, durable before the packet that depends on it leaves [I10];
              written, not synced, for QoS 1: what a power failure takes costs a repeat, as QoS 1 may
    done      ranges of rows that need no more sending; not synced by itself: after a crash a few rows may be done a
              second time. A packet id is freed in the frame that says its row is done, or a crash would send it anew
    outcomes  how many of them are done in which way, in each frame that says which are done: after a crash both are
              known or none [I11]

Any thread may append; what is done is noted by one thread, the one that sends.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

from annotated_types import Ge, Len

from towline.errors import JournalError, JournalFull
from towline.journal.disk import full
from towline.journal.journal import Journal
from towline.journal.ranges import Range, Ranges
from towline.journal.recovery import state_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from towline.journal.disk import Disk, Lock, Room
    from towline.journal.recovery import RecoveredJournal

#: Phases of a flight: the receiver may have the row; it owns the row, and the id is being given back; as the first, of
#: QoS 1, which has no second.
PUBLISHED, RELEASED, SENT = 0, 1, 2

_SENDER = "sender"
_DONE = "done"
_OUTCOMES = "outcomes"
_BATCH = "batch:"
_DROPPED = "dropped"
_OVER = "over:"

#: A batch that is not whole and gets nothing for so many seconds is given up; sooner where its room is needed. A task
#: that lives on all the same is refused and begins again.
_IDLE_S: Final = 86_400.0
_IDLE_FULL_S: Final = 600.0
#: That a job is over is known for so many seconds: so long a task that Spark has stopped may still come.
_OVER_S: Final = 3_600
#: The last batches of a job that nobody ended (the driver was killed) stay for so many seconds.
_JOB_S: Final = 7 * 86_400
#: What a frame takes beyond the bytes of its rows, at most.
_FRAME_MORE: Final = 1 << 16
#: Seconds between two looks at what may go.
_LOOK_S: Final = 600.0


class Flight(NamedTuple):
    """A row on its way under a packet id.

    Attributes:
        reason: What PUBREC said, below 0x80; 0 before it.
    """

    number: int
    phase: int
    reason: int = 0


class Outbox(Journal):
    """A durable queue; `open` makes one, and offsets, limits, ledger and session are the journal's.

    Attributes:
        done: Rows that need no more sending; only the sending thread changes it.
    """

    def __init__(
        self, directory: Path, schema: Any, room: Room, disk: Disk, lock: Lock, opened: RecoveredJournal
    ) -> None:
        super().__init__(directory, schema, room, disk, lock, opened)
        watermark = self.consumers.get(_SENDER, self.first)
        self.done = _done(watermark, self.notes)
        #: by outcome, rows that are done
        self._outcomes: Mapping[str, int] = dict(self.notes.get(_OUTCOMES, {}))
        #: packet ids that are free again and whose frame does not say so yet
        self._freed: set[int] = set()
        #: a last batch is looked up and replaced in one step
        self._entering = threading.Lock()
        #: guards all below; held for moments, never during a system call
        self._guard = threading.Lock()
        #: rows below may be sent, but for those that must not leave: of a batch that is not whole, or dropped and not
        #: noted as done; replaced, never changed
        self._visible, self._skipped = 0, Ranges()
        #: a batch became whole: the sending thread has to go back to its first row
        self._back: int | None = None
        #: by writer, when rows of its batch came last
        self._touched: dict[str, float] = {}
        self._opened_at = time.monotonic()
        self._renew()
        self._look_at = 0.0
        if _SENDER not in self.consumers:
            self.commit(_SENDER, watermark)

    # -- coming in; any thread --

    def stored(self, batch: Batch) -> Appended:
        """How much of a batch is here: all of one that is older than the writer's newest.

        Raises:
            JournalError: TL-J17, the job of its writer is over. TL-J22, another batch with this number is here.
        """
        if job_of(batch.writer) and _OVER + job_of(batch.writer) in self.notes:
            what = f"the job of {batch.writer} is over, this task comes too late"
            raise JournalError("TL-J17", self.where, what, "Nothing: the job has its result.")
        last = self._last_batch(batch.writer)
        if last is None or last.number < batch.number:
            return Appended(0, self.end, whole=False, already=False, newest=last.number if last else -1)
        if last.number == batch.number and last.origin and batch.origin and last.origin != batch.origin:
            what = f"batch {batch.number} of {batch.writer} is here already, and was made from something else"
            do = "bring back the newest one, or start the query with a new checkpoint directory."
            do = f"The query's checkpoint was restored from an older copy: {do}"
            raise JournalError("TL-J22", self.where, what, do)
        whole = last.whole or last.number > batch.number
        if not whole and last.attempt != batch.attempt:
            return Appended(0, self.end, whole=False, already=False, newest=last.number)
        return Appended(last.rows, last.end, whole, already=True, newest=last.number)

    def _last_batch(self, writer: str) -> LastBatch | None:
        values = self.notes.get(_BATCH + writer)
        return None if values is None else LastBatch(*values)

    def enter(self, rows: Any, batch: Batch | None = None, *, start: int = 0, whole: bool = True) -> Appended:
        """Make rows durable, exactly once if they belong to a batch [I10].

        A large batch may come in pieces, in order; what of a piece is here already is left out. Rows and note are in
        one frame, so that no crash parts them. The pieces of an attempt leave when the batch is whole; those of an
        attempt that another one follows never do (ADR 14).

        Args:
            rows: A record batch of the outbox's schema.
            batch: Whose rows they are; None for rows that nobody repeats.
            start: Number of the first of these rows within the batch.
            whole: The batch ends with these rows.

        Raises:
            JournalFull: TL-J02, no room: nothing was stored, the same call may succeed later [I7].
            JournalFailed: TL-J04, nothing of it is promised; the outbox is dead [I6].
            JournalError: TL-J06 another schema, TL-J08 too large for one frame, TL-J10 closed, TL-J15 the batch can
                never become whole, TL-J16 the rows before `start` are not here, TL-J17 the job is over, TL-J22 another
                batch.
        """
        with self._entering:
            if batch is None:
                end = self.append(rows)
                self._renew()
                return Appended(rows.num_rows, end, whole=True, already=False)
            self._look()
            here = self.stored(batch)
            if here.whole or (here.already and start + rows.num_rows <= here.rows and not whole):
                return here
            if start > here.rows:
                what = f"rows {here.rows:,} to {start:,} of batch {batch.number} of {batch.writer} are missing"
                what = f"{what}: the task was started once more meanwhile, or paused for too long"
                do = "Let the task run again: it brings the batch from its first row."
                raise JournalError("TL-J16", self.where, what, do)
            if not here.rows:
                self._give_up([batch.writer])  # of an attempt before this one
            fresh = rows.slice(here.rows - start)
            count = start + rows.num_rows
            if not count:
                return Appended(0, self.end, whole=True, already=False)  # an empty batch needs no note
            return self._bring(fresh, batch, count, whole=whole)

    def _bring(self, fresh: Any, batch: Batch, count: int, *, whole: bool) -> Appended:
        """Append rows and last batch."""
        writer, former = batch.writer, self._last_batch(batch.writer)
        end, before = self.end + fresh.num_rows, former.ranges if former else ()
        ranges = Ranges(0, [*before, (self.end, end)]).ranges if before or not whole else ()
        at = int(time.time()) if job_of(writer) else 0
        attempt, waiting = ("", ()) if whole else (batch.attempt, ranges)
        try:
            self._store(fresh, batch, LastBatch(batch.number, count, whole, end, batch.origin, attempt, waiting, at))
        except JournalError as error:
            if error.code == "TL-J15":
                self._give_up([writer])
            raise
        self._touched[writer] = time.monotonic()
        self._renew(back=ranges[0][0] if whole and ranges else None)  # its rows leave, the oldest first
        return Appended(count, end, whole, already=False, newest=batch.number)

    def _store(self, fresh: Any, batch: Batch, last: LastBatch) -> None:
        for last_try in (False, True):
            try:
                self.append(fresh, notes={_BATCH + batch.writer: last})
            except JournalFull as error:
                if not last_try:
                    self._give_up(writer for writer in self._idle(_IDLE_FULL_S) if writer != batch.writer)
                if not self._stuck(fresh):
                    raise
                if last_try:  # what made room may have come before
                    what = f"batch {batch.number} of {batch.writer} can't become whole: {error.what}"
                    raise JournalError(
                        "TL-J15",
                        self.where,
                        f"{what}, and nothing there can leave",
                        "Raise outboxMaxBytes (outbox.max_bytes of a bridge line), or bring less at a time: smaller "
                        "batches or more partitions. Nothing of this batch was sent; it is brought anew.",
                    ) from error
            else:
                return

    def _stuck(self, fresh: Any) -> bool:
        """Whether the limit is in the way of these rows for ever: nothing that is here can leave."""
        limit = self.limits.max_bytes
        if limit is None or self.bytes_on_disk + fresh.nbytes + _FRAME_MORE <= limit:
            return False
        with self._guard:
            noted = self.consumers.get(_SENDER) == self.done.watermark and not self._unsettled()
        return noted and self.reached(self.end)

    def _give_up(self, writers: Iterable[str]) -> None:
        """Never send what is here of these writers' batches that are not whole; one frame says so."""
        partial = {writer: last for writer in writers if (last := self._last_batch(writer)) and last.ranges}
        gone = [piece for last in partial.values() for piece in last.ranges]
        if not gone:
            return
        rows, dropped = self._dropped
        kept = Ranges(0, [*((s, e) for s, e in dropped if e > self.first), *gone]).ranges
        notes: dict[str, Any] = {_DROPPED: [rows + sum(end - start for start, end in gone), kept]}
        for writer, last in partial.items():
            notes[_BATCH + writer] = LastBatch(last.number, 0, False, last.end, last.origin, at=last.at)
        self.append(notes=notes)
        self._renew()

    def _renew(self, *, back: int | None = None) -> None:
        """Let the sending thread see what has entered, and what of it must not leave."""
        with self._guard:
            end = self.end  # before the notes are read, which know of all rows below it
            partial = (piece for last in self.last_batches.values() for piece in last.ranges)
            self._visible, self._skipped = end, Ranges(0, (*partial, *self._unsettled()))
            if back is not None:
                self._back = back if self._back is None else min(self._back, back)

    def _unsettled(self) -> list[Range]:
        """Rows that were dropped and are not noted as done; the guard is held."""
        return [piece for start, end in self._dropped[1] for piece in self.done.missing(start, end)]

    def _idle(self, seconds: float) -> list[str]:
        """Writers whose batch is not whole and has got nothing for so long."""
        limit = time.monotonic() - seconds
        every = self.last_batches.items()
        return [name for name, last in every if last.ranges and self._touched.get(name, self._opened_at) <= limit]

    def end_job(self, job: str) -> None:
        """Forget the batches of a job; what is here of them is sent if it is whole, and nothing more enters.

        Raises:
            JournalFull: TL-J02, the disk took no more: the last batches go later by themselves.
        """
        with self._entering:
            writers = [writer for writer in self.last_batches if job_of(writer) == job]
            self._give_up(writers)
            notes: dict[str, Any] = {_BATCH + writer: None for writer in writers}
            self.append(notes={**notes, _OVER + job: int(time.time())})

    def _look(self) -> None:
        """Give up what no writer asked for in a while; now and then."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        self._give_up(self._idle(_IDLE_S))
        now, notes = int(time.time()), dict[str, Any]()
        for name, value in dict(self.notes).items():
            if name.startswith(_OVER):
                if value < now - _OVER_S:
                    notes[name] = None
            elif name.startswith(_BATCH) and job_of(name.removeprefix(_BATCH)):
                last = LastBatch(*value)
                if last.at < now - _JOB_S and not last.ranges:
                    notes[name] = None
        if notes:
            self.append(notes=notes)

    # -- going out; the sending thread --

    @property
    def waiting(self) -> int:
        """Rows that are not done, of whole batches."""
        return self._visible - self.done.count() - self._skipped.count()

    @property
    def incomplete(self) -> int:
        """Rows that are held back, because their batch is not whole."""
        return sum(end - start for last in self.last_batches.values() for start, end in last.ranges)

    @property
    def dropped(self) -> int:
        """Rows that are never sent: their batch was brought anew, or never became whole."""
        return int(self._dropped[0])

    @property
    def _dropped(self) -> tuple[int, Sequence[Range]]:
        rows, ranges = self.notes.get(_DROPPED, (0, ()))
        return rows, ranges

    def following(self, cursor: int) -> Range | None:
        """The next rows that may leave, from `cursor` on; from further back when a batch has become whole."""
        with self._guard:
            start = max(cursor if self._back is None else min(cursor, self._back), self.done.watermark)
            self._back = None
            return next(iter(self._skipped.missing(start, self._visible)), None)

    def settle(self) -> bool:
        """Note as done what was dropped since the last time; return whether there was any."""
        if not self._dropped[1]:
            return False
        with self._guard:
            dropped = self._unsettled()
            for start, end in dropped:
                self.done.add(start, end)
        if dropped:
            self._renew()
        return bool(dropped)

    def reached(self, upto: int) -> bool:
        """Whether every row below `upto` is done that may leave; from any thread."""
        if self.done.watermark >= upto:
            return True
        with self._guard:
            done = self.done.copy()
            done.unite(self._skipped)
        return done.watermark >= upto

    @property
    def flights(self) -> dict[int, Flight]:
        """Packet ids in use, as they are on disk, in the order of their rows."""
        in_order = sorted(self.held.items(), key=lambda entry: entry[1][0])
        return {i: Flight(number, said & 255, said >> 8) for i, (number, said) in in_order if i not in self._freed}

    def fly(self, flights: Mapping[int, Flight], *, durable: bool = True) -> None:
        """Make durable which row a packet id stands for, and its phase, before the packets leave.

        If not `durable`, for QoS 1 alone, it is written, so that it outlives this process, and not synced.

        Raises:
            JournalFull: TL-J02, the disk took no more: none of the packets may leave, but those of QoS 1.
        """
        phases = {i: (flight.number, flight.phase | flight.reason << 8) for i, flight in flights.items()}
        if not durable and self._freed.isdisjoint(phases):
            self.append(held=phases, durable=False)
            return
        notes = self._finished() if self._freed else {}
        self.append(held=phases, released=tuple(self._freed), notes=notes, durable=durable)
        self._freed = set()

    def finish(self, numbers: Iterable[int], freed: Sequence[int] = (), *, outcomes: Sequence[str] = ()) -> None:
        """Note in memory that rows are done, and which packet ids that frees; `flush` brings it to the disk.

        `outcomes` are counters of the ledger that grow by one, in the frame that says that they are done [I11].
        """
        with self._guard:  # `reached` looks from other threads
            for number in numbers:
                self.done.add(number)
            for outcome in outcomes:
                self._outcomes = {**self._outcomes, outcome: self._outcomes.get(outcome, 0) + 1}
        self._freed.update(freed)

    def flush(self, *, durable: bool = False) -> None:
        """Write what is done; segments whose rows are all done are removed.

        If `durable`, wait for the disk: before rows leave that must not leave twice (QoS 0).

        Raises:
            JournalFull: TL-J02, with `durable` and a disk that took no more.
        """
        freed = tuple(self._freed)
        written = self.commit(_SENDER, self.done.watermark, released=freed, notes=self._finished())
        if written:
            self._freed = set()
        if durable:
            if not written:
                raise full(self.where, "no room to note what is done")
            self.sync()

    def _finished(self) -> dict[str, Any]:
        return {_DONE: self.done.ranges, _OUTCOMES: self._outcomes}

    @property
    def ledger(self) -> Mapping[str, int]:
        """The counters' totals, with what is not on the disk yet."""
        ledger = dict(super().ledger)
        for outcome, count in self._outcomes.items():
            ledger[outcome] = ledger.get(outcome, 0) + count
        return ledger

    @property
    def last_batches(self) -> Mapping[str, LastBatch]:
        """The newest batch of each writer."""
        return _last_batches(self.notes)


def waiting_in(directory: Path) -> int:
    """Count the rows of a journal or an outbox, open or not, that a consumer or the sender is not done with.

    Raises:
        JournalError, OSError: As `towline.journal.recovery.session_in`.
    """
    state = state_in(directory)
    if state is None:
        return 0
    done = _done(min(state.consumers.values(), default=state.floor), state.notes)
    for last in _last_batches(state.notes).values():  # of a batch that is not whole: whoever brings it has it still
        done.unite(Ranges(0, last.ranges))
    return sum(end - start for start, end in done.missing(0, state.end))


def _done(watermark: int, notes: Mapping[str, Any]) -> Ranges:
    """Rows below a watermark, and those that are noted as sent, or are never sent."""
    return Ranges(watermark, (*notes.get(_DONE, ()), *notes.get(_DROPPED, (0, ()))[1]))


def _last_batches(notes: Mapping[str, Any]) -> dict[str, LastBatch]:
    every = dict(notes).items()
    return {name.removeprefix(_BATCH): LastBatch(*value) for name, value in every if name.startswith(_BATCH)}


#: Writers that belong to a job, which ends: ``job-<id>/<part>``. A query's id is a UUID and never begins so.
_OF_A_JOB: Final = re.compile(r"(job-[0-9a-f]{32})/[0-9]+")


@dataclass(frozen=True, slots=True)
class Batch:
    """Names some rows for ever, so that they enter once, however often they are brought; bounds are for requests.

    Attributes:
        writer: Who writes one batch after the other, such as a query and a partition of it.
        number: Grows with each of the writer's batches.
        origin: What the batch was made from, such as a hash; tells another batch with the same number. Empty for
            unknown.
        attempt: Names one run through the rows, from the first on: another run may have them in another order. Empty
            for a batch that comes whole.
    """

    #: Of requests that name one.
    __pydantic_config__: ClassVar[Mapping[str, object]] = {"extra": "forbid"}

    writer: Annotated[str, Len(1, 256)]
    number: Annotated[int, Ge(0)]
    origin: Annotated[str, Len(0, 256)] = ""
    attempt: Annotated[str, Len(0, 256)] = ""


class Appended(NamedTuple):
    """What became of rows that were brought.

    Attributes:
        rows: Rows of this batch that are here now, durable; of this attempt, as long as the batch is not whole.
        end: The offset after the last of them.
        whole: The batch is complete: whatever more is brought of it is a repeat.
        already: Nothing of what was brought was new.
        newest: Number of the writer's newest batch; -1 when it has none.
    """

    rows: int
    end: int
    whole: bool
    already: bool
    newest: int = -1


class LastBatch(NamedTuple):
    """The newest batch of a writer, as the notes have it under ``batch:<writer>``.

    Attributes:
        rows: So many of its rows are here.
        whole: No more are expected.
        end: The offset after the last of them.
        origin: As `Batch` has it.
        attempt: Whose rows they are, until the batch is whole.
        ranges: Where they are, until the batch is whole.
        at: Seconds since 1970 of the newest rows; only of a writer that belongs to a job.
    """

    number: int
    rows: int
    whole: bool
    end: int
    origin: str = ""
    attempt: str = ""
    ranges: Sequence[Range] = ()
    at: int = 0


def job_of(writer: str) -> str:
    """The job a writer belongs to; "" for a writer that goes on for ever."""
    match = _OF_A_JOB.fullmatch(writer)
    return match[1] if match else ""
