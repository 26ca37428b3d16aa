"""How far an outbox had come, kept in the checkpoint of a query that writes to it.

An older copy of a state directory lacks batches that Spark has committed, and would send once more what was delivered
since. So the newest answer of the outbox stands beside the query's own logs, durable before Spark commits the batch;
the gateway compares it before it connects, and the sink before each batch [I14]. A checkpoint on no disk of this
machine (an object store, HDFS) keeps nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from towline.checkpoint import Checkpoint
from towline.errors import Fenced, GatewayError
from towline.gateway.belonging import is_other

if TYPE_CHECKING:
    from towline.journal import Outbox

__all__ = ["FILE", "UNFIT", "OutboxPosition", "Remembered", "StoredBatch", "check_outbox", "position"]

#: Codes of the errors below: another try finds the same.
UNFIT: Final = frozenset({"TL-G35", "TL-G36", "TL-G37"})

#: Batches with rows that are remembered: more than whoever listens can be behind.
_KEPT: Final = 50
#: Beside Spark's own files in the checkpoint.
FILE: Final = "towline-outbox.json"
_DO: Final = (
    "Bring back the newest state directory. Or start the query with a new checkpoint directory (a bridge line: towline "
    "run --begin-again LINE): what only the newer outbox held is then not sent, what it had delivered may come again."
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
        since: The first batch that `brought` counts; None before there is one.
        brought: Batches with rows, and how many rows the outbox had of them and all before since then. An account holds
            it against what Spark says of them.
    """

    journal: str
    tip: int
    incarnation: str = ""
    since: int | None = None
    brought: tuple[tuple[int, int], ...] = ()

    def after(self, before: Remembered | None, batch: int, rows: int) -> Self:
        """With the rows of a batch, behind what was known before; of one that is brought again they count once."""
        if before is None or before.since is None:
            return replace(self, since=batch, brought=((batch, rows),))
        if not rows:
            return replace(self, since=before.since, brought=before.brought)
        earlier = [one for one in before.brought if one[0] < batch]
        total = (earlier[-1][1] if earlier else 0) + rows
        return replace(self, since=before.since, brought=(*earlier, (batch, total))[-_KEPT:])

    def brought_at(self, batch: int) -> tuple[int, int] | None:
        """Rows of all batches up to one since `since`, and of that one alone; None where that is not known."""
        if self.since is None or batch < self.since or (self.brought and self.brought[0][0] > batch):
            return None
        upto, before = (
            next((total for number, total in reversed(self.brought) if number <= last), 0)
            for last in (batch, batch - 1)
        )
        return upto, upto - before

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
            known = str(values["journal"]), int(values["tip"]), str(values["incarnation"])
            brought = tuple((int(number), int(total)) for number, total in values["brought"])
            since = values["since"]
            return cls(*known, None if since is None else int(since), brought)
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
