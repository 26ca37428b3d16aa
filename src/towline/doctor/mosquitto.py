"""What a broker's ``mosquitto.conf`` says of its promises, beyond single settings."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Final

from towline.mosquitto_conf import MosquittoConf, Settings

__all__ = ["access", "expiration_s", "number", "one_session", "unwritable"]

#: Units of persistent_client_expiration [mosquitto.conf(5)] in seconds; a month is Mosquitto's 30 days.
_UNITS: Final = {"h": 3600, "d": 86400, "w": 7 * 86400, "m": 30 * 86400, "y": 365 * 86400}


def number(conf: MosquittoConf | None, name: str) -> int:
    """A setting of the broker that is a number, as set or by default; 0 where there is no limit, or no file."""
    return 0 if conf is None else int(conf.value(name))


def expiration_s(conf: MosquittoConf) -> float | None:
    """Seconds after which a session that is away is forgotten; None for never."""
    found = re.fullmatch(r"([0-9]{1,9})([hdwmy])", conf.text("persistent_client_expiration").strip())
    return None if found is None else float(int(found[1]) * _UNITS[found[2]])


def access(conf: MosquittoConf, port: int) -> str:
    """What decides who may read and write at a port: ``acl_file /etc/acl``; empty for nothing, and so everybody."""
    names = ("plugin", "auth_plugin", "acl_file")
    found = [one for home in _homes(conf, port) for name in names if (one := home.get(name)) is not None]
    return f"{found[-1].name} {found[-1].value}" if found else ""


def one_session(conf: MosquittoConf, port: int) -> bool:
    """Whether all clients of a user have one session (``use_username_as_clientid``)."""
    return any(home.flag("use_username_as_clientid", otherwise=False) for home in _homes(conf, port))


def _homes(conf: MosquittoConf, port: int) -> list[Settings]:
    return [conf, *(one for one in conf.listeners if one.port == port)]


def unwritable(conf: MosquittoConf) -> str:
    """Why a broker can't save where its file says, as far as it is seen from here; empty for nothing.

    Mosquitto makes no directory, and goes on with an error in its log. It runs as the owner of a store that it has
    written, else as ``user`` of its file, which is ``mosquitto`` for a broker that root starts.
    """
    location = conf.text("persistence_location")
    place, store = Path(location), Path(location, conf.text("persistence_file", "mosquitto.db"))
    if not location:
        return ""  # its working directory, which is not known
    try:
        if not place.is_dir():
            return "is no directory" if place.exists() else "does not exist"
        directory, user = place.stat(), conf.text("user", "mosquitto" if place.stat().st_uid == 0 else "")
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            return "is on a file system that can only be read"
        owner = pwd.getpwuid(store.stat().st_uid) if store.exists() else pwd.getpwnam(user)
    except (OSError, KeyError):
        return ""  # not seen from here
    mine, group = directory.st_uid == owner.pw_uid, directory.st_gid in os.getgrouplist(owner.pw_name, owner.pw_gid)
    needed = 0o300 if mine else 0o030 if group else 0o003
    may = owner.pw_uid == 0 or directory.st_mode & needed == needed
    return "" if may else f"may not be written by the broker's user {owner.pw_name}"
