"""Identity of a state directory: whose journal and outbox it holds, and which MQTT sessions are its own.

Restored copies and swapped directories make an offset mean other rows. Each offset that was handed out names the
journal and the opening of it that wrote the row below, so each of them is recognised before anything is taken in or cut
[I14]. An older copy of an outbox would send once more what was delivered since: so its newest answer stands beside the
query's own logs, durable before Spark commits the batch; the gateway compares it before it connects, and the sink
before each batch.

A client id that is given up without a word (a member taken out of the file, a changed ``client_id``) leaves its session
at the broker, and nobody fetches what comes to it. So each id is written down in ``sessions.json``, for people: what a
gateway must not forget stands in its journal.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline import files
from towline.checkpoint import Checkpoint
from towline.errors import Fenced, GatewayError
from towline.gateway.endpoint import text_of

if TYPE_CHECKING:
    from towline.gateway.settings import GatewaySettings
    from towline.journal import Journal, Outbox

#: Beside Spark's own files in the checkpoint: where the query's outbox stood.
OUTBOX_FILE: Final = "towline-outbox.json"


class Extent(NamedTuple):
    """Where a journal stands: its oldest offset, and the one after its last row.

    ``incarnation`` is the opening that wrote the row below the offset that was asked about; "" where there is none.
    """

    journal: str
    first: int
    tip: int
    incarnation: str


class KnownOffset(NamedTuple):
    """An offset that was handed out, with the journal and the incarnation that it came with."""

    journal: str
    offset: int
    incarnation: str = ""

    @classmethod
    def read(cls, checkpoint: str, number: int = 0) -> Self | None:
        """What a checkpoint keeps of its query's outbox, by its number among several; None for nothing.

        Raises:
            GatewayError: TL-G37, the file is not one of ours.
        """
        try:
            text = Checkpoint(checkpoint).note(_outbox_file(number))
            if text is None:
                return None
            values = json.loads(text)
            return cls(str(values["journal"]), int(values["offset"]), str(values["incarnation"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{_outbox_file(number)} can't be read ({type(error).__name__})"
            do = "It tells which outbox the query writes to. If that is the newest one, remove the file."
            raise GatewayError("TL-G37", checkpoint, what, do) from error

    def keep(self, checkpoint: str, number: int = 0) -> None:
        """Keep it for `read`, durable; or TL-J20, and the batch must not be committed.

        A checkpoint on no disk of this machine (an object store, HDFS) keeps nothing.
        """
        Checkpoint(checkpoint).keep_note(_outbox_file(number), json.dumps(self._asdict()) + "\n")


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """What the outbox holds of a batch, as `towline.journal.outbox.Appended` says it, and where the outbox ends."""

    rows: int
    end: int
    whole: bool
    already: bool
    newest: int
    outbox: KnownOffset

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """From a gateway's answer."""
        return cls(**{**answer, "outbox": KnownOffset(*answer["outbox"])})


def is_other(incarnation: str, here: str, offset: int, first: int) -> bool:
    """Whether another opening of a journal wrote the row below an offset than the one that the offset came with.

    What was below an older offset than the journal's first was committed and is not compared; "" is that of an empty
    journal.
    """
    return incarnation != "" and offset >= first and here != incarnation


#: Of whose rows → codes: another journal, an older copy, an older copy that has gone on.
_CODES: Final = {"inbox": ("TL-G04", "TL-G06", "TL-G26"), "outbox": ("TL-G36", "TL-G35", "TL-G35")}
_DO: Final = {
    "inbox": "Bring back the newest state directory of that query. Or start the query with a new checkpoint directory "
    "and get what waits here: rows that only the other one held stay there, and what both hold may come twice.",
    "outbox": "Bring back the newest state directory. Or start the query with a new checkpoint directory (a bridge "
    "line: towline begin-again FILE LINE): what only the newer outbox held is then not sent, what it had delivered may "
    "come again.",
}
#: Codes of the errors about an inbox that is not the one of a checkpoint.
MISMATCHES: Final = frozenset(_CODES["inbox"])


def check_offset(name: str, known: KnownOffset, here: Extent, *, rows: str = "inbox") -> None:
    """See that the rows below an offset are those that were below it when it was handed out.

    Args:
        name: Of the gateway.
        known: The offset.
        here: Of its inbox or outbox, asked about that offset.
        rows: Which of them.

    Raises:
        Fenced: Another journal: TL-G04, TL-G36 of an outbox. A copy that has gone on: TL-G26.
        GatewayError: An older copy: TL-G06, TL-G35 of an outbox, of one that has gone on too.
    """
    store = "journal" if rows == "inbox" else rows
    another, older, gone_on = _CODES[rows]
    if known.journal != here.journal:
        what = f"the query's checkpoint belongs to {store} {known.journal}, this gateway has {store} {here.journal}"
        raise Fenced(another, name, what, _DO[rows])
    if known.offset > here.tip:
        what = f"the checkpoint has come to offset {known.offset:,}, the {store} ends at {here.tip:,}: an older copy"
        raise GatewayError(older, name, what, _DO[rows])
    if is_other(known.incarnation, here.incarnation, known.offset, here.first):
        writer = f"opening {here.incarnation}" if here.incarnation else "another"
        what = (
            f"the row below offset {known.offset:,} was written by opening {known.incarnation} of the {store} when the "
            f"query saw it, and here by {writer}: this is an older copy that has gone on"
        )
        raise (GatewayError if rows == "outbox" else Fenced)(gone_on, name, what, _DO[rows])


def extent(journal: Journal, offset: int | None = None) -> Extent:
    """Where a journal stands, and who wrote the row below an offset; its end by default."""
    tip = journal.end
    return Extent(journal.journal_id, journal.first, tip, journal.incarnation_of(tip if offset is None else offset))


def check_checkpoint(name: str, journal: Journal, location: str, *, alone: bool = True) -> None:
    """See that the newest batch a query has planned lies in this journal; raises as `check_offset`.

    What lies below the journal's first row is left to the reader: those rows were committed.

    Args:
        name: Of the gateway.
        journal: Its inbox.
        location: Of the query's checkpoint; "" for none. One on no disk of this machine can't be read here.
        alone: It is the only gateway that the query reads: a place under another name is its own from before.
    """
    if not location:
        return
    places = [place for offset in Checkpoint(location).newest_offsets() for place in _places(offset)]
    ours = [known for _, known in places if known.journal == journal.journal_id]
    for known in ours or [known for gateway, known in places if gateway == name or (alone and len(places) == 1)]:
        check_offset(name, known, extent(journal, known.offset))


def _places(offset: Any) -> list[tuple[str, KnownOffset]]:
    """The places by gateway in one source's offset; nothing for another kind of source (`towline.spark.offsets`)."""
    try:
        return [
            (name, KnownOffset(str(place["journal"]), int(place["offset"]), str(place.get("incarnation", ""))))
            for name, place in offset["gateways"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def check_outbox(name: str, outbox: Outbox, checkpoint: str, number: int = 0) -> None:
    """Compare an outbox with what a query's checkpoint keeps of it; raises as `check_offset` and `KnownOffset.read`."""
    known = KnownOffset.read(checkpoint, number)
    if known is not None:
        check_offset(name, known, extent(outbox, known.offset), rows="outbox")


def _outbox_file(number: int) -> str:
    return OUTBOX_FILE if number == 0 else OUTBOX_FILE.replace(".json", f"-{number}.json")


CLIENTS_FILE: Final = "sessions.json"
#: Directory in a line's state directory that has one for each member.
MEMBERS: Final = "members"


@dataclass(frozen=True, slots=True)
class ClientSession:
    """The session of a client id of a state directory.

    Attributes:
        broker: Where it may be, as last connected to.
        since: When its first connection stood, in seconds since 1970.
        ended: When it was ended at the broker; None while it may be there.
        how: ``drained`` when it was empty then, ``discarded`` when it was given up with what it held; "" before.
    """

    client_id: str
    broker: str = ""
    since: float = 0.0
    ended: float | None = None
    how: str = ""


def read_clients(state_dir: Path) -> tuple[ClientSession, ...]:
    """What is written down in a state directory; nothing where there is no such file, or another's."""
    try:
        values = json.loads(text_of(state_dir / CLIENTS_FILE) or "")["clients"]
        return tuple(ClientSession(**each) for each in values)
    except (ValueError, KeyError, TypeError):
        return ()


def note_client(state_dir: Path, client_id: str, broker: str) -> None:
    """Write down that a client id has a session at a broker, since when it has one stays; nothing on a full disk.

    Raises:
        JournalFailed: TL-J04, the disk that holds the journal too has failed.
    """
    there = _session(state_dir, client_id) or ClientSession(client_id, since=time.time())
    _write(state_dir, replace(there, broker=broker))


def end_client(state_dir: Path, client_id: str, how: str) -> None:
    """Write down that the session of a client id was ended, if one was noted; raises as `note_client`."""
    if there := _session(state_dir, client_id):
        _write(state_dir, replace(there, ended=time.time(), how=how))


def given_up(settings: GatewaySettings, session: Mapping[str, object]) -> str:
    """The client id that the settings give up, if the journal's session or a noted one is of it; "" for none."""
    client_id, share = settings.abandon_session, settings.share
    others = [share.id_of(name) for name in share.members] if share else []
    if not client_id or client_id in (settings.mqtt_client_id, *others):
        return ""
    known = session.get("client_id") == client_id or any(_session(each, client_id) for each in directories(settings))
    of_line = share is not None and f"{client_id}-".startswith(f"{share.client_id}-")
    return client_id if known or of_line else ""


def directories(settings: GatewaySettings) -> list[Path]:
    """Where it may be written down that a session of the line is there: of a member, beside the others and above."""
    own = settings.state_dir
    if settings.share is None:
        return [own]
    with contextlib.suppress(OSError):
        return [own, *(path for path in sorted(own.parent.iterdir()) if path.name != own.name), own.parent.parent]
    return [own, own.parent.parent]


def _session(state_dir: Path, client_id: str) -> ClientSession | None:
    """The session of a client id that may be at a broker."""
    return next((one for one in read_clients(state_dir) if one.client_id == client_id and one.ended is None), None)


def _write(state_dir: Path, session: ClientSession) -> None:
    before = read_clients(state_dir)
    if session in before:
        return
    others = [each for each in before if each.client_id != session.client_id]
    text = json.dumps({"clients": [asdict(each) for each in (*others, session)]}, indent=1)
    try:
        files.replace_durably(state_dir / CLIENTS_FILE, text + "\n")
    except OSError as error:
        from towline.journal.disk import NO_ROOM, failed  # noqa: PLC0415 - workers need none

        if error.errno not in NO_ROOM:  # which keeps no gateway from going on [I7]
            raise failed(state_dir, f"writing {CLIENTS_FILE}", error) from error
