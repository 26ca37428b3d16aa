"""What is to be sent, on disk: rows that come in once, go out in order, and are done when the receiver has them.

A journal like the inbox, with the same frames, recovery and limits (ADR 12). What is its own lies in the notes and the
packet ids of that journal's frames, so that each becomes durable together with the rows it is about:

    marker    ``batch:<writer>`` → the newest batch of a writer and how much is here: a repeat enters nothing [I10]
    flight    packet id → number of the row and its phase, durable before the packet that depends on it leaves [I10]
    done      ranges of rows that need no more sending; not synced by itself: after a crash a few rows may be done a
              second time. A packet id is freed in the frame that says its row is done, or a crash would send it anew

Any thread may append; the marks belong to one thread, the one that sends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline.errors import JournalError
from towline.journal.journal import Journal, Limits
from towline.journal.ranges import Ranges
from towline.journal.writer import full

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from towline.journal.disk import Disk
    from towline.journal.recovery import Recovery

__all__ = ["PUBLISHED", "RELEASED", "Appended", "Batch", "Flight", "Outbox"]

#: Phases of a flight: the receiver may have the row; the receiver owns the row, and the id is being given back.
PUBLISHED, RELEASED = 0, 1

_NO_LIMITS: Final = Limits()
_SENDER = "sender"
_DONE = "done"
_MARKER = "batch:"


class Flight(NamedTuple):
    """A row on its way under a packet id.

    Attributes:
        number: The row.
        phase: `PUBLISHED` or `RELEASED`.
    """

    number: int
    phase: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Names some rows for ever, so that they enter once, however often they are brought.

    Attributes:
        writer: Who writes one batch after the other, such as a query and a partition of it.
        number: Grows with each of the writer's batches.
        origin: What the batch was made from, such as a hash; tells another batch with the same number. Empty for
            unknown.
    """

    writer: str
    number: int
    origin: str = ""


class Appended(NamedTuple):
    """What became of rows that were brought.

    Attributes:
        rows: Rows of this batch that are here now, durable.
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


class Outbox:
    """A durable queue; `open` makes one.

    Attributes:
        journal: What it lies in: offsets, limits, ledger and session are the journal's.
        done: Rows that need no more sending; only the sending thread changes it.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        watermark = journal.consumers.get(_SENDER, journal.first)
        self.done = Ranges(watermark)
        for start, end in journal.notes.get(_DONE, ()):
            self.done.add(start, end)
        #: packet ids that are free again and whose frame does not say so yet
        self._freed: list[int] = []
        #: as the disk has them; the journal changes it
        self._held = journal.held
        #: markers are looked up and appended in one step
        self._entering = threading.Lock()
        if _SENDER not in journal.consumers:
            journal.commit(_SENDER, watermark)

    @classmethod
    def open(cls, directory: Path, *, schema: Any, limits: Limits = _NO_LIMITS, disk: Disk | None = None) -> Self:
        """Open the outbox in a directory of its own, or make one; arguments and errors are those of `Journal.open`."""
        return cls(Journal.open(directory, schema=schema, limits=limits, disk=disk))

    # -- coming in; any thread --

    def stored(self, batch: Batch) -> Appended:
        """How much of a batch is here: all of one that is older than the writer's newest.

        Raises:
            JournalError: TL-J22, another batch with this number is here.
        """
        found = self.journal.notes.get(_MARKER + batch.writer)
        if found is None or found[0] < batch.number:
            return Appended(0, self.journal.end, whole=False, already=False, newest=found[0] if found else -1)
        number, rows, whole, end, origin = found
        if number == batch.number and origin and batch.origin and origin != batch.origin:
            raise _another(self.journal.directory, batch)
        return Appended(rows, end, whole=bool(whole) or number > batch.number, already=True, newest=number)

    def append(self, rows: Any, batch: Batch | None = None, *, start: int = 0, whole: bool = True) -> Appended:
        """Make rows durable, exactly once if they belong to a batch [I10].

        A large batch may come in pieces, in order; what of a piece is here already is left out. Rows and marker are in
        one frame, so that no crash parts them.

        Args:
            rows: A record batch of the outbox's schema.
            batch: Whose rows they are; None for rows that nobody repeats.
            start: Number of the first of these rows within the batch.
            whole: The batch ends with these rows.

        Raises:
            JournalFull: TL-J02, no room: nothing was stored, the same call may succeed later [I7].
            JournalFailed: TL-J04, nothing of it is promised; the outbox is dead [I6].
            JournalError: TL-J06 another schema, TL-J08 too large for one frame, TL-J10 closed, TL-J22 another batch.
            ValueError: Rows before `start` are missing.
        """
        with self._entering:
            if batch is None:
                return Appended(rows.num_rows, self.journal.append(rows), whole=True, already=False)
            here = self.stored(batch)
            if here.whole or (here.already and start + rows.num_rows <= here.rows and not whole):
                return here
            if start > here.rows:
                raise ValueError(f"rows {here.rows} to {start} of batch {batch.number} are missing")
            fresh = rows.slice(here.rows - start)
            count = start + rows.num_rows
            if not count:
                return Appended(0, self.journal.end, whole=True, already=False)  # an empty batch needs no marker
            end = self.journal.end + fresh.num_rows
            marker = [batch.number, count, int(whole), end, batch.origin]
            self.journal.append(fresh, notes={_MARKER + batch.writer: marker})
            return Appended(count, end, whole, already=False, newest=batch.number)

    # -- going out; the sending thread --

    @property
    def end(self) -> int:
        """The next offset; every row below it is durable."""
        return self.journal.end

    @property
    def waiting(self) -> int:
        """Rows that are not done."""
        return self.journal.end - self.done.watermark - self.done.count_above()

    @property
    def flights(self) -> dict[int, Flight]:
        """Packet ids in use, as the disk knows them, in the order of their rows."""
        held = sorted(self.journal.held.items(), key=lambda entry: entry[1][0])
        return {packet_id: Flight(*entry) for packet_id, entry in held if packet_id not in self._freed}

    def holds(self, packet_id: int) -> bool:
        """Whether the disk knows a packet id as in use."""
        return packet_id in self._held

    def read(self, start: int, end: int, *, batch_rows: int = 1000) -> Iterator[Any]:
        """Return the rows from `start` to `end`, as `Journal.read` does."""
        return self.journal.read(start, end, batch_rows=batch_rows)

    def fly(self, flights: Mapping[int, Flight]) -> None:
        """Make durable which row a packet id stands for, and its phase, before the packets leave.

        Raises:
            JournalFull: TL-J02, the disk took no more: none of the packets may leave.
            JournalFailed: TL-J04, the outbox is dead [I6].
        """
        held = {packet_id: (flight.number, flight.phase) for packet_id, flight in flights.items()}
        freed = self._freed
        done = {_DONE: self._ranges()} if freed else {}
        self.journal.append(self.journal.no_rows, held=held, released=freed, notes=done)
        self._freed = []

    def finish(self, numbers: Iterable[int], freed: Sequence[int] = ()) -> None:
        """Note in memory that rows are done, and which packet ids that frees; `flush` brings it to the disk."""
        for number in numbers:
            self.done.add(number)
        self._freed += freed

    def flush(self, *, durable: bool = False) -> None:
        """Write what is done; segments whose rows are all done are removed.

        Args:
            durable: Wait for the disk: before rows leave that must not leave twice (QoS 0).

        Raises:
            JournalFull: TL-J02, with `durable` and a disk that took no more.
            JournalFailed: TL-J04, the outbox is dead [I6].
        """
        freed = self._freed
        notes = {_DONE: self._ranges()}
        written = self.journal.note(_SENDER, self.done.watermark, released=freed, notes=notes)
        if written:
            self._freed = []
        if durable:
            if not written:
                raise full(self.journal.directory, "no room to note what is done")
            self.journal.sync()

    def _ranges(self) -> list[list[int]]:
        return [[0, self.done.watermark], *self.done.above()]

    def count(self, **increments: int) -> None:
        """Add to counters of the ledger; their totals reach the disk with the next frame [I11]."""
        self.journal.count(**increments)

    @property
    def ledger(self) -> Mapping[str, int]:
        """The counters' totals."""
        return self.journal.ledger

    @property
    def recovery(self) -> Recovery:
        """What opening found."""
        return self.journal.recovery

    @property
    def session(self) -> Mapping[str, object]:
        """What `set_session` was given last, for an owner whose session has no other place."""
        return self.journal.session

    def set_session(self, session: Mapping[str, object]) -> None:
        """Make the session durable; errors are those of `Journal.set_session`."""
        self.journal.set_session(session)

    def close(self) -> None:
        """Write what is done and let the next one in; a second call does nothing.

        Raises:
            JournalFailed: TL-J04, the last write failed; the directory is unlocked all the same.
        """
        self.journal.close()

    @property
    def markers(self) -> Mapping[str, Any]:
        """The newest batch of each writer: number, rows, whole, end, origin."""
        notes = dict(self.journal.notes).items()
        return {name.removeprefix(_MARKER): value for name, value in notes if name.startswith(_MARKER)}


def _another(directory: Path, batch: Batch) -> JournalError:
    return JournalError(
        "TL-J22",
        str(directory),
        f"batch {batch.number} of {batch.writer} is here already, and was made from something else",
        "The query's checkpoint was restored from an older copy: bring back the newest one, or start the query with a "
        "new checkpoint directory.",
    )
