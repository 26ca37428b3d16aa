"""Which stage of which message somebody still waits for, and how each is settled.

The condition of the publisher's `Lifecycle` is held in every call; what the calls return is called back without it
(`settling`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TypeAlias

from towline.delivery.outbound import Outcome
from towline.publisher.awaited import Awaited
from towline.publisher.errors import given_up, not_sent, without_receipts
from towline.publisher.lifecycle import Lifecycle
from towline.publisher.receipt import Callback, Completion, PendingMessage, call_all, settle

__all__ = ["Stages", "settling"]

_ByNumber: TypeAlias = MutableMapping[int, Completion[None]]


class Stages:
    """The stages of one publisher's messages.

    Args:
        life: Of the publisher.
        where: The broker, as errors name it.
        awaited: Messages on their way to Kafka; None without receipts.
        end: Of the outbox: messages below are of an earlier life, and nobody holds them.

    Attributes:
        no_end: The one end of all messages where there are no receipts; None where there are.
    """

    def __init__(self, life: Lifecycle, where: str, awaited: Awaited | None, end: int) -> None:
        self._where = where
        self._awaited = awaited
        #: number of a message → its stage at the broker, as long as somebody holds it or has a callback on it
        self._at_broker: _ByNumber = weakref.WeakValueDictionary()
        #: the same for their receipts
        self._end_to_end: _ByNumber = weakref.WeakValueDictionary()
        #: every message below has been entered in `_at_broker`
        self._entered = end
        #: outcomes of messages that the mqtt thread had done before they were entered
        self._early: dict[int, Outcome] = {}
        self.no_end: Completion[None] | None = None
        if awaited is None:
            self.no_end = Completion(life)
            settle(self.no_end, failure=without_receipts(where))

    def stored(self, group: list[PendingMessage], first: int) -> list[Callback]:
        """Messages are durable; `first` is the number of the first."""
        callbacks: list[Callback] = []
        for number, message in enumerate(group, first):
            receipt = message.receipt
            callbacks += settle(receipt.on_disk, number)
            self._at_broker[number] = receipt.at_broker
            if self._awaited is not None:
                self._end_to_end[number] = receipt.end_to_end
                if number in self._awaited.settled:  # the mqtt thread was faster
                    callbacks += _settle(self._end_to_end, number)
            if (early := self._early.pop(number, None)) is not None:
                callbacks += self._done(number, early)
        self._entered = first + len(group)
        return callbacks

    def done(self, outcomes: Iterable[tuple[int, Outcome]]) -> list[Callback]:
        """Messages are not sent any more."""
        callbacks: list[Callback] = []
        for number, outcome in outcomes:
            if number >= self._entered:
                self._early[number] = outcome
            else:
                callbacks += self._done(number, outcome)
        return callbacks

    def _done(self, number: int, outcome: Outcome) -> list[Callback]:
        if outcome is Outcome.DELIVERED:
            return _settle(self._at_broker, number)
        callbacks = _settle(self._at_broker, number, not_sent(self._where, number, outcome))
        if self._awaited is not None and number not in self._awaited.settled:
            self._awaited.give_up(number)
            callbacks += _settle(self._end_to_end, number, given_up(self._where, number, outcome))
        return callbacks

    def arrived(self, numbers: range) -> list[Callback]:
        """Messages have their receipt."""
        held = self._end_to_end
        here = numbers if len(numbers) < len(held) else [number for number in held if number in numbers]
        return [call for number in here for call in _settle(held, number)]

    def abandon(self, failure: BaseException) -> list[Callback]:
        """Nothing comes of what is still waited for."""
        stages = (self._at_broker, self._end_to_end)
        return [call for held in stages for number in list(held) for call in _settle(held, number, failure)]


def _settle(stages: _ByNumber, number: int, failure: BaseException | None = None) -> list[Callback]:
    """Settle the stage of a message, if anybody holds it."""
    stage = stages.pop(number, None)
    return [] if stage is None else settle(stage, failure=failure)


@contextlib.contextmanager
def settling(life: Lifecycle) -> Iterator[list[Callback]]:
    """Hold the condition; at the end notify those who wait and call back what the block has added."""
    callbacks: list[Callback] = []
    with life.changed:
        yield callbacks
        life.changed.notify_all()
    call_all(callbacks)
