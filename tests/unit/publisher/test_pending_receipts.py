"""When a publisher asks, and what it sends again: nothing on suspicion, everything that an answer does not name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest

from tests.unit.delivery.receipts.marks import KEYS
from towline.delivery.receipts.mark import Content, Mark, parse_mark
from towline.delivery.receipts.payload import ReceiptPayload
from towline.journal.ranges import Ranges
from towline.publisher.pending_receipts import RECEIPT_CONSUMER, OutboxRestored, PendingReceipts


class Noted:
    """An outbox without a disk: numbers, what the broker has of them, and what is kept."""

    journal_id = "p"

    def __init__(self, done: Ranges, end: int) -> None:
        self.done_rows, self.end = done, end
        self.consumers: dict[str, int] = {}
        self.notes: dict[str, Any] = {}

    def incarnation_of(self, _end: int) -> str:
        """Of the one opening that gave out all numbers."""
        return "a"

    def commit(self, consumer: str, offset: int, *, notes: Mapping[str, Any]) -> None:
        assert offset <= self.end
        self.consumers[consumer] = offset
        self.notes.update(notes)


def awaited_of(outbox: Noted, patience_s: float, nonce: Callable[[], str] = lambda: "1") -> PendingReceipts:
    return PendingReceipts(outbox, patience_s, KEYS, nonce)  # type: ignore[arg-type] # a stand-in


PATIENCE = 10.0
CONTENT = Content("t", b"")
#: Of the one opening that gave out all numbers.
OPENED = ((0, "a"),)


def awaiting(done: int = 0, settled: int = 0, end: int = 200) -> tuple[PendingReceipts, Ranges]:
    outbox, numbers = Noted(Ranges(done), end), count(1)
    outbox.consumers[RECEIPT_CONSUMER] = settled
    return awaited_of(outbox, PATIENCE, lambda: f"{next(numbers):x}"), outbox.done_rows


def receipt(
    watermark: int, asked: str = "", *journaled: tuple[int, int], epoch: int = 1, fresh: bool = False
) -> ReceiptPayload:
    return ReceiptPayload("p", epoch, watermark, asked, journaled, fresh, OPENED)


def test_nothing_is_asked_while_receipts_come() -> None:
    awaited, done = awaiting()
    awaited.connection_opened(0)
    assert awaited.due_request(0) == []
    for second in range(100):
        done.add(second)
        assert awaited.due_request(second) == []
        assert awaited.apply_receipt(receipt(second), second) == []
    assert awaited.request_count == 0


def test_no_progress_is_asked_about_ever_more_rarely() -> None:
    awaited, _ = awaiting(done=5)
    awaited.connection_opened(0)
    asked = [now for now in range(2000) if awaited.due_request(now)]
    assert asked == [0, 10, 30, 70, 150, 310, 630, 1230, 1830]


def test_only_what_the_answer_does_not_name_is_sent_again() -> None:
    awaited, done = awaiting(done=10)
    awaited.connection_opened(0)
    assert awaited.due_request(0) == [(0, 1)]
    mark = parse_mark(awaited.mark_properties(0, CONTENT))
    assert mark is not None
    assert mark.nonce == "1"
    assert parse_mark(awaited.mark_properties(3, CONTENT)) == Mark("p", 1, 3, 0, incarnation="a").sign(KEYS, CONTENT)
    done.add(10, 15)  # sent after the question: the answer may well not know it
    assert awaited.apply_receipt(receipt(2, "other", (0, 2)), 1) == []
    assert awaited.apply_receipt(receipt(2, "1", (0, 4), (6, 7)), 1) == [(4, 6), (7, 10)]
    assert awaited.resent_count == 5
    assert awaited.apply_receipt(receipt(2, "1", (0, 4)), 1) == []  # answered once
    assert awaited.due_request(100) == [(2, 3)]
    assert awaited.apply_receipt(receipt(2, "2", (0, 15)), 101) == []  # all of it waits for Kafka alone


def test_a_new_gateway_and_a_new_connection_are_asked_at_once() -> None:
    awaited, _ = awaiting(done=5)
    awaited.connection_opened(0)
    assert awaited.due_request(0)
    awaited.apply_receipt(receipt(1, fresh=True), 5)
    assert awaited.due_request(5) == [(1, 2)]
    awaited.connection_opened(6)
    assert awaited.due_request(6) == [(1, 2)]
    assert awaited.apply_receipt(receipt(1, "2", (0, 5)), 7) == []  # of the connection before


def test_a_gateway_that_says_again_and_again_that_it_is_new_is_asked_ever_more_rarely() -> None:
    awaited, _ = awaiting(done=5)
    awaited.connection_opened(0)
    awaited.due_request(0)
    asked = 0
    for now in range(1, 600):
        awaited.apply_receipt(receipt(0, fresh=True), now)
        asked += len(awaited.due_request(now))
    assert asked <= 10


@pytest.mark.parametrize(
    ("watermark", "journaled", "openings"),
    [
        (4, (), ((0, "a"),)),
        (4, (), ((0, "a"), (2, "c"))),
        (4, (), ((2, "b"), (4, "c"))),
        (4, (), ((0, "a"), (2, "b"), (3, "x"))),
        (0, ((0, 1), (4, 5)), ((0, "a"), (2, "b"))),
    ],
)
def test_numbers_of_another_opening_settle_nothing(
    watermark: int, journaled: tuple[tuple[int, int], ...], openings: tuple[tuple[int, str], ...]
) -> None:
    awaited = of_three_openings()
    with pytest.raises(OutboxRestored):
        awaited.apply_receipt(ReceiptPayload("p", 1, watermark, journaled=journaled, incarnations=openings), 0)
    assert (awaited.completed_ranges.watermark, awaited.epoch) == (1, 2)
    assert awaited.due_request(0) == [(1, 2)], "at once"
    awaited.apply_receipt(ReceiptPayload("p", 1, 5, incarnations=((0, "a"), (2, "b"), (4, "c"))), 0)
    assert awaited.completed_ranges.watermark == 1, "of the epoch before"


def of_three_openings() -> PendingReceipts:
    """Five numbers, of which the first is settled."""
    names = ["a", "a", "b", "b", "c"]
    outbox = Noted(Ranges(5), 5)
    outbox.consumers[RECEIPT_CONSUMER] = 1
    outbox.incarnation_of = lambda end: names[end - 1]  # type: ignore[assignment, method-assign]
    return awaited_of(outbox, PATIENCE)


def test_what_settles_are_numbers_of_ours() -> None:
    awaited = of_three_openings()
    awaited.apply_receipt(ReceiptPayload("p", 1, 3, incarnations=((0, "x"), (1, "a"), (2, "b"), (4, "y"))), 0)
    assert awaited.completed_ranges.watermark == 3
    awaited.apply_receipt(ReceiptPayload("p", 1 << 21, 5), 0)
    awaited.apply_receipt(ReceiptPayload("p", 1, 1 << 41), 0)  # nobody has that many
    assert awaited.completed_ranges.watermark == 3


def test_what_was_given_up_is_not_owed_and_not_asked_about() -> None:
    awaited, done = awaiting(done=3)
    awaited.connection_opened(0)
    awaited.drop(0)
    awaited.drop(2)
    done.add(5, 7)
    assert awaited.pending_ranges(100) == [(1, 2), (5, 7)]
    assert awaited.pending_ranges(6) == [(1, 2), (5, 6)]
    assert awaited.due_request(0) == [(1, 2)]


def test_rows_that_are_in_flight_once_more_stay_with_their_receipts() -> None:
    """The broker may hold one under a packet id, which has to be given back; a restart knows its receipt."""
    outbox = Noted(Ranges(10), 10)
    outbox.consumers[RECEIPT_CONSUMER] = 0
    awaited = awaited_of(outbox, PATIENCE)
    awaited.apply_receipt(receipt(8), 0)
    for in_flight, kept in ((3, 3), (9, 8), (None, 8)):
        awaited.persist(in_flight)
        assert outbox.consumers[RECEIPT_CONSUMER] == kept
        assert awaited_of(outbox, PATIENCE).completed_ranges.watermark == 8


def test_a_mark_is_never_below_its_own_low() -> None:
    awaited, _ = awaiting(done=10, settled=8)
    mark = parse_mark(awaited.mark_properties(3, CONTENT))  # it was on its way when its receipt came
    assert mark is not None
    assert mark.low == 3
