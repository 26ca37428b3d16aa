"""Refused messages of a broker, stored with their reason code in a journal that is opened on demand.

    store    a message is done in the outbox only after it is durable here; without free space it waits there. After
             a crash, a message stored here but not done there is marked as done: sent once more it might be accepted,
             and be delivered twice with a replay
    page     list messages
    message  read one message
    replay   append messages to the outbox again, each once, and remove them here after they are durable there
    drop     remove messages from this journal

A replay is a batch of the outbox (writer ``refused/`` and the id of this journal, number: the offset of the last row):
messages that a crash left in both places are deduplicated at the next replay [I10].
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from towline.journal import Batch, Journal, Limits, Outbox
from towline.mqtt.reasons import reason_name
from towline.schema import OUTBOX_SCHEMA, REFUSED_SCHEMA

#: A full journal stops the delivery [I7]. There is space for several of the largest packets.
_DEFAULT_LIMITS: Final = Limits(max_bytes=1 << 30, min_free_bytes=64 << 20, segment_bytes=16 << 20)
#: Bytes per durable group.
_GROUP_BYTES: Final = 1 << 20
#: Rows and bytes per step of a listing or replay.
_STEP_ROWS: Final = 1000
_STEP_BYTES: Final = 32 << 20
#: Bytes of a payload that `RefusedMessages.message` returns.
_PAYLOAD_BYTES: Final = 1 << 20
_USER_PROPERTIES: Final = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))
_REPLAY_CONSUMER: Final = "replay"
_REPLAY_WRITER: Final = "refused/"
#: Counter of the outbox's ledger: refused messages that were replayed.
REPLAYED_COUNTER: Final = "replayed"


class RefusedMessages:
    """Journal of refused messages.

    Args:
        directory: Directory of the journal; created with the first message.
        outbox: Source of the messages, and target of a replay; only the sending thread calls. None for `page` only.
        limits: Disk space limits of the journal.
    """

    def __init__(self, directory: Path, outbox: Outbox | None = None, limits: Limits = _DEFAULT_LIMITS) -> None:
        self._directory = directory
        self._outbox = outbox
        self._limits = limits
        self._journal: Journal | None = None
        #: Number → offset of messages that a crash left stored here and not done in the outbox.
        self._not_done_offsets: dict[int, int] = {}

    def store(self, messages: Iterable[tuple[pa.RecordBatch, int, int]]) -> Iterator[list[int]]:
        """Store messages (row of the outbox, number, reason code), each once; yield the durable numbers in groups.

        Raises:
            JournalFull: TL-J02, no free space.
            JournalFailed: TL-J04, the disk failed.
            JournalError: The journal can't be opened; TL-J03 while another process holds its lock.
        """
        journal = self._open_journal()
        numbers: list[int] = []
        batches: list[pa.RecordBatch] = []
        size = 0
        for row, number, reason in messages:
            if batches and size + row.nbytes > _GROUP_BYTES:
                journal.append(pa.concat_batches(batches))
                yield numbers
                numbers, batches, size = [], [], 0
            numbers.append(number)
            if self._not_done_offsets.get(number, -1) < self._first_offset(journal):
                extra = [pa.array([number], pa.int64()), pa.array([reason], pa.int16())]
                batches.append(pa.RecordBatch.from_arrays([*row.columns, *extra], schema=REFUSED_SCHEMA))
                size += row.nbytes
        if batches:
            journal.append(pa.concat_batches(batches))
        yield numbers

    def not_done_numbers(self) -> list[int]:
        """Return the numbers that a crash left stored here but not done in the outbox: they must not be sent again.

        Raises:
            JournalError: The journal can't be opened.
        """
        return [] if self._existing_journal() is None else [*self._not_done_offsets]

    def page(self, start: int) -> dict[str, Any]:
        """Return one page of messages from an offset on, without their payloads.

        Returns:
            ``rows``, the offset ``next`` of the next page, and the ``end``.
        """
        rows: list[dict[str, Any]] = []
        journal = self._existing_journal()
        if journal is None:
            return {"rows": rows, "next": 0, "end": 0}
        start = max(start, self._first_offset(journal))
        end = _step_end(journal, start, journal.end)
        for batch in journal.read(start, end):
            rows += [_describe(batch.slice(i, 1), start + i) for i in range(batch.num_rows)]
            start += batch.num_rows
        return {"rows": rows, "next": end, "end": journal.end}

    def message(self, offset: int) -> dict[str, Any]:
        """Return the message at an offset: one row of `page`, or none if there is none any more.

        The row also has ``properties``, pairs of name and Base64, and Base64 of the first MiB of the ``payload``.
        """
        journal = self._existing_journal()
        if journal is None or not self._first_offset(journal) <= offset < journal.end:
            return {"rows": []}
        (row,) = journal.read(offset, offset + 1)
        return {"rows": [_describe(row, offset) | _content(row)]}

    def replay(self, end_offset: int) -> dict[str, Any]:
        """Append some of the oldest messages to the outbox again; each once, even after a crash.

        A message that is not done in the outbox is skipped: it will be refused again, or delivered.

        Returns:
            Number of ``moved`` messages, the ``next`` offset, and the ``end``.

        Raises:
            JournalFull: TL-J02, the outbox has no free space: nothing of this step has moved.
            JournalFailed: TL-J04, one of the two journals is dead [I6].
        """
        return self._move(end_offset, self._replay_range)

    def drop(self, end_offset: int) -> dict[str, Any]:
        """Drop some of the oldest messages, up to an offset; returns the same as `replay`."""
        return self._move(end_offset, lambda _journal, start, end: end - start)

    def _move(self, end_offset: int, move: Callable[[Journal, int, int], int]) -> dict[str, Any]:
        journal = self._existing_journal()
        if journal is None:
            return {"moved": 0, "next": 0, "end": 0}
        start = self._first_offset(journal)
        end = _step_end(journal, start, min(end_offset, journal.end))
        moved_count = move(journal, start, end)
        journal.commit(_REPLAY_CONSUMER, end)
        return {"moved": moved_count, "next": end, "end": journal.end}

    def _replay_range(self, journal: Journal, start: int, end: int) -> int:
        """Append a range to the outbox, without messages that are not done there; return the number of messages."""
        outbox = self._outbox
        assert outbox is not None
        outbox.flush()  # done rows are written before the new rows, and durable with them
        writer = _REPLAY_WRITER + journal.journal_id
        start = max(start, outbox.batch_status(Batch(writer, journal.end)).newest + 1)
        rows = _read_rows(journal, start, end)
        replayed_rows = [row for row, number, _ in rows if not _is_waiting(row, number, outbox)]
        if replayed_rows:
            outbox.count(**{REPLAYED_COUNTER: len(replayed_rows)})
            try:
                outbox.append_batch(pa.concat_batches(replayed_rows), Batch(writer, end - 1))
            except BaseException:
                outbox.count(**{REPLAYED_COUNTER: -len(replayed_rows)})
                raise
        return len(replayed_rows)

    def close(self) -> None:
        """Close the journal, if it is open."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _existing_journal(self) -> Journal | None:
        """Return the journal, None if no message was ever refused."""
        return self._open_journal() if self._journal is not None or self._directory.exists() else None

    def _open_journal(self) -> Journal:
        if self._journal is None:
            self._journal = Journal.open(self._directory, schema=REFUSED_SCHEMA, limits=self._limits)
            self._journal.commit(_REPLAY_CONSUMER, self._first_offset(self._journal))
            if self._outbox is not None:
                self._not_done_offsets = self._find_not_done(self._journal, self._outbox)
        return self._journal

    def _find_not_done(self, journal: Journal, outbox: Outbox) -> dict[int, int]:
        """Return number → offset of the newest messages that also wait in the outbox; all older ones are done."""
        offsets: dict[int, int] = {}
        end, first = journal.end, self._first_offset(journal)
        while end > first:
            start = max(first, end - _STEP_ROWS)
            rows = [entry for entry in _read_rows(journal, start, end) if entry[1] not in outbox.done_rows]
            if not rows:
                break
            offsets = {number: offset for row, number, offset in rows if _is_waiting(row, number, outbox)} | offsets
            end = start
        return offsets

    def _first_offset(self, journal: Journal) -> int:
        """Return the offset of the oldest message that was neither replayed nor dropped."""
        return max(journal.consumers.get(_REPLAY_CONSUMER, 0), journal.first_offset)


def _read_rows(journal: Journal, start: int, end: int) -> Iterator[tuple[pa.RecordBatch, int, int]]:
    """Yield each refused message of a range: its row of the outbox, its number there, and its offset here."""
    for batch in journal.read(start, end) if start < end else ():
        rows = batch.select(OUTBOX_SCHEMA.names)
        for row_index, number in enumerate(batch.column("number").to_pylist()):
            yield rows.slice(row_index, 1), number, start + row_index
        start += batch.num_rows


def _is_waiting(row: pa.RecordBatch, number: int, outbox: Outbox) -> bool:
    """Return whether a message still waits in an outbox: the row with its number is equal and not done."""
    if number >= outbox.end or number in outbox.done_rows:
        return False
    return all(row.equals(outbox_row.select(OUTBOX_SCHEMA.names)) for outbox_row in outbox.read(number, number + 1))


def _step_end(journal: Journal, start: int, end_offset: int) -> int:
    """Return the end of a range within the limits of one step, empty only at `end_offset`."""
    if start >= end_offset:
        return start
    return min(journal.find_range_end(start, max_rows=_STEP_ROWS, max_bytes=_STEP_BYTES), end_offset)


def _describe(row: pa.RecordBatch, offset: int) -> dict[str, Any]:
    """Return one refused message as JSON values; invalid UTF-8 is replaced."""
    topic, payload = row.column("topic").view(pa.binary())[0], row.column("payload")[0]
    reason = row.column("reason")[0].as_py() or 0
    return {
        "offset": offset,
        "number": row.column("number")[0].as_py(),
        "reason": reason,
        "words": reason_name(reason),
        "topic": (topic.as_py() or b"").decode("utf-8", "replace"),
        "qos": row.column("qos")[0].as_py() or 0,
        "retain": bool(row.column("retain")[0].as_py()),
        "expiry_s": row.column("message_expiry_seconds")[0].as_py(),
        "bytes": len(payload.as_buffer()) if payload.is_valid else 0,
        "arrived_at": row.column("arrived_at").view(pa.int64())[0].as_py() or 0,
    }


def _content(row: pa.RecordBatch) -> dict[str, Any]:
    """Return properties and payload of one refused message as JSON values."""
    texts = ("content_type", "response_topic", "correlation_data")
    properties = [(name, row.column(name).view(pa.binary())[0].as_py()) for name in texts]
    pairs = row.column("user_properties").view(_USER_PROPERTIES)[0].as_py() or ()
    properties += [((pair["key"] or b"").decode("utf-8", "replace"), pair["value"]) for pair in pairs if pair]
    encoded = [(name, base64.b64encode(value).decode()) for name, value in properties if value is not None]
    payload = (row.column("payload")[0].as_py() or b"")[:_PAYLOAD_BYTES]
    return {"properties": encoded, "payload": base64.b64encode(payload).decode()}
