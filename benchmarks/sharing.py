"""What a member that shares by hash pays for what it leaves out, beside a gateway that stores all: no broker, no disk.

From received bytes to rows and acknowledgements; half of the messages are another member's.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Final

from mqtt5 import PublishPacket, QoS

from towline.delivery.intake import to_rows
from towline.delivery.members import HashedShare, KeyLevel, MemberScreen
from towline.delivery.plain import plain_run
from towline.mqtt.codec import Decoder, PublishRun, encode
from towline.mqtt.inbound import Inbound
from towline.mqtt.plain import PlainRun
from towline.mqtt.screens import Screen

__all__ = ["run"]

#: Messages of one read, of as many devices.
_CHUNK: Final = 2000
_DEVICES: Final = 50


def run(count: int, rounds: int) -> None:
    """Print the CPU of a message with and without members.

    Args:
        count: Messages of a round.
        rounds: Both are measured so often, in turn.
    """
    member = MemberScreen(HashedShare(2, 0, (KeyLevel("t/+/+/#", 2),)))
    for qos in (1, 2):
        data = b"".join(encode(_message(number, qos), 5) for number in range(_CHUNK))
        pairs = [(_costs(data, qos, None, count), _costs(data, qos, member, count)) for _ in range(rounds)]
        alone, shared = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratios = sorted(one / other for other, one in pairs)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        sys.stdout.write(
            f"QoS {qos}: a gateway alone {alone:.2f} us a message received, one of two by hash {shared:.2f}   "
            f"ratio {shared / alone:.2f} ({spread})\n"
        )


def _message(number: int, qos: int) -> PublishPacket:
    return PublishPacket(f"t/a/d{number % _DEVICES}/x", b"x" * 150, qos=QoS(qos), packet_id=number + 1)


def _costs(data: bytes, qos: int, screen: Screen | None, count: int) -> float:
    """Microseconds of CPU for a message."""
    decoder, inbound = Decoder(1 << 20, 5, plain_run), Inbound()
    inbound.screen = screen
    began = time.process_time()
    for _ in range(count // _CHUNK):
        for item in decoder.feed(data):
            if isinstance(item, PlainRun):
                inbound.plain(item)
            else:
                assert isinstance(item, PublishRun)
                inbound.publishes(item)
        _store(inbound)
        if qos == 2:
            inbound.release(range(1, _CHUNK + 1))
            _store(inbound)
    return (time.process_time() - began) / count * 1e6


def _store(inbound: Inbound) -> None:
    delivery = inbound.hand_over()
    if delivery is not None:
        to_rows(delivery.messages, delivery.first, 0, "g")
        inbound.stored(delivery.ticket)
    inbound.settle(inbound.next_number)
