"""What a stream's sink was given, and what became of it, kept in the checkpoint.

Spark takes nothing back from a Python sink, and a row that Kafka refuses is known to the sink alone. So the sink notes
the sum beside each batch before Spark commits it: a batch that is run again replaces what was noted of it, and who
reads the note for a committed batch has counted that batch and all before it, whether anybody listened or not [I11].

The rows of each batch, the sums of what became of them (`towline.spark.sink_note`) and how long its transactions were
open are noted beside that, in one file that is not synced: where a power failure took it, nobody knows them, and the
sums begin anew.
"""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from towline.errors import JournalError
from towline.kafka.pace import WritePace
from towline.spark.sink_note import NotedBatch, SinkBatch, SinkSums, alone, noted_after

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from towline.checkpoint import Checkpoint

__all__ = [
    "given",
    "given_at",
    "left_out_at",
    "note_empty",
    "noted",
    "noted_last",
    "pace_of",
    "paced",
    "said_at",
    "served_empty",
    "sum_at",
    "took_at",
]

_T = TypeVar("_T")

_NAME: Final = "towline.letters"
_ROWS: Final = "towline.rows"
_EMPTY: Final = "towline.empty"
#: Batches remembered: more than whoever listens can be behind.
_KEPT: Final = 100
#: The same of sums, each of which has all before it.
_SUMS_KEPT: Final = 50
#: The same of times, which are only looked at once.
_TIMES_KEPT: Final = 20


def noted(checkpoint: Checkpoint, batch: int, dead_letters: int) -> None:
    """Note the dead letters of a batch, before it is committed; a batch without any costs no write.

    Raises:
        JournalError: TL-J20, the disk did not take it, or does not give what was noted before.
    """
    try:
        known = _read(checkpoint)
    except OSError as error:  # as if nothing was noted, the sum would begin anew
        what = f"the sum of dead letters can't be read ({error.strerror})"
        raise JournalError("TL-J20", str(error.filename), what, "The batch is run again when it can be.") from error
    before = [entry for entry in known if entry[0] < batch]
    total = (before[-1][1] if before else 0) + dead_letters
    now = [*before, (batch, total)][-_KEPT:] if dead_letters else before
    if now != known:
        checkpoint.keep_note(_NAME, json.dumps({"v": 1, "sums": now}, separators=(",", ":")))


class _RowsNote(NamedTuple):
    """What is noted of batches without a sync.

    Attributes:
        rows: Batches, and how many rows the sink was given of each.
        sums: What became of them.
        times: Batches, and how long each transaction of them was open, in seconds.
        left_out: Batches, and how many rows were left out of each, by why; only those that left any out.
        pace: How Kafka took the last batch.
    """

    rows: list[tuple[int, int]]
    sums: list[NotedBatch]
    times: list[tuple[int, list[float]]]
    left_out: list[tuple[int, dict[str, int]]]
    pace: WritePace | None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> _RowsNote:
        """The note, as far as it is one of ours; nothing where the checkpoint is not local."""
        try:
            told = json.loads(checkpoint.note(_ROWS) or "{}")
        except (OSError, ValueError):
            told = {}
        return cls(
            _listed(told, "rows", _pair),
            _listed(told, "sums", NotedBatch.from_json),
            _listed(told, "times", _times),
            _listed(told, "left_out", _counts),
            next(iter(_listed(told, "pace", lambda entry: WritePace(*entry))), None),
        )

    def keep(self, checkpoint: Checkpoint) -> None:
        """Write it."""
        note = {
            "v": 1,
            "rows": self.rows[-_KEPT:],
            "sums": [one.as_json() for one in self.sums[-_SUMS_KEPT:]],
            "times": self.times[-_TIMES_KEPT:],
            "left_out": self.left_out[-_KEPT:],
            "pace": [] if self.pace is None else [self.pace],
        }
        checkpoint.keep_note(_ROWS, json.dumps(note, separators=(",", ":")), synced=False)


def given(
    checkpoint: Checkpoint,
    batch: int,
    rows: int | None,
    said: SinkBatch | None = None,
    seconds: Sequence[float] = (),
    left_out: Mapping[str, int] = MappingProxyType({}),
    pace: WritePace | None = None,
) -> None:
    """Note how many rows the sink was given in a batch, what became of them, and what its transactions took.

    Args:
        checkpoint: Where.
        batch: The batch.
        rows: None where it did not look at all of them.
        said: What the sink says; None for nothing.
        seconds: How long each transaction was open; none where there are no transactions.
        left_out: How many rows more were left out, by why.
        pace: How Kafka took it; None for what was noted before.

    Raises:
        JournalError: TL-J20, the disk did not take it.
    """
    before = _RowsNote.read(checkpoint)
    now = _RowsNote(
        [entry for entry in before.rows if entry[0] < batch] + ([] if rows is None else [(batch, rows)]),
        [one for one in before.sums if one.batch < batch],
        [entry for entry in before.times if entry[0] < batch] + ([(batch, [*seconds])] if seconds else []),
        [entry for entry in before.left_out if entry[0] < batch] + ([(batch, {**left_out})] if left_out else []),
        pace or before.pace,
    )
    if said is not None:
        now.sums.append(noted_after(before.sums, batch, said))
    if now != before:
        now.keep(checkpoint)


def paced(checkpoint: Checkpoint, pace: WritePace) -> None:
    """Note how Kafka took a batch that failed.

    Raises:
        JournalError: TL-J20, the disk did not take it.
    """
    _RowsNote.read(checkpoint)._replace(pace=pace).keep(checkpoint)


def pace_of(checkpoint: Checkpoint) -> WritePace | None:
    """How Kafka took the last batch; None where nobody has said it, or the checkpoint is not local."""
    return _RowsNote.read(checkpoint).pace


def note_empty(checkpoint: Checkpoint, batch: int, *, empty: bool) -> None:
    """Note whether a batch that was begun before is now served empty, before it is run again.

    Raises:
        JournalError: TL-J20, the disk did not take it.
    """
    before = served_empty(checkpoint)
    now = [*(one for one in before if one != batch), *([batch] if empty else [])][-_KEPT:]
    if now != before:
        checkpoint.keep_note(_EMPTY, json.dumps({"v": 1, "batches": now}, separators=(",", ":")))


def served_empty(checkpoint: Checkpoint) -> list[int]:
    """The batches that were served empty, in order: what they held is given up."""
    try:
        return _listed(json.loads(checkpoint.note(_EMPTY) or "{}"), "batches", int)
    except (OSError, ValueError):
        return []


def said_at(checkpoint: Checkpoint, batch: int) -> tuple[SinkSums, SinkSums] | None:
    """What the sink says of all batches up to one, and of that one alone; None for nothing."""
    known = _RowsNote.read(checkpoint).sums
    own = alone(known, batch)
    return None if own is None else (next(one.sums for one in known if one.batch == batch), own)


def noted_last(checkpoint: Checkpoint) -> NotedBatch | None:
    """What the sink said last; None for nothing, or where the checkpoint is not local."""
    return next(iter(_RowsNote.read(checkpoint).sums[-1:]), None)


def given_at(checkpoint: Checkpoint, batch: int) -> int | None:
    """What `given` was told of a batch; None for nothing, or where the checkpoint is not local."""
    return dict(_RowsNote.read(checkpoint).rows).get(batch)


def left_out_at(checkpoint: Checkpoint, batch: int) -> dict[str, int]:
    """How many rows of a batch were left out, by why; nothing where none was, or nobody knows."""
    return dict(_RowsNote.read(checkpoint).left_out).get(batch, {})


def took_at(checkpoint: Checkpoint, batch: int) -> list[float]:
    """How long each transaction of a batch was open; nothing where there was none, or nobody knows."""
    return dict(_RowsNote.read(checkpoint).times).get(batch, [])


def sum_at(checkpoint: Checkpoint, batch: int) -> int:
    """Dead letters of all batches up to one; 0 where none were noted, or the checkpoint is not local."""
    try:
        known = _read(checkpoint)
    except OSError:
        return 0  # whoever counts takes the largest sum
    return next((total for number, total in reversed(known) if number <= batch), 0)


def _read(checkpoint: Checkpoint) -> list[tuple[int, int]]:
    """Batches and their sums of dead letters, in order; a note that is none of ours is one that was never written.

    Raises:
        OSError: The file can't be read.
    """
    try:
        told = json.loads(checkpoint.note(_NAME) or "{}")
    except ValueError:
        return []
    return _listed(told, "sums", _pair)


def _listed(told: Any, key: str, read: Callable[[Any], _T]) -> list[_T]:
    """The entries of a part of a note; none where it is none of ours."""
    try:
        return [read(one) for one in told.get(key, [])]
    except (ValueError, TypeError, AttributeError):
        return []


def _pair(entry: Any) -> tuple[int, int]:
    batch, count = entry
    return int(batch), int(count)


def _counts(entry: Any) -> tuple[int, dict[str, int]]:
    batch, counts = entry
    return int(batch), {str(why): int(count) for why, count in counts.items()}


def _times(entry: Any) -> tuple[int, list[float]]:
    batch, seconds = entry
    return int(batch), [float(one) for one in seconds]
