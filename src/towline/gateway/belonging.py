"""Do a query's checkpoint and a gateway's journal, or its outbox, belong together?

Restored copies and swapped directories make an offset mean other rows. Each offset that was handed out names the
journal and the opening of it that wrote the row below (`Journal.incarnation_of`), so that each is recognised, before
anything is taken in or cut [I14].

An older copy of an outbox lacks batches that Spark has committed, and would send once more what was delivered since.
So its newest answer stands beside the query's own logs, durable before Spark commits the batch; the gateway compares
it before it connects, and the sink before each batch. A checkpoint on no disk of this machine (an object store, HDFS)
keeps nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline.checkpoint import Checkpoint
from towline.errors import Fenced, GatewayError

if TYPE_CHECKING:
    from towline.journal import Journal, Outbox

__all__ = [
    "FILE",
    "MISMATCHES",
    "OutboxPosition",
    "Remembered",
    "StoredBatch",
    "check_checkpoint",
    "check_history",
    "check_journal",
    "check_outbox",
    "is_other",
    "position",
]

#: Codes of the errors below.
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


#: Beside Spark's own files in the checkpoint.
FILE: Final = "towline-outbox.json"
_DO: Final = (
    "Bring back the newest state directory. Or start the query with a new checkpoint directory (a bridge line: towline "
    "begin-again FILE LINE): what only the newer outbox held is then not sent, what it had delivered may come again."
)


class OutboxPosition(NamedTuple):
    """Where an outbox stands.

    Attributes:
        journal: Its id.
        first: The oldest offset that is still there.
        tip: The offset after its last row.
        incarnation: The opening that wrote the row below the offset that was asked about; "" where there is none.
    """

    journal: str
    first: int
    tip: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """What the outbox holds of a batch.

    Attributes:
        rows: So many of its rows, from the first on, durable.
        end: Offset in the outbox after the last of them.
        whole: Nothing more is expected of it.
        already: They were there before this call.
        newest: Number of the writer's newest batch; -1 when it has none.
        journal: Id of the outbox's journal.
        first: The oldest offset that is still there.
        tip: The offset after its last row.
        incarnation: The opening of the journal that wrote that row [I14].
    """

    rows: int
    end: int
    whole: bool
    already: bool
    newest: int
    journal: str = ""
    first: int = 0
    tip: int = 0
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a query knows of its outbox.

    Attributes:
        journal: Id of the outbox's journal.
        tip: The offset after its last row when it answered.
        incarnation: The opening that had written that row; "" where there was none.
    """

    journal: str
    tip: int
    incarnation: str = ""

    @classmethod
    def read(cls, checkpoint: str, number: int = 0) -> Self | None:
        """What is kept in a checkpoint; None for nothing.

        Args:
            checkpoint: Its location; "" for none.
            number: Of the outbox, where the query writes to several.

        Raises:
            GatewayError: TL-G37, the file is not one of ours.
        """
        try:
            text = Checkpoint(checkpoint).note(_file(number))
            if text is None:
                return None
            values = json.loads(text)
            return cls(str(values["journal"]), int(values["tip"]), str(values["incarnation"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{_file(number)} can't be read ({type(error).__name__})"
            do = "It tells which outbox the query writes to. If that is the newest one, remove the file."
            raise GatewayError("TL-G37", checkpoint, what, do) from error

    def keep(self, checkpoint: str, number: int = 0) -> None:
        """Keep it, durable; nothing to do where the checkpoint is on no disk of this machine.

        Raises:
            JournalError: TL-J20, the disk did not take it: the batch must not be committed.
        """
        Checkpoint(checkpoint).keep_note(_file(number), json.dumps(asdict(self)) + "\n")

    def check(self, name: str, here: OutboxPosition) -> None:
        """See that an outbox is the one that is remembered, and no older copy of it.

        Args:
            name: Of the gateway.
            here: Asked about `tip`.

        Raises:
            Fenced: TL-G36 another outbox.
            GatewayError: TL-G35 an older copy.
        """
        if here.journal != self.journal:
            what = f"the query's checkpoint belongs to outbox {self.journal}, this gateway has outbox {here.journal}"
            raise Fenced("TL-G36", name, what, _DO)
        if here.tip < self.tip:
            what = (
                f"the outbox had {self.tip:,} messages when the query wrote last, this one {here.tip:,}: an older copy"
            )
            raise GatewayError("TL-G35", name, what, _DO)
        if is_other(self.incarnation, here.incarnation, self.tip, here.first):
            what = (
                f"message {self.tip - 1:,} of the outbox came in opening {self.incarnation} when the query brought it, "
                f"here in {here.incarnation or 'another'}: an older copy that has gone on"
            )
            raise GatewayError("TL-G35", name, what, _DO)


def position(outbox: Outbox, offset: int | None = None) -> OutboxPosition:
    """Where an outbox stands, and who wrote the row below an offset; its end by default."""
    journal = outbox.journal
    tip = journal.end
    return OutboxPosition(
        journal.journal_id, journal.first, tip, journal.incarnation_of(tip if offset is None else offset)
    )


def _file(number: int) -> str:
    """Where it stands of an outbox among several."""
    return FILE if number == 0 else FILE.replace(".json", f"-{number}.json")


def check_outbox(name: str, outbox: Outbox, checkpoint: str, number: int = 0) -> None:
    """Compare an outbox with what a query's checkpoint remembers, before anything of it is sent.

    Raises:
        GatewayError: TL-G35 an older copy, TL-G37 what is remembered can't be read.
        Fenced: TL-G36 another outbox.
    """
    remembered = Remembered.read(checkpoint, number)
    if remembered is not None:
        remembered.check(name, position(outbox, remembered.tip))
