"""What at least once and at most once make of each answer of Kafka's: written, an error, or counted as lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError as ClientError
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import FULL, MemoryKafka, numbers
from towline.errors import KafkaError
from towline.kafka import delivery, producers
from towline.kafka.delivery import Delivery, DeliveryResult, Spool, checksum, delivery_for, require_configured_topics
from towline.kafka.options import SinkSettings
from towline.sinks import Task

GUARANTEES = ["at_least_once", "at_most_once"]
LATE = ClientError(ClientError._MSG_TIMED_OUT)
DENIED = ClientError(ClientError.TOPIC_AUTHORIZATION_FAILED)


def sink(guarantee: str, *columns: str, **options: str) -> Delivery:
    of = kafka.settings(guarantee=guarantee, **options)
    return delivery_for(of, kafka.columns(of, *columns))


def refusing(memory: MemoryKafka, error: ClientError = kafka.REFUSED) -> Iterator[Any]:
    """A batch that Kafka refuses while the next one is read, and two more."""
    yield kafka.values(b"1", b"2")
    memory.producers[-1].refuse(error)
    yield kafka.values(b"3")
    yield kafka.values(b"4")


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_acknowledged_rows_are_delivered_by_one_producer(memory: MemoryKafka, guarantee: str) -> None:
    for first in (0, 20):
        done = sink(guarantee).deliver(Task(0), numbers(*range(first + 10, first + 15)))
        assert done == DeliveryResult(5, 10)
    assert memory.committed("t") == [b"%d" % number for number in (*range(10, 15), *range(30, 35))]
    assert len(memory.producers) == 1


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_nothing_is_sent_to_a_topic_that_is_missing(memory: MemoryKafka, guarantee: str) -> None:
    memory.topics.clear()
    with pytest.raises(KafkaError, match="TL-K04"):
        sink(guarantee).deliver(Task(0), numbers(1))
    with pytest.raises(KafkaError, match="TL-K04"):
        sink("at_least_once").deliver(Task(0), [])
    assert "produce" not in memory.calls
    assert not producers._clients, "the producer is not used again"


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("name", ["__consumer_offsets", "towline.x.markers"])
def test_nothing_is_sent_to_a_reserved_topic(memory: MemoryKafka, guarantee: str, name: str) -> None:
    """It is there, and Kafka would take the record."""
    memory.topics[name] = 1
    of = SinkSettings.parse({"kafka.bootstrap.servers": "k:9092", "guarantee": guarantee})
    batch = pa.record_batch({"topic": ["t", name], "value": pa.array([b"1", b"2"])})
    with pytest.raises(KafkaError, match=r"the topic is reserved.*TL-K06"):
        delivery_for(of, kafka.columns(of, "topic")).deliver(Task(0), [batch])
    assert "produce" not in memory.calls


# -- at least once: any record without a confirmation fails the task --


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (DENIED, "TL-K03", r'refused 2 of 3 records, the first for topic "t": .*Give this user the right to write'),
        (LATE, "TL-K02", r"did not take 2 of 3 records within 60 s\. .*are written again"),
    ],
)
def test_a_failed_record_fails_the_task_and_ends_it_early(
    memory: MemoryKafka, monkeypatch: pytest.MonkeyPatch, error: ClientError, code: str, told: str
) -> None:
    rest = refusing(memory, error)
    monkeypatch.setattr(delivery, "MEMORY_BYTES", 0)  # it is read while it is sent
    with pytest.raises(KafkaError, match=told) as caught:
        sink("at_least_once").deliver(Task(0), rest)
    assert (type(caught.value), caught.value.code) == (KafkaError, code), "Spark's text names the class"
    assert next(rest).num_rows == 1, "what comes after is not even read"
    sink("at_least_once").deliver(Task(0), numbers(9))
    assert len(memory.producers) == 2


def test_a_silence_fails_the_task_after_the_delivery_timeout(memory: MemoryKafka) -> None:
    memory.silent = True
    with pytest.raises(KafkaError, match=r"did not take 3 of 3 records within 7 s\. .*TL-K02"):
        sink("at_least_once", deliveryTimeout="7").deliver(Task(0), numbers(1, 2, 3))
    assert 7 <= memory.now - 1000 < 20

    memory.heard = "k:9092/bootstrap: Connect failed: Connection refused"
    told = r"did not take 1,500 of 1,500 records within 1\.5 s: k:9092: Connect failed: Connection refused.*TL-K02"
    with pytest.raises(KafkaError, match=told):
        sink("at_least_once", deliveryTimeout="1.5").deliver(Task(0), [kafka.values(*[b"x"] * 1500)])


def test_at_least_once_waits_while_kafka_makes_progress(memory: MemoryKafka) -> None:
    memory.rate = 2.0
    done = sink("at_least_once", deliveryTimeout="7").deliver(Task(0), numbers(*range(100)))
    assert (done.rows, len(memory.committed("t"))) == (100, 100)
    assert done.seconds is not None
    assert 49 < done.seconds < 52
    assert memory.producers[-1].config["message.timeout.ms"] == "0"


def test_rows_are_written_again_with_the_learned_limits(memory: MemoryKafka) -> None:
    memory.topics["dlq"] = 1
    memory.refuses = lambda record: kafka.UNFIT if record.topic == "t" and record.key is None else None
    of = kafka.settings(guarantee="at_least_once", deadLetterTopic="dlq")
    one = delivery_for(of, kafka.columns(of, "key"))
    batch = pa.record_batch({"key": pa.array([b"k", None, b"k"]), "value": pa.array([b"1", b"2", b"3"])})
    done = one.deliver(Task(0), iter([batch, batch]))
    assert (done.rows, done.dead_lettered) == (4, 2)
    assert memory.committed("dlq") == [b"2", b"2"]
    assert memory.committed("t")[-4:] == [b"1", b"3", b"1", b"3"]
    before = len(memory.producers)
    assert one.deliver(Task(0), [batch]).dead_lettered == 1
    assert len(memory.producers) == before, "nothing is refused any more"


def test_rows_that_are_too_many_to_keep_are_not_written_again(
    memory: MemoryKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.refuses = lambda record: kafka.UNFIT if record.key is None else None
    monkeypatch.setattr(delivery, "MEMORY_BYTES", 10)
    with pytest.raises(KafkaError, match="TL-K03"):
        sink("at_least_once").deliver(Task(0), numbers(*range(10)))
    assert len(memory.producers) == 1


@pytest.mark.parametrize(
    ("call", "problem", "told"),
    [
        ("produce", FULL, r"did not take 2 of 4 records.*TL-K02"),
        ("produce", kafka.FATAL, "TL-K07"),
        ("flush", kafka.DEAD, "TL-K07"),
        ("admin.list_topics", kafka.TRANSPORT, "TL-K01"),
    ],
)
def test_what_stops_sending_is_an_error_or_costs_the_rest(
    memory: MemoryKafka, call: str, problem: BaseException, told: str
) -> None:
    """Two rows are sent at most; the fifth comes in the batch after. At most once counts them all as lost."""
    after = [None, None] if call == "produce" else []
    memory.fail(call, *after, *[problem] * 1000)
    with pytest.raises(KafkaError, match=told):
        sink("at_least_once").deliver(Task(0), numbers(1, 2, 3, 4, 5))
    assert memory.calls[-2:] == ["purge", "flush"] or call == "admin.list_topics"
    memory.fail(call, *after, *[problem] * 1000)
    done = sink("at_most_once").deliver(Task(0), numbers(1, 2, 3, 4, 5))
    assert (done.rows, done.dropped_rows) == (0, 5)
    assert call != "admin.list_topics" or "did not answer" in done.drop_reason
    memory.fail(call)
    sink("at_most_once").deliver(Task(0), numbers(6))
    assert memory.committed("t") == [b"6"]


def test_at_most_once_counts_what_is_lost(memory: MemoryKafka) -> None:
    done = sink("at_most_once").deliver(Task(0), refusing(memory))
    assert (done.rows, done.dropped_rows, done.drop_reason) == (2, 2, "message size too large")
    assert memory.committed("t") == [b"3", b"4"]
    memory.silent = True
    done = sink("at_most_once").deliver(Task(0), numbers(1, 2, 3))
    assert (done.rows, done.dropped_rows, done.drop_reason) == (0, 3, "Kafka did not take them in time")
    memory.calls.clear()
    done = sink("at_most_once").deliver(Task(0, attempt=1), numbers(1, 2, 3))
    assert (done.rows, done.dropped_rows, done.drop_reason) == (0, 3, "attempt 2 of a task writes nothing")
    assert memory.calls == []


# -- before a task or a row asks --


def test_configured_topics_are_checked_once(memory: MemoryKafka) -> None:
    of = kafka.settings(deadLetterTopic="dlq")
    with pytest.raises(KafkaError, match=r'"dlq" does not exist.*TL-K04'):
        require_configured_topics(of)
    memory.fail("admin.list_topics", kafka.TRANSPORT)
    require_configured_topics(of)  # the tasks wait longer for Kafka, and tell it
    memory.topics["dlq"] = 1
    before = len(memory.calls)
    for _ in range(3):
        require_configured_topics(of)
    assert len(memory.calls) == before + 2, "the list and the settings"


# -- rows wait in memory, then on disk, and come back as they were; their sum does not know their order --


cells = st.one_of(st.none(), st.binary(max_size=5))
rows = st.lists(st.tuples(cells, cells), max_size=30)


def batch(pairs: list[tuple[bytes | None, bytes | None]]) -> Any:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    return pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


@settings(deadline=None)  # files
@given(rows, st.integers(0, 400), st.integers(1, 7))
def test_rows_come_back_in_order_any_number_of_times(
    pairs: list[tuple[bytes | None, bytes | None]], memory: int, size: int
) -> None:
    batches = [batch(pairs[at : at + size]) for at in range(0, len(pairs), size)]
    with Spool(memory) as spool:
        spool.fill(iter(batches))
        assert spool.rows == len(pairs)
        assert sum(one.nbytes for one in spool._batches_in_memory) <= memory
        for _ in range(2):
            assert [b.to_pydict() for b in spool] == [b.to_pydict() for b in batches]


@given(rows, st.integers(1, 7))
def test_the_sum_is_of_each_key_and_then_its_value(pairs: list[tuple[bytes | None, bytes | None]], size: int) -> None:
    """As it is in markers that were written by other versions; it knows neither order nor batches."""
    expected = sum(crc32c(value or b"", crc32c(key or b"")) for key, value in pairs)
    assert checksum(batch(pairs)) == expected
    with Spool(1 << 20) as spool:
        spool.fill(batch(pairs[at : at + size]) for at in range(0, len(pairs), size))
        assert (spool.rows, spool.crc()) == (len(pairs), expected % 2**64)
    assert checksum(batch(pairs).select(["value"])) == sum(crc32c(value or b"") for _, value in pairs)
    elsewhere = [batch([(b"k", b"v")]).append_column("topic", pa.array([topic])) for topic in ("a", "b")]
    assert checksum(elsewhere[0]) != checksum(elsewhere[1])


def test_a_full_disk_names_the_ways_out() -> None:
    """/dev/full is one."""
    full = pytest.raises(KafkaError, match=r"No space left.*TMPDIR.*max_bytes_per_trigger.*TL-K23")
    with Spool(0, lambda: Path("/dev/full").open("wb", buffering=0)) as spool, full:
        spool.fill([batch([(None, b"x" * 1000)])] * 10)
