"""Whether the broker lives: when a PINGREQ is due, and how long an answer may take [MQTT-3.1.2-22 to -24].

Pure: whoever owns it says what time it is.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["PONG_WITHIN", "Liveness"]

#: Share of the keep alive after which we send PINGREQ when nothing else went out: early enough for a slow link.
_PING_AFTER: Final = 0.75
#: A silent peer is found within 1.5 × keep alive: 0.75 until the PINGREQ and as much for its answer.
PONG_WITHIN: Final = 0.75


class Liveness:
    """The times of one connection after another.

    Args:
        answer_within_s: Seconds that CONNACK and SUBACK may take.
    """

    def __init__(self, answer_within_s: float) -> None:
        self.answer_within_s = answer_within_s
        #: We do not read: what is missing may lie in what was not read.
        self.suspended = False
        #: When the connection was opened, or the broker last sent something.
        self._heard_at = 0.0
        self._sent_at = 0.0
        #: When the PINGREQ without an answer left, or the peer last showed since that it lives; None without one.
        self._ping_at: float | None = None

    def opened(self, now: float) -> None:
        """A connection begins."""
        self.suspended = False
        self._heard_at = now

    def sent(self, now: float) -> None:
        """Something left."""
        self._sent_at = now

    def heard(self, now: float) -> None:
        """The broker sent something that counts as an answer, or the time for one begins anew."""
        self._heard_at = now

    def lives(self, now: float) -> None:
        """The peer shows that it lives: it sends, or takes what waited to be sent, however long a packet takes."""
        if self._ping_at is not None:
            self._ping_at = now

    def resumed(self, now: float) -> None:
        """We read again: what is awaited may lie in what was not read."""
        self.suspended = False
        self.heard(now)
        self.lives(now)

    def pinged(self, now: float) -> None:
        """A PINGREQ leaves."""
        self._ping_at = now if self._ping_at is None else self._ping_at

    def answered(self) -> None:
        """Nothing is out any more: PINGRESP came, or the connection begins or ends."""
        self._ping_at = None

    @property
    def answer_due(self) -> float:
        """When an answer that is owed comes too late."""
        return self._heard_at + self.answer_within_s

    def ping_due(self, keep_alive_s: int) -> float:
        """When a PINGREQ has to leave."""
        return self._sent_at + keep_alive_s * _PING_AFTER

    def pong_due(self, keep_alive_s: int) -> float:
        """When PINGRESP comes too late."""
        if self._ping_at is None or self.suspended:
            return math.inf
        return self._ping_at + keep_alive_s * PONG_WITHIN
