"""The text of a receipt: what a gateway tells a publisher, as JSON in a message of its own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Self

from towline.delivery.receipts.keys import ReceiptKeys

__all__ = ["PREFIX", "ReceiptPayload", "receipt_topic"]

#: Where receipts go: this, a slash, and the publisher's id.
PREFIX: Final = "towline/receipts"
#: A receipt names so many ranges at most; what is left out is sent again, and dropped.
_MOST_RANGES: Final = 64
#: A longer one is none of ours.
_LONGEST: Final = 16 << 10
#: The end of a receipt with codes: they are about all before it.
_CODES: Final = re.compile(rb',"codes":\["([0-9a-f]{32}(?:","[0-9a-f]{32}){0,15})"\]\}\Z')


def receipt_topic(prefix: str, publisher: str) -> str:
    """Where the receipts of a publisher go."""
    return f"{prefix}/{publisher}"


@dataclass(frozen=True, slots=True)
class ReceiptPayload:
    """What a gateway tells a publisher.

    Attributes:
        publisher: Its id.
        epoch: Of the numbers.
        watermark: Every number below is in Kafka, committed, or was given up by the publisher; only grows in an epoch.
        gateway: Who says it, for people.
        asked: Nonce of the question this answers; "" for none.
        journaled: Ranges of numbers that are on the gateway's disk, or further. With an answer: what the publisher had
            sent before it asked and is in none of them has to be sent again.
        fresh: The gateway has just come, and may have missed something: ask.
        openings: First number and name of each opening of the publisher's journal that gave out the numbers from there
            on, as the gateway received them.
    """

    publisher: str
    epoch: int
    watermark: int
    gateway: str = ""
    asked: str = ""
    journaled: tuple[tuple[int, int], ...] = ()
    fresh: bool = False
    openings: tuple[tuple[int, str], ...] = ()

    def encode(self, keys: ReceiptKeys) -> bytes:
        """As the payload of a message, with a code for each key."""
        fields: dict[str, Any] = {"publisher": self.publisher, "epoch": self.epoch, "watermark": self.watermark}
        fields["gateway"] = self.gateway
        if self.asked:
            fields["asked"] = self.asked
        if self.asked or self.journaled:
            fields["journaled"] = self.journaled[:_MOST_RANGES]
        if self.fresh:
            fields["fresh"] = True
        fields["openings"] = self.openings
        text = json.dumps(fields, separators=(",", ":")).encode()
        codes = keys.codes(self.publisher, _RECEIPT, text[:-1])
        return text[:-1] + b',"codes":' + json.dumps(codes, separators=(",", ":")).encode() + b"}"

    @classmethod
    def decode(cls, payload: bytes) -> Self | None:
        """From a payload; None for one that is no receipt. It says nothing of who wrote it: `was_written_by`."""
        try:
            fields: Any = json.loads(payload) if len(payload) <= _LONGEST else None
            receipt = cls(
                fields["publisher"],
                fields["epoch"],
                fields["watermark"],
                fields.get("gateway", ""),
                fields.get("asked", ""),
                tuple((start, end) for start, end in fields.get("journaled", ())),
                fields.get("fresh", False) is True,
                tuple((start, name) for start, name in fields["openings"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        numbers = [receipt.epoch, receipt.watermark, *(n for pair in receipt.journaled for n in pair)]
        numbers += [start for start, _ in receipt.openings]
        texts = [receipt.publisher, receipt.gateway, receipt.asked, *(name for _, name in receipt.openings)]
        sound = all(type(n) is int and n >= 0 for n in numbers) and all(isinstance(text, str) for text in texts)
        return receipt if sound else None

    @staticmethod
    def was_written_by(keys: ReceiptKeys, publisher: str, payload: bytes) -> bool:
        """Whether a gateway with one of the keys wrote this payload for a publisher."""
        match = _CODES.search(payload) if len(payload) <= _LONGEST else None
        if match is None:
            return False
        codes = match[1].decode("ascii").split('","')
        return keys.genuine(publisher, codes, _RECEIPT, payload[: match.start()])


_RECEIPT: Final = b"towline receipt\0"
