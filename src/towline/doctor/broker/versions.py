"""Faults of Mosquitto by version, as its issues and our own runs tell them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = ["VersionFault", "faults_of"]

_Version: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class VersionFault:
    """A fault that a promise feels.

    Attributes:
        first: The first version that has it.
        mended: The first one after it without.
        until: What it breaks, and when.
        what: The fault, and the number of Mosquitto's issue.
        shared: It concerns shared subscriptions only.
    """

    first: str
    mended: str
    until: str
    what: str
    shared: bool = False

    def concerns(self, version: _Version) -> bool:
        """Whether a version has it."""
        return _numbers(self.first) <= version < _numbers(self.mended)


_FAULTS: Final = (
    VersionFault(
        "2.0.0",
        "2.0.13",
        "messages wait in the session",
        "it sends another whole window after each acknowledgement (#2301), and with QoS 2 loses messages by it",
    ),
    VersionFault(
        "1.6.0",
        "2.0.12",
        "the broker is restarted",
        "shared subscriptions of a session are not restored",
        shared=True,
    ),
    VersionFault(
        "2.0.16",
        "2.0.17",
        "messages wait in the session",
        "it ignores max_inflight_messages (#2876), and with max_queued_messages 0 drops everything (#2879)",
    ),
)


def faults_of(software: str, *, shared: bool) -> Iterator[VersionFault]:
    """What is known of a broker by its own word.

    Args:
        software: Its ``$SYS/broker/version``: "mosquitto version 2.0.21".
        shared: Whether shared subscriptions are used.
    """
    found = re.match(r"mosquitto version (\d+)\.(\d+)\.(\d+)", software)
    if found is None:
        return
    version = (int(found[1]), int(found[2]), int(found[3]))
    yield from (one for one in _FAULTS if one.concerns(version) and (shared or not one.shared))


def _numbers(version: str) -> _Version:
    major, minor, patch = map(int, version.split("."))
    return major, minor, patch
