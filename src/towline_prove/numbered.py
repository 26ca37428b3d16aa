"""A numbered message: who sent it, its number, when; one JSON object, padded to a size, checkable to the byte."""

from __future__ import annotations

import re
from typing import NamedTuple

_SHAPE = re.compile(rb'\{"r":"([\w.-]*)","p":(\d+),"n":(\d+),"d":"([\w.-]*)","t":(\d+),"s":(\d+),"x":"(x*)"\}')
#: Bytes that the longest fields need; a smaller size would pad nothing.
MIN_SIZE = 110


class Numbered(NamedTuple):
    """What a payload says about itself.

    Attributes:
        run: Names the run, so that several runs can share a topic.
        publisher: Number of the MQTT connection that sent it, from 0.
        number: Position in that publisher's sequence, from 0 without gaps.
        device: The key under which order must hold.
        sent_ns: Wall clock when the payload was built, nanoseconds since 1970 UTC.
        size: Bytes of the whole payload.
    """

    run: str
    publisher: int
    number: int
    device: str
    sent_ns: int
    size: int


class encoder:  # noqa: N801 - used as a function that remembers the constant part
    """Make payloads of one publisher: ``encode(number, device, sent_ns) -> bytes``.

    Args:
        run: Name of the run; letters, digits, ``_ . -``.
        publisher: Number of the publisher.
        size: Bytes of every payload; longer only where the fields need it.
    """

    def __init__(self, run: str, publisher: int, size: int) -> None:
        self._head = f'{{"r":"{run}","p":{publisher},"n":'
        self._size = size
        self._pad = "x" * size

    def __call__(self, number: int, device: str, sent_ns: int) -> bytes:
        """Build one payload."""
        text = f'{self._head}{number},"d":"{device}","t":{sent_ns},"s":{self._size},"x":"'
        return f'{text}{self._pad[: max(0, self._size - len(text) - 2)]}"}}'.encode()


def decode(payload: bytes | None) -> Numbered | None:
    """Read a payload back; None when a single byte differs from what an encoder makes."""
    match = _SHAPE.fullmatch(payload or b"")
    if match is None:
        return None
    run, publisher, number, device, sent_ns, size, padding = match.groups()
    if match.end() != int(size) and (padding or match.end() < int(size)):
        return None
    return Numbered(run.decode(), int(publisher), int(number), device.decode(), int(sent_ns), match.end())
