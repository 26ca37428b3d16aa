"""Reads a Kafka topic back with foreign code: a plain confluent-kafka consumer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from towline.errors import KafkaError as TowlineKafkaError
from towline.kafka.admin import KafkaAdmin, watermarks
from towline_prove.referee import Arrival

_CHUNK = 10_000


class Tail:
    """Follows all partitions of a topic, read_committed, without a group.

    Args:
        bootstrap: Kafka's bootstrap servers.
        topic: The topic; it must exist.
        start: Partition -> offset, as `start` of another tail; the beginning where it is not given.
        timeout: Seconds to wait for Kafka's metadata.
        from_now: Leave out what the topic holds already.

    Attributes:
        start: Partition -> offset of the first record that is read.

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
        from_now: bool = False,
    ) -> None:
        self._topic = topic
        settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": "towline-prove-reader",  # the client demands one; nothing is ever committed to it
            "enable.auto.commit": False,
            "auto.offset.reset": "error",  # the default goes on at the end, and leaves out what lies between
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
        self._consumer = Consumer(settings)
        try:
            self._ends: dict[int, bool] = dict.fromkeys(self._partitions(timeout), False)
            self.start = dict(start or {number: self._borders(number)[from_now] for number in self._ends})
        except TowlineKafkaError:
            self.close()
            raise
        #: Partition -> the offset that is read next; never descending.
        self._next = dict(self.start)
        #: Partitions that the client stopped reading: Kafka did not know the offset it asked for.
        self._stopped: set[int] = set()
        self._assign()

    def _assign(self) -> None:
        """Read on from where everything so far ends."""
        self._stopped.clear()
        self._consumer.assign([TopicPartition(self._topic, number, offset) for number, offset in self._next.items()])

    def _borders(self, partition: int) -> tuple[int, int]:
        try:
            return watermarks(self._consumer, TopicPartition(self._topic, partition), 10)
        except KafkaException as error:
            raise self._unreadable(error, "Is Kafka running?") from error

    def _unreadable(self, why: object, do: str) -> TowlineKafkaError:
        return TowlineKafkaError("TL-K60", self._topic, f"cannot be read back ({why})", do)

    def _partitions(self, timeout: float) -> list[int]:
        try:
            description = self._consumer.list_topics(self._topic, timeout=timeout).topics[self._topic]
        except KafkaException as error:
            raise self._unreadable(error, "Is Kafka running?") from error
        if description.error is not None:
            raise self._unreadable(description.error, "Create the topic first.")
        return sorted(description.partitions)

    def read(self, seconds: float) -> Iterator[Arrival]:
        """Hand out records for at most this long, or up to the first moment with every partition at its end.

        Raises:
            KafkaError: Records were deleted before they were read (TL-K60).
        """
        deadline = time.monotonic() + seconds
        self._ends = dict.fromkeys(self._ends, False)
        self._go_on()
        while not self.at_end and (left := deadline - time.monotonic()) > 0:
            for message in self._consumer.consume(_CHUNK, timeout=min(left, 0.1)):
                if (arrival := self._take(message)) is not None:
                    yield arrival

    def pull(self, seconds: float) -> list[Arrival]:
        """All that `read` hands out."""
        return list(self.read(seconds))

    def _go_on(self) -> None:
        """Read on where the client stopped; it stops too when a leader has just changed, and has all there is."""
        for partition in sorted(self._stopped):
            try:
                first, _ = self._borders(partition)
            except TowlineKafkaError:
                return  # Kafka is away: the next pull asks again
            if self._next[partition] < first:
                what = f"partition {partition}: records {self._next[partition]} to {first - 1} were deleted unread"
                raise TowlineKafkaError("TL-K60", self._topic, what, "Keep records for longer (retention.ms).")
        if self._stopped:
            self._assign()

    def next(self, seconds: float) -> Arrival | None:
        """Wait for one record and hand it out at once; None when there is none in time."""
        self._go_on()
        message = self._consumer.poll(seconds)
        return None if message is None else self._take(message)

    @property
    def at_end(self) -> bool:
        """Whether the last `read` reached the end of every partition."""
        return all(self._ends.values())

    def _take(self, message: Any) -> Arrival | None:
        error, partition = message.error(), message.partition()
        if error is None:
            self._ends[partition] = False
            self._next[partition] = message.offset() + 1
            return Arrival(partition, message.offset(), message.key(), message.value())
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the binding's public name for it
            self._ends[partition] = True
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
            self._stopped.add(partition)
        return None

    def close(self) -> None:
        """Leave Kafka."""
        self._consumer.close()


def read_topic(
    bootstrap: str, topic: str, *, start: Mapping[int, int] | None = None, seconds: float = 60.0
) -> Iterator[Arrival]:
    """Read everything a topic holds now; waits up to 10 s for transactions that are being decided.

    Args:
        bootstrap: Kafka's bootstrap servers.
        topic: The topic.
        start: As `Tail`.
        seconds: Longest time to its end.

    Raises:
        KafkaError: Kafka does not answer (TL-K01), or it cannot be read to its end within the time (TL-K60).
    """
    KafkaAdmin(bootstrap).settled(topic)
    tail = Tail(bootstrap, topic, start=start)
    try:
        yield from tail.read(seconds)
        if not tail.at_end:
            raise TowlineKafkaError(
                "TL-K60", topic, f"its end was not reached in {seconds:g} s", "Is Kafka overloaded?"
            )
    finally:
        tail.close()
