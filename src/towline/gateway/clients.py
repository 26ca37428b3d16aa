"""The MQTT client ids of a state directory: which had a session at a broker, and whether that was ended.

A broker keeps a session, with its subscriptions and all that waits, until its client comes back or its time is over. A
client id that is given up without a word (a member taken out of the file, a changed ``client_id``) leaves its session
behind: nobody fetches what comes to it. So each id is written down when its first connection stands, and when its
session was ended; `towline status` names what is left.

The file is for people: what a gateway must not forget stands in its journal.
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline import files
from towline.errors import JournalFailed
from towline.gateway.endpoint import text_of

if TYPE_CHECKING:
    from towline.gateway.settings import GatewaySettings

__all__ = [
    "CLIENTS_FILE",
    "MEMBERS",
    "ClientSession",
    "directories",
    "end_client",
    "given_up",
    "note_client",
    "read_clients",
]

CLIENTS_FILE: Final = "sessions.json"
#: A full disk keeps no gateway from going on [I7]; any other failure is one of the disk that holds the journal [I6].
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Directory in a line's state directory that has one for each member.
MEMBERS: Final = "members"


@dataclass(frozen=True, slots=True)
class ClientSession:
    """One client id of a state directory.

    Attributes:
        client_id: As in CONNECT.
        brokers: Where its session may be, as last connected to.
        since: When its first connection stood, in seconds since 1970.
        ended: When its session was ended at the broker; None while it may be there.
        how: ``drained`` when it was empty then, ``discarded`` when it was given up with what it held; "" before.
    """

    client_id: str
    brokers: tuple[str, ...] = ()
    since: float = 0.0
    ended: float | None = None
    how: str = ""


def read_clients(state_dir: Path) -> tuple[ClientSession, ...]:
    """What is written down in a state directory; nothing where that is not one of our files."""
    try:
        values = json.loads(text_of(state_dir / CLIENTS_FILE) or "")["clients"]
        return tuple(ClientSession(**{**each, "brokers": tuple(each["brokers"])}) for each in values)
    except (ValueError, KeyError, TypeError):
        return ()


def note_client(state_dir: Path, client_id: str, broker: str) -> None:
    """Write down that a client id has a session at a broker; since when it has one stays.

    Raises:
        OSError: The disk is full.
        JournalFailed: TL-J04, it does not work.
    """
    clients = read_clients(state_dir)
    before = next((each for each in clients if _is_there(each, client_id)), None)
    now = replace(before or ClientSession(client_id, since=time.time()), brokers=(broker,))
    if now != before:
        _write(state_dir, [*(each for each in clients if each.client_id != client_id), now])


def end_client(state_dir: Path, client_id: str, how: str) -> None:
    """Write down that the session of a client id was ended, if it was written down that there is one.

    Raises:
        OSError: The disk is full.
        JournalFailed: TL-J04, it does not work.
    """
    clients, now = read_clients(state_dir), time.time()
    ended = [replace(each, ended=now, how=how) if _is_there(each, client_id) else each for each in clients]
    if ended != [*clients]:
        _write(state_dir, ended)


def given_up(settings: GatewaySettings, session: Mapping[str, object]) -> str:
    """The client id that the settings give up, if a session of it may be there and is this line's; "" for none.

    Args:
        settings: Of the gateway.
        session: The one that its journal knows.
    """
    client_id, share = settings.abandon_session, settings.share
    others = [share.id_of(name) for name in share.members] if share else []
    if not client_id or client_id in (settings.mqtt_client_id, *others):
        return ""
    written = (each for directory in directories(settings) for each in read_clients(directory))
    known = session.get("client_id") == client_id or any(_is_there(each, client_id) for each in written)
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


def _is_there(session: ClientSession, client_id: str) -> bool:
    return session.client_id == client_id and session.ended is None


def _write(state_dir: Path, clients: Iterable[ClientSession]) -> None:
    text = json.dumps({"clients": [asdict(each) for each in clients]}, indent=1)
    try:
        files.replace_durably(state_dir / CLIENTS_FILE, text + "\n")
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        what = f"writing {CLIENTS_FILE} failed ({files.why(error)})"
        raise JournalFailed("TL-J04", str(state_dir), what, "Check the disk and start again.") from error
