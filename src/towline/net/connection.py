"""One session's way to its brokers: transport, decoder, clock, and another try after every end.

`towline.net.sender.Sender` turns it in its caller's thread, `towline.net.client.Client` in one of its own. All of it
but `wake` and `cancel` belongs to that one thread. What a session asks for beside sending is the owner's: `perform`.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from towline.errors import BrokerError, ConfigError, TakenOver
from towline.mqtt.codec import Decoder, MalformedPacket
from towline.mqtt.events import (
    Acknowledged,
    Action,
    Close,
    Deliver,
    Event,
    Lost,
    Malformed,
    Online,
    Opened,
    Received,
    Resumed,
    Send,
    Stop,
    Suspended,
    Tick,
    Written,
)
from towline.mqtt.reasons import CUT
from towline.mqtt.session import Session
from towline.mqtt.versions import LEVELS, Versions
from towline.net.backoff import Backoff
from towline.net.redirect import Redirects
from towline.net.transport import Endpoint, Proxy, Tls, Transport, connect

__all__ = ["LEVELS", "Connection", "Way"]

#: A client id taken over twice in this many seconds is given up: a fight that nobody wins.
_TAKEOVER_WINDOW: Final = 60.0
#: Patience in seconds with what is still to be sent when a connection ends.
_LAST_WORDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Way:
    """How to get to the brokers.

    Attributes:
        endpoints: Tried in this order, again from the first after the last, and after a connection that worked.
        tls: How to encrypt; None for the defaults where an endpoint asks for TLS.
        proxy: On the way to all of them.
        connect_timeout_s: Seconds for the look-up of the name, TCP, TLS and WebSocket together.
        max_packet_bytes: Of a larger message only a stub is kept; any other packet that is larger ends the connection.
        follow_redirects: Go where a broker points; see `towline.net.redirect`.
        brokers_share_sessions: They are one cluster; otherwise each has a session of its own.
        longest_pause_s: Seconds between two attempts, at most.
    """

    endpoints: tuple[Endpoint, ...]
    tls: Tls | None = None
    proxy: Proxy | None = None
    connect_timeout_s: float = 10.0
    max_packet_bytes: int = 64 << 20
    follow_redirects: bool = False
    brokers_share_sessions: bool = False
    longest_pause_s: float = 30.0

    @property
    def several_sessions(self) -> bool:
        """Whether the next server may be one with another session."""
        return (len(self.endpoints) > 1 or self.follow_redirects) and not self.brokers_share_sessions


class Connection:
    """Drives a `Session`.

    Args:
        way: How to get to the brokers.
        new_session: Makes the session for a protocol level; asked again only before the first CONNACK.
        perform: Carries out the session's actions other than `Send` and `Close`, in order.
        levels: Protocol levels to try; see `towline.mqtt.versions`.
    """

    def __init__(
        self,
        way: Way,
        new_session: Callable[[int], Session],
        perform: Callable[[Action], None],
        levels: tuple[int, ...] = (5,),
    ) -> None:
        self._way = way
        self._new_session = new_session
        self._perform = perform
        self._versions = Versions(levels)
        self.session = new_session(levels[0])
        self._redirects = Redirects(follow=way.follow_redirects)
        self._index = 0
        #: The server in use or last tried.
        self.endpoint = way.endpoints[0]
        self._decoder = Decoder(way.max_packet_bytes, levels[0])
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
        self._backoff = Backoff(way.longest_pause_s)
        #: Times all endpoints were tried in vain.
        self.rounds = 0
        self._retry_at = 0.0
        self._takeovers: deque[float] = deque(maxlen=2)
        self._reading = True
        self._cancelled = threading.Event()
        #: Read end and write end of what `wake` writes to; empty when disposed of.
        self._pipe = list(os.pipe())
        #: Held by whoever writes to it or closes it: a descriptor that is closed may be another's at once.
        self._pipe_lock = threading.Lock()
        for descriptor in self._pipe:
            os.set_blocking(descriptor, False)

    # -- from any thread --

    def wake(self) -> None:
        """Let a `turn` that waits come back now."""
        with self._pipe_lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            if self._pipe:
                os.write(self._pipe[1], b"w")

    def cancel(self) -> None:
        """Give up an attempt to connect that is under way, and wake."""
        self._cancelled.set()
        self.wake()

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
        for action in self.session.handle(event, time.monotonic()):
            if isinstance(action, Send):
                if self._transport is not None:
                    self._transport.write(action.data)
            elif isinstance(action, Close):
                self._close(action)
            else:
                if isinstance(action, Acknowledged):
                    if action.packet_id and action.reason != CUT:
                        self._backoff.useful()
                elif isinstance(action, Online):
                    self._came_online()
                elif isinstance(action, Deliver):
                    self._backoff.useful()
                self._perform(action)

    def turn(self, timeout_s: float) -> None:
        """Connect, or wait up to `timeout_s` seconds for something to do and do it."""
        if self._transport is None:
            self._try_to_connect(timeout_s)
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
                self._lost()
            elif transport.unsent < waiting:
                self.handle(Written())
        self.handle(Tick())

    def hold_back(self, *, hold: bool) -> None:
        """Stop or resume reading from the broker; the keep alive goes on [I7]."""
        if hold == self._reading:
            self._reading = not hold
            self.handle(Suspended() if hold else Resumed())

    def connect(self) -> None:
        """Open a transport and begin the session on it.

        Raises:
            BrokerError: No connection.
            ConfigError: Files or a proxy that can't be used.
        """
        self.endpoint = self._redirects.target(self._way.endpoints[self._index])
        self._transport = connect(
            self.endpoint,
            tls=self._way.tls,
            proxy=self._way.proxy,
            timeout_s=self._way.connect_timeout_s,
            keep_alive_s=self.session.config.keep_alive_s or 60,
            cancelled=self._cancelled.is_set,
        )
        self._decoder = Decoder(self._way.max_packet_bytes, self._versions.level)
        self._reading = True
        self.count += 1
        server = "" if self._way.brokers_share_sessions else str(self.endpoint)
        self.handle(Opened(server, alone=not self._way.several_sessions))

    def renew(self, error: BrokerError) -> None:
        """Begin anew with another session, because what this one decided can't be made durable."""
        self.session = self._new_session(self._versions.level)
        self._close(Close(error))

    def culprit_found(self) -> None:
        """The message at which the broker ended the connection is set aside: try again soon."""
        if self._backoff.culprit_found():  # a longer pause was taken before this was known
            now = time.monotonic()
            self._retry_at = min(self._retry_at, now + self._backoff.pause(now))

    def leave(self, patience_s: float) -> None:
        """Say goodbye, wait up to `patience_s` seconds until that is sent, and close; the session stays there."""
        if self._transport is not None:
            for action in self.session.handle(Stop(), time.monotonic()):
                if isinstance(action, Send):
                    self._transport.write(action.data)
            self._transport.drain(patience_s)
        self._drop()

    def dispose(self) -> None:
        """Close everything, for good; a second call does nothing."""
        self._drop()
        with self._pipe_lock:
            while self._pipe:
                os.close(self._pipe.pop())

    # -- inside --

    def _wait(self, transport: Transport | None, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._pipe[0], select.POLLIN)
        if transport is not None:
            wanted = select.POLLIN if self._reading else 0
            poller.register(transport.fileno(), wanted | (select.POLLOUT if transport.unsent else 0))
        poller.poll(max(0.0, timeout_s) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)

    def _receive(self, transport: Transport) -> None:
        data = transport.read()
        if data is None:
            return
        if not data:
            self._lost()
            return
        try:
            items = self._decoder.feed(data)
        except MalformedPacket as error:
            self.handle(Malformed(str(error), error.reason))
            return
        self.handle(Received(items))

    def _lost(self) -> None:
        told = self._transport.problem if self._transport is not None else None
        meant = Close(told) if told else self.session.broke(str(self.endpoint))
        self.handle(Lost())
        self._close(meant)

    def _try_to_connect(self, timeout_s: float) -> None:
        pause = self._retry_at - time.monotonic()
        if pause > 0:
            self._wait(None, min(pause, timeout_s))
            return
        try:
            self.connect()
        except (BrokerError, ConfigError) as error:
            self._versions.away()
            self._keep_to_version()
            self._failed(error, for_good=isinstance(error, ConfigError) and not self.ever_online)

    def _came_online(self) -> None:
        self.online = self.ever_online = True
        self.error = None
        self._index = 0
        self._backoff.online(time.monotonic())
        self._versions.online()
        self._redirects.served(self.endpoint)

    def _close(self, action: Close) -> None:
        served = self.online
        self._drop()
        action = self._versions.judge(self._redirects.judge(action, self.endpoint), self.session.config)
        self._keep_to_version()
        if action.again_at_once:
            self._retry_at = 0.0
        elif action.error is not None:
            for_good = action.fatal and not self.ever_online
            fight = isinstance(action.error, TakenOver) and self._fights()
            self._failed(action.error, for_good=for_good or fight, served=served)

    def _keep_to_version(self) -> None:
        """Have a session of the version that is to be spoken; before the first CONNACK nothing is in it yet."""
        if self.session.config.protocol != self._versions.level:
            self.session = self._new_session(self._versions.level)
            self.session.probing = self._versions.guessed

    def _fights(self) -> bool:
        now = time.monotonic()
        self._takeovers.append(now)
        return len(self._takeovers) == self._takeovers.maxlen and now - self._takeovers[0] < _TAKEOVER_WINDOW

    def _failed(self, error: BrokerError | ConfigError, *, for_good: bool, served: bool = False) -> None:
        self.error = error
        if for_good:
            self.fatal = error
        if self._redirects.pending:
            return
        now = time.monotonic()
        worked = served and not self._backoff.in_vain(now)
        self._index = 0 if worked else (self._index + 1) % len(self._way.endpoints)
        if self._index == 0:
            self.rounds += 1
            self._retry_at = now + self._backoff.pause(now)

    def _drop(self) -> None:
        self.online = False
        if self._transport is not None:
            self._transport.drain(_LAST_WORDS)
            self._transport.close()
            self._transport = None
