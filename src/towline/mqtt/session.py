"""The MQTT session as a value machine: events in, actions out.

No socket, thread, disk or clock lives here. `Session.handle(event, now)` changes memory only and returns what must be
done, in order; whoever drives it does that and feeds the outcome back as the next event. Two rules shape the rest:

1. **The session never acknowledges by itself.** Every message received gets the next number of one sequence, the
   offset it will have in the journal. The acknowledgements of all messages below `n` leave when `Settled(n)` says that
   they are safe, in the order of arrival [MQTT-4.6.0-2, -3], [I2].
2. **What must survive a crash is an action, not a field.** `Remember` carries the record of the broker's session; it is
   durable before the actions after it are carried out. `Deliver` carries messages together with the QoS 2 packet ids
   that come or go with them, so that a crash can't part the two [I3]. The ids of a session that the broker has lost go
   with one, and no SUBSCRIBE leaves before `Stored` says so: what it brings may have the same ids.

The halves are in `towline.mqtt.inbound` and `towline.mqtt.outbound`, what is known of the subscriptions in
`towline.mqtt.subscriptions`; here are the events of a connection. Other filters may be wanted while a session is online
(`Want`): then only the difference is asked for, and no connection is made anew.
Transitions are two tables: `_PACKETS` (connection state × packet type → method) and `_EVENTS` (event type → method).
What is not in the first is a protocol error (0x82).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Final, TypeAlias

import mqtt5

from towline.errors import BrokerError, ProtocolViolation, Refused, SessionUnknown, Unreachable
from towline.mqtt import events
from towline.mqtt.codec import AnswerRun, Packet, PublishRun, encode
from towline.mqtt.events import Action, Breach, Close, Filter, Send, SessionConfig, SessionRecord
from towline.mqtt.handshake import (
    answered_challenge,
    authenticate,
    check_connack,
    connect_packet,
    connection_ended,
    connection_refused,
    subscription_refused,
    unsupported,
)
from towline.mqtt.inbound import Inbound
from towline.mqtt.outbound import Answer, Outbound
from towline.mqtt.plain import PlainRun
from towline.mqtt.reasons import BLAMING, ID_IN_USE, TAKEN_OVER
from towline.mqtt.rules import check_config
from towline.mqtt.subscriptions import Subscriptions

#: Servers that a record names: where brokers point to others, new ones may come for ever.
_MOST_SERVERS: Final = 100
_PINGREQ: Final = mqtt5.PingReqPacket().write()
#: Packet ids tried for a SUBSCRIBE: a broker that calls more of them in use says so of any.
_MOST_IDS_IN_USE: Final = 16
#: Share of the keep alive after which we send PINGREQ when nothing else went out: early enough for a slow link.
_PING_AFTER: Final = 0.75
#: A silent peer is found within 1.5 × keep alive: 0.75 until the PINGREQ and as much for its answer.
PONG_WITHIN: Final = 0.75


@dataclass(slots=True)
class Liveness:
    """Whether the broker of a connection lives [MQTT-3.1.2-22 to -24].

    Attributes:
        answer_within_s: Seconds that CONNACK and SUBACK may take.
        heard_at: When the connection was opened, the broker last sent what counts as an answer, or the time for one
            began anew.
        sent_at: When something left.
        ping_at: When the PINGREQ without an answer left, or the peer last showed since that it lives; None without one.
        suspended: We do not read: what is missing may lie in what was not read.
    """

    answer_within_s: float
    heard_at: float = 0.0
    sent_at: float = 0.0
    ping_at: float | None = None
    suspended: bool = False

    def lives(self, now: float) -> None:
        """The peer shows that it lives: it sends, or takes what waited to be sent, however long a packet takes."""
        if self.ping_at is not None:
            self.ping_at = now

    def reading(self, now: float, *, on: bool) -> None:
        """We read again, or not any more: what is awaited may lie in what was not read."""
        self.suspended = not on
        if on:
            self.heard_at = now
            self.lives(now)

    @property
    def answer_due(self) -> float:
        """When an answer that is owed comes too late."""
        return self.heard_at + self.answer_within_s

    def ping_due(self, keep_alive_s: int) -> float:
        """When a PINGREQ has to leave."""
        return self.sent_at + keep_alive_s * _PING_AFTER

    def pong_due(self, keep_alive_s: int) -> float:
        """When PINGRESP comes too late."""
        if self.ping_at is None or self.suspended:
            return math.inf
        return self.ping_at + keep_alive_s * PONG_WITHIN


class SessionState(Enum):
    """Where the connection stands."""

    OFFLINE = "offline"
    CONNECTING = "connecting"  # CONNECT sent, no CONNACK yet
    SUBSCRIBING = "subscribing"  # CONNACK seen, a SUBACK or UNSUBACK is missing; messages may already come
    ONLINE = "online"


class Session:
    """One client identity towards one broker, across its connections.

    Args:
        config: What does not change.
        record: The durable record of the broker's session, None on a new journal.
        next_number: Number of the next message received: the end of the journal.
        held: QoS 2 packet ids the journal holds.

    Raises:
        ConfigError: The protocol version can't say what the configuration wants (TL-C50).
    """

    def __init__(
        self,
        config: SessionConfig,
        record: SessionRecord | None = None,
        next_number: int = 0,
        held: Mapping[int, events.Held] | None = None,
    ) -> None:
        check_config(config)
        self.config = config
        self.state = SessionState.OFFLINE
        #: As last given to `Remember`.
        self.record = record
        #: The server's limits of this connection, None before CONNACK.
        self.server: mqtt5.ConnAckPacket | None = None
        self._encode: Callable[[Packet], bytes] = partial(encode, version=config.protocol)
        self.inbound = Inbound(
            next_number,
            held,
            receive_maximum=config.receive_maximum,
            topic_alias_maximum=config.topic_alias_maximum,
            reasons=config.protocol == 5,
        )
        self.outbound = Outbound(self._encode, durable=config.durable_ids, exactly=config.exactly_once)
        self.subscriptions = Subscriptions(_said_by(config), record.subscriptions if record else {})
        #: Filters that are to be wanted as soon as the answers have come that are missing; None for no change.
        self._next: events.Want | None = None
        #: Those before, while the broker is asked for such a change.
        self._back: tuple[Filter, ...] | None = None
        #: Why the last change of filters was taken back; None where it was not.
        self.refusal: BrokerError | None = None
        #: The session is online, and only asks for other filters.
        self._changing = False
        #: PINGREQs of this connection without an answer: answers come in their order.
        self._pings = 0
        #: Each SUBSCRIBE or UNSUBSCRIBE without an answer, by its packet id.
        self._requests: dict[int, mqtt5.SubscribePacket | mqtt5.UnsubscribePacket] = {}
        #: The last connection was ended by the broker, for a reason that may be something we sent.
        self.cut = False
        #: Only to see whether the broker answers this version: the connection ends at CONNACK.
        self.probing = False
        self._known_before = record is not None
        #: The server of this connection, whether what we remember is of another one, and whether it may be.
        self._at, self._elsewhere, self._perhaps_elsewhere = "", False, False
        #: Ticket of the `Deliver` that frees the packet ids of a lost session; None when that is durable.
        self._freeing: int | None = None
        self._discarding = False
        #: Times the broker called the packet id of a SUBSCRIBE in use, on this connection.
        self._ids_in_use = 0
        self._liveness = Liveness(config.connect_timeout_s)
        #: Of the event at hand.
        self._now = 0.0

    # -- for the driver --

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Take one event and return what must be done, in order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        actions: list[Action] = []
        self._now = now
        _EVENTS[type(event)](self, event, now, actions)
        if self.outbound.suspects.cuts:
            for action in actions:
                if isinstance(action, events.Acknowledged):
                    self.outbound.suspects.answered(action.token)
        for action in actions:
            if type(action) is Send:
                self._liveness.sent_at = now
                break
        return actions

    @property
    def window_full(self) -> bool:
        """The broker may send nothing more, or sends against the rules: do not read."""
        return self.inbound.unacknowledged >= self.config.receive_maximum

    def deadline(self) -> float | None:
        """When `Tick` is due on the clock of `handle`, None for never."""
        if self.state is SessionState.OFFLINE:
            return None
        times = [self._liveness.answer_due] if self._owes_answer else []
        keep_alive_s = self.keep_alive_s
        if keep_alive_s and self.state is not SessionState.CONNECTING:
            # Also while an answer is missing: a packet that takes long to arrive must not silence us [MQTT-3.1.2-22].
            times += [self._liveness.ping_due(keep_alive_s), self._liveness.pong_due(keep_alive_s)]
        if self.outbound.due is not None:
            times.append(self.outbound.due)
        return min(times, default=None)

    @property
    def _owes_answer(self) -> bool:
        """The broker has to say something now: CONNACK, or SUBACK unless it is us who do not read."""
        waiting = self._liveness.suspended or self._freeing is not None
        return self.state is SessionState.CONNECTING or (self.state is SessionState.SUBSCRIBING and not waiting)

    @property
    def probed(self) -> bool:
        """Every PINGREQ is answered: the broker has read all that left before the last one."""
        return self._pings == 0

    @property
    def keep_alive_s(self) -> int:
        """Seconds in force: the shorter of ours and the server's; 0 where neither has one.

        The server's value is the one that must be kept [MQTT-3.2.2-21], and a PINGREQ may leave at any time: a server
        that waits longer than we want to, or for ever (0), does not make us blind for a line that is dead.
        """
        given = self.server.server_keep_alive if self.server else None
        return min(filter(None, (self.config.keep_alive_s, given)), default=0)

    @property
    def subscribed(self) -> bool:
        """The session is online, and is subscribed to exactly what is wanted, as far as the broker has said."""
        wanted = {one.pattern: one.terms for one in _said_by(self.config)}
        return self.state is SessionState.ONLINE and self.subscriptions.known == wanted

    def validate(self) -> None:
        """Assert every invariant; for tests."""
        self.inbound.validate()
        self.outbound.validate()
        assert self.state is not SessionState.OFFLINE or not self.inbound.unacknowledged
        assert set(self._requests) == self.outbound.reserved
        assert not self._changing or self.state is SessionState.SUBSCRIBING
        assert self.state is not SessionState.ONLINE or not self._requests
        assert self.record is None or self.record.subscriptions == self.subscriptions.known

    # -- events --

    def _on_opened(self, event: events.Opened, now: float, actions: list[Action]) -> None:
        self.cut, self.outbound.culprit = False, None
        self._at = event.server
        last = self.record.servers[-1] if self.record and self.record.servers else ""
        self._perhaps_elsewhere = bool(event.server) and event.server != last
        # The one server there is may have got another name: then its packet ids still hold.
        self._elsewhere = self._perhaps_elsewhere and bool(last) and not event.alone
        self._liveness = Liveness(self.config.connect_timeout_s, heard_at=now)
        self._ids_in_use = 0
        if event.config is not None:
            self.config = event.config
        if self.record is None:
            # Durable before CONNECT leaves: after a crash here the broker may hold a session that is ours.
            self._remember(SessionRecord(self.config.client_id), actions)
        self.subscriptions.connect()
        self._remember_subscriptions(actions)
        try:
            first = authenticate(self.config, lambda method: method.start())
        except Refused as error:
            self._end(Close(error, fatal=True), actions)
            return
        self.state = SessionState.CONNECTING
        self._send(connect_packet(self.config, first, discarding=self._discarding), actions)

    def _on_received(self, event: events.Received, now: float, actions: list[Action]) -> None:
        if event.items or self.state is not SessionState.CONNECTING:  # a CONNACK byte by byte is none
            self._liveness.heard_at = now
        self._liveness.lives(now)
        for item in event.items:
            handler = _PACKETS.get((self.state, type(item)))
            if handler is None or (self.config.protocol < 5 and type(item) in _ONLY_5):
                kind = item.kind if isinstance(item, AnswerRun) else type(item)
                name = kind.__name__.removesuffix("Packet").removesuffix("Run").upper()
                self._violation(f"sent {name} while {self.state.value}", 0x82, actions)
                break
            try:
                handler(self, item, now, actions)
            except Breach as error:
                self._violation(str(error), error.reason, actions)
            except Refused as error:
                self._end(Close(error, fatal=True), actions)
            if self.state is SessionState.OFFLINE:
                break
        if not self.outbound.idle:
            actions += self.outbound.actions(now)  # once for all answers: one write, and one sync where ids are durable
        delivery = self.inbound.hand_over()
        if self.state is not SessionState.OFFLINE and (data := self.inbound.settle(self.inbound.settled)):
            # Repeats of what is settled; before the delivery, whose own acknowledgements come after [MQTT-4.6.0-3].
            actions.append(Send(data))
        if delivery:
            actions.append(delivery)

    def _on_settled(self, event: events.Settled, _now: float, actions: list[Action]) -> None:
        if data := self.inbound.settle(event.upto):
            actions.append(Send(data))

    def _on_stored(self, event: events.Stored, now: float, actions: list[Action]) -> None:
        self._send_bytes(self.inbound.stored(event.ticket), actions)
        if self._freeing is not None and event.ticket >= self._freeing:
            self._freeing = None
            if self.state is SessionState.SUBSCRIBING:
                self._liveness.heard_at = now  # the time for the answer to SUBSCRIBE begins here
                self._take_up(now, actions)

    def _on_publish(self, event: events.Publish, now: float, actions: list[Action]) -> None:
        self._on_publish_many(events.PublishMany((event,)), now, actions)

    def _on_publish_many(self, event: events.PublishMany, now: float, actions: list[Action]) -> None:
        for message in event.messages:
            self.outbound.publish(message.token, message.message, message.expires_at)
        actions += self.outbound.actions(now)

    def _on_reading(self, event: events.Reading, now: float, _actions: list[Action]) -> None:
        self._liveness.reading(now, on=event.on)

    def _on_written(self, _event: events.Written, now: float, _actions: list[Action]) -> None:
        self._liveness.lives(now)

    def _on_tick(self, _event: events.Tick, now: float, actions: list[Action]) -> None:
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return
        where = self.config.where
        if self._owes_answer and now >= self._liveness.answer_due:
            within, unanswered = f"within {self.config.connect_timeout_s:g} s", self.state is SessionState.CONNECTING
            what = f"no {'CONNACK' if unanswered else 'answer to SUBSCRIBE'} {within}"
            self._end(Close(Unreachable("TL-M03", where, what, "Trying again."), unanswered=unanswered), actions)
        elif now >= self._liveness.pong_due(self.keep_alive_s):
            what = f"no answer to PINGREQ within {self.keep_alive_s * PONG_WITHIN:g} s"
            self._end(Close(Unreachable("TL-M04", where, what, "The connection is made anew.")), actions)
        elif self.outbound.due is not None and now >= self.outbound.due:
            actions += self.outbound.actions(now)
        else:
            self._ping(now, actions)

    def _ping(self, now: float, actions: list[Action]) -> None:
        if self._liveness.ping_at is None:
            self._liveness.ping_at = now
        self._pings += 1
        actions.append(Send(_PINGREQ))

    def _on_probe(self, _event: events.Probe, now: float, actions: list[Action]) -> None:
        if self.state is SessionState.ONLINE:
            self._ping(now, actions)

    def _on_malformed(self, event: events.Malformed, _now: float, actions: list[Action]) -> None:
        self._violation(f"sent {event.what}", event.reason, actions)

    def _on_lost(self, _event: events.Lost, _now: float, _actions: list[Action]) -> None:
        self.cut = self.state in {SessionState.SUBSCRIBING, SessionState.ONLINE}
        self._go_offline()

    def broke(self, where: str) -> Close:
        """What `Lost`, which is given next, means for the connection where the transport itself has no words for it."""
        if self.state is not SessionState.CONNECTING:
            return Close(Unreachable("TL-M05", where, "the connection broke", "Trying again."))
        return Close(
            Unreachable("TL-M03", where, "the connection ended in place of CONNACK", "Trying again."), unanswered=True
        )

    def _on_stop(self, _event: events.Stop, _now: float, actions: list[Action]) -> None:
        if self.state is not SessionState.OFFLINE:
            self._end(Close(None), actions, farewell=True)

    # -- connecting --

    def _on_connack(self, packet: mqtt5.ConnAckPacket, now: float, actions: list[Action]) -> None:
        self.state, self.server = SessionState.SUBSCRIBING, packet
        if int(packet.reason_code):
            self.subscriptions.kept()
            self._remember_subscriptions(actions)
            self._end(connection_refused(packet, self.config.where), actions)
            return
        check_connack(packet, self.config, discarding=self._discarding)
        if self.probing:
            self._end(Close(None, again_at_once=True, answered=True), actions, farewell=True)
        elif self._discarding:
            self._discarding = False
            self._end(Close(None, again_at_once=True), actions, farewell=True)
        elif self._present and not self._known_before:
            self._meet_unknown_session(now, actions)
        else:
            self._enter_session(now, actions)

    def _meet_unknown_session(self, now: float, actions: list[Action]) -> None:
        choice = self.config.unknown_session
        if choice == "adopt":
            self._enter_session(now, actions)
            return
        if choice == "discard":
            self._discarding = True
            self._end(Close(None, again_at_once=True), actions, farewell=True)
            return
        self._remember(None, actions)
        error = SessionUnknown(
            "TL-M20",
            self.config.where,
            f'the broker holds a session for client id "{self.config.client_id}" that this journal knows nothing of',
            'Restore the journal, or set unknown_session = "adopt" to take what it has queued or "discard" to drop it.',
        )
        self._end(Close(error, fatal=True), actions, farewell=True)

    def _enter_session(self, now: float, actions: list[Action]) -> None:
        self._known_before = True
        if not self.resumed:
            if self._lost_here and not self.config.clean_start:
                actions.append(events.SessionLost())
            self._freeing = self.inbound.forget() or self._freeing
        if self._freeing is None:
            self._take_up(now, actions)

    def _take_up(self, now: float, actions: list[Action]) -> None:
        """Go on with a session whose packet ids are known, on disk too: subscribe, and send what waits."""
        assert self.server is not None
        resumed = self.resumed
        if not self._present:
            self.subscriptions.lost()
        elif not (self._perhaps_elsewhere or self.config.protocol == 3):  # MQTT 3.1 can't say Session Present
            self.subscriptions.kept()
        wanted = self.subscriptions.ask()
        servers = tuple(s for s in self.record.servers if s != self._at) if self.record and self._at else ()
        servers = (*servers[1 - _MOST_SERVERS :], self._at) if self._at else ()
        self._remember(SessionRecord(self.config.client_id, True, self.subscriptions.known, servers), actions)
        window = self.server.receive_max if self.config.protocol == 5 else self.config.window_3
        self.outbound.connected(self.server, window, resumed=resumed, now=now)
        actions += self.outbound.actions(now)
        self._ask(*wanted, actions)

    def _on_auth(self, packet: mqtt5.AuthPacket, _now: float, actions: list[Action]) -> None:
        self._send(answered_challenge(packet, self.config), actions)

    # -- subscribing --

    def _ask(self, filters: list[Filter], surplus: list[str], actions: list[Action]) -> None:
        """Subscribe to these filters, and unsubscribe from the surplus ones."""
        assert self.server is not None
        refused = unsupported(self.server, filters, self.config.where)
        if refused and not self._take_back(refused):
            self._end(Close(refused, fatal=True), actions, farewell=True)
            return
        if not refused:
            for identifier in dict.fromkeys(f.identifier for f in filters):  # one each [MQTT 5 section 3.8.2.1.2]
                self._subscribe([f.packet() for f in filters if f.identifier == identifier], identifier, actions)
            if surplus:
                self._request(mqtt5.UnsubscribePacket(self.outbound.new_id(), surplus), actions)
        self._come_online(actions)

    def _subscribe(self, filters: list[mqtt5.TopicFilter], identifier: int | None, actions: list[Action]) -> None:
        self._request(mqtt5.SubscribePacket(self.outbound.new_id(), filters, subscription_id=identifier), actions)

    def _request(self, packet: mqtt5.SubscribePacket | mqtt5.UnsubscribePacket, actions: list[Action]) -> None:
        if self.server is None:  # one before it was too large
            return
        data, limit = self._encode(packet), self.server.max_packet_size
        if limit is None or len(data) <= limit:
            self.outbound.reserved.add(packet.packet_id)
            self._requests[packet.packet_id] = packet
            actions.append(Send(data))
            return
        what = f"the broker takes packets of {limit:,} bytes, our subscription has {len(data):,} [MQTT-3.2.2-15]"
        error = Refused("TL-M16", self.config.where, what, "Subscribe to fewer filters.")
        self._end(Close(error, fatal=True), actions)

    def _answered(self, packet_id: int) -> mqtt5.SubscribePacket | mqtt5.UnsubscribePacket | None:
        self.outbound.reserved.discard(packet_id)
        return self._requests.pop(packet_id, None)

    def _on_suback(self, packet: mqtt5.SubAckPacket, _now: float, actions: list[Action]) -> None:
        request = self._answered(packet.packet_id)
        if not isinstance(request, mqtt5.SubscribePacket) or len(request.topic_filters) != len(packet.reason_codes):
            raise Breach("sent a SUBACK that answers no SUBSCRIBE of ours [MQTT-3.9.3-1]")
        again: list[mqtt5.TopicFilter] = []
        granted: list[str] = []
        for wanted, code in zip(request.topic_filters, map(int, packet.reason_codes), strict=True):
            if code == ID_IN_USE and self._ids_in_use < _MOST_IDS_IN_USE:
                again.append(wanted)
            elif (error := subscription_refused(wanted, code, self.config.where)) is None:
                granted.append(wanted.pattern)
            elif not self._take_back(error):
                self._end(Close(error, fatal=code != ID_IN_USE), actions, farewell=True)
                return
        self.subscriptions.granted(granted)
        self._remember_subscriptions(actions)
        if again:
            self._ids_in_use += 1
            self._subscribe(again, request.subscription_id, actions)
        self._come_online(actions)

    def _on_unsuback(self, packet: mqtt5.UnsubAckPacket, _now: float, actions: list[Action]) -> None:
        if packet.packet_id not in self._requests:
            return  # nothing of ours depends on it
        request, codes = self._answered(packet.packet_id), packet.reason_codes
        coded = self.config.protocol == 5  # MQTT 3.x has no way to refuse
        if not isinstance(request, mqtt5.UnsubscribePacket) or (coded and len(request.patterns) != len(codes)):
            raise Breach("sent an UNSUBACK that answers no UNSUBSCRIBE of ours [MQTT-3.11.3-1]")
        refused = {pattern for pattern, code in zip(request.patterns, codes, strict=False) if int(code) >= 0x80}
        self.subscriptions.removed(set(request.patterns) - refused)
        self._remember_subscriptions(actions)
        self._come_online(actions)

    def _come_online(self, actions: list[Action]) -> None:
        if self.state is not SessionState.SUBSCRIBING or self._requests:
            return
        self.state, changed = SessionState.ONLINE, self._changing
        self._changing = False
        actions.append(events.Subscribed() if changed else events.Online(resumed=self.resumed))
        if self._next is not None:
            self._ask_again(actions)

    def _on_want(self, event: events.Want, now: float, actions: list[Action]) -> None:
        self._next, self.refusal = event, None
        if self._requests:  # each answer is judged by what was wanted when it was asked for
            return
        if self.state is SessionState.ONLINE:
            self._liveness.heard_at = now  # the time for the answer begins here
            self._ask_again(actions)
        else:
            self._take_filters()

    def _ask_again(self, actions: list[Action]) -> None:
        """Ask for the difference, without another connection."""
        before, change = self.config.filters, self._next
        self._take_filters()
        self._back = before if change is not None and change.or_back else None
        self.state, self._changing = SessionState.SUBSCRIBING, True
        wanted = self.subscriptions.ask()
        self._remember_subscriptions(actions)
        self._ask(*wanted, actions)

    def _take_back(self, error: BrokerError) -> bool:
        """Want the filters before this change again, where it may be taken back; whether it may."""
        if self._back is None:
            return False
        if self._next is None:  # else others are wanted anyway
            self._next = events.Want(self._back)
        self.refusal = self.refusal or error
        return True

    # -- messages --

    def _on_publishes(self, run: PublishRun | PlainRun, _now: float, _actions: list[Action]) -> None:
        self.inbound.publishes(run)

    def _on_pubrel(self, packet: mqtt5.PubRelPacket, _now: float, actions: list[Action]) -> None:
        self._send_bytes(self.inbound.release((packet.packet_id,)), actions)

    def _on_answers(self, run: AnswerRun, now: float, actions: list[Action]) -> None:
        if run.kind is mqtt5.PubRelPacket:
            self._send_bytes(self.inbound.release(run.packet_ids), actions)
            return
        handler = _CONNECTED[run.kind]
        for packet in run.packets:
            handler(self, packet, now, actions)

    def _on_answer(self, packet: Answer, _now: float, actions: list[Action]) -> None:
        actions += self.outbound.take(packet)

    def _on_pingresp(self, _packet: mqtt5.PingRespPacket, _now: float, _actions: list[Action]) -> None:
        self._pings = max(0, self._pings - 1)
        self._liveness.ping_at = None

    def _on_disconnect(self, packet: mqtt5.DisconnectPacket, _now: float, actions: list[Action]) -> None:
        if packet.session_expiry_interval is not None:
            raise Breach("set a Session Expiry Interval on DISCONNECT [MQTT-3.14.2-2]")
        self.cut = int(packet.reason_code) in BLAMING
        if int(packet.reason_code) == TAKEN_OVER:  # and perhaps made anew: then Session Present says so of an empty one
            self.subscriptions.doubt()
            self._remember_subscriptions(actions)
        self._end(connection_ended(packet, self.config.client_id, self.config.where), actions)

    # -- what it knows, and what it can ask for --

    @property
    def resumed(self) -> bool:
        """Whether the broker kept the session that we remember; a session at another server is not that one."""
        return self._present and not self._elsewhere

    @property
    def _present(self) -> bool:
        """Whether the broker has a session of ours. MQTT 3.1 does not say: then what we remember counts."""
        assert self.server is not None
        if self.config.protocol == 3:
            return self.record is not None and self.record.established
        return self.server.session_present

    @property
    def _lost_here(self) -> bool:
        """Whether this server had a session of ours and has none now; one we were never at has lost nothing.

        Nor has one of which nothing was wanted: brokers may keep no session without subscriptions.
        """
        record = self.record
        if record is None or not record.established or self._present:
            return False
        held = record.subscriptions or self.inbound.held or self.outbound.unfinished_qos_2
        return bool(held) and (not self._elsewhere or self._at in record.servers)

    def _send(self, packet: Packet, actions: list[Action]) -> None:
        actions.append(Send(self._encode(packet)))

    def _send_bytes(self, data: bytes, actions: list[Action]) -> None:
        if data:
            actions.append(Send(data))

    def _remember(self, record: SessionRecord | None, actions: list[Action]) -> None:
        if record != self.record:
            self.record = record
            actions.append(events.Remember(record))

    def _remember_subscriptions(self, actions: list[Action]) -> None:
        assert self.record is not None
        self._remember(replace(self.record, subscriptions=self.subscriptions.known), actions)

    def _violation(self, what: str, reason: int, actions: list[Action]) -> None:
        if self.config.protocol == 5:  # 3.x knows no reasons: the connection just ends [MQTT-4.8.0-1 of 3.1.1]
            self._send(mqtt5.DisconnectPacket(reason_code=mqtt5.DisconnectReasonCode(reason)), actions)
        self._end(Close(ProtocolViolation(self.config.where, f"the broker {what}", reason=reason)), actions)

    def _end(self, close: Close, actions: list[Action], *, farewell: bool = False) -> None:
        """End the connection, perhaps with a plain DISCONNECT: no expiry in it, so the broker keeps the session."""
        if farewell:
            self._send(mqtt5.DisconnectPacket(), actions)
        self._go_offline()
        actions.append(close)

    def _take_filters(self) -> None:
        """Want other filters from here on."""
        assert self._next is not None
        self._back = None
        self.config, self._next = replace(self.config, filters=self._next.filters), None
        self.subscriptions.want(_said_by(self.config))

    def _go_offline(self) -> None:
        if self.state is SessionState.CONNECTING:
            self._known_before = True  # the session that the broker may have made is ours
        self.state = SessionState.OFFLINE
        self.server = None
        self._requests.clear()
        self._changing, self._pings, self._back = False, 0, None
        if self._next is not None:
            self._take_filters()
        # Packet ids owed name nothing after the connection: the broker sends again what we have not acknowledged.
        self.inbound.disconnect()
        self.outbound.disconnected(self._now, cut=self.cut)


def _said_by(config: SessionConfig) -> tuple[Filter, ...]:
    """The filters as the version of the protocol can say them."""
    if config.protocol == 5:
        return config.filters
    return tuple(replace(f, retain_handling=0) for f in config.filters)


_Handler: TypeAlias = Callable[..., None]

_EVENTS: Final[dict[type, _Handler]] = {
    events.Opened: Session._on_opened,
    events.Received: Session._on_received,
    events.Settled: Session._on_settled,
    events.Stored: Session._on_stored,
    events.Publish: Session._on_publish,
    events.PublishMany: Session._on_publish_many,
    events.Reading: Session._on_reading,
    events.Written: Session._on_written,
    events.Tick: Session._on_tick,
    events.Malformed: Session._on_malformed,
    events.Want: Session._on_want,
    events.Probe: Session._on_probe,
    events.Lost: Session._on_lost,
    events.Stop: Session._on_stop,
}

_CONNECTED: Final[dict[type, _Handler]] = {
    PublishRun: Session._on_publishes,
    PlainRun: Session._on_publishes,
    AnswerRun: Session._on_answers,
    mqtt5.PubRelPacket: Session._on_pubrel,
    mqtt5.PubAckPacket: Session._on_answer,
    mqtt5.PubRecPacket: Session._on_answer,
    mqtt5.PubCompPacket: Session._on_answer,
    mqtt5.PingRespPacket: Session._on_pingresp,
    mqtt5.DisconnectPacket: Session._on_disconnect,
    mqtt5.SubAckPacket: Session._on_suback,
    mqtt5.UnsubAckPacket: Session._on_unsuback,
}

#: A resumed session may deliver right after CONNACK, before SUBACK: PUBLISH is at home in both connected states.
_PACKETS: Final[dict[tuple[SessionState, type], _Handler]] = {
    (SessionState.CONNECTING, mqtt5.ConnAckPacket): Session._on_connack,
    (SessionState.CONNECTING, mqtt5.AuthPacket): Session._on_auth,
    **{(SessionState.SUBSCRIBING, kind): handler for kind, handler in _CONNECTED.items()},
    **{(SessionState.ONLINE, kind): handler for kind, handler in _CONNECTED.items()},
}

#: Packets that MQTT 3.x does not have in this direction.
_ONLY_5: Final = frozenset({mqtt5.AuthPacket, mqtt5.DisconnectPacket})
