"""The messages of an outbox in the order in which they may leave, read some at a time.

The cursor goes on with each message that is taken; `rewind` sets it back to the oldest that is not done. What is done
and goes once more (`repeat`) comes from a sequence of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from towline.delivery.outrows import Outgoing, outgoing
from towline.delivery.receipts.mark import Content
from towline.errors import JournalError
from towline.journal import Outbox
from towline.journal.ranges import joined

__all__ = ["Marking", "Upcoming"]

#: Number and content of a message → user properties to be added to it.
Marking: TypeAlias = Callable[[int, Content], Sequence[tuple[str, str]]]

#: Rows decoded at a time, and their bytes, unless it is one row.
_CHUNK: Final = 1000
_CHUNK_BYTES: Final = 8 << 20


class Upcoming:
    """Reads one outbox; belongs to the thread that sends.

    Args:
        outbox: What is to be sent.
        mark: Adds to each message; None for nothing.
    """

    def __init__(self, outbox: Outbox, mark: Marking | None) -> None:
        self._outbox = outbox
        self._mark = mark
        #: Next row to be read; everything below is done, or was taken.
        self._cursor = outbox.done.watermark
        #: Reads on from the cursor.
        self._batches: Iterator[Any] = iter(())
        #: Decoded, and below the cursor.
        self._messages: deque[Outgoing] = deque()
        #: Messages that were done and go once more.
        self._repeats: Iterator[Outgoing] = iter(())

    def rewind(self) -> None:
        """Begin anew with the oldest that is not done; no repeat is left."""
        self._cursor = self._outbox.done.watermark
        self._batches = iter(())
        self._messages.clear()
        self._repeats = iter(())

    def following(self) -> Outgoing | None:
        """Take the next message; None when there is none."""
        while not self._messages:
            if self._cursor < self._outbox.done.watermark:  # rows from there on may be gone
                self._batches = iter(())
            batch = next(self._batches, None)
            if batch is not None:
                self._messages.extend(outgoing(batch, self._cursor, self._mark))
                self._cursor += batch.num_rows
            elif rows := self._outbox.following(self._cursor):
                self._cursor, end = rows
                self._batches = self._outbox.read(self._cursor, end, batch_rows=_CHUNK, batch_bytes=_CHUNK_BYTES)
            else:
                return None
        return self._messages.popleft()

    def following_repeat(self) -> Outgoing | None:
        """Take the next message that goes once more; None when there is none."""
        return next(self._repeats, None)

    def repeat(self, ranges: Sequence[tuple[int, int]], wanted: Callable[[int], bool]) -> None:
        """Let messages that are done go once more; instead of what was asked for before.

        Args:
            ranges: Of numbers.
            wanted: Asked when the turn of each has come: its row has to stay as long as it is on its way.
        """
        self._repeats = (message for message in self._read_again(ranges) if wanted(message.number))

    def _read_again(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Outgoing]:
        for first, end in ranges:
            start = first
            while (start := max(start, self._outbox.journal.first)) < end:
                try:
                    for batch in self._outbox.read(start, min(start + _CHUNK, end), batch_bytes=_CHUNK_BYTES):
                        yield from outgoing(batch, start, self._mark, again=True)
                        start += batch.num_rows
                except JournalError as error:
                    if error.code != "TL-J07" or start >= self._outbox.journal.first:
                        raise  # otherwise they were let go between two turns: nobody waits for them any more

    def message(self, number: int) -> Outgoing:
        """Read one message."""
        (batch,) = self._outbox.read(number, number + 1)
        (message,) = outgoing(batch, number, self._mark, again=number in self._outbox.done)
        return message

    def unfinished(self, numbers: Iterable[int]) -> dict[int, Outgoing]:
        """Those among these that are not done, by number, read in as few pieces as there are."""
        done, first = self._outbox.done, self._outbox.journal.first
        messages: dict[int, Outgoing] = {}
        for start, end in joined((n, n + 1) for n in numbers if n >= first and n not in done):
            at = start
            for batch in self._outbox.read(start, end, batch_rows=_CHUNK, batch_bytes=_CHUNK_BYTES):
                messages.update((message.number, message) for message in outgoing(batch, at, self._mark))
                at += batch.num_rows
        return messages
