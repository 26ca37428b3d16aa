"""Session driver: connects a session to its brokers, with transport, decoder, clock and reconnects.

Gateway, Publisher and Client each own one driver and call it in their own loop. Everything but `wake` and `cancel`
belongs to that one thread. The driver has no MQTT rules (they are in the session) and no storage: actions of the
session other than sending are the owner's (`Hooks`). The driver adds time, sockets and retries.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from towline.errors import BrokerError, ConfigError, TakenOver, Unreachable
from towline.mqtt import events
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import AckRun, Decoder, Item, PublishRun
from towline.mqtt.events import Action, Close, Event, Send
from towline.mqtt.plain import PlainReader, PlainRun
from towline.mqtt.reasons import CONNECTION_CUT
from towline.mqtt.session import Session, SessionState
from towline.mqtt.versions import VERSION_NAMES, VersionNegotiation
from towline.net.connecting import Transport
from towline.net.endpoint import Endpoint, tls_port_hint
from towline.net.settings import BrokerConnection, ConnectionSettings
from towline.timing import Backoff

#: Timeout in seconds for sending DISCONNECT.
DISCONNECT_TIMEOUT_S: Final = 2.0
#: Longest wait of `run_once` in seconds; every relevant event wakes it.
_MAX_WAIT_S: Final = 60.0
#: Timeout in seconds for sending remaining bytes at the end of a connection.
_FLUSH_TIMEOUT_S: Final = 0.2
#: A chunk below this size waits `BrokerConnection.linger_s` for more; a larger one gains nothing by it.
_SMALL_CHUNK_BYTES: Final = 128 << 10
#: Packets from which a chunk counts as part of a stream.
_STREAM_PACKETS: Final = 100
#: Wait of a chunk in multiples of `linger_s`: in a stream, and elsewhere.
_STREAM_LINGER_FACTOR: Final = 2
_LINGER_FACTOR: Final = 3
#: Pause in seconds until the window is checked again: a broker fills it packet by packet.
_WINDOW_STEP_S: Final = 0.00025
#: Consecutive chunks of other sizes after which no window is assumed.
_MAX_WINDOW_MISSES: Final = 3
#: Seconds since the last chunk after which a chunk may wait `linger_after_silence_s`.
_SILENCE_S: Final = 0.003
#: Window size from which a silence may just be the round trip to the broker.
_BURST_PACKETS: Final = 8
#: Number of chunks after which one waits on trial: an assumed window may have been a low rate.
_TRIAL_CHUNKS: Final = 64


#: Item types that hold several packets.
_RUN_TYPES: Final = (PublishRun, PlainRun, AckRun)


def _count_packets(items: list[Item]) -> int:
    count = 0
    for item in items:
        count += len(item) if isinstance(item, _RUN_TYPES) else 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks to the driver's owner, all called on the driver's thread.

    Attributes:
        new_session: Returns the session for a protocol level; called again for another version, and by
            `restart_session`.
        perform: Performs an action of the session other than `Send` and `Close`; actions come in order.
        connection_ended: Called after the end of a connection, when the session knows it.
        attempt_failed: Called with the error of a failed or ended connection that is followed by another attempt.
        log_notice: Called as ``log_notice(event, code=code, **facts)``: TL-M25 older version, TL-M26 redirect.
        plain_reader: Returns columns for messages without properties; None for one object each.
    """

    new_session: Callable[[int], Session]
    perform: Callable[[Action], None]
    connection_ended: Callable[[], object] = lambda: None
    attempt_failed: Callable[[BrokerError | ConfigError], None] = lambda _error: None
    log_notice: Callable[..., object] = lambda _event, **_facts: None
    plain_reader: PlainReader | None = None


class SessionDriver:
    """Driver of one `Session`.

    Args:
        connection: Brokers and settings of the connection; `Hooks.new_session` gives the session its part.
        hooks: Callbacks to the owner.
    """

    def __init__(self, connection: BrokerConnection, hooks: Hooks) -> None:
        self._connection = connection
        self._settings = connection.settings
        self._hooks = hooks
        #: Protocol versions; changes only while disconnected.
        self.versions = VersionNegotiation(connection.levels)
        self.session = hooks.new_session(connection.levels[0])
        self.schedule = ReconnectSchedule(connection.brokers, self._settings)
        self._decoder = self._new_decoder()
        self._transport: Transport | None = None
        #: Number of connections opened so far; identifies the current one.
        self.connection_count = 0
        #: The session is online on the current connection.
        self.online = False
        #: A session has been online: later failures are retried.
        self.ever_online = False
        #: Error of the last connection or attempt; None while online.
        self.error: BrokerError | ConfigError | None = None
        #: Permanent error; the owner has to stop.
        self.fatal_error: BrokerError | ConfigError | None = None
        self._reading = True
        self._linger = Linger(connection.linger_s, connection.linger_after_silence_s)
        #: End of handling of the last chunk, on `time.monotonic`.
        self._last_chunk_at = 0.0
        self._cancelled = threading.Event()
        #: Read and write end of the pipe of `wake`; empty after `dispose`.
        self._wake_pipe: tuple[int, ...] = os.pipe()
        #: Held for writes and close: a closed descriptor may be reused at once. Reentrant, because a signal handler may
        #: call `wake` on a thread inside `wake`.
        self._pipe_lock = threading.RLock()
        for descriptor in self._wake_pipe:
            os.set_blocking(descriptor, False)

    def _new_decoder(self) -> Decoder:
        return Decoder(self._settings.max_packet_bytes, self.versions.level, self._hooks.plain_reader)

    # -- from any thread --

    def wake(self) -> None:
        """Wake a blocked `run_once`; callable from any thread."""
        with self._pipe_lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            if self._wake_pipe:
                os.write(self._wake_pipe[1], b"w")

    @property
    def wake_fd(self) -> int:
        """File descriptor that wakes `run_once` when a byte is written to it; valid until `dispose`."""
        return self._wake_pipe[1]

    def cancel(self) -> None:
        """Cancel a running connection attempt and wake `run_once`."""
        self._cancelled.set()
        self.wake()

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint in use, or of the last attempt."""
        return self.schedule.endpoint

    # -- owner's thread --

    @property
    def connected(self) -> bool:
        """Whether a transport is open."""
        return self._transport is not None

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the system has not accepted yet."""
        return self._transport.unsent_bytes if self._transport is not None else 0

    def handle(self, event: Event) -> None:
        """Pass an event to the session and perform the actions it returns."""
        session = self.session
        for action in session.handle(event, time.monotonic()):
            if self.session is not session:
                break  # the owner could not persist its decision and called `restart_session`
            if isinstance(action, Send):
                if self._transport is not None:
                    self._transport.write(action.data)  # after a failed write, received bytes are read first
            elif isinstance(action, Close):
                self._close(action)
            else:
                self._note_progress(action)
                self._hooks.perform(action)

    def run_once(self, *deadlines: float | None, may_connect: bool = True) -> None:
        """Connect, or wait up to a minute for input, a deadline or `wake`, and handle it.

        Args:
            deadlines: Deadlines of the owner, on `time.monotonic`; None for no deadline.
            may_connect: False makes no new connection now.
        """
        now = time.monotonic()
        timeout_s = max(0.0, min([_MAX_WAIT_S, *[deadline - now for deadline in deadlines if deadline is not None]]))
        if self._transport is None:
            pause = self.schedule.due_at - time.monotonic() if may_connect else timeout_s
            if pause > 0 or not may_connect:
                self._wait(None, min(pause, timeout_s))
            else:
                self._connect()
            return
        transport = self._transport
        if not (self._reading and transport.has_buffered_input):
            session_deadline = self.session.deadline()
            if session_deadline is not None:
                timeout_s = min(timeout_s, session_deadline - time.monotonic())
            self._wait(transport, timeout_s)
        if self._reading:
            self._receive(transport)
        if self._transport is transport and (unsent_before := transport.unsent_bytes):
            if not transport.flush():
                self._handle_connection_loss(transport)
            elif transport.unsent_bytes < unsent_before:
                self.handle(events.BytesWritten())
        self.handle(events.Tick())

    def pause_reading(self, *, pause: bool) -> None:
        """Pause or resume reading from the broker; keep alive continues [I7]."""
        if pause == self._reading:
            self._reading = not pause
            self.handle(events.ReadingToggled(not pause))

    def restart_session(self, error: BrokerError | None = None) -> None:
        """Replace the session, because its decisions cannot be persisted; `error` ends a connection."""
        self._new_session()
        if error is not None:
            self._close(Close(error))

    def send_disconnect(self, timeout_s: float = DISCONNECT_TIMEOUT_S) -> None:
        """Send DISCONNECT, wait up to `timeout_s` seconds for it, and close; the broker keeps the session."""
        if self._transport is not None:
            for action in self.session.handle(events.Stop(), time.monotonic()):
                if isinstance(action, Send):
                    self._transport.write(action.data)
            self._transport.drain(timeout_s)
        self.close_transport()

    def close_transport(self) -> None:
        """Close the transport, if one is open."""
        self.online = False
        if self._transport is None:
            return
        self._transport.drain(_FLUSH_TIMEOUT_S)
        self._transport.close()
        self._transport = None
        self._hooks.connection_ended()
        if self.session.outbound.culprit_token is not None:
            self.schedule.record_culprit()

    def dispose(self) -> None:
        """Close everything for good; a second call has no effect."""
        self.close_transport()
        with self._pipe_lock:
            pipe, self._wake_pipe = self._wake_pipe, ()
            for descriptor in pipe:
                os.close(descriptor)

    # -- a connection --

    def _connect(self) -> None:
        endpoint = self.schedule.next_endpoint()
        try:
            keep_alive_s = self.session.config.keep_alive_s or 60
            self._transport, credentials = self._connection.connect(endpoint, keep_alive_s, self._cancelled.is_set)
        except (BrokerError, ConfigError) as error:
            if not self._cancelled.is_set():
                self.versions.connection_failed()
                self._apply_version("")
                # A configuration that worked before may be a certificate under renewal.
                self._record_failure(error, permanent=isinstance(error, ConfigError) and not self.ever_online)
            return
        self._decoder = self._new_decoder()
        self._reading = True
        self.connection_count += 1
        server = "" if self._settings.brokers_share_sessions else str(endpoint)
        config = replace(self.session.config, **credentials)
        self.handle(events.ConnectionOpened(server, not self._connection.several_sessions, config))

    def _wait(self, transport: Transport | None, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._wake_pipe[0], select.POLLIN)
        if transport is not None:
            events = (select.POLLIN if self._reading else 0) | (select.POLLOUT if transport.unsent_bytes else 0)
            if events:  # with no events, poll would still report a hang-up, in a busy loop
                poller.register(transport.fileno(), events)
        if any(ready == self._wake_pipe[0] for ready, _ in poller.poll(max(0.0, timeout_s) * 1000)):
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_pipe[0], 4096)

    def _receive(self, transport: Transport) -> None:
        data = transport.read()
        if data is None:
            return
        if not data:
            self._handle_connection_loss(transport)
            return
        try:
            self.handle(events.PacketsReceived(self._read_chunk(transport, data)))
        except MalformedPacket as error:
            self.handle(events.DecodeFailed(str(error), error.reason))
        self._last_chunk_at = time.monotonic()

    def _read_chunk(self, transport: Transport, data: bytes) -> list[Item]:
        """Read a chunk, with further packets of a short wait, so that one sync serves many messages."""
        if len(data) >= _SMALL_CHUNK_BYTES or self.session.state is not SessionState.ONLINE:
            return self._decoder.feed(data)
        linger = self._linger
        following_data = b""
        if pause := linger.initial_pause(time.monotonic() - self._last_chunk_at):
            items = self._decoder.feed(data + (following_data := self._read_after_pause(transport, pause)))
        else:
            items = self._decoder.feed(data)
            for pause in linger.further_pauses(partial(_count_packets, items)):
                if following_data := self._read_after_pause(transport, pause):
                    items += self._decoder.feed(following_data)
        linger.record_chunk(_count_packets(items), wait_was_idle=not following_data)
        return items

    def _read_after_pause(self, transport: Transport, pause_s: float) -> bytes:
        time.sleep(pause_s)
        return transport.read() or b""

    def _note_progress(self, action: Action) -> None:
        """Record a delivered or acknowledged message: it shows that the connection works."""
        if isinstance(action, events.Deliver):
            self.schedule.record_delivery()
        elif isinstance(action, events.PublishAcknowledged):
            if action.packet_id and action.reason != CONNECTION_CUT:
                self.schedule.record_delivery()
        elif isinstance(action, events.Online):
            self.online = self.ever_online = True
            self.error = None
            self.schedule.record_online(time.monotonic())
            self.versions.confirm_level()

    # -- end of a connection --

    def _handle_connection_loss(self, transport: Transport) -> None:
        problem = transport.error
        close = Close(problem) if problem else self.session.connection_break(str(self.endpoint))
        self.handle(events.ConnectionLost())
        self._close(close)

    def _close(self, action: Close) -> None:
        was_online = self.online
        self.close_transport()
        reason = action.error.problem if action.error else ""
        action = self.versions.decide_close(self.schedule.follow_redirect(action), self.session.config)
        self._apply_version(reason)
        if action.reconnect_at_once:
            if action.server_reference:
                self._hooks.log_notice("redirected to another server", code="TL-M26", reason=str(action.error))
            self.schedule.due_at = 0.0
        elif action.error is not None:
            contended = isinstance(action.error, TakenOver) and self.schedule.record_takeover(time.monotonic())
            permanent = contended or (action.fatal and not self.ever_online)
            self._record_failure(action.error, permanent=permanent, was_online=was_online)

    def _new_session(self) -> None:
        self.session = self._hooks.new_session(self.versions.level)
        self.session.probing_version = self.versions.level_is_guess

    def _apply_version(self, reason: str) -> None:
        """Replace the session if the protocol version changed; before the first CONNACK it has no state."""
        previous_level, level = self.session.config.protocol, self.versions.level
        if previous_level != level:
            self._new_session()
        if level < previous_level:
            versions = {"refused": VERSION_NAMES[previous_level], "trying": VERSION_NAMES[level]}
            self._hooks.log_notice("trying an older version", code="TL-M25", **versions, reason=reason)

    def _record_failure(self, error: BrokerError | ConfigError, *, permanent: bool, was_online: bool = False) -> None:
        self.error = error
        if error.code in {"TL-M03", "TL-M30"} and not self.ever_online and not self.endpoint.tls:
            error.remedy += tls_port_hint(str(self.endpoint))
        if permanent:
            self.fatal_error = error
        else:
            self._hooks.attempt_failed(error)
        self.schedule.record_failure(time.monotonic(), was_online=was_online)


class Linger:
    """Wait of a chunk for further messages, so that one sync serves many (as Kafka's ``linger.ms``). Pure: no clock.

    Waiting saves CPU where messages come one by one. It harms if the broker sends no more before an acknowledgement:
    with a window of 20, a wait of 3 ms limits the line to 6,700 messages a second. Chunks with an equal number of
    packets reveal such a window; a chunk of this size does not wait. Messages that follow a silence did not wait for an
    acknowledgement, so a longer wait costs nothing: at 100 messages a second four are then served by one cycle instead
    of eight.

    Args:
        linger_s: In seconds: a chunk of a stream waits twice as long, any other up to three times; 0 for no wait.
        after_silence_s: Wait in seconds of a chunk that follows a silence; 0 for the usual wait.
    """

    def __init__(self, linger_s: float, after_silence_s: float = 0.0) -> None:
        self._linger_s = linger_s
        self._after_silence_s = after_silence_s
        #: The current chunk waits `linger_after_silence_s`.
        self._after_silence_now = False
        #: Chunks until the next such wait, after one without a further message.
        self._chunks_until_retry = 0
        #: Number of packets in the last chunk.
        self._last_packets = 0
        #: Assumed window of the broker in packets; 0 for unknown.
        self._window_packets = 0
        #: Chunks since the last one of a whole window; below _MAX_WINDOW_MISSES.
        self._window_misses = 0
        #: Chunks of a whole window since the last trial; at most _TRIAL_CHUNKS.
        self._chunks_without_wait = 0

    def initial_pause(self, silence_s: float = 0.0) -> float:
        """Return the seconds to wait before a chunk is decoded, `silence_s` after the last acknowledgement."""
        if self._last_packets >= _STREAM_PACKETS:
            return _STREAM_LINGER_FACTOR * self._linger_s
        silent = silence_s >= _SILENCE_S and not self._chunks_until_retry
        self._after_silence_now = silent and self._window_packets < _BURST_PACKETS
        return self._after_silence_s if self._after_silence_now else 0.0

    def further_pauses(self, count_packets: Callable[[], int]) -> Iterator[float]:
        """Yield the further pauses of a chunk in seconds; `count_packets` returns its current size."""
        remaining_s, first_count = _LINGER_FACTOR * self._linger_s, count_packets()
        is_trial = self._chunks_without_wait == _TRIAL_CHUNKS
        self._chunks_without_wait *= not is_trial
        count = first_count
        while self._window_packets and remaining_s > 0:
            if count == self._window_packets and not is_trial:
                self._chunks_without_wait += 1
                return
            pause = min(remaining_s, _WINDOW_STEP_S)
            remaining_s -= pause
            yield pause
            previous_count, count = count, count_packets()
            if count == previous_count:
                break
        if remaining_s > 0:
            yield remaining_s
            count = count_packets()
        if count == first_count:
            self._window_packets = first_count
        elif is_trial:
            self._window_packets = 0  # more arrived than the assumed window

    def record_chunk(self, packets: int, *, wait_was_idle: bool = False) -> None:
        """Record the size of a complete chunk; `wait_was_idle`: nothing arrived during `initial_pause`."""
        self._chunks_until_retry = max(0, self._chunks_until_retry - 1)
        if self._after_silence_now and wait_was_idle:
            self._chunks_until_retry = _TRIAL_CHUNKS
        self._after_silence_now = False
        if packets == self._last_packets < _STREAM_PACKETS:
            self._window_packets = packets
        self._window_misses = 0 if packets == self._window_packets else self._window_misses + 1
        if self._window_misses == _MAX_WINDOW_MISSES:
            self._window_packets = self._window_misses = 0
        self._last_packets = packets


#: Random share of a pause.
_JITTER: Final = 0.75
#: Seconds online from which a connection counts as useful, even without a message.
_STABLE_S: Final = 10.0
#: Consecutive failures after which a broker that accepts and then closes is skipped.
_MAX_BROKER_FAILURES: Final = 4
#: Consecutive culprits, without a delivered message, that reset the pause.
_MAX_CULPRITS: Final = 8
#: Consecutive redirects without an online connection: a load balancer needs one, a move behind it two.
MAX_REDIRECTS: Final = 4
#: References read from one packet.
_MAX_REFERENCES: Final = 8
#: Seconds within which a second takeover of the client id ends the session.
_TAKEOVER_WINDOW_S: Final = 60.0


class ReconnectSchedule:
    """Schedule of connection attempts: the next broker and its time. Pure: the caller owns the clock.

    Brokers are tried in list order without a pause; a pause follows each round and doubles until a connection was
    useful. An online connection proves little: the broker may close it at the first packet, every time. So the pause is
    reset only after a delivered message, in either direction, or after ten seconds online. After a useful connection
    the list starts again at its first broker (order of preference). A broker that repeatedly accepts and then closes is
    skipped.

    Redirects have priority (Server Reference [MQTT 5 section 4.11]). They are followed only if configured, to the same
    scheme with the same TLS verification, and a limited number of times. "Use another server" (0x9C) holds for the next
    connection. "Server moved" (0x9D) holds for the lifetime of the process, once the new server has accepted a
    connection: the setting is the operator's to change.

    Args:
        endpoints: Brokers in order of preference.
        settings: Redirect setting, and the first and the longest pause between rounds.
    """

    def __init__(self, endpoints: Sequence[Endpoint], settings: ConnectionSettings) -> None:
        #: Brokers of the list; a moved one is replaced by its new endpoint.
        self._endpoints = [*endpoints]
        #: Index of the next broker, or of the one in use.
        self._endpoint_index = 0
        self._follow_redirects = settings.follow_redirects
        #: Untried servers of the last reference; they precede the list.
        self._redirect_targets: deque[Endpoint] = deque()
        #: Server that has moved, until the new one is online.
        self._moved_server: Endpoint | None = None
        #: Redirects since the last online connection; at most `MAX_REDIRECTS`.
        self._redirect_count = 0
        longest_s = settings.reconnect_max_delay_s
        self._backoff = Backoff(min(settings.reconnect_delay_s, longest_s), longest_s, _JITTER)
        #: Time at which the current connection came online; None after its pause was set.
        self._online_at: float | None = None
        #: Culprits since the last delivered message.
        self._culprit_count = 0
        #: Time of the last takeover of the client id.
        self._last_takeover = float("-inf")
        #: Endpoint in use or of the last attempt; may be a redirect target.
        self.endpoint = endpoints[0]
        #: Number of rounds without success, and of useful connections that ended.
        self.rounds = 0
        #: Time of the next attempt; 0 for at once.
        self.due_at = 0.0

    def next_endpoint(self) -> Endpoint:
        """Return the endpoint of the attempt that starts now."""
        targets = self._redirect_targets
        self.endpoint = targets.popleft() if targets else self._endpoints[self._endpoint_index]
        return self.endpoint

    def record_online(self, now: float) -> None:
        """Record that the server accepted the session with all subscriptions."""
        self._online_at = now
        self._redirect_count = 0
        self._redirect_targets.clear()
        self._endpoints = [self.endpoint if broker == self._moved_server else broker for broker in self._endpoints]
        self._moved_server = None

    def follow_redirect(self, close: Close) -> Close:
        """Follow the server reference of a closed connection: ``reconnect_at_once`` is set if there is one."""
        if not self._follow_redirects or not close.server_reference:
            return close
        if self._redirect_count >= MAX_REDIRECTS:
            self._redirect_count, self._moved_server = 0, None
            self._redirect_targets.clear()
            problem = f"redirected {MAX_REDIRECTS} times without a connection"
            remedy = "The brokers redirect in a circle; report it to their operator."
            return Close(Unreachable("TL-M27", str(self.endpoint), problem, remedy))
        references = parse_references(close.server_reference, self.endpoint)
        servers = [server for server in references if server != self.endpoint]
        if not servers:
            return close
        self._redirect_count += 1
        self._redirect_targets = deque(servers)
        self._moved_server = self.endpoint if close.permanent_redirect else None
        return replace(close, fatal=False, reconnect_at_once=True)

    def record_delivery(self) -> None:
        """Record a delivered message; a dropped one says nothing about the broker."""
        self._backoff.reset()
        self._culprit_count = 0

    def record_culprit(self) -> None:
        """Record that the message at which the broker closes the connection was set aside: it blocks no longer.

        After many in a row the broker itself is the likely cause; it would have all messages set aside at this speed.
        """
        self._culprit_count += 1
        if self._culprit_count <= _MAX_CULPRITS:
            self._backoff.reset()

    def record_failure(self, now: float, *, was_online: bool) -> None:
        """Record a failed connection, or the end of one that was online; `now` is on the clock of `due_at`."""
        if self._redirect_targets:
            return
        was_stable = self._online_at is not None and now - self._online_at >= _STABLE_S
        was_useful = was_online and (was_stable or self._backoff.failures < _MAX_BROKER_FAILURES)
        self._endpoint_index = 0 if was_useful else (self._endpoint_index + 1) % len(self._endpoints)
        if self._endpoint_index == 0:
            self.rounds += 1
            if was_stable:
                self._backoff.reset()
            self._online_at = None
            self.due_at = now + self._backoff.next_pause()

    def record_takeover(self, now: float) -> bool:
        """Record a takeover of the client id; return whether two clients compete for it."""
        previous_takeover, self._last_takeover = self._last_takeover, now
        return now - previous_takeover < _TAKEOVER_WINDOW_S


def parse_references(text: str, current: Endpoint) -> list[Endpoint]:
    """Parse a Server Reference, names separated by spaces, with the scheme and path of the current endpoint.

    References with another scheme, which would weaken the operator's choice, and malformed ones are skipped.
    """
    endpoints: list[Endpoint] = []
    for reference in text.split(" ")[:_MAX_REFERENCES]:
        with contextlib.suppress(ValueError):
            endpoint = Endpoint.parse(reference if "://" in reference else f"{current.scheme}://{reference}")
            if endpoint.scheme == current.scheme != "unix":
                endpoints.append(replace(endpoint, path=current.path))
    return list(dict.fromkeys(endpoints))
