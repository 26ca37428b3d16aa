"""The strategies against a real Kafka, without Spark around them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.kafka.reading import committed_count, numbers, records
from towline.errors import ConfigError, KafkaError
from towline.kafka import producers
from towline.kafka.columns import COLUMN_TYPES, Columns
from towline.kafka.delivery import Delivery, DeliveryResult, delivery_for
from towline.kafka.options import SinkSettings
from towline.sinks import Task
from towline_prove.devstack import Kafka

FIRST = Task(partition=0)
AGAIN = Task(partition=0, attempt=1)


def settings_for(kafka: Kafka, guarantee: str = "at_least_once", **options: str) -> SinkSettings:
    given = {name.replace("__", "."): value for name, value in options.items()}
    return SinkSettings.parse({"kafka.bootstrap.servers": kafka.bootstrap, "guarantee": guarantee, **given})


def sink(settings: SinkSettings, *columns: str) -> Delivery:
    names = columns or ("value",)
    return delivery_for(
        settings, Columns.bind({n: COLUMN_TYPES[n][0] for n in names}, settings.topic, include_headers=True)
    )


def counted(start: int, stop: int, size: int = 1000) -> Iterator[Any]:
    """Arrow batches of the numbers from start to stop as values."""
    for low in range(start, stop, size):
        yield pa.record_batch({"value": pa.array([b"%d" % n for n in range(low, min(low + size, stop))])})


@pytest.fixture(autouse=True)
def _no_producers_left() -> Iterator[None]:
    yield
    for key in list(producers._clients):
        producers._clients.pop(key).close()


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_rows_arrive_once_and_in_order(kafka: Kafka, topic: NewTopic, guarantee: str) -> None:
    name = topic()
    delivery = sink(settings_for(kafka, guarantee, topic=name))
    assert delivery.deliver(FIRST, counted(0, 5000)) == DeliveryResult(rows=5000, bytes=18890)
    assert delivery.deliver(FIRST, counted(5000, 6000)).rows == 1000
    wait_until(lambda: committed_count(kafka.bootstrap, name) == 6000, what="6000 records")
    assert numbers(kafka.bootstrap, name) == list(range(6000))


def test_every_part_of_a_record_comes_back(kafka: Kafka, topic: NewTopic) -> None:
    name, other = topic(partitions=3), topic("other")
    moment = dt.datetime.now(dt.UTC).replace(microsecond=678000)
    headers = [("a", b"1"), ("b", None), ("a", b"1"), ("a", b"2"), ("empty", b"")]
    batch = pa.record_batch(
        {
            "key": pa.array([b"k", None]),
            "value": pa.array([b"v", None]),
            "headers": pa.array([[{"key": k, "value": v} for k, v in headers], None], _headers_type()),
            "topic": pa.array([name, other]),
            "partition": pa.array([2, None], pa.int32()),
            "timestamp": pa.array([moment, None], pa.timestamp("us", tz="UTC")),
        }
    )
    sink(settings_for(kafka), *COLUMN_TYPES).deliver(FIRST, [batch])
    (message,) = records(kafka.bootstrap, name)
    assert (message.key(), message.value(), message.partition()) == (b"k", b"v", 2)
    assert message.headers() == headers
    assert message.timestamp() == (1, round(moment.timestamp() * 1000))
    (message,) = records(kafka.bootstrap, other)
    assert (message.key(), message.value(), message.headers()) == (None, None, None)
    assert abs(message.timestamp()[1] - dt.datetime.now(dt.UTC).timestamp() * 1000) < 60_000


def _headers_type() -> Any:
    return pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize(
    ("key", "murmur2"),
    [
        ("21", -973932308),
        ("foobar", -790332482),
        ("a-little-bit-long-string", -985981536),
        ("a-little-bit-longer-string", -1486304829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        ("abc", 479470107),
    ],
)
def test_keys_go_where_java_puts_them(kafka: Kafka, topic: NewTopic, key: str, murmur2: int) -> None:
    """Vectors of Kafka's UtilsTest.testMurmur2; the partition is toPositive(hash) % partitions."""
    name = topic(partitions=7)
    batch = pa.record_batch({"key": pa.array([key.encode()]), "value": pa.array([b""])})
    sink(settings_for(kafka, topic=name), "key", "value").deliver(FIRST, [batch])
    assert [m.partition() for m in records(kafka.bootstrap, name)] == [(murmur2 & 0x7FFFFFFF) % 7]


def test_a_healthy_producer_is_kept_and_a_failed_one_is_not(kafka: Kafka, topic: NewTopic) -> None:
    settings = settings_for(kafka, topic=topic())
    delivery = sink(settings)
    delivery.deliver(FIRST, counted(0, 1))
    (first,) = producers._clients.values()
    delivery.deliver(FIRST, counted(1, 2))
    assert [*producers._clients.values()] == [first]

    def failing() -> Iterator[Any]:
        yield from counted(2, 3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        delivery.deliver(FIRST, failing())
    assert not producers._clients


def test_a_full_queue_only_slows_down(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    settings = settings_for(kafka, topic=name, kafka__queue__buffering__max__messages="100", kafka__linger__ms="0")
    assert sink(settings).deliver(FIRST, counted(0, 5000)).rows == 5000
    assert numbers(kafka.bootstrap, name) == list(range(5000))


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_a_missing_topic_is_named_and_not_created(kafka: Kafka, guarantee: str) -> None:
    settings = settings_for(kafka, guarantee, topic="towline-nowhere")
    for _ in range(2):
        with pytest.raises(KafkaError, match='topic "towline-nowhere" does not exist') as caught:
            sink(settings).deliver(FIRST, counted(0, 1))
        assert caught.value.code == "TL-K04"
        assert f"--bootstrap-server {kafka.bootstrap} --create --topic towline-nowhere" in caught.value.remedy


def test_a_missing_topic_of_a_column(kafka: Kafka, topic: NewTopic) -> None:
    batch = pa.record_batch({"value": pa.array([b"", b""]), "topic": pa.array([topic(), "towline-nowhere"])})
    with pytest.raises(KafkaError, match='topic "towline-nowhere"'):
        sink(settings_for(kafka), "value", "topic").deliver(FIRST, [batch])


def test_a_record_too_large_for_the_client(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    batch = pa.record_batch({"value": pa.array([b"x" * 5000])})
    settings = settings_for(kafka, topic=name, kafka__message__max__bytes="2000", kafka__batch__size="1000")
    with pytest.raises(KafkaError, match="5,100 bytes, the client takes 2,000") as caught:
        sink(settings).deliver(FIRST, [batch])
    assert caught.value.code == "TL-K05"
    assert f'"{name}"' in caught.value.problem
    assert "2,000" in caught.value.problem


def test_a_record_too_large_for_the_topic(kafka: Kafka, topic: NewTopic) -> None:
    name = topic(config={"max.message.bytes": "1000"})
    with pytest.raises(KafkaError, match=rf'"{name}" can not be written: .*max\.message\.bytes') as caught:
        sink(settings_for(kafka, topic=name)).deliver(FIRST, [pa.record_batch({"value": pa.array([b"x" * 5000])})])
    assert caught.value.code == "TL-K05"


def test_a_partition_that_is_not_there(kafka: Kafka, topic: NewTopic) -> None:
    name = topic(partitions=2)
    batch = pa.record_batch({"value": pa.array([b""]), "partition": pa.array([5], pa.int32())})
    with pytest.raises(KafkaError, match="partitions 0 to 1, not 5") as caught:
        sink(settings_for(kafka, topic=name), "value", "partition").deliver(FIRST, [batch])
    assert caught.value.code == "TL-K06"


def test_a_time_kafka_refuses(kafka: Kafka, topic: NewTopic) -> None:
    column = pa.array([dt.datetime.now(dt.UTC) + dt.timedelta(days=2)], pa.timestamp("us", tz="UTC"))
    batch = pa.record_batch({"value": pa.array([b""]), "timestamp": column})
    with pytest.raises(KafkaError, match=r"further ahead than message\.timestamp\.after\.max\.ms\..*TL-K06"):
        sink(settings_for(kafka, topic=topic()), "value", "timestamp").deliver(FIRST, [batch])


def test_a_secret_that_is_not_here(kafka: Kafka, topic: NewTopic) -> None:
    settings = settings_for(kafka, topic=topic(), kafka__client__id="${TOWLINE_NOT_SET}")
    with pytest.raises(ConfigError, match="TOWLINE_NOT_SET"):
        sink(settings).deliver(FIRST, counted(0, 1))


def test_at_least_once_writes_in_every_attempt(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    assert sink(settings_for(kafka, topic=name)).deliver(AGAIN, counted(0, 10)).rows == 10
    assert numbers(kafka.bootstrap, name) == list(range(10))


def test_at_most_once_writes_in_the_first_attempt_only(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    done = sink(settings_for(kafka, "at_most_once", topic=name)).deliver(AGAIN, counted(0, 10))
    assert (done.rows, done.dropped_rows) == (0, 10)
    assert "attempt 2" in done.drop_reason
    assert records(kafka.bootstrap, name) == []


@pytest.mark.faults
def test_kafka_down_fails_with_one_line_and_no_noise(own_kafka: Kafka, capfd: pytest.CaptureFixture[str]) -> None:
    own_kafka.create_topics({"t": 1})
    settings = settings_for(own_kafka, topic="t", deliveryTimeout="2")
    delivery = sink(settings)
    assert delivery.deliver(FIRST, counted(0, 10)).rows == 10
    own_kafka.kill()
    capfd.readouterr()
    with pytest.raises(KafkaError, match="Kafka did not take 2,500 of 2,500 records within 2 s") as caught:
        delivery.deliver(FIRST, counted(10, 2510))
    assert caught.value.code == "TL-K02"
    with pytest.raises(KafkaError, match=r"within 2 s: .*Connection refused") as caught:
        delivery.deliver(FIRST, counted(10, 2510))
    assert caught.value.code == "TL-K02"
    assert capfd.readouterr().err == ""
    own_kafka.start()
    assert delivery.deliver(FIRST, counted(10, 2510)).rows == 2500
    assert set(numbers(own_kafka.bootstrap, "t")) == set(range(2510))


@pytest.mark.faults
def test_at_most_once_counts_what_a_dead_kafka_costs(own_kafka: Kafka) -> None:
    own_kafka.create_topics({"t": 1})
    delivery = sink(settings_for(own_kafka, "at_most_once", topic="t", deliveryTimeout="1"))
    assert delivery.deliver(FIRST, counted(0, 10)).dropped_rows == 0
    wait_until(lambda: committed_count(own_kafka.bootstrap, "t") == 10, what="10 records")
    own_kafka.kill()
    for _ in range(2):
        done = delivery.deliver(FIRST, counted(10, 2510))
        assert done.rows + done.dropped_rows == 2500
        assert done.dropped_rows > 0
        assert done.drop_reason
    own_kafka.start()
    assert delivery.deliver(FIRST, counted(2510, 2520)) == DeliveryResult(rows=10, bytes=40)
    wait_until(lambda: 2519 in numbers(own_kafka.bootstrap, "t"), what="the last record")
    arrived = numbers(own_kafka.bootstrap, "t")
    assert len(arrived) == len(set(arrived))
