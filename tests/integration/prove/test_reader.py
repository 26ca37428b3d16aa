"""The reader sees what is committed, in order, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.conftest import NewTopic
from tests.helpers import wait_until
from towline.errors import KafkaError
from towline_prove.devstack import Kafka
from towline_prove.reader import TopicTail, read_topic


def send(kafka: Kafka, topic: str, values: list[bytes], *, partition: int = 0, txn: str = "") -> Producer:
    settings: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap, "linger.ms": 0, "enable.idempotence": True}
    producer = Producer(settings | ({"transactional.id": txn} if txn else {}))
    if txn:
        producer.init_transactions(30)
        producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, b"key", partition=partition)
    producer.flush(30)
    return producer


def read(kafka: Kafka, topic: str, **more: Any) -> list[tuple[int, int, bytes | None]]:
    return [(found.partition, found.offset, found.value) for found in read_topic(kafka.bootstrap, topic, **more)]


def test_what_is_committed_is_read_per_partition_in_order(kafka: Kafka, topic: NewTopic) -> None:
    name = topic("read", 2)
    send(kafka, name, [b"%d" % number for number in range(500)])
    send(kafka, name, [b"no"], partition=1, txn=f"{name}-1").abort_transaction(30)
    still_open = send(kafka, name, [b"not yet"], partition=1, txn=f"{name}-2")
    seen = read(kafka, name)
    assert [row for row in seen if row[0] == 0] == [(0, n, b"%d" % n) for n in range(500)]
    assert [row for row in seen if row[0] == 1] == []
    still_open.commit_transaction(30)
    assert [row[2] for row in read(kafka, name) if row[0] == 1] == [b"not yet"]


def pulled(tail: TopicTail, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []

    def there() -> bool:
        found.extend(arrival.value for arrival in tail.read_all(0.5))
        return len(found) >= count

    wait_until(there)
    return found


def stop(tail: TopicTail, topic: str) -> None:
    """Kafka answers OFFSET_OUT_OF_RANGE to a place beyond its end, and the client stops reading."""
    tail._consumer.seek(TopicPartition(topic, 0, 1_000))
    wait_until(lambda: tail.read_all(0.5) == [] and tail._stopped_partitions, what="a stop")


def test_a_tail_leaves_the_past_out_and_loses_nothing_where_the_client_stops(kafka: Kafka, topic: NewTopic) -> None:
    """The client's default would go on at the end without a word, and the account would call the rest lost."""
    name = topic("stopped")
    send(kafka, name, [b"old"])
    tail = TopicTail(kafka.bootstrap, name, skip_existing=True)
    assert (tail.read_all(20), tail.at_end) == ([], True)
    send(kafka, name, [b"0", b"1"])
    assert pulled(tail, 2) == [b"0", b"1"]
    assert [row[2] for row in read(kafka, name, start=tail.start)] == [b"0", b"1"]
    stop(tail, name)
    send(kafka, name, [b"2", b"3"])
    assert pulled(tail, 2) == [b"2", b"3"]
    stop(tail, name)
    send(kafka, name, [b"4", b"5", b"6"])
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    deleted = admin.delete_records([TopicPartition(name, 0, 7)])
    assert [future.result(30).low_watermark for future in deleted.values()] == [7]
    with pytest.raises(KafkaError, match="records 5 to 6 were deleted unread"):
        tail.read_all(20)
    tail.close()


def test_no_kafka_and_no_topic_are_clear_lines(kafka: Kafka) -> None:
    with pytest.raises(KafkaError, match=r"TL-K60"):
        TopicTail("127.0.0.1:1", "t", timeout=0.5)
    with pytest.raises(KafkaError, match=r"missing.*TL-K60"):
        TopicTail(kafka.bootstrap, "missing")
