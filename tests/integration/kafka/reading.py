"""What is really in Kafka, read back with read_committed."""

from __future__ import annotations

import contextlib
import uuid
from contextlib import closing
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from tests.helpers import wait_until
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin
from towline.kafka.deadletters import ChunkAssembler, DeadLetter

#: Seconds that a machine may take which is busy, or stood still. A Spark start takes 10 s alone, and a minute there.
PATIENCE = 240.0


def records(bootstrap: str, topic: str, *, amid: bool = False) -> list[Any]:
    """Every message of a topic up to its last stable offset, by partition and offset; amid: a transaction is open."""
    wait_until(lambda: amid or _has_ended_transactions(bootstrap, topic), PATIENCE, f"the transactions in {topic}")
    reading = {"isolation.level": "read_committed", "enable.auto.commit": False, "enable.partition.eof": True}
    reading["auto.offset.reset"] = "earliest"
    client = {"bootstrap.servers": bootstrap, "group.id": f"test-{uuid.uuid4()}", "log_level": 0}
    with closing(Consumer({**client, **reading, "error_cb": lambda _error: None})) as consumer:
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

        wait_until(complete, PATIENCE, f"the end of {topic}")
        return sorted(found, key=lambda message: (message.partition(), message.offset()))


def _has_ended_transactions(bootstrap: str, topic: str) -> bool:
    with contextlib.suppress(KafkaError):  # a busy machine may leave it without a word for 10 s
        KafkaAdmin(bootstrap).wait_for_open_transactions(topic)
        return True
    return False


def dead_letters(bootstrap: str, topic: str) -> list[DeadLetter]:
    """Those of a topic, put together again, and none of them in part."""
    collector = ChunkAssembler()
    found = [collector.add(one.key(), one.value(), one.headers()) for one in records(bootstrap, topic)]
    assert not collector.incomplete
    return [letter for letter in found if letter is not None]


def numbers(bootstrap: str, topic: str, *, amid: bool = False) -> list[int]:
    """The values of a topic as numbers, in the order of `records`."""
    return [int(message.value()) for message in records(bootstrap, topic, amid=amid)]
