"""The MQTT session as a value machine: events in, actions out.

No socket, thread, disk or clock lives here. `Session.handle(event, now)` changes memory only and returns what must be
done, in order; whoever drives it does that and feeds the outcome back as the next event. Two rules shape the rest:

1. **The session never acknowledges by itself.** Every message received gets the next number of one sequence, the
   offset it will have in the journal. The acknowledgements of all messages below `n` leave when `Settled(n)` says that
   they are safe, in the order of arrival [MQTT-4.6.0-2, -3], [I2].
2. **What must survive a crash is an action, not a field.** `Remember` carries the record of the broker's session; it is
   durable before the actions after it are carried out.

Transitions are two tables: `_PACKETS` (connection state × packet type → method) and `_EVENTS` (event type → method).
What is not in the first is a protocol error (0x82).
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeAlias

import mqtt5
from mqtt5 import (
    ConnAckPacket,
    ConnectPacket,
    DisconnectPacket,
    DisconnectReasonCode,
    PingReqPacket,
    PingRespPacket,
    PubAckPacket,
    PublishPacket,
    QoS,
    SubAckPacket,
    SubscribePacket,
    UnsubAckPacket,
    UnsubscribePacket,
)

from towline.errors import BrokerError, ProtocolViolation, Refused, SessionUnknown, TakenOver, Unreachable
from towline.mqtt.codec import PublishRun
from towline.mqtt.events import (
    Acknowledged,
    Action,
    Close,
    Deliver,
    Event,
    Filter,
    Lost,
    Online,
    Opened,
    Publish,
    Received,
    Remember,
    Resumed,
    Send,
    SessionConfig,
    SessionLost,
    SessionRecord,
    Settled,
    Stop,
    Suspended,
    Tick,
)
from towline.mqtt.reasons import CONNECT_ADVICE, reason_words

__all__ = ["Session", "State"]


class State(Enum):
    """Where the connection stands."""

    OFFLINE = "offline"
    CONNECTING = "connecting"  # CONNECT sent, no CONNACK yet
    SUBSCRIBING = "subscribing"  # CONNACK seen, a SUBACK or UNSUBACK is missing; messages may already come
    ONLINE = "online"


@dataclass(slots=True)
class _Pending:
    """Acknowledgements owed for one delivered run."""

    #: One big-endian 32-bit word each: type, length 2, packet id.
    words: array[int]
    #: Sequence numbers of the words, ascending; as long as `words`.
    numbers: Sequence[int]


@dataclass(slots=True)
class _Outbound:
    token: int
    packet: PublishPacket
    #: Sent at least once: a resend carries DUP [MQTT-3.3.1-1].
    sent: bool = False


#: PUBACK and PUBREC with reason 0 in their short form, by QoS, before the packet id is added.
_ACK_WORD: Final = {1: 0x40020000, 2: 0x50020000}
_PINGREQ: Final = PingReqPacket().write()
#: Share of the keep alive after which we send PINGREQ when nothing else went out: early enough for a slow link.
_PING_AFTER: Final = 0.75
#: A silent peer is found within 1.5 × keep alive: 0.75 until the PINGREQ and as much for its answer.
_PONG_WITHIN: Final = 0.75
_MAX_PACKET_ID: Final = 65535


class Session:
    """One client identity towards one broker, across its connections.

    Args:
        config: What does not change.
        record: The durable record of the broker's session, None on a new journal.
        next_number: Sequence number of the next message received: the end of the journal.
    """

    def __init__(self, config: SessionConfig, record: SessionRecord | None = None, next_number: int = 0) -> None:
        self.config = config
        self.state = State.OFFLINE
        #: As last given to `Remember`.
        self.record = record
        #: Grows by one a message, never goes back.
        self.next_number = next_number
        #: Everything below may be acknowledged. Never above `next_number`, never goes back.
        self.settled = next_number
        #: The server's limits of this connection, None before CONNACK.
        self.server: ConnAckPacket | None = None
        #: Times the broker had more unacknowledged messages open than Receive Maximum allows [MQTT 5 section 4.9].
        self.overruns = 0
        #: Runs in order of arrival; all numbers at or above `settled`. Empty while offline.
        self._pending: deque[_Pending] = deque()
        self._unacknowledged = 0
        #: Packet ids in use by us → what they stand for; never the broker's ids [MQTT-2.2.1-3].
        self._outbound: dict[int, _Outbound] = {}
        self._queue: deque[_Outbound] = deque()
        self._requests: dict[int, tuple[Filter, ...] | tuple[str, ...]] = {}
        self._last_id = 0
        self._known_before = record is not None
        self._discarding = False
        self._suspended = False
        self._opened_at = 0.0
        self._sent_at = 0.0
        self._ping_at: float | None = None

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
            self._sent_at = now
        return actions

    @property
    def unacknowledged(self) -> int:
        """Messages of QoS > 0 received on this connection and not acknowledged."""
        return self._unacknowledged

    @property
    def outbound(self) -> int:
        """Messages to publish that the broker has not acknowledged."""
        return len(self._queue) + len(self._outbound)

    @property
    def window_full(self) -> bool:
        """The broker may send nothing more, or sends against the rules: do not read."""
        return self._unacknowledged >= self.config.receive_maximum

    @property
    def keep_alive_s(self) -> int:
        """Seconds in force: the server's value if it gave one [MQTT-3.2.2-21]; 0 for none."""
        given = self.server.server_keep_alive if self.server else None
        return self.config.keep_alive_s if given is None else given

    def deadline(self) -> float | None:
        """When `Tick` is due on the clock of `handle`, None for never."""
        if self.state is State.OFFLINE:
            return None
        if self.state is State.CONNECTING:
            return self._opened_at + self.config.connect_timeout_s
        keep_alive = self.keep_alive_s
        if not keep_alive:
            return None
        if self._ping_at is not None and not self._suspended:
            return self._ping_at + keep_alive * _PONG_WITHIN
        return self._sent_at + keep_alive * _PING_AFTER

    def validate(self) -> None:
        """Assert every invariant named above; for tests."""
        assert self.settled <= self.next_number
        assert self._unacknowledged == sum(len(p.words) for p in self._pending)
        numbers = [n for p in self._pending for n in p.numbers]
        assert numbers == sorted(set(numbers))
        assert not numbers or numbers[0] >= self.settled
        assert self.state is not State.OFFLINE or not self._pending
        assert not set(self._outbound) & set(self._requests)
        assert all(0 < i <= _MAX_PACKET_ID for i in (*self._outbound, *self._requests))
        assert self._quota >= 0

    # -- events --

    def _on_opened(self, _event: Opened, now: float, actions: list[Action]) -> None:
        self.state = State.CONNECTING
        self._opened_at = now
        self._suspended = False
        if self.record is None:
            # Durable before CONNECT leaves: after a crash here the broker may hold a session that is ours.
            self._remember(SessionRecord(self.config.client_id), actions)
        actions.append(Send(self._connect_packet().write()))

    def _connect_packet(self) -> ConnectPacket:
        config = self.config
        # Clean Start 0 always, also the first time: Mosquitto saves only sessions whose last CONNECT had it.
        return ConnectPacket(
            config.client_id,
            username=config.username,
            password=config.password,
            clean_start=self._discarding,
            keep_alive=config.keep_alive_s,
            session_expiry_interval=0 if self._discarding else config.session_expiry_s,
            receive_max=config.receive_maximum,
        )

    def _on_received(self, event: Received, now: float, actions: list[Action]) -> None:
        for item in event.items:
            handler = _PACKETS.get((self.state, type(item)))
            if handler is None:
                name = type(item).__name__.removesuffix("Packet").upper()
                self._violation(f"sent {name} while {self.state.value}", 0x82, actions)
            else:
                handler(self, item, now, actions)
            if self.state is State.OFFLINE:
                return

    def _on_settled(self, event: Settled, _now: float, actions: list[Action]) -> None:
        self.settled = max(self.settled, min(event.upto, self.next_number))
        acks: list[bytes] = []
        while self._pending and self._pending[0].numbers[0] < self.settled:
            first = self._pending[0]
            ready = bisect_left(first.numbers, self.settled)
            acks.append(_big_endian(first.words[:ready]))
            self._unacknowledged -= ready
            if ready == len(first.words):
                self._pending.popleft()
            else:
                first.words, first.numbers = first.words[ready:], first.numbers[ready:]
        if acks:
            actions.append(Send(b"".join(acks)))

    def _on_publish(self, event: Publish, _now: float, actions: list[Action]) -> None:
        self._queue.append(_Outbound(event.token, event.packet))
        self._pump_out(actions)

    def _on_suspended(self, _event: Suspended, _now: float, _actions: list[Action]) -> None:
        self._suspended = True

    def _on_resumed(self, _event: Resumed, now: float, _actions: list[Action]) -> None:
        self._suspended = False
        if self._ping_at is not None:
            self._ping_at = now  # the answer may lie in what was not read

    def _on_tick(self, _event: Tick, now: float, actions: list[Action]) -> None:
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return
        where = self.config.where
        if self.state is State.CONNECTING:
            what = f"no CONNACK within {self.config.connect_timeout_s:g} s"
            self._close(Unreachable("TL-M03", where, what, "Is this port an MQTT listener?"), actions)
        elif self._ping_at is not None and not self._suspended:
            what = f"no answer to PINGREQ within {self.keep_alive_s * _PONG_WITHIN:g} s"
            self._close(Unreachable("TL-M04", where, what, "The connection is made anew."), actions)
        else:
            self._ping_at = now if self._ping_at is None else self._ping_at
            actions.append(Send(_PINGREQ))

    def _on_lost(self, _event: Lost, _now: float, _actions: list[Action]) -> None:
        self._go_offline()

    def _on_stop(self, _event: Stop, _now: float, actions: list[Action]) -> None:
        if self.state is not State.OFFLINE:
            # A plain DISCONNECT: no expiry in it, so the broker keeps the session for us.
            actions.append(Send(DisconnectPacket().write()))
            self._close(None, actions)

    # -- packets --

    def _on_connack(self, packet: ConnAckPacket, _now: float, actions: list[Action]) -> None:
        reason = int(packet.reason_code)
        if reason:
            self._close(self._refusal(packet, reason), actions, fatal=reason in CONNECT_ADVICE)
            return
        self.server = packet
        self.state = State.SUBSCRIBING
        self._ping_at = None
        if self._discarding:
            self._discarding = False
            actions.append(Send(DisconnectPacket().write()))
            self._close(None, actions, again_at_once=True)
            return
        if self.config.durable and packet.session_expiry_interval == 0 and self.config.session_expiry_s:
            what = "the broker keeps no session (Session Expiry Interval 0), so at least once can't hold"
            self._close(Refused("TL-M12", self.config.where, what, "Allow persistent sessions."), actions, fatal=True)
            return
        if packet.session_present and not self._known_before:
            self._meet_unknown_session(packet, actions)
        else:
            self._enter_session(packet, actions)

    def _meet_unknown_session(self, packet: ConnAckPacket, actions: list[Action]) -> None:
        choice = self.config.unknown_session
        if choice == "adopt":
            self._enter_session(packet, actions)
            return
        actions.append(Send(DisconnectPacket().write()))
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

    def _enter_session(self, packet: ConnAckPacket, actions: list[Action]) -> None:
        known = self.record.subscriptions if self.record and packet.session_present else {}
        if self.record and self.record.established and not packet.session_present:
            actions.append(SessionLost())
        self._known_before = True
        self._remember(SessionRecord(self.config.client_id, established=True, subscriptions=dict(known)), actions)
        self._resume_outbound(packet, actions)
        self._subscribe_by_difference(known, actions)
        if not self._requests:
            self._come_online(actions)

    def _resume_outbound(self, packet: ConnAckPacket, actions: list[Action]) -> None:
        """Send again what the broker has not acknowledged, in the original order [MQTT-4.4.0-1, MQTT-4.6.0-1]."""
        unfinished = list(self._outbound.values())
        if packet.session_present:
            for packet_id, item in self._outbound.items():
                actions.append(Send(_with_id(item.packet, packet_id, duplicate=item.sent).write()))
        else:
            # A new session knows no old packet ids; the messages are sent as new ones, doubled at worst.
            self._outbound.clear()
            self._queue.extendleft(reversed([_Outbound(item.token, item.packet) for item in unfinished]))
        self._pump_out(actions)

    def _subscribe_by_difference(self, known: dict[str, int], actions: list[Action]) -> None:
        wanted = {f.pattern: f for f in self.config.filters}
        changed = tuple(f for f in wanted.values() if known.get(f.pattern) != f.options)
        surplus = tuple(pattern for pattern in known if pattern not in wanted)
        if changed:
            packet_id = self._new_id()
            self._requests[packet_id] = changed
            actions.append(Send(SubscribePacket(packet_id, [f.packet() for f in changed]).write()))
        if surplus:
            packet_id = self._new_id()
            self._requests[packet_id] = surplus
            actions.append(Send(UnsubscribePacket(packet_id, list(surplus)).write()))

    def _on_suback(self, packet: SubAckPacket, _now: float, actions: list[Action]) -> None:
        asked = self._requests.pop(packet.packet_id, ())
        if len(asked) != len(packet.reason_codes) or not asked or not isinstance(asked[0], Filter):
            self._violation("sent a SUBACK that answers no SUBSCRIBE of ours [MQTT-3.9.3-1]", 0x82, actions)
            return
        for wanted, code in zip(asked, packet.reason_codes, strict=True):
            error = self._subscription_problem(wanted, int(code))
            if error:
                actions.append(Send(DisconnectPacket().write()))
                self._close(error, actions, fatal=True)
                return
        self._confirm({f.pattern: f.options for f in asked}, (), actions)

    def _subscription_problem(self, wanted: Filter, code: int) -> BrokerError | None:
        where = self.config.where
        if code >= 0x80:
            what = f'the broker refused the subscription "{wanted.pattern}": {reason_words(code)} (0x{code:02X})'
            return Refused("TL-M10", where, what, "Grant this client the right to read it, or change the filter.")
        if code < wanted.qos:
            what = (
                f'the broker grants "{wanted.pattern}" QoS {code} instead of {wanted.qos}, so the promise can\'t hold'
            )
            return Refused("TL-M11", where, what, "Raise the broker's maximum QoS, or choose a weaker guarantee.")
        return None

    def _on_unsuback(self, packet: UnsubAckPacket, _now: float, actions: list[Action]) -> None:
        asked = self._requests.pop(packet.packet_id, ())
        patterns = tuple(p for p in asked if isinstance(p, str))
        if not patterns or len(patterns) != len(packet.reason_codes):
            self._violation("sent an UNSUBACK that answers no UNSUBSCRIBE of ours [MQTT-3.11.3-1]", 0x82, actions)
            return
        self._confirm({}, patterns, actions)

    def _confirm(self, added: dict[str, int], removed: tuple[str, ...], actions: list[Action]) -> None:
        assert self.record is not None
        kept = {p: o for p, o in self.record.subscriptions.items() if p not in removed}
        self._remember(replace(self.record, subscriptions=kept | added), actions)
        if not self._requests:
            self._come_online(actions)

    def _come_online(self, actions: list[Action]) -> None:
        self.state = State.ONLINE
        assert self.server is not None
        actions.append(Online(resumed=self.server.session_present))

    def _on_publishes(self, run: PublishRun, _now: float, actions: list[Action]) -> None:
        qos = run.qos
        if [packet.topic_alias for packet in run.packets].count(None) != len(run):
            self._violation("used a topic alias, which we allow none [MQTT-3.3.2-9]", 0x94, actions)
            return
        if b"\x02" in qos:
            self._violation("sent QoS 2 though no subscription asked for it [MQTT-3.8.4-8]", 0x9B, actions)
            return
        first = self.next_number
        self.next_number += len(run)
        self._owe(run, qos, first)
        actions.append(Deliver(first, run))

    def _owe(self, run: PublishRun, qos: bytes, first: int) -> None:
        if b"\x00" not in qos:
            numbers: Sequence[int] = range(first, first + len(run))
            acked = run.packets
        else:
            numbers = [first + index for index, level in enumerate(qos) if level]
            acked = [run.packets[number - first] for number in numbers]
        if not acked:
            return
        word = _ACK_WORD[1]
        self._pending.append(_Pending(array("I", [word | packet.packet_id for packet in acked]), numbers))  # type: ignore[operator]
        self._unacknowledged += len(acked)
        if self._unacknowledged > self.config.receive_maximum:
            self.overruns += 1

    def _on_puback(self, packet: PubAckPacket, _now: float, actions: list[Action]) -> None:
        item = self._outbound.pop(packet.packet_id, None)
        if item is None:
            return  # an answer to a message of an earlier session; nothing of ours depends on it
        actions.append(Acknowledged(item.token, int(packet.reason_code)))
        self._pump_out(actions)

    def _on_pingresp(self, _packet: PingRespPacket, _now: float, _actions: list[Action]) -> None:
        self._ping_at = None

    def _on_disconnect(self, packet: DisconnectPacket, _now: float, actions: list[Action]) -> None:
        reason = int(packet.reason_code)
        where = self.config.where
        if reason == 0x8E:
            what = f'another client took over the client id "{self.config.client_id}"'
            error: BrokerError = TakenOver("TL-M21", where, what, "Two lines with one id? Give each its own.")
        else:
            text = f" ({packet.reason_str})" if packet.reason_str else ""
            what = f"the broker ended the connection: {reason_words(reason)}{text} (0x{reason:02X})"
            error = Unreachable("TL-M05", where, what, "Trying again.")
        self._close(error, actions)

    # -- helpers --

    @property
    def _quota(self) -> int:
        """Messages of QoS > 0 we may still send [MQTT-4.9.0-1]."""
        allowed = self.server.receive_max if self.server else 0
        return max(0, allowed - len(self._outbound))

    def _pump_out(self, actions: list[Action]) -> None:
        if self.state in (State.OFFLINE, State.CONNECTING):
            return
        while self._queue:
            item = self._queue[0]
            if item.packet.qos == QoS.AT_MOST_ONCE:
                actions += [Send(item.packet.write()), Acknowledged(item.token, 0)]
            elif self._quota:
                packet_id = self._new_id()
                self._outbound[packet_id] = item
                item.sent = True
                actions.append(Send(_with_id(item.packet, packet_id, duplicate=False).write()))
            else:
                return
            self._queue.popleft()

    def _new_id(self) -> int:
        """An unused packet id [MQTT-2.2.1-3]; ids go round, so that a late answer is not taken for a new one."""
        for _ in range(_MAX_PACKET_ID):
            self._last_id = self._last_id % _MAX_PACKET_ID + 1
            if self._last_id not in self._outbound and self._last_id not in self._requests:
                return self._last_id
        raise AssertionError("more packet ids in use than Receive Maximum allows")

    def _remember(self, record: SessionRecord | None, actions: list[Action]) -> None:
        if record != self.record:
            self.record = record
            actions.append(Remember(record))

    def _refusal(self, packet: ConnAckPacket, reason: int) -> BrokerError:
        text = f" ({packet.reason_str})" if packet.reason_str else ""
        what = f"the broker refused the connection: {reason_words(reason)}{text} (0x{reason:02X})"
        if reason in CONNECT_ADVICE:
            return Refused("TL-M08", self.config.where, what, CONNECT_ADVICE[reason])
        return Unreachable("TL-M06", self.config.where, what, "Trying again.")

    def _violation(self, what: str, reason: int, actions: list[Action]) -> None:
        code = DisconnectReasonCode(reason)
        actions.append(Send(DisconnectPacket(reason_code=code).write()))
        self._close(ProtocolViolation(self.config.where, f"the broker {what}", reason=reason), actions)

    def _close(
        self, error: BrokerError | None, actions: list[Action], *, fatal: bool = False, again_at_once: bool = False
    ) -> None:
        self._go_offline()
        actions.append(Close(error, fatal=fatal, again_at_once=again_at_once))

    def _go_offline(self) -> None:
        self.state = State.OFFLINE
        self.server = None
        self._ping_at = None
        self._requests.clear()
        # Packet ids name nothing after the connection: the broker sends again what we have not acknowledged.
        self._pending.clear()
        self._unacknowledged = 0


def _big_endian(words: array[int]) -> bytes:
    if sys.byteorder == "little":
        words = words[:]
        words.byteswap()
    return words.tobytes()


def _with_id(packet: PublishPacket, packet_id: int, *, duplicate: bool) -> PublishPacket:
    return PublishPacket(
        packet.topic,
        packet.payload,
        qos=packet.qos,
        retain=packet.retain,
        packet_id=packet_id,
        duplicate=duplicate,
        payload_format_indicator=packet.payload_format_indicator,
        message_expiry_interval=packet.message_expiry_interval,
        content_type=packet.content_type,
        response_topic=packet.response_topic,
        correlation_data=packet.correlation_data,
        user_properties=packet.user_properties,
    )


_Handler: TypeAlias = Callable[..., None]

_EVENTS: Final[dict[type, _Handler]] = {
    Opened: Session._on_opened,  # noqa: SLF001
    Received: Session._on_received,  # noqa: SLF001
    Settled: Session._on_settled,  # noqa: SLF001
    Publish: Session._on_publish,  # noqa: SLF001
    Suspended: Session._on_suspended,  # noqa: SLF001
    Resumed: Session._on_resumed,  # noqa: SLF001
    Tick: Session._on_tick,  # noqa: SLF001
    Lost: Session._on_lost,  # noqa: SLF001
    Stop: Session._on_stop,  # noqa: SLF001
}

_CONNECTED: Final[dict[type, _Handler]] = {
    PublishRun: Session._on_publishes,  # noqa: SLF001
    mqtt5.PubAckPacket: Session._on_puback,  # noqa: SLF001
    mqtt5.PingRespPacket: Session._on_pingresp,  # noqa: SLF001
    mqtt5.DisconnectPacket: Session._on_disconnect,  # noqa: SLF001
    mqtt5.SubAckPacket: Session._on_suback,  # noqa: SLF001
    mqtt5.UnsubAckPacket: Session._on_unsuback,  # noqa: SLF001
}

#: A resumed session may deliver right after CONNACK, before SUBACK: PUBLISH is at home in both connected states.
_PACKETS: Final[dict[tuple[State, type], _Handler]] = {
    (State.CONNECTING, ConnAckPacket): Session._on_connack,  # noqa: SLF001
    **{(State.SUBSCRIBING, kind): handler for kind, handler in _CONNECTED.items()},
    **{(State.ONLINE, kind): handler for kind, handler in _CONNECTED.items()},
}
