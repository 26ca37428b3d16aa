"""Asks Kafka: the thin edge. It writes nothing, and makes nothing but one transactional id for each writer.

A topic's name is looked up in the cluster's list before it is asked about by name, so nothing is created on the way
(``auto.create.topics.enable``); a creation is only validated (CreateTopics, ``validate_only``).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from towline import files
from towline.doctor.kafka.copies import can_begin
from towline.doctor.kafka.seen import OK, TRANSACTIONS, KafkaSeen, TopicSeen
from towline.doctor.kafka.wanted import TopicRole
from towline.kafka import admin, faults
from towline.kafka.clientconfig import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka.admin import AdminClient

    from towline.doctor.case import Case
    from towline.doctor.kafka.wanted import TransactionWriter, WantedTopic

__all__ = ["UNANSWERED", "loopback", "read"]

#: Seconds that the way to one broker may take.
_REACH_S: Final = 3.0
_DENIED: Final = "TOPIC_AUTHORIZATION_FAILED"
#: What an answer is in place of a result: an error of Kafka's, or none in time.
UNANSWERED: Final = (*faults.FOREIGN, TimeoutError)
_COMPACTED: Final = {"cleanup.policy": "compact"}


def read(
    case: Case,
    wanted: Callable[[Iterable[str]], tuple[WantedTopic, ...]],
    writers: Iterable[TransactionWriter],
) -> tuple[KafkaSeen, tuple[WantedTopic, ...]]:
    """Ask a cluster all that the rules need.

    Args:
        case: Whose Kafka.
        wanted: Tells the topics of the bridge, given those there are.
        writers: Who writes with transactions.

    Raises:
        KafkaError: TL-K01: no server answered.
        ConfigError: The client's configuration is impossible.
    """
    client, patience = case.bridge.kafka.client(), case.patience
    with admin.looking(client) as asked:
        begin = case.monotonic()
        listed = asked.list_topics(timeout=patience)
        answer_s = case.monotonic() - begin
        brokers = {number: f"{one.host}:{one.port}" for number, one in listed.brokers.items()}
        told: dict[str, Any] = {
            "servers": client["bootstrap.servers"],
            "cluster_id": listed.cluster_id,
            "answer_s": answer_s,
            "brokers": brokers,
            "unreached": _unreached(brokers, min(_REACH_S, patience)),
            "listed": {name: len(topic.partitions) for name, topic in listed.topics.items()},
            "local": all(map(loopback, brokers.values())),
        }
        needed = wanted(told["listed"])
        if len(told["unreached"]) == len(brokers):  # whoever is asked for more, would not answer
            return KafkaSeen(**told), needed
        topics, hidden = _topics(asked, {one.name for one in needed}, told["listed"], patience)
        told |= {
            "settings": _settings(asked, set(brokers) - set(told["unreached"]), patience),
            "topics": topics,
            "hidden": hidden,
            "may_create": _may_create(asked, [one for one in needed if one.made and one.name not in topics], patience),
        }
    if can_begin(KafkaSeen(**told)):
        told["transactions"] = {one.probe_id: _begun(client, one, patience) for one in writers}
    return KafkaSeen(**told), needed


def _unreached(brokers: Mapping[int, str], seconds: float) -> dict[int, str]:
    """Which brokers can't be reached at the address that they give to clients, and why."""

    def reach(broker: str) -> str:
        host, _, port = broker.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
        except OSError as error:
            return files.why(error)
        return OK

    with ThreadPoolExecutor(max_workers=8) as pool:
        return {number: why for number, why in zip(brokers, pool.map(reach, brokers.values()), strict=True) if why}


def loopback(broker: str) -> bool:
    """Whether ``host:port`` is this machine itself."""
    host = broker.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _topics(
    asked: AdminClient, names: set[str], listed: Mapping[str, int], seconds: float
) -> tuple[dict[str, TopicSeen], frozenset[str]]:
    """The topics that are there, and which may not even be seen."""
    asked_for = sorted(names | ({TRANSACTIONS} & set(listed)))
    configs = _configs(asked, ResourceType.TOPIC, [name for name in asked_for if name in listed], seconds)
    collection = TopicCollection(asked_for)
    answers = asked.describe_topics(collection, include_authorized_operations=True, request_timeout=seconds)
    found: dict[str, TopicSeen] = {}
    hidden = set()
    for name, future in answers.items() if asked_for else ():
        try:
            found[name] = _topic(future.result(seconds), configs.get(name))
        except UNANSWERED as problem:
            if faults.name_of(problem) == _DENIED:
                hidden.add(name)
    return found, frozenset(hidden)


def _topic(described: Any, config: Mapping[str, str] | None) -> TopicSeen:
    parts = described.partitions
    operations = described.authorized_operations
    return TopicSeen(
        name=described.name,
        partitions=len(parts),
        replicas=min((len(one.replicas) for one in parts), default=0),
        in_sync=min((len(one.isr) for one in parts), default=0),
        leaderless=sum(one.leader is None or one.leader.id < 0 for one in parts),
        config=config,
        allowed=None if operations is None else frozenset(one.name for one in operations),
    )


def _settings(asked: AdminClient, brokers: set[int], seconds: float) -> dict[int, Mapping[str, str]]:
    found: dict[int, Mapping[str, str]] = {}
    for number in sorted(brokers):  # each tells its own, and only that
        config = _configs(asked, ResourceType.BROKER, [str(number)], seconds).get(str(number))
        if config is not None:
            found[number] = config
    return found


def _configs(asked: AdminClient, kind: Any, names: list[str], seconds: float) -> dict[str, Mapping[str, str]]:
    """Settings of topics or brokers; whose this user may not read is left out."""
    if not names:
        return {}
    found: dict[str, Mapping[str, str]] = {}
    resources = [ConfigResource(kind, name) for name in names]
    for resource, future in asked.describe_configs(resources, request_timeout=seconds).items():
        try:
            entries = future.result(seconds)
        except UNANSWERED:
            continue
        found[resource.name] = {name: entry.value for name, entry in entries.items() if entry.value is not None}
    return found


def _may_create(asked: AdminClient, missing: list[WantedTopic], seconds: float) -> dict[str, tuple[str, str]]:
    """Kafka's answer to each creation that Towline would ask for, when it is only to validate it."""
    new = {
        one.name: NewTopic(
            one.name,
            one.partitions,
            one.replication,
            config=_COMPACTED if one.role is TopicRole.MARKERS else {},
        )
        for one in missing
    }
    if not new:
        return {}
    futures = asked.create_topics(list(new.values()), validate_only=True, request_timeout=seconds)
    return {name: _outcome(future, seconds) for name, future in futures.items()}


def _outcome(future: Any, seconds: float) -> tuple[str, str]:
    """Kafka's name for what went wrong and its words, or `OK` and nothing."""
    try:
        future.result(seconds)
    except UNANSWERED as problem:
        return faults.name_of(problem) or "_FAIL", faults.reason(problem)
    return OK, ""


def _begun(client: Mapping[str, str], writer: TransactionWriter, seconds: float) -> tuple[str, str]:
    """Begin a producer with the writer's probe id and time-out, as the writer does with its own."""
    told: dict[str, Any] = {
        **admin.client_config(client),
        "transactional.id": writer.probe_id,
        "transaction.timeout.ms": str(writer.clock_ms),
        "reconnect.backoff.ms": "0",
        "error_cb": lambda _error: None,
    }
    try:
        producer = Producer(told, logger=QUIET)
        producer.list_topics(timeout=seconds)  # else the look-up of the coordinator takes half a second longer
        producer.init_transactions(seconds)
    except UNANSWERED as problem:
        return faults.name_of(problem) or "_FAIL", faults.reason(problem)
    return OK, ""
