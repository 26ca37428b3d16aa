"""What the sink of a stream says of its batches: the words of one batch, and their sums. Pure.

The sums are a witness of their own beside the journal's offsets and the markers in Kafka: what Kafka acknowledged, what
went to the dead-letter topic, what was lost. A batch that is run again replaces what was said of it. Sums go on only
where the batch before was noted too; where it was not (a power failure took the note) they begin anew with the batch
at hand, and say so by `SinkSums.since`.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from towline.kafka.markers import MarkerStep, MarkerTotals

__all__ = ["NotedBatch", "SinkBatch", "SinkSums", "alone", "noted_after"]


@dataclass(frozen=True, slots=True)
class SinkSums:
    """Rows of one batch, or of all from a batch on.

    Attributes:
        since: The first batch.
        given: Came to the sink.
        acknowledged: Kafka has them where they belong: it acknowledged them, or the marker of a skipped batch says so.
            With acks=0, handed to the network.
        dead_lettered: Kafka acknowledged them in the dead-letter topic.
        lost: Given up by at_most_once.
        unknown: Of batches that were skipped because a marker set by hand says that they are done.
        again: Of those acknowledged, acknowledged once more when the batch was run again.
        drift: By how many rows the totals of Kafka's markers are not what this sink left there.
        drift_dead: The same of their dead letters.
    """

    since: int
    given: int = 0
    acknowledged: int = 0
    dead_lettered: int = 0
    lost: int = 0
    unknown: int = 0
    again: int = 0
    drift: int = 0
    drift_dead: int = 0

    def plus(self, other: SinkSums) -> Self:
        """The sums of both, since `self` began."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _COUNTED})

    def minus(self, other: SinkSums) -> Self:
        """What `self` has beyond `other`."""
        return replace(self, **{name: getattr(self, name) - getattr(other, name) for name in _COUNTED})

    def as_json(self) -> dict[str, int]:
        """Plain values."""
        return asdict(self)


_COUNTED: Final = tuple(one.name for one in fields(SinkSums) if one.name != "since")


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """What the sink says of one batch.

    Attributes:
        given: As `SinkSums` has it; of a batch that was skipped what the marker says.
        acknowledged: The same.
        dead_lettered: The same.
        lost: The same.
        unknown: The same.
        marks: The totals of its markers before and after, over all partitions; None without transactions.
        sink: Whose markers, and how many: ``<sink id>/<partitions>``.
    """

    given: int
    acknowledged: int
    dead_lettered: int = 0
    lost: int = 0
    unknown: int = 0
    marks: MarkerStep | None = None
    sink: str = ""


@dataclass(frozen=True, slots=True)
class NotedBatch:
    """A line of the note.

    Attributes:
        batch: The batch.
        sums: Of it and all before, since they began.
        marks: Totals of the markers that it left; None where there are none.
        sink: As in `SinkBatch`.
    """

    batch: int
    sums: SinkSums
    marks: MarkerTotals | None = None
    sink: str = ""

    def as_json(self) -> list[Any]:
        """As the note has it."""
        return [self.batch, list(astuple(self.sums)), self.marks and list(self.marks), self.sink]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """From `as_json`.

        Raises:
            TypeError, ValueError: It is none.
        """
        from towline.kafka.markers import MarkerTotals  # noqa: PLC0415 - at the call: this module needs only its type

        batch, sums, marks, sink = values
        return cls(int(batch), SinkSums(*map(int, sums)), marks and MarkerTotals(*map(int, marks)), str(sink))


def noted_after(known: Sequence[NotedBatch], batch: int, said: SinkBatch) -> NotedBatch:
    """The line of a batch, behind those that are known; what was noted of it by a run before is replaced."""
    before = next((one for one in reversed(known) if one.batch == batch - 1), None)
    former = next((one for one in reversed(known) if one.batch == batch), None)
    own = SinkSums(batch, said.given, said.acknowledged, said.dead_lettered, said.lost, said.unknown)
    last_run = alone(known, batch)
    if former is not None and last_run is not None and not _skipped(former, said):
        own = replace(own, again=min(said.acknowledged, last_run.acknowledged))
    own = replace(own, **_drift(before, said))
    after = said.marks.after if said.marks else None
    return NotedBatch(batch, own if before is None else before.sums.plus(own), after, said.sink)


def alone(known: Sequence[NotedBatch], batch: int) -> SinkSums | None:
    """What was said of one batch alone; None where that is not known."""
    sums, before = (next((one.sums for one in reversed(known) if one.batch == at), None) for at in (batch, batch - 1))
    if sums is None:
        return None
    if before is not None and before.since == sums.since:
        return sums.minus(before)
    return sums if sums.since == batch else None


def _skipped(former: NotedBatch, said: SinkBatch) -> bool:
    """Whether the markers stand where the run before left them: nothing was written again."""
    return said.marks is not None and said.sink == former.sink and said.marks.after == former.marks


def _drift(before: NotedBatch | None, said: SinkBatch) -> dict[str, int]:
    """How far the markers are from where the batch before left them; only its own query's can be compared."""
    if before is None or before.marks is None or said.marks is None or before.sink != said.sink:
        return {}
    here = said.marks.before
    if here is None:  # there was none, or a person has set it
        return {}
    return {"drift": here.rows - before.marks.rows, "drift_dead": here.dead_lettered - before.marks.dead_lettered}
