"""What is counted of a line from MQTT to Kafka, by offsets of its journal, and who says so.

    the journal   how many messages were taken in, and up to where they are done
    Spark         how many each batch had, and why some of them did not come to the sink
    the sink      how many it was given, how many Kafka acknowledged, as dead letters too, how many were lost
    the marker    the same in Kafka itself, written in the transaction of the records (exactly_once)

None of them knows the others. The account is their sum, and says who disagrees with whom [I11].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self, TypeAlias

from towline.bridge.lines.account import AccountWords, LineAccount, LineCounts, remark
from towline.bridge.lines.elsewhere import AWAY, away_text

if TYPE_CHECKING:
    from towline.spark.offsets import JournalPlace

__all__ = ["UplinkCounts", "ranges_of"]

#: Offsets of a journal where counting began and up to where it has come, or where a batch begins and ends.
Span: TypeAlias = tuple[int, int]
#: Counts of every batch.
_OBSERVED: Final = ("filtered", "undecided", "unrouted", "fallback", "deduplicated", "late", "astray", "left_out")
#: Of those, why a message did not come to the sink.
_NOT_GIVEN: Final = ("filtered", "undecided", "unrouted", "deduplicated", "late", "astray", "left_out")
#: ``undecided``: its ``where`` is null. ``unrouted``: taken by no route. ``skipped``: given up by at_most_once after a
#: crash. ``lost``: given up by its sink, Kafka did not take them in time. ``deduplicated``: recognised as repeats, by a
#: dedupe key or by an open QoS 2 packet id. ``left_out``: did not come to the sink, in a batch whose reasons nobody
#: told of. ``arriving``: not yet on disk and not acknowledged.
_WORDS: Final = AccountWords(
    "received",
    "in_kafka",
    "in Kafka",
    {
        "filtered": "filtered",
        "undecided": "where is null",
        "unrouted": "unrouted",
        "skipped": "given up",
        "lost": "lost",
        "dead_lettered": "dead-lettered",
        "deduplicated": "deduplicated",
        "left_out": "left out",
        "arriving": "arriving",
    },
)


class _Said(NamedTuple):
    """What a gateway says of itself; the sum of several is a member-wise one.

    ``before`` are the messages that were carried before the bridge began to count, ``waiting`` those that are not known
    to be carried: committed, and not told of by the sink yet, among them (``untold``).
    """

    end: int
    #: Sent again under an open QoS 2 id: answered, and not stored [I3].
    repeats: int
    received: int
    committed: int
    before: int
    waiting: int
    untold: int

    @classmethod
    def of(cls, told: Mapping[str, Any], span: Span | None) -> Self:
        """What one says; of one that says nothing, what was carried.

        Args:
            told: ``received``, ``end``, ``committed``, ``deduplicated`` ...
            span: Where the bridge's own count of its journal begins and ends; None before it has begun.
        """
        upto = span[1] if span else 0
        end, repeats = int(told.get("end", upto)), int(told.get("deduplicated", 0))
        # The status is not one instant: rows may become durable between reading `received` and `end`.
        received = max(int(told.get("received", end)), end + repeats)
        # The gateway learns of a commit with the next `latestOffset`, the bridge right after the batch.
        committed = max(int(told.get("committed", upto)), min(upto, end))
        counted = min(upto, end) if span else committed
        before = min(span[0], counted) if span else committed
        return cls(end, repeats, received, committed, before, end - counted, committed - counted)


@dataclass(frozen=True, slots=True)
class UplinkCounts(LineCounts):
    """What the committed batches of an uplink held, by journal offsets.

    Attributes:
        spans: By journal, the offset where counting began and the one after the last counted row; what was counted of
            a gateway that has gone stays.
        incarnations: By journal, the opening that wrote the row below the last counted offset [I14].
        undecided: Their ``where`` is null.
        unrouted: Taken by no route.
        deduplicated: Dropped as repeats.
        late: Dropped by the state store as older than its watermark, which no row should be.
        astray: Rows of batches that did not come to the sink for no reason there is, which no row should be; below zero
            for rows that came there from nowhere.
        left_out: Rows that did not come to the sink in batches whose reasons nobody told of.
        missed: Rows of batches that were committed while nobody listened (the bridge ended in between), or that were
            skipped because the marker said that Kafka has them, as far as the sink did not tell of them.
        covered: The same as far as it did.
        skipped: Rows of a repeated batch that guarantee at_most_once served empty.
        told: Part of `dead_lettered` that the sink of `query` told of.
        letters_off: Dead letters that the one note of the sink has and its sums have not.
        unwitnessed: Carried, and told of by Spark alone.
    """

    witness: ClassVar[str] = "received"

    spans: Mapping[str, Span] = field(default_factory=dict)
    incarnations: Mapping[str, str] = field(default_factory=dict)
    undecided: int = 0
    unrouted: int = 0
    deduplicated: int = 0
    late: int = 0
    astray: int = 0
    left_out: int = 0
    missed: int = 0
    covered: int = 0
    skipped: int = 0
    told: int = 0
    letters_off: int = 0
    unwitnessed: int = 0

    def add(self, report: Mapping[str, Any]) -> Self:
        """Count a committed batch; one that was counted before changes nothing.

        Args:
            report: ``spans`` (of each journal), ``batch``, ``rows``, ``observed``, ``gives_up`` (whether rows that
                a batch did not show were given up, or are in Kafka), ``known`` (whether it tells why rows did not come
                to the sink), ``reasons`` (why they may not); what the sink says, as `SinkWitness.hear` takes it; where
                it counts dead letters, ``query`` and ``letters`` (of all its batches up to this one).
        """
        counted = self._batch(report)
        if (dead_letters := report.get("letters")) is None:
            return counted
        query = str(report["query"])
        before = counted.told if query == counted.query else 0
        total = max(before, int(dead_letters))
        added = total - before
        counted = replace(counted, query=query, told=total, dead_lettered=counted.dead_lettered + added)
        return counted._balanced(self, report, added)  # noqa: SLF001 - its own

    def _balanced(self, before: UplinkCounts, report: Mapping[str, Any], added: int) -> Self:
        """The sink counts a dead letter in two notes; of what its sums do not tell, the one is all there is."""
        more = added - (self.sink.sums.dead_lettered - before.sink.sums.dead_lettered)
        sure = "sink" in report and self.sink.whole  # the sums tell of all that was counted
        again = self.batch == before.batch == int(report["batch"])
        if not more:
            return self
        if sure and not again:
            return replace(self, letters_off=self.letters_off + more)
        return replace(self, unwitnessed=self.unwitnessed - more)

    def _batch(self, report: Mapping[str, Any]) -> Self:
        held = gap = 0
        if not (spans := report.get("spans")):
            return self
        moved = {journal: (since, upto) for journal, (since, upto) in self.spans.items()}
        known = dict(self.incarnations)
        for journal, (start, end) in spans.items():
            since, before = moved.get(journal, (start, start))
            if end > before:
                known[journal] = report.get("incarnations", {}).get(journal, "")
                held += end - start
                gap += max(0, start - before)
            moved[journal] = (since, max(before, end))
        counted = replace(self, spans=moved, incarnations=known, batch=report["batch"])
        if not held and not gap:  # counted before, or without a row
            return counted._again(self.batch, report)  # noqa: SLF001 - its own
        # Of a gateway that has come or gone since the last report, what lies in between is not known by its offsets.
        complete = self.spans.keys() == spans.keys()
        return counted._counted(report, held, gap, begun=bool(self.spans), complete=complete)  # noqa: SLF001 - its own

    def _again(self, last: int, report: Mapping[str, Any]) -> Self:
        return replace(self, sink=self.sink.told_again(report, same=int(report["batch"]) == last))

    def _counted(self, report: Mapping[str, Any], held: int, gap: int, *, begun: bool, complete: bool) -> Self:
        """Count messages that were not counted before: `held` offsets, `gap` between the batch and the one before."""
        rows, observed = int(report.get("rows") or 0), dict(report.get("observed") or {})
        hidden = max(0, held - rows)
        given_up = hidden if report.get("gives_up", True) else 0
        silent = gap + hidden - given_up
        heard = self.sink.hear(report, batch=held > 0, counted=begun, complete=complete)
        covered = 0
        if heard is not None:
            covered = silent if heard.whole else silent - gap
            known = report.get("known", True)
            left = covered - (heard.sums.given - (heard.own if known and held else 0))
            observed = _with(observed, _why(report.get("reasons")), left)
        told_of = sum(int(observed.get(name, 0)) for name in _NOT_GIVEN)
        unwitnessed = (gap + held - given_up - told_of) if heard is None else silent - covered
        return replace(
            self,
            rows=self.rows + rows,
            missed=self.missed + silent - covered,
            covered=self.covered + covered,
            skipped=self.skipped + given_up,
            sink=self.sink.silent(report) if heard is None else heard.witness,
            unwitnessed=self.unwitnessed + unwitnessed,
            **{name: getattr(self, name) + int(observed.get(name, 0)) for name in _OBSERVED},
        )

    @property
    def offsets(self) -> int:
        """Messages that were counted, as the journals number them."""
        return sum(upto - since for since, upto in self.spans.values())

    @property
    def agree(self) -> bool:
        """Whether the rows are as many as the offsets."""
        return self.offsets == self.rows + self.missed + self.covered + self.skipped

    def account(self, gateway: Mapping[str, Any]) -> LineAccount:
        """Bring the witnesses together.

        Of a gateway that is away that is what it said last, of one that has gone what was carried.

        Args:
            gateway: ``received``, ``end``, ``committed``, ``deduplicated`` ...; of several also ``gateways``.
        """
        several = gateway.get("gateways")
        total, beyond = _Said(*[0] * len(_Said._fields)), list[str]()
        parts = {str(part.get("journal", name)): (name, part) for name, part in (several or {"": gateway}).items()}
        for journal in sorted({*parts, *self.spans}):
            (name, part), span = parts.get(journal, (journal, {})), self.spans.get(journal)
            said = _Said.of(part, None if span is None else (int(span[0]), int(span[1])))
            if span is not None and (fault := _restored(part, int(span[1]), said.end, self.incarnations.get(journal))):
                beyond.append(f"gateway {name}: {fault}" if several else fault)
            total = _Said(*map(sum, zip(total, said, strict=True)))
        away = {name: part for name, part in (several or {}).items() if AWAY in part}
        told = self._account(total, beyond)
        return replace(told, away=tuple(away_text(name, part) for name, part in away.items()))

    def _account(self, said: _Said, beyond: list[str]) -> LineAccount:
        sums = self.sink.sums
        not_witnessed = said.before + self.unwitnessed + sums.unknown
        carried = not_witnessed + sums.acknowledged
        parts = {
            "filtered": self.filtered,
            "undecided": self.undecided,
            "unrouted": self.unrouted,
            "skipped": self.skipped,
            "lost": sums.lost,
            "dead_lettered": self.dead_lettered,
            "deduplicated": self.deduplicated + said.repeats,
            "left_out": self.left_out,
            "arriving": said.received - said.end - said.repeats,
        }
        known = [*beyond, *self._disagreements()]
        uncounted = said.committed - self.rows - self.skipped - self.covered if self.agree and not known else 0
        witnessed = self.sink.began is not None
        seen = (not_witnessed, "not witnessed") if witnessed else (min(carried, uncounted - said.untold), "uncounted")
        whole = carried + sum(parts.values()) + said.waiting
        if whole != said.received and not known:
            known = [f"{said.received:,} were received · the parts are {whole:,}"]
        return LineAccount(
            _WORDS,
            said.received,
            carried,
            waiting=said.waiting,
            parts=parts,
            disagreements=known,
            uncounted=uncounted,
            notes=("", remark(seen, (sums.again, "again")), remark((said.untold, "committed"))),
            more={
                "not_witnessed": not_witnessed,
                "witnessed_since": self.sink.began,
                "again": sums.again,
            },
        )

    def _disagreements(self) -> Iterator[str]:
        """Which witness says what, where they can't both be right."""
        if not self.agree:
            where = " and ".join(f"{since:,} to {upto:,}" for since, upto in self.spans.values())
            rows = self.rows + self.missed + self.covered
            yield f"offsets {where} have {self.offsets:,} messages · Spark saw {rows:,} rows"
        if self.astray > 0:
            yield f"{self.astray:,} rows did not come to the sink, for no reason that the line has"
        if self.astray < 0:
            yield f"the sink was given {-self.astray:,} rows more than the journal has committed"
        if self.late:
            yield f"{self.late:,} rows were lost: Spark took them for late. That should not happen; please report it"
        yield from self._of_the_sink()

    def _of_the_sink(self) -> Iterator[str]:
        sink, sums = self.sink, self.sink.sums
        if not sink.accounts_for_all:
            before = sum(getattr(self, name) for name in (*_NOT_GIVEN, "skipped"))
            others = ((sums.lost, "lost"), (sums.unknown, "unknown"), (before, "that did not come to it"))
            more = "".join(f" + {count:,} {word}" for count, word in others if count)
            yield f"journal says {sums.given + before:,} committed · the sink says {sink.kafka}{more}"
        yield from sink.against_markers()
        if self.letters_off:
            told = self.dead_lettered
            yield f"the sink's note of dead letters says {told:,} · its sums say {told - self.letters_off:,}"


def _why(reasons: object) -> str:
    """What is counted of rows that did not come to the sink, and of which nobody told why."""
    possible = list(reasons) if isinstance(reasons, list | tuple) else None
    if possible is None:
        return "left_out"
    return "astray" if not possible else possible[0] if len(possible) == 1 and possible[0] in _NOT_GIVEN else "left_out"


def _with(observed: Mapping[str, int], name: str, left: int) -> dict[str, int]:
    name = "astray" if left < 0 else name
    return {**observed, name: int(observed.get(name, 0)) + left}


def _restored(told: Mapping[str, Any], upto: int, end: int, incarnation: str | None) -> str:
    """Why a journal is not the one of which rows were committed up to an offset; "" where it may be [I14]."""
    if upto > end:
        return f"Spark committed up to {upto:,}, the journal ends at {end:,}: was it restored from a copy?"
    here = next((name for first, name in reversed(told.get("openings", ())) if first < upto), "")
    if not here or not incarnation or here == incarnation:
        return ""
    return (
        f"Spark committed up to {upto:,} of what opening {incarnation} of the journal wrote, here {here} wrote it: "
        "it was restored from a copy, and has gone on"
    )


def ranges_of(start: Iterable[JournalPlace], end: Sequence[JournalPlace]) -> dict[str, dict[str, Any]]:
    """What a batch has of each journal, as a report says it, and which opening wrote the row below its end.

    Of a journal that comes in with it, or whose start is not known, it has nothing.
    """
    begun = {place.journal: place.offset for place in start}
    spans = {one.journal: (min(begun.get(one.journal, one.offset), one.offset), one.offset) for one in end}
    return {"spans": spans, "incarnations": {one.journal: one.incarnation for one in end}}
