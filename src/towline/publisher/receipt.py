"""What becomes of a published message: the queue before the disk, and stages that can be waited for, or call back.

The condition of the publisher's `Lifecycle` guards them all; callbacks run without it (`Lifecycle.settling`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

from towline.delivery.outbound import Outcome
from towline.delivery.outrows import arrived, rows_of
from towline.errors import ConfigError, JournalFull, PublisherError, TowlineError
from towline.journal import Outbox, largest_frame
from towline.publisher.awaited import Awaited
from towline.text import cause, printable
from towline.threads import Condition
from towline.timing import Stamp

T = TypeVar("T")

#: Messages stored in one frame, at most.
_GROUP: Final = 10_000
#: Messages that may wait for the disk thread, before `publish` waits; and their bytes, of more than one message.
_QUEUED: Final = 20_000
_QUEUED_BYTES: Final = 64 << 20
#: How often a full disk or outbox is tried again, in seconds.
_ROOM_RETRY: Final = 0.2
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


log: Final = Log()


def _facts(facts: Mapping[str, object]) -> str:
    return "".join(f" {name}={printable(str(value))}" for name, value in facts.items())


class Lifecycle:
    """One publisher's messages, from `publish` to the end: the queue before the disk, and the stages behind it.

    Everything is bounded: messages and bytes that wait, and bytes of a frame, so that no message is in the way of
    another.

    Args:
        directory: Names it in errors.
        where: The broker, as errors name it.
        awaited: Messages on their way to Kafka; None without receipts.
        outbox: Stores them; what is in it now is of an earlier life, and nobody holds it.
        refuses: Refuse what finds the outbox full, instead of waiting.
        max_bytes: Of the outbox; None for no limit but the disk.

    Attributes:
        changed: Guards everything of the publisher's that its threads share, and is notified of every change.
        kept: Holds the stages that have callbacks, though nobody else may hold them.
        callbacks: Of stages that were settled: called when the condition is released.
        closing: No more messages are taken.
        ended: The threads are gone.
        dead: Why nothing works any more; None while it does.
        full_since: Why nothing is stored; None while there is room.
        threads: Those of the publisher, which must not wait for each other.
        wake: Lets the mqtt thread look at what has changed.
        no_end: The one end of all messages where there are no receipts; None where there are.
    """

    def __init__(
        self,
        directory: Path,
        where: str,
        awaited: Awaited | None,
        outbox: Outbox,
        *,
        refuses: bool,
        max_bytes: int | None,
    ) -> None:
        self.directory = directory
        self.changed = Condition()
        self.kept: set[Completion[Any]] = set()
        self.callbacks: list[Callable[[], object]] = []
        self.closing = False
        self.ended = False
        self.dead: TowlineError | None = None
        self.full_since: JournalFull | None = None
        self.threads: tuple[threading.Thread, ...] = ()
        self.wake: Callable[[], object] = lambda: None
        self._pid = os.getpid()
        self._where = where
        self._awaited = awaited
        self._outbox = outbox
        self._refuses = refuses
        #: of the messages of one frame, where there are several
        self._group_bytes = largest_frame(max_bytes)
        self._queue: deque[PendingMessage] = deque()
        self._queued_bytes = 0
        #: what the disk thread is at work on
        self._group: list[PendingMessage] = []
        #: that work waits for room, and a message may be taken out of it
        self._held = False
        #: number of a message → its stage at the broker, as long as somebody holds it or has a callback on it
        self._at_broker: _ByNumber[int] = weakref.WeakValueDictionary()
        #: the same for their receipts
        self._end_to_end: _ByNumber[None] = weakref.WeakValueDictionary()
        #: every message below has been entered in `_at_broker`; the disk thread's group has the numbers from here on
        self._entered = outbox.end
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

    def die(self, error: BaseException, *, disk: bool) -> None:
        """Note why nothing works any more; what waits fails with it, and the group if the disk thread has died."""
        with self.settling():
            if self.dead is None and isinstance(error, TowlineError):
                self.dead = error
            elif self.dead is None:
                what = f"the publisher has ended: unexpected {cause(error)}"
                do = "What is on disk is safe; make a new one, and report the fault in Towline."
                self.dead = PublisherError("TL-O09", str(self.directory), what, do)
                self.dead.__cause__ = error
            for message in (*(self._group if disk else ()), *self._queue):
                message.fail(self.dead)
            self._queue.clear()
            self._queued_bytes = 0
            if disk:
                self._group = []
            self.abandon(self.dead)
            self.wake()

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

    # -- the queue: any thread --

    @property
    def unstored(self) -> int:
        """Messages in the queue; those that are being written are one."""
        return len(self._queue) + bool(self._group)

    @property
    def crowded(self) -> bool:
        """`put` would wait."""
        return not self._room() or self.full_since is not None

    def _room(self) -> bool:
        return len(self._queue) < _QUEUED and (self._queued_bytes < _QUEUED_BYTES or not self._queue)

    def _judged(self) -> bool:
        """What becomes of a message is known now: it is taken, or refused for good."""
        return self.closing or self.dead is not None or self._room()

    def put(self, message: PendingMessage, deadline: float | None = None) -> None:
        """Queue a message; `deadline` as `time.monotonic` has it, None for never.

        Raises:
            PublisherError: TL-O30 no room until the deadline, TL-O02 closed, TL-O08 another process, TL-O10 it would
                have to wait on the publisher's own thread.
            TowlineError: Why the publisher has ended.
        """
        self.check()
        with self.changed:
            if not self._judged():
                self.may_wait()
                self.changed.wait_for(self._judged, None if deadline is None else deadline - time.monotonic())
            if self.dead is not None:
                raise self.dead
            if self.closing:
                raise self.closed()
            if not self._room():
                raise self._not_taken()
            self._queue.append(message)
            self._queued_bytes += message.size
            if not self._group:
                self.changed.notify_all()

    def wait_stored(self, message: PendingMessage, deadline: float | None) -> None:
        """Wait until a queued message is durable; at the deadline take it back, unless it is being written.

        Raises:
            PublisherError: TL-O30, it was taken back.
            TowlineError: Why it is not stored.
        """
        stage = message.receipt.on_disk
        if deadline is not None:
            with self.changed:
                self.changed.wait_for(stage.done, deadline - time.monotonic())
                while not stage.done():
                    if self._take_back(message):
                        message.fail(self._not_taken())  # nobody has it to be called back
                        self.changed.notify_all()
                    else:
                        self.changed.wait()
        stage.result()

    def _take_back(self, message: PendingMessage) -> bool:
        if message in self._queue:
            self._queue.remove(message)
            self._queued_bytes -= message.size
        elif self._held and message in self._group:
            self._group.remove(message)
        else:
            return False
        return True

    def _not_taken(self) -> PublisherError:
        full = self.full_since
        why = f"no room: {full.what}" if full else "the disk can't keep up"
        what = f"the message was not taken within its timeout ({why})"
        return PublisherError("TL-O30", str(self.directory), what, full.do if full else "Publish it again later.")

    # -- the disk thread --

    def run(self) -> None:
        """Store what is queued until the publisher is closed and nothing is left."""
        while group := self._next_group():
            self._store(group)

    def _next_group(self) -> list[PendingMessage]:
        with self.changed:
            self._group = []
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._queue or self.closing)
            group, size, queue = self._group, 0, self._queue
            while queue and len(group) < _GROUP and (not group or size + queue[0].size <= self._group_bytes):
                group.append(queue.popleft())
                size += group[-1].size
            self._queued_bytes -= size
            return group

    def _store(self, group: list[PendingMessage]) -> None:
        while group:  # less of it, or nothing, after a wait for room
            rows = arrived(rows_of([message.fields for message in group]), Stamp.now())
            try:
                end = self._outbox.enter(rows).end
            except JournalFull as error:
                if not self._hold_back(group, error):
                    return
            else:
                if self.full_since is not None:
                    self.full_since = None
                    log.info("there is room again; messages are taken")
                with self.settling():
                    self._enter(end)
                    self.wake()
                return

    def _hold_back(self, group: list[PendingMessage], error: JournalFull) -> bool:
        """Wait for room, or refuse the group; whether to try again."""
        if self.full_since is None and not self._refuses:
            log.warning("no room; publish waits", directory=self.directory, why=error.what, code="TL-O01")
        with self.settling():
            again = not (self._refuses or self.closing)
            self.full_since = error if again else None
            if again:
                self._held = True
                self.changed.notify_all()
                self.changed.wait(_ROOM_RETRY)
                self._held = False
            else:
                failure = PublisherError("TL-O01", str(self.directory), f"the outbox is full: {error.what}", error.do)
                for message in group:
                    message.fail(failure)
        return again

    # -- what becomes of messages; the condition is held (`settling`) --

    def _enter(self, upto: int) -> None:
        """Messages below are durable: give the group its numbers, unless the other thread has seen it first."""
        if upto <= self._entered:
            return
        for number, message in enumerate(self._group, self._entered):
            receipt = message.receipt
            receipt.on_disk.settle(number)
            self._at_broker[number] = receipt.at_broker
            if self._awaited is not None:
                self._end_to_end[number] = receipt.end_to_end
        self._entered += len(self._group)
        if self.dead is not None:  # the mqtt thread has ended meanwhile
            self.abandon(self.dead)

    def sent(self, outcomes: Iterable[tuple[int, Outcome, int]]) -> None:
        """Messages are not sent any more; with the broker's reason codes."""
        for number, outcome, reason in outcomes:
            self._enter(number + 1)
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
        self._enter(numbers.stop)
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
        if not self._done:
            loop, reached = asyncio.get_running_loop(), asyncio.Event()

            def notify(_stage: Completion[T]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(reached.set)

            self.add_done_callback(notify)
            yield from reached.wait().__await__()
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
