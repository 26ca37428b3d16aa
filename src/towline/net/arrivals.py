"""Messages of a client between its session and whoever takes them: pure, in memory, guarded by the client's lock.

A message waits until it is taken, and is settled once it is acknowledged: what is settled is a prefix of the session's
numbers, because acknowledgements leave in order [MQTT-4.6.0-2, -3].
"""

from __future__ import annotations

from collections import deque
from typing import Final

from towline.net.messages import Message

__all__ = ["Arrivals"]

#: QoS 0 messages beyond this many waiting ones are dropped and counted: nothing holds their sender back.
_MOST_WAITING: Final = 10_000
#: Bytes of waiting messages above which nothing more is read, and half of it above which QoS 0 is dropped. Receive
#: Maximum is no such bound: MQTT 3.x has none, and an answer behind more messages than it allows must be read too.
_MOST_BYTES: Final = 64 << 20
#: Bytes that a message takes beside what it carries.
_OVERHEAD: Final = 1000


class Arrivals:
    """What came, in order.

    Args:
        settled: Number of the first message to come.
    """

    def __init__(self, settled: int) -> None:
        #: Came and not handed out, in order.
        self.waiting: deque[Message] = deque()
        #: What they take in memory.
        self._bytes = 0
        #: Number of each message handed out and not acknowledged → its QoS.
        self._taken: dict[int, int] = {}
        #: Everything below is acknowledged.
        self.settled = settled
        #: Acknowledged out of turn; all above `settled`.
        self._early: set[int] = set()
        #: The connection whose beginning `connected` has seen.
        self._connection = 0
        #: QoS 0 messages that found no room.
        self.dropped = 0

    @property
    def full(self) -> bool:
        """So much waits that nothing more may be read."""
        return self._bytes >= _MOST_BYTES

    def add(self, message: Message) -> None:
        """A message came."""
        if not message.qos:
            self.settle(message.number)
            if len(self.waiting) >= _MOST_WAITING or self._bytes >= _MOST_BYTES // 2:
                self.dropped += 1
                return
        self._line_up(message)

    def take(self) -> Message:
        """Hand out the first that waits."""
        message = self.waiting.popleft()
        self._bytes -= _size(message)
        if message.qos:
            self._taken[message.number] = message.qos
        return message

    def is_settled(self, number: int) -> bool:
        """Whether a message is acknowledged, or can't be any more."""
        return number < self.settled or number in self._early

    def settle(self, number: int) -> None:
        """A message is acknowledged."""
        self._taken.pop(number, None)
        self._early.add(number)
        while self.settled in self._early:
            self._early.remove(self.settled)
            self.settled += 1

    def connected(self, connection: int, *, resumed: bool) -> None:
        """On a new connection, settle what can't be acknowledged any more; a second call does nothing.

        A kept session sends QoS 1 again under new numbers, so what nobody has taken is not handed out twice. A lost one
        has no name for anything. QoS 2 in a kept session still waits for its acknowledgement: PUBREC to the repeat.

        Args:
            connection: Its number, which grows.
            resumed: The session was kept.
        """
        if self._connection == connection:
            return
        self._connection = connection
        for number, qos in list(self._taken.items()):
            if qos == 1 or not resumed:
                self.settle(number)
        if not resumed:
            return
        waiting, self.waiting, self._bytes = self.waiting, deque(), 0
        for message in waiting:
            if message.qos == 1 and message._connection < connection:  # noqa: SLF001  # our own
                self.settle(message.number)
            else:
                self._line_up(message)

    def _line_up(self, message: Message) -> None:
        self.waiting.append(message)
        self._bytes += _size(message)


def _size(message: Message) -> int:
    pairs = sum(len(name) + len(value) for name, value in message.user_properties)
    return _OVERHEAD + len(message.topic) + len(message.payload or b"") + len(message.correlation_data or b"") + pairs
