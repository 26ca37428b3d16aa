"""What Kafka said of itself and of the topics of a bridge; values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from towline.doctor.kafka.wanted import TopicRole

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge
    from towline.doctor.case import LineLoad
    from towline.doctor.kafka.wanted import TransactionWriter, WantedTopic

__all__ = ["OK", "TRANSACTIONS", "KafkaSeen", "LookedAt", "TopicSeen", "number"]

#: Kafka's topic of transactions.
TRANSACTIONS: Final = "__transaction_state"
#: Outcome of what was tried and went well; others have the name of Kafka's error.
OK: Final = ""


def number(config: Mapping[str, str] | None, name: str) -> int | None:
    """A setting that is a whole number; None where it can't be read."""
    text = (config or {}).get(name, "")
    return int(text) if text.lstrip("-").isdecimal() else None


@dataclass(frozen=True, kw_only=True)
class TopicSeen:
    """A topic as Kafka describes it.

    Attributes:
        name: Of the topic.
        partitions: How many.
        replicas: Copies of the partition that has fewest.
        in_sync: Those in sync of the partition that has fewest of them.
        leaderless: Partitions without a leader.
        config: Its settings; None where this user may not read them.
        allowed: What this user may do, as Kafka names operations; None where Kafka does not say it.
        planned: It is not there: Towline makes it so.
    """

    name: str
    partitions: int = 1
    replicas: int = 1
    in_sync: int = 1
    leaderless: int = 0
    config: Mapping[str, str] | None = None
    allowed: frozenset[str] | None = None
    planned: bool = False

    def number(self, name: str) -> int | None:
        """A setting that is a whole number; None where it can't be read."""
        return number(self.config, name)

    @property
    def policy(self) -> frozenset[str]:
        """The words of cleanup.policy; none where it can't be read."""
        text = (self.config or {}).get("cleanup.policy", "")
        return frozenset(word.strip() for word in text.split(",")) - {""}

    @property
    def min_in_sync(self) -> int | None:
        """Its min.insync.replicas."""
        return self.number("min.insync.replicas")


_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class KafkaSeen:
    """A cluster.

    Attributes:
        servers: The bootstrap servers, for messages.
        cluster_id: Kafka's id of it.
        answer_s: Seconds it took to answer.
        brokers: ``host:port`` of each broker, by id, as it tells its clients.
        unreached: Why a broker can't be reached from here, by id; only those.
        settings: Of each broker whose settings this user may read, by id.
        listed: Partitions of each topic this user may see.
        topics: Those of the bridge that are there, and `TRANSACTIONS`, by name.
        hidden: Topics of the bridge that this user may not even see.
        may_create: For each missing topic that Towline would make: `OK`, or Kafka's error, when it is asked to validate
            the creation without doing it.
        transactions: For each transactional writer's probe id: `OK`, or the name of Kafka's error, when a producer
            with that id was begun.
        local: Whether all brokers are on loopback.
    """

    servers: str
    cluster_id: str = ""
    answer_s: float = 0.0
    brokers: Mapping[int, str]
    unreached: Mapping[int, str] = field(default_factory=dict)
    settings: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    listed: Mapping[str, int] = field(default_factory=dict)
    topics: Mapping[str, TopicSeen] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    may_create: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    transactions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    local: bool = False

    def least(self, name: str) -> int | None:
        """The lowest value that a broker has for a setting; None where none can be read."""
        found = [value for one in self.settings.values() if (value := number(one, name)) is not None]
        return min(found, default=None)

    def texts(self, name: str) -> frozenset[str]:
        """The values that brokers have for a setting."""
        return frozenset(one[name] for one in self.settings.values() if name in one)

    @property
    def alone(self) -> bool:
        """Whether it has one broker."""
        return len(self.brokers) == 1


@dataclass(frozen=True, kw_only=True)
class LookedAt:
    """What the rules judge.

    Attributes:
        bridge: What the file says.
        kafka: What was seen.
        wanted: The topics of the bridge.
        writers: Its transactional writers.
        total: What comes in on all lines; None where it is not known.
    """

    bridge: Bridge
    kafka: KafkaSeen
    wanted: tuple[WantedTopic, ...] = ()
    writers: tuple[TransactionWriter, ...] = ()
    total: LineLoad | None = None

    def of(self, *roles: TopicRole) -> list[TopicSeen]:
        """The topics with one of these roles that are there, each once; of all roles where none is named."""
        chosen = roles or tuple(TopicRole)
        names = dict.fromkeys(one.name for one in self.wanted if one.role in chosen)
        return [self.kafka.topics[name] for name in names if name in self.kafka.topics]

    def uses(self, name: str) -> list[WantedTopic]:
        """What a topic is used for."""
        return [one for one in self.wanted if one.name == name]
