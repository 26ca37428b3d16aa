"""The Kafka topics that a bridge uses, what each is for, and the transactions it writes with. Pure but for one file.

The file is a line's ``identity.json``: a line that was begun again has markers of another name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from towline.bridge.config.model import AnyLine, DownLine, Line
from towline.bridge.config.patterns import allowed
from towline.bridge.lines.identity import Identity
from towline.guarantee import Guarantee, policy
from towline.kafka.options import SinkSettings

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

__all__ = ["PROBE", "TopicRole", "TransactionWriter", "WantedTopic", "wanted", "writers"]

#: How everything ends or begins that doctor makes in Kafka.
PROBE: Final = "towline-doctor"
#: What no pattern of a downlink takes [Kafka: Topic.INTERNAL_TOPICS].
_INTERNAL: Final = "__"


class TopicRole(StrEnum):
    """What a topic is for, in the word that people read."""

    RECORDS = "records"
    DEAD_LETTERS = "dead letters"
    NOTICES = "failure notices"
    MARKERS = "markers"
    SOURCE = "source"


#: What a user has to be allowed for each role; Kafka gives Describe with any of them [Kafka: AclEntry].
_RIGHTS: Final = {
    TopicRole.RECORDS: ("WRITE",),
    TopicRole.DEAD_LETTERS: ("WRITE",),
    TopicRole.NOTICES: ("WRITE",),
    TopicRole.MARKERS: ("READ", "WRITE"),
    TopicRole.SOURCE: ("READ",),
}


@dataclass(frozen=True)
class WantedTopic:
    """A topic in one use of it by one line.

    Attributes:
        name: Of the topic.
        role: What it is for.
        line: Of which line.
        partitions: As many as it has to have.
        keyed: Whether each record that is written has a key.
        must: Whether the line needs it; else a message may name it.
        made: Whether Towline makes it where it is missing.
        replication: Copies it is made with; -1 for the cluster's default.
    """

    name: str
    role: TopicRole
    line: str
    partitions: int = 1
    keyed: bool = True
    must: bool = True
    made: bool = False
    replication: int = -1

    @property
    def rights(self) -> tuple[str, ...]:
        """What this user has to be allowed, as Kafka names operations."""
        return _RIGHTS[self.role]

    @property
    def written(self) -> bool:
        """Whether the line writes into it."""
        return self.role is not TopicRole.SOURCE


@dataclass(frozen=True)
class TransactionWriter:
    """Who writes with transactions.

    Attributes:
        line: Name of the line.
        prefix: What its transactional ids begin with.
        clock_ms: Its transaction.timeout.ms.
    """

    line: str
    prefix: str
    clock_ms: int

    @property
    def probe_id(self) -> str:
        """A transactional id that a right for the prefix covers and that no writer has."""
        return f"{self.prefix}{PROBE}"


def wanted(bridge: Bridge, listed: Collection[str]) -> tuple[WantedTopic, ...]:
    """Every topic that the lines of a bridge use, sorted.

    Args:
        bridge: What the file says.
        listed: The topics there are: they tell what a pattern, or a message, may name.
    """
    found = {one for line in bridge.lines for one in _of_line(bridge, line, sorted(listed))}
    return tuple(sorted(found, key=lambda one: (one.name, one.line, one.role)))


def _of_line(bridge: Bridge, line: Line | DownLine, listed: list[str]) -> Iterator[WantedTopic]:
    create = bridge.kafka.create_topics
    made = create is not None
    partitions = 1 if create is None else create.partitions
    replication = -1 if create is None else create.replication_factor

    def made_so(name: str, role: TopicRole, *, keyed: bool = True, must: bool = True) -> WantedTopic:
        count = partitions if made else 1
        return WantedTopic(name, role, line.name, count, keyed, must, made and must, replication)

    if isinstance(line, Line):
        for name, keyed, must in _targets(line, listed, all_listed=made):
            yield made_so(name, TopicRole.RECORDS, keyed=keyed, must=must)
    else:
        yield from (WantedTopic(name, TopicRole.SOURCE, line.name, must=must) for name, must in _sources(line, listed))
        for name in sorted(line.listed_topics):
            yield made_so(name, TopicRole.NOTICES, must=made)
    if line.dead_letter_topic:
        yield made_so(line.dead_letter_topic, TopicRole.DEAD_LETTERS)
    if (settings := _sink(bridge, line)) is not None:
        name = settings.markers_of(_sink_id(bridge, line))
        yield WantedTopic(name, TopicRole.MARKERS, line.name, line.parallelism, made=settings.create_marker_topic)


def _targets(line: Line, listed: list[str], *, all_listed: bool) -> Iterator[tuple[str, bool, bool]]:
    """Topics of records, whether each of them has a key, and whether it has to be there."""
    keyed: dict[str, bool] = {}
    must: dict[str, bool] = {}

    def note(name: str, *, key: bool, needed: bool) -> None:
        keyed[name] = keyed.get(name, True) and key
        must[name] = must.get(name, False) or needed

    for route in line.routes:
        key = route.key is not None
        for name in filter(None, (route.topic.constant, route.fallback_topic)):
            note(name, key=key, needed=True)
        if route.topic.fields and route.allowed_topics:
            named = [name for name in route.allowed_topics if route.may_become(name)]
            for name in named:
                note(name, key=key, needed=all_listed)
        if route.topic.fields:
            for name in listed:
                if route.may_become(name) and allowed(name, route.allowed_topics):
                    note(name, key=key, needed=False)
    yield from ((name, keyed[name], must[name]) for name in keyed)


def _sources(line: DownLine, listed: list[str]) -> Iterator[tuple[str, bool]]:
    section = line.section
    yield from ((name, True) for name in section.topics)
    for name in listed:
        if name not in section.topics and not name.startswith(_INTERNAL) and section.reads(name):
            yield name, False


def _sink_id(bridge: Bridge, line: AnyLine) -> str:
    identity = Identity.read(line.gateway.state_dir) or Identity.new(bridge.name, line.name)
    return identity.sink


def _sink(bridge: Bridge, line: AnyLine) -> SinkSettings | None:
    """What the line's sink is told, where it writes with transactions."""
    writes = isinstance(line, Line) or line.dead_letter_topic is not None
    if not writes or not policy(line.guarantee).transactions:
        return None
    client = {f"kafka.{name}": value for name, value in bridge.kafka.client().items()}
    own = {"guarantee": Guarantee.EXACTLY_ONCE.value, "parallelism": str(line.parallelism)}
    return SinkSettings.parse({**client, **own})


def writers(bridge: Bridge) -> tuple[TransactionWriter, ...]:
    """Who of a bridge writes with transactions: sinks that are exactly once.

    Raises:
        ConfigError: As `SinkSettings.parse`.
    """
    found = []
    for line in bridge.lines:
        if (settings := _sink(bridge, line)) is not None:
            prefix = f"{settings.prefix}.{_sink_id(bridge, line)}."
            found.append(TransactionWriter(line.name, prefix, int(settings.client["transaction.timeout.ms"])))
    return tuple(found)
