"""Which broker is tried next, and when. Pure: the clock is the caller's.

The brokers of a list are tried in its order, one right after the other, with a pause after each round, which doubles
until a connection was of use. That one came online says little: a broker may end it again at the first packet, for
ever. So the pauses begin anew only after a message went through it, in either direction, or after ten seconds online.
After a connection that worked the list begins at the first again, so that it is an order of preference; a broker that
takes us in again and again only to end the connection is left for the next one.

What a broker says of other servers goes first (Server Reference [MQTT 5 section 4.11]). A reference is followed only
when that was asked for, to the same scheme with the same TLS verification, and a few times in a row at most. "Use
another server" (0x9C) counts for the next connection; "server moved" (0x9D) from the moment the new server has served
us, for as long as the process lives: the setting is the operator's to change.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from towline.errors import Unreachable
from towline.mqtt.events import Close
from towline.net.endpoint import DEFAULT_PORTS, Endpoint
from towline.timing import Backoff

#: First pause in seconds; doubles up to the longest.
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 30.0
#: Part of a pause that is left to chance.
_JITTER: Final = 0.75
#: A connection that was online for so many seconds was of use, whatever it carried.
_STEADY_S: Final = 10.0
#: After so many failures in a row a server that takes us in only to end the connection is left for the next one.
_IN_VAIN: Final = 4
#: So many culprits in a row, without a message that went through, begin the pauses anew.
_MOST_CULPRITS: Final = 8
#: Redirections in a row without a connection that works: a load balancer needs one, a move while it balances two.
MOST_HOPS: Final = 4
#: References of one packet that are looked at.
_MOST_REFERENCES: Final = 8
#: ``name``, ``name:port``, ``[name with colons]``, ``[...]:port`` (section 4.11), or the same with a scheme before it.
_REFERENCE: Final = re.compile(r"(?:([a-z]+)://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::(\d{1,5}))?/?")
#: A taken-over client id is given up when it happens twice in this many seconds.
_TAKEOVER_WINDOW: Final = 60.0


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


class Attempts:
    """The order of the connections, and what is known of other servers.

    Args:
        endpoints: The list of brokers, in order of preference.
        follow_redirects: Go where a broker points; otherwise its word is only an error to show.
        first_s: First pause between rounds, in seconds; never above the longest.
        longest_s: Longest pause in seconds.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        follow_redirects: bool = False,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
    ) -> None:
        #: A server that has moved is where it moved to.
        self._endpoints = [*endpoints]
        #: Place in the list of the next one, or of the one in use.
        self._index = 0
        self._follow = follow_redirects
        #: Servers the last reference named and that are not tried yet, before the list goes on.
        self._next: deque[Endpoint] = deque()
        #: Who said "moved" and waits for the new server to prove itself.
        self._moving: Endpoint | None = None
        #: Redirections since the last connection that worked; at most `MOST_HOPS`.
        self._hops = 0
        self._backoff = Backoff(min(first_s, longest_s), longest_s, _JITTER)
        #: When the connection came online that has not ended, or whose pause is not taken.
        self._online_at: float | None = None
        #: Culprits since the last message that went through.
        self._culprits = 0
        #: When the client id was taken over last.
        self._taken_over = float("-inf")
        #: The server in use or last tried, which may be one that a broker of the list has named.
        self.endpoint = endpoints[0]
        #: Times all of the list were tried in vain, or a connection that worked has ended.
        self.rounds = 0
        #: When the next attempt may be made; 0 for at once.
        self.due = 0.0

    def begin(self) -> Endpoint:
        """The server to connect to now."""
        self.endpoint = self._next.popleft() if self._next else self._endpoints[self._index]
        return self.endpoint

    def online(self, now: float) -> None:
        """The server has taken us in, with all subscriptions."""
        self._online_at = now
        self._hops = 0
        self._next.clear()
        self._endpoints = [self.endpoint if one == self._moving else one for one in self._endpoints]
        self._moving = None

    def judge(self, close: Close) -> Close:
        """What the end of the connection means: with ``again_at_once`` the server's reference is followed."""
        if not self._follow or not close.reference:
            return close
        if self._hops >= MOST_HOPS:
            self._hops, self._moving = 0, None
            self._next.clear()
            what = f"sent from server to server {MOST_HOPS} times without being served"
            do = "The brokers' redirections go round; tell their operator."
            return Close(Unreachable("TL-M27", str(self.endpoint), what, do))
        servers = [server for server in read_references(close.reference, self.endpoint) if server != self.endpoint]
        if not servers:
            return close
        self._hops += 1
        self._next = deque(servers)
        self._moving = self.endpoint if close.moved else None
        return replace(close, fatal=False, again_at_once=True)

    def useful(self) -> None:
        """A message went through; that one was given up says nothing about the broker."""
        self._backoff.reset()
        self._culprits = 0

    def culprit_found(self) -> None:
        """The message at which the broker ended the connection is set aside: what was in the way is gone.

        After many in a row it is rather the broker, which would have all messages set aside at this speed.
        """
        self._culprits += 1
        if self._culprits <= _MOST_CULPRITS:
            self._backoff.reset()

    def failed(self, now: float, *, served: bool) -> None:
        """No connection could be made, or one has ended.

        Args:
            now: On the clock of `due`.
            served: It had come online.
        """
        if self._next:
            return
        lasted = self._online_at is not None and now - self._online_at >= _STEADY_S
        worked = served and (lasted or self._backoff.failures < _IN_VAIN)
        self._index = 0 if worked else (self._index + 1) % len(self._endpoints)
        if self._index == 0:
            self.rounds += 1
            if lasted:
                self._backoff.reset()
            self._online_at = None
            self.due = now + self._backoff.next()

    def taken_over(self, now: float) -> bool:
        """Another client has taken our id over; whether two clients fight for it."""
        before, self._taken_over = self._taken_over, now
        return now - before < _TAKEOVER_WINDOW
