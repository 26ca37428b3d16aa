"""What became of a published message: stages that can be waited for, asked, or reported by a callback.

The condition of the publisher's `Lifecycle` guards them all; callbacks run without it (`Lifecycle.settling`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

from towline.delivery.outbound import Outcome
from towline.errors import ConfigError, PublisherError, TowlineError
from towline.publisher.awaited import Awaited
from towline.text import cause, printable
from towline.threads import Condition

T = TypeVar("T")

#: Bytes of a row's other columns, and of a pair beside its text.
_ROW_BYTES, _PAIR_BYTES = 64, 16
#: The application's own logging: a library does not choose where its lines go.
LOG: Final = "towline.publisher"


class Log:
    """Writes there."""

    def info(self, event: str, **facts: object) -> None:
        """Write at level INFO."""
        logging.getLogger(LOG).info("%s%s", event, _facts(facts))

    def warning(self, event: str, **facts: object) -> None:
        """Write at level WARNING."""
        logging.getLogger(LOG).warning("%s%s", event, _facts(facts))


def _facts(facts: Mapping[str, object]) -> str:
    return "".join(f" {name}={printable(str(value))}" for name, value in facts.items())


class Lifecycle:
    """One publisher, from the first message to the end, and the stages of its messages.

    Args:
        directory: Names it in errors.
        where: The broker, as errors name it.
        awaited: Messages on their way to Kafka; None without receipts.
        end: Of the outbox: messages below are of an earlier life, and nobody holds them.

    Attributes:
        changed: Guards everything of the publisher's that its threads share, and is notified of every change.
        kept: Holds the stages that have callbacks, though nobody else may hold them.
        callbacks: Of stages that were settled: called when the condition is released.
        closing: No more messages are taken.
        ended: The threads are gone.
        dead: Why nothing works any more; None while it does.
        threads: Those of the publisher, which must not wait for each other.
        no_end: The one end of all messages where there are no receipts; None where there are.
    """

    def __init__(self, directory: Path, where: str, awaited: Awaited | None, end: int) -> None:
        self.directory = directory
        self.changed = Condition()
        self.kept: set[Completion[Any]] = set()
        self.callbacks: list[Callable[[], object]] = []
        self.closing = False
        self.ended = False
        self.dead: TowlineError | None = None
        self.threads: tuple[threading.Thread, ...] = ()
        self._pid = os.getpid()
        self._where = where
        self._awaited = awaited
        #: number of a message → its stage at the broker, as long as somebody holds it or has a callback on it
        self._at_broker: _ByNumber[int] = weakref.WeakValueDictionary()
        #: the same for their receipts
        self._end_to_end: _ByNumber[None] = weakref.WeakValueDictionary()
        #: every message below has been entered in `_at_broker`
        self._entered = end
        #: outcomes of messages that the mqtt thread had done before they were entered
        self._early: dict[int, tuple[Outcome, int]] = {}
        self.no_end: Completion[None] | None = None
        if awaited is None:
            self.no_end = Completion(self)
            what = "this publisher asks for no receipts"
            self.no_end.settle(failure=ConfigError("TL-C51", where, what, "Open it with receipts=True."))

    @property
    def inherited(self) -> bool:
        """This process is a copy made by ``fork``, without the publisher's threads and with locks as they stood."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Refuse a process that has no publisher, before any lock is touched.

        Raises:
            PublisherError: TL-O08.
        """
        if self.inherited:
            what = f"this publisher belongs to the process that made it (pid {self._pid})"
            do = "Make one, with a directory of its own, after the fork."
            raise PublisherError("TL-O08", str(self.directory), what, do)

    def may_wait(self) -> None:
        """Refuse a wait that nothing would end.

        Raises:
            PublisherError: TL-O08 in another process, TL-O10 on a thread of the publisher's own.
        """
        self.check()
        if threading.current_thread() in self.threads:
            what = "a callback waits on the publisher's own thread for what this thread has to do"
            do = "Publish with wait=False there, and wait on another thread."
            raise PublisherError("TL-O10", str(self.directory), what, do)

    def fail(self, error: BaseException) -> TowlineError:
        """Note, with the condition held, why nothing works any more; returns what others get."""
        if self.dead is None and isinstance(error, TowlineError):
            self.dead = error
        elif self.dead is None:
            what = f"the publisher has ended: unexpected {cause(error)}"
            do = "What is on disk is safe; make a new one, and report the fault in Towline."
            self.dead = PublisherError("TL-O09", str(self.directory), what, do)
            self.dead.__cause__ = error
        return self.dead

    def closed(self) -> PublisherError:
        """The error of a call that comes too late."""
        return PublisherError("TL-O02", str(self.directory), "the publisher is closed", "Make a new one.")

    @property
    def over(self) -> TowlineError | None:
        """Why nothing comes of a wait any more; None while something may."""
        return self.dead or (self.closed() if self.ended else None)

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Hold the condition to settle stages; at the end notify those who wait, and call back without it."""
        with self.changed:
            yield
            callbacks, self.callbacks = self.callbacks, []
            self.changed.notify_all()
        for call in callbacks:
            guarded(call)

    # -- what becomes of messages; the condition is held (`settling`) --

    def stored(self, group: list[PendingMessage], first: int) -> None:
        """Messages are durable; `first` is the number of the first."""
        for number, message in enumerate(group, first):
            receipt = message.receipt
            receipt.on_disk.settle(number)
            self._at_broker[number] = receipt.at_broker
            if self._awaited is not None:
                self._end_to_end[number] = receipt.end_to_end
                if number in self._awaited.settled:  # the mqtt thread was faster
                    _settle(self._end_to_end, number)
            if (early := self._early.pop(number, None)) is not None:
                self._sent(number, *early)
        self._entered = first + len(group)
        if self.dead is not None:  # the mqtt thread has ended meanwhile
            self.abandon(self.dead)

    def sent(self, outcomes: Iterable[tuple[int, Outcome, int]]) -> None:
        """Messages are not sent any more; with the broker's reason codes."""
        for number, outcome, reason in outcomes:
            if number >= self._entered:
                self._early[number] = (outcome, reason)
            else:
                self._sent(number, outcome, reason)

    def _sent(self, number: int, outcome: Outcome, reason: int) -> None:
        if outcome is Outcome.DELIVERED:
            _settle(self._at_broker, number, reason)
            return
        if outcome is Outcome.EXPIRED:
            failure = PublisherError("TL-O05", self._where, f"message {number} expired before it was sent")
        else:
            what, do = f"the broker refused message {number}", "It is kept aside; see the log."
            failure = PublisherError("TL-O04", self._where, what, do)
        _settle(self._at_broker, number, failure=failure)
        if self._awaited is not None and number not in self._awaited.settled:
            self._awaited.give_up(number)
            what = f"message {number} was {outcome.value} before its receipt came; whether it arrived is not known"
            _settle(self._end_to_end, number, failure=PublisherError("TL-O06", self._where, what))

    def arrived(self, numbers: range) -> None:
        """Messages have their receipt."""
        held = self._end_to_end
        for number in numbers if len(numbers) < len(held) else [number for number in held if number in numbers]:
            _settle(held, number)

    def abandon(self, failure: BaseException) -> None:
        """Nothing comes of what is still waited for."""
        stages: tuple[_ByNumber[Any], ...] = (self._at_broker, self._end_to_end)
        for held in stages:
            for number in list(held):
                _settle(held, number, failure=failure)


class Completion(Generic[T]):
    """Something that happens once, or fails once; like `concurrent.futures.Future`, lighter, and awaitable."""

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
        with self._life.changed:
            if not self._life.changed.wait_for(self.done, timeout):
                raise TimeoutError(f"not within {timeout:g} s; it is on disk and may still happen")

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

    def __await__(self) -> Generator[Any, None, T]:
        """Await as `result` waits, as often as you like; cancelling that cancels nothing else."""
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        if not self._done:
            loop, reached = asyncio.get_running_loop(), asyncio.Event()

            def notify(_stage: Completion[T]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(reached.set)

            self.add_done_callback(notify)
            await reached.wait()
        return self.result(0)

    def settle(self, value: T | None = None, failure: BaseException | None = None) -> None:
        """For the publisher alone: note the outcome in `Lifecycle.settling`; a second one changes nothing."""
        if self._done:
            return
        self._value, self._failure, self._done = value, failure, True
        self._life.callbacks += [partial(call, self) for call in self._callbacks]
        self._callbacks = []
        self._life.kept.discard(self)


class Receipt:
    """A published message.

    Attributes:
        on_disk: Done when it is durable; its result is the message's number in the outbox.
        at_broker: Done when the broker has it (QoS 0: when it was sent), with its reason code: 0, or 16 where nobody is
            subscribed to the topic and the broker says so (MQTT 5, QoS 1 and 2). Fails when the broker refused it for
            good, or when it expired.
        end_to_end: Done when the gateway has said that it is in Kafka, committed: where its route leads, in the
            dead-letter topic, or left out by a ``where``. Fails when the message expires or is refused before that,
            and at once for a publisher without receipts.
    """

    __slots__ = ("at_broker", "end_to_end", "on_disk", "topic")

    def __init__(self, topic: str, life: Lifecycle, end_to_end: Completion[None] | None) -> None:
        self.topic = topic
        self.on_disk: Completion[int] = Completion(life)
        self.at_broker: Completion[int] = Completion(life)
        self.end_to_end: Completion[None] = end_to_end or Completion(life)

    @property
    def number(self) -> int:
        """The message's number in the outbox, which names it for ever together with `Publisher.journal_id`; waits."""
        return self.on_disk.result()

    def __repr__(self) -> str:
        stages = (("end to end", self.end_to_end), ("at broker", self.at_broker), ("on disk", self.on_disk))
        state = next((name for name, stage in stages if stage.done() and not stage.exception()), "queued")
        return f"Receipt({self.topic!r}, {state})"


@dataclass(slots=True, eq=False)
class PendingMessage:
    """What `publish` was given, on its way to the disk."""

    fields: Mapping[str, Any]
    receipt: Receipt

    def fail(self, failure: BaseException) -> None:
        """Nothing comes of it; with the condition held."""
        for stage in (self.receipt.on_disk, self.receipt.at_broker, self.receipt.end_to_end):
            stage.settle(failure=failure)

    @property
    def size(self) -> int:
        """Bytes that it takes on disk, about."""
        users = self.fields["user_properties"] or ()
        size = len(self.fields["payload"]) + len(self.fields["topic"]) + _ROW_BYTES
        return size + sum(len(pair["key"]) + len(pair["value"]) + _PAIR_BYTES for pair in users)


def guarded(call: Callable[[], object]) -> None:
    """Call something of the user's, which must not end the delivery."""
    try:
        call()
    except Exception:
        logging.getLogger(LOG).exception("a callback failed")


_ByNumber: TypeAlias = MutableMapping[int, Completion[T]]


def _settle(stages: _ByNumber[T], number: int, value: T | None = None, *, failure: BaseException | None = None) -> None:
    """Settle the stage of a message, if anybody holds it."""
    if (stage := stages.pop(number, None)) is not None:
        stage.settle(value, failure)
