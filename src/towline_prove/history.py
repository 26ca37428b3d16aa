"""What the senders claim, on disk before the wire: attempts before the send, outcomes after the answer.

The file survives a kill -9 of the load generator (the page cache is the kernel's), so a killed sender can still be
judged: what has an attempt and no outcome may or may not have arrived (Jepsen's *recovered*, reference checker
`total-queue`). One fixed record covers a whole run of numbers, so recording costs a fraction of a microsecond a
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

_RECORD = struct.Struct("<BxHII")


class SenderRecord(IntFlag):
    """What became of one message, as its sender saw it; the values are the record kinds in the file."""

    ATTEMPTED = 1
    ACKED = 2
    RESENT = 4
    REFUSED = 8


_ADD = {claim: bytes(value | claim for value in range(256)) for claim in SenderRecord}


class Claims:
    """The claims of all publishers of one load: for each number a byte of `SenderRecord` flags.

    Args:
        path: The history file, which may still be written; none for claims that are only added.
        run: Name of the run; that of the plan in the file's head where there is one.

    Attributes:
        flags: Publisher number → flags, indexed by message number.
    """

    def __init__(self, path: Path | None = None, *, run: str = "") -> None:
        self.path = path
        self.run = run
        self.flags: dict[int, bytearray] = {}
        self._end = 0

    def add(self, claim: SenderRecord, publisher: int, first: int, count: int = 1) -> None:
        """Take a claim about `count` numbers from `first` on."""
        flags = self.flags.setdefault(publisher, bytearray())
        end = first + count
        if len(flags) < end:
            flags.extend(bytes(end - len(flags)))
        flags[first:end] = flags[first:end].translate(_ADD[claim])

    def of(self, publisher: int, number: int) -> SenderRecord:
        """Flags of one message; none when it was never attempted."""
        flags = self.flags.get(publisher, b"")
        return SenderRecord(flags[number]) if number < len(flags) else SenderRecord(0)

    def count(self, claim: SenderRecord) -> int:
        """How many messages carry this claim."""
        carrying = bytes(value for value in range(256) if value & claim)
        return sum(len(flags) - len(flags.translate(None, carrying)) for flags in self.flags.values())

    def read(self) -> Self:
        """Read on; what is torn at the end (the writer is inside a write, or was killed there) is left out.

        Raises:
            ConfigError: When the file is missing or has something else in its first line (TL-C82).
        """
        assert self.path is not None
        try:
            with self.path.open("rb") as file:
                file.seek(self._end)
                if not self._end:
                    head = file.readline()
                    if not head.endswith(b"\n"):
                        return self
                    self.run = str(json.loads(head).get("run", ""))
                    self._end = len(head)
                data = file.read()
        except (OSError, ValueError) as error:
            what = f"not a readable history ({error})"
            raise ConfigError("TL-C82", str(self.path), what, "Name the directory of a load.") from error
        whole = len(data) - len(data) % _RECORD.size
        for kind, publisher, first, count in _RECORD.iter_unpack(data[:whole]):
            self.add(SenderRecord(kind), publisher, first, count)
        self._end += whole
        return self


class HistoryWriter:
    """Appends claims to a history file.

    Args:
        path: The file; it must not exist yet, a history is never overwritten.
        plan: Put into the first line.

    Raises:
        ConfigError: When the file exists already (TL-C81).
    """

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        try:
            self._file = path.open("xb")
        except FileExistsError:
            what = "a history is there already and is never overwritten"
            raise ConfigError("TL-C81", str(path), what, "Name another directory.") from None
        self._file.write(json.dumps(plan).encode() + b"\n")
        self.flush()

    def note(self, claim: SenderRecord, publisher: int, first: int, count: int = 1) -> None:
        """Remember a claim; it is on its way to disk only after `flush`."""
        self._file.write(_RECORD.pack(claim, publisher, first, count))

    def note_all(self, claim: SenderRecord, publisher: int, numbers: Iterable[int]) -> None:
        """Remember a claim about many numbers, in the order given."""
        for first, count in ranges(numbers):
            self.note(claim, publisher, first, count)

    def flush(self) -> None:
        """Hand everything remembered to the kernel; call it before the bytes it speaks of are sent."""
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Fold numbers into (first, count) runs, keeping their order."""
    first, count = 0, 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


def read_history(path: Path) -> Claims:
    """The claims in a file now; as `Claims.read`."""
    return Claims(path).read()
