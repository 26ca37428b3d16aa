"""The note of a stream's sink in its checkpoint: totals of its batches, and how Kafka took the last one.

Spark takes nothing back from a Python sink, and a row that Kafka refuses is known to the sink alone. So the sink notes
the totals with each batch before Spark commits it: whoever reads the note for a committed batch has counted that batch
and all before it, whenever he asks [I11]. It is durable when the checkpoint is made so (`Checkpoint.sync`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

from towline.checkpoint import SINK_NOTE
from towline.errors import JournalError
from towline.kafka.markers import BEFORE_FIRST
from towline.kafka.pace import WritePace
from towline.spark.totals import BatchResult, BatchTotals, totals_after

if TYPE_CHECKING:
    from towline.checkpoint import Checkpoint

__all__ = ["SinkNote", "pace_of"]

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
    def read(cls, checkpoint: Checkpoint) -> Self:
        """The note; empty where there is none, it is none of ours, or the checkpoint is on no disk of this machine.

        Raises:
            OSError: The file can't be read.
        """
        text = checkpoint.note(SINK_NOTE)
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

    def keep(self, checkpoint: Checkpoint) -> None:
        """Write it.

        Raises:
            JournalError: TL-J20, the disk did not take it.
        """
        values = {"v": 1, "totals": [one.as_json() for one in self.totals[-_KEPT:]], "pace": self.pace}
        checkpoint.keep_note(SINK_NOTE, json.dumps(values, separators=(",", ":")), synced=False)

    def before(self, batch: int) -> BatchTotals | None:
        """The totals of all batches before one, as far as they are known; None for nothing."""
        return next((one for one in reversed(self.totals) if one.batch < batch), None)

    def upto(self, batch: int) -> BatchTotals | None:
        """The totals of all batches up to one; None where they are not known."""
        return next((one for one in self.totals if one.batch == batch), None)

    def after(self, batch: int, result: BatchResult, pace: WritePace | None = None) -> Self:
        """With a batch.

        Args:
            batch: The batch.
            result: What the sink says of it.
            pace: How Kafka took it; None for what was noted before.
        """
        totals = totals_after(self.before(batch), self.upto(batch), batch, result)
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
