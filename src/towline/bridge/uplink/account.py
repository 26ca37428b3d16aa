"""What is counted of a line from MQTT to Kafka, by offsets of its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from towline.bridge.lines.account import AccountWords, LineAccount, LineCounts, unseen

__all__ = ["UplinkCounts"]

#: Counts of every batch.
_OBSERVED: Final = ("filtered", "unrouted", "fallback", "dead_lettered", "deduplicated", "late", "astray")
#: ``unrouted``: taken by no route. ``skipped``: given up by at_most_once after a crash. ``deduplicated``: recognised as
#: repeats, by a dedupe key or by an open QoS 2 packet id. ``of_other_members``: received here, and stored by the member
#: that they hash to. ``arriving``: not yet on disk and not acknowledged.
_WORDS: Final = AccountWords(
    "received",
    "in_kafka",
    "in Kafka",
    {
        "filtered": "filtered",
        "unrouted": "unrouted",
        "skipped": "given up",
        "dead_lettered": "dead-lettered",
        "deduplicated": "deduplicated",
        "of_other_members": "of other members",
        "arriving": "arriving",
    },
)


@dataclass(frozen=True, slots=True)
class UplinkCounts(LineCounts):
    """What the committed batches of an uplink held, by journal offsets.

    Attributes:
        journal: Id of the journal the offsets belong to.
        since: Offset where counting began; None before the first batch.
        upto: Offset after the last counted row.
        unrouted: Taken by no route.
        deduplicated: Dropped as repeats.
        late: Dropped by the state store as older than its watermark, which no row should be.
        astray: Rows of batches that did not come to the sink for no reason there is, which no row should be.
        missed: Rows of batches that were committed while nobody listened (the bridge ended in between), or that were
            skipped because the marker said that Kafka has them.
        skipped: Rows of a repeated batch that guarantee at_most_once served empty.
        told: Part of `dead_lettered` that the sink of `query` told of.
    """

    witness: ClassVar[str] = "received"

    journal: str = ""
    since: int | None = None
    upto: int = 0
    unrouted: int = 0
    deduplicated: int = 0
    late: int = 0
    astray: int = 0
    missed: int = 0
    skipped: int = 0
    told: int = 0

    def add(self, report: Mapping[str, Any]) -> Self:
        """Count a committed batch; one that was counted before changes nothing.

        Args:
            report: ``journal``, ``batch``, ``rows``, ``start``, ``end``, ``observed``, ``gives_up`` (whether rows that
                a batch did not show were given up, or are in Kafka); where the sink counts dead letters, ``query`` and
                ``letters`` (of all its batches up to this one).
        """
        counted = self._batch(report)
        if (dead_letters := report.get("letters")) is None:
            return counted
        query = str(report["query"])
        before = counted.told if query == counted.query else 0
        total = max(before, int(dead_letters))
        return replace(counted, query=query, told=total, dead_lettered=counted.dead_lettered + total - before)

    def _batch(self, report: Mapping[str, Any]) -> Self:
        journal = str(report.get("journal", ""))
        if journal != self.journal:  # another journal: its offsets begin anew
            fresh = replace(self, journal=journal) if self.since is None else type(self)(journal=journal)
            return fresh._batch(report)  # noqa: SLF001 - its own
        end, observed = report.get("end"), report.get("observed") or {}
        rows = int(report.get("rows") or 0)
        if end is None:
            return self
        start = report.get("start")
        start = end - rows if start is None else start
        since = start if self.since is None else self.since
        before = start if self.since is None else self.upto
        if end <= before:
            return replace(self, since=since, upto=max(before, self.upto), batch=report["batch"])
        hidden = max(0, end - start - rows)
        given_up = hidden if report.get("gives_up", True) else 0
        return replace(
            self,
            since=since,
            upto=end,
            batch=report["batch"],
            rows=self.rows + rows,
            missed=self.missed + max(0, start - before) + hidden - given_up,
            skipped=self.skipped + given_up,
            **{name: getattr(self, name) + int(observed.get(name, 0)) for name in _OBSERVED},
        )

    @property
    def agree(self) -> bool:
        """Whether the rows are as many as the offsets."""
        return self.since is None or self.upto - self.since == self.rows + self.missed + self.skipped

    def account(self, gateway: Mapping[str, Any]) -> LineAccount:
        """Bring both witnesses together.

        Args:
            gateway: ``received``, ``end``, ``committed``, ``deduplicated`` ...
        """
        end = int(gateway["end"])
        # What the broker sent again under an open QoS 2 id was answered and not stored [I3].
        repeats = int(gateway.get("deduplicated", 0))
        others = int(gateway.get("of_other_members", 0))
        # The status is not one instant: rows may become durable between reading `received` and `end`.
        received = max(int(gateway["received"]), end + repeats + others)
        # The gateway learns of a commit with the next `latestOffset`, the bridge right after the batch.
        committed = max(int(gateway["committed"]), min(self.upto, end))
        elsewhere = self.dead_lettered + self.deduplicated + self.late + self.astray
        why_not = self._disagreement(end)
        uncounted = committed - self.rows - self.skipped if self.agree and not why_not else 0
        return LineAccount(
            _WORDS,
            received,
            committed - self.filtered - self.unrouted - self.skipped - elsewhere,
            waiting=end - committed,
            parts={
                "filtered": self.filtered,
                "unrouted": self.unrouted,
                "skipped": self.skipped,
                "dead_lettered": self.dead_lettered,
                "deduplicated": self.deduplicated + repeats,
                "of_other_members": others,
                "arriving": received - end - repeats - others,
            },
            why_not=why_not,
            uncounted=uncounted,
            notes=("", unseen(uncounted)),
        )

    def _disagreement(self, end: int) -> str:
        """Why the counts and a journal that ends there can't both be right, or ""."""
        if self.upto > end:
            return f"Spark committed up to {self.upto:,}, the journal ends at {end:,}: was it restored from a copy?"
        if not self.agree:
            return f"offsets {self.since:,} to {self.upto:,} gave {self.rows + self.missed:,} rows"
        if self.astray:
            return f"{self.astray:,} rows did not come to the sink. That should not happen; please report it"
        if self.late:
            return f"{self.late:,} rows were lost: Spark took them for late. That should not happen; please report it"
        return ""
