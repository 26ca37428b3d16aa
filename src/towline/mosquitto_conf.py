"""Parser of a Mosquitto configuration: its settings, each with file and line, and the defaults.

Follows ``config__read_file_core`` of Mosquitto 2.0 (src/conf.c). Unknown settings are kept, so that files of other
versions can be read.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from towline import files
from towline.errors import ConfigError

#: Numbers that hold where a file says nothing [mosquitto.conf(5), Mosquitto 2.0], if they are not 0.
DEFAULTS: Final[Mapping[str, int]] = {
    "autosave_interval": 1800,
    "max_inflight_messages": 20,
    "max_queued_messages": 1000,
}
_PORT: Final = 1883
#: Units of persistent_client_expiration [mosquitto.conf(5)] in seconds; a month is Mosquitto's 30 days.
_EXPIRATION_UNITS: Final = {"h": 3600, "d": 86400, "w": 7 * 86400, "m": 30 * 86400, "y": 365 * 86400}
#: Settings that control access; a listener's with ``per_listener_settings true``, else the broker's.
_ACCESS_SETTINGS: Final = ("plugin", "auth_plugin", "acl_file")
_NAMES: Final = """
    acl_file address addresses allow_anonymous auth_plugin autosave_interval autosave_on_changes bind_address cafile
    capath certfile clientid connection include_dir keyfile listener local_password log_dest log_type
    max_inflight_messages max_queued_bytes max_queued_messages memory_limit message_size_limit password password_file
    per_listener_settings persistence persistence_location persistent_client_expiration pid_file plugin port protocol
    psk_file psk_hint remote_password remote_username require_certificate sys_interval topic use_username_as_clientid
    user username
"""
#: Names by which a file is recognized as Mosquitto's; each has a value.
_KNOWN_NAMES: Final = frozenset(_NAMES.split())
_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}
#: Bytes of one file at most; a configuration is text that somebody wrote.
_MAX_FILE_BYTES: Final = 8 << 20
#: What a setting is called, with ``plugin_opt_ANY``.
_SETTING_NAME: Final = re.compile(r"[a-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a configuration, with its file and line.

    Attributes:
        value: Rest of the line; it may be a secret, so ``repr`` does not show it.
        line: Line number, from 1.
    """

    name: str
    value: str = field(repr=False)
    file: Path
    line: int

    def error(self, problem: str) -> ConfigError:
        """Return the error TL-C156 of this line."""
        return _conf_error(f"{self.file}:{self.line}", problem)


@dataclass(slots=True)
class ConfSection:
    """Settings of the broker or of a listener, in file order; a name may occur several times.

    Attributes:
        port: Port of the listener, 0 for a Unix socket.
    """

    port: int = _PORT
    settings: list[Setting] = field(default_factory=list)

    def get(self, name: str) -> Setting | None:
        """Return the occurrence of a setting that is in force, the last one; None if it is not set."""
        return next((setting for setting in reversed(self.settings) if setting.name == name), None)

    def text(self, name: str, default: str = "") -> str:
        """Return a setting's value as written; the default if it is not set."""
        setting = self.get(name)
        return default if setting is None else setting.value

    def flag(self, name: str) -> bool:
        """Return a setting as a boolean, parsed as ``conf__parse_bool`` does (TL-C156); False if it is not set."""
        setting = self.get(name)
        if setting and setting.value.lower() not in _BOOLEANS:
            raise setting.error(f'"{name}" must be true or false')
        return setting is not None and _BOOLEANS[setting.value.lower()]

    def number(self, name: str) -> int:
        """Return a setting as a whole number (TL-C156); its value in `DEFAULTS` if it is not set."""
        setting = self.get(name)
        if setting and not re.fullmatch(r"-?[0-9]{1,18}", setting.value):
            raise setting.error(f'"{name}" must be a whole number')
        return int(setting.value) if setting else DEFAULTS.get(name, 0)


@dataclass(slots=True)
class MosquittoConf(ConfSection):
    """A whole Mosquitto configuration; its own section is the broker's, with the settings of all bridge connections.

    Attributes:
        listeners: Listeners of the broker; the first is the one without a line.
    """

    listeners: list[ConfSection] = field(default_factory=lambda: [ConfSection()])

    @property
    def session_expiry_s(self) -> float | None:
        """Seconds after which the broker deletes a disconnected session; None for never."""
        match = re.fullmatch(r"([0-9]{1,9})([hdwmy])", self.text("persistent_client_expiration").strip())
        return None if match is None else float(int(match[1]) * _EXPIRATION_UNITS[match[2]])

    def access_control(self, port: int) -> str:
        """Return the setting that controls access at a port, as ``acl_file /etc/acl``; "" if everybody has access."""
        settings = [section.get(name) for section in self._sections_of_port(port) for name in _ACCESS_SETTINGS]
        return next((f"{setting.name} {setting.value}" for setting in reversed(settings) if setting), "")

    def shares_session(self, port: int) -> bool:
        """Return True if all clients of a user at this port share one session (``use_username_as_clientid``)."""
        return any(section.flag("use_username_as_clientid") for section in self._sections_of_port(port))

    def _sections_of_port(self, port: int) -> list[ConfSection]:
        return [self, *(listener for listener in self.listeners if listener.port == port)]

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
    conf = MosquittoConf()
    settings = list(_read_settings(file))
    if settings and _KNOWN_NAMES.isdisjoint(setting.name for setting in settings):
        raise _conf_error(str(file), f'it is no mosquitto.conf: Mosquitto has no setting "{settings[0].name}"')
    _add_settings(conf, settings)
    return conf


def _add_settings(conf: MosquittoConf, settings: list[Setting], *, included: bool = False) -> None:
    """Add the settings of one file; each file starts with the listener that has no line."""
    listener = conf.listeners[0]
    for setting in settings:
        if setting.name == "include_dir":
            for file in () if included else _included_files(setting):  # only the main file may [mosquitto.conf(5)]
                _add_settings(conf, list(_read_settings(file)), included=True)
        elif setting.name == "listener":
            conf.listeners.append(listener := ConfSection(_port(setting)))
        elif setting.name == "port":
            conf.listeners[0].port = _port(setting)
        elif setting.name == "use_username_as_clientid" or (
            setting.name in _ACCESS_SETTINGS and conf.flag("per_listener_settings")
        ):
            listener.settings.append(setting)
        else:
            conf.settings.append(setting)


def _port(setting: Setting) -> int:
    """Return the port of ``listener PORT [ADDRESS | SOCKET]`` or ``port PORT``; 0 for a socket."""
    text, _, address = setting.value.partition(" ")
    if text == "0" and address.strip().startswith("/"):
        return 0
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 1 << 16:
        raise setting.error(f'"{setting.name}" needs a port from 1 to 65,535')
    return int(text)


def _read_settings(file: Path) -> Iterator[Setting]:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        remedy = "Name a file that this user may read, or run as one who may."
        raise ConfigError("TL-C155", str(file), f"it can't be read ({files.os_error_text(error)})", remedy) from error
    if len(data) > _MAX_FILE_BYTES or b"\0" in data:
        raise _conf_error(str(file), "it is no text file")
    for number, raw_line in enumerate(data.split(b"\n"), start=1):
        if not raw_line.strip() or raw_line.lstrip().startswith(b"#"):
            continue
        try:
            line = raw_line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise _conf_error(f"{file}:{number}", "it is not UTF-8 text") from error
        name, value = [*line.split(maxsplit=1), "", ""][:2]
        is_known = name in _KNOWN_NAMES
        if not _SETTING_NAME.fullmatch(name) or value.startswith("= ") or (value[:1] in ("=", "{") and not is_known):
            problem = f'it is no mosquitto.conf: "{name}" is no name of a setting, as Mosquitto writes NAME VALUE'
            raise _conf_error(f"{file}:{number}", problem)
        if not value and is_known:
            raise _conf_error(f"{file}:{number}", f'"{name}" has no value')
        yield Setting(name, value, file, number)


def _included_files(setting: Setting) -> list[Path]:
    """Return the files of ``include_dir`` in Mosquitto's order: A.conf, a.conf, B.conf."""
    directory = setting.file.parent / setting.value
    try:
        conf_files = [file for file in directory.iterdir() if file.name.endswith(".conf")]
    except OSError as error:
        remedy = "Correct the directory, or run as a user who may read it."
        problem = f"include_dir {setting.value} can't be read ({files.os_error_text(error)})"
        raise ConfigError("TL-C155", f"{setting.file}:{setting.line}", problem, remedy) from error
    return sorted(conf_files, key=lambda file: [(letter.lower(), letter) for letter in file.name])


def _conf_error(location: str, problem: str) -> ConfigError:
    return ConfigError("TL-C156", location, problem, "Correct the line; mosquitto.conf(5) describes it.")
