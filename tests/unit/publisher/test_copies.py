"""A publisher's directory is copied and restored, at any moment, between broker and gateway that lose and repeat.

Whatever is settled is in Kafka; whatever is dropped is in the journal; and in the end everything is settled.
"""

from __future__ import annotations

import contextlib
import copy
from itertools import count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.delivery.receipts.marks import KEYS
from tests.unit.publisher.test_pending_receipts import Noted, awaited_of
from towline.delivery.receipts.ledger import MarkVerdict, ReceiptLedger
from towline.delivery.receipts.mark import Content, Mark, parse_mark
from towline.delivery.receipts.payload import ReceiptPayload
from towline.journal.ranges import Ranges
from towline.publisher.pending_receipts import OutboxRestored
from towline.timing import Timestamp

NOW = Timestamp(1_000_000_000)
END = 1_000_000


class Disk(Noted):
    """What a publisher's directory holds."""

    def __init__(self) -> None:
        super().__init__(Ranges(), 0)
        self.opening = ""
        #: of each number: the opening that gave it out, and the message
        self.rows: list[tuple[str, int]] = []

    def incarnation_of(self, end: int) -> str:
        return self.rows[end - 1][0] if end <= len(self.rows) else ""


class Copies(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.names, self.messages, self.nonces = count(), count(), count(1)
        self.disk, self.copies = Disk(), [Disk()]
        self.clock = 0.0
        self.open()
        #: with the broker: what somebody published, and all that the gateway ever said
        self.queue: list[tuple[Mark, int]] = []
        self.said: list[bytes] = []
        self.notes: dict[str, Any] = {}
        self.journal: list[int] = []
        self.committed = 0
        self.ledger = ReceiptLedger({}, 0, max_ranges=4, keys=KEYS)
        self.ahead: list[tuple[Mark, int]] = []

    # -- the publisher --

    def open(self) -> None:
        disk = self.disk
        disk.opening = f"{next(self.names):x}"
        self.awaited = awaited_of(disk, 1.0, lambda: f"{next(self.nonces):x}")
        self.awaited.connection_opened(self.clock)

    @rule(more=st.integers(1, 4))
    def publish(self, more: int) -> None:
        self.disk.rows += [(self.disk.opening, next(self.messages)) for _ in range(more)]
        self.disk.end = len(self.disk.rows)

    def send(self, number: int) -> None:
        mark = parse_mark(self.awaited.mark_properties(number, Content("t", b"")))
        assert mark is not None
        self.queue.append((mark, self.disk.rows[number][1]))
        self.disk.done_rows.add(number)

    @rule()
    def send_new(self) -> None:
        for number in range(self.disk.done_rows.watermark, len(self.disk.rows)):
            self.send(number)

    @rule()
    def ask(self) -> None:
        self.clock += 1000
        for start, end in self.awaited.due_request(self.clock):
            for number in range(start, end):
                self.send(number)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        """One of all that were ever said: a broker retains them, and others may repeat them."""
        self.take(data.draw(st.sampled_from(self.said)))

    def take(self, said: bytes) -> None:
        receipt = ReceiptPayload.decode(said)
        assert receipt is not None
        before = self.awaited.completed_ranges.watermark
        lost: list[tuple[int, int]] = []
        with contextlib.suppress(OutboxRestored):
            lost = self.awaited.apply_receipt(receipt, self.clock)
        self.awaited.persist(None)
        in_kafka = set(self.journal[: self.committed])
        assert all(self.disk.rows[n][1] in in_kafka for n in range(before, self.awaited.completed_ranges.watermark))
        for start, end in lost:
            for number in range(start, end):
                self.send(number)

    @rule()
    def kill(self) -> None:
        self.open()

    @rule()
    def copy(self) -> None:
        self.copies.append(copy.deepcopy(self.disk))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.disk = copy.deepcopy(data.draw(st.sampled_from(self.copies)))
        self.open()

    # -- the broker --

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.queue) - 1))
        self.receive(*(self.queue[at] if data.draw(st.booleans()) else self.queue.pop(at)))

    @rule()
    def deliver_all(self) -> None:
        queue, self.queue = self.queue, []
        for mark, message in queue:
            self.receive(mark, message)

    @rule()
    def forget(self) -> None:
        self.queue = []

    # -- the gateway --

    def receive(self, mark: Mark, message: int) -> None:
        verdict = self.ledger.record_mark(mark, NOW)
        here = {*self.journal, *(message for _, message in self.ahead)}
        if verdict is MarkVerdict.NEW:
            self.ahead.append((mark, message))
        elif verdict in (MarkVerdict.UNKNOWN, MarkVerdict.FOREIGN):
            self.journal.append(message)  # at once: nothing remembers it
        elif verdict is MarkVerdict.REPEAT:
            assert message in here

    @rule()
    def store(self) -> None:
        marks = [mark for mark, _ in self.ahead]
        self.notes.update(self.ledger.notes_for_frame(marks))
        self.journal += [message for _, message in self.ahead]
        self.ahead = []
        self.ledger.frame_stored(marks, len(self.journal))

    @rule(more=st.integers(1, 5))
    def commit(self, more: int) -> None:
        self.committed = min(len(self.journal), self.committed + more)
        self.ledger.commit(self.committed)

    @rule()
    def tell(self) -> None:
        for receipt in self.ledger.receipts(5):
            self.notes.update(self.ledger.watermark_notes([receipt]))
            self.ledger.receipt_sent(receipt)
            self.said.append(receipt.encode(KEYS))

    @rule()
    def crash(self) -> None:
        self.ahead = []
        self.ledger = ReceiptLedger(self.notes, len(self.journal), max_ranges=4, keys=KEYS)
        self.ledger.commit(self.committed)

    @rule(kept=st.integers(0, 3))
    def new_session(self, kept: int) -> None:
        self.ahead = self.ahead[:kept]
        self.ledger.reset([mark for mark, _ in self.ahead])

    @invariant()
    def sound(self) -> None:
        self.ledger.validate()

    def teardown(self) -> None:
        for _ in range(30):
            self.send_new()
            self.ask()
            self.deliver_all()
            self.store()
            self.commit(END)
            heard = len(self.said)
            self.tell()
            for said in self.said[heard:]:
                self.take(said)
        assert self.awaited.completed_ranges.watermark == len(self.disk.rows)
        assert {message for _, message in self.disk.rows} <= set(self.journal)


TestCopies = Copies.TestCase
TestCopies.settings = settings(stateful_step_count=50, deadline=None)
