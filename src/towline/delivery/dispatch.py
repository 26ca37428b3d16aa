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
        #: topic → numbers that wait, in order. One of them was put off, or is being tried again (then it is open): the
        #: first, unless older ones came later, of a batch that became whole
        self._waiting: dict[str, deque[int]] = {}
        #: how many numbers are in `_waiting`
        self._waiting_count = 0
        #: topic → when its first is tried again, and the pause after that; the keys are those of `_waiting`
        self._again: dict[str, tuple[float, float]] = {}
        #: numbers that waited and may go, in order; all of one topic before any newer of that topic
        self._ready: deque[int] = deque()
        self._ready_set: set[int] = set()

    @property
    def full(self) -> bool:
        """So much is with the broker that nothing more may be handed over, not even what waited."""
        return bool(self.open) and (len(self.open) >= self._most_open or self.open_bytes >= self._most_bytes)

    @property
    def room(self) -> bool:
        """A message that did not wait may be handed over: none that waited is before it."""
        if self.full or self._ready:
            return False
        return self._waiting_count < self._most_waiting

    @property
    def waiting(self) -> int:
        """Messages that wait behind one that was put off, that one included."""
        return self._waiting_count + len(self._ready)

    @property
    def oldest(self) -> int | None:
        """The smallest number that was handed over or waits; None when there is none."""
        firsts = [queue[0] for queue in self._waiting.values()]
        return min((*self.open, *self._ready, *firsts), default=None)

    def admit(self, number: int, topic: str) -> Fate:
        """Decide about the next message of the outbox: GO, WAIT or ALREADY."""
        if number in self.open or number in self._done or number in self._ready_set:
            return Fate.ALREADY
        queue = self._waiting.get(topic)
        if queue is None:
            return Fate.GO
        if number in queue:
            return Fate.ALREADY
        insort(queue, number)
        self._waiting_count += 1
        return Fate.WAIT

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
            self._settled(number, topic)
        return fate

    def drop(self, number: int, topic: str) -> None:
        """A message that waited is not sent at all, because it expired: those behind it need not wait for it."""
        self._settled(number, topic)

    def _put_off(self, number: int, topic: str, now: float) -> None:
        queue = self._waiting.setdefault(topic, deque())
        if number not in queue:  # a second one of the topic that had left before the first answer came
            insort(queue, number)
            self._waiting_count += 1
        _, pause = self._again.get(topic, (0.0, _FIRST_PAUSE))
        if queue[0] == number or topic not in self._again:
            self._again[topic] = (now + pause, min(2 * pause, _LONGEST_PAUSE))

    def _settled(self, number: int, topic: str) -> None:
        """Let those go that waited behind this one."""
        queue = self._waiting.get(topic)
        if queue is None or number not in queue:
            return
        if queue[0] != number:  # it was tried again, and an older one was put off, or came, meanwhile
            queue.remove(number)
            self._waiting_count -= 1
            return
        self._waiting_count -= len(queue)
        del self._waiting[topic], self._again[topic]
        free = [other for other in queue if other != number and other not in self.open]
        self._ready.extend(free)
        self._ready_set.update(free)

    def due(self) -> float | None:
        """When `ready` has something by the clock, None for never or after an answer; what is ready counts as 0."""
        if self.full:
            return None
        if self._ready:
            return 0.0
        times = [at for topic, (at, _) in self._again.items() if self._waiting[topic][0] not in self.open]
        return min(times, default=None)

    def ready(self, now: float, most: int) -> Iterator[int]:
        """Numbers that waited and may be handed over now, in order; what is taken has to be handed over, or dropped."""
        due = [self._waiting[topic][0] for topic, (at, _) in self._again.items() if at <= now]
        firsts = [number for number in due if number not in self.open][:most]
        yield from firsts
        left = most - len(firsts)
        while self._ready and left:
            left -= 1
            number = self._ready.popleft()
            self._ready_set.discard(number)
            yield number

    def wait_again(self, number: int, topic: str) -> bool:
        """Whether a message from `ready` has to wait after all, behind one of its topic put off meanwhile."""
        queue = self._waiting.get(topic)
        if queue is None or queue[0] == number:
            return False
        insort(queue, number)
        self._waiting_count += 1
        return True

    def start_again(self, never_left: Iterable[int]) -> None:
        """The connection is gone: what never left, and what waited, is met again in the outbox.

        Args:
            never_left: Handed over, and never sent; what was sent stays the session's.
        """
        for number in never_left:
            _, size = self.open.pop(number)
            self.open_bytes -= size
        self._waiting.clear()
        self._again.clear()
        self._ready.clear()
        self._ready_set.clear()
        self._waiting_count = 0

    def validate(self) -> None:
        """Assert every invariant named above; for tests."""
        assert self.open_bytes == sum(size for _, size in self.open.values())
        assert self._waiting_count == sum(map(len, self._waiting.values()))
        assert self._waiting.keys() == self._again.keys()
        assert all(self._waiting.values())
        assert all(list(queue) == sorted(queue) for queue in self._waiting.values())
        assert set(self._ready) == self._ready_set
        assert not self._ready_set & self.open.keys()
        assert not any(number in self._done for number in self.open)
