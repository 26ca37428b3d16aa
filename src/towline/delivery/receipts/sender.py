"""Sends receipts through the gateway's own session; what there is to send stands in the ledger alone.

A receipt needs no place on disk: it says what the ledger knows, and is said again to everybody when the process is new
or the broker has lost our session, and to one publisher whenever it asks. Only the watermark is made durable first,
so that it never goes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from towline.delivery.receipts.ledger import Ledger
from towline.delivery.receipts.payload import ReceiptPayload, receipt_topic
from towline.errors import JournalFull
from towline.journal import Journal
from towline.mqtt.events import Acknowledged, Event, Publish, PublishMany, Token
from towline.mqtt.message import OutboundMessage
from towline.mqtt.reasons import reason_words
from towline.schema import NO_ROWS
from towline.timing import Stamp

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

    Args:
        prefix: Where receipts go.
        ledger: What there is to say.
        inbox: Keeps the watermarks.
        handle: Gives the session an event.
        log: Takes ``warning(event, **facts)``.
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
        """Send what is due.

        Raises:
            JournalFailed: TL-J04 [I6].
        """
        if self.ledger.forged and not self._warned:
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
                self._inbox.append(NO_ROWS, held={}, released=(), notes=notes)
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
        ledger = self.ledger
        return {
            "publishers": len(ledger),
            "sent": self.sent,
            "deferred": ledger.deferred,
            "unknown": ledger.unknown,
            "foreign": ledger.foreign,
            "forged": ledger.forged,
        }
