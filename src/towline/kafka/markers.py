"""What a sink remembers in Kafka about its batches, and what that means for the batch at hand. Pure: no Kafka here.

Every transaction of ``exactly_once`` writes, beside the records, one marker: the number of the batch and enough to know
whether it is the same batch of the same query. The marker is read after ``init_transactions()``, so the transaction it
stands for is committed or aborted, never pending [I9]. `situation` compares, and says where to stop.

Every partition writes its marker in every batch, an empty one too. So the marker before batch b is b-1 or b; anything
else means that marker and checkpoint do not belong together, and guessing would lose or double records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from towline.sinks import Task

#: Version of the marker's JSON; a marker of a newer one is not understood, and not guessed at.
VERSION: Final = 1
#: ``batch`` of a marker that was written before any batch was.
BEFORE_FIRST: Final = -1
#: ``writer`` of a marker set by hand: any query may go on from it.
ANYONE: Final = ""


class TaskRefusal(NamedTuple):
    """A task beyond the sink's parallelism said no: the batch has more partitions than may be written.

    `run` is Spark's run id of the query, None if unknown.
    """

    batch: int
    run: str | None
    partition: int


class MarkerTotals(NamedTuple):
    """What the markers of a sink say of all its batches: rows, dead letters included, and dead letters among them."""

    rows: int
    dead_lettered: int


class MarkerStep(NamedTuple):
    """What a batch found in the markers, and what it left there: a source in Kafka, beside the sink's own sums.

    Attributes:
        before: None where nothing can be told from it: there was no marker, or a person has set it.
        after: With the batch.
    """

    before: MarkerTotals | None
    after: MarkerTotals

    @classmethod
    def over(cls, steps: Sequence[MarkerStep | None]) -> MarkerStep | None:
        """Of all partitions of a batch; None where one has no markers."""
        after = _sum([step and step.after for step in steps])
        return after and cls(_sum([step and step.before for step in steps]), after)


def _sum(totals: Sequence[MarkerTotals | None]) -> MarkerTotals | None:
    """None where one of them is not known, or there are none."""
    known = [one for one in totals if one is not None]
    return MarkerTotals(*map(sum, zip(*known, strict=True))) if known and len(known) == len(totals) else None


@dataclass(frozen=True)
class Marker:
    """What one partition of a sink wrote last; its fields are those of the JSON in the marker topic.

    Attributes:
        batch: The batch; `BEFORE_FIRST` if none.
        parallelism: Partitions the sink wrote its batches in (N).
        rows: Rows of this batch and partition, dead letters included.
        crc: Order-insensitive sum over keys and values (`towline.kafka.delivery.checksum`); None where nobody was
            to compare it.
        writer: Id of the query, which is random and lives in its checkpoint; `ANYONE` if set by hand.
        offsets: SHA-256 of the checkpoint's ``offsets/<batch>``; None where the checkpoint is not local.
        dead_lettered: How many of the rows went to the dead-letter topic.
        total_rows: Sum of ``rows`` over all batches of this partition: an account that is itself exactly once.
        total_dead_lettered: Sum of ``dead_lettered``.
        refused: The last refusal, if any.
    """

    batch: int
    parallelism: int
    rows: int = 0
    crc: int | None = 0
    writer: str = ANYONE
    offsets: str | None = None
    dead_lettered: int = 0
    total_rows: int = 0
    total_dead_lettered: int = 0
    refused: TaskRefusal | None = None

    @property
    def totals(self) -> MarkerTotals:
        """Of this batch and all before it."""
        return MarkerTotals(self.total_rows, self.total_dead_lettered)

    def step(self, *, known: bool) -> MarkerStep:
        """What its batch found and left; `known` says whether the one before it was of a batch, and not of a person."""
        rows, dead = self.totals
        before = MarkerTotals(rows - self.rows, dead - self.dead_lettered) if known else None
        return MarkerStep(before, self.totals)

    def to_json(self) -> bytes:
        """The value of the marker's record."""
        return json.dumps({"v": VERSION, **vars(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Marker:
        """Read a marker.

        Raises:
            ValueError: It is none, or of a newer version; says why.
        """
        try:
            values = json.loads(value)
            if (version := values.pop("v")) != VERSION:
                raise ValueError(f"it has version {version}, this Towline knows {VERSION}")
            refused = values.pop("refused")
            marker = cls(**values, refused=None if refused is None else TaskRefusal(*refused))
        except (AttributeError, KeyError, TypeError) as problem:
            raise ValueError(f"it is no marker: {problem!r}") from None
        numbers = (marker.batch, marker.parallelism, marker.rows, marker.dead_lettered, *marker.totals, marker.crc or 0)
        if not all(type(number) is int for number in numbers):
            raise ValueError(f"it is no marker: {values}")
        return marker

    def following(self, marker: Marker | None) -> Marker:
        """``self`` with the totals that follow from the marker before it; None for the first."""
        rows, dead = (0, 0) if marker is None else marker.totals
        return replace(self, total_rows=rows + self.rows, total_dead_lettered=dead + self.dead_lettered)


class Mismatch(NamedTuple):
    """Why nothing is written: the error's code, what happened, and two ways out, to start anew and to go on.

    ``{m}`` is the marker, ``{t}`` the task, ``{n}`` the parallelism now, ``{to}`` the batch before the task's.
    """

    code: str
    what: str
    do: str


_RESET: Final = "`towline kafka marker reset {command} --to-batch {to} --yes`"
#: Where no marker says how many there were.
_RESET_ALL: Final = "`towline kafka marker reset {command} --to-batch {to} --parallelism {n} --yes`"
#: In the words of both places where it is read: a program with format("kafka_transactional"), and a bridge file.
_ANEW: Final = "a new sinkId (for a bridge: towline begin-again FILE LINE)"


class Situation(Enum):
    """What a marker says about a claim: that it is written, or skipped, or the `Mismatch` at which the query stops."""

    #: The marker of the batch before; or this is batch 0, and no marker, or another query's that has never had a row.
    WRITE = "write"
    #: The marker of this very batch: it is in Kafka.
    DONE = "done"
    MISSING = Mismatch(
        "TL-K10",
        "batch {t.batch} has no marker of the batch before it (partition {t.partition}): the topic {topic} was "
        "deleted or lost it, or this checkpoint wrote to another sink until now",
        f"If batch {{t.batch}} is not in Kafka, {_RESET_ALL} goes on and writes it; if it is, the same with "
        "--to-batch {t.batch} leaves it out.",
    )
    BEHIND = Mismatch(
        "TL-K11",
        "the marker of partition {t.partition} says batch {m.batch}, Spark runs batch {t.batch}: markers were lost, or "
        "batches {after} to {to} were written by another sink, or left out in foreachBatch",
        f"If batch {{t.batch}} is not in Kafka, {_RESET} goes on and writes it; else start with a new "
        f"checkpoint and {_ANEW}.",
    )
    AHEAD = Mismatch(
        "TL-K12",
        "the marker of partition {t.partition} says batch {m.batch}, Spark runs batch {t.batch} only: an older "
        "checkpoint was restored, and skipping would lose new rows under old numbers",
        f"Restore the newest checkpoint; or {_RESET} writes batches {{t.batch}} to {{m.batch}} again, doubling them.",
    )
    FOREIGN = Mismatch(
        "TL-K13",
        "the marker of partition {t.partition} belongs to query {m.writer}, this is query {t.query}: the checkpoint "
        "was deleted, or two queries write as this sink",
        f"Take {_ANEW}; or {_RESET} hands this sink over to this query, and its next batch is "
        "written whatever the other query wrote.",
    )
    RESCALED = Mismatch(
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
    REFUSED = Mismatch(
        "TL-K17",
        "batch {t.batch} has more than {n} partitions (partition {m.refused.partition} came), and parallelism is {n}",
        "Leave parallelism out; or put .coalesce(1) before writeStream, or .repartition(N, key) with parallelism=N.",
    )
    TORN = Mismatch(
        "TL-K18",
        "batch {t.batch} is half written: partition {t.partition} is in Kafka ({m.rows:,} rows), partition "
        "{m.refused.partition} and others were refused because parallelism was {m.parallelism}",
        f"Start with a new checkpoint, {_ANEW} and a new topic; or "
        f"{_RESET} writes the whole batch, doubling those rows.",
    )


def situation(marker: Marker | None, task: Task, parallelism: int, hashes: Mapping[int, str]) -> Situation:
    """Compare the last marker of a partition with what a task of a stream is to write.

    The order matters: who wrote it comes before what it says, and numbers before details. The hashes are those of the
    checkpoint's ``offsets/<batch>`` by batch, as far as known.
    """
    batch = task.batch or 0
    if marker is None:
        return Situation.WRITE if batch == 0 else Situation.MISSING
    if marker.writer not in (ANYONE, task.query or ANYONE):
        return Situation.WRITE if batch == 0 and not marker.total_rows else Situation.FOREIGN
    reached, written = marker.batch == batch, marker.batch != BEFORE_FIRST
    refused = marker.refused is not None and marker.refused.batch == batch
    # A refusal of an earlier run does not bind this one: the query may have been corrected.
    of_this_run = marker.refused is not None and marker.refused.run is not None and marker.refused.run == task.run
    other = marker.offsets is not None and hashes.get(marker.batch, marker.offsets) != marker.offsets
    rules = (
        (Situation.AHEAD, marker.batch > batch),
        (Situation.BEHIND, marker.batch < batch - 1),
        (Situation.TORN, refused and reached),
        (Situation.REFUSED, refused and of_this_run),
        (Situation.RESCALED, written and marker.parallelism != parallelism),
        (Situation.OTHER_OFFSETS, written and other),
        (Situation.DONE, reached),
        (Situation.WRITE, True),
    )
    return next(found for found, holds in rules if holds)
