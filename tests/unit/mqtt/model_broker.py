"""An MQTT broker as a pure object, written from the statements of the standard, that judges the client it serves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Final

import mqtt5

import tests.engines.mqtt3  # noqa: F401  # the half of a server
from tests.helpers import packets_in
from towline.mqtt.codec import Decoder, encode

TOPIC: Final = "t"
_GRANTED: Final = (
    mqtt5.SubAckReasonCode.GRANTED_QOS_AT_MOST_ONCE,
    mqtt5.SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE,
    mqtt5.SubAckReasonCode.GRANTED_QOS_EXACTLY_ONCE,
)


class Dup(Enum):
    """When a broker sets DUP on what it sends at QoS > 0."""

    STANDARD = "again"  # on what it sends again [MQTT-3.3.1-1]
    NEVER = "never"  # aedes
    ALWAYS = "always"  # RabbitMQ after a crash: also on what was never sent before


class Phase(Enum):
    """How far a message to the client has come."""

    QUEUED = "queued"
    SENT = "sent"  # PUBLISH written, no PUBACK or PUBREC
    RECEIVED = "received"  # PUBREC came, PUBREL not written yet
    RELEASED = "released"  # PUBREL written, no PUBCOMP
    DONE = "done"


@dataclass(slots=True, eq=False)
class Message:
    """One message for the client; its payload is the serial, in ASCII."""

    serial: int
    qos: int
    phase: Phase = Phase.QUEUED
    publishes: int = 0
    promised: bool = True  # neither lost with a session nor dropped at QoS 0
    may_double: bool = False  # a fault of this broker makes more than one copy unavoidable
    server: int = 0  # it waits at this one of two


@dataclass(frozen=True, slots=True)
class Habits:
    """Where brokers differ."""

    version: int = 5
    dup: Dup = Dup.STANDARD
    new_ids: bool = False  # a QoS 1 message that comes again has a new packet id: RabbitMQ
    lowest_id: bool = False  # the lowest free packet id instead of the next: HiveMQ
    both_again: bool = False  # after PUBREC and before PUBREL, a resume brings PUBLISH and PUBREL: mochi
    republishes: bool = False  # a fault: after PUBREL too [MQTT-4.3.3-6]: Mosquitto restored from an old database
    reuses_ids: bool = False  # a fault: a QoS 2 packet id comes again before PUBCOMP: Mosquitto 2.0.11
    receive_maximum: int = 5
    window_3: int = 4  # open at once towards a 3.x client, which can't say


@dataclass(slots=True)
class _Connection:
    """What ends with a network connection: quotas, answers owed, what is to be sent again."""

    decoder: Decoder
    greeted: bool = False
    #: The client's Receive Maximum.
    quota: int = 0
    #: Packet ids of PUBLISHes that count against it [MQTT 5 section 4.9].
    open: set[int] = field(default_factory=set)
    #: To be sent again, in order.
    again: deque[tuple[int, Message]] = field(default_factory=deque)
    #: PUBACK or PUBREC the client owes, in order.
    owed: deque[tuple[type, int, Message]] = field(default_factory=deque)
    #: PUBRELs written and not answered.
    completions: Counter[int] = field(default_factory=Counter)
    #: What the client has open: ids of its PUBLISHes without a final answer.
    client_open: set[int] = field(default_factory=set)
    #: Ids of its SUBSCRIBEs and UNSUBSCRIBEs without an answer.
    asked: set[int] = field(default_factory=set)
    #: PUBRECs written, in order: its PUBRELs must follow them.
    to_release: deque[int] = field(default_factory=deque)
    #: Answers to the client not written yet.
    answers: deque[mqtt5.Packet] = field(default_factory=deque)
    last_serial: int = -1


#: What a server keeps for itself of `ModelBroker`: a session, and what it remembers of the client's publishes.
_OF_A_SERVER: Final = (
    "has_session", "subscriptions", "queue", "in_flight", "incoming", "_seen", "_released", "_last_id",
)  # fmt: skip


class ModelBroker:
    """A broker with one client; or two that share no sessions, of which one is there at a time."""

    def __init__(self, habits: Habits, on_accepted: Callable[[Message], None] = lambda _message: None) -> None:
        self.habits = habits
        self._on_accepted = on_accepted
        #: Announced to the client; another one counts from the next connection on.
        self.receive_maximum = habits.receive_maximum
        #: Written and not taken by the client.
        self.out = bytearray()
        self.connection: _Connection | None = None
        # Session state of the server, section 4.1.
        self.has_session = False
        self.subscriptions: dict[str, int] = {}
        self.queue: deque[Message] = deque()
        self.in_flight: dict[int, Message] = {}
        #: The client's QoS 2 packet ids between PUBLISH and PUBREL → serial.
        self.incoming: dict[int, int] = {}
        self.messages: list[Message] = []
        #: Serials the client published, in order of arrival.
        self.taken: list[int] = []
        self._seen: set[int] = set()
        self._released: set[int] = set()
        self._last_id = 0
        #: Which of the two servers is there, and what the other one keeps.
        self.server, self.two = 0, False
        self._other: dict[str, Any] = deepcopy({name: getattr(self, name) for name in _OF_A_SERVER})

    # -- the application behind the broker --

    def offer(self, qos: int) -> Message:
        """A message comes for the client. It is promised if a subscription is there to take it."""
        promised = bool(self.subscriptions) and qos > 0
        message = Message(len(self.messages), qos, promised=promised, server=self.server)
        self.messages.append(message)
        if self.subscriptions and (qos or self.connection is not None):
            self.queue.append(message)
        return message

    @property
    def idle(self) -> bool:
        """Nothing is left to send or to wait for."""
        c = self.connection
        quiet = c is not None and c.greeted and not (c.again or c.owed or c.answers or +c.completions)
        return quiet and not self.queue and not self.in_flight and not self.out

    # -- the network --

    def connect(self) -> None:
        """A client has opened a connection."""
        assert self.connection is None
        self.connection = _Connection(Decoder(version=self.habits.version))
        self.out.clear()

    def lost(self) -> None:
        """The connection is gone, with every byte on its way. Messages of QoS 0 are not kept."""
        self.connection = None
        self.out.clear()
        self.queue = deque(m for m in self.queue if m.qos)

    def switch(self) -> None:
        """The other server takes over; what was under way at this one may come again when it is back."""
        self.lost()
        for message in self.in_flight.values():
            message.may_double = True
        self._other, mine = {name: getattr(self, name) for name in _OF_A_SERVER}, self._other
        for name, value in mine.items():
            setattr(self, name, value)
        self._seen.clear()  # whoever was elsewhere meanwhile sends as new what this server has seen before
        self.server, self.two = 1 - self.server, True

    def lose_session(self) -> None:
        """A restart without its store: connection and session are gone."""
        self.lost()
        self._end_session()

    def restore_before_release(self) -> None:
        """The fault `Habits.republishes`: what was released comes back as published."""
        for message in self.in_flight.values():
            if message.phase is Phase.RELEASED:
                message.phase, message.may_double = Phase.SENT, True

    def forget_publisher(self) -> None:
        """The client has lost its half of its own publishes: a harness without an outbox says so."""
        for name in ("incoming", "_seen", "_released"):
            getattr(self, name).clear()
            self._other[name].clear()
        if self.connection is not None:
            self.connection.client_open.clear()
            self.connection.answers.clear()

    def take(self, count: int) -> bytes:
        """Up to `count` bytes on their way to the client."""
        data = bytes(self.out[:count])
        del self.out[:count]
        return data

    def receive(self, data: bytes) -> None:
        """Bytes of the client; they may end anywhere."""
        connection = self._c
        for item in connection.decoder.feed(data):
            for packet in packets_in(item):
                if self.connection is connection:  # until it says DISCONNECT
                    self._on_packet(packet)

    def _on_packet(self, packet: mqtt5.Packet) -> None:
        assert self.connection is not None
        first = not self.connection.greeted
        assert isinstance(packet, mqtt5.ConnectPacket) == first, "CONNECT comes first and once [MQTT-3.1.0-1, -2]"
        _HANDLERS[type(packet)](self, packet)

    def _write(self, packet: mqtt5.Packet) -> None:
        self.out += encode(packet, self.habits.version)

    @property
    def _c(self) -> _Connection:
        assert self.connection is not None
        return self.connection

    # -- connecting and subscribing --

    def _on_connect(self, packet: mqtt5.ConnectPacket) -> None:
        c = self._c
        c.greeted = True
        assert not packet.clean_start, "a durable line never begins with Clean Start"
        assert packet.session_expiry_interval > 0
        present = self.has_session
        self.has_session = True
        c.quota = packet.receive_max if self.habits.version == 5 else self.habits.window_3
        announced = self.receive_maximum if self.habits.version == 5 else 65_535
        self._write(mqtt5.ConnAckPacket(session_present=present, receive_max=announced))
        self._prepare_resend()

    def _prepare_resend(self) -> None:
        """[MQTT-4.4.0-1]: what is unacknowledged is sent again, with its packet id; RabbitMQ gives new ones."""
        if self.habits.new_ids:
            kept = frozenset(i for i, m in self.in_flight.items() if m.qos == 2)
            before, self.in_flight = self.in_flight, {}
            for packet_id, message in before.items():
                self.in_flight[packet_id if message.qos == 2 else self._new_id(kept)] = message
        self._c.again = deque(self.in_flight.items())

    def _end_session(self) -> None:
        for message in (*self.queue, *self.in_flight.values()):
            message.promised = False
        self.has_session = False
        self.subscriptions.clear()
        self.queue.clear()
        self.in_flight.clear()
        self.incoming.clear()
        self._seen.clear()
        self._released.clear()

    def _on_subscribe(self, packet: mqtt5.SubscribePacket) -> None:
        c = self._c
        self._check_unused(packet.packet_id)
        for f in packet.topic_filters if self.habits.version == 5 else ():
            new, handling = f.pattern not in self.subscriptions or self.two, int(f.retain_handling)
            assert new or handling, f"all retained messages of {f.pattern} would come again [MQTT-3.3.1-9, -10]"
            assert handling < 2, f"no retained message of {f.pattern} would ever come [MQTT-3.3.1-11]"
        self.subscriptions |= {f.pattern: int(f.max_qos) for f in packet.topic_filters}
        granted = [_GRANTED[int(f.max_qos)] for f in packet.topic_filters]
        c.asked.add(packet.packet_id)
        c.answers.append(mqtt5.SubAckPacket(packet.packet_id, granted))

    def _on_unsubscribe(self, packet: mqtt5.UnsubscribePacket) -> None:
        c = self._c
        self._check_unused(packet.packet_id)
        for pattern in packet.patterns:
            self.subscriptions.pop(pattern, None)
        c.asked.add(packet.packet_id)
        codes = [mqtt5.UnsubAckReasonCode.SUCCESS] * len(packet.patterns)
        c.answers.append(mqtt5.UnsubAckPacket(packet.packet_id, codes))

    def _on_ping(self, _packet: mqtt5.PingReqPacket) -> None:
        self._write(mqtt5.PingRespPacket())

    def _on_disconnect(self, packet: mqtt5.DisconnectPacket) -> None:
        assert int(packet.reason_code) == 0, f"the client complains: 0x{int(packet.reason_code):02x}"
        self.lost()

    # -- to the client --

    def flow(self, limit: int) -> None:
        """Write up to `limit` packets that may leave now."""
        c = self.connection
        if c is None or not c.greeted:
            return
        for _ in range(limit):
            if not (self._resend_next(c) if c.again else self.queue and self._send_next(c)):
                break

    def release(self, limit: int) -> None:
        """Write up to `limit` PUBRELs that wait [MQTT-4.3.3-4]."""
        c = self.connection
        if c is None or not c.greeted:
            return
        # What is still to be sent again may wait for the quota that a PUBCOMP gives back.
        again = {packet_id for packet_id, _ in c.again}
        waiting = [(i, m) for i, m in self.in_flight.items() if m.phase is Phase.RECEIVED and i not in again]
        for packet_id, message in islice(waiting, limit):
            self._pubrel(packet_id, message)

    def retry(self) -> int:
        """Write again what waits for PUBACK, as EMQX 4 and VerneMQ do by a timer; return how many there are."""
        waiting = [
            (i, m) for i, m in self.in_flight.items() if m.qos == 1 and m.phase is Phase.SENT and i in self._c.open
        ]
        for packet_id, message in waiting:
            self._write_publish(packet_id, message, duplicate=True)
        return len(waiting)

    def _resend_next(self, c: _Connection) -> bool:
        packet_id, message = c.again[0]
        if self.in_flight.get(packet_id) is not message:
            c.again.popleft()
            return True
        publish = message.phase is Phase.SENT or (message.phase is Phase.RECEIVED and self.habits.both_again)
        if publish:
            if len(c.open) >= c.quota:
                return False  # [MQTT-3.3.4-9], also for what comes again
            self._publish(packet_id, message)
        if message.phase in {Phase.RECEIVED, Phase.RELEASED}:
            self._pubrel(packet_id, message)
        c.again.popleft()
        return True

    def _send_next(self, c: _Connection) -> bool:
        message = self.queue[0]
        if not message.qos:
            self.queue.popleft()
            self._write_publish(None, message)
            return True
        if len(c.open) >= c.quota:
            return False
        packet_id = self._reusable_id(message) or self._new_id()
        self.queue.popleft()
        before = self.in_flight.pop(packet_id, None)
        self.in_flight[packet_id] = message
        message.phase = Phase.SENT
        self._publish(packet_id, message)
        if before is not None:  # the fault `reuses_ids`: one PUBREL for two messages, or none
            if before.phase is Phase.RECEIVED:
                self._pubrel(packet_id, before)
                message.may_double = True  # released before it was acknowledged
            before.phase = Phase.DONE
        return True

    def _publish(self, packet_id: int, message: Message) -> None:
        c, dup = self._c, self.habits.dup
        again = message.publishes > 0
        message.publishes += 1
        c.open.add(packet_id)
        c.owed.append((mqtt5.PubAckPacket if message.qos == 1 else mqtt5.PubRecPacket, packet_id, message))
        self._write_publish(packet_id, message, duplicate=dup is Dup.ALWAYS or (dup is Dup.STANDARD and again))

    def _write_publish(self, packet_id: int | None, message: Message, *, duplicate: bool = False) -> None:
        payload, qos = b"%d" % message.serial, mqtt5.QoS(message.qos)
        self._write(mqtt5.PublishPacket(TOPIC, payload, qos=qos, packet_id=packet_id, duplicate=duplicate))

    def _pubrel(self, packet_id: int, message: Message) -> None:
        message.phase = Phase.RELEASED
        self._c.completions[packet_id] += 1
        self._write(mqtt5.PubRelPacket(packet_id))

    def _new_id(self, taken: set[int] | frozenset[int] = frozenset()) -> int:
        """An unused packet id [MQTT-2.2.1-4]."""
        used = self.in_flight.keys() | taken
        if self.habits.lowest_id:
            return next(i for i in range(1, 65536) if i not in used)
        while True:
            self._last_id = self._last_id % 65535 + 1
            if self._last_id not in used:
                return self._last_id

    def _reusable_id(self, message: Message) -> int:
        """The fault of Mosquitto 2.0.11: an id whose release the client has not confirmed."""
        if not self.habits.reuses_ids or message.qos != 2:
            return 0
        return next((i for i, m in self.in_flight.items() if m.phase in {Phase.RECEIVED, Phase.RELEASED}), 0)

    def _owed(self, packet: mqtt5.PubAckPacket | mqtt5.PubRecPacket) -> Message:
        """[MQTT-4.6.0-2, -3]: acknowledgements come in the order of the PUBLISHes; ours across both kinds."""
        c, kind = self._c, type(packet)
        assert c.owed, f"{kind.__name__} {packet.packet_id} answers nothing"
        wanted, packet_id, message = c.owed.popleft()
        assert (kind, packet.packet_id) == (wanted, packet_id), (
            f"{kind.__name__} {packet.packet_id} instead of {wanted.__name__} {packet_id} [MQTT-4.6.0-2, -3]"
        )
        assert int(packet.reason_code) == 0
        self._on_accepted(message)
        return message

    def _on_puback(self, packet: mqtt5.PubAckPacket) -> None:
        message = self._owed(packet)
        message.phase = Phase.DONE
        self._free(packet.packet_id, message)

    def _on_pubrec(self, packet: mqtt5.PubRecPacket) -> None:
        message = self._owed(packet)
        if message.phase is Phase.SENT:
            message.phase = Phase.RECEIVED
        elif message.phase is Phase.RELEASED and self.in_flight.get(packet.packet_id) is message:
            self._pubrel(packet.packet_id, message)

    def _on_pubcomp(self, packet: mqtt5.PubCompPacket) -> None:
        c, packet_id = self._c, packet.packet_id
        assert c.completions[packet_id] > 0, f"PUBCOMP {packet_id} answers no PUBREL [MQTT-4.3.3-11]"
        c.completions[packet_id] -= 1
        message = self.in_flight.get(packet_id)
        if message is None or message.phase is not Phase.RELEASED:
            return
        message.phase = Phase.DONE
        self._free(packet_id, message)

    def _free(self, packet_id: int, message: Message) -> None:
        self._c.open.discard(packet_id)
        if self.in_flight.get(packet_id) is message:
            del self.in_flight[packet_id]

    # -- from the client --

    def _on_publish(self, packet: mqtt5.PublishPacket) -> None:
        c, serial, qos = self._c, int(packet.payload), int(packet.qos)
        assert packet.topic_alias is None, "we allowed none, and the client uses none [MQTT-3.2.2-17, -18]"
        assert serial > c.last_serial, "sent again out of the original order [MQTT-4.6.0-1]"
        c.last_serial = serial
        if not qos:
            self.taken.append(serial)
            return
        packet_id = packet.packet_id or 0
        assert serial not in self._released, f"PUBLISH of {serial} after its PUBREL [MQTT-4.3.3-6]"
        self._check_unused(packet_id)
        assert packet.duplicate or serial not in self._seen, f"{serial} sent again without DUP [MQTT-3.3.1-1]"
        c.client_open.add(packet_id)
        window = self.receive_maximum if self.habits.version == 5 else 20
        assert len(c.client_open) <= window, "more than Receive Maximum allows [MQTT-3.3.4-9]"
        self._seen.add(serial)
        if qos == 1:
            assert packet_id not in self.incoming, f"packet id {packet_id} is in use [MQTT-2.2.1-3]"
            self.taken.append(serial)
            c.answers.append(mqtt5.PubAckPacket(packet_id))
            return
        if packet_id not in self.incoming:
            self.taken.append(serial)  # [MQTT-4.3.3-8]: from here on it is the broker's
            self.incoming[packet_id] = serial
        assert self.incoming[packet_id] == serial, f"packet id {packet_id} is in use [MQTT-2.2.1-3]"
        c.answers.append(mqtt5.PubRecPacket(packet_id))

    def _on_pubrel(self, packet: mqtt5.PubRelPacket) -> None:
        c, packet_id = self._c, packet.packet_id
        if c.to_release and packet_id in c.to_release:
            assert c.to_release.popleft() == packet_id, "PUBRELs out of the order of the PUBRECs [MQTT-4.6.0-4]"
        serial = self.incoming.pop(packet_id, None)
        if serial is not None:
            self._released.add(serial)
            c.answers.append(mqtt5.PubCompPacket(packet_id))
        else:
            unknown = mqtt5.PubCompReasonCode(0x92 if self.habits.version == 5 else 0)
            c.answers.append(mqtt5.PubCompPacket(packet_id, reason_code=unknown))

    def answer(self, limit: int) -> None:
        """Write up to `limit` answers to what the client sent."""
        c = self.connection
        if c is None:
            return
        for _ in range(min(limit, len(c.answers))):
            packet: Any = c.answers.popleft()
            if isinstance(packet, mqtt5.PubRecPacket):
                c.to_release.append(packet.packet_id)
            else:
                c.client_open.discard(packet.packet_id)
                c.asked.discard(packet.packet_id)
            self._write(packet)

    def _check_unused(self, packet_id: int) -> None:
        used = packet_id in self._c.client_open or packet_id in self._c.asked
        assert not used, f"packet id {packet_id} is in use [MQTT-2.2.1-3]"


_HANDLERS: Final[dict[type, Callable[..., None]]] = {
    mqtt5.ConnectPacket: ModelBroker._on_connect,
    mqtt5.SubscribePacket: ModelBroker._on_subscribe,
    mqtt5.UnsubscribePacket: ModelBroker._on_unsubscribe,
    mqtt5.PublishPacket: ModelBroker._on_publish,
    mqtt5.PubAckPacket: ModelBroker._on_puback,
    mqtt5.PubRecPacket: ModelBroker._on_pubrec,
    mqtt5.PubRelPacket: ModelBroker._on_pubrel,
    mqtt5.PubCompPacket: ModelBroker._on_pubcomp,
    mqtt5.PingReqPacket: ModelBroker._on_ping,
    mqtt5.DisconnectPacket: ModelBroker._on_disconnect,
}
