"""The outbox as the Flight service offers it: batches come in exactly once, and who wants to can wait for the broker.

Called on the service's threads; nothing here touches the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Final

import pyarrow as pa

from towline.delivery.outrows import arrived
from towline.delivery.refused import RefusedMessages
from towline.errors import GatewayError, GatewayUnreachable, JournalFailed
from towline.gateway.belonging import OutboxPosition, position
from towline.gateway.endpoint import END_OF_ROWS
from towline.gateway.longpoll import LongPoll
from towline.journal import Batch, Outbox, largest_frame
from towline.journal.outbox import Appended
from towline.journal.reading import RowSlice, combined
from towline.schema import MESSAGE_SCHEMA, NO_MESSAGES
from towline.timing import Stamp

__all__ = ["OutboxHandler"]

#: A piece above is stored before more is read.
_AT_ONCE: Final = 4 << 20
#: Most rows of one frame.
_FRAME_ROWS: Final = 1 << 20
#: Patience with the thread the refused messages belong to, in seconds: it may be connecting.
_ASK_S: Final = 15.0


class OutboxHandler:
    """Takes batches and answers how far they are.

    Args:
        outbox: Where they go.
        where: The gateway, as errors name it.
        wake: Called after rows came in.
        ask: Carries out a call on the refused messages, on the thread they belong to.
        on_failure: Called when the outbox fails [I6]; the gateway has to end.
        max_bytes: Limit of the outbox; None for no limit but the disk.
    """

    def __init__(
        self,
        outbox: Outbox,
        where: str,
        *,
        wake: Callable[[], None],
        on_failure: Callable[[JournalFailed], None],
        ask: Callable[[Callable[[RefusedMessages], dict[str, Any]]], Future[dict[str, Any]]],
        max_bytes: int | None = None,
    ) -> None:
        #: Of a larger batch several frames are made, each with a note of how far it has come.
        self._frame_bytes = largest_frame(max_bytes)
        self._outbox = outbox
        self._where = where
        self._wake = wake
        self._ask = ask
        self._on_failure = on_failure
        self._polls = LongPoll()

    def stored(self, batch: Batch) -> Appended:
        """How much of a batch is here."""
        return self._outbox.stored(batch)

    def position(self, offset: int | None = None) -> OutboxPosition:
        """Where the outbox stands; see `towline.gateway.belonging`."""
        return position(self._outbox, offset)

    def take(self, batch: Batch, reader: Any, *, start: int, whole: bool) -> Appended:
        """Store the rows of a stream, exactly once.

        A stream whose client was killed ends for gRPC as one that is complete. So a client says at the end that this
        is the end (`END_OF_ROWS`); else the last rows of the batch would be missing for ever, and nobody would bring
        them again [I10].

        Args:
            batch: Whose rows they are.
            reader: The stream.
            start: Number of the first row within the batch.
            whole: The batch ends with this stream.

        Raises:
            GatewayError: TL-G21, the rows have other columns. TL-G39, the stream broke off; what came of it is stored,
                and the batch is not whole.
            JournalFull: TL-J02, no room: the same call may succeed later; what is stored stays [I7].
            JournalFailed: TL-J04, the gateway ends.
            JournalError: TL-J15, TL-J16, TL-J17, TL-J22; see `Outbox.append`.
        """
        if not reader.schema.equals(MESSAGE_SCHEMA):
            what = "the rows have other columns than this gateway's outbox"
            raise GatewayError("TL-G21", self._where, what, "Use the same version of Towline on both sides.")
        stored = self._outbox.stored(batch)
        try:
            for piece, last in _pieces(self._rows(reader), self._frame_bytes):
                rows = arrived(piece, Stamp.now())
                stored = self._outbox.append(rows, batch, start=start, whole=whole and last)
                start += piece.num_rows
                del piece, rows  # the next one may be as large
                self._wake()
        except JournalFailed as error:
            self._on_failure(error)
            raise
        return stored

    def _rows(self, reader: Any) -> Iterator[RowSlice]:
        ended = False
        for chunk in reader:
            ended = ended or (chunk.app_metadata is not None and chunk.app_metadata.to_pybytes() == END_OF_ROWS)
            yield RowSlice(chunk.data, chunk.data.nbytes)
        if not ended:
            what, do = "the stream of a batch broke off", "Its client brings the rest again, if it is there yet."
            raise GatewayUnreachable("TL-G39", self._where, what, do)

    def end_job(self, job: str) -> None:
        """Forget the batches of a job that is over.

        Raises:
            JournalFull: TL-J02, they stay for now.
            JournalFailed: TL-J04, the gateway ends.
        """
        try:
            self._outbox.end_job(job)
        except JournalFailed as error:
            self._on_failure(error)
            raise
        self._wake()

    def wait(self, upto: int, timeout_s: float, cancelled: Callable[[], bool]) -> bool:
        """Wait until everything below `upto` is done; False when the time is over, or the caller has gone."""
        return self._polls.wait(lambda: self._outbox.reached(upto), timeout_s, cancelled)

    def refused(self, do: str, at: int) -> dict[str, Any]:
        """Look at some of the refused messages, or move some of them: a method of `RefusedMessages` and its argument.

        Raises:
            GatewayError: TL-G32, the gateway is ending, or has no time. What was asked for may have been done: each
                message is moved once all the same.
            JournalFull: TL-J02, the outbox has no room.
        """
        answer = self._ask(lambda refused: getattr(refused, do)(at))
        try:
            return answer.result(_ASK_S)
        except (CancelledError, TimeoutError) as error:
            do = "Ask again in a moment."
            raise GatewayError("TL-G32", self._where, "the gateway is ending, or connecting", do) from error

    def progress(self) -> None:
        """Messages are done: whoever waits looks again; cheap when nobody does."""
        self._polls.notify()

    def close(self) -> None:
        """Let all who wait go."""
        self._polls.close()


def _pieces(rows: Iterator[RowSlice], most: int) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """The rows of a stream in pieces of at most `most` bytes or one row, and whether a piece is the last.

    What is large does not wait for what comes behind it: then an empty piece is the last.
    """
    waiting: pa.RecordBatch | None = None
    for piece in combined(rows, _FRAME_ROWS, most):
        if waiting is not None:
            yield waiting, False
        waiting = piece
        del piece
        if waiting.nbytes > _AT_ONCE:
            yield waiting, False
            waiting = None
    yield NO_MESSAGES if waiting is None else waiting, True
