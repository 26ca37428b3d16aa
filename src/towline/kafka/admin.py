"""Look-ups in a Kafka cluster for the bridge and doctor: quiet, bounded in time, with one clear line when they fail.

A client here is a mapping of librdkafka's names without a prefix; secrets as ``sasl.password.file`` or ``${NAME}``
(`towline.kafka.clientconfig`), exactly as the sink takes them after ``kafka.``.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import confluent_kafka
from confluent_kafka import IsolationLevel, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from towline.errors import KafkaError
from towline.kafka import faults
from towline.kafka.clientconfig import QUIET, check_client, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = [
    "ANY",
    "DENIED",
    "ClusterInfo",
    "LastWord",
    "TopicFacts",
    "answer",
    "backlog",
    "client_config",
    "comes",
    "create_topics",
    "described",
    "first_offsets",
    "least",
    "looking",
    "reachable",
    "settings_of",
    "settled",
    "topic_facts",
    "watermarks",
    "writable",
]

#: One failed attempt a second is enough to learn why; the default is 100 ms and makes noise.
_PATIENCE = {"reconnect.backoff.ms": "100", "reconnect.backoff.max.ms": "1000"}
#: Seconds between two looks at a topic whose transaction is not decided, or that has no leader yet.
_LOOK_S = 0.02
#: Seconds a leader has to answer before it is asked anew who leads.
_LEADER_S = 3.0
#: Kafka's errors for want of a right to a topic.
DENIED = frozenset({"TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"})
#: Seconds beyond a request's own time-out for its answer to come through.
_GRACE_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class ClusterInfo:
    """What a cluster says about itself.

    Attributes:
        cluster_id: Kafka's id of the cluster; None from very old brokers.
        brokers: ``host:port`` of each broker, by id.
        topics: Partitions of each topic this user may see; internal ones (``__...``) included.
    """

    cluster_id: str | None
    brokers: Mapping[int, str]
    topics: Mapping[str, int]


@dataclass(frozen=True)
class TopicFacts:
    """What a topic takes; a limit that can't be read (no right to describe it) is None.

    Attributes:
        partitions: How many it has.
        max_bytes: Most bytes of a record batch, compressed: its max.message.bytes, and no more than segment.bytes.
        after_ms: How far ahead of now a record's time may be; None too where the topic keeps its own time.
        before_ms: How far behind.
        policy: Its cleanup.policy, such as ``compact`` or ``compact,delete``; empty if it can't be read.
        batch_bytes: Bytes of a batch that it takes for sure, where it refused one; None for ``max_bytes``.
    """

    partitions: int
    max_bytes: int | None = None
    after_ms: int | None = None
    before_ms: int | None = None
    policy: str = ""
    batch_bytes: int | None = None

    @property
    def compacted(self) -> bool:
        """Whether a record needs a key."""
        return "compact" in self.policy

    @classmethod
    def of(cls, partitions: int, config: Mapping[str, str | None]) -> TopicFacts:
        """From what ``describe_configs`` says; empty if nothing."""
        own_time = config.get("message.timestamp.type") == "LogAppendTime"
        return cls(
            partitions,
            least(_limit(config.get("max.message.bytes")), _limit(config.get("segment.bytes"))),
            None if own_time else _limit(config.get("message.timestamp.after.max.ms")),
            None if own_time else _limit(config.get("message.timestamp.before.max.ms")),
            config.get("cleanup.policy") or "",
        )

    def narrowed(self, other: TopicFacts) -> TopicFacts:
        """What is taken by this and by another."""
        return TopicFacts(
            min(self.partitions, other.partitions),
            least(self.max_bytes, other.max_bytes),
            least(self.after_ms, other.after_ms),
            least(self.before_ms, other.before_ms),
            self.policy if self.compacted else other.policy or self.policy,
            least(self.batch_bytes, other.batch_bytes),
        )


#: Takes everything, as far as anybody knows.
ANY: Final = TopicFacts(1 << 31)


def least(*limits: int | None) -> int | None:
    """The lowest limit of those that there are."""
    return min((one for one in limits if one is not None), default=None)


def _limit(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def topic_facts(client: str | Mapping[str, str], names: Iterable[str], timeout: float = 15.0) -> dict[str, TopicFacts]:
    """Partitions and limits of topics; one that does not exist, or may not be seen, is left out.

    Args:
        client: Bootstrap servers, or a whole client configuration.
        names: Topics; looked up in the cluster's whole list, so nothing is created.
        timeout: Seconds to wait at most for each of two answers.

    Raises:
        KafkaError: TL-K01.
        ConfigError: The configuration is impossible.
    """
    with looking(client) as admin:
        listed = admin.list_topics(timeout=timeout).topics
        present = {name: len(listed[name].partitions) for name in names if name in listed}
        configs = settings_of(admin, present, timeout)
    return {name: TopicFacts.of(count, configs.get(name, {})) for name, count in present.items()}


def settled(client: str | Mapping[str, str], topic: str, timeout: float = 10.0) -> bool:
    """Wait until no transaction is open in a topic: a reader of committed records then sees all there is.

    Kafka answers a commit once the decision is logged; the control records that show it to readers follow (KIP-98).

    Args:
        client: Bootstrap servers, or a whole client configuration.
        topic: The topic; one that does not exist is settled.
        timeout: Seconds to wait at most, and for each answer.

    Returns:
        False when a transaction was still open at the end.

    Raises:
        KafkaError: TL-K01.
    """
    with looking(client) as admin:
        found = admin.list_topics(timeout=timeout).topics.get(topic)
        first = {} if found is None else {topic: {str(number): 0 for number in found.partitions}}
        return comes(lambda: not _answered(lambda: backlog(admin, first, timeout), timeout)[1], timeout)


def backlog(admin: AdminClient, taken: Mapping[str, Mapping[str, int]], timeout: float) -> tuple[int, int]:
    """Offsets from a reader of committed records to the high watermarks, and those of them that it can't get yet.

    Those lie behind an open transaction, from the last stable offset on; control records take offsets too (KIP-98).

    Args:
        admin: Of `looking`.
        taken: The next offset of the reader, by topic and number of the partition.
        timeout: Seconds to wait at most for each of two answers.

    Raises:
        KafkaException, SystemError: `faults.FOREIGN`; also for one partition that is not there, or ends before the
            reader's offset: he stands in a topic that was deleted.
    """
    at = {(topic, int(part)): offset for topic, parts in taken.items() for part, offset in parts.items()}
    places = [TopicPartition(*place) for place in at]
    stable = _ends(admin, places, IsolationLevel.READ_COMMITTED, timeout)
    high = _ends(admin, places, IsolationLevel.READ_UNCOMMITTED, timeout)
    if any(offset > high[place] for place, offset in at.items()):
        raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError.OFFSET_OUT_OF_RANGE))
    behind = sum(high[place] - offset for place, offset in at.items())
    return behind, sum(max(0, high[place] - max(offset, stable[place])) for place, offset in at.items())


def first_offsets(
    client: Mapping[str, str], topic: str, partitions: list[int], timeout: float = 10.0
) -> dict[int, int]:
    """The first offset that Kafka still has of each of some partitions of a topic.

    Raises:
        KafkaError: TL-K01.
    """
    with looking(client) as admin:
        places, earliest = [TopicPartition(topic, one) for one in partitions], OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        ends = _answered(lambda: _ends(admin, places, IsolationLevel.READ_UNCOMMITTED, timeout, earliest), timeout)
    return {partition: offset for (_, partition), offset in ends.items()}


def watermarks(consumer: Any, place: TopicPartition, seconds: float) -> tuple[int, int]:
    """The first offset of a partition and its end, as a consumer of that isolation level may read it.

    Args:
        consumer: A ``confluent_kafka.Consumer``.
        place: Topic and partition.
        seconds: How long to wait for the answer, and to ask again while the partition has no leader, or another.

    Raises:
        KafkaException, SystemError: There is no answer, at the end or at all.
    """
    each = min(_LEADER_S, seconds)

    def ask() -> Any:
        try:
            return consumer.get_watermark_offsets(place, timeout=each)
        except faults.FOREIGN:
            # It asks the leader that librdkafka knows, for minutes after that was killed, unless it is told anew.
            with suppress(*faults.FOREIGN):
                consumer.list_topics(place.topic, timeout=each)
            raise

    first, end = _answered(ask, seconds)
    return int(first), int(end)


def comes(look: Callable[[], T], seconds: float, pause_s: float = _LOOK_S) -> T:
    """What a look-up says once it is true, or at the end of the time; looks again after a pause, in seconds."""
    deadline = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() <= deadline:
        time.sleep(pause_s)
    return seen


def _answered(ask: Callable[[], T], seconds: float) -> T:
    """The answer to a look-up, asked again while a topic is being made or changes its leader.

    A broker tells of a topic before it leads it: who asks for its offsets right after its creation is told
    NOT_LEADER_OR_FOLLOWER.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except faults.FOREIGN as problem:
            if not faults.passes(problem) or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def client_config(client: Mapping[str, str]) -> dict[str, Any]:
    """Check a client configuration and resolve its secrets; the result must never be shown.

    Raises:
        ConfigError, KafkaError: As `check_client` and `resolve` say.
    """
    check_client(client, "kafka", "")
    return resolve(client, "kafka", "")


def reachable(client: str | Mapping[str, str], timeout: float = 5.0) -> ClusterInfo:
    """Ask a cluster who it is.

    Args:
        client: Bootstrap servers, or a whole client configuration.
        timeout: Seconds to wait at most.

    Raises:
        KafkaError: TL-K01: no server answered; says which and why (refused, unknown host, authentication).
        ConfigError: The configuration is impossible.
    """
    with looking(client) as admin:
        metadata = admin.list_topics(timeout=timeout)
    brokers = {number: f"{broker.host}:{broker.port}" for number, broker in metadata.brokers.items()}
    topics = {name: len(topic.partitions) for name, topic in metadata.topics.items()}
    return ClusterInfo(metadata.cluster_id, brokers, topics)


def create_topics(
    client: str | Mapping[str, str],
    topics: Mapping[str, int],
    *,
    replication: int = -1,
    config: Mapping[str, str] | None = None,
    timeout: float = 15.0,
) -> list[str]:
    """Create topics that do not exist yet; existing ones stay as they are.

    Args:
        client: Bootstrap servers, or a whole client configuration.
        topics: Name -> partitions.
        replication: Replicas of each; -1 for the cluster's default (KIP-464).
        config: Topic settings such as ``cleanup.policy``.
        timeout: Seconds to wait at most; for the creation, and then until the cluster's list has them.

    Returns:
        The names that were created, sorted.

    Raises:
        KafkaError: TL-K01, or TL-K09 when Kafka refuses to create one.
    """
    wanted = [NewTopic(name, count, replication, config=dict(config or {})) for name, count in topics.items()]
    if not wanted:
        return []
    with looking(client) as admin:
        admin.list_topics(timeout=timeout)
        futures = admin.create_topics(wanted, operation_timeout=timeout, request_timeout=timeout)
        made = sorted(name for name, future in futures.items() if _created(_servers(client), name, future, timeout))
        # The controller answers before the brokers know of them.
        comes(lambda: set(made) <= set(admin.list_topics(timeout=timeout).topics), timeout)
    return made


def writable(topic: Any) -> bool:
    """Whether this user may write to a topic, of `described`; also where Kafka does not say it."""
    allowed = topic and topic.authorized_operations
    return topic is not None and (allowed is None or "WRITE" in {one.name for one in allowed})


def described(admin: AdminClient, names: list[str], timeout: float) -> dict[str, Any]:
    """Kafka's descriptions of topics, with what this user may do with each (KIP-430).

    Args:
        admin: Of `looking`.
        names: The topics; one that does not exist is left out, and one that this user may not see is None.
        timeout: Seconds to wait at most.

    Raises:
        KafkaException, SystemError: `faults.FOREIGN`.
    """
    wanted: Any = TopicCollection(names)
    asked = admin.describe_topics(wanted, include_authorized_operations=True, request_timeout=timeout) if names else {}
    found = {}
    for name, future in asked.items():
        try:
            found[name] = answer(future, timeout)
        except confluent_kafka.KafkaException as problem:
            if faults.name_of(problem) in DENIED:
                found[name] = None
            elif faults.name_of(problem) != "UNKNOWN_TOPIC_OR_PART":
                raise
    return found


def answer(future: Any, timeout: float) -> Any:
    """The answer to a request of the admin client.

    Args:
        future: Of the request.
        timeout: Its ``request_timeout`` in seconds, at which librdkafka ends it: a client must not be let go before.

    Raises:
        KafkaException: `_TIMED_OUT` in place of the future's TimeoutError, too, which nobody would take for Kafka's.
    """
    try:
        return future.result(timeout + _GRACE_S)
    except TimeoutError:
        late = confluent_kafka.KafkaError(confluent_kafka.KafkaError._TIMED_OUT, "no answer in time")  # noqa: SLF001
        raise confluent_kafka.KafkaException(late) from None


def _created(servers: str, name: str, future: Any, timeout: float) -> bool:
    try:
        answer(future, timeout)
    except confluent_kafka.KafkaException as problem:
        if faults.name_of(problem) == "TOPIC_ALREADY_EXISTS":
            return False
        if faults.passes(problem):
            raise  # no answer, and so no refusal
        what = f'topic "{name}" can not be created: {faults.reason(problem)}'
        raise KafkaError("TL-K09", servers, what, "Create it by hand, or give this user the right to.") from None
    return True


def settings_of(
    admin: AdminClient, names: Iterable[str], timeout: float, kind: Any = ResourceType.TOPIC
) -> dict[str, dict[str, str]]:
    """Settings of topics, or of brokers; whose settings this user may not see is left out."""
    resources = [ConfigResource(kind, name) for name in names]
    if not resources:
        return {}
    found = {}
    for resource, future in admin.describe_configs(resources, request_timeout=timeout).items():
        with suppress(*faults.FOREIGN):
            settings = answer(future, timeout)
            found[resource.name] = {name: one.value for name, one in settings.items() if one.value is not None}
    return found


def _ends(
    admin: AdminClient, places: list[TopicPartition], isolation: IsolationLevel, timeout: float, which: Any = None
) -> dict[tuple[str, int], int]:
    which = which or OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = dict.fromkeys(places, which)
    answers = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout) if wanted else {}
    return {(place.topic, place.partition): answer(future, timeout).offset for place, future in answers.items()}


class LastWord:
    """When Kafka answered last, and the best explanation of its silence since then."""

    def __init__(self) -> None:
        self.answered()

    def answered(self) -> None:
        """Begin anew: what was said before explains nothing any more."""
        self.at, self.why = time.monotonic(), ""

    def note(self, error: Any) -> None:
        """Take an error of the connections, which librdkafka retries."""
        self.why = faults.clearer(self.why, error)


@contextmanager
def looking(client: str | Mapping[str, str], last: LastWord | None = None) -> Iterator[AdminClient]:
    """An admin client for look-ups.

    Args:
        client: Bootstrap servers, or a whole client configuration.
        last: Of a client that is kept from look to look.

    Raises:
        KafkaError: TL-K01, for what of librdkafka's leaves the block.
        ConfigError: The configuration is impossible.
    """
    config = client_config({"bootstrap.servers": client} if isinstance(client, str) else client)
    last = last or LastWord()
    options: dict[str, Any] = {**_PATIENCE, **config, "error_cb": last.note}
    try:
        admin = AdminClient(options, logger=QUIET)
    except faults.FOREIGN as problem:
        raise faults.unusable("kafka", problem) from None
    try:
        yield admin
    except faults.FOREIGN as problem:
        admin.poll(0)  # serves error_cb, which a blocking look-up does not
        why = last.why or faults.reason(problem)
        raise faults.unreachable(_servers(client), time.monotonic() - last.at, why) from None


def _servers(client: str | Mapping[str, str]) -> str:
    return client if isinstance(client, str) else client.get("bootstrap.servers", "kafka")
