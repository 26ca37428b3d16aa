"""Which broker is tried next, and when. Pure: the clock is the caller's.

The brokers of a list are tried in its order, one right after the other, with a pause after each round. After a
connection that worked it begins at the first again, so that the list is an order of preference; a broker that takes us
in again and again only to end the connection is left for the next one. What a broker says of other servers goes first
(`towline.net.redirect`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from towline.mqtt.events import Close
from towline.net.pauses import LONGEST_PAUSE_S, Pauses
from towline.net.redirect import Redirects
from towline.net.transport import Endpoint

__all__ = ["Attempts"]

#: A taken-over client id is given up when it happens twice in this many seconds.
_TAKEOVER_WINDOW: Final = 60.0


class Attempts:
    """The order of the connections.

    Args:
        endpoints: The list of brokers, in order of preference.
        follow_redirects: Go where a broker points.
        pauses: Between rounds; None for the usual ones.
    """

    def __init__(self, endpoints: Sequence[Endpoint], *, follow_redirects: bool, pauses: Pauses | None = None) -> None:
        self._endpoints = endpoints
        #: Place in the list of the next one, or of the one in use.
        self._index = 0
        self._redirects = Redirects(follow=follow_redirects)
        self._pauses = pauses or Pauses(LONGEST_PAUSE_S)
        #: When the client id was taken over, the last two times.
        self._takeovers: deque[float] = deque(maxlen=2)
        #: The server in use or last tried, which may be one that a broker of the list has named.
        self.endpoint = endpoints[0]
        #: Times all of the list were tried in vain, or a connection that worked has ended.
        self.rounds = 0
        #: When the next attempt may be made.
        self.due = 0.0

    def begin(self) -> Endpoint:
        """The server to connect to now."""
        self.endpoint = self._redirects.target(self._endpoints[self._index])
        return self.endpoint

    def online(self, now: float) -> None:
        """The server has taken us in, with all subscriptions."""
        self._pauses.online(now)
        self._redirects.served(self.endpoint)

    def useful(self) -> None:
        """A message went through this connection."""
        self._pauses.useful()

    def culprit_found(self) -> None:
        """The message at which the broker ended the connection is set aside; told before `failed`."""
        self._pauses.culprit_found()

    def judge(self, close: Close) -> Close:
        """What the end of the connection means: with ``again_at_once`` the server's reference is followed."""
        return self._redirects.judge(close, self.endpoint)

    def at_once(self) -> None:
        """The next attempt needs no pause."""
        self.due = 0.0

    def failed(self, now: float, *, served: bool) -> None:
        """No connection could be made, or one has ended.

        Args:
            now: On the clock of `due`.
            served: It had come online.
        """
        if self._redirects.pending:
            return
        worked = served and not self._pauses.in_vain(now)
        self._index = 0 if worked else (self._index + 1) % len(self._endpoints)
        if self._index == 0:
            self.rounds += 1
            self.due = now + self._pauses.next(now)

    def taken_over(self, now: float) -> bool:
        """Another client has taken our id over; whether two clients fight for it."""
        self._takeovers.append(now)
        return len(self._takeovers) == self._takeovers.maxlen and now - self._takeovers[0] < _TAKEOVER_WINDOW
