"""What a reader of the landing topic has to know of its journal, found in Kafka alone, without its owner."""

from __future__ import annotations

from towline.errors import JournalError
from towline.journal.frames import Kind
from towline.landing.place import LandingPlace, end_of, scan
from towline.landing.records import number_of
from towline.landing.statelog import Assembler

__all__ = ["bounds", "row_at", "rows_in"]

#: Records that are looked at for the first row at or after an offset: ends of transactions are none.
_AHEAD = 64


def bounds(place: LandingPlace) -> tuple[int, int]:
    """The first offset of the landing partition, and the end of what is committed.

    Raises:
        KafkaError: TL-K01.
    """
    return end_of(place.client, place.rows)


def row_at(place: LandingPlace, offset: int) -> int:
    """How many rows the journal had before an offset: the number of the first row at or after it.

    Raises:
        KafkaError: TL-K01.
        JournalError: TL-J07 what lay there was removed, TL-J33 the partition has never come so far.
    """
    first, end = bounds(place)
    if offset < first:
        what = f"what lay at offset {offset:,} was committed and removed; the topic begins at {first:,}"
        raise JournalError("TL-J07", place.where, what, "It was counted when it was committed.")
    if offset > end:
        what = f"offset {offset:,} was read, and the topic ends at {end:,}: it was made anew, or restored"
        do = "Bring the topics back from the same backup, or start the query with a new checkpoint directory."
        raise JournalError("TL-J33", place.where, what, do)
    start = offset
    while start < end:
        records = scan(place.client, place.rows, start, upto=min(end, start + _AHEAD)).records
        if records:
            return number_of(records[0][1] or b"")
        start += _AHEAD
    return rows_in(place)


def rows_in(place: LandingPlace) -> int:
    """How many rows the journal has had, by its state.

    Raises:
        KafkaError: TL-K01.
    """
    assembler, rows = Assembler(place.where), 0
    for offset, key, value in scan(place.client, place.state).records:
        try:
            frame = assembler.take(key, value, offset)
        except JournalError:
            continue  # the rest of one that was removed
        if frame is not None and frame.header.kind in (Kind.SNAPSHOT, Kind.RECORDS):
            rows = frame.header.end
    return rows
