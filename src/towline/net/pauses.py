"""How long to wait before the next connection: doubling with jitter, until one was of use."""

from __future__ import annotations

from typing import Final

from towline.backoff import Backoff

__all__ = ["FIRST_PAUSE_S", "LONGEST_PAUSE_S", "Pauses"]

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


class Pauses:
    """Pauses between connections.

    That a connection came online says little: a broker may end it again at the first packet, for ever. So the pauses
    begin anew only after a message went through it, in either direction, or after it was online for ten seconds. The
    first pause is short all the same.

    Args:
        longest_s: Longest pause in seconds.
        first_s: First pause in seconds.
    """

    def __init__(self, longest_s: float, first_s: float = FIRST_PAUSE_S) -> None:
        self._backoff = Backoff(min(first_s, longest_s), longest_s, _JITTER)
        #: When the connection came online that has not ended, or whose pause is not taken.
        self._online_at: float | None = None
        #: Culprits since the last message that went through.
        self._culprits = 0

    def online(self, now: float) -> None:
        """A connection has come online."""
        self._online_at = now

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

    def in_vain(self, now: float) -> bool:
        """Whether connections of late were of no use, though they may have come online: try another server."""
        return self._backoff.failures >= _IN_VAIN and not self._lasted(now)

    def _lasted(self, now: float) -> bool:
        return self._online_at is not None and now - self._online_at >= _STEADY_S

    def next(self, now: float) -> float:
        """Seconds until the next try, after a connection has ended or could not be made."""
        if self._lasted(now):
            self._backoff.reset()
        self._online_at = None
        return self._backoff.next()
