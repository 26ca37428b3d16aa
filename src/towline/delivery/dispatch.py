"""Which message of the outbox goes next: decisions only, no disk, no socket, no clock.

Messages are handed to the session in the order in which they came, so that order per topic is kept [MQTT-4.6.0-1, -5].
Only a message that the broker puts off (0x97, quota exceeded) leaves the row: it is tried again later, and those of
its topic that have not left wait behind it: not handed over yet, or given back by the session (`Outbound.in_order`).
Those that had left before the answer came can overtake it.

What an answer means is a table, `_FATES`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from towline.mqtt.reasons import QUOTA_EXCEEDED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from towline.journal.ranges import Ranges

#: First pause before a message that was put off is tried again, in seconds; doubles up to the longest.
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_REFUSAL: Final = 0x80


class Fate(Enum):
    """What becomes of a message."""

    GO = "go"  # hand it to the session now
    WAIT = "wait"  # behind another of its topic
    ALREADY = "already"  # done, on its way, or waiting: nothing to do
    DELIVERED = "delivered"  # the broker has it
    REFUSED = "refused"  # the broker will not take it: keep it with its reason, go on with the others
    LATER = "later"  # the broker can't take it now


#: Reason code → fate, where being below 0x80 or not does not say it [MQTT 5 section 3.4.2.1].
_FATES: Final = {QUOTA_EXCEEDED: Fate.LATER}


@dataclass(slots=True)
class _Waiting:
    """The messages of a topic that wait, in order."""

    numbers: deque[int] = field(default_factory=deque)
    #: when the first is tried again, and the pause after that; it was put off, unless older ones came later, of a batch
    #: that became whole
    at: float = 0.0
    pause: float = _FIRST_PAUSE
    #: the one that was put off is answered: all may go
    free: bool = False


class Dispatch:
    """What is on its way and what waits.

    Args:
        done: What needs no sending; its owner adds to it.
        most_open: Messages handed over and not answered, at most.
        most_bytes: The same in bytes; one message is always allowed.
        most_waiting: Messages that wait behind one that was put off: beyond it nothing new is handed over.
    """

    def __init__(self, done: Ranges, *, most_open: int, most_bytes: int, most_waiting: int) -> None:
        self._done = done
        self._most_open = most_open
        self._most_bytes = most_bytes
        self._most_waiting = most_waiting
        #: number → topic and bytes of each message handed over and not answered; done are only those that go once more,
        #: or whose packet id is given back
        self.open: dict[int, tuple[str, int]] = {}
        #: sum of the bytes in `open`
        self.open_bytes = 0
        #: by topic, none of them empty; of those being tried again the first is open
        self._topics: dict[str, _Waiting] = {}
        #: Messages that wait behind one that was put off, that one included.
        self.waiting = 0

    @property
    def full(self) -> bool:
        """So much is with the broker that nothing more may be handed over, not even what waited."""
        return bool(self.open) and (len(self.open) >= self._most_open or self.open_bytes >= self._most_bytes)

    @property
    def room(self) -> bool:
        """A message that did not wait may be handed over."""
        return not self.full and self.waiting < self._most_waiting

    @property
    def oldest(self) -> int | None:
        """The smallest number that was handed over or waits; None when there is none."""
        return min((*self.open, *(topic.numbers[0] for topic in self._topics.values())), default=None)

    def admit(self, number: int, topic: str) -> Fate:
        """Decide about the next message of the outbox: GO, WAIT or ALREADY."""
        if number in self.open or number in self._done:
            return Fate.ALREADY
        if topic not in self._topics:
            return Fate.GO
        return Fate.WAIT if self._wait(number, topic) else Fate.ALREADY

    def _wait(self, number: int, topic: str) -> bool:
        """Put a message in the row of its topic; whether it was not there."""
        numbers = self._topics.setdefault(topic, _Waiting()).numbers
        if number in numbers:
            return False
        insort(numbers, number)
        self.waiting += 1
        return True

    def hand_over(self, number: int, topic: str, size: int) -> None:
        """A message was given to the session."""
        assert number not in self.open
        self.open[number] = (topic, size)
        self.open_bytes += size

    def answered(self, number: int, reason: int, now: float) -> Fate:
        """Take the broker's answer; DELIVERED, REFUSED or LATER.

        Args:
            number: The message.
            reason: The answer's reason code.
            now: Seconds on a clock that never goes back.
        """
        topic, size = self.open.pop(number)
        self.open_bytes -= size
        fate = Fate.DELIVERED if reason < _REFUSAL else _FATES.get(reason, Fate.REFUSED)
        if fate is Fate.LATER:
            self._put_off(number, topic, now)
        else:
            self.drop(number, topic)
        return fate

    def _put_off(self, number: int, topic: str, now: float) -> None:
        first = topic not in self._topics
        self._wait(number, topic)  # it may be a second one of the topic, that had left before the first answer came
        row = self._topics[topic]
        if first or row.free or row.numbers[0] == number:
            row.at, row.pause, row.free = now + row.pause, min(2 * row.pause, _LONGEST_PAUSE), False

    def drop(self, number: int, topic: str) -> None:
        """A message is answered, or not sent at all because it expired: those behind it need not wait for it."""
        row = self._topics.get(topic)
        if row is None or number not in row.numbers:
            return
        if row.numbers[0] == number:  # else an older one was put off, or came, while it was tried again
            row.free, row.pause = True, _FIRST_PAUSE
        row.numbers.remove(number)
        self.waiting -= 1
        if not row.numbers:
            del self._topics[topic]

    def due(self) -> float | None:
        """When `ready` has something by the clock, None for never or after an answer; what is ready counts as 0."""
        if self.full:
            return None
        rows = (row for row in self._topics.values() if row.free or row.numbers[0] not in self.open)
        return min((0.0 if row.free else row.at for row in rows), default=None)

    def ready(self, now: float, most: int) -> Iterator[int]:
        """Numbers that waited and may be handed over now, in order; what is taken has to be handed over, or dropped."""
        for topic, row in list(self._topics.items()):
            if most and not row.free and row.at <= now and row.numbers[0] not in self.open:
                most -= 1
                yield row.numbers[0]
            while most and row.free and row.numbers:
                number = row.numbers.popleft()
                self.waiting -= 1
                if not row.numbers:
                    del self._topics[topic]
                if number not in self.open:
                    most -= 1
                    yield number

    def start_again(self, never_left: Iterable[int]) -> None:
        """The connection is gone: what never left, and what waited, is met again in the outbox.

        Args:
            never_left: Handed over, and never sent; what was sent stays the session's.
        """
        for number in never_left:
            _, size = self.open.pop(number)
            self.open_bytes -= size
        self._topics.clear()
        self.waiting = 0

    def validate(self) -> None:
        """Assert every invariant named above; for tests."""
        assert self.open_bytes == sum(size for _, size in self.open.values())
        assert self.waiting == sum(len(row.numbers) for row in self._topics.values())
        assert all(row.numbers for row in self._topics.values())
        assert all(list(row.numbers) == sorted(row.numbers) for row in self._topics.values())
        assert not any(number in self._done for number in self.open)
