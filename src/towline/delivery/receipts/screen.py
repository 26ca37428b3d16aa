"""The ledger's word on messages, as a session asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from towline.delivery.receipts.ledger import Ledger
from towline.mqtt.plain import MessageColumns
from towline.mqtt.screens import NOTHING, Screening
from towline.mqtt.stubs import Published

__all__ = ["MarkScreen"]


class MarkScreen:
    """Leaves out what publishers with receipts send again; the marks of what is new are the tags.

    Args:
        ledger: Of the publishers.
        now_s: The time, in seconds since 1970.
    """

    tagged = True

    def __init__(self, ledger: Ledger, now_s: Callable[[], float]) -> None:
        self._ledger = ledger
        self._now_s = now_s

    def packets(self, packets: Sequence[Published], topics: Sequence[str]) -> Screening:
        """Of messages, their topic aliases resolved."""
        return self._ledger.screen(packets, topics, int(self._now_s()))

    def plain(self, columns: MessageColumns) -> bytes:
        """Nothing: marks stand in properties."""
        del columns
        return NOTHING
