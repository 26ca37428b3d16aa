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
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Final, Self, TypedDict, Unpack, cast

from mqtt5 import ConnAckPacket

from towline.errors import BrokerError, ConfigError, Refused, Unreachable
from towline.mqtt import events
from towline.mqtt.events import Filter
from towline.mqtt.message import OutboundMessage
from towline.mqtt.reasons import reason_words
from towline.mqtt.rules import NO_QOS_2, message_problem
from towline.mqtt.session import Session
from towline.mqtt.stubs import Published
from towline.net.driver import GOODBYE_S, Hooks, SessionDriver
from towline.net.endpoint import Endpoint
from towline.net.settings import ClientSettings, refuse
from towline.threads import Condition, guarded_thread

#: Messages handed over to `publish` and not confirmed, before it waits.
_AHEAD: Final = 1000
#: Nothing is handed over while so many bytes wait for the system: QoS 0, which has no answer, has no other bound.
_MOST_UNSENT: Final = 1 << 20
#: Bytes of waiting messages above which nothing more is read, and half of it above which QoS 0 is dropped: nothing
#: else holds its sender back. Receive Maximum is no such bound: MQTT 3.x has none, and an answer behind more messages
#: than it allows must be read too.
_MOST_BYTES: Final = 64 << 20
#: Bytes that a message takes beside what it carries.
_OVERHEAD: Final = 1000


class Message:
    """A message from the broker.

    One that was not taken in whole, because it is larger than ``max_packet_bytes`` or has more than 1,000 user
    properties, comes in its place all the same, with `payload` None and `user_properties` that say why
    (`towline.mqtt.stubs.Stub`). It wants its `ack` like any other, or the broker sends it again.
    """

    def __init__(self, packet: Published, topic: str, number: int, acknowledge: Callable[[int], None]) -> None:
        self.topic = topic
        #: As it came; None if it was not taken in whole.
        self.payload = packet.payload
        self.qos = int(packet.qos)
        #: Retained at the broker, or published so where the subscription keeps the flag.
        self.retain = packet.retain
        #: The broker says that it may have come before [MQTT-3.3.1-1].
        self.duplicate = packet.duplicate
        #: Names it until it is acknowledged (QoS 1) or released (QoS 2); None for QoS 0.
        self.packet_id = packet.packet_id
        #: MQTT 5, as all that follow.
        self.content_type = packet.content_type
        self.payload_is_utf8 = packet.payload_format_indicator == 1
        self.response_topic = packet.response_topic
        #: Goes into the answer; without a payload, the whole packet if it is within the limit.
        self.correlation_data = packet.correlation_data
        #: Seconds left to it when the broker sent it.
        self.expiry_s = packet.message_expiry_interval
        #: Pairs, in order, repetitions kept [MQTT-3.3.2-18].
        self.user_properties = tuple(packet.user_properties or ())
        #: Identifiers of our subscriptions that match.
        self.subscription_ids = tuple(packet.subscription_ids or ())
        #: Of the session.
        self.number = number
        self._acknowledge = acknowledge

    def __repr__(self) -> str:
        return f"Message({self.topic!r}, {self.payload!r}, qos={self.qos})"

    def ack(self) -> None:
        """Take the message over: PUBACK, or PUBREC, may leave.

        It leaves in the order of arrival whatever the order of the calls, so a message that is never acknowledged
        holds back all after it [MQTT-4.6.0-2, -3]. A second call, one for QoS 0 and one after the client has ended do
        nothing; in the last case the broker sends the message again.
        """
        self._acknowledge(self.number)

    @property
    def size(self) -> int:
        """Bytes of topic, payload and properties."""
        texts = (self.topic, self.content_type or "", self.response_topic or "", *chain(*self.user_properties))
        return sum(len(text.encode()) for text in texts) + len(self.payload or b"") + len(self.correlation_data or b"")


class Arrivals:
    """What came, in order, in memory, guarded by the client's lock: it waits to be taken, and then for its `settle`."""

    def __init__(self) -> None:
        #: Came and not handed out, in order.
        self.waiting: deque[Message] = deque()
        #: What they take in memory.
        self._bytes = 0
        #: Number of each message that is to be acknowledged → its QoS, in order.
        self._open: dict[int, int] = {}
        #: Number of the message that comes next.
        self._next = 0
        #: The connection whose beginning `connected` has seen.
        self._connection = 0

    @property
    def settled(self) -> int:
        """Everything below is acknowledged, because acknowledgements leave in order [MQTT-4.6.0-2, -3]."""
        return next(iter(self._open), self._next)

    @property
    def full(self) -> bool:
        """So much waits that nothing more may be read."""
        return self._bytes >= _MOST_BYTES

    def add(self, message: Message) -> bool:
        """Take a message in; whether there was room."""
        self._next = message.number + 1
        if message.qos:
            self._open[message.number] = message.qos
        elif self._bytes >= _MOST_BYTES // 2:
            return False
        self.waiting.append(message)
        self._bytes += _OVERHEAD + message.size
        return True

    def take(self) -> Message:
        """Hand out the first that waits."""
        message = self.waiting.popleft()
        self._bytes -= _OVERHEAD + message.size
        return message

    def settle(self, number: int) -> None:
        """A message is acknowledged; a second call does nothing."""
        self._open.pop(number, None)

    def connected(self, connection: int, *, resumed: bool) -> None:
        """On a new connection, forget what can't be acknowledged any more; a second call does nothing.

        A kept session sends QoS 1 again under new numbers, so what nobody has taken is not handed out twice. A lost one
        has no name for anything. QoS 2 in a kept session still waits for its acknowledgement: PUBREC to the repeat.

        Args:
            connection: Its number, which grows.
            resumed: The session was kept.
        """
        if self._connection == connection:
            return
        self._connection = connection
        self._open = {number: qos for number, qos in self._open.items() if resumed and qos == 2}
        if resumed:
            self.waiting = deque(message for message in self.waiting if message.qos != 1)
            self._bytes = sum(_OVERHEAD + message.size for message in self.waiting)


class Properties(TypedDict, total=False):
    """Properties of a message to be published; MQTT 3.x leaves them out.

    Attributes:
        content_type: What the payload is.
        payload_is_utf8: The payload is text.
        response_topic: Where an answer is expected.
        correlation_data: Goes into the answer.
        expiry_s: Seconds after which nobody needs it any more.
        user_properties: Pairs, in order, repetitions kept.
    """

    content_type: str | None
    payload_is_utf8: bool | None
    response_topic: str | None
    correlation_data: bytes | None
    expiry_s: int | None
    user_properties: Sequence[tuple[str, str]]


def checked(
    topic: str, payload: bytes | str, qos: int, room: int = 0, *, several: bool, **properties: Unpack[Properties]
) -> tuple[bytes, bool | None, dict[str, Any]]:
    """A message to be published: its payload as bytes, whether that is said to be text, and the other properties.

    Bytes of `room` are left free, for properties that are added on the way. With `several` sessions there is no QoS 2
    (`BrokerConnection`).

    Raises:
        ConfigError: TL-C51, MQTT has no way to say it.
    """
    said = cast("dict[str, Any]", properties)
    if said and (unknown := said.keys() - Properties.__annotations__.keys()):
        raise TypeError(f"a message has no property {min(unknown)}")
    is_utf8 = said.pop("payload_is_utf8", None)
    if qos == 2 and several:
        raise ConfigError("TL-C51", f"message to {str(topic)[:80]!r}", *NO_QOS_2)
    if problem := message_problem(topic, payload, qos, room, **said):
        refuse(f"message to {str(topic)[:80]!r}", problem)
    data = payload.encode() if isinstance(payload, str) else bytes(payload)
    return data, None if is_utf8 is None else bool(is_utf8), said


def outbound(
    topic: str, payload: bytes | str, qos: int, *, several: bool = False, retain: bool, **properties: Unpack[Properties]
) -> OutboundMessage:
    """What is to be published; errors of `checked`."""
    data, is_utf8, said = checked(topic, payload, qos, several=several, **properties)
    said["message_expiry_interval"] = said.pop("expiry_s", None)
    said["user_properties"] = [(name, value) for name, value in said.get("user_properties") or ()]
    text = is_utf8 or False
    return OutboundMessage(topic, data, qos=qos, retain=bool(retain), payload_format_indicator=text, **said)


class PublishResult:
    """What became of a published message. Made by `Client.publish`."""

    def __init__(self, topic: str, changed: threading.Condition) -> None:
        #: Where it went.
        self.topic = topic
        #: The broker's reason code [MQTT 5 section 2.4], None while there is none. QoS 0: 0 when it was sent.
        self.reason: int | None = None
        #: The broker took a QoS 2 message at QoS 1.
        self.degraded = False
        #: The client has ended before.
        self.failure: BaseException | None = None
        self._changed = changed

    @property
    def done(self) -> bool:
        """The broker has taken or refused it, or the client has ended before."""
        return self.reason is not None or self.failure is not None

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait until the broker has taken the message.

        Args:
            timeout_s: Seconds, None for as long as it takes.

        Raises:
            Refused: The broker dropped it (TL-M31).
            Unreachable: No answer in time (TL-M33), or the client was closed before (TL-M32): publish it again.
            BrokerError: Why the client has ended.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout_s):
                what = f"no answer within {timeout_s:g} s to a message"
                do = "It is sent again by itself. Receive what waits: the answer may lie behind 64 MiB of messages."
                raise Unreachable("TL-M33", self.topic, what, do)
        if self.failure is not None:
            raise self.failure
        if self.reason is not None and self.reason >= 0x80:
            what = f"the message was dropped: {reason_words(self.reason)} (0x{self.reason:02X})"
            raise Refused("TL-M31", self.topic, what, "Change the message, or the broker's limits and rights.")
        return self


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
        hooks = Hooks(new_session=lambda level: Session(self._connection.session_at(level)), perform=self._perform)
        self._driver = SessionDriver(self._connection, hooks)
        #: Guards everything below; told of every change.
        self._changed = Condition()
        self._closing = False
        #: Patience in seconds with what is still to be sent when it ends.
        self._goodbye_s = GOODBYE_S
        #: Set when the thread has ended: why, for those who still wait.
        self._ended: BaseException | None = None
        #: Events for the session, from any thread.
        self._orders: deque[events.Event] = deque()
        #: Of the messages that are not confirmed; each is its message's token.
        self._results: set[PublishResult] = set()
        self._arrivals = Arrivals()
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
        return self._driver.versions.level

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
                full, message = self._arrivals.full, self._arrivals.take()
                if full:
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
            properties: Of MQTT 5, see `Properties`.

        Raises:
            ConfigError: A message that can't be (TL-C51).
            Unreachable: No room in time (TL-M33), the client is closed (TL-M32), or another process's (TL-M34).
            BrokerError: Why the client has ended.
        """
        several = self._connection.several_sessions
        content = outbound(topic, payload, qos, several=several, retain=retain, **properties)
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
            self._orders.append(events.Publish(result, content))
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
            while not (self._driver.ever_online or self._arrivals.full):
                if error := self._ended or (self.last_error if self._driver.attempts.rounds else None):
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
            full = self._arrivals.full
            if full or self._driver.error is not None:
                self._changed.notify_all()
        if self._driver.connected:
            self._driver.hold_back(hold=full)
        self._driver.turn()

    def _carry_out(self) -> None:
        """Give the session what other threads have asked for; not before it is sure which session it will be."""
        if not self._driver.ever_online:
            return
        while self._orders and self._driver.unsent < _MOST_UNSENT:
            self._driver.handle(self._orders.popleft())
        with self._changed:
            settled = self._arrivals.settled
        if settled > self._driver.session.inbound.settled:
            self._driver.handle(events.Settled(settled))

    def _perform(self, action: events.Action) -> None:
        with self._changed:
            if isinstance(action, events.Deliver):
                self._deliver(action)
            elif isinstance(action, events.Acknowledged):
                assert isinstance(action.token, PublishResult)
                self._results.remove(action.token)
                action.token.reason, action.token.degraded = action.reason, action.degraded
            elif isinstance(action, events.SessionLost):
                self.sessions_lost += 1
            self._changed.notify_all()
        if isinstance(action, events.Deliver):
            self._driver.handle(events.Stored(action.ticket))

    def _deliver(self, action: events.Deliver) -> None:
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
