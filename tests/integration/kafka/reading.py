"""What is really in Kafka, read back with read_committed."""

from __future__ import annotations

import uuid
from functools import cache
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.helpers import wait_until
from towline.kafka.admin import KafkaAdmin

if TYPE_CHECKING:
    from collections.abc import Callable


def _consumer(bootstrap: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"test-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
            "error_cb": lambda _error: None,
        }
    )


def _places(consumer: Consumer, topic: str) -> dict[int, int]:
    """End of each partition, the last stable offset."""
    partitions = consumer.list_topics(topic, timeout=60).topics[topic].partitions
    return {p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=60)[1] for p in partitions}


@cache
def _watcher(bootstrap: str) -> Consumer:
    """One for each broker and test run: a new connection for every look would load the broker it looks at."""
    return _consumer(bootstrap)


def committed_count(bootstrap: str, topic: str) -> int:
    """Records a consumer may read; right while there are no transactions. Waits while a broker finds its feet."""

    def count() -> tuple[int] | None:
        try:
            return (sum(_places(_watcher(bootstrap), topic).values()),)
        except KafkaException:  # no leader yet, or a connection of before the restart
            return None

    return wait_until(count, what=f"the offsets of {topic}")[0]


def records(bootstrap: str, topic: str) -> list[Any]:
    """Every message of a topic up to its last stable offset, partition by partition, in order."""
    KafkaAdmin(bootstrap).wait_for_open_transactions(topic)
    consumer = _consumer(bootstrap)
    try:
        left = set(consumer.list_topics(topic, timeout=60).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in left])
        found: list[Any] = []

        def complete() -> bool:
            # Control records are never seen, so offsets say nothing about how many messages are to come.
            for message in consumer.consume(10_000, timeout=0.2):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.name() == "_PARTITION_EOF":
                    left.discard(message.partition())
            return not left

        wait_until(complete, what=f"the end of {topic}")
        return sorted(found, key=lambda message: (message.partition(), message.offset()))
    finally:
        consumer.close()


def numbers(bootstrap: str, topic: str, parse: Callable[[bytes], int] = int) -> list[int]:
    """The values of a topic as numbers, in the order of `records`."""
    return [parse(message.value()) for message in records(bootstrap, topic)]
