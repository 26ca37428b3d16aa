"""The partitions of a batch: which rows of which journal a task reads. Pure: a range is always cut the same way."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from towline.spark.link import GatewayPlace
    from towline.spark.offsets import JournalPlace, Position

__all__ = ["JournalRange", "Slice", "divided", "ranges_between", "slices_of"]


@dataclass(frozen=True)
class Slice(InputPartition):
    """The rows ``start`` to ``end`` - 1 of one journal: all that a worker is told.

    Attributes:
        place: Where the gateway is.
        journal: Id of its journal.
        start: Offset of the first row.
        end: Offset after the last one.
        incarnation: Which opening of the journal wrote the row below `end`; "" for unknown.
        watermark_ms: The query's watermark, in ms since 1970; None for rows without an event time.
        ticket: Lets the worker in to a gateway on a network.
        authority: With it: the authorities of the gateway's certificate as PEM text.
    """

    place: GatewayPlace
    journal: str
    start: int
    end: int
    incarnation: str = ""
    watermark_ms: int | None = None
    ticket: str = field(default="", repr=False)
    authority: str = ""

    @property
    def admitted(self) -> GatewayPlace:
        """The gateway's place as a worker comes to it."""
        return self.place.admitted(self.ticket, self.authority)


@dataclass(frozen=True, slots=True)
class JournalRange:
    """The rows ``start`` to ``end.offset`` - 1 of a gateway's journal.

    Attributes:
        start: Offset of the first row.
        end: The place after the last one.
    """

    start: int
    end: JournalPlace

    @property
    def rows(self) -> int:
        """How many they are."""
        return self.end.offset - self.start

    def bounds(self, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Where each part begins and ends.

        Args:
            sizes: Rows of the parts.
        """
        return tuple(pairwise(accumulate(sizes, initial=self.start)))


def slices_of(
    place: GatewayPlace,
    end: JournalPlace,
    bounds: Sequence[tuple[int, int]],
    tickets: Sequence[str],
    watermark_ms: int | None = None,
) -> list[Slice]:
    """The slices of a range; only of its end it is known which opening of the journal wrote the row below.

    Args:
        place: Where the gateway is.
        end: Where the range ends.
        bounds: Where each slice begins and ends.
        tickets: For each, what lets a worker in.
        watermark_ms: The query's watermark.

    Raises:
        GatewayError: TL-G46, the file with the authorities of the gateway's certificate can't be read.
    """
    known, trusted = [""] * (len(bounds) - 1) + [end.incarnation], place.trusted()
    return [
        Slice(place, end.journal, *each, incarnation, watermark_ms, ticket, trusted)
        for each, incarnation, ticket in zip(bounds, known, tickets, strict=True)
    ]


def ranges_between(start: Position, end: Position) -> list[JournalRange]:
    """What a batch has of each gateway, in the order of their names.

    A gateway that comes in with this batch has no rows in it: where it begins is only known from its end. One that
    leaves with it has none either.
    """
    known = ((start.place(place.gateway), place) for place in end.places)
    return [JournalRange(here.offset, there) for here, there in known if here and here.offset < there.offset]


def divided(rows: Sequence[int], min_partitions: int | None, max_records: int | None) -> list[list[int]]:
    """Into how many parts each range is cut, and how many rows each part has: as Spark's Kafka source does it.

    First by ``maxRecordsPerPartition``. Where that leaves fewer parts than ``minPartitions``, those are cut again, each
    in proportion to its rows; a part whose share is less than one and a half stays whole and does not count
    (KafkaOffsetRangeCalculator.getRanges). The number is a hint: rounding may give a few more or fewer.

    Args:
        rows: Of each range, at least 1.
        min_partitions: Wanted number of all parts together; None for one each.
        max_records: Most rows of a part; None for no limit.

    Returns:
        The rows of the parts of each range, in order; each at least 1.
    """
    parts = [_even(count, -(-count // max_records) if max_records else 1) for count in rows]
    sizes = [size for part in parts for size in part]
    if min_partitions is None or len(sizes) >= min_partitions:
        return parts
    total = sum(sizes)
    whole = [size for size in sizes if _count(size, total, min_partitions) == 1]
    left, wanted = total - sum(whole), max(min_partitions - len(whole), 1)

    def again(size: int) -> list[int]:
        return [size] if _count(size, total, min_partitions) == 1 else _even(size, _count(size, left, wanted))

    return [[piece for size in part for piece in again(size)] for part in parts]


def _count(rows: int, total: int, wanted: int) -> int:
    """The share of a number of parts; a half is rounded up, as Java does, and there is no part without a row."""
    return min(max((2 * rows * wanted + total) // (2 * total), 1), rows)


def _even(rows: int, parts: int) -> list[int]:
    """Cut a range as evenly as can be; what can't be divided goes to the last parts."""
    sizes = []
    for left in range(parts, 0, -1):
        sizes.append(rows // left)
        rows -= sizes[-1]
    return sizes
