"""Receipt ledger of a gateway: the state of publishers with receipts, and the receipts to send them.

The `ReceiptLedger` is pure: no disk, no socket, no clock.

Each publisher has three sets of numbers, each a subset of the previous one. A receipt holds the last two:

    received    received by this process, perhaps not on disk yet      a repeated number is deduplicated
    journaled   in the journal, with a note beside the rows            answers a publisher's question
    committed   in Kafka: Spark's commit log has passed the row        the watermark of the receipt

A message whose number needs one range too many is dropped and not recorded: its publisher sends it again until it has
the receipt. A publisher beyond the limit gets no receipts: its messages pass, and repeats are doubled.
Unauthenticated marks have no effect [I13]: without a key's code a marked message is one without a mark. A number from
another incarnation of its publisher's journal is another message: the directory was restored from a copy.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Final

from towline.delivery.receipts.mark import MAX_EPOCH_GAP, MAX_NUMBER_GAP, Mark, ReceiptKeys, parse_mark, verify_mark
from towline.delivery.receipts.payload import IncarnationMap, ReceiptPayload, receipt_topic
from towline.errors import JournalFull
from towline.journal import Journal
from towline.journal.ranges import Ranges
from towline.mqtt.events import Event, MessageToken, Publish, PublishAcknowledged, PublishMany
from towline.mqtt.inbound import NO_DUPLICATES, FilterResult
from towline.mqtt.message import OutboundMessage
from towline.mqtt.reasons import reason_name
from towline.mqtt.truncated import ReceivedPublish
from towline.timing import Timestamp

_NOTE_PREFIX: Final = "publisher:"
#: Frames of a publisher that wait for their commit; beyond it, neighbours are merged.
_MAX_WAITING_FRAMES: Final = 256
#: Remembered questions per publisher: a repeated one is answered once, and hides no other.
_MAX_NONCES: Final = 32


def noted_state(notes: Mapping[str, Any], publisher: str, number: int) -> str:
    """Return the state of a number in the newest epoch by the notes of a journal; "" for an unknown publisher."""
    if (note := notes.get(_NOTE_PREFIX + publisher)) is None:
        return ""
    _, watermark, ranges, committed, *_ = note
    return "committed" if number < committed else "journaled" if number in Ranges(watermark, ranges) else "not_received"


class MarkVerdict(Enum):
    """Verdict on a marked message."""

    NEW = "new"  # store it
    REPEAT = "repeat"  # stored before, or about to be: acknowledge and drop
    DEFERRED = "deferred"  # no space for one more range: acknowledge and drop, it comes again
    UNKNOWN = "unknown"  # older epoch, too far away, or one publisher too many: store it, record nothing
    FOREIGN = "foreign"  # its number is another message's: store it, record nothing, and inform the publisher


@dataclass(slots=True)
class _PublisherState:
    epoch: int
    received_numbers: Ranges
    journaled_numbers: Ranges
    committed_numbers: Ranges
    #: time of its last message
    last_received_at: Timestamp
    #: end of a frame → the journaled numbers then, in order: committed with the frame
    waiting_frames: deque[tuple[int, Ranges]] = field(default_factory=deque)
    #: questions without an answer
    unanswered_nonces: list[str] = field(default_factory=list)
    #: the largest LOW received by this process: everything below is in all three sets
    lowest_needed: int = 0
    #: a durable note has at least this watermark
    noted_watermark: int = 0
    #: this gateway may have missed messages: the publisher should ask
    announces_restart: bool = False
    #: incarnations that assigned the received numbers
    incarnations: IncarnationMap = field(default_factory=IncarnationMap)
    #: newest questions, answered or not
    known_nonces: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_NONCES))
    #: incarnation of the newest message with another message's number, and whether the publisher must be informed
    foreign_incarnation: str | None = None
    reports_foreign: bool = False

    def as_note(self, journaled_numbers: Ranges | None = None) -> list[Any]:
        journaled = self.journaled_numbers if journaled_numbers is None else journaled_numbers
        numbers = [journaled.watermark, journaled.ranges_above(), self.committed_numbers.watermark]
        return [self.epoch, *numbers, self.last_received_at, self.incarnations.steps()]


class ReceiptLedger:
    """Receipt state of the publishers of one journal.

    Args:
        notes: Notes of the journal.
        end: End offset of the journal.
        max_publishers: Most publishers with receipts.
        max_ranges: Most ranges of received numbers per publisher, with missing numbers between them.
        retention_s: A publisher that is silent for this many seconds is removed with its numbers.
        keys: Keys of the publishers, or keys that theirs are derived from.
        max_packet_bytes: Largest packet that is stored whole, in bytes.

    Attributes:
        keys: As given.
        counts: Marked messages by `MarkVerdict`; ``forged`` are those with a wrong code, stored as if they had no mark.
    """

    def __init__(
        self,
        notes: Mapping[str, Any],
        end: int,
        *,
        max_publishers: int = 10_000,
        max_ranges: int = 256,
        retention_s: float = 30 * 86400,
        keys: ReceiptKeys,
        max_packet_bytes: int = 64 << 20,
    ) -> None:
        self._max_publishers = max_publishers
        self._max_ranges = max_ranges
        self._retention_s = retention_s
        self.keys = keys
        self._max_packet_bytes = max_packet_bytes
        self._publishers: dict[str, _PublisherState] = {}
        #: publishers with a due receipt, in order
        self._due_publishers: dict[str, None] = {}
        #: rows below are in Kafka; None before the first commit
        self._committed_offset: int | None = None
        self.counts: Counter[str] = Counter()
        for name, note in notes.items():
            if name.startswith(_NOTE_PREFIX):
                self._restore(name.removeprefix(_NOTE_PREFIX), note, end)

    def _restore(self, name: str, note: Sequence[Any], end: int) -> None:
        epoch, watermark, ranges, committed_watermark, last_received_at, incarnations = note
        journaled_numbers = Ranges(watermark, ranges)
        received, committed = journaled_numbers.copy(), Ranges(committed_watermark)
        state = _PublisherState(epoch, received, journaled_numbers, committed, Timestamp(*last_received_at))
        state.noted_watermark, state.announces_restart = committed_watermark, True
        state.incarnations = IncarnationMap(incarnations)
        # Numbers are not stored per row: all of them are committed when the whole journal, as it is now, is.
        state.waiting_frames.append((end, journaled_numbers.copy()))
        self._publishers[name] = state
        self._due_publishers[name] = None

    def __len__(self) -> int:
        return len(self._publishers)

    # -- received --

    def deduplicate(self, packets: Sequence[ReceivedPublish], topics: Sequence[str], now: Timestamp) -> FilterResult:
        """Check the marks of received messages; return which messages to deduplicate, and the marks of the new ones."""
        deduplicated = bytearray(len(packets))
        marks: list[Mark | None] = []
        for index, packet in enumerate(packets):
            mark = self._verified_mark(packet, topics[index])
            verdict = None if mark is None else self.record_mark(mark, now)
            if verdict in _DEDUPLICATED_VERDICTS:
                deduplicated[index] = 1
            marks.append(mark if verdict is MarkVerdict.NEW else None)
        return FilterResult(bytes(deduplicated) if any(deduplicated) else NO_DUPLICATES, marks)

    def _verified_mark(self, packet: ReceivedPublish, topic: str) -> Mark | None:
        properties = packet.user_properties
        mark = parse_mark(properties) if properties else None
        if mark is None or verify_mark(mark, self.keys, packet, topic, self._max_packet_bytes):
            return mark
        if self.keys.refresh() and verify_mark(mark, self.keys, packet, topic, self._max_packet_bytes):
            return mark
        self.counts["forged"] += 1
        return None

    def record_mark(self, mark: Mark, now: Timestamp) -> MarkVerdict:
        """Return the verdict on a marked message, and record the number of a new one."""
        state, verdict = self._current_state(mark, now), MarkVerdict.UNKNOWN
        if state is None or mark.number > state.received_numbers.end + MAX_NUMBER_GAP:
            state = self._publishers.get(mark.publisher)  # a copy of an older epoch has to learn of the newer one
        else:
            state.last_received_at = now
            verdict = self._check_number(mark, state)
        self.counts[verdict.value] += 1
        if state is not None and verdict is MarkVerdict.NEW:
            state.received_numbers.add(mark.number)
        elif state is not None:
            self._add_nonce(mark.publisher, state, mark)
        return verdict

    def _check_number(self, mark: Mark, state: _PublisherState) -> MarkVerdict:
        number = mark.number
        known_incarnation = state.incarnations.incarnation_of(number) if number in state.received_numbers else None
        if known_incarnation not in (None, mark.incarnation):
            if state.foreign_incarnation != mark.incarnation:
                state.foreign_incarnation, state.reports_foreign = mark.incarnation, True
                self._due_publishers[mark.publisher] = None
            return MarkVerdict.FOREIGN
        self._apply_low(mark, state)
        if number in state.received_numbers:
            return MarkVerdict.REPEAT
        received = state.received_numbers
        has_space = received.is_adjacent(number) or received.range_count < self._max_ranges
        is_newest = number >= received.end
        if has_space and state.incarnations.record(
            number, mark.incarnation, is_newest=is_newest, low=state.lowest_needed
        ):
            return MarkVerdict.NEW
        return MarkVerdict.DEFERRED

    def _current_state(self, mark: Mark, now: Timestamp) -> _PublisherState | None:
        state = self._publishers.get(mark.publisher)
        if state is not None and mark.epoch == state.epoch:
            return state
        if state is None and len(self._publishers) >= self._max_publishers:
            return None
        if state is not None and not state.epoch < mark.epoch <= state.epoch + MAX_EPOCH_GAP:
            return None
        low = mark.low
        state = _PublisherState(mark.epoch, Ranges(low), Ranges(low), Ranges(low), now, lowest_needed=low)
        self._publishers[mark.publisher] = state
        self._due_publishers.pop(mark.publisher, None)
        return state

    def _apply_low(self, mark: Mark, state: _PublisherState) -> None:
        """Count numbers below the mark's LOW as received: they never come again, and would block the watermark."""
        if mark.low <= state.lowest_needed:
            return
        state.lowest_needed, previous_watermark = mark.low, state.committed_numbers.watermark
        for numbers in (state.received_numbers, state.journaled_numbers, state.committed_numbers):
            numbers.add(0, mark.low)
        if state.committed_numbers.watermark > max(previous_watermark, mark.low):
            self._due_publishers[mark.publisher] = None

    def _add_nonce(self, name: str, state: _PublisherState, mark: Mark) -> None:
        if mark.nonce and mark.nonce not in state.known_nonces:
            state.known_nonces.append(mark.nonce)
            state.unanswered_nonces = [*state.unanswered_nonces, mark.nonce][-_MAX_NONCES:]
            self._due_publishers[name] = None

    # -- on disk --

    def notes_for_frame(self, marks: Iterable[Mark]) -> dict[str, Any]:
        """Return the notes to store with a frame of these messages."""
        journaled: dict[str, Ranges] = {}
        for mark, state in self._states_of_marks(marks):
            journaled.setdefault(mark.publisher, state.journaled_numbers.copy()).add(mark.number)
        return {_NOTE_PREFIX + name: self._publishers[name].as_note(numbers) for name, numbers in journaled.items()}

    def frame_stored(self, marks: Iterable[Mark], end: int) -> None:
        """Record that a frame of these messages is durable, and that the journal ends at `end`."""
        states: dict[str, _PublisherState] = {}
        for mark, state in self._states_of_marks(marks):
            states[mark.publisher] = state
            state.journaled_numbers.add(mark.number)
            self._add_nonce(mark.publisher, state, mark)
        for state in states.values():
            if len(state.waiting_frames) >= _MAX_WAITING_FRAMES:
                state.waiting_frames.pop()
            state.waiting_frames.append((end, state.journaled_numbers.copy()))

    def reset(self, marks: Iterable[Mark]) -> None:
        """Reset the received numbers to the journaled ones and the pending `marks`, after the session was renewed."""
        for state in self._publishers.values():
            state.received_numbers = state.journaled_numbers.copy()
        for mark, state in self._states_of_marks(marks):
            is_newest = mark.number >= state.received_numbers.end
            state.incarnations.record(mark.number, mark.incarnation, is_newest=is_newest, low=state.lowest_needed)
            state.received_numbers.add(mark.number)

    def _states_of_marks(self, marks: Iterable[Mark]) -> Iterator[tuple[Mark, _PublisherState]]:
        for mark in marks:
            state = self._publishers.get(mark.publisher)
            if state is not None and state.epoch == mark.epoch:
                yield mark, state

    # -- in Kafka --

    def commit(self, offset: int) -> None:
        """Record that every row below `offset` is in Kafka."""
        if offset == self._committed_offset:
            return  # later frames end above it
        self._committed_offset = offset
        for name, state in self._publishers.items():
            previous_watermark = state.committed_numbers.watermark
            while state.waiting_frames and state.waiting_frames[0][0] <= offset:
                state.committed_numbers.unite(state.waiting_frames.popleft()[1])
            if state.committed_numbers.watermark > previous_watermark:
                self._due_publishers[name] = None

    # -- receipts --

    @property
    def has_due(self) -> bool:
        """Whether a receipt is due."""
        return bool(self._due_publishers)

    def receipts(self, limit: int, busy_publishers: Iterable[str] = ()) -> list[ReceiptPayload]:
        """Return up to `limit` due receipts, at most one per publisher and none for `busy_publishers`."""
        busy_names = set(busy_publishers)
        names = islice((name for name in self._due_publishers if name not in busy_names), limit)
        return [self._receipt(name) for name in names]

    def _receipt(self, name: str) -> ReceiptPayload:
        state = self._publishers[name]
        with_ranges = state.unanswered_nonces or state.reports_foreign
        return ReceiptPayload(
            name,
            state.epoch,
            state.committed_numbers.watermark,
            " ".join(state.unanswered_nonces),
            state.journaled_numbers.ranges if with_ranges else (),
            restarted=state.announces_restart,
            incarnations=state.incarnations.steps(),
        )

    def watermark_notes(self, receipts: Iterable[ReceiptPayload]) -> dict[str, Any]:
        """Return the notes to persist before these receipts are sent, so that a watermark never decreases."""
        states = ((receipt, self._publishers[receipt.publisher]) for receipt in receipts)
        raised = [(receipt, state) for receipt, state in states if receipt.watermark > state.noted_watermark]
        return {_NOTE_PREFIX + receipt.publisher: state.as_note() for receipt, state in raised}

    def receipt_sent(self, receipt: ReceiptPayload) -> None:
        """Record that a receipt was given to the session."""
        state = self._publishers.get(receipt.publisher)
        if state is None or state.epoch != receipt.epoch:
            return
        state.noted_watermark = max(state.noted_watermark, receipt.watermark)
        state.announces_restart = state.reports_foreign = False
        answered_nonces = receipt.nonces.split()
        state.unanswered_nonces = [nonce for nonce in state.unanswered_nonces if nonce not in answered_nonces]
        if not state.unanswered_nonces and state.committed_numbers.watermark <= receipt.watermark:
            self._due_publishers.pop(receipt.publisher, None)

    def resend_receipts(self, names: Iterable[str] | None = None) -> None:
        """Send receipts again to the publishers in `names`; by default to all, as after a restart."""
        for name in self._publishers if names is None else names:
            if name in self._publishers:
                state = self._publishers[name]
                state.announces_restart = state.announces_restart or names is None
                self._due_publishers[name] = None

    # -- expiry --

    def expire_publishers(self, now: Timestamp) -> dict[str, None]:
        """Remove publishers silent for too long, without messages on the way to Kafka; return the notes to remove."""
        idle_states = [(name, state) for name, state in self._publishers.items() if not state.waiting_frames]
        max_age_us = self._retention_s * 1e6
        expired_names = [name for name, state in idle_states if state.last_received_at.age_us(now) > max_age_us]
        for name in expired_names:
            del self._publishers[name]
            self._due_publishers.pop(name, None)
        return dict.fromkeys(_NOTE_PREFIX + name for name in expired_names)

    def validate(self) -> None:
        """Assert every invariant of the attributes; for tests."""
        for name, state in self._publishers.items():
            assert _is_subset(state.committed_numbers, state.journaled_numbers), name
            assert _is_subset(state.journaled_numbers, state.received_numbers), name
            assert [end for end, _ in state.waiting_frames] == sorted(end for end, _ in state.waiting_frames), name
            assert len(state.waiting_frames) <= _MAX_WAITING_FRAMES, name
        assert self._due_publishers.keys() <= self._publishers.keys()
        assert len(self._publishers) <= self._max_publishers


_DEDUPLICATED_VERDICTS: Final = (MarkVerdict.REPEAT, MarkVerdict.DEFERRED)


def _is_subset(inner: Ranges, outer: Ranges) -> bool:
    union = outer.copy()
    union.unite(inner)
    return union.watermark == outer.watermark and union.ranges_above() == outer.ranges_above()


#: Most receipts in flight: they share the broker's window with other messages.
_MAX_IN_FLIGHT: Final = 200
#: Seconds between two rounds of receipts: each costs a sync.
_ROUND_INTERVAL_S: Final = 0.05
#: Seconds between two checks for silent publishers and changed keys.
_EXPIRY_INTERVAL_S: Final = 60.0
_FIRST_ERROR_REASON: Final = 0x80
_FORGED_WARNING: Final = "a mark has a wrong code (another key, or a forgery); stored as unmarked, without a receipt"


class ReceiptSender:
    """Sender of receipts to publishers; belongs to the pump's thread.

    A receipt is not stored: it shows the state of the ledger, and is sent again to all publishers after a restart or a
    lost session, to one whenever it asks. Only the watermark is persisted first, so that it never decreases.
    """

    def __init__(
        self, prefix: str, ledger: ReceiptLedger, inbox: Journal, handle_event: Callable[[Event], None], log: Any
    ) -> None:
        self._prefix = prefix
        self.ledger = ledger
        self._inbox = inbox
        self._handle_event = handle_event
        self._log = log
        #: Receipts in flight, at most one per publisher; each is its message's token.
        self._in_flight: set[ReceiptPayload] = set()
        self._next_round_at = 0.0
        self._next_expiry_at = 0.0
        self._refused_publishers: set[str] = set()
        #: the warning about forged marks was logged
        self._logged_forgery = False
        #: Acknowledged receipts.
        self.sent_count = 0

    def turn(self, now: float, *, online: bool) -> None:
        """Send due receipts."""
        if self.ledger.counts["forged"] and not self._logged_forgery:
            self._logged_forgery = True
            self._log.warning(_FORGED_WARNING, code="TL-M35")
        if now >= self._next_expiry_at:
            self._next_expiry_at = now + _EXPIRY_INTERVAL_S
            self.ledger.keys.refresh()
            if problem := self.ledger.keys.problem:
                self._log.warning("the previous receipt keys stay in use", reason=str(problem), code=problem.code)
            self._write_notes(self.ledger.expire_publishers(Timestamp.now()))
        free_slots = _MAX_IN_FLIGHT - len(self._in_flight)
        if not online or not self.ledger.has_due or free_slots <= 0 or now < self._next_round_at:
            return
        receipts = self.ledger.receipts(free_slots, {receipt.publisher for receipt in self._in_flight})
        if not receipts:
            return
        self._next_round_at = now + _ROUND_INTERVAL_S
        if self._write_notes(self.ledger.watermark_notes(receipts)):
            self._send(receipts)

    def next_turn_at(self) -> float | None:
        """Return the time of the next `turn`; None for never."""
        return self._next_round_at if self.ledger.has_due and len(self._in_flight) < _MAX_IN_FLIGHT else None

    def _write_notes(self, notes: Mapping[str, Any]) -> bool:
        try:
            if notes:
                self._inbox.append(notes=notes)
        except JournalFull:
            self._next_round_at = time.monotonic() + 1.0
            return False
        return True

    def _send(self, receipts: list[ReceiptPayload]) -> None:
        messages = []
        for receipt in receipts:
            self._in_flight.add(receipt)
            self.ledger.receipt_sent(receipt)
            message = OutboundMessage(
                receipt_topic(self._prefix, receipt.publisher),
                receipt.encode(self.ledger.keys),
                qos=1,
                retain=True,  # an offline publisher gets it when it subscribes again
                payload_format_indicator=1,
                content_type="application/json",
            )
            messages.append(Publish(receipt, message))
        self._handle_event(PublishMany(messages))

    def perform(self, action: PublishAcknowledged) -> bool:
        """Handle the broker's acknowledgement; return False if it is not of a receipt."""
        receipt = action.token
        if not isinstance(receipt, ReceiptPayload):
            return False
        if receipt not in self._in_flight:
            return True
        self._in_flight.remove(receipt)
        if action.reason < _FIRST_ERROR_REASON:
            self.sent_count += 1
        elif receipt.publisher not in self._refused_publishers and len(self._refused_publishers) < 1000:
            self._refused_publishers.add(receipt.publisher)
            topic, reason = receipt_topic(self._prefix, receipt.publisher), reason_name(action.reason)
            self._log.warning("the broker refused a receipt", topic=topic, reason=reason, code="TL-M41")
        return True

    def connection_lost(self, unsent_tokens: Iterable[MessageToken]) -> None:
        """Handle the end of the connection; the messages with these tokens were not sent."""
        unsent_receipts = self._in_flight.intersection(unsent_tokens)
        self._in_flight -= unsent_receipts
        self.ledger.resend_receipts([receipt.publisher for receipt in unsent_receipts])

    def session_lost(self) -> None:
        """Send all receipts again after the broker lost the session: publishers may have missed some."""
        self.ledger.resend_receipts()

    def reset(self) -> None:
        """Reset for a new session: receipts in flight are sent again."""
        names = [receipt.publisher for receipt in self._in_flight]
        self._in_flight.clear()
        self.ledger.resend_receipts(names)

    def status(self) -> dict[str, int]:
        """Return receipt counts for `towline status`; from any thread, about."""
        counts = {name: self.ledger.counts[name] for name in ("deferred", "unknown", "foreign", "forged")}
        return {"publishers": len(self.ledger), "sent": self.sent_count, **counts}
