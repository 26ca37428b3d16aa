"""`Publisher`: session and outbox of a gateway inside the application's process.

    any thread     publish: queue the message, wait until it is durable
    disk thread    write all queued messages as one frame with one sync: group commit across threads
    mqtt thread    deliver, across reconnects, restarts and days offline

If this process ends first, the next `Publisher` on the same directory delivers the messages on disk.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, NoReturn, Self, Unpack

from pydantic import AfterValidator, Field

from towline.delivery.outbound import OutboxSender, Outcome, load_session_record
from towline.delivery.receipts.mark import MARK_BYTES
from towline.delivery.receipts.payload import TOPIC_PREFIX, ReceiptPayload, receipt_topic
from towline.errors import BrokerError, JournalError, JournalFull, PublisherError, Unreachable
from towline.files import check_owner
from towline.journal import Limits, Outbox
from towline.mqtt import events
from towline.mqtt.session import Session
from towline.net.client import Properties, check_message
from towline.net.driver import Hooks, SessionDriver
from towline.net.settings import Arguments, ClientSettings, reject_argument
from towline.options import parse_path
from towline.publisher.pending_receipts import RECEIPT_CONSUMER, OutboxRestored, PendingReceipts, read_receipt_keys
from towline.publisher.receipt import Lifecycle, PendingMessage, Receipt, call_guarded, log
from towline.schema import OUTBOX_SCHEMA
from towline.text import count_text
from towline.threads import guarded_thread

#: Timeout in seconds for the broker's answers at interpreter exit without `close`.
_EXIT_TIMEOUT_S: Final = 5.0
_NO_RECEIPTS_HINT: Final = (
    ". No receipt has ever arrived: the line that receives these messages needs `receipts`, with the same prefix and "
    "the key from which this publisher's key is derived, and it must reach Kafka"
)
_UNVERIFIED_RECEIPT: Final = "a receipt is not signed with our key: from a gateway without the key, or forged"


class _PublisherArguments(Arguments):
    """Validated arguments of a `Publisher`."""

    state_dir: Annotated[str, AfterValidator(parse_path)]
    max_bytes: Annotated[int, Field(ge=1)] | None
    min_free_bytes: Annotated[int, Field(ge=0)]
    max_age_s: Annotated[float, Field(ge=0)] | None
    receipt_patience_s: Annotated[float, Field(ge=0.001, le=1e9)]


class Publisher:
    """MQTT publisher that loses no message after `publish` has returned; a context manager.

    One publisher per directory: a second one is refused. All methods may be called from any thread.

    Args:
        brokers: ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://``, ``wss://`` or ``unix:///PATH``; several in order of
            preference.
        state_dir: Directory of this publisher alone, on a local disk.
        client_id: Stable MQTT client id; default derived from the journal id.
        settings: Connection settings; `session_expiry_s` is for ever by default, which QoS 2 needs.
        abandon_session: Former client id of this directory; its session at the broker is abandoned, and unfinished QoS
            2 messages may be sent twice. Without it a changed client id is refused.
        max_bytes: Most bytes of the outbox on disk; None for no limit but the disk.
        min_free_bytes: Bytes left free on the file system.
        max_age_s: Messages older than these seconds are not sent any more; None for never.
        receipts: Keep each message until its gateway confirms it in Kafka, and resend it if a broker lost it
            (docs/publishers.md#receipts). Needs MQTT 5, and a line with ``receipts`` in its gateway.
        receipt_key_file: Holds the gateway's key, or the key of this publisher.
        receipt_prefix: Topic prefix of receipts, as in the gateway.
        receipt_patience_s: Seconds without progress before a status request to the gateway.
        on_outcome: Called with number and outcome (``delivered``, ``expired``, ``refused``; ``arrived`` with a receipt)
            of each message, also of messages from earlier processes, on the mqtt thread.

    Raises:
        ConfigError: Invalid argument; TL-M23 for a changed client id.
        ConfigError: TL-J23, the directory belongs to another user.
        JournalError: The directory can't be used; TL-J03 when another publisher uses it.
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
        receipts: bool = False,
        receipt_key_file: str | Path | None = None,
        receipt_prefix: str = TOPIC_PREFIX,
        receipt_patience_s: float = 30.0,
        on_outcome: Callable[[int, str], None] | None = None,
    ) -> None:
        connection = settings.connection(brokers, client_id or "towline", session_expiry_s=0xFFFFFFFF)
        arguments = _PublisherArguments(
            state_dir=str(state_dir),
            max_bytes=max_bytes,
            min_free_bytes=min_free_bytes,
            max_age_s=max_age_s,
            receipt_patience_s=receipt_patience_s,
        )
        if receipts and settings.protocol != "5":
            reject_argument("receipts", 'they need protocol "5"')
        self._directory = Path(arguments.state_dir)
        limits = Limits(max_bytes=max_bytes, min_free_bytes=min_free_bytes, segment_bytes=16 << 20)
        check_owner(self._directory)
        self._outbox = Outbox.open(self._directory / "outbox", schema=OUTBOX_SCHEMA, limits=limits)
        try:
            keys = read_receipt_keys(self._outbox, receipt_key_file) if receipts else None
            self._receipts = PendingReceipts(self._outbox, receipt_patience_s, keys) if keys else None
            if keys is None:
                self._outbox.forget(RECEIPT_CONSUMER)
            receipt_filter = events.Filter(receipt_topic(receipt_prefix, self.journal_id), 1, retain_handling=0)
            session_config = replace(
                connection.session,
                client_id=client_id or f"towline-{self.journal_id}",
                filters=(receipt_filter,) if receipts else (),  # the broker retains the newest receipt
                durable_ids=True,
            )
            self._connection = replace(connection, session=session_config)
            #: its condition guards the state shared by the threads
            self._lifecycle = Lifecycle(self._directory, str(connection.brokers[0]), self._receipts, self._outbox)
            self._condition = self._lifecycle.condition
            #: of several threads in `close` one shuts down, the others wait
            self._close_lock = threading.RLock()
            self._abandoned_client_id = abandon_session
            self._on_outcome = on_outcome
            #: outcomes of one cycle of the mqtt thread, reported together
            self._outcomes: list[tuple[int, Outcome, int]] = []
            self._downlink = OutboxSender(
                self._outbox,
                handle_event=self._handle,
                log=log,
                refused_dir=self._directory / "refused",
                max_age_s=max_age_s,
                on_outcome=lambda *outcome: self._outcomes.append(outcome),
                on_progress=self._report_outcomes,
                mark=self._receipts.mark_properties if self._receipts is not None else None,
            )
            hooks = Hooks(
                new_session=self._new_session,
                perform=self._perform,
                connection_ended=lambda: self._downlink.connection_lost(
                    self._driver.session.outbound.withdraw_unsent()
                ),
            )
            self._driver = SessionDriver(self._connection, hooks)
        except BaseException:
            self._outbox.close()
            raise
        lifecycle = self._lifecycle
        lifecycle.wake = self._driver.wake
        lifecycle.threads = (
            guarded_thread(
                lifecycle.run_disk_thread, "publisher-disk", on_fault=partial(lifecycle.fail_pending, disk=True)
            ),
            guarded_thread(
                self._run_mqtt_thread, "publisher-mqtt", on_fault=partial(lifecycle.fail_pending, disk=False)
            ),
        )
        for thread in lifecycle.threads:
            thread.start()
        atexit.register(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(0 if kind else 30.0)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Publisher belongs to the process that created it: create one there, with its own directory")

    # -- any thread --

    @property
    def journal_id(self) -> str:
        """Permanent id of this outbox: 12 hex digits; together with its number it identifies a message."""
        return self._outbox.journal_id

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
        """Publish a message; on return it is durable.

        Args:
            topic: Topic name.
            payload: Bytes, or text for UTF-8.
            qos: 0, 1 or 2. A QoS 0 message is kept until it is sent, and sent once; with receipts it is kept as the
                others.
            retain: The broker retains it for later subscribers.
            wait: Return when the message is durable; False returns at once: see `Receipt.on_disk`.
            timeout: Seconds to wait for room, and with `wait` for the disk; None for no limit. A write under way is
                always awaited.
            properties: MQTT 5 properties, see `towline.net.client.Properties`; an expiry counts from now.

        Raises:
            ConfigError: TL-C51, MQTT cannot express this message.
            PublisherError: TL-O30, not accepted within `timeout`, such as in a full outbox. TL-O02, the publisher is
                closed. TL-O01, it was closed while the outbox was full. TL-O08, this is a forked process. TL-O09, an
                internal error ended the publisher. TL-O10, called from a callback, where only ``wait=False`` is
                allowed.
            JournalFailed: TL-J04, the disk failed; messages that were not durable before may be lost.
        """
        several_sessions = self._connection.several_sessions
        fields = message_columns(topic, payload, qos, several_sessions=several_sessions, retain=retain, **properties)
        if wait:
            self._lifecycle.check_may_wait()
        receipt = Receipt(topic, self._lifecycle, self._lifecycle.no_receipt_stage)
        message = PendingMessage(fields, receipt)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._lifecycle.enqueue(message, deadline)
        if wait:
            self._lifecycle.wait_until_stored(message, deadline)
        return receipt

    def flush(self, timeout: float | None = None, *, end_to_end: bool | None = None) -> int:
        """Wait until every message is at the broker, or has its receipt.

        Args:
            timeout: Longest wait in seconds; None for no limit, 0 to ask only.
            end_to_end: Wait for receipts; None waits for them if the publisher uses receipts.

        Returns:
            Number of messages that are not; they stay on disk.

        Raises:
            TowlineError: Error that ended the publisher.
        """
        self._lifecycle.check_may_wait()
        count_unsent = partial(self._count_unsent, end_to_end=end_to_end is not False)
        with self._condition:
            self._condition.wait_for(lambda: self._lifecycle.end_error or not count_unsent(), timeout)
            if (remaining := count_unsent()) and (end_error := self._lifecycle.end_error):
                raise end_error
        return remaining

    @property
    def would_block(self) -> bool:
        """Whether `publish` would wait for the disk before it accepts a message."""
        return self._lifecycle.would_block

    def status(self) -> dict[str, Any]:
        """Return counters and state: accepted = queued + in_flight + delivered + expired + refused [I11]."""
        self._lifecycle.check_process()
        error, pending, full_error = self._driver.error, self._receipts, self._lifecycle.full_error
        return {
            **self._downlink.status(),
            "receipts": pending.status() if pending is not None else None,
            "online": self._driver.online,
            "client_id": self._connection.session.client_id,
            "broker": str(self._driver.endpoint),
            "last_error": str(error) if error else None,
            "closed": self._lifecycle.closed,
            "measured": self._outbox.disk_status(),
            **({"held_back": str(full_error)} if full_error else {}),
        }

    def close(self, timeout: float = 30.0, *, end_to_end: bool | None = None) -> int:
        """Wait as `flush` does, at most `timeout` seconds, and close; a second call has no effect.

        The call has no effect in a forked process.

        Returns:
            Number of messages that are not at the broker, or have no receipt. They stay on disk, and the next
            `Publisher` on this directory sends them; a warning logs the number.
        """
        if self._lifecycle.is_forked:
            return 0
        self._lifecycle.check_may_wait()
        with self._condition:
            if self._lifecycle.closing:
                return 0
        with contextlib.suppress(BrokerError, JournalError, PublisherError):
            self.flush(timeout, end_to_end=end_to_end)
        with self._close_lock:
            if closed_here := not self._lifecycle.closed:
                self._shut_down()
        remaining = self._count_unsent(end_to_end=end_to_end is not False)
        if remaining and closed_here:
            log.warning(self._remaining_text(remaining), code="TL-O03")
        return remaining

    # -- internals --

    def _count_unsent(self, *, end_to_end: bool = False) -> int:
        unsent_count = self._outbox.waiting_rows
        if end_to_end and self._receipts is not None:
            unsent_count = max(unsent_count, self._receipts.pending_count)
        return self._lifecycle.unstored_count + unsent_count

    def _remaining_text(self, remaining: int) -> str:
        state, hint = "not at the broker", ""
        if self._receipts is not None and not self._count_unsent():
            state = "without a receipt"
            hint = "" if self._receipts.completed_ranges.watermark else _NO_RECEIPTS_HINT
        return f"{count_text(remaining)} {state}: kept in {self._directory}, and the next start continues{hint}"

    # -- the mqtt thread --

    def _run_mqtt_thread(self) -> None:
        while not self._lifecycle.closing and self._lifecycle.fatal_error is None:
            self._run_once()

    def _run_once(self) -> None:
        """Run one cycle of the mqtt thread: handle due work, then wait."""
        driver, pending = self._driver, self._receipts
        try:
            driver.run_once(self._downlink.next_turn_at(), pending.due_at if pending and driver.online else None)
            if pending and driver.online and (request := pending.due_request(time.monotonic())):
                self._downlink.resend(request, pending.is_pending)
            self._downlink.turn(unsent=driver.unsent_bytes)
        except JournalFull as error:  # actions that can't be persisted must not be performed
            problem = f"the state of deliveries can't be written: {error.problem}"
            driver.restart_session(Unreachable("TL-M13", self._connection.session.location, problem, error.remedy))
        if driver.fatal_error is not None:
            # Messages on disk are safe, and the broker may be fixed meanwhile: log, and keep trying.
            log.warning("no connection", code=driver.fatal_error.code, reason=str(driver.fatal_error))
            driver.fatal_error = None

    def _handle(self, event: events.Event) -> None:
        self._driver.handle(event)

    def _new_session(self, level: int) -> Session:
        outbox, directory, config = self._outbox, str(self._directory), self._connection.session
        record = load_session_record(outbox.session, directory, config, self._abandoned_client_id)
        if record is not None and self._receipts is not None:  # subscribes again, to get the retained newest receipt
            record = replace(record, subscriptions={})
        session = Session(self._connection.session_config_for(level), record)
        self._downlink.attach_session(session)
        return session

    def _perform(self, action: events.Action) -> None:
        if isinstance(action, events.SaveSessionRecord):
            self._outbox.set_session(asdict(action.record) if action.record else {})
        elif isinstance(action, events.Online):
            log.info("online", broker=str(self._driver.endpoint), session="kept" if action.session_resumed else "new")
            if self._receipts is not None:
                self._receipts.connection_opened(time.monotonic())
        elif isinstance(action, events.Deliver):
            self._handle_receipts(action)
        elif isinstance(action, events.SessionLost):
            self._outbox.count(sessions_lost=1)
            log.warning("the broker has lost our session", code="TL-M22", broker=str(self._driver.endpoint))
        else:
            self._downlink.perform(action)

    def _report_outcomes(self) -> None:
        """Report all outcomes of one cycle at once."""
        outcomes, self._outcomes = self._outcomes, []
        with self._lifecycle.completing_stages():
            self._lifecycle.record_outcomes(outcomes)
        for number, outcome, _ in outcomes:
            self._report_outcome(number, outcome.value)
        if self._receipts is not None and any(outcome is not Outcome.DELIVERED for _, outcome, _ in outcomes):
            self._receipts.persist(self._downlink.oldest_number)

    def _report_outcome(self, number: int, outcome: str) -> None:
        if self._on_outcome is not None:
            call_guarded(partial(self._on_outcome, number, outcome))

    # -- the mqtt thread: receipts --

    def _handle_receipts(self, action: events.Deliver) -> None:
        """Apply received receipts and acknowledge them at once: the broker retains the newest."""
        for message in action.messages.packets:
            if self._receipts is None or message.payload is None:
                continue  # a truncated message is too large for a receipt
            unverified_before = self._receipts.unverified_count
            receipt = self._receipts.verify(message.payload)
            if receipt is not None:
                self._apply_receipt(self._receipts, receipt)
            elif not unverified_before and self._receipts.unverified_count:
                log.warning(_UNVERIFIED_RECEIPT, code="TL-O11")
        self._driver.handle(events.AckWatermark(action.first_number + len(action.messages)))
        self._driver.handle(events.DeliveryStored(action.delivery_id))

    def _apply_receipt(self, pending: PendingReceipts, receipt: ReceiptPayload) -> None:
        with self._lifecycle.completing_stages():
            previous_watermark = pending.completed_ranges.watermark
            try:
                lost_ranges = pending.apply_receipt(receipt, time.monotonic())
            except OutboxRestored:
                lost_ranges = []
                log.warning("the outbox was restored from an older copy; messages may be duplicated", code="TL-O07")
                pending.persist(self._downlink.oldest_number)
                self._outbox.sync()
            numbers = range(previous_watermark, pending.completed_ranges.watermark)
            self._lifecycle.record_receipts(numbers)
        if numbers:
            pending.persist(self._downlink.oldest_number)
        for number in numbers:
            self._report_outcome(number, "arrived")
        if lost_ranges:
            count = sum(end - start for start, end in lost_ranges)
            log.warning("the broker lost messages; sending them again", count=count)
            self._downlink.resend(lost_ranges, pending.is_pending)

    # -- shutdown --

    def _shut_down(self) -> None:
        with self._condition:
            self._lifecycle.closing = True
            self._condition.notify_all()
        self._driver.cancel()
        for thread in self._lifecycle.threads:
            thread.join()
        with self._lifecycle.completing_stages():
            self._lifecycle.closed = True
            remedy = "The message stays on disk, and the next start sends it."
            error = PublisherError("TL-O03", str(self._directory), "the publisher was closed first", remedy)
            self._lifecycle.fail_stages(self._lifecycle.fatal_error or error)
        atexit.unregister(self._at_exit)
        try:
            self._driver.send_disconnect()
            if self._lifecycle.fatal_error is None:
                self._downlink.close()
        finally:
            try:
                self._driver.dispose()
            finally:
                with contextlib.suppress(JournalError):
                    self._outbox.close()

    def _at_exit(self) -> None:
        """Close at interpreter exit: wait briefly for the broker and report the remaining messages."""
        remaining = self.close(_EXIT_TIMEOUT_S, end_to_end=False)  # no effect in a forked process
        if remaining:
            sys.stderr.write(f"{self._remaining_text(remaining)}   [TL-O03]\n")


class AsyncPublisher:
    """`Publisher` for asyncio with the same arguments; an asynchronous context manager.

    The stages of a `Receipt` can be awaited: ``await receipt.at_broker``.

    Attributes:
        publisher: Underlying publisher, for its status and journal id; from ``async with`` on.
    """

    publisher: Publisher

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._arguments = (args, settings)

    async def __aenter__(self) -> Self:
        args, settings = self._arguments
        self.publisher = await asyncio.to_thread(Publisher, *args, **settings)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close(0 if kind else 30.0)

    async def publish(self, topic: str, payload: bytes | str = b"", *, wait: bool = True, **properties: Any) -> Receipt:
        """Publish a message; see `Publisher.publish` for arguments and errors."""
        publisher = self.publisher
        if properties.get("timeout") is not None:  # at the timeout the message is withdrawn
            return await asyncio.to_thread(publisher.publish, topic, payload, wait=wait, **properties)
        if publisher.would_block:  # it would block the event loop
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
        """Wait until every message is at the broker, or has its receipt; see `Publisher.flush`."""
        return await asyncio.to_thread(self.publisher.flush, timeout, end_to_end=end_to_end)

    async def close(
        self,
        timeout: float = 30.0,  # noqa: ASYNC109 - as `Publisher.close`
        *,
        end_to_end: bool | None = None,
    ) -> int:
        """Close the publisher; see `Publisher.close`."""
        return await asyncio.to_thread(self.publisher.close, timeout, end_to_end=end_to_end)


def message_columns(
    topic: str,
    payload: bytes | str,
    qos: int,
    *,
    several_sessions: bool = False,
    retain: bool,
    **properties: Unpack[Properties],
) -> dict[str, Any]:
    """Return the columns of a message's row, with room for later receipt marks; raises as `check_message`."""
    data, is_utf8, values = check_message(
        topic, payload, qos, MARK_BYTES, several_sessions=several_sessions, **properties
    )
    pairs = values.pop("user_properties", None)
    return {
        "topic": topic,
        "payload": data,
        "qos": int(qos),
        "retain": bool(retain),
        "payload_is_utf8": is_utf8,
        "user_properties": [{"key": key, "value": value} for key, value in pairs] if pairs else None,
        "message_expiry_seconds": values.pop("expiry_s", None),
        **values,
    }
