"""What the sink to Kafka has told of a line's batches, beside what the journal and Spark say of them. Pure.

The sink's note has sums from a batch on (`towline.spark.sink_note`). A report brings them; what they grew by since the
last one is what became of all batches in between, whoever heard of those. Where they began anew, the report's own batch
is all that they tell of.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from towline.spark.sink_note import SinkSums

__all__ = ["NOTHING", "SinkWitness", "Testimony"]

NOTHING = SinkSums(0)


class Testimony(NamedTuple):
    """What a report brings of the sink's note.

    Attributes:
        witness: With it.
        sums: What became of the batches it is about.
        whole: It is about all messages since the last report; else about the report's own batch.
        own: What the report's own batch was given.
    """

    witness: SinkWitness
    sums: SinkSums
    whole: bool
    own: int


@dataclass(frozen=True, slots=True)
class SinkWitness:
    """The sink's word so far.

    Attributes:
        began: When it was heard first, in seconds since 1970; None before that.
        query: Of the last report.
        told: The sums of the last report, as the note had them.
        sums: All that was told.
        whole: The last report's sums were of all messages since the one before.
    """

    began: float | None = None
    query: str = ""
    told: SinkSums | None = None
    sums: SinkSums = NOTHING
    whole: bool = False

    def hear(self, report: Mapping[str, Any], *, batch: bool, counted: bool, complete: bool = True) -> Testimony | None:
        """Take a report's word; None where the sink has none.

        Args:
            report: With ``sink``: ``sums`` and ``own``, as `SinkSums.as_json`, and ``whole``, whether those sums are of
                all batches that the checkpoint ever had; and the ``query``.
            batch: The report is about a batch with messages; else about all there are since the last one.
            counted: All was counted that came before this checkpoint, or nothing of it.
            complete: The report names every journal that messages since the last one may be from.
        """
        said = report.get("sink")
        if said is None:
            return None
        sums, own = SinkSums(**said["sums"]), SinkSums(**said["own"])
        query = str(report.get("query", ""))
        told = self.told
        if query != self.query:
            told = replace(NOTHING, since=sums.since) if said.get("whole") and counted else None
        whole = complete and told is not None and sums.since == told.since
        added = sums.minus(told) if whole and told else own if batch else NOTHING
        began = self.began or float(report.get("at", time.time()))
        heard = SinkWitness(began, query, sums, self.sums.plus(added), whole)
        return Testimony(heard, added, whole, own.given)

    def silent(self, report: Mapping[str, Any]) -> Self:
        """After a report without its word: the sums that come next are of messages that were counted without it."""
        return replace(self, told=None, query=str(report.get("query", "")), whole=False)

    def told_again(self, report: Mapping[str, Any], *, same: bool) -> Self:
        """A report without new messages: all that its sums are of was counted.

        Args:
            report: As `hear` takes it.
            same: It is of the batch that was reported last, which may have been run again: that is counted once.
        """
        said, query = report.get("sink"), str(report.get("query", ""))
        if said is None or not (same or self.told is None or query != self.query):
            return self
        return replace(self, query=query, told=SinkSums(**said["sums"]), whole=False)

    @property
    def kafka(self) -> str:
        """What Kafka has by its word."""
        return f"{self.sums.acknowledged:,} acknowledged by Kafka + {self.sums.dead_lettered:,} dead letters"

    @property
    def accounts_for_all(self) -> bool:
        """Whether it says of each row that it was given what became of it."""
        sums = self.sums
        return sums.given == sums.acknowledged + sums.dead_lettered + sums.lost + sums.unknown

    def against_markers(self) -> Iterator[str]:
        """What Kafka's markers say, where that is something else."""
        sums = self.sums
        if sums.drift or sums.drift_dead:
            rows, dead = sums.acknowledged + sums.dead_lettered + sums.drift, sums.dead_lettered + sums.drift_dead
            yield f"Kafka's markers say {rows:,} rows, {dead:,} of them dead letters · the sink says {self.kafka}"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From ``dataclasses.asdict``."""
        told = values["told"]
        return cls(**{**values, "told": told and SinkSums(**told), "sums": SinkSums(**values["sums"])})
