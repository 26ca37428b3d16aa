"""The account of a line: no message leaves the ledger without a counted reason [I11].

It is made when somebody asks, of sources that do not know each other (docs/account.md): the counts of each under their
names, and a table of what each number of the account is the sum of. What is counted differs by direction; the sum is
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from towline.bridge.lines.evidence import AWAY, away_text, parts_of
from towline.checkpoint import Checkpoint
from towline.kafka.markers import BEFORE_FIRST
from towline.spark.offsets import JournalPlace
from towline.spark.tally import BatchMessages, BatchResult, BatchTotals, SinkNote, Span

#: The note of the driver, as that of the sink.
SPARK_NOTE: Final = "towline.spark"


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
        spark = SinkNote.read(logs, SPARK_NOTE).totals[-1:]
        return cls(SinkNote.read(logs).committed(logs), spark[0].counts if spark else {})

    @property
    def counts(self) -> Counter[str]:
        """The sink's totals, and Spark's numbers as ``spark.NAME``; 0 of what nobody has counted."""
        totals = self.totals.counts if self.totals else {}
        return Counter({**totals, **{f"spark.{name}": count for name, count in self.spark.items()}})


def add_spark_counts(checkpoint: Path, batch: int, numbers: Callable[[Counter[str]], Mapping[str, int]]) -> None:
    """Add Spark's numbers of a batch, made of the sink's own of it, unless they are there or the sink has none.

    Raises:
        OSError: The notes can't be read.
        JournalError: TL-J20, the disk did not take it.
    """
    logs = Checkpoint(str(checkpoint))
    sink, spark = SinkNote.read(logs), SinkNote.read(logs, SPARK_NOTE)
    if (totals := sink.upto(batch)) is not None and all(one.batch < batch for one in spark.totals):
        counts = Counter(numbers(totals.since(sink.before(batch))))
        spark.after(batch, BatchResult(counts)).keep(logs, SPARK_NOTE)


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
    SinkNote((BatchTotals(BEFORE_FIRST, notes.spark),)).keep(logs, SPARK_NOTE)


def begin_totals(
    checkpoint: Path, ends: Sequence[JournalPlace], *, batch: int = BEFORE_FIRST, gives_up: bool = False
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
    messages, counts = BatchMessages.of(totals, ends, ends), Counter(totals.counts)
    if messages.gap:
        counts.update({"messages": messages.gap, "skipped" if gives_up else "unwitnessed": messages.gap})
    note.begun(replace(totals, batch=batch, spans=messages.spans, counts=counts, marks=None)).keep(logs)


# -- the sum -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A number of an account.

    Attributes:
        word: For people.
        counts: The names of what it is the sum of; one with a minus is taken away. "" for the number's own name.
        remarks: The names of what is said of some of its messages, and the words.
    """

    word: str
    counts: str = ""
    remarks: Mapping[str, str] = MappingProxyType({})


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

    @classmethod
    def of(cls, table: Mapping[str, Part], counts: Counter[str], disagreements: Iterable[str], **more: Any) -> Self:
        """The account of a direction, by its table and what its sources have counted."""
        sums = dict.fromkeys(table, 0)
        for key, part in table.items():
            for name in (part.counts or key).split():
                sums[key] += -counts[name[1:]] if name.startswith("-") else counts[name]
        said = {key: [(counts[name], word) for name, word in part.remarks.items()] for key, part in table.items()}
        remarks = {key: remark(*some) for key, some in said.items()}
        return cls({key: part.word for key, part in table.items()}, sums, [*disagreements], remarks=remarks, **more)

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
    "received": Part("received", "journal.received"),
    "in_kafka": Part("in Kafka", "not_witnessed acknowledged", {"not_witnessed": "not witnessed", "again": "again"}),
    "filtered": Part("filtered"),
    "undecided": Part("where is null"),
    "unrouted": Part("unrouted"),
    "skipped": Part("given up"),
    "lost": Part("lost"),
    "dead_lettered": Part("dead-lettered"),
    "deduplicated": Part("deduplicated", "spark.deduplicated journal.repeats"),
    "left_out": Part("left out", "left_out dropped -spark.dropped"),
    "arriving": Part("arriving", "journal.arriving"),
    "waiting": Part("waiting", "journal.waiting", {"journal.committed": "committed"}),
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
    made = {
        "repeats": repeats,
        "received": received,
        "arriving": received - end - repeats,
        "before": min(span.since if span else upto, counted),
        "waiting": end - counted,
        "committed": max(0, int(status.get("committed", 0)) - counted),
    }
    return Counter({f"journal.{name}": count for name, count in made.items()})


def uplink_account(notes: LineNotes, gateway: Mapping[str, Any]) -> LineAccount:
    """Bring the sources together.

    Of a gateway that is away that is what it said last, of one that has gone what was carried.

    Args:
        notes: Read before the gateway was asked: it knows of every message that they are about.
        gateway: ``received``, ``end``, ``committed``, ``deduplicated`` ...; of several also ``gateways``.
    """
    several, spans = parts_of(gateway), notes.totals.spans if notes.totals else {}
    parts = {str(part.get("journal", name)): (name, part) for name, part in several.items()}
    counts, disagreements = notes.counts, list[str]()
    for journal in sorted({*parts, *spans}):
        (name, part), span = parts.get(journal, (journal, {})), spans.get(journal)
        if span is not None and AWAY not in part and (fault := _restored(part, span)):
            disagreements.append(f"gateway {name}: {fault}" if name else fault)
        counts.update(_of_gateway(part, span))
    counts["not_witnessed"] = counts["journal.before"] + counts["unwitnessed"] + counts["unknown"]
    account = LineAccount.of(
        _UP,
        counts,
        [*disagreements, *_of_uplink(notes, counts)],
        uncounted=counts["journal.committed"],
        more={name: counts[name] for name in ("not_witnessed", "again")},
        away=tuple(away_text(name, part) for name, part in several.items() if name and AWAY in part),
    )
    if (whole := sum(account.counts.values()) - account.received) != account.received and not account.disagreements:
        return replace(account, disagreements=[f"{account.received:,} were received · the parts are {whole:,}"])
    return account


def _of_uplink(notes: LineNotes, counts: Counter[str]) -> Iterator[str]:
    """Which source says what, where they can't both be right."""
    spans = notes.totals.spans.values() if notes.totals else ()
    if (offsets := sum(span.upto - span.since for span in spans)) != counts["messages"]:
        where = " and ".join(f"{span.since:,} to {span.upto:,}" for span in spans)
        yield f"offsets {where} have {offsets:,} messages · the sink's note has {counts['messages']:,}"
    late = counts["spark.late"]
    astray = counts["astray"] + counts["spark.dropped"] - counts["spark.deduplicated"] - late
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
    "taken": Part("taken", "accepted filtered spark.removed undecided unfit", {"uncounted": "uncounted"}),
    "delivered": Part("delivered", "outbox.delivered", {"outbox.degraded": "at QoS 1, not 2"}),
    "dead_lettered": Part("dead-lettered", "unfit"),
    "filtered": Part("filtered", "filtered spark.removed"),
    "undecided": Part("where is null"),
    "expired": Part("expired", "outbox.expired"),
    "refused": Part("refused", "outbox.refused"),
    "waiting": Part("waiting", "accepted -outbox.delivered -outbox.expired -outbox.refused"),
}


def downlink_account(notes: LineNotes, gateway: Mapping[str, Any]) -> LineAccount:
    """Bring the sources together.

    Args:
        notes: Read before the gateway was asked.
        gateway: With the counts of its ``outbox``; delivered are those that the broker has, with QoS 0 those that were
            sent.
    """
    outbox: Mapping[str, Any] = gateway["outbox"]
    counts = notes.counts
    counts.update({f"outbox.{name}": count for name, count in outbox.items() if isinstance(count, int)})
    # The last answer of one that is away is older than the last batch.
    counts["accepted"] = max(counts["outbox.accepted"], counts["sent"] if AWAY in gateway else 0)
    uncounted = counts["uncounted"] = max(0, counts["accepted"] - counts["sent"])
    # Published with QoS 2, and the broker took it as QoS 1, so it may be doubled.
    degraded = counts["outbox.degraded"]
    broken = "not exactly once" if degraded and gateway.get("guarantee") == "exactly_once" else ""
    more = {"degraded": degraded, "broken": broken}
    return LineAccount.of(_DOWN, counts, _of_downlink(counts), uncounted=uncounted, broken=broken, more=more)


def _of_downlink(counts: Counter[str]) -> Iterator[str]:
    """Which source says what, where they can't both be right."""
    taken = counts["spark.taken"]
    if beyond := counts["spark.beyond"]:
        yield f"Kafka's offsets have room for {taken - beyond:,} records · Spark took {taken:,}"
    if unlike := counts["spark.unlike"]:
        yield f"Spark took {taken:,} records · the writer was given {taken - unlike:,} of them"
    sent = counts["records"] - counts["filtered"] - counts["undecided"] - counts["unfit"]
    if sent != counts["sent"]:
        yield f"the writer says {sent:,} messages went to the outbox · the outbox says it has {counts['sent']:,}"
    missing = max(counts["unlettered"], counts["unfit"] - counts["dead_lettered"])
    if missing > 0:
        yield f"the writer says {counts['unfit']:,} dead letters · the sink says {counts['unfit'] - missing:,}"
    yield from sink_disagreements(counts, f"the writer brought {counts['given']:,} dead letters and notices")
    if counts["accepted"] < counts["sent"]:
        theirs = f"the outbox knows {counts['accepted']:,}"
        yield f"the writer brought {counts['sent']:,} messages · {theirs}: was it restored from a copy?"
    answered, plain = counts["outbox.acknowledged"] - counts["outbox.taken_back"], counts["outbox.sent"]
    if counts["outbox.delivered"] != answered + plain:
        more = f" + {plain:,} sent with QoS 0" if plain else ""
        told = f"the outbox says {counts['outbox.delivered']:,} delivered"
        yield f"{told} · the broker has acknowledged {answered:,}{more}"
