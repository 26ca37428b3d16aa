"""Admin requests to a Kafka cluster, for sink, bridge and doctor: time-limited, and one line per failure."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, TopicPartition, Uuid
from confluent_kafka import KafkaError as ClientError
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from towline.checkpoint import Checkpoint, kafka_offsets_in
from towline.errors import KafkaError
from towline.kafka import faults
from towline.kafka.clientconfig import connect
from towline.kafka.faults import ErrorKind, LastConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

#: One failed connection a second is enough to learn the cause; the default of 100 ms logs too much.
_BACKOFF: Final = {"reconnect.backoff.ms": "100", "reconnect.backoff.max.ms": "1000"}
#: Seconds between two polls of a topic whose transaction is not decided, or that has no leader yet.
_POLL_S: Final = 0.02
_LEADER_TIMEOUT_S: Final = 3.0  #: Seconds that a leader has to answer before the metadata is refreshed.
#: Seconds beyond the time-out of a request, at which librdkafka ends it; the client must not be closed earlier.
_ANSWER_GRACE_S: Final = 2.0
_NO_CONFIG: Final[Mapping[str, str]] = MappingProxyType({})
_MAX_TRANSACTION_MS: Final = 900_000  #: Kafka's default of transaction.max.timeout.ms.

T = TypeVar("T")
#: Offsets by topic and number of the partition.
Offsets: TypeAlias = "Mapping[str, Mapping[str, int]]"


@dataclass(frozen=True)
class ClusterInfo:
    """Metadata of a Kafka cluster.

    Attributes:
        cluster_id: None from very old brokers.
        brokers: ``host:port`` of each broker, by broker id.
        topics: Number of partitions by topic, for all topics this user may see; internal ones (``__...``) included.
    """

    cluster_id: str | None
    brokers: Mapping[int, str]
    topics: Mapping[str, int]


@dataclass(frozen=True)
class TopicLimits:
    """Limits of a topic; a limit that this user may not read is None.

    Attributes:
        partitions: Number of partitions.
        max_bytes: Largest record batch in bytes, compressed: the lower one of max.message.bytes and segment.bytes.
        max_ahead_ms: How far in the future a record's timestamp may be, in ms; None too for LogAppendTime.
        max_behind_ms: How far in the past a record's timestamp may be, in ms.
        cleanup_policy: Its cleanup.policy, such as ``compact`` or ``compact,delete``; empty if it can't be read.
        batch_bytes: Safe batch size in bytes after the topic refused a larger batch; None: use ``max_bytes``.
    """

    partitions: int
    max_bytes: int | None = None
    max_ahead_ms: int | None = None
    max_behind_ms: int | None = None
    cleanup_policy: str = ""
    batch_bytes: int | None = None

    @property
    def is_compacted(self) -> bool:
        """True if the topic is compacted, so that each record needs a key."""
        return "compact" in self.cleanup_policy

    @classmethod
    def from_config(cls, partitions: int, config: Mapping[str, str | None]) -> TopicLimits:
        """Read the limits from the topic's configuration, as ``describe_configs`` returns it; may be empty."""
        limits = {name: int(text) for name, text in config.items() if text and text.isdecimal()}
        max_ahead_ms, max_behind_ms = (limits.get(f"message.timestamp.{side}.max.ms") for side in ("after", "before"))
        if config.get("message.timestamp.type") == "LogAppendTime":
            max_ahead_ms = max_behind_ms = None
        max_bytes = min_limit(limits.get("max.message.bytes"), limits.get("segment.bytes"))
        return cls(partitions, max_bytes, max_ahead_ms, max_behind_ms, config.get("cleanup.policy") or "")

    def intersect(self, limits: TopicLimits) -> TopicLimits:
        """Return the limits that satisfy both topics: the lower one of each pair."""
        return TopicLimits(
            min(self.partitions, limits.partitions),
            min_limit(self.max_bytes, limits.max_bytes),
            min_limit(self.max_ahead_ms, limits.max_ahead_ms),
            min_limit(self.max_behind_ms, limits.max_behind_ms),
            self.cleanup_policy if self.is_compacted else limits.cleanup_policy or self.cleanup_policy,
            min_limit(self.batch_bytes, limits.batch_bytes),
        )


#: Limits of a topic of which nothing is known.
NO_LIMITS: Final = TopicLimits(1 << 31)


def min_limit(*limits: int | None) -> int | None:
    """Return the lowest of the limits that are not None; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


class KafkaAdmin:
    """Kafka admin client: connects at the first request, and again after a request without an answer.

    Topics are looked up in the cluster's whole list, or described, so no request creates a topic.

    Args:
        client: Bootstrap servers, or a whole client configuration, unresolved (`towline.kafka.clientconfig`).
        timeout: Seconds to wait at most for each answer.

    Raises:
        KafkaError: By every request: TL-K01, no server answered; names the server and the cause (connection refused,
            unknown host, authentication).
        ConfigError: By every request: as `connect`.
    """

    def __init__(self, client: str | Mapping[str, str], timeout: float = 10.0) -> None:
        self._client = {"bootstrap.servers": client} if isinstance(client, str) else client
        self._servers = self._client.get("bootstrap.servers", "kafka")
        self._timeout = timeout
        self._admin: AdminClient | None = None
        #: Cause of a missing answer, of the client in use.
        self._last_error = LastConnectionError()

    def request(self, call: Callable[[AdminClient], T]) -> T:
        """Run a request with the admin client and return its result; librdkafka's error becomes KafkaError TL-K01."""
        admin = self._admin
        if admin is None:  # its truth value is the length of its queue
            self._last_error.reason = ""
            admin = connect(AdminClient, {**_BACKOFF, **self._client}, {"error_cb": self._last_error.on_error})
        self._admin, started_at = None, time.monotonic()
        try:
            result = call(admin)
        except faults.CLIENT_ERRORS as error:
            admin.poll(0)  # serves error_cb, which a blocking look-up does not
            reason = self._last_error.reason or faults.error_text(error)
            error.__traceback__ = None  # its frames hold the client, and the future that holds the error
            raise faults.unreachable_error(self._servers, time.monotonic() - started_at, reason) from None
        self._admin, self._last_error.reason = admin, ""
        return result

    def request_each(
        self,
        call: Callable[[AdminClient], Mapping[Any, Any]],
        is_answer: Callable[[BaseException], bool] = lambda _: True,
    ) -> dict[Any, Any]:
        """Run a request that returns one future per resource, and return the results by resource.

        Args:
            call: Starts the request with the admin client.
            is_answer: Whether an error is an answer of Kafka, which then is the result; other errors are raised.
        """

        def result_of(future: Any) -> Any:
            try:
                return future.result(self._timeout + _ANSWER_GRACE_S)
            except KafkaException as error:
                if not is_answer(error):
                    raise
                return error.with_traceback(None)  # as in `request`

        return self.request(lambda admin: {resource: result_of(future) for resource, future in call(admin).items()})

    def check_reachable(self) -> None:
        """Check that the cluster answers, at the addresses that its brokers advertise to clients."""

        def describe_cluster(admin: AdminClient) -> None:
            admin.describe_cluster(request_timeout=self._timeout).result(self._timeout + _ANSWER_GRACE_S)
            admin.poll(0)

        self.request(describe_cluster)

    def info(self) -> ClusterInfo:
        """Return the metadata of the cluster and of all its topics."""
        metadata = self.request(lambda admin: admin.list_topics(timeout=self._timeout))
        brokers = {broker_id: f"{broker.host}:{broker.port}" for broker_id, broker in metadata.brokers.items()}
        topics = {name: len(topic.partitions) for name, topic in metadata.topics.items()}
        return ClusterInfo(metadata.cluster_id, brokers, topics)

    def topic_limits(self, names: Iterable[str]) -> dict[str, TopicLimits]:
        """Return partitions and limits by topic; without topics that do not exist or that this user may not see."""
        counts = self.info().topics
        existing = {name: counts[name] for name in names if name in counts}
        configs = self.configs(existing)
        return {name: TopicLimits.from_config(count, configs.get(name, {})) for name, count in existing.items()}

    def configs(self, names: Iterable[str], resource_type: Any = ResourceType.TOPIC) -> dict[str, dict[str, str]]:
        """Return the configs of topics, or of brokers by broker id; without configs that this user may not read."""
        resources = [ConfigResource(resource_type, name) for name in names]
        if resource_type is ResourceType.BROKER and len(resources) > 1:  # librdkafka takes one broker per call
            return dict(chain.from_iterable(self.configs([broker.name], resource_type).items() for broker in resources))
        if not resources:
            return {}
        results = self.request_each(lambda admin: admin.describe_configs(resources, request_timeout=self._timeout))
        return {
            resource.name: {name: entry.value for name, entry in entries.items() if entry.value is not None}
            for resource, entries in results.items()
            if not isinstance(entries, KafkaException)
        }

    def max_transaction_ms(self) -> int:
        """Return the longest transaction that all brokers allow, in ms; Kafka's default if they are not readable."""
        broker_configs = self.configs(map(str, self.info().brokers), ResourceType.BROKER).values()
        limits = [int(config.get("transaction.max.timeout.ms", _MAX_TRANSACTION_MS)) for config in broker_configs]
        return min(limits, default=_MAX_TRANSACTION_MS)

    def describe_topics(self, names: Iterable[str]) -> dict[str, Any]:
        """Describe topics, with the operations that this user is authorized to do on each (KIP-430).

        Returns:
            Descriptions by topic; without topics that do not exist, None for a topic that this user may not see.
        """
        topics: Any = TopicCollection(sorted(set(names)))
        if not topics.topic_names:
            return {}
        request_options: Any = {"include_authorized_operations": True, "request_timeout": self._timeout}

        def is_missing(result: Any) -> bool:
            return faults.error_name(result) == "UNKNOWN_TOPIC_OR_PART"

        results = self.request_each(
            lambda admin: admin.describe_topics(topics, **request_options),
            lambda error: is_missing(error) or faults.is_kind(error, ErrorKind.ACCESS_RIGHTS),
        )
        described = {name: result for name, result in results.items() if not is_missing(result)}
        return {name: None if isinstance(result, KafkaException) else result for name, result in described.items()}

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return the topic ids (KIP-516) by topic name, in the text form of Kafka's tools.

        Returns:
            Without topics that do not exist; "" for an unknown id: the broker has none (before Kafka 2.8), or this user
            may not read it.
        """
        topics, null_id = self.describe_topics(names).items(), str(Uuid(0, 0))
        return {name: "" if topic is None else str(topic.topic_id).replace(null_id, "") for name, topic in topics}

    def unwritable_topics(self, names: Iterable[str]) -> list[str]:
        """Return the topics that this user may not write to, as far as Kafka reports the operations."""
        topics = self.describe_topics(names).items()
        operations_of = {name: [] if topic is None else topic.authorized_operations for name, topic in topics}
        return [
            name
            for name, operations in operations_of.items()
            if operations is not None and "WRITE" not in {operation.name for operation in operations}
        ]

    def create(
        self, topics: Mapping[str, int], *, replication: int = -1, config: Mapping[str, str] = _NO_CONFIG
    ) -> list[str]:
        """Create topics that do not exist yet, and wait until the metadata lists them.

        Args:
            topics: Number of partitions by topic name.
            replication: Replicas of each; -1 for the cluster's default (KIP-464).
            config: Topic configs such as ``cleanup.policy``.

        Returns:
            The names of the topics created, sorted.

        Raises:
            KafkaError: TL-K09 too, when Kafka refuses to create one.
        """
        new_topics = [NewTopic(name, count, replication, config=dict(config)) for name, count in topics.items()]
        if not new_topics:
            return []
        timeouts: Any = {"operation_timeout": self._timeout, "request_timeout": self._timeout}
        results = self.request_each(
            lambda admin: admin.create_topics(new_topics, **timeouts),
            lambda error: not faults.is_kind(error, ErrorKind.TRANSIENT),
        )
        errors = {name: result for name, result in results.items() if isinstance(result, KafkaException)}
        for name, error in errors.items():
            if faults.error_name(error) != "TOPIC_ALREADY_EXISTS":
                problem = f'topic "{name}" can not be created: {faults.error_text(error)}'
                raise KafkaError("TL-K09", self._servers, problem, "Create it by hand, or give this user the right to.")
        created_topics = results.keys() - errors.keys()
        # The controller answers before the brokers know the topics.
        wait_until(lambda: created_topics <= set(self.info().topics), self._timeout)
        return sorted(created_topics)

    def wait_for_open_transactions(self, topic: str) -> bool:
        """Wait until no transaction is open in a topic, so that a read_committed consumer sees every record.

        Kafka answers a commit once the decision is logged; the control records that show it to readers follow (KIP-98).

        Returns:
            False when a transaction was still open at the end of the time; True for a topic that does not exist.
        """
        offsets = {topic: {str(partition): 0 for partition in range(self.info().topics.get(topic, 0))}}
        return self.request(lambda admin: wait_until(lambda: not self._backlog(admin, offsets)[1], self._timeout))

    def backlog(self, positions: Offsets, timeout: float | None = None) -> tuple[int, int]:
        """Return the lag of a read_committed reader, and the part of it above the last stable offset.

        The lag counts offsets up to the high watermarks; control records take offsets too (KIP-98). The part above the
        last stable offset can't be read yet, because a transaction is open.

        Args:
            positions: The reader's next offset, by topic and number of the partition.
            timeout: Seconds to wait at most for each of two answers; by default that of the client.

        Raises:
            KafkaError: Also for a partition that does not exist, or ends before the reader's offset: the topic was
                deleted.
        """
        return self.request(lambda admin: self._backlog(admin, positions, timeout))

    def _backlog(self, admin: AdminClient, positions: Offsets, timeout: float | None = None) -> tuple[int, int]:
        offsets = {(topic, int(number)): offset for topic, of in positions.items() for number, offset in of.items()}
        latest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        answer_timeout = timeout or self._timeout
        stable = _offsets(admin, offsets, latest, answer_timeout, IsolationLevel.READ_COMMITTED)
        high = _offsets(admin, offsets, latest, answer_timeout)
        if any(offset > high[partition] for partition, offset in offsets.items()):
            out_of_range = ClientError(ClientError.OFFSET_OUT_OF_RANGE)
            raise KafkaException(out_of_range)
        backlog = sum(high[partition] - offset for partition, offset in offsets.items())
        return backlog, sum(max(0, high[key] - max(offset, stable[key])) for key, offset in offsets.items())

    def first_offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the earliest offset that Kafka still has, by partition of a topic."""
        pairs, earliest = [(topic, partition) for partition in partitions], OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        timeout = self._timeout
        results = self.request(lambda admin: wait_until(lambda: [_offsets(admin, pairs, earliest, timeout)], timeout))
        return {partition: offset for (_, partition), offset in results[0].items()}

    def offsets_at(self, topic: str, partitions: Iterable[int], seconds: float) -> dict[int, int]:
        """Return the first offset with a timestamp from a time on, in seconds since 1970; no partition without one."""
        pairs, spec = [(topic, partition) for partition in partitions], OffsetSpec.for_timestamp(int(seconds * 1000))
        found = self.request(lambda admin: _offsets(admin, pairs, spec, self._timeout))
        return {partition: offset for (_, partition), offset in found.items() if offset >= 0}


def watermarks(consumer: Any, partition: TopicPartition, timeout_s: float) -> tuple[int, int]:
    """Return the low watermark and the end offset of a partition, at the consumer's isolation level.

    Args:
        consumer: A ``confluent_kafka.Consumer``.
        partition: The partition.
        timeout_s: Seconds to wait for the answer; retries meanwhile, while the partition has no leader or a new one.

    Raises:
        KafkaException, SystemError: There is no answer in time.
    """
    attempt_s = min(_LEADER_TIMEOUT_S, timeout_s)

    def query_watermarks() -> Any:
        try:
            return consumer.get_watermark_offsets(partition, timeout=attempt_s)
        except faults.CLIENT_ERRORS:
            # librdkafka asks a killed leader for minutes; a metadata request makes it look up the new one.
            with suppress(*faults.CLIENT_ERRORS):
                consumer.list_topics(partition.topic, timeout=attempt_s)
            raise

    low, high = wait_until(query_watermarks, timeout_s)
    return int(low), int(high)


def wait_until(poll: Callable[[], T], timeout_s: float, pause_s: float = _POLL_S) -> T:
    """Poll until the result is true or the time is over, and return the last result.

    Retries after ``pause_s`` seconds on transient errors too, while a topic is being created or changes its leader. A
    broker announces a topic before it leads it, and then answers a request for offsets NOT_LEADER_OR_FOLLOWER.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if (result := poll()) or time.monotonic() > deadline:
                return result
        except faults.CLIENT_ERRORS as error:
            if not faults.is_kind(error, ErrorKind.TRANSIENT) or time.monotonic() > deadline:
                raise
            error.__traceback__ = None  # as in `KafkaAdmin.request`
        time.sleep(pause_s)


def _offsets(
    admin: AdminClient,
    partitions: Iterable[tuple[str, int]],
    spec: OffsetSpec,
    timeout: float,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[tuple[str, int], int]:
    specs: Any = {TopicPartition(*partition): spec for partition in partitions}
    futures = admin.list_offsets(specs, isolation_level=isolation, request_timeout=timeout) if specs else {}
    results = {tp: future.result(timeout + _ANSWER_GRACE_S) for tp, future in futures.items()}
    return {(tp.topic, tp.partition): result.offset for tp, result in results.items()}


# -- topic ids --

# A checkpoint has offsets by topic and partition. A topic that was deleted and recreated is another topic; read on from
# an offset of the old one, its first records would be missing. So the topic ids (KIP-516) are saved in the checkpoint
# beside Spark's own files, and compared before the tasks of each batch that reads the topic, and after them [I17]. Ids
# of a broker without topic ids are unknown, and are not compared.

_TOPIC_IDS_NOTE: Final = "towline.topics"
#: Admin clients by process and configuration: a new connection for each batch would cost 20 ms.
_admins: Final[dict[tuple[int, frozenset[tuple[str, str]]], KafkaAdmin]] = {}


def saved_topic_ids(checkpoint: Checkpoint, note: str = _TOPIC_IDS_NOTE) -> dict[str, str]:
    """Return the topic ids saved in a checkpoint, by topic name; empty where the note can't be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads(checkpoint.read_note(note) or "{}"))
    return {}


def save_topic_ids(checkpoint: Checkpoint, ids: Mapping[str, str], note: str = _TOPIC_IDS_NOTE) -> None:
    """Save topic ids in a checkpoint, durably; does nothing for a checkpoint that is on no local disk.

    Raises:
        JournalError: TL-J20, the ids could not be written.
    """
    if ids != saved_topic_ids(checkpoint, note):
        checkpoint.write_note(note, json.dumps(ids))


def recreated_topics(saved_ids: Mapping[str, str], ids: Mapping[str, str]) -> list[str]:
    """Return the topics whose id differs from the saved id, sorted; an unknown id never differs."""
    return sorted(name for name, topic_id in ids.items() if topic_id and saved_ids.get(name, "") not in ("", topic_id))


def check_topic_ids(
    location: str, remedy: str, offsets: Offsets, saved_ids: Mapping[str, str], ids: Mapping[str, str]
) -> None:
    """Raise TL-B06 for topics that were deleted and recreated: the query's offsets belong to the old topics."""
    descriptions = [
        f'"{name}" (its id was {saved_ids[name]}, and is {ids[name]}): offset '
        + ", ".join(f"{offset:,} of partition {partition}" for partition, offset in offsets.get(name, {}).items())
        for name in recreated_topics(saved_ids, ids)
    ]
    if descriptions:
        old = f"the query has offsets of the old ones, {'; '.join(descriptions)}"
        problem = f"Kafka topics were deleted and recreated, and {old}; nothing is read from the new one"
        raise KafkaError("TL-B06", location, problem, remedy)


def check_source_topics(client: Mapping[str, str], checkpoint_path: str, location: str, remedy: str) -> None:
    """Compare the ids of a query's source topics with the saved ids, and save the ids of new topics.

    Call it when a writer is created, which Spark does on the driver before the tasks of a batch and again for its
    commit. Only topics with records in the newest batch are checked: an idle topic is not read from a wrong offset.

    Args:
        client: A client configuration, unresolved.
        checkpoint_path: The query's checkpoint directory.
        location: The query, for error texts.
        remedy: Remedy of TL-B06, for its text.

    Raises:
        KafkaError: TL-B06, a topic was recreated; TL-K01, no answer.
        JournalError: TL-J20, the ids could not be written.
    """
    checkpoint = Checkpoint(checkpoint_path)
    batch, saved_ids = checkpoint.last_planned_batch(), saved_topic_ids(checkpoint)
    starts = kafka_offsets_in(checkpoint.offsets(batch - 1) if batch else [checkpoint.kafka_start_offsets()])
    ends = kafka_offsets_in(checkpoint.offsets(batch))
    admin = _admins.setdefault((os.getpid(), frozenset(client.items())), KafkaAdmin(client))
    ids = admin.topic_ids(name for name in ends if name not in saved_ids or starts.get(name) != ends[name])
    check_topic_ids(location, remedy, starts, saved_ids, ids)
    save_topic_ids(checkpoint, {name: saved_ids.get(name) or ids.get(name, "") for name in ends})
