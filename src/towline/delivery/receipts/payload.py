"""Receipt payload: JSON message of a gateway to a publisher, and incarnations that assigned a publisher's numbers."""

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

#: Topic of a receipt: this, a slash, and the publisher's id.
TOPIC_PREFIX: Final = "towline/receipts"
#: Most ranges in a receipt; messages of further ranges are sent again, and deduplicated.
_MAX_RANGES: Final = 64
#: Incarnations whose numbers all have their receipt are kept for late repeats, at least so many in all.
_MIN_INCARNATIONS: Final = 8
#: Most incarnations in a note or receipt.
_MAX_INCARNATIONS: Final = 128
#: A longer payload is no receipt.
_MAX_PAYLOAD_BYTES: Final = 16 << 10
#: End of a receipt with codes, which cover all bytes before it.
_CODES_PATTERN: Final = re.compile(rb',"codes":\["([0-9a-f]{32}(?:","[0-9a-f]{32}){0,15})"\]\}\Z')


def receipt_topic(prefix: str, publisher: str) -> str:
    """Return the topic of a publisher's receipts."""
    return f"{prefix}/{publisher}"


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True))
class ReceiptPayload:
    """Receipt of a gateway for a publisher.

    Attributes:
        publisher: Id of the publisher.
        epoch: Epoch of the numbers.
        watermark: Every number below is in Kafka, committed, or was dropped by the publisher; only grows in an epoch.
        nonces: Nonces of the questions this answers; "" for none.
        journaled: Ranges of numbers that are on the gateway's disk, or in Kafka. In an answer: the publisher must
            resend numbers that it sent before the question and that are in none of them.
        restarted: The gateway has restarted, and may have missed messages: the publisher should ask.
        incarnations: First number and incarnation of each range of received numbers, of the publisher's journal.
    """

    publisher: str
    epoch: NonNegativeInt
    watermark: NonNegativeInt
    nonces: str = ""
    journaled: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    restarted: bool = False
    incarnations: tuple[tuple[NonNegativeInt, str], ...] = ()

    def encode(self, keys: ReceiptKeys) -> bytes:
        """Return the payload of a message, with a code for each key."""
        text = _ADAPTER.dump_json(replace(self, journaled=self.journaled[:_MAX_RANGES]), exclude_defaults=True)[:-1]
        codes = json.dumps(keys.compute_codes(self.publisher, _SIGNED_PREFIX, text), separators=(",", ":"))
        return text + f',"codes":{codes}}}'.encode()

    @staticmethod
    def decode(payload: bytes) -> ReceiptPayload | None:
        """Return the receipt in a payload, None if it is none. It is not authenticated: see `verify_payload`."""
        try:
            return _ADAPTER.validate_json(payload) if len(payload) <= _MAX_PAYLOAD_BYTES else None
        except ValidationError:
            return None

    @staticmethod
    def verify_payload(keys: ReceiptKeys, publisher: str, payload: bytes) -> bool:
        """Return whether a gateway with one of the keys wrote this payload for a publisher."""
        match = _CODES_PATTERN.search(payload) if len(payload) <= _MAX_PAYLOAD_BYTES else None
        if match is None:
            return False
        codes = match[1].decode("ascii").split('","')
        return keys.verify_codes(publisher, codes, _SIGNED_PREFIX, payload[: match.start()])


_ADAPTER: Final = TypeAdapter(ReceiptPayload)
_SIGNED_PREFIX: Final = b"towline receipt\0"


class IncarnationMap:
    """Map from a publisher's numbers to the incarnation of its journal that assigned them.

    A publisher whose directory was restored from an older copy assigns numbers again. Each opening of a journal is an
    incarnation [I14], so the same number with another incarnation is another message. A step is a first number and an
    incarnation, and holds up to the next step. For numbers that were never received a step has no meaning.

    Args:
        steps: Steps in order; numbers below the first one are unknown.
    """

    def __init__(self, steps: Iterable[tuple[int, str]] = ()) -> None:
        self._steps = [(start, name) for start, name in steps]

    def steps(self) -> tuple[tuple[int, str], ...]:
        """Return all steps, as JSON holds them."""
        return tuple(self._steps)

    def incarnation_of(self, number: int) -> str | None:
        """Return the incarnation of a number; None if it is unknown."""
        index = _step_index(self._steps, number)
        return self._steps[index][1] if index >= 0 else None

    def record(self, number: int, incarnation: str, *, is_newest: bool, low: int) -> bool:
        """Record the incarnation of a received number, perhaps the newest one; return False if the map is full.

        Of steps below `low`, whose numbers all have their receipt, only some are retained.
        """
        index = _step_index(self._steps, number)
        if index == len(self._steps) - 1 and index >= 0 and self._steps[index][1] == incarnation:
            return True  # in order, the usual case
        steps = [step for step in self._steps[: index + 1] if step[0] < number] + [(number, incarnation)]
        if not is_newest:
            later_steps = self._steps[index + 1 :]
            if index >= 0 and (not later_steps or later_steps[0][0] > number + 1):
                steps.append((number + 1, self._steps[index][1]))
            steps += later_steps
        steps = [step for i, step in enumerate(steps) if not i or step[1] != steps[i - 1][1]]
        while len(steps) > _MIN_INCARNATIONS and steps[1][0] <= low:
            del steps[0]
        if len(steps) > _MAX_INCARNATIONS:
            return False
        self._steps = steps
        return True


def _step_index(steps: Sequence[tuple[int, str]], number: int) -> int:
    """Return the index of the step that holds for a number; -1 for none."""
    return bisect_right(steps, number, key=lambda step: step[0]) - 1


def are_same_messages(
    steps: Sequence[tuple[int, str]], ranges: Iterable[tuple[int, int]], incarnation_of: Callable[[int], str]
) -> bool:
    """Return whether the gateway's numbers, by its steps, are the publisher's messages with these numbers.

    `incarnation_of` is the publisher's: the numbers of an incarnation are contiguous.
    """
    for start, end in ranges:
        number = start
        while number < end:
            step_index = _step_index(steps, number)
            if step_index < 0:
                return False  # forgotten, because the publisher once reported that it has the receipts
            step_end = min(end, steps[step_index + 1][0]) if step_index + 1 < len(steps) else end
            incarnation = steps[step_index][1]
            if not incarnation == incarnation_of(number) == incarnation_of(step_end - 1):
                return False
            number = step_end
    return True
