"""The partitions of a batch: which rows of which journal a task reads. Pure: a range is always cut the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from towline.spark.link import GatewayPlace
    from towline.spark.offsets import JournalPlace, Position

__all__ = ["JournalRange", "Slice", "bounds_of", "divided", "ranges_between"]


class Slice(InputPartition):
    """The rows ``start`` to ``end`` - 1 of one journal, and the query's watermark: all that a worker is told.

    ``ticket`` and ``authority`` let the worker in to a gateway on a network (`GatewayPlace.admitted`). ``place`` is
    where the gateway is, None for the one that the reader's plan names.
    """

    def __init__(
        self,
        journal: str,
        start: int,
        end: int,
        incarnation: str = "",
        watermark_ms: int | None = None,
        ticket: str = "",
        authority: str = "",
        place: GatewayPlace | None = None,
    ) -> None:
        super().__init__((journal, start, end))
        self.journal = journal
        self.start = start
        self.end = end
        self.incarnation = incarnation
        self.watermark_ms = watermark_ms
        self.ticket = ticket
        self.authority = authority
        self.place = place


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


def ranges_between(start: Position, end: Position) -> list[JournalRange]:
    """What a batch has of each gateway, in the order of their names.

    A gateway that comes in with this batch has no rows in it: where it begins is only known from its end. One that
    leaves with it has none either.
    """
    known = ((start.place(place.gateway), place) for place in end.places)
    return [JournalRange(here.offset, there) for here, there in known if here and here.offset < there.offset]


def bounds_of(start: int, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where each part of a range begins and ends."""
    bounds = []
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return tuple(bounds)


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
