"""What waits in a client's memory: its bounds, the order of acknowledgements, and what a new connection makes void."""

from __future__ import annotations

import random

import pytest
from mqtt5 import PublishPacket, QoS

from towline.net.client import Message, ReceiveQueue

MIB = 1 << 20


class Inbox(ReceiveQueue):
    """Arrivals that number what comes."""

    def come(self, qos: int, payload: bytes = b"") -> None:
        packet = PublishPacket("t", payload, qos=QoS(qos), packet_id=self._next_number + 1 if qos else None)
        self.add(Message(packet, "t", self._next_number, self.acknowledge))

    @property
    def numbers(self) -> list[int]:
        return [message.number for message in self.messages]


def test_settled_is_a_prefix_whatever_the_order_of_the_calls() -> None:
    inbox = Inbox()
    for number in range(100):
        inbox.come(number % 3)  # every third has no acknowledgement
    assert inbox.acknowledgeable == 1
    taken = [inbox.pop() for _ in range(100)]
    random.Random(7).shuffle(taken)
    done: set[int] = {number for number in range(100) if number % 3 == 0}
    for message in taken:
        message.ack()
        message.ack()
        done.add(message.number)
        assert inbox.acknowledgeable == next((number for number in range(100) if number not in done), 100)
    assert inbox.acknowledgeable == 100


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_64_mib_stop_the_reading(qos: int) -> None:
    inbox = Inbox()
    for number in range(64):
        assert not inbox.is_full
        inbox.come(qos, bytes(MIB))
        assert inbox.numbers[-1] == number
    assert inbox.is_full
    inbox.pop()
    assert not inbox.is_full


@pytest.mark.parametrize(("resumed", "settled", "waiting"), [(True, 3, [3, 4]), (False, 6, [3, 4, 5])])
def test_a_new_connection(resumed: bool, settled: int, waiting: list[int]) -> None:
    """A kept session sends QoS 1 again under new numbers, and of QoS 2 wants the PUBREC; a lost one wants nothing."""
    inbox = Inbox()
    for qos in (0, 1, 1, 2, 0, 1):
        inbox.come(qos)
    for _ in range(3):
        inbox.pop()
    inbox.connection_opened(2, resumed=resumed)
    assert (inbox.acknowledgeable, inbox.numbers) == (settled, waiting)
    inbox.come(1)
    inbox.connection_opened(2, resumed=resumed)
    assert inbox.numbers[-1] == 6, "a second call does nothing"
    for _ in range(len(inbox.messages)):
        inbox.pop().ack()
    assert inbox.acknowledgeable == 7
