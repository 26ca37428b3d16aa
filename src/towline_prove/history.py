"""Claims of the senders: attempts on disk before the send, outcomes after the answer.

The file survives a kill -9 of the load generator (the page cache is the kernel's), so a killed sender can still be
checked: an attempt without an outcome may or may not have arrived (Jepsen's *recovered*, reference checker
`total-queue`). One fixed record covers a whole range of numbers, so recording costs a fraction of a microsecond a
message.

    first line   JSON, the plan of the load
    records      kind (1) · reserved (1) · publisher (2) · first number (4) · count (4), little endian
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from enum import IntFlag
from pathlib import Path
from typing import Any, Self

from towline.errors import ConfigError

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
        """Read new records of the file; an incomplete last one (being written, or killed there) is skipped.

        Raises:
            ConfigError: The file is missing or has an invalid first line (TL-C82).
        """
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
    """Writer that appends claims to a history file.

    Args:
        path: The file; it must not exist yet, a history is never overwritten.
        plan: Plan of the load, for the first line.

    Raises:
        ConfigError: The file exists already (TL-C81).
    """

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
