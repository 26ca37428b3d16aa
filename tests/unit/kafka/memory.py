"""A Kafka in memory: what the sink asks of librdkafka, with transactions, fencing, and calls that fail as a test says.

Errors are librdkafka's own, with the flags that it gives them. What the real ones do, tests/integration/kafka shows.
"""
# ruff: noqa: ARG002  who stands in takes the same arguments

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, Uuid
from confluent_kafka import KafkaError as ClientError
from confluent_kafka.admin import ResourceType  # type: ignore[attr-defined]

from towline.kafka import admin, delivery, markerstore, producers, recordcheck
from towline.kafka.columns import COLUMN_TYPES, Columns, Rows
from towline.kafka.options import SinkSettings

#: Arrow types of a record's columns, as Spark hands them to the sink.
RECORD_TYPES: Mapping[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}


def raised(name: str, text: str | None = None, **flags: bool) -> KafkaException:
    """What librdkafka raises; flags are ``fatal``, ``retriable`` and ``txn_requires_abort``."""
    return KafkaException(ClientError(getattr(ClientError, name), text, **flags))


TIMED_OUT = raised("_TIMED_OUT", "Timed out waiting for operation to finish, retry call to resume", retriable=True)
INCONSISTENT = raised(
    "_INCONSISTENT", "1 message(s) failed delivery (see individual delivery reports)", txn_requires_abort=True
)
STATE = raised("_STATE", "Unable to produce message: Local: Erroneous state")
FATAL = raised("_FATAL", "Unable to produce message: Local: Fatal error")
FENCED = raised("_FENCED", fatal=True)
#: A fatal error that meets a pending delivery report.
DEAD = SystemError("<method 'produce' of 'cimpl.Producer' objects> returned a result with an exception set")
DEAD.__cause__ = raised("_FENCED", fatal=True)
FULL = BufferError("Local: Queue full")
TRANSPORT = raised("_TRANSPORT", "Failed to get metadata: Local: Broker transport failure")
UNKNOWN = raised("UNKNOWN")
#: A record that a broker refused, as its delivery report has it.
REFUSED = ClientError(ClientError.MSG_SIZE_TOO_LARGE)
UNFIT = ClientError(ClientError.INVALID_RECORD)
#: And what it says of the transaction from there on.
SPOILT = raised(
    "MSG_SIZE_TOO_LARGE",
    "ProduceRequest for t [0] with 4 message(s) failed: Broker: Message size too large (broker 1 PID{Id:15,Epoch:0})",
    txn_requires_abort=True,
)


class Failure(NamedTuple):
    """What a call raises; done: Kafka did it; late: it does it when the next producer of that id starts."""

    problem: BaseException
    done: bool = False
    late: bool = False


class Killed(BaseException):
    """The process ends within a call: nothing that it does from there on reaches Kafka."""


class Written(NamedTuple):
    """A record."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None


class MemoryKafka:
    """The cluster, its clients, and the time that the sink sees; a failing call takes as long as it may."""

    def __init__(self) -> None:
        self.now = 1000.0
        #: By topic, its partitions, and what differs from Kafka's own settings.
        self.topics: dict[str, int] = {}
        self.configs: dict[str, dict[str, str]] = {}
        #: By topic and partition, what is committed; None for the record that ends a transaction.
        self.log: dict[tuple[str, int], list[Written | None]] = defaultdict(list)
        self.calls: list[str] = []
        #: By the name of a call, what becomes of the next ones; then they succeed.
        self.decide: dict[str, Iterator[Failure | BaseException | None]] = {}
        self.producers: list[MemoryProducer] = []
        self.admins: list[MemoryAdmin] = []
        #: Why connections fail, as clients hear when they are polled.
        self.heard = ""
        self.epochs: Counter[str] = Counter()
        #: By transactional id, what is committed when the next producer of it starts.
        self.late: dict[str, list[Written]] = {}
        #: How many looks at the ends of a topic still find a transaction that is not decided.
        self.undecided = 0
        #: Whether the next looks at the list of topics show the newest one.
        self.seen: Iterator[bool] = iter(())
        self.newest = ""
        #: Where the log ends for the next fetches.
        self.ends: Iterator[int] = iter(())
        #: Records are not confirmed.
        self.silent = False
        #: Records that are confirmed in a second; None for all at once.
        self.rate: float | None = None
        #: Why a broker refuses a record, if it does.
        self.refuses: Callable[[Written], ClientError | None] = lambda _: None
        self.killed = False
        #: The ids of its brokers.
        self.brokers = [1]

    def fail(self, call: str, *failures: Failure | BaseException | None) -> None:
        """Let the next calls of a name fail, one after the other; None for one that succeeds."""
        self.decide[call] = iter(failures)

    def new_process(self) -> None:
        """What a process remembers of Kafka is gone; calls are heard again after a `Killed`."""
        self.killed = False
        for cache in _CACHES:
            cache.clear()

    @contextmanager
    def call(self, name: str, timeout: float = 0.0) -> Iterator[Failure | None]:
        """What is done in this block, unless a test wants the call to fail."""
        if self.killed:
            raise Killed
        self.calls.append(name)
        planned = next(self.decide.get(name, iter(())), None)
        failure = planned if isinstance(planned, Failure) or planned is None else Failure(planned)
        if failure is None or failure.done or failure.late:
            yield failure
        if failure is not None:
            self.now += timeout
            self.killed = isinstance(failure.problem, Killed)
            raise failure.problem

    def asked(self, name: str, timeout: float = 0.0) -> None:
        """A call that changes nothing."""
        with self.call(name, timeout):
            pass

    def committed(self, topic: str) -> list[bytes | None]:
        """The values of a topic that a reader of committed records gets."""
        places = sorted(place for place in self.log if place[0] == topic)
        return [record.value for place in places for record in self.log[place] if record is not None]

    def monotonic(self) -> float:
        return self.now

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def producer(self, config: Mapping[str, Any], logger: object) -> MemoryProducer:
        self.producers.append(MemoryProducer(self, config))
        return self.producers[-1]

    def consumer(self, config: Mapping[str, Any], logger: object) -> MemoryConsumer:
        return MemoryConsumer(self, config)

    def admin(self, config: Mapping[str, Any], logger: object) -> MemoryAdmin:
        self.admins.append(MemoryAdmin(self, config))
        return self.admins[-1]

    def polled(self, config: Mapping[str, Any]) -> int:
        if self.heard:
            config["error_cb"](ClientError(ClientError._TRANSPORT, self.heard))
        return 0


def _report(record: Written) -> Any:
    """The message of a delivery report, which has no headers."""
    topic, key, value = lambda: record.topic, lambda: record.key, lambda: record.value
    return SimpleNamespace(topic=topic, key=key, value=value, timestamp=lambda: (0, -1))


def _message(offset: int, key: bytes | None, value: bytes | None, error: ClientError | None) -> Any:
    return SimpleNamespace(offset=lambda: offset, key=lambda: key, value=lambda: value, error=lambda: error)


class MemoryProducer:
    """librdkafka's producer; one that has another one's transactional id fences it."""

    def __init__(self, kafka: MemoryKafka, config: Mapping[str, Any]) -> None:
        self.kafka, self.config = kafka, config
        self.id = config.get("transactional.id", "")
        self.epoch = 0
        #: Records that wait for their confirmation.
        self.queue: list[Written] = []
        #: What is called for a record in place of the producer's own.
        self.reports: dict[Written, Any] = {}
        #: Records of the open transaction that are.
        self.confirmed: list[Written] = []
        #: Whether one of them was refused.
        self.spoilt = False
        self.state = ""

    def __len__(self) -> int:
        return len(self.queue)

    def list_topics(self, topic: str | None = None, timeout: float = -1.0) -> Any:
        self.kafka.asked("list_topics", timeout)
        return SimpleNamespace(topics=dict(self.kafka.topics))

    def init_transactions(self, timeout: float) -> None:
        with self.kafka.call("init_transactions", timeout):
            self.kafka.epochs[self.id] += 1
            self.epoch = self.kafka.epochs[self.id]
            self._write(self.kafka.late.pop(self.id, []))
            self.state = "ready"

    def begin_transaction(self) -> None:
        with self.kafka.call("begin_transaction"):
            if self.state != "ready":
                raise STATE
            self.state = "begun"

    def produce(
        self, topic: str, value: bytes | None = None, key: bytes | None = None, partition: int = -1, *more: Any
    ) -> None:
        with self.kafka.call("produce"):
            assert topic in self.kafka.topics, topic
            self.queue.append(Written(topic, max(partition, 0), key, value))
            if more and more[0] is not None:
                self.reports[self.queue[-1]] = more[0]

    def commit_transaction(self, timeout: float) -> None:
        with self.kafka.call("commit_transaction", timeout) as failure:
            if self.epoch < self.kafka.epochs[self.id]:
                raise FENCED
            if self.spoilt:
                raise INCONSISTENT
            queue, self.queue, self.state = self.confirmed + self.queue, [], "ready"
            self.confirmed = []  # asked again, there is nothing left to commit
            if failure is not None and failure.late:
                self.kafka.late[self.id] = queue
            else:
                self._write(queue)

    def _write(self, records: list[Written]) -> None:
        for record in records:
            self.kafka.log[record.topic, record.partition].append(record)
        for place in {(record.topic, record.partition) for record in records} if self.id else ():
            self.kafka.log[place].append(None)

    def abort_transaction(self, timeout: float) -> None:
        with self.kafka.call("abort_transaction", timeout):
            self.refuse(ClientError(ClientError._PURGE_QUEUE))
            self.confirmed, self.spoilt = [], False
            self.state = "ready"

    def refuse(self, error: ClientError = REFUSED) -> None:
        """Let what waits fail, one by one, as a broker does that refuses it; reports come with the next `poll`."""
        refused, self.queue = self.queue, []
        for record in refused:
            self.config["on_delivery"](error, _report(record))

    def poll(self, timeout: float) -> int:
        self.kafka.asked("poll")
        self.kafka.now += timeout
        return self.kafka.polled(self.config)

    def flush(self, timeout: float) -> int:
        self.kafka.asked("flush")
        if self.kafka.silent:
            self.kafka.now += timeout if self.queue else 0
        else:
            count = len(self.queue) if self.kafka.rate is None else max(1, int(timeout * self.kafka.rate))
            self.kafka.now += 0 if self.kafka.rate is None else count / self.kafka.rate
            sent, self.queue = self.queue[:count], self.queue[count:]
            for record in sent:
                if error := self.kafka.refuses(record):
                    self.spoilt = bool(self.id)
                    self.reports.get(record, self.config["on_delivery"])(error, _report(record))
            sent = [record for record in sent if not self.kafka.refuses(record)]
            if self.id:
                self.confirmed += sent
            else:
                self._write(sent)
        return len(self.queue)

    def purge(self, *, in_queue: bool, in_flight: bool, blocking: bool) -> None:
        self.kafka.asked("purge")
        if in_queue:
            self.queue = []


class MemoryConsumer:
    """librdkafka's consumer of one partition, which reads what is committed."""

    def __init__(self, kafka: MemoryKafka, config: Mapping[str, Any]) -> None:
        self.kafka, self.config = kafka, config
        self.place: tuple[str, int] = ("", 0)
        #: The next offset, and the one at which the end was told.
        self.at = self.ended = 0

    def get_watermark_offsets(self, place: Any, timeout: float) -> tuple[int, int]:
        self.kafka.asked("get_watermark_offsets", timeout)
        return 0, len(self.kafka.log[place.topic, place.partition])

    def list_topics(self, topic: str, timeout: float) -> None:
        self.kafka.asked("consumer.list_topics", timeout)

    def assign(self, places: list[Any]) -> None:
        (place,) = places
        self.place, self.at, self.ended = (place.topic, place.partition), place.offset, -1

    def unassign(self) -> None:
        self.place = ("", 0)

    def close(self) -> None:
        self.kafka.calls.append("close")

    def poll(self, timeout: float) -> Any:
        try:
            self.kafka.asked("fetch", timeout)
        except KafkaException as problem:
            return _message(self.at, None, None, problem.args[0])
        log = self.kafka.log[self.place][: next(self.kafka.ends, None)]
        while self.at < len(log):
            offset, record = self.at, log[self.at]
            self.at += 1
            if record is not None:
                return _message(offset, record.key, record.value, None)
        if self.ended == self.at:  # it is told once
            self.kafka.now += timeout
            return None
        self.ended = self.at
        return _message(self.at, None, None, ClientError(ClientError._PARTITION_EOF))


class MemoryAdmin:
    """librdkafka's client for look-ups."""

    def __init__(self, kafka: MemoryKafka, config: Mapping[str, Any]) -> None:
        self.kafka, self.config = kafka, config

    def __len__(self) -> int:
        """As librdkafka's: what waits in its queue."""
        return 0

    def poll(self, timeout: float) -> int:
        return self.kafka.polled(self.config)

    def list_topics(self, timeout: float) -> Any:
        self.kafka.asked("admin.list_topics", timeout)
        newest = "" if next(self.kafka.seen, True) else self.kafka.newest
        counts = [(name, count) for name, count in self.kafka.topics.items() if name != newest]
        topics = {name: SimpleNamespace(partitions=dict.fromkeys(range(count))) for name, count in counts}
        brokers = {number: SimpleNamespace(host="k", port=9091 + number) for number in self.kafka.brokers}
        return SimpleNamespace(cluster_id="c", brokers=brokers, topics=topics)

    def describe_configs(self, resources: list[Any], request_timeout: float) -> dict[Any, Future[Any]]:
        several = len([one for one in resources if one.restype is ResourceType.BROKER]) > 1

        def config(name: str) -> dict[str, Any]:
            if several:
                raise raised("_CONFLICT", "Only one ConfigResource of type BROKER is allowed per call")
            return self._config(name)

        return {one: self._answer("describe_configs", partial(config, one.name)) for one in resources}

    def _config(self, name: str) -> dict[str, Any]:
        config = {"cleanup.policy": "delete", "max.message.bytes": "1048588", **self.kafka.configs.get(name, {})}
        return {key: SimpleNamespace(value=value) for key, value in config.items()}

    def describe_topics(self, topics: TopicCollection, request_timeout: float, **_: Any) -> dict[str, Future[Any]]:
        names = topics.topic_names
        return {name: self._answer("describe_topics", partial(self._described, name)) for name in names}

    def _described(self, name: str) -> Any:
        if name not in self.kafka.topics:
            raise raised("UNKNOWN_TOPIC_OR_PART", "Broker: Unknown topic or partition")
        return SimpleNamespace(topic_id=Uuid(1, sum(name.encode())), authorized_operations=None)

    def create_topics(self, new: list[Any], operation_timeout: float, request_timeout: float) -> dict[str, Future[Any]]:
        return {one.topic: self._answer("create_topics", partial(self._create, one)) for one in new}

    def _create(self, one: Any) -> None:
        if one.topic in self.kafka.topics:
            raise raised("TOPIC_ALREADY_EXISTS", f"Topic '{one.topic}' already exists.")
        self.kafka.topics[one.topic], self.kafka.configs[one.topic] = one.num_partitions, dict(one.config)
        self.kafka.newest = one.topic

    def list_offsets(
        self, wanted: Mapping[Any, Any], isolation_level: IsolationLevel, request_timeout: float
    ) -> dict[Any, Future[Any]]:
        more = 0
        if isolation_level is IsolationLevel.READ_UNCOMMITTED and self.kafka.undecided:
            more, self.kafka.undecided = 1, self.kafka.undecided - 1

        def end(place: Any) -> Any:
            return SimpleNamespace(offset=more + len(self.kafka.log[place.topic, place.partition]))

        return {place: self._answer("list_offsets", partial(end, place)) for place in wanted}

    def _answer(self, name: str, ask: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            with self.kafka.call(name):
                answer.set_result(ask())
        except (KafkaException, TimeoutError) as problem:
            answer = Future()
            answer.set_exception(problem)
        return answer


#: What a process remembers of Kafka.
_CACHES: tuple[Any, ...] = (
    *(producers._clients, recordcheck._described_limits, recordcheck._learned_limits),
    *(markerstore._consumers, markerstore._highest_ends),
)


@contextmanager
def kafka_in_memory() -> Iterator[MemoryKafka]:
    """Such a Kafka behind all modules of the sink, which know nothing of any other."""
    kafka = MemoryKafka()
    with pytest.MonkeyPatch.context() as patch:
        for module in (admin, delivery, markerstore, producers, recordcheck):
            patch.setattr(module, "time", kafka)
        patch.setattr(producers, "Producer", kafka.producer)
        patch.setattr(markerstore, "Consumer", kafka.consumer)
        patch.setattr(admin, "AdminClient", kafka.admin)
        kafka.new_process()
        yield kafka
    kafka.new_process()


def settings(**options: str) -> SinkSettings:
    """Of a sink; ``__`` in an option stands for a dot."""
    given = {name.replace("__", "."): value for name, value in options.items()}
    named = {} if "guarantee" in given else {"sinkId": "s"}
    return SinkSettings.parse({"kafka.bootstrap.servers": "k:9092", "topic": "t", **named, **given})


def columns(of: SinkSettings, *names: str) -> Columns:
    """Columns of rows that have a value."""
    types = {name: COLUMN_TYPES[name][0] for name in (*names, "value")}
    return Columns.bind(types, of.topic, include_headers=True)


def rows(*values: bytes) -> Rows:
    """Records of the topic t."""
    return Rows(len(values), 0, frozenset({"t"}), iter([("t", value, None, -1) for value in values]))


def values(*those: bytes | None) -> Any:
    """An Arrow batch of these values."""
    return pa.record_batch({"value": pa.array(those, pa.binary())})


def numbers(*those: int, each: int = 2) -> Iterator[Any]:
    """Arrow batches of these numbers."""
    for at in range(0, len(those), each):
        yield values(*(b"%d" % number for number in those[at : at + each]))
