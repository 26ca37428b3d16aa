"""Pump of one gateway's MQTT side: messages go into the inbox, and out of the outbox, over one session.

One thread, one loop: read a chunk, run it through the session, store, sync, acknowledge, send. The pump decides when
session, driver and journals may continue:

- a full disk or a full window stops the reading, never the keep alive [I7];
- an action that can't be recorded is not performed: the session is restored from the disk;
- a failed sync ends the process before anything else is acknowledged [I6].
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import pyarrow as pa
import structlog

from towline import errors
from towline.delivery.inbound import TRUNCATION_COUNTERS, InboxWriter, plain_run
from towline.delivery.outbound import OutboxSender, load_session_record
from towline.delivery.receipts.ledger import ReceiptLedger, ReceiptSender
from towline.delivery.receipts.mark import ReceiptKeys
from towline.gateway.identity import abandoned_client_id, record_client_session, record_session_end, session_directories
from towline.gateway.sessions import RETRY_IDLE_S, Drain, DrainStep, end_session
from towline.gateway.settings import GatewaySettings
from towline.guarantee import AckAfter, Guarantee
from towline.journal import Journal, Outbox
from towline.mqtt import events
from towline.mqtt.events import Action, Event, Online, PublishAcknowledged
from towline.mqtt.reasons import KEEP_SESSIONS_ADVICE
from towline.mqtt.session import UNSURE, Session, SessionState
from towline.mqtt.versions import VERSION_NAMES
from towline.net.driver import Hooks, SessionDriver
from towline.processes import notify
from towline.text import printable
from towline.timing import Timestamp

_T = TypeVar("_T")
#: Counters of the inbox's ledger in `Pump.status`.
_INBOX_COUNTERS = ("deduplicated", *TRUNCATION_COUNTERS.values(), "packet_ids_reused", "lower_qos", "sessions_lost")


def row_time(journal: Journal, offset: int, column: str) -> float | None:
    """Return the time in a column of one row, in seconds since 1970; None if the row is not in the journal."""
    with contextlib.suppress(errors.JournalError):
        if offset >= journal.first_offset:
            row = next(iter(journal.read(offset, offset + 1)))
            microseconds: int = row.column(column).view(pa.int64())[0].as_py()
            return microseconds / 1e6
    return None


class Pump:
    """MQTT loop of one gateway.

    Args:
        outbox: Messages to send; None for a gateway that only receives.
        on_progress: Called after rows became durable and after messages of the outbox are delivered, on the pump's
            thread.

    Raises:
        ConfigError: TL-C85, the key file of the receipts can't be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        inbox: Journal,
        outbox: Outbox | None = None,
        *,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._inbox, self._outbox = inbox, outbox
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        #: Receipts for publishers; None if there are none.
        self._receipts: ReceiptSender | None = None
        if (receipts := settings.receipts) is not None:
            limits = receipts.model_dump(exclude={"key_file", "prefix", "keep_s"}) | {"retention_s": receipts.keep_s}
            limits |= {"keys": ReceiptKeys.read_file(receipts.key_file), "max_packet_bytes": settings.max_packet_bytes}
            ledger = ReceiptLedger(inbox.notes, inbox.end, **limits)
            self._receipts = ReceiptSender(receipts.prefix, ledger, inbox, self._handle, self._log)
        #: The session was created while rows waited for room: it lacks their numbers and packet ids.
        self._session_stale = False
        #: The driver's session, once there is one.
        self._session: Session | None = None
        self._stopping = threading.Event()
        self._has_stopped = False
        #: Calls of other threads, for the pump's thread.
        self._pending_calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        #: Time of the loop's last turn, on `time.monotonic`: shows a stalled loop.
        self._loop_turn_at = time.monotonic()
        #: Set after the first answer of a broker, good or bad.
        self.broker_answered = threading.Event()
        #: Set from the service's threads: the consumers' watermark for ``ack_after = kafka``.
        self._committed_offset = inbox.committed
        #: Fields of `status`; written by the pump's thread only, each value replaced as a whole.
        self._status_fields: dict[str, Any] = {"connects": 0}
        self._status_fields |= dict.fromkeys(("connected_since", "last_error", "held_back", "session_lost"))
        self._uplink = InboxWriter(
            inbox,
            name=settings.name,
            acks=settings.effective_ack_after,
            least_qos=settings.least_qos,
            handle_event=self._handle,
            on_rows=on_progress,
            on_full=self._on_journal_full,
            receipt_ledger=self._receipts.ledger if self._receipts else None,
        )
        self._downlink: OutboxSender | None = None
        if outbox is not None and settings.outbox is not None:
            self._downlink = OutboxSender(
                outbox,
                handle_event=self._handle,
                log=self._log,
                refused_dir=settings.refused_dir,
                max_age_s=settings.outbox.max_age_s,
                on_progress=on_progress,
                exactly_once=settings.guarantee is Guarantee.EXACTLY_ONCE,
            )
        hooks = Hooks(
            new_session=self._new_session,
            perform=self._perform,
            connection_ended=self._on_disconnected,
            attempt_failed=self._on_connect_failed,
            log_notice=self._log.warning,
            plain_reader=plain_run,
        )
        self._connection = settings.connection
        self._acks_after_kafka = settings.effective_ack_after is AckAfter.KAFKA
        self._drain = None if settings.drain_s is None else Drain(settings.drain_s)
        #: Abandoned client id whose session is to be ended at the broker; "" for none.
        self._abandoned_client_id = abandoned_client_id(settings, inbox.session)
        self._driver = SessionDriver(self._connection, hooks)

    # -- from any thread --

    def stop(self) -> None:
        """End `run`: it stores what is in memory and disconnects; the broker keeps the session."""
        self._stopping.set()
        self._driver.cancel()

    def set_committed(self, end_offset: int) -> None:
        """Set the watermark: the consumers have committed everything below `end_offset`."""
        self._committed_offset = max(self._committed_offset, end_offset)
        if self._acks_after_kafka or self._receipts is not None or self._drain is not None:
            self.wake()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Schedule a call on the pump's thread, which may be connecting; cancelled if the pump ends before."""
        future: Future[_T] = Future()
        self._pending_calls.append((call, future))
        self.wake()
        return future

    def refused_messages(self, operation: str, offset: int) -> Future[dict[str, Any]]:
        """Call a method of `RefusedMessages` on the pump's thread: list, read, replay or drop refused messages."""
        downlink = self._downlink
        assert downlink is not None

        def run_operation() -> dict[str, Any]:
            downlink.flush()  # counters first, before a replay writes deliveries
            answer: dict[str, Any] = getattr(downlink.refused_messages, operation)(offset)
            return answer

        return self.submit(run_operation)

    def wake(self) -> None:
        """Wake the loop now."""
        self._driver.wake()

    @property
    def wake_fd(self) -> int:
        """File descriptor that wakes the loop when a byte is written to it."""
        return self._driver.wake_fd

    def status(self) -> Mapping[str, Any]:
        """Return the MQTT side of `towline status`; counters are totals over the journal's life."""
        ledger, session = self._inbox.ledger, self._driver.session
        inbound, server = session.inbound, session.server_limits
        return {
            "state": "stopped" if self._has_stopped else self._state.value,
            **self._status_fields,
            "broker": str(self._driver.endpoint) if self.broker_answered.is_set() else None,
            "client_id": self._settings.mqtt_client_id,
            "protocol": VERSION_NAMES[self._driver.versions.level].removeprefix("MQTT "),
            "received": self._uplink.received_count,
            "acknowledged": self._uplink.acknowledged_count + inbound.acknowledged_count,
            "redelivered": self._uplink.redelivered_count,
            "unacknowledged": inbound.unacknowledged_count,
            "receive_maximum": session.config.receive_maximum,
            "turned_s": round(time.monotonic() - self._loop_turn_at, 3),
            "window_overruns": inbound.window_overruns,
            "qos2_held": len(inbound.unreleased_messages),
            "share": self._settings.share.model_dump(mode="json") if self._settings.share else None,
            "drain": self._drain.step.value if self._drain else None,
            **{name: ledger.get(name, 0) for name in _INBOX_COUNTERS},
            "session_kept_s": self._session_expiry_s,
            "broker_max_packet_bytes": server.max_packet_size if server else None,
            "proxy": str(self._settings.proxy_endpoint) if self._settings.proxy_endpoint else None,
            "insecure": self._settings.tls.insecure,
            "ack_after": self._settings.effective_ack_after.value,
            "outbox": self._downlink.status() if self._downlink else None,
            "receipts": self._receipts.status() if self._receipts else None,
        }

    @property
    def _state(self) -> SessionState:
        """State of the session for other threads; online only once the other status fields are updated too."""
        state = self._driver.session.state
        is_incomplete = state is SessionState.ONLINE and self._status_fields["connected_since"] is None
        return SessionState.SUBSCRIBING if is_incomplete else state

    @property
    def is_drained(self) -> bool:
        """True when everything is committed and the session at the broker is ended."""
        return self._drain is not None and self._drain.step is DrainStep.DRAINED

    @property
    def has_ended(self) -> bool:
        """True when `run` has ended, or ends with an error."""
        return self._has_stopped or self._driver.fatal_error is not None

    # -- the loop --

    def run(self) -> None:
        """Run the loop until `stop`.

        Raises:
            TowlineError: An error that a retry can't fix: a refusal on the first connection, a client id taken over
                twice, a failed journal. No acknowledged message is lost.
        """
        driver = self._driver
        try:
            while not self._stopping.is_set() and driver.fatal_error is None:
                self._turn()
            if driver.fatal_error is None:
                with contextlib.suppress(errors.JournalFull):
                    self._uplink.store_pending()  # acknowledges the durable messages
                driver.send_disconnect()
        finally:
            with contextlib.ExitStack() as exit_stack:  # each may raise the error that ended the loop
                exit_stack.callback(self._finish)
                if self._downlink is not None:
                    exit_stack.callback(self._downlink.close)
                exit_stack.callback(driver.close_transport)
        if driver.fatal_error is not None:
            raise driver.fatal_error

    def _finish(self) -> None:
        while self._pending_calls:
            self._pending_calls.popleft()[1].cancel()
        self._has_stopped = True
        self.broker_answered.set()

    def _turn(self) -> None:
        driver, uplink, now = self._driver, self._uplink, time.monotonic()
        self._loop_turn_at = now
        while self._pending_calls:
            self._run_call(*self._pending_calls.popleft())
        if uplink.is_full:
            uplink.retry_when_due(now)
        due_times = self._send_pending(now)
        is_inbox_full = uplink.is_full
        self._throttle_reading(is_inbox_full=is_inbox_full)
        if is_inbox_full:
            due_times.append(uplink.retry_at)
        elif self._session_stale and not driver.connected:
            driver.restart_session()
        # Not while rows wait for room: nothing could be read, and a new session would reuse their numbers.
        driver.run_once(*due_times, may_connect=not is_inbox_full)
        inbound = driver.session.inbound
        if inbound.duplicates or inbound.reused_ids:
            uplink.count_duplicates(inbound, str(driver.endpoint))
        if self._acks_after_kafka:
            uplink.allow_acknowledgements(inbound, self._committed_offset)
        if self._drain is not None:
            self._advance_drain(self._drain)

    def _run_call(self, call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
            if isinstance(error, errors.JournalFailed):
                raise

    def _send_pending(self, now: float) -> list[float | None]:
        """Send due messages of the outbox and due receipts; return when the next ones are due."""
        due_times: list[float | None] = []
        if (downlink := self._downlink) is not None:
            self._persist(lambda: downlink.turn(unsent=self._driver.unsent_bytes))
            if (error := downlink.guarantee_error) and self._status_fields["last_error"] is None:
                self._record_error(error)  # stays after a reconnect
            due_times.append(downlink.next_turn_at())
        if self._receipts is not None:
            self._receipts.ledger.commit(self._committed_offset)
            self._receipts.turn(now, online=self._driver.online)
            due_times.append(self._receipts.next_turn_at() if self._driver.online else None)
        if self._drain is not None:
            due_times.append(self._drain.next_check_at)
        return due_times

    def _persist(self, write: Callable[[], object]) -> None:
        """Write state that must be durable first; on a full disk restore the session from the disk instead."""
        try:
            write()
        except errors.JournalFull as error:
            broker = str(self._driver.endpoint)
            problem = f"the state of the session can't be recorded: {error.problem}"
            self._driver.restart_session(errors.Unreachable("TL-M13", broker, problem, error.remedy))

    def _throttle_reading(self, *, is_inbox_full: bool) -> None:
        """Stop reading while the journal is full [I7] or the broker exceeds the receive window."""
        if not self._driver.connected:
            return
        reason = "journal full" if is_inbox_full else "window full" if self._driver.session.window_full else None
        if reason is None and (self._status_fields["last_error"] or {}).get("code", "").startswith("TL-J"):
            self._status_fields["last_error"] = None  # there is room again
        self._status_fields["held_back"] = reason
        self._driver.pause_reading(pause=reason is not None)

    # -- what the driver asks for --

    def _handle(self, event: Event) -> None:
        self._driver.handle(event)

    def _new_session(self, level: int) -> Session:
        self._session_stale = self._uplink.is_full
        if self._session is not None:
            self._uplink.count_duplicates(self._session.inbound, str(self._driver.endpoint))
        if self._receipts is not None:
            self._receipts.ledger.reset(self._uplink.pending_marks)
            self._receipts.reset()
        session = self._session = self._restore_session(level)
        if self._downlink is not None:
            self._downlink.attach_session(session)
        return session

    def _restore_session(self, level: int) -> Session:
        """Create a session with the state that the journal holds."""
        settings = self._settings
        config = self._connection.session_config_for(level)
        config = replace(config, filters=()) if self._drain else config
        record = load_session_record(self._inbox.session, str(settings.state_dir), config, settings.abandon_session)
        if record is None and self._inbox.held_ids:  # packet ids of an abandoned session mean nothing to the next
            self._inbox.append(released_ids=list(self._inbox.held_ids))
        held = {packet_id: events.UnreleasedMessage(*entry) for packet_id, entry in self._inbox.held_ids.items()}
        session = Session(config, record, self._inbox.end, held)
        if self._drain is not None and not (record and record.established):  # the session may have all filters
            possible_subscriptions = dict.fromkeys((topic_filter.pattern for topic_filter in settings.filters), UNSURE)
            session.subscriptions.known_options = possible_subscriptions | session.subscriptions.known_options
        if self._acks_after_kafka:  # a repeat of an uncommitted message has to wait too [I1]
            session.inbound.ack_watermark = self._inbox.committed
        if self._receipts is not None:  # repeats of its publishers are deduplicated
            filter_repeats = self._receipts.ledger.deduplicate
            session.inbound.duplicate_filter = lambda packets, topics: filter_repeats(packets, topics, Timestamp.now())
        return session

    def _perform(self, action: Action) -> None:
        if isinstance(action, events.Deliver):
            self._uplink.deliver(action, self._driver.session.inbound)
        elif isinstance(action, events.SaveSessionRecord):
            record = asdict(action.record) if action.record else {}
            self._persist(lambda: self._inbox.set_session(record))
        elif isinstance(action, events.SessionLost):
            self._session_lost()
        elif isinstance(action, Online):
            self._on_online(action)
        elif self._receipts is not None and isinstance(action, PublishAcknowledged) and self._receipts.perform(action):
            return
        elif (downlink := self._downlink) is not None:
            self._persist(lambda: downlink.perform(action))

    def _on_online(self, action: Online) -> None:
        if self._receipts is not None and not action.session_resumed:
            self._receipts.session_lost()
        self.broker_answered.set()
        broker = str(self._driver.endpoint)
        connects = self._status_fields["connects"] + 1
        self._status_fields.update(connected_since=time.time(), connects=connects, last_error=None)
        notify(STATUS=f"connected to {broker}")
        self._log.info("online", broker=broker, session="kept" if action.session_resumed else "new")
        record_client_session(self._settings.state_dir, self._settings.mqtt_client_id, broker)
        expiry_s = self._session_expiry_s
        if expiry_s < self._settings.session_expiry_s:
            problem = f"the broker keeps our session for {expiry_s:,} s only; after longer away, its messages are lost"
            self._log.warning(problem, code="TL-M36", broker=broker)
        if self._abandoned_client_id:
            client_id, self._abandoned_client_id = self._abandoned_client_id, ""
            self.submit(lambda: self._end_abandoned_session(client_id))

    # -- sessions that end --

    def _advance_drain(self, drain: Drain) -> None:
        driver, inbox, session, previous_step = self._driver, self._inbox, self._driver.session, drain.step
        waiting_rows, outbox, receipts = inbox.end - inbox.committed, self._outbox, self._receipts
        has_unsent = outbox is not None and not outbox.is_done_below(outbox.end)
        online = driver.online and session.state is SessionState.ONLINE
        is_quiet = online and not session.inbound.unacknowledged_count and not self._uplink.is_full
        end_now = drain.advance(
            time.monotonic(),
            lambda: driver.handle(events.PingRequest()),
            (driver.connection_count, self._uplink.received_count, len(session.inbound.unreleased_messages))
            if is_quiet
            else None,
            subscribed=bool(session.subscriptions.known_options),
            probes_answered=session.pings_answered,
            work_pending=bool(waiting_rows) or has_unsent or (receipts is not None and receipts.ledger.has_due),
        )
        if drain.step is not previous_step:
            self._log.info("drain", step=drain.step.value, waiting=waiting_rows, consumers=[*inbox.consumers])
        if end_now:
            self._end_drained_session(drain)

    def _end_drained_session(self, drain: Drain) -> None:
        """End the session of a drained gateway at the broker, then stop."""
        client_id = self._settings.mqtt_client_id
        self._driver.send_disconnect()
        try:
            end_session(self._settings, client_id)
            self._inbox.set_session({})
        except (errors.BrokerError, errors.ConfigError, errors.JournalFull) as error:
            drain.idle_s = max(drain.idle_s, RETRY_IDLE_S)
            self._record_error(error)
            self._log.warning("the session is not ended yet", code=error.code, reason=str(error))
            return
        record_session_end(self._settings.state_dir, client_id, "drained")
        drain.step = DrainStep.DRAINED
        self._log.info("drained")
        self._stopping.set()

    def _end_abandoned_session(self, client_id: str) -> None:
        """End the session of an abandoned client id, so that it queues no more messages; tried once a start."""
        try:
            end_session(self._settings, client_id)
        except (errors.BrokerError, errors.ConfigError) as error:
            problem = f'the session of client id "{client_id}" was abandoned and is not ended: {error}'
            self._log.warning(problem, code="TL-G59")
            return
        for directory in session_directories(self._settings):
            record_session_end(directory, client_id, "discarded")
        self._log.info("abandoned session ended", client_id=client_id)

    @property
    def _session_expiry_s(self) -> int:
        """Session expiry in seconds that the broker granted; may be less than requested [MQTT 5 section 3.2.2.3.2]."""
        server = self._driver.session.server_limits
        granted_s = server.session_expiry_interval if server else None
        return self._settings.session_expiry_s if granted_s is None else granted_s

    def _session_lost(self) -> None:
        self._inbox.count(sessions_lost=1)
        stored_at, since_text = row_time(self._inbox, self._inbox.end - 1, "received_at"), "the last connection"
        if stored_at is not None:
            time_text = f"{datetime.fromtimestamp(stored_at, UTC):%Y-%m-%d %H:%M:%S} UTC"
            since_text = f"{time_text}, when the last message was stored,"
        problem = f"the broker has lost our session: what came to it between {since_text} and now may be missing"
        remedy = KEEP_SESSIONS_ADVICE
        if isinstance(self._driver.error, errors.TakenOver):
            remedy = "Another client took over the client id and started a new session: give each client its own id."
        lost = {"at": time.time(), "since": stored_at, "text": problem, "do": remedy}
        self._status_fields["session_lost"] = lost
        self._log.warning(problem, do=remedy, code="TL-M22", broker=str(self._driver.endpoint))

    def _on_disconnected(self) -> None:
        self._status_fields["connected_since"] = None
        withdrawn_messages = self._driver.session.outbound.withdraw_unsent()
        if self._receipts is not None:
            self._receipts.connection_lost(withdrawn_messages)
        if self._downlink is not None:
            self._downlink.connection_lost(withdrawn_messages)

    def _on_connect_failed(self, error: errors.BrokerError | errors.ConfigError) -> None:
        self.broker_answered.set()
        if not error.location.startswith(self._settings.name):  # the connection does not know the line
            error.location = f"{self._settings.name} at {error.location}"
        self._record_error(error)
        notify(STATUS=printable(str(error)))
        self._log.warning("no connection", code=error.code, reason=str(error))

    # -- helpers --

    def _on_journal_full(self, error: errors.JournalFull) -> None:
        if self._status_fields["held_back"] is None:
            self._log.warning("journal full, holding back", reason=str(error), code=error.code)
        self._record_error(error)

    def _record_error(self, error: errors.TowlineError) -> None:
        self._status_fields["last_error"] = {"code": error.code, "text": str(error), "at": time.time()}
