"""A line that flips bits between broker and client: whatever arrives, decoder and session end in Close.

The stream is what a real exchange with the model broker brought; 3.5 % of its bits are flipped, as the ETSI test ware
does, or a few, which come deeper. Nothing may be raised, and a client that hears nothing sensible gives up by its keep
alive [MQTT-3.1.2-24].
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

import pytest
from mqtt5 import ConnAckPacket, PubAckPacket, SubAckPacket, SubAckReasonCode

from tests.unit.mqtt.model_broker import Habits, ModelBroker
from towline.mqtt.checks import MalformedPacket
from towline.mqtt.codec import Decoder
from towline.mqtt.events import (
    AckWatermark,
    Action,
    Close,
    ConnectionLost,
    ConnectionOpened,
    DecodeFailed,
    Deliver,
    DeliveryStored,
    Event,
    Filter,
    PacketsReceived,
    Publish,
    PublishAcknowledged,
    Send,
    SessionConfig,
    SessionRecord,
    Tick,
)
from towline.mqtt.message import OutboundMessage
from towline.mqtt.session import Session, SessionState

CONFIG: Final = SessionConfig("line", "proxy", (Filter("t", qos=2),), receive_maximum=20, topic_alias_maximum=3)
SEEDS: Final = range(60)
LIMIT: Final = 1 << 20


class Client:
    """Drives decoder and session as the pump does, on a disk that is always ready."""

    def __init__(self, version: int) -> None:
        config = replace(CONFIG, protocol=version, topic_alias_maximum=3 if version == 5 else 0)
        self.session = Session(config, SessionRecord("line", established=True, subscriptions={}))
        self.decoder = Decoder(LIMIT, version)
        self.sent = bytearray()
        self.close: Close | None = None
        self.now = 0.0

    def handle(self, event: Event) -> None:
        for action in self.session.handle(event, self.now):
            self._perform(action)
        self.session.validate()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            self.sent += action.data
        elif isinstance(action, Deliver):
            self.handle(AckWatermark(action.first_number + len(action.messages)))
            self.handle(DeliveryStored(action.delivery_id))
        elif isinstance(action, Close):
            self.close = action

    def read(self, data: bytes) -> None:
        try:
            items = self.decoder.feed(data)
        except MalformedPacket as error:
            self.handle(DecodeFailed(str(error), error.reason))
            assert self.close is not None
        else:
            self.handle(PacketsReceived(items))

    def publish(self, token: int) -> None:
        self.handle(Publish(token, OutboundMessage("o", b"%d" % token, qos=token % 3)))

    def wait_for_close(self) -> None:
        for _ in range(5):
            if self.close is not None:
                return
            self.now = self.session.deadline() or self.now
            self.handle(Tick())
        raise AssertionError(f"still {self.session.state} though nothing comes any more")


def exchange(version: int) -> list[bytes]:
    """What a broker sends in an ordinary exchange, piece by piece."""
    broker, client = ModelBroker(Habits(version=version, receive_maximum=9)), Client(version)
    broker.connect()
    client.handle(ConnectionOpened())
    pieces: list[bytes] = []
    for turn in range(30):
        broker.offer(turn % 3)
        client.publish(turn)
        broker.receive(bytes(client.sent))
        client.sent.clear()
        broker.answer(9)
        broker.release(9)
        broker.flow(9)
        pieces.append(broker.take(LIMIT))
        client.read(pieces[-1])
    assert client.session.state is SessionState.ONLINE
    return pieces


def flipped(data: bytes, share: float, random: Random) -> bytes:
    flips = [random.random() < share for _ in range(8 * len(data))]
    return bytes(byte ^ sum(flips[8 * at + bit] << bit for bit in range(8)) for at, byte in enumerate(data))


@pytest.mark.parametrize("version", [5, 4, 3])
@pytest.mark.parametrize("share", [0.035, 0.004, 0.0005])
@pytest.mark.parametrize("sound", [0, 2], ids=["from the start", "once online"])
def test_flipped_bits_end_in_close_and_never_in_an_exception(version: int, share: float, sound: int) -> None:
    """[MQTT-4.13.1-1]: a malformed packet or a protocol error closes the connection."""
    pieces = exchange(version)
    for seed in SEEDS:
        random, client = Random(seed), Client(version)
        client.handle(ConnectionOpened())
        for turn, piece in enumerate(pieces):
            if client.close is None:
                client.read(piece if turn < sound else flipped(piece, share, random))
            if client.close is None:
                client.publish(turn)
        client.wait_for_close()
        assert client.session.state is SessionState.OFFLINE
        assert client.decoder._buffered_bytes <= LIMIT


@pytest.mark.parametrize("version", [5, 4, 3])
def test_every_bit_of_an_exchange_flipped_alone(version: int) -> None:
    stream = b"".join(exchange(version)[:8])
    for bit in range(8 * len(stream)):
        client = Client(version)
        client.handle(ConnectionOpened())
        for turn in range(4):
            client.publish(turn)
        client.read(stream[: bit // 8] + bytes([stream[bit // 8] ^ 1 << bit % 8]) + stream[bit // 8 + 1 :])
        client.wait_for_close()


def test_an_answer_to_a_publish_that_still_waits_to_be_sent_again() -> None:
    """A smaller Receive Maximum holds it back [MQTT-3.3.4-9]; the broker says it has it."""
    client = Client(5)
    client.handle(ConnectionOpened())
    granted = SubAckPacket(1, [SubAckReasonCode.GRANTED_QOS_EXACTLY_ONCE]).write()
    client.read(ConnAckPacket(session_present=True, receive_max=9).write() + granted)
    for token in (1, 4):
        client.publish(token)
    client.handle(ConnectionLost())
    client.handle(ConnectionOpened())
    client.read(ConnAckPacket(session_present=True, receive_max=1).write())
    waiting = list(client.session.outbound.in_flight)[1]
    actions = client.session.handle(PacketsReceived([PubAckPacket(waiting)]), 1.0)
    client.session.validate()
    assert [a.token for a in actions if isinstance(a, PublishAcknowledged)] == [4]
    first = next(iter(client.session.outbound.in_flight))
    actions = client.session.handle(PacketsReceived([PubAckPacket(first)]), 1.0)
    assert [a.token for a in actions if isinstance(a, PublishAcknowledged)] == [1]
    assert not client.session.outbound.in_flight
