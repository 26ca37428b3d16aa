"""A small blocking MQTT client: messages as an iterator, acknowledgements when you say so.

    with Client("mqtt://127.0.0.1", client_id="plant-7", subscribe=["telemetry/#"]) as client:
        for message in client:
            store(message)
            message.ack()

One thread of the client's own talks to the broker, keeps the connection alive and makes it anew when it breaks, however
long a message takes to be handled. **Every public method may be called from any thread.** Nothing of the caller's runs
on the client's thread but the methods of an `Authenticator`, which may not call the client.

What is in memory is lost with the process: messages not acknowledged come again from the broker, messages published
and not confirmed are the caller's to publish again. `towline.gateway` is the same session with a disk under it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self, Unpack

from mqtt5 import ConnAckPacket

from towline.errors import BrokerError, ConfigError, Unreachable
from towline.mqtt.events import (
    Acknowledged,
    Action,
    Deliver,
    Event,
    Filter,
    Publish,
    PublishMany,
    SessionLost,
    Settled,
    Stored,
)
from towline.mqtt.rules import NO_QOS_2
from towline.mqtt.session import Session
from towline.mqtt.suspects import Culprits
from towline.net.driver import GOODBYE_S, Hooks, SessionDriver
from towline.net.messages import Arrivals, Message, Properties, PublishResult, outbound
from towline.net.settings import ClientSettings
from towline.net.transport import Endpoint
from towline.threads import Condition, guarded_thread

#: Messages handed over to `publish` and not confirmed, before it waits.
_AHEAD: Final = 1000
#: Nothing is handed over while so many bytes wait for the system: QoS 0, which has no answer, has no other bound.
_MOST_UNSENT: Final = 1 << 20


class Client:
    """An MQTT client; a context manager and an iterable of messages.

    It connects at once, and is there when every subscription is confirmed; before that where the broker sends 64 MiB of
    messages ahead of its confirmation: they have to be taken first. From then on connections that break are made anew
    with growing pauses.

    Args:
        uri: The broker, ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://``, ``wss://``, ``unix:///PATH``; or several in
            order of preference.
        client_id: Stable and nobody else's: it names the session.
        subscribe: Topic filters, or one; a plain text means QoS 1.
        settings: Everything else.

    Raises:
        BrokerError: No broker took us at the first try.
        ConfigError: Something that can't be (TL-C50, TL-C51), files or a proxy that can't be used.
    """

    def __init__(
        self,
        uri: str | Endpoint | Sequence[str | Endpoint],
        *,
        client_id: str,
        subscribe: str | Filter | Sequence[str | Filter] = (),
        settings: ClientSettings = ClientSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._connection = settings.connection(uri, client_id, subscribe)
        self._where = self._connection.session.where
        self._pid = os.getpid()
        #: The message at which the broker ends the connection, where there is one.
        self._culprits = Culprits()
        hooks = Hooks(
            new_session=lambda level: Session(self._connection.session_at(level)),
            perform=self._perform,
            ended=self._ended_connection,
        )
        self._driver = SessionDriver(self._connection, hooks)
        #: Guards everything below; told of every change.
        self._changed = Condition()
        self._closing = False
        #: Patience in seconds with what is still to be sent when it ends.
        self._goodbye_s = GOODBYE_S
        #: Set when the thread has ended: why, for those who still wait.
        self._ended: BaseException | None = None
        #: Events for the session, from any thread.
        self._orders: deque[Event] = deque()
        #: Of the messages that are not confirmed; each is its message's token.
        self._results: set[PublishResult] = set()
        self._arrivals = Arrivals()
        self._holding_back = False
        #: Times the broker had forgotten our session, and with it what it held for us [MQTT-3.2.2-5].
        self.sessions_lost = 0
        #: QoS 0 messages that came while 32 MiB waited to be taken; QoS 1 and 2 are never dropped.
        self.dropped = 0
        self._thread = guarded_thread(self._run, f"mqtt {client_id}")
        self._thread.start()
        try:
            self._wait_for_service()
        except BaseException:
            self.close(0)
            raise

    # -- for everybody --

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0 if kind else GOODBYE_S)

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, until `close`; one that ends for another reason raises it."""
        return iter(self.receive, None)

    @property
    def online(self) -> bool:
        """Connected, and every subscription is confirmed."""
        return self._driver.online

    @property
    def connack(self) -> ConnAckPacket | None:
        """What the broker said when it took us in, with its limits; None without a connection.

        Such are ``session_present``, ``session_expiry_interval`` (None where it keeps ours), ``receive_max``,
        ``max_qos``, ``retain_available``, ``max_packet_size``, ``server_keep_alive``; what MQTT 3.x has no word for has
        the value that means no limit.
        """
        return self._driver.session.server

    @property
    def level(self) -> int:
        """Version of the protocol in use, or to be tried next: 5, 4 for 3.1.1, 3 for 3.1."""
        return self._driver.level

    @property
    def last_error(self) -> BrokerError | ConfigError | None:
        """Why there is no connection; None while there is one."""
        return self._driver.error

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message, None when there is none in time or the client is closed.

        Args:
            timeout_s: Seconds, None for as long as it takes.

        Raises:
            Unreachable: The client is another process's (TL-M34).
            BrokerError: The client has given up: a refusal, or its client id was taken over twice in a minute.
        """
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: self._arrivals.waiting or self._closing or self._ended, timeout_s)
            if self._closing:
                return None
            if self._arrivals.waiting:
                message = self._arrivals.take()
                if self._holding_back:
                    self._driver.wake()
                return message
            if self._ended:
                raise self._ended
        return None

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        qos: int = 1,
        retain: bool = False,
        timeout_s: float | None = None,
        **properties: Unpack[Properties],
    ) -> PublishResult:
        """Hand over a message; it is sent, and sent again after a broken connection, until the broker answers.

        Waits while 1,000 messages are not confirmed.

        Args:
            topic: Topic name.
            payload: Text is sent as UTF-8.
            qos: 0, 1 or 2.
            retain: The broker keeps it for later subscribers.
            timeout_s: Longest wait in seconds for room among the unconfirmed, None for as long as it takes.
            properties: Of MQTT 5, see `towline.net.messages.Properties`.

        Raises:
            ConfigError: A message that can't be (TL-C51).
            Unreachable: No room in time (TL-M33), the client is closed (TL-M32), or another process's (TL-M34).
            BrokerError: Why the client has ended.
        """
        if qos == 2 and self._connection.several_sessions:
            raise ConfigError("TL-C51", f"message to {str(topic)[:80]!r}", *NO_QOS_2)
        content = outbound(topic, payload, qos, retain=retain, **properties)
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: len(self._results) < _AHEAD or self._ended or self._closing, timeout_s)
            if self._ended or self._closing:
                raise self._ended or self._closed()
            if len(self._results) >= _AHEAD:
                what = f"{_AHEAD:,} messages are not confirmed after {timeout_s:g} s"
                raise Unreachable("TL-M33", self._where, what, "Is the broker alive? This message was not taken.")
            result = PublishResult(topic, self._changed)
            self._results.add(result)
            self._orders.append(Publish(result, content))
        self._driver.wake()
        return result

    def close(self, timeout_s: float = GOODBYE_S) -> None:
        """Wait for what is not confirmed, say goodbye and close, for good; the session stays at the broker.

        Nothing in a process that has inherited the client by ``fork``.

        Args:
            timeout_s: Longest wait in seconds for the broker's answers to what was published, and again, but for 2 s
                at least, until it has taken what was sent.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._results or self._ended, timeout_s)
            self._closing, self._goodbye_s = True, max(GOODBYE_S, timeout_s)
            self._changed.notify_all()
        self._driver.cancel()
        self._thread.join()

    # -- on the caller's thread --

    def _wait_for_service(self) -> None:
        """Return when a session is there, or so much of it that nothing more is read; raise why it can't be had."""
        with self._changed:
            while not (self._driver.ever_online or self._holding_back):
                if error := self._ended or (self.last_error if self._driver.rounds else None):
                    raise error
                self._changed.wait()

    def _check_process(self) -> None:
        """Refuse before a lock is taken, which a forked process has as it stood, and nobody there gives back."""
        if os.getpid() != self._pid:
            what = f"this client belongs to the process that made it (pid {self._pid})"
            raise Unreachable("TL-M34", self._where, what, "Make a new one after the fork.")

    def _acknowledge(self, number: int) -> None:
        with self._changed:
            self._arrivals.settle(number)
        self._driver.wake()

    def _closed(self) -> Unreachable:
        return Unreachable("TL-M32", self._where, "the client is closed", "Make a new one.")

    # -- on the client's thread --

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._closing and self._driver.fatal is None:
                self._turn()
            failure = self._driver.fatal
            if failure is None:
                self._carry_out()
                self._driver.leave(self._goodbye_s)
        except BaseException as error:  # noqa: BLE001  # whatever it is, those who wait must know
            failure = error
        finally:
            with contextlib.suppress(OSError):
                self._driver.dispose()
            self._end(failure or self._closed())

    def _turn(self) -> None:
        self._carry_out()
        with self._changed:
            self._holding_back = self._arrivals.full
            if self._holding_back or self._driver.error is not None:
                self._changed.notify_all()
        if self._driver.connected:
            self._driver.hold_back(hold=self._holding_back)
        self._driver.turn(self._culprits.due(self._driver.session))
        if self._culprits.pace(self._driver.session, time.monotonic()):
            self._driver.handle(PublishMany(()))

    def _ended_connection(self) -> bool:
        """Give up the message at which the broker ends every connection, or it would stop all that is behind it."""
        return self._culprits.ended(self._driver.session, time.monotonic()) is not None

    def _carry_out(self) -> None:
        """Give the session what other threads have asked for; not before it is sure which session it will be."""
        if not self._driver.ever_online:
            return
        while self._orders and self._driver.unsent < _MOST_UNSENT:
            self._driver.handle(self._orders.popleft())
        with self._changed:
            settled = self._arrivals.settled
        if settled > self._driver.session.inbound.settled:
            self._driver.handle(Settled(settled))

    def _perform(self, action: Action) -> None:
        with self._changed:
            if isinstance(action, Deliver):
                self._deliver(action)
            elif isinstance(action, Acknowledged):
                self._culprits.answered(action.token)
                assert isinstance(action.token, PublishResult)
                self._results.remove(action.token)
                action.token.reason, action.token.degraded = action.reason, action.degraded
            elif isinstance(action, SessionLost):
                self.sessions_lost += 1
            self._changed.notify_all()
        if isinstance(action, Deliver):
            self._driver.handle(Stored(action.ticket))

    def _deliver(self, action: Deliver) -> None:
        session, messages = self._driver.session, action.messages
        if session.server is not None:  # else its connection has ended with it
            self._arrivals.connected(self._driver.count, resumed=session.resumed)
        for number, (packet, topic) in enumerate(zip(messages.packets, messages.topics, strict=True), action.first):
            if not self._arrivals.add(Message(packet, topic, number, self._acknowledge)):
                self.dropped += 1

    def _end(self, failure: BaseException) -> None:
        with self._changed:
            self._ended = failure
            for result in self._results:
                result.failure = failure
            self._results.clear()
            self._changed.notify_all()
