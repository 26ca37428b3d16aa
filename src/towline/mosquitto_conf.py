"""Parser of a Mosquitto configuration: sections with their settings, each with file and line, and the defaults.

Follows ``config__read_file_core`` of Mosquitto 2.0 (src/conf.c). The name of a setting decides its section: the broker,
the last ``listener`` or the last ``connection``; both stay open side by side, and each file starts with neither.
Unknown settings are kept, so that files of other versions can be read.
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

#: Settings by their present names.
_SETTING_ALIASES: Final = {"addresses": "address", "password": "remote_password", "username": "remote_username"}

#: Setting → what it belongs to, as far as it matters to which; those of either to a listener with
#: ``per_listener_settings true``, else to the broker. All that begin with ``bridge_`` are a connection's.
_SETTING_SCOPES: Final[Mapping[str, str]] = {
    name: home
    for home, names in {
        "connection": """address addresses cleansession clientid idle_timeout keepalive_interval local_cleansession
            local_clientid local_password local_username notification_topic notifications
            notifications_local_only password remote_clientid remote_password remote_username restart_timeout
            round_robin start_type threshold topic try_private username""",
        "listener": "cafile capath certfile keyfile protocol psk_hint require_certificate use_username_as_clientid",
        "either": "acl_file allow_anonymous auth_plugin password_file plugin psk_file",
        "broker": """autosave_interval autosave_on_changes bind_address connection include_dir listener log_dest
            log_type max_inflight_messages max_queued_bytes max_queued_messages memory_limit message_size_limit
            persistence pid_file port sys_interval user""",
    }.items()
    for name in names.split()
}

#: Settings of the listener that has no line, wherever they stand.
_DEFAULT_LISTENER_SETTINGS: Final = ("port", "bind_address")

_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}

#: Bytes of one file at most; a configuration is text that somebody wrote.
_MAX_FILE_BYTES: Final = 8 << 20
#: What a setting is called, with ``plugin_opt_ANY``.
_SETTING_NAME: Final = re.compile(r"[a-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a configuration, with its file and line.

    Attributes:
        name: Current name of the setting: ``remote_username`` for ``username``.
        value: Rest of the line; it may be a secret, so ``repr`` does not show it.
        file: File with the line.
        line: Line number, from 1.
    """

    name: str
    value: str = field(repr=False)
    file: Path
    line: int

    @property
    def location(self) -> str:
        """File and line for error messages."""
        return f"{self.file}:{self.line}"

    def error(self, problem: str) -> ConfigError:
        """Return the error TL-C156 of this line."""
        return _conf_error(self.location, problem)

    def parse_port(self, text: str) -> int:
        """Return a port number from a part of the value; raises TL-C156 if it is not one."""
        if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 1 << 16:
            return int(text)
        raise self.error(f'"{self.name}" needs a port from 1 to 65,535')


@dataclass(slots=True)
class ConfSection:
    """Settings of the broker, a listener or a bridge connection, in file order.

    Attributes:
        header: Line that opens the section, ``listener PORT [ADDRESS | SOCKET]`` or ``connection NAME``; None for the
            broker and the default listener.
        settings: Settings of the section; a name may occur several times.
    """

    header: Setting | None = None
    settings: list[Setting] = field(default_factory=list)

    def get_all(self, name: str) -> list[Setting]:
        """Return every occurrence of a setting; the last one is in force."""
        return [setting for setting in self.settings if setting.name == name]

    def get(self, name: str) -> Setting | None:
        """Return the occurrence of a setting that is in force; None if it is not set."""
        return next(iter(reversed(self.get_all(name))), None)

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

    # -- of a listener --

    @property
    def port(self) -> int:
        """Port of the listener; 0 for a Unix socket."""
        setting = self.header or self.get("port")
        if setting is None:
            return _PORT
        port_text = setting.value.partition(" ")[0]
        return 0 if port_text == "0" and self.address.startswith("/") else setting.parse_port(port_text)

    @property
    def address(self) -> str:
        """Bind address of the listener, or path of its Unix socket; "" for all addresses."""
        return self.text("bind_address") if self.header is None else self.header.value.partition(" ")[2].strip()

    # -- of a connection: this broker as a client of another one --

    @property
    def name(self) -> str:
        """Name of the bridge connection."""
        return "" if self.header is None else self.header.value

    @property
    def addresses(self) -> list[str]:
        """``HOST:PORT`` of each remote broker of the connection, in order; the default port is 1883."""
        addresses = []
        for setting in self.get_all("address"):
            for address in setting.value.split():
                host, colon, port = address.rpartition(":")
                if colon and not host:
                    raise setting.error('"address" needs a host')
                addresses.append(f"{uri_host(host)}:{setting.parse_port(port)}" if colon else f"{address}:{_PORT}")
        return addresses

    @property
    def topics(self) -> list[tuple[str, str, str]]:
        """Direction, local and remote filter of each ``topic PATTERN [out|in|both [QOS [LOCAL REMOTE]]]`` (TL-C156).

        ``out`` goes to the remote broker, ``in`` comes from it, ``both`` goes either way. A prefix ``""``, or one that
        starts a comment, is empty, as in Mosquitto.
        """
        topics = []
        for setting in self.get_all("topic"):
            words = setting.value.split()[:5]
            pattern, direction, _, *prefixes = [*words, *("", "out", "0", "", "")[len(words) :]]
            pattern = "" if pattern == '""' else pattern
            local, remote = ("" if prefix == '""' or prefix.startswith("#") else prefix for prefix in prefixes)
            if direction not in ("out", "in", "both"):
                raise setting.error('the direction of a "topic" must be out, in or both')
            if not pattern and not (local and remote):
                raise setting.error('a "topic" needs a pattern, or both prefixes')
            topics.append((direction, local + pattern, remote + pattern))
        return topics


@dataclass(slots=True)
class MosquittoConf(ConfSection):
    """A whole Mosquitto configuration; its own section is the broker's.

    Attributes:
        file: Main configuration file.
        listeners: Listeners of the broker. The first is the default listener, with ``port``, ``bind_address`` and the
            listener settings before the first ``listener``, as far as it is in use.
        connections: Bridge connections.
    """

    file: Path = Path()
    listeners: list[ConfSection] = field(default_factory=lambda: [ConfSection()])
    connections: list[ConfSection] = field(default_factory=list)

    @property
    def local_only(self) -> bool:
        """True if the broker listens on loopback only, because no listener is configured [mosquitto.conf(5)]."""
        (listener, *others) = self.listeners
        return not (others or listener.header or any(map(listener.get_all, _DEFAULT_LISTENER_SETTINGS)))

    @property
    def session_expiry_s(self) -> float | None:
        """Seconds after which the broker deletes a disconnected session; None for never."""
        match = re.fullmatch(r"([0-9]{1,9})([hdwmy])", self.text("persistent_client_expiration").strip())
        return None if match is None else float(int(match[1]) * _EXPIRATION_UNITS[match[2]])

    def access_control(self, port: int) -> str:
        """Return the setting that controls access at a port, as ``acl_file /etc/acl``; "" if everybody has access."""
        names = ("plugin", "auth_plugin", "acl_file")
        settings = [section.get(name) for section in self._sections_of_port(port) for name in names]
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
    conf = MosquittoConf(file=file)
    _read_file(conf, file, main=True)
    default_listener, *named_listeners = conf.listeners
    is_recognized = named_listeners or conf.connections or default_listener.settings
    if conf.settings and not is_recognized and not any(setting.name in _SETTING_SCOPES for setting in conf.settings):
        raise _conf_error(str(file), f'it is no mosquitto.conf: Mosquitto has no setting "{conf.settings[0].name}"')
    if named_listeners and not any(map(default_listener.get_all, _DEFAULT_LISTENER_SETTINGS)):
        conf.listeners = named_listeners
    return conf


def _read_file(conf: MosquittoConf, file: Path, *, main: bool) -> None:
    default_listener = listener = conf.listeners[0]
    connection = None
    for setting in _read_settings(file):
        name, scope = setting.name, _scope(setting.name)
        if name == "include_dir":
            if main:  # only the main file may [mosquitto.conf(5)]
                for included in _included_files(setting):
                    _read_file(conf, included, main=False)
        elif name == "listener":
            conf.listeners.append(listener := ConfSection(setting))
            _ = listener.port  # a mistake in it is told here
        elif name == "connection":
            conf.connections.append(connection := ConfSection(setting))
        elif scope == "connection":
            if connection is None:
                raise setting.error(f'"{name}" stands before the first connection')
            connection.settings.append(setting)
        elif name in _DEFAULT_LISTENER_SETTINGS:
            default_listener.settings.append(setting)
            _ = default_listener.port
        else:
            of_listener = scope == "listener" or (scope == "either" and conf.flag("per_listener_settings"))
            (listener if of_listener else conf).settings.append(setting)


def _scope(name: str) -> str:
    return "connection" if name.startswith("bridge_") else _SETTING_SCOPES.get(name, "")


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
        has_scope = bool(_scope(name))
        if not _SETTING_NAME.fullmatch(name) or value.startswith("= ") or (value[:1] in ("=", "{") and not has_scope):
            problem = f'it is no mosquitto.conf: "{name}" is no name of a setting, as Mosquitto writes NAME VALUE'
            raise _conf_error(f"{file}:{number}", problem)
        if not value and has_scope:
            raise _conf_error(f"{file}:{number}", f'"{name}" has no value')
        yield Setting(_SETTING_ALIASES.get(name, name), value, file, number)


def _included_files(setting: Setting) -> list[Path]:
    """Return the files of ``include_dir`` in Mosquitto's order: A.conf, a.conf, B.conf."""
    directory = setting.file.parent / setting.value
    try:
        conf_files = [file for file in directory.iterdir() if file.name.endswith(".conf")]
    except OSError as error:
        remedy = "Correct the directory, or run as a user who may read it."
        problem = f"include_dir {setting.value} can't be read ({files.os_error_text(error)})"
        raise ConfigError("TL-C155", setting.location, problem, remedy) from error
    return sorted(conf_files, key=lambda file: [(letter.lower(), letter) for letter in file.name])


def uri_host(host: str) -> str:
    """Return a host in URI form: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _conf_error(location: str, problem: str) -> ConfigError:
    return ConfigError("TL-C156", location, problem, "Correct the line; mosquitto.conf(5) describes it.")
