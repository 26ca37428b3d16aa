"""Numbered test messages, and the claims of their senders: attempts on disk before the send, outcomes after the answer.

The file survives a kill -9 of the load generator (the page cache is the kernel's), so a killed sender can still be
checked: an attempt without an outcome may or may not have arrived (Jepsen's *recovered*, reference checker
`total-queue`). One fixed record covers a whole range of numbers, so recording costs a fraction of a microsecond a
message.

    first line   JSON, the plan of the load
    records      kind (1) · reserved (1) · publisher (2) · first number (4) · count (4), little endian
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from enum import IntFlag
from pathlib import Path
from typing import Any, NamedTuple, Self

from towline.errors import ConfigError

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
    """Encoder for payloads of one publisher, at least `size` bytes: ``encode(number, device, sent_ns) -> bytes``."""

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


_CLAIM_STRUCT = struct.Struct("<BxHII")


class SenderClaim(IntFlag):
    """Outcome of one message as its sender saw it; the values are the record kinds in the file."""

    ATTEMPTED = 1
    ACKED = 2
    RESENT = 4
    REFUSED = 8


_ADD_FLAG = {claim: bytes(value | claim for value in range(256)) for claim in SenderClaim}


class Claims:
    """Claims of all publishers of one load: a byte of `SenderClaim` flags for each number.

    Args:
        path: The history file, which may still be written; None for claims that are only added.
        run: Name of the run; replaced by that of the plan in the file's first line.

    Attributes:
        flags: Publisher number → flags, indexed by message number.
    """

    def __init__(self, path: Path | None = None, *, run: str = "") -> None:
        self.path = path
        self.run = run
        self.flags: dict[int, bytearray] = {}
        self._end_position = 0

    def add(self, claim: SenderClaim, publisher: int, first_number: int, count: int = 1) -> None:
        """Add a claim about `count` numbers from `first_number` on."""
        flags = self.flags.setdefault(publisher, bytearray())
        end_number = first_number + count
        if len(flags) < end_number:
            flags.extend(bytes(end_number - len(flags)))
        flags[first_number:end_number] = flags[first_number:end_number].translate(_ADD_FLAG[claim])

    def flags_of(self, publisher: int, number: int) -> SenderClaim:
        """Return the flags of one message; none if it was never attempted."""
        flags = self.flags.get(publisher, b"")
        return SenderClaim(flags[number]) if number < len(flags) else SenderClaim(0)

    def count(self, claim: SenderClaim) -> int:
        """Return the number of messages with this claim."""
        matching_bytes = bytes(value for value in range(256) if value & claim)
        return sum(len(flags) - len(flags.translate(None, matching_bytes)) for flags in self.flags.values())

    def read_file(self) -> Self:
        """Read new records except an incomplete last one (write in progress, or a kill); ConfigError TL-C82."""
        assert self.path is not None
        try:
            with self.path.open("rb") as file:
                file.seek(self._end_position)
                if not self._end_position:
                    header = file.readline()
                    if not header.endswith(b"\n"):
                        return self
                    self.run = str(json.loads(header).get("run", ""))
                    self._end_position = len(header)
                data = file.read()
        except (OSError, ValueError) as error:
            problem = f"not a readable history ({error})"
            raise ConfigError("TL-C82", str(self.path), problem, "Name the directory of a load.") from error
        whole_size = len(data) - len(data) % _CLAIM_STRUCT.size
        for claim, publisher, first_number, count in _CLAIM_STRUCT.iter_unpack(data[:whole_size]):
            self.add(SenderClaim(claim), publisher, first_number, count)
        self._end_position += whole_size
        return self


class HistoryWriter:
    """Writer of claims to a new history file, whose first line is the plan; ConfigError TL-C81 if it exists."""

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        try:
            self._file = path.open("xb")
        except FileExistsError:
            problem = "a history is there already and is never overwritten"
            raise ConfigError("TL-C81", str(path), problem, "Name another directory.") from None
        self._file.write(json.dumps(plan).encode() + b"\n")
        self.flush()

    def add_claim(self, claim: SenderClaim, publisher: int, first_number: int, count: int = 1) -> None:
        """Add a claim; it reaches the kernel only with `flush`."""
        self._file.write(_CLAIM_STRUCT.pack(claim, publisher, first_number, count))

    def add_claims(self, claim: SenderClaim, publisher: int, numbers: Iterable[int]) -> None:
        """Add a claim about many numbers, in the order given."""
        for first_number, count in number_ranges(numbers):
            self.add_claim(claim, publisher, first_number, count)

    def flush(self) -> None:
        """Pass all claims to the kernel; call it before the bytes they describe are sent."""
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def number_ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Fold numbers into (first, count) ranges, keeping their order."""
    first_number, count = 0, 0
    for number in numbers:
        if count and number == first_number + count:
            count += 1
            continue
        if count:
            yield first_number, count
        first_number, count = number, 1
    if count:
        yield first_number, count


def read_history(path: Path) -> Claims:
    """Return the claims in a file, as `Claims.read_file`."""
    return Claims(path).read_file()
