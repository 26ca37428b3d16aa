"""Bytes of a journal, frames with a checksum each; what it holds besides its rows, and how frames change that.

    header, 48 bytes, little endian          section             payload
    magic version kind flags epoch rows      small JSON object   depends on the kind
    first durable section payload 0 crc      padded to 8         padded to 8

Everything starts at a multiple of 8, so that an Arrow batch is used where it lies in the mapped file.

`durable` says how many bytes of this file were known to be durable when the frame was written. It tells damage from
an unfinished write: a bad frame that a later frame calls durable was durable once, and must not be cut.
Pure: nothing here opens a file. docs/journal-format.md shows the same for people.
"""

from __future__ import annotations

import base64
import enum
import json
import re
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
from crc32c import crc32c

from towline.errors import JournalDamaged, JournalError
from towline.version import version

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
        return frame_bytes(self.section, self.payload)

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

    `first` is the offset of its first row, or of the next row when it has none; `durable` how many bytes of the
    segment are known to be durable now; `section` a small JSON object that becomes durable with the rows.

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


FORMAT = 3

#: What becomes durable with a frame beside its rows, by the fields of `JournalState`. ``released`` are QoS 2 packet ids
#: that are free again, before those of ``held``; None among ``notes`` removes one; all else is what it is from then on.
Changes: TypeAlias = Mapping[str, Any]


class Provenance(NamedTuple):
    """Which openings of a journal wrote the rows of a segment, all of them one, and the row below its first."""

    rows: str
    below: str


@dataclass
class JournalState:
    """Everything that a snapshot holds and later frames change."""

    #: 12 hex digits, the same for the life of the journal
    journal_id: str
    #: grows by one with every opening; a frame never carries a larger one [I8]
    epoch: int
    #: the offset of the next row; only grows
    end: int = 0
    #: rows below it may be gone: what whole segments were removed up to, always <= every watermark
    floor: int = 0
    #: consumer -> offset up to which it is done, each only grows, none > end
    consumers: dict[str, int] = field(default_factory=dict)
    #: what `set_session` was given last
    session: dict[str, Any] = field(default_factory=dict)
    #: counted reasons [I11]
    ledger: dict[str, int] = field(default_factory=dict)
    #: packet id -> number of its row and digest, while the broker has not released it [I3]; number < end
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: name -> any JSON value but null, as noted last: what an owner has to know exactly as long as the rows beside it
    notes: dict[str, Any] = field(default_factory=dict)
    #: names the opening that writes: 8 random hex digits, another for each, so that two journals that went on from the
    #: same copy differ [I14]; "" before the first
    incarnation: str = ""
    #: incarnation that wrote row `end - 1`; "" when there was none
    newest: str = ""

    @property
    def origin(self) -> Provenance:
        """That of a segment that begins here."""
        return Provenance(self.incarnation, self.newest)

    def begin(self) -> None:
        """Begin another opening [I8], [I14]."""
        self.epoch += 1
        self.incarnation = secrets.token_hex(4)


@dataclass(frozen=True)
class Snapshot:
    """The first frame of a segment: the state there, the rows' schema, and the segment before it."""

    state: JournalState
    schema: Any
    #: 1 for the first segment of a journal, then one more each; without holes
    sequence: int
    #: size in bytes of the segment before this one, 0 for the first: a sealed file that lost its end shows at once
    previous_bytes: int
    #: version of the Towline that began the segment
    towline: str = field(default_factory=version)

    def encode(self) -> bytes:
        """Return the payload of the frame."""
        state = self.state
        return encode_json(
            {
                "format": FORMAT,
                "towline": self.towline,
                "journal": state.journal_id,
                "sequence": self.sequence,
                "previous_bytes": self.previous_bytes,
                "schema": base64.b64encode(self.schema.serialize()).decode("ascii"),
                "incarnation": state.incarnation,
                "below": state.newest,
                **{name: part.encode(getattr(state, name)) for name, part in _PARTS.items() if part.kept},
            }
        )

    @classmethod
    def decode(cls, where: str, header: Header, payload: bytes) -> Snapshot:
        """Return the snapshot in an intact frame.

        Raises:
            JournalError: TL-J09, it is of another format, or the frame is none.
        """
        if header.kind != Kind.SNAPSHOT:
            raise foreign(where, f"starts with a frame of kind {header.kind} instead of a snapshot")
        content = decode_json(where, payload)
        if content.get("format") != FORMAT:
            wrote = f"has format {content.get('format')}, of Towline {content.get('towline', 'before 0.2.0rc1')}"
            raise foreign(where, f"{wrote}; this one, {version()}, reads format {FORMAT}")
        state = JournalState(content["journal"], header.epoch, header.first)
        state.incarnation, state.newest = content["incarnation"], content["below"]
        apply_changes(state, {name: part.decode(content[name]) for name, part in _PARTS.items() if part.kept})
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["schema"])))
        return cls(state, schema, content["sequence"], content["previous_bytes"], content["towline"])


def apply_frame(where: str, state: JournalState, header: Header, section: bytes) -> None:
    """Change `state` as an intact frame says.

    Raises:
        JournalError: TL-J09, the kind or a part of the section is unknown: a newer Towline wrote it.
        JournalDamaged: TL-J05, the frame does not continue the one before it.
    """
    if header.kind != Kind.CHANGES or header.flags:
        raise foreign(
            where, f"has a frame of kind {header.kind}, flags {header.flags}, which this Towline doesn't know"
        )
    if header.first != state.end:
        raise damaged(where, f"rows {state.end:,} to {header.first:,} are missing between two frames")
    if header.rows:
        state.end, state.newest = header.end, state.incarnation
    if section:
        content = decode_json(where, section)
        if unknown := content.keys() - _PARTS.keys():
            raise foreign(where, f"has a frame with {', '.join(sorted(unknown))}, which this Towline doesn't know")
        apply_changes(state, {name: part.decode(content[name]) for name, part in _PARTS.items() if name in content})


def apply_changes(state: JournalState, changes: Changes) -> None:
    """Change the state, when a frame was written or is read."""
    for name, value in changes.items():
        _PARTS[name].change(state, value)


def section_of(changes: Changes) -> bytes:
    """Return the section of a frame with these changes, empty when there are none."""
    return encode_json({name: part.encode(changes[name]) for name, part in _PARTS.items() if name in changes})


def _drop(state: JournalState, packet_ids: Sequence[int]) -> None:
    for packet_id in packet_ids:
        state.held.pop(packet_id, None)


def _take_notes(state: JournalState, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            state.notes.pop(name, None)
        else:
            state.notes[name] = value


def _pack_held(held: Mapping[int, tuple[int, int]]) -> list[str]:
    """Three columns: a chunk can bring thousands, and JSON numbers would cost more than the rows."""
    numbers, digests = zip(*held.values(), strict=True) if held else ((), ())
    return [_pack("H", tuple(held)), _pack("Q", numbers), _pack("I", digests)]


def _unpack_held(columns: Sequence[str]) -> dict[int, tuple[int, int]]:
    ids, numbers, digests = (_unpack(code, text) for code, text in zip("HQI", columns, strict=True))
    return dict(zip(ids, zip(numbers, digests, strict=True), strict=True))


def _pack(code: str, values: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode("ascii")


def _unpack(code: str, text: str) -> tuple[int, ...]:
    content = base64.b64decode(text)
    return struct.unpack(f"<{len(content) // struct.calcsize('<' + code)}{code}", content)


class _Part(NamedTuple):
    """One kind of change: what it does to the state, and how JSON has it."""

    change: Callable[[JournalState, Any], None]
    encode: Callable[[Any], object] = dict
    decode: Callable[[Any], Any] = dict
    #: It is a field of the state, and stands in snapshots.
    kept: bool = True


#: What can become durable with a frame, in the order in which it is done: ids are freed before they are held again.
_PARTS: Final = {
    "floor": _Part(lambda state, floor: setattr(state, "floor", floor), int, int),
    "consumers": _Part(lambda state, consumers: setattr(state, "consumers", consumers)),
    "session": _Part(lambda state, session: setattr(state, "session", session)),
    "ledger": _Part(lambda state, totals: state.ledger.update(totals)),
    "released": _Part(_drop, partial(_pack, "H"), partial(_unpack, "H"), kept=False),
    "held": _Part(lambda state, held: state.held.update(held), _pack_held, _unpack_held),
    "notes": _Part(_take_notes),
}


def encode_json(content: Mapping[str, object]) -> bytes:
    """Return compact UTF-8 JSON."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def decode_json(where: str, content: bytes) -> dict[str, Any]:
    """Return the JSON object in an intact frame.

    Raises:
        JournalError: TL-J09, it is none: something else wrote this frame.
    """
    try:
        decoded = json.loads(content)
    except ValueError as error:
        raise foreign(where, "has a frame whose content is not JSON") from error
    if not isinstance(decoded, dict):
        raise foreign(where, "has a frame whose content is not a JSON object")
    return decoded


def foreign(where: str, what: str) -> JournalError:
    """Return the error for a file that this version can't read, though it may be in order."""
    return JournalError(
        "TL-J09", where, what, "Open it with the Towline that wrote it, or give another directory; nothing was changed."
    )


def damaged(where: object, what: str) -> JournalDamaged:
    """Return the error for durable bytes that no longer read back, with what a person can do about it [I12]."""
    return JournalDamaged(
        "TL-J05",
        str(where),
        what,
        "Nothing was changed. Check the disk, keep a copy of the directory, and restore this file from a backup; "
        "without one, start with an empty directory: rows that were not committed before the damage are lost.",
    )
