"""`Publisher`: the Session and the outbox of a gateway inside the user's process.

    any thread     publish   queue the message, wait until it is durable
    disk thread    takes all that is queued, one frame, one sync for all of it: group commit across threads
    mqtt thread    delivers, over reconnects, restarts and days offline

What is on disk is delivered by the next `Publisher` on the same directory if this process ends first, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Literal, NoReturn, Self, Unpack

from pydantic import AfterValidator, Field

from towline.delivery.outbound import Downlink, Outcome, recall
from towline.delivery.outrows import arrived, rows_of
from towline.delivery.receipts.mark import MARK_BYTES
from towline.delivery.receipts.payload import PREFIX, ReceiptPayload, receipt_topic
from towline.errors import BrokerError, ConfigError, JournalError, JournalFull, PublisherError, Unreachable
from towline.files import check_owner
from towline.journal import Limits, Outbox, largest_frame
from towline.mqtt.events import Action, Deliver, Event, Filter, Online, Remember, SessionLost, Settled, Stored
from towline.mqtt.rules import NO_QOS_2, message_problem
from towline.mqtt.session import Session
from towline.net.client import Properties
from towline.net.driver import Hooks, SessionDriver
from towline.net.settings import Arguments, ClientSettings, refuse
from towline.options import path
from towline.publisher.awaited import CONSUMER, Awaited, Restored, awaited_of, keep, keys_of
from towline.publisher.receipt import Lifecycle, Log, PendingMessage, Receipt, guarded
from towline.schema import OUTBOX_SCHEMA
from towline.text import counted
from towline.threads import guarded_thread
from towline.timing import Stamp

#: Patience with the broker's answers when the interpreter ends without `close`, in seconds.
_AT_EXIT: Final = 5.0
#: Messages stored in one frame, at most.
_GROUP: Final = 10_000
#: Messages that may wait for the disk thread, before `publish` waits; and their bytes, of more than one message.
_QUEUED: Final = 20_000
_QUEUED_BYTES: Final = 64 << 20
#: How often a full disk or outbox is tried again, in seconds.
_ROOM_RETRY: Final = 0.2
_NOT_BELIEVED: Final = "a receipt without a code of our key: of a gateway without it, or a forged one"


class _Outbox(Arguments):
    """What the arguments of a `Publisher` may be."""

    state_dir: Annotated[str, AfterValidator(path)]
    max_bytes: Annotated[int, Field(ge=1)] | None
    min_free_bytes: Annotated[int, Field(ge=0)]
    max_age_s: Annotated[float, Field(ge=0)] | None
    overflow: Literal["block", "refuse"]
    receipt_patience_s: Annotated[float, Field(ge=0.001, le=1e9)]


class Publisher:
    """Publishes MQTT messages that are not lost once `publish` has returned; a context manager.

    One publisher per directory: a second one is refused. All methods may be called from any thread.

    Args:
        brokers: ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://``, ``wss://`` or ``unix:///PATH``; several in order of
            preference.
        state_dir: Directory of this publisher alone, on a local disk.
        client_id: MQTT client id, stable; default one made from the directory's journal.
        settings: The way to the broker; its `session_expiry_s` is for ever by default, which QoS 2 needs.
        abandon_session: A former client id of this directory whose session at the broker is given up: what is under way
            with QoS 2 may come twice. Without it a changed client id is refused.
        max_bytes: Most bytes of the outbox on disk; None for no limit but the disk.
        min_free_bytes: Space left free on the file system.
        max_age_s: Messages that old are not sent any more; None for never.
        overflow: What `publish` does when the outbox is full: ``block`` until there is room, or ``refuse``.
        receipts: Keep each message until its gateway says that it is in Kafka, and send it again when a broker lost
            it (docs/receipts.md). MQTT 5, and a line with ``receipts`` in its gateway.
        receipt_key_file: Holds the key that the gateway has too, or this publisher's own.
        receipt_prefix: Where receipts come, as the gateway has it.
        receipt_patience_s: Seconds without progress before the gateway is asked what it has.
        on_outcome: Called with number and outcome (``delivered``, ``expired``, ``refused``; ``arrived`` with a
            receipt) of each message, also of those of an earlier life, on the mqtt thread.

    Raises:
        ConfigError: Something that can't be; TL-M23 for a changed client id.
        ConfigError: TL-J23, the directory belongs to another user.
        JournalError: The directory can't be used; TL-J03 when another publisher has it.
    """

    def __init__(
        self,
        brokers: str | Sequence[str],
        *,
        state_dir: str | Path,
        client_id: str = "",
        settings: ClientSettings = ClientSettings(),  # noqa: B008 - frozen
        abandon_session: str = "",
        max_bytes: int | None = None,
        min_free_bytes: int = 64 << 20,
        max_age_s: float | None = None,
        overflow: Literal["block", "refuse"] = "block",
        receipts: bool = False,
        receipt_key_file: str | Path | None = None,
        receipt_prefix: str = PREFIX,
        receipt_patience_s: float = 30.0,
        on_outcome: Callable[[int, str], None] | None = None,
    ) -> None:
        connection = settings.connection(brokers, client_id or "towline", session_expiry_s=0xFFFFFFFF)
        own = _Outbox(
            state_dir=str(state_dir),
            max_bytes=max_bytes,
            min_free_bytes=min_free_bytes,
            max_age_s=max_age_s,
            overflow=overflow,
            receipt_patience_s=receipt_patience_s,
        )
        if receipts and settings.protocol != "5":
            refuse("receipts", 'they need protocol "5"')
        self._directory = Path(own.state_dir)
        limits = Limits(max_bytes=max_bytes, min_free_bytes=min_free_bytes, segment_bytes=16 << 20)
        check_owner(self._directory)
        self._outbox = Outbox.open(self._directory / "outbox", schema=OUTBOX_SCHEMA, limits=limits)
        self._log = Log()
        try:
            keys = keys_of(self._outbox, receipt_key_file) if receipts else None
            self._awaited = awaited_of(self._outbox, receipt_patience_s, keys) if keys else None
            if keys is None:
                self._outbox.forget(CONSUMER)
            newest = Filter(receipt_topic(receipt_prefix, self.journal_id), 1, retain_handling=0)
            session = replace(
                connection.session,
                client_id=client_id or f"towline-{self.journal_id}",
                filters=(newest,) if receipts else (),  # the newest receipt is retained
                durable_ids=True,
            )
            self._connection = replace(connection, session=session)
            #: its condition guards what the threads share
            self._life = Lifecycle(self._directory, str(connection.brokers[0]), self._awaited, self._outbox.end)
            self._changed = self._life.changed
            #: one of several threads that close it at the same time ends it, the others wait
            self._ending = threading.RLock()
            self._abandoned = abandon_session
            self._on_outcome = on_outcome
            #: outcomes of this turn of the mqtt thread, reported together
            self._outcomes: list[tuple[int, Outcome, int]] = []
            self._downlink = Downlink(
                self._outbox,
                handle=self._handle,
                log=self._log,
                refused_dir=self._directory / "refused",
                max_age_s=max_age_s,
                on_outcome=lambda *outcome: self._outcomes.append(outcome),
                on_progress=self._progress,
                mark=self._awaited.mark if self._awaited is not None else None,
            )
            hooks = Hooks(new_session=self._new_session, perform=self._perform, ended=self._ended_connection)
            self._driver = SessionDriver(self._connection, hooks)
        except BaseException:
            self._outbox.close()
            raise
        refuses, wake = overflow == "refuse", self._driver.wake
        self._intake = Intake(self._life, self._outbox, refuses=refuses, max_bytes=max_bytes, wake=wake)
        self._disk_thread = guarded_thread(self._intake.run, "publisher-disk", ended=partial(self._die, disk=True))
        self._mqtt_thread = guarded_thread(self._deliver_all, "publisher-mqtt", ended=partial(self._die, disk=False))
        self._life.threads = (self._disk_thread, self._mqtt_thread)
        self._disk_thread.start()
        self._mqtt_thread.start()
        atexit.register(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0 if kind else 30.0)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Publisher belongs to the process that made it: make one, with a directory of its own, there")

    # -- for everybody --

    @property
    def journal_id(self) -> str:
        """Names this outbox for ever: 12 hex digits; a message is named by it and its number."""
        return self._outbox.journal_id

    @property
    def epoch(self) -> int:
        """Grows by one each time the directory is opened [I8]."""
        return self._outbox.epoch

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        qos: int = 1,
        retain: bool = False,
        wait: bool = True,
        timeout: float | None = None,
        **properties: Unpack[Properties],
    ) -> Receipt:
        """Hand over a message; on return it is durable.

        Args:
            topic: Topic name.
            payload: Bytes, or text for UTF-8.
            qos: 0, 1 or 2. QoS 0 is kept until it is sent, and sent once; with receipts it is kept as the others are.
            retain: The broker keeps it for later subscribers.
            wait: Return when the message is durable; False returns at once: see `Receipt.on_disk`.
            timeout: Seconds to wait for room, and with `wait` for the disk; None for ever. A write under way is waited
                for.
            properties: Of MQTT 5, see `towline.net.client.Properties`; the seconds of an expiry begin now.

        Raises:
            ConfigError: TL-C51, MQTT has no way to say this message.
            PublisherError: TL-O01, the outbox is full and `overflow` is ``refuse``. TL-O30, not taken within `timeout`.
                TL-O02, the publisher is closed.
                TL-O08, it belongs to the process that was forked. TL-O09, it has ended by a fault. TL-O10, this is a
                callback, and only ``wait=False`` can be done there.
            JournalFailed: TL-J04, the disk failed: what was not durable before is not promised.
        """
        fields = fields_of(
            topic, payload, qos, several_sessions=self._connection.several_sessions, retain=retain, **properties
        )
        if wait:
            self._life.may_wait()
        receipt = Receipt(topic, self._life, self._life.no_end)
        message = PendingMessage(fields, receipt)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._intake.put(message, deadline)
        if wait and deadline is not None:
            self._intake.stored(message, deadline)
        elif wait:
            receipt.on_disk.result()
        return receipt

    def flush(self, timeout: float | None = None, *, end_to_end: bool | None = None) -> int:
        """Wait until everything is at the broker, or has its receipt.

        Args:
            timeout: Seconds; None for ever.
            end_to_end: Wait for the receipts; None where there are any.

        Returns:
            Messages that are not; they stay on disk.

        Raises:
            TowlineError: Why the publisher has ended.
        """
        self._life.may_wait()
        unsent = partial(self._unsent, end_to_end=end_to_end is not False)
        with self._changed:
            self._changed.wait_for(lambda: self._life.over or not unsent(), timeout)
            if (left := unsent()) and (over := self._life.over):
                raise over
        return left

    @property
    def crowded(self) -> bool:
        """The disk can't keep up: `publish` would wait before it takes a message."""
        return self._intake.crowded

    @property
    def waiting(self) -> int:
        """Messages that are not at the broker."""
        self._life.check()
        with self._changed:
            return self._unsent()

    @property
    def awaiting(self) -> int:
        """Messages that are not at the broker, or have no receipt where there are any."""
        self._life.check()
        with self._changed:
            return self._unsent(end_to_end=True)

    def status(self) -> dict[str, Any]:
        """The account, as a gateway's: accepted = queued + in_flight + delivered + expired + refused [I11]."""
        self._life.check()
        error, awaited, full = self._driver.error, self._awaited, self._intake.full_since
        return {
            **self._downlink.status(),
            "receipts": awaited.status(self._outbox.end) if awaited is not None else None,
            "online": self._driver.online,
            "client_id": self._connection.session.client_id,
            "broker": str(self._driver.endpoint),
            "last_error": str(error) if error else None,
            "closed": self._life.ended,
            "measured": self._outbox.measured(),
            **({"held_back": str(full)} if full else {}),
        }

    def close(self, timeout: float = 30.0, *, end_to_end: bool | None = None) -> int:
        """Wait as `flush` does, at most `timeout` seconds, and end; a second call does nothing.

        Nor does a call in a process that has inherited the publisher: it belongs to the one that made it.

        Returns:
            Messages that are not at the broker, or have no receipt. They stay on disk, and the next `Publisher` on this
            directory sends them; a warning says how many.
        """
        if self._life.inherited:
            return 0
        self._life.may_wait()
        with self._changed:
            if self._life.closing:
                return 0
        with contextlib.suppress(BrokerError, JournalError, PublisherError):
            self.flush(timeout, end_to_end=end_to_end)
        with self._ending:
            if first := not self._life.ended:
                self._end()
        left = self._unsent(end_to_end=end_to_end is not False)
        if left and first:
            receipts = self._awaited.status(self._outbox.end) if self._awaited is not None else None
            what = _left_on_disk(left, self._directory, None if self._unsent() else receipts)
            self._log.warning(what, code="TL-O03")
        return left

    # -- inside --

    def _unsent(self, *, end_to_end: bool = False) -> int:
        waiting = self._outbox.waiting
        if end_to_end and self._awaited is not None:
            waiting = max(waiting, self._outbox.end - self._awaited.settled.count())
        return len(self._intake) + waiting

    # -- the mqtt thread --

    def _deliver_all(self) -> None:
        while not self._life.closing and self._life.dead is None:
            self._turn()

    def _turn(self) -> None:
        """Do what is due, and wait for more."""
        driver = self._driver
        try:
            driver.turn(self._downlink.due(), self._awaited.due() if self._awaited is not None else None)
            if self._awaited is not None and (question := self._awaited.turn(time.monotonic())):
                self._downlink.send_again(question, self._awaited.waits)
            self._downlink.turn(unsent=driver.unsent)
        except JournalFull as error:  # what can't be made durable must not be acted on
            what = f"what is sent can't be recorded: {error.what}"
            driver.renew(Unreachable("TL-M13", self._connection.session.where, what, error.do))
        if driver.fatal is not None:
            # What is on disk is safe, and another may mend the broker: go on trying, and say so.
            self._log.warning("no connection", code=driver.fatal.code, reason=str(driver.fatal))
            driver.fatal = None

    def _ended_connection(self) -> None:
        if self._awaited is not None:
            self._awaited.offline()
        self._downlink.lost(self._driver.session.outbound.withdraw())

    def _handle(self, event: Event) -> None:
        self._driver.handle(event)

    def _new_session(self, level: int) -> Session:
        record = recall(self._outbox.session, str(self._directory), self._connection.session, self._abandoned)
        if record is not None and self._awaited is not None:  # to get the newest receipt, which the broker retains
            record = replace(record, subscriptions={})
        session = Session(self._connection.session_at(level), record)
        self._downlink.attach(session)
        return session

    def _perform(self, action: Action) -> None:
        if isinstance(action, Remember):
            self._outbox.set_session(asdict(action.record) if action.record else {})
        elif isinstance(action, Online):
            self._log.info("online", broker=str(self._driver.endpoint), session="kept" if action.resumed else "new")
            if self._awaited is not None:
                self._awaited.online(time.monotonic())
        elif isinstance(action, Deliver):
            self._take_receipts(action)
        elif isinstance(action, SessionLost):
            self._outbox.count(sessions_lost=1)
            self._log.warning("the broker has lost our session", code="TL-M22", broker=str(self._driver.endpoint))
        else:
            self._downlink.perform(action)

    def _progress(self) -> None:
        """Report all outcomes of a turn at once."""
        outcomes, self._outcomes = self._outcomes, []
        with self._life.settling():
            self._life.sent(outcomes)
        for number, outcome, _ in outcomes:
            self._report(number, outcome.value)
        if self._awaited is not None and any(outcome is not Outcome.DELIVERED for _, outcome, _ in outcomes):
            keep(self._outbox, self._awaited, self._downlink.oldest)

    def _report(self, number: int, outcome: str) -> None:
        if self._on_outcome is not None:
            guarded(partial(self._on_outcome, number, outcome))

    # -- the mqtt thread: receipts --

    def _take_receipts(self, action: Deliver) -> None:
        """That they are acknowledged at once loses nothing, the broker retains the newest."""
        for message in action.messages.packets:
            if self._awaited is None or message.payload is None:
                continue  # a stub is too large for a receipt of ours
            before = self._awaited.not_believed
            receipt = self._awaited.believed(message.payload)
            if receipt is not None:
                self._take(self._awaited, receipt)
            elif not before and self._awaited.not_believed:
                self._log.warning(_NOT_BELIEVED, code="TL-O11")
        self._handle(Settled(action.first + len(action.messages)))
        self._handle(Stored(action.ticket))

    def _take(self, awaited: Awaited, receipt: ReceiptPayload) -> None:
        with self._life.settling():
            before = awaited.settled.watermark
            try:
                lost = awaited.take(receipt, self._outbox.end, time.monotonic())
            except Restored:
                lost = []
                self._log.warning("the outbox is an older copy of itself; messages may be doubled", code="TL-O07")
                awaited.begin_again(receipt.epoch + 1)
                keep(self._outbox, awaited, self._downlink.oldest)
                self._outbox.sync()
            numbers = range(before, awaited.settled.watermark)
            self._life.arrived(numbers)
        if numbers:
            keep(self._outbox, awaited, self._downlink.oldest)
        for number in numbers:
            self._report(number, "arrived")
        if lost:
            self._log.warning("the broker lost messages; sending them again", count=sum(e - s for s, e in lost))
            self._downlink.send_again(lost, awaited.waits)

    # -- inside: ending --

    def _die(self, error: BaseException, *, disk: bool) -> None:
        with self._life.settling():
            failure = self._life.fail(error)
            self._intake.fail(failure, group=disk)
            self._life.abandon(failure)
            self._driver.wake()

    def _end(self) -> None:
        with self._changed:
            self._life.closing = True
            self._changed.notify_all()
        self._driver.cancel()
        self._disk_thread.join()
        self._mqtt_thread.join()
        with self._life.settling():
            self._life.ended = True
            what, do = "the publisher was closed before", "The message stays on disk, and the next start sends it."
            self._life.abandon(self._life.dead or PublisherError("TL-O03", str(self._directory), what, do))
        atexit.unregister(self._at_exit)
        try:
            self._driver.leave()
            if self._life.dead is None:
                self._downlink.close()
        finally:
            try:
                self._driver.dispose()
            finally:
                with contextlib.suppress(JournalError):
                    self._outbox.close()

    def _at_exit(self) -> None:
        """The interpreter ends without `close`: give the broker a moment, and say what stays."""
        left = self.close(_AT_EXIT, end_to_end=False)  # nothing, in a process that has inherited it
        if left:
            sys.stderr.write(f"{_left_on_disk(left, self._directory)}   [TL-O03]\n")


class Intake:
    """The queue before the disk, and the disk thread.

    Everything is bounded: messages and bytes that wait, and bytes of a frame, so that no message is in the way of
    another.

    Args:
        refuses: Refuse what finds the outbox full, instead of waiting.
        max_bytes: Of the outbox; None for no limit but the disk.

    Attributes:
        full_since: Why nothing is stored; None while there is room.
    """

    def __init__(
        self,
        life: Lifecycle,
        outbox: Outbox,
        *,
        refuses: bool,
        max_bytes: int | None,
        wake: Callable[[], None],
    ) -> None:
        self._life = life
        self._outbox = outbox
        self._refuses = refuses
        #: of the messages of one frame, where there are several
        self._group_bytes = largest_frame(max_bytes)
        self._wake = wake
        self._queue: deque[PendingMessage] = deque()
        self._bytes = 0
        #: what the disk thread is at work on
        self._group: list[PendingMessage] = []
        #: that work waits for room, and a message may be taken out of it
        self._held = False
        self._log = Log()
        self.full_since: JournalFull | None = None

    def __len__(self) -> int:
        return len(self._queue) + bool(self._group)

    @property
    def crowded(self) -> bool:
        """`put` would wait."""
        return not self._room() or self.full_since is not None

    def _room(self) -> bool:
        return len(self._queue) < _QUEUED and (self._bytes < _QUEUED_BYTES or not self._queue)

    def _judged(self) -> bool:
        """What becomes of a message is known now: it is taken, or refused for good."""
        over = self._life.closing or self._life.dead is not None
        return over or self._room() or (self._refuses and self.full_since is not None)

    # -- any thread --

    def put(self, message: PendingMessage, deadline: float | None = None) -> None:
        """Queue a message; `deadline` as `time.monotonic` has it, None for never.

        Raises:
            PublisherError: TL-O01 no room, TL-O30 none until the deadline, TL-O02 closed, TL-O08 another process,
                TL-O10 it would have to wait on the publisher's own thread.
            TowlineError: Why the publisher has ended.
        """
        life = self._life
        life.check()
        with life.changed:
            if not self._judged():
                life.may_wait()
                left = None if deadline is None else deadline - time.monotonic()
                life.changed.wait_for(self._judged, left)
            if life.dead is not None:
                raise life.dead
            if life.closing:
                raise life.closed()
            if self._refuses and self.full_since is not None:
                raise _outbox_full(life.directory, self.full_since)
            if not self._room():
                raise _not_taken(life.directory, self.full_since)
            self._queue.append(message)
            self._bytes += message.size
            if not self._group:
                life.changed.notify_all()

    def stored(self, message: PendingMessage, deadline: float) -> None:
        """Wait until a queued message is durable; at the deadline take it back, unless it is being written.

        Raises:
            PublisherError: TL-O30, it was taken back.
            TowlineError: Why it is not stored.
        """
        life, stage = self._life, message.receipt.on_disk
        with life.changed:
            while not stage.done():
                left = deadline - time.monotonic()
                if left <= 0 and self._take_back(message):
                    message.fail(_not_taken(life.directory, self.full_since))  # nobody has it to be called back
                    life.changed.notify_all()
                    break
                life.changed.wait(left if left > 0 else None)
        stage.result()

    def _take_back(self, message: PendingMessage) -> bool:
        if message in self._queue:
            self._queue.remove(message)
            self._bytes -= message.size
        elif self._held and message in self._group:
            self._group.remove(message)
        else:
            return False
        return True

    # -- the disk thread --

    def run(self) -> None:
        """Store what is queued until the publisher is closed and nothing is left."""
        while group := self._next_group():
            self._store(group)

    def _next_group(self) -> list[PendingMessage]:
        changed = self._life.changed
        with changed:
            self._group = []
            changed.notify_all()
            while not self._queue and not self._life.closing:
                changed.wait()
            group, size = self._group, 0
            while (
                self._queue and len(group) < _GROUP and (not group or size + self._queue[0].size <= self._group_bytes)
            ):
                group.append(self._queue.popleft())
                size += group[-1].size
            self._bytes -= size
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
                    self._log.info("there is room again; messages are taken")
                with self._life.settling():
                    self._life.stored(group, end - len(group))
                    self._wake()
                return

    def _hold_back(self, group: list[PendingMessage], error: JournalFull) -> bool:
        """Wait for room, or refuse the group; whether to try again."""
        life = self._life
        if self.full_since is None and not self._refuses:
            self._log.warning("no room; publish waits", directory=life.directory, why=error.what, code="TL-O01")
        with life.settling():
            self.full_since = error
            if self._refuses or life.closing:
                failure = _outbox_full(life.directory, error)
                for message in group:
                    message.fail(failure)
                self.full_since = None
                return False
            self._held = True
            life.changed.notify_all()
            life.changed.wait(_ROOM_RETRY)
            self._held = False
        return True

    def fail(self, error: BaseException, *, group: bool) -> None:
        """Nothing of what waits will be stored, nor the group if the disk thread has died; with the condition held."""
        for message in (*(self._group if group else ()), *self._queue):
            message.fail(error)
        self._queue.clear()
        self._bytes = 0
        if group:
            self._group = []


def _not_taken(directory: Path, full: JournalFull | None) -> PublisherError:
    """The error of a message that found no room in time."""
    why = f"no room: {full.what}" if full else "the disk can't keep up"
    what = f"the message was not taken within its timeout ({why})"
    return PublisherError("TL-O30", str(directory), what, full.do if full else "Publish it again later.")


def _outbox_full(directory: Path, error: JournalFull) -> PublisherError:
    """The error of a message that finds no room."""
    return PublisherError("TL-O01", str(directory), f"the outbox is full: {error.what}", error.do)


def fields_of(
    topic: str,
    payload: bytes | str,
    qos: int,
    *,
    several_sessions: bool = False,
    retain: bool,
    payload_is_utf8: bool | None = None,
    user_properties: Iterable[tuple[str, str]] = (),
    expiry_s: int | None = None,
    content_type: str | None = None,
    response_topic: str | None = None,
    correlation_data: bytes | None = None,
) -> dict[str, Any]:
    """The columns of a message's row.

    Raises:
        ConfigError: TL-C51, MQTT has no way to say it, with the marks of receipts, which it may get in a later life.
    """
    if qos == 2 and several_sessions:
        raise ConfigError("TL-C51", f"message to {str(topic)[:80]!r}", *NO_QOS_2)
    pairs = tuple(user_properties or ())
    said = {"content_type": content_type, "response_topic": response_topic, "correlation_data": correlation_data}
    room = MARK_BYTES
    if problem := message_problem(topic, payload, qos, room, user_properties=pairs, expiry_s=expiry_s, **said):
        what = f"MQTT has no way to say it: {problem}"
        raise ConfigError("TL-C51", f"message to {str(topic)[:80]!r}", what, "Change it.")
    return {
        "topic": topic,
        "payload": payload.encode() if isinstance(payload, str) else bytes(payload),
        "qos": int(qos),
        "retain": bool(retain),
        "payload_is_utf8": None if payload_is_utf8 is None else bool(payload_is_utf8),
        "user_properties": [{"key": key, "value": value} for key, value in pairs] if pairs else None,
        "message_expiry_seconds": expiry_s,
        **said,
    }


def _left_on_disk(left: int, directory: Path, receipts: Mapping[str, int | bool] | None = None) -> str:
    """What becomes of messages left behind; `receipts` has their account, if only their receipts are missing."""
    if receipts is None:
        return f"{counted(left)} not at the broker: kept in {directory}, and the next start sends what is there"
    return f"{counted(left)} without a receipt: kept in {directory}, and the next start asks again{_why(receipts)}"


def _why(receipts: Mapping[str, int | bool]) -> str:
    """Why no receipt has come at all, as far as this side can tell."""
    if receipts["watermark"]:
        return ""
    if receipts["not_believed"]:
        return ". Receipts came that this publisher's key did not sign: is it made of the line's key (towline key)?"
    return (
        ". No receipt has ever come: the line that takes these messages up needs `receipts`, with the same prefix and "
        "the key that this publisher's is made of, and has to reach Kafka"
    )
