"""The reader sees what is committed, in order, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.conftest import NewTopic
from tests.helpers import wait_until
from towline.errors import KafkaError
from towline_prove.devstack import Kafka
from towline_prove.reader import TopicTail, read_topic
from towline_prove.referee import Arrival


def send(kafka: Kafka, topic: str, values: list[bytes | None], *, partition: int = 0, txn: str = "") -> Producer:
    settings: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap, "linger.ms": 0, "enable.idempotence": True}
    producer = Producer(settings | ({"transactional.id": txn} if txn else {}))
    if txn:
        producer.init_transactions(30)
        producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, b"key", partition=partition)
    producer.flush(30)
    return producer


def values(arrivals: Iterable[Arrival]) -> list[bytes | None]:
    return [arrival.value for arrival in arrivals]


def test_everything_is_read_per_partition_in_order(kafka: Kafka, topic: NewTopic) -> None:
    name = topic("read", 2)
    send(kafka, name, [b"%d" % number for number in range(500)])
    send(kafka, name, [b"other"], partition=1)
    arrivals = list(read_topic(kafka.bootstrap, name))
    assert values([arrival for arrival in arrivals if arrival.partition == 0]) == [b"%d" % n for n in range(500)]
    assert [arrival.offset for arrival in arrivals if arrival.partition == 0] == list(range(500))
    assert values([arrival for arrival in arrivals if arrival.partition == 1]) == [b"other"]


def test_aborted_and_open_transactions_are_not_seen(kafka: Kafka, topic: NewTopic) -> None:
    name = topic("transactions")
    send(kafka, name, [b"yes"], txn=f"{name}-1").commit_transaction(30)
    send(kafka, name, [b"no"], txn=f"{name}-2").abort_transaction(30)
    still_open = send(kafka, name, [b"not yet"], txn=f"{name}-3")
    assert values(read_topic(kafka.bootstrap, name)) == [b"yes"]
    still_open.commit_transaction(30)
    assert values(read_topic(kafka.bootstrap, name)) == [b"yes", b"not yet"]


def pulled(tail: TopicTail, count: int) -> list[Arrival]:
    """The next records, so many of them."""
    arrivals: list[Arrival] = []

    def there() -> bool:
        arrivals.extend(tail.read_all(0.5))
        return len(arrivals) >= count

    wait_until(there)
    return arrivals


def two_read(kafka: Kafka, name: str) -> TopicTail:
    """A tail that has read the first two records, 0 and 1."""
    send(kafka, name, [b"0", b"1"])
    tail = TopicTail(kafka.bootstrap, name)
    assert values(tail.read_all(20)) == [b"0", b"1"]
    return tail


def stop(tail: TopicTail, topic: str) -> None:
    """Kafka answers OFFSET_OUT_OF_RANGE to a place beyond its end, and the client stops reading."""
    tail._consumer.seek(TopicPartition(topic, 0, 1_000))
    wait_until(lambda: tail.read_all(0.5) == [] and tail._stopped_partitions, what="a stop")


def test_a_partition_the_client_stopped_is_read_on_at_its_place(kafka: Kafka, topic: NewTopic) -> None:
    """The client's default would go on at the end without a word, and the account would call the rest lost."""
    name = topic("stopped")
    tail = two_read(kafka, name)
    stop(tail, name)
    send(kafka, name, [b"2", b"3"])
    assert values(pulled(tail, 2)) == [b"2", b"3"]
    stop(tail, name)
    send(kafka, name, [b"4", b"5", b"6"])
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    deleted = admin.delete_records([TopicPartition(name, 0, 6)])
    assert [future.result(30).low_watermark for future in deleted.values()] == [6]
    with pytest.raises(KafkaError, match="records 4 to 5 were deleted unread"):
        tail.read_all(20)
    tail.close()


def test_a_new_client_reads_from_where_another_began(kafka: Kafka, topic: NewTopic) -> None:
    name = topic("anew")
    send(kafka, name, [b"old"])
    tail = TopicTail(kafka.bootstrap, name, skip_existing=True)
    send(kafka, name, [b"0", b"1"])
    assert values(pulled(tail, 2)) == [b"0", b"1"]
    assert values(read_topic(kafka.bootstrap, name, start=tail.start)) == [b"0", b"1"]
    tail.close()


def test_a_tail_from_now_leaves_the_past_out(kafka: Kafka, topic: NewTopic) -> None:
    name = topic("now")
    send(kafka, name, [b"old"])
    tail = TopicTail(kafka.bootstrap, name, skip_existing=True)
    assert tail.read_all(20) == []
    assert tail.at_end
    send(kafka, name, [b"new", None])
    assert values(pulled(tail, 2)) == [b"new", None]
    send(kafka, name, [b"next"])
    arrival = next(arrived for _ in range(100) if (arrived := tail.next_arrival(0.2)))
    assert (arrival.value, arrival.key) == (b"next", b"key")
    tail.close()


def test_no_kafka_and_no_topic_are_clear_lines(kafka: Kafka) -> None:
    with pytest.raises(KafkaError, match=r"TL-K60"):
        TopicTail("127.0.0.1:1", "t", timeout=0.5)
    with pytest.raises(KafkaError, match=r"missing.*TL-K60"):
        TopicTail(kafka.bootstrap, "missing")
