"""Pending receipts of a publisher, and the schedule of status requests. No socket or clock; state is one journal note.

A message is *pending* once the broker accepted it, until its receipt. Nothing is resent on suspicion: the oldest
pending message is resent with a request, and only messages that the answer does not name are resent. The broker
delivers in order, so a message sent before the request and missing in the answer is lost.

    online again, or the gateway is new     request at once
    no progress for a while                 request; the pause doubles until there is progress
    an answer                               resend the messages that it does not name

A directory restored from an older copy reuses message numbers. A receipt names the journal incarnation of each number
that the gateway has [I14]. If it is another one, nothing is completed, and the messages get a new epoch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from towline.delivery.receipts.mark import MAX_EPOCH_GAP, MAX_NUMBER_GAP, Content, Mark, ReceiptKeys
from towline.delivery.receipts.payload import ReceiptPayload, are_same_messages
from towline.errors import ConfigError
from towline.journal import Outbox
from towline.journal.ranges import Ranges

#: Outbox consumer that retains the rows of messages without a receipt.
RECEIPT_CONSUMER: Final = "receipts"

#: Longest pause between two status requests, in seconds.
_MAX_PAUSE_S: Final = 600.0
#: Shortest pause, in seconds.
_MIN_PAUSE_S: Final = 1.0


class OutboxRestored(Exception):
    """The gateway has other messages under the numbers of this outbox: the directory is an older copy."""


class PendingReceipts:
    """Messages of an outbox without a receipt; the state continues from the outbox's note.

    Messages sent before receipts were enabled need none.

    Args:
        outbox: Outbox whose `done` has the numbers that the broker accepted, or that are dropped.
        patience_s: Seconds without progress before a status request.
        keys: Keys that sign marks and verify receipts.
        new_nonce: Returns a unique name for a request.

    Attributes:
        completed_ranges: Numbers with a receipt, and dropped ones; only this object adds to it.
        resent_count: Messages resent because an answer did not name them.
        unverified_count: Receipts without a valid signature.
        due_at: Time of the next request on `time.monotonic`; None if nothing is pending.
    """

    def __init__(
        self,
        outbox: Outbox,
        patience_s: float,
        keys: ReceiptKeys,
        new_nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        note = outbox.notes.get(RECEIPT_CONSUMER) or {"epoch": 1, "above": []}
        sent_ranges = outbox.done_rows
        self.epoch: int = note["epoch"]
        self.completed_ranges = Ranges(sent_ranges.watermark, sent_ranges.ranges_above())
        if RECEIPT_CONSUMER in outbox.consumers:
            self.completed_ranges = Ranges(outbox.consumers[RECEIPT_CONSUMER], note["above"])
        sent_ranges.add(0, self.completed_ranges.watermark)  # a message with a receipt needs no PUBACK
        self.request_count = 0
        self.resent_count = 0
        self.unverified_count = 0
        self._outbox, self._sent_ranges = outbox, sent_ranges
        self._patience_s = max(patience_s, _MIN_PAUSE_S)
        self._new_nonce = new_nonce
        self._keys = keys
        #: pause after the next request
        self.due_at: float | None = None
        self._pause_s = self._patience_s
        self._last_request_at = float("-inf")
        #: shortest pause before a request to a new gateway: a third party may replay its receipt
        self._fresh_pause_s = _MIN_PAUSE_S
        #: open request: its nonce, its message number, and the end of the numbers sent before it
        self._request_nonce, self._request_number, self._request_end = "", -1, 0
        self.persist(None)

    def persist(self, oldest_in_flight: int | None) -> None:
        """Persist the state and release completed rows, except those from `oldest_in_flight` on."""
        end = watermark = self.completed_ranges.watermark
        if oldest_in_flight is not None:
            end = min(oldest_in_flight, watermark)
        uncommitted = [[end, watermark]] if end < watermark else []
        note = {"epoch": self.epoch, "above": [*uncommitted, *self.completed_ranges.ranges_above()]}
        self._outbox.commit(RECEIPT_CONSUMER, min(end, self._outbox.end), notes={RECEIPT_CONSUMER: note})

    def _incarnation_of(self, number: int) -> str:
        """Return the journal incarnation that assigned a message number."""
        return self._outbox.incarnation_of(number + 1)

    def mark_properties(self, number: int, content: Content) -> list[tuple[str, str]]:
        """Return the user properties that request a receipt for a message."""
        nonce = self._request_nonce if number == self._request_number else ""
        lowest_pending, incarnation = min(self.completed_ranges.watermark, number), self._incarnation_of(number)
        mark = Mark(self._outbox.journal_id, self.epoch, number, lowest_pending, nonce, incarnation)
        return mark.sign(self._keys, content).properties()

    def is_pending(self, number: int) -> bool:
        """Return whether a message has no receipt and is not dropped."""
        return number not in self.completed_ranges

    def pending_ranges(self, end_number: int) -> list[tuple[int, int]]:
        """Return ranges of numbers below `end_number` that the broker accepted and that have no receipt."""
        sent_ranges = ((start, min(end, end_number)) for start, end in self._sent_ranges.ranges)
        return [gap for start, end in sent_ranges for gap in self.completed_ranges.missing(start, end)]

    # -- events --

    def connection_opened(self, now: float) -> None:
        """Schedule a request at once: the broker may have lost messages."""
        self._keys.refresh()
        self.due_at = now
        self._request_nonce = ""

    def drop(self, number: int) -> None:
        """Drop a message that will not be sent any more: refused or expired."""
        self.completed_ranges.add(number)

    def verify(self, payload: bytes | None) -> ReceiptPayload | None:
        """Verify and decode a receipt; None without a valid signature, or without a payload."""
        if payload is None:
            return None
        if not ReceiptPayload.verify_payload(self._keys, self._outbox.journal_id, payload):
            self.unverified_count += 1
            return None
        return ReceiptPayload.decode(payload)

    def apply_receipt(self, receipt: ReceiptPayload, now: float) -> list[tuple[int, int]]:
        """Apply a receipt; return the ranges to resend.

        Args:
            receipt: Verified receipt.
            now: Time on `time.monotonic`.

        Raises:
            OutboxRestored: The gateway has other messages under numbers assigned since this copy. The messages get a
                new epoch; the gateway accepts them as new, once the epoch is persisted and synced.
        """
        end, epochs = self._outbox.end, range(self.epoch, self.epoch + MAX_EPOCH_GAP + 1)
        if receipt.publisher != self._outbox.journal_id or receipt.epoch not in epochs:
            return []
        if receipt.watermark > end + MAX_NUMBER_GAP:
            return []
        if receipt.epoch > self.epoch or not self._matches_outbox(receipt, end):
            self.epoch, self._request_nonce, self.due_at = receipt.epoch + 1, "", float("-inf")
            raise OutboxRestored
        if receipt.watermark > self.completed_ranges.watermark:
            self.completed_ranges.add(0, receipt.watermark)
            self._pause_s, self._fresh_pause_s = self._patience_s, _MIN_PAUSE_S
            self.due_at = now + self._pause_s
        if receipt.restarted and now - self._last_request_at >= self._fresh_pause_s:
            self.due_at = now
            self._fresh_pause_s = min(2 * self._fresh_pause_s, _MAX_PAUSE_S)
        if not self._request_nonce or self._request_nonce not in receipt.nonces.split():
            return []
        self._request_nonce = ""
        return self._find_lost_ranges(receipt, now)

    def _matches_outbox(self, receipt: ReceiptPayload, end: int) -> bool:
        """Return whether all messages without a receipt have the incarnations that the receipt names."""
        watermark = self.completed_ranges.watermark
        ranges = [(max(start, watermark), stop) for start, stop in ((0, receipt.watermark), *receipt.journaled)]
        if any(stop > end for _, stop in ranges):
            return False
        return are_same_messages(receipt.incarnations, ranges, self._incarnation_of)

    def _find_lost_ranges(self, receipt: ReceiptPayload, now: float) -> list[tuple[int, int]]:
        journaled = Ranges(0, receipt.journaled)
        lost = [gap for start, end in self.pending_ranges(self._request_end) for gap in journaled.missing(start, end)]
        if lost:
            self._pause_s = self._patience_s
            self.due_at = now + self._pause_s
            self.resent_count += sum(end - start for start, end in lost)
        return lost

    @property
    def pending_count(self) -> int:
        """Number of messages without a receipt that are not dropped."""
        return self._outbox.end - self.completed_ranges.count()

    def status(self) -> dict[str, int]:
        """Return the counters of receipts."""
        return {
            "epoch": self.epoch,
            "watermark": self.completed_ranges.watermark,
            "awaiting": self.pending_count,
            "asked": self.request_count,
            "sent_again": self.resent_count,
            "not_believed": self.unverified_count,
        }

    # -- schedule, while online --

    def due_request(self, now: float) -> list[tuple[int, int]]:
        """Return the message to resend with a status request, if one is due."""
        pending = self.pending_ranges(self._sent_ranges.end)
        if not pending:
            self.due_at = None
            self._pause_s = self._patience_s
            return []
        if self.due_at is None:
            self.due_at = now + self._pause_s
        if now < self.due_at:
            return []
        return [self._request_status(pending[0][0], now)]

    def _request_status(self, oldest_pending: int, now: float) -> tuple[int, int]:
        self.request_count += 1
        self._request_nonce, self._request_number = self._new_nonce(), oldest_pending
        self._request_end = self._sent_ranges.end
        self._last_request_at = now
        self.due_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        return oldest_pending, oldest_pending + 1


def read_receipt_keys(outbox: Outbox, key_file: str | Path | None) -> ReceiptKeys:
    """Read the receipt keys of an outbox.

    Raises:
        ConfigError: TL-C84 no key file is configured, TL-C85 it is unusable, TL-C86 its keys belong to other
            publishers.
    """
    publisher = outbox.journal_id
    if key_file is None:
        remedy = f"Set receipt_key_file, created with: towline key LINE_KEY_FILE {publisher}."
        raise ConfigError("TL-C84", f"publisher {publisher}", "receipts need a key", remedy)
    keys = ReceiptKeys.read_file(Path(key_file).expanduser())
    if not keys.has_key_for(publisher):
        problem, remedy = f"it holds keys of other publishers, and this one is {publisher}", "Create one: towline key"
        raise ConfigError("TL-C86", str(key_file), problem, f"{remedy} LINE_KEY_FILE {publisher}")
    return keys
