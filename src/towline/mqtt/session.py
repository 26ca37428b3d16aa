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
`towline.mqtt.subscriptions`, how they are asked for in `towline.mqtt.subscribing`, fields and invariants in
`towline.mqtt.machine`; here are the events of a connection.
Transitions are two tables: `_PACKETS` (connection state × packet type → method) and `_EVENTS` (event type → method).
What is not in the first is a protocol error (0x82).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import mqtt5
from mqtt5 import (
    AuthPacket,
    ConnAckPacket,
    DisconnectPacket,
    PingReqPacket,
    PingRespPacket,
    PubRelPacket,
    SubAckPacket,
    UnsubAckPacket,
)

from towline.errors import Refused, SessionUnknown, Unreachable
from towline.mqtt.codec import AnswerRun, PublishRun
from towline.mqtt.events import (
    Action,
    Close,
    Event,
    Lost,
    Malformed,
    Opened,
    Probe,
    Publish,
    PublishMany,
    Received,
    Resumed,
    Send,
    SessionLost,
    SessionRecord,
    Settled,
    Stop,
    Stored,
    Suspended,
    Tick,
    Want,
    Written,
)
from towline.mqtt.handshake import Unasked, connect_packet, forgetful, too_narrow
from towline.mqtt.inbound import AliasError
from towline.mqtt.liveness import PONG_WITHIN
from towline.mqtt.machine import SessionState
from towline.mqtt.outbound import Answer, Unexpected
from towline.mqtt.plain import PlainRun
from towline.mqtt.reasons import BLAMING
from towline.mqtt.refusals import connection_ended, connection_refused
from towline.mqtt.rules import connack_problem
from towline.mqtt.subscribing import Subscribing
from towline.mqtt.subscriptions import SubscriptionStep

__all__ = ["Session", "SessionState"]


#: Servers that a record names: where brokers point to others, new ones may come for ever.
_MOST_SERVERS: Final = 100
_PINGREQ: Final = PingReqPacket().write()


class Session(Subscribing):
    """One client identity towards one broker, across its connections.

    Args:
        config: What does not change.
        record: The durable record of the broker's session, None on a new journal.
        next_number: Number of the next message received: the end of the journal.
        held: QoS 2 packet ids the journal holds.

    Raises:
        ConfigError: The protocol version can't say what the configuration wants (TL-C50).
    """

    # -- for the driver --

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event and return what must be done, in order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        actions: list[Action] = []
        _EVENTS[type(event)](self, event, now, actions)
        if any(type(action) is Send for action in actions):
            self._liveness.sent(now)
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
        if self.keep_alive_s and self.state is not SessionState.CONNECTING:
            # Also while an answer is missing: a packet that takes long to arrive must not silence us [MQTT-3.1.2-22].
            times += [self._liveness.ping_due(self.keep_alive_s), self._liveness.pong_due(self.keep_alive_s)]
        return min(times, default=None)

    @property
    def _owes_answer(self) -> bool:
        """The broker has to say something now: CONNACK, or SUBACK unless it is us who do not read."""
        waiting = self._liveness.suspended or self._freeing is not None
        return self.state is SessionState.CONNECTING or (self.state is SessionState.SUBSCRIBING and not waiting)

    # -- events --

    def _on_opened(self, event: Opened, now: float, actions: list[Action]) -> None:
        self.state = SessionState.CONNECTING
        self.cut = False
        self._at = event.server
        last = self.record.servers[-1] if self.record and self.record.servers else ""
        self._perhaps_elsewhere = bool(event.server) and event.server != last
        # The one server there is may have got another name: then its packet ids still hold.
        self._elsewhere = self._perhaps_elsewhere and bool(last) and not event.alone
        self._liveness.opened(now)
        self._ids_in_use = 0
        if self.record is None:
            # Durable before CONNECT leaves: after a crash here the broker may hold a session that is ours.
            self._remember(SessionRecord(self.config.client_id), actions)
        self.subscriptions.step(SubscriptionStep.CONNECT)
        self._remember_subscriptions(actions)
        try:
            first = self._authentication.start()
        except Refused as error:
            self._close(error, actions, fatal=True)
            return
        self._unanswered = True
        self._send(connect_packet(self.config, first, discarding=self._discarding), actions)

    def _on_received(self, event: Received, now: float, actions: list[Action]) -> None:
        if event.items or self.state is not SessionState.CONNECTING:  # a CONNACK byte by byte is none
            self._liveness.heard(now)
        self._liveness.lives(now)
        for item in event.items:
            handler = _PACKETS.get((self.state, type(item)))
            if handler is None or (self.config.protocol < 5 and type(item) in _ONLY_5):
                kind = item.kind if isinstance(item, AnswerRun) else type(item)
                name = kind.__name__.removesuffix("Packet").removesuffix("Run").upper()
                self._violation(f"sent {name} while {self.state.value}", 0x82, actions)
            else:
                handler(self, item, now, actions)
            if self.state is SessionState.OFFLINE:
                break
        actions += self.outbound.actions(now)  # once for all answers: one write, and one sync where ids are durable
        self._hand_over(actions)

    def _hand_over(self, actions: list[Action]) -> None:
        delivery = self.inbound.hand_over()
        if self.state is not SessionState.OFFLINE:
            # Repeats of what is settled; before the delivery, whose own acknowledgements come after [MQTT-4.6.0-3].
            self._send_bytes(self.inbound.settle(self.inbound.settled), actions)
        if delivery:
            actions.append(delivery)

    def _on_settled(self, event: Settled, _now: float, actions: list[Action]) -> None:
        self._send_bytes(self.inbound.settle(event.upto), actions)

    def _on_stored(self, event: Stored, now: float, actions: list[Action]) -> None:
        self._send_bytes(self.inbound.stored(event.ticket), actions)
        if self._freeing is not None and event.ticket >= self._freeing:
            self._freeing = None
            if self.state is SessionState.SUBSCRIBING:
                self._liveness.heard(now)  # the time for the answer to SUBSCRIBE begins here
                self._take_up(now, actions)

    def _on_publish(self, event: Publish, now: float, actions: list[Action]) -> None:
        self.outbound.publish(event.token, event.message, event.expires_at)
        actions += self.outbound.actions(now)

    def _on_publish_many(self, event: PublishMany, now: float, actions: list[Action]) -> None:
        for message in event.messages:
            self.outbound.publish(message.token, message.message, message.expires_at)
        actions += self.outbound.actions(now)

    def _on_suspended(self, _event: Suspended, _now: float, _actions: list[Action]) -> None:
        self._liveness.suspended = True

    def _on_resumed(self, _event: Resumed, now: float, _actions: list[Action]) -> None:
        self._liveness.resumed(now)

    def _on_written(self, _event: Written, now: float, _actions: list[Action]) -> None:
        self._liveness.lives(now)

    def _on_tick(self, _event: Tick, now: float, actions: list[Action]) -> None:
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return
        where = self.config.where
        if self._owes_answer and now >= self._liveness.answer_due:
            within, unanswered = f"within {self.config.connect_timeout_s:g} s", self.state is SessionState.CONNECTING
            what = f"no {'CONNACK' if unanswered else 'answer to SUBSCRIBE'} {within}"
            self._go_offline()
            actions.append(Close(Unreachable("TL-M03", where, what, "Trying again."), unanswered=unanswered))
        elif now >= self._liveness.pong_due(self.keep_alive_s):
            what = f"no answer to PINGREQ within {self.keep_alive_s * PONG_WITHIN:g} s"
            self._close(Unreachable("TL-M04", where, what, "The connection is made anew."), actions)
        else:
            self._ping(now, actions)

    def _ping(self, now: float, actions: list[Action]) -> None:
        self._liveness.pinged(now)
        self._pings += 1
        actions.append(Send(_PINGREQ))

    def _on_probe(self, _event: Probe, now: float, actions: list[Action]) -> None:
        if self.state is SessionState.ONLINE:
            self._ping(now, actions)

    def _on_malformed(self, event: Malformed, _now: float, actions: list[Action]) -> None:
        self._violation(f"sent {event.what}", event.reason, actions)

    def _on_lost(self, _event: Lost, _now: float, _actions: list[Action]) -> None:
        self.cut = self.state in {SessionState.SUBSCRIBING, SessionState.ONLINE}
        self._go_offline()

    def broke(self, where: str) -> Close:
        """What `Lost`, which is given next, means for the connection where the transport itself has no words for it."""
        if self.state is not SessionState.CONNECTING:
            return Close(Unreachable("TL-M05", where, "the connection broke", "Trying again."))
        return Close(
            Unreachable("TL-M03", where, "the connection ended in place of CONNACK", "Trying again."), unanswered=True
        )

    def _on_stop(self, _event: Stop, _now: float, actions: list[Action]) -> None:
        if self.state is not SessionState.OFFLINE:
            # A plain DISCONNECT: no expiry in it, so the broker keeps the session for us.
            self._send(DisconnectPacket(), actions)
            self._close(None, actions)

    # -- connecting --

    def _on_connack(self, packet: ConnAckPacket, now: float, actions: list[Action]) -> None:
        self._unanswered = False
        if int(packet.reason_code):
            self.subscriptions.step(SubscriptionStep.REFUSED)
            self._remember_subscriptions(actions)
            self._go_offline()
            actions.append(connection_refused(packet, self.config.where))
            return
        problem = connack_problem(packet, self.config, clean_start=self._discarding or self.config.clean_start)
        if problem:
            self._violation(problem, 0x82, actions)
            return
        try:
            self._authentication.finish(packet.authentication_data or b"")
        except Refused as error:
            self._close(error, actions, fatal=True)
            return
        if narrow := too_narrow(packet, self.config.where):
            self._close(narrow, actions, fatal=True)
            return
        self.server = packet
        self.state = SessionState.SUBSCRIBING
        self._liveness.answered()
        if self.probing:
            self._send(DisconnectPacket(), actions)
            self._go_offline()
            actions.append(Close(None, again_at_once=True, answered=True))
        elif self._discarding:
            self._discarding = False
            self._send(DisconnectPacket(), actions)
            self._close(None, actions, again_at_once=True)
        elif refused := forgetful(packet, self.config):
            self._close(refused, actions, fatal=True)
        elif self._present and not self._known_before:
            self._meet_unknown_session(now, actions)
        else:
            self._enter_session(now, actions)

    def _meet_unknown_session(self, now: float, actions: list[Action]) -> None:
        choice = self.config.unknown_session
        if choice == "adopt":
            self._enter_session(now, actions)
            return
        self._send(DisconnectPacket(), actions)
        if choice == "discard":
            self._discarding = True
            self._close(None, actions, again_at_once=True)
            return
        self._remember(None, actions)
        error = SessionUnknown(
            "TL-M20",
            self.config.where,
            f'the broker holds a session for client id "{self.config.client_id}" that this journal knows nothing of',
            'Restore the journal, or set unknown_session = "adopt" to take what it has queued or "discard" to drop it.',
        )
        self._close(error, actions, fatal=True)

    def _enter_session(self, now: float, actions: list[Action]) -> None:
        self._known_before = True
        if not self.resumed:
            if self._lost_here and not self.config.clean_start:
                actions.append(SessionLost())
            self._freeing = self.inbound.forget() or self._freeing
        if self._freeing is None:
            self._take_up(now, actions)

    def _take_up(self, now: float, actions: list[Action]) -> None:
        """Go on with a session whose packet ids are known, on disk too: subscribe, and send what waits."""
        assert self.server is not None
        resumed = self.resumed
        kept = SubscriptionStep.ELSEWHERE if self._perhaps_elsewhere else SubscriptionStep.RESUMED
        kept = SubscriptionStep.PERHAPS_RESUMED if self.config.protocol == 3 else kept
        self.subscriptions.step(kept if self._present else SubscriptionStep.NEW)
        requests = self.subscriptions.ask()
        servers = tuple(s for s in self.record.servers if s != self._at) if self.record and self._at else ()
        servers = (*servers[1 - _MOST_SERVERS :], self._at) if self._at else ()
        self._remember(SessionRecord(self.config.client_id, True, self.subscriptions.known, servers), actions)
        window = self.server.receive_max if self.config.protocol == 5 else self.config.window_3
        self.outbound.connected(self.server, window, resumed=resumed)
        actions += self.outbound.actions(now)
        self._ask_all(requests, actions)

    def _on_auth(self, packet: AuthPacket, _now: float, actions: list[Action]) -> None:
        try:
            self._send(self._authentication.answer(packet), actions)
        except Unasked as error:
            self._violation(str(error), 0x82, actions)
        except Refused as error:
            self._close(error, actions, fatal=True)

    # -- messages --

    def _on_publishes(self, run: PublishRun, _now: float, actions: list[Action]) -> None:
        try:
            self.inbound.publishes(run)
        except AliasError as error:
            self._violation(str(error), 0x94, actions)

    def _on_plain(self, run: PlainRun, _now: float, _actions: list[Action]) -> None:
        self.inbound.plain(run)

    def _on_pubrel(self, packet: PubRelPacket, _now: float, actions: list[Action]) -> None:
        self._send_bytes(self.inbound.release((packet.packet_id,)), actions)

    def _on_answers(self, run: AnswerRun, now: float, actions: list[Action]) -> None:
        if run.kind is PubRelPacket:
            self._send_bytes(self.inbound.release(run.packet_ids), actions)
            return
        handler = _CONNECTED[run.kind]
        for packet in run.packets:
            handler(self, packet, now, actions)
            if self.state is SessionState.OFFLINE:
                break

    def _on_answer(self, packet: Answer, _now: float, actions: list[Action]) -> None:
        try:
            actions += self.outbound.take(packet)
        except Unexpected as error:
            self._violation(str(error), 0x82, actions)

    def _on_pingresp(self, _packet: PingRespPacket, _now: float, _actions: list[Action]) -> None:
        self._pings = max(0, self._pings - 1)
        self._liveness.answered()

    def _on_disconnect(self, packet: DisconnectPacket, _now: float, actions: list[Action]) -> None:
        if packet.session_expiry_interval is not None:
            self._violation("set a Session Expiry Interval on DISCONNECT [MQTT-3.14.2-2]", 0x82, actions)
            return
        self.cut = int(packet.reason_code) in BLAMING
        self._go_offline()
        actions.append(connection_ended(packet, self.config.client_id, self.config.where))


_Handler: TypeAlias = Callable[..., None]

_EVENTS: Final[dict[type, _Handler]] = {
    Opened: Session._on_opened,
    Received: Session._on_received,
    Settled: Session._on_settled,
    Stored: Session._on_stored,
    Publish: Session._on_publish,
    PublishMany: Session._on_publish_many,
    Suspended: Session._on_suspended,
    Resumed: Session._on_resumed,
    Written: Session._on_written,
    Tick: Session._on_tick,
    Malformed: Session._on_malformed,
    Want: Session._on_want,
    Probe: Session._on_probe,
    Lost: Session._on_lost,
    Stop: Session._on_stop,
}

_CONNECTED: Final[dict[type, _Handler]] = {
    PublishRun: Session._on_publishes,
    PlainRun: Session._on_plain,
    AnswerRun: Session._on_answers,
    PubRelPacket: Session._on_pubrel,
    mqtt5.PubAckPacket: Session._on_answer,
    mqtt5.PubRecPacket: Session._on_answer,
    mqtt5.PubCompPacket: Session._on_answer,
    PingRespPacket: Session._on_pingresp,
    DisconnectPacket: Session._on_disconnect,
    SubAckPacket: Session._on_suback,
    UnsubAckPacket: Session._on_unsuback,
}

#: A resumed session may deliver right after CONNACK, before SUBACK: PUBLISH is at home in both connected states.
_PACKETS: Final[dict[tuple[SessionState, type], _Handler]] = {
    (SessionState.CONNECTING, ConnAckPacket): Session._on_connack,
    (SessionState.CONNECTING, AuthPacket): Session._on_auth,
    **{(SessionState.SUBSCRIBING, kind): handler for kind, handler in _CONNECTED.items()},
    **{(SessionState.ONLINE, kind): handler for kind, handler in _CONNECTED.items()},
}

#: Packets that MQTT 3.x does not have in this direction.
_ONLY_5: Final = frozenset({AuthPacket, DisconnectPacket})
