"""The outbox as the Flight service offers it: batches come in exactly once, and who wants to can wait for the broker.

Called on the service's threads; nothing here touches the session.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa

from towline.errors import GatewayError, JournalFailed
from towline.gateway.outrows import MESSAGE_SCHEMA, arrived
from towline.journal import Batch, Outbox
from towline.journal.outbox import Appended

__all__ = ["OutboxDesk"]

#: Bytes of one frame, about: a batch above is stored in several, each with the marker of how far it has come.
_FRAME_BYTES: Final = 32 << 20
#: How often a waiting call looks whether its caller is still there, in seconds.
_GLANCE_S: Final = 1.0


class OutboxDesk:
    """Takes batches and answers how far they are.

    Args:
        outbox: Where they go.
        where: The gateway, as errors name it.
        wake: Called after rows came in.
        on_failure: Called when the outbox fails [I6]; the gateway has to end.
    """

    def __init__(
        self, outbox: Outbox, where: str, *, wake: Callable[[], None], on_failure: Callable[[JournalFailed], None]
    ) -> None:
        self._outbox = outbox
        self._where = where
        self._wake = wake
        self._on_failure = on_failure
        self._news = threading.Condition()
        self._waiting = 0
        self._closing = False

    def stored(self, batch: Batch) -> Appended:
        """How much of a batch is here."""
        return self._outbox.stored(batch)

    def take(self, batch: Batch, reader: Any, *, start: int, whole: bool) -> Appended:
        """Store the rows of a stream, exactly once.

        Args:
            batch: Whose rows they are.
            reader: The stream.
            start: Number of the first row within the batch.
            whole: The batch ends with this stream.

        Raises:
            GatewayError: TL-G21, the rows have other columns.
            JournalFull: TL-J02, no room: the same call may succeed later; what is stored stays [I7].
            JournalFailed: TL-J04, the gateway ends.
        """
        if not reader.schema.equals(MESSAGE_SCHEMA):
            what = "the rows have other columns than this gateway's outbox"
            raise GatewayError("TL-G21", self._where, what, "Use the same version of Towline on both sides.")
        stored = self._outbox.stored(batch)
        try:
            for piece, last in _pieces(reader):
                rows = arrived(piece, time.time_ns() // 1000)
                stored = self._outbox.append(rows, batch, start=start, whole=whole and last)
                start += piece.num_rows
                self._wake()
        except JournalFailed as error:
            self._on_failure(error)
            raise
        return stored

    def wait(self, upto: int, timeout_s: float, cancelled: Callable[[], bool]) -> bool:
        """Wait until everything below `upto` is done; False when the time is over, or the caller has gone."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            self._waiting += 1
            try:
                while self._outbox.done.watermark < upto:
                    left = deadline - time.monotonic()
                    if left <= 0 or self._closing or cancelled():
                        return False
                    self._news.wait(min(left, _GLANCE_S))
            finally:
                self._waiting -= 1
        return True

    def progress(self) -> None:
        """Messages are done: whoever waits looks again; cheap when nobody does."""
        if self._waiting:
            with self._news:
                self._news.notify_all()

    def close(self) -> None:
        """Let all who wait go."""
        with self._news:
            self._closing = True
            self._news.notify_all()


def _pieces(reader: Any) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """The rows of a stream in pieces of about `_FRAME_BYTES`, and whether a piece is the last."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for chunk in reader:
        if waiting and size + chunk.data.nbytes > _FRAME_BYTES:
            yield pa.concat_batches(waiting), False
            waiting, size = [], 0
        waiting.append(chunk.data)
        size += chunk.data.nbytes
    yield pa.concat_batches(waiting) if waiting else _empty(), True


def _empty() -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA)
