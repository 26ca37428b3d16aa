"""The uplink: brings what the session delivers into the inbox, and tells the session when it is safe.

It belongs to the pump's thread. A delivery that finds no room waits here, in order, and holds the reading back [I7].
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import structlog

from towline.delivery.intake import below, to_rows
from towline.delivery.receipts.ledger import Ledger
from towline.delivery.receipts.mark import Mark
from towline.errors import JournalFull
from towline.guarantee import AckAfter
from towline.journal import Journal, largest_frame
from towline.journal.segment import cut
from towline.mqtt.events import Deliver, Event, Held, Messages, Settled, Stored
from towline.mqtt.inbound import Inbound
from towline.mqtt.stubs import TOO_LARGE, TOO_MANY, Stub

#: How often a full journal is tried again, in seconds.
_ROOM_RETRY: Final = 0.5
#: Messages that were not taken in whole are reported once in so many seconds: anybody may send ten thousand of them.
_REPORT_EVERY: Final = 60.0
#: Characters of a topic in the log; a device chose them, so they are escaped there [I13].
_SHOWN: Final = 200
#: Why there is only a stub → the counter in the ledger.
COUNTERS: Final = {TOO_LARGE: "packets_too_large", TOO_MANY: "too_many_properties"}


class _Unstored(NamedTuple):
    """One frame to be: rows with the packet ids that come and go with them."""

    rows: pa.RecordBatch
    held: Mapping[int, Held]
    released: tuple[int, ...]
    #: Of the delivery that is whole with this frame; 0 while more of it follows.
    ticket: int
    #: Of publishers that want receipts.
    marks: tuple[Mark, ...] = ()


class Uplink:
    """Stores one session's deliveries.

    Args:
        name: The gateway's, as rows and log have it.
        max_packet_bytes: Largest packet that is taken in whole, as the log names it.
        least_qos: Messages with less are counted: a publisher's QoS may be lower than the subscription's.
        note: Called when there is no room.
        ledger: Of the publishers that want receipts; None when nobody gets any.

    Attributes:
        received: Messages received over the journal's life, those included that were not stored.
        acknowledged: Of this process, acknowledgements that left in sessions before the one in use.
        redelivered: Of this process, messages that the broker said to have sent before (DUP), stored all the same.
        room_at: When a full inbox is tried again, on `time.monotonic`.
    """

    def __init__(
        self,
        inbox: Journal,
        *,
        name: str,
        acks: AckAfter,
        max_packet_bytes: int,
        least_qos: int = 0,
        handle: Callable[[Event], None],
        on_rows: Callable[[], None],
        note: Callable[[JournalFull], None],
        ledger: Ledger | None = None,
    ) -> None:
        self._name, self._acks, self._max_packet_bytes, self._least_qos = name, acks, max_packet_bytes, least_qos
        self._inbox = inbox
        self._handle = handle
        self._on_rows = on_rows
        self._note = note
        self._ledger = ledger
        self._log = structlog.get_logger("towline.gateway").bind(line=name)
        #: What is not stored yet, in order; longer than one only while there is no room.
        self._waiting: deque[_Unstored] = deque()
        #: A larger chunk is stored in several frames; one packet is never parted.
        self._frame_bytes = largest_frame(inbox.limits.max_bytes)
        self.room_at = 0.0
        #: Stubs that no line of the log has reported, by their counter, and when the next may.
        self._unreported: Counter[str] = Counter()
        self._report_at = 0.0
        self.acknowledged = self.redelivered = 0
        self.received = inbox.end + inbox.ledger.get("deduplicated", 0)

    @property
    def full(self) -> bool:
        """Rows wait for room: nothing may be read, and no session renewed, whose numbers would be theirs."""
        return bool(self._waiting)

    def expect(self, least_qos: int) -> None:
        """Count messages with less than this QoS from now on: other filters are subscribed."""
        self._least_qos = least_qos

    def deliver(self, action: Deliver, inbound: Inbound) -> None:
        """Store a delivery, or keep it until there is room."""
        if self._acks is AckAfter.RECEIVED:
            self.settle(inbound, action.first + len(action.messages))
        batch = to_rows(
            action.messages,
            action.first,
            time.time_ns() // 1000,
            self._name,
            strip_marks=self._ledger is not None,
        )
        self.received += batch.num_rows
        self.redelivered += batch.column("duplicate").true_count
        if lower := below(action.messages, self._least_qos):
            self._inbox.count(lower_qos=lower)
        if batch.column("payload").null_count:
            self._count_stubs(action.messages)
        self._waiting += _frames(batch, action, self._frame_bytes)
        self.store()

    def _count_stubs(self, messages: Messages) -> None:
        """Count what was not taken in whole, and say so once in a while."""
        stubs = Counter(COUNTERS[p.reason] for p in messages.packets if isinstance(p, Stub))
        self._inbox.count(**stubs)
        self._unreported += stubs
        now = time.monotonic()
        if now < self._report_at:
            return
        self._report_at = now + _REPORT_EVERY
        topic = next(t for p, t in zip(messages.packets, messages.topics, strict=True) if isinstance(p, Stub))
        what = "messages not taken in whole; each is stored as a row without payload"
        self._log.warning(
            what, code="TL-M42", topic=repr(topic[:_SHOWN]), limit=self._max_packet_bytes, **self._unreported
        )
        self._unreported.clear()

    def find_room(self, now: float) -> None:
        """Try again what found no room."""
        if self._waiting and now >= self.room_at:
            self.store()

    def store(self) -> None:
        """Append what waits, in order; each batch is durable before its acknowledgements leave [I2]."""
        try:
            while self._waiting:
                frame = self._waiting[0]
                notes = {} if self._ledger is None else self._ledger.storing(frame.marks)
                end = self._inbox.append(frame.rows, held=frame.held, released=frame.released, notes=notes)
                self._waiting.popleft()
                if self._ledger is not None:
                    self._ledger.stored(frame.marks, end)
                self._on_rows()
                if self._acks is AckAfter.JOURNAL:
                    self._handle(Settled(end))
                if frame.ticket:
                    self._handle(Stored(frame.ticket))
        except JournalFull as error:
            self.room_at = time.monotonic() + _ROOM_RETRY
            self._note(error)

    def settle(self, inbound: Inbound, upto: int) -> None:
        """Tell the session that messages below `upto` are as safe as their acknowledgement promises [I1]."""
        if upto > inbound.settled:
            self._handle(Settled(upto))

    @property
    def waiting_marks(self) -> list[Mark]:
        """Of the messages that wait for room."""
        return [mark for frame in self._waiting for mark in frame.marks]

    def count_repeats(self, inbound: Inbound, where: str) -> None:
        """Carry what the session did not have stored, and what it saw of the broker's faults, into the ledger [I11]."""
        reused, inbound.reused_ids = inbound.reused_ids, 0
        self.acknowledged += inbound.acknowledged
        inbound.acknowledged = 0
        if repeats := inbound.repeats:
            self.received += repeats
            self._inbox.count(deduplicated=repeats)
            inbound.repeats = 0
        if reused:
            self._inbox.count(packet_ids_reused=reused)
            what = "the broker used QoS 2 packet ids again before we released them; stored as new messages"
            self._log.warning(what, code="TL-M24", broker=where, count=reused)


def _frames(rows: pa.RecordBatch, delivery: Deliver, most: int) -> list[_Unstored]:
    """Part a delivery into frames of at most `most` bytes or one packet; each packet id stays with its row [I3]."""
    marks: Sequence[Mark | None] = delivery.messages.tags
    parts = cut(rows, rows.num_rows, most) if rows.num_rows else [rows]
    if len(parts) == 1:
        return [_Unstored(rows, delivery.held, delivery.released, delivery.ticket, tuple(filter(None, marks)))]
    frames, at = list[_Unstored](), 0
    for part in parts:
        start, at = at, at + part.num_rows
        first, last = delivery.first + start, delivery.first + at
        held = {packet_id: entry for packet_id, entry in delivery.held.items() if first <= entry.number < last}
        ticket = delivery.ticket if at == rows.num_rows else 0
        released = () if start else delivery.released
        frames.append(_Unstored(part, held, released, ticket, tuple(filter(None, marks[start:at]))))
    return frames
