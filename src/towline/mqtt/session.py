"""MQTT session as a state machine: events in, actions out.

It has no socket, thread, disk or clock. `Session.handle(event, now)` changes memory only and returns the actions that
the driver must carry out, in order; the driver reports their outcome as the next event. Two rules shape the rest:

1. **The session never acknowledges by itself.** Every received message gets the next number of one sequence, its
   offset in the journal. The acknowledgements of all messages below `n` are sent after `AckWatermark(n)`, in the order
   of arrival [MQTT-4.6.0-2, -3], [I2].
2. **State that must survive a crash is an action, not a field.** `SaveSessionRecord` carries the record of the broker's
   session; it is durable before the actions after it. `Deliver` carries messages together with the QoS 2 packet ids
   that come or go with them, so that a crash can't separate the two [I3]. The packet ids of a session that the broker
   has lost are released by a `Deliver`, and no SUBSCRIBE is sent before its `DeliveryStored`: new messages may have the
   same ids.

`towline.mqtt.inbound` and `towline.mqtt.outbound` are the two directions, this module handles the events of a
connection. Transitions are two tables: `_PACKET_HANDLERS` (connection state × packet type → method) and
`_EVENT_HANDLERS` (event type → method). A packet that is not in the first is a protocol error (0x82).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Final, TypeAlias

import mqtt5

from towline.errors import BrokerRefused, ProtocolViolation, SessionUnknown, Unreachable
from towline.mqtt import events
from towline.mqtt.codec import AckRun, Packet, PublishRun, encode
from towline.mqtt.events import Action, BrokerProtocolError, Close, Filter, Send, SessionConfig, SessionRecord
from towline.mqtt.handshake import (
    answer_challenge,
    authenticate,
    check_connack,
    connect_packet,
    connection_ended,
    connection_refused,
    subscription_refused,
    unsupported_subscription,
)
from towline.mqtt.inbound import Inbound
from towline.mqtt.outbound import Outbound, PublishAck
from towline.mqtt.plain import PlainRun
from towline.mqtt.reasons import PACKET_ERROR_CODES, PACKET_ID_IN_USE, TAKEN_OVER
from towline.mqtt.rules import check_config

#: Most servers in a record: redirects may name new ones for ever.
_MAX_SERVERS: Final = 100
_PINGREQ: Final = mqtt5.PingReqPacket().write()
#: Messages in flight towards a 3.x broker, which announces no Receive Maximum: Mosquitto drops those beyond its 20.
_WINDOW_3: Final = 20
#: Share of the keep alive after which PINGREQ is sent if nothing else was: early enough for a slow link.
_PING_AFTER_SHARE: Final = 0.75
#: Share of the keep alive for PINGRESP: a silent peer is detected within 1.5 × keep alive, 0.75 before PINGREQ.
PONG_TIMEOUT_SHARE: Final = 0.75
#: In place of `Filter.encoded_options`: the broker may have the filter or not, with any options.
UNSURE: Final = -1


@dataclass(slots=True)
class _Liveness:
    """Keep-alive state of a connection [MQTT-3.1.2-22 to -24]."""

    #: Seconds for CONNACK and SUBACK.
    answer_timeout_s: float
    #: Time of the last answer; or of the connection, or of the restart of the timeout.
    last_answer_at: float = 0.0
    last_sent_at: float = 0.0
    #: Time of the unanswered PINGREQ, or of the last activity since; None without one.
    unanswered_ping_at: float | None = None
    #: Reading is paused: the missing answer may be among the unread bytes.
    reading_suspended: bool = False

    def mark_alive(self, now: float) -> None:
        """Note activity of the peer: it sends, or accepts outgoing bytes, however long a packet takes."""
        if self.unanswered_ping_at is not None:
            self.unanswered_ping_at = now

    def set_reading(self, now: float, *, enabled: bool) -> None:
        """Note that reading was paused or resumed: the missing answer may be among the unread bytes."""
        self.reading_suspended = not enabled
        if enabled:
            self.last_answer_at = now
            self.mark_alive(now)

    @property
    def answer_deadline(self) -> float:
        """Time at which a pending CONNACK or SUBACK is too late."""
        return self.last_answer_at + self.answer_timeout_s

    def ping_deadline(self, keep_alive_s: int) -> float:
        """Return the time at which a PINGREQ must be sent."""
        return self.last_sent_at + keep_alive_s * _PING_AFTER_SHARE

    def pong_deadline(self, keep_alive_s: int) -> float:
        """Return the time at which PINGRESP is too late."""
        if self.unanswered_ping_at is None or self.reading_suspended:
            return math.inf
        return self.unanswered_ping_at + keep_alive_s * PONG_TIMEOUT_SHARE


class Subscriptions:
    """Topic filters of one session at the broker, across connections.

    A filter wrongly taken for subscribed means silence for ever. A filter wrongly taken for unsubscribed means unwanted
    messages. So the durable record never claims more than we know: a filter that a packet may change is unsure before
    the packet is sent, and only the answer makes it sure again. An unsure filter is requested again with the next
    connection, which does no harm [MQTT-3.8.4-3], [MQTT-3.10.4-5] except for retained messages: with Retain Handling 0
    they would all come a second time. So a filter that we have requested before has Retain Handling 1, "only for a new
    subscription": after the loss of a session they still come. MQTT 3.x has no Retain Handling.

    Args:
        filters: Requested filters.
        known_options: Topic filter → options, as in the durable record.
    """

    def __init__(self, filters: Iterable[Filter], known_options: Mapping[str, int]) -> None:
        self._filters = {f.pattern: f for f in filters}
        #: Topic filter → `Filter.encoded_options` or `UNSURE`. Durable before any packet that depends on it is sent;
        #: replaced with each step and never changed, so that a record can hold it.
        self.known_options = dict(known_options)
        self._options_before_connect = self.known_options

    def expect_connack(self) -> None:
        """Mark all subscriptions unsure before CONNECT: the broker may have lost the session and create an empty one.

        After a crash before CONNACK, the next CONNACK would say Session Present of the empty session.
        """
        self._options_before_connect = self.known_options
        self.mark_unsure()

    def mark_unsure(self) -> None:
        """Mark all subscriptions unsure: another client had the session, or the server may be another one."""
        self.known_options = dict.fromkeys(self.known_options, UNSURE)

    def restore_options(self) -> None:
        """Restore the options from before CONNECT: CONNACK confirmed the session, or refused the connection."""
        self.known_options = self._options_before_connect

    def clear_options(self) -> None:
        """Clear all subscriptions: CONNACK reported no session."""
        self.known_options = {}

    def pending_changes(self) -> tuple[list[Filter], list[str]]:
        """Return the filters to subscribe to and the topic filters to unsubscribe from, and mark them unsure.

        They stay unsure even if the packet can't be sent: the broker may apply it though its answer never comes.
        """
        options = self.known_options
        changed_filters = [f for f in self._filters.values() if options.get(f.pattern) != f.encoded_options]
        surplus = [pattern for pattern in options if pattern not in self._filters]
        filters = list(map(self._with_retain_handling, changed_filters))
        self.known_options = options | dict.fromkeys([*(f.pattern for f in changed_filters), *surplus], UNSURE)
        return filters, surplus

    def _with_retain_handling(self, topic_filter: Filter) -> Filter:
        if topic_filter.retain_handling is not None:
            return topic_filter
        return replace(topic_filter, retain_handling=int(topic_filter.pattern in self.known_options))

    def confirm_granted(self, patterns: Iterable[str]) -> None:
        """Record the filters that SUBACK granted, with the requested options."""
        self.known_options = self.known_options | {p: self._filters[p].encoded_options for p in patterns}

    def confirm_removed(self, patterns: Collection[str]) -> None:
        """Remove the filters that UNSUBACK confirmed; a refused one stays unsure."""
        self.known_options = {p: options for p, options in self.known_options.items() if p not in patterns}


class SessionState(Enum):
    """State of the connection."""

    OFFLINE = "offline"
    CONNECTING = "connecting"  # CONNECT sent, no CONNACK yet
    SUBSCRIBING = "subscribing"  # CONNACK received, a SUBACK or UNSUBACK pending; messages may come
    ONLINE = "online"


class Session:
    """Session of one client id with one broker, across connections.

    Args:
        config: Settings of the session.
        record: Durable record of the broker's session, None on a new journal.
        next_number: Number of the next received message: the end of the journal.
        unreleased_messages: QoS 2 packet ids in the journal.

    Raises:
        ConfigError: The protocol version does not support the configuration (TL-C50).
    """

    def __init__(
        self,
        config: SessionConfig,
        record: SessionRecord | None = None,
        next_number: int = 0,
        unreleased_messages: Mapping[int, events.UnreleasedMessage] | None = None,
    ) -> None:
        check_config(config)
        self.config = config
        self.state = SessionState.OFFLINE
        #: As in the last `SaveSessionRecord`.
        self.record = record
        #: CONNACK with the server's limits; None before it.
        self.server_limits: mqtt5.ConnAckPacket | None = None
        self._encode: Callable[[Packet], bytes] = partial(encode, version=config.protocol)
        self.inbound = Inbound(
            next_number,
            unreleased_messages,
            receive_maximum=config.receive_maximum,
            topic_alias_maximum=config.topic_alias_maximum,
            has_reason_codes=config.protocol == 5,
        )
        self.outbound = Outbound(self._encode, save_in_flight=config.durable_ids, require_qos2=config.exactly_once)
        self.subscriptions = Subscriptions(_protocol_filters(config), record.subscriptions if record else {})
        #: Topic filters to unsubscribe when every new one is granted.
        self._surplus_patterns: list[str] = []
        #: Number of PINGREQs of this connection without an answer; answers come in their order.
        self._unanswered_pings = 0
        #: Packet id → SUBSCRIBE or UNSUBSCRIBE without an answer.
        self._pending_requests: dict[int, mqtt5.SubscribePacket | mqtt5.UnsubscribePacket] = {}
        #: The broker ended the last connection, perhaps because of a packet of ours.
        self.ended_by_broker = False
        #: The connection only tests the protocol version and ends at CONNACK.
        self.probing_version = False
        self._session_known = record is not None
        #: Server of this connection; whether the record is of another one, and whether it may be.
        self._server, self._on_other_server, self._maybe_on_other_server = "", False, False
        #: Id of the `Deliver` that frees the packet ids of a lost session; None when that is durable.
        self._freeing_delivery_id: int | None = None
        self._discarding_session = False
        self._liveness = _Liveness(config.connect_timeout_s)
        #: Time of the current event.
        self._event_time = 0.0

    # -- for the driver --

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Handle one event and return the actions to carry out, in order.

        Args:
            event: The event.
            now: Seconds on a monotonic clock.
        """
        actions: list[Action] = []
        self._event_time = now
        _EVENT_HANDLERS[type(event)](self, event, now, actions)
        if self.outbound.culprit_finder.candidate_cuts:
            for action in actions:
                if isinstance(action, events.PublishAcknowledged):
                    self.outbound.culprit_finder.clear_token(action.token)
        for action in actions:
            if type(action) is Send:
                self._liveness.last_sent_at = now
                break
        return actions

    @property
    def window_full(self) -> bool:
        """True if the broker has used up its Receive Maximum: do not read."""
        return self.inbound.unacknowledged_count >= self.config.receive_maximum

    def deadline(self) -> float | None:
        """Return the time at which `Tick` is due on the clock of `handle`; None for never."""
        if self.state is SessionState.OFFLINE:
            return None
        deadlines = [self._liveness.answer_deadline] if self._awaits_answer else []
        keep_alive_s = self.keep_alive_s
        if keep_alive_s and self.state is not SessionState.CONNECTING:
            # Also while an answer is pending: a packet that takes long must not stop our pings [MQTT-3.1.2-22].
            deadlines += [self._liveness.ping_deadline(keep_alive_s), self._liveness.pong_deadline(keep_alive_s)]
        if self.outbound.next_send_at is not None:
            deadlines.append(self.outbound.next_send_at)
        return min(deadlines, default=None)

    @property
    def _awaits_answer(self) -> bool:
        """True while CONNACK is due, or SUBACK unless our own reading is paused."""
        must_wait = self._liveness.reading_suspended or self._freeing_delivery_id is not None
        return self.state is SessionState.CONNECTING or (self.state is SessionState.SUBSCRIBING and not must_wait)

    @property
    def pings_answered(self) -> bool:
        """True if every PINGREQ is answered: the broker has read everything sent before the last one."""
        return self._unanswered_pings == 0

    @property
    def keep_alive_s(self) -> int:
        """Effective keep alive in seconds: the shorter of ours and the server's; 0 if neither has one.

        The server's value must be kept [MQTT-3.2.2-21], and a PINGREQ may be sent at any time. So a longer server
        value, or none (0), does not delay the detection of a dead connection.
        """
        server_keep_alive_s = self.server_limits.server_keep_alive if self.server_limits else None
        return min(filter(None, (self.config.keep_alive_s, server_keep_alive_s)), default=0)

    # -- events --

    def _on_connection_opened(self, event: events.ConnectionOpened, now: float, actions: list[Action]) -> None:
        self.ended_by_broker, self.outbound.culprit_token = False, None
        self._server = event.server_name
        last_server = self.record.servers[-1] if self.record and self.record.servers else ""
        self._maybe_on_other_server = bool(event.server_name) and event.server_name != last_server
        # The only server may have got another name: then its packet ids are still valid.
        self._on_other_server = self._maybe_on_other_server and bool(last_server) and not event.is_only_server
        self._liveness = _Liveness(self.config.connect_timeout_s, last_answer_at=now)
        if event.config is not None:
            self.config = event.config
        if self.record is None:
            # Durable before CONNECT is sent: after a crash here the broker may have a session of ours.
            self._save_record(SessionRecord(self.config.client_id), actions)
        self.subscriptions.expect_connack()
        self._save_subscriptions(actions)
        try:
            auth_data = authenticate(self.config, lambda method: method.start())
        except BrokerRefused as error:
            self._close(Close(error, fatal=True), actions)
            return
        self.state = SessionState.CONNECTING
        self._send(connect_packet(self.config, auth_data, discard_session=self._discarding_session), actions)

    def _on_packets_received(self, event: events.PacketsReceived, now: float, actions: list[Action]) -> None:
        if event.items or self.state is not SessionState.CONNECTING:  # an incomplete CONNACK is no answer
            self._liveness.last_answer_at = now
        self._liveness.mark_alive(now)
        for item in event.items:
            handler = _PACKET_HANDLERS.get((self.state, type(item)))
            if handler is None or (self.config.protocol < 5 and type(item) in _MQTT5_PACKETS):
                packet_type = item.packet_type if isinstance(item, AckRun) else type(item)
                name = packet_type.__name__.removesuffix("Packet").removesuffix("Run").upper()
                self._end_with_violation(f"sent {name} while {self.state.value}", 0x82, actions)
                break
            try:
                handler(self, item, now, actions)
            except BrokerProtocolError as error:
                self._end_with_violation(str(error), error.reason, actions)
            except BrokerRefused as error:
                self._close(Close(error, fatal=True), actions)
            if self.state is SessionState.OFFLINE:
                break
        if not self.outbound.idle:
            actions += self.outbound.actions(now)  # once for all acks: one write and one sync
        delivery = self.inbound.next_delivery()
        if self.state is not SessionState.OFFLINE and (
            data := self.inbound.raise_ack_watermark(self.inbound.ack_watermark)
        ):
            # Acks of repeats; before the delivery, whose own acks come after [MQTT-4.6.0-3].
            actions.append(Send(data))
        if delivery:
            actions.append(delivery)

    def _on_ack_watermark(self, event: events.AckWatermark, _now: float, actions: list[Action]) -> None:
        if data := self.inbound.raise_ack_watermark(event.end_number):
            actions.append(Send(data))

    def _on_delivery_stored(self, event: events.DeliveryStored, now: float, actions: list[Action]) -> None:
        self._send_bytes(self.inbound.confirm_stored(event.delivery_id), actions)
        if self._freeing_delivery_id is not None and event.delivery_id >= self._freeing_delivery_id:
            self._freeing_delivery_id = None
            if self.state is SessionState.SUBSCRIBING:
                self._liveness.last_answer_at = now  # the timeout of SUBSCRIBE begins here
                self._start_session(now, actions)

    def _on_publish(self, event: events.Publish, now: float, actions: list[Action]) -> None:
        self._on_publish_many(events.PublishMany((event,)), now, actions)

    def _on_publish_many(self, event: events.PublishMany, now: float, actions: list[Action]) -> None:
        for message in event.messages:
            self.outbound.publish(message.token, message.message, message.expires_at)
        actions += self.outbound.actions(now)

    def _on_reading_toggled(self, event: events.ReadingToggled, now: float, _actions: list[Action]) -> None:
        self._liveness.set_reading(now, enabled=event.enabled)

    def _on_bytes_written(self, _event: events.BytesWritten, now: float, _actions: list[Action]) -> None:
        self._liveness.mark_alive(now)

    def _on_tick(self, _event: events.Tick, now: float, actions: list[Action]) -> None:
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return
        location = self.config.location
        if self._awaits_answer and now >= self._liveness.answer_deadline:
            timeout_text = f"within {self.config.connect_timeout_s:g} s"
            no_connack = self.state is SessionState.CONNECTING
            problem = f"no {'CONNACK' if no_connack else 'answer to SUBSCRIBE'} {timeout_text}"
            error = Unreachable("TL-M03", location, problem, "Trying again.")
            self._close(Close(error, no_connack=no_connack), actions)
        elif now >= self._liveness.pong_deadline(self.keep_alive_s):
            problem = f"no answer to PINGREQ within {self.keep_alive_s * PONG_TIMEOUT_SHARE:g} s"
            self._close(Close(Unreachable("TL-M04", location, problem, "Reconnecting.")), actions)
        elif self.outbound.next_send_at is not None and now >= self.outbound.next_send_at:
            actions += self.outbound.actions(now)
        else:
            self._send_ping(now, actions)

    def _send_ping(self, now: float, actions: list[Action]) -> None:
        if self._liveness.unanswered_ping_at is None:
            self._liveness.unanswered_ping_at = now
        self._unanswered_pings += 1
        actions.append(Send(_PINGREQ))

    def _on_ping_request(self, _event: events.PingRequest, now: float, actions: list[Action]) -> None:
        if self.state is SessionState.ONLINE:
            self._send_ping(now, actions)

    def _on_decode_failed(self, event: events.DecodeFailed, _now: float, actions: list[Action]) -> None:
        self._end_with_violation(f"sent {event.problem}", event.reason, actions)

    def _on_connection_lost(self, _event: events.ConnectionLost, _now: float, _actions: list[Action]) -> None:
        self.ended_by_broker = self.state in {SessionState.SUBSCRIBING, SessionState.ONLINE}
        self._go_offline()

    def connection_break(self, location: str) -> Close:
        """Return the `Close` for a broken transport without an error of its own; `ConnectionLost` follows."""
        if self.state is not SessionState.CONNECTING:
            return Close(Unreachable("TL-M05", location, "the connection broke", "Trying again."))
        error = Unreachable("TL-M03", location, "the connection ended in place of CONNACK", "Trying again.")
        return Close(error, no_connack=True)

    def _on_stop(self, _event: events.Stop, _now: float, actions: list[Action]) -> None:
        if self.state is not SessionState.OFFLINE:
            self._close(Close(None), actions, disconnect=True)

    # -- connecting --

    def _on_connack(self, packet: mqtt5.ConnAckPacket, now: float, actions: list[Action]) -> None:
        self.state, self.server_limits = SessionState.SUBSCRIBING, packet
        if int(packet.reason_code):
            self.subscriptions.restore_options()
            self._save_subscriptions(actions)
            self._close(connection_refused(packet, self.config.location), actions)
            return
        check_connack(packet, self.config, discard_session=self._discarding_session)
        if self.probing_version:
            self._close(Close(None, reconnect_at_once=True, version_confirmed=True), actions, disconnect=True)
        elif self._discarding_session:
            self._discarding_session = False
            self._close(Close(None, reconnect_at_once=True), actions, disconnect=True)
        elif self._session_present and not self._session_known:
            self._meet_unknown_session(now, actions)
        else:
            self._enter_session(now, actions)

    def _meet_unknown_session(self, now: float, actions: list[Action]) -> None:
        unknown_session = self.config.unknown_session
        if unknown_session == "adopt":
            self._enter_session(now, actions)
            return
        if unknown_session == "discard":
            self._discarding_session = True
            self._close(Close(None, reconnect_at_once=True), actions, disconnect=True)
            return
        self._save_record(None, actions)
        error = SessionUnknown(
            "TL-M20",
            self.config.location,
            f'the broker has a session of client id "{self.config.client_id}" that this journal does not know',
            'Restore the journal, or set unknown_session = "adopt" to get its messages, or "discard" to drop them.',
        )
        self._close(Close(error, fatal=True), actions, disconnect=True)

    def _enter_session(self, now: float, actions: list[Action]) -> None:
        self._session_known = True
        if not self.session_resumed:
            if self._session_lost_here and not self.config.clean_start:
                actions.append(events.SessionLost())
            self._freeing_delivery_id = self.inbound.drop_session_state() or self._freeing_delivery_id
        if self._freeing_delivery_id is None:
            self._start_session(now, actions)

    def _start_session(self, now: float, actions: list[Action]) -> None:
        """Continue a session whose packet ids are durable: subscribe, and send the waiting messages."""
        assert self.server_limits is not None
        session_resumed = self.session_resumed
        if not self._session_present:
            self.subscriptions.clear_options()
        elif not (self._maybe_on_other_server or self.config.protocol == 3):  # MQTT 3.1 lacks Session Present
            self.subscriptions.restore_options()
        subscription_changes = self.subscriptions.pending_changes()
        servers = tuple(s for s in self.record.servers if s != self._server) if self.record and self._server else ()
        servers = (*servers[1 - _MAX_SERVERS :], self._server) if self._server else ()
        record = SessionRecord(self.config.client_id, True, self.subscriptions.known_options, servers)
        self._save_record(record, actions)
        window = self.server_limits.receive_max if self.config.protocol == 5 else _WINDOW_3
        self.outbound.start_connection(self.server_limits, window, resumed=session_resumed, now=now)
        actions += self.outbound.actions(now)
        self._request_subscriptions(*subscription_changes, actions)

    def _on_auth(self, packet: mqtt5.AuthPacket, _now: float, actions: list[Action]) -> None:
        self._send(answer_challenge(packet, self.config), actions)

    # -- subscribing --

    def _request_subscriptions(self, filters: list[Filter], surplus_patterns: list[str], actions: list[Action]) -> None:
        """Send SUBSCRIBE for these filters, and UNSUBSCRIBE for the surplus ones once all are granted."""
        assert self.server_limits is not None
        if error := unsupported_subscription(self.server_limits, filters, self.config.location):
            self._close(Close(error, fatal=True), actions, disconnect=True)
            return
        # After a refused filter the subscriptions of before stay, for the settings of before.
        self._surplus_patterns = surplus_patterns
        if not self.config.durable:  # a gap is better than a message for each of two filters [MQTT-3.3.4-2]
            self._unsubscribe(actions)
        for identifier in dict.fromkeys(f.identifier for f in filters):  # one each [MQTT 5 section 3.8.2.1.2]
            self._subscribe([f.topic_filter() for f in filters if f.identifier == identifier], identifier, actions)
        self._come_online(actions)

    def _subscribe(self, filters: list[mqtt5.TopicFilter], identifier: int | None, actions: list[Action]) -> None:
        self._request(mqtt5.SubscribePacket(self.outbound.new_id(), filters, subscription_id=identifier), actions)

    def _unsubscribe(self, actions: list[Action]) -> None:
        if self._surplus_patterns:
            self._request(mqtt5.UnsubscribePacket(self.outbound.new_id(), self._surplus_patterns), actions)
        self._surplus_patterns = []

    def _request(self, packet: mqtt5.SubscribePacket | mqtt5.UnsubscribePacket, actions: list[Action]) -> None:
        if self.server_limits is None:  # an earlier one was too large
            return
        data, limit = self._encode(packet), self.server_limits.max_packet_size
        if limit is None or len(data) <= limit:
            self.outbound.reserved_ids.add(packet.packet_id)
            self._pending_requests[packet.packet_id] = packet
            actions.append(Send(data))
            return
        problem = f"the broker takes packets of {limit:,} bytes, our subscription has {len(data):,} [MQTT-3.2.2-15]"
        error = BrokerRefused("TL-M16", self.config.location, problem, "Subscribe to fewer filters.")
        self._close(Close(error, fatal=True), actions)

    def _pop_request(self, packet_id: int) -> mqtt5.SubscribePacket | mqtt5.UnsubscribePacket | None:
        self.outbound.reserved_ids.discard(packet_id)
        return self._pending_requests.pop(packet_id, None)

    def _on_suback(self, packet: mqtt5.SubAckPacket, _now: float, actions: list[Action]) -> None:
        request = self._pop_request(packet.packet_id)
        if not isinstance(request, mqtt5.SubscribePacket) or len(request.topic_filters) != len(packet.reason_codes):
            raise BrokerProtocolError("sent a SUBACK that answers no SUBSCRIBE of ours [MQTT-3.9.3-1]")
        for topic_filter, code in zip(request.topic_filters, map(int, packet.reason_codes), strict=True):
            if error := subscription_refused(topic_filter, code, self.config.location):
                self._close(Close(error, fatal=code != PACKET_ID_IN_USE), actions, disconnect=True)
                return
        self.subscriptions.confirm_granted(topic_filter.pattern for topic_filter in request.topic_filters)
        self._save_subscriptions(actions)
        self._come_online(actions)

    def _on_unsuback(self, packet: mqtt5.UnsubAckPacket, _now: float, actions: list[Action]) -> None:
        if packet.packet_id not in self._pending_requests:
            return  # not ours
        request, codes = self._pop_request(packet.packet_id), packet.reason_codes
        has_codes = self.config.protocol == 5  # MQTT 3.x can't refuse
        if not isinstance(request, mqtt5.UnsubscribePacket) or (has_codes and len(request.patterns) != len(codes)):
            raise BrokerProtocolError("sent an UNSUBACK that answers no UNSUBSCRIBE of ours [MQTT-3.11.3-1]")
        refused = {pattern for pattern, code in zip(request.patterns, codes, strict=False) if int(code) >= 0x80}
        self.subscriptions.confirm_removed(set(request.patterns) - refused)
        self._save_subscriptions(actions)
        self._come_online(actions)

    def _come_online(self, actions: list[Action]) -> None:
        if self.state is not SessionState.SUBSCRIBING or self._pending_requests:
            return
        if self._surplus_patterns:
            self._unsubscribe(actions)
            return
        self.state = SessionState.ONLINE
        actions.append(events.Online(session_resumed=self.session_resumed))

    # -- messages --

    def _on_publish_run(self, run: PublishRun | PlainRun, _now: float, _actions: list[Action]) -> None:
        self.inbound.take_publishes(run)

    def _on_pubrel(self, packet: mqtt5.PubRelPacket, _now: float, actions: list[Action]) -> None:
        self._send_bytes(self.inbound.take_pubrels((packet.packet_id,)), actions)

    def _on_ack_run(self, run: AckRun, now: float, actions: list[Action]) -> None:
        if run.packet_type is mqtt5.PubRelPacket:
            self._send_bytes(self.inbound.take_pubrels(run.packet_ids), actions)
            return
        handler = _CONNECTED_HANDLERS[run.packet_type]
        for packet in run.packets:
            handler(self, packet, now, actions)

    def _on_publish_ack(self, packet: PublishAck, _now: float, actions: list[Action]) -> None:
        actions += self.outbound.take_ack(packet)

    def _on_pingresp(self, _packet: mqtt5.PingRespPacket, _now: float, _actions: list[Action]) -> None:
        self._unanswered_pings = max(0, self._unanswered_pings - 1)
        self._liveness.unanswered_ping_at = None

    def _on_disconnect(self, packet: mqtt5.DisconnectPacket, _now: float, actions: list[Action]) -> None:
        if packet.session_expiry_interval is not None:
            raise BrokerProtocolError("set a Session Expiry Interval on DISCONNECT [MQTT-3.14.2-2]")
        self.ended_by_broker = int(packet.reason_code) in PACKET_ERROR_CODES
        if int(packet.reason_code) == TAKEN_OVER:  # its session may be new and empty though Session Present is set
            self.subscriptions.mark_unsure()
            self._save_subscriptions(actions)
        self._close(connection_ended(packet, self.config.client_id, self.config.location), actions)

    # -- session state and records --

    @property
    def session_resumed(self) -> bool:
        """True if the broker kept the recorded session; a session at another server does not count."""
        return self._session_present and not self._on_other_server

    @property
    def _session_present(self) -> bool:
        """True if the broker has a session of this client id. MQTT 3.1 can't report it: then the record decides."""
        assert self.server_limits is not None
        if self.config.protocol == 3:
            return self.record is not None and self.record.established
        return self.server_limits.session_present

    @property
    def _session_lost_here(self) -> bool:
        """True if this server had our session and lost it; a server we never used has lost nothing."""
        record = self.record
        if record is None or not record.established or self._session_present:
            return False
        # Brokers may drop sessions without subscriptions.
        had_state = record.subscriptions or self.inbound.unreleased_messages or self.outbound.unfinished_qos_2
        return bool(had_state) and (not self._on_other_server or self._server in record.servers)

    def _send(self, packet: Packet, actions: list[Action]) -> None:
        actions.append(Send(self._encode(packet)))

    def _send_bytes(self, data: bytes, actions: list[Action]) -> None:
        if data:
            actions.append(Send(data))

    def _save_record(self, record: SessionRecord | None, actions: list[Action]) -> None:
        if record != self.record:
            self.record = record
            actions.append(events.SaveSessionRecord(record))

    def _save_subscriptions(self, actions: list[Action]) -> None:
        assert self.record is not None
        self._save_record(replace(self.record, subscriptions=self.subscriptions.known_options), actions)

    def _end_with_violation(self, problem: str, reason: int, actions: list[Action]) -> None:
        if self.config.protocol == 5:  # 3.x has no reason codes: just close [MQTT-4.8.0-1 of 3.1.1]
            self._send(mqtt5.DisconnectPacket(reason_code=mqtt5.DisconnectReasonCode(reason)), actions)
        self._close(Close(ProtocolViolation(self.config.location, f"the broker {problem}", reason=reason)), actions)

    def _close(self, close: Close, actions: list[Action], *, disconnect: bool = False) -> None:
        """End the connection, optionally with DISCONNECT: it carries no expiry, so the broker keeps the session."""
        if disconnect:
            self._send(mqtt5.DisconnectPacket(), actions)
        self._go_offline()
        actions.append(close)

    def _go_offline(self) -> None:
        if self.state is SessionState.CONNECTING:
            self._session_known = True  # the broker may have created our session
        self.state = SessionState.OFFLINE
        self.server_limits = None
        self._pending_requests.clear()
        self._surplus_patterns, self._unanswered_pings = [], 0
        # Pending packet ids end with the connection: the broker sends unacknowledged messages again.
        self.inbound.drop_connection_state()
        self.outbound.end_connection(self._event_time, ended_by_broker=self.ended_by_broker)


def _protocol_filters(config: SessionConfig) -> tuple[Filter, ...]:
    """Return the filters with the options that the protocol version supports."""
    if config.protocol == 5:
        return config.filters
    return tuple(replace(f, retain_handling=0) for f in config.filters)


_Handler: TypeAlias = Callable[..., None]

_EVENT_HANDLERS: Final[dict[type, _Handler]] = {
    events.ConnectionOpened: Session._on_connection_opened,
    events.PacketsReceived: Session._on_packets_received,
    events.AckWatermark: Session._on_ack_watermark,
    events.DeliveryStored: Session._on_delivery_stored,
    events.Publish: Session._on_publish,
    events.PublishMany: Session._on_publish_many,
    events.ReadingToggled: Session._on_reading_toggled,
    events.BytesWritten: Session._on_bytes_written,
    events.Tick: Session._on_tick,
    events.DecodeFailed: Session._on_decode_failed,
    events.PingRequest: Session._on_ping_request,
    events.ConnectionLost: Session._on_connection_lost,
    events.Stop: Session._on_stop,
}

_CONNECTED_HANDLERS: Final[dict[type, _Handler]] = {
    PublishRun: Session._on_publish_run,
    PlainRun: Session._on_publish_run,
    AckRun: Session._on_ack_run,
    mqtt5.PubRelPacket: Session._on_pubrel,
    mqtt5.PubAckPacket: Session._on_publish_ack,
    mqtt5.PubRecPacket: Session._on_publish_ack,
    mqtt5.PubCompPacket: Session._on_publish_ack,
    mqtt5.PingRespPacket: Session._on_pingresp,
    mqtt5.DisconnectPacket: Session._on_disconnect,
    mqtt5.SubAckPacket: Session._on_suback,
    mqtt5.UnsubAckPacket: Session._on_unsuback,
}

#: A resumed session may deliver between CONNACK and SUBACK: PUBLISH is valid in both connected states.
_PACKET_HANDLERS: Final[dict[tuple[SessionState, type], _Handler]] = {
    (SessionState.CONNECTING, mqtt5.ConnAckPacket): Session._on_connack,
    (SessionState.CONNECTING, mqtt5.AuthPacket): Session._on_auth,
    **{(SessionState.SUBSCRIBING, kind): handler for kind, handler in _CONNECTED_HANDLERS.items()},
    **{(SessionState.ONLINE, kind): handler for kind, handler in _CONNECTED_HANDLERS.items()},
}

#: Packets that MQTT 3.x does not have in this direction.
_MQTT5_PACKETS: Final = frozenset({mqtt5.AuthPacket, mqtt5.DisconnectPacket})
