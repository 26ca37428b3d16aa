"""State of published messages: queue before the disk, and stages that can be awaited or call back.

The condition of the publisher's `Lifecycle` guards all of it; callbacks run without it (`Lifecycle.completing_stages`).
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
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import structlog

from towline.delivery.outbound import Outcome
from towline.delivery.outrows import add_arrival, rows_from_messages
from towline.errors import ConfigError, JournalFull, PublisherError, TowlineError
from towline.journal import Outbox, max_frame_bytes
from towline.publisher.pending_receipts import PendingReceipts
from towline.text import error_text, printable
from towline.threads import Condition
from towline.timing import Timestamp

T = TypeVar("T")

#: Most messages of one frame.
_MAX_GROUP: Final = 10_000
#: Queued messages, and queued bytes (of more than one message), above which `publish` waits.
_MAX_QUEUED: Final = 20_000
_MAX_QUEUED_BYTES: Final = 64 << 20
#: Interval in seconds of retries with a full disk or outbox.
_ROOM_RETRY_S: Final = 0.2
#: Bytes of a row without its content, and of a user property without its text.
_ROW_BYTES, _PAIR_BYTES = 64, 16
#: Logger name: the application configures its output.
LOGGER_NAME: Final = "towline.publisher"


def _event_text(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    """Append the facts of an event to its text."""
    text: str = event.pop("event")
    return text + "".join(f" {name}={printable(str(value))}" for name, value in event.items())


#: Logger of the publisher; takes facts, as `OutboxSender` gives them.
log: Final = structlog.wrap_logger(logging.getLogger(LOGGER_NAME), [_event_text], structlog.BoundLogger)


class Lifecycle:
    """Messages of one publisher from `publish` to their outcome: the queue before the disk, and the later stages.

    Queued messages, queued bytes and frame size are bounded, so that no message blocks another.

    Args:
        directory: Directory as errors show it.
        location: Broker as errors show it.
        pending: Messages without a receipt; None if receipts are not used.
        outbox: Outbox that stores the messages; its current rows belong to earlier processes.

    Attributes:
        condition: Guards all state shared by the publisher's threads; notified at every change.
        stages_with_callbacks: Strong references to stages with callbacks.
        due_callbacks: Callbacks of completed stages, called when the condition is released.
        closing: No more messages are accepted.
        closed: The threads have ended.
        fatal_error: Error that ended the publisher; None while it works.
        full_error: Reason why nothing is stored; None while there is room.
        threads: The publisher's threads, which must not wait for each other.
        wake: Wakes the mqtt thread.
        no_receipt_stage: Failed receipt stage shared by all messages without receipts; None with receipts.
    """

    def __init__(self, directory: Path, location: str, pending: PendingReceipts | None, outbox: Outbox) -> None:
        self.directory = directory
        self.condition = Condition()
        self.stages_with_callbacks: set[Completion[Any]] = set()
        self.due_callbacks: list[Callable[[], object]] = []
        self.closing = False
        self.closed = False
        self.fatal_error: TowlineError | None = None
        self.full_error: JournalFull | None = None
        self.threads: tuple[threading.Thread, ...] = ()
        self.wake: Callable[[], object] = lambda: None
        self._pid = os.getpid()
        self._location = location
        self._receipts = pending
        self._outbox = outbox
        #: most bytes of one frame with several messages
        self._group_bytes = max_frame_bytes(outbox.limits.max_bytes)
        #: messages that are not durable yet; the disk thread is writing the first `_writing_count` of them
        self._queue: deque[PendingMessage] = deque()
        self._queued_bytes = 0
        self._writing_count = 0
        #: message number → stage at the broker, while referenced or with a callback
        self._broker_stages: _StagesByNumber[int] = weakref.WeakValueDictionary()
        #: message number → receipt stage
        self._receipt_stages: _StagesByNumber[None] = weakref.WeakValueDictionary()
        #: number of the first queued message
        self._next_number = outbox.end
        self.no_receipt_stage: Completion[None] | None = None
        if pending is None:
            self.no_receipt_stage = Completion(self)
            problem, remedy = "this publisher does not use receipts", "Open it with receipts=True."
            self.no_receipt_stage.set_outcome(failure=ConfigError("TL-C51", location, problem, remedy))

    @property
    def is_forked(self) -> bool:
        """Whether this process is a ``fork`` of the publisher's process, without its threads."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Reject a forked process before any lock is taken.

        Raises:
            PublisherError: TL-O08.
        """
        if self.is_forked:
            problem = f"this publisher belongs to the process that created it (pid {self._pid})"
            remedy = "Create one after the fork, with its own directory."
            raise PublisherError("TL-O08", str(self.directory), problem, remedy)

    def check_may_wait(self) -> None:
        """Reject a wait that would never end.

        Raises:
            PublisherError: TL-O08 in a forked process, TL-O10 on one of the publisher's threads.
        """
        self.check_process()
        if threading.current_thread() in self.threads:
            problem = "a callback waits on the publisher's own thread, which would wait for itself"
            remedy = "Publish with wait=False there, and wait on another thread."
            raise PublisherError("TL-O10", str(self.directory), problem, remedy)

    def fail_pending(self, error: BaseException, *, disk: bool) -> None:
        """Record a fatal error; fail queued messages, also those that the disk thread was writing if that one ended."""
        with self.completing_stages():
            if self.fatal_error is None and isinstance(error, TowlineError):
                self.fatal_error = error
            elif self.fatal_error is None:
                problem = f"the publisher has ended: unexpected {error_text(error)}"
                remedy = "Messages on disk are safe; create a new publisher, and report this bug."
                self.fatal_error = PublisherError("TL-O09", str(self.directory), problem, remedy)
                self.fatal_error.__cause__ = error
            kept_count = 0 if disk else self._writing_count
            while len(self._queue) > kept_count:
                self._queue.pop().fail(self.fatal_error)
            self.fail_stages(self.fatal_error)
            self.wake()

    def closed_error(self) -> PublisherError:
        """Return the error of a call after `close`."""
        return PublisherError("TL-O02", str(self.directory), "the publisher is closed", "Create a new one.")

    @property
    def end_error(self) -> TowlineError | None:
        """Error that ends every wait; None while the publisher works."""
        return self.fatal_error or (self.closed_error() if self.closed else None)

    @contextlib.contextmanager
    def completing_stages(self) -> Iterator[None]:
        """Hold the condition to complete stages; then notify waiters and run callbacks without it."""
        with self.condition:
            yield
            callbacks_to_run, self.due_callbacks = self.due_callbacks, []
            self.condition.notify_all()
        for callback in callbacks_to_run:
            call_guarded(callback)

    # -- the queue: any thread --

    @property
    def unstored_count(self) -> int:
        """Number of messages before the disk."""
        return len(self._queue)

    @property
    def would_block(self) -> bool:
        """Whether `enqueue` would wait."""
        return not self._has_room() or self.full_error is not None

    def _has_room(self) -> bool:
        return len(self._queue) < _MAX_QUEUED and (self._queued_bytes < _MAX_QUEUED_BYTES or not self._queue)

    def _can_decide(self) -> bool:
        """Return whether a message can be accepted or refused without a wait."""
        return self.closing or self.fatal_error is not None or self._has_room()

    def enqueue(self, message: PendingMessage, deadline: float | None = None) -> None:
        """Queue a message.

        Args:
            message: Message to queue.
            deadline: On `time.monotonic`; None for no limit.

        Raises:
            PublisherError: TL-O30 no room until the deadline, TL-O02 closed, TL-O08 forked process, TL-O10 it would
                wait on one of the publisher's threads.
            TowlineError: Error that ended the publisher.
        """
        self.check_process()
        with self.condition:
            if not self._can_decide():
                self.check_may_wait()
                self.condition.wait_for(self._can_decide, None if deadline is None else deadline - time.monotonic())
            if self.fatal_error is not None:
                raise self.fatal_error
            if self.closing:
                raise self.closed_error()
            if not self._has_room():
                raise self._timeout_error()
            self._queue.append(message)
            self._queued_bytes += message.size
            if len(self._queue) == 1:  # the disk thread waits for it
                self.condition.notify_all()

    def wait_until_stored(self, message: PendingMessage, deadline: float | None) -> None:
        """Wait until a queued message is durable; at the deadline withdraw it, unless it is being written.

        Raises:
            PublisherError: TL-O30, it was withdrawn.
            TowlineError: Error that prevented the write.
        """
        stage = message.receipt.on_disk
        if deadline is not None:
            with self.condition:
                self.condition.wait_for(stage.done, deadline - time.monotonic())
                self.condition.wait_for(lambda: stage.done() or message in [*self._queue][self._writing_count :])
                if not stage.done():
                    self._remove(message)
                    message.fail(self._timeout_error())  # no callback can be registered yet
                    self.condition.notify_all()
        stage.result()

    def _remove(self, message: PendingMessage) -> None:
        self._queue.remove(message)
        self._queued_bytes -= message.size

    def _timeout_error(self) -> PublisherError:
        reason, remedy = "the disk can't keep up", "Publish it again later."
        if self.full_error:
            reason, remedy = f"no room: {self.full_error.problem}", self.full_error.remedy
        problem = f"the message was not accepted within its timeout ({reason})"
        return PublisherError("TL-O30", str(self.directory), problem, remedy)

    # -- the disk thread --

    def run_disk_thread(self) -> None:
        """Store queued messages until the publisher is closed and the queue is empty."""
        while group := self._next_group():
            rows = add_arrival(rows_from_messages([message.fields for message in group]), Timestamp.now())
            try:
                end = self._outbox.append_batch(rows).end
            except JournalFull as error:
                self._wait_for_room(group, error)
                continue
            if self.full_error is not None:
                self.full_error = None
                log.info("room again; messages are accepted")
            with self.completing_stages():
                self._assign_numbers(end)
                self.wake()

    def _next_group(self) -> list[PendingMessage]:
        with self.condition:
            self.condition.wait_for(lambda: self._queue or self.closing)
            group, size = list[PendingMessage](), 0
            for message in islice(self._queue, _MAX_GROUP):
                size += message.size
                if group and size > self._group_bytes:
                    break
                group.append(message)
            self._writing_count = len(group)
            return group

    def _wait_for_room(self, group: list[PendingMessage], error: JournalFull) -> None:
        """Wait for room; refuse the group when the publisher is closed."""
        if self.full_error is None:
            log.warning("no room; publish waits", directory=self.directory, reason=error.problem, code="TL-O01")
        with self.completing_stages():
            self._writing_count = 0
            if self.closing:
                self.full_error = None
                problem = f"the outbox is full: {error.problem}"
                failure = PublisherError("TL-O01", str(self.directory), problem, error.remedy)
                for message in group:
                    self._remove(message)
                    message.fail(failure)
            else:
                self.full_error = error
                self.condition.notify_all()
                self.condition.wait(_ROOM_RETRY_S)

    # -- outcomes; the condition is held (`completing_stages`) --

    def _assign_numbers(self, end: int) -> None:
        """Assign numbers to the messages that are durable now, unless the other thread did it first."""
        if end <= self._next_number:
            return
        for _ in range(self._writing_count):
            receipt, number = self._queue[0].receipt, self._next_number
            self._remove(self._queue[0])
            receipt.on_disk.set_outcome(number)
            self._broker_stages[number] = receipt.at_broker
            if self._receipts is not None:
                self._receipt_stages[number] = receipt.end_to_end
            self._next_number += 1
        self._writing_count = 0
        if self.fatal_error is not None:  # the mqtt thread has ended meanwhile
            self.fail_stages(self.fatal_error)

    def record_outcomes(self, outcomes: Iterable[tuple[int, Outcome, int]]) -> None:
        """Record outcomes of messages, with the broker's reason codes."""
        for number, outcome, reason_code in outcomes:
            self._assign_numbers(number + 1)
            self._record_outcome(number, outcome, reason_code)

    def _record_outcome(self, number: int, outcome: Outcome, reason_code: int) -> None:
        if outcome is Outcome.DELIVERED:
            _complete_stage(self._broker_stages, number, reason_code)
            return
        if outcome is Outcome.EXPIRED:
            failure = PublisherError("TL-O05", self._location, f"message {number} expired before it was sent")
        else:
            problem, remedy = f"the broker refused message {number}", "It is stored in refused/; see the log."
            failure = PublisherError("TL-O04", self._location, problem, remedy)
        _complete_stage(self._broker_stages, number, failure=failure)
        if self._receipts is not None and number not in self._receipts.completed_ranges:
            self._receipts.drop(number)
            problem = f"message {number} was {outcome.value} before its receipt; whether it is in Kafka is unknown"
            _complete_stage(self._receipt_stages, number, failure=PublisherError("TL-O06", self._location, problem))

    def record_receipts(self, numbers: range) -> None:
        """Record the receipts of messages."""
        self._assign_numbers(numbers.stop)
        stages = self._receipt_stages
        for number in numbers if len(numbers) < len(stages) else [number for number in stages if number in numbers]:
            _complete_stage(stages, number)

    def fail_stages(self, failure: BaseException) -> None:
        """Fail all stages that are still awaited."""
        stages: list[Completion[Any]] = [*self._broker_stages.values(), *self._receipt_stages.values()]
        self._broker_stages.clear()
        self._receipt_stages.clear()
        for stage in stages:
            stage.set_outcome(failure=failure)


class Completion(Generic[T]):
    """One-time result or failure; like `concurrent.futures.Future`, lighter, and awaitable."""

    __slots__ = ("__weakref__", "_callbacks", "_done", "_failure", "_lifecycle", "_value")

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._done = False
        self._value: T | None = None
        self._failure: BaseException | None = None
        self._callbacks: list[Callable[[Completion[T]], None]] = []

    def done(self) -> bool:
        """Return whether there is a result or a failure."""
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: No result within `timeout` seconds; it may still come.
            TowlineError: The failure; TL-O08 in a forked process, TL-O10 on one of the publisher's threads.
        """
        if not self._done:
            self._wait(timeout)
        if self._failure is not None:
            raise self._failure
        return self._value  # type: ignore[return-value] # set before `_done`

    def _wait(self, timeout: float | None) -> None:
        self._lifecycle.check_may_wait()
        with self._lifecycle.condition:
            if not self._lifecycle.condition.wait_for(self.done, timeout):
                raise TimeoutError(f"no result within {timeout:g} s; it may still come")

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does; return the failure, or None."""
        if not self._done:
            self._wait(timeout)
        return self._failure

    def add_done_callback(self, callback: Callable[[Completion[T]], None]) -> None:
        """Call `callback` with this stage once it is done, on a publisher thread; at once if it is done already."""
        self._lifecycle.check_process()
        with self._lifecycle.condition:
            if not self._done:
                self._callbacks.append(callback)
                self._lifecycle.stages_with_callbacks.add(self)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, T]:
        """Await the result, any number of times; cancellation affects only this wait."""
        if not self._done:
            loop, done_event = asyncio.get_running_loop(), asyncio.Event()

            def notify(_stage: Completion[T]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(done_event.set)

            self.add_done_callback(notify)
            yield from done_event.wait().__await__()
        return self.result(0)

    def set_outcome(self, value: T | None = None, failure: BaseException | None = None) -> None:
        """Set the outcome, inside `Lifecycle.completing_stages`; a second call has no effect. Not for applications."""
        if self._done:
            return
        self._value, self._failure, self._done = value, failure, True
        self._lifecycle.due_callbacks += [partial(callback, self) for callback in self._callbacks]
        self._callbacks = []
        self._lifecycle.stages_with_callbacks.discard(self)


class Receipt:
    """Stages of a published message.

    Attributes:
        on_disk: Done when the message is durable; its result is the message's number in the outbox.
        at_broker: Done when the broker has it (QoS 0: when it was sent), with its reason code: 0, or 16 if no client is
            subscribed to the topic and the broker reports it (MQTT 5, QoS 1 and 2). Fails when the broker refused the
            message for good, or when it expired.
        end_to_end: Done when the gateway confirmed it as committed in Kafka, as a record or dead letter, or filtered by
            a ``where``. Fails when the message expires or is refused before, and at once without receipts.
    """

    __slots__ = ("at_broker", "end_to_end", "on_disk", "topic")

    def __init__(self, topic: str, lifecycle: Lifecycle, end_to_end: Completion[None] | None) -> None:
        self.topic = topic
        self.on_disk: Completion[int] = Completion(lifecycle)
        self.at_broker: Completion[int] = Completion(lifecycle)
        self.end_to_end: Completion[None] = end_to_end or Completion(lifecycle)

    @property
    def number(self) -> int:
        """Number of the message in the outbox, unique with `Publisher.journal_id`; waits until it is on disk."""
        return self.on_disk.result()

    def __repr__(self) -> str:
        stages = (("end to end", self.end_to_end), ("at broker", self.at_broker), ("on disk", self.on_disk))
        state = next((name for name, stage in stages if stage.done() and not stage.exception()), "queued")
        return f"Receipt({self.topic!r}, {state})"


@dataclass(slots=True, eq=False)
class PendingMessage:
    """Arguments of `publish` on their way to the disk."""

    fields: Mapping[str, Any]
    receipt: Receipt

    def fail(self, failure: BaseException) -> None:
        """Fail all stages; the condition is held."""
        for stage in (self.receipt.on_disk, self.receipt.at_broker, self.receipt.end_to_end):
            stage.set_outcome(failure=failure)

    @property
    def size(self) -> int:
        """Approximate size on disk in bytes."""
        user_properties = self.fields["user_properties"] or ()
        size_bytes = len(self.fields["payload"]) + len(self.fields["topic"]) + _ROW_BYTES
        return size_bytes + sum(len(pair["key"]) + len(pair["value"]) + _PAIR_BYTES for pair in user_properties)


def call_guarded(callback: Callable[[], object]) -> None:
    """Call application code; an exception is logged and does not end the delivery."""
    try:
        callback()
    except Exception:
        logging.getLogger(LOGGER_NAME).exception("a callback failed")


_StagesByNumber: TypeAlias = MutableMapping[int, Completion[T]]


def _complete_stage(
    stages: _StagesByNumber[T], number: int, value: T | None = None, failure: BaseException | None = None
) -> None:
    """Complete the stage of a message, if it is still referenced."""
    if (stage := stages.pop(number, None)) is not None:
        stage.set_outcome(value, failure)
