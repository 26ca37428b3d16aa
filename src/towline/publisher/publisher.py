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
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self

from towline.delivery.outbound import Downlink, Outcome
from towline.delivery.receipts.payload import PREFIX, receipt_topic
from towline.delivery.receipts.payload import ReceiptPayload as Told
from towline.delivery.record import recall
from towline.errors import BrokerError, JournalError, JournalFull, PublisherError, Unreachable
from towline.journal import Limits, Outbox
from towline.mqtt.events import (
    Action,
    Deliver,
    Event,
    Filter,
    Online,
    Remember,
    SessionConfig,
    SessionLost,
    Settled,
    Stored,
)
from towline.mqtt.session import Session
from towline.mqtt.versions import LEVELS
from towline.net.driver import Hooks, SessionDriver, Way
from towline.net.transport import Proxy, Tls
from towline.publisher.arguments import check_settings, endpoints_of, fields_of
from towline.publisher.awaited import CONSUMER, Awaited, Restored, awaited_of, keep, keys_of
from towline.publisher.errors import given_up, left_behind, left_on_disk, not_sent, without_receipts, wrong
from towline.publisher.home import Home
from towline.publisher.intake import Intake
from towline.publisher.log import Log
from towline.publisher.receipt import Callbacks, Completion, PendingMessage, Receipt, call_all, guarded, settle
from towline.schema import OUTBOX_SCHEMA

__all__ = ["Publisher"]

#: The mqtt thread looks around after this many seconds at the latest; everything that matters wakes it.
_LONGEST_TURN: Final = 60.0
#: Patience with the broker's answers when the interpreter ends without `close`, in seconds.
_AT_EXIT: Final = 5.0
_NOT_BELIEVED: Final = "a receipt without a code of our key: of a gateway without it, or older, or a forged one"
#: Patience with the goodbye, in seconds.
_GOODBYE: Final = 2.0


class Publisher:
    """Publishes MQTT messages that are not lost once `publish` has returned; a context manager.

    One publisher per directory: a second one is refused. All methods may be called from any thread.

    Args:
        brokers: ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://``, ``wss://`` or ``unix:///PATH``; several in order of
            preference.
        state_dir: Directory of this publisher alone, on a local disk.
        client_id: MQTT client id, stable; default one made from the directory's journal.
        username: MQTT user name.
        password: MQTT password.
        tls: How to encrypt ``mqtts`` and ``wss``; None for verification against the system's certificates.
        proxy: On the way to the broker.
        protocol: ``5``, ``3.1.1``, ``3.1``, or ``auto``.
        keep_alive_s: Seconds; a shorter value of the server wins [MQTT-3.2.2-21].
        session_expiry_s: Seconds the broker keeps the session, which QoS 2 needs; default for ever.
        abandon_session: A former client id of this directory whose session at the broker is given up: what is under way
            with QoS 2 may come twice. Without it a changed client id is refused.
        max_bytes: Most bytes of the outbox on disk; None for no limit but the disk.
        min_free_bytes: Space left free on the file system.
        max_age_s: Messages that old are not sent any more; None for never.
        overflow: What `publish` does when the outbox is full: ``block`` until there is room, or ``refuse``.
        receipts: Keep each message until its gateway says that it is in Kafka, and send it again when a broker lost
            it (docs/receipts.md). MQTT 5, and a line with ``receipts`` in its gateway.
        receipt_key_file: Holds the key that the gateway has too, or this publisher's own.
        receipt_trust_all_clients: There is no key: whoever may publish on the receipts' topic can make this publisher
            let go of messages.
        receipt_prefix: Where receipts come, as the gateway has it.
        receipt_patience_s: Seconds without progress before the gateway is asked what it has.
        on_outcome: Called with number and outcome (``delivered``, ``expired``, ``refused``; ``arrived`` with a
            receipt) of each message, also of those of an earlier life, on the mqtt thread.
        brokers_share_sessions: The brokers are one cluster; otherwise each has a session of its own, and there is no
            QoS 2.

    Raises:
        ConfigError: Something that can't be; TL-M23 for a changed client id.
        JournalError: The directory can't be used; TL-J03 when another publisher has it.
    """

    def __init__(
        self,
        brokers: str | Sequence[str],
        *,
        state_dir: str | Path,
        client_id: str = "",
        username: str | None = None,
        password: bytes | str | None = None,
        tls: Tls | None = None,
        proxy: Proxy | None = None,
        protocol: Literal["5", "3.1.1", "3.1", "auto"] = "5",
        keep_alive_s: int = 60,
        session_expiry_s: int = 0xFFFFFFFF,
        abandon_session: str = "",
        max_bytes: int | None = None,
        min_free_bytes: int = 64 << 20,
        max_age_s: float | None = None,
        overflow: Literal["block", "refuse"] = "block",
        receipts: bool = False,
        receipt_key_file: str | Path | None = None,
        receipt_trust_all_clients: bool = False,
        receipt_prefix: str = PREFIX,
        receipt_patience_s: float = 30.0,
        on_outcome: Callable[[int, str], None] | None = None,
        brokers_share_sessions: bool = False,
    ) -> None:
        endpoints = endpoints_of(brokers)
        if protocol not in LEVELS or overflow not in ("block", "refuse"):
            raise wrong("protocol is 5, 3.1.1, 3.1 or auto, overflow is block or refuse")
        if receipts and protocol != "5":
            raise wrong('receipts need protocol "5"')
        check_settings(
            client_id,
            keep_alive_s=keep_alive_s,
            session_expiry_s=session_expiry_s,
            min_free_bytes=min_free_bytes,
            max_bytes=max_bytes,
            max_age_s=max_age_s,
            receipt_patience_s=receipt_patience_s,
        )
        self._where = str(endpoints[0])
        self._way = Way(endpoints, tls, proxy, brokers_share_sessions=brokers_share_sessions)
        self._told = on_outcome
        self._abandoned = abandon_session
        self._directory = Path(state_dir).expanduser()
        limits = Limits(max_bytes=max_bytes, min_free_bytes=min_free_bytes, segment_bytes=16 << 20)
        self._outbox = Outbox.open(self._directory / "outbox", schema=OUTBOX_SCHEMA, limits=limits)
        try:
            keys = keys_of(self._outbox, receipt_key_file, trust=receipt_trust_all_clients) if receipts else None
        except BaseException:
            self._outbox.close()
            raise
        self._awaited = awaited_of(self._outbox, receipt_patience_s, keys) if receipts else None
        if not receipts:
            self._outbox.journal.forget(CONSUMER)
        topic = receipt_topic(receipt_prefix, self._outbox.journal.journal_id)
        self._config = SessionConfig(
            client_id or f"towline-{self._outbox.journal.journal_id}",
            self._where,
            filters=(Filter(topic, 1, retain_handling=0),) if receipts else (),  # the newest receipt is retained
            username=username,
            password=password.encode() if isinstance(password, str) else password,
            session_expiry_s=session_expiry_s,
            keep_alive_s=keep_alive_s,
            unknown_session="adopt",
            durable=session_expiry_s > 0,
            durable_ids=True,
        )
        self._log = Log()
        #: its condition guards everything below
        self._home = Home(self._directory)
        self._changed = self._home.changed
        #: one of several threads that close it at the same time ends it, the others wait
        self._ending = threading.RLock()
        refuses = overflow == "refuse"
        self._intake = Intake(self._home, self._outbox, refuses=refuses, max_bytes=max_bytes, on_stored=self._stored)
        #: number of a message → its stage at the broker, as long as somebody holds it or wants to be told
        self._stages: weakref.WeakValueDictionary[int, Completion[None]] = weakref.WeakValueDictionary()
        #: the same for their receipts
        self._ends: weakref.WeakValueDictionary[int, Completion[None]] = weakref.WeakValueDictionary()
        #: the one end of all messages where there are no receipts
        self._no_end: Completion[None] | None = None
        if not receipts:
            self._no_end = Completion(self._home)
            self._no_end._settle(failure=without_receipts(self._where))  # noqa: SLF001 - ours
        #: every message below has been entered in `_stages`
        self._entered = self._outbox.end
        #: outcomes of messages that the mqtt thread had done before they were entered
        self._early: dict[int, Outcome] = {}
        #: outcomes of this turn, told together
        self._outcomes: list[tuple[int, Outcome]] = []
        try:
            self._downlink = Downlink(
                self._outbox,
                handle=self._handle,
                log=self._log,
                refused_dir=self._directory / "refused",
                max_age_s=max_age_s,
                on_outcome=self._outcome,
                on_progress=self._progress,
                mark=self._awaited.mark if self._awaited is not None else None,
            )
            self._driver = SessionDriver(
                self._way,
                Hooks(new_session=self._new_session, perform=self._perform, ended=self._ended),
                LEVELS[protocol],
            )
        except BaseException:
            self._outbox.close()
            raise
        self._disk_thread = threading.Thread(target=self._store_all, name="publisher-disk", daemon=True)
        self._mqtt_thread = threading.Thread(target=self._deliver_all, name="publisher-mqtt", daemon=True)
        self._home.threads = (self._disk_thread, self._mqtt_thread)
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
        return self._outbox.journal.journal_id

    @property
    def epoch(self) -> int:
        """Grows by one each time the directory is opened [I8]."""
        return self._outbox.journal.epoch

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        qos: int = 1,
        retain: bool = False,
        content_type: str | None = None,
        payload_is_utf8: bool | None = None,
        response_topic: str | None = None,
        correlation_data: bytes | None = None,
        user_properties: Iterable[tuple[str, str]] = (),
        message_expiry_s: int | None = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Receipt:
        """Hand over a message; on return it is durable.

        Args:
            topic: Topic name.
            payload: Bytes, or text for UTF-8.
            qos: 0, 1 or 2. QoS 0 is kept until it is sent, and sent once; with receipts it is kept as the others are.
            retain: The broker keeps it for later subscribers.
            content_type: MQTT 5, as all that follow.
            payload_is_utf8: The payload is text.
            response_topic: Where an answer is expected.
            correlation_data: Goes into the answer.
            user_properties: Pairs, in order, repetitions kept.
            message_expiry_s: Seconds from now after which nobody needs it any more.
            wait: Return when the message is durable; False returns at once: see `Receipt.on_disk`.
            timeout: Seconds to wait for room, and with `wait` for the disk; None for ever. A write under way is waited
                for.

        Raises:
            ConfigError: TL-C52, MQTT has no way to say this message.
            PublisherError: TL-O01, the outbox is full and `overflow` is ``refuse``. TL-O30, not taken within `timeout`.
                TL-O02, the publisher is closed.
                TL-O08, it belongs to the process that was forked. TL-O09, it has ended by a fault. TL-O10, this is a
                callback, and only ``wait=False`` can be done there.
            JournalFailed: TL-J04, the disk failed: what was not durable before is not promised.
        """
        fields = fields_of(
            topic,
            payload,
            qos,
            several_sessions=self._way.several_sessions,
            retain=retain,
            content_type=content_type,
            payload_is_utf8=payload_is_utf8,
            response_topic=response_topic,
            correlation_data=correlation_data,
            user_properties=user_properties,
            message_expiry_seconds=message_expiry_s,
        )
        if wait:
            self._home.may_wait()
        receipt = Receipt(topic, self._home, self._no_end)
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
        self._home.may_wait()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while left := self._unsent(end_to_end=end_to_end is not False):
                if (over := self._home.over) is not None:
                    raise over
                rest = None if deadline is None else deadline - time.monotonic()
                if rest is not None and rest <= 0:
                    return left
                self._changed.wait(rest)
        return 0

    @property
    def crowded(self) -> bool:
        """The disk can't keep up: `publish` would wait before it takes a message."""
        return self._intake.crowded

    @property
    def waiting(self) -> int:
        """Messages that are not at the broker."""
        self._home.check()
        with self._changed:
            return self._unsent()

    @property
    def awaiting(self) -> int:
        """Messages that are not at the broker, or have no receipt where there are any."""
        self._home.check()
        with self._changed:
            return self._unsent(end_to_end=True)

    def status(self) -> dict[str, Any]:
        """The account, as a gateway's: accepted = queued + in_flight + delivered + expired + refused [I11]."""
        self._home.check()
        error, awaited = self._driver.error, self._awaited
        return {
            **self._downlink.status(),
            "receipts": awaited.status(self._outbox.end) if awaited is not None else None,
            "online": self._driver.online,
            "client_id": self._config.client_id,
            "broker": str(self._driver.endpoint),
            "last_error": str(error) if error else None,
            "held_back": str(self._intake.full_since) if self._intake.full_since else self._downlink.held_back,
        }

    def close(self, timeout: float = 30.0, *, end_to_end: bool | None = None) -> int:
        """Wait as `flush` does, at most `timeout` seconds, and end; a second call does nothing.

        Nor does a call in a process that has inherited the publisher: it belongs to the one that made it.

        Returns:
            Messages that are not at the broker, or have no receipt. They stay on disk, and the next `Publisher` on this
            directory sends them; a warning says how many.
        """
        if self._home.inherited:
            return 0
        self._home.may_wait()
        with self._changed:
            if self._home.closing:
                return 0
        with contextlib.suppress(BrokerError, JournalError, PublisherError):
            self.flush(timeout, end_to_end=end_to_end)
        with self._ending:
            if first := not self._home.ended:
                self._end()
        left = self._unsent(end_to_end=end_to_end is not False)
        if left and first:
            receipts = self._awaited.status(self._outbox.end) if self._awaited is not None else None
            told = left_on_disk(left, self._directory, None if self._unsent() else receipts)
            self._log.warning(told, code="TL-O03")
        return left

    # -- inside: coming in --

    def _unsent(self, *, end_to_end: bool = False) -> int:
        waiting = self._outbox.waiting
        if end_to_end and self._awaited is not None:
            settled = self._awaited.settled
            waiting = max(waiting, self._outbox.end - settled.watermark - settled.count_above())
        return len(self._intake) + waiting

    def _store_all(self) -> None:
        """The disk thread."""
        try:
            self._intake.run()
        except BaseException as error:  # noqa: BLE001 - told to everybody who waits
            self._die(error, disk=True)

    def _stored(self, group: list[PendingMessage], first: int) -> None:
        callbacks: Callbacks = []
        with self._changed:
            for number, message in enumerate(group, first):
                stage = message.receipt.on_disk
                callbacks += [(stage, call) for call in stage._settle(number)]  # noqa: SLF001 - ours
                self._stages[number] = message.receipt.at_broker
                if self._awaited is not None:
                    self._ends[number] = message.receipt.end_to_end
                    if number in self._awaited.settled:  # the mqtt thread was faster
                        callbacks += settle(self._ends, number)
                if (early := self._early.pop(number, None)) is not None:
                    callbacks += self._settled(number, early)
            self._entered = first + len(group)
            if self._home.dead is not None:  # the mqtt thread has ended meanwhile
                callbacks += self._abandon(self._home.dead)
            self._changed.notify_all()
        self._driver.wake()
        call_all(callbacks)

    # -- inside: going out --

    def _deliver_all(self) -> None:
        """The mqtt thread."""
        try:
            while not self._home.closing and self._home.dead is None:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - told to everybody who waits
            self._die(error, disk=False)

    def _turn(self) -> None:
        driver = self._driver
        times = [self._downlink.due(), self._awaited.due() if self._awaited is not None else None]
        due = min((at for at in times if at is not None), default=None)
        patience = _LONGEST_TURN if due is None else max(0.0, min(due - time.monotonic(), _LONGEST_TURN))
        try:
            driver.turn(patience)
            if self._awaited is not None and (asking := self._awaited.turn(time.monotonic())):
                self._downlink.send_again(asking, self._awaited.waits)
            self._downlink.turn(unsent=driver.unsent)
        except JournalFull as error:  # what can't be made durable must not be acted on
            driver.renew(Unreachable("TL-M13", self._where, f"what is sent can't be recorded: {error.what}", error.do))
        if driver.fatal is not None:
            # What is on disk is safe, and another may mend the broker: go on trying, and say so.
            self._log.warning("no connection", code=driver.fatal.code, reason=str(driver.fatal))
            driver.fatal = None

    def _ended(self) -> bool:
        """The connection is gone; whether the message was found at which the broker ended it."""
        if self._awaited is not None:
            self._awaited.offline()
        return self._downlink.lost(self._driver.session.outbound.withdraw())

    def _handle(self, event: Event) -> None:
        self._driver.handle(event)

    def _new_session(self, level: int) -> Session:
        record = recall(self._outbox.session, str(self._directory), self._config, self._abandoned)
        if record is not None and self._awaited is not None:  # to get the newest receipt, which the broker retains
            record = replace(record, subscriptions={})
        session = Session(replace(self._config, protocol=level), record)
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
            self._hear(action)
        elif isinstance(action, SessionLost):
            self._outbox.count(sessions_lost=1)
            self._log.warning("the broker has lost our session", code="TL-M22", broker=str(self._driver.endpoint))
        else:
            self._downlink.perform(action)

    def _outcome(self, number: int, outcome: Outcome) -> None:
        self._outcomes.append((number, outcome))

    def _progress(self) -> None:
        """Tell all outcomes of a turn at once."""
        outcomes, self._outcomes = self._outcomes, []
        callbacks: Callbacks = []
        with self._changed:
            for number, outcome in outcomes:
                if number >= self._entered:
                    self._early[number] = outcome
                else:
                    callbacks += self._settled(number, outcome)
            self._changed.notify_all()
        call_all(callbacks)
        if self._told is not None:
            for number, outcome in outcomes:
                guarded(partial(self._told, number, outcome.value))
        if self._awaited is not None and any(outcome is not Outcome.DELIVERED for _, outcome in outcomes):
            keep(self._outbox, self._awaited, self._downlink.oldest)

    def _settled(self, number: int, outcome: Outcome) -> Callbacks:
        """Settle the stages of a message, with the condition held; what is to be called for it."""
        if outcome is Outcome.DELIVERED:
            return settle(self._stages, number)
        callbacks = settle(self._stages, number, not_sent(self._where, number, outcome))
        if self._awaited is not None and number not in self._awaited.settled:
            self._awaited.give_up(number)
            callbacks += settle(self._ends, number, given_up(self._where, number, outcome))
        return callbacks

    # -- inside: receipts --

    def _hear(self, action: Deliver) -> None:
        """Take receipts; that they are acknowledged at once loses nothing, the broker retains the newest."""
        for message in action.messages.packets:
            if self._awaited is None or message.payload is None:
                continue  # a stub is too large for a receipt of ours
            before = self._awaited.not_believed
            told = self._awaited.believed(message.payload)
            if told is not None:
                self._take(self._awaited, told)
            elif not before and self._awaited.not_believed:
                self._log.warning(_NOT_BELIEVED, code="TL-O11")
        self._handle(Settled(action.first + len(action.messages)))
        self._handle(Stored(action.ticket))

    def _take(self, awaited: Awaited, told: Told) -> None:
        callbacks: Callbacks = []
        with self._changed:
            before = awaited.settled.watermark
            try:
                lost = awaited.take(told, self._outbox.end, time.monotonic())
            except Restored:
                lost = []
                self._log.warning("the outbox is an older copy of itself; messages may be doubled", code="TL-O07")
                awaited.begin_again(told.epoch + 1)
                keep(self._outbox, awaited, self._downlink.oldest)
                self._outbox.journal.sync()
            numbers = range(before, awaited.settled.watermark)
            for number in numbers if len(numbers) < len(self._ends) else [n for n in self._ends if n in numbers]:
                callbacks += settle(self._ends, number)
            self._changed.notify_all()
        call_all(callbacks)
        if numbers:
            keep(self._outbox, awaited, self._downlink.oldest)
        if self._told is not None:
            for number in numbers:
                guarded(partial(self._told, number, "arrived"))
        if lost:
            self._log.warning("the broker lost messages; sending them again", count=sum(e - s for s, e in lost))
            self._downlink.send_again(lost, awaited.waits)

    # -- inside: ending --

    def _die(self, error: BaseException, *, disk: bool) -> None:
        with self._changed:
            failure = self._home.fail(error)
            self._intake.fail(failure, group=disk)
            callbacks = self._abandon(failure)
            self._changed.notify_all()
        self._driver.wake()
        call_all(callbacks)

    def _abandon(self, failure: BaseException) -> Callbacks:
        """Let nobody wait for what this publisher will not see, with the condition held; what is to be called."""
        stages = [self._stages, self._ends]
        return [one for kind in stages for number in list(kind) for one in settle(kind, number, failure)]

    def _end(self) -> None:
        with self._changed:
            self._home.closing = True
            self._changed.notify_all()
        self._driver.cancel()
        self._disk_thread.join()
        self._mqtt_thread.join()
        with self._changed:
            self._home.ended = True
            callbacks = self._abandon(self._home.dead or left_behind(self._directory))
            self._changed.notify_all()
        call_all(callbacks)
        atexit.unregister(self._at_exit)
        self._driver.leave(_GOODBYE)
        try:
            if self._home.dead is None:
                self._downlink.close()
        finally:
            self._driver.dispose()
            with contextlib.suppress(JournalError):
                self._outbox.close()

    def _at_exit(self) -> None:
        """The interpreter ends without `close`: give the broker a moment, and say what stays."""
        left = self.close(_AT_EXIT, end_to_end=False)  # nothing, in a process that has inherited it
        if left:
            sys.stderr.write(f"{left_on_disk(left, self._directory)}   [TL-O03]\n")
