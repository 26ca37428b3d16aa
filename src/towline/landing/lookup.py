"""What a reader of the landing topic has to know of its journal, found in Kafka alone, without its owner."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from towline.errors import JournalError
from towline.landing import followers
from towline.landing.opening import frames_of
from towline.landing.place import LandingPlace, end_of, scan
from towline.landing.records import NUMBER, key_at
from towline.landing.signs import SignWatch, StandbyVerdict
from towline.landing.statelog import replayed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline.landing.signs import Sign
    from towline.landing.statelog import RecoveredState

__all__ = ["JournalWord", "bounds", "count_below", "done_before", "row_at", "state_of", "word_of"]

#: Records that are looked at for the first row at or after an offset: ends of transactions are none.
_AHEAD: Final = 64
#: Rows that are held at a time.
_TOGETHER: Final = 10_000
#: Seconds that an owner is waited for to say that it lives, at most, and between two looks.
_OWNER_S: Final = 5.0
_PAUSE_S: Final = 0.1


class JournalWord(NamedTuple):
    """What a journal says of itself in Kafka, whoever has it.

    Attributes:
        end: How many rows it has had.
        committed: How many of them a consumer is done with.
        first: The oldest row that is kept.
        epoch: Of its newest opening.
        ledger: Its counters.
        received_at: When the oldest row came that waits, in seconds since 1970; None where none waits.
    """

    end: int
    committed: int
    first: int
    epoch: int
    ledger: Mapping[str, int]
    received_at: float | None
    sign: Sign | None
    lives: bool


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
    _, end = bounds(place)
    if offset > end:
        what = f"offset {offset:,} was read, and the topic ends at {end:,}: it was made anew, or restored"
        do = "Bring the topics back from the same backup, or start the query with a new checkpoint directory."
        raise JournalError("TL-J33", place.where, what, do)
    found = _from(place, offset, end)
    first, _ = bounds(place)  # after the look: rows that go meanwhile leave a later one to be found
    if offset < first:
        what = f"what lay at offset {offset:,} was committed and removed; the topic begins at {first:,}"
        raise JournalError("TL-J07", place.where, what, "It was counted when it was committed.")
    if found is not None:
        return found.number
    known = state_of(place)
    return 0 if known is None else known.state.end


class _Found(NamedTuple):
    """A row: its number, its offset, when it was received in seconds since 1970."""

    number: int
    offset: int
    received_at: float


def _from(place: LandingPlace, offset: int, end: int) -> _Found | None:
    """The first row at or after an offset; None where there is none before `end`."""
    while offset < end:
        records = scan(place.client, place.rows, offset, upto=min(end, offset + _AHEAD)).records
        if records:
            at, key, _ = records[0]
            row = key_at(place.where, at, key)
            return _Found(row[NUMBER], at, row.get("received_at", 0) / 1e6)
        offset += _AHEAD
    return None


def count_below(place: LandingPlace, start: int, upto: int, qos: int) -> int:
    """How many rows between two offsets were received with a lower QoS.

    Raises:
        KafkaError: TL-K01.
        JournalDamaged: TL-J05, a record is no row.
    """
    lower = 0
    for begin in range(start, upto, _TOGETHER):
        records = scan(place.client, place.rows, begin, upto=min(upto, begin + _TOGETHER)).records
        lower += sum(int(key_at(place.where, at, key).get("qos") or 0) < qos for at, key, _ in records)
    return lower


def state_of(place: LandingPlace) -> RecoveredState | None:
    """The journal's state, read beside its owner; None where there is none in its topic.

    Raises:
        KafkaError: TL-K01.
        JournalError: As `towline.landing.opening.open_journal`.
    """
    return replayed(place.where, frames_of(place, scan(place.client, place.state)))


def done_before(place: LandingPlace, consumer: str, known: RecoveredState | None = None) -> int | None:
    """The offset up to which a consumer is done, as its group says, or else the journal; None where neither says.

    Kafka forgets what a group has committed when it commits nothing for a week (``offsets.retention.minutes``); the
    journal keeps the row.

    Args:
        place: Where the journal lies.
        consumer: Whose progress.
        known: Its state, where that was read before.

    Raises:
        KafkaError: TL-K01.
        JournalError: As `state_of`.
    """
    offset = followers.committed_of(place, consumer)
    if offset is not None:
        return offset
    known = known or state_of(place)
    row = 0 if known is None else known.state.consumers.get(consumer, 0)
    if known is None or not row:
        return None
    first, end = bounds(place)
    at = max(first, known.places.offset_of(row))
    while (found := _from(place, at, end)) is not None and found.number < row:
        at = found.offset + row - found.number
    return end if found is None else found.offset


def word_of(place: LandingPlace, consumer: str) -> JournalWord | None:
    """What a journal and its owner say; None where there is none in its topics.

    Args:
        place: Where it lies.
        consumer: Whose progress counts.

    Raises:
        KafkaError: TL-K01.
        JournalError: As `state_of`.
    """
    known = state_of(place)
    if known is None:
        return None
    state = known.state
    first, end = bounds(place)
    found = _from(place, max(first, done_before(place, consumer, known) or 0), end)
    committed = state.end if found is None else found.number
    sign, lives = _owner(place)
    return JournalWord(
        max(state.end, committed),
        committed,
        state.floor,
        state.epoch,
        dict(state.ledger),
        None if found is None else found.received_at,
        sign,
        lives,
    )


def _owner(place: LandingPlace) -> tuple[Sign | None, bool]:
    """What the owner said last, and whether it says anything now: a silence is waited for."""
    watch, deadline = SignWatch(place, {}), time.monotonic() + _OWNER_S
    try:
        while watch.look() is StandbyVerdict.WAIT and not watch.fresh and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return watch.sign, watch.fresh and not (watch.sign and watch.sign.ended)
    finally:
        watch.close()
