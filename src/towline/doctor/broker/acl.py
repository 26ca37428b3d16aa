"""Who may read and write what, as Mosquitto's ``acl_file`` says it [mosquitto.conf(5)]. Pure but for the file.

Mosquitto grants every subscription and asks these rules when it delivers: what a subscriber may not read never comes,
and nobody is told. So the rules are read, where they can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from towline import files
from towline.errors import ConfigError
from towline.mqtt.filters import common

__all__ = ["AclRule", "Right", "parse_acl", "read_acl", "right"]

_ACCESS: Final = {
    "read": frozenset({"read"}),
    "write": frozenset({"write"}),
    "readwrite": frozenset({"read", "write"}),
    "deny": frozenset[str](),
}
#: Bytes of a file at most.
_LARGEST: Final = 8 << 20


class Right(StrEnum):
    """How much of a topic filter somebody has a right to."""

    ALL = "all"
    PART = "part"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class AclRule:
    """One line.

    Attributes:
        user: Whom it concerns; None for clients without a user name, "" for everybody (``pattern``).
        pattern: A topic filter; ``%u`` and ``%c`` stand for user name and client id in that of everybody.
        access: ``read``, ``write``, both, or none of them: denied.
    """

    user: str | None
    pattern: str
    access: frozenset[str]


def read_acl(file: Path) -> tuple[AclRule, ...]:
    """The rules of a file.

    Raises:
        ConfigError: TL-C155, it can't be read.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(_LARGEST).decode("utf-8", "replace")
    except OSError as error:
        do = "Name a file that this user may read, or run as one who may."
        raise ConfigError("TL-C155", str(file), f"it can't be read ({files.why(error)})", do) from error
    return tuple(parse_acl(text))


def parse_acl(text: str) -> Iterator[AclRule]:
    """The rules of a text; what Mosquitto would refuse is left out."""
    user: str | None = None
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "user" and rest:
            user = rest
        elif word in {"topic", "pattern"} and rest:
            first, _, other = rest.partition(" ")
            known = first in _ACCESS and bool(other.strip())
            access = _ACCESS[first] if known else _ACCESS["readwrite"]
            yield AclRule("" if word == "pattern" else user, other.strip() if known else rest, access)


def right(rules: Iterable[AclRule], access: str, pattern: str, *, user: str | None, client_id: str) -> Right:
    """How much of a filter somebody may read or write.

    Args:
        rules: Of the file; a file without any denies everything.
        access: ``read`` or ``write``.
        pattern: A topic filter, or a topic.
        user: User name; None without one.
        client_id: MQTT client id.
    """
    found = Right.NONE
    denied = False
    for rule in rules:
        meant = _meant(rule, user, client_id)
        both = None if meant is None else common(meant, pattern)
        if both is None:
            continue
        if not rule.access:
            denied = True
            if both == pattern:
                return Right.NONE
        elif access in rule.access and found is not Right.ALL:
            found = Right.ALL if both == pattern else Right.PART
    return Right.PART if denied and found is Right.ALL else found


def _meant(rule: AclRule, user: str | None, client_id: str) -> str | None:
    """The filter of a rule for somebody, None where it does not concern them."""
    if rule.user != "":
        return rule.pattern if rule.user == user else None
    if "%u" in rule.pattern and user is None:
        return None
    return rule.pattern.replace("%c", client_id).replace("%u", user or "")
