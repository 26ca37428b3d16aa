"""Owner of a directory with state: that of another user is refused before anything is written there [I8].

One `towline run` as root in the directory of a service leaves files there that the service can't open any more.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path
from typing import Final

from towline.errors import ConfigError

#: Root, and the uid of owners that are not known here: over NFS, or in a user namespace (proc(5), overflowuid).
_NOBODYS: Final = (0, 65_534)


def check_owner(place: Path) -> None:
    """See that a directory, and all below it, is of this user; where none is yet there is nothing to see.

    A directory of root that lets this user write counts as his own: a mounted volume is one; so does one whose owner
    this machine can't tell. Of a file only one that this user can't read is another's, since people leave notes; and
    ``lost+found`` is the file system's.

    Raises:
        ConfigError: TL-J23, it belongs to another user; nothing was written.
    """
    for path in (place, *place.rglob("*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not yet, or removed by whoever runs there
            owner = path.stat(follow_symlinks=path == place).st_uid
            if owner != os.geteuid() and not _usable(path, owner):
                theirs, ours = user_name(owner), user_name(os.geteuid())
                what = f"it belongs to the user {theirs}, and this is {ours}: what {ours} writes there {theirs} could"
                do = f"Run this as {theirs} (sudo -u), or hand it over: chown -R {ours.removeprefix('#')} {path}."
                raise ConfigError("TL-J23", str(path), f"{what} not use any more", do)


def _usable(path: Path, owner: int) -> bool:
    """Whether what is another user's is in nobody's way."""
    if not path.is_dir():
        return os.access(path, os.R_OK, effective_ids=True)
    lets_in = owner in _NOBODYS and os.access(path, os.W_OK | os.X_OK, effective_ids=True)
    return lets_in or path.name == "lost+found"


def user_name(user: int) -> str:
    """A user's name; ``#`` and his number where he has none, as sudo takes it."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"
