"""What a session knows between two events, and what it can ask for: fields, invariants, actions. No event is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial

from mqtt5 import ConnAckPacket, DisconnectPacket, DisconnectReasonCode

from towline.errors import BrokerError, ProtocolViolation
from towline.mqtt.codec import Packet, encode
from towline.mqtt.events import Action, Close, Filter, Held, Remember, Send, SessionConfig, SessionRecord
from towline.mqtt.handshake import Authentication
from towline.mqtt.inbound import Inbound
from towline.mqtt.liveness import Liveness
from towline.mqtt.outbound import Outbound
from towline.mqtt.rules import check_config
from towline.mqtt.subscriptions import Request, Subscriptions

__all__ = ["Machine", "SessionState"]


class SessionState(Enum):
    """Where the connection stands."""

    OFFLINE = "offline"
    CONNECTING = "connecting"  # CONNECT sent, no CONNACK yet
    SUBSCRIBING = "subscribing"  # CONNACK seen, a SUBACK or UNSUBACK is missing; messages may already come
    ONLINE = "online"


class Machine:
    """The state of a `towline.mqtt.session.Session`, which says what it is made of and adds the events."""

    def __init__(
        self,
        config: SessionConfig,
        record: SessionRecord | None = None,
        next_number: int = 0,
        held: Mapping[int, Held] | None = None,
    ) -> None:
        check_config(config)
        self.config = config
        self.state = SessionState.OFFLINE
        #: As last given to `Remember`.
        self.record = record
        #: The server's limits of this connection, None before CONNACK.
        self.server: ConnAckPacket | None = None
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
        self._next_filters: tuple[Filter, ...] | None = None
        #: Whether those before are wanted again where the broker refuses one of them.
        self._or_back = False
        #: Those before, while the broker is asked for such a change.
        self._back: tuple[Filter, ...] | None = None
        #: Why the last change of filters was taken back; None where it was not.
        self.refusal: BrokerError | None = None
        #: The session is online, and only asks for other filters.
        self._changing = False
        #: PINGREQs of this connection without an answer: answers come in their order.
        self._pings = 0
        #: Packet id of each SUBSCRIBE or UNSUBSCRIBE without an answer → what it asked for.
        self._requests: dict[int, Request] = {}
        #: The last connection was ended by the broker, for a reason that may be something we sent.
        self.cut = False
        #: Only to see whether the broker answers this version: the connection ends at CONNACK.
        self.probing = False
        self._known_before = record is not None
        #: The server of this connection, whether what we remember is of another one, and whether it may be.
        self._at, self._elsewhere, self._perhaps_elsewhere = "", False, False
        #: Ticket of the `Deliver` that frees the packet ids of a lost session; None when that is durable.
        self._freeing: int | None = None
        #: A CONNECT has left and no CONNACK has come.
        self._unanswered = False
        self._discarding = False
        #: Times the broker called the packet id of a SUBSCRIBE in use, on this connection.
        self._ids_in_use = 0
        self._liveness = Liveness(config.connect_timeout_s)
        self._authentication = Authentication(config.authenticator, config.where)

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

    # -- what it can ask for --

    def _send(self, packet: Packet, actions: list[Action]) -> None:
        actions.append(Send(self._encode(packet)))

    def _send_bytes(self, data: bytes, actions: list[Action]) -> None:
        if data:
            actions.append(Send(data))

    def _remember(self, record: SessionRecord | None, actions: list[Action]) -> None:
        if record != self.record:
            self.record = record
            actions.append(Remember(record))

    def _remember_subscriptions(self, actions: list[Action]) -> None:
        assert self.record is not None
        self._remember(replace(self.record, subscriptions=self.subscriptions.known), actions)

    def _violation(self, what: str, reason: int, actions: list[Action]) -> None:
        if self.config.protocol == 5:  # 3.x knows no reasons: the connection just ends [MQTT-4.8.0-1 of 3.1.1]
            self._send(DisconnectPacket(reason_code=DisconnectReasonCode(reason)), actions)
        self._close(ProtocolViolation(self.config.where, f"the broker {what}", reason=reason), actions)

    def _close(
        self,
        error: BrokerError | None,
        actions: list[Action],
        *,
        fatal: bool = False,
        again_at_once: bool = False,
    ) -> None:
        self._go_offline()
        actions.append(Close(error, fatal, again_at_once))

    def _take_filters(self) -> None:
        """Want other filters from here on."""
        assert self._next_filters is not None
        self._back = None
        self.config, self._next_filters = replace(self.config, filters=self._next_filters), None
        self.subscriptions.want(_said_by(self.config))

    def _go_offline(self) -> None:
        if self._unanswered:
            self._unanswered, self._known_before = False, True  # the session it may have made is ours
        self.state = SessionState.OFFLINE
        self.server = None
        self._liveness.answered()
        self._requests.clear()
        self._changing, self._pings, self._back = False, 0, None
        if self._next_filters is not None:
            self._take_filters()
        # Packet ids owed name nothing after the connection: the broker sends again what we have not acknowledged.
        self.inbound.disconnect()
        self.outbound.disconnected()


def _said_by(config: SessionConfig) -> tuple[Filter, ...]:
    """The filters as the version of the protocol can say them."""
    if config.protocol == 5:
        return config.filters
    return tuple(replace(f, retain_handling=0) for f in config.filters)
