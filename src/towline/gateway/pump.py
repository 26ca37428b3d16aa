"""The pump: moves bytes between one broker and one `Session`, rows into the inbox, and rows out of the outbox.

One thread, one loop: read a gulp, let the session decide, store, sync, acknowledge, hand over what is to be sent. It
holds no rule of MQTT (those are in the session) and no rule of storage (the two boxes); what comes in is the business
of `towline.delivery.inbound`, what goes out that of `towline.delivery.outbound`. What the pump adds is time, sockets,
and patience:

- a connection that ends is made anew, through the list of brokers, with exponential backoff and full jitter;
- a full disk or a full window stops the reading, never the keep alive [I7];
- a failed sync ends the process before anything else is acknowledged [I6].
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import structlog

from towline.delivery.inbound import Uplink
from towline.delivery.inbox import Inbox
from towline.delivery.outbound import Downlink
from towline.delivery.receipts.sender import ReceiptSender, ledger_of
from towline.delivery.record import recall
from towline.delivery.refused import RefusedMessages
from towline.errors import BrokerError, ConfigError, JournalFull, TakenOver, TowlineError, Unreachable
from towline.errors import Refused as RefusedByBroker
from towline.gateway.sessions import inbound_config, receipt_config, session_config
from towline.gateway.settings import GatewaySettings
from towline.guarantee import AckAfter, Guarantee
from towline.journal import Outbox
from towline.mqtt.codec import Decoder, MalformedPacket
from towline.mqtt.events import (
    Acknowledged,
    Action,
    Close,
    Deliver,
    Event,
    Held,
    Lost,
    Malformed,
    Online,
    Opened,
    Received,
    Remember,
    Resumed,
    Send,
    SessionLost,
    Stop,
    Suspended,
    Tick,
    Written,
)
from towline.mqtt.reasons import CUT
from towline.mqtt.session import Session, SessionState
from towline.mqtt.versions import LEVELS, NAMES, Versions
from towline.net.backoff import Backoff
from towline.net.redirect import Redirects
from towline.net.transport import Tls, Transport, connect
from towline.schema import NO_ROWS

__all__ = ["Pump"]

_T = TypeVar("_T")

#: Below this a gulp may be the beginning of more, and waits `linger_ms`; above, waiting gains nothing.
_SMALL_GULP: Final = 64 << 10
#: Gulps taken without lingering after a wait in vain.
_LINGER_REST: Final = 15
#: Longest pause between two connections, in seconds.
_LONGEST_PAUSE: Final = 30.0
#: A taken-over client id is given up when it happens twice in this many seconds.
_TAKEOVER_WINDOW: Final = 60.0
#: Patience with the broker when we leave, in seconds.
_GOODBYE: Final = 2.0


class Pump:
    """Drives one gateway's MQTT side until it is told to stop.

    Args:
        settings: The gateway's settings.
        inbox: Where messages go.
        password: Read from the password file, None without one.
        on_rows: Called after rows became durable, on the pump's thread.
        outbox: What is to be sent; None for a gateway that only receives.
        on_progress: Called after messages of the outbox are done, on the pump's thread.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        inbox: Inbox,
        *,
        password: bytes | None = None,
        on_rows: Callable[[], None] = lambda: None,
        outbox: Outbox | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._password = password
        self._inbox = inbox
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        #: The one in use changes only while nothing is connected.
        self._versions = Versions(LEVELS[settings.protocol])
        #: Publishers that want receipts; None when nobody gets any.
        receipts = receipt_config(settings)
        self._ledger = ledger_of(receipts, inbox) if receipts is not None else None
        self._session = self._new_session()
        #: The session was made while rows waited for room: it knows neither their numbers nor their packet ids.
        self._stale = False
        self._tls = Tls(**settings.tls.model_dump())
        self._proxy = settings.way
        self._decoder = Decoder(settings.max_packet_bytes)
        self._transport: Transport | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stopping = threading.Event()
        #: Set after the first word from a broker, good or bad.
        self.heard = threading.Event()
        #: Set from the service's threads: the consumers' watermark for ``ack_after = kafka``.
        self._committed = inbox.committed
        self._where = settings.name
        self._broker_index = 0
        self._redirects = Redirects(follow=settings.follow_redirects)
        #: The server in use or last tried, which may be one that a broker of the list has named.
        self._endpoint = settings.brokers[0].endpoint
        #: Whether the current connection came online: after it the list is tried from its first broker again.
        self._served = False
        self._backoff = Backoff(_LONGEST_PAUSE)
        self._retry_at = 0.0
        self._reading = False
        #: Gulps still to be taken as they come, because lingering brought nothing.
        self._no_linger = 0
        self._ever_online = False
        self._takeovers: deque[float] = deque(maxlen=2)
        self._fatal: TowlineError | None = None
        #: What `status` shows; written by the pump's thread only, each value replaced as a whole.
        self._shown: dict[str, Any] = {
            "state": SessionState.OFFLINE.value,
            "broker": None,
            "connected_since": None,
            "connects": 0,
            "last_error": None,
            "held_back": None,
            "session_lost": None,
        }
        self._uplink = Uplink(
            inbound_config(settings),
            inbox,
            handle=self._handle,
            on_rows=on_rows,
            note=self._no_room,
            ledger=self._ledger,
        )
        self._downlink: Downlink | None = None
        if outbox is not None and settings.outbox is not None:
            self._downlink = Downlink(
                outbox,
                handle=self._handle,
                log=self._log,
                refused_dir=settings.refused,
                max_age_s=settings.outbox.max_age_s,
                on_progress=on_progress,
                exactly_once=settings.guarantee is Guarantee.EXACTLY_ONCE,
            )
            self._downlink.attach(self._session)
        self._receipts: ReceiptSender | None = None
        if self._ledger is not None and receipts is not None:
            self._receipts = ReceiptSender(receipts.prefix, self._ledger, inbox, self._handle, self._log)

    # -- from any thread --

    def stop(self) -> None:
        """Finish what is in memory, say goodbye to the broker, leave the session there, and end `run`."""
        self._stopping.set()
        self.wake()

    def committed(self, upto: int) -> None:
        """The consumers have committed everything below `upto`."""
        self._committed = max(self._committed, upto)
        if self._settings.acks is AckAfter.KAFKA or self._ledger is not None:
            self.wake()

    def ask(self, call: Callable[[RefusedMessages], _T]) -> Future[_T]:
        """Let a call look at the refused messages on the pump's thread; only for a gateway with an outbox."""
        assert self._downlink is not None
        answer = self._downlink.ask(call)
        self.wake()
        return answer

    def wake(self) -> None:
        """Make the loop look around now."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"w")

    @property
    def wake_fd(self) -> int:
        """A descriptor that wakes the loop when a byte is written to it."""
        return self._wake_write

    def status(self) -> Mapping[str, Any]:
        """The MQTT side as `towline status` shows it; counters are totals over the journal's life."""
        ledger, inbound = self._inbox.ledger, self._session.inbound
        return {
            **self._shown,
            "client_id": self._settings.mqtt_client_id,
            "protocol": NAMES[self._versions.level].removeprefix("MQTT "),
            "received": self._uplink.received,
            "unacknowledged": inbound.unacknowledged,
            "window_overruns": inbound.overruns,
            "qos2_held": len(inbound.held),
            "deduplicated": ledger.get("deduplicated", 0),
            "packet_ids_reused": ledger.get("packet_ids_reused", 0),
            "packets_too_large": ledger.get("packets_too_large", 0),
            "too_many_properties": ledger.get("too_many_properties", 0),
            "sessions_lost": ledger.get("sessions_lost", 0),
            "session_kept_s": self._session_kept_s,
            "broker_max_packet_bytes": self._session.server.max_packet_size if self._session.server else None,
            "proxy": str(self._proxy) if self._proxy else None,
            "insecure": self._settings.tls.insecure,
            "ack_after": self._settings.acks.value,
            "outbox": self._downlink.status() if self._downlink else None,
            "receipts": self._receipts.status() if self._receipts else None,
        }

    @property
    def failed(self) -> bool:
        """Whether `run` ends, or ended, with an error."""
        return self._fatal is not None

    # -- the loop --

    def run(self) -> None:
        """Pump until `stop`.

        Raises:
            TowlineError: What can't be mended by trying again: a refusal on the first connection, a client id taken
                over twice, a failed journal. Nothing acknowledged is lost by it.
        """
        try:
            while not self._stopping.is_set() and self._fatal is None:
                self._turn()
            if self._fatal is None:
                self._say_goodbye()
        finally:
            self._drop()
            if self._downlink is not None:
                self._downlink.close()
            self._shown["state"] = "stopped"
            self.heard.set()
        if self._fatal is not None:
            raise self._fatal

    def _turn(self) -> None:
        now = time.monotonic()
        # Not while rows wait: nothing could be read, and a session made anew would give their numbers to others.
        if self._transport is None and not self._uplink.full and now >= self._retry_at:
            if self._stale:
                self._renew_session()
            self._connect()
        self._uplink.find_room(now)
        if self._downlink is not None:
            self._send_on(self._downlink)
        self._tell_publishers(now)
        self._adjust_reading()
        for key, _mask in self._selector.select(self._patience()):
            if key.fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
        if self._transport is not None:
            self._serve_transport()
        if self._settings.acks is AckAfter.KAFKA:
            self._uplink.settle(self._session.inbound, self._committed)

    def _send_on(self, downlink: Downlink) -> None:
        try:
            downlink.turn(unsent=self._transport.unsent if self._transport is not None else 0)
        except JournalFull as error:
            self._begin_again("what is to be sent can't be recorded", error)
        if downlink.broken is not None and self._shown["last_error"] is None:  # stays, whatever connects
            self._note(downlink.broken)

    def _tell_publishers(self, now: float) -> None:
        if self._ledger is not None and self._receipts is not None:
            self._ledger.commit(self._committed)
            self._receipts.turn(now, online=self._session.state is SessionState.ONLINE)

    def _serve_transport(self) -> None:
        assert self._transport is not None
        waiting = self._transport.unsent
        if waiting and not self._transport.flush():
            self._line_broke()
            return
        if self._transport.unsent < waiting:
            self._handle(Written())
        if self._reading:
            self._read_gulp()
        deadline = self._session.deadline()
        if deadline is not None and time.monotonic() >= deadline:
            self._handle(Tick())

    def _patience(self) -> float:
        """Seconds until something is due by the clock."""
        if self._transport is None:
            due = self._uplink.room_at if self._uplink.full else self._retry_at
        elif self._reading and self._transport.decrypted:
            return 0.0
        else:
            due = self._session.deadline() or time.monotonic() + 60.0
        if self._uplink.full:
            due = min(due, self._uplink.room_at)
        sending = self._downlink.due() if self._downlink is not None else None
        if sending is not None:
            due = min(due, sending)
        telling = self._receipts.due() if self._receipts is not None and self._transport is not None else None
        if telling is not None and self._session.state is SessionState.ONLINE:
            due = min(due, telling)
        return max(0.0, due - time.monotonic())

    def _adjust_reading(self) -> None:
        """Read only while there is room for what comes [I7] and the broker keeps to the window."""
        transport = self._transport
        if transport is None:
            return
        why = None
        if self._uplink.full:
            why = "journal full"
        elif self._session.window_full:
            why = "window full"
        self._shown["held_back"] = why
        if (why is None) != self._reading:
            self._reading = why is None
            if self._reading and (self._shown["last_error"] or {}).get("code", "").startswith("TL-J"):
                self._shown["last_error"] = None  # there is room again
            self._handle(Resumed() if self._reading else Suspended())
            self._log.debug("reading again" if self._reading else "holding back", why=why)
        if self._transport is not None:
            events = selectors.EVENT_READ if self._reading else 0
            events |= selectors.EVENT_WRITE if transport.unsent else 0
            self._watch(transport, events)

    def _watch(self, transport: Transport, events: int) -> None:
        known = self._selector.get_map().get(transport.fileno())
        if not events:
            if known:
                self._selector.unregister(transport)
        elif not known:
            self._selector.register(transport, events)
        elif known.events != events:
            self._selector.modify(transport, events)

    # -- receiving --

    def _read_gulp(self) -> None:
        assert self._transport is not None
        data = self._transport.read()
        if data is None:
            return
        if data and len(data) < _SMALL_GULP:
            data += self._linger()
        if not data:
            self._line_broke()
            return
        try:
            items = self._decoder.feed(data)
        except MalformedPacket as error:
            self._handle(Malformed(str(error), error.reason))
            return
        self._handle(Received(items))
        self._uplink.count_repeats(self._session.inbound, self._where)

    def _linger(self) -> bytes:
        """Wait a moment for more of the same, so that one sync serves many.

        A broker with a small window sends nothing more before our acknowledgement: a wait that brought nothing is
        not repeated for the next gulps.
        """
        assert self._transport is not None
        if self._no_linger or not self._settings.linger_ms or self._session.state is not SessionState.ONLINE:
            self._no_linger = max(0, self._no_linger - 1)
            return b""
        time.sleep(self._settings.linger_ms / 1000)
        more = self._transport.read() or b""
        if not more:
            self._no_linger = _LINGER_REST
        return more

    def _new_session(self) -> Session:
        settings = self._settings
        config = session_config(settings, self._password, self._versions.level)
        record = recall(self._inbox.session, str(settings.state_dir), config, settings.abandon_session)
        if record is None and self._inbox.held:  # packet ids of a session that is given up are none of the next one's
            self._inbox.append(NO_ROWS, held={}, released=list(self._inbox.held), notes={})
        held = {packet_id: Held(*entry) for packet_id, entry in self._inbox.held.items()}
        session = Session(config, record, self._inbox.end, held)
        session.probing = self._versions.guessed
        if self._settings.acks is AckAfter.KAFKA:  # a repeat of what is stored and not committed has to wait too [I1]
            session.inbound.settled = self._inbox.committed
        if self._ledger is not None:
            ledger = self._ledger
            session.inbound.screen = lambda packets, topics: ledger.screen(packets, topics, int(time.time()))
        return session

    def _line_broke(self) -> None:
        told = self._transport.problem if self._transport is not None else None
        meant = Close(told) if told else self._session.broke(self._where)
        self._handle(Lost())
        self._close(meant)

    # -- the session's actions --

    def _handle(self, event: Event) -> None:
        session = self._session
        for action in session.handle(event, time.monotonic()):
            if self._session is not session:
                break  # what it decided is void: its record could not be stored, and its numbers are those of no row
            self._perform(action)
        self._shown["state"] = self._session.state.value

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            if self._transport is not None and not self._transport.write(action.data):
                self._line_broke()
        elif isinstance(action, Deliver):
            self._backoff.useful()
            self._uplink.deliver(action, self._session.inbound)
        elif isinstance(action, Remember):
            self._remember(action)
        elif isinstance(action, Close):
            self._close(action)
        elif isinstance(action, Online):
            self._online(action)
        elif isinstance(action, SessionLost):
            self._session_lost()
        else:
            self._sent(action)

    def _session_lost(self) -> None:
        self._inbox.count(sessions_lost=1)
        now, last = datetime.now(UTC), None
        if self._inbox.end > self._inbox.first:
            last = next(iter(self._inbox.read(self._inbox.end - 1, self._inbox.end))).column("received_at")[0].as_py()
        since = f"{last:%Y-%m-%d %H:%M:%S} UTC, when the last message was stored," if last else "the last connection"
        what = f"the broker has lost our session: what came to it between {since} and now may be missing"
        self._shown["session_lost"] = {"at": now.timestamp(), "since": last.timestamp() if last else None, "text": what}
        self._log.warning(what, code="TL-M22", broker=self._where)

    def _sent(self, action: Action) -> None:
        """What the session says of what we publish."""
        if isinstance(action, Acknowledged) and action.packet_id and action.reason != CUT:
            self._backoff.useful()
        if self._receipts is not None and isinstance(action, Acknowledged) and self._receipts.perform(action):
            return
        if self._downlink is not None:
            self._tell_downlink(self._downlink, action)

    def _tell_downlink(self, downlink: Downlink, action: Action) -> None:
        try:
            downlink.perform(action)
        except JournalFull as error:
            self._begin_again("what is about to be sent can't be recorded", error)

    def _remember(self, action: Remember) -> None:
        try:
            self._inbox.set_session(asdict(action.record) if action.record else {})
        except JournalFull as error:
            self._begin_again("the session can't be recorded", error)

    def _begin_again(self, what: str, error: JournalFull) -> None:
        """What can't be made durable must not be acted on: begin anew from what the disk holds."""
        self._renew_session()
        self._close(Close(Unreachable("TL-M13", self._where, f"{what}: {error.what}", error.do)))

    def _renew_session(self) -> None:
        self._stale = self._uplink.full
        if self._ledger is not None and self._receipts is not None:
            self._ledger.start_again(self._uplink.waiting_marks)
            self._receipts.start_again()
        self._session = self._new_session()
        if self._downlink is not None:
            self._downlink.attach(self._session)

    def _no_room(self, error: JournalFull) -> None:
        if self._shown["held_back"] is None:
            self._log.warning("journal full, holding back", reason=str(error), code=error.code)
        self._note(error)

    # -- connecting --

    def _connect(self) -> None:
        self._endpoint = self._redirects.target(self._settings.brokers[self._broker_index].endpoint)
        self._where = str(self._endpoint)
        self._served = False
        try:
            self._transport = connect(
                self._endpoint,
                tls=self._tls,
                proxy=self._proxy,
                timeout_s=self._settings.connect_timeout_s,
                keep_alive_s=self._settings.keep_alive_s,
                cancelled=self._stopping.is_set,
            )
        except (BrokerError, ConfigError) as error:
            if isinstance(error, ConfigError) and not self._ever_online:
                self._fatal = error
            elif not self._stopping.is_set():
                self._versions.away()
                self._keep_to_version("")
                self._try_again(error)  # what worked before may be a certificate that is being renewed
            return
        self._decoder = Decoder(self._settings.max_packet_bytes, self._versions.level)
        self._shown["broker"] = self._where
        self._reading = True
        server = "" if self._settings.brokers_share_sessions else self._where
        self._handle(Opened(server, alone=not self._settings.several_sessions))

    def _online(self, action: Online) -> None:
        self._backoff.online(time.monotonic())
        self._redirects.served(self._endpoint)
        self._versions.online()
        self._ever_online = self._served = True
        if self._receipts is not None and not action.resumed:
            self._receipts.session_lost()
        self.heard.set()
        self._shown.update(connected_since=time.time(), connects=self._shown["connects"] + 1, last_error=None)
        self._log.info("online", broker=self._where, session="kept" if action.resumed else "new")
        kept = self._session_kept_s
        if kept < self._settings.session_expiry_s:
            what = f"the broker keeps our session for {kept:,} s only; after longer away, what it held is gone"
            self._log.warning(what, code="TL-M36", broker=self._where)

    @property
    def _session_kept_s(self) -> int:
        """Seconds the broker keeps the session for us: as asked, or less [MQTT 5 section 3.2.2.3.2]."""
        given = self._session.server.session_expiry_interval if self._session.server else None
        return self._settings.session_expiry_s if given is None else given

    def _close(self, action: Close) -> None:
        self._drop()
        why = action.error.what if action.error else ""
        action = self._versions.judge(self._redirects.judge(action, self._endpoint), self._session.config)
        self._keep_to_version(why)
        if action.again_at_once and action.reference:
            self._log.warning("sent to another server", reason=str(action.error), code="TL-M26")
        if action.again_at_once:
            self._retry_at = 0.0
        elif action.error is not None:
            if (action.fatal and not self._ever_online) or (isinstance(action.error, TakenOver) and self._fights()):
                self._fatal = action.error
            if self._fatal is None:
                self._try_again(action.error)

    def _keep_to_version(self, why: str) -> None:
        """Have a session of the version that is to be spoken."""
        before, level = self._session.config.protocol, self._versions.level
        if before != level:
            self._renew_session()
        if level < before:
            facts = {"refused": NAMES[before], "trying": NAMES[level], "reason": why}
            self._log.warning("trying an older version", **facts, code="TL-M25")

    def _fights(self) -> bool:
        now = time.monotonic()
        self._takeovers.append(now)
        return len(self._takeovers) == self._takeovers.maxlen and now - self._takeovers[0] < _TAKEOVER_WINDOW

    def _drop(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._transport)
            self._transport.drain(0.2)
            self._transport.close()
            self._transport = None
            withdrawn = self._session.outbound.withdraw()
            if self._downlink is not None and self._downlink.lost(token for token in withdrawn if token >= 0):
                self._backoff.culprit_found()
            if self._receipts is not None:
                self._receipts.lost(withdrawn)
        self._shown.update(connected_since=None, state=SessionState.OFFLINE.value)

    def _try_again(self, error: BrokerError | ConfigError) -> None:
        """The next broker of the list at once; a pause after each round through the list.

        After a connection that worked, and was of use, it begins at the first again: the order is that of preference.
        """
        self.heard.set()
        if not error.where.startswith(self._settings.name):  # the way to a broker knows of no line
            error.where = f"{self._settings.name} at {error.where}"
        self._note(error)
        self._log.warning("no connection", code=error.code, reason=str(error))
        if self._redirects.pending:
            return
        now = time.monotonic()
        again = self._served and not self._backoff.in_vain(now)
        self._broker_index = 0 if again else (self._broker_index + 1) % len(self._settings.brokers)
        if self._broker_index == 0 or isinstance(error, RefusedByBroker):
            self._retry_at = now + self._backoff.pause(now)

    def _note(self, error: TowlineError) -> None:
        self._shown["last_error"] = {"code": error.code, "text": str(error), "at": time.time()}

    # -- ending --

    def _say_goodbye(self) -> None:
        """Acknowledge what is safe and leave the session with a plain DISCONNECT."""
        with contextlib.suppress(JournalFull):
            self._uplink.store()
        if self._transport is not None:
            self._session_farewell()

    def _session_farewell(self) -> None:
        assert self._transport is not None
        transport = self._transport
        for action in self._session.handle(Stop(), time.monotonic()):
            if isinstance(action, Send):
                transport.write(action.data)
        transport.drain(_GOODBYE)
