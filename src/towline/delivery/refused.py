"""What the broker refused for good, kept with its reason: a journal of its own, opened when it is needed.

    keep     a message is done in the outbox only after it is durable here; without room it stays there, and waits.
             What is here and not done there after a crash is done with the next start: sent once more, it might be
             accepted, and be delivered twice with a replay
    page     look at them
    replay   they enter the outbox again, each once, and leave this journal after they are durable there
    drop     they leave this journal

`replay` names what it brings as a batch of the outbox (writer ``refused/`` and the id of this journal, number: the
offset of the last row): whatever of it a crash left in both places is left out the next time [I10].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from towline.journal import Batch, Journal, Limits, Outbox
from towline.mqtt.reasons import reason_words
from towline.schema import OUTBOX_SCHEMA, REFUSED_SCHEMA

#: Beyond it nothing more is kept, and the delivery waits [I7]. Several of the largest packets have room.
_LIMITS: Final = Limits(max_bytes=1 << 30, min_free_bytes=64 << 20, segment_bytes=16 << 20)
#: Bytes made durable together.
_GROUP_BYTES: Final = 1 << 20
#: Rows and bytes looked at or moved in one step.
_STEP_ROWS: Final = 1000
_STEP_BYTES: Final = 32 << 20
_CONSUMER: Final = "replay"
_WRITER: Final = "refused/"
#: Counter of the outbox's ledger: messages that were refused and entered again.
REPLAYED: Final = "replayed"
ACTIONS: Final = ("page", "replay", "drop")


class RefusedMessages:
    """The journal of refused messages.

    Args:
        directory: Of its journal; created with the first message.
        outbox: Where its messages come from and go back to; the calling thread is the one that sends. None only to
            look.
    """

    def __init__(self, directory: Path, outbox: Outbox | None = None, limits: Limits = _LIMITS) -> None:
        self._directory = directory
        self._outbox = outbox
        self._limits = limits
        self._journal: Journal | None = None
        #: Number → offset of what is here, and waits in the outbox too: a crash came between.
        self._undone: dict[int, int] = {}

    def keep(self, messages: Iterable[tuple[pa.RecordBatch, int, int]]) -> Iterator[list[int]]:
        """Keep messages (row of the outbox, number, reason), each once; yields the numbers that are durable in groups.

        Raises:
            JournalFull: TL-J02, no room for more.
            JournalFailed: TL-J04, the disk failed.
            JournalError: The journal can't be opened; TL-J03 while another process has it.
        """
        journal = self._opened()
        numbers: list[int] = []
        group: list[pa.RecordBatch] = []
        size = 0
        for row, number, reason in messages:
            if group and size + row.nbytes > _GROUP_BYTES:
                journal.append(pa.concat_batches(group))
                yield numbers
                numbers, group, size = [], [], 0
            numbers.append(number)
            if self._undone.get(number, -1) < self._first(journal):
                extra = [pa.array([number], pa.int64()), pa.array([reason], pa.int16())]
                group.append(pa.RecordBatch.from_arrays([*row.columns, *extra], schema=REFUSED_SCHEMA))
                size += row.nbytes
        if group:
            journal.append(pa.concat_batches(group))
        yield numbers

    def unfinished(self) -> list[int]:
        """Numbers of what a crash left here, kept, and in the outbox, not done: it must not be sent any more.

        Raises:
            JournalError: The journal can't be opened.
        """
        return [] if self._existing() is None else [*self._undone]

    def page(self, start: int) -> dict[str, Any]:
        """Facts of the messages from an offset on, some at a time, without their payloads.

        Returns:
            ``rows``, the offset ``next`` to go on from, and the ``end``.
        """
        rows: list[dict[str, Any]] = []
        journal = self._existing()
        if journal is None:
            return {"rows": rows, "next": 0, "end": 0}
        start = max(start, self._first(journal))
        end = _step(journal, start, journal.end)
        for batch in journal.read(start, end):
            rows += map(_facts, [batch.slice(at, 1) for at in range(batch.num_rows)], range(start, end))
            start += batch.num_rows
        return {"rows": rows, "next": end, "end": journal.end}

    def replay(self, upto: int) -> dict[str, Any]:
        """Let some of the oldest messages enter the outbox again; each once, whatever ends this process meanwhile.

        A message that is not done in the outbox is left to it: it will be refused there again, or delivered.

        Returns:
            ``moved`` messages, the ``next`` offset, and the ``end``.

        Raises:
            JournalFull: TL-J02, the outbox has no room: nothing of this step has moved.
            JournalFailed: TL-J04, one of the two is dead [I6].
        """
        return self._move(upto, self._enter)

    def drop(self, upto: int) -> dict[str, Any]:
        """Forget some of the oldest messages, up to an offset; returns what `replay` does."""
        return self._move(upto, lambda _journal, start, end: end - start)

    def _move(self, upto: int, move: Callable[[Journal, int, int], int]) -> dict[str, Any]:
        journal = self._existing()
        if journal is None:
            return {"moved": 0, "next": 0, "end": 0}
        start = self._first(journal)
        end = _step(journal, start, min(upto, journal.end))
        moved = move(journal, start, end)
        journal.commit(_CONSUMER, end)
        return {"moved": moved, "next": end, "end": journal.end}

    def _enter(self, journal: Journal, start: int, end: int) -> int:
        """Let a range enter the outbox, but for what stands there and is not done; how many messages entered."""
        outbox = self._outbox
        assert outbox is not None
        outbox.flush()  # what is done is written before the rows, and durable with them
        writer = _WRITER + journal.journal_id
        start = max(start, outbox.stored(Batch(writer, journal.end)).newest + 1)
        entering = [row for row, number, _ in _rows(journal, start, end) if not _waits(row, number, outbox)]
        if entering:
            outbox.count(**{REPLAYED: len(entering)})
            try:
                outbox.enter(pa.concat_batches(entering), Batch(writer, end - 1))
            except BaseException:
                outbox.count(**{REPLAYED: -len(entering)})
                raise
        return len(entering)

    def close(self) -> None:
        """Close the journal, if there is one."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _existing(self) -> Journal | None:
        """The journal, None where nothing was ever refused."""
        return self._opened() if self._journal is not None or self._directory.exists() else None

    def _opened(self) -> Journal:
        if self._journal is None:
            self._journal = Journal.open(self._directory, schema=REFUSED_SCHEMA, limits=self._limits)
            self._journal.commit(_CONSUMER, self._first(self._journal))
            if self._outbox is not None:
                self._undone = self._not_done(self._journal, self._outbox)
        return self._journal

    def _not_done(self, journal: Journal, outbox: Outbox) -> dict[int, int]:
        """Number → offset of what waits in the outbox too: the newest, since what is older was done before."""
        offsets: dict[int, int] = {}
        end, first = journal.end, self._first(journal)
        while end > first:
            start = max(first, end - _STEP_ROWS)
            part = [(row, number, at) for row, number, at in _rows(journal, start, end) if number not in outbox.done]
            if not part:
                break
            offsets = {number: at for row, number, at in part if _waits(row, number, outbox)} | offsets
            end = start
        return offsets

    def _first(self, journal: Journal) -> int:
        """The oldest that was neither replayed nor dropped."""
        return max(journal.consumers.get(_CONSUMER, 0), journal.first)


def _rows(journal: Journal, start: int, end: int) -> Iterator[tuple[pa.RecordBatch, int, int]]:
    """Each refused message of a range: its row of the outbox, its number there, and its offset here."""
    for batch in journal.read(start, end) if start < end else ():
        rows = batch.select(OUTBOX_SCHEMA.names)
        for at, number in enumerate(batch.column("number").to_pylist()):
            yield rows.slice(at, 1), number, start + at
        start += batch.num_rows


def _waits(row: pa.RecordBatch, number: int, outbox: Outbox) -> bool:
    """Whether a message is not done in an outbox: the row under its number is equal, its arrival too."""
    if number >= outbox.end or number in outbox.done:
        return False
    return all(row.equals(stored.select(OUTBOX_SCHEMA.names)) for stored in outbox.read(number, number + 1))


def _step(journal: Journal, start: int, upto: int) -> int:
    """The end of a range that is not too large for one step, and not empty unless all of it is."""
    if start >= upto:
        return start
    return min(journal.locate(start, max_rows=_STEP_ROWS, max_bytes=_STEP_BYTES), upto)


def _facts(row: pa.RecordBatch, offset: int) -> dict[str, Any]:
    """One refused message as JSON values; text that is no UTF-8 shows what can be shown."""
    topic, payload = row.column("topic").view(pa.binary())[0], row.column("payload")[0]
    reason = row.column("reason")[0].as_py() or 0
    return {
        "offset": offset,
        "number": row.column("number")[0].as_py(),
        "reason": reason,
        "words": reason_words(reason),
        "topic": (topic.as_py() or b"").decode("utf-8", "replace"),
        "qos": row.column("qos")[0].as_py() or 0,
        "bytes": len(payload.as_buffer()) if payload.is_valid else 0,
        "arrived_at": row.column("arrived_at").view(pa.int64())[0].as_py() or 0,
    }
