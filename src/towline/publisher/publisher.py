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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self, Unpack

from towline.delivery.receipts.mark import MARK_BYTES
from towline.delivery.receipts.payload import PREFIX, receipt_topic
from towline.errors import BrokerError, ConfigError, JournalError, PublisherError
from towline.journal import Limits, Outbox
from towline.mqtt.events import Filter
from towline.mqtt.rules import NO_QOS_2, message_problem, number_problem, whole_number_problem
from towline.net.messages import Properties
from towline.net.options import ClientSettings
from towline.options import path
from towline.ownership import check_owner
from towline.publisher.awaited import CONSUMER, awaited_of, keys_of
from towline.publisher.delivery import OutboxDelivery
from towline.publisher.intake import Intake
from towline.publisher.receipt import Lifecycle, Log, PendingMessage, Receipt, Stages, settling
from towline.schema import OUTBOX_SCHEMA
from towline.text import counted
from towline.threads import guarded_thread

__all__ = ["Publisher", "fields_of"]

#: Patience with the broker's answers when the interpreter ends without `close`, in seconds.
_AT_EXIT: Final = 5.0


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
        options = settings.options(brokers, client_id or "towline", session_expiry_s=0xFFFFFFFF)
        if overflow not in ("block", "refuse"):
            raise _wrong("overflow is block or refuse")
        if receipts and settings.protocol != "5":
            raise _wrong('receipts need protocol "5"')
        problems = {
            "min_free_bytes": whole_number_problem(min_free_bytes, 0, 1 << 62),
            "max_bytes": None if max_bytes is None else whole_number_problem(max_bytes, 1, 1 << 62),
            "max_age_s": None if max_age_s is None else number_problem(max_age_s, 0, 1e12),
            "receipt_patience_s": number_problem(receipt_patience_s, 0.001, 1e9),
        }
        if wrong := next((f"{name}: {problem}" for name, problem in problems.items() if problem), None):
            raise _wrong(wrong)
        where = str(options.brokers[0])
        try:
            self._directory = Path(path(str(state_dir)))
        except ValueError as error:
            raise _wrong(f"state_dir: {error}") from None
        limits = Limits(max_bytes=max_bytes, min_free_bytes=min_free_bytes, segment_bytes=16 << 20)
        check_owner(self._directory)
        self._outbox = Outbox.open(self._directory / "outbox", schema=OUTBOX_SCHEMA, limits=limits)
        self._awaited = None
        try:
            if receipts:
                keys = keys_of(self._outbox, receipt_key_file)
                self._awaited = awaited_of(self._outbox, receipt_patience_s, keys)
        except BaseException:
            self._outbox.close()
            raise
        if not receipts:
            self._outbox.journal.forget(CONSUMER)
        topic = receipt_topic(receipt_prefix, self._outbox.journal.journal_id)
        session = replace(
            options.session,
            client_id=client_id or f"towline-{self._outbox.journal.journal_id}",
            filters=(Filter(topic, 1, retain_handling=0),) if receipts else (),  # the newest receipt is retained
            durable_ids=True,
        )
        self._options = replace(options, session=session)
        self._log = Log()
        #: its condition guards what the threads share
        self._life = Lifecycle(self._directory)
        self._changed = self._life.changed
        #: one of several threads that close it at the same time ends it, the others wait
        self._ending = threading.RLock()
        refuses = overflow == "refuse"
        self._intake = Intake(self._life, self._outbox, refuses=refuses, max_bytes=max_bytes, on_stored=self._stored)
        self._stages = Stages(self._life, where, self._awaited, self._outbox.end)
        try:
            self._delivery = OutboxDelivery(
                self._life,
                self._outbox,
                self._stages,
                self._awaited,
                options=self._options,
                abandoned=abandon_session,
                max_age_s=max_age_s,
                on_outcome=on_outcome,
            )
        except BaseException:
            self._outbox.close()
            raise
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
            properties: Of MQTT 5, see `towline.net.messages.Properties`; the seconds of an expiry begin now.

        Raises:
            ConfigError: TL-C52, MQTT has no way to say this message.
            PublisherError: TL-O01, the outbox is full and `overflow` is ``refuse``. TL-O30, not taken within `timeout`.
                TL-O02, the publisher is closed.
                TL-O08, it belongs to the process that was forked. TL-O09, it has ended by a fault. TL-O10, this is a
                callback, and only ``wait=False`` can be done there.
            JournalFailed: TL-J04, the disk failed: what was not durable before is not promised.
        """
        fields = fields_of(
            topic, payload, qos, several_sessions=self._options.several_sessions, retain=retain, **properties
        )
        if wait:
            self._life.may_wait()
        receipt = Receipt(topic, self._life, self._stages.no_end)
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
        status, full = self._delivery.status(), self._intake.full_since
        status |= {"closed": self._life.ended, "measured": self._outbox.journal.measured()}
        return {**status, "held_back": str(full)} if full else status

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
            settled = self._awaited.settled
            waiting = max(waiting, self._outbox.end - settled.watermark - settled.count_above())
        return len(self._intake) + waiting

    def _stored(self, group: list[PendingMessage], first: int) -> None:
        with settling(self._life) as callbacks:
            callbacks.extend(self._stages.stored(group, first))
            if self._life.dead is not None:  # the mqtt thread has ended meanwhile
                callbacks.extend(self._stages.abandon(self._life.dead))
            self._delivery.wake()

    def _deliver_all(self) -> None:
        """The mqtt thread."""
        while not self._life.closing and self._life.dead is None:
            self._delivery.turn()

    # -- inside: ending --

    def _die(self, error: BaseException, *, disk: bool) -> None:
        with settling(self._life) as callbacks:
            failure = self._life.fail(error)
            self._intake.fail(failure, group=disk)
            callbacks.extend(self._stages.abandon(failure))
            self._delivery.wake()

    def _end(self) -> None:
        with self._changed:
            self._life.closing = True
            self._changed.notify_all()
        self._delivery.cancel()
        self._disk_thread.join()
        self._mqtt_thread.join()
        with settling(self._life) as callbacks:
            self._life.ended = True
            callbacks.extend(self._stages.abandon(self._life.dead or self._left_behind()))
        atexit.unregister(self._at_exit)
        try:
            self._delivery.end()
        finally:
            with contextlib.suppress(JournalError):
                self._outbox.close()

    def _left_behind(self) -> PublisherError:
        what, do = "the publisher was closed before", "The message stays on disk, and the next start sends it."
        return PublisherError("TL-O03", str(self._directory), what, do)

    def _at_exit(self) -> None:
        """The interpreter ends without `close`: give the broker a moment, and say what stays."""
        left = self.close(_AT_EXIT, end_to_end=False)  # nothing, in a process that has inherited it
        if left:
            sys.stderr.write(f"{_left_on_disk(left, self._directory)}   [TL-O03]\n")


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
        ConfigError: TL-C52, MQTT has no way to say it, with the marks of receipts, which it may get in a later life.
    """
    if qos == 2 and several_sessions:
        raise ConfigError("TL-C52", f"message to {str(topic)[:80]!r}", *NO_QOS_2)
    pairs = tuple(user_properties or ())
    said = {"content_type": content_type, "response_topic": response_topic, "correlation_data": correlation_data}
    room = MARK_BYTES
    if problem := message_problem(topic, payload, qos, room, user_properties=pairs, expiry_s=expiry_s, **said):
        what = f"MQTT has no way to say it: {problem}"
        raise ConfigError("TL-C52", f"message to {str(topic)[:80]!r}", what, "Change it.")
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
    """What becomes of messages that a publisher leaves behind.

    Args:
        left: How many.
        directory: Where they are.
        receipts: The account of receipts, where nothing but these is missing.
    """
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


def _wrong(what: str) -> ConfigError:
    """The error of an argument that can't be."""
    return ConfigError("TL-C52", "Publisher", what, "Change it.")
