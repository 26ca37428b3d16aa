"""What we publish, from PUBLISH to the last acknowledgement.

A message of QoS > 0 holds a packet id and a phase until the broker has it. The table `_STEPS` says what each answer
does in each phase; what is not in it is a protocol error. After PUBREL a message is never published again
[MQTT-4.3.3-6]; after a lost connection everything unfinished is sent again with its packet id, in the original order
[MQTT-4.4.0-1, MQTT-4.6.0-1].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from mqtt5 import (
    ConnAckPacket,
    PubAckPacket,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
    PubRelReasonCode,
    QoS,
)

from towline.mqtt.codec import Packet
from towline.mqtt.events import Acknowledged, Action, Send

__all__ = ["Outbound", "Phase", "Unexpected"]

MAX_PACKET_ID: Final = 65535

Answer: TypeAlias = PubAckPacket | PubRecPacket | PubCompPacket


class Unexpected(ValueError):
    """An answer that the standard does not allow in this phase; the connection must end with 0x82."""


class Phase(Enum):
    """How far a message of QoS > 0 has come."""

    PUBLISHED = "published"  # PUBLISH sent or about to be sent again
    RELEASED = "released"  # PUBREC seen, PUBREL sent; the broker owns the message


@dataclass(slots=True)
class _Message:
    token: int
    packet: PublishPacket
    phase: Phase = Phase.PUBLISHED
    #: Sent at least once: the next PUBLISH of it carries DUP [MQTT-3.3.1-1].
    sent: bool = False


class Outbound:
    """The publishing half of a session.

    Args:
        encode: Packet to bytes in the protocol version of the session.
        topic_aliases: Topics that may get an alias, as far as the server allows.
    """

    def __init__(self, encode: Callable[[Packet], bytes], topic_aliases: int = 0) -> None:
        self._encode = encode
        self._most_aliases = topic_aliases
        #: Topics of this connection → alias, in the order of their first PUBLISH [MQTT-3.3.2-7, -9].
        self._aliases: dict[str, int] = {}
        #: The server's limits of this connection, None while there is none.
        self._server: ConnAckPacket | None = None
        self._window = 0
        #: Packet ids in use by us → their message, in the order of their first PUBLISH; never the broker's ids.
        self._unfinished: dict[int, _Message] = {}
        #: Packet ids whose PUBLISH or PUBREL has to leave again on this connection, in order.
        self._again: deque[int] = deque()
        #: Ids published on this connection and not finished: what counts against the server's Receive Maximum.
        self._open: set[int] = set()
        #: Not sent yet, in order.
        self._queue: deque[_Message] = deque()
        #: Ids of SUBSCRIBE and UNSUBSCRIBE; they come from the same numbers [MQTT-2.2.1-3].
        self.reserved: set[int] = set()
        #: Tokens of messages that a session now gone had released: the broker owned them, nothing is left to do.
        self._finished_elsewhere: list[int] = []
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._unfinished)

    @property
    def in_flight(self) -> dict[int, tuple[int, Phase]]:
        """Packet id → token and phase of every message the broker has not finished, in order."""
        return {packet_id: (m.token, m.phase) for packet_id, m in self._unfinished.items()}

    def connected(self, server: ConnAckPacket, window: int, *, resumed: bool) -> None:
        """A connection is there: what is unfinished has to leave again.

        Args:
            server: The server's limits.
            window: Messages of QoS > 0 that may be open at once.
            resumed: The broker kept the session. If not, what it had not released is sent as new: doubled at worst.
        """
        self._server, self._window = server, window
        if resumed:
            self._again = deque(self._unfinished)
            return
        fresh = [m for m in self._unfinished.values() if m.phase is Phase.PUBLISHED]
        self._finished_elsewhere = [m.token for m in self._unfinished.values() if m.phase is Phase.RELEASED]
        self._unfinished.clear()
        self._queue.extendleft(reversed([_Message(m.token, m.packet) for m in fresh]))

    def disconnected(self) -> None:
        """The connection is gone."""
        self._server = None
        self._aliases.clear()
        self._open.clear()
        self._again.clear()
        self.reserved.clear()

    def publish(self, token: int, packet: PublishPacket) -> None:
        """Queue a message; its packet id is ignored."""
        self._queue.append(_Message(token, packet))

    def actions(self) -> Iterator[Action]:
        """Send what the connection and the server's window allow, in order."""
        if self._server is None:
            return
        for token in self._finished_elsewhere:
            yield Acknowledged(token, 0)
        self._finished_elsewhere = []
        yield from self._send_again()
        while self._queue and not self._again:
            message = self._queue[0]
            at_most_once = message.packet.qos == QoS.AT_MOST_ONCE
            if not at_most_once and len(self._open) >= self._window:
                return
            yield from self._first_time(message, 0 if at_most_once else self.new_id())
            self._queue.popleft()

    def _first_time(self, message: _Message, packet_id: int) -> Iterator[Action]:
        reason = self._refusal(message.packet)
        data = b""
        if not reason:
            reason, data = self._aliased(message.packet, packet_id)
        if reason:
            yield Acknowledged(message.token, reason)
            return
        yield Send(data)
        if packet_id:
            message.sent = True
            self._unfinished[packet_id] = message
            self._open.add(packet_id)
        else:
            yield Acknowledged(message.token, 0)

    def _aliased(self, packet: PublishPacket, packet_id: int) -> tuple[int, bytes]:
        """As `_encoded`, with a topic alias where there is one left; a resent packet never has one."""
        assert self._server is not None
        topic, alias = packet.topic, self._aliases.get(packet.topic)
        if alias is not None:
            return self._encoded(_with_id(packet, packet_id, topic="", alias=alias))
        if len(self._aliases) >= min(self._most_aliases, self._server.topic_alias_max):
            return self._encoded(_with_id(packet, packet_id))
        alias = len(self._aliases) + 1
        reason, data = self._encoded(_with_id(packet, packet_id, alias=alias))
        if not reason:
            self._aliases[topic] = alias
        return reason, data

    def _encoded(self, packet: PublishPacket) -> tuple[int, bytes]:
        """A reason code, 0 for none, and the bytes."""
        assert self._server is not None
        try:
            data = self._encode(packet)
        except ValueError:
            return 0x90, b""  # a topic or text that this version can't carry
        limit = self._server.max_packet_size
        return (0x95, b"") if limit is not None and len(data) > limit else (0, data)

    def answered(self, packet: Answer) -> Iterator[Action]:
        """Take an answer of the broker.

        Raises:
            Unexpected: It can't come now.
        """
        message = self._unfinished.get(packet.packet_id)
        if message is None:
            yield from self._stray(packet)
            return
        qos = 1 if message.packet.qos == QoS.AT_LEAST_ONCE else 2
        step = _STEPS.get((qos, message.phase, type(packet)))
        if step is None:
            name = type(packet).__name__.removesuffix("Packet").upper()
            raise Unexpected(f"answered a QoS {qos} message that is {message.phase.value} with {name}")
        yield from step(self, packet, message)
        yield from self.actions()

    def new_id(self) -> int:
        """An unused packet id [MQTT-2.2.1-3]; ids go round, so that a late answer is not taken for a new one."""
        for _ in range(MAX_PACKET_ID):
            self._last_id = self._last_id % MAX_PACKET_ID + 1
            if self._last_id not in self._unfinished and self._last_id not in self.reserved:
                return self._last_id
        raise AssertionError("more packet ids in use than any window allows")

    def validate(self) -> None:
        """Assert every invariant named above; for tests."""
        assert self._open <= set(self._unfinished)
        assert self._server is None or len(self._open) <= self._window
        assert self._server is None or len(self._aliases) <= min(self._most_aliases, self._server.topic_alias_max)
        assert not set(self._unfinished) & self.reserved
        assert all(0 < i <= MAX_PACKET_ID for i in (*self._unfinished, *self.reserved))

    # -- steps --

    def _send_again(self) -> Iterator[Action]:
        while self._again:
            packet_id = self._again[0]
            message = self._unfinished.get(packet_id)
            if message is None:
                pass  # answered before it was sent again
            elif message.phase is Phase.RELEASED:
                yield Send(self._encode(PubRelPacket(packet_id)))
            elif len(self._open) < self._window:
                self._open.add(packet_id)
                yield Send(self._encode(_with_id(message.packet, packet_id, duplicate=message.sent)))
            else:
                return
            self._again.popleft()

    def _finish(self, packet: Answer, message: _Message) -> Iterator[Action]:
        del self._unfinished[packet.packet_id]
        self._open.discard(packet.packet_id)
        degraded = message.packet.qos == QoS.EXACTLY_ONCE and isinstance(packet, PubAckPacket)
        # After PUBREC the message is the broker's: 0x92 on a PUBREL sent again says that it had finished already.
        reason = 0 if message.phase is Phase.RELEASED else int(packet.reason_code)
        yield Acknowledged(message.token, reason, degraded=degraded)

    def _received(self, packet: Answer, message: _Message) -> Iterator[Action]:
        if int(packet.reason_code) >= 0x80:
            yield from self._finish(packet, message)  # a negative answer is final [MQTT-4.4.0-2]
            return
        message.phase = Phase.RELEASED
        yield Send(self._encode(PubRelPacket(packet.packet_id)))

    def _stray(self, packet: Answer) -> Iterator[Action]:
        """An answer to a message of an earlier session: only a PUBREC waits for us."""
        if isinstance(packet, PubRecPacket) and int(packet.reason_code) < 0x80:
            reason = PubRelReasonCode.PACKET_ID_NOT_FOUND
            yield Send(self._encode(PubRelPacket(packet.packet_id, reason_code=reason)))

    def _refusal(self, packet: PublishPacket) -> int:
        """Reason code for what can't be sent to this server, 0 for nothing [MQTT-3.2.2-11, -14, -15]."""
        server = self._server
        assert server is not None
        if int(packet.qos) > int(server.max_qos):
            return 0x9B
        if packet.retain and not server.retain_available:
            return 0x9A
        return 0


_Step: TypeAlias = Callable[[Outbound, Answer, _Message], Iterator[Action]]

#: (QoS, phase, answer) → what it does. RabbitMQ answers QoS 2 with PUBACK: done, at QoS 1, and told so.
_STEPS: Final[dict[tuple[int, Phase, type], _Step]] = {
    (1, Phase.PUBLISHED, PubAckPacket): Outbound._finish,
    (2, Phase.PUBLISHED, PubRecPacket): Outbound._received,
    (2, Phase.PUBLISHED, PubAckPacket): Outbound._finish,
    (2, Phase.RELEASED, PubRecPacket): Outbound._received,
    (2, Phase.RELEASED, PubCompPacket): Outbound._finish,
}


def _with_id(
    packet: PublishPacket,
    packet_id: int,
    *,
    duplicate: bool = False,
    topic: str | None = None,
    alias: int | None = None,
) -> PublishPacket:
    return PublishPacket(
        packet.topic if topic is None else topic,
        packet.payload,
        qos=packet.qos,
        retain=packet.retain,
        packet_id=packet_id or None,
        duplicate=duplicate,
        payload_format_indicator=packet.payload_format_indicator,
        message_expiry_interval=packet.message_expiry_interval,
        content_type=packet.content_type,
        response_topic=packet.response_topic,
        correlation_data=packet.correlation_data,
        topic_alias=alias,
        user_properties=packet.user_properties,
    )
