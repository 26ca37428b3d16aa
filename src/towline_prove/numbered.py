"""Numbered test message: publisher, number and time as one JSON object, padded to a size, checkable to the byte."""

from __future__ import annotations

import re
from typing import NamedTuple

_PAYLOAD_PATTERN = re.compile(
    rb'\{"r":"([\w.-]*)","p":(\d+),"n":(\d+),"d":"([\w.-]*)","t":(\d+),"s":(\d+),"x":"(x*)"\}'
)
#: Bytes that the longest fields need; a smaller size would pad nothing.
MIN_SIZE = 110


class NumberedMessage(NamedTuple):
    """Content of a numbered payload.

    Attributes:
        run: Name of the run, so that several runs can share a topic.
        publisher: Number of the MQTT connection that sent it, from 0.
        number: Position in that publisher's sequence, from 0 without gaps.
        device: Key whose messages must stay in order.
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
    """Encoder for payloads of one publisher: ``encode(number, device, sent_ns) -> bytes``.

    Args:
        run: Name of the run; letters, digits, ``_ . -``.
        publisher: Number of the publisher.
        size: Bytes of every payload; longer only where the fields need it.
    """

    def __init__(self, run: str, publisher: int, size: int) -> None:
        self._json_head = f'{{"r":"{run}","p":{publisher},"n":'
        self._size = size
        self._padding = "x" * size

    def __call__(self, number: int, device: str, sent_ns: int) -> bytes:
        """Encode one payload."""
        text = f'{self._json_head}{number},"d":"{device}","t":{sent_ns},"s":{self._size},"x":"'
        return f'{text}{self._padding[: max(0, self._size - len(text) - 2)]}"}}'.encode()


def decode_message(payload: bytes | None) -> NumberedMessage | None:
    """Decode a payload; None if a single byte differs from the encoder's output."""
    match = _PAYLOAD_PATTERN.fullmatch(payload or b"")
    if match is None:
        return None
    run, publisher, number, device, sent_ns, size, padding = match.groups()
    if match.end() != int(size) and (padding or match.end() < int(size)):
        return None
    return NumberedMessage(run.decode(), int(publisher), int(number), device.decode(), int(sent_ns), match.end())
