"""Bytes of a journal: a segment is a row of frames, each with a checksum over all of it.

    header, 48 bytes, little endian          section             payload
    magic version kind flags epoch rows      small JSON object   depends on the kind
    first durable section payload 0 crc      padded to 8         padded to 8

Everything starts at a multiple of 8, so that an Arrow batch is used where it lies in the mapped file.

`durable` says how many bytes of this file were known to be durable when the frame was written. It tells damage from
an unfinished write: a bad frame that a later frame calls durable was durable once, and must not be cut.
Pure: nothing here opens a file. docs/journal-format.md shows the same for people.
"""

from __future__ import annotations

import enum
import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from crc32c import crc32c

from towline.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator

Bytes: TypeAlias = Any  # bytes, memoryview or pyarrow.Buffer: anything with the buffer protocol

MAGIC = b"TWLJ"
_MAGIC = re.compile(MAGIC)
VERSION = 1
_STRUCT = struct.Struct("<4sBBHIIQQII4xI")
HEADER_BYTES = _STRUCT.size
_CRC_AT = HEADER_BYTES - 4
_CRC = struct.Struct("<I")
_LARGEST = (1 << 31) - 1  # Arrow's own limit for one IPC message is far above any sensible batch


class Kind(enum.IntEnum):
    """What a frame holds. A number that is not here was written by a newer Towline."""

    SNAPSHOT = 1
    """The whole state at the head of a segment; always its first frame, and only there."""
    CHANGES = 2
    """`rows` rows from offset `first` on, as one Arrow record batch, perhaps none; in the section what changes."""


class Header(NamedTuple):
    """The fixed part of a frame, in the order in which it lies on disk; sizes in bytes without padding."""

    magic: bytes
    version: int
    kind: int
    flags: int
    epoch: int
    rows: int
    first: int
    durable: int
    section: int
    payload: int
    crc: int

    @property
    def size(self) -> int:
        """Bytes of the whole frame on disk."""
        return HEADER_BYTES + ((self.section + 7) & ~7) + ((self.payload + 7) & ~7)

    @property
    def end(self) -> int:
        """The offset after the last row of this frame."""
        return self.first + self.rows


class Encoded(NamedTuple):
    """A frame ready to be written: its buffers in order and the sum of their bytes."""

    buffers: list[Bytes]
    size: int


def frame_bytes(section: int, payload: int) -> int:
    """Return the bytes on disk of a frame with so many bytes of section and payload."""
    return HEADER_BYTES + (section + 7 & ~7) + (payload + 7 & ~7)


def encode(
    kind: Kind, *, epoch: int, first: int, durable: int, rows: int = 0, section: bytes = b"", payload: Bytes = b""
) -> Encoded:
    """Return the frame as buffers; a large payload is not copied.

    Args:
        kind: What it holds.
        epoch: The epoch of the journal that writes it [I8].
        first: Offset of its first row, or of the next row when it has none.
        durable: Bytes of the segment that are known to be durable now.
        rows: How many rows the payload holds.
        section: A small JSON object that becomes durable together with the rows.
        payload: The rows, or of a snapshot the state.

    Raises:
        JournalError: TL-J08, the batch is larger than a frame can be.
    """
    if len(payload) > _LARGEST:
        raise JournalError(
            "TL-J08", "journal", f"a batch of {len(payload):,} bytes is too large for one frame", "Append smaller ones."
        )
    fields = (MAGIC, VERSION, kind, 0, epoch, rows, first, durable, len(section), len(payload))
    header = bytearray(_STRUCT.pack(*fields, 0))
    buffers: list[Bytes] = [header]
    crc, size = crc32c(header[:_CRC_AT]), HEADER_BYTES
    for content in (section, payload):
        if content:
            buffers += (content, bytes(-len(content) % 8)) if len(content) % 8 else (content,)
    for part in buffers[1:]:
        crc, size = crc32c(part, crc), size + len(part)
    _CRC.pack_into(header, _CRC_AT, crc)
    return Encoded(buffers, size)


def header_at(memory: memoryview, position: int, limit: int) -> Header | None:
    """Return the header at `position` if a whole frame can stand there below `limit`; its checksum is not checked."""
    if position + HEADER_BYTES > limit:
        return None
    header = Header._make(_STRUCT.unpack_from(memory, position))
    if header.magic != MAGIC or header.version != VERSION or position + header.size > limit:
        return None
    return header


def intact_at(memory: memoryview, position: int, limit: int) -> Header | None:
    """Return the header at `position` if the whole frame there is as it was written."""
    header = header_at(memory, position, limit)
    if header is None:
        return None
    crc = crc32c(memory[position : position + _CRC_AT])
    crc = crc32c(memory[position + HEADER_BYTES : position + header.size], crc)
    return header if crc == header.crc else None


def intact_after(memory: memoryview, position: int, limit: int) -> Iterator[tuple[int, Header]]:
    """Yield the frames that are intact behind a bad one at `position`; its own content is searched too."""
    reached = position + 1
    for found in _MAGIC.finditer(memory, reached, limit):
        at = found.start()
        if at % 8 == 0 and at >= reached and (header := intact_at(memory, at, limit)):
            yield at, header
            reached = at + header.size


def section_at(memory: memoryview, position: int, header: Header) -> bytes:
    """Return the section of the frame at `position`."""
    start = position + HEADER_BYTES
    return bytes(memory[start : start + header.section])


def payload_at(position: int, header: Header) -> int:
    """Return where in the file the payload of the frame at `position` starts."""
    return position + frame_bytes(header.section, 0)
