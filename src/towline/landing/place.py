"""Where a journal lies in Kafka, and the clients that reach it."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from towline.errors import JournalFull, KafkaError
from towline.kafka import admin, faults
from towline.kafka.clientconfig import LEADER_ONLY, QUIET, resolve
from towline.kafka.options import SinkSettings
from towline.kafka.reserved import JOURNALS

__all__ = ["LANDING", "STATE", "LandingPlace", "Scanned", "consumer_of", "end_of", "scan"]

#: How the names of the topics end; they begin with ``towline.`` and the journal's name.
LANDING, STATE = JOURNALS
#: Seconds that one transaction may take, and its clock at Kafka. A client that is cut off knows after the first; who
#: reads committed rows waits no longer than the second for one that was killed and has no successor.
_ATTEMPT_S: Final = 4
_CLOCK_MS: Final = 10_000
#: Seconds to wait for the answer to a look-up.
LOOK_S: Final = 4.0
_POLL_S: Final = 0.2
_MANY: Final = 500


@dataclass(frozen=True)
class LandingPlace:
    """Two partitions and the transactional id that guards them.

    Attributes:
        client: librdkafka's settings, unresolved (`towline.kafka.clientconfig`).
        name: Of the journal, such as the line's.
        partition: Which partition of the landing topic; of the state topic, twice that and the next are used: for the
            state, and for the signs of life of its owner.
    """

    client: Mapping[str, str] = field(hash=False)
    name: str
    partition: int = 0

    @property
    def topic(self) -> str:
        """The landing topic."""
        return f"towline.{self.name}{LANDING}"

    @property
    def state_topic(self) -> str:
        """The state topic."""
        return f"towline.{self.name}{STATE}"

    @property
    def rows(self) -> TopicPartition:
        """Where the rows are."""
        return TopicPartition(self.topic, self.partition)

    @property
    def state(self) -> TopicPartition:
        """Where the state is."""
        return TopicPartition(self.state_topic, 2 * self.partition)

    @property
    def signs(self) -> TopicPartition:
        """Where the owner's signs of life are."""
        return TopicPartition(self.state_topic, 2 * self.partition + 1)

    @property
    def servers(self) -> str:
        """The bootstrap servers."""
        return self.client["bootstrap.servers"]

    @property
    def transactional_id(self) -> str:
        """Whoever starts a producer with it fences the owner before [I8]."""
        return f"towline.{self.name}.landing.{self.partition}"

    @property
    def where(self) -> str:
        """For people."""
        return f"{self.topic}/{self.partition} at {self.servers}"

    def sink_settings(self, most_bytes: int) -> SinkSettings:
        """What its producer is told.

        Args:
            most_bytes: The largest record.

        Raises:
            ConfigError: As `SinkSettings.parse`.
        """
        tuned = {
            "kafka.linger.ms": "1",
            "kafka.transaction.timeout.ms": str(_CLOCK_MS),
            "kafka.message.max.bytes": str(max(1000, most_bytes)),
            "kafka.topic.metadata.refresh.interval.ms": "30000",
        }
        given = {f"kafka.{name}": value for name, value in self.client.items()}
        own = {"guarantee": "exactly_once", "deliveryTimeout": str(_ATTEMPT_S)}
        return SinkSettings.parse({**tuned, **given, **own})


def consumer_of(client: Mapping[str, str], more: Mapping[str, Any]) -> Any:
    """A consumer that joins no group, reads committed records, from leaders only.

    Raises:
        ConfigError: TL-C45, TL-C46.
    """
    config: dict[str, Any] = {
        **resolve(client, "kafka"),
        **LEADER_ONLY,
        "group.id": f"towline-{uuid.uuid4()}",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 10,
        "reconnect.backoff.ms": 20,
        "reconnect.backoff.max.ms": 1000,
        "error_cb": lambda _error: None,
        **more,
    }
    try:
        return Consumer(config, logger=QUIET)
    except faults.FOREIGN as problem:
        raise faults.unusable("kafka", problem) from None


def end_of(client: Mapping[str, str], place: TopicPartition, seconds: float = LOOK_S) -> tuple[int, int]:
    """The first offset of a partition, and the end of what is committed.

    Raises:
        KafkaError: TL-K01.
    """
    consumer, began = consumer_of(client, {}), time.monotonic()
    try:
        return admin.watermarks(consumer, place, seconds)
    except faults.FOREIGN as problem:
        raise _unreachable(client, began, problem) from None
    finally:
        consumer.close()


class Scanned:
    """What a partition held.

    Attributes:
        records: Offset, key and value of each.
        first: The first offset that is there.
        end: The offset after the last that was committed.
    """

    def __init__(self, first: int, end: int) -> None:
        self.records: list[tuple[int, bytes | None, bytes | None]] = []
        self.first = first
        self.end = end


def scan(
    client: Mapping[str, str],
    place: TopicPartition,
    start: int | None = None,
    seconds: float = 30.0,
    *,
    upto: int | None = None,
) -> Scanned:
    """All committed records of a partition, from an offset on, up to its leader's end [LEADER_ONLY].

    Args:
        client: librdkafka's settings, unresolved.
        place: Topic and partition.
        start: The first offset; None for all that is there.
        seconds: How long it may take without anything new.
        upto: The offset after the last that is wanted; the end of what is committed by default.

    Raises:
        KafkaError: TL-K01, it can't be read, or not to its end.
    """
    consumer, began = consumer_of(client, {"enable.partition.eof": True}), time.monotonic()
    try:
        first, end = admin.watermarks(consumer, place, LOOK_S)
        found = Scanned(first, end)
        start = first if start is None else max(start, first)
        end = end if upto is None else min(end, upto)
        if start < end:
            consumer.assign([TopicPartition(place.topic, place.partition, start)])
            records = _until(consumer, end, seconds, client["bootstrap.servers"])
            found.records = [record for record in records if record[0] < end]
    except faults.FOREIGN as problem:
        raise _unreachable(client, began, problem) from None
    else:
        return found
    finally:
        with contextlib.suppress(*faults.FOREIGN, RuntimeError):
            consumer.close()


def _until(consumer: Any, end: int, seconds: float, servers: str) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    """Records up to `end`: an end that a follower, or a leader that has just begun, takes for its own is none."""
    deadline, reached = time.monotonic() + seconds, 0
    while reached < end:
        messages: Sequence[Any] = consumer.consume(_MANY, _POLL_S)
        if not messages and time.monotonic() > deadline:
            raise faults.unreachable(servers, seconds, f"nothing came between offsets {reached:,} and {end:,}")
        for message in messages:
            error = message.error()
            if error is None:
                reached = message.offset() + 1
                yield message.offset(), message.key(), message.value()
            elif error.name() == "_PARTITION_EOF":
                reached = max(reached, message.offset() or 0)
            else:
                raise KafkaException(error)
        if messages:
            deadline = time.monotonic() + seconds


def _unreachable(client: Mapping[str, str], began: float, problem: BaseException) -> KafkaError:
    servers = client["bootstrap.servers"]
    return faults.unreachable(servers, time.monotonic() - began, faults.reason(problem))


def unread(where: str, what: str) -> JournalFull:
    """The error for rows that Kafka does not give now; whoever wants them asks again, as where there is no room."""
    do = "Is Kafka up and reachable? Ask again: what was stored stays."
    return JournalFull("TL-J32", where, what, do)
