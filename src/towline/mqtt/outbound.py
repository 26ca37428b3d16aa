"""What we publish, from PUBLISH to the last acknowledgement.

A message of QoS > 0 holds a packet id and a phase until the broker has it. The table `_STEPS` says what each answer
does in each phase; what is not in it is a protocol error. After PUBREL a message is never published again
[MQTT-4.3.3-6]; after a lost connection everything unfinished is sent again with its packet id, in the original order
[MQTT-4.4.0-1, MQTT-4.6.0-1].

An owner that must know after a crash which message a packet id stands for sets `durable`: what is about to be
published, and what is about to be released, is then told in a `Flying` before the bytes that depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Final, TypeAlias

import mqtt5

from towline.mqtt.codec import Packet
from towline.mqtt.events import Acknowledged, Action, Breach, Flying, Send, Token
from towline.mqtt.message import LONGEST_EXPIRY, OutboundMessage
from towline.mqtt.reasons import CUT, QUOTA_EXCEEDED
from towline.mqtt.suspects import Culprits

MAX_PACKET_ID: Final = 65535

Answer: TypeAlias = mqtt5.PubAckPacket | mqtt5.PubRecPacket | mqtt5.PubCompPacket


class Phase(Enum):
    """How far a message of QoS > 0 has come."""

    PUBLISHED = "published"  # PUBLISH sent or about to be sent again
    RELEASED = "released"  # PUBREC seen, PUBREL sent; the broker owns the message


@dataclass(slots=True)
class _Message:
    token: Token
    content: OutboundMessage
    phase: Phase = Phase.PUBLISHED
    #: Sent at least once: the next PUBLISH of it carries DUP [MQTT-3.3.1-1].
    sent: bool = False
    #: When its message expiry interval ends, None to send the message's own.
    expires_at: float | None = None
    #: Of QoS 2, once released: what PUBREC said, or why it was given up and only its packet id is still to be freed.
    reason: int = 0
    given_up: bool = False

    def interval(self, now: float) -> int | None:
        """The message expiry interval to send: what is left, and a last second once it is under way."""
        if self.expires_at is None:
            return self.content.message_expiry_interval
        return min(max(1, ceil(self.expires_at - now)), LONGEST_EXPIRY)


class Outbound:
    """The publishing half of a session.

    Args:
        encode: Packet to bytes in the protocol version of the session.
        durable: Tell what is in flight in a `Flying` before it leaves.
        exactly: One message of QoS 2 at a time until the broker has answered one with PUBREC.
    """

    def __init__(self, encode: Callable[[Packet], bytes], *, durable: bool = False, exactly: bool = False) -> None:
        self._encode = encode
        self._durable = durable
        self._exactly = exactly
        #: With `exactly`: the broker of this connection has not shown yet that it knows QoS 2.
        self._unproven = exactly
        #: With `exactly`: a broker has taken one as QoS 1; no other leaves.
        self._failed = False
        #: The server's limits of this connection, None while there is none.
        self._server: mqtt5.ConnAckPacket | None = None
        #: Messages of QoS > 0 that may be open at once on this connection; 0 before there is one.
        self.window = 0
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
        #: Messages that a session now gone had released: the broker owned them, nothing is left to do.
        self._finished_elsewhere: list[Acknowledged] = []
        #: PUBRELs that answer what came, in its order [MQTT-4.6.0-4].
        self._replies: list[mqtt5.PubRelPacket] = []
        #: With `durable`: ids released with their reason, and ids of a session now gone, that no `Flying` has told yet.
        self._untold: dict[int, int] = {}
        self._forgotten: list[int] = []
        self._last_id = 0
        #: Which message makes the broker end connections, and the one that was found when the last one ended.
        self.suspects = Culprits()
        self.culprit: Token | None = None
        #: Messages that may be without an answer at once because of them; None for no limit.
        self._limit: int | None = None
        #: What has not left is answered as the one before it of its topic and QoS when the server puts that off (0x97):
        #: the owner sends them again, in their order.
        self.in_order = False
        #: On the clock of `actions`: when something was published or released last.
        self.sent_at = 0.0
        #: QoS 0 messages, which have no answer, have left since the last answer to another.
        self.unanswerable = False
        self._unanswered: tuple[Token, ...] = ()

    def __len__(self) -> int:
        return len(self._queue) + len(self._unfinished)

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing has to leave."""
        return not (self._queue or self._unfinished or self._replies or self._finished_elsewhere or self._forgotten)

    @property
    def open_count(self) -> int:
        """How many of them are."""
        return len(self._open)

    @property
    def in_flight(self) -> dict[int, tuple[Token, Phase]]:
        """Packet id → token and phase of every message the broker has not finished, in order."""
        return {packet_id: (m.token, m.phase) for packet_id, m in self._unfinished.items()}

    @property
    def unfinished_qos_2(self) -> bool:
        """Whether a message of QoS 2 is under way: a session that is lost leaves open what became of it."""
        return any(message.content.qos == mqtt5.QoS.EXACTLY_ONCE for message in self._unfinished.values())

    @property
    def due(self) -> float | None:
        """When more may leave by the clock, None for never."""
        return self.suspects.quiet_until if self._server is not None and self._limit == 0 else None

    @property
    def unanswered(self) -> tuple[Token, ...]:
        """Tokens of the messages that left on this connection, or the last one, and have no answer; in order."""
        return self._unanswered if self._server is None else tuple(self._exposed())

    def _exposed(self) -> Iterator[Token]:
        waiting = set(self._again)
        for packet_id, message in self._unfinished.items():
            if packet_id not in waiting and (packet_id in self._open or message.phase is Phase.RELEASED):
                yield message.token

    def connected(self, server: mqtt5.ConnAckPacket, window: int, *, resumed: bool, now: float = 0.0) -> None:
        """A connection is there: what is unfinished has to leave again.

        Args:
            server: The server's limits.
            window: Messages of QoS > 0 that may be open at once.
            resumed: The broker kept the session. If not, what it had not released is sent as new, doubled at worst;
                what it had released is the broker's, lost at worst.
            now: On the clock of `actions`.
        """
        self._server, self.window = server, window
        self.suspects.connected(now)
        self.unanswerable, self._unproven = False, self._exactly
        if resumed:
            self._again = deque(self._unfinished)
            return
        fresh = [m for m in self._unfinished.values() if m.phase is Phase.PUBLISHED]
        self._finished_elsewhere += [
            Acknowledged(m.token, m.reason, packet_id=packet_id, unsure=not m.given_up)
            for packet_id, m in self._unfinished.items()
            if m.phase is Phase.RELEASED
        ]
        if self._durable:
            self._forgotten += self._unfinished
        self._unfinished.clear()
        self._untold.clear()
        self._queue.extendleft(reversed([_Message(m.token, m.content, expires_at=m.expires_at) for m in fresh]))

    def disconnected(self, now: float = 0.0, *, cut: bool = False) -> None:
        """The connection is gone: the message that made the broker do it, if it is found, is given up.

        Args:
            now: On the clock of `actions`.
            cut: The broker ended it, or something between, for a reason that may be something we sent.
        """
        self._unanswered = self.unanswered
        self._server = None
        self._open.clear()
        self._again.clear()
        self._replies.clear()
        self.reserved.clear()
        exact, after_s = not self.unanswerable, now - self.sent_at
        self.culprit = self.suspects.judge(self._unanswered, cut=cut, exact=exact, after_s=after_s)
        if self.culprit is not None:
            self.give_up(self.culprit, CUT)

    def publish(self, token: Token, content: OutboundMessage, expires_at: float | None = None) -> None:
        """Queue a message."""
        self._queue.append(_Message(token, content, expires_at=expires_at))

    def restore(
        self,
        packet_id: int,
        token: Token,
        content: OutboundMessage,
        phase: Phase,
        expires_at: float | None = None,
        reason: int = 0,
    ) -> None:
        """Take up a message that an earlier life had in flight, with PUBREC's reason; in the order of their PUBLISH."""
        message = _Message(token, content, phase, sent=True, expires_at=expires_at, reason=reason)
        self._unfinished[packet_id] = message
        self._last_id = max(self._last_id, packet_id)

    def give_up(self, token: Token, reason: int) -> None:
        """Never publish a message again; `Acknowledged` with the reason comes when nothing is left to be done.

        A packet id of QoS 2 is freed with PUBREL: were the broker to hold the message under it, it would take the next
        one with that id for a repeat, and drop it. After PUBREC the message is the broker's: it is done, and unsure.
        """
        for packet_id, message in self._unfinished.items():
            if message.token == token:
                self._give_up(packet_id, message, reason)
                return

    def _give_up(self, packet_id: int, message: _Message, reason: int) -> None:
        owned = message.phase is Phase.RELEASED and not message.given_up
        if message.content.qos == mqtt5.QoS.EXACTLY_ONCE and message.phase is Phase.PUBLISHED:
            message.reason, message.given_up, message.phase = reason, True, Phase.RELEASED
            return
        del self._unfinished[packet_id]
        self._open.discard(packet_id)
        answer = message.reason if owned else reason
        self._finished_elsewhere.append(Acknowledged(message.token, answer, packet_id=packet_id, unsure=owned))

    def withdraw(self) -> list[Token]:
        """Drop what was never sent, and return its tokens."""
        tokens = [message.token for message in self._queue if not message.sent]
        self._queue.clear()
        return tokens

    def actions(self, now: float = 0.0) -> Iterator[Action]:
        """Send what the connection and the server's window allow, in order.

        Args:
            now: On the clock of the messages' `expires_at`.
        """
        if self._server is None:
            return
        self._limit = self.suspects.limit(now)
        out = [self._encode(packet) for packet in self._replies]
        self._replies.clear()
        self._send_again(out, now)
        yield from self._finished_elsewhere
        self._finished_elsewhere = []
        assigned: dict[int, Token] = {}
        noted: dict[int, Token] = {}
        done = self._send_queued(out, (noted, assigned), now)
        if self._durable and (assigned or noted or self._untold or self._forgotten):
            yield Flying(tuple(self._forgotten), assigned, self._untold, noted)
            self._forgotten, self._untold = [], {}
        if out:
            self.sent_at = now
            yield Send(b"".join(out))
        yield from done

    def _send_queued(
        self, out: list[bytes], assigned: tuple[dict[int, Token], dict[int, Token]], now: float
    ) -> list[Acknowledged]:
        """Add what may leave to `out`; returns what needs no answer or can't be sent to this server.

        Args:
            out: Packets.
            assigned: Packet id → token of what was added, for QoS 1 and QoS 2.
            now: See `actions`.
        """
        done: list[Acknowledged] = []
        while self._queue and not self._again:
            message = self._queue[0]
            qos = message.content.qos
            if (qos and len(self._open) >= self.window) or (not self._allowed()):
                break
            if self._unproven and self._on_trial(qos):
                break
            packet_id = self.new_id() if qos else 0
            reason, data = self._encoded(message, packet_id, now)
            self._queue.popleft()
            if not reason:
                out.append(data)
            if reason or not qos:
                self.unanswerable |= not reason
                done.append(Acknowledged(message.token, reason))
            else:
                message.sent = True
                self._unfinished[packet_id] = message
                self._open.add(packet_id)
                assigned[qos - 1][packet_id] = message.token
        return done

    def _allowed(self) -> bool:
        """Whether our own limit lets another message leave."""
        return self._limit is None or sum(1 for _ in self._exposed()) < self._limit

    def _on_trial(self, qos: int) -> bool:
        """Whether a message of QoS 2 has to wait: for the answer to another, or for ever."""
        if qos != mqtt5.QoS.EXACTLY_ONCE:
            return False
        return self._failed or any(self._unfinished[i].content.qos == qos for i in self._open)

    def _encoded(self, message: _Message, packet_id: int, now: float) -> tuple[int, bytes]:
        """A reason code of ours, 0 for none, and the bytes of a PUBLISH to this server [MQTT-3.2.2-11, -14, -15]."""
        server, content = self._server, message.content
        assert server is not None
        if content.qos > int(server.max_qos):
            return 0x9B, b""
        if content.retain and not server.retain_available:
            return 0x9A, b""
        template = content.template if packet_id and message.expires_at is None and not message.sent else None
        packet = template or content.packet(packet_id, message.interval(now), duplicate=message.sent)
        try:
            data = self._encode(packet)
        except ValueError:
            return 0x90, b""  # a topic or text that this version can't carry
        if server.max_packet_size is not None and len(data) > server.max_packet_size:
            return 0x95, b""
        return 0, data if template is None else content.renumbered(data, packet_id)

    def take(self, packet: Answer) -> Iterator[Action]:
        """Take one of many answers; `actions` has to follow the last.

        Raises:
            Breach: The standard does not allow it in this phase.
        """
        message = self._unfinished.get(packet.packet_id)
        if message is None:
            self._stray(packet)
            return
        qos = 1 if message.content.qos == mqtt5.QoS.AT_LEAST_ONCE else 2
        self.unanswerable = False
        step = _STEPS.get((qos, message.phase, type(packet)))
        if step is None:
            name = type(packet).__name__.removesuffix("Packet").upper()
            raise Breach(f"answered a QoS {qos} message that is {message.phase.value} with {name}")
        yield from step(self, packet, message)

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
        assert self._server is None or len(self._open) <= self.window
        assert not set(self._unfinished) & self.reserved
        assert all(0 < i <= MAX_PACKET_ID for i in (*self._unfinished, *self.reserved))

    # -- steps --

    def _send_again(self, out: list[bytes], now: float) -> None:
        while self._again:
            packet_id = self._again[0]
            message = self._unfinished.get(packet_id)
            if message is not None:
                if not self._allowed():
                    return
                if message.phase is Phase.PUBLISHED:
                    if len(self._open) >= self.window or (self._unproven and self._on_trial(message.content.qos)):
                        return
                    self._publish_again(packet_id, message, out, now)
                if message.phase is Phase.RELEASED:
                    out.append(self._encode(mqtt5.PubRelPacket(packet_id)))
            self._again.popleft()

    def _publish_again(self, packet_id: int, message: _Message, out: list[bytes], now: float) -> None:
        """Add a PUBLISH to `out`; one that this server, or this version of ours, does not take is given up."""
        reason, data = self._encoded(message, packet_id, now)
        if reason:
            self._give_up(packet_id, message, reason)
            return
        self._open.add(packet_id)
        out.append(data)

    def _finish(self, packet: Answer, message: _Message) -> Iterator[Action]:
        del self._unfinished[packet.packet_id]
        self._open.discard(packet.packet_id)
        degraded = message.content.qos == mqtt5.QoS.EXACTLY_ONCE and isinstance(packet, mqtt5.PubAckPacket)
        self._failed |= degraded and self._exactly
        # After PUBREC the message is the broker's: 0x92 on a PUBREL sent again says that it had finished already, and
        # what became of the message PUBREC has said.
        reason = message.reason if message.phase is Phase.RELEASED else int(packet.reason_code)
        yield Acknowledged(message.token, reason, degraded=degraded, packet_id=packet.packet_id)
        if reason == QUOTA_EXCEEDED and self.in_order:
            yield from self._put_off(message.content)

    def _put_off(self, first: OutboundMessage) -> Iterator[Acknowledged]:
        """Give back what would overtake a message that was put off [MQTT-4.6.0-1]."""
        behind: list[_Message] = []
        rest: deque[_Message] = deque()
        for message in self._queue:
            same = (message.content.topic, message.content.qos) == (first.topic, first.qos)
            (behind if same else rest).append(message)
        self._queue = rest
        for message in behind:
            yield Acknowledged(message.token, QUOTA_EXCEEDED)

    def _received(self, packet: Answer, message: _Message) -> Iterator[Action]:
        self._unproven = False
        if int(packet.reason_code) >= 0x80:
            yield from self._finish(packet, message)  # a negative answer is final [MQTT-4.4.0-2]
            return
        if message.phase is Phase.PUBLISHED:
            message.reason = int(packet.reason_code)
            if self._durable:
                self._untold[packet.packet_id] = message.reason
        message.phase = Phase.RELEASED
        self._replies.append(mqtt5.PubRelPacket(packet.packet_id))

    def _stray(self, packet: Answer) -> None:
        """An answer to a message of an earlier session: only a PUBREC waits for us."""
        if isinstance(packet, mqtt5.PubRecPacket) and int(packet.reason_code) < 0x80:
            reason = mqtt5.PubRelReasonCode.PACKET_ID_NOT_FOUND
            self._replies.append(mqtt5.PubRelPacket(packet.packet_id, reason_code=reason))


_Step: TypeAlias = Callable[[Outbound, Answer, _Message], Iterator[Action]]

#: (QoS, phase, answer) → what it does. RabbitMQ answers QoS 2 with PUBACK: done, at QoS 1, and told so.
_STEPS: Final[dict[tuple[int, Phase, type], _Step]] = {
    (1, Phase.PUBLISHED, mqtt5.PubAckPacket): Outbound._finish,
    (2, Phase.PUBLISHED, mqtt5.PubRecPacket): Outbound._received,
    (2, Phase.PUBLISHED, mqtt5.PubAckPacket): Outbound._finish,
    (2, Phase.RELEASED, mqtt5.PubRecPacket): Outbound._received,
    (2, Phase.RELEASED, mqtt5.PubCompPacket): Outbound._finish,
}
