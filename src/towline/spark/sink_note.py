"""Sink note in a stream's checkpoint: totals of its batches, and write throughput of the last one.

Only the sink knows the rows that Kafka refused. So it writes the totals with each batch before Spark commits it. For a
committed batch, the note has counted that batch and all before it, whenever it is read [I11]. It becomes durable with
the checkpoint (`Checkpoint.sync`). A repeated batch replaces its former counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline.checkpoint import SINK_TOTALS
from towline.errors import JournalError
from towline.kafka.markers import NO_BATCH, MarkerStep, MarkerTotals
from towline.spark.batching import WriteThroughput
from towline.timing import BATCH_BUCKETS, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from towline.checkpoint import Checkpoint
    from towline.gateway.identity import JournalPosition


class Span(NamedTuple):
    """Range of a journal's messages covered by totals.

    Attributes:
        start: Offset of the first message.
        end: Offset after the last.
    """

    start: int
    end: int


class BatchMessages(NamedTuple):
    """Journal messages of a batch.

    Attributes:
        spans: Covered ranges by journal, including all batches before.
        row_count: Number of messages in the batch; None if its start or end is unknown.
        uncounted_rows: Number of messages between the batches before and this one, which no sink counted.
    """

    spans: Mapping[str, Span]
    row_count: int | None
    uncounted_rows: int

    @classmethod
    def from_positions(
        cls, previous: BatchTotals | None, start: Iterable[JournalPosition], end: Sequence[JournalPosition]
    ) -> Self:
        """Return the messages between the start positions of a batch, as far as they are known, and its end positions.

        A journal new to the batch has no message in it yet. The totals before may be unknown, too.
        """
        spans, row_count, uncounted_rows = {**previous.spans} if previous else {}, 0, 0
        starts = {name: span.end for name, span in spans.items()}
        starts |= {position.journal: position.offset for position in start}
        for position in end:
            journal, batch_start = position.journal, starts.get(position.journal, position.offset)
            span = spans.setdefault(journal, Span(batch_start, batch_start))
            uncounted_rows += max(0, batch_start - span.end)
            row_count += position.offset - batch_start
            if position.offset != batch_start or batch_start > span.end:  # a reset line may end below it
                spans[journal] = Span(span.start, position.offset)
        return cls(spans, row_count if starts and end else None, uncounted_rows)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Counts of a sink for one batch.

    Attributes:
        counts: Of the sink to Kafka: ``given``, rows that it received, of a skipped batch as its marker says;
            ``acknowledged`` by Kafka in their topics, with acks=0 sent to the network; ``dead_lettered``, in the
            dead-letter topic; ``lost``, dropped by at_most_once; ``unknown``, of batches skipped because a person set
            their marker. Further ones are those of a bridge's lines (`towline.bridge.uplink.sink`,
            `towline.bridge.downlink.sink`).
        marks: Totals of its markers before and after, over all partitions; None without transactions.
        sink: Name and number of its markers: ``<sink id>/<partitions>``.
        seconds: Duration of each transaction.
        spans: Of an uplink, by journal: its messages, and those of all batches before.
    """

    counts: Counter[str]
    marks: MarkerStep | None = None
    sink: str = ""
    seconds: Sequence[float] = ()
    spans: Mapping[str, Span] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Sums of the counts of all batches up to one.

    Attributes:
        batch: Id of the last batch; `towline.kafka.markers.NO_BATCH` for the totals of earlier checkpoints.
        counts: Sums of `BatchResult.counts`; and ``drift`` and ``drift_dead``: rows, and dead letters, by which the
            totals of Kafka's markers differ from those that this sink wrote.
        spans: Covered ranges of the last batch.
        marks: Marker totals after the last batch; None if there are none.
        sink: Sink name of the last batch.
        transactions: Number of transactions by duration, in the buckets of `towline.timing.BATCH_BUCKETS`.
        seconds: Sum of their durations.
    """

    batch: int
    counts: Mapping[str, int] = field(default_factory=dict)
    spans: Mapping[str, Span] = field(default_factory=dict)
    marks: MarkerTotals | None = None
    sink: str = ""
    transactions: Sequence[int] = ()
    seconds: float = 0.0

    @property
    def histogram(self) -> Histogram:
        """Histogram of transaction durations."""
        histogram = Histogram(BATCH_BUCKETS)
        histogram.counts, histogram.seconds = [*self.transactions] or histogram.counts, self.seconds
        return histogram

    def as_json(self) -> dict[str, Any]:
        """Return the totals as plain values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if value or name == "batch"}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Parse the values of `as_json`; raises ValueError, TypeError, KeyError or AttributeError for other values."""
        spans = {name: Span(*span) for name, span in values.get("spans", {}).items()}
        marks, transactions = values.get("marks"), tuple(values.get("transactions", ()))
        fields = {"batch": int(values["batch"]), "spans": spans, "transactions": transactions}
        return cls(**{**values, **fields, "marks": marks and MarkerTotals(*marks)})


#: Number of batches whose totals are kept: more than any reader is behind.
_KEPT_BATCHES: Final = 10
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SinkNote:
    """Note of a sink in its checkpoint.

    Attributes:
        totals: Totals of the newest batches, in order.
        throughput: Write throughput of the last batch; None if unknown.
    """

    totals: tuple[BatchTotals, ...] = ()
    throughput: WriteThroughput | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint, name: str = SINK_TOTALS) -> Self:
        """Read the note; empty if it is missing, invalid, or the checkpoint is on no disk of this machine.

        Raises:
            JournalError: TL-J20, the file can't be read, or a later version wrote it: totals must not restart at zero.
        """
        try:
            values = json.loads(checkpoint.read_note(name) or "{}")
            if (version := values.get("v", _VERSION)) != _VERSION:
                problem, remedy = f"the totals of the batches have format {version}", "Use the version that wrote them."
                raise JournalError("TL-J20", name, problem, remedy)
            throughput = values.get("throughput")
            totals = tuple(map(BatchTotals.from_json, values.get("totals", ())))
            return cls(totals, throughput and WriteThroughput(*throughput))
        except (ValueError, TypeError, AttributeError, KeyError):
            return cls()
        except OSError as error:
            problem = f"the totals of the batches can't be read ({error.strerror})"
            raise JournalError("TL-J20", str(error.filename), problem, "The batch is repeated later.") from error

    def write(self, checkpoint: Checkpoint, name: str = SINK_TOTALS) -> None:
        """Write the note.

        Raises:
            JournalError: TL-J20, the file can't be written.
        """
        totals = [batch_totals.as_json() for batch_totals in self.totals[-_KEPT_BATCHES:]]
        values = {"v": _VERSION, "totals": totals, "throughput": self.throughput}
        checkpoint.write_note(name, json.dumps(values, separators=(",", ":")), sync=False)

    def totals_before(self, batch: int) -> BatchTotals | None:
        """Return the newest totals before a batch, else None."""
        return next((totals for totals in reversed(self.totals) if totals.batch < batch), None)

    def totals_of(self, batch: int) -> BatchTotals | None:
        """Return the totals up to and including a batch, else None."""
        return next((totals for totals in self.totals if totals.batch == batch), None)

    def with_batch(self, batch: int, result: BatchResult, throughput: WriteThroughput | None = None) -> Self:
        """Return the note with a batch and its write throughput added; None keeps the former throughput."""
        previous = self.totals_before(batch)
        step, histogram = result.marks, previous.histogram if previous else Histogram(BATCH_BUCKETS)
        for seconds in result.seconds:
            histogram.observe(seconds)
        counts = Counter(previous.counts if previous else {})
        counts.update(result.counts)
        is_adjacent = previous and (previous.batch, previous.sink) == (batch - 1, result.sink)
        if previous and is_adjacent and previous.marks is not None and step and step.totals_before is not None:
            counts["drift"] += step.totals_before.rows - previous.marks.rows
            counts["drift_dead"] += step.totals_before.dead_lettered - previous.marks.dead_lettered
        nonzero = {name: count for name, count in counts.items() if count}
        transactions, marks = tuple(histogram.counts), step.totals_after if step else None
        totals = BatchTotals(batch, nonzero, result.spans, marks, result.sink, transactions, histogram.seconds)
        return replace(self.with_totals(totals), throughput=throughput or self.throughput)

    def with_totals(self, totals: BatchTotals) -> Self:
        """Return the note with these totals in place of those of the same or later batches."""
        earlier = (batch_totals for batch_totals in self.totals if batch_totals.batch < totals.batch)
        return replace(self, totals=(*earlier, totals))

    def committed_totals(self, checkpoint: Checkpoint) -> BatchTotals | None:
        """Return the totals of the newest batch that Spark has committed, else None."""
        for totals in reversed(self.totals):
            if totals.batch == NO_BATCH or checkpoint.has_commit(totals.batch):
                return totals
        return None


def read_throughput(checkpoint: Checkpoint) -> WriteThroughput | None:
    """Return the write throughput of the last batch; None if unknown or unreadable."""
    with suppress(JournalError):
        return SinkNote.read(checkpoint).throughput
    return None
