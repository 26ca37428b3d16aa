"""The account against Kafka itself: what its markers and offsets say, and what the line says. Pure.

markers    totals of all batches of the sink, written in the transaction of the records (exactly_once): equal to
what the sink has noted, or one batch ahead of it where a kill came between
ends       a topic ends at an offset that is no smaller than the number of records that Kafka acknowledged in it:
transactions, repeats and other writers take offsets too, so this is a bound
offsets    of a line that reads Kafka: where it stands is neither before the first record nor behind the last
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from towline.kafka.markers import ANYONE, Marker, MarkerTotals

if TYPE_CHECKING:
    from towline.spark.sink_note import NotedBatch

__all__ = ["Bounds", "Comparison", "of_ends", "of_journal", "of_markers", "of_offsets"]

#: By topic and partition: the first offset, and the last stable one.
Bounds: TypeAlias = Mapping[str, Mapping[int, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing that two witnesses say.

    Attributes:
        what: It is about.
        kafka: What Kafka says; None for nothing.
        line: What the line says; None for nothing.
        agrees: None where they can't be compared.
        why: What is wrong, with its code, or why they can't be compared.
        bound: Kafka's number may be larger.
    """

    what: str
    kafka: int | None
    line: int | None
    agrees: bool | None
    why: str = ""
    bound: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def of_markers(noted: NotedBatch | None, markers: Mapping[int, Marker | None], sink: str) -> Iterator[Comparison]:
    """The totals of a sink's markers against its note.

    Args:
        noted: What the sink noted last; None for nothing.
        markers: Of each partition, read after the note.
        sink: As the note has it: ``<sink id>/<partitions>``.
    """
    what = "rows in the markers"
    if noted is None or noted.marks is None or noted.sink != sink:
        yield Comparison(what, _total(markers), None, None, "the sink has noted nothing that it wrote with them")
        return
    partitions = int(sink.rpartition("/")[2])
    known = [marker for part in range(partitions) if (marker := markers.get(part)) is not None]
    if len(known) < partitions:
        why = f"{partitions - len(known):,} of {partitions:,} markers are not there   [TL-K62]"
        yield Comparison(what, _total(markers), noted.marks.rows, agrees=False, why=why)
        return
    if any(marker.writer == ANYONE for marker in known):
        yield Comparison(what, _total(markers), noted.marks.rows, None, "a person has set them")
        return
    if odd := next((one for one in known if not 0 <= one.batch - noted.batch <= 1), None):
        why = f"a marker is of batch {odd.batch}, the sink has noted batch {noted.batch}   [TL-K62]"
        yield Comparison(what, _total(markers), noted.marks.rows, agrees=False, why=why)
        return
    totals = [_before(one) if one.batch > noted.batch else one.totals for one in known]
    rows, dead = (sum(column) for column in zip(*totals, strict=True))
    letters = ("dead letters in the markers", dead, noted.marks.dead_lettered)
    for about, kafka, line in ((what, rows, noted.marks.rows), letters):
        why = "" if kafka == line else f"the markers say {kafka:,}, the sink has noted {line:,}   [TL-K62]"
        yield Comparison(about, kafka, line, kafka == line, why)


def _before(marker: Marker) -> MarkerTotals:
    """The totals without its own batch, which the sink has not noted yet."""
    return MarkerTotals(marker.total_rows - marker.rows, marker.total_dead_lettered - marker.dead_lettered)


def _total(markers: Mapping[int, Marker | None]) -> int | None:
    known = [marker.total_rows for marker in markers.values() if marker is not None]
    return sum(known) if known else None


def of_ends(what: str, topics: Iterable[str], bounds: Bounds, acknowledged: int) -> Comparison:
    """Where topics end, against how many records Kafka has acknowledged in them.

    Args:
        what: For the table.
        topics: All that the records can be in.
        bounds: Read after the line's number.
        acknowledged: By the line.
    """
    absent = sorted(set(topics) - set(bounds))
    end = sum(last for name in topics for _, last in bounds.get(name, {}).values())
    if end >= acknowledged:
        return Comparison(what, end, acknowledged, agrees=True, bound=True)
    gone = f"{', '.join(absent)} is not there" if absent else "was a topic made anew, or did Kafka lose records?"
    why = f"Kafka has room for {end:,}, and acknowledged {acknowledged:,}: {gone}   [TL-K63]"
    return Comparison(what, end, acknowledged, agrees=False, why=why, bound=True)


def of_journal(committed: int, done: int) -> Comparison:
    """The journal's watermark against the newest batch that is done: it is never ahead of it.

    Args:
        committed: As the gateway says, asked before the checkpoint was read.
        done: Where that batch ends.
    """
    ahead = f"journal says {committed:,} committed · the checkpoint's last batch ends at {done:,}   [TL-K61]"
    return Comparison("committed", None, committed, committed <= done, "" if committed <= done else ahead)


def of_offsets(stands: Mapping[str, Mapping[str, int]], bounds: Bounds) -> Iterator[Comparison]:
    """Where a line that reads Kafka stands, by topic and partition, against what Kafka has."""
    for topic, partitions in sorted(stands.items()):
        for part, at in sorted(partitions.items(), key=lambda one: int(one[0])):
            what = f"{topic}/{part}"
            first, end = bounds.get(topic, {}).get(int(part), (0, None))
            if end is None:
                yield Comparison(what, None, at, agrees=False, why="it is not there   [TL-K63]", bound=True)
            elif at > end:
                why = (
                    f"it ends at {end:,}, the line has read up to {at:,}: it was made anew, or lost records   [TL-K63]"
                )
                yield Comparison(what, end, at, agrees=False, why=why, bound=True)
            elif at < first:
                why = f"{first - at:,} offsets were removed before the line read them   [TL-K64]"
                yield Comparison(what, end, at, agrees=False, why=why, bound=True)
            else:
                yield Comparison(what, end, at, agrees=True, bound=True)
