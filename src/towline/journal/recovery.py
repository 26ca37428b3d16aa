"""What is on disk when a journal is opened, and what of it is good.

Sealed segments are checked by their snapshots: each knows its number and the size of the one before, so that a
missing or shortened file shows without reading rows (those are checked whenever they are read). The last segment is
read frame by frame. What follows the last good frame is an unfinished write and is cut; unless a good frame behind it
says that it was durable: that is damage, and an operator's decision.
"""

from __future__ import annotations

import os
import secrets
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from towline.errors import JournalError, JournalFull
from towline.journal.disk import UNFINISHED, Name, full, new_file, segment_names
from towline.journal.frames import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    JournalState,
    Snapshot,
    apply_frame,
    damaged,
    foreign,
    intact_after,
    intact_at,
    payload_at,
    section_at,
)
from towline.journal.segment import Segment, View
from towline.version import version

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from towline.journal.disk import Disk


class RecoveredJournal(NamedTuple):
    """A journal ready to go on in a new segment.

    Attributes:
        state: The state after the last good frame; its epoch is that of the run before.
        segments: Sealed segments with rows and those between them, oldest first.
        note: One line for a person when an unfinished write at the end was cut; else "".
    """

    state: JournalState
    segments: list[Segment]
    sequence: int
    previous_bytes: int
    note: str = ""


class _Head(NamedTuple):
    """A segment, whose end is not known yet, and its snapshot."""

    segment: Segment
    snapshot: Snapshot


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
        return RecoveredJournal(JournalState(secrets.token_hex(6), 0), [], 1, 0)
    chain = _chain(heads)
    last, snapshot = chain[-1]
    _check_schema(directory, snapshot, schema)
    state, good = _scan(chain[-1])
    segments = [head.segment for head in chain]
    if segments[0].first > state.floor:  # above what may have been removed [I5]
        what = f"the segments with rows {state.floor:,} to {segments[0].first:,} are missing"
        raise damaged(directory, what)
    _remove_unfinished(directory, disk)
    for head in heads[: len(heads) - len(chain)]:  # removal was not durable yet
        disk.remove(head.segment.path)
    cut = last.size - good
    what = f"{last.path}: cut {cut:,} bytes of an unfinished write at byte {good:,}"
    note = f"{what}; rows up to {state.end:,} are whole" if cut else ""
    for segment, following in pairwise(segments):
        segment.end = following.first
    last.size, last.end = good, state.end
    sequence = last.name.sequence
    if state.end == last.first:  # without rows it is replaced: the next one takes its number, and its name
        return RecoveredJournal(state, segments[:-1], sequence, snapshot.previous_bytes, note)
    _copy(last, disk)
    return RecoveredJournal(state, segments, sequence + 1, good, note)


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
    return _scan(_head(directory, names[-1]))[0] if names else None


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
    return _Head(Segment(directory, name, size=size, end=name.first, origin=snapshot.state.origin), snapshot)


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
        raise foreign(str(older.segment.path), f"belongs to journal {ids}")
    before, after = older.segment, newer.segment
    if before.name.sequence == after.name.sequence or before.first > after.first:
        raise foreign(str(after.path), f"and {before.path.name} can't both belong to one journal")
    if before.name.sequence + 1 != after.name.sequence:
        return False
    if before.size != newer.snapshot.previous_bytes:
        what = f"is {before.size:,} bytes long, but {newer.snapshot.previous_bytes:,} were durable"
        raise damaged(before.path, what)
    return True


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


def _scan(head: _Head) -> tuple[JournalState, int]:
    """Follow the frames of the last segment to the first that is not good: the state there, and the place."""
    last, state, position = head.segment, head.snapshot.state, 0
    view, where = last.view(), str(last.path)
    while header := intact_at(view.memory, position, last.size):
        if position:
            apply_frame(where, state, header, section_at(view.memory, position, header))
        position += header.size
    for at, header in intact_after(view.memory, position, last.size):
        if header.durable > position:  # what a later frame says was durable is not cut
            what = f"row {state.end:,} on (byte {position:,}) no longer reads as it was written, though a later frame"
            raise damaged(last.path, f"{what} (byte {at:,}) is whole")
    if any(upto > state.end for upto in state.consumers.values()):
        raise damaged(last.path, f"rows were committed that are not there; the last one is {state.end:,}")
    return state, position


def _copy(segment: Segment, disk: Disk) -> None:
    """Write the good frames anew: the page cache may hold bytes that a failed sync never brought to the disk [I6]."""
    try:
        os.close(new_file(disk, segment.path, [segment.view().memory]))
    except JournalFull as error:
        what = f"no room for the {segment.size:,} bytes that recovery copies; nothing was changed"
        raise full(segment.path.parent, what, "Free that much.") from error
