"""An outbox without a disk, as `Awaited` sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.unit.delivery.receipts.marks import KEYS
from towline.journal.ranges import Ranges
from towline.publisher.pending_receipts import PendingReceipts


class Noted:
    """Numbers, what the broker has of them, and what is kept."""

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
