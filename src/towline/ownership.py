"""Owner of a directory with state: that of another user is refused before anything is written there [I8].

One `towline run` as root in the directory of a service leaves files there that the service can't open any more.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

from towline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_owner"]


def check_owner(place: Path) -> None:
    """See that a directory, and all below it, is of this user; where none is yet there is nothing to see.

    A directory of root that lets this user write counts as his own: a mounted volume is one. Of a file only one that
    this user can't read is another's, since people leave notes; and ``lost+found`` is the file system's.

    Raises:
        ConfigError: TL-J23, it belongs to another user; nothing was written.
    """
    for path, owner in _foreign(place):
        theirs, ours = _name(owner), _name(os.geteuid())
        what = f"it belongs to the user {theirs}, and this is {ours}: what {ours} writes there {theirs} could not use"
        do = f"Run this as {theirs} (sudo -u), or hand it over: chown -R {ours.removeprefix('#')} {path}."
        raise ConfigError("TL-J23", str(path), f"{what} any more", do)


def _foreign(place: Path) -> Iterator[tuple[Path, int]]:
    """Path and owner of what is another user's, from the top down; symbolic links below are not followed."""
    ours = os.geteuid()
    try:
        owner = place.stat().st_uid
        if owner != ours and not (owner == 0 and os.access(place, os.W_OK | os.X_OK, effective_ids=True)):
            yield place, owner
        for entry in list(os.scandir(place)):
            if entry.is_dir(follow_symlinks=False) and entry.name != "lost+found":
                yield from _foreign(Path(entry.path))
            unread = entry.is_file(follow_symlinks=False) and not os.access(entry.path, os.R_OK, effective_ids=True)
            if unread and (owner := entry.stat().st_uid) != ours:
                yield Path(entry.path), owner
    except OSError:  # not there yet, removed meanwhile by whoever runs there, or told by the first who needs it
        return


def _name(user: int) -> str:
    """A user's name; ``#`` and his number where he has none, as sudo takes it."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"
