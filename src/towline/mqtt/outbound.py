"""Outbound messages, from PUBLISH to the last acknowledgement.

A message of QoS > 0 has a packet id and a phase until the broker has acknowledged it. The table `_TRANSITIONS` defines
the effect of each acknowledgement in each phase; anything else is a protocol error. After PUBREL a message is never
published again [MQTT-4.3.3-6]; after a lost connection everything unfinished is sent again with its packet id, in the
original order [MQTT-4.4.0-1, MQTT-4.6.0-1].

An owner that must know its packet ids after a crash sets `save_in_flight`: each PUBLISH and PUBREL is then announced by
a `SaveInFlight` before its bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Final, TypeAlias

import mqtt5

from towline.mqtt.codec import Packet
from towline.mqtt.events import Action, BrokerProtocolError, MessageToken, PublishAcknowledged, SaveInFlight, Send
from towline.mqtt.message import MAX_EXPIRY_S, OutboundMessage
from towline.mqtt.reasons import CONNECTION_CUT, QUOTA_EXCEEDED

MAX_PACKET_ID: Final = 65535
#: Connections in a row that must end at a message that was sent alone.
CULPRIT_STRIKES: Final = 3
#: Connections in a row with the same messages unanswered, before messages are sent one at a time.
_CUTS_BEFORE_CAUTION: Final = 2
#: Seconds after a packet was sent within which the end of a connection may be caused by it.
_PROMPT_S: Final = 5.0
#: Seconds that a connection must last before the first message is sent, while there are suspects: a broker that ends
#: every connection would make each message one.
_QUIET_S: Final = 1.0

PublishAck: TypeAlias = mqtt5.PubAckPacket | mqtt5.PubRecPacket | mqtt5.PubCompPacket


class Phase(Enum):
    """Phase of a message of QoS > 0."""

    PUBLISHED = "published"  # PUBLISH sent or about to be sent again
    RELEASED = "released"  # PUBREC seen, PUBREL sent; the broker owns the message


@dataclass(slots=True)
class _Message:
    token: MessageToken
    content: OutboundMessage
    phase: Phase = Phase.PUBLISHED
    #: Sent at least once: the next PUBLISH of it carries DUP [MQTT-3.3.1-1].
    was_sent: bool = False
    #: End of its message expiry interval; None to send the message's own.
    expires_at: float | None = None
    #: QoS 2 after release: reason code of PUBREC; or of the drop, when only its packet id has to be freed.
    pubrec_reason: int = 0
    is_dropped: bool = False

    def expiry_interval_s(self, now: float) -> int | None:
        """Return the message expiry interval to send: the remaining seconds, at least 1."""
        if self.expires_at is None:
            return self.content.message_expiry_interval
        return min(max(1, ceil(self.expires_at - now)), MAX_EXPIRY_S)


class CulpritFinder:
    """Finder of the message that makes the broker end connections; while there are suspects, one is sent at a time.

    A broker may answer a packet by ending the connection, without a reason code: Mosquitto does at a control character
    in a topic or property, which MQTT allows both sides [MQTT-1.5.4-1, section 1.5.4]; others do where a client may not
    publish. Sent again after each reconnect, such a message would block all messages behind it for ever.

    Several messages may be unanswered when a connection ends, so the culprit is found in two steps:

        several, twice   the same messages were unanswered when the broker ended two connections in a row: from now on
                         one message at a time
        alone, 3 times   the broker ended three connections in a row promptly after this message alone had been sent,
                         and before it had answered it: drop the message

    A broker that is stopped, or a network that fails, ends connections too. To drop a wrong message it would have to
    strike three times in a row between the PUBLISH of the very same message and its answer. With a round trip of r
    seconds and connections that end every T seconds for other reasons, the probability is about (r / T)² for a message
    that was hit once: one in four million at 5 ms and 10 s. For a broker that ends every connection at once the rule
    does not apply, because the first message waits for a second of quiet (`CulpritFinder.max_unanswered`).

    MQTT 3.x has no Maximum Packet Size: a message too large for the broker is found in this way too.
    """

    def __init__(self) -> None:
        #: Returns whether a message may be dropped; set by the owner.
        self.is_droppable: Callable[[MessageToken], bool] = lambda _token: True
        #: Messages without an answer at the last cut and at the cuts before it.
        self._candidate_tokens: frozenset[MessageToken] = frozenset()
        #: Cuts in a row with a candidate unanswered; 0 without suspects.
        self.candidate_cuts = 0
        #: The only unanswered message at the last end of a connection; None if there were several.
        self._lone_token: MessageToken | None = None
        self._strikes = 0
        #: Time at which the first message may be sent on this connection, while there are suspects.
        self.first_send_at = 0.0

    @property
    def one_at_a_time(self) -> bool:
        """True while only one message at a time may be sent."""
        return self.candidate_cuts >= _CUTS_BEFORE_CAUTION

    def start_connection(self, now: float) -> None:
        """Start the quiet period of a new connection."""
        self.first_send_at = now + _QUIET_S

    def max_unanswered(self, now: float) -> int | None:
        """Return the number of messages that may be unanswered at once; None for no limit."""
        return int(now >= self.first_send_at) if self.one_at_a_time else None

    def clear_token(self, token: MessageToken) -> None:
        """Clear a message that the broker has answered, or that will not be sent."""
        if token in self._candidate_tokens:
            self._candidate_tokens -= {token}
            self.candidate_cuts *= bool(self._candidate_tokens)
        if token == self._lone_token:
            self._lone_token, self._strikes = None, 0

    def find_culprit(
        self,
        unanswered_tokens: Sequence[MessageToken],
        *,
        ended_by_broker: bool,
        only_acked_sent: bool,
        idle_s: float = 0.0,
    ) -> MessageToken | None:
        """Return the message to drop after the end of a connection; None for none.

        Args:
            unanswered_tokens: Messages sent on this connection without an answer.
            ended_by_broker: The broker, or something between, ended the connection, perhaps because of a message.
            only_acked_sent: Nothing without an acknowledgement, such as QoS 0, was sent since the last answer.
            idle_s: Seconds since something was last sent.
        """
        only_acked_sent = only_acked_sent and all(map(self.is_droppable, unanswered_tokens))
        unanswered_tokens = [token for token in unanswered_tokens if self.is_droppable(token)]
        if not (ended_by_broker and idle_s < _PROMPT_S and unanswered_tokens):
            self._lone_token, self._strikes = None, 0
            return None
        common_tokens = self._candidate_tokens.intersection(unanswered_tokens)
        self._candidate_tokens = common_tokens or frozenset(unanswered_tokens)
        self.candidate_cuts = self.candidate_cuts + 1 if common_tokens else 1
        if len(unanswered_tokens) > 1 or not only_acked_sent:
            self._lone_token, self._strikes = None, 0
            return None
        (lone_token,) = unanswered_tokens
        self._strikes = self._strikes + 1 if lone_token == self._lone_token else 1
        self._lone_token = lone_token
        if self._strikes < CULPRIT_STRIKES:
            return None
        self.clear_token(lone_token)  # it will not be sent again
        return lone_token


class Outbound:
    """Publishing half of a session.

    Args:
        encode: Encoder for the protocol version of the session.
        save_in_flight: Emit `SaveInFlight` before packets with packet ids are sent.
        require_qos2: Send one QoS 2 message at a time until the broker has answered one with PUBREC.
    """

    def __init__(
        self, encode: Callable[[Packet], bytes], *, save_in_flight: bool = False, require_qos2: bool = False
    ) -> None:
        self._encode = encode
        self._save_in_flight = save_in_flight
        self._require_qos2 = require_qos2
        #: With `require_qos2`: the broker of this connection has not proven yet that it supports QoS 2.
        self._qos2_unproven = require_qos2
        #: With `require_qos2`: a broker took a QoS 2 message at QoS 1; no other is sent.
        self._qos2_degraded = False
        #: CONNACK with the server's limits; None while offline.
        self._server_limits: mqtt5.ConnAckPacket | None = None
        #: Messages of QoS > 0 that may be open at once on this connection; 0 before the first.
        self.window = 0
        #: Packet id assigned by us → message, in the order of the first PUBLISH.
        self._unfinished: dict[int, _Message] = {}
        #: Packet ids whose PUBLISH or PUBREL must be sent again on this connection, in order.
        self._resend_ids: deque[int] = deque()
        #: Packet ids that count against the server's Receive Maximum: published on this connection, not finished.
        self._open_ids: set[int] = set()
        #: Messages to be sent, in order.
        self._queue: deque[_Message] = deque()
        #: Packet ids of SUBSCRIBE and UNSUBSCRIBE, from the same range [MQTT-2.2.1-3].
        self.reserved_ids: set[int] = set()
        #: Final answers to yield: of a lost session, and of dropped messages.
        self._finished_acks: list[PublishAcknowledged] = []
        #: PUBRELs in the order of their PUBRECs [MQTT-4.6.0-4].
        self._pubrels: list[mqtt5.PubRelPacket] = []
        #: With `save_in_flight`: PUBREC reasons by id, and ids of a lost session, that are not saved yet.
        self._unsaved_pubrecs: dict[int, int] = {}
        self._discarded_ids: list[int] = []
        self._last_id = 0
        #: Search for the message that makes the broker end connections, and the result at the end of the last one.
        self.culprit_finder = CulpritFinder()
        self.culprit_token: MessageToken | None = None
        #: Messages that may be unanswered at once during that search; None for no limit.
        self._send_limit: int | None = None
        #: When the server postpones a message (0x97), later ones of its topic and QoS get the same answer: the owner
        #: sends them again in order.
        self.in_order = False
        #: Time of the last PUBLISH or PUBREL, on the clock of `actions`.
        self.last_sent_at = 0.0
        #: QoS 0 messages, which have no answer, were sent since the last acknowledgement.
        self.qos0_since_ack = False
        self._last_unanswered: tuple[MessageToken, ...] = ()

    @property
    def idle(self) -> bool:
        """True if there is nothing to send and no acknowledgement is pending."""
        return not (self._queue or self._unfinished or self._pubrels or self._finished_acks or self._discarded_ids)

    @property
    def open_count(self) -> int:
        """Number of messages that count against the server's Receive Maximum."""
        return len(self._open_ids)

    @property
    def unfinished_qos_2(self) -> bool:
        """True if a QoS 2 message is unfinished: its outcome is unknown if the broker loses the session."""
        return any(message.content.qos == mqtt5.QoS.EXACTLY_ONCE for message in self._unfinished.values())

    @property
    def next_send_at(self) -> float | None:
        """Time at which more messages may be sent; None if it does not depend on time."""
        return self.culprit_finder.first_send_at if self._server_limits is not None and self._send_limit == 0 else None

    @property
    def unanswered_tokens(self) -> tuple[MessageToken, ...]:
        """Tokens of the messages sent on this connection, or the last one, without an answer; in order."""
        return self._last_unanswered if self._server_limits is None else tuple(self._unanswered_on_connection())

    def _unanswered_on_connection(self) -> Iterator[MessageToken]:
        resend_ids = set(self._resend_ids)
        for packet_id, message in self._unfinished.items():
            if packet_id not in resend_ids and (packet_id in self._open_ids or message.phase is Phase.RELEASED):
                yield message.token

    def start_connection(self, limits: mqtt5.ConnAckPacket, window: int, *, resumed: bool, now: float = 0.0) -> None:
        """Start a connection: all unfinished messages are sent again.

        Args:
            limits: CONNACK with the server's limits.
            window: Messages of QoS > 0 that may be open at once.
            resumed: The broker kept the session. Otherwise a message without PUBREC is sent as new, doubled at
                worst; a released one belongs to the broker, lost at worst.
            now: Time on the clock of `actions`.
        """
        self._server_limits, self.window = limits, window
        self.culprit_finder.start_connection(now)
        self.qos0_since_ack, self._qos2_unproven = False, self._require_qos2
        if resumed:
            self._resend_ids = deque(self._unfinished)
            return
        in_flight = [m for m in self._unfinished.values() if m.phase is Phase.PUBLISHED]
        self._finished_acks += [
            PublishAcknowledged(m.token, m.pubrec_reason, packet_id=packet_id, delivery_unknown=not m.is_dropped)
            for packet_id, m in self._unfinished.items()
            if m.phase is Phase.RELEASED
        ]
        if self._save_in_flight:
            self._discarded_ids += self._unfinished
        self._unfinished.clear()
        self._unsaved_pubrecs.clear()
        self._queue.extendleft(reversed([_Message(m.token, m.content, expires_at=m.expires_at) for m in in_flight]))

    def end_connection(self, now: float = 0.0, *, ended_by_broker: bool = False) -> None:
        """End the connection, and drop the message that made the broker end it, if it is found.

        Args:
            now: Time on the clock of `actions`.
            ended_by_broker: The broker, or something between, ended it, perhaps because of a message.
        """
        self._last_unanswered = self.unanswered_tokens
        self._server_limits = None
        self._open_ids.clear()
        self._resend_ids.clear()
        self._pubrels.clear()
        self.reserved_ids.clear()
        only_acked_sent, idle_s = not self.qos0_since_ack, now - self.last_sent_at
        self.culprit_token = self.culprit_finder.find_culprit(
            self._last_unanswered, ended_by_broker=ended_by_broker, only_acked_sent=only_acked_sent, idle_s=idle_s
        )
        if self.culprit_token is not None:
            self.drop_message(self.culprit_token, CONNECTION_CUT)

    def publish(self, token: MessageToken, message: OutboundMessage, expires_at: float | None = None) -> None:
        """Queue a message."""
        self._queue.append(_Message(token, message, expires_at=expires_at))

    def restore(
        self,
        packet_id: int,
        token: MessageToken,
        message: OutboundMessage,
        phase: Phase,
        expires_at: float | None = None,
        pubrec_reason: int = 0,
    ) -> None:
        """Restore a message that was in flight before a restart, with PUBREC's reason; call it in PUBLISH order."""
        restored = _Message(token, message, phase, was_sent=True, expires_at=expires_at, pubrec_reason=pubrec_reason)
        self._unfinished[packet_id] = restored
        self._last_id = max(self._last_id, packet_id)

    def drop_message(self, token: MessageToken, reason: int) -> None:
        """Drop a message for good; `PublishAcknowledged` with the reason follows when its packet id is free.

        A QoS 2 packet id is freed with PUBREL: a broker that still has the message would take the next one with that id
        for a repeat, and drop it. After PUBREC the message belongs to the broker: it is finished with unknown delivery.
        """
        for packet_id, message in self._unfinished.items():
            if message.token == token:
                self._drop_message(packet_id, message, reason)
                return

    def _drop_message(self, packet_id: int, message: _Message, reason: int) -> None:
        owned_by_broker = message.phase is Phase.RELEASED and not message.is_dropped
        if message.content.qos == mqtt5.QoS.EXACTLY_ONCE and message.phase is Phase.PUBLISHED:
            message.pubrec_reason, message.is_dropped, message.phase = reason, True, Phase.RELEASED
            return
        del self._unfinished[packet_id]
        self._open_ids.discard(packet_id)
        ack_reason = message.pubrec_reason if owned_by_broker else reason
        self._finished_acks.append(
            PublishAcknowledged(message.token, ack_reason, packet_id=packet_id, delivery_unknown=owned_by_broker)
        )

    def withdraw_unsent(self) -> list[MessageToken]:
        """Drop all messages that were never sent, and return their tokens."""
        tokens = [message.token for message in self._queue if not message.was_sent]
        self._queue.clear()
        return tokens

    def actions(self, now: float = 0.0) -> Iterator[Action]:
        """Yield the packets that the connection and the server's window allow now, in order.

        Args:
            now: Time on the clock of the messages' `expires_at`.
        """
        if self._server_limits is None:
            return
        self._send_limit = self.culprit_finder.max_unanswered(now)
        packets = [self._encode(packet) for packet in self._pubrels]
        self._pubrels.clear()
        self._resend(packets, now)
        yield from self._finished_acks
        self._finished_acks = []
        qos2_ids: dict[int, MessageToken] = {}
        qos1_ids: dict[int, MessageToken] = {}
        finished_acks = self._send_queued(packets, (qos1_ids, qos2_ids), now)
        if self._save_in_flight and (qos2_ids or qos1_ids or self._unsaved_pubrecs or self._discarded_ids):
            yield SaveInFlight(tuple(self._discarded_ids), qos2_ids, self._unsaved_pubrecs, qos1_ids)
            self._discarded_ids, self._unsaved_pubrecs = [], {}
        if packets:
            self.last_sent_at = now
            yield Send(b"".join(packets))
        yield from finished_acks

    def _send_queued(
        self, packets: list[bytes], assigned_ids: tuple[dict[int, MessageToken], dict[int, MessageToken]], now: float
    ) -> list[PublishAcknowledged]:
        """Append queued messages to `packets`; return the answers of QoS 0 and of messages this server can't take."""
        finished_acks: list[PublishAcknowledged] = []
        while self._queue and not self._resend_ids:
            message = self._queue[0]
            qos = message.content.qos
            if (qos and len(self._open_ids) >= self.window) or (not self._limit_allows()):
                break
            if self._must_wait_for_qos2(qos):
                break
            packet_id = self.new_id() if qos else 0
            reason, data = self._encode_publish(message, packet_id, now)
            self._queue.popleft()
            if not reason:
                packets.append(data)
            if reason or not qos:
                self.qos0_since_ack |= not reason
                finished_acks.append(PublishAcknowledged(message.token, reason))
            else:
                message.was_sent = True
                self._unfinished[packet_id] = message
                self._open_ids.add(packet_id)
                assigned_ids[qos - 1][packet_id] = message.token
        return finished_acks

    def _limit_allows(self) -> bool:
        """Return whether the limit of the culprit search allows another message."""
        return self._send_limit is None or sum(1 for _ in self._unanswered_on_connection()) < self._send_limit

    def _must_wait_for_qos2(self, qos: int) -> bool:
        """Return whether a QoS 2 message must wait: for the answer to another, or for ever."""
        if qos != mqtt5.QoS.EXACTLY_ONCE or not self._qos2_unproven:
            return False
        return self._qos2_degraded or any(self._unfinished[i].content.qos == qos for i in self._open_ids)

    def _encode_publish(self, message: _Message, packet_id: int, now: float) -> tuple[int, bytes]:
        """Return our reason code, 0 for none, and the bytes of a PUBLISH to this server [MQTT-3.2.2-11, -14, -15]."""
        server_limits, content = self._server_limits, message.content
        assert server_limits is not None
        if content.qos > int(server_limits.max_qos):
            return 0x9B, b""
        if content.retain and not server_limits.retain_available:
            return 0x9A, b""
        template = content.template if packet_id and message.expires_at is None and not message.was_sent else None
        packet = template or content.to_packet(packet_id, message.expiry_interval_s(now), is_duplicate=message.was_sent)
        try:
            data = self._encode(packet)
        except ValueError:
            return 0x90, b""  # a topic or text that this version can't carry
        if server_limits.max_packet_size is not None and len(data) > server_limits.max_packet_size:
            return 0x95, b""
        return 0, data if template is None else content.with_packet_id(data, packet_id)

    def take_ack(self, ack: PublishAck) -> Iterator[Action]:
        """Handle one acknowledgement; call `actions` after the last one.

        Raises:
            BrokerProtocolError: The standard does not allow it in this phase.
        """
        message = self._unfinished.get(ack.packet_id)
        if message is None:
            self._answer_unknown_id(ack)
            return
        qos = 1 if message.content.qos == mqtt5.QoS.AT_LEAST_ONCE else 2
        self.qos0_since_ack = False
        transition = _TRANSITIONS.get((qos, message.phase, type(ack)))
        if transition is None:
            ack_name = type(ack).__name__.removesuffix("Packet").upper()
            raise BrokerProtocolError(f"answered a QoS {qos} message that is {message.phase.value} with {ack_name}")
        yield from transition(self, ack, message)

    def new_id(self) -> int:
        """Return an unused packet id [MQTT-2.2.1-3]; ids rotate, so that a late answer is not taken for a new one."""
        for _ in range(MAX_PACKET_ID):
            self._last_id = self._last_id % MAX_PACKET_ID + 1
            if self._last_id not in self._unfinished and self._last_id not in self.reserved_ids:
                return self._last_id
        raise AssertionError("more packet ids in use than any window allows")

    # -- steps --

    def _resend(self, packets: list[bytes], now: float) -> None:
        while self._resend_ids:
            packet_id = self._resend_ids[0]
            message = self._unfinished.get(packet_id)
            if message is not None:
                if not self._limit_allows():
                    return
                if message.phase is Phase.PUBLISHED:
                    if len(self._open_ids) >= self.window or self._must_wait_for_qos2(message.content.qos):
                        return
                    self._resend_publish(packet_id, message, packets, now)
                if message.phase is Phase.RELEASED:
                    packets.append(self._encode(mqtt5.PubRelPacket(packet_id)))
            self._resend_ids.popleft()

    def _resend_publish(self, packet_id: int, message: _Message, packets: list[bytes], now: float) -> None:
        """Append a repeated PUBLISH to `packets`; drop a message that this server or protocol version can't take."""
        reason, data = self._encode_publish(message, packet_id, now)
        if reason:
            self._drop_message(packet_id, message, reason)
            return
        self._open_ids.add(packet_id)
        packets.append(data)

    def _finish_message(self, ack: PublishAck, message: _Message) -> Iterator[Action]:
        del self._unfinished[ack.packet_id]
        self._open_ids.discard(ack.packet_id)
        qos_degraded = message.content.qos == mqtt5.QoS.EXACTLY_ONCE and isinstance(ack, mqtt5.PubAckPacket)
        self._qos2_degraded |= qos_degraded and self._require_qos2
        # After PUBREC the broker owns the message: 0x92 for a repeated PUBREL means that it had finished already, and
        # PUBREC's reason is the result.
        reason = message.pubrec_reason if message.phase is Phase.RELEASED else int(ack.reason_code)
        yield PublishAcknowledged(message.token, reason, qos_degraded=qos_degraded, packet_id=ack.packet_id)
        if reason == QUOTA_EXCEEDED and self.in_order:
            yield from self._return_later_messages(message.content)

    def _return_later_messages(self, postponed: OutboundMessage) -> Iterator[PublishAcknowledged]:
        """Return the queued messages that would overtake a postponed one of the same topic [MQTT-4.6.0-1]."""
        later_messages: list[_Message] = []
        other_messages: deque[_Message] = deque()
        for message in self._queue:
            same_order = (message.content.topic, message.content.qos) == (postponed.topic, postponed.qos)
            (later_messages if same_order else other_messages).append(message)
        self._queue = other_messages
        for message in later_messages:
            yield PublishAcknowledged(message.token, QUOTA_EXCEEDED)

    def _on_pubrec(self, pubrec: PublishAck, message: _Message) -> Iterator[Action]:
        self._qos2_unproven = False
        if int(pubrec.reason_code) >= 0x80:
            yield from self._finish_message(pubrec, message)  # a negative answer is final [MQTT-4.4.0-2]
            return
        if message.phase is Phase.PUBLISHED:
            message.pubrec_reason = int(pubrec.reason_code)
            if self._save_in_flight:
                self._unsaved_pubrecs[pubrec.packet_id] = message.pubrec_reason
        message.phase = Phase.RELEASED
        self._pubrels.append(mqtt5.PubRelPacket(pubrec.packet_id))

    def _answer_unknown_id(self, ack: PublishAck) -> None:
        """Answer an acknowledgement for an unknown packet id: only PUBREC needs an answer."""
        if isinstance(ack, mqtt5.PubRecPacket) and int(ack.reason_code) < 0x80:
            reason = mqtt5.PubRelReasonCode.PACKET_ID_NOT_FOUND
            self._pubrels.append(mqtt5.PubRelPacket(ack.packet_id, reason_code=reason))


_Transition: TypeAlias = Callable[[Outbound, PublishAck, _Message], Iterator[Action]]

#: (QoS, phase, acknowledgement) → transition. RabbitMQ answers QoS 2 with PUBACK: finished as QoS 1 (degraded).
_TRANSITIONS: Final[dict[tuple[int, Phase, type], _Transition]] = {
    (1, Phase.PUBLISHED, mqtt5.PubAckPacket): Outbound._finish_message,
    (2, Phase.PUBLISHED, mqtt5.PubRecPacket): Outbound._on_pubrec,
    (2, Phase.PUBLISHED, mqtt5.PubAckPacket): Outbound._finish_message,
    (2, Phase.RELEASED, mqtt5.PubRecPacket): Outbound._on_pubrec,
    (2, Phase.RELEASED, mqtt5.PubCompPacket): Outbound._finish_message,
}
