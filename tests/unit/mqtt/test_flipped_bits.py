"""A line that flips bits between broker and client: whatever arrives, decoder and session end in Close."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

import pytest

from tests.unit.mqtt.model_broker import Habits, ModelBroker
from tests.unit.mqtt.vectors import Client
from towline.mqtt.events import ConnectionOpened, Filter, Publish, SessionConfig, SessionRecord, Tick
from towline.mqtt.message import OutboundMessage
from towline.mqtt.session import SessionState

CONFIG: Final = SessionConfig("line", "proxy", (Filter("t", qos=2),), receive_maximum=20, topic_alias_maximum=3)
LIMIT: Final = 1 << 20


class FlippedClient(Client):
    def __init__(self, version: int) -> None:
        config = replace(CONFIG, protocol=version, topic_alias_maximum=3 if version == 5 else 0)
        super().__init__(config, SessionRecord("line", established=True, subscriptions={}), LIMIT)
        self.handle(ConnectionOpened())

    def publish(self, token: int) -> None:
        self.handle(Publish(token, OutboundMessage("o", b"%d" % token, qos=token % 3)))

    def wait_for_close(self) -> None:
        for _ in range(5):
            if self.closed is not None:
                return
            self.now = self.session.deadline() or self.now
            self.handle(Tick())
        raise AssertionError(f"still {self.session.state} though nothing comes any more")


def exchange(version: int) -> list[bytes]:
    """What a broker sends in an ordinary exchange, piece by piece."""
    broker, client = ModelBroker(Habits(version=version, receive_maximum=9)), FlippedClient(version)
    broker.connect()
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
        client.receive(pieces[-1])
    assert client.session.state is SessionState.ONLINE
    return pieces


def flipped(data: bytes, share: float, random: Random) -> bytes:
    flips = [random.random() < share for _ in range(8 * len(data))]
    return bytes(byte ^ sum(flips[8 * at + bit] << bit for bit in range(8)) for at, byte in enumerate(data))


@pytest.mark.parametrize("version", [5, 4, 3])
@pytest.mark.parametrize("sound", [0, 2], ids=["from the start", "once online"])
def test_flipped_bits_end_in_close_and_never_in_an_exception(version: int, sound: int) -> None:
    """[MQTT-4.13.1-1]: a malformed packet or a protocol error closes the connection."""
    pieces = exchange(version)
    for seed in range(30):
        random, client = Random(seed), FlippedClient(version)
        share = (0.035, 0.004, 0.0005)[seed % 3]  # the first is that of the ETSI test ware
        for turn, piece in enumerate(pieces):
            client.receive(piece if turn < sound else flipped(piece, share, random))
            client.publish(turn)
        client.wait_for_close()
        assert client.session.state is SessionState.OFFLINE
        assert client.decoder._buffered_bytes <= LIMIT
