"""What a broker was told to keep, from its ``mosquitto.conf``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from towline.doctor.broker.acl import AclRule, read_acl
from towline.errors import ConfigError
from towline.mosquitto_conf import MosquittoConf, Settings, read

__all__ = ["BrokerConf", "read_conf"]

#: Units of persistent_client_expiration [mosquitto.conf(5)] in seconds; a month is Mosquitto's 30 days.
_UNITS: Final = {"h": 3600, "d": 86400, "w": 7 * 86400, "m": 30 * 86400, "y": 365 * 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConf:
    """The settings that a promise depends on; 0 means no limit, as in the file.

    Attributes:
        file: Where they were read.
        persistence: Sessions and queues are saved at all.
        autosave_interval: Seconds, or changes, between two savings; 0 for the end of the broker only.
        autosave_on_changes: It is a number of changes.
        max_queued_messages: For each client that is away.
        max_queued_bytes: The same in bytes; both hold.
        memory_limit: Bytes of the whole broker.
        max_inflight_messages: Unacknowledged, for each client.
        message_size_limit: Bytes of a payload; more is dropped.
        expiration_s: Seconds after which a session that is away is forgotten; None for never.
        acl: Rules of access; None where there are none, or where they are not known.
        acl_unknown: Why they are not known; empty where they are.
    """

    file: Path
    persistence: bool = False
    autosave_interval: int = 1800
    autosave_on_changes: bool = False
    max_queued_messages: int = 1000
    max_queued_bytes: int = 0
    memory_limit: int = 0
    max_inflight_messages: int = 20
    message_size_limit: int = 0
    expiration_s: float | None = None
    acl: tuple[AclRule, ...] | None = None
    acl_unknown: str = ""


def read_conf(file: Path, port: int) -> BrokerConf:
    """The settings of a file.

    Args:
        file: ``mosquitto.conf``.
        port: Of the listener that is used, for settings of its own.

    Raises:
        ConfigError: TL-C155 or TL-C156, it can't be read or a line is damaged.
    """
    conf = read(file)
    acl, unknown = _acl(conf, port)
    return BrokerConf(
        file=file,
        persistence=_flag(conf, "persistence"),
        autosave_interval=_number(conf, "autosave_interval"),
        autosave_on_changes=_flag(conf, "autosave_on_changes"),
        max_queued_messages=_number(conf, "max_queued_messages"),
        max_queued_bytes=_number(conf, "max_queued_bytes"),
        memory_limit=_number(conf, "memory_limit"),
        max_inflight_messages=_number(conf, "max_inflight_messages"),
        message_size_limit=_number(conf, "message_size_limit"),
        expiration_s=_seconds(conf.text("persistent_client_expiration")),
        acl=acl,
        acl_unknown=unknown,
    )


def _flag(conf: MosquittoConf, name: str) -> bool:
    return conf.value(name) is True


def _number(conf: MosquittoConf, name: str) -> int:
    value = conf.value(name)
    return value if isinstance(value, int) else 0


def _seconds(text: str) -> float | None:
    found = re.fullmatch(r"([0-9]{1,9})([hdwmy])", text.strip())
    return None if found is None else float(int(found[1]) * _UNITS[found[2]])


def _acl(conf: MosquittoConf, port: int) -> tuple[tuple[AclRule, ...] | None, str]:
    """The rules that hold at a port, or why they are not known."""
    homes: list[Settings] = [conf, *(one for one in conf.listeners if one.port == port)]
    plugin = next((found for one in homes for name in ("plugin", "auth_plugin") if (found := one.get(name))), None)
    if plugin is not None:
        return None, f"a plugin decides ({plugin.name} at {plugin.where})"
    named = next((found for one in reversed(homes) if (found := one.get("acl_file"))), None)
    if named is None:
        return None, ""
    try:
        return read_acl(named.file.parent / named.value), ""
    except ConfigError as error:
        return None, f"acl_file {error.where}: {error.what}"
