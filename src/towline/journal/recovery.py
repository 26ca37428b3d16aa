"""What is on disk when a journal is opened, and what of it is good.

Sealed segments are checked by their snapshots: each knows its number and the size of the one before, so that a
missing or shortened file shows without reading rows (those are checked whenever they are read). The last segment is
read frame by frame. What follows the last good frame is an unfinished write and is cut; unless a good frame behind it
says that it was durable: that is damage, and an operator's decision.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from towline.errors import JournalError, JournalFull
from towline.journal.disk import UNFINISHED, Name, full, new_file, segment_names
from towline.journal.frames import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    intact_after,
    intact_at,
    payload_at,
    section_at,
)
from towline.journal.segment import Segment, View, damaged
from towline.journal.state import JournalState, Provenance, Snapshot, apply_frame, foreign
from towline.version import version

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from towline.journal.disk import Disk

__all__ = ["RecoveredJournal", "Recovery", "recover", "session_in", "state_in"]


@dataclass(frozen=True)
class Recovery:
    """What was on disk when a journal was opened.

    Attributes:
        cut_bytes: Bytes of an unfinished write at the end that were cut.
        note: One line for a person when something was cut.
    """

    cut_bytes: int
    note: str | None


@dataclass(frozen=True)
class RecoveredJournal:
    """A journal ready to go on in a new segment.

    Attributes:
        state: The state after the last good frame; its epoch is that of the run before.
        segments: Sealed segments with rows and those between them, oldest first.
        sequence: Number for the next segment.
        previous_bytes: Size of the segment before it.
        recovery: The account for a person.
    """

    state: JournalState
    segments: list[Segment]
    sequence: int
    previous_bytes: int
    recovery: Recovery


@dataclass(frozen=True)
class _Head:
    name: Name
    path: Path
    size: int
    snapshot: Snapshot
    origin: Provenance


@dataclass(frozen=True)
class _Tail:
    state: JournalState
    good: int
    cut: int


def recover(directory: Path, schema: Any, disk: Disk) -> RecoveredJournal:
    """Return what the directory holds, made durable again, or a new journal if it holds none.

    Raises:
        JournalDamaged: TL-J05, durable rows are gone or unreadable; nothing was changed.
        JournalError: TL-J06, the rows have another schema. TL-J09, a file is foreign or newer; nothing was changed.
        JournalFull: TL-J02, no room for the copy of the last segment; nothing was changed.
        JournalFailed: TL-J04, a write or sync failed.
    """
    heads = [_head(directory, name) for name in segment_names(directory)]
    if not heads:
        _remove_unfinished(directory, disk)
        return RecoveredJournal(JournalState(secrets.token_hex(6), 0), [], 1, 0, Recovery(0, None))
    chain = _chain(heads)
    _check_schema(directory, chain[-1].snapshot, schema)
    tail = _scan(chain[-1])
    _check_floor(chain, tail.state)
    _remove_unfinished(directory, disk)
    for head in heads[: len(heads) - len(chain)]:  # removal was not durable yet
        disk.remove(head.path)
    return _sealed(directory, chain, tail, disk)


def session_in(directory: Path) -> Mapping[str, Any]:
    """Return what `Journal.set_session` was given last in a journal, open or not; empty when never, or without one.

    The newest segment alone is read; nothing is locked, and nothing changed.

    Raises:
        JournalDamaged: TL-J05, it no longer reads as it was written.
        JournalError: TL-J09, a file is foreign or newer.
        OSError: Directory or file can't be read.
    """
    state = state_in(directory)
    return {} if state is None else state.session


def state_in(directory: Path) -> JournalState | None:
    """Return what a journal holds besides its rows, as `session_in` does; None without one."""
    names = segment_names(directory)
    return _scan(_head(directory, names[-1])).state if names else None


def _sealed(directory: Path, chain: list[_Head], tail: _Tail, disk: Disk) -> RecoveredJournal:
    last, state = chain[-1], tail.state
    ends = [head.name.first for head in chain[1:]]
    segments = [
        Segment(directory, head.name, size=head.size, end=end, origin=head.origin)
        for head, end in zip(chain, ends, strict=False)
    ]
    sequence, previous_bytes = last.name.sequence, last.snapshot.previous_bytes
    if state.end > last.name.first:
        _copy(last.path, tail.good, disk)
        segments.append(Segment(directory, last.name, size=tail.good, end=state.end, origin=last.origin))
        sequence, previous_bytes = sequence + 1, tail.good
    # a last segment without rows is replaced: the next one takes its number, and its name
    return RecoveredJournal(state, segments, sequence, previous_bytes, Recovery(tail.cut, _note(last, tail)))


def _note(last: _Head, tail: _Tail) -> str | None:
    if not tail.cut:
        return None
    return (
        f"{last.path}: cut {tail.cut:,} bytes of an unfinished write at byte {tail.good:,}; "
        f"rows up to {tail.state.end:,} are whole"
    )


def _remove_unfinished(directory: Path, disk: Disk) -> None:
    for path in directory.glob(f"*{UNFINISHED}"):
        disk.remove(path)


def _head(directory: Path, name: Name) -> _Head:
    """Read the snapshot of a segment."""
    path = name.path(directory)
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise damaged(path, f"is only {size} bytes long; its snapshot was durable")
    view = View(path, size)
    if view.memory[: len(MAGIC)] == MAGIC and (found := view.memory[len(MAGIC)]) != VERSION:
        raise foreign(str(path), f"has frames of version {found}; this Towline, {version()}, reads version {VERSION}")
    header = intact_at(view.memory, 0, size)
    if header is None:
        raise damaged(path, "its snapshot, which was durable, no longer reads as it was written")
    start = payload_at(0, header)
    snapshot = Snapshot.decode(str(path), header, bytes(view.memory[start : start + header.payload]))
    if (snapshot.sequence, header.first) != name:
        raise foreign(str(path), f"holds segment {snapshot.sequence} from row {header.first:,}, which is not its name")
    return _Head(name, path, size, snapshot, snapshot.state.origin)


def _chain(heads: list[_Head]) -> list[_Head]:
    """Return the unbroken row of segments that ends with the last one."""
    start = len(heads) - 1
    while start and _joined(heads[start - 1], heads[start]):
        start -= 1
    return heads[start:]


def _joined(older: _Head, newer: _Head) -> bool:
    """Return whether no segment is missing between these two; refuse two that can't belong together."""
    if older.snapshot.state.journal_id != newer.snapshot.state.journal_id:
        ids = f"{older.snapshot.state.journal_id}, the next one to {newer.snapshot.state.journal_id}"
        raise foreign(str(older.path), f"belongs to journal {ids}")
    if older.name.sequence == newer.name.sequence or older.name.first > newer.name.first:
        raise foreign(str(newer.path), f"and {older.path.name} can't both belong to one journal")
    if older.name.sequence + 1 != newer.name.sequence:
        return False
    if older.size != newer.snapshot.previous_bytes:
        what = f"is {older.size:,} bytes long, but {newer.snapshot.previous_bytes:,} were durable"
        raise damaged(older.path, what)
    return True


def _check_floor(chain: list[_Head], state: JournalState) -> None:
    """Refuse a chain that begins above what may have been removed [I5]."""
    first = chain[0].name.first
    if first > state.floor:
        raise damaged(chain[0].path.parent, f"the segments with rows {state.floor:,} to {first:,} are missing")


def _check_schema(directory: Path, snapshot: Snapshot, wanted: Any) -> None:
    """Refuse rows of another schema."""
    if (stored := snapshot.schema).equals(wanted):
        return
    differing = sorted({field.name for field in stored} ^ {field.name for field in wanted}) or [
        field.name for field in wanted if not stored.field(field.name).equals(field)
    ]
    names = f"column {', '.join(differing)}" if differing else "the order of the columns"
    raise JournalError(
        "TL-J06",
        str(directory),
        f"its rows, of Towline {snapshot.towline}, have another schema than this one, {version()}, writes ({names})",
        "Let the version that wrote them hand them over first, or give another directory.",
    )


def _scan(last: _Head) -> _Tail:
    """Follow the frames of the last segment to the first that is not good."""
    view, state = View(last.path, last.size), last.snapshot.state
    where, position = str(last.path), 0
    while header := intact_at(view.memory, position, last.size):
        if position:
            apply_frame(where, state, header, section_at(view.memory, position, header))
        position += header.size
    _check_cut(last, view, position, state.end)
    if any(upto > state.end for upto in state.consumers.values()):
        raise damaged(last.path, f"rows were committed that are not there; the last one is {state.end:,}")
    return _Tail(state, position, last.size - position)


def _check_cut(last: _Head, view: View, position: int, end: int) -> None:
    """Refuse to cut what a later frame says was durable."""
    for at, header in intact_after(view.memory, position, last.size):
        if header.durable > position:
            raise damaged(
                last.path,
                f"row {end:,} on (byte {position:,}) no longer reads as it was written, though a later frame "
                f"(byte {at:,}) is whole",
            )


def _copy(path: Path, size: int, disk: Disk) -> None:
    """Write the good frames anew: the page cache may hold bytes that a failed sync never brought to the disk [I6]."""
    view = View(path, size)
    try:
        os.close(new_file(disk, path, [view.memory]))
    except JournalFull as error:
        raise full(
            path.parent, f"no room for the {size:,} bytes that recovery copies; nothing was changed", "Free that much."
        ) from error
