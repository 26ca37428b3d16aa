"""Identity of a state directory: its journal and outbox, and its MQTT sessions.

In a restored copy or a swapped directory an offset means other rows. So each issued offset names the journal and the
incarnation that wrote the row below it, and a mismatch is detected before rows are received or cut [I14]. An older copy
of an outbox would send delivered messages again. So the query's checkpoint stores the outbox's newest offset before
Spark commits the batch; the gateway compares it before it connects, and the sink before each batch.

A client id that is no longer used (a member removed from the file, a changed ``client_id``) leaves its session at the
broker, which goes on queueing messages. So ``sessions.json`` lists each client id, for people: the gateway's own state
is in its journal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline import files
from towline.checkpoint import Checkpoint
from towline.errors import GatewayError, ReaderFenced
from towline.gateway.endpoint import read_state_file

if TYPE_CHECKING:
    from towline.gateway.settings import GatewaySettings
    from towline.journal import Journal, Outbox

#: In the checkpoint, beside Spark's own files: the end of the query's outbox.
OUTBOX_FILE: Final = "towline-outbox.json"


class Extent(NamedTuple):
    """Offset range of a journal: its first offset, and the offset after its last row.

    ``incarnation`` is the opening that wrote the row below the requested offset; "" if there is none.
    """

    journal: str
    first_offset: int
    end_offset: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """Position in the journal or the outbox of one gateway.

    Attributes:
        gateway: Name of the gateway; "" for an outbox, since a query writes to a single one.
        journal: Id of its journal: the same offset in another journal is another row.
        offset: Offset after the last row before this position.
        incarnation: Opening of the journal that wrote the row below `offset` [I14]; "" if there is none, or unknown.
    """

    gateway: str
    journal: str
    offset: int
    incarnation: str = ""

    @classmethod
    def parse(cls, gateway: str, fields: Mapping[str, Any]) -> Self:
        """Parse the JSON object of a position.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: It is none.
        """
        return cls(gateway, str(fields["journal"]), int(fields["offset"]), str(fields.get("incarnation", "")))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the position, keys in their fixed order, without the gateway's name."""
        incarnation = {"incarnation": self.incarnation} if self.incarnation else {}
        return {"journal": self.journal, "offset": self.offset, **incarnation}

    @classmethod
    def read_outbox_note(cls, checkpoint: str) -> Self | None:
        """Read the outbox offset from a checkpoint; None if there is none.

        Raises:
            GatewayError: TL-G37, the file is invalid.
        """
        try:
            text = Checkpoint(checkpoint).read_note(OUTBOX_FILE)
            if text is None:
                return None
            return cls.parse("", json.loads(text))
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{OUTBOX_FILE} can't be read ({type(error).__name__})"
            remedy = "It identifies the query's outbox. If that outbox is the newest one, remove the file."
            raise GatewayError("TL-G37", checkpoint, problem, remedy) from error

    def write_outbox_note(self, checkpoint: str) -> None:
        """Store the offset durably in a checkpoint; raises TL-J20, and then the batch must not be committed.

        A checkpoint that is not on a local disk (an object store, HDFS) stores nothing.
        """
        Checkpoint(checkpoint).write_note(OUTBOX_FILE, json.dumps(self.to_json()) + "\n")


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Rows of a batch that the outbox holds, as `towline.journal.outbox.BatchStatus`, and the end of the outbox."""

    rows: int
    end: int
    whole: bool
    already: bool
    newest: int
    outbox: JournalPosition

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Self:
        """Parse a gateway's answer."""
        return cls(**{**answer, "outbox": JournalPosition.parse("", answer["outbox"])})


#: Kind of journal → codes of: another journal, an older copy, an older copy that was written to since.
_CODES_BY_KIND: Final = {"journal": ("TL-G04", "TL-G06", "TL-G26"), "outbox": ("TL-G36", "TL-G35", "TL-G35")}
_REMEDIES: Final = {
    "journal": "Bring back the newest state directory of that query. Or start the query with a new checkpoint "
    "directory and get what waits here: rows that only the other one held stay there, and what both hold may come "
    "twice.",
    "outbox": "Bring back the newest state directory. Or start the query with a new checkpoint directory (a bridge "
    "line: towline reset FILE LINE): what only the newer outbox held is then not sent, what it had delivered may "
    "come again.",
}
#: Codes of errors about an inbox that does not match a checkpoint.
INBOX_MISMATCH_CODES: Final = frozenset(_CODES_BY_KIND["journal"])


def check_offset(gateway: str, position: JournalPosition, extent: Extent, *, kind: str = "journal") -> None:
    """Check that the rows below an offset are the same as when the offset was issued.

    Args:
        gateway: Name of the gateway.
        position: The issued offset.
        extent: Extent of its inbox or outbox, for that offset.
        kind: ``journal`` for the inbox, or ``outbox``.

    Raises:
        ReaderFenced: Another journal: TL-G04, TL-G36 of an outbox. A copy that was written to since: TL-G26.
        GatewayError: An older copy: TL-G06, TL-G35 of an outbox, also of one that was written to since.
    """
    other_code, older_code, diverged_code = _CODES_BY_KIND[kind]
    if position.journal != extent.journal:
        problem = (
            f"the query's checkpoint belongs to {kind} {position.journal}, this gateway has {kind} {extent.journal}"
        )
        raise ReaderFenced(other_code, gateway, problem, _REMEDIES[kind])
    if position.offset > extent.end_offset:
        problem = (
            f"the checkpoint is at offset {position.offset:,}, the {kind} ends at {extent.end_offset:,}: an older copy"
        )
        raise GatewayError(older_code, gateway, problem, _REMEDIES[kind])
    # Rows below an offset before the journal's first one were committed and are not compared; "" is an empty journal.
    is_comparable = position.incarnation != "" and position.offset >= extent.first_offset
    if is_comparable and extent.incarnation != position.incarnation:
        writer = f"opening {extent.incarnation}" if extent.incarnation else "another"
        row = f"the row below offset {position.offset:,} was written by opening {position.incarnation} of the {kind}"
        problem = f"{row} when the query saw it, and here by {writer}: this is an older copy that was written to since"
        raise (GatewayError if kind == "outbox" else ReaderFenced)(diverged_code, gateway, problem, _REMEDIES[kind])


def journal_extent(journal: Journal, offset: int) -> Extent:
    """Return the offset range of a journal, and the incarnation of the row below `offset`."""
    end, incarnation = journal.end, journal.incarnation_of(offset)  # then the first offset: a cut may come in between
    return Extent(journal.journal_id, journal.first_offset, end, incarnation)


def check_checkpoint(gateway: str, journal: Journal, location: str, *, is_only_gateway: bool = True) -> None:
    """Check that the newest batch that a query has planned lies in this journal; raises as `check_offset`.

    Rows below the journal's first one were committed: the reader checks them.

    Args:
        gateway: Name of the gateway.
        journal: Its inbox.
        location: Location of the query's checkpoint; "" for none. One that is not on a local disk can't be read here.
        is_only_gateway: The query reads no other gateway: an offset under another name is an earlier one of this
            gateway.
    """
    if not location:
        return
    positions = [position for offset in Checkpoint(location).newest_offsets() for position in parse_positions(offset)]
    for position in own_positions(positions, gateway, journal.journal_id, is_only_gateway=is_only_gateway):
        check_offset(gateway, position, journal_extent(journal, position.offset))


def parse_positions(source_offset: Any) -> tuple[JournalPosition, ...]:
    """Return the position at each gateway in an offset of ``format("mqtt")``; empty for another source's offset."""
    try:
        return tuple(JournalPosition.parse(str(name), fields) for name, fields in source_offset["gateways"].items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()


def own_positions(
    positions: Sequence[JournalPosition], gateway: str, journal: str, *, is_only_gateway: bool = False
) -> Sequence[JournalPosition]:
    """Return the positions of a gateway: by the id of its journal, else by its name, then in another journal.

    For the only gateway of a query it is the only position, whatever its name.
    """
    in_journal = [position for position in positions if position.journal == journal]
    under_name = [position for position in positions if position.gateway == gateway]
    return in_journal or under_name or (positions if is_only_gateway and len(positions) == 1 else [])


def check_outbox(gateway: str, outbox: Outbox, checkpoint: str) -> None:
    """Compare an outbox with the offset in a query's checkpoint; raises as `check_offset` and `read_outbox_note`."""
    position = JournalPosition.read_outbox_note(checkpoint)
    if position is not None:
        check_offset(gateway, position, journal_extent(outbox, position.offset), kind="outbox")


SESSIONS_FILE: Final = "sessions.json"
#: Directory in a line's state directory with the state directories of its members.
MEMBERS_DIR: Final = "members"


@dataclass(frozen=True, slots=True)
class ClientSession:
    """MQTT session of a client id, as recorded in a state directory.

    Attributes:
        broker: Broker of the last connection.
        since: Time of the first connection, in seconds since 1970.
        ended: Time when the session was ended at the broker; None while it may exist.
        how: ``drained`` if it was empty then, ``discarded`` if its messages were dropped; "" before.
    """

    client_id: str
    broker: str = ""
    since: float = 0.0
    ended: float | None = None
    how: str = ""


def read_client_sessions(state_dir: Path) -> tuple[ClientSession, ...]:
    """Return the recorded sessions of a state directory; empty if the file is missing or invalid."""
    try:
        values = json.loads(read_state_file(state_dir / SESSIONS_FILE) or "")["clients"]
        return tuple(ClientSession(**fields) for fields in values)
    except (ValueError, KeyError, TypeError):
        return ()


def record_client_session(state_dir: Path, client_id: str, broker: str) -> None:
    """Record that a client id has a session at a broker; `since` stays the first time, and a full disk is ignored.

    Raises:
        JournalFailed: TL-J04, the disk of the journal has failed.
    """
    client_session = _open_session(state_dir, client_id) or ClientSession(client_id, since=time.time())
    _write_session(state_dir, replace(client_session, broker=broker))


def record_session_end(state_dir: Path, client_id: str, outcome: str) -> None:
    """Record that the session of a client id was ended, if it was recorded; raises as `record_client_session`."""
    if client_session := _open_session(state_dir, client_id):
        _write_session(state_dir, replace(client_session, ended=time.time(), how=outcome))


def abandoned_client_id(settings: GatewaySettings, journal_session: Mapping[str, object]) -> str:
    """Return the client id to abandon by the settings, if the journal or a record has its session; "" for none."""
    client_id, share = settings.abandon_session, settings.share
    member_ids = [share.member_client_id(name) for name in share.members] if share else []
    if not client_id or client_id in (settings.mqtt_client_id, *member_ids):
        return ""
    directories = session_directories(settings)
    is_recorded = journal_session.get("client_id") == client_id or any(_open_session(d, client_id) for d in directories)
    is_of_line = share is not None and f"{client_id}-".startswith(f"{share.client_id}-")
    return client_id if is_recorded or is_of_line else ""


def session_directories(settings: GatewaySettings) -> list[Path]:
    """Return the directories that record sessions of the line: its own, and those of its members."""
    line_dir = settings.state_dir.parent.parent if settings.share else settings.state_dir
    return [path.parent for pattern in ("", f"{MEMBERS_DIR}/*/") for path in line_dir.glob(pattern + SESSIONS_FILE)]


def _open_session(state_dir: Path, client_id: str) -> ClientSession | None:
    """Return the recorded session of a client id that is not ended."""
    sessions = read_client_sessions(state_dir)
    return next((session for session in sessions if session.client_id == client_id and session.ended is None), None)


def _write_session(state_dir: Path, session: ClientSession) -> None:
    previous_sessions = read_client_sessions(state_dir)
    if session in previous_sessions:
        return
    other_sessions = [entry for entry in previous_sessions if entry.client_id != session.client_id]
    text = json.dumps({"clients": [asdict(entry) for entry in (*other_sessions, session)]}, indent=1)
    try:
        files.replace_durably(state_dir / SESSIONS_FILE, text + "\n")
    except OSError as error:
        from towline.journal.disk import NO_ROOM, journal_failed  # noqa: PLC0415 - workers need none

        if error.errno not in NO_ROOM:  # a full disk does not stop a gateway [I7]
            raise journal_failed(state_dir, f"writing {SESSIONS_FILE}", error) from error
