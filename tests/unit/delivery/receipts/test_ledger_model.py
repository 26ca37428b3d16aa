"""The ledger of publishers against a model."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.delivery.receipts.marks import KEYS, NOW, later
from towline.delivery.receipts.ledger import MarkVerdict, ReceiptLedger
from towline.delivery.receipts.mark import Mark
from towline.delivery.receipts.payload import ReceiptPayload


class Gateway(RuleBasedStateMachine):
    """A publisher that repeats, reorders, gives up and begins anew; a gateway that crashes at every point."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {}
        #: what the journal holds: (epoch, number) of each row
        self.rows: list[tuple[int, int]] = []
        self.committed = 0
        self.ledger = ReceiptLedger({}, 0, max_ranges=3, keys=KEYS)
        #: received and not stored
        self.ahead: list[Mark] = []
        self.epoch, self.low = 1, 0
        self.given_up: set[tuple[int, int]] = set()
        self.announced: dict[int, int] = {}

    @rule(ahead=st.integers(0, 12), nonce=st.sampled_from(["", "", "a1"]))
    def publish(self, ahead: int, nonce: str) -> None:
        marked = Mark("p", self.epoch, self.low + ahead, self.low, nonce)
        here = (self.epoch, marked.number) in [*self.rows, *((m.epoch, m.number) for m in self.ahead)]
        verdict = self.ledger.record_mark(marked, NOW)
        assert verdict in ((MarkVerdict.REPEAT,) if here else (MarkVerdict.NEW, MarkVerdict.DEFERRED))
        if verdict is MarkVerdict.NEW:
            self.ahead.append(marked)

    @precondition(lambda self: self.ahead)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.ahead)))
        frame, self.ahead = self.ahead[:count], self.ahead[count:]
        notes = self.ledger.notes_for_frame(frame)
        if data.draw(st.booleans()):
            self._durable(notes)
            self.rows += [(m.epoch, m.number) for m in frame]
            self.ledger.frame_stored(frame, len(self.rows))
        else:
            self.ahead = frame + self.ahead  # the journal was full

    def _durable(self, notes: Any) -> None:
        for name, note in notes.items():
            if note is None:
                self.notes.pop(name, None)
            else:
                self.notes[name] = note

    @rule(more=st.integers(0, 5))
    def commit(self, more: int) -> None:
        self.committed = min(len(self.rows), self.committed + more)
        self.ledger.commit(self.committed)

    @rule()
    def tell(self) -> None:
        for receipt in self.ledger.receipts(5):
            self._durable(self.ledger.watermark_notes([receipt]))
            self.ledger.receipt_sent(receipt)
            self._judge(receipt)
        assert not self.ledger.has_due

    def _judge(self, receipt: ReceiptPayload) -> None:
        in_kafka, stored = set(self.rows[: self.committed]) | self.given_up, set(self.rows) | self.given_up
        epoch = receipt.epoch
        assert all((epoch, n) in in_kafka for n in range(receipt.watermark))
        assert all((epoch, n) in stored for start, end in receipt.journaled for n in range(start, end))
        assert receipt.watermark >= self.announced.get(epoch, 0)
        self.announced[epoch] = receipt.watermark
        if epoch == self.epoch:  # the publisher's low follows what it was told
            self.low = max(self.low, receipt.watermark)

    @rule(count=st.integers(1, 3))
    def give_up(self, count: int) -> None:
        self.given_up |= {(self.epoch, n) for n in range(self.low, self.low + count)}
        self.low += count

    @rule()
    def crash(self) -> None:
        self.ahead = []
        self.ledger = ReceiptLedger(self.notes, len(self.rows), max_ranges=3, keys=KEYS)
        self.ledger.commit(self.committed)

    @rule(data=st.data())
    def new_session(self, data: st.DataObject) -> None:
        self.ahead = self.ahead[: data.draw(st.integers(0, len(self.ahead)))]
        self.ledger.reset(self.ahead)

    @rule()
    def new_epoch(self) -> None:
        # What is received of the older epoch may be stored or lost, and comes again only under the new one.
        self.ahead = []
        self.ledger.reset([])
        self.epoch += 1
        self.low = 0
        assert self.ledger.record_mark(Mark("p", self.epoch, 0, 0), NOW) is MarkVerdict.NEW
        first = [Mark("p", self.epoch, 0, 0)]
        self._durable(self.ledger.notes_for_frame(first))
        self.rows.append((self.epoch, 0))
        self.ledger.frame_stored(first, len(self.rows))

    @rule()
    def expiry(self) -> None:
        assert self.ledger.expire_publishers(later(10)) == {}

    @invariant()
    def sound(self) -> None:
        self.ledger.validate()
        assert len(set(self.rows)) == len(self.rows)  # no double, ever

    def teardown(self) -> None:
        """Once everything is sent again and committed, the receipt says so."""
        top = max([n for e, n in self.rows if e == self.epoch], default=-1) + 1
        for number in range(self.low, top):
            self.publish(number - self.low, "")
        notes = self.ledger.notes_for_frame(self.ahead)
        self.rows += [(m.epoch, m.number) for m in self.ahead]
        self._durable(notes)
        self.ledger.frame_stored(self.ahead, len(self.rows))
        self.commit(1_000_000)
        self.tell()
        assert max(self.announced.get(self.epoch, 0), self.low) >= top


TestGateway = Gateway.TestCase
TestGateway.settings = settings(stateful_step_count=40, deadline=None)
