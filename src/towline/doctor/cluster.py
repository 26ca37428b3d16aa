"""Probes of a Kafka cluster and of the topics of a bridge; each fact is probed once, when a check needs it.

Nothing is written and no topic is created [I16]. A topic is described only if the cluster lists it, because
``auto.create.topics.enable`` would create it. A creation is only validated (CreateTopics, ``validate_only``). One
unused transactional id per writer remains until Kafka expires it.
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
from towline.bridge.config.model import AnyLine, Bridge, Downlink, Uplink
from towline.bridge.lines.identity import Identity, former_dead_letter_topics
from towline.bridge.patterns import is_allowed
from towline.doctor.inputs import PROBE_PREFIX, Inputs
from towline.doctor.table import ProbeSkipped, fact
from towline.kafka import admin, faults
from towline.kafka.clientconfig import QUIET_LOGGER, resolve
from towline.kafka.options import SinkSettings

#: Kafka's internal topic of transaction states.
TRANSACTION_TOPIC: Final = "__transaction_state"
#: Timeout in seconds of a connection to one broker.
_CONNECT_TIMEOUT_S: Final = 3.0
#: Settings that a new topic inherits from its broker under the same name, as far as checks need them.
_INHERITED_SETTINGS: Final = ("min.insync.replicas", "unclean.leader.election.enable")


class TopicRole(StrEnum):
    """Role of a topic, as shown to people."""

    RECORDS = "records"
    DEAD_LETTERS = "dead letters"
    NOTICES = "failure notices"
    MARKERS = "markers"
    SOURCE = "source"


@dataclass(frozen=True)
class TopicUse:
    """Use of a topic by one line.

    Attributes:
        name, role, line: Name and role of the topic, and name of the line.
        partitions: Number of partitions required.
        keyed: Whether each written record has a key.
        required: Whether the line needs the topic; otherwise a message may name it.
        auto_created: Whether Towline creates the topic if it is missing, with `replication` copies (-1 for the
            default).
    """

    name: str
    role: TopicRole
    line: str
    partitions: int = 1
    keyed: bool = True
    required: bool = True
    auto_created: bool = False
    replication: int = -1

    @property
    def operations(self) -> tuple[str, ...]:
        """ACL operations that this user needs; any of them implies Describe [Kafka: AclEntry]."""
        reads = self.role in {TopicRole.SOURCE, TopicRole.MARKERS}
        return (*(["READ"] if reads else []), *(["WRITE"] if self.role is not TopicRole.SOURCE else []))


@dataclass(frozen=True)
class TransactionalWriter:
    """Transactional writer of a line: prefix of its transactional ids, and its transaction.timeout.ms."""

    line: str
    prefix: str
    timeout_ms: int

    @property
    def probe_id(self) -> str:
        """Transactional id that an ACL for the prefix covers and that no writer uses."""
        return f"{self.prefix}{PROBE_PREFIX}"


def topic_uses(bridge: Bridge, topic_names: Collection[str]) -> tuple[TopicUse, ...]:
    """Return every topic use of a bridge, sorted; patterns and fields of messages are matched against `topic_names`."""
    uses = {use for line in bridge.lines for use in _line_topic_uses(bridge, line, sorted(topic_names))}
    return tuple(sorted(uses, key=lambda use: (use.name, use.line, use.role)))


def _line_topic_uses(bridge: Bridge, line: Uplink | Downlink, topic_names: list[str]) -> Iterator[TopicUse]:
    template = TopicUse("", TopicRole.RECORDS, line.name)
    if (new := bridge.kafka.create_topics) is not None:
        template = replace(template, partitions=new.partitions, auto_created=True, replication=new.replication_factor)
    if isinstance(line, Uplink):
        yield from _uplink_topics(line, template, topic_names)
    else:
        yield from _downlink_topics(line, template, topic_names)
    for name in filter(None, (line.dead_letter_topic, *{*former_dead_letter_topics(bridge)}.intersection(topic_names))):
        yield replace(template, name=name, role=TopicRole.DEAD_LETTERS)
    if (sink := _sink_settings(bridge, line)) is not None:
        name = sink.marker_topic_of(str(sink.sink_id))
        yield TopicUse(name, TopicRole.MARKERS, line.name, line.parallelism, auto_created=True)


def _uplink_topics(line: Uplink, template: TopicUse, topic_names: list[str]) -> Iterator[TopicUse]:
    """Yield the record topics of an uplink; a message may name one that exists or is allowed."""
    for route in line.routes:
        use = replace(template, keyed=route.key is not None)
        if route.topic.constant:
            yield replace(use, name=route.topic.constant)
        else:
            existing_topics = {name for name in topic_names if is_allowed(name, route.allowed_topics)}
            for name in filter(route.may_name_topic, {*route.allowed_topics, *existing_topics}):
                required = name in route.allowed_topics and template.auto_created
                yield replace(use, name=name, required=required, auto_created=required)


def _downlink_topics(line: Downlink, template: TopicUse, topic_names: list[str]) -> Iterator[TopicUse]:
    """Yield the source topics of a downlink, with the existing topics that match its pattern."""
    yield from (TopicUse(name, TopicRole.SOURCE, line.name) for name in line.topics)
    matching_topics = (name for name in topic_names if name not in line.topics and line.reads(name))
    yield from (TopicUse(name, TopicRole.SOURCE, line.name, required=False) for name in matching_topics)
    notices = replace(template, role=TopicRole.NOTICES, required=template.auto_created)
    yield from (replace(notices, name=name) for name in line.listed_topics)


def _sink_settings(bridge: Bridge, line: AnyLine) -> SinkSettings | None:
    """Return the sink settings of a line that writes with transactions; else None."""
    if not line.transactional:
        return None
    options = bridge.sink_options(line, Identity.of_line(bridge, line).sink)
    return SinkSettings.parse({**options, "guarantee": line.guarantee.value})


@dataclass(frozen=True, kw_only=True)
class TopicState:
    """State of a topic as Kafka describes it.

    Attributes:
        name, partitions, leaderless_partitions: Name, number of partitions, and number of partitions without a leader.
        replicas, in_sync: Replicas and in-sync replicas of the partition with the fewest.
        settings: Topic settings; None if this user may not read them.
        allowed_operations: ACL operations of this user; None if Kafka does not report them.
        is_planned: The topic does not exist; Towline or Kafka would create it so.
    """

    name: str
    partitions: int = 1
    replicas: int = 1
    in_sync: int = 1
    leaderless_partitions: int = 0
    settings: Mapping[str, str] | None = None
    allowed_operations: frozenset[str] | None = None
    is_planned: bool = False

    def int_setting(self, name: str) -> int | None:
        """Return a setting as a whole number; None if it can't be read."""
        return _int_setting(self.settings, name)

    @property
    def cleanup_policies(self) -> frozenset[str]:
        """Values of cleanup.policy; empty if it can't be read."""
        text = (self.settings or {}).get("cleanup.policy", "")
        return frozenset(policy_name.strip() for policy_name in text.split(",")) - {""}


def _int_setting(settings: Mapping[str, str] | None, name: str) -> int | None:
    text = (settings or {}).get(name, "")
    return int(text) if text.lstrip("-").isdecimal() else None


class ClusterProbe:
    """Probes of the Kafka cluster of a bridge."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._client_config = inputs.bridge.kafka.client_settings()
        self._admin = admin.KafkaAdmin(self._client_config, inputs.timeout_s)
        self.servers = self._client_config["bootstrap.servers"]

    @fact
    def cluster_info(self) -> admin.ClusterInfo:
        """Brokers and topics; raises KafkaError if no server answers, ConfigError for unusable client settings."""
        return self._admin.info()

    @fact
    def unreachable(self) -> Mapping[int, str]:
        """Connection error by broker id, for brokers that can't be reached at their advertised listener."""
        brokers, timeout_s = self.cluster_info.brokers, min(_CONNECT_TIMEOUT_S, self.inputs.timeout_s)

        def connect_error(broker: str) -> str:
            host, _, port = broker.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
            except OSError as error:
                return files.os_error_text(error)
            except ValueError as error:  # malformed host or port
                return str(error)
            return ""

        with ThreadPoolExecutor(max_workers=8) as pool:
            errors = zip(brokers, pool.map(connect_error, brokers.values()), strict=True)
            return {broker_id: error for broker_id, error in errors if error}

    @fact
    def broker_settings(self) -> Mapping[int, Mapping[str, str]]:
        """Settings by broker id, for brokers whose settings this user may read; each broker returns only its own."""
        reachable_ids = map(str, sorted(set(self.cluster_info.brokers) - set(self.unreachable)))
        settings_by_id = self._reachable_admin().configs(reachable_ids, ResourceType.BROKER)
        return {int(broker_id): settings for broker_id, settings in settings_by_id.items()}

    def lowest_setting(self, name: str) -> int | None:
        """Return the lowest value of a setting over all brokers; None if it can't be read."""
        values = (_int_setting(settings, name) for settings in self.broker_settings.values())
        return min((value for value in values if value is not None), default=None)

    @fact
    def topic_uses(self) -> tuple[TopicUse, ...]:
        """Topic uses of the bridge."""
        return topic_uses(self.inputs.bridge, self.cluster_info.topics)

    @fact
    def writers(self) -> tuple[TransactionalWriter, ...]:
        """Transactional writers of the bridge."""
        bridge, writers = self.inputs.bridge, []
        for line in bridge.lines:
            if (sink := _sink_settings(bridge, line)) is not None:
                prefix = f"{sink.prefix}.{sink.sink_id}."
                writers.append(TransactionalWriter(line.name, prefix, int(sink.client["transaction.timeout.ms"])))
        return tuple(writers)

    @fact
    def described_topics(self) -> Mapping[str, TopicState | None]:
        """Existing topics of the bridge and `TRANSACTION_TOPIC`; None for a topic without the right to describe it."""
        names = sorted({use.name for use in self.topic_uses} | ({TRANSACTION_TOPIC} & set(self.cluster_info.topics)))
        if not names:
            return {}
        configs = self._reachable_admin().configs(name for name in names if name in self.cluster_info.topics)
        topics = self._reachable_admin().describe_topics(names).items()
        return {name: None if topic is None else _topic_state(topic, configs.get(name)) for name, topic in topics}

    @fact
    def create_errors(self) -> Mapping[str, tuple[str, str]]:
        """Kafka's error name and text for each topic that Towline would create; empty strings on success."""
        uses = {use.name: use for use in self.topic_uses if use.auto_created and use.name not in self.described_topics}
        configs = {TopicRole.MARKERS: {"cleanup.policy": "compact"}}
        topics = [
            NewTopic(name, use.partitions, use.replication, config=configs.get(use.role, {}))
            for name, use in uses.items()
        ]
        if not topics:
            return {}
        options = {"validate_only": True, "request_timeout": self.inputs.timeout_s}
        answers = self._reachable_admin().request_each(lambda admin: admin.create_topics(topics, **options))
        return {name: _error_parts(answer) for name, answer in answers.items()}

    @fact
    def topics(self) -> Mapping[str, TopicState]:
        """Topics of the bridge, including planned ones as far as the brokers' settings determine them."""
        states = {name: state for name, state in self.described_topics.items() if state is not None}
        settings: Mapping[str, str] = next(iter(self.broker_settings.values()), {})
        for use in self.topic_uses:
            to_create = use.auto_created and use.name not in self.described_topics and self._may_create(use.name)
            replicas = use.replication if use.replication > 0 else self.lowest_setting("default.replication.factor")
            if to_create and replicas is not None:
                inherited = {name: settings[name] for name in _INHERITED_SETTINGS if name in settings}
                states[use.name] = _planned_topic(use.name, use.partitions, replicas, inherited)
        replicas_of_log = self.lowest_setting("transaction.state.log.replication.factor")
        if TRANSACTION_TOPIC not in states and replicas_of_log is not None:
            config = {"min.insync.replicas": str(self.lowest_setting("transaction.state.log.min.isr") or "")}
            states[TRANSACTION_TOPIC] = _planned_topic(TRANSACTION_TOPIC, 1, replicas_of_log, config)
        return states

    def _may_create(self, name: str) -> bool:
        """Return whether Kafka would create a topic, given the right to."""
        error_name = self.create_errors[name][0]
        return not error_name or faults.is_kind(error_name, faults.ErrorKind.ACCESS_RIGHTS)

    @fact
    def hidden_offsets(self) -> Mapping[str, int]:
        """Number of offsets behind an open transaction, by source topic; only topics with such offsets."""
        sources, admin_client = {u.name for u in self.topic_uses if u.role is TopicRole.SOURCE}, self._reachable_admin()
        counts: dict[str, int] = {}
        for name in sorted(name for name in sources if self.described_topics.get(name) is not None):
            first_offsets = {name: {str(partition): 0 for partition in range(self.topics[name].partitions)}}
            _, counts[name] = admin_client.backlog(first_offsets)
        open_counts = ((name, count) for name, count in counts.items() if count)
        return {name: count for name, count in open_counts if not admin_client.wait_for_open_transactions(name)}

    @fact
    def begin_errors(self) -> Mapping[str, tuple[str, str]]:
        """Error name and text of a transaction by probe id, with the writer's timeout; empty strings on success."""
        log_topic = self.topics.get(TRANSACTION_TOPIC)
        if log_topic is not None and log_topic.is_planned and log_topic.replicas > len(self.cluster_info.brokers):
            return {}
        return {writer.probe_id: self._try_transaction(writer) for writer in self.writers}

    def _try_transaction(self, writer: TransactionalWriter) -> tuple[str, str]:
        transaction_config = {"transactional.id": writer.probe_id, "transaction.timeout.ms": str(writer.timeout_ms)}
        quiet_config: dict[str, Any] = {"reconnect.backoff.ms": "0", "error_cb": lambda _error: None}
        try:
            config = {**resolve(self._client_config), **transaction_config, **quiet_config}
            producer = Producer(config, logger=QUIET_LOGGER)
            producer.list_topics(timeout=self.inputs.timeout_s)  # saves half a second in the coordinator lookup
            producer.init_transactions(self.inputs.timeout_s)
        except faults.CLIENT_ERRORS as error:
            return _error_parts(error)
        return "", ""

    def _reachable_admin(self) -> admin.KafkaAdmin:
        """Return the admin client; raises ProbeSkipped if no broker is reachable at its advertised listener."""
        if len(self.unreachable) == len(self.cluster_info.brokers):
            raise ProbeSkipped("no broker is reachable at its advertised listener")
        return self._admin


def _topic_state(description: Any, settings: Mapping[str, str] | None) -> TopicState:
    partitions, operations = description.partitions, description.authorized_operations
    return TopicState(
        name=description.name,
        partitions=len(partitions),
        replicas=min((len(partition.replicas) for partition in partitions), default=0),
        in_sync=min((len(partition.isr) for partition in partitions), default=0),
        leaderless_partitions=sum(partition.leader is None or partition.leader.id < 0 for partition in partitions),
        settings=settings,
        allowed_operations=None if operations is None else frozenset(operation.name for operation in operations),
    )


def _planned_topic(name: str, count: int, replicas: int, settings: Mapping[str, str] | None) -> TopicState:
    return TopicState(
        name=name, partitions=count, replicas=replicas, in_sync=replicas, settings=settings, is_planned=True
    )


def _error_parts(answer: Any) -> tuple[str, str]:
    """Return Kafka's error name and text; empty strings on success."""
    if not isinstance(answer, faults.CLIENT_ERRORS):
        return "", ""
    return faults.error_name(answer) or "_FAIL", faults.error_text(answer)
