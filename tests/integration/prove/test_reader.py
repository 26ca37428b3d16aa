"""A record that the reader has not seen is told, and never called lost: it was deleted, or the client stopped there."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.conftest import NewTopic
from tests.helpers import wait_until
from towline.errors import KafkaError
from towline_prove.devstack import Kafka
from towline_prove.reader import TopicTail, read_topic


def send(kafka: Kafka, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 0})
    for value in values:
        producer.produce(topic, value, b"key", partition=0)
    producer.flush(30)


def stop(tail: TopicTail, topic: str) -> None:
    """Kafka answers OFFSET_OUT_OF_RANGE to a place beyond its end, and the client stops reading."""
    tail._consumer.seek(TopicPartition(topic, 0, 1_000))
    wait_until(lambda: tail.read_all(0.5) == [] and tail._stopped_partitions, what="a stop")


def test_a_tail_leaves_the_past_out_and_loses_nothing_where_the_client_stops(kafka: Kafka, topic: NewTopic) -> None:
    """The client's default would go on at the end without a word, and the account would call the rest lost."""
    name, found = topic("stopped"), list[bytes | None]()
    send(kafka, name, b"old")
    tail = TopicTail(kafka.bootstrap, name, skip_existing=True)
    assert (tail.read_all(20), tail.at_end) == ([], True)
    stop(tail, name)
    send(kafka, name, b"0", b"1")
    while len(found) < 2:
        found += [one.value for one in tail.read_all(20)]
    assert found == [one.value for one in read_topic(kafka.bootstrap, name, start=tail.start)] == [b"0", b"1"]
    stop(tail, name)
    send(kafka, name, b"2", b"3", b"4")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    deleted = admin.delete_records([TopicPartition(name, 0, 5)])
    assert [future.result(30).low_watermark for future in deleted.values()] == [5]
    with pytest.raises(KafkaError, match="records 3 to 4 were deleted unread"):
        tail.read_all(20)
    tail.close()


def test_no_kafka_and_no_topic_are_clear_lines(kafka: Kafka) -> None:
    with pytest.raises(KafkaError, match=r"TL-K60"):
        TopicTail("127.0.0.1:1", "t", timeout=0.5)
    with pytest.raises(KafkaError, match=r"missing.*TL-K60"):
        TopicTail(kafka.bootstrap, "missing")
