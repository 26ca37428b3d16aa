"""What a `towline.net.client.Client` hands out and takes: messages, receipts, and the store for what must last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import mqtt5
from mqtt5 import QoS

from towline.errors import ConfigError, Refused, Unreachable
from towline.mqtt.events import Held, SessionRecord
from towline.mqtt.reasons import reason_words
from towline.mqtt.rules import message_problem
from towline.mqtt.session import Session
from towline.mqtt.stubs import Published
from towline.net.options import ConnectionOptions

__all__ = ["Memory", "Message", "PublishResult", "Store", "Will", "message_of", "session_from"]


class Store(Protocol):
    """Where a client keeps what must outlive the process; each method returns when it is durable.

    A store that writes the packet id in the same transaction as the message's effect makes QoS 2 exactly once across
    a crash. It may be called from the client's thread and from those that call `Message.ack`, never from two at once.
    """

    def load(self) -> tuple[SessionRecord | None, Mapping[int, Held]]:
        """What is known of the broker's session, and the QoS 2 packet ids it has not released."""

    def remember(self, record: SessionRecord | None) -> None:
        """Keep the record of the session; None forgets it."""

    def hold(self, packet_id: int, held: Held) -> None:
        """A QoS 2 message is acknowledged: PUBREC leaves after this, and until `release` its id is a repeat."""

    def release(self, packet_ids: Sequence[int]) -> None:
        """These ids are free again, known or not: PUBCOMP leaves after this [MQTT-4.3.3-11]."""


class Memory:
    """The store that is none: a new process knows nothing, and QoS 2 messages of before may come a second time."""

    def load(self) -> tuple[SessionRecord | None, Mapping[int, Held]]:
        """Nothing."""
        return None, {}

    def remember(self, record: SessionRecord | None) -> None:
        """The session has it."""

    def hold(self, packet_id: int, held: Held) -> None:
        """The session has it."""

    def release(self, packet_ids: Sequence[int]) -> None:
        """The session has it."""


def session_from(store: Store, options: ConnectionOptions, level: int) -> Session:
    """A session that goes on with what a store has of it, if that is of the same client id."""
    record, held = store.load()
    if record is not None and record.client_id != options.session.client_id:
        record, held = None, {}
    number = max((entry.number + 1 for entry in held.values()), default=0)
    return Session(options.session_at(level), record, number, held)


class Will(mqtt5.Will):
    """What the broker publishes when the connection ends without our goodbye [MQTT 5 section 3.1.2.5].

    Args:
        topic: Topic name.
        payload: Bytes, or text for UTF-8.
        qos: 0, 1 or 2.
        properties: As `mqtt5.Will` has them: ``retain``, ``will_delay_interval`` in seconds, ``content_type``, ...

    Raises:
        ConfigError: A message that can't be (TL-C51).
    """

    def __new__(cls, topic: str, *, payload: bytes | str = b"", qos: int | QoS = 0, **properties: Any) -> Self:
        """Take numbers for QoS, and text."""
        level = int(qos) if isinstance(qos, QoS) else qos
        if problem := message_problem(topic, payload, level):
            raise ConfigError("TL-C51", f"will to {str(topic)[:80]!r}", problem, "Change it.")
        data = payload.encode() if isinstance(payload, str) else payload
        make: Any = super().__new__
        return cast("Self", make(cls, topic, payload=data, qos=QoS(level), **properties))

    if TYPE_CHECKING:

        def __init__(self, topic: str, *, payload: bytes | str = b"", qos: int | QoS = 0, **properties: Any) -> None:
            """The arguments of `__new__`."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message from the broker.

    One that was not taken in whole, because it is larger than ``max_packet_bytes`` or has more than 1,000 user
    properties, comes in its place all the same, with `payload` None and `user_properties` that say why
    (`towline.mqtt.stubs.Stub`). It wants its `ack` like any other, or the broker sends it again.

    Attributes:
        topic: Topic name, aliases resolved.
        payload: As it came; None if it was not taken in whole.
        qos: 0, 1 or 2.
        retain: Retained at the broker, or published so where the subscription keeps the flag.
        duplicate: The broker says that it may have come before [MQTT-3.3.1-1].
        packet_id: Names it until it is acknowledged (QoS 1) or released (QoS 2); None for QoS 0.
        content_type: None without one; this and all that follow are MQTT 5's.
        payload_is_utf8: The publisher says that the payload is text.
        response_topic: Where an answer is expected.
        correlation_data: Goes into the answer; without a payload, the whole packet if it is within the limit.
        expiry_s: Seconds left to it when the broker sent it.
        user_properties: Pairs, in order, repetitions kept [MQTT-3.3.2-18].
        subscription_ids: Identifiers of our subscriptions that match.
    """

    topic: str
    payload: bytes | None
    qos: int
    retain: bool
    duplicate: bool
    packet_id: int | None
    content_type: str | None
    payload_is_utf8: bool
    response_topic: str | None
    correlation_data: bytes | None
    expiry_s: int | None
    user_properties: tuple[tuple[str, str], ...]
    subscription_ids: tuple[int, ...]
    number: int = field(repr=False)
    _acknowledge: Callable[[Message], None] = field(repr=False)
    _connection: int = field(repr=False)

    def ack(self) -> None:
        """Take the message over: PUBACK, or PUBREC, may leave.

        It leaves in the order of arrival whatever the order of the calls, so a message that is never acknowledged
        holds back all after it [MQTT-4.6.0-2, -3]. A second call, one for QoS 0 and one after the client has ended do
        nothing; in the last case the broker sends the message again.

        Raises:
            Exception: What the `Store` raises; the message is not acknowledged then.
        """
        self._acknowledge(self)


def message_of(
    packet: Published, topic: str, number: int, acknowledge: Callable[[Message], None], connection: int
) -> Message:
    """The message in a packet.

    Args:
        packet: As it came, or a stub.
        topic: Topic aliases resolved.
        number: Of the session.
        acknowledge: What `Message.ack` calls.
        connection: Number of the connection it came on.
    """
    return Message(
        topic,
        packet.payload,
        int(packet.qos),
        packet.retain,
        packet.duplicate,
        packet.packet_id,
        packet.content_type,
        packet.payload_format_indicator == 1,
        packet.response_topic,
        packet.correlation_data,
        packet.message_expiry_interval,
        tuple(packet.user_properties or ()),
        tuple(packet.subscription_ids or ()),
        number,
        acknowledge,
        connection,
    )


class PublishResult:
    """What became of a published message. Made by `Client.publish`."""

    def __init__(
        self, topic: str, changed: threading.Condition, check: Callable[[], None], missing: Callable[[], str]
    ) -> None:
        #: Where it went.
        self.topic = topic
        #: The broker's reason code [MQTT 5 section 2.4], None while there is none. QoS 0: 0 when it was sent.
        self.reason: int | None = None
        #: The broker took a QoS 2 message at QoS 1.
        self.degraded = False
        self._changed = changed
        self._check = check
        #: Why there may be no answer yet, and what to do.
        self._missing = missing
        self._failure: BaseException | None = None

    @property
    def done(self) -> bool:
        """The broker has taken or refused it, or the client has ended before."""
        return self.reason is not None or self._failure is not None

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait until the broker has taken the message.

        Args:
            timeout_s: Seconds, None for as long as it takes.

        Raises:
            Refused: The broker dropped it (TL-M31).
            Unreachable: No answer in time (TL-M33), the client is not opened (TL-M50), or was closed before (TL-M32):
                publish it again.
            BrokerError: Why the client has ended.
        """
        if not self.done:
            self._check()
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout_s):
                what = f"no answer within {timeout_s:g} s to a message"
                raise Unreachable("TL-M33", self.topic, what, self._missing())
        if self.reason is None:
            assert self._failure is not None
            raise self._failure
        if self.reason >= 0x80:
            what = f"the message was dropped: {reason_words(self.reason)} (0x{self.reason:02X})"
            raise Refused("TL-M31", self.topic, what, "Change the message, or the broker's limits and rights.")
        return self
