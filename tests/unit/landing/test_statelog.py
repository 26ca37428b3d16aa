"""Frames in pieces: whole again in order, and anything else is told."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from towline.errors import JournalDamaged, JournalError
from towline.journal.frames import Kind, encode
from towline.journal.state import Changes, JournalState, Snapshot, encode_json, section_of
from towline.landing.places import Place, RowPlaces
from towline.landing.statelog import PIECE_BYTES, Assembler, Further, Label, StateFrame, pieces_of, replayed

SCHEMA = pa.schema([("payload", pa.binary())])


def frame(kind: Kind, state: JournalState, sequence: int, *, rows: int = 0, changes: Changes | None = None) -> bytes:
    payload: bytes = b""
    section = section_of({}, changes or Changes())
    if kind == Kind.SNAPSHOT:
        payload, section = Snapshot(state, SCHEMA, sequence + 1, 0).encode(), Further((), RowPlaces()).encode()
    elif kind == Kind.SESSION:
        payload = encode_json({"x": 1})
    made = encode(kind, epoch=state.epoch, first=state.end, durable=0, rows=rows, section=section, payload=payload)
    return b"".join(bytes(buffer) for buffer in made.buffers)


def label(state: JournalState, sequence: int, offset: int = 0, below: int = 0) -> Label:
    return Label(state.incarnation, sequence, 0, 1, offset, below)


def read(records: list[tuple[bytes, bytes]]) -> list[StateFrame]:
    assembler = Assembler("t")
    found = (assembler.take(key, value, at) for at, (key, value) in enumerate(records))
    return [one for one in found if one is not None]


def history() -> list[tuple[bytes, bytes]]:
    """An opening: snapshot, three rows with a packet id, a session."""
    state = JournalState("j" * 12, 1, incarnation="aaaa")
    records = [*pieces_of(frame(Kind.SNAPSHOT, state, 0), label(state, 0))]
    records += pieces_of(frame(Kind.RECORDS, state, 1, rows=3, changes=Changes({1: (0, 9)})), label(state, 1, 0, 300))
    state.end = 3
    return [*records, *pieces_of(frame(Kind.SESSION, state, 2), label(state, 2, 4, 300))]


def test_a_state_comes_back() -> None:
    found = replayed("t", read(history()))
    assert found is not None
    assert (found.state.end, found.state.held, found.state.session) == (3, {1: (0, 9)}, {"x": 1})
    assert (found.openings, found.sequence, found.frames) == (((0, "aaaa"),), 2, 3)
    assert found.end == Place(3, 4, 300)


def test_a_large_frame_is_cut_and_put_together() -> None:
    state = JournalState("j" * 12, 1, incarnation="aaaa", notes={"n": "x" * (3 * PIECE_BYTES)})
    pieces = list(pieces_of(frame(Kind.SNAPSHOT, state, 0), label(state, 0)))
    assert len(pieces) == 4
    assert all(len(value) <= PIECE_BYTES for _, value in pieces)
    (whole,) = read(pieces)
    assert Snapshot.decode("t", whole.header, whole.payload).state.notes == state.notes
    for missing in (0, 1, 2):
        with pytest.raises(JournalDamaged, match="does not follow"):
            read(pieces[:missing] + pieces[missing + 1 :])


def test_every_byte_counts() -> None:
    (key, value) = history()[1]
    for at in range(0, len(value), 5):
        changed = value[:at] + bytes([value[at] ^ 0x20]) + value[at + 1 :]
        with pytest.raises(JournalDamaged, match="does not read as it was written"):
            read([(key, changed)])


@pytest.mark.parametrize("key", [b"", None, b"{}", b"[1]", b'{"incarnation": "a"}'])
def test_a_record_of_something_else_is_told(key: bytes | None) -> None:
    with pytest.raises(JournalError, match="TL-J09"):
        Assembler("t").take(key, b"", 0)


@pytest.mark.parametrize("order", [[1], [0, 2], [0, 1, 1], [0, 1, 2, 1]])
def test_frames_follow_one_another(order: list[int]) -> None:
    records = history()
    with pytest.raises(JournalDamaged):
        replayed("t", read([records[number] for number in order]))


def test_two_that_wrote_are_told() -> None:
    """Another opening begins with a snapshot of the same rows and the next epoch; nothing else may."""
    before = history()
    for epoch, end, sequence, good in ((2, 3, 0, True), (1, 3, 0, False), (3, 3, 0, False), (2, 2, 0, False)):
        state: Any = JournalState("j" * 12, epoch, end, incarnation="bbbb")
        records = [*before, *pieces_of(frame(Kind.SNAPSHOT, state, sequence), label(state, sequence))]
        if good:
            found = replayed("t", read(records))
            assert found is not None
            assert found.state.incarnation == "bbbb"
        else:
            with pytest.raises(JournalDamaged, match="two have written here"):
                replayed("t", read(records))
