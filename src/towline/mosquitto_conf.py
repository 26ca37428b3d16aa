"""A Mosquitto configuration as data: what was set, where, and what holds where nothing was.

Reads as ``config__read_file_core`` of Mosquitto 2.0 (src/conf.c) does. The name of a setting says what it belongs to:
the broker, the listener begun last, or the bridge connection begun last; the two go on side by side, and each file
begins with neither. Settings that nobody knows are kept, so that files of other versions can be read.
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
_UNITS: Final = {"h": 3600, "d": 86400, "w": 7 * 86400, "m": 30 * 86400, "y": 365 * 86400}

#: Settings by their present names.
_RENAMED: Final = {"addresses": "address", "password": "remote_password", "username": "remote_username"}

#: Setting → what it belongs to, as far as it matters to which; those of either to a listener with
#: ``per_listener_settings true``, else to the broker. All that begin with ``bridge_`` are a connection's.
_HOMES: Final[Mapping[str, str]] = {
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
_OF_DEFAULT: Final = ("port", "bind_address")

_TRUE_FALSE: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}

#: Bytes of one file at most; a configuration is text that somebody wrote.
_LARGEST: Final = 8 << 20
#: What a setting is called, with ``plugin_opt_ANY``.
_NAME: Final = re.compile(r"[a-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of a configuration.

    Attributes:
        name: As it is called at present: ``remote_username`` for ``username``.
        value: The rest of the line; it may be a secret, and is not shown by ``repr``.
        line: From 1.
    """

    name: str
    value: str = field(repr=False)
    file: Path
    line: int

    @property
    def where(self) -> str:
        """File and line, as errors name them."""
        return f"{self.file}:{self.line}"

    def wrong(self, what: str) -> ConfigError:
        """The error of this line, TL-C156."""
        return _damaged(self.where, what)

    def port(self, word: str) -> int:
        """A word of the value as a port; TL-C156 if it is none."""
        if re.fullmatch(r"[0-9]{1,5}", word) and 0 < int(word) < 1 << 16:
            return int(word)
        raise self.wrong(f'"{self.name}" needs a port from 1 to 65,535')


@dataclass(slots=True)
class ConfSection:
    """What was set of one broker, listener or connection, in the order of the files.

    Attributes:
        begun: The line that begins it, ``listener PORT [ADDRESS | SOCKET]`` or ``connection NAME``; None for the
            broker, and for the listener that holds where none is named.
        settings: Each line; a name may come more than once.
    """

    begun: Setting | None = None
    settings: list[Setting] = field(default_factory=list)

    def all(self, name: str) -> list[Setting]:
        """Every line with this setting; the last one holds."""
        return [one for one in self.settings if one.name == name]

    def get(self, name: str) -> Setting | None:
        """The line that holds."""
        return next(iter(reversed(self.all(name))), None)

    def text(self, name: str, otherwise: str = "") -> str:
        """The value that holds, as written."""
        found = self.get(name)
        return otherwise if found is None else found.value

    def flag(self, name: str) -> bool:
        """The value that holds, as ``conf__parse_bool`` reads it (TL-C156), else false."""
        found = self.get(name)
        if found and found.value.lower() not in _TRUE_FALSE:
            raise found.wrong(f'"{name}" must be true or false')
        return found is not None and _TRUE_FALSE[found.value.lower()]

    def number(self, name: str) -> int:
        """The value that holds, as a whole number (TL-C156), else that of `DEFAULTS`."""
        found = self.get(name)
        if found and not re.fullmatch(r"-?[0-9]{1,18}", found.value):
            raise found.wrong(f'"{name}" must be a whole number')
        return int(found.value) if found else DEFAULTS.get(name, 0)

    # -- of a listener --

    @property
    def port(self) -> int:
        """Where it listens; 0 for a Unix socket."""
        line = self.begun or self.get("port")
        if line is None:
            return _PORT
        word = line.value.partition(" ")[0]
        return 0 if word == "0" and self.address.startswith("/") else line.port(word)

    @property
    def address(self) -> str:
        """The address or name that it is bound to, the path of a Unix socket, or empty for all addresses."""
        return self.text("bind_address") if self.begun is None else self.begun.value.partition(" ")[2].strip()

    # -- of a connection: this broker as a client of another one --

    @property
    def name(self) -> str:
        """As written."""
        return "" if self.begun is None else self.begun.value

    @property
    def addresses(self) -> list[str]:
        """``HOST:PORT`` of the remote broker, in order; the port is 1883 where none is named."""
        found = []
        for one in self.all("address"):
            for word in one.value.split():
                host, colon, port = word.rpartition(":")
                if colon and not host:
                    raise one.wrong('"address" needs a host')
                found.append(f"{in_uri(host)}:{one.port(port)}" if colon else f"{word}:{_PORT}")
        return found

    @property
    def topics(self) -> list[tuple[str, str, str]]:
        """Of each ``topic PATTERN [out|in|both [QOS [LOCAL REMOTE]]]`` the direction and both filters (TL-C156).

        ``out`` goes from here to the remote broker, ``in`` comes from it, ``both`` goes either way. A prefix that is
        ``""`` or begins a comment is none, as in Mosquitto.
        """
        found = []
        for one in self.all("topic"):
            words = one.value.split()[:5]
            pattern, direction, _, *prefixes = [*words, *("", "out", "0", "", "")[len(words) :]]
            pattern = "" if pattern == '""' else pattern
            local, remote = ("" if prefix == '""' or prefix.startswith("#") else prefix for prefix in prefixes)
            if direction not in ("out", "in", "both"):
                raise one.wrong('the direction of a "topic" must be out, in or both')
            if not pattern and not (local and remote):
                raise one.wrong('a "topic" needs a pattern, or both prefixes')
            found.append((direction, local + pattern, remote + pattern))
        return found


@dataclass(slots=True)
class MosquittoConf(ConfSection):
    """A whole configuration; its own settings are the broker's.

    Attributes:
        file: The main file.
        listeners: Where the broker listens: first the one without a line, which has ``port``, ``bind_address`` and the
            settings of listeners before the first ``listener``, as far as that is used.
        connections: Its bridges.
    """

    file: Path = Path()
    listeners: list[ConfSection] = field(default_factory=lambda: [ConfSection()])
    connections: list[ConfSection] = field(default_factory=list)

    @property
    def local_only(self) -> bool:
        """Whether it listens on loopback only, since no listener is configured [mosquitto.conf(5)]."""
        (first, *others) = self.listeners
        return first.begun is None and not others and not any(map(first.all, _OF_DEFAULT))

    @property
    def session_expiry_s(self) -> float | None:
        """Seconds after which a session that is away is forgotten; None for never."""
        found = re.fullmatch(r"([0-9]{1,9})([hdwmy])", self.text("persistent_client_expiration").strip())
        return None if found is None else float(int(found[1]) * _UNITS[found[2]])

    def access(self, port: int) -> str:
        """What decides who may read and write at a port: ``acl_file /etc/acl``; empty for nothing, and so everybody."""
        names = ("plugin", "auth_plugin", "acl_file")
        found = [one for home in self._at(port) for name in names if (one := home.get(name)) is not None]
        return f"{found[-1].name} {found[-1].value}" if found else ""

    def one_session(self, port: int) -> bool:
        """Whether all clients of a user have one session (``use_username_as_clientid``)."""
        return any(home.flag("use_username_as_clientid") for home in self._at(port))

    def _at(self, port: int) -> list[ConfSection]:
        return [self, *(one for one in self.listeners if one.port == port)]

    def unwritable(self) -> str:
        """Why the broker can't save where its file says, as far as it is seen from here; empty for nothing.

        Mosquitto makes no directory, and goes on with an error in its log. It runs as the owner of a store that it has
        written, else as ``user`` of its file, which is ``mosquitto`` for a broker that root starts.
        """
        location = self.text("persistence_location")
        place, store = Path(location), Path(location, self.text("persistence_file", "mosquitto.db"))
        if not location:
            return ""  # its working directory, which is not known
        try:
            if not place.is_dir():
                return "is no directory" if place.exists() else "does not exist"
            directory, user = place.stat(), self.text("user", "mosquitto" if place.stat().st_uid == 0 else "")
            if os.statvfs(place).f_flag & os.ST_RDONLY:
                return "is on a file system that can only be read"
            owner = pwd.getpwuid(store.stat().st_uid) if store.exists() else pwd.getpwnam(user)
        except (OSError, KeyError):
            return ""  # not seen from here
        mine, group = directory.st_uid == owner.pw_uid, directory.st_gid in os.getgrouplist(owner.pw_name, owner.pw_gid)
        needed = 0o300 if mine else 0o030 if group else 0o003
        may = owner.pw_uid == 0 or directory.st_mode & needed == needed
        return "" if may else f"may not be written by the broker's user {owner.pw_name}"


def read(file: Path) -> MosquittoConf:
    """Read a configuration with everything it includes.

    Raises:
        ConfigError: TL-C155 if a file can't be read, TL-C156 if one is damaged, with its line, or no mosquitto.conf.
    """
    conf = MosquittoConf(file=file)
    _read_file(conf, file, main=True)
    default, *others = conf.listeners
    elsewhere = others or conf.connections or default.settings
    if conf.settings and not elsewhere and not any(one.name in _HOMES for one in conf.settings):
        raise _damaged(str(file), f'it is no mosquitto.conf: Mosquitto has no setting "{conf.settings[0].name}"')
    if others and not any(map(default.all, _OF_DEFAULT)):
        conf.listeners = others
    return conf


def _read_file(conf: MosquittoConf, file: Path, *, main: bool) -> None:
    default = listener = conf.listeners[0]
    connection = None
    for setting in _lines(file):
        name, home = setting.name, _home(setting.name)
        if name == "include_dir":
            if main:  # only the main file may [mosquitto.conf(5)]
                for included in _included(setting):
                    _read_file(conf, included, main=False)
        elif name == "listener":
            conf.listeners.append(listener := ConfSection(setting))
            _ = listener.port  # a mistake in it is told here
        elif name == "connection":
            conf.connections.append(connection := ConfSection(setting))
        elif home == "connection":
            if connection is None:
                raise setting.wrong(f'"{name}" stands before the first connection')
            connection.settings.append(setting)
        elif name in _OF_DEFAULT:
            default.settings.append(setting)
            _ = default.port
        else:
            own = home == "listener" or (home == "either" and conf.flag("per_listener_settings"))
            (listener if own else conf).settings.append(setting)


def _home(name: str) -> str:
    return "connection" if name.startswith("bridge_") else _HOMES.get(name, "")


def _lines(file: Path) -> Iterator[Setting]:
    try:
        with file.open("rb") as stream:
            data = stream.read(_LARGEST + 1)
    except OSError as error:
        do = "Name a file that this user may read, or run as one who may."
        raise ConfigError("TL-C155", str(file), f"it can't be read ({files.why(error)})", do) from error
    if len(data) > _LARGEST or b"\0" in data:
        raise _damaged(str(file), "it is no text file")
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip() or raw.lstrip().startswith(b"#"):
            continue
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise _damaged(f"{file}:{number}", "it is not UTF-8 text") from error
        name, value = [*line.split(maxsplit=1), "", ""][:2]
        known = bool(_home(name))
        if not _NAME.fullmatch(name) or value.startswith("= ") or (value[:1] in ("=", "{") and not known):
            what = f'it is no mosquitto.conf: "{name}" is no name of a setting, as Mosquitto writes NAME VALUE'
            raise _damaged(f"{file}:{number}", what)
        if not value and known:
            raise _damaged(f"{file}:{number}", f'"{name}" has no value')
        yield Setting(_RENAMED.get(name, name), value, file, number)


def _included(setting: Setting) -> list[Path]:
    """The files of ``include_dir``, in Mosquitto's order: A.conf, a.conf, B.conf."""
    directory = setting.file.parent / setting.value
    try:
        found = [one for one in directory.iterdir() if one.name.endswith(".conf")]
    except OSError as error:
        do = "Correct the directory, or run as a user who may read it."
        what = f"include_dir {setting.value} can't be read ({files.why(error)})"
        raise ConfigError("TL-C155", setting.where, what, do) from error
    return sorted(found, key=lambda one: [(letter.lower(), letter) for letter in one.name])


def in_uri(host: str) -> str:
    """A host as a URI has it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _damaged(where: str, what: str) -> ConfigError:
    return ConfigError("TL-C156", where, what, "Correct the line; mosquitto.conf(5) describes it.")
