"""The note of a stream's sink in its checkpoint: totals of its batches, and how Kafka took the last one.

A row that Kafka refuses is known to the sink alone. So the sink notes the totals with each batch before Spark commits
it: whoever reads the note for a committed batch has counted that batch and all before it, whenever he asks [I11]. It is
durable when the checkpoint is made so (`Checkpoint.sync`). A batch that is run again replaces what it added before.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline.checkpoint import SINK_NOTE
from towline.errors import JournalError
from towline.kafka.markers import BEFORE_FIRST, MarkerStep, MarkerTotals
from towline.spark.pace import WritePace
from towline.timing import BATCHES, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from towline.checkpoint import Checkpoint
    from towline.spark.offsets import JournalPlace


class Span(NamedTuple):
    """The messages of a journal that totals are about.

    Attributes:
        since: Offset of the first.
        upto: Offset after the last.
        incarnation: Which opening of the journal wrote that row [I14]; "" where it is not known.
    """

    since: int
    upto: int
    incarnation: str = ""


class BatchMessages(NamedTuple):
    """Which messages of the journals a batch has.

    Attributes:
        spans: With those of all batches before.
        own: How many the batch has; None where it is not known where the batch begins, or ends.
        gap: How many lie between the batches before and this one, and were counted by nobody.
    """

    spans: Mapping[str, Span]
    own: int | None
    gap: int

    @classmethod
    def of(cls, before: BatchTotals | None, start: Iterable[JournalPlace], end: Sequence[JournalPlace]) -> Self:
        """The messages between two places: where the batch before ends, as far as that is known, and where it ends.

        A journal that it begins with has no message yet. What the batches before have may not be known either.
        """
        spans, own, gap = {**before.spans} if before else {}, 0, 0
        begins = {name: span.upto for name, span in spans.items()} | {one.journal: one.offset for one in start}
        for place in end:
            begin = begins.get(place.journal, place.offset)
            span = spans.setdefault(place.journal, Span(begin, begin, place.incarnation))
            gap += max(0, begin - span.upto)
            own += place.offset - begin
            if place.offset != begin or begin > span.upto:  # a line that begins again may end below what was counted
                spans[place.journal] = Span(span.since, place.offset, place.incarnation)
        return cls(spans, own if begins and end else None, gap)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a sink says of one batch.

    Attributes:
        counts: Of the sink to Kafka: ``given``, rows that came to it, of a skipped batch what the marker says;
            ``acknowledged`` by Kafka where they belong, with acks=0 handed to the network; ``dead_lettered``, in the
            dead-letter topic; ``lost``, given up by at_most_once; ``unknown``, of batches skipped because a marker set
            by hand says that they are done. Further ones are those of a bridge's lines (`towline.bridge.uplink.sink`,
            `towline.bridge.downlink.sink`).
        marks: The totals of its markers before and after, over all partitions; None without transactions.
        sink: Whose markers, and how many: ``<sink id>/<partitions>``.
        seconds: How long each transaction was open.
        spans: Of an uplink, by journal: its messages, and those of all batches before.
    """

    counts: Counter[str]
    marks: MarkerStep | None = None
    sink: str = ""
    seconds: Sequence[float] = ()
    spans: Mapping[str, Span] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """What became of all batches up to one.

    Attributes:
        batch: The last of them; `towline.kafka.markers.BEFORE_FIRST` for those of the checkpoints before.
        counts: Sums of `BatchResult.counts`; and ``again``: acknowledged once more when a batch was run again;
            ``drift`` and ``drift_dead``: by how many rows, and dead letters, the totals of Kafka's markers are not what
            this sink left there.
        spans: Of the last.
        marks: Totals of the markers that the last batch left; None where there are none.
        sink: Of the last.
        transactions: How many were open how long, by the buckets of `towline.timing.BATCHES`.
        seconds: How long they were open together.
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
        """How long transactions were open."""
        made = Histogram(BATCHES)
        made.counts, made.seconds = [*self.transactions] or made.counts, self.seconds
        return made

    def since(self, before: BatchTotals | None) -> Counter[str]:
        """What was counted since other totals."""
        counts = Counter(self.counts)
        counts.subtract(before.counts if before else {})
        return counts

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if value or name == "batch"}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From `as_json`.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: It is none.
        """
        marks = values.get("marks")
        return cls(
            int(values["batch"]),
            {str(name): int(count) for name, count in values.get("counts", {}).items()},
            {name: Span(int(since), int(upto), str(by)) for name, (since, upto, by) in values.get("spans", {}).items()},
            marks and MarkerTotals(*map(int, marks)),
            str(values.get("sink", "")),
            tuple(map(int, values.get("transactions", ()))),
            float(values.get("seconds", 0)),
        )


#: Batches of which the totals are kept: more than whoever asks for those of a batch is behind.
_KEPT: Final = 10


@dataclass(frozen=True, slots=True)
class SinkNote:
    """What a sink has noted.

    Attributes:
        totals: Of the newest batches, in their order.
        pace: How Kafka took the last batch; None where nobody has said it.
    """

    totals: tuple[BatchTotals, ...] = ()
    pace: WritePace | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint, name: str = SINK_NOTE) -> Self:
        """The note; empty where there is none, it is none of ours, or the checkpoint is on no disk of this machine.

        Raises:
            OSError: The file can't be read.
        """
        text = checkpoint.note(name)
        try:
            values = json.loads(text or "{}")
            pace = values.get("pace")
            return cls(tuple(map(BatchTotals.from_json, values.get("totals", ()))), pace and WritePace(*pace))
        except (ValueError, TypeError, AttributeError, KeyError):
            return cls()

    @classmethod
    def read_to_write(cls, checkpoint: Checkpoint) -> Self:
        """The note, before it is written anew.

        Raises:
            JournalError: TL-J20, the disk does not give it: the totals would begin anew.
        """
        try:
            return cls.read(checkpoint)
        except OSError as error:
            what = f"the totals of the batches can't be read ({error.strerror})"
            raise JournalError("TL-J20", str(error.filename), what, "The batch is run again when it can be.") from error

    def keep(self, checkpoint: Checkpoint, name: str = SINK_NOTE) -> None:
        """Write it.

        Raises:
            JournalError: TL-J20, the disk did not take it.
        """
        values = {"v": 1, "totals": [one.as_json() for one in self.totals[-_KEPT:]], "pace": self.pace}
        checkpoint.keep_note(name, json.dumps(values, separators=(",", ":")), synced=False)

    def before(self, batch: int) -> BatchTotals | None:
        """The totals of all batches before one, as far as they are known; None for nothing."""
        return next((one for one in reversed(self.totals) if one.batch < batch), None)

    def upto(self, batch: int) -> BatchTotals | None:
        """The totals of all batches up to one; None where they are not known."""
        return next((one for one in self.totals if one.batch == batch), None)

    def after(self, batch: int, result: BatchResult, pace: WritePace | None = None) -> Self:
        """With a batch, and how Kafka took it; None for what was noted before."""
        before, former = self.before(batch), self.upto(batch)  # of the batches before; and by a run before this one
        marks, histogram = result.marks, Histogram(BATCHES) if before is None else before.histogram
        for seconds in result.seconds:
            histogram.observe(seconds)
        total = Counter(before.counts if before else {})
        total.update(result.counts)
        if former is not None and not (marks is not None and (result.sink, marks.after) == (former.sink, former.marks)):
            written = former.since(before)["acknowledged"]  # else the markers stand there: nothing was written again
            total["again"] += min(written, result.counts.get("acknowledged", 0))
        last = before if before is not None and before.batch == batch - 1 and before.sink == result.sink else None
        if last is not None and last.marks is not None and marks is not None and marks.before is not None:
            total["drift"] += marks.before.rows - last.marks.rows
            total["drift_dead"] += marks.before.dead_lettered - last.marks.dead_lettered
        counts = {name: count for name, count in total.items() if count}
        after = marks.after if marks else None
        totals = BatchTotals(
            batch, counts, result.spans, after, result.sink, tuple(histogram.counts), histogram.seconds
        )
        return replace(self.begun(totals), pace=pace or self.pace)

    def begun(self, totals: BatchTotals) -> Self:
        """With totals behind which nothing is known."""
        return replace(self, totals=(*(one for one in self.totals if one.batch < totals.batch), totals))

    def committed(self, checkpoint: Checkpoint) -> BatchTotals | None:
        """The totals of the newest batch that Spark has committed; None for nothing."""
        done = (one for one in reversed(self.totals) if one.batch == BEFORE_FIRST or checkpoint.committed(one.batch))
        return next(done, None)


def pace_of(checkpoint: Checkpoint) -> WritePace | None:
    """How Kafka took the last batch; None where nobody has said it, or it can't be read."""
    try:
        return SinkNote.read(checkpoint).pace
    except OSError:
        return None
