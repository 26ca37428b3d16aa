"""Small blocking MQTT client: messages as an iterator, explicit acknowledgements.

    with Client("mqtt://127.0.0.1", client_id="plant-7", subscribe=["telemetry/#"]) as client:
        for message in client:
            store(message)
            message.ack()

The client runs one thread. It talks to the broker, sends the keep alive and reconnects, however long the caller takes
to handle a message. **Every public method may be called from any thread.** No code of the caller runs on the client's
thread, except the methods of an `Authenticator` and callbacks of results, which must not call the client.

The content of memory is lost with the process. The broker sends unacknowledged messages again; the caller has to
publish unconfirmed messages again. `towline.gateway` runs the same session on top of a disk.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain
from types import TracebackType
from typing import Any, Final, Self, TypedDict, Unpack, cast

from mqtt5 import ConnAckPacket

from towline.errors import BrokerError, BrokerRefused, ConfigError, Unreachable
from towline.mqtt import events
from towline.mqtt.events import Filter
from towline.mqtt.message import OutboundMessage
from towline.mqtt.reasons import reason_name
from towline.mqtt.rules import QOS2_NEEDS_SHARED_SESSIONS, message_problem
from towline.mqtt.session import Session
from towline.mqtt.truncated import ReceivedPublish
from towline.net.driver import DISCONNECT_TIMEOUT_S, Hooks, SessionDriver
from towline.net.endpoint import Endpoint
from towline.net.settings import ClientSettings, reject_argument
from towline.threads import Condition, guarded_thread

#: Unconfirmed messages above which `publish` blocks.
_MAX_PENDING: Final = 1000
#: Bytes in the send buffer above which no event is passed to the session: QoS 0 has no other limit.
_MAX_UNSENT_BYTES: Final = 1 << 20
#: Bytes of queued messages above which reading stops. Receive Maximum is no such limit: QoS 0 and MQTT 3.x have none,
#: and an answer behind more messages must be read too.
_MAX_QUEUED_BYTES: Final = 64 << 20
#: Memory of a message object in bytes, without its content.
_MESSAGE_OVERHEAD_BYTES: Final = 1000


class Message:
    """Message received from the broker.

    A message larger than ``max_packet_bytes`` or with more than 1,000 user properties is delivered too. Its `payload`
    is None and its `user_properties` give the reason (`towline.mqtt.truncated.TruncatedMessage`). Like any other
    message it needs `ack`; otherwise the broker sends it again.
    """

    def __init__(self, packet: ReceivedPublish, topic: str, number: int, acknowledge: Callable[[int], None]) -> None:
        self.topic = topic
        #: Payload; None if the message was truncated.
        self.payload = packet.payload
        self.qos = int(packet.qos)
        #: Sent from the broker's retained messages, or published so if the subscription has Retain As Published.
        self.retain = packet.retain
        #: DUP flag: the message may be a repeat [MQTT-3.3.1-1].
        self.duplicate = packet.duplicate
        #: Content type; MQTT 5, as all following properties.
        self.content_type = packet.content_type
        self.payload_is_utf8 = packet.payload_format_indicator == 1
        self.response_topic = packet.response_topic
        #: Correlation data for the response; of a truncated message the whole packet, if within the limit.
        self.correlation_data = packet.correlation_data
        #: Remaining message expiry in seconds when the broker sent it.
        self.expiry_s = packet.message_expiry_interval
        #: Pairs, in order, repetitions preserved [MQTT-3.3.2-18].
        self.user_properties = tuple(packet.user_properties or ())
        #: Subscription Identifiers of the matching subscriptions.
        self.subscription_ids = tuple(packet.subscription_ids or ())
        #: Message number within the session.
        self.number = number
        self._acknowledge = acknowledge

    def __repr__(self) -> str:
        return f"Message({self.topic!r}, {self.payload!r}, qos={self.qos})"

    def ack(self) -> None:
        """Acknowledge the message: PUBACK or PUBREC may be sent.

        Acknowledgements are sent in order of arrival, whatever the order of the calls. A message that is never
        acknowledged therefore blocks all later acknowledgements [MQTT-4.6.0-2, -3]. The call has no effect when
        repeated, for QoS 0, and after the end of the client; in the last case the broker sends the message again.
        """
        self._acknowledge(self.number)

    @property
    def size(self) -> int:
        """Size of topic, payload and properties in bytes."""
        texts = (self.topic, self.content_type or "", self.response_topic or "", *chain(*self.user_properties))
        return sum(len(text.encode()) for text in texts) + len(self.payload or b"") + len(self.correlation_data or b"")


class ReceiveQueue:
    """Received messages in memory, in order, from arrival to acknowledgement; guarded by the client's lock."""

    def __init__(self) -> None:
        #: Messages not yet returned to the caller, in order.
        self.messages: deque[Message] = deque()
        #: Memory of `messages` in bytes.
        self._queued_bytes = 0
        #: Numbers of unacknowledged messages → QoS, in order.
        self._unacknowledged: dict[int, int] = {}
        #: Number of the next message.
        self._next_number = 0
        #: Last connection number passed to `connection_opened`.
        self._connection_number = 0

    @property
    def acknowledgeable(self) -> int:
        """Message number below which every message is acknowledged; PUBACKs are sent in order [MQTT-4.6.0-2, -3]."""
        return next(iter(self._unacknowledged), self._next_number)

    @property
    def is_full(self) -> bool:
        """Whether the queue is so large that no more bytes may be read from the broker."""
        return self._queued_bytes >= _MAX_QUEUED_BYTES

    def add(self, message: Message) -> None:
        """Add a message."""
        self._next_number = message.number + 1
        if message.qos:
            self._unacknowledged[message.number] = message.qos
        self.messages.append(message)
        self._queued_bytes += _MESSAGE_OVERHEAD_BYTES + message.size

    def pop(self) -> Message:
        """Remove and return the oldest message."""
        message = self.messages.popleft()
        self._queued_bytes -= _MESSAGE_OVERHEAD_BYTES + message.size
        return message

    def acknowledge(self, number: int) -> None:
        """Mark a message as acknowledged; a second call has no effect."""
        self._unacknowledged.pop(number, None)

    def connection_opened(self, connection_number: int, *, resumed: bool) -> None:
        """Drop messages that cannot be acknowledged on the new connection; a second call has no effect.

        A resumed session sends QoS 1 messages again under new numbers, so unread ones are dropped here. After a lost
        session no earlier message can be acknowledged. QoS 2 messages of a resumed session still can be: PUBREC answers
        the repeat.
        """
        if self._connection_number == connection_number:
            return
        self._connection_number = connection_number
        self._unacknowledged = {number: qos for number, qos in self._unacknowledged.items() if resumed and qos == 2}
        if resumed:
            self.messages = deque(message for message in self.messages if message.qos != 1)
            self._queued_bytes = sum(_MESSAGE_OVERHEAD_BYTES + message.size for message in self.messages)


class Properties(TypedDict, total=False):
    """MQTT 5 properties of a message to publish; ignored with MQTT 3.x.

    Attributes:
        content_type: Content type of the payload.
        payload_is_utf8: The payload is UTF-8 text.
        response_topic: Topic for the response.
        correlation_data: Bytes that the response repeats.
        expiry_s: Message expiry interval in seconds.
        user_properties: Pairs, in order, repetitions preserved.
    """

    content_type: str | None
    payload_is_utf8: bool | None
    response_topic: str | None
    correlation_data: bytes | None
    expiry_s: int | None
    user_properties: Sequence[tuple[str, str]]


def check_message(
    topic: str,
    payload: bytes | str,
    qos: int,
    reserved_bytes: int = 0,
    *,
    several_sessions: bool,
    **properties: Unpack[Properties],
) -> tuple[bytes, bool | None, dict[str, Any]]:
    """Validate a message to publish; return its payload bytes, its UTF-8 flag and its other properties.

    `reserved_bytes` leaves space for properties that are added later. With `several_sessions` QoS 2 is rejected
    (`BrokerConnection`).

    Raises:
        ConfigError: TL-C51, MQTT cannot express the message.
    """
    values = cast("dict[str, Any]", properties)
    if values and (unknown := values.keys() - Properties.__annotations__.keys()):
        raise TypeError(f"a message has no property {min(unknown)}")
    is_utf8 = values.pop("payload_is_utf8", None)
    if qos == 2 and several_sessions:
        raise ConfigError("TL-C51", f"message to {str(topic)[:80]!r}", *QOS2_NEEDS_SHARED_SESSIONS)
    if problem := message_problem(topic, payload, qos, reserved_bytes, **values):
        reject_argument(f"message to {str(topic)[:80]!r}", problem)
    data = payload.encode() if isinstance(payload, str) else bytes(payload)
    return data, None if is_utf8 is None else bool(is_utf8), values


def outbound_message(
    topic: str,
    payload: bytes | str,
    qos: int,
    *,
    several_sessions: bool = False,
    retain: bool,
    **properties: Unpack[Properties],
) -> OutboundMessage:
    """Return the message as the session sends it; raises as `check_message`."""
    data, is_utf8, values = check_message(topic, payload, qos, several_sessions=several_sessions, **properties)
    values["message_expiry_interval"] = values.pop("expiry_s", None)
    values["user_properties"] = [(name, value) for name, value in values.get("user_properties") or ()]
    is_text = is_utf8 or False
    return OutboundMessage(topic, data, qos=qos, retain=bool(retain), payload_format_indicator=is_text, **values)


class Client:
    """MQTT client; a context manager and an iterable of messages.

    The constructor connects and returns when every subscription is confirmed. It returns earlier if the broker sends 64
    MiB of messages before the confirmation: these must be received first. Later connection losses are followed by
    reconnects with growing pauses.

    Args:
        uri: Broker URI: ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://``, ``wss://``, ``unix:///PATH``; or several in
            order of preference.
        client_id: Stable and unique client id; it names the session.
        subscribe: One or more topic filters; a plain string means QoS 1.
        settings: All other settings.

    Raises:
        BrokerError: No broker accepted the first connection.
        ConfigError: Invalid argument (TL-C50, TL-C51), unusable file or proxy.
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
        self._location = self._connection.session.location
        self._pid = os.getpid()
        config_for = self._connection.session_config_for
        hooks = Hooks(new_session=lambda level: Session(config_for(level)), perform=self._perform)
        self._driver = SessionDriver(self._connection, hooks)
        #: Guards all fields below; notified at every change.
        self._condition = Condition()
        self._closing = False
        #: Timeout in seconds for sending the remaining bytes at the end.
        self._disconnect_timeout_s = DISCONNECT_TIMEOUT_S
        #: Error for waiting callers, set when the thread has ended.
        self._end_error: BaseException | None = None
        #: Events for the session, queued by any thread.
        self._queued_events: deque[events.Event] = deque()
        #: Results of unconfirmed messages with their topics; each is the token of its message.
        self._pending_results: dict[Future[events.PublishAcknowledged], str] = {}
        self._receive_queue = ReceiveQueue()
        #: Number of times that the broker lost the session with its queued messages [MQTT-3.2.2-5].
        self.sessions_lost = 0
        self._thread = guarded_thread(self._run, f"mqtt {client_id}")
        self._thread.start()
        try:
            self._wait_for_session()
        except BaseException:
            self.close(0)
            raise

    # -- any thread --

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(0 if kind else DISCONNECT_TIMEOUT_S)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over received messages until `close`; an error that ends the client is raised."""
        return iter(self.receive, None)

    @property
    def online(self) -> bool:
        """Whether the client is connected and every subscription is confirmed."""
        return self._driver.online

    @property
    def connack(self) -> ConnAckPacket | None:
        """CONNACK of the current connection with the broker's limits; None without a connection.

        Fields: ``session_present``, ``session_expiry_interval`` (None if the broker accepts the requested one),
        ``receive_max``, ``max_qos``, ``retain_available``, ``max_packet_size``, ``server_keep_alive``. A field that
        MQTT 3.x does not have has the value for "no limit".
        """
        return self._driver.session.server_limits

    @property
    def level(self) -> int:
        """MQTT protocol level in use, or of the next attempt: 5, 4 for 3.1.1, 3 for 3.1."""
        return self._driver.versions.level

    @property
    def last_error(self) -> BrokerError | ConfigError | None:
        """Reason for the missing connection; None while connected."""
        return self._driver.error

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None at the timeout or after `close`.

        Args:
            timeout_s: Longest wait in seconds; None for no limit.

        Raises:
            Unreachable: The client belongs to another process (TL-M34).
            BrokerError: The client has ended: the broker refused it, or its client id was taken over twice in a minute.
        """
        self._check_process()
        with self._condition:
            queue = self._receive_queue
            self._condition.wait_for(lambda: queue.messages or self._closing or self._end_error, timeout_s)
            if self._closing:
                return None
            if queue.messages:
                was_full, message = queue.is_full, queue.pop()
                if was_full:
                    self._driver.wake()
                return message
            if self._end_error:
                raise self._end_error
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
    ) -> Future[events.PublishAcknowledged]:
        """Queue a message; it is sent, and sent again after a reconnect, until the broker answers.

        The call blocks while 1,000 messages are unconfirmed. The result has the broker's reason code (QoS 0: 0 when the
        message was sent). It raises BrokerRefused, TL-M31, if the message was dropped, and the error that ended the
        client before an answer: publish it again. A callback of it must not call the client.

        Args:
            topic: Topic name.
            payload: Bytes, or text sent as UTF-8.
            qos: 0, 1 or 2.
            retain: The broker retains the message for later subscribers.
            timeout_s: Longest wait in seconds for room in the queue; None for no limit.
            properties: MQTT 5 properties, see `Properties`.

        Raises:
            ConfigError: Invalid message (TL-C51).
            Unreachable: No room in time (TL-M33), the client is closed (TL-M32), or belongs to another process
                (TL-M34).
            BrokerError: Error that ended the client.
        """
        several_sessions = self._connection.several_sessions
        content = outbound_message(topic, payload, qos, several_sessions=several_sessions, retain=retain, **properties)
        self._check_process()
        with self._condition:
            results = self._pending_results
            self._condition.wait_for(lambda: len(results) < _MAX_PENDING or self._end_error or self._closing, timeout_s)
            if self._end_error or self._closing:
                raise self._end_error or self._closed_error()
            if len(results) >= _MAX_PENDING:
                problem = f"{_MAX_PENDING:,} messages are not confirmed after {timeout_s:g} s"
                remedy = "Is the broker alive? This message was not queued."
                raise Unreachable("TL-M33", self._location, problem, remedy)
            result = Future[events.PublishAcknowledged]()
            result.set_running_or_notify_cancel()  # can't be cancelled: the message may have left
            results[result] = topic
            self._queued_events.append(events.Publish(result, content))
        self._driver.wake()
        return result

    def close(self, timeout_s: float = DISCONNECT_TIMEOUT_S) -> None:
        """Wait for unconfirmed messages, send DISCONNECT and close for good; the broker keeps the session.

        The call has no effect in a process that inherited the client by ``fork``.

        Args:
            timeout_s: Longest wait in seconds for the broker's answers. The same time again, at least 2 s, is allowed
                for sending the remaining bytes.
        """
        if os.getpid() != self._pid:
            return
        with self._condition:
            self._condition.wait_for(lambda: not self._pending_results or self._end_error, timeout_s)
            self._closing, self._disconnect_timeout_s = True, max(DISCONNECT_TIMEOUT_S, timeout_s)
            self._condition.notify_all()
        self._driver.cancel()
        self._thread.join()

    # -- on the caller's thread --

    def _wait_for_session(self) -> None:
        """Wait for an online session or a full receive queue; raise the reason if neither comes."""
        with self._condition:
            while not (self._driver.ever_online or self._receive_queue.is_full):
                if error := self._end_error or (self.last_error if self._driver.schedule.rounds else None):
                    raise error
                self._condition.wait()

    def _check_process(self) -> None:
        """Reject a forked process before a lock is taken: an inherited lock may be held for ever."""
        if os.getpid() != self._pid:
            problem = f"this client belongs to the process that created it (pid {self._pid})"
            raise Unreachable("TL-M34", self._location, problem, "Create a new one after the fork.")

    def _acknowledge(self, number: int) -> None:
        with self._condition:
            self._receive_queue.acknowledge(number)
        self._driver.wake()

    def _closed_error(self) -> Unreachable:
        return Unreachable("TL-M32", self._location, "the client is closed", "Create a new one.")

    # -- on the client's thread --

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._closing and self._driver.fatal_error is None:
                self._run_once()
            failure = self._driver.fatal_error
            if failure is None:
                self._handle_queued_events()
                self._driver.send_disconnect(self._disconnect_timeout_s)
        except BaseException as error:  # noqa: BLE001  # waiting callers must see any error
            failure = error
        finally:
            with contextlib.suppress(OSError):
                self._driver.dispose()
            self._fail_pending_results(failure or self._closed_error())

    def _run_once(self) -> None:
        self._handle_queued_events()
        with self._condition:
            queue_full = self._receive_queue.is_full
            if queue_full or self._driver.error is not None:
                self._condition.notify_all()
        if self._driver.connected:
            self._driver.pause_reading(pause=queue_full)
        self._driver.run_once()

    def _handle_queued_events(self) -> None:
        """Pass queued events to the session, once it is known which session it is."""
        if not self._driver.ever_online:
            return
        while self._queued_events and self._driver.unsent_bytes < _MAX_UNSENT_BYTES:
            self._driver.handle(self._queued_events.popleft())
        with self._condition:
            acknowledgeable = self._receive_queue.acknowledgeable
        if acknowledgeable > self._driver.session.inbound.ack_watermark:
            self._driver.handle(events.AckWatermark(acknowledgeable))

    def _perform(self, action: events.Action) -> None:
        with self._condition:
            if isinstance(action, events.Deliver):
                self._deliver(action)
            elif isinstance(action, events.PublishAcknowledged):
                self._resolve_result(action)
            elif isinstance(action, events.SessionLost):
                self.sessions_lost += 1
            self._condition.notify_all()
        if isinstance(action, events.Deliver):
            self._driver.handle(events.DeliveryStored(action.delivery_id))

    def _resolve_result(self, action: events.PublishAcknowledged) -> None:
        result = cast("Future[events.PublishAcknowledged]", action.token)
        topic = self._pending_results.pop(result)
        if action.reason < 0x80:
            result.set_result(action)
        else:
            problem = f"the message was dropped: {reason_name(action.reason)} (0x{action.reason:02X})"
            remedy = "Change the message, or the broker's limits and rights."
            result.set_exception(BrokerRefused("TL-M31", topic, problem, remedy))

    def _deliver(self, action: events.Deliver) -> None:
        session, messages = self._driver.session, action.messages
        if session.server_limits is not None:  # else the connection has ended already
            self._receive_queue.connection_opened(self._driver.connection_count, resumed=session.session_resumed)
        contents = zip(messages.packets, messages.topics, strict=True)
        for number, (packet, topic) in enumerate(contents, action.first_number):
            self._receive_queue.add(Message(packet, topic, number, self._acknowledge))

    def _fail_pending_results(self, failure: BaseException) -> None:
        with self._condition:
            self._end_error = failure
            for result in self._pending_results:
                result.set_exception(failure)
            self._pending_results.clear()
            self._condition.notify_all()
