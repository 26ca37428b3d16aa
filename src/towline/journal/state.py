"""What a journal knows besides its rows, and how each kind of frame changes it: a table, no disk."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from towline.errors import JournalDamaged, JournalError
from towline.journal.frames import Header, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Snapshot", "State", "apply", "decode_json", "encode_json", "foreign", "section_of"]

FORMAT = 1


@dataclass
class State:
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


@dataclass(frozen=True)
class Snapshot:
    """The first frame of a segment: the state there, the rows' schema, and the segment before it."""

    state: State
    schema: Any
    #: 1 for the first segment of a journal, then one more each; without holes
    sequence: int
    #: size in bytes of the segment before this one, 0 for the first: a sealed file that lost its end shows at once
    previous_bytes: int

    def encode(self) -> bytes:
        """Return the payload of the frame."""
        state = self.state
        return encode_json(
            {
                "format": FORMAT,
                "journal": state.journal_id,
                "sequence": self.sequence,
                "previous_bytes": self.previous_bytes,
                "floor": state.floor,
                "consumers": state.consumers,
                "session": state.session,
                "ledger": state.ledger,
                "schema": base64.b64encode(self.schema.serialize()).decode("ascii"),
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
            raise foreign(where, f"has format {content.get('format')}; this Towline reads format {FORMAT}")
        state = State(
            content["journal"],
            header.epoch,
            header.first,
            content["floor"],
            content["consumers"],
            content["session"],
            content["ledger"],
        )
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["schema"])))
        return cls(state, schema, content["sequence"], content["previous_bytes"])


def _records(state: State, header: Header, _: bytes) -> None:
    state.end = header.end


def _session(state: State, _: Header, payload: bytes) -> None:
    state.session = json.loads(payload)


def _committed(state: State, _: Header, payload: bytes) -> None:
    content = json.loads(payload)
    state.consumers = content["consumers"]
    state.floor = content["floor"]


#: what a frame after the snapshot does to the state; RELEASED joins with QoS 2
_CHANGES: Mapping[int, Callable[[State, Header, bytes], None]] = {
    Kind.RECORDS: _records,
    Kind.SESSION: _session,
    Kind.COMMITTED: _committed,
}


def apply(where: str, state: State, header: Header, section: bytes, payload: bytes) -> None:
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


def _apply_section(where: str, state: State, section: bytes) -> None:
    content = decode_json(where, section)
    if unknown := content.keys() - {"ledger"}:
        raise foreign(where, f"has a frame with {', '.join(sorted(unknown))}, which this Towline doesn't know")
    state.ledger.update(content["ledger"])


def section_of(ledger: Mapping[str, int]) -> bytes:
    """Return the section that carries these counters' new totals, empty when there are none."""
    return encode_json({"ledger": dict(ledger)}) if ledger else b""


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
