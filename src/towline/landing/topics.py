"""The two topics of a journal in Kafka: made, or looked at, before anything is taken in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from towline.errors import ConfigError, KafkaError
from towline.kafka import admin

if TYPE_CHECKING:
    from towline.kafka.admin import TopicFacts
    from towline.landing.place import LandingPlace

__all__ = ["NewTopics", "Topics", "ensure", "problem_of", "record_bytes", "weaknesses"]

#: Nothing goes by itself: rows are removed when they are committed, state when a newer snapshot is there.
_CONFIG: Final = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
#: Kafka's default of max.message.bytes, where a topic's own can't be read.
_MESSAGE_BYTES: Final = 1_048_588
#: A row without its payload has its topic at least, 65,535 bytes of which JSON makes six each where a device wrote
#: control characters, and a piece of state (`towline.landing.statelog`) is smaller: whatever comes has a place [I15].
_LEAST_BYTES: Final = 512 << 10
#: Bytes of a record that are not its key or value, and of its batch.
_AROUND: Final = 1024
_TIMEOUT_S: Final = 10.0
_LOOK_S: Final = 0.1


class NewTopics(NamedTuple):
    """How missing topics are made.

    Attributes:
        partitions: Of the landing topic, at least; the state topic has twice as many.
        replication: Copies; -1 for the cluster's default.
    """

    partitions: int = 1
    replication: int = -1


class Topics(NamedTuple):
    """What was found.

    Attributes:
        record_bytes: The largest key and value of a row's record.
        weak: What breaks the promise when a broker is lost, a line each.
    """

    record_bytes: int
    weak: tuple[str, ...]


def ensure(place: LandingPlace, create: NewTopics | None) -> Topics:
    """See that both topics are there and keep what they get; make them if that is wanted.

    Raises:
        ConfigError: TL-J35, one is missing, deletes or compacts what it gets, or takes small records only.
        KafkaError: TL-K01, TL-K09.
    """
    wanted = {place.topic: place.partition + 1, place.state_topic: 2 * place.partition + 2}
    facts = _facts(place, wanted)
    if create is not None and len(facts) < len(wanted):
        counts = {place.topic: max(wanted[place.topic], create.partitions)}
        counts[place.state_topic] = max(wanted[place.state_topic], 2 * create.partitions)
        admin.create_topics(place.client, counts, replication=create.replication, config=_CONFIG, timeout=_TIMEOUT_S)
        facts = _soon(place, wanted)
    for name, count in wanted.items():
        if problem := problem_of(name, facts.get(name), count):
            what, do = problem
            raise ConfigError("TL-J35", place.servers, what, do.replace("SERVERS", place.servers))
    weak = tuple(text for name in wanted for text in weaknesses(name, facts[name]))
    return Topics(record_bytes(facts[place.topic]), weak)


def record_bytes(facts: TopicFacts) -> int:
    """The largest key and value that a topic takes in one record."""
    return (facts.max_bytes or _MESSAGE_BYTES) - _AROUND


def _facts(place: LandingPlace, wanted: dict[str, int]) -> dict[str, TopicFacts]:
    return admin.topic_facts(place.client, wanted, _TIMEOUT_S)


def _soon(place: LandingPlace, wanted: dict[str, int]) -> dict[str, TopicFacts]:
    """The facts of topics that were just made: in a cluster the next broker that is asked may not know them yet."""
    deadline = time.monotonic() + _TIMEOUT_S
    while len(facts := _facts(place, wanted)) < len(wanted):
        if time.monotonic() > deadline:
            do = "Is a broker down?"
            raise KafkaError("TL-K09", place.servers, "topics were made, and no broker knows them", do)
        time.sleep(_LOOK_S)
    return facts


def problem_of(name: str, facts: TopicFacts | None, partitions: int) -> tuple[str, str] | None:
    """Why a topic can't hold a journal, and what to do; None if it can."""
    create = "kafka-topics.sh --bootstrap-server SERVERS"
    if facts is None:
        settings = " ".join(f"--config {key}={value}" for key, value in _CONFIG.items() if value != "delete")
        what = f'the topic "{name}" does not exist, or this user may not see it'
        return (
            what,
            f"Set [kafka] create_topics, or: {create} --create --topic {name} --partitions {partitions} {settings}",
        )
    if facts.partitions < partitions:
        what = f'the topic "{name}" has {facts.partitions} partitions, {partitions} are needed'
        return what, f"{create} --alter --topic {name} --partitions {partitions}"
    alter = f"kafka-configs.sh --bootstrap-server SERVERS --alter --topic {name} --add-config"
    if facts.compacted:
        what = f'the topic "{name}" has cleanup.policy={facts.policy}: it would forget what nobody has committed'
        return what, f"{alter} cleanup.policy=delete"
    for key, value in zip(("retention.ms", "retention.bytes"), facts.retention, strict=True):
        if value not in (None, -1):
            what = f'the topic "{name}" has {key}={value}: it would delete what nobody has committed'
            return what, f"{alter} {key}=-1"
    if facts.max_bytes is not None and facts.max_bytes < _LEAST_BYTES:
        what = f'the topic "{name}" has max.message.bytes={facts.max_bytes}: a message could be too large for any row'
        return what, f"{alter} max.message.bytes={_LEAST_BYTES}, or more"
    return None


def weaknesses(name: str, facts: TopicFacts) -> Iterator[str]:
    """What may lose acknowledged messages when a broker is lost."""
    if facts.replicas < 2:
        yield f'"{name}" has one copy: who loses that broker loses what is not committed'
    elif facts.in_sync is not None and facts.in_sync < 2:
        yield f'"{name}" has min.insync.replicas={facts.in_sync}: a message may be acknowledged that one broker has'
    if facts.unclean:
        yield f'"{name}" has unclean.leader.election.enable=true: a leader that is behind forgets what was acknowledged'
