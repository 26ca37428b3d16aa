"""Does a place in a query's checkpoint belong to this journal?

Restored copies and swapped directories make an offset mean other rows. Each offset that was handed out names the
journal and the opening of it that wrote the row below (`Journal.incarnation_of`), so that each is recognised, before
anything is taken in or cut [I14].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from towline.checkpoint import Checkpoint
from towline.errors import Fenced, GatewayError

if TYPE_CHECKING:
    from towline.journal import Journal

__all__ = ["MISMATCHES", "check_checkpoint", "check_history", "check_journal", "is_other"]

#: Codes of the errors below: another try finds the same.
MISMATCHES = frozenset({"TL-G04", "TL-G06", "TL-G26"})


class _Place(NamedTuple):
    gateway: str
    journal: str
    offset: int
    incarnation: str


def check_journal(name: str, journal: Journal, wanted: str) -> None:
    """See that a checkpoint is about this journal.

    Raises:
        Fenced: TL-G04, it is about another one.
    """
    if wanted != journal.journal_id:
        raise Fenced(
            "TL-G04",
            name,
            f"the checkpoint belongs to journal {wanted}, this gateway serves journal {journal.journal_id}",
            "Bring back the state directory of that journal, or start the query with a new checkpoint directory "
            "and get what waits here; rows that only the other journal held stay there.",
        )


def is_other(incarnation: str, here: str, offset: int, first: int) -> bool:
    """Whether another opening of a journal wrote the row below an offset than the one that the offset came with.

    Args:
        incarnation: What the offset came with; "" for none, as that of an empty journal.
        here: What the journal says (`Journal.incarnation_of`).
        offset: The offset.
        first: The first that the journal has; what was below an older one was committed and is not compared.
    """
    return incarnation != "" and offset >= first and here != incarnation


def check_history(name: str, journal: Journal, offset: int, incarnation: str) -> None:
    """See that the rows below an offset are those that were below it when it was handed out.

    Args:
        name: Of the gateway.
        journal: Its journal.
        offset: One that the journal has.
        incarnation: What the offset came with; "" for none.

    Raises:
        Fenced: TL-G26, they are others.
    """
    here = journal.incarnation_of(offset)
    if is_other(incarnation, here, offset, journal.first):
        raise Fenced(
            "TL-G26",
            name,
            f"the row below offset {offset:,} was written by opening {incarnation} of the journal when the checkpoint "
            f"took it, and here by {f'opening {here}' if here else 'another'}: this is an older copy that has gone on",
            "Bring back the newest state directory, or start the query with a new checkpoint directory and get what "
            "waits here; rows that only the newer one held stay there, and what both hold may come twice.",
        )


def check_checkpoint(name: str, journal: Journal, location: str, *, alone: bool = True) -> None:
    """See that the newest batch a query has planned lies in this journal.

    What lies below the journal's first row is left to the reader: those rows were committed.

    Args:
        name: Of the gateway.
        journal: Its journal.
        location: Of the query's checkpoint; "" for none. One on no disk of this machine can't be read here.
        alone: It is the only gateway that the query reads: a place under another name is its own from before.

    Raises:
        Fenced: TL-G04 for another journal, TL-G26 for an older copy that has gone on.
        GatewayError: TL-G06 for an older copy.
    """
    if not location:
        return
    places = [place for offset in Checkpoint(location).newest_offsets() for place in _places(offset)]
    ours = [place for place in places if place.journal == journal.journal_id]
    for place in ours or [place for place in places if place.gateway == name or (alone and len(places) == 1)]:
        check_journal(name, journal, place.journal)
        if place.offset > journal.end:
            raise GatewayError(
                "TL-G06",
                name,
                f"the checkpoint has come to offset {place.offset:,}, the journal ends at {journal.end:,}: an older "
                "copy",
                "Bring back the newest state directory, or start the query with a new checkpoint directory.",
            )
        check_history(name, journal, place.offset, place.incarnation)


def _places(offset: Any) -> list[_Place]:
    """The gateways' places in one source's offset; nothing for another kind of source (`towline.spark.offsets`)."""
    try:
        return [
            _Place(name, str(place["journal"]), int(place["offset"]), str(place.get("incarnation", "")))
            for name, place in offset["gateways"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
