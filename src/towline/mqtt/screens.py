"""What the owner of a session says of messages before they get their numbers: which are not stored, and why.

A message that is left out is acknowledged in its place like any other, and takes no number. With QoS 2 its packet id is
known until its PUBREL, in memory alone: after a crash the id is free, and PUBCOMP with 0x92 ends it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol

from towline.mqtt.plain import MessageColumns
from towline.mqtt.stubs import Published

__all__ = ["NOTHING", "UNSCREENED", "LeftOut", "Screen", "Screening", "kept"]


class LeftOut(IntEnum):
    """What becomes of a message; one byte in `Screening.left_out`."""

    STORE = 0
    #: Stored before, by a name that its publisher gave it.
    REPEAT = 1
    #: Another member of the line stores it.
    OTHER_MEMBER = 2


class Screening(NamedTuple):
    """What the owner says of some messages.

    Attributes:
        left_out: One byte a message, a `LeftOut`; empty where all are stored.
        tags: One for each message, or none at all; they come back in `Messages.tags`.
    """

    left_out: bytes
    tags: Sequence[Any]


#: Nothing is left out.
NOTHING: Final = b""
#: Of an owner that says nothing.
UNSCREENED: Final = Screening(NOTHING, ())
#: 1 for each message that is stored.
_KEPT: Final = b"\x01" + bytes(255)


class Screen(Protocol):
    """The owner's word."""

    @property
    def tagged(self) -> bool:
        """Whether messages get tags, those of `plain` too: None there."""

    def packets(self, packets: Sequence[Published], topics: Sequence[str]) -> Screening:
        """Of messages, their topic aliases resolved."""

    def plain(self, columns: MessageColumns) -> bytes:
        """`Screening.left_out` of messages without properties."""


def kept(left_out: bytes) -> bytes:
    """1 for each message that is stored, 0 for the others."""
    return left_out.translate(_KEPT)
