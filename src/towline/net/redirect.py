"""Where to go when a broker names another one in a Server Reference [MQTT 5 section 4.11].

A reference is followed only when that was asked for, to the same scheme with the same TLS verification, and a few
times in a row at most. "Use another server" (0x9C) counts for the next connection; "server moved" (0x9D) from the
moment the new server has served us, for as long as the process lives: the setting is the operator's to change.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from typing import Final

from towline.errors import Unreachable
from towline.mqtt.events import Close
from towline.net.transport.endpoint import DEFAULT_PORTS, Endpoint

__all__ = ["MOST_HOPS", "Redirects", "read_references"]

#: Redirections in a row without a connection that works: a load balancer needs one, a move while it balances two.
MOST_HOPS: Final = 4
#: References of one packet that are looked at.
_MOST_REFERENCES: Final = 8
#: ``name``, ``name:port``, ``[name with colons]``, ``[...]:port`` (section 4.11), or the same with a scheme before it.
_REFERENCE: Final = re.compile(r"(?:([a-z]+)://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::(\d{1,5}))?/?")


def read_references(text: str, like: Endpoint) -> list[Endpoint]:
    """The servers a broker names, as endpoints.

    Args:
        text: The Server Reference: names separated by spaces.
        like: Gives scheme and path. A reference that names another scheme is left out, and so is what can't be read:
            it would weaken what the operator chose.
    """
    endpoints = (_endpoint(part, like) for part in text.split(" ")[:_MOST_REFERENCES])
    return list(dict.fromkeys(endpoint for endpoint in endpoints if endpoint is not None))


def _endpoint(reference: str, like: Endpoint) -> Endpoint | None:
    match = _REFERENCE.fullmatch(reference)
    if match is None or like.scheme == "unix" or match[1] not in (None, like.scheme):
        return None
    port = int(match[3]) if match[3] else DEFAULT_PORTS[like.scheme]
    return Endpoint(like.scheme, match[2].strip("[]"), port, like.path) if 0 < port < 1 << 16 else None


class Redirects:
    """What is known of other servers.

    Args:
        follow: Go where the broker points; otherwise its word is only an error to show.
    """

    def __init__(self, *, follow: bool) -> None:
        self._follow = follow
        #: Servers the last reference named and that are not tried yet.
        self._next: deque[Endpoint] = deque()
        #: Who said "moved" and waits for the new server to prove itself.
        self._moving: Endpoint | None = None
        #: Servers that have moved → where to; never leads back to itself.
        self._moved: dict[Endpoint, Endpoint] = {}
        #: Redirections since the last connection that worked; at most `MOST_HOPS`.
        self._hops = 0

    @property
    def pending(self) -> bool:
        """Named servers are left to try, before the list goes on."""
        return bool(self._next)

    def target(self, configured: Endpoint) -> Endpoint:
        """Where to connect instead of the configured server, or that one itself."""
        if self._next:
            return self._next.popleft()
        for _ in range(MOST_HOPS):
            if configured not in self._moved:
                break
            configured = self._moved[configured]
        return configured

    def judge(self, close: Close, at: Endpoint) -> Close:
        """What the end of the connection to `at` means: with ``again_at_once`` the reference is followed."""
        if not self._follow or not close.reference:
            return close
        if self._hops >= MOST_HOPS:
            self._hops, self._moving = 0, None
            self._next.clear()
            what = f"sent from server to server {MOST_HOPS} times without being served"
            return Close(
                Unreachable("TL-M27", str(at), what, "The brokers' redirections go round; tell their operator.")
            )
        servers = [endpoint for endpoint in read_references(close.reference, at) if endpoint != at]
        if not servers:
            return close
        self._hops += 1
        self._next = deque(servers)
        self._moving = at if close.moved else None
        return replace(close, fatal=False, again_at_once=True)

    def served(self, at: Endpoint) -> None:
        """The server `at` has taken us in."""
        self._hops = 0
        self._next.clear()
        self._moved.pop(at, None)
        if self._moving is not None and self._moving != at:
            self._moved[self._moving] = at
        self._moving = None
