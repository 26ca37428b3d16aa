"""The account of a line: no message leaves the ledger without a counted reason [I11].

It is made when somebody asks, of sources that do not know each other: what the gateway says that it received, stored
and sent, and the notes in the checkpoint, of what each committed batch held and what Kafka or the outbox took of it.
What is counted differs by direction; the sum is one.

Of the notes the sink's totals are one. Spark tells the driver alone how many rows it took of Kafka, or dropped as
repeats or late: the driver sums them beside what the sink has noted of the same batches; of batches that nobody heard
of, nobody knows them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from towline.bridge.lines.evidence import AWAY, away_text, parts_of
from towline.checkpoint import Checkpoint
from towline.kafka.markers import BEFORE_FIRST
from towline.spark.offsets import JournalPlace
from towline.spark.tally import BatchTotals, SinkNote, Span

_SPARK_NOTE: Final = "towline.spark"


@dataclass(frozen=True, slots=True)
class LineNotes:
    """What is noted of a line's committed batches.

    Attributes:
        totals: By its sink; None where nothing is.
        spark: Spark's numbers, of the batches that the driver heard of.
    """

    totals: BatchTotals | None = None
    spark: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Path | str) -> Self:
        """The notes of a checkpoint.

        Raises:
            OSError: They can't be read.
        """
        logs = Checkpoint(str(checkpoint))
        return cls(SinkNote.read(logs).committed(logs), _spark_note(logs)[0])

    @property
    def counts(self) -> Counter[str]:
        """The sink's totals; 0 of what it has not counted."""
        return Counter(self.totals.counts if self.totals else {})


def _spark_note(logs: Checkpoint) -> tuple[dict[str, int], int]:
    """Spark's numbers, and the last batch that they are of; none where the note is none of ours."""
    try:
        values = json.loads(logs.note(_SPARK_NOTE) or "{}")
        counts = {str(name): int(count) for name, count in values.get("counts", {}).items()}
        return counts, int(values.get("batch", BEFORE_FIRST))
    except (ValueError, TypeError, AttributeError):
        return {}, BEFORE_FIRST


def keep_spark_counts(logs: Checkpoint, batch: int, counts: Mapping[str, int]) -> None:
    """Write Spark's numbers of all batches up to one.

    Raises:
        JournalError: TL-J20, the disk did not take it.
    """
    values = {"v": 1, "batch": batch, "counts": counts}
    logs.keep_note(_SPARK_NOTE, json.dumps(values, separators=(",", ":")), synced=False)


def add_spark_counts(checkpoint: Path, batch: int, numbers: Callable[[Counter[str]], Mapping[str, int]]) -> None:
    """Add Spark's numbers of a batch, made of the sink's own of it, unless they are there or the sink has none.

    Raises:
        OSError: The notes can't be read.
        JournalError: TL-J20, the disk did not take it.
    """
    logs = Checkpoint(str(checkpoint))
    counts, last = _spark_note(logs)
    sink = SinkNote.read(logs)
    if batch <= last or (totals := sink.upto(batch)) is None:
        return
    total = Counter(counts)
    total.update(numbers(totals.since(sink.before(batch))))
    keep_spark_counts(logs, batch, total)


def carry_totals(old: Path, new: Path) -> None:
    """Begin a new checkpoint with what the one before it has counted.

    Raises:
        OSError: The notes can't be read, or the directory can't be made.
        JournalError: TL-J20, the disk did not take them.
    """
    notes = LineNotes.read(old)
    if notes.totals is None:
        return
    new.mkdir(mode=0o700, exist_ok=True)
    logs = Checkpoint(str(new))
    SinkNote((replace(notes.totals, batch=BEFORE_FIRST, marks=None, sink=""),)).keep(logs)
    if notes.spark:
        keep_spark_counts(logs, BEFORE_FIRST, notes.spark)


def begin_totals(
    checkpoint: Path, ends: Iterable[JournalPlace], *, batch: int = BEFORE_FIRST, gives_up: bool = False
) -> None:
    """Note where the next batch begins in each journal, where the sink has not.

    What lies between the `ends` of the newest `batch` that is done and what was counted is given up if it `gives_up`;
    else it was carried, and nobody counted it, as after a power failure that took the note.

    Raises:
        OSError: The note can't be read, or the directory can't be made.
        JournalError: TL-J20, the disk did not take it.
    """
    checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = Checkpoint(str(checkpoint))
    note = SinkNote.read(logs)
    if batch != BEFORE_FIRST and note.upto(batch) is not None:
        return
    totals = note.before(batch + 1) or BatchTotals(batch)
    spans, counts = dict(totals.spans), Counter(totals.counts)
    for place in ends:
        span = spans.get(place.journal, Span(place.offset, place.offset, place.incarnation))
        if (gap := place.offset - span.upto) > 0:
            counts.update({"messages": gap, "skipped" if gives_up else "unwitnessed": gap})
            span = Span(span.since, place.offset, place.incarnation)
        spans[place.journal] = span
    note.begun(replace(totals, batch=batch, spans=spans, counts=counts, marks=None)).keep(logs)


# -- the sum -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineAccount:
    """Where every message of a line is."""

    #: Of its direction: key in JSON → word of each number, in the order of the sum: what came into the line, what is
    #: where it was to go, everything else, and what waits on disk. And the numbers, by the same keys.
    words: Mapping[str, str]
    counts: Mapping[str, int]
    #: Which source says what, where they can't all be right; empty when the account adds up.
    disagreements: Sequence[str] = ()
    #: Messages of a batch in work, or of one that no note tells of.
    uncounted: int = 0
    #: What the guarantee promises and was not kept, or "".
    broken: str = ""
    #: On some of the numbers, by their keys; and what else stands in JSON.
    remarks: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    #: Gateways that do not answer, in words; their numbers are those of their last word.
    away: tuple[str, ...] = ()
    #: The line has stopped for good: what its sources say of it is not judged, unless they disagree.
    stopped: bool = False

    @property
    def received(self) -> int:
        """What came into the line."""
        return self.counts[next(iter(self.words))]

    @property
    def carried(self) -> int:
        """What is where it was to go."""
        return self.counts[[*self.words][1]]

    @property
    def parts(self) -> dict[str, int]:
        """What became of the others, but for those that wait on disk."""
        return {key: self.counts[key] for key in [*self.words][2:-1]}

    @property
    def adds_up(self) -> bool | None:
        """Whether the parts are the whole, and the sources agree; None for not known [I19]."""
        return False if self.disagreements else None if self.stopped else True

    @property
    def why_not(self) -> str:
        """All disagreements in one line."""
        return "; ".join(self.disagreements)

    @property
    def pending(self) -> int:
        """What is still to be carried: not yet on disk, or waiting there."""
        return self.counts["waiting"] + self.counts.get("arriving", 0)

    def sentence(self) -> str:
        """The sum in one line, and whether it holds."""
        verdict = "adds up ✓" if self.adds_up else "not judged: the line has stopped"
        verdict = f"does not add up ✗ ({self.why_not})" if self.disagreements else verdict
        said = f"{self.sum()}   {verdict}" + (f", but is {self.broken} ✗" if self.broken else "")
        return "   ".join((said, *self.away))

    def sum(self) -> str:
        """The sum; parts that are zero are left out, but for the three that matter."""
        shown = [key for key in self.words if self.counts[key] or key not in self.parts]
        whole, *parts = (f"{self.words[key]} {self.counts[key]:,}{self.remarks.get(key, '')}" for key in shown)
        return f"{whole} = {' + '.join(parts)}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **self.counts,
            "adds_up": self.adds_up,
            "why_not": self.why_not,
            "disagreements": list(self.disagreements),
            "uncounted": self.uncounted,
            **({"away": list(self.away)} if self.away else {}),
            **self.more,
        }


def remark(*counts: tuple[int, str]) -> str:
    """What is to be said of some of a number's messages, such as " (9 of them uncounted)"; empty for none."""
    said = [f"{count:,} of them {word}" for count, word in counts if count]
    return f" ({', '.join(said)})" if said else ""


def sink_disagreements(counts: Counter[str], given: str, others: str = "") -> Iterator[str]:
    """Where the sink to Kafka, or Kafka's markers, say something else than what was ``given`` to it, in words."""
    said = f"{counts['acknowledged']:,} acknowledged by Kafka + {counts['dead_lettered']:,} dead letters"
    if counts["given"] != sum(counts[name] for name in ("acknowledged", "dead_lettered", "lost", "unknown")):
        lost = "".join(f" + {counts[name]:,} {name}" for name in ("lost", "unknown") if counts[name])
        yield f"{given} · the sink says {said}{lost}{others}"
    if counts["drift"] or counts["drift_dead"]:
        dead = counts["dead_lettered"] + counts["drift_dead"]
        rows = counts["acknowledged"] + counts["dead_lettered"] + counts["drift"]
        yield f"Kafka's markers say {rows:,} rows, {dead:,} of them dead letters · the sink says {said}"


# -- from MQTT to Kafka ------------------------------------------------------------------------------------------------

#: ``undecided``: its ``where`` is null. ``unrouted``: taken by no route. ``skipped``: given up by at_most_once after a
#: crash. ``lost``: given up by its sink, Kafka did not take them in time. ``deduplicated``: recognised as repeats, by a
#: dedupe key or by an open QoS 2 packet id. ``left_out``: did not come to the sink, in a batch whose reasons nobody
#: knows. ``arriving``: not yet on disk and not acknowledged.
_UP: Final = {
    "received": "received",
    "in_kafka": "in Kafka",
    "filtered": "filtered",
    "undecided": "where is null",
    "unrouted": "unrouted",
    "skipped": "given up",
    "lost": "lost",
    "dead_lettered": "dead-lettered",
    "deduplicated": "deduplicated",
    "left_out": "left out",
    "arriving": "arriving",
    "waiting": "waiting",
}
#: Why a message did not come to the sink, as its totals say it.
_NOT_GIVEN: Final = ("filtered", "undecided", "unrouted", "skipped", "dropped", "left_out", "astray", "unwitnessed")


def _of_gateway(status: Mapping[str, Any], span: Span | None) -> Counter[str]:
    """What a gateway says of itself, or what was carried of one that says nothing.

    ``repeats`` came again under an open QoS 2 id: answered, and not stored [I3]. ``before`` were carried before the
    totals begin; ``waiting`` are not known to be carried, though the gateway calls some of them ``committed``.

    Args:
        status: ``received``, ``end``, ``committed``, ``deduplicated`` ...
        span: What the totals have of its journal; None for nothing yet.
    """
    upto = span.upto if span else int(status.get("committed", 0))
    end, repeats = int(status.get("end", upto)), int(status.get("deduplicated", 0))
    if AWAY in status:
        end = max(end, upto)  # its last answer is older than the last batch
    # The status is not one instant: rows may become durable between reading `received` and `end`.
    received = max(int(status.get("received", end)), end + repeats)
    counted = min(upto, end)
    return Counter(
        repeats=repeats,
        received=received,
        arriving=received - end - repeats,
        before=min(span.since if span else upto, counted),
        waiting=end - counted,
        committed=max(0, int(status.get("committed", 0)) - counted),
    )


def uplink_account(notes: LineNotes, gateway: Mapping[str, Any]) -> LineAccount:
    """Bring the sources together.

    Of a gateway that is away that is what it said last, of one that has gone what was carried.

    Args:
        notes: Read before the gateway was asked: it knows of every message that they are about.
        gateway: ``received``, ``end``, ``committed``, ``deduplicated`` ...; of several also ``gateways``.
    """
    several, spans = parts_of(gateway), notes.totals.spans if notes.totals else {}
    parts = {str(part.get("journal", name)): (name, part) for name, part in several.items()}
    journals, disagreements = Counter[str](), list[str]()
    for journal in sorted({*parts, *spans}):
        (name, part), span = parts.get(journal, (journal, {})), spans.get(journal)
        if span is not None and AWAY not in part and (fault := _restored(part, span)):
            disagreements.append(f"gateway {name}: {fault}" if name else fault)
        journals.update(_of_gateway(part, span))
    counts, spark = notes.counts, notes.spark
    not_witnessed = journals["before"] + counts["unwitnessed"] + counts["unknown"]
    sums = {
        "in_kafka": not_witnessed + counts["acknowledged"],
        **{name: counts[name] for name in ("filtered", "undecided", "unrouted", "skipped", "lost", "dead_lettered")},
        "deduplicated": spark.get("deduplicated", 0) + journals["repeats"],
        "left_out": counts["left_out"] + counts["dropped"] - spark.get("dropped", 0),
        "arriving": journals["arriving"],
        "waiting": journals["waiting"],
    }
    disagreements += _of_uplink(notes, counts)
    if (whole := sum(sums.values())) != journals["received"] and not disagreements:
        disagreements = [f"{journals['received']:,} were received · the parts are {whole:,}"]
    return LineAccount(
        _UP,
        {"received": journals["received"], **sums},
        disagreements,
        uncounted=journals["committed"],
        remarks={
            "in_kafka": remark((not_witnessed, "not witnessed"), (counts["again"], "again")),
            "waiting": remark((journals["committed"], "committed")),
        },
        more={"not_witnessed": not_witnessed, "again": counts["again"]},
        away=tuple(away_text(name, part) for name, part in several.items() if name and AWAY in part),
    )


def _of_uplink(notes: LineNotes, counts: Counter[str]) -> Iterator[str]:
    """Which source says what, where they can't both be right."""
    spans = notes.totals.spans.values() if notes.totals else ()
    if (offsets := sum(span.upto - span.since for span in spans)) != counts["messages"]:
        where = " and ".join(f"{span.since:,} to {span.upto:,}" for span in spans)
        yield f"offsets {where} have {offsets:,} messages · the sink's note has {counts['messages']:,}"
    late = notes.spark.get("late", 0)
    astray = counts["astray"] + notes.spark.get("dropped", 0) - notes.spark.get("deduplicated", 0) - late
    if astray > 0:
        yield f"{astray:,} rows did not come to the sink, for no reason that the line has"
    if astray < 0:
        yield f"the sink was given {-astray:,} rows more than the journal has committed"
    if late:
        yield f"{late:,} rows were lost: Spark took them for late. That should not happen; please report it"
    others = sum(counts[name] for name in _NOT_GIVEN)
    if counts["given"] + others != counts["messages"]:
        yield f"journal says {counts['messages']:,} committed · the sink was given {counts['given']:,}"
    more = f" + {others:,} that did not come to it" if others else ""
    yield from sink_disagreements(counts, f"journal says {counts['messages']:,} committed", more)


def _restored(status: Mapping[str, Any], span: Span) -> str:
    """Why a journal is not the one of which rows were committed up to an offset; "" where it may be [I14]."""
    upto, end = span.upto, int(status.get("end", span.upto))
    if upto > end:
        return f"Spark committed up to {upto:,}, the journal ends at {end:,}: was it restored from a copy?"
    here = next((name for first, name in reversed(status.get("openings", ())) if first < upto), "")
    if not here or not span.incarnation or here == span.incarnation:
        return ""
    return (
        f"Spark committed up to {upto:,} of what opening {span.incarnation} of the journal wrote, here {here} wrote "
        "it: it was restored from a copy, and has gone on"
    )


# -- from Kafka to MQTT ------------------------------------------------------------------------------------------------

#: ``undecided``: their ``where`` is null. ``expired``: not sent, their time was over. ``refused``: the broker does not
#: take them, the gateway keeps them apart.
_DOWN: Final = {
    "taken": "taken",
    "delivered": "delivered",
    "dead_lettered": "dead-lettered",
    "filtered": "filtered",
    "undecided": "where is null",
    "expired": "expired",
    "refused": "refused",
    "waiting": "waiting",
}


def downlink_account(notes: LineNotes, gateway: Mapping[str, Any]) -> LineAccount:
    """Bring the sources together.

    Args:
        notes: Read before the gateway was asked.
        gateway: With the counts of its ``outbox``; delivered are those that the broker has, with QoS 0 those that were
            sent.
    """
    outbox: Mapping[str, Any] = gateway["outbox"]
    accepted, delivered, expired, refused = (
        int(outbox[name]) for name in ("accepted", "delivered", "expired", "refused")
    )
    counts = notes.counts
    if AWAY in gateway:
        accepted = max(accepted, counts["sent"])  # its last answer is older than the last batch
    filtered = counts["filtered"] + notes.spark.get("removed", 0)
    # Published with QoS 2, and the broker took it as QoS 1, so it may be doubled.
    degraded = int(outbox.get("degraded", 0))
    broken = "not exactly once" if degraded and gateway.get("guarantee") == "exactly_once" else ""
    uncounted = max(0, accepted - counts["sent"])
    return LineAccount(
        _DOWN,
        {
            "taken": accepted + filtered + counts["undecided"] + counts["unfit"],
            "delivered": delivered,
            "dead_lettered": counts["unfit"],
            "filtered": filtered,
            "undecided": counts["undecided"],
            "expired": expired,
            "refused": refused,
            "waiting": accepted - delivered - expired - refused,
        },
        [*_of_downlink(notes, outbox, accepted)],
        uncounted=uncounted,
        broken=broken,
        remarks={
            "taken": remark((uncounted, "uncounted")),
            "delivered": remark((degraded, "at QoS 1, not 2")),
        },
        more={"degraded": degraded, "broken": broken},
    )


def _of_downlink(notes: LineNotes, outbox: Mapping[str, Any], accepted: int) -> Iterator[str]:
    """Which source says what, where they can't both be right."""
    counts, spark = notes.counts, notes.spark
    taken = spark.get("taken", 0)
    if beyond := spark.get("beyond", 0):
        yield f"Kafka's offsets have room for {taken - beyond:,} records · Spark took {taken:,}"
    if unlike := spark.get("unlike", 0):
        yield f"Spark took {taken:,} records · the writer was given {taken - unlike:,} of them"
    sent = counts["records"] - counts["filtered"] - counts["undecided"] - counts["unfit"]
    if sent != counts["sent"]:
        yield f"the writer says {sent:,} messages went to the outbox · the outbox says it has {counts['sent']:,}"
    missing = max(counts["unlettered"], counts["unfit"] - counts["dead_lettered"])
    if missing > 0:
        yield f"the writer says {counts['unfit']:,} dead letters · the sink says {counts['unfit'] - missing:,}"
    yield from sink_disagreements(counts, f"the writer brought {counts['given']:,} dead letters and notices")
    if accepted < counts["sent"]:
        theirs = f"the outbox knows {accepted:,}"
        yield f"the writer brought {counts['sent']:,} messages · {theirs}: was it restored from a copy?"
    delivered = int(outbox["delivered"])
    answered = int(outbox["acknowledged"]) - int(outbox.get("taken_back", 0))
    plain = int(outbox.get("sent", 0))
    if delivered != answered + plain:
        more = f" + {plain:,} sent with QoS 0" if plain else ""
        yield f"the outbox says {delivered:,} delivered · the broker has acknowledged {answered:,}{more}"
