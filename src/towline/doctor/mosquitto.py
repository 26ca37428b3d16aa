"""Mosquitto's configuration file with its include files: the settings in force, and the defaults.

Follows ``config__read_file_core`` of Mosquitto 2.0 (src/conf.c). Unknown settings are kept, so that files of other
versions can be read. Listeners are not told apart: a rule of one of them counts as the broker's.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from towline import files
from towline.errors import ConfigError

#: Numbers that hold where a file says nothing [mosquitto.conf(5), Mosquitto 2.0], if they are not 0.
DEFAULTS: Final = {"autosave_interval": 1800, "max_inflight_messages": 20, "max_queued_messages": 1000}
#: Units of persistent_client_expiration [mosquitto.conf(5)] in seconds; a month is Mosquitto's 30 days.
_EXPIRATION_UNITS: Final = {"h": 3600, "d": 86400, "w": 7 * 86400, "m": 30 * 86400, "y": 365 * 86400}
_ACCESS_SETTINGS: Final = ("plugin", "auth_plugin", "acl_file")
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
#: Bytes of one file that are read at most; a configuration is text that somebody wrote.
_MAX_FILE_BYTES: Final = 8 << 20
#: What a setting is called, with ``plugin_opt_ANY``.
_SETTING_NAME: Final = re.compile(r"[a-z][A-Za-z0-9_.-]*")


class Setting(NamedTuple):
    """One setting and its place; the value may be a secret."""

    name: str
    value: str
    location: str

    def as_flag(self) -> bool:
        """Return the value as a boolean, parsed as ``conf__parse_bool`` does (TL-C156)."""
        if self.value.lower() not in _BOOLEANS:
            raise _conf_error(self.location, f'"{self.name}" must be true or false')
        return _BOOLEANS[self.value.lower()]


class MosquittoConf:
    """Configuration of a broker; a name may occur several times, and the last occurrence is in force."""

    def __init__(self, settings: list[Setting]) -> None:
        self.settings = settings

    def _get(self, name: str) -> Setting | None:
        return next((setting for setting in reversed(self.settings) if setting.name == name), None)

    def text(self, name: str, default: str = "") -> str:
        """Return a setting's value as written; the default if it is not set."""
        return setting.value if (setting := self._get(name)) else default

    def flag(self, name: str) -> bool:
        """Return a setting as a boolean (TL-C156); False if it is not set."""
        return setting.as_flag() if (setting := self._get(name)) else False

    def number(self, name: str) -> int:
        """Return a setting as a whole number (TL-C156); its value in `DEFAULTS` if it is not set."""
        setting = self._get(name)
        if setting and not re.fullmatch(r"-?[0-9]{1,18}", setting.value):
            raise _conf_error(setting.location, f'"{name}" must be a whole number')
        return int(setting.value) if setting else DEFAULTS.get(name, 0)

    @property
    def session_expiry_s(self) -> float | None:
        """Seconds after which the broker deletes a disconnected session; None for never."""
        match = re.fullmatch(r"([0-9]{1,9})([hdwmy])", self.text("persistent_client_expiration"))
        return None if match is None else float(int(match[1]) * _EXPIRATION_UNITS[match[2]])

    @property
    def access_control(self) -> str:
        """A setting that controls access, as ``acl_file /etc/acl``; "" if everybody has access."""
        settings = (f"{setting.name} {setting.value}" for setting in self.settings if setting.name in _ACCESS_SETTINGS)
        return next(settings, "")

    @property
    def shares_session(self) -> bool:
        """Whether all clients of a user may share one session (``use_username_as_clientid``)."""
        return any(setting.as_flag() for setting in self.settings if setting.name == "use_username_as_clientid")

    def persistence_problem(self) -> str:
        """Return the reason why the broker can't write its persistence file; "" if none, or if it is unknown.

        Mosquitto creates no directory, and goes on with an error in its log. It runs as the owner of an existing
        database, else as ``user`` of its file, which is ``mosquitto`` for a broker started by root.
        """
        location = self.text("persistence_location")
        directory, database = Path(location), Path(location, self.text("persistence_file", "mosquitto.db"))
        if not location:
            return ""  # its working directory, which is not known
        try:
            if not directory.is_dir():
                return "is no directory" if directory.exists() else "does not exist"
            status = directory.stat()
            user = self.text("user", "mosquitto" if status.st_uid == 0 else "")
            if os.statvfs(directory).f_flag & os.ST_RDONLY:
                return "is on a file system that can only be read"
            owner = pwd.getpwuid(database.stat().st_uid) if database.exists() else pwd.getpwnam(user)
        except (OSError, KeyError):
            return ""  # not seen from here
        groups = os.getgrouplist(owner.pw_name, owner.pw_gid)
        mode = 0o300 if status.st_uid == owner.pw_uid else 0o030 if status.st_gid in groups else 0o003
        may_write = owner.pw_uid == 0 or status.st_mode & mode == mode
        return "" if may_write else f"may not be written by the broker's user {owner.pw_name}"


def read_conf(file: Path) -> MosquittoConf:
    """Read a configuration file with all its include files.

    Raises:
        ConfigError: TL-C155 if a file can't be read, TL-C156 if one is damaged, with its line, or no mosquitto.conf.
    """
    settings: list[Setting] = []
    for setting in _read_settings(file):
        settings.append(setting)
        if setting.name == "include_dir":
            for included_file in _included_files(file.parent / setting.value):
                settings += _read_settings(included_file)  # only the main file may include [mosquitto.conf(5)]
    return MosquittoConf(settings)


def _read_settings(file: Path) -> Iterator[Setting]:
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise _unreadable_error(file, error) from error
    except UnicodeDecodeError as error:
        raise _conf_error(str(file), "it is not UTF-8 text") from error
    for number, line in enumerate(map(str.strip, text.split("\n")), start=1):
        if line and not line.startswith("#"):
            name, value = [*line.split(maxsplit=1), ""][:2]
            if not _SETTING_NAME.fullmatch(name) or value.startswith("= "):
                problem = f'it is no mosquitto.conf: "{name}" is no name of a setting, as Mosquitto writes NAME VALUE'
                raise _conf_error(f"{file}:{number}", problem)
            yield Setting(name, value, f"{file}:{number}")


def _included_files(directory: Path) -> list[Path]:
    """Return the files of ``include_dir`` in Mosquitto's order: A.conf, a.conf, B.conf."""
    try:
        conf_files = [file for file in directory.iterdir() if file.name.endswith(".conf")]
    except OSError as error:
        raise _unreadable_error(directory, error) from error
    return sorted(conf_files, key=lambda file: [(letter.lower(), letter) for letter in file.name])


def _unreadable_error(path: Path, error: OSError) -> ConfigError:
    problem = f"it can't be read ({files.os_error_text(error)})"
    return ConfigError("TL-C155", str(path), problem, "Name a path that this user may read, or run as one who may.")


def _conf_error(location: str, problem: str) -> ConfigError:
    return ConfigError("TL-C156", location, problem, "Correct the line; mosquitto.conf(5) describes it.")
