"""Which messages wait for their receipt, and when the gateway is asked: no socket, no clock, and of the disk a note.

A message that the broker took and that has no receipt is *owed*. Nothing is sent again on suspicion: the oldest that is
owed is sent once more with a question, and only what the answer does not name is sent again. The broker hands a gateway
its messages in order, so what was sent before the question and is not in the answer is lost.

    online again, or the gateway is new     ask at once
    no progress for a while                 ask; the pause doubles as long as nothing moves
    an answer                               send again what it does not name

A directory that was restored from an older copy gives its numbers to other messages. A receipt says which opening of
the journal gave out each number that the gateway has [I14]; where that is another, nothing is settled, and the messages
take a new epoch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from towline.delivery.receipts.mark import FARTHEST, MOST_EPOCHS, Content, Mark, ReceiptKeys
from towline.delivery.receipts.payload import ReceiptPayload, same_messages
from towline.errors import ConfigError
from towline.journal import Outbox
from towline.journal.ranges import Ranges

#: Keeps the rows of messages that have no receipt.
CONSUMER: Final = "receipts"

#: Longest pause between two questions, in seconds.
_LONGEST: Final = 600.0
#: Shortest, whatever happens.
_SHORTEST: Final = 1.0


class Restored(Exception):
    """The gateway has other messages under the numbers of this outbox: the directory is an older copy."""


class Awaited:
    """The messages of an outbox on their way to Kafka; it goes on where the outbox's note says.

    What the outbox had sent before receipts were asked for needs none.

    Args:
        outbox: It adds to `done` what the broker has, or will not have.
        patience_s: Seconds without progress before the gateway is asked.
        nonce: Makes names for questions.

    Attributes:
        settled: What has its receipt or was given up; only this object adds to it.
        sent_again: Messages that were sent again because an answer did not name them.
        not_believed: Receipts that no gateway with our key has written.
    """

    def __init__(
        self,
        outbox: Outbox,
        patience_s: float,
        keys: ReceiptKeys,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        note = outbox.notes.get(CONSUMER) or {"epoch": 1, "above": []}
        done = outbox.done
        self.epoch: int = note["epoch"]
        self.settled = Ranges(done.watermark, done.above())
        if CONSUMER in outbox.consumers:
            self.settled = Ranges(outbox.consumers[CONSUMER], note["above"])
        done.add(0, self.settled.watermark)  # what has its receipt need not be sent, also if the broker never said so
        self.asked = 0
        self.sent_again = 0
        self.not_believed = 0
        self._outbox = outbox
        self._done = done
        self._patience = max(patience_s, _SHORTEST)
        self._nonce = nonce
        self._keys = keys
        #: when the gateway is asked, and the pause after that; None while nothing is owed
        self._at: float | None = None
        self._pause = self._patience
        self._asked_at = float("-inf")
        #: shortest pause before a gateway that says it is new is asked: somebody may repeat what it said
        self._heed = _SHORTEST
        #: the question that is open: its name, the message that carries it, and the end of what was sent before it
        self._question = ""
        self._carrier = -1
        self._horizon = 0
        self.keep(None)

    def keep(self, oldest: int | None) -> None:
        """Note it, and let go of the rows that are settled, but for those from `oldest` on, still on their way."""
        settled = self.settled
        upto = settled.watermark if oldest is None else min(oldest, settled.watermark)
        above = [[upto, settled.watermark]] if upto < settled.watermark else []
        note = {"epoch": self.epoch, "above": [*above, *settled.above()]}
        self._outbox.commit(CONSUMER, min(upto, self._outbox.end), notes={CONSUMER: note})

    def _opening_of(self, number: int) -> str:
        """The opening of the outbox's journal that gave a number out."""
        return self._outbox.incarnation_of(number + 1)

    def mark(self, number: int, content: Content) -> list[tuple[str, str]]:
        """The user properties of a message."""
        nonce = self._question if number == self._carrier else ""
        low, opening = min(self.settled.watermark, number), self._opening_of(number)
        mark = Mark(self._outbox.journal_id, self.epoch, number, low, nonce, opening)
        return mark.signed(self._keys, content).properties()

    def waits(self, number: int) -> bool:
        """Whether a message has no receipt and was not given up."""
        return number not in self.settled

    def owed(self, below: int) -> list[tuple[int, int]]:
        """Ranges of numbers that the broker took and that have no receipt."""
        taken = ((start, min(end, below)) for start, end in self._done.ranges)
        return [piece for start, end in taken for piece in self.settled.missing(start, end)]

    # -- what happens --

    def online(self, now: float) -> None:
        """The broker is there: what it had may be gone."""
        self._keys.refresh()
        self._at = now
        self._question = ""

    def give_up(self, number: int) -> None:
        """A message is not sent any more: refused, or expired."""
        self.settled.add(number)

    def believed(self, payload: bytes | None) -> ReceiptPayload | None:
        """The receipt in a payload; None for one that anybody may have written, or was not taken in whole."""
        if payload is None:
            return None
        if not ReceiptPayload.was_written_by(self._keys, self._outbox.journal_id, payload):
            self.not_believed += 1
            return None
        return ReceiptPayload.decode(payload)

    def take(self, receipt: ReceiptPayload, now: float) -> list[tuple[int, int]]:
        """Take a receipt at a time of `time.monotonic`; return the ranges to be sent again.

        Raises:
            Restored: The numbers given out since this copy was made are another message's. The messages have a new
                epoch, as if they were numbered anew: the gateway takes them for others, once that is kept and synced.
        """
        end, epochs = self._outbox.end, range(self.epoch, self.epoch + MOST_EPOCHS + 1)
        if receipt.publisher != self._outbox.journal_id or receipt.epoch not in epochs:
            return []
        if receipt.watermark > end + FARTHEST:
            return []
        if receipt.epoch > self.epoch or not self._same(receipt, end):
            self.epoch, self._question, self._at = receipt.epoch + 1, "", float("-inf")
            raise Restored
        if receipt.watermark > self.settled.watermark:
            self.settled.add(0, receipt.watermark)
            self._pause, self._heed = self._patience, _SHORTEST
            self._at = now + self._pause
        if receipt.fresh and now - self._asked_at >= self._heed:
            self._at = now
            self._heed = min(2 * self._heed, _LONGEST)
        if not self._question or self._question not in receipt.asked.split():
            return []
        self._question = ""
        return self._lost(receipt, now)

    def _same(self, receipt: ReceiptPayload, end: int) -> bool:
        """Whether the gateway means our messages: all of those that have no receipt, one by one."""
        here = self.settled.watermark
        ranges = [(max(start, here), stop) for start, stop in ((0, receipt.watermark), *receipt.journaled)]
        if any(stop > end for _, stop in ranges):
            return False
        return same_messages(receipt.openings, ranges, self._opening_of)

    def _lost(self, receipt: ReceiptPayload, now: float) -> list[tuple[int, int]]:
        there = Ranges(0, receipt.journaled)
        lost = [piece for start, end in self.owed(self._horizon) for piece in there.missing(start, end)]
        if lost:
            self._pause = self._patience
            self._at = now + self._pause
            self.sent_again += sum(end - start for start, end in lost)
        return lost

    @property
    def awaiting(self) -> int:
        """Messages without a receipt that were not given up."""
        return self._outbox.end - self.settled.count()

    def status(self) -> dict[str, int]:
        """The account of receipts."""
        return {
            "epoch": self.epoch,
            "watermark": self.settled.watermark,
            "awaiting": self.awaiting,
            "asked": self.asked,
            "sent_again": self.sent_again,
            "not_believed": self.not_believed,
        }

    # -- time, while the broker is there --

    @property
    def due(self) -> float | None:
        """When `turn` has something to do; None for not by the clock alone."""
        return self._at

    def turn(self, now: float) -> list[tuple[int, int]]:
        """The message to be sent once more with a question, if it is time for one."""
        owed = self.owed(self._done.end)
        if not owed:
            self._at = None
            self._pause = self._patience
            return []
        if self._at is None:
            self._at = now + self._pause
        if now < self._at:
            return []
        return [self._ask(owed[0][0], now)]

    def _ask(self, oldest: int, now: float) -> tuple[int, int]:
        self.asked += 1
        self._question, self._carrier, self._horizon = self._nonce(), oldest, self._done.end
        self._asked_at = now
        self._at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST)
        return oldest, oldest + 1


def keys_of(outbox: Outbox, file: str | Path | None) -> ReceiptKeys:
    """The keys of an outbox.

    Raises:
        ConfigError: TL-C84 there is no file, TL-C85 the file can't be used, TL-C86 its keys are other publishers'.
    """
    publisher = outbox.journal_id
    if file is None:
        do = f"Give receipt_key_file, made with: towline key LINE_KEY_FILE {publisher}."
        raise ConfigError("TL-C84", f"publisher {publisher}", "receipts need a key", do)
    keys = ReceiptKeys.read(Path(file).expanduser())
    if not keys.speaks_for(publisher):
        what, do = f"it holds keys of other publishers, and this one is {publisher}", "Make one: towline key"
        raise ConfigError("TL-C86", str(file), what, f"{do} LINE_KEY_FILE {publisher}")
    return keys
