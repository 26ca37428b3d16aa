"""Look-ups in a Kafka cluster for the sink, the bridge and doctor: quiet, bounded in time, with one line on failure."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import confluent_kafka
from confluent_kafka import IsolationLevel, TopicCollection, TopicPartition, Uuid
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
from towline.kafka.faults import LastWord, Meaning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

#: One failed attempt a second is enough to learn why; the default is 100 ms and makes noise.
_PATIENCE: Final = {"reconnect.backoff.ms": "100", "reconnect.backoff.max.ms": "1000"}
#: Seconds between two looks at a topic whose transaction is not decided, or that has no leader yet.
_LOOK_S: Final = 0.02
#: Seconds a leader has to answer before it is asked anew who leads.
_LEADER_S: Final = 3.0
#: Seconds beyond a request's own time-out for its answer to come through.
_GRACE_S: Final = 2.0
#: Longest transaction a cluster allows unless it says otherwise (transaction.max.timeout.ms), in ms.
_LONGEST_MS: Final = 900_000

T = TypeVar("T")


@dataclass(frozen=True)
class ClusterInfo:
    """What a cluster says about itself.

    Attributes:
        cluster_id: None from very old brokers.
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
        limits = {name: int(text) for name, text in config.items() if text and text.isdecimal()}
        after, before = (limits.get(f"message.timestamp.{side}.max.ms") for side in ("after", "before"))
        if config.get("message.timestamp.type") == "LogAppendTime":
            after = before = None
        size = least(limits.get("max.message.bytes"), limits.get("segment.bytes"))
        return cls(partitions, size, after, before, config.get("cleanup.policy") or "")

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
    return min((limit for limit in limits if limit is not None), default=None)


class KafkaAdmin:
    """A cluster and the client that asks it, which is made at the first question and again after one without an answer.

    A name of a topic is looked up in the cluster's whole list, or described, so nothing is created.

    Args:
        client: Bootstrap servers, or a whole client configuration, unresolved (`towline.kafka.clientconfig`).
        timeout: Seconds to wait at most for each answer.

    Raises:
        KafkaError: By every question: TL-K01, no server answered; says which and why (refused, unknown host,
            authentication).
        ConfigError: By every question: as `connect`.
    """

    def __init__(self, client: str | Mapping[str, str], timeout: float = 10.0) -> None:
        self._client = {"bootstrap.servers": client} if isinstance(client, str) else client
        self._servers = self._client.get("bootstrap.servers", "kafka")
        self._timeout = timeout
        self._admin: AdminClient | None = None
        #: Why there is no answer, of the client in use.
        self._last = LastWord()

    def ask(self, question: Callable[[AdminClient], T]) -> T:
        """The answer to a question; of an error of librdkafka's in it, the KafkaError (TL-K01)."""
        admin = self._admin
        if admin is None:  # its truth is that of its queue's length
            self._last.why = ""
            admin = connect(AdminClient, {**_PATIENCE, **self._client}, {"error_cb": self._last.note})
        self._admin, began = None, time.monotonic()
        try:
            reply = question(admin)
        except faults.FOREIGN as problem:
            admin.poll(0)  # serves error_cb, which a blocking look-up does not
            why = self._last.why or faults.reason(problem)
            raise faults.unreachable(self._servers, time.monotonic() - began, why) from None
        self._admin, self._last.why = admin, ""
        return reply

    def ask_each(
        self,
        request: Callable[[AdminClient], Mapping[Any, Any]],
        refusal: Callable[[BaseException], bool] = lambda _: True,
    ) -> dict[Any, Any]:
        """The answers to a request that gives a future for each of several things.

        Args:
            request: What is asked.
            refusal: Whether an error is Kafka's answer, which then stands for it; any other one is silence.
        """

        def outcome(future: Any) -> Any:
            try:
                return answer(future, self._timeout)
            except confluent_kafka.KafkaException as problem:
                if not refusal(problem):
                    raise
                return problem

        return self.ask(lambda admin: {thing: outcome(future) for thing, future in request(admin).items()})

    def answers(self) -> None:
        """Ask whether it is there, by the brokers' addresses that all clients are told to come to."""

        def look(admin: AdminClient) -> None:
            answer(admin.describe_cluster(request_timeout=self._timeout), self._timeout)
            admin.poll(0)

        self.ask(look)

    def info(self) -> ClusterInfo:
        """Who it is, and all its topics."""
        metadata = self.ask(lambda admin: admin.list_topics(timeout=self._timeout))
        brokers = {number: f"{broker.host}:{broker.port}" for number, broker in metadata.brokers.items()}
        topics = {name: len(topic.partitions) for name, topic in metadata.topics.items()}
        return ClusterInfo(metadata.cluster_id, brokers, topics)

    def facts(self, names: Iterable[str]) -> dict[str, TopicFacts]:
        """Partitions and limits of topics; one that does not exist, or may not be seen, is left out."""
        listed = self.info().topics
        present = {name: listed[name] for name in names if name in listed}
        configs = self.settings(present)
        return {name: TopicFacts.of(count, configs.get(name, {})) for name, count in present.items()}

    def settings(self, names: Iterable[str], kind: Any = ResourceType.TOPIC) -> dict[str, dict[str, str]]:
        """Settings of topics, or of brokers by their ids; those that this user may not see are left out."""
        resources = [ConfigResource(kind, name) for name in names]
        if kind is ResourceType.BROKER and len(resources) > 1:  # librdkafka takes one a call: each tells its own
            return dict(chain.from_iterable(self.settings([broker.name], kind).items() for broker in resources))
        if not resources:
            return {}
        replies = self.ask_each(lambda admin: admin.describe_configs(resources, request_timeout=self._timeout))
        return {
            resource.name: {name: entry.value for name, entry in entries.items() if entry.value is not None}
            for resource, entries in replies.items()
            if not isinstance(entries, confluent_kafka.KafkaException)
        }

    def longest_transaction_ms(self) -> int:
        """The longest transaction that it allows, in ms; Kafka's own limit where this user may not see it."""
        brokers = self.settings(map(str, self.info().brokers), ResourceType.BROKER).values()
        allowed = [int(settings.get("transaction.max.timeout.ms", _LONGEST_MS)) for settings in brokers]
        return min(allowed, default=_LONGEST_MS)

    def described(self, names: Iterable[str]) -> dict[str, Any]:
        """Kafka's descriptions of topics, with what this user may do with each (KIP-430).

        Returns:
            By name; one that does not exist is left out, and one that this user may not see is None.
        """
        topics: Any = TopicCollection(sorted(set(names)))
        if not topics.topic_names:
            return {}
        more: Any = {"include_authorized_operations": True, "request_timeout": self._timeout}

        def missing(outcome: Any) -> bool:
            return faults.name_of(outcome) == "UNKNOWN_TOPIC_OR_PART"

        outcomes = self.ask_each(
            lambda admin: admin.describe_topics(topics, **more),
            lambda problem: missing(problem) or faults.means(problem, Meaning.DENIED),
        )
        return {
            name: None if isinstance(outcome, confluent_kafka.KafkaException) else outcome
            for name, outcome in outcomes.items()
            if not missing(outcome)
        }

    def ids(self, names: Iterable[str]) -> dict[str, str]:
        """The ids of topics (KIP-516) as Kafka's tools show them, by name.

        Returns:
            "" for one that is unknown, because the broker gives none (before Kafka 2.8) or this user may not ask; one
            that is not there is left out.
        """
        topics, none = self.described(names).items(), str(Uuid(0, 0))
        return {name: "" if topic is None else str(topic.topic_id).replace(none, "") for name, topic in topics}

    def denied(self, names: Iterable[str]) -> list[str]:
        """Those of some topics that this user may not write to, as far as Kafka says it."""
        topics = self.described(names).items()
        rights = {name: [] if topic is None else topic.authorized_operations for name, topic in topics}
        return [name for name, those in rights.items() if those is not None and "WRITE" not in {r.name for r in those}]

    def create(
        self, topics: Mapping[str, int], *, replication: int = -1, config: Mapping[str, str] | None = None
    ) -> list[str]:
        """Create topics that do not exist yet, by name and partitions, and wait until the list has them.

        Args:
            topics: Partitions by name.
            replication: Replicas of each; -1 for the cluster's default (KIP-464).
            config: Topic settings such as ``cleanup.policy``.

        Returns:
            The names that were created, sorted.

        Raises:
            KafkaError: TL-K09 too, when Kafka refuses to create one.
        """
        new = [NewTopic(name, count, replication, config=dict(config or {})) for name, count in topics.items()]
        if not new:
            return []
        patience: Any = {"operation_timeout": self._timeout, "request_timeout": self._timeout}
        outcomes = self.ask_each(
            lambda admin: admin.create_topics(new, **patience),
            lambda problem: not faults.means(problem, Meaning.PASSING),
        )
        refused = {name: one for name, one in outcomes.items() if isinstance(one, confluent_kafka.KafkaException)}
        for name, problem in refused.items():
            if faults.name_of(problem) != "TOPIC_ALREADY_EXISTS":
                what = f'topic "{name}" can not be created: {faults.reason(problem)}'
                raise KafkaError("TL-K09", self._servers, what, "Create it by hand, or give this user the right to.")
        made = outcomes.keys() - refused.keys()
        comes(lambda: made <= set(self.info().topics), self._timeout)  # the controller answers before the brokers know
        return sorted(made)

    def settled(self, topic: str) -> bool:
        """Wait until no transaction is open in a topic: a reader of committed records then sees all there is.

        Kafka answers a commit once the decision is logged; the control records that show it to readers follow (KIP-98).

        Returns:
            False when a transaction was still open at the end of the time; a topic that does not exist is settled.
        """
        start = {topic: {str(number): 0 for number in range(self.info().topics.get(topic, 0))}}
        return self.ask(lambda admin: comes(lambda: not self._behind(admin, start)[1], self._timeout))

    def backlog(self, taken: Mapping[str, Mapping[str, int]], timeout: float | None = None) -> tuple[int, int]:
        """Offsets from a reader of committed records to the high watermarks, and those of them that it can't get yet.

        Those lie behind an open transaction, from the last stable offset on; control records take offsets too (KIP-98).

        Args:
            taken: The next offset of the reader, by topic and number of the partition.
            timeout: Seconds to wait at most for each of two answers, if not the cluster's.

        Raises:
            KafkaError: Also for one partition that is not there, or ends before the reader's offset: he stands in a
                topic that was deleted.
        """
        return self.ask(lambda admin: self._behind(admin, taken, timeout))

    def _behind(
        self, admin: AdminClient, taken: Mapping[str, Mapping[str, int]], timeout: float | None = None
    ) -> tuple[int, int]:
        offsets = {(topic, int(part)): offset for topic, parts in taken.items() for part, offset in parts.items()}
        latest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        limit = timeout or self._timeout
        stable = _offsets(admin, offsets, latest, limit, IsolationLevel.READ_COMMITTED)
        high = _offsets(admin, offsets, latest, limit)
        if any(offset > high[place] for place, offset in offsets.items()):
            beyond = confluent_kafka.KafkaError(confluent_kafka.KafkaError.OFFSET_OUT_OF_RANGE)
            raise confluent_kafka.KafkaException(beyond)
        behind = sum(high[place] - offset for place, offset in offsets.items())
        return behind, sum(max(0, high[place] - max(offset, stable[place])) for place, offset in offsets.items())

    def first_offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """The first offset that Kafka still has of each of some partitions of a topic."""
        places, first = [(topic, number) for number in partitions], OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        found = self.ask(lambda admin: comes(lambda: [_offsets(admin, places, first, self._timeout)], self._timeout))
        return {partition: offset for (_, partition), offset in found[0].items()}


def watermarks(consumer: Any, place: TopicPartition, seconds: float) -> tuple[int, int]:
    """The first offset of a partition and its end, as a consumer of that isolation level may read it.

    Args:
        consumer: A ``confluent_kafka.Consumer``.
        place: The partition.
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

    first, end = comes(ask, seconds)
    return int(first), int(end)


def comes(look: Callable[[], T], seconds: float, pause_s: float = _LOOK_S) -> T:
    """What a look-up says once it is true, or at the end of the time.

    It looks again after a pause, in seconds, while a topic is being made or changes its leader too: a broker tells of a
    topic before it leads it, and whoever asks for its offsets then is told NOT_LEADER_OR_FOLLOWER.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            if (seen := look()) or time.monotonic() > deadline:
                return seen
        except faults.FOREIGN as problem:
            if not faults.means(problem, Meaning.PASSING) or time.monotonic() > deadline:
                raise
        time.sleep(pause_s)


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


def _offsets(
    admin: AdminClient,
    places: Iterable[tuple[str, int]],
    which: OffsetSpec,
    timeout: float,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[tuple[str, int], int]:
    wanted: Any = {TopicPartition(*place): which for place in places}
    answers = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout) if wanted else {}
    return {(place.topic, place.partition): answer(future, timeout).offset for place, future in answers.items()}


# -- topics are known by their ids --

# A checkpoint has offsets by topic and partition. Deleted and made again, a topic of that name is another one, and read
# on from an offset of the old one its first records would never come. So the ids (KIP-516) are noted in the checkpoint
# beside Spark's own files, and compared before the tasks of each batch that reads the topic, and after them [I17]. A
# broker that gives no ids leaves them unknown, and nothing is compared.

_NOTE: Final = "towline.topics"
#: By process and configuration: a new connection for each batch would cost 20 ms.
_clusters: Final[dict[tuple[int, frozenset[tuple[str, str]]], KafkaAdmin]] = {}


def kept_ids(checkpoint: Checkpoint, note: str = _NOTE) -> dict[str, str]:
    """The ids noted in a checkpoint, by topic; none where the note can't be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads(checkpoint.note(note) or "{}"))
    return {}


def keep_ids(checkpoint: Checkpoint, ids: Mapping[str, str], note: str = _NOTE) -> None:
    """Note ids in a checkpoint, durably; nothing where it is on no disk of this machine.

    Raises:
        JournalError: TL-J20, the disk did not take them.
    """
    if ids != kept_ids(checkpoint, note):
        checkpoint.keep_note(note, json.dumps(ids))


def remade(kept: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Topics with another id than the one that was noted, sorted; an unknown id is no other one."""
    return sorted(name for name, one in now.items() if one and kept.get(name, "") not in ("", one))


def check_ids(
    where: str, do: str, offsets: Mapping[str, Mapping[str, int]], kept: Mapping[str, str], now: Mapping[str, str]
) -> None:
    """Refuse topics that were deleted and made again: the query stands at offsets of the old ones (TL-B06)."""
    told = [
        f'"{name}" (its id was {kept[name]}, and is {now[name]}): offset '
        + ", ".join(f"{at:,} of partition {part}" for part, at in offsets.get(name, {}).items())
        for name in remade(kept, now)
    ]
    if told:
        what = f"Kafka topics were deleted and made again, and the query stands in the old ones, {'; '.join(told)}"
        raise KafkaError("TL-B06", where, f"{what}; nothing is read from there", do)


def check_source_topics(client: Mapping[str, str], location: str, where: str, do: str) -> None:
    """Compare the topics that a query reads with Spark's Kafka source, and note the ids of those new in its batch.

    Call it when a writer is made, which Spark does on the driver before the tasks of a batch and again for its commit.
    Only topics with records in the newest batch are asked about: one that stands still is not read from a wrong offset.

    Args:
        client: A client configuration, unresolved.
        location: The query's checkpoint.
        where: Whose query it is, for messages.
        do: The ways out of TL-B06.

    Raises:
        KafkaError: TL-B06, a topic was made anew; TL-K01, no answer.
        JournalError: TL-J20, the ids can't be noted.
    """
    logs = Checkpoint(location)
    batch, kept = logs.last_offsets_batch(), kept_ids(logs)
    begun = kafka_offsets_in(logs.offsets(batch - 1) if batch else [logs.first_offsets()])
    ends = kafka_offsets_in(logs.offsets(batch))
    cluster = _clusters.setdefault((os.getpid(), frozenset(client.items())), KafkaAdmin(client))
    now = cluster.ids(name for name in ends if name not in kept or begun.get(name) != ends[name])
    check_ids(where, do, begun, kept, now)
    keep_ids(logs, {name: kept.get(name) or now.get(name, "") for name in ends})
