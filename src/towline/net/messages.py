"""Messages of a `towline.net.client.Client`: those that came, those that wait to be taken, and what was published."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, Self, TypedDict, Unpack, cast

from towline.errors import Refused, Unreachable
from towline.mqtt.message import OutboundMessage
from towline.mqtt.reasons import reason_words
from towline.mqtt.rules import message_problem
from towline.mqtt.stubs import Published
from towline.net.settings import refuse

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
        #: Number of each message that is to be acknowledged → its QoS.
        self._open: dict[int, int] = {}
        #: Everything below is acknowledged, because acknowledgements leave in order [MQTT-4.6.0-2, -3].
        self.settled = 0
        #: Number of the message that comes next.
        self._next = 0
        #: The connection whose beginning `connected` has seen.
        self._connection = 0

    @property
    def full(self) -> bool:
        """So much waits that nothing more may be read."""
        return self._bytes >= _MOST_BYTES

    def add(self, message: Message) -> bool:
        """Take a message in; whether there was room."""
        self._next = message.number + 1
        if message.qos:
            self._open[message.number] = message.qos
        else:
            self.settle(message.number)
            if self._bytes >= _MOST_BYTES // 2:
                return False
        self.waiting.append(message)
        self._bytes += _OVERHEAD + message.size
        return True

    def take(self) -> Message:
        """Hand out the first that waits."""
        message = self.waiting.popleft()
        self._bytes -= _OVERHEAD + message.size
        return message

    def settle(self, *numbers: int) -> None:
        """Messages are acknowledged, or can't be any more; a second call does nothing."""
        for number in numbers:
            self._open.pop(number, None)
        while self.settled < self._next and self.settled not in self._open:
            self.settled += 1

    def connected(self, connection: int, *, resumed: bool) -> None:
        """On a new connection, settle what can't be acknowledged any more; a second call does nothing.

        A kept session sends QoS 1 again under new numbers, so what nobody has taken is not handed out twice. A lost one
        has no name for anything. QoS 2 in a kept session still waits for its acknowledgement: PUBREC to the repeat.

        Args:
            connection: Its number, which grows.
            resumed: The session was kept.
        """
        if self._connection == connection:
            return
        self._connection = connection
        self.settle(*[number for number, qos in self._open.items() if qos == 1 or not resumed])
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


def outbound(
    topic: str, payload: bytes | str, qos: int, *, retain: bool, **properties: Unpack[Properties]
) -> OutboundMessage:
    """What is to be published.

    Raises:
        ConfigError: TL-C51, MQTT has no way to say it.
    """
    said = cast("dict[str, Any]", properties)
    text = bool(said.pop("payload_is_utf8", False))
    if problem := message_problem(topic, payload, qos, **said):
        refuse(f"message to {str(topic)[:80]!r}", problem)
    said["message_expiry_interval"] = said.pop("expiry_s", None)
    said["user_properties"] = [(name, value) for name, value in said.get("user_properties") or ()]
    data = payload.encode() if isinstance(payload, str) else bytes(payload)
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
