"""Binary format of journal frames, each with a checksum, and the journal state that frames change.

    header, 48 bytes, little endian          section             payload
    magic version kind flags epoch rows      small JSON object   depends on the kind
    first durable section payload 0 crc      padded to 8         padded to 8

Every part starts at a multiple of 8, so that an Arrow batch is read from the mapped file without a copy.

`durable_bytes` is the size of the file's durable part when the frame was written. It distinguishes damage from an
unfinished write: a bad frame within the durable part of a later frame was durable once, and must not be cut.
Pure: nothing here opens a file. docs/journal.md#the-format-on-disk describes the format for people.
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

Bytes: TypeAlias = Any  # bytes, memoryview or pyarrow.Buffer: any object with the buffer protocol

MAGIC = b"TWLJ"
_MAGIC_PATTERN = re.compile(MAGIC)
VERSION = 1
_HEADER_STRUCT = struct.Struct("<4sBBHIIQQII4xI")
HEADER_BYTES = _HEADER_STRUCT.size
_CRC_POSITION = HEADER_BYTES - 4
_CRC_STRUCT = struct.Struct("<I")
_MAX_PAYLOAD_BYTES = (1 << 31) - 1  # Arrow's own limit for one IPC message is far above any sensible batch


class FrameKind(enum.IntEnum):
    """Kind of a frame. An unknown number was written by a newer Towline."""

    SNAPSHOT = 1
    """The whole state at the head of a segment; always its first frame, and only there."""
    CHANGES = 2
    """`rows` rows from offset `first` on, as one Arrow record batch, perhaps none; in the section what changes."""


class FrameHeader(NamedTuple):
    """Fixed part of a frame, with its fields in the order on disk; sizes in bytes without padding."""

    magic: bytes
    version: int
    kind: int
    flags: int
    epoch: int
    rows: int
    first_offset: int
    durable_bytes: int
    section_bytes: int
    payload_bytes: int
    crc: int

    @property
    def size(self) -> int:
        """Bytes of the whole frame on disk."""
        return frame_bytes(self.section_bytes, self.payload_bytes)

    @property
    def end(self) -> int:
        """Offset after the last row of this frame."""
        return self.first_offset + self.rows


class EncodedFrame(NamedTuple):
    """Encoded frame: its buffers in order and the sum of their bytes."""

    buffers: list[Bytes]
    size: int


def frame_bytes(section_bytes: int, payload_bytes: int) -> int:
    """Return the bytes on disk of a frame with a section and a payload of these sizes."""
    return HEADER_BYTES + (section_bytes + 7 & ~7) + (payload_bytes + 7 & ~7)


def encode_frame(
    kind: FrameKind,
    *,
    epoch: int,
    first_offset: int,
    durable_bytes: int,
    rows: int = 0,
    section: bytes = b"",
    payload: Bytes = b"",
) -> EncodedFrame:
    """Return the frame as buffers; a large payload is not copied.

    `first_offset` is the offset of the frame's first row, or of the next row if it has none. `durable_bytes` is the
    size of the durable part of the segment. `section` is a small JSON object that becomes durable with the rows.

    Raises:
        JournalError: TL-J08, the batch is larger than a frame can be.
    """
    if len(payload) > _MAX_PAYLOAD_BYTES:
        problem = f"a batch of {len(payload):,} bytes is too large for one frame"
        raise JournalError("TL-J08", "journal", problem, "Append smaller batches.")
    fields = (MAGIC, VERSION, kind, 0, epoch, rows, first_offset, durable_bytes, len(section), len(payload))
    header = bytearray(_HEADER_STRUCT.pack(*fields, 0))
    buffers: list[Bytes] = [header]
    crc, size = crc32c(header[:_CRC_POSITION]), HEADER_BYTES
    for content in (section, payload):
        if content:
            buffers += (content, bytes(-len(content) % 8)) if len(content) % 8 else (content,)
    for part in buffers[1:]:
        crc, size = crc32c(part, crc), size + len(part)
    _CRC_STRUCT.pack_into(header, _CRC_POSITION, crc)
    return EncodedFrame(buffers, size)


def header_at(memory: memoryview, position: int, limit: int) -> FrameHeader | None:
    """Return the header at `position` if a whole frame fits there below `limit`; its checksum is not verified."""
    if position + HEADER_BYTES > limit:
        return None
    header = FrameHeader._make(_HEADER_STRUCT.unpack_from(memory, position))
    if header.magic != MAGIC or header.version != VERSION or position + header.size > limit:
        return None
    return header


def intact_at(memory: memoryview, position: int, limit: int) -> FrameHeader | None:
    """Return the header at `position` if the frame's checksum is correct."""
    header = header_at(memory, position, limit)
    if header is None:
        return None
    crc = crc32c(memory[position : position + _CRC_POSITION])
    crc = crc32c(memory[position + HEADER_BYTES : position + header.size], crc)
    return header if crc == header.crc else None


def intact_frames_after(memory: memoryview, position: int, limit: int) -> Iterator[tuple[int, FrameHeader]]:
    """Yield the intact frames after a damaged one at `position`; its content is searched too."""
    search_start = position + 1
    for match in _MAGIC_PATTERN.finditer(memory, search_start, limit):
        start = match.start()
        if start % 8 == 0 and start >= search_start and (header := intact_at(memory, start, limit)):
            yield start, header
            search_start = start + header.size


def section_at(memory: memoryview, position: int, header: FrameHeader) -> bytes:
    """Return the section of the frame at `position`."""
    start = position + HEADER_BYTES
    return bytes(memory[start : start + header.section_bytes])


def payload_at(position: int, header: FrameHeader) -> int:
    """Return the position in the file of the payload of the frame at `position`."""
    return position + frame_bytes(header.section_bytes, 0)


JOURNAL_FORMAT = 3

#: Changes that become durable with a frame's rows, by the fields of `JournalState`. ``released`` are QoS 2 packet ids
#: to release before those of ``held``; None among ``notes`` removes a note; any other value replaces the old one.
Changes: TypeAlias = Mapping[str, Any]


class SegmentProvenance(NamedTuple):
    """Incarnations of a journal that wrote the rows of a segment, and the row before its first one."""

    rows_incarnation: str
    previous_incarnation: str


@dataclass
class JournalState:
    """State of a journal, as a snapshot holds it and later frames change it."""

    #: 12 hex digits, the same for the life of the journal
    journal_id: str
    #: grows by one with every opening; no frame has a larger one [I8]
    epoch: int
    #: the offset of the next row; only grows
    end: int = 0
    #: rows below it may be removed, with whole segments; <= every watermark
    floor: int = 0
    #: consumer -> committed offset; each only grows, none > end
    consumers: dict[str, int] = field(default_factory=dict)
    #: last argument of `set_session`
    session: dict[str, Any] = field(default_factory=dict)
    #: counters [I11]
    ledger: dict[str, int] = field(default_factory=dict)
    #: packet id -> row number and digest, while the broker has not released it [I3]; number < end
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: name -> newest note, any JSON value but null: state that an owner needs exactly as long as the rows beside it
    notes: dict[str, Any] = field(default_factory=dict)
    #: 8 random hex digits of this opening: journals that continue from one copy differ [I14]; "" before the first
    incarnation: str = ""
    #: incarnation that wrote row `end - 1`; "" without rows
    last_row_incarnation: str = ""

    @property
    def provenance(self) -> SegmentProvenance:
        """Provenance of a segment that starts with this state."""
        return SegmentProvenance(self.incarnation, self.last_row_incarnation)

    def start_incarnation(self) -> None:
        """Start a new epoch and incarnation, when the journal is opened [I8], [I14]."""
        self.epoch += 1
        self.incarnation = secrets.token_hex(4)


@dataclass(frozen=True)
class Snapshot:
    """Snapshot in the first frame of a segment: journal state, row schema, and size of the previous segment."""

    state: JournalState
    schema: Any
    #: 1 for the first segment of a journal, then one more each; without gaps
    sequence: int
    #: size in bytes of the previous segment, 0 for the first: shows a sealed file that lost its end
    previous_bytes: int
    #: version of Towline that started the segment
    towline: str = field(default_factory=version)

    def encode(self) -> bytes:
        """Return the payload of the snapshot frame."""
        state = self.state
        return encode_json(
            {
                "format": JOURNAL_FORMAT,
                "towline": self.towline,
                "journal": state.journal_id,
                "sequence": self.sequence,
                "previous_bytes": self.previous_bytes,
                "schema": base64.b64encode(self.schema.serialize()).decode("ascii"),
                "incarnation": state.incarnation,
                "below": state.last_row_incarnation,
                **{name: field.encode(getattr(state, name)) for name, field in _SNAPSHOT_FIELDS.items()},
            }
        )

    @classmethod
    def decode(cls, location: str, header: FrameHeader, payload: bytes) -> Snapshot:
        """Return the snapshot in an intact frame.

        Raises:
            JournalError: TL-J09, the snapshot has another format, or the frame is of another kind.
        """
        if header.kind != FrameKind.SNAPSHOT:
            raise foreign_file(location, f"starts with a frame of kind {header.kind} instead of a snapshot")
        content = decode_json(location, payload)
        if content.get("format") != JOURNAL_FORMAT:
            problem = f"has format {content.get('format')}, of Towline {content.get('towline', 'before 0.2.0rc1')}"
            raise foreign_file(location, f"{problem}; this one, {version()}, reads format {JOURNAL_FORMAT}")
        state = JournalState(content["journal"], header.epoch, header.first_offset)
        state.incarnation, state.last_row_incarnation = content["incarnation"], content["below"]
        apply_changes(state, {name: field.decode(content[name]) for name, field in _SNAPSHOT_FIELDS.items()})
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["schema"])))
        return cls(state, schema, content["sequence"], content["previous_bytes"], content["towline"])


def apply_frame(location: str, state: JournalState, header: FrameHeader, section: bytes) -> None:
    """Apply an intact frame to `state`.

    Raises:
        JournalError: TL-J09, the kind or a part of the section is unknown: a newer Towline wrote it.
        JournalDamaged: TL-J05, the frame does not continue the previous one.
    """
    if header.kind != FrameKind.CHANGES or header.flags:
        problem = f"has a frame of kind {header.kind}, flags {header.flags}, which this Towline doesn't know"
        raise foreign_file(location, problem)
    if header.first_offset != state.end:
        raise journal_damaged(location, f"rows {state.end:,} to {header.first_offset:,} are missing between two frames")
    if header.rows:
        state.end, state.last_row_incarnation = header.end, state.incarnation
    if section:
        content = decode_json(location, section)
        if unknown := content.keys() - _FIELDS.keys():
            names = ", ".join(sorted(unknown))
            raise foreign_file(location, f"has a frame with {names}, which this Towline doesn't know")
        apply_changes(state, {name: field.decode(content[name]) for name, field in _FIELDS.items() if name in content})


def apply_changes(state: JournalState, changes: Changes) -> None:
    """Apply the changes of a frame that was written or read to the state."""
    for name, value in changes.items():
        _FIELDS[name].change(state, value)


def encode_section(changes: Changes) -> bytes:
    """Return the section of a frame with these changes, empty without changes."""
    return encode_json({name: field.encode(changes[name]) for name, field in _FIELDS.items() if name in changes})


def _release_packet_ids(state: JournalState, packet_ids: Sequence[int]) -> None:
    for packet_id in packet_ids:
        state.held.pop(packet_id, None)


def _apply_notes(state: JournalState, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            state.notes.pop(name, None)
        else:
            state.notes[name] = value


def _encode_held_ids(held_ids: Mapping[int, tuple[int, int]]) -> list[str]:
    """Return packet ids, row numbers and digests as packed columns: JSON numbers would be larger than the rows."""
    numbers, digests = zip(*held_ids.values(), strict=True) if held_ids else ((), ())
    return [_pack_integers("H", tuple(held_ids)), _pack_integers("Q", numbers), _pack_integers("I", digests)]


def _decode_held_ids(columns: Sequence[str]) -> dict[int, tuple[int, int]]:
    ids, numbers, digests = (_unpack_integers(code, text) for code, text in zip("HQI", columns, strict=True))
    return dict(zip(ids, zip(numbers, digests, strict=True), strict=True))


def _pack_integers(code: str, values: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode("ascii")


def _unpack_integers(code: str, text: str) -> tuple[int, ...]:
    content = base64.b64decode(text)
    return struct.unpack(f"<{len(content) // struct.calcsize('<' + code)}{code}", content)


class _StateField(NamedTuple):
    """Encoding of one state field in JSON, and the function that applies a change of it."""

    change: Callable[[JournalState, Any], None]
    encode: Callable[[Any], object] = dict
    decode: Callable[[Any], Any] = dict
    #: The field is stored in snapshots.
    in_snapshot: bool = True


#: Fields that a frame may change, in the order of their application: ids are released before they are held again.
_FIELDS: Final = {
    "floor": _StateField(lambda state, floor: setattr(state, "floor", floor), int, int),
    "consumers": _StateField(lambda state, consumers: setattr(state, "consumers", consumers)),
    "session": _StateField(lambda state, session: setattr(state, "session", session)),
    "ledger": _StateField(lambda state, totals: state.ledger.update(totals)),
    "released": _StateField(
        _release_packet_ids, partial(_pack_integers, "H"), partial(_unpack_integers, "H"), in_snapshot=False
    ),
    "held": _StateField(lambda state, held: state.held.update(held), _encode_held_ids, _decode_held_ids),
    "notes": _StateField(_apply_notes),
}


_SNAPSHOT_FIELDS: Final = {name: field for name, field in _FIELDS.items() if field.in_snapshot}


def encode_json(content: Mapping[str, object]) -> bytes:
    """Return compact UTF-8 JSON."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def decode_json(location: str, content: bytes) -> dict[str, Any]:
    """Return the JSON object in an intact frame.

    Raises:
        JournalError: TL-J09, the content is no JSON object: another program wrote this frame.
    """
    try:
        document = json.loads(content)
    except ValueError as error:
        raise foreign_file(location, "has a frame whose content is not JSON") from error
    if not isinstance(document, dict):
        raise foreign_file(location, "has a frame whose content is not a JSON object")
    return document


def foreign_file(location: str, problem: str) -> JournalError:
    """Return the error for a file of another format, which this version can't read."""
    remedy = "Open it with the Towline that wrote it, or give another directory; nothing was changed."
    return JournalError("TL-J09", location, problem, remedy)


def journal_damaged(location: object, problem: str) -> JournalDamaged:
    """Return the error for durable bytes that are missing or changed, with a remedy for the operator [I12]."""
    return JournalDamaged(
        "TL-J05",
        str(location),
        problem,
        "Nothing was changed. Check the disk, keep a copy of the directory, and restore this file from a backup; "
        "without one, start with an empty directory: rows that were not committed before the damage are lost.",
    )
