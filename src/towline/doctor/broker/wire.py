"""One MQTT connection, packet by packet: a probe has to see what a client rightly hides.

Such as a granted QoS, PUBACK in place of PUBREC, or a message beyond Receive Maximum. The way to the broker, the
packets and CONNECT are those of a gateway; what is left out is its session.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, TypeVar

from mqtt5 import (
    AuthPacket,
    ConnAckPacket,
    DisconnectPacket,
    PingReqPacket,
    PingRespPacket,
    PubAckPacket,
    PubCompPacket,
    PublishPacket,
    PubRecPacket,
    PubRelPacket,
    QoS,
    SubAckPacket,
    SubscribePacket,
)

from towline.errors import BrokerError, Unreachable
from towline.mqtt.codec import AnswerRun, Decoder, MalformedPacket, Packet, PublishRun, encode
from towline.mqtt.events import Filter
from towline.mqtt.handshake import Authentication, Unasked, connect_packet
from towline.mqtt.plain import PlainRun
from towline.mqtt.refusals import connection_ended, connection_refused
from towline.mqtt.stubs import Published, Stub
from towline.net.options import ConnectionOptions
from towline.net.transport import Transport, connect

__all__ = ["OtherVersion", "Wire", "meet"]

_T = TypeVar("_T")

#: Largest packet that is read whole; of a larger PUBLISH the decoder keeps a stub.
_LARGEST: Final = 8 << 20
#: Seconds for what still has to leave when a connection ends.
_GOODBYE: Final = 0.5
#: The broker ends a connection of ours that is silent for 1.5 times as long [MQTT-3.1.2-22].
_KEEP_ALIVE: Final = 30
#: Unsupported protocol version, in CONNACK.
_VERSION_REFUSED: Final = 0x84


class OtherVersion(Unreachable):
    """No CONNACK came, or one that refuses the version of the protocol: it may be that."""


class Wire:
    """A connection that the broker has taken in; made by `meet`, a context manager.

    Args:
        transport: Connected; CONNACK has come.
        decoder: Has read it.
        level: Of the protocol.
        connack: It.
        where: Names the broker in errors.
    """

    def __init__(self, transport: Transport, decoder: Decoder, level: int, connack: ConnAckPacket, where: str) -> None:
        self._transport = transport
        self._decoder = decoder
        self._where = where
        self._answers: deque[Packet] = deque()
        self._packet_id = 0
        self._open = True
        self.level = level
        self.connack = connack
        #: What came, in order; whoever reads it may clear it.
        self.arrived: list[Published] = []
        #: Acknowledge each message as it comes.
        self.acknowledging = True
        #: PUBLISHes that wait for an acknowledgement of ours, in order.
        self._owed: deque[Published] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, expiry_s: int | None = None) -> None:
        """Say goodbye; a second call does nothing.

        Args:
            expiry_s: Seconds the broker keeps the session from here on (MQTT 5), None for what CONNECT said.
        """
        if not self._open:
            return
        self._open = False
        try:
            expiry = expiry_s if self.level == 5 else None
            self._transport.write(encode(DisconnectPacket(session_expiry_interval=expiry), self.level))
            self._transport.drain(_GOODBYE)
        finally:
            self._transport.close()

    # -- what is asked --

    def subscribe(self, one: Filter, patience_s: float) -> int:
        """Subscribe; the reason code of SUBACK: the granted QoS, or why not.

        Raises:
            BrokerError: The connection ended, or there is no answer.
        """
        packet_id = self._next_id()
        self.send(SubscribePacket(packet_id, [one.packet()], subscription_id=one.identifier))
        answer = self.answer(SubAckPacket, patience_s, lambda packet: packet.packet_id == packet_id)
        return int(answer.reason_codes[0])

    def publish(
        self, topic: str, payload: bytes, *, qos: int, retain: bool = False, expiry_s: int | None = None
    ) -> int | None:
        """Send a PUBLISH and return its packet id, None with QoS 0."""
        packet_id = self._next_id() if qos else None
        self.send(
            PublishPacket(
                topic,
                payload,
                qos=(QoS.AT_MOST_ONCE, QoS.AT_LEAST_ONCE, QoS.EXACTLY_ONCE)[qos],
                retain=retain,
                packet_id=packet_id,
                message_expiry_interval=expiry_s if self.level == 5 else None,
            )
        )
        return packet_id

    def published(self, patience_s: float) -> int:
        """The reason code of the next PUBACK.

        Raises:
            BrokerError: As `answer`.
        """
        return int(self.answer(PubAckPacket, patience_s).reason_code)

    def received(self, patience_s: float) -> PubAckPacket | PubRecPacket:
        """The next answer to a PUBLISH of QoS 2, which is PUBREC where the broker knows QoS 2.

        Raises:
            BrokerError: As `answer`.
        """
        kinds: tuple[type[PubAckPacket | PubRecPacket], ...] = (PubAckPacket, PubRecPacket)
        return self.answer(kinds, patience_s)

    def publish_all(self, topic: str, payloads: Iterable[bytes], patience_s: float, until: float) -> list[int]:
        """Publish with QoS 1 as fast as the broker's window allows; the reason code of each.

        Args:
            topic: Of all.
            payloads: One message each.
            patience_s: Seconds for each answer.
            until: On the monotonic clock; no further message is begun after it.
        """
        window = min(self.connack.receive_max, 500) if self.level == 5 else 20
        codes: list[int] = []
        open_ = 0
        for payload in payloads:
            if time.monotonic() > until:
                break
            while open_ >= window:
                codes.append(self.published(patience_s))
                open_ -= 1
            self.publish(topic, payload, qos=1)
            open_ += 1
        codes += [self.published(patience_s) for _ in range(open_)]
        return codes

    def ping(self, patience_s: float) -> float:
        """Seconds until PINGRESP."""
        begun = time.monotonic()
        self.send(PingReqPacket())
        self.answer(PingRespPacket, patience_s)
        return time.monotonic() - begun

    def acknowledge(self, most: int | None = None) -> None:
        """Acknowledge what came and is not acknowledged yet, the oldest first [MQTT-4.6.0-2]; `most` of it."""
        words = bytearray()
        for _ in range(len(self._owed) if most is None else min(most, len(self._owed))):
            packet = self._owed.popleft()
            kind = PubAckPacket if int(packet.qos) == 1 else PubRecPacket
            words += encode(kind(packet.packet_id or 0), self.level)
        if words:
            self._write(bytes(words))

    # -- the way --

    def send(self, packet: Packet) -> None:
        """Send a packet."""
        self._write(encode(packet, self.level))

    def answer(
        self,
        kind: type[_T] | tuple[type[_T], ...],
        patience_s: float,
        fits: Callable[[_T], bool] = lambda _packet: True,
    ) -> _T:
        """The next packet of a kind.

        Raises:
            BrokerError: The connection ended, or nothing came in time (TL-M03).
        """
        found: list[_T] = []

        def come() -> bool:
            while self._answers:
                packet = self._answers.popleft()
                if isinstance(packet, kind) and fits(packet):
                    found.append(packet)
                    return True
            return False

        if not self.wait(come, patience_s):
            first = kind[0] if isinstance(kind, tuple) else kind
            what = f"no {first.__name__.removesuffix('Packet').upper()} within {patience_s:g} s"
            raise Unreachable("TL-M03", self._where, what, "Is the broker overloaded?")
        return found[0]

    def wait(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """Read until a condition holds; False where it did not in time.

        Raises:
            BrokerError: The connection ended.
        """
        until = time.monotonic() + patience_s
        while not condition():
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._read(left)
        return True

    def _next_id(self) -> int:
        self._packet_id = self._packet_id % 0xFFFF + 1
        return self._packet_id

    def _write(self, data: bytes) -> None:
        if not self._transport.write(data):
            raise self._ended()

    def _read(self, timeout_s: float) -> None:
        _wait(self._transport, timeout_s)
        if not self._transport.flush():
            raise self._ended()
        data = self._transport.read()
        if data is None:
            return
        if not data:
            raise self._ended()
        for packet in _packets(self._decoder, data, self._where):
            self._take(packet)
        if self.acknowledging:
            self.acknowledge()

    def _take(self, packet: Packet | Published) -> None:
        if isinstance(packet, DisconnectPacket):
            error = connection_ended(packet, "", self._where).error
            raise error or self._ended()
        if isinstance(packet, PubRelPacket):
            self.send(PubCompPacket(packet.packet_id))
        elif isinstance(packet, PublishPacket | Stub):
            self.arrived.append(packet)
            if int(packet.qos):
                self._owed.append(packet)
        else:
            self._answers.append(packet)

    def _ended(self) -> BrokerError:
        return self._transport.problem or Unreachable("TL-M05", self._where, "the connection broke", "Trying again.")


def meet(
    options: ConnectionOptions,
    client_id: str,
    *,
    level: int,
    patience_s: float,
    clean: bool = True,
    expiry_s: int = 0,
    window: int = 1000,
) -> Wire:
    """Connect as a line does, under another client id.

    Args:
        options: How to get to the broker, and the credentials; it names one.
        client_id: The probe's own.
        level: Of the protocol.
        patience_s: Seconds for the connection, and again for CONNACK.
        clean: Clean Start; with MQTT 3.x the session then ends with the connection.
        expiry_s: Session Expiry Interval.
        window: Receive Maximum; below 65,535, which is not sent, and then Mosquitto keeps to its own.

    Raises:
        OtherVersion: No CONNACK came, or one that refuses the version.
        BrokerError: No connection, or the broker refuses us.
        ConfigError: Files or a proxy that can't be used.
    """
    [endpoint] = options.brokers
    config = replace(
        options.session_at(level),
        client_id=client_id,
        where=str(endpoint),
        filters=(),
        will=None,
        session_expiry_s=0 if clean and level < 5 else expiry_s,
        clean_start=clean,
        keep_alive_s=_KEEP_ALIVE,
        receive_maximum=window,
        topic_alias_maximum=0,
    )
    authentication = Authentication(config.authenticator, config.where)
    transport = connect(
        endpoint,
        tls=options.tls,
        proxy=options.proxy,
        timeout_s=patience_s,
        keep_alive_s=_KEEP_ALIVE,
        headers=options.websocket_headers,
    )
    try:
        transport.write(encode(connect_packet(config, authentication.start(), discarding=False), level))
        decoder = Decoder(_LARGEST, level)
        connack, rest = _connack(transport, decoder, authentication, config.where, time.monotonic() + patience_s)
    except BaseException:
        transport.close()
        raise
    wire = Wire(transport, decoder, level, connack, config.where)
    for packet in rest:
        wire._take(packet)  # noqa: SLF001 - it came with CONNACK
    return wire


def _connack(
    transport: Transport, decoder: Decoder, authentication: Authentication, where: str, until: float
) -> tuple[ConnAckPacket, Sequence[Packet | Published]]:
    """CONNACK, and what came with it."""
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise OtherVersion("TL-M03", where, "no CONNACK: the broker is silent", "Is it an MQTT listener?")
        _wait(transport, left)
        transport.flush()
        data = transport.read()
        if data is None:
            continue
        if not data:
            what = "the connection ended in place of CONNACK"
            raise transport.problem or OtherVersion("TL-M03", where, what, "Is it an MQTT listener?")
        packets = list(_packets(decoder, data, where))
        if packets and isinstance(packets[0], AuthPacket):
            try:
                transport.write(encode(authentication.answer(packets[0])))
            except Unasked as error:
                raise Unreachable("TL-M30", where, f"the broker {error}", "Report it to its makers.") from error
        elif packets and isinstance(connack := packets[0], ConnAckPacket):
            if code := int(connack.reason_code):
                no = connection_refused(connack, where).error
                assert no is not None
                raise OtherVersion(no.code, where, no.what, no.do) if code == _VERSION_REFUSED else no
            authentication.finish(connack.authentication_data or b"")
            return connack, packets[1:]
        elif packets:
            raise Unreachable("TL-M30", where, "the broker began with another packet than CONNACK", "Is it a broker?")


def _packets(decoder: Decoder, data: bytes, where: str) -> Iterator[Packet | Published]:
    try:
        items = decoder.feed(data)
    except MalformedPacket as error:
        raise Unreachable("TL-M30", where, f"the broker sent {error}", "Is it an MQTT listener?") from error
    for item in items:
        if isinstance(item, PublishRun | AnswerRun | PlainRun):
            yield from item.packets
        else:
            yield item


def _wait(transport: Transport, timeout_s: float) -> None:
    if transport.decrypted:
        return
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN | (select.POLLOUT if transport.unsent else 0))
    poller.poll(max(0.0, timeout_s) * 1000)
