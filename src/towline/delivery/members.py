"""Which member of a line stores a message, where members share its messages by a hash: pure, and fixed for ever.

Every member subscribes to the same filters, and stores the messages that are its own:

    member = CRC32C(key in UTF-8) mod number of members

The key is one level of the topic, such as the device's, or the whole topic. A member's number is its place among the
names of all, sorted. Were any of this changed, a device's messages would go to another journal while older ones wait in
the first: the state directory remembers it (`towline.gateway.membership`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

from crc32c import crc32c

from towline.mqtt.filters import matches
from towline.mqtt.plain import MessageColumns
from towline.mqtt.screens import NOTHING, LeftOut, Screen, Screening, kept
from towline.mqtt.stubs import Published

__all__ = ["BothScreens", "HashedShare", "KeyLevel", "MemberScreen", "member_of"]

#: Topics whose member is remembered; then all are forgotten, because a device may choose them [I13].
_MOST_TOPICS: Final = 100_000


@dataclass(frozen=True, slots=True)
class KeyLevel:
    """Where the key stands in topics.

    Attributes:
        filter: Which topics.
        level: Of the topic, from 0; below the filter's ``#`` it may be missing, and then the whole topic is the key.
    """

    filter: str
    level: int


@dataclass(frozen=True, slots=True)
class HashedShare:
    """One member's share.

    Attributes:
        of: How many members there are, at least 1.
        place: Which of them this is, from 0.
        keys: Where the key stands, the first that takes a topic; the whole topic where none does.
    """

    of: int
    place: int
    keys: tuple[KeyLevel, ...] = ()

    def key(self, topic: str) -> str:
        """What is hashed of a topic."""
        for one in self.keys:
            if matches(one.filter, topic):
                levels = topic.split("/")
                return levels[one.level] if one.level < len(levels) else topic
        return topic

    def has(self, topic: str) -> bool:
        """Whether this member stores the messages of a topic."""
        return member_of(self.key(topic), self.of) == self.place


def member_of(key: str, of: int) -> int:
    """The number of the member for a key."""
    return int(crc32c(key.encode())) % of


class MemberScreen:
    """Leaves the messages of other members out.

    Args:
        share: What this member stores.
    """

    tagged = False

    def __init__(self, share: HashedShare) -> None:
        self._share = share
        #: Topic → what becomes of its messages.
        self._known: dict[str, int] = {}

    def packets(self, packets: Sequence[Published], topics: Sequence[str]) -> Screening:
        """Of messages, their topic aliases resolved."""
        del packets
        return Screening(_sparse(bytes(map(self._verdict, topics))), ())

    def plain(self, columns: MessageColumns) -> bytes:
        """Of messages without properties."""
        return _sparse(columns.by_topic(self._verdict))

    def _verdict(self, topic: str) -> int:
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= _MOST_TOPICS:
                self._known.clear()
            known = self._known[topic] = LeftOut.STORE if self._share.has(topic) else LeftOut.OTHER_MEMBER
        return known


class BothScreens:
    """Two screens: the second is asked about what the first has stored.

    Args:
        first: One without tags.
        second: Its tags are those of the messages.
    """

    def __init__(self, first: Screen, second: Screen) -> None:
        self._first = first
        self._second = second

    @property
    def tagged(self) -> bool:
        """As the second says."""
        return self._second.tagged

    def packets(self, packets: Sequence[Published], topics: Sequence[str]) -> Screening:
        """Of messages, their topic aliases resolved."""
        before = self._first.packets(packets, topics).left_out
        if not before:
            return self._second.packets(packets, topics)
        stored = kept(before)
        after = self._second.packets(list(compress(packets, stored)), list(compress(topics, stored)))
        tags = iter(after.tags)
        every = [next(tags, None) if one else None for one in stored] if self.tagged else ()
        return Screening(_merged(before, after.left_out), every)

    def plain(self, columns: MessageColumns) -> bytes:
        """Of messages without properties."""
        before = self._first.plain(columns)
        if not before:
            return self._second.plain(columns)
        return _merged(before, self._second.plain(columns.only(kept(before))))


def _merged(before: bytes, after: bytes) -> bytes:
    """What two screens say, the second of what the first has stored."""
    if not after:
        return before
    later = iter(after)
    return bytes(one or next(later) for one in before)


def _sparse(left_out: bytes) -> bytes:
    return left_out if left_out.strip(b"\0") else NOTHING
