"""The topics that Towline will make, as the cluster's settings make them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from towline.doctor.kafka.seen import OK, TopicSeen, number
from towline.doctor.kafka.topics import DENIED
from towline.doctor.kafka.wanted import TopicRole

if TYPE_CHECKING:
    from towline.doctor.kafka.seen import KafkaSeen
    from towline.doctor.kafka.wanted import WantedTopic

__all__ = ["planned"]

#: A topic's setting, and the broker's of which it is the default [Kafka: ServerTopicConfigSynonyms].
_SYNONYMS: Final = {
    "cleanup.policy": "log.cleanup.policy",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.type": "log.message.timestamp.type",
    "min.insync.replicas": "min.insync.replicas",
    "retention.bytes": "log.retention.bytes",
    "unclean.leader.election.enable": "unclean.leader.election.enable",
}
#: Where a topic's retention.ms is from, the first that is set, and how many milliseconds its unit has.
_RETENTION: Final = (("log.retention.ms", 1), ("log.retention.minutes", 60_000), ("log.retention.hours", 3_600_000))
#: What Towline itself sets, by what the topic is for.
_OURS: Final[Mapping[TopicRole, Mapping[str, str]]] = {
    TopicRole.MARKERS: {"cleanup.policy": "compact"},
}


def planned(kafka: KafkaSeen, wanted: Iterable[WantedTopic]) -> dict[str, TopicSeen]:
    """What each topic will be that is missing and that Towline makes.

    Left out are those that Kafka refuses to make for another reason than a right, and all where neither the file nor
    a broker says how many copies there will be.
    """
    return {one.name: one for one in _each(kafka, wanted)}


def _each(kafka: KafkaSeen, wanted: Iterable[WantedTopic]) -> Iterator[TopicSeen]:
    copies = kafka.least("default.replication.factor")
    settings = next(iter(kafka.settings.values()), None)
    for one in wanted:
        outcome, _ = kafka.may_create.get(one.name, ("", ""))
        absent = one.made and one.name not in kafka.topics and one.name not in kafka.hidden
        replicas = one.replication if one.replication > 0 else copies
        if not absent or outcome not in {OK, *DENIED} or replicas is None:
            continue
        config = None if settings is None else {**_defaults(settings), **_OURS.get(one.role, {})}
        yield TopicSeen(
            name=one.name,
            partitions=one.partitions,
            replicas=replicas,
            in_sync=replicas,
            config=config,
            planned=True,
        )


def _defaults(settings: Mapping[str, str]) -> dict[str, str]:
    found = {name: settings[broker] for name, broker in _SYNONYMS.items() if broker in settings}
    for name, unit in _RETENTION:
        value = number(settings, name)
        if value is not None:
            found["retention.ms"] = str(value if value < 0 else value * unit)
            break
    return found
