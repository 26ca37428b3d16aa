"""The state of a journal as records of a state partition: the frames of the disk's format, in pieces; pure.

A frame is what `towline.journal.frames` writes, rows left out: those are records of the landing partition, and the
frame says from which number on and how many. One that is larger than a record may be is cut. The key of each piece says
what it belongs to: who wrote it, the how-manieth of that opening it is, and which piece of how many.

The first frame is a snapshot, and each opening begins with one; what lies before the newest may be removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from towline.errors import JournalDamaged
from towline.journal.frames import Header, Kind, intact_at, payload_at, section_at
from towline.journal.state import JournalState, Snapshot, apply, decode_json, encode_json, foreign
from towline.landing.places import Place, RowPlaces

__all__ = ["PIECE_BYTES", "Assembler", "Further", "Label", "RecoveredState", "StateFrame", "pieces_of", "replayed"]

#: Bytes of a piece: less than any topic takes that may hold a journal (`towline.landing.topics`).
PIECE_BYTES: Final = 256 << 10


class Label(NamedTuple):
    """What the key of a piece says.

    Attributes:
        incarnation: The opening that wrote the frame.
        sequence: The how-manieth frame of that opening; the first, a snapshot, is 0.
        part: Which piece, from 0 on.
        parts: Of how many.
        offset: The end of the landing partition when it was written, or a smaller offset.
        below: Bytes of all rows in and before the frame, over the journal's life.
    """

    incarnation: str
    sequence: int
    part: int
    parts: int
    offset: int
    below: int

    def encode(self) -> bytes:
        """The key."""
        return encode_json(self._asdict())

    @classmethod
    def decode(cls, where: str, key: bytes | None) -> Label:
        """From a key.

        Raises:
            JournalError: TL-J09, it is another's.
        """
        try:
            return cls(**json.loads(key or b""))
        except (ValueError, TypeError):
            raise foreign(where, "has a record that is no frame of a journal") from None


class Further(NamedTuple):
    """What a snapshot holds beside the state: which rows each opening wrote, and where they lie.

    Attributes:
        openings: First row and incarnation of each opening that wrote rows which may still be there, in order.
        places: Some rows' offsets.
    """

    openings: tuple[tuple[int, str], ...]
    places: RowPlaces

    def encode(self) -> bytes:
        """The section of the snapshot's frame."""
        return encode_json({"openings": self.openings, "places": self.places.as_json()})

    @classmethod
    def decode(cls, where: str, section: bytes) -> Further:
        """From a section."""
        content = decode_json(where, section)
        openings = tuple((first, incarnation) for first, incarnation in content["openings"])
        return cls(openings, RowPlaces(content["places"]))


class StateFrame(NamedTuple):
    """A whole frame as it was read.

    Attributes:
        label: Of its first piece.
        header: Of the frame.
        section: Its section.
        payload: Its payload.
        offset: Where its first piece lies in the state partition.
    """

    label: Label
    header: Header
    section: bytes
    payload: bytes
    offset: int


def pieces_of(frame: bytes, label: Label) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a frame's pieces; of the label counts what all of them share."""
    parts = max(1, -(-len(frame) // PIECE_BYTES))
    for part in range(parts):
        yield label._replace(part=part, parts=parts).encode(), frame[part * PIECE_BYTES : (part + 1) * PIECE_BYTES]


class Assembler:
    """Puts pieces together, in the order in which they are read.

    Args:
        where: The partition, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        #: pieces of a frame that is not whole, from its first on
        self._pieces: list[bytes] = []
        self._first: tuple[Label, int] | None = None

    def take(self, key: bytes | None, value: bytes | None, offset: int) -> StateFrame | None:
        """The next piece; the frame that it makes whole.

        Raises:
            JournalError: TL-J09, it is another's.
            JournalDamaged: TL-J05, pieces are missing, or don't read as they were written.
        """
        label = Label.decode(self._where, key)
        if label.part == 0:
            self._pieces, self._first = [], (label, offset)
        expected = (label.incarnation, label.sequence, len(self._pieces))
        if self._first is None or (self._first[0].incarnation, self._first[0].sequence, label.part) != expected:
            raise self._damaged(f"the piece at offset {offset:,} does not follow the one before it")
        self._pieces.append(value or b"")
        if len(self._pieces) < label.parts:
            return None
        first, at = self._first
        data = memoryview(b"".join(self._pieces))
        self._pieces, self._first = [], None
        header = intact_at(data, 0, len(data))
        if header is None:
            raise self._damaged(f"the frame at offset {at:,} does not read as it was written")
        start = payload_at(0, header)
        return StateFrame(first, header, section_at(data, 0, header), bytes(data[start : start + header.payload]), at)

    def _damaged(self, what: str) -> JournalDamaged:
        do = "Nothing was changed. Let nobody else write to this topic; bring back the state topic of a backup."
        return JournalDamaged("TL-J05", self._where, what, do)


class RecoveredState(NamedTuple):
    """A state as it was left.

    Attributes:
        state: After the last frame; its epoch and incarnation are those of the opening that wrote it.
        schema: Of the rows, as the newest snapshot has it.
        openings: As `Further`; the last one of them included.
        places: As `Further`.
        end: The place of the next row.
        sequence: Of the last frame of its opening.
        frames: How many were read.
    """

    state: JournalState
    schema: object
    openings: tuple[tuple[int, str], ...]
    places: RowPlaces
    end: Place
    sequence: int
    frames: int


def replayed(where: str, frames: Iterable[StateFrame], before: RecoveredState | None = None) -> RecoveredState | None:
    """The state after some frames; None when there are none and was none before.

    Args:
        where: The partition, for messages.
        frames: In order; the first is a snapshot, unless there was a state before.
        before: The state before them, which is changed.

    Raises:
        JournalError: TL-J09, a newer Towline, or something else, wrote one.
        JournalDamaged: TL-J05, one does not follow the one before it.
    """
    current = before
    for frame in frames:
        if frame.header.kind == Kind.SNAPSHOT:
            current = _from_snapshot(where, frame, current)
        elif current is None:
            what = f"begins with a frame of kind {frame.header.kind} instead of a snapshot"
            raise JournalDamaged("TL-J05", where, what, "Bring back the state topic of a backup.")
        else:
            current = _further(where, frame, current)
    return current


def _from_snapshot(where: str, frame: StateFrame, before: RecoveredState | None) -> RecoveredState:
    snapshot = Snapshot.decode(where, frame.header, frame.payload)
    if before is not None:
        _check_successor(where, frame, before, snapshot.state)
    further = Further.decode(where, frame.section)
    end = Place(snapshot.state.end, frame.label.offset, frame.label.below)
    return RecoveredState(
        snapshot.state,
        snapshot.schema,
        further.openings,
        further.places,
        end,
        frame.label.sequence,
        (before.frames if before else 0) + 1,
    )


def _check_successor(where: str, frame: StateFrame, before: RecoveredState, state: JournalState) -> None:
    """A later snapshot is of the same journal and of the same or the next opening, with the same rows."""
    goes_on = frame.label.incarnation == before.state.incarnation and state.epoch == before.state.epoch
    begins = state.epoch == before.state.epoch + 1 and frame.label.sequence == 0
    same = (state.journal_id, state.end) == (before.state.journal_id, before.state.end)
    if not same or not (goes_on or begins):
        what = f"the snapshot at offset {frame.offset:,} does not follow the state before it: two have written here"
        raise JournalDamaged("TL-J05", where, what, "Bring back the state topic of a backup.")


def _further(where: str, frame: StateFrame, before: RecoveredState) -> RecoveredState:
    state, header = before.state, frame.header
    if frame.label.incarnation != state.incarnation or frame.label.sequence != before.sequence + 1:
        what = f"the frame at offset {frame.offset:,} does not follow the one before it: two have written here"
        raise JournalDamaged("TL-J05", where, what, "Bring back the state topic of a backup.")
    openings = before.openings
    if header.rows and (not openings or openings[-1][1] != state.incarnation):
        openings = (*openings, (header.first, state.incarnation))
    if header.rows:
        before.places.note(Place(header.first, frame.label.offset, before.end.below))
    apply(where, state, header, frame.section, frame.payload)
    end = Place(state.end, frame.label.offset + header.rows + (1 if header.rows else 0), frame.label.below)
    return before._replace(
        openings=openings, end=end, sequence=frame.label.sequence, frames=before.frames + 1, state=state
    )
