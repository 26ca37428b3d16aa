"""What is counted of a line from MQTT to Kafka, by offsets of its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias

from towline.bridge.lines.account import AccountWords, LineAccount, LineCounts, unseen
from towline.bridge.lines.elsewhere import AWAY, away_text

if TYPE_CHECKING:
    from towline.spark.offsets import JournalPlace

__all__ = ["UplinkCounts", "spans_of"]

#: Offsets of a journal where counting began and up to where it has come, or where a batch begins and ends.
Span: TypeAlias = tuple[int, int]
#: Counts of every batch.
_OBSERVED: Final = ("filtered", "unrouted", "fallback", "dead_lettered", "deduplicated", "late", "astray")
#: ``unrouted``: taken by no route. ``skipped``: given up by at_most_once after a crash. ``deduplicated``: recognised as
#: repeats, by a dedupe key or by an open QoS 2 packet id. ``arriving``: not yet on disk and not acknowledged.
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
        spans: Of a line over several gateways what `since` and `upto` are of one, by journal; what was counted of a
            gateway that has gone stays.
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
    spans: Mapping[str, Span] = field(default_factory=dict)

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
        if "spans" in report:
            return self._batch_of_several(report)
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

    def _batch_of_several(self, report: Mapping[str, Any]) -> Self:
        spans, rows = self._known_spans(), int(report.get("rows") or 0)
        held = missed = 0
        moved = dict(spans)
        for journal, (start, end) in report["spans"].items():
            since, before = spans.get(journal, (start, start))
            if end > before:
                held += end - start
                missed += max(0, start - before)
            moved[journal] = (since, max(before, end))
        counted = replace(self, journal="", since=None, upto=0, spans=moved, batch=report["batch"])
        if not held and not missed:  # counted before, or without a row
            return counted
        hidden = max(0, held - rows)
        given_up = hidden if report.get("gives_up", True) else 0
        observed = report.get("observed") or {}
        return replace(
            counted,
            rows=self.rows + rows,
            missed=self.missed + missed + hidden - given_up,
            skipped=self.skipped + given_up,
            **{name: getattr(self, name) + int(observed.get(name, 0)) for name in _OBSERVED},
        )

    def _known_spans(self) -> dict[str, Span]:
        """What is counted of each journal, that of the line's former only gateway too."""
        known = {journal: (int(since), int(upto)) for journal, (since, upto) in self.spans.items()}
        return known if self.since is None else {**known, self.journal: (self.since, self.upto)}

    @property
    def agree(self) -> bool:
        """Whether the rows are as many as the offsets."""
        if self.spans:
            return sum(upto - since for since, upto in self.spans.values()) == self.rows + self.missed + self.skipped
        return self.since is None or self.upto - self.since == self.rows + self.missed + self.skipped

    def account(self, gateway: Mapping[str, Any]) -> LineAccount:
        """Bring both witnesses together.

        Args:
            gateway: ``received``, ``end``, ``committed``, ``deduplicated`` ...
        """
        if "gateways" in gateway:
            return self._account_of_several(gateway["gateways"])
        end = int(gateway["end"])
        # What the broker sent again under an open QoS 2 id was answered and not stored [I3].
        repeats = int(gateway.get("deduplicated", 0))
        # The status is not one instant: rows may become durable between reading `received` and `end`.
        received = max(int(gateway["received"]), end + repeats)
        # The gateway learns of a commit with the next `latestOffset`, the bridge right after the batch.
        committed = max(int(gateway["committed"]), min(self.upto, end))
        return self._account(end, repeats, received, committed, self._disagreement(end))

    def _account_of_several(self, gateways: Mapping[str, Mapping[str, Any]]) -> LineAccount:
        """The sum over the gateways: of one that is away what it said last, of one that has gone what was carried."""
        sums, why_not = [0, 0, 0, 0], ""
        parts = {str(part.get("journal", name)): (name, part) for name, part in gateways.items()}
        for journal in sorted({*parts, *self.spans}):
            (name, part), (_, upto) = parts.get(journal, (journal, {})), self.spans.get(journal, (0, 0))
            end, repeats = int(part.get("end", upto)), int(part.get("deduplicated", 0))
            why_not = why_not or (f"gateway {name}: {_beyond(upto, end)}" if upto > end else "")
            received = max(int(part.get("received", end)), end + repeats)
            committed = max(int(part.get("committed", upto)), min(upto, end))
            sums = [total + one for total, one in zip(sums, (end, repeats, received, committed), strict=True)]
        away = {name: part for name, part in gateways.items() if AWAY in part}
        end, repeats, received, committed = sums
        told = self._account(end, repeats, received, committed, why_not or self._disagreement(None))
        return replace(told, away=tuple(away_text(name, part) for name, part in away.items()))

    def _account(self, end: int, repeats: int, received: int, committed: int, why_not: str) -> LineAccount:
        elsewhere = self.dead_lettered + self.deduplicated + self.late + self.astray
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
                "arriving": received - end - repeats,
            },
            why_not=why_not,
            uncounted=uncounted,
            notes=("", unseen(uncounted)),
        )

    def _disagreement(self, end: int | None) -> str:
        """Why the counts, and a journal that ends there, can't both be right, or ""."""
        if end is not None and self.upto > end:
            return _beyond(self.upto, end)
        if not self.agree and self.spans:
            rows = sum(upto - since for since, upto in self.spans.values())
            return f"offsets of {rows:,} messages gave {self.rows + self.missed:,} rows"
        if not self.agree:
            return f"offsets {self.since:,} to {self.upto:,} gave {self.rows + self.missed:,} rows"
        if self.astray:
            return f"{self.astray:,} rows did not come to the sink. That should not happen; please report it"
        if self.late:
            return f"{self.late:,} rows were lost: Spark took them for late. That should not happen; please report it"
        return ""


def _beyond(upto: int, end: int) -> str:
    return f"Spark committed up to {upto:,}, the journal ends at {end:,}: was it restored from a copy?"


def spans_of(start: Iterable[JournalPlace], end: Iterable[JournalPlace]) -> dict[str, Span]:
    """What a batch has of each journal; of one that comes in with it, or whose start is not known, nothing."""
    begun = {place.journal: place.offset for place in start}
    return {place.journal: (min(begun.get(place.journal, place.offset), place.offset), place.offset) for place in end}
