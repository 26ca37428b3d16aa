"""Account of a line: every message is counted in exactly one part, with a reason [I11].

It is computed on request from independent sources (docs/monitoring.md#the-account): a `Counter` has the counts of each
source under its names. Each direction has its own parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from towline.bridge.lines.statuses import AWAY_SINCE, outage_text, statuses_by_gateway
from towline.checkpoint import Checkpoint
from towline.gateway.identity import JournalPosition
from towline.kafka.markers import NO_BATCH
from towline.spark.sink_note import BatchMessages, BatchResult, BatchTotals, SinkNote, Span

#: File with the counts of the driver, beside that of the sink.
SPARK_NOTE: Final = "towline.spark"


@dataclass(frozen=True, slots=True)
class LineNotes:
    """Persisted counts of a line's committed batches.

    Attributes:
        totals: Totals of its sink; None if there are none.
        spark_counts: Spark's counts, of the batches whose progress the driver received.
    """

    totals: BatchTotals | None = None
    spark_counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Path | str) -> Self:
        """Read the counts in a checkpoint; raises JournalError, TL-J20."""
        logs = Checkpoint(str(checkpoint))
        spark_totals = SinkNote.read(logs, SPARK_NOTE).totals[-1:]
        return cls(SinkNote.read(logs).committed_totals(logs), spark_totals[0].counts if spark_totals else {})

    @property
    def counts(self) -> Counter[str]:
        """Totals of the sink, and Spark's counts as ``spark.NAME``; 0 for a count that no source has."""
        totals = self.totals.counts if self.totals else {}
        return Counter({**totals, **{f"spark.{name}": count for name, count in self.spark_counts.items()}})


def add_spark_counts(checkpoint: Path, batch: int, spark_counts: Mapping[str, int], sink_count: str) -> None:
    """Add Spark's counts of a batch, and the sink's to compare with; skip one that has them, or that the sink lacks.

    Raises:
        JournalError: TL-J20, the notes can't be read; the disk is full or failed.
    """
    logs = Checkpoint(str(checkpoint))
    sink_note, spark_note = SinkNote.read(logs), SinkNote.read(logs, SPARK_NOTE)
    if (totals := sink_note.totals_of(batch)) is not None and all(t.batch < batch for t in spark_note.totals):
        previous = sink_note.totals_before(batch)
        count = totals.counts.get(sink_count, 0) - (previous.counts.get(sink_count, 0) if previous else 0)
        spark_note.with_batch(batch, BatchResult(Counter({**spark_counts, sink_count: count}))).write(logs, SPARK_NOTE)


def copy_totals(former_checkpoint: Path, new_checkpoint: Path) -> None:
    """Copy the totals of a checkpoint into the new one that replaces it.

    Raises:
        OSError: The directory can't be made.
        JournalError: TL-J20, a note can't be read; the disk is full or failed.
    """
    notes = LineNotes.read(former_checkpoint)
    if notes.totals is None:
        return
    new_checkpoint.mkdir(mode=0o700, exist_ok=True)
    logs = Checkpoint(str(new_checkpoint))
    SinkNote((replace(notes.totals, batch=NO_BATCH, marks=None, sink=""),)).write(logs)
    SinkNote((BatchTotals(NO_BATCH, notes.spark_counts),)).write(logs, SPARK_NOTE)


def start_totals(checkpoint: Path, start_positions: Sequence[JournalPosition], *, drops: bool) -> None:
    """Persist the start positions of a new checkpoint's first batch.

    Messages between the last counted offset and the start count as dropped if the line `drops` them. Else they were
    delivered without a count, as after a power failure that lost the note.

    Raises:
        OSError: The directory can't be made.
        JournalError: TL-J20, the note can't be read; the disk is full or failed.
    """
    checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = Checkpoint(str(checkpoint))
    note = SinkNote.read(logs)
    totals = note.totals_before(0) or BatchTotals(NO_BATCH)
    messages = BatchMessages.from_positions(totals, start_positions, start_positions)
    counts = Counter(totals.counts)
    counts["skipped" if drops else "unwitnessed"] += messages.uncounted_rows
    note.with_totals(replace(totals, spans=messages.spans, counts=counts)).write(logs)


# -- the sum -----------------------------------------------------------------------------------------------------------


class AccountPart(NamedTuple):
    """Part of an account: one number of the sum.

    Attributes:
        label: Name in the output.
        messages: Number of its messages.
        remark: Remark on a subset of them (`remark_text`).
    """

    label: str
    messages: int
    remark: str = ""


@dataclass(frozen=True, slots=True)
class LineAccount:
    """Account of a line: its messages counted by outcome.

    Attributes:
        parts: By JSON key, in the order of the sum: received, delivered, other parts, waiting on disk.
        disagreements: Contradictions between sources; empty when the account adds up.
        more: Further JSON keys; ``uncounted`` are messages of an unfinished batch, or of one without a note.
        away: Texts on unavailable gateways; their counts are from their last status.
        stopped: The line has stopped permanently: only disagreements are reported.
    """

    parts: Mapping[str, AccountPart]
    disagreements: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    away: tuple[str, ...] = ()
    stopped: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the parts."""
        return {key: part.messages for key, part in self.parts.items()}

    @property
    def received(self) -> int:
        """Messages received by the line."""
        return next(iter(self.counts.values()))

    @property
    def adds_up(self) -> bool | None:
        """Whether the parts sum up and the sources agree; None if unknown [I19]."""
        return False if self.disagreements else None if self.stopped else True

    @property
    def broken(self) -> str:
        """Guarantee that was violated, or "" for none."""
        return str(self.more.get("broken", ""))

    @property
    def pending(self) -> int:
        """Messages not delivered yet: waiting on disk, or not yet written there."""
        return self.counts["waiting"] + self.counts.get("arriving", 0)

    def sentence(self) -> str:
        """Return the sum in one line, with the verdict."""
        verdict = "adds up ✓" if self.adds_up else "not checked: the line has stopped"
        verdict = f"does not add up ✗ ({'; '.join(self.disagreements)})" if self.disagreements else verdict
        text = f"{self.sum_text()}   {verdict}" + (f", but is {self.broken} ✗" if self.broken else "")
        return "   ".join((text, *self.away))

    def sum_text(self) -> str:
        """Return the sum as text; parts that are zero are omitted, except received, delivered and waiting."""
        first, *others, last = self.parts.values()
        shown = [others[0], *(part for part in others[1:] if part.messages), last]
        first_text, *texts = (f"{part.label} {part.messages:,}{part.remark}" for part in (first, *shown))
        return f"{first_text} = {' + '.join(texts)}"

    def as_json(self) -> dict[str, Any]:
        """Return the account as JSON values; ``parts`` are label, messages and remark of each, as in `sum_text`."""
        return {
            **self.counts,
            "parts": [list(part) for part in self.parts.values()],
            "adds_up": self.adds_up,
            "disagreements": list(self.disagreements),
            **({"away": list(self.away)} if self.away else {}),
            **self.more,
        }


def remark_text(count: int, label: str) -> str:
    """Return a remark on a subset of a part's messages, such as " (9 of them uncounted)"; "" if there is none."""
    return f" ({count:,} of them {label})" if count else ""


def _sink_disagreements(counts: Counter[str]) -> Iterator[str]:
    """Yield disagreements of the Kafka sink with its rows, or with its markers."""
    sink_text = f"{counts['acknowledged']:,} acknowledged by Kafka + {counts['dead_lettered']:,} dead letters"
    if counts["given"] != sum(counts[name] for name in ("acknowledged", "dead_lettered", "lost", "unknown")):
        dropped_text = "".join(f" + {counts[name]:,} {name}" for name in ("lost", "unknown") if counts[name])
        yield f"the sink was given {counts['given']:,} rows · it says {sink_text}{dropped_text}"
    if counts["drift"] or counts["drift_dead"]:
        dead_letters = counts["dead_lettered"] + counts["drift_dead"]
        rows = counts["acknowledged"] + counts["dead_lettered"] + counts["drift"]
        yield f"Kafka's markers say {rows:,} rows, {dead_letters:,} of them dead letters · the sink says {sink_text}"


# -- from MQTT to Kafka ------------------------------------------------------------------------------------------------


def _gateway_counts(status: Mapping[str, Any], span: Span | None) -> Counter[str]:
    """Return the counts of a gateway's status, or of the committed offsets if it does not answer.

    ``repeats`` were resent under an open QoS 2 packet id: answered, and not stored [I3]. ``before`` were delivered
    before the totals begin. ``waiting`` are not known to be delivered, though the gateway counts some as ``committed``.
    """
    committed_offset = span.end if span else int(status.get("committed", 0))
    end_offset, repeats = int(status.get("end", committed_offset)), int(status.get("deduplicated", 0))
    if AWAY_SINCE in status:
        end_offset = max(end_offset, committed_offset)  # its last status is older than the last batch
    # The status is not one instant: rows may become durable between reading `received` and `end`.
    received_count = max(int(status.get("received", end_offset)), end_offset + repeats)
    counted_offset = min(committed_offset, end_offset)
    journal_counts = {
        "repeats": repeats,
        "received": received_count,
        "arriving": received_count - end_offset - repeats,
        "before": min(span.start if span else committed_offset, counted_offset),
        "waiting": end_offset - counted_offset,
        "committed": max(0, int(status.get("committed", 0)) - counted_offset),
    }
    return Counter({f"journal.{name}": count for name, count in journal_counts.items()})


def uplink_account(notes: LineNotes, gateway: Mapping[str, Any]) -> LineAccount:
    """Return the account of an uplink.

    An unavailable gateway counts with its last status, a removed one with its committed offsets.

    Args:
        notes: Read before the gateway was asked, so that its status covers all their messages.
        gateway: ``received``, ``end``, ``committed``, ``deduplicated`` ...; of several also ``gateways``.
    """
    statuses, spans = statuses_by_gateway(gateway), notes.totals.spans if notes.totals else {}
    statuses_by_journal = {str(status.get("journal", name)): status for name, status in statuses.items()}
    counts = notes.counts
    for journal in {*statuses_by_journal, *spans}:
        counts.update(_gateway_counts(statuses_by_journal.get(journal, {}), spans.get(journal)))
    unconfirmed = counts["journal.before"] + counts["unwitnessed"] + counts["unknown"]
    in_kafka, uncounted = unconfirmed + counts["acknowledged"], counts["journal.committed"]
    # ``unrouted``: no route matches. ``skipped``: dropped by at_most_once after a crash. ``lost``: dropped by its sink
    # after the delivery timeout. ``deduplicated``: repeats by dedupe key or open packet id. ``left_out``: did not reach
    # the sink, in a batch with unknown reasons. ``arriving``: not yet on disk, unacknowledged.
    parts = {
        "received": AccountPart("received", counts["journal.received"]),
        "in_kafka": AccountPart("in Kafka", in_kafka, remark_text(unconfirmed, "unconfirmed")),
        "filtered": AccountPart("filtered", counts["filtered"]),
        "undecided": AccountPart("where is null", counts["undecided"]),
        "unrouted": AccountPart("unrouted", counts["unrouted"]),
        "skipped": AccountPart("dropped", counts["skipped"]),
        "lost": AccountPart("lost", counts["lost"]),
        "dead_lettered": AccountPart("dead-lettered", counts["dead_lettered"]),
        "deduplicated": AccountPart("deduplicated", counts["spark.deduplicated"] + counts["journal.repeats"]),
        "left_out": AccountPart("unexplained", counts["left_out"] + counts["dropped"] - counts["spark.dropped"]),
        "arriving": AccountPart("arriving", counts["journal.arriving"]),
        "waiting": AccountPart("waiting", counts["journal.waiting"], remark_text(uncounted, "committed")),
    }
    received = parts["received"].messages
    disagreements = [*_uplink_disagreements(counts)]
    if (total := sum(part.messages for part in parts.values()) - received) != received and not disagreements:
        disagreements.append(f"{received:,} were received · the parts are {total:,}")
    return LineAccount(
        parts,
        disagreements,
        more={"not_witnessed": unconfirmed, "uncounted": uncounted},
        away=tuple(outage_text(name, status) for name, status in statuses.items() if name and AWAY_SINCE in status),
    )


def _uplink_disagreements(counts: Counter[str]) -> Iterator[str]:
    """Yield pairs of sources that contradict each other, as text."""
    late_rows = counts["spark.late"]
    missing_rows = counts["astray"] + counts["spark.dropped"] - counts["spark.deduplicated"] - late_rows
    if missing_rows > 0:
        yield f"{missing_rows:,} rows did not reach the sink, for no reason that the line has"
    if missing_rows < 0:
        yield f"the sink was given {-missing_rows:,} rows more than the journal has committed"
    if late_rows:
        yield f"{late_rows:,} rows were lost: Spark took them for late. That should not happen; please report it"
    yield from _sink_disagreements(counts)


# -- from Kafka to MQTT ------------------------------------------------------------------------------------------------


def downlink_account(notes: LineNotes, gateway: Mapping[str, Any]) -> LineAccount:
    """Return the account of a downlink.

    Args:
        notes: Read before the gateway was asked.
        gateway: Status with the counts of its ``outbox``.
    """
    outbox: Mapping[str, Any] = gateway["outbox"]
    counts = notes.counts
    counts.update({f"outbox.{name}": count for name, count in outbox.items() if isinstance(count, int)})
    # An unavailable gateway's last status is older than the last batch.
    accepted = counts["accepted"] = max(counts["outbox.accepted"], counts["sent"] if AWAY_SINCE in gateway else 0)
    delivered, expired, refused = (counts[f"outbox.{name}"] for name in ("delivered", "expired", "refused"))
    uncounted, degraded = max(0, accepted - counts["sent"]), counts["outbox.degraded"]
    taken = accepted + counts["filtered"] + counts["undecided"] + counts["unfit"]
    # ``delivered``: acknowledged by the broker, or sent with QoS 0. ``expired``: not sent before the message expiry.
    # ``refused``: by the broker; the gateway stores them separately.
    parts = {
        "taken": AccountPart("taken", taken, remark_text(uncounted, "uncounted")),
        "delivered": AccountPart("delivered", delivered, remark_text(degraded, "at QoS 1, not 2")),
        "dead_lettered": AccountPart("dead-lettered", counts["unfit"]),
        "filtered": AccountPart("filtered", counts["filtered"]),
        "undecided": AccountPart("where is null", counts["undecided"]),
        "expired": AccountPart("expired", expired),
        "refused": AccountPart("refused", refused),
        "waiting": AccountPart("waiting", accepted - delivered - expired - refused),
    }
    # Published with QoS 2, and the broker took it as QoS 1, so it may be doubled.
    broken = "not exactly once" if degraded and gateway.get("guarantee") == "exactly_once" else ""
    more = {"degraded": degraded, "broken": broken, "uncounted": uncounted}
    return LineAccount(parts, [*_downlink_disagreements(counts)], more=more)


def _downlink_disagreements(counts: Counter[str]) -> Iterator[str]:
    """Yield pairs of sources that contradict each other, as text."""
    if (spark_rows := counts["spark.taken"]) != (writer_rows := counts["spark.records"]):
        yield f"Spark took {spark_rows:,} records · the writer was given {writer_rows:,} of them"
    sent = counts["records"] - counts["filtered"] - counts["undecided"] - counts["unfit"]
    if sent != counts["sent"]:
        yield f"the writer says {sent:,} messages went to the outbox · the outbox says it has {counts['sent']:,}"
    if counts["unfit"] > counts["dead_lettered"]:
        yield f"the writer says {counts['unfit']:,} dead letters · the sink says {counts['dead_lettered']:,}"
    yield from _sink_disagreements(counts)
    if counts["accepted"] < counts["sent"]:
        outbox_text = f"the outbox knows {counts['accepted']:,}"
        yield f"the writer brought {counts['sent']:,} messages · {outbox_text}: was it restored from a copy?"
    if counts["outbox.delivered"] != counts["outbox.acknowledged"]:
        delivered_text = f"the outbox says {counts['outbox.delivered']:,} delivered"
        yield f"{delivered_text} · the broker has acknowledged {counts['outbox.acknowledged']:,}"
