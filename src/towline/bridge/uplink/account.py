"""The account of a line from MQTT to Kafka, by offsets of its journals.

    the journal      how many messages were taken in
    the offset log   up to where each batch has them
    the writer       what it left out, and why
    Spark            what it dropped as repeats, or as late
    the sink         how many it was given, how many Kafka acknowledged, as dead letters too, how many were lost
    the marker       the same in Kafka itself, written in the transaction of the records (exactly_once)

None of them knows the others. The account is their sum, and says who disagrees with whom [I11].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline.bridge.lines.account import AccountWords, LineAccount, remark, sink_disagreements
from towline.bridge.lines.elsewhere import AWAY, away_text

if TYPE_CHECKING:
    from collections import Counter

    from towline.bridge.lines.notes import LineNotes
    from towline.spark.tally import Span

__all__ = ["uplink_account"]

#: ``undecided``: its ``where`` is null. ``unrouted``: taken by no route. ``skipped``: given up by at_most_once after a
#: crash. ``lost``: given up by its sink, Kafka did not take them in time. ``deduplicated``: recognised as repeats, by a
#: dedupe key or by an open QoS 2 packet id. ``left_out``: did not come to the sink, in a batch whose reasons nobody
#: knows. ``arriving``: not yet on disk and not acknowledged.
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
#: Why a message did not come to the sink, as its totals say it.
_NOT_GIVEN: Final = ("filtered", "undecided", "unrouted", "skipped", "dropped", "left_out", "astray", "unwitnessed")


class _JournalCounts(NamedTuple):
    """What a gateway says of itself; the sum of several is a member-wise one.

    ``before`` are the messages that were carried before the totals begin, ``waiting`` those that are not known to be
    carried, of which the gateway calls some committed.
    """

    #: Sent again under an open QoS 2 id: answered, and not stored [I3].
    repeats: int
    received: int
    arriving: int
    before: int
    waiting: int
    committed: int

    @classmethod
    def of(cls, status: Mapping[str, Any], span: Span | None) -> Self:
        """What one says; of one that says nothing, what was carried.

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
        before = min(span.since if span else upto, counted)
        committed = max(0, int(status.get("committed", 0)) - counted)
        return cls(repeats, received, received - end - repeats, before, end - counted, committed)


def uplink_account(notes: LineNotes, gateway: Mapping[str, Any]) -> LineAccount:
    """Bring the sources together.

    Of a gateway that is away that is what it said last, of one that has gone what was carried.

    Args:
        notes: Read before the gateway was asked: it knows of every message that they are about.
        gateway: ``received``, ``end``, ``committed``, ``deduplicated`` ...; of several also ``gateways``.
    """
    several = gateway.get("gateways")
    spans = notes.totals.spans if notes.totals else {}
    parts = {str(part.get("journal", name)): (name, part) for name, part in (several or {"": gateway}).items()}
    total, restored = _JournalCounts(*[0] * len(_JournalCounts._fields)), list[str]()
    for journal in sorted({*parts, *spans}):
        (name, part), span = parts.get(journal, (journal, {})), spans.get(journal)
        if span is not None and AWAY not in part and (fault := _restored(part, span)):
            restored.append(f"gateway {name}: {fault}" if several else fault)
        total = _JournalCounts(*map(sum, zip(total, _JournalCounts.of(part, span), strict=True)))
    away = {name: part for name, part in (several or {}).items() if AWAY in part}
    return _sum(notes, total, restored, tuple(away_text(name, part) for name, part in away.items()))


def _sum(notes: LineNotes, journals: _JournalCounts, restored: list[str], away: tuple[str, ...]) -> LineAccount:
    counts, spark = notes.counts, notes.spark
    not_witnessed = journals.before + counts["unwitnessed"] + counts["unknown"]
    carried = not_witnessed + counts["acknowledged"]
    parts = {
        **{name: counts[name] for name in ("filtered", "undecided", "unrouted", "skipped", "lost", "dead_lettered")},
        "deduplicated": spark.get("deduplicated", 0) + journals.repeats,
        "left_out": counts["left_out"] + counts["dropped"] - spark.get("dropped", 0),
        "arriving": journals.arriving,
    }
    disagreements = [*restored, *_disagreements(notes, counts)]
    whole = carried + sum(parts.values()) + journals.waiting
    if whole != journals.received and not disagreements:
        disagreements = [f"{journals.received:,} were received · the parts are {whole:,}"]
    return LineAccount(
        _WORDS,
        journals.received,
        carried,
        waiting=journals.waiting,
        parts=parts,
        disagreements=disagreements,
        uncounted=journals.committed,
        notes=(
            "",
            remark((not_witnessed, "not witnessed"), (counts["again"], "again")),
            remark((journals.committed, "committed")),
        ),
        more={"not_witnessed": not_witnessed, "again": counts["again"]},
        away=away,
    )


def _disagreements(notes: LineNotes, counts: Counter[str]) -> Iterator[str]:
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
