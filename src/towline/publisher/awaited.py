"""Which messages wait for their receipt, and when the gateway is asked: decisions only, no disk, no socket, no clock.

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
    """The messages of one outbox on their way to Kafka.

    Args:
        settled: What has its receipt or was given up; only this object adds to it.
        done: What the broker has, or will not have; the outbox adds to it.
        patience_s: Seconds without progress before the gateway is asked.
        nonce: Makes names for questions.
        opening_of: Number → the opening of the outbox's journal that gave it out.

    Attributes:
        sent_again: Messages that were sent again because an answer did not name them.
        not_believed: Receipts that no gateway with our key has written.
    """

    def __init__(
        self,
        publisher: str,
        epoch: int,
        settled: Ranges,
        done: Ranges,
        patience_s: float,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
        *,
        opening_of: Callable[[int], str],
        keys: ReceiptKeys,
    ) -> None:
        self.publisher = publisher
        self.epoch = epoch
        self.settled = settled
        self.asked = 0
        self.sent_again = 0
        self.not_believed = 0
        self._done = done
        self._patience = max(patience_s, _SHORTEST)
        self._nonce = nonce
        self._opening_of = opening_of
        self._keys = keys
        self._online = False
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

    def mark(self, number: int, content: Content) -> list[tuple[str, str]]:
        """The user properties of a message."""
        nonce = self._question if number == self._carrier else ""
        low, opening = min(self.settled.watermark, number), self._opening_of(number)
        mark = Mark(self.publisher, self.epoch, number, low, nonce, opening)
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
        self._online = True
        self._keys.refresh()
        self._at = now
        self._question = ""

    def offline(self) -> None:
        """The connection is gone."""
        self._online = False

    def give_up(self, number: int) -> None:
        """A message is not sent any more: refused, or expired."""
        self.settled.add(number)

    def believed(self, payload: bytes | None) -> ReceiptPayload | None:
        """The receipt in a payload; None for one that anybody may have written, or was not taken in whole."""
        if payload is None:
            return None
        if not ReceiptPayload.was_written_by(self._keys, self.publisher, payload):
            self.not_believed += 1
            return None
        return ReceiptPayload.decode(payload)

    def take(self, receipt: ReceiptPayload, end: int, now: float) -> list[tuple[int, int]]:
        """Take a receipt at a time of `time.monotonic`, with the outbox's end; return the ranges to be sent again.

        Raises:
            Restored: The numbers given out since this copy was made are another message's; call `begin_again`.
        """
        if receipt.publisher != self.publisher or not self.epoch <= receipt.epoch <= self.epoch + MOST_EPOCHS:
            return []
        if receipt.watermark > end + FARTHEST:
            return []
        if receipt.epoch > self.epoch or not self._same(receipt, end):
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
        self._question, self._carrier = "", -1
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

    def begin_again(self, epoch: int) -> None:
        """Number the messages anew, as it were: the gateway takes those of a new epoch for others."""
        self.epoch = epoch
        self._question = ""
        self._at = float("-inf")

    def status(self, end: int) -> dict[str, int]:
        """The account of receipts; `end` is the outbox's."""
        return {
            "epoch": self.epoch,
            "watermark": self.settled.watermark,
            "awaiting": end - self.settled.count(),
            "asked": self.asked,
            "sent_again": self.sent_again,
            "not_believed": self.not_believed,
        }

    # -- time --

    def due(self) -> float | None:
        """When `turn` has something to do; None for not by the clock alone."""
        return self._at if self._online else None

    def turn(self, now: float) -> list[tuple[int, int]]:
        """The message to be sent once more with a question, if it is time for one."""
        if not self._online:
            return []
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


def awaited_of(outbox: Outbox, patience_s: float, keys: ReceiptKeys) -> Awaited:
    """Go on where the outbox's notes say; what it had sent before receipts were asked for needs none."""
    done = outbox.done
    note = outbox.notes.get(CONSUMER) or {"epoch": 1, "above": []}
    if CONSUMER in outbox.consumers:
        settled = Ranges(outbox.consumers[CONSUMER], note["above"])
    else:
        settled = Ranges(done.watermark, done.above())
    done.add(0, settled.watermark)  # what has its receipt need not be sent, also if the broker never said so
    awaited = Awaited(
        outbox.journal_id,
        note["epoch"],
        settled,
        done,
        patience_s,
        opening_of=lambda number: outbox.incarnation_of(number + 1),
        keys=keys,
    )
    keep(outbox, awaited, None)
    return awaited


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


def keep(outbox: Outbox, awaited: Awaited, oldest: int | None) -> None:
    """Let go of the rows that are settled, but for those from `oldest` on, which are still on their way."""
    settled = awaited.settled
    upto = settled.watermark if oldest is None else min(oldest, settled.watermark)
    above = [[upto, settled.watermark]] if upto < settled.watermark else []
    note = {"epoch": awaited.epoch, "above": [*above, *settled.above()]}
    outbox.commit(CONSUMER, min(upto, outbox.end), notes={CONSUMER: note})
