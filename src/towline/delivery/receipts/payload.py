"""What a receipt says: the text in which a gateway tells a publisher, as JSON in a message of its own; and openings."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from towline.delivery.receipts.mark import ReceiptKeys

#: Where receipts go: this, a slash, and the publisher's id.
PREFIX: Final = "towline/receipts"
#: A receipt names so many ranges at most; what is left out is sent again, and dropped.
_MOST_RANGES: Final = 64
#: Openings whose numbers all have their receipt are kept for repeats that come late; so many in all, at least.
_KEPT_OPENINGS: Final = 8
#: At most, as they stand in every note and receipt.
_MOST_OPENINGS: Final = 128
#: A longer one is none of ours.
_LONGEST: Final = 16 << 10
#: The end of a receipt with codes: they are about all before it.
_CODES: Final = re.compile(rb',"codes":\["([0-9a-f]{32}(?:","[0-9a-f]{32}){0,15})"\]\}\Z')


def receipt_topic(prefix: str, publisher: str) -> str:
    """Where the receipts of a publisher go."""
    return f"{prefix}/{publisher}"


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True))
class ReceiptPayload:
    """What a gateway tells a publisher.

    Attributes:
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
    epoch: NonNegativeInt
    watermark: NonNegativeInt
    gateway: str = ""
    asked: str = ""
    journaled: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    fresh: bool = False
    openings: tuple[tuple[NonNegativeInt, str], ...] = ()

    def encode(self, keys: ReceiptKeys) -> bytes:
        """As the payload of a message, with a code for each key."""
        text = _JSON.dump_json(replace(self, journaled=self.journaled[:_MOST_RANGES]), exclude_defaults=True)[:-1]
        codes = json.dumps(keys.codes(self.publisher, _RECEIPT, text), separators=(",", ":"))
        return text + f',"codes":{codes}}}'.encode()

    @staticmethod
    def decode(payload: bytes) -> ReceiptPayload | None:
        """From a payload; None for one that is no receipt. It says nothing of who wrote it: `was_written_by`."""
        try:
            return _JSON.validate_json(payload) if len(payload) <= _LONGEST else None
        except ValidationError:
            return None

    @staticmethod
    def was_written_by(keys: ReceiptKeys, publisher: str, payload: bytes) -> bool:
        """Whether a gateway with one of the keys wrote this payload for a publisher."""
        match = _CODES.search(payload) if len(payload) <= _LONGEST else None
        if match is None:
            return False
        codes = match[1].decode("ascii").split('","')
        return keys.genuine(publisher, codes, _RECEIPT, payload[: match.start()])


_JSON: Final = TypeAdapter(ReceiptPayload)
_RECEIPT: Final = b"towline receipt\0"


class Openings:
    """Which opening of a publisher's journal gave out each of its numbers: it tells a number from that of a copy.

    A publisher whose directory was restored from an older copy gives out numbers anew. Each opening of a journal has a
    name of its own [I14], so the same number under another name is another message. Steps are first number and name;
    each holds up to the next, and the last one for ever. Of a number that was never received they mean nothing.

    Args:
        steps: In order; below the first, it is not known any more.
    """

    def __init__(self, steps: Iterable[tuple[int, str]] = ()) -> None:
        self._steps = [(start, name) for start, name in steps]

    def steps(self) -> tuple[tuple[int, str], ...]:
        """All of them, as JSON holds them."""
        return tuple(self._steps)

    def of(self, number: int) -> str | None:
        """The opening of a number; None where it is not known."""
        at = _step(self._steps, number)
        return self._steps[at][1] if at >= 0 else None

    def put(self, number: int, name: str, *, newest: bool, low: int) -> bool:
        """Note which opening gave out a number that was received now, perhaps the `newest`; False for no room.

        Of steps below `low`, whose numbers all have their receipt, only some are kept.
        """
        at = _step(self._steps, number)
        if at == len(self._steps) - 1 and at >= 0 and self._steps[at][1] == name:
            return True  # in order, as nearly always
        steps = [step for step in self._steps[: at + 1] if step[0] < number] + [(number, name)]
        if not newest:
            after = self._steps[at + 1 :]
            if at >= 0 and (not after or after[0][0] > number + 1):
                steps.append((number + 1, self._steps[at][1]))
            steps += after
        steps = [step for i, step in enumerate(steps) if not i or step[1] != steps[i - 1][1]]
        while len(steps) > _KEPT_OPENINGS and steps[1][0] <= low:
            del steps[0]
        if len(steps) > _MOST_OPENINGS:
            return False
        self._steps = steps
        return True


def _step(steps: Sequence[tuple[int, str]], number: int) -> int:
    """The place of the step that holds for a number; -1 for none."""
    return bisect_right(steps, number, key=lambda step: step[0]) - 1


def same_messages(
    steps: Sequence[tuple[int, str]], ranges: Iterable[tuple[int, int]], opening_of: Callable[[int], str]
) -> bool:
    """Whether the numbers that a gateway has, with its steps, are the messages that a publisher has under them.

    `opening_of` is the publisher's: the numbers of an opening have no others between them.
    """
    for start, end in ranges:
        at = start
        while at < end:
            step = _step(steps, at)
            if step < 0:
                return False  # forgotten, because a publisher said long ago that it has the receipts
            stop = min(end, steps[step + 1][0]) if step + 1 < len(steps) else end
            name = steps[step][1]
            if not name == opening_of(at) == opening_of(stop - 1):
                return False
            at = stop
    return True
