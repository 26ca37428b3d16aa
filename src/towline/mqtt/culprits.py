"""Search for the message that makes the broker end the connection: decisions only, no disk and no socket.

A broker may answer a packet by ending the connection, without a reason code: Mosquitto does at a control character in
a topic or property, which MQTT allows both sides [MQTT-1.5.4-1, section 1.5.4]; others do where a client may not
publish. Sent again after each reconnect, such a message would block all messages behind it for ever.

Several messages may be unanswered when a connection ends, so the culprit is found in two steps:

    several, twice   the same messages were unanswered when the broker ended two connections in a row: from now on
                     one message at a time
    alone, 3 times   the broker ended three connections in a row promptly after this message alone had been sent,
                     and before it had answered it: drop the message

A broker that is stopped, or a network that fails, ends connections too. To drop a wrong message it would have to strike
three times in a row between the PUBLISH of the very same message and its answer. With a round trip of r seconds and
connections that end every T seconds for other reasons, the probability is about (r / T)² for a message that was hit
once: one in four million at 5 ms and 10 s. For a broker that ends every connection at once the rule does not apply,
because the first message waits for a second of quiet (`CulpritFinder.max_unanswered`).

MQTT 3.x has no Maximum Packet Size: a message too large for the broker is found in this way too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from towline.mqtt.events import MessageToken

#: Connections in a row that must end at a message that was sent alone.
CULPRIT_STRIKES: Final = 3
#: Connections in a row with the same messages unanswered, before messages are sent one at a time.
_CUTS_BEFORE_CAUTION: Final = 2
#: Seconds after a packet was sent within which the end of a connection may be caused by it.
_PROMPT_S: Final = 5.0
#: Seconds that a connection must last before the first message is sent, while there are suspects: a broker that ends
#: every connection would make each message one.
_QUIET_S: Final = 1.0


class CulpritFinder:
    """Finder of the message that makes the broker end connections; while there are suspects, one is sent at a time."""

    def __init__(self) -> None:
        #: Returns whether a message may be dropped; set by the owner.
        self.is_droppable: Callable[[MessageToken], bool] = lambda _token: True
        #: Messages without an answer at the last cut and at the cuts before it.
        self._candidate_tokens: frozenset[MessageToken] = frozenset()
        #: Cuts in a row with a candidate unanswered; 0 without suspects.
        self.candidate_cuts = 0
        #: The only unanswered message at the last end of a connection; None if there were several.
        self._lone_token: MessageToken | None = None
        self._strikes = 0
        #: Time at which the first message may be sent on this connection, while there are suspects.
        self.first_send_at = 0.0

    @property
    def one_at_a_time(self) -> bool:
        """True while only one message at a time may be sent."""
        return self.candidate_cuts >= _CUTS_BEFORE_CAUTION

    def start_connection(self, now: float) -> None:
        """Start the quiet period of a new connection."""
        self.first_send_at = now + _QUIET_S

    def max_unanswered(self, now: float) -> int | None:
        """Return the number of messages that may be unanswered at once; None for no limit."""
        return int(now >= self.first_send_at) if self.one_at_a_time else None

    def clear_token(self, token: MessageToken) -> None:
        """Clear a message that the broker has answered, or that will not be sent."""
        if token in self._candidate_tokens:
            self._candidate_tokens -= {token}
            self.candidate_cuts *= bool(self._candidate_tokens)
        if token == self._lone_token:
            self._lone_token, self._strikes = None, 0

    def find_culprit(
        self,
        unanswered_tokens: Sequence[MessageToken],
        *,
        ended_by_broker: bool,
        only_acked_sent: bool,
        idle_s: float = 0.0,
    ) -> MessageToken | None:
        """Return the message to drop after the end of a connection; None for none.

        Args:
            unanswered_tokens: Messages sent on this connection without an answer.
            ended_by_broker: The broker, or something between, ended the connection, perhaps because of a message.
            only_acked_sent: Nothing without an acknowledgement, such as QoS 0, was sent since the last answer.
            idle_s: Seconds since something was last sent.
        """
        only_acked_sent = only_acked_sent and all(map(self.is_droppable, unanswered_tokens))
        unanswered_tokens = [token for token in unanswered_tokens if self.is_droppable(token)]
        if not (ended_by_broker and idle_s < _PROMPT_S and unanswered_tokens):
            self._lone_token, self._strikes = None, 0
            return None
        common_tokens = self._candidate_tokens.intersection(unanswered_tokens)
        self._candidate_tokens = common_tokens or frozenset(unanswered_tokens)
        self.candidate_cuts = self.candidate_cuts + 1 if common_tokens else 1
        if len(unanswered_tokens) > 1 or not only_acked_sent:
            self._lone_token, self._strikes = None, 0
            return None
        (lone_token,) = unanswered_tokens
        self._strikes = self._strikes + 1 if lone_token == self._lone_token else 1
        self._lone_token = lone_token
        if self._strikes < CULPRIT_STRIKES:
            return None
        self.clear_token(lone_token)  # it will not be sent again
        return lone_token
