"""What the tests of receipts share: marks, a key, and a message that carries them."""

from __future__ import annotations

from typing import Any

from mqtt5 import PublishPacket, QoS

from towline.delivery.receipts.ledger import ReceiptLedger
from towline.delivery.receipts.mark import Content, Mark, ReceiptKeys
from towline.timing import Timestamp

NOW = Timestamp(1_000_000_000)
KEYS = ReceiptKeys([("", bytes(range(32)))])
CONTENT = Content("t", b"21.5", "text/plain", True, "answers", b"7", (("a", "1"),))


def later(seconds: float, *, set_s: float = 0, boot: int = 0) -> Timestamp:
    """A moment after `NOW`, the wall clock set by some seconds meanwhile; boot 0 is unknown."""
    return Timestamp(NOW.wall_us + int((seconds + set_s) * 1e6), int(seconds * 1e6), boot)


def store(ledger: ReceiptLedger, marks: list[Mark], end: int) -> dict[str, Any]:
    notes = ledger.notes_for_frame(marks)
    ledger.frame_stored(marks, end)
    return notes


def mark(number: int, low: int = 0, epoch: int = 1, nonce: str = "") -> Mark:
    return Mark("p", epoch, number, low, nonce)


def opened(number: int, opening: str, low: int = 0) -> Mark:
    return Mark("p", 1, number, low, "", opening)


def sent(marked: Mark, content: Content = CONTENT) -> PublishPacket:
    return PublishPacket(
        content.topic,
        content.payload,
        qos=QoS.AT_LEAST_ONCE,
        packet_id=1,
        payload_format_indicator=int(content.payload_is_utf8),
        content_type=content.content_type,
        response_topic=content.response_topic,
        correlation_data=content.correlation_data,
        user_properties=[*content.user_properties, *marked.properties()],
    )
