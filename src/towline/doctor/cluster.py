"""What a Kafka cluster says of itself and of the topics of a bridge; each fact is asked for when a check wants it.

Nothing is written, and no topic is made [I16]: a name is looked up in the cluster's list before it is asked about, as
``auto.create.topics.enable`` would make it, and a creation is only validated (CreateTopics, ``validate_only``). What is
left is one transactional id for each writer, which no writer has, until Kafka forgets it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from confluent_kafka import Producer
from confluent_kafka.admin import ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from towline import files
from towline.bridge.config.model import AnyLine, Bridge, DownLine, Line
from towline.bridge.lines.identity import Identity, former_topics
from towline.bridge.patterns import allowed
from towline.doctor.case import PROBE, Case
from towline.doctor.table import NotAsked, fact
from towline.kafka import admin, faults
from towline.kafka.clientconfig import QUIET, resolve
from towline.kafka.options import SinkSettings

#: Kafka's topic of transactions.
TRANSACTIONS: Final = "__transaction_state"
#: Seconds that the way to one broker may take.
_REACH_S: Final = 3.0
#: Settings of a new topic that promises rest on; brokers have them under the same names.
_INHERITED: Final = ("min.insync.replicas", "unclean.leader.election.enable")


class TopicRole(StrEnum):
    """What a topic is for, in the word that people read."""

    RECORDS = "records"
    DEAD_LETTERS = "dead letters"
    NOTICES = "failure notices"
    MARKERS = "markers"
    SOURCE = "source"


@dataclass(frozen=True)
class TopicUse:
    """A topic in one use of it by one line.

    Attributes:
        name, role, line: Which, what for, and of which line.
        partitions: As many as it has to have.
        keyed: Whether each record that is written has a key.
        must: Whether the line needs it; else a message may name it.
        made: Whether Towline makes it where it is missing, with so many copies (`replication`, -1 for the default).
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
        """What this user has to be allowed, as Kafka names operations; Describe comes with any [Kafka: AclEntry]."""
        read = self.role in {TopicRole.SOURCE, TopicRole.MARKERS}
        return (*(["READ"] if read else []), *(["WRITE"] if self.role is not TopicRole.SOURCE else []))


@dataclass(frozen=True)
class Writer:
    """A line that writes with transactions: what its ids begin with, and its transaction.timeout.ms."""

    line: str
    prefix: str
    timeout_ms: int

    @property
    def probe_id(self) -> str:
        """A transactional id that a right for the prefix covers and that no writer has."""
        return f"{self.prefix}{PROBE}"


def wanted(bridge: Bridge, listed: Collection[str]) -> tuple[TopicUse, ...]:
    """Every topic that the lines of a bridge use, sorted; those listed tell what a pattern, or a message, may name."""
    found = {one for line in bridge.lines for one in _of_line(bridge, line, sorted(listed))}
    return tuple(sorted(found, key=lambda one: (one.name, one.line, one.role)))


def _of_line(bridge: Bridge, line: Line | DownLine, listed: list[str]) -> Iterator[TopicUse]:
    create = bridge.kafka.create_topics
    plain = TopicUse("", TopicRole.RECORDS, line.name)
    if create is not None:
        plain = replace(plain, partitions=create.partitions, made=True, replication=create.replication_factor)
    yield from _written(line, plain, listed) if isinstance(line, Line) else _read(line, plain, listed)
    for name in filter(None, (line.dead_letter_topic, *{*former_topics(bridge)}.intersection(listed))):
        yield replace(plain, name=name, role=TopicRole.DEAD_LETTERS)
    if (sink := _sink(bridge, line)) is not None:
        name = sink.markers_of(str(sink.sink_id))
        yield TopicUse(name, TopicRole.MARKERS, line.name, line.parallelism, made=sink.create_marker_topic)


def _written(line: Line, plain: TopicUse, listed: list[str]) -> Iterator[TopicUse]:
    """Topics of records; a message may name one that is listed, or allowed."""
    for route in line.routes:
        one = replace(plain, keyed=route.key is not None)
        yield from (replace(one, name=name) for name in filter(None, (route.topic.constant, route.fallback_topic)))
        if route.topic.fields:
            there = {name for name in listed if allowed(name, route.allowed_topics)}
            for name in filter(route.may_become, {*route.allowed_topics, *there}):
                must = name in route.allowed_topics and plain.made
                yield replace(one, name=name, must=must, made=must)


def _read(line: DownLine, plain: TopicUse, listed: list[str]) -> Iterator[TopicUse]:
    """Topics of a downlink; a pattern takes what is listed."""
    yield from (TopicUse(name, TopicRole.SOURCE, line.name) for name in line.topics)
    found = (name for name in listed if name not in line.topics and line.reads(name))
    yield from (TopicUse(name, TopicRole.SOURCE, line.name, must=False) for name in found)
    yield from (replace(plain, name=name, role=TopicRole.NOTICES, must=plain.made) for name in line.listed_topics)


def _sink(bridge: Bridge, line: AnyLine) -> SinkSettings | None:
    """What the line's sink is told, where it writes with transactions."""
    if not line.transacts:
        return None
    options = bridge.sink_options(line, Identity.of(bridge, line).sink)
    return SinkSettings.parse({**options, "guarantee": line.guarantee.value})


@dataclass(frozen=True, kw_only=True)
class TopicSeen:
    """A topic as Kafka describes it.

    Attributes:
        name, partitions, leaderless: Its name, how many partitions it has, and how many of them without a leader.
        replicas, in_sync: Copies, and those in sync, of the partition that has fewest.
        config: Its settings; None where this user may not read them.
        allowed: What this user may do, as Kafka names operations; None where Kafka does not say it.
        planned: It is not there: Towline, or Kafka itself, makes it so.
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
        return _number(self.config, name)

    @property
    def policy(self) -> frozenset[str]:
        """The words of cleanup.policy; none where it can't be read."""
        text = (self.config or {}).get("cleanup.policy", "")
        return frozenset(word.strip() for word in text.split(",")) - {""}


def _number(config: Mapping[str, str] | None, name: str) -> int | None:
    text = (config or {}).get(name, "")
    return int(text) if text.lstrip("-").isdecimal() else None


class Cluster:
    """The Kafka of a bridge."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._client = case.bridge.kafka.client()
        self._cluster = admin.KafkaAdmin(self._client, case.patience)
        self.servers = self._client["bootstrap.servers"]

    @fact
    def listed(self) -> admin.ClusterInfo:
        """Brokers and topics; raises KafkaError where no server answers, ConfigError where none can be asked."""
        return self._cluster.info()

    @fact
    def unreached(self) -> Mapping[int, str]:
        """Why a broker can't be reached at the address that it gives to clients, by its id; only those."""
        brokers, seconds = self.listed.brokers, min(_REACH_S, self.case.patience)

        def reach(broker: str) -> str:
            host, _, port = broker.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
            except OSError as error:
                return files.why(error)
            except ValueError as error:  # a name that no resolver is asked for, a port that is none
                return str(error)
            return ""

        with ThreadPoolExecutor(max_workers=8) as pool:
            return {number: why for number, why in zip(brokers, pool.map(reach, brokers.values()), strict=True) if why}

    @fact
    def settings(self) -> Mapping[int, Mapping[str, str]]:
        """Of each broker whose settings this user may read, by its id; each tells its own, and only that."""
        reached = map(str, sorted(set(self.listed.brokers) - set(self.unreached)))
        found = self._asked().settings(reached, ResourceType.BROKER)
        return {int(number): settings for number, settings in found.items()}

    def least(self, name: str) -> int | None:
        """The lowest value that a broker has for a setting; None where none can be read."""
        found = [value for one in self.settings.values() if (value := _number(one, name)) is not None]
        return min(found, default=None)

    @fact
    def wanted(self) -> tuple[TopicUse, ...]:
        """The topics of the bridge."""
        return wanted(self.case.bridge, self.listed.topics)

    @fact
    def writers(self) -> tuple[Writer, ...]:
        """Who of the bridge writes with transactions."""
        bridge, found = self.case.bridge, []
        for line in bridge.lines:
            if (sink := _sink(bridge, line)) is not None:
                prefix = f"{sink.prefix}.{sink.sink_id}."
                found.append(Writer(line.name, prefix, int(sink.client["transaction.timeout.ms"])))
        return tuple(found)

    @fact
    def described(self) -> Mapping[str, TopicSeen | None]:
        """The topics of the bridge that are there, and `TRANSACTIONS`; None for one that may not even be seen."""
        names = sorted({one.name for one in self.wanted} | ({TRANSACTIONS} & set(self.listed.topics)))
        if not names:
            return {}
        configs = self._asked().settings(one for one in names if one in self.listed.topics)
        found = self._asked().described(names)
        return {name: None if one is None else _seen(one, configs.get(name)) for name, one in found.items()}

    @fact
    def may_create(self) -> Mapping[str, tuple[str, str]]:
        """Kafka's answer to each creation that Towline would ask for: its name for an error, and words; else empty."""
        missing = {one.name: one for one in self.wanted if one.made and one.name not in self.described}
        compacted = {TopicRole.MARKERS: {"cleanup.policy": "compact"}}
        new = [
            NewTopic(name, one.partitions, one.replication, config=compacted.get(one.role, {}))
            for name, one in missing.items()
        ]
        if not new:
            return {}
        validated = {"validate_only": True, "request_timeout": self.case.patience}
        return {
            name: _outcome(outcome)
            for name, outcome in self._asked().ask_each(lambda admin: admin.create_topics(new, **validated)).items()
        }

    @fact
    def topics(self) -> Mapping[str, TopicSeen]:
        """The topics of the bridge; those too that Towline or Kafka will make, as far as the brokers' settings tell."""
        found = {name: one for name, one in self.described.items() if one is not None}
        settings: Mapping[str, str] = next(iter(self.settings.values()), {})
        for one in self.wanted:
            made = one.made and one.name not in self.described and self._may_be(one.name)
            replicas = one.replication if one.replication > 0 else self.least("default.replication.factor")
            if made and replicas is not None:
                config = {name: settings[name] for name in _INHERITED if name in settings}
                found[one.name] = _planned(one.name, one.partitions, replicas, config)
        copies = self.least("transaction.state.log.replication.factor")
        if TRANSACTIONS not in found and copies is not None:
            least = str(self.least("transaction.state.log.min.isr") or "")
            found[TRANSACTIONS] = _planned(TRANSACTIONS, 1, copies, {"min.insync.replicas": least})
        return found

    def _may_be(self, name: str) -> bool:
        """Whether Kafka refuses to make a topic for want of a right at most."""
        refusal = self.may_create[name][0]
        return not refusal or faults.means(refusal, faults.Meaning.DENIED)

    @fact
    def hidden(self) -> Mapping[str, int]:
        """How many offsets are behind a transaction that stays open, by topic that a line reads; only where any are."""
        names, asked = {one.name for one in self.wanted if one.role is TopicRole.SOURCE}, self._asked()
        found: dict[str, int] = {}
        for name in sorted(names & {name for name, one in self.described.items() if one is not None}):
            from_the_first = {name: {str(part): 0 for part in range(self.topics[name].partitions)}}
            _, found[name] = asked.backlog(from_the_first)
        return {name: one for name, one in found.items() if one and not asked.settled(name)}

    @fact
    def begun(self) -> Mapping[str, tuple[str, str]]:
        """For each writer's probe id what became of a producer with it and the writer's time-out; as `may_create`."""
        log = self.topics.get(TRANSACTIONS)
        if log is not None and log.planned and log.replicas > len(self.listed.brokers):
            return {}
        return {one.probe_id: self._begin(one) for one in self.writers}

    def _begin(self, writer: Writer) -> tuple[str, str]:
        told = {"transactional.id": writer.probe_id, "transaction.timeout.ms": str(writer.timeout_ms)}
        quiet: dict[str, Any] = {"reconnect.backoff.ms": "0", "error_cb": lambda _error: None}
        try:
            producer = Producer({**resolve(self._client), **told, **quiet}, logger=QUIET)
            producer.list_topics(
                timeout=self.case.patience
            )  # else looking for the coordinator takes half a second more
            producer.init_transactions(self.case.patience)
        except faults.FOREIGN as problem:
            return _outcome(problem)
        return "", ""

    def _asked(self) -> admin.KafkaAdmin:
        """The client for what needs more than the list; raises NotAsked where no broker is where it says to be."""
        if len(self.unreached) == len(self.listed.brokers):
            raise NotAsked("no broker can be reached at the address that it gives to clients")
        return self._cluster


def _seen(described: Any, config: Mapping[str, str] | None) -> TopicSeen:
    parts, operations = described.partitions, described.authorized_operations
    return TopicSeen(
        name=described.name,
        partitions=len(parts),
        replicas=min((len(one.replicas) for one in parts), default=0),
        in_sync=min((len(one.isr) for one in parts), default=0),
        leaderless=sum(one.leader is None or one.leader.id < 0 for one in parts),
        config=config,
        allowed=None if operations is None else frozenset(one.name for one in operations),
    )


def _planned(name: str, partitions: int, replicas: int, config: Mapping[str, str] | None) -> TopicSeen:
    return TopicSeen(name=name, partitions=partitions, replicas=replicas, in_sync=replicas, config=config, planned=True)


def _outcome(answer: Any) -> tuple[str, str]:
    """Kafka's name for what went wrong and its words, or nothing."""
    if not isinstance(answer, faults.FOREIGN):
        return "", ""
    return faults.name_of(answer) or "_FAIL", faults.reason(answer)
