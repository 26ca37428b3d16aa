"""The notes in a line's checkpoint, which its account is read from: the sink's totals, and Spark's own numbers.

Spark tells the driver alone how many rows it took of Kafka, or dropped as repeats or late. The driver sums them beside
what the sink has noted of the same batches; of batches that nobody heard of, nobody knows them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Self

from towline.checkpoint import Checkpoint
from towline.kafka.markers import BEFORE_FIRST
from towline.spark.tally import BatchTotals, SinkNote, Span

if TYPE_CHECKING:
    from pathlib import Path

    from towline.spark.offsets import JournalPlace

_SPARK_NOTE: Final = "towline.spark"


@dataclass(frozen=True, slots=True)
class LineNotes:
    """What is noted of a line's committed batches.

    Attributes:
        totals: By its sink; None where nothing is.
        spark: Spark's numbers, of the batches that the driver heard of.
        spark_batch: The last of those.
    """

    totals: BatchTotals | None = None
    spark: Mapping[str, int] = field(default_factory=dict)
    spark_batch: int = BEFORE_FIRST

    @classmethod
    def read(cls, checkpoint: Path | str) -> Self:
        """The notes of a checkpoint.

        Raises:
            OSError: They can't be read.
        """
        logs = Checkpoint(str(checkpoint))
        return cls(SinkNote.read(logs).committed(logs), *_spark_note(logs))

    @property
    def counts(self) -> Counter[str]:
        """The sink's totals; 0 of what it has not counted."""
        return Counter(self.totals.counts if self.totals else {})


def _spark_note(logs: Checkpoint) -> tuple[dict[str, int], int]:
    """Spark's numbers, and the last batch that they are of; none where the note is none of ours."""
    try:
        values = json.loads(logs.note(_SPARK_NOTE) or "{}")
        counts = {str(name): int(count) for name, count in values.get("counts", {}).items()}
        return counts, int(values.get("batch", BEFORE_FIRST))
    except (ValueError, TypeError, AttributeError):
        return {}, BEFORE_FIRST


def keep_spark_counts(logs: Checkpoint, batch: int, counts: Mapping[str, int]) -> None:
    """Write Spark's numbers of all batches up to one.

    Raises:
        JournalError: TL-J20, the disk did not take it.
    """
    values = {"v": 1, "batch": batch, "counts": counts}
    logs.keep_note(_SPARK_NOTE, json.dumps(values, separators=(",", ":")), synced=False)


def add_spark_counts(checkpoint: Path, batch: int, numbers: Callable[[Counter[str]], Mapping[str, int]]) -> None:
    """Add Spark's numbers of a batch, unless they were heard before, or the sink has noted nothing of it.

    Args:
        checkpoint: The line's.
        batch: The batch.
        numbers: Makes them, from what the sink has counted of the batch alone.

    Raises:
        OSError: The notes can't be read.
        JournalError: TL-J20, the disk did not take it.
    """
    logs = Checkpoint(str(checkpoint))
    counts, last = _spark_note(logs)
    sink = SinkNote.read(logs)
    if batch <= last or (totals := sink.upto(batch)) is None:
        return
    total = Counter(counts)
    total.update(numbers(totals.since(sink.before(batch))))
    keep_spark_counts(logs, batch, total)


def carry_totals(old: Path, new: Path) -> None:
    """Begin a new checkpoint with what the one before it has counted.

    Raises:
        OSError: The notes can't be read, or the directory can't be made.
        JournalError: TL-J20, the disk did not take them.
    """
    notes = LineNotes.read(old)
    if notes.totals is None:
        return
    new.mkdir(mode=0o700, exist_ok=True)
    logs = Checkpoint(str(new))
    SinkNote((replace(notes.totals, batch=BEFORE_FIRST, marks=None, sink=""),)).keep(logs)
    if notes.spark:
        keep_spark_counts(logs, BEFORE_FIRST, notes.spark)


def begin_totals(
    checkpoint: Path, ends: Iterable[JournalPlace], *, batch: int = BEFORE_FIRST, gives_up: bool = False
) -> None:
    """Note where the next batch begins in each journal, where the sink has not.

    Args:
        checkpoint: The line's.
        ends: Where it begins.
        batch: The newest batch that is done; `BEFORE_FIRST` in a checkpoint that has none.
        gives_up: Whether what lies between that and what was counted is given up; else it was carried, and nobody
            counted it, as after a power failure that took the note.

    Raises:
        OSError: The note can't be read, or the directory can't be made.
        JournalError: TL-J20, the disk did not take it.
    """
    checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = Checkpoint(str(checkpoint))
    note = SinkNote.read(logs)
    if batch != BEFORE_FIRST and note.upto(batch) is not None:
        return
    totals = note.before(batch + 1) or BatchTotals(batch)
    spans, counts = dict(totals.spans), Counter(totals.counts)
    for place in ends:
        span = spans.get(place.journal, Span(place.offset, place.offset, place.incarnation))
        if (gap := place.offset - span.upto) > 0:
            counts.update({"messages": gap, "skipped" if gives_up else "unwitnessed": gap})
            span = Span(span.since, place.offset, place.incarnation)
        spans[place.journal] = span
    note.begun(replace(totals, batch=batch, spans=spans, counts=counts, marks=None)).keep(logs)
