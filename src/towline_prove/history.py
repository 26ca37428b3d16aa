"""What the senders claim, on disk before the wire: attempts before the send, outcomes after the answer.

The file survives a kill -9 of the load generator (the page cache is the kernel's), so a killed sender can still be
judged: what has an attempt and no outcome may or may not have arrived (Jepsen's *recovered*, reference checker
`total-queue`). One fixed record covers a whole run of numbers, so recording costs a fraction of a microsecond a
message.

    first line   JSON, the plan of the load
    records      kind (1) · reserved (1) · publisher (2) · first number (4) · count (4) · wall clock (8), little endian
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from typing import Any, NamedTuple, Self

from towline.errors import ConfigError

__all__ = ["Claims", "HistoryWriter", "Record", "SenderRecord", "ranges", "read_history"]

_RECORD = struct.Struct("<BxHIId")


class SenderRecord(IntFlag):
    """What became of one message, as its sender saw it; the values are the record kinds in the file."""

    ATTEMPTED = 1
    ACKED = 2
    RESENT = 4
    REFUSED = 8


_ADD = {claim: bytes(value | claim for value in range(256)) for claim in SenderRecord}


class Record(NamedTuple):
    """One claim about a run of numbers.

    Attributes:
        claim: What happened.
        publisher: Whose numbers.
        first: First number.
        length: How many numbers follow each other from there.
        at: Wall clock, seconds since 1970 UTC.
    """

    claim: SenderRecord
    publisher: int
    first: int
    length: int
    at: float


@dataclass(slots=True)
class Claims:
    """The claims of all publishers of one load: for each number a byte of `SenderRecord` flags.

    Attributes:
        plan: The plan from the head of the file.
        flags: Publisher number → flags, indexed by message number.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    flags: dict[int, bytearray] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Take one record in."""
        flags = self.flags.setdefault(record.publisher, bytearray())
        end = record.first + record.length
        if len(flags) < end:
            flags.extend(bytes(end - len(flags)))
        flags[record.first : end] = flags[record.first : end].translate(_ADD[record.claim])

    def of(self, publisher: int, number: int) -> SenderRecord:
        """Flags of one message; none when it was never attempted."""
        flags = self.flags.get(publisher, b"")
        return SenderRecord(flags[number]) if number < len(flags) else SenderRecord(0)

    def count(self, claim: SenderRecord) -> int:
        """How many messages carry this claim."""
        carrying = bytes(value for value in range(256) if value & claim)
        return sum(len(flags) - len(flags.translate(None, carrying)) for flags in self.flags.values())

    @property
    def run(self) -> str:
        """Name of the run."""
        return str(self.plan.get("run", ""))


class HistoryWriter:
    """Appends claims to a history file.

    Args:
        path: The file; it must not exist yet, a history is never overwritten.
        plan: Put into the first line.

    Raises:
        ConfigError: When the file exists already (TL-C81).
    """

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        self._fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, json.dumps(plan).encode() + b"\n")
        try:
            os.link(draft, path)  # with its first line, because a reader may be waiting for it
        except FileExistsError:
            os.close(self._fd)
            raise ConfigError(
                "TL-C81", str(path), "a history is there already and is never overwritten", "Name another directory."
            ) from None
        finally:
            draft.unlink()
        self._pending = bytearray()

    def note(self, claim: SenderRecord, publisher: int, first: int, count: int = 1) -> None:
        """Remember a claim; it is on its way to disk only after `flush`."""
        self._pending += _RECORD.pack(claim, publisher, first, count, time.time())

    def note_all(self, claim: SenderRecord, publisher: int, numbers: Iterable[int]) -> None:
        """Remember a claim about many numbers, in the order given."""
        for first, count in ranges(numbers):
            self.note(claim, publisher, first, count)

    def flush(self) -> None:
        """Hand everything remembered to the kernel; call it before the bytes it speaks of are sent."""
        while self._pending:
            del self._pending[: os.write(self._fd, self._pending)]  # a disk that fills takes a part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        os.close(self._fd)


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


def records(data: bytes) -> Iterator[Record]:
    """Decode records; a torn one at the end (the writer was killed inside a write) is left out."""
    whole = len(data) - len(data) % _RECORD.size
    for kind, publisher, first, count, at in _RECORD.iter_unpack(data[:whole]):
        yield Record(SenderRecord(kind), publisher, first, count, at)


def read_history(path: Path) -> Claims:
    """Read a history file, also while it is being written.

    Raises:
        ConfigError: When the file is missing or has no plan in its first line (TL-C82).
    """
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        claims = Claims(plan=json.loads(head))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "TL-C82", str(path), f"not a readable history ({error})", "Name the directory of a load."
        ) from error
    for record in records(body):
        claims.add(record)
    return claims
