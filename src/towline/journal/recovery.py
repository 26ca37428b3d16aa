"""Recovery of a journal at its opening: checks segments and cuts an unfinished write.

Sealed segments are checked by their snapshots: each holds its sequence number and the size of the previous segment, so
that a missing or shortened file is detected without reading rows (those are checked at every read). The last segment is
read frame by frame. Bytes after the last good frame are an unfinished write and are cut. If a good frame after them
proves that they were durable, they are damage, and an operator's decision.
"""

from __future__ import annotations

import os
import secrets
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from towline.errors import JournalError, JournalFull
from towline.journal.disk import TEMPORARY_SUFFIX, SegmentName, journal_full, segment_names, write_file
from towline.journal.frames import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    JournalState,
    Snapshot,
    apply_frame,
    foreign_file,
    intact_at,
    intact_frames_after,
    journal_damaged,
    payload_at,
    section_at,
)
from towline.journal.segment import Segment, SegmentView
from towline.version import version

if TYPE_CHECKING:
    from pathlib import Path

    from towline.journal.disk import Disk


class RecoveredJournal(NamedTuple):
    """Recovered journal, ready to continue in a new segment.

    Attributes:
        state: The state after the last good frame, with the epoch of the previous opening.
        segments: Sealed segments with rows and those between them, oldest first.
        sequence: Sequence number of the new segment.
        previous_bytes: Size of the last sealed segment in bytes.
        repair_note: One line for the operator when an unfinished write at the end was cut; else "".
    """

    state: JournalState
    segments: list[Segment]
    sequence: int
    previous_bytes: int
    repair_note: str = ""


class _SegmentHead(NamedTuple):
    """Segment with its snapshot, before its end is known."""

    segment: Segment
    snapshot: Snapshot


def recover(directory: Path, schema: Any, disk: Disk) -> RecoveredJournal:
    """Recover the journal of a directory, durable again; an empty directory gives a new journal.

    Raises:
        JournalDamaged: TL-J05, durable rows are missing or unreadable; nothing was changed.
        JournalError: TL-J06, the rows have another schema. TL-J09, a file is foreign or newer; nothing was changed.
        JournalFull: TL-J02, no free space for the copy of the last segment; nothing was changed.
        JournalFailed: TL-J04, a write or sync failed.
    """
    heads = [_read_head(directory, name) for name in segment_names(directory)]
    if not heads:
        _remove_temporary_files(directory, disk)
        return RecoveredJournal(JournalState(secrets.token_hex(6), 0), [], 1, 0)
    chain = _last_chain(heads)
    last_segment, snapshot = chain[-1]
    _check_schema(directory, snapshot, schema)
    state, valid_bytes = _scan_frames(chain[-1])
    segments = [head.segment for head in chain]
    if segments[0].first_offset > state.floor:  # the floor is the highest offset that may have been removed [I5]
        problem = f"the segments with rows {state.floor:,} to {segments[0].first_offset:,} are missing"
        raise journal_damaged(directory, problem)
    _remove_temporary_files(directory, disk)
    for head in heads[: len(heads) - len(chain)]:  # their removal was not durable yet
        disk.remove(head.segment.path)
    cut_bytes = last_segment.size - valid_bytes
    problem = f"{last_segment.path}: cut {cut_bytes:,} bytes of an unfinished write at byte {valid_bytes:,}"
    repair_note = f"{problem}; rows up to {state.end:,} are whole" if cut_bytes else ""
    for segment, next_segment in pairwise(segments):
        segment.end = next_segment.first_offset
    last_segment.size, last_segment.end = valid_bytes, state.end
    sequence = last_segment.name.sequence
    if state.end == last_segment.first_offset:  # a segment without rows is replaced by one of the same name
        return RecoveredJournal(state, segments[:-1], sequence, snapshot.previous_bytes, repair_note)
    _copy_segment(last_segment, disk)
    return RecoveredJournal(state, segments, sequence + 1, valid_bytes, repair_note)


def read_state(directory: Path) -> JournalState | None:
    """Return the state of a journal from its directory; None without a journal.

    Only the newest segment is read; no lock is needed, and nothing is changed.

    Raises:
        JournalDamaged: TL-J05, the segment has a damaged frame.
        JournalError: TL-J09, a file is foreign or newer.
        OSError: Directory or file can't be read.
    """
    names = segment_names(directory)
    return _scan_frames(_read_head(directory, names[-1]))[0] if names else None


def _remove_temporary_files(directory: Path, disk: Disk) -> None:
    for path in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        disk.remove(path)


def _read_head(directory: Path, name: SegmentName) -> _SegmentHead:
    """Read the snapshot of a segment."""
    path = name.path(directory)
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise journal_damaged(path, f"is only {size} bytes long; its snapshot was durable")
    view = SegmentView(path, size)
    if view.memory[: len(MAGIC)] == MAGIC and (frame_version := view.memory[len(MAGIC)]) != VERSION:
        problem = f"has frames of version {frame_version}; this Towline, {version()}, reads version {VERSION}"
        raise foreign_file(str(path), problem)
    header = intact_at(view.memory, 0, size)
    if header is None:
        raise journal_damaged(path, "its snapshot, which was durable, is damaged")
    start = payload_at(0, header)
    snapshot = Snapshot.decode(str(path), header, bytes(view.memory[start : start + header.payload_bytes]))
    if (snapshot.sequence, header.first_offset) != name:
        problem = f"holds segment {snapshot.sequence} from row {header.first_offset:,}, which is not its name"
        raise foreign_file(str(path), problem)
    segment = Segment(directory, name, size=size, end=name.first_offset, provenance=snapshot.state.provenance)
    return _SegmentHead(segment, snapshot)


def _last_chain(heads: list[_SegmentHead]) -> list[_SegmentHead]:
    """Return the unbroken chain of segments that ends with the last one."""
    start = len(heads) - 1
    while start and _is_successor(heads[start - 1], heads[start]):
        start -= 1
    return heads[start:]


def _is_successor(older: _SegmentHead, newer: _SegmentHead) -> bool:
    """Return whether no segment is missing between these two; refuse two that can't belong to one journal."""
    if older.snapshot.state.journal_id != newer.snapshot.state.journal_id:
        journal_ids = f"{older.snapshot.state.journal_id}, the next one to {newer.snapshot.state.journal_id}"
        raise foreign_file(str(older.segment.path), f"belongs to journal {journal_ids}")
    previous, segment = older.segment, newer.segment
    if previous.name.sequence == segment.name.sequence or previous.first_offset > segment.first_offset:
        raise foreign_file(str(segment.path), f"and {previous.path.name} can't both belong to one journal")
    if previous.name.sequence + 1 != segment.name.sequence:
        return False
    if previous.size != newer.snapshot.previous_bytes:
        problem = f"is {previous.size:,} bytes long, but {newer.snapshot.previous_bytes:,} were durable"
        raise journal_damaged(previous.path, problem)
    return True


def _check_schema(directory: Path, snapshot: Snapshot, schema: Any) -> None:
    """Refuse stored rows of another schema."""
    if not snapshot.schema.equals(schema):
        problem = f"its rows, of Towline {snapshot.towline}, have another schema than this one, {version()}, writes"
        remedy = "Let the version that wrote them hand them over first, or give another directory."
        raise JournalError("TL-J06", str(directory), problem, remedy)


def _scan_frames(head: _SegmentHead) -> tuple[JournalState, int]:
    """Apply the frames of the last segment up to the first bad one; return the state and its byte position."""
    segment, state, position = head.segment, head.snapshot.state, 0
    memory, location = segment.view().memory, str(segment.path)
    while header := intact_at(memory, position, segment.size):
        if position:
            apply_frame(location, state, header, section_at(memory, position, header))
        position += header.size
    for later_position, header in intact_frames_after(memory, position, segment.size):
        if header.durable_bytes > position:  # bytes that a later frame proves durable are not cut
            problem = f"the frame of row {state.end:,} (byte {position:,}) is damaged, a later one (byte"
            raise journal_damaged(segment.path, f"{problem} {later_position:,}) is intact")
    if any(offset > state.end for offset in state.consumers.values()):
        raise journal_damaged(segment.path, f"rows were committed that are not there; the last one is {state.end:,}")
    return state, position


def _copy_segment(segment: Segment, disk: Disk) -> None:
    """Copy the good frames to a new file: cached bytes may never have reached the disk after a failed sync [I6]."""
    try:
        os.close(write_file(disk, segment.path, [segment.view().memory]))
    except JournalFull as error:
        problem = f"no room for the {segment.size:,} bytes that recovery copies; nothing was changed"
        raise journal_full(segment.path.parent, problem, "Free that much.") from error
