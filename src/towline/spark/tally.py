"""What a stream's sink was given, and what became of it, kept in the checkpoint.

Spark takes nothing back from a Python sink, and a row that Kafka refuses is known to the sink alone. So the sink notes
the sum beside each batch before Spark commits it: a batch that is run again replaces what was noted of it, and who
reads the note for a committed batch has counted that batch and all before it, whether anybody listened or not [I11].

The rows of each batch, and the sums of what became of them (`towline.spark.sink_note`), are noted beside that and not
synced: where a power failure took the note, nobody knows them, and the sums begin anew.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from towline.errors import JournalError
from towline.spark.sink_note import NotedBatch, SinkBatch, SinkSums, noted_after

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from towline.checkpoint import Checkpoint

__all__ = [
    "begun_before",
    "given",
    "given_at",
    "noted",
    "noted_last",
    "run_again",
    "said_at",
    "sum_at",
    "took",
    "took_at",
]

_NAME: Final = "towline.letters"
_ROWS: Final = "towline.rows"
_AGAIN: Final = "towline.again"
_TIMES: Final = "towline.times"
#: Batches remembered: more than whoever listens can be behind.
_KEPT: Final = 100
#: The same of sums, each of which has all before it.
_SUMS_KEPT: Final = 50
#: The same of what is only looked at once.
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


def given(checkpoint: Checkpoint, batch: int, rows: int | None, said: SinkBatch | None = None) -> None:
    """Note how many rows the sink was given in a batch, and what became of them.

    Args:
        checkpoint: Where.
        batch: The batch.
        rows: None where it did not look at all of them.
        said: What the sink says; None for nothing.

    Raises:
        JournalError: TL-J20, the disk did not take it.
    """
    known, before = _rows(checkpoint), _sums(checkpoint)
    now = [entry for entry in known if entry[0] < batch] + ([] if rows is None else [(batch, rows)])
    sums = [one for one in before if one.batch < batch]
    if said is not None:
        sums.append(noted_after(before, batch, said))
    if now != known or sums != before:
        note = {"v": 1, "rows": now[-_KEPT:], "sums": [one.as_json() for one in sums[-_SUMS_KEPT:]]}
        checkpoint.keep_note(_ROWS, json.dumps(note, separators=(",", ":")), synced=False)


def begun_before(checkpoint: Checkpoint, batch: int, given_up: int | None = None) -> None:
    """Note that a query begins with a batch that was begun before, whose rows are not all served again.

    Args:
        checkpoint: Where.
        batch: The batch.
        given_up: How many of its rows are not; None for not known.

    Raises:
        JournalError: TL-J20, the disk did not take it.
    """
    now = {**{one: known for one, known in run_again(checkpoint).items() if one != batch}, batch: given_up}
    kept = [*now.items()][-_KEPT:]
    note = {"v": 1, "batches": [(one, 0) for one, _ in kept], "given_up": [one for one in kept if one[1] is not None]}
    checkpoint.keep_note(_AGAIN, json.dumps(note, separators=(",", ":")))


def run_again(checkpoint: Checkpoint) -> dict[int, int | None]:
    """The batches that `begun_before` was told of, in order, and how many rows each was to be run without."""
    try:
        given_up = dict(_read(checkpoint, _AGAIN, "given_up"))
        return {batch: given_up.get(batch) for batch, _ in _read(checkpoint, _AGAIN, "batches")}
    except OSError:
        return {}


def said_at(checkpoint: Checkpoint, batch: int) -> tuple[SinkSums, SinkSums] | None:
    """What the sink says of all batches up to one, and of that one alone; None for nothing."""
    known = {one.batch: one.sums for one in _sums(checkpoint)}
    sums, before = known.get(batch), known.get(batch - 1)
    if sums is None:
        return None
    if before is not None and before.since == sums.since:
        return sums, sums.minus(before)
    return (sums, sums) if sums.since == batch else None


def noted_last(checkpoint: Checkpoint) -> NotedBatch | None:
    """What the sink said last; None for nothing, or where the checkpoint is not local."""
    return next(iter(_sums(checkpoint)[-1:]), None)


def _sums(checkpoint: Checkpoint) -> list[NotedBatch]:
    try:
        told: Mapping[str, list[list[object]]] = json.loads(checkpoint.note(_ROWS) or "{}")
        return [NotedBatch.from_json(one) for one in told.get("sums", [])]
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def given_at(checkpoint: Checkpoint, batch: int) -> int | None:
    """What `given` was told of a batch; None for nothing, or where the checkpoint is not local."""
    return dict(_rows(checkpoint)).get(batch)


def _rows(checkpoint: Checkpoint) -> list[tuple[int, int]]:
    try:
        return _read(checkpoint, _ROWS, "rows")
    except OSError:
        return []


def took(checkpoint: Checkpoint, batch: int, seconds: Sequence[float]) -> None:
    """Note how long the transactions of a batch were open; nothing is written for none.

    Raises:
        JournalError: TL-J20, the disk did not take it.
    """
    if seconds:
        times = {**{one: known for one, known in _times(checkpoint).items() if one < batch}, batch: [*seconds]}
        kept = [*times.items()][-_TIMES_KEPT:]
        checkpoint.keep_note(_TIMES, json.dumps({"v": 1, "times": kept}, separators=(",", ":")), synced=False)


def took_at(checkpoint: Checkpoint, batch: int) -> list[float]:
    """What `took` was told of a batch; nothing where it was told nothing, or the checkpoint is not local."""
    return _times(checkpoint).get(batch, [])


def _times(checkpoint: Checkpoint) -> dict[int, list[float]]:
    try:
        told = json.loads(checkpoint.note(_TIMES) or "{}").get("times", [])
        return {int(batch): [float(one) for one in seconds] for batch, seconds in told}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def sum_at(checkpoint: Checkpoint, batch: int) -> int:
    """Dead letters of all batches up to one; 0 where none were noted, or the checkpoint is not local."""
    try:
        known = _read(checkpoint)
    except OSError:
        return 0  # whoever counts takes the largest sum
    return next((total for number, total in reversed(known) if number <= batch), 0)


def _read(checkpoint: Checkpoint, name: str = _NAME, key: str = "sums") -> list[tuple[int, int]]:
    """Batches and what was noted of each, in order; a note that is none of ours is one that was never written."""
    try:
        told = json.loads(checkpoint.note(name) or "{}").get(key, [])
        return [(int(batch), int(count)) for batch, count in told]
    except (ValueError, TypeError, AttributeError):
        return []
