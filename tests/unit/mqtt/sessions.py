"""A session for tests, and the packets it takes and sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import mqtt5

from tests.helpers import packets_in, read_all
from towline.mqtt.codec import Decoder, Packet, encode
from towline.mqtt.events import Action, ConnectionOpened, Filter, PacketsReceived, Send, SessionConfig, SessionRecord
from towline.mqtt.session import Session, SessionState

A, B = Filter("a/#", 1), Filter("b", 1)
CONFIG = SessionConfig("plant-7", "line", (A, B), keep_alive_s=60)
KNOWN = SessionRecord("plant-7", established=True, subscriptions={"a/#": A.encoded_options, "b": B.encoded_options})
T = TypeVar("T")


class Method:
    """An authenticator of one challenge, which fails where it is told to."""

    method = "PLAIN"

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def _step(self, data: bytes) -> bytes:
        if self.failure is not None:
            raise self.failure
        return data

    def start(self) -> bytes:
        return self._step(b"first")

    def challenge(self, data: bytes) -> bytes:
        return self._step(b"to " + data)

    def finish(self, data: bytes) -> None:
        if self._step(data) != b"proof":
            raise ValueError("proves nothing")


def challenge(
    method: str = "PLAIN",
    reason: mqtt5.AuthReasonCode = mqtt5.AuthReasonCode.CONTINUE_AUTHENTICATION,
    data: bytes = b"you",
) -> mqtt5.AuthPacket:
    return mqtt5.AuthPacket(reason_code=reason, authentication_method=method, authentication_data=data)


def only(actions: list[Action], kind: type[T]) -> T:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def sent(actions: Iterable[Action], version: int = 5) -> list[Packet]:
    """Read by a codec that is not ours, which knows MQTT 5 alone."""
    data = b"".join(action.data for action in actions if isinstance(action, Send))
    if version == 5:
        return read_all(data)
    decoder = Decoder(version=version)
    packets = [packet for item in decoder.feed(data) for packet in packets_in(item)]
    assert not decoder._buffered_bytes, "whole packets"
    return packets


def only_sent(actions: Iterable[Action], kind: type[T]) -> T:
    (packet,) = sent(actions)
    assert isinstance(packet, kind)
    return packet


def receive(session: Session, *packets: Packet, now: float = 1.0) -> list[Action]:
    version = session.config.protocol
    data = b"".join(encode(packet, version) for packet in packets)
    return session.handle(PacketsReceived(Decoder(version=version).feed(data)), now)


def connect(session: Session, *packets: Packet, opened: float = 0.0, now: float = 1.0) -> list[Action]:
    """What comes of a new connection on which the broker sends packets."""
    session.handle(ConnectionOpened(), opened)
    return receive(session, *packets, now=now)


def granted(packet_id: int, count: int = 2) -> mqtt5.SubAckPacket:
    return mqtt5.SubAckPacket(packet_id, [mqtt5.SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE] * count)


def online(config: SessionConfig = CONFIG, connack: mqtt5.ConnAckPacket | None = None) -> Session:
    """At a broker that has kept the session and its subscriptions."""
    session = Session(config, KNOWN)
    connect(session, connack or mqtt5.ConnAckPacket(session_present=True))
    assert session.state is SessionState.ONLINE
    return session


def subscribing(session: Session) -> mqtt5.SubscribePacket:
    """The SUBSCRIBE that follows CONNACK."""
    return only_sent(connect(session, mqtt5.ConnAckPacket()), mqtt5.SubscribePacket)
