"""Opens a journal in Kafka: fences the owner before, reads what it left, sees that rows and state belong together."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

from towline.errors import JournalDamaged, JournalError
from towline.journal import Journal, Limits, Recovery
from towline.journal.frames import Kind
from towline.journal.recovery import check_schema
from towline.journal.state import JournalState
from towline.landing.committer import Committer
from towline.landing.place import LandingPlace, end_of, scan
from towline.landing.places import Place, RowPlaces
from towline.landing.records import number_at
from towline.landing.statelog import Assembler, RecoveredState, StateFrame, replayed
from towline.landing.store import KafkaStore
from towline.landing.topics import NewTopics, Topics, ensure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from towline.landing.place import Scanned

__all__ = ["frames_of", "open_journal"]

_NO_LIMITS: Final = Limits()
#: Records that are looked at from the end in the first try: the last rows, and the ends of their transactions.
_BACK: Final = 64
_RESTORED: Final = (
    "Bring back both topics from the same backup, or delete both and start with a new checkpoint directory; rows that "
    "were not committed before that are lost."
)


def open_journal(
    place: LandingPlace,
    *,
    schema: Any,
    limits: Limits = _NO_LIMITS,
    create: NewTopics | None = None,
    repeats: bool = False,
    topics: Topics | None = None,
) -> Journal:
    """Open the journal, or make one there: fence, recover, epoch + 1.

    Args:
        place: Where it lies.
        schema: The Arrow schema of every row.
        limits: How much it may take.
        create: How missing topics are made; None for not at all.
        repeats: As `KafkaStore`.
        topics: What `ensure` found, where that was asked before.

    Raises:
        KafkaError: TL-K01, TL-K09, TL-K20: Kafka can't be used.
        ConfigError: TL-J35, a topic is unfit.
        JournalDamaged: TL-J05, durable rows are gone, or don't read as they were written.
        JournalFailed: TL-J31, another one was quicker.
        JournalError: TL-J06 another schema, TL-J09 foreign or newer records, TL-J33 rows and state are of different
            times: one of the topics was restored or made anew.
    """
    topics = topics or ensure(place, create)
    committer = Committer(place, place.sink_settings(topics.record_bytes + 512))
    committer.start()
    try:
        scanned = scan(place.client, place.state)
        recovered = _recovered(place, schema, scanned)
        before = recovered.state.end - recovered.state.floor
        recovered.state.begin()
        committer.opening = (recovered.state.epoch, recovered.state.incarnation)
        committer.state_end = scanned.end
        store = KafkaStore(
            place, schema, limits, committer, recovered, record_bytes=topics.record_bytes, repeats=repeats
        )
        store.begin()
    except BaseException:
        committer.close()
        raise
    store.trim_state(scanned.end)
    return Journal(place.where, store, store, Recovery(1 if before else 0, before, 0, None))


def _recovered(place: LandingPlace, schema: Any, scanned: Scanned) -> RecoveredState:
    recovered = replayed(place.where, frames_of(place, scanned))
    first, end = end_of(place.client, place.rows)
    if recovered is None:
        if end:
            what = f'"{place.topic}" has had {end:,} records, and there is no state of them in "{place.state_topic}"'
            raise JournalError("TL-J33", place.where, what, _RESTORED)
        state = JournalState(secrets.token_hex(6), 0)
        return RecoveredState(state, schema, (), RowPlaces(), Place(0, 0, 0), -1, 0)
    check_schema(place.where, recovered.schema, schema)
    _check_rows(place, recovered, first, end)
    return recovered._replace(end=recovered.end._replace(offset=max(end, recovered.end.offset)))


def frames_of(place: LandingPlace, scanned: Scanned) -> Iterator[StateFrame]:
    """The frames of the state partition, from its first snapshot on: what a removal has left before it is none."""
    assembler, begun = Assembler(f"{place.state_topic}/{place.state.partition}"), False
    for offset, key, value in scanned.records:
        try:
            frame = assembler.take(key, value, offset)
        except JournalDamaged:
            if begun or not scanned.first:
                raise
            continue
        if frame is not None and (begun or frame.header.kind == Kind.SNAPSHOT or not scanned.first):
            begun = True
            yield frame


def _check_rows(place: LandingPlace, recovered: RecoveredState, first: int, end: int) -> None:
    """See that the landing partition ends with the last row that the state knows [I14].

    Raises:
        JournalError: TL-J33, it has other rows, or has never come so far.
        JournalDamaged: TL-J05, it lacks rows that nobody has committed.
    """
    state = recovered.state
    if end < recovered.end.offset:
        what = f'"{place.topic}" ends at offset {end:,}, the state knows {recovered.end.offset:,}: made anew, or a copy'
        raise JournalError("TL-J33", place.where, what, _RESTORED)
    last = _last_row(place, first, end)
    if last is not None and last >= state.end:
        what = f'"{place.topic}" has row {last:,}, the state in "{place.state_topic}" ends before row {state.end:,}'
        raise JournalError("TL-J33", place.where, f"{what}: an older copy", _RESTORED)
    if state.floor < state.end and (last is None or last < state.end - 1):
        gone = f"rows from {0 if last is None else last + 1:,} to {state.end:,} are missing"
        do = "Was something deleted by hand, or by retention.ms? Bring the topic back from a backup."
        raise JournalDamaged("TL-J05", place.where, gone, do)


def _last_row(place: LandingPlace, first: int, end: int) -> int | None:
    """The number of the last row that is there; None where there is none."""
    back = _BACK
    while end > first:
        start = max(first, end - back)
        records = scan(place.client, place.rows, start).records
        if records:
            offset, key, _ = records[-1]
            return number_at(place.where, offset, key)
        if start == first:
            return None
        back *= 16
    return None
