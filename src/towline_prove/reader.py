"""Independent reader of a Kafka topic: a plain confluent-kafka consumer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from towline.errors import KafkaError as TowlineKafkaError
from towline.kafka.admin import KafkaAdmin, watermarks
from towline_prove.referee import Arrival

_RECORDS_PER_CALL = 10_000


class TopicTail:
    """Reader of all partitions of a topic, read_committed, without a consumer group.

    Args:
        start: Partition → offset, as `start` of another reader; None for the beginning.
        skip_existing: Start at the end of the topic.

    Attributes:
        start: Partition → offset of the first record that is read.

    Raises:
        KafkaError: Kafka does not answer or the topic does not exist (TL-K60).
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        start: Mapping[int, int] | None = None,
        timeout: float = 10.0,
        skip_existing: bool = False,
    ) -> None:
        self._topic = topic
        settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": "towline-prove-reader",  # the client demands one; nothing is ever committed to it
            "enable.auto.commit": False,
            "auto.offset.reset": "error",  # the default skips to the end
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
        self._consumer = Consumer(settings)
        try:
            self._ends_reached: dict[int, bool] = dict.fromkeys(self._partitions(timeout), False)
            self.start = dict(start or {p: self._offset_range(p)[skip_existing] for p in self._ends_reached})
        except TowlineKafkaError:
            self.close()
            raise
        #: Partition -> the offset that is read next; never descending.
        self._offsets = dict(self.start)
        #: Partitions that the client stopped reading: Kafka did not know the offset it asked for.
        self._stopped_partitions: set[int] = set()
        self._assign()

    def _assign(self) -> None:
        """Assign all partitions at their next offsets."""
        self._stopped_partitions.clear()
        self._consumer.assign([TopicPartition(self._topic, *position) for position in self._offsets.items()])

    def _offset_range(self, partition: int) -> tuple[int, int]:
        try:
            return watermarks(self._consumer, TopicPartition(self._topic, partition), 10)
        except KafkaException as error:
            raise self._read_error(error, "Is Kafka running?") from error

    def _read_error(self, reason: object, remedy: str) -> TowlineKafkaError:
        return TowlineKafkaError("TL-K60", self._topic, f"cannot be read back ({reason})", remedy)

    def _partitions(self, timeout: float) -> list[int]:
        try:
            description = self._consumer.list_topics(self._topic, timeout=timeout).topics[self._topic]
        except KafkaException as error:
            raise self._read_error(error, "Is Kafka running?") from error
        if description.error is not None:
            raise self._read_error(description.error, "Create the topic first.")
        return sorted(description.partitions)

    def read_arrivals(self, seconds: float) -> Iterator[Arrival]:
        """Yield records until every partition is at its end or time is up; KafkaError TL-K60 after a deletion."""
        deadline = time.monotonic() + seconds
        self._ends_reached = dict.fromkeys(self._ends_reached, False)
        self._resume_stopped()
        while not self.at_end and (remaining_s := deadline - time.monotonic()) > 0:
            for message in self._consumer.consume(_RECORDS_PER_CALL, timeout=min(remaining_s, 0.1)):
                if (arrival := self._take_message(message)) is not None:
                    yield arrival

    def read_all(self, seconds: float) -> list[Arrival]:
        """Return the records of `read_arrivals` as a list."""
        return list(self.read_arrivals(seconds))

    def _resume_stopped(self) -> None:
        """Resume partitions that the client stopped reading, as it also does at a leader change."""
        for partition in sorted(self._stopped_partitions):
            try:
                low, _ = self._offset_range(partition)
            except TowlineKafkaError:
                return  # Kafka is unavailable: the next read tries again
            if self._offsets[partition] < low:
                problem = f"partition {partition}: records {self._offsets[partition]} to {low - 1} were deleted unread"
                raise TowlineKafkaError("TL-K60", self._topic, problem, "Keep records for longer (retention.ms).")
        if self._stopped_partitions:
            self._assign()

    def next_arrival(self, seconds: float) -> Arrival | None:
        """Wait for one record and return it at once; None if none comes in time."""
        self._resume_stopped()
        message = self._consumer.poll(seconds)
        return None if message is None else self._take_message(message)

    @property
    def at_end(self) -> bool:
        """True if the last `read_arrivals` reached the end of every partition."""
        return all(self._ends_reached.values())

    def _take_message(self, message: Any) -> Arrival | None:
        error, partition = message.error(), message.partition()
        if error is None:
            self._ends_reached[partition] = False
            self._offsets[partition] = message.offset() + 1
            return Arrival(partition, message.offset(), message.key(), message.value())
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the binding's public name for it
            self._ends_reached[partition] = True
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
            self._stopped_partitions.add(partition)
        return None

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def read_topic(
    bootstrap: str, topic: str, *, start: Mapping[int, int] | None = None, seconds: float = 60.0
) -> Iterator[Arrival]:
    """Yield all records that a topic holds now; waits up to 10 s for open transactions.

    Raises:
        KafkaError: Kafka does not answer (TL-K01), or it cannot be read to its end within the time (TL-K60).
    """
    KafkaAdmin(bootstrap).wait_for_open_transactions(topic)
    tail = TopicTail(bootstrap, topic, start=start)
    try:
        yield from tail.read_arrivals(seconds)
        if not tail.at_end:
            raise TowlineKafkaError("TL-K60", topic, f"end not reached in {seconds:g} s", "Is Kafka overloaded?")
    finally:
        tail.close()
