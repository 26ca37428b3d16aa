"""End-to-end receipts on the wire: the marks of a message and the text of a receipt (docs/receipts.md).

    towline-id   who publishes, `NAME`
    towline-n    EPOCH.NUMBER.LOW, decimal; the publisher asks for nothing below LOW any more; ?NONCE asks for an answer

A publisher's numbers grow by one a message; a new epoch begins them anew. Both properties, or the message has no mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

__all__ = ["ID_KEY", "NAME", "NUMBER_KEY", "PREFIX", "Mark", "Receipt", "mark_of", "receipt_topic", "unmarked"]

ID_KEY: Final = "towline-id"
NUMBER_KEY: Final = "towline-n"
#: Where receipts go: this, a slash, and the publisher's id.
PREFIX: Final = "towline/receipts"
#: Ids become part of a topic: no slash, no wildcard, nothing to escape.
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"

_NAME: Final = re.compile(NAME)
_NUMBER: Final = re.compile(r"([0-9]{1,10})\.([0-9]{1,18})\.([0-9]{1,18})(?:\?([0-9a-f]{1,16}))?\Z")
#: A receipt names so many ranges at most; what is left out is sent again, and dropped.
_MOST_RANGES: Final = 64
#: A longer one is none of ours.
_LONGEST: Final = 16 << 10


class Mark(NamedTuple):
    """What a publisher wrote on a message.

    Attributes:
        publisher: Its id.
        epoch: Grows when numbers begin anew.
        number: Names the message for ever, with publisher and epoch.
        low: Every number below has its receipt, or was given up.
        nonce: The publisher wants an answer that carries this; "" for none.
    """

    publisher: str
    epoch: int
    number: int
    low: int
    nonce: str = ""

    def properties(self) -> list[tuple[str, str]]:
        """As user properties."""
        asked = f"?{self.nonce}" if self.nonce else ""
        return [(ID_KEY, self.publisher), (NUMBER_KEY, f"{self.epoch}.{self.number}.{self.low}{asked}")]


def mark_of(properties: Sequence[tuple[str, str]]) -> Mark | None:
    """The mark among the user properties of a message; None for none, or one that says nothing sensible."""
    publisher = number = None
    for key, value in properties:
        if key == NUMBER_KEY:
            number = value
        elif key == ID_KEY:
            publisher = value
    if publisher is None or number is None:
        return None
    found = _NUMBER.match(number)
    if found is None or not _NAME.match(publisher):
        return None
    mark = Mark(publisher, int(found[1]), int(found[2]), int(found[3]), found[4] or "")
    return mark if mark.low <= mark.number else None


def unmarked(properties: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The user properties without the mark, which is between a publisher and its gateway alone."""
    return [pair for pair in properties if pair[0] not in (ID_KEY, NUMBER_KEY)]


def receipt_topic(prefix: str, publisher: str) -> str:
    """Where the receipts of a publisher go."""
    return f"{prefix}/{publisher}"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a gateway tells a publisher.

    Attributes:
        publisher: Its id.
        epoch: Of the numbers.
        watermark: Every number below is in Kafka, committed, or was given up by the publisher; only grows in an epoch.
        gateway: Who says it, for people.
        asked: Nonce of the question this answers; "" for none.
        journaled: With an answer: ranges of numbers that are on the gateway's disk, or further. What the publisher had
            sent before it asked and is in none of them has to be sent again.
        fresh: The gateway has just come, and may have missed something: ask.
    """

    publisher: str
    epoch: int
    watermark: int
    gateway: str = ""
    asked: str = ""
    journaled: tuple[tuple[int, int], ...] = ()
    fresh: bool = False

    def encode(self) -> bytes:
        """As the payload of a message."""
        told: dict[str, Any] = {"publisher": self.publisher, "epoch": self.epoch, "watermark": self.watermark}
        told["gateway"] = self.gateway
        if self.asked:
            told |= {"asked": self.asked, "journaled": self.journaled[:_MOST_RANGES]}
        if self.fresh:
            told["fresh"] = True
        return json.dumps(told, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Self | None:
        """From a payload; None for one that is no receipt."""
        try:
            told: Any = json.loads(payload) if len(payload) <= _LONGEST else None
            made = cls(
                told["publisher"],
                told["epoch"],
                told["watermark"],
                told.get("gateway", ""),
                told.get("asked", ""),
                tuple((start, end) for start, end in told.get("journaled", ())),
                told.get("fresh", False) is True,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        numbers = (made.epoch, made.watermark, *(n for pair in made.journaled for n in pair))
        texts = (made.publisher, made.gateway, made.asked)
        sound = all(type(n) is int and n >= 0 for n in numbers) and all(isinstance(text, str) for text in texts)
        return made if sound else None
