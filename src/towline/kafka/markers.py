"""Batch markers of a sink, and their comparison with the batch to write. Pure: no Kafka here.

Every transaction of ``exactly_once`` writes one marker beside the records: the batch number and enough to tell whether
it is the same batch of the same query. The marker is read after ``init_transactions()``, so its transaction is
committed or aborted, never pending [I9]. `compare_marker` decides: write, skip, or stop.

Every partition writes its marker in every batch, an empty one too. So the marker before batch b is b-1 or b. Any other
number means that marker and checkpoint do not belong together, and a guess would lose or duplicate records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from towline.sinks import Task

VERSION: Final = 1  #: Version of the marker's JSON; a marker of a newer version is an error.
NO_BATCH: Final = -1  #: ``batch`` of a marker that was written before any batch was.
ANY_QUERY: Final = ""  #: ``writer`` of a marker set by hand: any query may go on from it.


class TaskRefusal(NamedTuple):
    """Refusal by a task beyond the sink's parallelism: the batch has more partitions than may be written.

    `run` is Spark's run id of the query, None if unknown.
    """

    batch: int
    run: str | None
    partition: int


class MarkerTotals(NamedTuple):
    """Totals of all batches in a sink's markers: rows, dead letters included, and dead letters among them."""

    rows: int
    dead_lettered: int


class MarkerStep(NamedTuple):
    """Marker totals before and after one batch: a count from Kafka, independent of the sink's own.

    Attributes:
        totals_before: None where unknown: there was no marker, or it was set by hand.
        totals_after: Totals with this batch.
    """

    totals_before: MarkerTotals | None
    totals_after: MarkerTotals

    @classmethod
    def sum_partitions(cls, steps: Sequence[MarkerStep | None]) -> MarkerStep | None:
        """Sum the totals of all partitions of a batch; None where a partition has no marker."""
        totals_after = _sum_totals([step and step.totals_after for step in steps])
        return totals_after and cls(_sum_totals([step and step.totals_before for step in steps]), totals_after)


def _sum_totals(totals: Sequence[MarkerTotals | None]) -> MarkerTotals | None:
    """Sum totals; None where one of them is unknown, or there are none."""
    present = [pair for pair in totals if pair is not None]
    return MarkerTotals(*map(sum, zip(*present, strict=True))) if present and len(present) == len(totals) else None


@dataclass(frozen=True)
class Marker:
    """Marker of the last batch that a sink wrote in one partition; its fields are the JSON of the marker topic.

    Attributes:
        batch: Batch number; `NO_BATCH` if none.
        parallelism: Number of partitions in which the sink wrote its batches (N).
        rows: Rows of this batch and partition, dead letters included.
        crc: Order-insensitive sum over keys and values (`towline.kafka.delivery.checksum`); None where it was not
            computed.
        writer: Id of the query, which is random and lives in its checkpoint; `ANY_QUERY` if set by hand.
        offsets: SHA-256 of the checkpoint's ``offsets/<batch>``; None where the checkpoint is not local.
        dead_lettered: How many of the rows went to the dead-letter topic.
        total_rows: Sum of ``rows`` over all batches of this partition: a total that is itself exactly once.
        total_dead_lettered: Sum of ``dead_lettered``.
        refused: The last refusal of a task, if any.
    """

    batch: int
    parallelism: int
    rows: int = 0
    crc: int | None = 0
    writer: str = ANY_QUERY
    offsets: str | None = None
    dead_lettered: int = 0
    total_rows: int = 0
    total_dead_lettered: int = 0
    refused: TaskRefusal | None = None

    @property
    def totals(self) -> MarkerTotals:
        """Totals of this batch and all before it."""
        return MarkerTotals(self.total_rows, self.total_dead_lettered)

    def step(self, *, has_previous: bool) -> MarkerStep:
        """Return the totals before and after this batch; `has_previous`: a batch wrote the marker before this one."""
        rows, dead = self.totals
        totals_before = MarkerTotals(rows - self.rows, dead - self.dead_lettered) if has_previous else None
        return MarkerStep(totals_before, self.totals)

    def to_json(self) -> bytes:
        """Encode the marker as the value of its record."""
        return json.dumps({"v": VERSION, **vars(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Marker:
        """Decode a marker.

        Raises:
            ValueError: The value is no marker, or of a newer version; has the cause.
        """
        try:
            values = json.loads(value)
            if (version := values.pop("v")) != VERSION:
                raise ValueError(f"it has version {version}, this Towline knows {VERSION}")
            refusal = values.pop("refused")
            marker = cls(**values, refused=None if refusal is None else TaskRefusal(*refusal))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is no marker: {error!r}") from None
        numbers = (marker.batch, marker.parallelism, marker.rows, marker.dead_lettered, *marker.totals, marker.crc or 0)
        if not all(type(number) is int for number in numbers):
            raise ValueError(f"it is no marker: {values}")
        return marker

    def with_totals_after(self, previous: Marker | None) -> Marker:
        """Return this marker with the totals that follow from the previous marker; None for the first marker."""
        rows, dead = (0, 0) if previous is None else previous.totals
        return replace(self, total_rows=rows + self.rows, total_dead_lettered=dead + self.dead_lettered)


class Mismatch(NamedTuple):
    """Error for a marker that forbids to write: code, problem, and a remedy with two choices, reset or continue.

    ``{m}`` is the marker, ``{t}`` the task, ``{n}`` the parallelism now, ``{to}`` the batch before the task's.
    """

    code: str
    problem: str
    remedy: str


_RESET: Final = "`towline kafka marker reset {command} --to-batch {to} --yes`"
#: Where no marker has the parallelism.
_RESET_ALL: Final = "`towline kafka marker reset {command} --to-batch {to} --parallelism {n} --yes`"
#: For both users: a program with format("kafka_transactional"), and a bridge file.
_NEW_SINK_ID: Final = "a new sinkId (for a bridge: towline reset FILE LINE)"


class MarkerVerdict(Enum):
    """Result of the comparison of a marker with a task: write, skip, or the `Mismatch` that stops the query."""

    #: The marker of the batch before; or this is batch 0, and no marker, or another query's that has never had a row.
    WRITE = "write"
    ALREADY_WRITTEN = "done"  #: The marker of this batch: it is in Kafka.
    NO_MARKER = Mismatch(
        "TL-K10",
        "batch {t.batch} has no marker of the batch before it (partition {t.partition}): the topic {topic} was "
        "deleted or lost it, or this checkpoint wrote to another sink until now",
        f"If batch {{t.batch}} is not in Kafka, {_RESET_ALL} goes on and writes it; if it is, the same with "
        "--to-batch {t.batch} skips it.",
    )
    MARKER_BEHIND = Mismatch(
        "TL-K11",
        "the marker of partition {t.partition} says batch {m.batch}, Spark runs batch {t.batch}: markers were lost, or "
        "batches {after} to {to} were written by another sink, or skipped in foreachBatch",
        f"If batch {{t.batch}} is not in Kafka, {_RESET} goes on and writes it; else start with a new "
        f"checkpoint and {_NEW_SINK_ID}.",
    )
    MARKER_AHEAD = Mismatch(
        "TL-K12",
        "the marker of partition {t.partition} says batch {m.batch}, Spark runs batch {t.batch} only: an older "
        "checkpoint was restored, and skipping would lose new rows under old numbers",
        f"Restore the newest checkpoint; or {_RESET} writes batches {{t.batch}} to {{m.batch}} again, doubling them.",
    )
    OTHER_QUERY = Mismatch(
        "TL-K13",
        "the marker of partition {t.partition} belongs to query {m.writer}, this is query {t.query}: the checkpoint "
        "was deleted, or two queries write as this sink",
        f"Take {_NEW_SINK_ID}; or {_RESET} hands this sink over to this query, and its next batch is "
        "written whatever the other query wrote.",
    )
    OTHER_PARALLELISM = Mismatch(
        "TL-K14",
        "batch {m.batch} was written with parallelism {m.parallelism}, now it is {n}: partitions no longer match",
        "Set parallelism back to {m.parallelism}; or, when batch {m.batch} is complete in Spark's commit log, "
        "`towline kafka marker reset {command} --to-batch {m.batch} --parallelism {n} --yes`.",
    )
    OTHER_OFFSETS = Mismatch(
        "TL-K15",
        "batch {m.batch} was written with other source offsets than the checkpoint has for it now: an "
        "older checkpoint was restored, and ran on",
        f"Restore the newest checkpoint; or {_RESET} goes on from this one, and rows between the two may be doubled.",
    )
    TASK_REFUSED = Mismatch(
        "TL-K17",
        "batch {t.batch} has more than {n} partitions (partition {m.refused.partition} came), and parallelism is {n}",
        "Leave parallelism out; or put .coalesce(1) before writeStream, or .repartition(N, key) with parallelism=N.",
    )
    HALF_WRITTEN = Mismatch(
        "TL-K18",
        "batch {t.batch} is half written: partition {t.partition} is in Kafka ({m.rows:,} rows), partition "
        "{m.refused.partition} and others were refused because parallelism was {m.parallelism}",
        f"Start with a new checkpoint, {_NEW_SINK_ID} and a new topic; or "
        f"{_RESET} writes the whole batch, doubling those rows.",
    )


def compare_marker(marker: Marker | None, task: Task, parallelism: int, hashes: Mapping[int, str]) -> MarkerVerdict:
    """Compare the last marker of a partition with the batch that a task of a stream is to write.

    The order of the rules matters: the writer is checked before the batch number, and numbers before details. `hashes`
    are those of the checkpoint's ``offsets/<batch>`` by batch, as far as known.
    """
    batch = task.batch or 0
    if marker is None:
        return MarkerVerdict.WRITE if batch == 0 else MarkerVerdict.NO_MARKER
    if marker.writer not in (ANY_QUERY, task.query or ANY_QUERY):
        return MarkerVerdict.WRITE if batch == 0 and not marker.total_rows else MarkerVerdict.OTHER_QUERY
    is_same_batch, has_batch = marker.batch == batch, marker.batch != NO_BATCH
    has_refusal = marker.refused is not None and marker.refused.batch == batch
    # A refusal of an earlier run does not bind this one: the query may have been corrected.
    of_this_run = marker.refused is not None and marker.refused.run is not None and marker.refused.run == task.run
    has_other_offsets = marker.offsets is not None and hashes.get(marker.batch, marker.offsets) != marker.offsets
    rules = (
        (MarkerVerdict.MARKER_AHEAD, marker.batch > batch),
        (MarkerVerdict.MARKER_BEHIND, marker.batch < batch - 1),
        (MarkerVerdict.HALF_WRITTEN, has_refusal and is_same_batch),
        (MarkerVerdict.TASK_REFUSED, has_refusal and of_this_run),
        (MarkerVerdict.OTHER_PARALLELISM, has_batch and marker.parallelism != parallelism),
        (MarkerVerdict.OTHER_OFFSETS, has_batch and has_other_offsets),
        (MarkerVerdict.ALREADY_WRITTEN, is_same_batch),
        (MarkerVerdict.WRITE, True),
    )
    return next(verdict for verdict, applies in rules if applies)
