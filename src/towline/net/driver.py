"""The session driver: one session's way to its brokers: transport, decoder, clock, and another try after every end.

The gateway, the Publisher and the Client each own one and turn it in a loop of their own. All of it but `wake` and
`cancel` belongs to that one thread. It holds no rule of MQTT (those are in the session) and none of storage: what the
session asks for beside sending is the owner's, see `Hooks`. What the driver adds is time, sockets and patience.
"""

from __future__ import annotations

import contextlib
import os
import re
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
from towline.mqtt.codec import AnswerRun, Decoder, Item, PublishRun
from towline.mqtt.events import Action, Close, Event, Send
from towline.mqtt.fence import MalformedPacket
from towline.mqtt.plain import PlainReader, PlainRun
from towline.mqtt.reasons import CUT
from towline.mqtt.session import Session, SessionState
from towline.mqtt.versions import NAMES, Versions
from towline.net.connecting import Transport
from towline.net.endpoint import DEFAULT_PORTS, Endpoint, other_port
from towline.net.settings import BrokerConnection, ConnectionSettings
from towline.timing import Backoff

#: Patience in seconds with the goodbye.
GOODBYE_S: Final = 2.0
#: A turn ends after this many seconds at the latest; everything that matters wakes it.
_LONGEST_TURN: Final = 60.0
#: Patience in seconds with bytes that are still to be sent when a connection ends.
_LAST_WORDS: Final = 0.2
#: A chunk below may be the beginning of more, and waits `BrokerConnection.linger_s`; above, waiting gains nothing.
_SMALL_CHUNK: Final = 128 << 10
#: Packets of a chunk in a stream.
_STREAM: Final = 100
#: How often the time that is set a chunk of a stream waits, and how often any other.
_IN_STREAM: Final = 2
_ELSEWHERE: Final = 3
#: One step towards a window that is not full yet, in seconds: a broker fills it packet by packet.
_STEP_S: Final = 0.00025
#: Chunks of other numbers in a row after which there is no window.
_MISSES: Final = 3
#: Seconds of silence since the last chunk was acknowledged after which a chunk may wait long.
_SILENCE_S: Final = 0.003
#: Packets of a window after which the silence may be the way to the broker and back.
_BURST: Final = 8
#: Every so many chunks one is kept waiting all the same: what looked like a window may have been a low rate.
_TRIAL: Final = 64


#: Items that are several packets.
_RUNS: Final = (PublishRun, PlainRun, AnswerRun)


def _packets(items: list[Item]) -> int:
    count = 0
    for item in items:
        count += len(item) if isinstance(item, _RUNS) else 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What is its owner's; all of it is called on the driver's thread.

    Attributes:
        new_session: Makes the session for a protocol level; asked again for another version, and by `renew`.
        perform: Carries out an action of the session other than `Send` and `Close`; they come in order.
        ended: A connection has ended, and the session knows.
        failed: No connection, or an end of one, and another try follows.
        notice: Takes ``notice(what, code=code, **facts)``: TL-M25 for an older version, TL-M26 for another server.
        plain: Makes columns of messages without properties; None to have each as an object.
        cancelled: Asked while it connects; True gives that up.
    """

    new_session: Callable[[int], Session]
    perform: Callable[[Action], None]
    ended: Callable[[], object] = lambda: None
    failed: Callable[[BrokerError | ConfigError], None] = lambda _error: None
    notice: Callable[..., object] = lambda _what, **_facts: None
    plain: PlainReader | None = None
    cancelled: Callable[[], bool] = lambda: False


class SessionDriver:
    """Drives a `Session`.

    Args:
        connection: To be made, and made anew; the session is told its part by its owner, see `Hooks.new_session`.
        hooks: The owner's part.
    """

    def __init__(self, connection: BrokerConnection, hooks: Hooks) -> None:
        self._connection = connection
        self._settings = connection.settings
        self._hooks = hooks
        #: Of the protocol; another one is taken only while nothing is connected.
        self.versions = Versions(connection.levels)
        self.session = hooks.new_session(connection.levels[0])
        self.attempts = Attempts(connection.brokers, self._settings)
        self._decoder = self._new_decoder()
        self._transport: Transport | None = None
        #: Connections opened so far: tells one from the next.
        self.count = 0
        #: The session is online on the current connection.
        self.online = False
        #: A session has been online: what fails from now on is tried again.
        self.ever_online = False
        #: Why the last connection ended, or could not be made; None while one is online.
        self.error: BrokerError | ConfigError | None = None
        #: What no other try will mend; the owner has to stop.
        self.fatal: BrokerError | ConfigError | None = None
        self._reading = True
        self._linger = Linger(connection.linger_s, connection.linger_after_silence_s)
        #: When the last chunk had been handled, on `time.monotonic`.
        self._answered = 0.0
        self._cancelled = threading.Event()
        #: Read end and write end of what `wake` writes to; empty when disposed of.
        self._pipe: tuple[int, ...] = os.pipe()
        #: Held by whoever writes to it or closes it: a descriptor that is closed may be another's at once. A signal
        #: handler may call `wake` on a thread that is in it.
        self._pipe_lock = threading.RLock()
        for descriptor in self._pipe:
            os.set_blocking(descriptor, False)

    def _new_decoder(self) -> Decoder:
        return Decoder(self._settings.max_packet_bytes, self.versions.level, self._hooks.plain)

    # -- from any thread --

    def wake(self) -> None:
        """Let a `turn` that waits come back now."""
        with self._pipe_lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            if self._pipe:
                os.write(self._pipe[1], b"w")

    @property
    def wake_fd(self) -> int:
        """A descriptor that wakes when a byte is written to it, until `dispose`."""
        return self._pipe[1]

    def cancel(self) -> None:
        """Give up an attempt to connect that is under way, and wake."""
        self._cancelled.set()
        self.wake()

    @property
    def endpoint(self) -> Endpoint:
        """The server in use or last tried."""
        return self.attempts.endpoint

    # -- for the owner --

    @property
    def connected(self) -> bool:
        """A transport is open."""
        return self._transport is not None

    @property
    def unsent(self) -> int:
        """Bytes the system has not taken."""
        return self._transport.unsent if self._transport is not None else 0

    def handle(self, event: Event) -> None:
        """Give the session an event and do what it asks for."""
        session = self.session
        for action in session.handle(event, time.monotonic()):
            if self.session is not session:
                break  # what it decided is void: the owner could not make it durable, and has called `renew`
            if isinstance(action, Send):
                if self._transport is not None:
                    self._transport.write(action.data)  # of a line that broke the last words are read first
            elif isinstance(action, Close):
                self._close(action)
            else:
                self._note(action)
                self._hooks.perform(action)

    def turn(self, *due: float | None, may_connect: bool = True) -> None:
        """Connect, or wait for something to do, a minute at most, and do it.

        Args:
            due: When the owner has something to do, on `time.monotonic`; None for not by the clock.
            may_connect: Otherwise no new connection is made now.
        """
        now = time.monotonic()
        timeout_s = max(0.0, min([_LONGEST_TURN, *[at - now for at in due if at is not None]]))
        if self._transport is None:
            pause = self.attempts.due - time.monotonic() if may_connect else timeout_s
            if pause > 0 or not may_connect:
                self._wait(None, min(pause, timeout_s))
            else:
                self._connect()
            return
        transport = self._transport
        if not (self._reading and transport.decrypted):
            deadline = self.session.deadline()
            if deadline is not None:
                timeout_s = min(timeout_s, deadline - time.monotonic())
            self._wait(transport, timeout_s)
        if self._reading:
            self._receive(transport)
        if self._transport is transport and (waiting := transport.unsent):
            if not transport.flush():
                self._lost(transport)
            elif transport.unsent < waiting:
                self.handle(events.Written())
        self.handle(events.Tick())

    def hold_back(self, *, hold: bool) -> None:
        """Stop or resume reading from the broker; the keep alive goes on [I7]."""
        if hold == self._reading:
            self._reading = not hold
            self.handle(events.Reading(not hold))

    def renew(self, error: BrokerError | None = None) -> None:
        """Begin anew with another session, because what this one decided can't be made durable.

        Args:
            error: Ends the connection; None where there is none.
        """
        self._new_session()
        if error is not None:
            self._close(Close(error))

    def leave(self, patience_s: float = GOODBYE_S) -> None:
        """Say goodbye, wait up to `patience_s` seconds until that is sent, and close; the session stays there."""
        if self._transport is not None:
            for action in self.session.handle(events.Stop(), time.monotonic()):
                if isinstance(action, Send):
                    self._transport.write(action.data)
            self._transport.drain(patience_s)
        self.disconnect()

    def disconnect(self) -> None:
        """Close the transport, if one is open."""
        self.online = False
        if self._transport is None:
            return
        self._transport.drain(_LAST_WORDS)
        self._transport.close()
        self._transport = None
        self._hooks.ended()
        if self.session.outbound.culprit is not None:
            self.attempts.culprit_found()

    def dispose(self) -> None:
        """Close everything, for good; a second call does nothing."""
        self.disconnect()
        with self._pipe_lock:
            pipe, self._pipe = self._pipe, ()
            for descriptor in pipe:
                os.close(descriptor)

    # -- a connection --

    def _given_up(self) -> bool:
        return self._cancelled.is_set() or self._hooks.cancelled()

    def _connect(self) -> None:
        endpoint = self.attempts.begin()
        try:
            keep_alive_s = self.session.config.keep_alive_s or 60
            self._transport, credentials = self._connection.connect(endpoint, keep_alive_s, self._given_up)
        except (BrokerError, ConfigError) as error:
            if not self._cancelled.is_set():
                self.versions.away()
                self._keep_to_version("")
                # What worked before may be a certificate that is being renewed.
                self._failed(error, for_good=isinstance(error, ConfigError) and not self.ever_online)
            return
        self._decoder = self._new_decoder()
        self._reading = True
        self.count += 1
        server = "" if self._settings.brokers_share_sessions else str(endpoint)
        config = replace(self.session.config, **credentials)
        self.handle(events.Opened(server, not self._connection.several_sessions, config))

    def _wait(self, transport: Transport | None, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._pipe[0], select.POLLIN)
        if transport is not None:
            events = (select.POLLIN if self._reading else 0) | (select.POLLOUT if transport.unsent else 0)
            if events:  # without any the end of the line would still be told, again and again
                poller.register(transport.fileno(), events)
        if any(ready == self._pipe[0] for ready, _ in poller.poll(max(0.0, timeout_s) * 1000)):
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)

    def _receive(self, transport: Transport) -> None:
        data = transport.read()
        if data is None:
            return
        if not data:
            self._lost(transport)
            return
        try:
            self.handle(events.Received(self._chunk(transport, data)))
        except MalformedPacket as error:
            self.handle(events.Malformed(str(error), error.reason))
        self._answered = time.monotonic()

    def _chunk(self, transport: Transport, data: bytes) -> list[Item]:
        """What was read, and what came in a moment of waiting for more of the same, so that one sync serves many.

        Raises:
            MalformedPacket: As `Decoder.feed`.
        """
        if len(data) >= _SMALL_CHUNK or self.session.state is not SessionState.ONLINE:
            return self._decoder.feed(data)
        linger = self._linger
        more = b""
        if pause := linger.at_once(time.monotonic() - self._answered):
            items = self._decoder.feed(data + (more := self._more(transport, pause)))
        else:
            items = self._decoder.feed(data)
            for pause in linger.pauses(partial(_packets, items)):
                if more := self._more(transport, pause):
                    items += self._decoder.feed(more)
        linger.done(_packets(items), in_vain=not more)
        return items

    def _more(self, transport: Transport, seconds: float) -> bytes:
        time.sleep(seconds)
        return transport.read() or b""

    def _note(self, action: Action) -> None:
        """Whether a connection is of use shows in what came through it."""
        if isinstance(action, events.Deliver):
            self.attempts.useful()
        elif isinstance(action, events.Acknowledged):
            if action.packet_id and action.reason != CUT:
                self.attempts.useful()
        elif isinstance(action, events.Online):
            self.online = self.ever_online = True
            self.error = None
            self.attempts.online(time.monotonic())
            self.versions.online()

    # -- its end --

    def _lost(self, transport: Transport) -> None:
        problem = transport.problem
        close = Close(problem) if problem else self.session.broke(str(self.endpoint))
        self.handle(events.Lost())
        self._close(close)

    def _close(self, action: Close) -> None:
        served = self.online
        self.disconnect()
        reason = action.error.what if action.error else ""
        action = self.versions.judge(self.attempts.judge(action), self.session.config)
        self._keep_to_version(reason)
        if action.again_at_once:
            if action.reference:
                self._hooks.notice("sent to another server", code="TL-M26", reason=str(action.error))
            self.attempts.due = 0.0
        elif action.error is not None:
            fight = isinstance(action.error, TakenOver) and self.attempts.taken_over(time.monotonic())
            self._failed(action.error, for_good=(action.fatal and not self.ever_online) or fight, served=served)

    def _new_session(self) -> None:
        self.session = self._hooks.new_session(self.versions.level)
        self.session.probing = self.versions.guessed

    def _keep_to_version(self, reason: str) -> None:
        """Have a session of the version that is to be spoken; before the first CONNACK nothing is in it yet."""
        before, level = self.session.config.protocol, self.versions.level
        if before != level:
            self._new_session()
        if level < before:
            what = "trying an older version"
            self._hooks.notice(what, code="TL-M25", refused=NAMES[before], trying=NAMES[level], reason=reason)

    def _failed(self, error: BrokerError | ConfigError, *, for_good: bool, served: bool = False) -> None:
        self.error = error
        if error.code in {"TL-M03", "TL-M30"} and not self.ever_online and not self.endpoint.tls:
            error.do += other_port(str(self.endpoint))
        if for_good:
            self.fatal = error
        else:
            self._hooks.failed(error)
        self.attempts.failed(time.monotonic(), served=served)


class Linger:
    """How long a chunk waits for more messages, so that one sync and one round of work serve many. Pure: no clock.

    Waiting saves CPU where messages come one by one. It harms where a broker sends nothing more before our
    acknowledgements: with a window of 20, a wait of 3 ms each time would hold the line at 6,700 messages a second. Such
    a broker shows itself by chunks of one and the same number of packets, its window; a chunk of that many does not
    wait. What comes after a moment of silence was not waiting for our acknowledgements: nobody loses by a longer wait,
    and at 100 messages a second one round of work in place of eight serves four.

    Args:
        linger_s: In seconds: a chunk of a stream waits twice as long, any other up to three times; 0 for none.
        after_silence_s: Seconds that a chunk waits after a moment of silence; 0 for as long as any other.
    """

    def __init__(self, linger_s: float, after_silence_s: float = 0.0) -> None:
        self._linger = linger_s
        self._after_silence = after_silence_s
        #: Whether the chunk at hand waits so.
        self._long = False
        #: Chunks until one may wait so again: the last wait was in vain.
        self._vain = 0
        #: Packets of the last chunk.
        self._last = 0
        #: As many as the broker seems to send at a time; 0 for unknown.
        self._window = 0
        #: Chunks since the last one of a whole window; < _MISSES.
        self._misses = 0
        #: Chunks of a whole window since the last one that was kept waiting; <= _TRIAL.
        self._spared = 0

    def at_once(self, silence_s: float = 0.0) -> float:
        """Seconds to wait before the bytes of a chunk are looked at: those of a stream are better decoded in one go.

        Args:
            silence_s: Between the last acknowledgement and this chunk.
        """
        if self._last >= _STREAM:
            return _IN_STREAM * self._linger
        self._long = silence_s >= _SILENCE_S and self._window < _BURST and not self._vain
        return self._after_silence if self._long else 0.0

    def pauses(self, packets: Callable[[], int]) -> Iterator[float]:
        """Seconds to wait for more, one wait after the other.

        Args:
            packets: How many the chunk has by now.
        """
        left, first = _ELSEWHERE * self._linger, packets()
        trial = self._spared == _TRIAL
        self._spared *= not trial
        count = first
        while self._window and left > 0:
            if count == self._window and not trial:
                self._spared += 1
                return
            pause = min(left, _STEP_S)
            left -= pause
            yield pause
            before, count = count, packets()
            if count == before:
                break
        if left > 0:
            yield left
            count = packets()
        if count == first:
            self._window = first
        elif trial:
            self._window = 0  # more came than was taken for all

    def done(self, packets: int, *, in_vain: bool = False) -> None:
        """The chunk is complete, with so many packets.

        Args:
            packets: How many.
            in_vain: Nothing came while it waited `at_once`.
        """
        self._vain = _TRIAL if self._long and in_vain else max(0, self._vain - 1)
        self._long = False
        if packets == self._last < _STREAM:
            self._window = packets
        self._misses = 0 if packets == self._window else self._misses + 1
        if self._misses == _MISSES:
            self._window = self._misses = 0
        self._last = packets


#: Part of a pause that is left to chance.
_JITTER: Final = 0.75
#: A connection that was online for so many seconds was of use, whatever it carried.
_STEADY_S: Final = 10.0
#: After so many failures in a row a server that takes us in only to end the connection is left for the next one.
_IN_VAIN: Final = 4
#: So many culprits in a row, without a message that went through, begin the pauses anew.
_MOST_CULPRITS: Final = 8
#: Redirections in a row without a connection that works: a load balancer needs one, a move while it balances two.
MOST_HOPS: Final = 4
#: References of one packet that are looked at.
_MOST_REFERENCES: Final = 8
#: ``name``, ``name:port``, ``[name with colons]``, ``[...]:port`` (section 4.11), or the same with a scheme before it.
_REFERENCE: Final = re.compile(r"(?:([a-z]+)://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::(\d{1,5}))?/?")
#: A taken-over client id is given up when it happens twice in this many seconds.
_TAKEOVER_WINDOW: Final = 60.0


class Attempts:
    """Which broker is tried next, and when. Pure: the clock is the caller's.

    The brokers of a list are tried in its order, one right after the other, with a pause after each round, which
    doubles until a connection was of use. That one came online says little: a broker may end it again at the first
    packet, for ever. So the pauses begin anew only after a message went through it, in either direction, or after ten
    seconds online. After a connection that worked the list begins at the first again, so that it is an order of
    preference; a broker that takes us in again and again only to end the connection is left for the next one.

    What a broker says of other servers goes first (Server Reference [MQTT 5 section 4.11]). A reference is followed
    only when that was asked for, to the same scheme with the same TLS verification, and a few times in a row at most.
    "Use another server" (0x9C) counts for the next connection; "server moved" (0x9D) from the moment the new server has
    served us, for as long as the process lives: the setting is the operator's to change.

    Args:
        endpoints: The list of brokers, in order of preference.
        settings: Whether to go where a broker points, and the first and the longest pause between rounds.
    """

    def __init__(self, endpoints: Sequence[Endpoint], settings: ConnectionSettings) -> None:
        #: A server that has moved is where it moved to.
        self._endpoints = [*endpoints]
        #: Place in the list of the next one, or of the one in use.
        self._index = 0
        self._follow = settings.follow_redirects
        #: Servers the last reference named and that are not tried yet, before the list goes on.
        self._next: deque[Endpoint] = deque()
        #: Who said "moved" and waits for the new server to prove itself.
        self._moving: Endpoint | None = None
        #: Redirections since the last connection that worked; at most `MOST_HOPS`.
        self._hops = 0
        longest_s = settings.reconnect_max_delay_s
        self._backoff = Backoff(min(settings.reconnect_delay_s, longest_s), longest_s, _JITTER)
        #: When the connection came online that has not ended, or whose pause is not taken.
        self._online_at: float | None = None
        #: Culprits since the last message that went through.
        self._culprits = 0
        #: When the client id was taken over last.
        self._taken_over = float("-inf")
        #: The server in use or last tried, which may be one that a broker of the list has named.
        self.endpoint = endpoints[0]
        #: Times all of the list were tried in vain, or a connection that worked has ended.
        self.rounds = 0
        #: When the next attempt may be made; 0 for at once.
        self.due = 0.0

    def begin(self) -> Endpoint:
        """The server to connect to now."""
        self.endpoint = self._next.popleft() if self._next else self._endpoints[self._index]
        return self.endpoint

    def online(self, now: float) -> None:
        """The server has taken us in, with all subscriptions."""
        self._online_at = now
        self._hops = 0
        self._next.clear()
        self._endpoints = [self.endpoint if one == self._moving else one for one in self._endpoints]
        self._moving = None

    def judge(self, close: Close) -> Close:
        """What the end of the connection means: with ``again_at_once`` the server's reference is followed."""
        if not self._follow or not close.reference:
            return close
        if self._hops >= MOST_HOPS:
            self._hops, self._moving = 0, None
            self._next.clear()
            what = f"sent from server to server {MOST_HOPS} times without being served"
            do = "The brokers' redirections go round; tell their operator."
            return Close(Unreachable("TL-M27", str(self.endpoint), what, do))
        servers = [server for server in read_references(close.reference, self.endpoint) if server != self.endpoint]
        if not servers:
            return close
        self._hops += 1
        self._next = deque(servers)
        self._moving = self.endpoint if close.moved else None
        return replace(close, fatal=False, again_at_once=True)

    def useful(self) -> None:
        """A message went through; that one was given up says nothing about the broker."""
        self._backoff.reset()
        self._culprits = 0

    def culprit_found(self) -> None:
        """The message at which the broker ended the connection is set aside: what was in the way is gone.

        After many in a row it is rather the broker, which would have all messages set aside at this speed.
        """
        self._culprits += 1
        if self._culprits <= _MOST_CULPRITS:
            self._backoff.reset()

    def failed(self, now: float, *, served: bool) -> None:
        """No connection could be made, or one has ended.

        Args:
            now: On the clock of `due`.
            served: It had come online.
        """
        if self._next:
            return
        lasted = self._online_at is not None and now - self._online_at >= _STEADY_S
        worked = served and (lasted or self._backoff.failures < _IN_VAIN)
        self._index = 0 if worked else (self._index + 1) % len(self._endpoints)
        if self._index == 0:
            self.rounds += 1
            if lasted:
                self._backoff.reset()
            self._online_at = None
            self.due = now + self._backoff.next()

    def taken_over(self, now: float) -> bool:
        """Another client has taken our id over; whether two clients fight for it."""
        before, self._taken_over = self._taken_over, now
        return now - before < _TAKEOVER_WINDOW


def read_references(text: str, like: Endpoint) -> list[Endpoint]:
    """The servers a broker names, as endpoints.

    Args:
        text: The Server Reference: names separated by spaces.
        like: Gives scheme and path. A reference that names another scheme is left out, and so is what can't be read:
            it would weaken what the operator chose.
    """
    endpoints = (_endpoint(part, like) for part in text.split(" ")[:_MOST_REFERENCES])
    return list(dict.fromkeys(endpoint for endpoint in endpoints if endpoint is not None))


def _endpoint(reference: str, like: Endpoint) -> Endpoint | None:
    match = _REFERENCE.fullmatch(reference)
    if match is None or like.scheme == "unix" or match[1] not in (None, like.scheme):
        return None
    port = int(match[3]) if match[3] else DEFAULT_PORTS[like.scheme]
    return Endpoint(like.scheme, match[2].strip("[]"), port, like.path) if 0 < port < 1 << 16 else None
