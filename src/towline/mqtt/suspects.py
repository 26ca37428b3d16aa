"""Which message makes the broker end the connection: decisions only, no disk and no socket.

A broker may answer a packet that it does not like by ending the connection, without a word: Mosquitto does at a control
character in a topic or property, which MQTT allows both sides [MQTT-1.5.4-1, section 1.5.4]; others do where a client
may not publish. Sent again after each reconnect, such a message would stop everything behind it for ever.

Several messages are without an answer when a connection ends, so the culprit is found in two steps:

    several, twice   the same ones were without an answer when the broker ended two connections in a row: from now on
                     one message at a time
    alone, 3 times   the broker ended three connections in a row promptly after this one message alone had been sent,
                     and before it had answered it: set it aside

A broker that is stopped, or a network that fails, ends connections too. That is no reason to set a message aside: it
would have to strike three times in a row between the PUBLISH of the very same message and its answer. With a round trip
of r seconds and connections that end every T seconds for reasons of their own, that is about (r / T)² for a message
that was hit once: one in four million at 5 ms and 10 s. To the broker that ends every connection at once the rule
does not apply, because the first message waits for a second of quiet (`Culprits.limit`).

MQTT 3.x has no Maximum Packet Size: a broker that ends the connection at a larger message is met in this way too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from towline.mqtt.events import Token

#: So many connections in a row must end at a message that was alone.
STRIKES: Final = 3
#: So many in a row with the same messages unanswered, before messages go one at a time.
_CUTS: Final = 2
#: A connection that ends within so many seconds after something has left may have ended because of it.
_PROMPT_S: Final = 5.0
#: Seconds that a connection has to last before the first message leaves, while one of them is suspected: a broker that
#: ends every connection would make each of them a suspect.
_QUIET_S: Final = 1.0


class Culprits:
    """Finds such messages among those of a session, which sends one at a time as long as one is suspected."""

    def __init__(self) -> None:
        #: Whether a token names a message that may be given up; the owner's word.
        self.mine: Callable[[Token], bool] = lambda _token: True
        #: Without an answer at the last cut, and at those before it that had any of them.
        self._candidates: frozenset[Token] = frozenset()
        #: Cuts in a row that had one of the candidates without an answer; 0 while nothing is suspected.
        self.cuts = 0
        #: The message that was alone at the last end of a connection, None where there were several.
        self._alone: Token | None = None
        self._strikes = 0
        #: When the first message may leave this connection, while one is suspected.
        self.quiet_until = 0.0

    @property
    def careful(self) -> bool:
        """Messages have to go one at a time."""
        return self.cuts >= _CUTS

    def connected(self, now: float) -> None:
        """A connection is there."""
        self.quiet_until = now + _QUIET_S

    def limit(self, now: float) -> int | None:
        """Messages that may be without an answer at once; None for no limit."""
        return int(now >= self.quiet_until) if self.careful else None

    def answered(self, token: Token) -> None:
        """The broker has answered a message, or it will not be sent: it is none of them."""
        if token in self._candidates:
            self._candidates -= {token}
            self.cuts *= bool(self._candidates)
        if token == self._alone:
            self._alone, self._strikes = None, 0

    def judge(self, unanswered: Sequence[Token], *, cut: bool, exact: bool, after_s: float = 0.0) -> Token | None:
        """The message that is to be set aside after the end of a connection, None for none.

        Args:
            unanswered: Messages that had left on this connection and had no answer.
            cut: The broker ended it, or something between, for a reason that may be a message.
            exact: Nothing else has left since the last answer, such as messages of QoS 0, which have none.
            after_s: Seconds after something had left.
        """
        exact = exact and all(map(self.mine, unanswered))
        unanswered = [token for token in unanswered if self.mine(token)]
        if not (cut and after_s < _PROMPT_S and unanswered):
            self._alone, self._strikes = None, 0
            return None
        same = self._candidates.intersection(unanswered)
        self._candidates, self.cuts = same or frozenset(unanswered), self.cuts + 1 if same else 1
        if len(unanswered) > 1 or not exact:
            self._alone, self._strikes = None, 0
            return None
        (alone,) = unanswered
        self._strikes = self._strikes + 1 if alone == self._alone else 1
        self._alone = alone
        if self._strikes < STRIKES:
            return None
        self.answered(alone)  # it will not be sent again
        return alone
