"""What a journal holds besides its rows, and how each kind of frame changes it: a table, no disk."""

from __future__ import annotations

import base64
import json
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from towline.errors import JournalDamaged, JournalError
from towline.journal.frames import Header, Kind
from towline.version import version

FORMAT = 2


class Changes(NamedTuple):
    """What becomes durable with a frame, beside what its kind says.

    Attributes:
        held: QoS 2 packet ids, each with the number and digest of its row [I3].
        released: QoS 2 packet ids that are free again, before those of `held`.
        notes: JSON values by name; None removes one.
    """

    held: Mapping[int, tuple[int, int]] = MappingProxyType({})
    released: Sequence[int] = ()
    notes: Mapping[str, Any] = MappingProxyType({})

    def apply(self, state: JournalState) -> None:
        """Change the state as reading the frame back will."""
        _drop(state.held, self.released)
        state.held.update(self.held)
        _take_notes(state.notes, self.notes)


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
                "floor": state.floor,
                "consumers": state.consumers,
                "session": state.session,
                "ledger": state.ledger,
                "held": _pack_held(state.held),
                "schema": base64.b64encode(self.schema.serialize()).decode("ascii"),
                "notes": state.notes,
                "incarnation": state.incarnation,
                "below": state.newest,
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
        state = JournalState(
            content["journal"],
            header.epoch,
            header.first,
            content["floor"],
            content["consumers"],
            content["session"],
            content["ledger"],
            _unpack_held(content["held"]),
            content["notes"],
            content["incarnation"],
            content["below"],
        )
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["schema"])))
        return cls(state, schema, content["sequence"], content["previous_bytes"], content["towline"])


def _records(state: JournalState, header: Header, _: bytes) -> None:
    state.end = header.end
    state.newest = state.incarnation


def _session(state: JournalState, _: Header, payload: bytes) -> None:
    state.session = json.loads(payload)


def _committed(state: JournalState, _: Header, payload: bytes) -> None:
    content = json.loads(payload)
    state.consumers = content["consumers"]
    state.floor = content["floor"]


def _released(_state: JournalState, _header: Header, _payload: bytes) -> None:
    """Packet ids come and go in the section, with rows or without."""


#: what a frame after the snapshot does to the state
_CHANGES: Mapping[int, Callable[[JournalState, Header, bytes], None]] = {
    Kind.RECORDS: _records,
    Kind.SESSION: _session,
    Kind.COMMITTED: _committed,
    Kind.RELEASED: _released,
}


def apply(where: str, state: JournalState, header: Header, section: bytes, payload: bytes) -> None:
    """Change `state` as an intact frame says.

    Args:
        where: The file, for messages.
        state: The state before the frame.
        header: Its header.
        section: Its section, may be empty.
        payload: Its payload; that of rows is not looked at.

    Raises:
        JournalError: TL-J09, the kind or a part of the section is unknown: a newer Towline wrote it.
        JournalDamaged: TL-J05, the frame does not continue the one before it.
    """
    change = _CHANGES.get(header.kind)
    if change is None or header.flags:
        raise foreign(
            where, f"has a frame of kind {header.kind}, flags {header.flags}, which this Towline doesn't know"
        )
    if header.first != state.end:
        raise JournalDamaged(
            "TL-J05",
            where,
            f"rows {state.end:,} to {header.first:,} are missing between two frames",
            "Keep a copy of the directory, and restore the file from a backup or start with an empty directory.",
        )
    change(state, header, payload)
    if section:
        _apply_section(where, state, section)


#: what the parts of a section do to the state, in this order: ids are freed before they are held again
_PARTS: Mapping[str, Callable[[JournalState, Any], None]] = {
    "ledger": lambda state, content: state.ledger.update(content),
    "released": lambda state, content: _drop(state.held, _unpack_ids(content)),
    "held": lambda state, content: state.held.update(_unpack_held(content)),
    "notes": lambda state, content: _take_notes(state.notes, content),
}


def _apply_section(where: str, state: JournalState, section: bytes) -> None:
    content = decode_json(where, section)
    if unknown := content.keys() - _PARTS.keys():
        raise foreign(where, f"has a frame with {', '.join(sorted(unknown))}, which this Towline doesn't know")
    for part, change in _PARTS.items():
        if part in content:
            change(state, content[part])


def _take_notes(notes: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change `notes` as a frame says; null removes one."""
    for name, value in changes.items():
        if value is None:
            notes.pop(name, None)
        else:
            notes[name] = value


def section_of(ledger: Mapping[str, int], changes: Changes) -> bytes:
    """Return the section of a frame with new totals of counters and its changes, empty when there are none."""
    content: dict[str, object] = {}
    if ledger:
        content["ledger"] = dict(ledger)
    if changes.released:
        content["released"] = _pack("H", changes.released)
    if changes.held:
        content["held"] = _pack_held(changes.held)
    if changes.notes:
        content["notes"] = dict(changes.notes)
    return encode_json(content) if content else b""


def _drop(held: dict[int, tuple[int, int]], packet_ids: Sequence[int]) -> None:
    for packet_id in packet_ids:
        held.pop(packet_id, None)


def _pack_held(held: Mapping[int, tuple[int, int]]) -> list[str]:
    """Three columns: a chunk can bring thousands, and JSON numbers would cost more than the rows."""
    numbers, digests = zip(*held.values(), strict=True) if held else ((), ())
    return [_pack("H", tuple(held)), _pack("Q", numbers), _pack("I", digests)]


def _unpack_held(columns: Sequence[str]) -> dict[int, tuple[int, int]]:
    ids, numbers, digests = (_unpack(code, text) for code, text in zip("HQI", columns, strict=True))
    return dict(zip(ids, zip(numbers, digests, strict=True), strict=True))


def _unpack_ids(text: str) -> tuple[int, ...]:
    return _unpack("H", text)


def _pack(code: str, values: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode("ascii")


def _unpack(code: str, text: str) -> tuple[int, ...]:
    content = base64.b64decode(text)
    return struct.unpack(f"<{len(content) // struct.calcsize('<' + code)}{code}", content)


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
