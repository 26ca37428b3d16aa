"""What a gateway knows of publishers that want receipts, and what it sends them.

The `Ledger` decides only: no disk, no socket, no clock.

Three sets of numbers for each publisher, each within the one before it; a repeat is judged by the first, a receipt
names the other two:

    seen        received by this process, perhaps not on disk yet     a number in it comes again: dropped
    journaled   in the journal; the note beside the rows says it      answers a question
    committed   in Kafka: Spark's commit log has passed its row       the watermark of the receipt

A message whose range of numbers finds no room is dropped as well, unseen: its publisher sends it again until it has
the receipt. A publisher that finds no room here gets no receipts: its messages pass, and repeats are doubles.
What anybody may have written decides nothing [I13]: without a key's code a marked message is one without a mark. A
number that came under another opening of its publisher's journal is another message: a directory was restored from a
copy.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Final

from towline.delivery.receipts.mark import FARTHEST, MOST_EPOCHS, Mark, ReceiptKeys, is_genuine, mark_of
from towline.delivery.receipts.payload import Openings, ReceiptPayload, receipt_topic
from towline.errors import JournalFull
from towline.journal import Journal
from towline.journal.ranges import Ranges
from towline.mqtt.events import Acknowledged, Event, Publish, PublishMany, Token
from towline.mqtt.inbound import NOTHING, Screening
from towline.mqtt.message import OutboundMessage
from towline.mqtt.reasons import reason_words
from towline.mqtt.stubs import Published
from towline.timing import Stamp

_NOTE: Final = "publisher:"
#: Frames of a publisher that wait for their commit, apart; of more, neighbours wait together.
_MOST_WAITING: Final = 256
#: Questions of a publisher that are remembered: one that somebody repeats is answered once, and hides no other.
_MOST_ASKED: Final = 32


class MarkVerdict(Enum):
    """What becomes of a marked message."""

    NEW = "new"  # store it
    REPEAT = "repeat"  # stored before, or about to be: acknowledge and drop
    DEFERRED = "deferred"  # no room for what it would leave open: acknowledge and drop, it comes again
    UNKNOWN = "unknown"  # of an older epoch, out of all reason, or one publisher too many: store it, and forget it
    FOREIGN = "foreign"  # its number is another message's: store it, forget it, and let the publisher know


@dataclass(slots=True)
class _PublisherState:
    epoch: int
    seen: Ranges
    journaled: Ranges
    committed: Ranges
    #: when it was last heard
    heard: Stamp
    #: end of a frame → the numbers in the journal then, in order: committed as soon as the frame is
    waiting: deque[tuple[int, Ranges]] = field(default_factory=deque)
    #: the questions to be answered
    questions: list[str] = field(default_factory=list)
    #: the largest LOW heard by this process: everything below is in all three sets
    low: int = 0
    #: a note says at least this watermark
    noted: int = 0
    #: this gateway may have missed something of it: it should ask
    fresh: bool = False
    #: who gave out the numbers that were seen
    openings: Openings = field(default_factory=Openings)
    #: the newest questions, answered or not
    nonces: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_ASKED))
    #: the opening of the newest message whose number was another's, and whether the publisher is to learn of it
    foreign: str | None = None
    contradicted: bool = False

    def note(self, journaled: Ranges | None = None) -> list[Any]:
        journaled = self.journaled if journaled is None else journaled
        marks = [self.epoch, journaled.watermark, journaled.above(), self.committed.watermark, self.heard]
        return [*marks, self.openings.steps()]


class Ledger:
    """The publishers of one journal.

    Args:
        max_ranges: Ranges of numbers of one publisher with others missing between them, at most.
        keep_s: A publisher that is silent for so many seconds is forgotten, and so are its numbers.
        keys: Publishers have one of these, or one made of it.
        largest: Bytes of a packet that is taken in whole.

    Attributes:
        keys: As given.
        counts: Marked messages by what became of them, a `MarkVerdict`; ``forged`` are those without the right code,
            stored as if they had no mark.
    """

    def __init__(
        self,
        notes: Mapping[str, Any],
        end: int,
        *,
        gateway: str = "",
        max_publishers: int = 10_000,
        max_ranges: int = 256,
        keep_s: float = 30 * 86400,
        keys: ReceiptKeys,
        largest: int = 64 << 20,
    ) -> None:
        self._gateway = gateway
        self._max_publishers = max_publishers
        self._max_ranges = max_ranges
        self._keep_s = keep_s
        self.keys = keys
        self._largest = largest
        self._publishers: dict[str, _PublisherState] = {}
        #: those that a receipt is due for, in order
        self._due: dict[str, None] = {}
        #: rows below are in Kafka; None before the first word of it
        self._upto: int | None = None
        self.counts: Counter[str] = Counter()
        for name, note in notes.items():
            if name.startswith(_NOTE):
                self._restore(name.removeprefix(_NOTE), note, end)

    def _restore(self, name: str, note: Sequence[Any], end: int) -> None:
        epoch, watermark, above, committed, heard, openings = note
        journaled = Ranges(watermark, above)
        state = _PublisherState(epoch, journaled.copy(), journaled, Ranges(committed), Stamp(*heard), noted=committed)
        state.fresh = True
        state.openings = Openings(openings)
        # Which rows are whose is not kept: all of them are committed when the whole journal, as it is now, is.
        state.waiting.append((end, journaled.copy()))
        self._publishers[name] = state
        self._due[name] = None

    def __len__(self) -> int:
        return len(self._publishers)

    # -- coming in --

    def screen(self, packets: Sequence[Published], topics: Sequence[str], now: Stamp) -> Screening:
        """Take messages in: which must not be stored, and the marks of those that are new, as their tags."""
        left_out = bytearray(len(packets))
        marks: list[Mark | None] = []
        for place, packet in enumerate(packets):
            mark = self._genuine_mark(packet, topics[place])
            verdict = None if mark is None else self.take(mark, now)
            if verdict in _DROPPED:
                left_out[place] = 1
            marks.append(mark if verdict is MarkVerdict.NEW else None)
        return Screening(bytes(left_out) if any(left_out) else NOTHING, marks)

    def _genuine_mark(self, packet: Published, topic: str) -> Mark | None:
        properties = packet.user_properties
        mark = mark_of(properties) if properties else None
        if mark is None or is_genuine(mark, self.keys, packet, topic, self._largest):
            return mark
        if self.keys.refresh() and is_genuine(mark, self.keys, packet, topic, self._largest):
            return mark
        self.counts["forged"] += 1
        return None

    def take(self, mark: Mark, now: Stamp) -> MarkVerdict:
        """Judge a message and, if it is new, see it."""
        state, verdict = self._state_of(mark, now), MarkVerdict.UNKNOWN
        if state is None or mark.number > state.seen.end + FARTHEST:
            state = self._publishers.get(mark.publisher)  # a copy of an older epoch has to learn of the newer one
        else:
            state.heard = now
            verdict = self._judge(mark, state)
        self.counts[verdict.value] += 1
        if state is not None and verdict is MarkVerdict.NEW:
            state.seen.add(mark.number)
        elif state is not None:
            self._note_question(mark.publisher, state, mark)
        return verdict

    def _judge(self, mark: Mark, state: _PublisherState) -> MarkVerdict:
        number = mark.number
        if number in state.seen and state.openings.of(number) not in (None, mark.opening):
            if state.foreign != mark.opening:
                state.foreign, state.contradicted = mark.opening, True
                self._due[mark.publisher] = None
            return MarkVerdict.FOREIGN
        self._raise_low(mark, state)
        if number in state.seen:
            return MarkVerdict.REPEAT
        room = state.seen.touches(number) or state.seen.pieces < self._max_ranges
        newest = number >= state.seen.end
        if room and state.openings.put(number, mark.opening, newest=newest, low=state.low):
            return MarkVerdict.NEW
        return MarkVerdict.DEFERRED

    def _state_of(self, mark: Mark, now: Stamp) -> _PublisherState | None:
        state = self._publishers.get(mark.publisher)
        if state is not None and mark.epoch == state.epoch:
            return state
        if state is None and len(self._publishers) >= self._max_publishers:
            return None
        if state is not None and not state.epoch < mark.epoch <= state.epoch + MOST_EPOCHS:
            return None
        low = mark.low
        state = _PublisherState(mark.epoch, Ranges(low), Ranges(low), Ranges(low), now, low=low)
        self._publishers[mark.publisher] = state
        self._due.pop(mark.publisher, None)
        return state

    def _raise_low(self, mark: Mark, state: _PublisherState) -> None:
        """What the publisher gave up counts as arrived: a hole that stays would hold its watermark back for ever."""
        if mark.low <= state.low:
            return
        state.low, before = mark.low, state.committed.watermark
        for numbers in (state.seen, state.journaled, state.committed):
            numbers.add(0, mark.low)
        if state.committed.watermark > max(before, mark.low):
            self._due[mark.publisher] = None

    def _note_question(self, name: str, state: _PublisherState, mark: Mark) -> None:
        if mark.nonce and mark.nonce not in state.nonces:
            state.nonces.append(mark.nonce)
            state.questions = [*state.questions, mark.nonce][-_MOST_ASKED:]
            self._due[name] = None

    # -- on disk --

    def storing(self, marks: Iterable[Mark]) -> dict[str, Any]:
        """The notes to be stored with a frame of these messages."""
        journaled: dict[str, Ranges] = {}
        for mark, state in self._of_this_epoch(marks):
            journaled.setdefault(mark.publisher, state.journaled.copy()).add(mark.number)
        return {_NOTE + name: self._publishers[name].note(numbers) for name, numbers in journaled.items()}

    def stored(self, marks: Iterable[Mark], end: int) -> None:
        """A frame of these messages is durable, and the journal ends at `end`."""
        states: dict[str, _PublisherState] = {}
        for mark, state in self._of_this_epoch(marks):
            states[mark.publisher] = state
            state.journaled.add(mark.number)
            self._note_question(mark.publisher, state, mark)
        for state in states.values():
            if len(state.waiting) >= _MOST_WAITING:
                state.waiting.pop()
            state.waiting.append((end, state.journaled.copy()))

    def start_again(self, marks: Iterable[Mark]) -> None:
        """The session was renewed: what is not in the journal, and not among `marks`, was never received."""
        for state in self._publishers.values():
            state.seen = state.journaled.copy()
        for mark, state in self._of_this_epoch(marks):
            newest = mark.number >= state.seen.end
            state.openings.put(mark.number, mark.opening, newest=newest, low=state.low)
            state.seen.add(mark.number)

    def _of_this_epoch(self, marks: Iterable[Mark]) -> Iterator[tuple[Mark, _PublisherState]]:
        for mark in marks:
            state = self._publishers.get(mark.publisher)
            if state is not None and state.epoch == mark.epoch:
                yield mark, state

    # -- in Kafka --

    def commit(self, upto: int) -> None:
        """Every row below `upto` is in Kafka."""
        if upto == self._upto:
            return  # whatever was stored since then lies above it
        self._upto = upto
        for name, state in self._publishers.items():
            before = state.committed.watermark
            while state.waiting and state.waiting[0][0] <= upto:
                state.committed.unite(state.waiting.popleft()[1])
            if state.committed.watermark > before:
                self._due[name] = None

    # -- answering --

    @property
    def due(self) -> bool:
        """A receipt is due."""
        return bool(self._due)

    def receipts(self, most: int, busy: Iterable[str] = ()) -> list[ReceiptPayload]:
        """Receipts to be sent now, at most one for a publisher; none for those in `busy`, whose turn comes again."""
        taken = set(busy)
        names = islice((name for name in self._due if name not in taken), most)
        return [self._receipt(name) for name in names]

    def _receipt(self, name: str) -> ReceiptPayload:
        state = self._publishers[name]
        answers = state.questions or state.contradicted
        ranges = ((0, state.journaled.watermark), *state.journaled.above()) if answers else ()
        return ReceiptPayload(
            name,
            state.epoch,
            state.committed.watermark,
            self._gateway,
            " ".join(state.questions),
            tuple((start, end) for start, end in ranges if end > start),
            fresh=state.fresh,
            openings=state.openings.steps(),
        )

    def notes(self, receipts: Iterable[ReceiptPayload]) -> dict[str, Any]:
        """What has to be durable before these leave: a watermark never goes back."""
        states = ((receipt, self._publishers[receipt.publisher]) for receipt in receipts)
        return {_NOTE + receipt.publisher: state.note() for receipt, state in states if receipt.watermark > state.noted}

    def handed_over(self, receipt: ReceiptPayload) -> None:
        """A receipt was handed over."""
        state = self._publishers.get(receipt.publisher)
        if state is None or state.epoch != receipt.epoch:
            return
        state.noted = max(state.noted, receipt.watermark)
        state.fresh = state.contradicted = False
        answered = receipt.asked.split()
        state.questions = [nonce for nonce in state.questions if nonce not in answered]
        if not state.questions and state.committed.watermark <= receipt.watermark:
            self._due.pop(receipt.publisher, None)

    def announce_again(self, names: Iterable[str] | None = None) -> None:
        """Receipts may not have come through: those of `names`; or of all, and what they sent neither."""
        for name in self._publishers if names is None else names:
            if name in self._publishers:
                state = self._publishers[name]
                state.fresh = state.fresh or names is None
                self._due[name] = None

    # -- forgetting --

    def expire(self, now: Stamp) -> dict[str, None]:
        """Forget who is silent for too long and has nothing on the way to Kafka; returns the notes to remove."""
        silent = [
            name
            for name, state in self._publishers.items()
            if state.heard.age_us(now) > self._keep_s * 1e6 and not state.waiting
        ]
        for name in silent:
            del self._publishers[name]
            self._due.pop(name, None)
        return dict.fromkeys(_NOTE + name for name in silent)

    def validate(self) -> None:
        """Assert every invariant named above; for tests."""
        for name, state in self._publishers.items():
            assert _within(state.committed, state.journaled), name
            assert _within(state.journaled, state.seen), name
            assert [end for end, _ in state.waiting] == sorted(end for end, _ in state.waiting), name
            assert len(state.waiting) <= _MOST_WAITING, name
        assert self._due.keys() <= self._publishers.keys()
        assert len(self._publishers) <= self._max_publishers


_DROPPED: Final = (MarkVerdict.REPEAT, MarkVerdict.DEFERRED)


def _within(inner: Ranges, outer: Ranges) -> bool:
    both = outer.copy()
    both.unite(inner)
    return both.watermark == outer.watermark and both.above() == outer.above()


#: Receipts under way at once, at most: they share the broker's window with what else is sent.
_MOST_OPEN: Final = 200
#: Pause between two rounds of receipts, in seconds: each costs a sync.
_PAUSE: Final = 0.05
#: How often silent publishers are looked for, and keys that were taken away, in seconds.
_EXPIRE: Final = 60.0
_REFUSAL: Final = 0x80
_FORGED: Final = "a marked message has a wrong code: another key, or not its publisher; stored as any other, no receipt"


class ReceiptSender:
    """Lets publishers know how far their messages are; belongs to the pump's thread.

    A receipt needs no place on disk: it says what the ledger knows, and is said again to everybody when the process is
    new or the broker has lost our session, and to one publisher whenever it asks. Only the watermark is made durable
    first, so that it never goes back.
    """

    def __init__(self, prefix: str, ledger: Ledger, inbox: Journal, handle: Callable[[Event], None], log: Any) -> None:
        self._prefix = prefix
        self.ledger = ledger
        self._inbox = inbox
        self._handle = handle
        self._log = log
        #: Receipts under way, one of a publisher at a time; each is its message's token.
        self._open: set[ReceiptPayload] = set()
        self._next_at = 0.0
        self._expire_at = 0.0
        self._refused: set[str] = set()
        #: it was said that there are messages that were not believed
        self._warned = False
        #: Receipts that the broker has.
        self.sent = 0

    def turn(self, now: float, *, online: bool) -> None:
        """Send what is due."""
        if self.ledger.counts["forged"] and not self._warned:
            self._warned = True
            self._log.warning(_FORGED, code="TL-M35")
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE
            self.ledger.keys.refresh()
            if problem := self.ledger.keys.problem:
                self._log.warning("the keys before count on", reason=str(problem), code=problem.code)
            self._keep(self.ledger.expire(Stamp.now()))
        room = _MOST_OPEN - len(self._open)
        if not online or not self.ledger.due or room <= 0 or now < self._next_at:
            return
        receipts = self.ledger.receipts(room, {one.publisher for one in self._open})
        if not receipts:
            return
        self._next_at = now + _PAUSE
        if self._keep(self.ledger.notes(receipts)):
            self._send(receipts)

    def due(self) -> float | None:
        """When `turn` is due by the clock; None for never."""
        return self._next_at if self.ledger.due and len(self._open) < _MOST_OPEN else None

    def _keep(self, notes: Mapping[str, Any]) -> bool:
        try:
            if notes:
                self._inbox.append(notes=notes)
        except JournalFull:
            self._next_at = time.monotonic() + 1.0
            return False
        return True

    def _send(self, receipts: list[ReceiptPayload]) -> None:
        messages = []
        for receipt in receipts:
            self._open.add(receipt)
            self.ledger.handed_over(receipt)
            message = OutboundMessage(
                receipt_topic(self._prefix, receipt.publisher),
                receipt.encode(self.ledger.keys),
                qos=1,
                retain=True,  # a publisher that was away learns it when it subscribes again
                payload_format_indicator=1,
                content_type="application/json",
            )
            messages.append(Publish(receipt, message))
        self._handle(PublishMany(messages))

    def perform(self, action: Acknowledged) -> bool:
        """Take an answer of the broker; False when it is about something else."""
        receipt = action.token
        if not isinstance(receipt, ReceiptPayload):
            return False
        if receipt not in self._open:
            return True
        self._open.remove(receipt)
        if action.reason < _REFUSAL:
            self.sent += 1
        elif receipt.publisher not in self._refused and len(self._refused) < 1000:
            self._refused.add(receipt.publisher)
            topic, reason = receipt_topic(self._prefix, receipt.publisher), reason_words(action.reason)
            self._log.warning("the broker refused a receipt", topic=topic, reason=reason, code="TL-M41")
        return True

    def lost(self, withdrawn: Iterable[Token]) -> None:
        """The connection is gone; the messages with these tokens never left."""
        unsent = [token for token in withdrawn if isinstance(token, ReceiptPayload) and token in self._open]
        self._open.difference_update(unsent)
        self.ledger.announce_again([receipt.publisher for receipt in unsent])

    def session_lost(self) -> None:
        """The broker forgot our session, and perhaps all that it kept; what publishers have heard is unknown."""
        self.ledger.announce_again()

    def start_again(self) -> None:
        """A new session knows nothing of what was under way."""
        names = [receipt.publisher for receipt in self._open]
        self._open.clear()
        self.ledger.announce_again(names)

    def status(self) -> dict[str, int]:
        """For `towline status`; from any thread, about."""
        counts = {name: self.ledger.counts[name] for name in ("deferred", "unknown", "foreign", "forged")}
        return {"publishers": len(self.ledger), "sent": self.sent, **counts}
