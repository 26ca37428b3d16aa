"""What became of a published message: stages that can be waited for, asked, or reported by a callback."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from towline.publisher.lifecycle import Lifecycle
from towline.publisher.log import LOG

__all__ = ["Callback", "Completion", "PendingMessage", "Receipt", "call_all", "guarded", "settle"]

T = TypeVar("T")
#: What is to be called, once no lock is held, for a stage that was settled.
Callback: TypeAlias = Callable[[], object]

#: Bytes of a row's other columns, and of a pair beside its text.
_ROW_BYTES, _PAIR_BYTES = 64, 16


class Completion(Generic[T]):
    """Something that happens once, or fails once; like `concurrent.futures.Future`, and lighter.

    Args:
        life: Of the publisher.
    """

    __slots__ = ("__weakref__", "_callbacks", "_done", "_failure", "_life", "_value")

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._done = False
        self._value: T | None = None
        self._failure: BaseException | None = None
        self._callbacks: list[Callable[[Completion[T]], None]] = []

    def done(self) -> bool:
        """Whether it has happened, or failed."""
        return self._done

    @property
    def _reached(self) -> bool:
        return self._done and self._failure is None

    def result(self, timeout: float | None = None) -> T:
        """Wait until it has happened.

        Args:
            timeout: Seconds; None for ever.

        Raises:
            TimeoutError: Not within `timeout` seconds; it may still happen.
            TowlineError: It never will: TL-O08 in a process that has inherited the publisher, TL-O10 on a thread of
                the publisher's own.
        """
        if not self._done:
            self._wait(timeout)
        if self._failure is not None:
            raise self._failure
        return self._value  # type: ignore[return-value] # set before `_done`

    def _wait(self, timeout: float | None) -> None:
        self._life.may_wait()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._life.changed:
            while not self._done:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"not within {timeout:g} s; it is on disk and may still happen")
                self._life.changed.wait(left)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does; return why it failed, or None."""
        if not self._done:
            self._wait(timeout)
        return self._failure

    def add_done_callback(self, call: Callable[[Completion[T]], None]) -> None:
        """Call with this stage once it is done, on a thread of the publisher's; at once if it is."""
        self._life.check()
        with self._life.changed:
            if not self._done:
                self._callbacks.append(call)
                self._life.kept.add(self)
                return
        call(self)

    def _settle(self, value: T | None = None, failure: BaseException | None = None) -> list[Callback]:
        """Note the outcome with the condition held; the caller notifies, and calls what this returns, without it."""
        if self._done:
            return []
        self._value, self._failure, self._done = value, failure, True
        callbacks, self._callbacks = self._callbacks, []
        self._life.kept.discard(self)
        return [partial(call, self) for call in callbacks]


class Receipt:
    """A published message.

    Attributes:
        topic: Where it goes.
        on_disk: Done when it is durable; its result is the message's number in the outbox.
        at_broker: Done when the broker has it (QoS 0: when it was sent). Fails when the broker refused it for good, or
            when it expired.
        end_to_end: Done when the gateway has said that it is in Kafka, committed: where its route leads, in the
            dead-letter topic, or left out by a ``where``. Fails when the message expires or is refused before that,
            and at once for a publisher without receipts.
    """

    __slots__ = ("at_broker", "end_to_end", "on_disk", "topic")

    def __init__(self, topic: str, life: Lifecycle, end_to_end: Completion[None] | None) -> None:
        self.topic = topic
        self.on_disk: Completion[int] = Completion(life)
        self.at_broker: Completion[None] = Completion(life)
        self.end_to_end: Completion[None] = end_to_end or Completion(life)

    @property
    def number(self) -> int:
        """The message's number in the outbox, which names it for ever together with `Publisher.journal_id`; waits."""
        return self.on_disk.result()

    def __repr__(self) -> str:
        stages = (("end to end", self.end_to_end), ("at broker", self.at_broker), ("on disk", self.on_disk))
        state = next((name for name, stage in stages if stage._reached), "queued")  # noqa: SLF001 - ours
        return f"Receipt({self.topic!r}, {state})"


@dataclass(slots=True, eq=False)
class PendingMessage:
    """What `publish` was given, on its way to the disk.

    Attributes:
        fields: The columns of its row.
        receipt: What the caller holds.
    """

    fields: Mapping[str, Any]
    receipt: Receipt

    def fail(self, failure: BaseException) -> None:
        """Nothing comes of it; with the condition held."""
        for stage in (self.receipt.on_disk, self.receipt.at_broker, self.receipt.end_to_end):
            settle(stage, failure=failure)

    @property
    def size(self) -> int:
        """Bytes that it takes on disk, about."""
        users = self.fields["user_properties"] or ()
        size = len(self.fields["payload"]) + len(self.fields["topic"]) + _ROW_BYTES
        return size + sum(len(pair["key"]) + len(pair["value"]) + _PAIR_BYTES for pair in users)


def settle(stage: Completion[Any], value: object = None, failure: BaseException | None = None) -> list[Callback]:
    """Note the outcome of a stage with the condition held; what is to be called without it."""
    return stage._settle(value, failure)  # noqa: SLF001 - ours


def call_all(callbacks: Iterable[Callback]) -> None:
    """Call back; without the condition held."""
    for call in callbacks:
        guarded(call)


def guarded(call: Callable[[], object]) -> None:
    """Call something of the user's, which must not end the delivery."""
    try:
        call()
    except Exception:
        logging.getLogger(LOG).exception("a callback failed")
