"""`Publisher`: the Session and the outbox of a gateway inside the user's process.

    any thread     publish   queue the message, wait until it is durable
    disk thread    takes all that is queued, one frame, one sync for all of it: group commit across threads
    mqtt thread    delivers, over reconnects, restarts and days offline

What is on disk is delivered by the next `Publisher` on the same directory if this process ends first, however it ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Literal, NoReturn, Self, Unpack

from pydantic import AfterValidator, Field

from towline.delivery.outbound import Downlink, Outcome, recall
from towline.delivery.receipts.mark import MARK_BYTES
from towline.delivery.receipts.payload import PREFIX, ReceiptPayload, receipt_topic
from towline.errors import BrokerError, JournalError, JournalFull, PublisherError, Unreachable
from towline.files import check_owner
from towline.journal import Limits, Outbox
from towline.mqtt.events import Action, Deliver, Event, Filter, Online, Remember, SessionLost, Settled, Stored
from towline.mqtt.session import Session
from towline.net.client import Properties, checked
from towline.net.driver import Hooks, SessionDriver
from towline.net.settings import Arguments, ClientSettings, refuse
from towline.options import path
from towline.publisher.awaited import CONSUMER, Awaited, Restored, keys_of
from towline.publisher.receipt import Lifecycle, PendingMessage, Receipt, guarded, log
from towline.schema import OUTBOX_SCHEMA
from towline.text import counted
from towline.threads import guarded_thread

#: Patience with the broker's answers when the interpreter ends without `close`, in seconds.
_AT_EXIT: Final = 5.0
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
        try:
            keys = keys_of(self._outbox, receipt_key_file) if receipts else None
            self._awaited = Awaited(self._outbox, receipt_patience_s, keys) if keys else None
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
            where, refuses = str(connection.brokers[0]), overflow == "refuse"
            self._life = Lifecycle(
                self._directory, where, self._awaited, self._outbox, refuses=refuses, max_bytes=max_bytes
            )
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
                log=log,
                refused_dir=self._directory / "refused",
                max_age_s=max_age_s,
                on_outcome=lambda *outcome: self._outcomes.append(outcome),
                on_progress=self._progress,
                mark=self._awaited.mark if self._awaited is not None else None,
            )
            hooks = Hooks(
                new_session=self._new_session,
                perform=self._perform,
                ended=lambda: self._downlink.lost(self._driver.session.outbound.withdraw()),
            )
            self._driver = SessionDriver(self._connection, hooks)
        except BaseException:
            self._outbox.close()
            raise
        life = self._life
        life.wake = self._driver.wake
        life.threads = (
            guarded_thread(life.run, "publisher-disk", ended=partial(life.die, disk=True)),
            guarded_thread(self._deliver_all, "publisher-mqtt", ended=partial(life.die, disk=False)),
        )
        for thread in life.threads:
            thread.start()
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
        several = self._connection.several_sessions
        fields = fields_of(topic, payload, qos, several=several, retain=retain, **properties)
        if wait:
            self._life.may_wait()
        receipt = Receipt(topic, self._life, self._life.no_end)
        message = PendingMessage(fields, receipt)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._life.put(message, deadline)
        if wait:
            self._life.wait_stored(message, deadline)
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
        return self._life.crowded

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
        error, awaited, full = self._driver.error, self._awaited, self._life.full_since
        return {
            **self._downlink.status(),
            "receipts": awaited.status() if awaited is not None else None,
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
            receipts = self._awaited.status() if self._awaited is not None else None
            what = _left_on_disk(left, self._directory, None if self._unsent() else receipts)
            log.warning(what, code="TL-O03")
        return left

    # -- inside --

    def _unsent(self, *, end_to_end: bool = False) -> int:
        waiting = self._outbox.waiting
        if end_to_end and self._awaited is not None:
            waiting = max(waiting, self._awaited.awaiting)
        return self._life.unstored + waiting

    # -- the mqtt thread --

    def _deliver_all(self) -> None:
        while not self._life.closing and self._life.dead is None:
            self._turn()

    def _turn(self) -> None:
        """Do what is due, and wait for more."""
        driver, awaited = self._driver, self._awaited
        try:
            driver.turn(self._downlink.due(), awaited.due if awaited and driver.online else None)
            if awaited and driver.online and (question := awaited.turn(time.monotonic())):
                self._downlink.send_again(question, awaited.waits)
            self._downlink.turn(unsent=driver.unsent)
        except JournalFull as error:  # what can't be made durable must not be acted on
            what = f"what is sent can't be recorded: {error.what}"
            driver.renew(Unreachable("TL-M13", self._connection.session.where, what, error.do))
        if driver.fatal is not None:
            # What is on disk is safe, and another may mend the broker: go on trying, and say so.
            log.warning("no connection", code=driver.fatal.code, reason=str(driver.fatal))
            driver.fatal = None

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
            log.info("online", broker=str(self._driver.endpoint), session="kept" if action.resumed else "new")
            if self._awaited is not None:
                self._awaited.online(time.monotonic())
        elif isinstance(action, Deliver):
            self._take_receipts(action)
        elif isinstance(action, SessionLost):
            self._outbox.count(sessions_lost=1)
            log.warning("the broker has lost our session", code="TL-M22", broker=str(self._driver.endpoint))
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
            self._awaited.keep(self._downlink.oldest)

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
                log.warning(_NOT_BELIEVED, code="TL-O11")
        self._driver.handle(Settled(action.first + len(action.messages)))
        self._driver.handle(Stored(action.ticket))

    def _take(self, awaited: Awaited, receipt: ReceiptPayload) -> None:
        with self._life.settling():
            before = awaited.settled.watermark
            try:
                lost = awaited.take(receipt, time.monotonic())
            except Restored:
                lost = []
                log.warning("the outbox is an older copy of itself; messages may be doubled", code="TL-O07")
                awaited.keep(self._downlink.oldest)
                self._outbox.sync()
            numbers = range(before, awaited.settled.watermark)
            self._life.arrived(numbers)
        if numbers:
            awaited.keep(self._downlink.oldest)
        for number in numbers:
            self._report(number, "arrived")
        if lost:
            log.warning("the broker lost messages; sending them again", count=sum(e - s for s, e in lost))
            self._downlink.send_again(lost, awaited.waits)

    # -- inside: ending --

    def _end(self) -> None:
        with self._changed:
            self._life.closing = True
            self._changed.notify_all()
        self._driver.cancel()
        for thread in self._life.threads:
            thread.join()
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


class AsyncPublisher:
    """A `Publisher` whose waits are awaits; arguments are the same. An asynchronous context manager.

    The stages of a `Receipt` can be awaited: ``await receipt.at_broker``.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._given = (args, settings)
        self._publisher: Publisher | None = None

    @property
    def publisher(self) -> Publisher:
        """The publisher underneath: status, journal id, epoch.

        Raises:
            RuntimeError: It is not open.
        """
        if self._publisher is None:
            raise RuntimeError("open it first: async with AsyncPublisher(...) as publisher")
        return self._publisher

    async def __aenter__(self) -> Self:
        args, settings = self._given
        self._publisher = await asyncio.to_thread(Publisher, *args, **settings)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(0 if kind else 30.0)

    async def publish(self, topic: str, payload: bytes | str = b"", *, wait: bool = True, **properties: Any) -> Receipt:
        """Hand over a message; see `Publisher.publish` for arguments and errors."""
        publisher = self.publisher
        if properties.get("timeout") is not None:  # it takes the message back when it runs out
            return await asyncio.to_thread(publisher.publish, topic, payload, wait=wait, **properties)
        if publisher.crowded:  # it would wait, and the loop must not
            receipt = await asyncio.to_thread(publisher.publish, topic, payload, wait=False, **properties)
        else:
            receipt = publisher.publish(topic, payload, wait=False, **properties)
        if wait:
            await receipt.on_disk
        return receipt

    async def flush(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - as `Publisher.flush`
        *,
        end_to_end: bool | None = None,
    ) -> int:
        """Wait until everything is at the broker, or has its receipt; see `Publisher.flush`."""
        return await asyncio.to_thread(self.publisher.flush, timeout, end_to_end=end_to_end)

    async def close(
        self,
        timeout: float = 30.0,  # noqa: ASYNC109 - as `Publisher.close`
        *,
        end_to_end: bool | None = None,
    ) -> int:
        """End; see `Publisher.close`."""
        return await asyncio.to_thread(self.publisher.close, timeout, end_to_end=end_to_end)


def fields_of(
    topic: str, payload: bytes | str, qos: int, *, several: bool = False, retain: bool, **properties: Unpack[Properties]
) -> dict[str, Any]:
    """The columns of a message's row; errors of `checked`. There is room for the marks of receipts in a later life."""
    data, is_utf8, said = checked(topic, payload, qos, MARK_BYTES, several=several, **properties)
    pairs = said.pop("user_properties", None)
    return {
        "topic": topic,
        "payload": data,
        "qos": int(qos),
        "retain": bool(retain),
        "payload_is_utf8": is_utf8,
        "user_properties": [{"key": key, "value": value} for key, value in pairs] if pairs else None,
        "message_expiry_seconds": said.pop("expiry_s", None),
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
