"""The pump: one gateway's MQTT side. Rows go into the inbox, and out of the outbox, over one session.

One thread, one loop: read a chunk, let the session decide, store, sync, acknowledge, hand over what is to be sent. What
the pump adds to session, driver and boxes is when they may go on:

- a full disk or a full window stops the reading, never the keep alive [I7];
- what can't be recorded is not acted on: the session is renewed from what the disk holds;
- a failed sync ends the process before anything else is acknowledged [I6].
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import pyarrow as pa
import structlog

from towline.delivery.inbound import COUNTERS, Uplink, plain_run
from towline.delivery.outbound import Downlink, recall
from towline.delivery.receipts.ledger import Ledger, ReceiptSender
from towline.delivery.receipts.mark import ReceiptKeys
from towline.errors import (
    BrokerError,
    ConfigError,
    JournalError,
    JournalFailed,
    JournalFull,
    TakenOver,
    TowlineError,
    Unreachable,
)
from towline.gateway.identity import directories, end_client, given_up, note_client
from towline.gateway.sessions import Drain, DrainStep, WantedFilters, end_session
from towline.gateway.settings import GatewaySettings
from towline.guarantee import AckAfter, Guarantee
from towline.journal import Journal, Outbox
from towline.mqtt import events
from towline.mqtt.events import Acknowledged, Action, Event, Filter, Online
from towline.mqtt.reasons import KEEP_SESSIONS
from towline.mqtt.session import Session, SessionState
from towline.mqtt.subscriptions import UNSURE
from towline.mqtt.versions import NAMES
from towline.net.driver import Hooks, SessionDriver
from towline.processes import notify
from towline.text import printable
from towline.timing import Stamp

_T = TypeVar("_T")
#: Of the inbox's ledger, as `Pump.status` shows them.
_COUNTERS = ("deduplicated", *COUNTERS.values(), "packet_ids_reused", "lower_qos", "sessions_lost")


def time_of_row(journal: Journal, offset: int, column: str) -> float | None:
    """What a column of times says of a row, in seconds since 1970; None where that is not, or no longer, there."""
    with contextlib.suppress(JournalError):
        if offset >= journal.first:
            row = next(iter(journal.read(offset, offset + 1)))
            microseconds: int = row.column(column).view(pa.int64())[0].as_py()
            return microseconds / 1e6
    return None


class Pump:
    """Drives one gateway's MQTT side until it is told to stop.

    Args:
        outbox: What is to be sent; None for a gateway that only receives.
        news: Called after rows became durable and after messages of the outbox are done, on the pump's thread.

    Raises:
        ConfigError: TL-C85, the file of keys for receipts can't be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        inbox: Journal,
        outbox: Outbox | None = None,
        *,
        news: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._inbox, self._outbox = inbox, outbox
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        #: Of publishers that want receipts; None when nobody gets any.
        self._receipts: ReceiptSender | None = None
        if (receipts := settings.receipts) is not None:
            keys, largest = ReceiptKeys.read(receipts.key_file), settings.max_packet_bytes
            limits = receipts.model_dump(exclude={"key_file", "prefix"})
            ledger = Ledger(inbox.notes, inbox.end, gateway=settings.name, keys=keys, largest=largest, **limits)
            self._receipts = ReceiptSender(receipts.prefix, ledger, inbox, self._handle, self._log)
        #: The session was made while rows waited for room: it knows neither their numbers nor their packet ids.
        self._stale = False
        #: That of the driver, once there is one.
        self._session: Session | None = None
        self._stopping = threading.Event()
        self._stopped = False
        #: Of other threads, for the pump's.
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        #: When the loop looked around last, on `time.monotonic`: one that stands still shows.
        self._turned_at = time.monotonic()
        #: Set after the first word from a broker, good or bad.
        self.heard = threading.Event()
        #: Set from the service's threads: the consumers' watermark for ``ack_after = kafka``.
        self._committed = inbox.committed
        #: What `status` shows; written by the pump's thread only, each value replaced as a whole.
        self._shown: dict[str, Any] = {
            **dict.fromkeys(("connected_since", "last_error", "held_back", "session_lost")),
            "connects": 0,
        }
        self._uplink = Uplink(
            inbox,
            name=settings.name,
            acks=settings.acks,
            max_packet_bytes=settings.max_packet_bytes,
            least_qos=settings.least_qos(settings.subscriptions),
            handle=self._handle,
            on_rows=news,
            note=self._no_room,
            ledger=self._receipts.ledger if self._receipts else None,
        )
        self._downlink: Downlink | None = None
        if outbox is not None and settings.outbox is not None:
            self._downlink = Downlink(
                outbox,
                handle=self._handle,
                log=self._log,
                refused_dir=settings.refused,
                max_age_s=settings.outbox.max_age_s,
                on_progress=news,
                exactly_once=settings.guarantee is Guarantee.EXACTLY_ONCE,
            )
        hooks = Hooks(
            new_session=self._new_session,
            perform=self._perform,
            ended=self._ended,
            failed=self._failed,
            notice=self._log.warning,
            plain=plain_run,
        )
        self._connection = settings.connection
        self._acks_after_kafka = settings.acks is AckAfter.KAFKA
        self._drain = None if settings.drain_s is None else Drain(settings.drain_s)
        wanted = settings.model_copy(update={"subscriptions": ()}) if self._drain else settings
        self._filters = WantedFilters(wanted, self._handle)
        #: A client id whose session is to be ended at the broker, because its owner has given it up; "" for none.
        self._given_up = given_up(settings, inbox.session)
        self._driver = SessionDriver(self._connection, hooks)

    # -- from any thread --

    def stop(self) -> None:
        """Finish what is in memory, say goodbye to the broker, leave the session there, and end `run`."""
        self._stopping.set()
        self._driver.cancel()

    def committed(self, upto: int) -> None:
        """The consumers have committed everything below `upto`."""
        self._committed = max(self._committed, upto)
        if self._acks_after_kafka or self._receipts is not None or self._drain is not None:
            self.wake()

    def ask(self, call: Callable[[], _T]) -> Future[_T]:
        """Have a call made on the pump's thread, which may be connecting; cancelled where the pump ends before."""
        answer: Future[_T] = Future()
        self._calls.append((call, answer))
        self.wake()
        return answer

    def refused(self, do: str, at: int) -> Future[dict[str, Any]]:
        """Look at the messages that the broker refused, or move some: a method of `RefusedMessages`, its argument."""
        downlink = self._downlink
        assert downlink is not None

        def call() -> dict[str, Any]:
            downlink.flush()  # with the counters, before a replay writes what is done
            answer: dict[str, Any] = getattr(downlink.refused, do)(at)
            return answer

        return self.ask(call)

    def want(self, change: str, filters: Sequence[Filter]) -> Future[dict[str, str]]:
        """Want other filters, or ask how far that is (`WantedFilters.ask`); TL-C172 where the gateway is drained."""
        if self._drain is not None:
            what = "the gateway is being drained, and takes no other filters"
            raise ConfigError("TL-C172", self._settings.name, what, "Start it without --drain, or wait.")
        return self.ask(lambda: self._filters.ask(change, filters, self._driver.session))

    def wake(self) -> None:
        """Make the loop look around now."""
        self._driver.wake()

    @property
    def wake_fd(self) -> int:
        """A descriptor that wakes the loop when a byte is written to it."""
        return self._driver.wake_fd

    def status(self) -> Mapping[str, Any]:
        """The MQTT side as `towline status` shows it; counters are totals over the journal's life."""
        ledger, session = self._inbox.ledger, self._driver.session
        inbound, server = session.inbound, session.server
        return {
            "state": "stopped" if self._stopped else self._state.value,
            **self._shown,
            "broker": str(self._driver.endpoint) if self.heard.is_set() else None,
            "client_id": self._settings.mqtt_client_id,
            "protocol": NAMES[self._driver.versions.level].removeprefix("MQTT "),
            "received": self._uplink.received,
            "acknowledged": self._uplink.acknowledged + inbound.acknowledged,
            "redelivered": self._uplink.redelivered,
            "unacknowledged": inbound.unacknowledged,
            "receive_maximum": session.config.receive_maximum,
            "turned_s": round(time.monotonic() - self._turned_at, 3),
            "window_overruns": inbound.overruns,
            "qos2_held": len(inbound.held),
            "share": self._settings.share.model_dump(mode="json") if self._settings.share else None,
            "drain": self._drain.step.value if self._drain else None,
            **{name: ledger.get(name, 0) for name in _COUNTERS},
            "session_kept_s": self._session_kept_s,
            "broker_max_packet_bytes": server.max_packet_size if server else None,
            "proxy": str(self._settings.way) if self._settings.way else None,
            "insecure": self._settings.tls.insecure,
            "ack_after": self._settings.acks.value,
            "outbox": self._downlink.status() if self._downlink else None,
            "receipts": self._receipts.status() if self._receipts else None,
        }

    @property
    def _state(self) -> SessionState:
        """Where the session is; online only when all that follows from it is shown too, to a thread that looks on."""
        state = self._driver.session.state
        settling = state is SessionState.ONLINE and self._shown["connected_since"] is None
        return SessionState.SUBSCRIBING if settling else state

    @property
    def drained(self) -> bool:
        """Whether all is committed, and the broker has no session any more."""
        return self._drain is not None and self._drain.step is DrainStep.DRAINED

    @property
    def ended(self) -> bool:
        """Whether `run` has ended, or ends with an error."""
        return self._stopped or self._driver.fatal is not None

    # -- the loop --

    def run(self) -> None:
        """Pump until `stop`.

        Raises:
            TowlineError: What can't be mended by trying again: a refusal on the first connection, a client id taken
                over twice, a failed journal. Nothing acknowledged is lost by it.
        """
        driver = self._driver
        try:
            while not self._stopping.is_set() and driver.fatal is None:
                self._turn()
            if driver.fatal is None:
                with contextlib.suppress(JournalFull):
                    self._uplink.store()  # acknowledges what is safe
                driver.leave()
        finally:
            with contextlib.ExitStack() as last:  # each raises again what has ended it
                last.callback(self._end)
                if self._downlink is not None:
                    last.callback(self._downlink.close)
                last.callback(driver.disconnect)
        if driver.fatal is not None:
            raise driver.fatal

    def _end(self) -> None:
        while self._calls:
            self._calls.popleft()[1].cancel()
        self._stopped = True
        self.heard.set()

    def _turn(self) -> None:
        driver, uplink, now = self._driver, self._uplink, time.monotonic()
        self._turned_at = now
        while self._calls:
            self._answer(*self._calls.popleft())
        if uplink.full:
            uplink.find_room(now)
        due = self._send(now)
        full = uplink.full
        self._adjust_reading(full=full)
        if full:
            due.append(uplink.room_at)
        elif self._stale and not driver.connected:
            driver.renew()
        # Not while rows wait: nothing could be read, and a session made anew would give their numbers to others.
        driver.turn(*due, may_connect=not full)
        inbound = driver.session.inbound
        if inbound.repeats or inbound.reused_ids:
            uplink.count_repeats(inbound, str(driver.endpoint))
        if self._acks_after_kafka:
            uplink.settle(inbound, self._committed)
        if self._drain is not None:
            self._drain_on(self._drain)

    def _answer(self, call: Callable[[], Any], answer: Future[Any]) -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)
            if isinstance(error, JournalFailed):
                raise

    def _send(self, now: float) -> list[float | None]:
        """Send what is due of the outbox and of receipts; returns when something but the session is due next."""
        due: list[float | None] = []
        if (downlink := self._downlink) is not None:
            self._recorded(lambda: downlink.turn(unsent=self._driver.unsent))
            if downlink.broken is not None and self._shown["last_error"] is None:  # stays, whatever connects
                self._note(downlink.broken)
            due.append(downlink.due())
        if self._receipts is not None:
            self._receipts.ledger.commit(self._committed)
            self._receipts.turn(now, online=self._driver.online)
            due.append(self._receipts.due() if self._driver.online else None)
        if self._drain is not None:
            due.append(self._drain.due)
        return due

    def _recorded(self, act: Callable[[], object]) -> None:
        """Do what has to be durable first; what can't be is not acted on: begin anew from what the disk holds."""
        try:
            act()
        except JournalFull as error:
            broker = str(self._driver.endpoint)
            what = f"the state of the session can't be recorded: {error.what}"
            self._driver.renew(Unreachable("TL-M13", broker, what, error.do))

    def _adjust_reading(self, *, full: bool) -> None:
        """Read only while there is room for what comes [I7] and the broker keeps to the window."""
        if not self._driver.connected:
            return
        why = "journal full" if full else "window full" if self._driver.session.window_full else None
        if why is None and (self._shown["last_error"] or {}).get("code", "").startswith("TL-J"):
            self._shown["last_error"] = None  # there is room again
        self._shown["held_back"] = why
        self._driver.hold_back(hold=why is not None)

    # -- what the driver asks for --

    def _handle(self, event: Event) -> None:
        self._driver.handle(event)

    def _new_session(self, level: int) -> Session:
        self._stale = self._uplink.full
        if self._session is not None:
            self._uplink.count_repeats(self._session.inbound, str(self._driver.endpoint))
        if self._receipts is not None:
            self._receipts.ledger.start_again(self._uplink.waiting_marks)
            self._receipts.start_again()
        session = self._session = self._recalled(level)
        if self._downlink is not None:
            self._downlink.attach(session)
        return session

    def _recalled(self, level: int) -> Session:
        """A session that knows what the journal holds of it."""
        settings = self._settings
        config = replace(self._connection.session_at(level), filters=self._filters.of(self._session))
        record = recall(self._inbox.session, str(settings.state_dir), config, settings.abandon_session)
        if record is None and self._inbox.held:  # packet ids of a session that is given up are none of the next one's
            self._inbox.append(released=list(self._inbox.held))
        held = {packet_id: events.Held(*entry) for packet_id, entry in self._inbox.held.items()}
        session = Session(config, record, self._inbox.end, held)
        if self._drain is not None and not (record and record.established):  # it may be subscribed to all of them
            unsure = dict.fromkeys((one.pattern for one in settings.filters), UNSURE)
            session.subscriptions.known = unsure | session.subscriptions.known
        if self._acks_after_kafka:  # a repeat of what is stored and not committed has to wait too [I1]
            session.inbound.settled = self._inbox.committed
        if self._receipts is not None:  # what its publishers send again is left out
            screen = self._receipts.ledger.screen
            session.inbound.screen = lambda packets, topics: screen(packets, topics, Stamp.now())
        return session

    def _perform(self, action: Action) -> None:
        if isinstance(action, events.Deliver):
            self._uplink.deliver(action, self._driver.session.inbound)
        elif isinstance(action, events.Remember):
            record = asdict(action.record) if action.record else {}
            self._recorded(lambda: self._inbox.set_session(record))
        elif isinstance(action, events.SessionLost):
            self._session_lost()
        elif isinstance(action, Online | events.Subscribed):
            if isinstance(action, Online):
                self._online(action)
            filters = self._driver.session.config.filters or self._settings.subscriptions
            self._uplink.expect(self._settings.least_qos(filters))
        elif self._receipts is not None and isinstance(action, Acknowledged) and self._receipts.perform(action):
            return
        elif (downlink := self._downlink) is not None:
            self._recorded(lambda: downlink.perform(action))

    def _online(self, action: Online) -> None:
        if self._receipts is not None and not action.resumed:
            self._receipts.session_lost()
        self.heard.set()
        broker = str(self._driver.endpoint)
        self._shown.update(connected_since=time.time(), connects=self._shown["connects"] + 1, last_error=None)
        notify(STATUS=f"connected to {broker}")
        self._log.info("online", broker=broker, session="kept" if action.resumed else "new")
        note_client(self._settings.state_dir, self._settings.mqtt_client_id, broker)
        kept = self._session_kept_s
        if kept < self._settings.session_expiry_s:
            what = f"the broker keeps our session for {kept:,} s only; after longer away, what it held is gone"
            self._log.warning(what, code="TL-M36", broker=broker)
        if self._given_up:
            client_id, self._given_up = self._given_up, ""
            self.ask(lambda: self._end_given_up(client_id))

    # -- sessions that end --

    def _drain_on(self, drain: Drain) -> None:
        driver, inbox, session, before = self._driver, self._inbox, self._driver.session, drain.step
        waiting, outbox, receipts = inbox.end - inbox.committed, self._outbox, self._receipts
        unsent = outbox is not None and not outbox.reached(outbox.end)
        online = driver.online and session.state is SessionState.ONLINE
        quiet = online and not session.inbound.unacknowledged and not self._uplink.full
        ends = drain.look(
            time.monotonic(),
            lambda: driver.handle(events.Probe()),
            (driver.count, self._uplink.received, len(session.inbound.held)) if quiet else None,
            subscribed=bool(session.subscriptions.known),
            probed=session.probed,
            owing=bool(waiting) or unsent or (receipts is not None and receipts.ledger.due),
        )
        if drain.step is not before:
            self._log.info("drain", step=drain.step.value, waiting=waiting, consumers=[*inbox.consumers])
        if ends:
            self._leave(drain)

    def _leave(self, drain: Drain) -> None:
        """Nothing is left, here or at the broker: end the session, and with it the gateway."""
        client_id = self._settings.mqtt_client_id
        self._driver.leave()
        try:
            end_session(self._connection, client_id, self._stopping.is_set)
            self._inbox.set_session({})
        except (BrokerError, ConfigError, JournalFull) as error:
            drain.put_off(time.monotonic())
            self._note(error)
            self._log.warning("the session is not ended yet", code=error.code, reason=str(error))
            return
        end_client(self._settings.state_dir, client_id, "drained")
        drain.step = DrainStep.DRAINED
        self._log.info("drained")
        self._stopping.set()

    def _end_given_up(self, client_id: str) -> None:
        """End the session of a client id that was given up, so that it collects nothing more; tried once a start."""
        try:
            end_session(self._connection, client_id, self._stopping.is_set)
        except (BrokerError, ConfigError) as error:
            what = f'the session of client id "{client_id}", which was given up, is not ended: {error}'
            self._log.warning(what, code="TL-G59")
            return
        for directory in directories(self._settings):
            end_client(directory, client_id, "discarded")
        self._log.info("a session that was given up is ended", client_id=client_id)

    @property
    def _session_kept_s(self) -> int:
        """Seconds the broker keeps the session for us: as asked, or less [MQTT 5 section 3.2.2.3.2]."""
        server = self._driver.session.server
        given = server.session_expiry_interval if server else None
        return self._settings.session_expiry_s if given is None else given

    def _session_lost(self) -> None:
        self._inbox.count(sessions_lost=1)
        last, since = time_of_row(self._inbox, self._inbox.end - 1, "received_at"), "the last connection"
        if last is not None:
            since = f"{datetime.fromtimestamp(last, UTC):%Y-%m-%d %H:%M:%S} UTC, when the last message was stored,"
        what = f"the broker has lost our session: what came to it between {since} and now may be missing"
        do = KEEP_SESSIONS
        if isinstance(self._driver.error, TakenOver):
            do = "Another client had taken over the client id, and began without it: give each client an id of its own."
        self._shown["session_lost"] = {"at": time.time(), "since": last, "text": what, "do": do}
        self._log.warning(what, do=do, code="TL-M22", broker=str(self._driver.endpoint))

    def _ended(self) -> None:
        self._shown["connected_since"] = None
        withdrawn = self._driver.session.outbound.withdraw()
        if self._receipts is not None:
            self._receipts.lost(withdrawn)
        if self._downlink is not None:
            self._downlink.lost(withdrawn)

    def _failed(self, error: BrokerError | ConfigError) -> None:
        self.heard.set()
        if not error.where.startswith(self._settings.name):  # the way to a broker knows of no line
            error.where = f"{self._settings.name} at {error.where}"
        self._note(error)
        notify(STATUS=printable(str(error)))
        self._log.warning("no connection", code=error.code, reason=str(error))

    # -- helpers --

    def _no_room(self, error: JournalFull) -> None:
        if self._shown["held_back"] is None:
            self._log.warning("journal full, holding back", reason=str(error), code=error.code)
        self._note(error)

    def _note(self, error: TowlineError) -> None:
        self._shown["last_error"] = {"code": error.code, "text": str(error), "at": time.time()}
